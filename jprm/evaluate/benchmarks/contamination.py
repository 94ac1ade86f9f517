"""Contamination: benchmark problems in training data. The figures are computed in `jprm.data.overlap`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jprm.evaluate.benchmark import Benchmark, CommandOptions, Files, Report
from jprm.evaluate.blocks import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Contamination: which problems of benchmarks occur in training data, by normalised text.

    For example:
      jprm eval contamination --data phase1_train.jsonl --benchmark math.json gsm8k.json --json contamination.json
    """

    data: Files
    """Source files that a model was or will be trained on."""
    benchmark: Files
    """Benchmark files."""


def run(options: Options) -> Report:
    from jprm.data.overlap import contamination

    return contamination(options.data, options.benchmark)


def tables(report: Report) -> Iterator[Table]:
    rows = [[name, str(row["n"]), str(row["shared"])] for name, row in report["benchmarks"].items()]
    yield Table("Contamination", ("", "problems", "in the data"), rows)


BENCHMARK = Benchmark(name="contamination", title="Contamination", options=Options, tables=tables, run=run)
