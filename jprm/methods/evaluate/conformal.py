"""Conformal thresholds, with finite-sample guarantees for any model and any score distribution.

The guarantees hold for new chains that are exchangeable with the calibration chains: the same policy, the same kind of
problems, and one chain per problem. They do not extend to other policies or harder problems.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import scipy  # its parts are loaded when they are first used
from jaxtyping import Bool, Float

from jprm.options import from_json

GRID = np.concatenate([1 - np.geomspace(1e-6, 1e-2, 40, endpoint=False), np.linspace(0.99, 0, 100)])
"""Thresholds that `accept_threshold` tries; the guarantee requires them to be fixed before any score is seen.

They are dense above 0.99, where a confident model has most of its scores.
"""

STARTS = 10


@dataclasses.dataclass(frozen=True)
class Threshold:
    """A threshold and its guarantee.

    `false_alarm`: flags a chain if its lowest step score is below `threshold`; at most a fraction `alpha` of the chains
    without an error is flagged. `accept`: accepts a chain if its score is at least `threshold`; at most a fraction
    `alpha` of the accepted chains is wrong. If `confidence` is given, the guarantee holds for this threshold with that
    probability over calibration sets; otherwise it is an average over calibration sets.
    """

    kind: Literal["false_alarm", "accept"]
    threshold: float  # -inf flags no chain, inf accepts no chain
    alpha: float
    confidence: float | None
    n: int  # calibration chains that it rests on
    bound: float | None  # accept: upper confidence bound on the error rate at this threshold only

    def to_json(self) -> dict[str, Any]:
        """Returns the fields; an infinite threshold, which flags or accepts no chain, becomes null."""
        return dataclasses.asdict(self) | {"threshold": self.threshold if math.isfinite(self.threshold) else None}

    @staticmethod
    def from_json(record: dict[str, Any]) -> Threshold:
        """Reads the output of `to_json`. Raises ValueError if the record is invalid."""
        if record.get("threshold", 0.0) is None:
            record = record | {"threshold": -math.inf if record.get("kind") == "false_alarm" else math.inf}
        return from_json(Threshold, record)


def false_alarm_threshold(
    lowest_N: Float[np.ndarray, " N"], alpha: float, *, confidence: float | None = None
) -> Threshold:
    """Returns the highest threshold that flags at most a fraction `alpha` of chains without an error.

    `lowest_N` must be the lowest step scores of N chains without an error. Split conformal prediction (Vovk, Gammerman
    & Shafer 2005; Angelopoulos & Bates 2021, arXiv 2107.07511, theorem 1): the threshold is the k-th smallest of
    `lowest_N`, and flags scores strictly below it. A new error-free chain is flagged only if it is among the k lowest
    of N + 1 exchangeable values, with probability at most k / (N + 1). So k = floor(alpha (N + 1)); if k = 0, no chain
    is flagged.

    That is an average over calibration sets. Given one set, the rate is Beta(k, N + 1 - k) distributed, lower if scores
    tie (Vovk 2012, arXiv 1209.2673, proposition 2a). With `confidence`, k is the largest value for which the rate stays
    below `alpha` with that probability. Raises ValueError if a score is not finite, or a level outside (0, 1).
    """
    lowest_N = _checked(lowest_N, alpha, confidence)
    n = len(lowest_N)
    k = min(math.floor(alpha * (n + 1) + 1e-9), n)  # 0.1 * 30 is 3.0000000000000004, 0.29 * 100 28.999999999999996
    if confidence is not None:
        k_K = np.arange(1, k + 1)
        k = int((scipy.special.betainc(k_K, n + 1 - k_K, alpha) >= confidence).sum())
    threshold = float(np.sort(lowest_N)[k - 1]) if k else -math.inf
    return Threshold("false_alarm", threshold, alpha, confidence, n, None)


def accept_threshold(
    score_N: Float[np.ndarray, " N"],
    right_N: Bool[np.ndarray, " N"],
    alpha: float,
    *,
    confidence: float,
    grid: Sequence[float] | np.ndarray = GRID,
) -> Threshold:
    """Returns the lowest threshold of `grid` with an error rate of at most `alpha` among accepted chains (score >= it).

    This holds with probability `confidence` over the calibration chains. If no threshold qualifies, it is infinite and
    no chain is accepted. `grid` must not be chosen on these chains. The error rate need not fall with the score. Raises
    ValueError like `false_alarm_threshold`.

    Learn then test (Angelopoulos, Bates, Candes, Jordan & Lei 2021, arXiv 2110.01052). Given the number of chains that
    score at least t, the number of wrong ones is binomial with the error rate at t. So the test "the Clopper-Pearson
    upper bound at level d is at most alpha" passes a threshold with an error rate above alpha with probability at most
    d. `STARTS` walks begin at evenly spaced thresholds and go down as long as the test at d = (1 - confidence) / STARTS
    passes (fixed sequence testing with several starts). A walk passes a false threshold only if it passes its own first
    false one, so all walks together do so with probability at most 1 - confidence.

    Also raises ValueError if `score_N` and `right_N` differ in shape.
    """
    score_N = _checked(score_N, alpha, confidence)
    right_N = np.asarray(right_N, bool)
    grid_K = np.sort(np.asarray(grid, float))[::-1]
    if right_N.shape != score_N.shape:
        raise ValueError(f"{score_N.shape} scores for {right_N.shape} outcomes")
    accepted_KN = score_N >= grid_K[:, None]
    accepted_K, wrong_K = accepted_KN.sum(1), (accepted_KN & ~right_N).sum(1)
    bound_K = clopper_pearson(wrong_K, accepted_K, 1 - (1 - confidence) / STARTS)
    passed_K = np.zeros(len(grid_K), bool)
    for start in np.linspace(0, len(grid_K), STARTS, endpoint=False).astype(int):
        fails_K = np.flatnonzero(bound_K[start:] > alpha)
        passed_K[start : start + (fails_K[0] if len(fails_K) else len(grid_K))] = True
    if not passed_K.any():
        return Threshold("accept", math.inf, alpha, confidence, len(score_N), None)
    k = int(np.flatnonzero(passed_K)[-1])
    bound = float(clopper_pearson(wrong_K[k], accepted_K[k], confidence))
    return Threshold("accept", float(grid_K[k]), alpha, confidence, len(score_N), bound)


def clopper_pearson(wrong: Any, n: Any, confidence: float) -> Any:
    """Returns the exact one-sided upper bound on a binomial probability after `wrong` of `n`; 1 if n is 0 or all wrong.

    Arrays broadcast.

    Clopper & Pearson 1934: p with P(Bin(n, p) <= wrong) = 1 - confidence, a quantile of Beta(wrong + 1, n - wrong).
    """
    wrong, n = np.asarray(wrong), np.asarray(n)
    return np.where(wrong >= n, 1.0, scipy.special.betaincinv(wrong + 1, np.maximum(n - wrong, 1), confidence))


def _checked(score_N, alpha: float, confidence: float | None) -> np.ndarray:
    score_N = np.asarray(score_N, float)
    if not 0 < alpha < 1 or (confidence is not None and not 0 < confidence < 1):
        raise ValueError(f"alpha {alpha} and confidence {confidence} must be between 0 and 1")
    if score_N.ndim != 1 or not np.isfinite(score_N).all():
        raise ValueError("a conformal threshold needs one finite score a chain")
    return score_N
