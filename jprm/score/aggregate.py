"""Aggregates step scores into a chain score, by every rule at once.

The right rule depends on a score's meaning. If it is the probability that the step is correct, a chain needs all
steps correct: `prod` (Lightman et al. 2023, appendix F.2) or `min` (Math-Shepherd). A value, the probability that the
chain will end correctly, covers the whole chain in its `last` step (Zhang et al. 2025, arXiv 2501.07301).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from jprm.score.scale import PROBABILITY, PROBABILITY_RULES, RULES, Rule, Scale

DEFAULT_RULE = {
    "correctness": "prod",
    "rating": "prod",
    "value": "last",
    "advantage": "min",  # one bad step spoils a chain, however many good ones follow (PURE's min-form credit)
    "implicit": "last",  # the score at step t is already the sum of the log ratios up to t
}
"""The default rule for each label semantics in `jprm.tree.SEMANTICS`."""

LOG_ODDS_CLIP = 1e-6
"""`sum_log_odds` clips probabilities to [1e-6, 1 - 1e-6], so a step weighs at most 13.8 nats."""

SOFT_MIN_TEMPERATURE = 0.1
"""Of `soft_min`, as `turn_process_reward_logits_to_reward` in CJReinforce/PURE, openrlhf/utils/utils.py."""


def aggregate(scores: Sequence[Any], rule: Rule) -> Any:
    """Returns a chain's score from its step scores, as a float; for N chains of any length, a float64 array (N,).

    `rank_keys` defines the rules; its logarithms and log odds become probabilities here. NaN if a chain has no step or
    a missing (None) or non-finite score. Raises ValueError for an unknown rule, or if the scores do not fit the rule.

    >>> jprm.aggregate([0.5, 0.25], "min"), jprm.aggregate([[0.5, 0.25], [0.75]], "last").tolist()
    (0.25, [0.25, 0.75])
    """
    if not isinstance(rule, str) or rule not in RULES:
        raise ValueError(f"rule is {rule!r}: it must be one of {', '.join(RULES)}")
    several = bool(len(scores)) and all(np.ndim(score) for score in scores)
    value_N = chain_scores(scores if several else [scores], rule)[0]
    return value_N if several else float(str(np.float32(value_N[0])))  # 0.8, not float32's 0.800000011920929


def rank_keys(
    score_BP: Float[np.ndarray, "B P"], mask_BP: Bool[np.ndarray, "B P"], log_BP: Float[np.ndarray, "B P"] | None = None
) -> dict[str, Float[np.ndarray, " B"]]:
    """Returns {rule: sort keys} by every rule in `RULES`, in float32, for B chains with up to P >= 1 steps.

    p_i are a chain's k step scores (true in the mask). `min`, `max`, `mean` and `last` are as named; `soft_min`
    is sum_i w_i p_i with w the softmax of -p / `SOFT_MIN_TEMPERATURE` (PURE, Cheng et al. 2025, arXiv 2504.15275),
    between mean and minimum. `prod` is sum log p_i, as a long product underflows to 0; `mean_log` is sum log p_i / k;
    `sum_log_odds` is sum log(p_i / (1 - p_i)), with p_i clipped by `LOG_ODDS_CLIP`. For these three the scores
    must be probabilities; 0 and 1 give no NaN. A chain without steps has -inf by every rule, so no argmax chooses it.

    Give `log_BP`, from `Scale.log_weights`, if scores may have rounded to 0 or 1.
    """
    some_B = mask_BP.any(-1)
    steps_B = np.maximum(mask_BP.sum(-1), 1)
    last_B = score_BP.shape[-1] - 1 - np.argmax(mask_BP[..., ::-1], axis=-1)
    inner_BP = np.clip(score_BP, LOG_ODDS_CLIP, 1 - LOG_ODDS_CLIP)

    def total(x_BP):
        return np.where(mask_BP, x_BP, 0.0).sum(-1)

    low_B = np.where(mask_BP, score_BP, np.inf).min(-1)
    above_BP = np.where(mask_BP, score_BP - np.where(some_B, low_B, 0)[..., None], np.inf)
    soft_BP = np.exp(-above_BP / SOFT_MIN_TEMPERATURE)  # 1 at the lowest step: the sum cannot vanish
    with np.errstate(divide="ignore", invalid="ignore"):
        log_B = total(np.log(score_BP) if log_BP is None else log_BP)
        value = {
            "min": low_B,
            "soft_min": total(soft_BP * score_BP) / np.where(some_B, soft_BP.sum(-1), 1),
            "prod": log_B,
            "mean": total(score_BP) / steps_B,
            "last": np.take_along_axis(score_BP, last_B[..., None], axis=-1)[..., 0],
            "max": np.where(mask_BP, score_BP, -np.inf).max(-1),
            "sum_log_odds": total(np.log(inner_BP) - np.log1p(-inner_BP)),
            "mean_log": log_B / steps_B,
        }
    return {rule: np.where(some_B, value[rule], -np.inf).astype(np.float32) for rule in RULES}


def padded(scores: Sequence[Float[np.ndarray, " _"]]) -> tuple[Float[np.ndarray, "B P"], Bool[np.ndarray, "B P"]]:
    """Pads B chains with zeros to one float32 array; returns it and its mask. P is the longest length, at least 1."""
    length_B = np.array([len(x) for x in scores], int)
    mask_BP = np.arange(max(1, length_B.max(initial=0))) < length_B[:, None]
    score_BP = np.zeros(mask_BP.shape, np.float32)
    if scores:
        score_BP[mask_BP] = np.concatenate(scores)
    return score_BP, mask_BP


def chain_scores(
    paths: Sequence[Sequence[float]], rule: str, scale: Scale = PROBABILITY
) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """Returns (scores, sort keys), each (N,) float64, for N chains; `paths` holds each chain's step scores.

    Keys are as in `rank_keys`. Scores are too, unless the rule multiplies probabilities: then it takes `Scale.weights`,
    and the score is a probability. Both are NaN if a chain has no steps or a non-finite score.

    Raises ValueError for a score outside [0, 1] if the rule multiplies probabilities, KeyError for an unknown rule.
    """
    score_BP, mask_BP = padded([np.array(path) for path in paths])
    known_B = np.isfinite(score_BP).all(1) & mask_BP.any(1)
    log_BP = None
    if rule in PROBABILITY_RULES and scale.weight != "score":  # float32 would round probabilities close to 1
        score_BP, log_BP = scale.weights(score_BP), scale.log_weights(score_BP)
    if rule in PROBABILITY_RULES and ((score_BP < 0) | (score_BP > 1)).any():
        raise ValueError(f"rule {rule!r} needs probabilities, but a score is outside [0, 1]: use 'min' or 'last'")
    score_BP[~known_B] = 0
    key_B = rank_keys(score_BP, mask_BP, log_BP)[rule].astype(float)
    value_B = np.exp(scale.log_votes(key_B, rule)) if rule in PROBABILITY_RULES else key_B
    return np.where(known_B, value_B, np.nan), np.where(known_B, key_B, np.nan)
