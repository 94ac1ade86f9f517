"""The programs of a sampler: prompts, then a loop of one token more for all samples.

A token is sampled greedily or from the nucleus of the softmax, without sorting the vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jprm.methods.policy import decode
from jprm.model.config import ModelConfig
from jprm.model.mesh import reshape, sharding
from jprm.model.transformer import head_logits

RUNNING, STEP, STOP, FULL = range(4)
"""How a sample ends; FULL: at the most tokens that it may have."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Samples:
    """The state of B samples, some of them unfinished: what the decoding loop carries.

    Tokens, and keys and values, are in rings: token number `count` of the loop is at `count` modulo the room. A sample
    has the last `length_B` of its ring, so that a row may begin a new sample at any time.
    """

    count: Array  # turns of the loop so far
    last_B: Array  # the last token
    progress_B: Array  # a column of the progress table
    end_B: Array  # RUNNING, or how it ended
    begun_B: Array  # tokens sampled before, which belong to the prompt here
    written_BN: Array
    logprob_BN: Array  # of every written token, at the sampling temperature
    length_B: Array  # tokens written, the last one included
    logprob_B: Array
    cache: decode.Cache


@functools.partial(jax.jit, static_argnums=1)
def prefill(params, config: ModelConfig, tokens_US, length_U, row_R) -> decode.Past:
    """Returns the keys of prompt `row_R[r]` for every r, without its last token, with which decoding begins."""
    S = tokens_US.shape[1]
    position_US = jnp.zeros_like(tokens_US) + jnp.arange(S)
    _, cache = decode.forward(params, config, tokens_US, position_US, length_B=length_U - 1)

    def of_rows(x: Array) -> Array:
        return x.at[row_R].get(out_sharding=sharding("batch", "kv_heads", *(None,) * (x.ndim - 2)))

    cache = jax.tree.map(of_rows, cache)
    length_R = length_U.at[row_R].get(out_sharding=sharding("batch"))
    return decode.Past(cache, jnp.arange(S) < length_R[:, None] - 1)


