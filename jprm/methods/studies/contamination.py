"""Contamination: benchmark problems in training data, by normalised text."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from jprm.methods.data.overlap import problems_in
from jprm.methods.evaluate.benchmark import Benchmark, Report
from jprm.methods.evaluate.blocks import Table


def contamination(data: Sequence[str | os.PathLike], benchmarks: Sequence[str | os.PathLike]) -> dict[str, Any]:
    """Returns, for each benchmark, its number of problems `n`, how many the data share, and the texts of up to 20.

    Only problems that are equal by `overlap.normalise` are found: no paraphrase, nor the same numbers in another story.
    """
    trained = {normal: os.fspath(path) for path in data for normal in problems_in(path)}
    report: dict[str, Any] = {"data": [os.fspath(path) for path in data], "benchmarks": {}}
    for path in benchmarks:
        problems = problems_in(path)
        shared = sorted(problems & trained.keys())
        report["benchmarks"][os.fspath(path)] = {
            "n": len(problems),
            "shared": len(shared),
            "examples": [{"problem": problem, "in": trained[problem]} for problem in shared[:20]],
        }
    return report


def tables(report: Report) -> Iterator[Table]:
    rows = [[name, str(row["n"]), str(row["shared"])] for name, row in report["benchmarks"].items()]
    yield Table("Contamination", ("", "problems", "in the data"), rows)


BENCHMARK = Benchmark(
    name="contamination",
    title="Contamination",
    tables=tables,
    run=lambda options: contamination(options.data, options.benchmark),
)
