"""Differences of two choosers on the same problems, by a paired bootstrap.

Most of the width of two intervals is the choice of problems, which both choosers share. So problems are drawn once and
the difference is taken within each draw.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jprm.statistics import DRAWS, Difference


def mean_differences(
    difference_PC: Float[np.ndarray, "P C"], problems: Sequence[str], seed: int, draws: int = DRAWS
) -> Difference:
    """Returns the mean over problems of C columns of differences "A less B", with 95 % intervals and `better`.

    Items of one problem are drawn together. Values are float64. The jitted draws are float32, which moves an end of an
    interval by at most 1e-6 for differences in [-1, 1].
    """
    difference_PC = np.asarray(difference_PC, float)
    group_P = np.unique(np.asarray(problems), return_inverse=True)[1].reshape(-1)
    n_groups = int(group_P.max(initial=-1)) + 1
    total_GC = np.zeros((n_groups, difference_PC.shape[1]))
    np.add.at(total_GC, group_P, difference_PC)
    size_G = np.bincount(group_P, minlength=n_groups)
    ends_2C, better_C = _drawn(jax.random.key(seed), jnp.asarray(total_GC), jnp.asarray(size_G), draws)
    low_C, high_C = np.asarray(ends_2C, float)
    return Difference(difference_PC.mean(0), low_C, high_C, np.asarray(better_C, float))


@functools.partial(jax.jit, static_argnames="draws")
def _drawn(
    key: Key[Array, ""], total_GC: Float[Array, "G C"], size_G: Int[Array, " G"], draws: int
) -> tuple[Float[Array, "2 C"], Float[Array, " C"]]:
    n_groups = len(size_G)
    chosen_RG = jax.random.randint(key, (draws, n_groups), 0, n_groups)
    count_RG = jnp.zeros((draws, n_groups), jnp.float32).at[jnp.arange(draws)[:, None], chosen_RG].add(1.0)
    precise = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    mean_RC = precise(count_RG, total_GC.astype(jnp.float32)) / precise(count_RG, size_G.astype(jnp.float32))[:, None]
    # What is below the rounding of the sums is a tie, not a lead.
    sign_RC = jnp.where(jnp.abs(mean_RC) < 1e-6, 0.0, jnp.sign(mean_RC))
    return jnp.quantile(mean_RC, jnp.array([0.025, 0.975]), axis=0), (0.5 + 0.5 * sign_RC).mean(0)


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
