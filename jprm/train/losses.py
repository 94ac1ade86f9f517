"""Losses on step logits: pure functions of (logits, target, weight) that return the weighted sum, in float32.

Divide by the sum of the weights, after all micro-batches and devices are summed, for the mean.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

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


def token_log_probability(logit_BSV: Array, token_BS: Array) -> Float[Array, "B S"]:
    """Natural logarithm of the softmax at one token a slot."""
    chosen_BS1 = jnp.take_along_axis(logit_BSV, token_BS.astype(jnp.int32)[..., None], axis=-1)
    return chosen_BS1[..., 0] - jax.nn.logsumexp(logit_BSV, axis=-1)


LOSSES: dict[str, tuple[Loss, tuple[str, ...]]] = {
    "cross_entropy": (cross_entropy, ("binary", "scalar")),
    "ternary_cross_entropy": (ternary_cross_entropy, ("ternary",)),
    "squared_error": (squared_error, ("binary", "scalar")),
    "next_token": (next_token, ("language",)),
}
"""Name to the loss and the heads that it fits."""


def probability(logit_BSC: Float[Array, "*B C"]) -> Float[Array, "*B"]:
    """The score of a step: the probability that it is not wrong.

    One logit: its sigmoid. Two: the softmax's second class. Three: 1 - P(negative), neutral being no error.
    """
    if logit_BSC.shape[-1] == 1:
        return jax.nn.sigmoid(logit_BSC[..., 0])
    # Two shares that make up all of 1 may add to 1.0000001, which no evaluation takes for a probability.
    return jnp.minimum(jnp.sum(jax.nn.softmax(logit_BSC, axis=-1)[..., 1:], axis=-1), 1.0)


def judged(head: str, logit_BSC: Float[Array, "B S C"], target_BS: Float[Array, "B S"]) -> tuple[Array, Array]:
    """Scores and which steps count as right, both (B, S): what metrics are made of.

    A step is right from a target of 0.5 on, as in `jprm.evaluate.steps`. A policy's score is the probability of the
    token that came next, and every token is right.
    """
    if head == "language":
        return jnp.exp(token_log_probability(logit_BSC, target_BS)), jnp.ones_like(target_BS, bool)
    return probability(logit_BSC), target_BS >= (1.0 if head == "ternary" else 0.5)
