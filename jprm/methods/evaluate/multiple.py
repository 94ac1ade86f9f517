"""Multiple comparisons: which differences to report, and how small a difference could have been detected.

If there is no true difference, one of twenty comparisons is still below p = 0.05 by chance. `discoveries` bounds the
fraction of false reports. If a comparison finds no difference, `smallest_shown` gives the smallest one it could have
detected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy  # its parts are loaded when they are first used
from jaxtyping import Bool, Float

from jprm.statistics import TIE, Draws, standard_error

RATE, LEVEL, POWER = 0.05, 0.95, 0.8


def p_value(difference: Draws) -> float:
    """Returns the two-sided p value of a paired difference by Student's t; NaN for fewer than two groups.

    `difference` has A's value and draws minus B's, from equal seed and groups. If all groups differ by the same amount,
    the sign test is used, or p is 1 if that amount is 0.
    """
    error = float(standard_error(difference))
    if difference.groups < 2 or not np.isfinite(error):
        return math.nan
    if error < TIE:  # all resamples are equal
        return 1.0 if abs(difference.value) < TIE else 2.0 ** (1 - difference.groups)
    return float(2 * scipy.special.stdtr(difference.groups - 1, -abs(difference.value) / error))


def discoveries(p_N: Sequence[float], rate: float = RATE) -> Bool[np.ndarray, " N"]:
    """Marks the differences to report, with false discovery rate `rate` (Benjamini & Hochberg, 1995).

    Takes the k smallest p values, for the largest k with p_(k) <= rate k / N. Valid for independent and for positively
    dependent comparisons, e.g. rules of one model. NaN is never reported, and not counted in N.
    """
    p = np.where(np.isnan(np.asarray(p_N, float)), np.inf, p_N)
    order_N, count = np.argsort(p, kind="stable"), int(np.isfinite(p).sum())
    below = np.flatnonzero(p[order_N][:count] <= rate * np.arange(1, count + 1) / max(count, 1))
    found_N = np.zeros(len(p), bool)
    found_N[order_N[: int(below.max(initial=-1)) + 1]] = True
    return found_N


def smallest_shown(difference: Draws, level: float = LEVEL, power: float = POWER) -> float:
    """Returns the smallest true difference that a two-sided interval at `level` detects with probability `power`.

    It has the unit of `difference`. It is 0, and means little, if all draws are equal, e.g. with one group.
    """
    quantiles: Float[np.ndarray, " 2"] = scipy.special.stdtrit(
        max(difference.groups - 1, 1), np.array([(1 + level) / 2, power])
    )
    return float(quantiles.sum()) * float(standard_error(difference))
