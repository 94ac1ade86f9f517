"""Scores in and out of records: a missing score is an error that says where, never a step left out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float


class ScoreError(ValueError):
    """A scored record without the scores, labels or outcomes that an evaluation needs."""


def checked_scores(
    chains: Iterable[tuple[str, int, Any]], *, probability: bool = False
) -> list[Float[np.ndarray, " P"]]:
    """The scores of each chain as an array, from (name of the chain in messages, number of steps, scores).

    Raises ScoreError that names the first bad step and counts all: no scores at all, another number of scores than
    steps, a score that is None, NaN or infinite, or with `probability` one outside [0, 1].
    """
    chains = list(chains)
    whole = _all_at_once(chains, probability)
    if whole is not None:
        return whole
    arrays, first, bad, total = [], None, 0, 0
    for where, steps, scores in chains:
        score_P, reason = _array(scores, steps)
        if reason:
            wrong_P = np.ones(steps, bool) if steps else np.ones(1, bool)
            place = where
        else:
            wrong_P = ~np.isfinite(score_P)
            if probability:
                wrong_P |= (score_P < 0) | (score_P > 1)
            step = int(np.argmax(wrong_P)) if wrong_P.any() else 0
            place = f"{where}, step {step}"
            reason = f"score {score_P[step]}" if wrong_P.any() else None
        if reason and first is None:
            first = f"{place}: {reason}"
        bad, total = bad + int(wrong_P.sum()), total + max(steps, len(wrong_P))
        arrays.append(score_P)
    if first:
        wanted = "a probability in [0, 1]" if probability else "a finite score"
        raise ScoreError(f"{first}. {bad} of {total} steps lack {wanted}. Score the file again with `jprm score`.")
    return arrays


def _all_at_once(chains, probability: bool) -> list[np.ndarray] | None:
    """The arrays where nothing is wrong anywhere, None otherwise: a million chains one by one take half a minute."""
    if not all(type(scores) is list and len(scores) == steps for _, steps, scores in chains):
        return None
    flat = list(itertools.chain.from_iterable(scores for _, _, scores in chains))
    if not set(map(type, flat)) <= {float, int}:
        return None
    score_M = np.array(flat, float)
    if not np.isfinite(score_M).all() or (probability and ((score_M < 0) | (score_M > 1)).any()):
        return None
    ends = np.cumsum([steps for _, steps, _ in chains]).tolist()
    return [score_M[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _array(scores: Any, steps: int) -> tuple[np.ndarray, str | None]:
    if scores is None:
        return np.empty(0), "no scores"
    if not isinstance(scores, Sequence | np.ndarray) or isinstance(scores, str):
        return np.empty(0), "scores are not a list"
    if len(scores) != steps:
        return np.empty(0), f"{len(scores)} scores for {steps} steps"
    if any(isinstance(x, str | bool) for x in scores):
        return np.empty(0), "scores are not numbers"
    try:
        return np.array(scores, dtype=float).reshape(steps), None  # None becomes NaN
    except (TypeError, ValueError):
        return np.empty(0), "scores are not numbers"


def padded(arrays: Sequence[Float[np.ndarray, " _"]]) -> tuple[Float[np.ndarray, "B P"], Bool[np.ndarray, "B P"]]:
    """Chains of unequal length as one float32 array and its mask; P is the longest chain, at least 1."""
    length_B = np.array([len(x) for x in arrays], int)
    mask_BP = np.arange(max(1, length_B.max(initial=0))) < length_B[:, None]
    score_BP = np.zeros(mask_BP.shape, np.float32)
    if arrays:
        score_BP[mask_BP] = np.concatenate(arrays)
    return score_BP, mask_BP