def next_token(
    params, config: ModelConfig, temperature, top_p, s: Samples, past, first_B, key_B, table_VP, stop_V, at_step, limit
) -> Samples:
    """Returns the samples with one token more; `limit` is the most tokens of a sample."""
    at = s.count % s.written_BN.shape[1]
    position_B1 = (first_B + s.length_B)[:, None]
    x_B1D, cache = decode.forward(params, config, s.last_B[:, None], position_B1, past, s.cache, at, age_B=s.length_B)
    logit_BV = head_logits(params, config, x_B1D[:, 0])
    key = jax.vmap(jax.random.fold_in)(key_B, s.begun_B + s.length_B)
    token_B = draw(key, logit_BV, temperature, top_p)
    logprob_B = pick(logit_BV, token_B) - jax.nn.logsumexp(logit_BV, axis=1)
    scaled_BV = logit_BV / (temperature or 1.0)
    drawn_B = pick(scaled_BV, token_B) - jax.nn.logsumexp(scaled_BV, axis=1)
    running_B = s.end_B == RUNNING
    progress_B = table_VP.at[token_B, s.progress_B].get(out_sharding=sharding("batch"))
    ends_B = stop_V.at[token_B].get(out_sharding=sharding("batch"))
    length_B = s.length_B + running_B
    end_B = jnp.where(s.begun_B + length_B >= limit, FULL, RUNNING)
    end_B = jnp.where(at_step & (progress_B < 0), STEP, end_B)

    def write(x_BN: Array, new_B: Array) -> Array:
        """Writes a column, but for samples that have ended: theirs wait in the ring until they are collected."""
        old_B1 = jax.lax.dynamic_slice_in_dim(x_BN, at, 1, 1)
        if (place := sharding("batch", None)) is not None:
            old_B1 = jax.sharding.reshard(old_B1, place)  # from jax 0.12 on a slice forgets how one row is split
        return jax.lax.dynamic_update_slice_in_dim(x_BN, jnp.where(running_B[:, None], new_B[:, None], old_B1), at, 1)

    return Samples(
        count=s.count + 1,
        last_B=token_B,
        progress_B=jnp.maximum(progress_B, 0).astype(jnp.int32),
        end_B=jnp.where(running_B, jnp.where(ends_B, STOP, end_B), s.end_B),
        begun_B=s.begun_B,
        written_BN=write(s.written_BN, token_B),
        logprob_BN=write(s.logprob_BN, drawn_B),
        length_B=length_B,
        logprob_B=s.logprob_B + jnp.where(running_B, logprob_B, 0),
        cache=cache,
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3), donate_argnums=4)
def decode_samples(
    params, config: ModelConfig, temperature, top_p, samples: Samples, past, first_B, key_B, table_VP, stop_V, at_step,
    limit, needed_B, enough,
) -> Samples:  # fmt: skip
    """Decodes until all needed samples have ended, or all of `enough` rows, or a running sample has no more room."""
    room, R = samples.written_BN.shape[1], len(past.seen_RS)

    def again(s: Samples):
        running_B = s.end_B == RUNNING
        ended_R = ~jnp.any(reshape(running_B, (R, len(running_B) // R), "batch"), axis=1)
        full = jnp.any(running_B & (s.length_B >= room))
        return jnp.any(running_B & needed_B) & (jnp.sum(ended_R) < enough) & ~full

    def body(s: Samples) -> Samples:
        return next_token(params, config, temperature, top_p, s, past, first_B, key_B, table_VP, stop_V, at_step, limit)

    return jax.lax.while_loop(again, body, samples)


@functools.partial(jax.jit, static_argnums=1)
def grown(samples: Samples, size: int) -> Samples:
    """Returns the samples with room for `size` tokens, of which the last ones before `count` keep their order."""
    room = samples.written_BN.shape[1]

    def pad(x: Array, axis: int) -> Array:
        return _padded(jnp.roll(x, -(samples.count % room), axis), axis, size)  # the oldest first

    cache, count = decode.mapped(lambda x: pad(x, 2), None, samples.cache), jnp.full_like(samples.count, room)
    written_BN, logprob_BN = pad(samples.written_BN, 1), pad(samples.logprob_BN, 1)
    return dataclasses.replace(samples, count=count, written_BN=written_BN, logprob_BN=logprob_BN, cache=cache)


def _padded(x: Array, axis: int, size: int) -> Array:
    return jnp.pad(x, [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)])


@functools.partial(jax.jit, donate_argnums=0)
def refilled(past: decode.Past, new: decode.Past, new_R) -> decode.Past:
    """Returns the past with other prompts in the rows `new_R`."""

    def either(a: Array, b: Array) -> Array:
        return jnp.where(reshape(new_R, (len(new_R), *[1] * (a.ndim - 1)), "batch"), b, a)

    return decode.Past(jax.tree.map(either, past.cache, new.cache), either(past.seen_RS, new.seen_RS))


@functools.partial(jax.jit, static_argnums=1)
def longer(past: decode.Past, size: int) -> decode.Past:
    """Returns the past with room for prompts of `size` tokens."""
    cache = decode.mapped(lambda x: _padded(x, 2, size), None, past.cache)
    return decode.Past(cache, _padded(past.seen_RS, 1, size))


@functools.partial(jax.jit, static_argnums=2)
def of_rows(state, row_Q, m: int):
    """Returns samples, m a row, and what else has an entry for each of them or for each row, of the rows `row_Q`."""
    index_B = (row_Q[:, None] * m + jnp.arange(m)).reshape(-1, out_sharding=sharding("batch"))
    samples, first_B, key_B, past = state

    def take(x: Array, index: Array) -> Array:
        rest = ("kv_heads", *(None,) * (x.ndim - 2)) if x.ndim >= 4 else (None,) * (x.ndim - 1)
        return x.at[index].get(out_sharding=sharding("batch", *rest)) if x.ndim else x

    of_samples = jax.tree.map(lambda x: take(x, index_B), (samples, first_B, key_B))
    return *of_samples, jax.tree.map(lambda x: take(x, row_Q), past)


@jax.jit
def keys(number_B, hash_B):
    return jax.vmap(lambda number, text: jax.random.fold_in(jax.random.key(number), text))(number_B, hash_B)


empty_cache = jax.jit(decode.empty_cache, static_argnums=(0, 1, 2))


# ---- One token from logits.

_BLOCK = 128


def draw(key_B: Key[Array, " B"], logit_BV: Float[Array, "B V"], temperature: float, top_p: float) -> Int[Array, " B"]:
    """Samples a token per row from softmax(logit / temperature), restricted to the fewest tokens of mass >= `top_p`.

    Temperature 0 takes the most probable token. Tokens as probable as the nucleus' last one belong to it.

    The nucleus is {v: mass of the tokens more probable than v < top_p}. Every round samples from all remaining tokens.
    A token outside the nucleus shows that no token of its probability or less is inside, so the next round samples from
    the more probable ones. An accepted token follows the nucleus' distribution (FlashInfer's sampling, Ye et al. 2025).
    """
    if temperature == 0:
        return jnp.argmax(logit_BV, axis=-1).astype(jnp.int32)
    weight_BV = jnp.exp((logit_BV - jnp.max(logit_BV, axis=-1, keepdims=True)) / temperature)
    if top_p >= 1:
        return _from_weights(_uniform(key_B, 0), weight_BV)
    total_B = jnp.sum(weight_BV, axis=-1)

    def again(carry):
        return ~jnp.all(carry[3])

    def body(carry):
        round, floor_B, token_B, accepted_B = carry
        rest_BV = jnp.where(weight_BV > floor_B[:, None], weight_BV, 0)
        drawn_B = _from_weights(_uniform(key_B, round), rest_BV)
        drawn_weight_B = pick(weight_BV, drawn_B)
        above_B = jnp.sum(jnp.where(weight_BV > drawn_weight_B[:, None], weight_BV, 0), axis=-1)
        token_B = jnp.where(accepted_B, token_B, drawn_B)
        return round + 1, jnp.maximum(floor_B, drawn_weight_B), token_B, accepted_B | (above_B < top_p * total_B)

    start = (jnp.int32(0), jnp.full_like(total_B, -1), jnp.zeros_like(total_B, jnp.int32), total_B < 0)
    return jax.lax.while_loop(again, body, start)[2]


def pick(x_BN: Float[Array, "B N *W"], index_B: Int[Array, " B"]) -> Array:
    """Returns every row's element with its index, of shape (B, *W)."""
    return jax.vmap(lambda x, i: x[i])(x_BN, index_B)


def _uniform(key_B: Key[Array, " B"], round) -> Float[Array, "B 2"]:
    return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, round), (2,)))(key_B)


