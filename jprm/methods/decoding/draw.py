"""One token from logits: the most probable, or one of the nucleus of the softmax, without sorting the vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jprm.model.mesh import reshape

_BLOCK = 128
"""Tokens of the vocabulary whose weights are summed together."""


def draw(key_B: Key[Array, " B"], logit_BV: Float[Array, "B V"], temperature: float, top_p: float) -> Int[Array, " B"]:
    """Samples a token per row from softmax(logit / temperature), restricted to the fewest tokens of mass >= `top_p`.

    Temperature 0 takes the most probable token. Tokens as probable as the nucleus' last one belong to it.

    The nucleus is {v: mass of the tokens more probable than v < top_p}. Every round samples from all remaining tokens.
    A token outside the nucleus shows that no token of its probability or less is inside, so the next round samples from
    the more probable ones. An accepted token follows the nucleus' distribution (FlashInfer's sampling, Ye et al. 2025).
    """
    if temperature == 0:
        return jnp.argmax(logit_BV, axis=-1).astype(jnp.int32)
    if top_p >= 1:  # weights of blocks, then of one block: those of all tokens are never written
        top_B, logit_BNW = jnp.max(logit_BV, axis=-1), _in_blocks(logit_BV, -jnp.inf)
        uniform_B2 = _uniform(key_B, 0)
        block_B = _invert(uniform_B2[:, 0], _weights(logit_BNW, top_B, temperature))
        weight_BW = jnp.exp((pick(logit_BNW, block_B) - top_B[:, None]) / temperature)
        return block_B * _BLOCK + _invert(uniform_B2[:, 1], weight_BW)
    weight_BV = jnp.exp((logit_BV - jnp.max(logit_BV, axis=-1, keepdims=True)) / temperature)
    total_B = jnp.sum(weight_BV, axis=-1)

    def body(carry):
        round, floor_B, token_B, accepted_B = carry
        rest_BV = jnp.where(weight_BV > floor_B[:, None], weight_BV, 0)
        drawn_B = _from_weights(_uniform(key_B, round), rest_BV)
        drawn_weight_B = pick(weight_BV, drawn_B)
        above_B = jnp.sum(jnp.where(weight_BV > drawn_weight_B[:, None], weight_BV, 0), axis=-1)
        token_B = jnp.where(accepted_B, token_B, drawn_B)
        return round + 1, jnp.maximum(floor_B, drawn_weight_B), token_B, accepted_B | (above_B < top_p * total_B)

    start = (jnp.int32(0), jnp.full_like(total_B, -1), jnp.zeros_like(total_B, jnp.int32), total_B < 0)
    return jax.lax.while_loop(lambda carry: ~jnp.all(carry[3]), body, start)[2]


def log_probabilities(
    logit_BV: Float[Array, "B V"], token_B: Int[Array, " B"], temperature: float
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Returns the log-probability of each row's token under softmax(logit), and under softmax(logit / temperature).

    Temperature 0 counts as 1.
    """
    top_B, logit_BNW = jnp.max(logit_BV, axis=-1), _in_blocks(logit_BV, -jnp.inf)
    temperature_2 = jnp.array([1.0, temperature or 1.0])
    # A pass for each: XLA for CPUs does not vectorise two sums of exponentials in one, nor the sum of such sums.
    weight_2BN = jax.lax.map(lambda temperature: _weights(logit_BNW, top_B, temperature), temperature_2)
    log_2B = (pick(logit_BV, token_B) - top_B) / temperature_2[:, None] - jnp.log(jnp.sum(weight_2BN, axis=-1))
    return log_2B[0], log_2B[1]


def top_entropy(logit_BV: Float[Array, "B V"], k: int) -> Float[Array, " B"]:
    """Returns the entropy, in nats, of softmax over the k largest logits of each row."""
    log_BK = jax.nn.log_softmax(jax.lax.top_k(logit_BV, min(k, logit_BV.shape[1]))[0])
    return -jnp.sum(jnp.exp(log_BK) * log_BK, axis=-1)


def pick(x_BN: Float[Array, "B N *W"], index_B: Int[Array, " B"]) -> Array:
    """Returns every row's element with its index, of shape (B, *W)."""
    return jax.vmap(lambda x, i: x[i])(x_BN, index_B)


def _uniform(key_B: Key[Array, " B"], round) -> Float[Array, "B 2"]:
    return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, round), (2,)))(key_B)


def _in_blocks(x_BV: Float[Array, "B V"], filler: float) -> Float[Array, "B N W"]:
    """Returns the numbers in blocks of tokens, the last one filled up."""
    B, V = x_BV.shape
    padded_BV = jnp.pad(x_BV, ((0, 0), (0, -V % _BLOCK)), constant_values=filler)
    return reshape(padded_BV, (B, padded_BV.shape[1] // _BLOCK, _BLOCK), "batch")


def _weights(logit_BNW: Float[Array, "B N W"], top_B: Float[Array, " B"], temperature: float) -> Float[Array, "B N"]:
    """Returns the sum of exp((logit - top) / temperature) of every block."""
    return jnp.sum(jnp.exp((logit_BNW - top_B[:, None, None]) / temperature), axis=-1)


def _from_weights(uniform_B2: Float[Array, "B 2"], weight_BV: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Inverts the distribution function in two levels, with a uniform number each: a block of tokens, then a token."""
    weight_BNW = _in_blocks(weight_BV, 0)
    block_B = _invert(uniform_B2[:, 0], jnp.sum(weight_BNW, axis=-1))
    return block_B * _BLOCK + _invert(uniform_B2[:, 1], pick(weight_BNW, block_B))


def _invert(uniform_B: Float[Array, " B"], weight_BN: Float[Array, "B N"]) -> Int[Array, " B"]:
    """Samples by inversion: returns the first index of positive weight at which the running sum passes uniform x total.

    If rounding leaves none, returns the heaviest. An index without weight is never returned.
    """
    sum_BN = jnp.cumsum(weight_BN, axis=-1)
    passed_BN = (sum_BN > (uniform_B * sum_BN[:, -1])[:, None]) & (weight_BN > 0)
    index_B = jnp.where(jnp.any(passed_BN, axis=-1), jnp.argmax(passed_BN, axis=-1), jnp.argmax(weight_BN, axis=-1))
    return index_B.astype(jnp.int32)
