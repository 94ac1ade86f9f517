"""Many comparisons at once: which differences are found, and how small a difference a set could have shown.

Of twenty comparisons of equals one is below p = 0.05 by chance. `discoveries` bounds the fraction of false ones among
those that are reported. A comparison that found nothing says little where only a large difference could be found:
`smallest_shown` says how large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy  # its parts are loaded when they are first used
from jaxtyping import Bool, Float

from jprm.statistics import TIE, Draws

RATE, LEVEL, POWER = 0.05, 0.95, 0.8


def standard_error(difference: Draws) -> float:
    """Returns the standard error of one difference, as `jprm.statistics.interval` takes it."""
    return float(np.nanstd(difference.drawn_R) * math.sqrt(difference.groups / max(difference.groups - 1, 1)))


def p_value(difference: Draws) -> float:
    """Returns the two-sided p value of no difference by Student's t, groups less one. NaN for fewer than two groups."""
    error = standard_error(difference)
    if difference.groups < 2 or not np.isfinite(error):
        return math.nan
    if error < TIE:  # all resamples are equal
        return float(abs(difference.value) < TIE)
    return float(2 * scipy.special.stdtr(difference.groups - 1, -abs(difference.value) / error))


def discoveries(p_N: Sequence[float], rate: float = RATE) -> Bool[np.ndarray, " N"]:
    """Marks the differences to report, of which at most `rate` are false on average (Benjamini & Hochberg, 1995).

    The k smallest p values are taken, for the largest k with p_(k) <= rate k / N. It holds for independent comparisons
    and for those that depend on each other positively, such as rules of one model. NaN is never reported.
    """
    p = np.where(np.isnan(np.asarray(p_N, float)), np.inf, p_N)
    order_N, count = np.argsort(p, kind="stable"), int(np.isfinite(p).sum())
    below = np.flatnonzero(p[order_N][:count] <= rate * np.arange(1, count + 1) / max(count, 1))
    found_N = np.zeros(len(p), bool)
    found_N[order_N[: int(below.max(initial=-1)) + 1]] = True
    return found_N


def smallest_shown(difference: Draws, level: float = LEVEL, power: float = POWER) -> float:
    """Returns the smallest true difference whose interval at this level would leave out 0 with this probability."""
    quantiles: Float[np.ndarray, " 2"] = scipy.special.stdtrit(
        max(difference.groups - 1, 1), np.array([(1 + level) / 2, power])
    )
    return float(quantiles.sum()) * standard_error(difference)
