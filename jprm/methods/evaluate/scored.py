"""Scores of trees as arrays, and ProcessBench's F1. A missing score is always an error, never skipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int

from jprm.statistics import Draws, difference, weighted_mean
from jprm.tree import ReasoningTree


class ScoreError(ValueError):
    """A scored record lacks scores, labels or outcomes that an evaluation needs."""


class NothingToMeasure(ScoreError):
    """Valid records, but too few or too uniform for a figure. A suite leaves the figure out with the reason."""


P = ParamSpec("P")
T = TypeVar("T")


def or_none(fit: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | None:
    """Returns the result of `fit`, unless it raises NothingToMeasure."""
    try:
        return fit(*args, **options)
    except NothingToMeasure:
        return None


def ahead(drawn: Draws, baselines: Mapping[str, Draws]) -> dict[str, Any]:
    """Returns `value`, `low`, `high` and `better` of a figure's paired `difference` from the best `baseline`, its name.

    The difference is the figure minus the baseline, and `better` the fraction of resamples with the figure ahead. The
    best baseline has the highest value. All draws must have equal seed and groups. Raises ValueError if `baselines` is
    empty.
    """
    best = max(baselines, key=lambda name: np.nan_to_num(baselines[name].value, nan=-1.0))
    return difference(drawn, baselines[best]).json() | {"baseline": best}


def scores_of(
    trees: Sequence[ReasoningTree], names: Sequence[str] | None = None, *, probability: bool = False
) -> list[Float[np.ndarray, " N"]]:
    """Returns the scores of each tree's nodes. `names`, one per tree, are used in error messages.

    Raises ScoreError if a score is missing or not finite, or, with `probability`, outside [0, 1]. Messages between
    steps have no score: remove them first (`jprm.tree.steps_only`).
    """
    flat = [node.score for tree in trees for node in tree.nodes]
    score_M = np.array([np.nan if score is None else score for score in flat], float)
    good_M = (score_M >= 0) & (score_M <= 1) if probability else np.isfinite(score_M)
    sizes = [len(tree.nodes) for tree in trees]
    if not good_M.all():
        first = int(np.argmin(good_M))
        tree = int(np.searchsorted(np.cumsum(sizes), first, side="right"))
        where = f"{names[tree] if names else f'record {tree + 1}'}, step {first - sum(sizes[:tree])}"
        value = "no score" if flat[first] is None else f"score {flat[first]}"
        wanted = "a probability in [0, 1]" if probability else "a finite score"
        fix = "Score the file again with `jprm score`."
        if probability and np.isfinite(score_M).all():
            fix = "If they are rewards, write `semantics` (value, advantage or implicit), or name the model's adapter."
        raise ScoreError(f"{where}: {value}. {(~good_M).sum()} of {len(flat)} steps lack {wanted}. {fix}")
    return np.split(score_M, np.cumsum(sizes)[:-1]) if trees else []


# ------------------------------------------------------------------- the F1 of chains with and without a first error


class F1(NamedTuple):
    """`f1` and its two parts, as fractions or arrays. A part is NaN if it has no chains."""

    f1: Any
    error_accuracy: Any
    correct_accuracy: Any


def harmonic_mean(a: Any, b: Any) -> Any:
    """Returns 2ab / (a + b), 0 if both are 0, NaN if one is NaN."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    return 2 * a * b / np.where(a + b == 0, 1.0, a + b)


def f1_of(error_accuracy: Any, correct_accuracy: Any) -> F1:
    """Returns ProcessBench's F1: the harmonic mean of the accuracies on chains with and without an error."""
    return F1(harmonic_mean(error_accuracy, correct_accuracy), error_accuracy, correct_accuracy)


def weighted_f1(
    right_N: Bool[np.ndarray, " N"], first_error_N: Int[np.ndarray, " N"], weight_RN: Float[np.ndarray, "*R N"]
) -> F1:
    """Returns F1 under each row of chain weights; `right_N`: predicted right, `first_error_N`: -1 for no error."""
    error_N = np.asarray(first_error_N) >= 0
    error = weighted_mean(right_N, weight_RN * error_N)
    correct = weighted_mean(right_N, weight_RN * ~error_N)
    return f1_of(error, correct)
