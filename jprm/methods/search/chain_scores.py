"""Scores of chains from the scores of their steps, in numpy: searches ask for few chains at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from jprm.score.aggregate import host_rank_keys, padded
from jprm.score.scale import PROBABILITY, PROBABILITY_RULES, Scale


def chain_scores(
    paths: Sequence[Sequence[float]], rule: str, scale: Scale = PROBABILITY
) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """Returns (score, key) of N chains, each given as its steps' scores.

    `score` is as in `jprm.score.aggregate.aggregate`, but a sum of log-odds becomes a probability. `key` is as in
    `rank_keys`. Rules that multiply probabilities take the scores' weights (`Scale.weights`). Both are NaN for a chain
    without steps and where a step's score is not finite.

    Raises:
      ValueError: a score outside [0, 1] under a rule that multiplies probabilities.
    """
    score_BP, mask_BP = padded([np.array(path) for path in paths])
    known_B = np.isfinite(score_BP).all(1)
    if rule in PROBABILITY_RULES and scale != PROBABILITY:
        score_BP = scale.weights(score_BP).astype(np.float32)
    if rule in PROBABILITY_RULES and ((score_BP < 0) | (score_BP > 1)).any():
        raise ValueError(f"rule {rule!r} needs probabilities, but a score is outside [0, 1]: use 'min' or 'last'")
    score_BP[~known_B] = 0
    key_B = host_rank_keys(score_BP, mask_BP)[rule].astype(float)
    value_B = key_B
    if rule in ("prod", "mean_log"):  # whose keys are logarithms
        value_B = np.exp(key_B)
    if rule == "sum_log_odds":
        value_B = 1 / (1 + np.exp(-key_B))
    known_B &= mask_BP.any(1)
    return np.where(known_B, value_B, np.nan), np.where(known_B, key_B, np.nan)
