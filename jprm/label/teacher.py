"""Soft labels: the scores of a teacher, an existing PRM."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from jprm.score.scorer import PRM, as_written
from jprm.tree import ReasoningTree, without_chain


def label_trees(prm: PRM, trees: Sequence[ReasoningTree]) -> list[ReasoningTree]:
    """Returns the trees with the teacher's score as every node's label, and its name and training step in `origin`.

    Labels are `value`s if the teacher was trained on outcomes, else `correctness`: a teacher trained on ratings gives
    the probability that a step is correct, not a rating.

    Raises:
      ValueError: a teacher whose scores are no probabilities: advantages or implicit rewards.
    """
    if prm.semantics in ("advantage", "implicit"):
        raise ValueError(
            f"{prm.name}: its scores are of semantics {prm.semantics!r}, not probabilities, and cannot be labels"
        )
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
