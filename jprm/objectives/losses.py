"""Losses on step logits: pure functions of (logits, target, weight) that return the weighted sum, in float32.

Divide by the sum of the weights, after all micro-batches and devices are summed, for the mean.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

from jprm.model.heads import probability, token_log_probability

Loss = Callable[[Float[Array, "B S C"], Float[Array, "B S"], Float[Array, "B S"]], Scalar]


def cross_entropy(logit_BSC: Array, target_BS: Array, weight_BS: Array) -> Scalar:
    """-t log p - (1 - t) log(1 - p), with t in [0, 1], hard or soft.

    Two logits: p is the softmax's second class. One logit: p is its sigmoid.
    """
    if logit_BSC.shape[-1] == 1:
        logit_BSC = jnp.concatenate([jnp.zeros_like(logit_BSC), logit_BSC], axis=-1)
    log_BSC = jax.nn.log_softmax(logit_BSC, axis=-1)
    return -jnp.sum(weight_BS * (target_BS * log_BSC[..., 1] + (1.0 - target_BS) * log_BSC[..., 0]))


def ternary_cross_entropy(logit_BSC: Array, target_BS: Array, weight_BS: Array) -> Scalar:
    """-log p[class], classes 0, 1, 2 being negative, neutral, positive."""
    log_BSC = jax.nn.log_softmax(logit_BSC, axis=-1)
    chosen_BSC = jax.nn.one_hot(target_BS.astype(jnp.int32), logit_BSC.shape[-1], dtype=log_BSC.dtype)
    return -jnp.sum(weight_BS * jnp.sum(chosen_BSC * log_BSC, axis=-1))


def squared_error(logit_BSC: Array, target_BS: Array, weight_BS: Array) -> Scalar:
    """(p - t)^2, with p the probability of being right, as `probability` gives it."""
    return jnp.sum(weight_BS * jnp.square(probability(logit_BSC) - target_BS))


def next_token(logit_BSV: Array, target_BS: Array, weight_BS: Array) -> Scalar:
    """-log p[token]: the loss of a policy, whose targets are token ids."""
    return -jnp.sum(weight_BS * token_log_probability(logit_BSV, target_BS))


LOSSES: dict[str, tuple[Loss, tuple[str, ...]]] = {
    "cross_entropy": (cross_entropy, ("binary", "scalar")),
    "ternary_cross_entropy": (ternary_cross_entropy, ("ternary",)),
    "squared_error": (squared_error, ("binary", "scalar")),
    "next_token": (next_token, ("language",)),
}
"""Name to the loss and the heads that it fits."""
