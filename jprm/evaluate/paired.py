"""Differences of two choosers on the same problems, by a paired bootstrap.

Most of the width of two intervals is the choice of problems, which both choosers share. So problems are drawn once and
the difference is taken within each draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jprm.statistics import Difference, difference, draws, weighted_mean


def mean_differences(difference_PC: Float[np.ndarray, "P C"], problems: Sequence[str], seed: int) -> Difference:
    """Returns the mean over problems of C columns of differences "A less B", with 95 % intervals and `better`.

    Items of one problem are drawn together.
    """
    return difference(draws(lambda weight_RP: weighted_mean(difference_PC, weight_RP), problems, seed=seed))


def shown_n(n_max: int) -> list[int]:
    """Returns the n at which curves are compared: the powers of two up to `n_max`, and `n_max`."""
    return sorted({2**k for k in range(n_max.bit_length())} | {n_max})


def compare_curves(
    a: Mapping[str, Float[np.ndarray, "P n"]],
    b: Mapping[str, Float[np.ndarray, "P n"]],
    pairs: Sequence[tuple[str, str]],
    problems: Sequence[str],
    seed: int,
) -> list[dict[str, Any]]:
    """Returns for each pair (name in `a`, name in `b`): `n` (`shown_n`), and `value`, `low`, `high`, `better` over it.

    The curves hold the problems' expected accuracies at n = 1, 2, ...
    """
    if not pairs:
        return []
    n = np.array(shown_n(min(a[pairs[0][0]].shape[1], b[pairs[0][1]].shape[1])))
    columns = [a[one][:, n - 1] - b[other][:, n - 1] for one, other in pairs]
    found = mean_differences(np.concatenate(columns, axis=1), problems, seed).json()
    return [
        {"a": one, "b": other, "n": n.tolist()}
        | {key: value[i * len(n) : (i + 1) * len(n)] for key, value in found.items()}
        for i, (one, other) in enumerate(pairs)
    ]
