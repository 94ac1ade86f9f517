"""Compares models on one suite: the difference of every headline figure, paired over the problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jprm.evaluate.benchmark import Benchmark, Scores
from jprm.evaluate.benchmarks import BENCHMARKS
from jprm.evaluate.blocks import Results
from jprm.statistics import Draws, difference
from jprm.tree import ReasoningTree


def drawn_figures(
    results: Results, scores: Scores, benchmarks: Mapping[str, Benchmark] = BENCHMARKS
) -> dict[str, Draws]:
    """Returns what each benchmark's figures of a model are, and their draws over problems.

    `scores` are scored trees by the name of their file. Models of one suite meet the same resamples.
    """
    return {
        what: drawn
        for name, benchmark in benchmarks.items()
        if name in results
        for what, drawn in benchmark.problem_draws(results, scores)
    }


def compare(a: Mapping[str, Draws], b: Mapping[str, Draws]) -> list[dict[str, Any]]:
    """Returns rows of `what`, `value` (A less B), `low`, `high`, `better`, for the figures that both models have."""
    return [{"what": what, **difference(a[what], b[what]).json()} for what in a if what in b]


def check_same_records(names: list[str], a: Scores, b: Scores) -> None:
    """Raises ValueError where two models have scored other records."""
    for name in names:
        if list(map(_content, a[name])) != list(map(_content, b.get(name, []))):
            raise ValueError(f"{name}: the two models have scored other records; run `jprm eval suite` on one suite")


def _content(tree: ReasoningTree) -> tuple[str, list[tuple[int, str]]]:
    """Returns a tree without its scores."""
    return tree.problem, [(node.parent, node.text) for node in tree.nodes]
