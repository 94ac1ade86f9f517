"""Soft labels: the scores of a teacher, a PRM that is there already."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from jprm.score.scorer import PRM, as_written
from jprm.tree import ReasoningTree, without_chain


def label_trees(prm: PRM, trees: Sequence[ReasoningTree]) -> list[ReasoningTree]:
    """The trees with the teacher's score as the label of every node, and its name and training step in `origin`.

    Labels have the semantics of the teacher: `value` where it was trained on outcomes, else `correctness`, since a
    teacher that was trained on ratings gives the probability that a step is right, not a rating.

    Raises ValueError for a teacher whose scores are no probabilities: advantages, or implicit rewards.
    """
    if prm.semantics in ("advantage", "implicit"):
        raise ValueError(f"{prm.name}: its scores are of semantics {prm.semantics!r}: no probabilities, so no labels")
    semantics = "value" if prm.semantics == "value" else "correctness"
    origin = f"model:{pathlib.Path(prm.name).name}@{prm.step}"
    labelled = []
    for tree, score_N in zip(trees, prm.score_trees(trees), strict=True):
        nodes = tuple(
            dataclasses.replace(node, label=as_written(score), origin=origin, extra=_without_label(node.extra))
            for node, score in zip(tree.nodes, score_N, strict=True)
        )
        extra = without_chain(tree.extra)
        labelled.append(dataclasses.replace(tree, nodes=nodes, semantics=semantics, kind="tree", extra=extra))
    return labelled


def _without_label(extra) -> dict:
    return {key: value for key, value in extra.items() if key not in ("label", "origin")}
