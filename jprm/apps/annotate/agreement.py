"""Krippendorff's alpha for ordinal ratings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

Ratings = Sequence[Sequence[float | None]]
"""The ratings of each unit, in any order; None for an annotator who did not rate it."""


def ordinal_alpha(units: Ratings) -> float:
    """Returns Krippendorff's alpha for ordinal ratings: 1 is agreement, 0 chance.

    Missing ratings are allowed; a unit with fewer than two says nothing. NaN where no unit has two, or all ratings are
    the same. Krippendorff, Computing Krippendorff's Alpha-Reliability (2011), section D.
    """
    return float(alpha_of(coincidences(units).sum(0)))


def coincidences(units: Ratings) -> Float[np.ndarray, "U C C"]:
    """Returns each unit's coincidences of values c and k: n_c (n_k - [c = k]) / (m - 1), m its number of ratings.

    C counts the values that occur, in rising order.
    """
    given = [[value for value in unit if value is not None] for unit in units]
    values = sorted({value for unit in given for value in unit})
    place = {value: i for i, value in enumerate(values)}
    count_UC = np.zeros((len(given), len(values)))
    for u, unit in enumerate(given):
        for value in unit:
            count_UC[u, place[value]] += 1
    pairs_UCC = count_UC[:, :, None] * count_UC[:, None, :]
    pairs_UCC -= count_UC[:, :, None] * np.eye(len(values))
    return pairs_UCC / np.maximum(count_UC.sum(-1) - 1, 1)[:, None, None]


def alpha_of(observed_CC: Float[np.ndarray, "*R C C"]) -> Float[np.ndarray, "*R"]:
    """Returns 1 - D_o / D_e from summed coincidences, with the ordinal distance.

    The distance of c < k is the square of the number of ratings from c to k, those of c and k counted half.
    """
    n_C = observed_CC.sum(-1)
    below_C = np.cumsum(n_C, -1) - n_C / 2
    square_CC = (below_C[..., :, None] - below_C[..., None, :]) ** 2
    total = n_C.sum(-1)
    disagreement = (total - 1) * (observed_CC * square_CC).sum((-2, -1))
    expected = (n_C[..., :, None] * n_C[..., None, :] * square_CC).sum((-2, -1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(expected > 0, 1 - disagreement / expected, np.nan)