def _from_weights(uniform_B2: Float[Array, "B 2"], weight_BV: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Inverts the distribution function in two levels, with a uniform number each: a block of tokens, then a token."""
    B, V = weight_BV.shape
    padded_BV = jnp.pad(weight_BV, ((0, 0), (0, -V % _BLOCK)))
    weight_BNW = reshape(padded_BV, (B, padded_BV.shape[1] // _BLOCK, _BLOCK), "batch")
    block_B = _invert(uniform_B2[:, 0], jnp.sum(weight_BNW, axis=-1))
    inner_BW = pick(weight_BNW, block_B)
    return block_B * _BLOCK + _invert(uniform_B2[:, 1], inner_BW)


def _invert(uniform_B: Float[Array, " B"], weight_BN: Float[Array, "B N"]) -> Int[Array, " B"]:
    """Samples by inversion: returns the first index of positive weight at which the running sum passes uniform x total.

    If rounding leaves none, returns the heaviest. An index without weight is never returned.
    """
    sum_BN = jnp.cumsum(weight_BN, axis=-1)
    passed_BN = (sum_BN > (uniform_B * sum_BN[:, -1])[:, None]) & (weight_BN > 0)
    index_B = jnp.where(jnp.any(passed_BN, axis=-1), jnp.argmax(passed_BN, axis=-1), jnp.argmax(weight_BN, axis=-1))
    return index_B.astype(jnp.int32)
