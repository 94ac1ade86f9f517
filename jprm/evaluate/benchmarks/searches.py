"""Searches at their own tokens. The figures are computed in `jprm.evaluate.searches`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from jprm.evaluate.benchmark import Benchmark, CommandOptions, Files, Report
from jprm.evaluate.blocks import Table
from jprm.evaluate.wording import interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Searches: each beside best of n and majority vote that spend the same tokens on the same problems, paired.

    For example:
      jprm eval searches --searches beam.jsonl mcts.jsonl --pool best.jsonl --json searches.json
    """

    searches: Files
    """Results of `jprm search`, for problems with known answers."""
    pool: Annotated[Path, arg(metavar="POOL.jsonl")]
    """Scored samples of the same policy for these problems, such as a file of `jprm search best-of-n`."""


def run(options: Options) -> Report:
    from jprm.evaluate.run import by_name
    from jprm.evaluate.searches import searches_report
    from jprm.score.files import stored_scale
    from jprm.tree import read_trees

    files = {name: list(read_trees(path)) for name, path in by_name(options.searches).items()}
    return searches_report(files, list(read_trees(options.pool)), 0, stored_scale(options.pool))


def tables(report: Report) -> Iterator[Table]:
    keys = ("accuracy", "best_of_n", "majority", "less_best_of_n", "less_majority")
    rows = [
        [name, *(interval(row[key]) for key in keys), f"{row['tokens']:.0f}", f"{row['n']:.1f}"]
        for name, row in report.items()
    ]
    columns = ("", "search [95 %]", "best of n", "majority", "less best of n", "less majority", "tokens", "mean n")
    beyond = sum(row["beyond_pool"] for row in report.values())
    caption = f"{beyond} times a search spent more than the whole pool has, which is then all used" if beyond else ""
    yield Table("Searches at their own tokens", columns, rows, caption=caption)


BENCHMARK = Benchmark(name="searches", title="Searches", options=Options, tables=tables, run=run)
