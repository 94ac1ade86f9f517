"""Drift of scores between two files. The figures are computed in `jprm.evaluate.drift`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from jprm.evaluate.benchmark import Benchmark, CommandOptions, Report


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Drift: whether two scored files have scores of one distribution, and whether to recalibrate or to retrain.

    For example:
      jprm eval drift scored_may.jsonl scored_june.jsonl --json drift.json
    """

    before: Annotated[Positional[Path], arg(metavar="BEFORE.jsonl")]
    """Chains or pools that `jprm score` wrote."""
    after: Annotated[Positional[Path], arg(metavar="AFTER.jsonl")]
    """The same later: of another policy, other problems or another model."""


def run(options: Options) -> Report:
    from jprm.evaluate.drift import drift
    from jprm.tree import read_trees

    return drift(list(read_trees(options.before)), list(read_trees(options.after)), 0)


def tables(report: Report) -> Iterator[str]:
    numbers = f"largest distance {report['ks']:.3f}, p = {report['p']:.3f}"
    means = f"mean score {report['mean_before']:.3f} before, {report['mean_after']:.3f} after"
    yield f"verdict: {report['verdict']} ({numbers}; {means})"
    if report["calibration_of"]:
        gap, noise = report["calibration_gap"], report["calibration_gap_if_unchanged"]
        p = f"p = {report['calibration_p']:.3f}"
        yield f"calibration of {report['calibration_of']}: moved by {gap:.3f} ({noise:.3f} by noise alone; {p})"
    else:
        yield "no labels in both files: whether the scores mean the same is not tested"


BENCHMARK = Benchmark(name="drift", title="Drift", options=Options, tables=tables, run=run)
