"""Compares two models on one suite: the difference of every headline figure, paired over the problems."""

from __future__ import annotations

from typing import Any

from jprm.evaluate.benchmark import Scores
from jprm.evaluate.benchmarks import BENCHMARKS
from jprm.evaluate.blocks import Results
from jprm.tree import ReasoningTree


def compare(results: Results, a: Scores, b: Scores) -> list[dict[str, Any]]:
    """Returns rows of `what`, `value` (A less B), `low`, `high`, `better`, for every benchmark that compares.

    `a` and `b` are scored trees by the name of their file. Raises ValueError where they are not the same records.
    """
    for name in results["data"]:
        if list(map(_content, a[name])) != list(map(_content, b.get(name, []))):
            raise ValueError(f"{name}: the two models have scored other records; run `jprm eval suite` on one suite")
    return [
        {"what": what, **found.json()}
        for name, benchmark in BENCHMARKS.items()
        if name in results
        for what, found in benchmark.compare(results, a, b)
    ]


def _content(tree: ReasoningTree) -> tuple[str, list[tuple[int, str]]]:
    """Returns a tree without its scores."""
    return tree.problem, [(node.parent, node.text) for node in tree.nodes]
