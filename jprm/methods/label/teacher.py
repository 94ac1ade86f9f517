"""Soft labels: the scores of a teacher, an existing PRM or a judge."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Sequence

from jprm.methods.judge.critiques import KEY
from jprm.methods.judge.judge import Judge
from jprm.score.records import as_written
from jprm.score.scorer import PRM
from jprm.tree import ReasoningTree, with_labels


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
    return [
        with_labels(tree, map(as_written, score_N), semantics, origin)
        for tree, score_N in zip(trees, prm.score_trees(trees), strict=True)
    ]


def judge_trees(judge: Judge, trees: Sequence[ReasoningTree], domain: str, rubric: str) -> list[ReasoningTree]:
    """Returns the trees with the judge's score as every node's label, none where no critique could be read.

    A tree's `judge` has the critiques. Its `domain` and `rubric` state what the steps are about and what a correct one
    is taken to be.
    """
    found = []
    for tree, judgement in zip(trees, judge.judgements(trees), strict=True):
        labels = [None if math.isnan(score) else as_written(score) for score in judgement.score_N]
        labelled = with_labels(tree, labels, "correctness", f"judge:{judge.name}")
        told = {"domain": domain, "rubric": rubric, KEY: {"name": judge.name, **judgement.report}}
        found.append(dataclasses.replace(labelled, extra={**labelled.extra, **told}))
    return found
