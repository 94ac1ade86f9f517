"""Heads: what a step's logits say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def token_log_probability(logit_BSV: Array, token_BS: Array) -> Float[Array, "B S"]:
    """Natural logarithm of the softmax at one token a slot."""
    chosen_BS1 = jnp.take_along_axis(logit_BSV, token_BS.astype(jnp.int32)[..., None], axis=-1)
    return chosen_BS1[..., 0] - jax.nn.logsumexp(logit_BSV, axis=-1)


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
