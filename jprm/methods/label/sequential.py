"""Estimates of a probability from trials that stop when they have decided on which side of a threshold it is.

The fraction of successes is biased under such a rule, and an interval for a fixed number of trials does not cover. The
interval here is a confidence sequence, which covers at any stopping time. The estimate is unbiased.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import betaln, log_ndtr, xlog1py, xlogy

_BISECTIONS = 50


def confidence_sequence(
    right: Int[np.ndarray, "*S"], total: Int[np.ndarray, "*S"], z: float = 1.96
) -> tuple[Float[np.ndarray, "*S"], Float[np.ndarray, "*S"]]:
    """Returns (low, high) of the probabilities that the trials do not reject; (0, 1) for total 0.

    Covers with probability 1 - alpha or more whenever the trials stop, alpha being that of z standard errors. It
    inverts Ville's inequality for the likelihood ratio of the beta(1/2, 1/2) mixture to p (H. Robbins, Annals of
    Mathematical Statistics 41, 1970).
    """
    right, total = np.asarray(right, float), np.asarray(total, float)
    mean = np.divide(right, total, out=np.full(total.shape, 0.5), where=total > 0)
    ends = []
    for outside in (np.zeros_like(mean), np.ones_like(mean)):
        inside = mean
        for _ in range(_BISECTIONS):
            middle = (inside + outside) / 2
            kept = undecided(right, total, middle, z)
            inside, outside = np.where(kept, middle, inside), np.where(kept, outside, middle)
        ends.append(outside)
    return np.where(right == 0, 0.0, ends[0]), np.where(right == total, 1.0, ends[1])


def undecided(
    right: Float[np.ndarray, "*S"], total: Float[np.ndarray, "*S"], p: Float[np.ndarray, "*#S"] | float, z: float
) -> Bool[np.ndarray, "*S"]:
    """Returns whether p is inside the confidence sequence."""
    right, wrong = np.asarray(right, float), np.asarray(total, float) - right
    fixed = xlogy(right, p) + xlog1py(wrong, -np.asarray(p))
    mixture = betaln(right + 0.5, wrong + 0.5) - math.log(math.pi)
    return mixture - fixed < -math.log(2) - log_ndtr(-z)


@functools.lru_cache(maxsize=4096)
def unbiased(right: int, totals: tuple[int, ...], threshold: float, z: float) -> float:
    """Returns the unbiased estimate from trials that were counted at `totals` and continued while undecided.

    This is the expected first trial given the number of successes at the last total: the fraction of the sequences
    with this end that begin with a success (Girshick, Mosteller & Savage, Annals of Mathematical Statistics 17, 1946).
    A limit on the trials of an undecided probability must not depend on their outcomes.

    Args:
      right: successes at the last total.
      totals: trials at every decision, increasing.
      threshold, z: trials continued where `undecided(..., threshold, z)`.
    """
    tilt = right / totals[-1]  # weighs all sequences with this end alike, and keeps the sums from underflow
    if len(totals) == 1:
        return tilt
    sequences = _binomial(totals[0], tilt)
    starting = sequences * np.arange(totals[0] + 1) / totals[0]
    for before, after in zip(totals[:-1], totals[1:], strict=True):
        continued = undecided(np.arange(before + 1.0), np.full(before + 1, float(before)), threshold, z)
        block = _binomial(after - before, tilt)
        sequences = np.convolve(np.where(continued, sequences, 0.0), block)
        starting = np.convolve(np.where(continued, starting, 0.0), block)
    return float(starting[right] / sequences[right])


def _binomial(n: int, p: float) -> Float[np.ndarray, " N"]:
    """Returns the probabilities of 0 .. n successes."""
    s = np.arange(n + 1.0)
    return np.exp(xlogy(s, p) + xlog1py(n - s, -p) - betaln(s + 1, n - s + 1)) / (n + 1)
