"""Cached decoding: hidden states for new tokens, which see each other and tokens with cached keys and values.

A sampler runs two programs: `prefill` for the prompts, then a loop that adds one token to all samples.

Layers use their kinds' functions; mixers continue from `Kind.cached`. A scan over stacked layers copies each
layer's weights out of its stack. With `layer_groups=1` every layer has its own arrays, which the program reads in
place. Decoding one token at a time is bound by reading weights, so samplers use such a copy
(`jprm.methods.policy.sampler.decoding_copy`).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int8, Key, UInt32

from jprm.model import attention, layers, transformer
from jprm.model.attention import HIDDEN, capped
from jprm.model.config import ModelConfig
from jprm.model.layers import rms_norm
from jprm.model.mesh import reshape, sharding
from jprm.model.transformer import Rotation, block, embed, head_logits, norm_scale, settings_of, walk
from jprm.tokenizer import Tokenizer

Cache = tuple[Mapping[str, tuple[Array, ...]], ...]
"""Cached arrays for every layer group, by mixer, with a leading layer axis if several layers have it.

`layers.KEYS`: keys and values, in rows (B, K, S, H) or slots (N, K, H).
`layers.Recurrent`: its state arrays, per row; if keys are in slots, per tree node.

A group with one layer has no layer axis, so that XLA writes a decoding loop's new keys in place and does not copy the
cache for every token.
"""

QUERIES = 256
"""New tokens per row whose attention is computed together."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Past:
    """Cached tokens in R rows, shared by B new rows; R must divide B, and row b sees row b // (B / R).

    All precede the first new token, so a row's new tokens all see the same ones, except for windows. The token
    at s is at position s.
    """

    cache: Cache  # of R rows
    seen_RS: Bool[Array, "R S"]
    slot_RS: Int[Array, "R S"] | None = None  # where the cache is slots: the slot of every token
    state_R: Int[Array, " R"] | None = None  # and the node whose state each row starts from; -1: none


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def empty_cache(config: ModelConfig, rows: int, size: int) -> Cache:
    """Returns zeros for `size` tokens in each of `rows` rows, split over the current mesh. Raises as `check`."""
    return _zeros(config, (rows, config.kv_heads, size, config.head_dim), ("batch", "kv_heads"), rows)


def empty_slots(config: ModelConfig, size: int, nodes: int = 0) -> Cache:
    """Returns zeros for `size` tokens and `nodes` recurrent states, in slots; only heads are split over devices.

    Raises as `check`.
    """
    return _zeros(config, (size, config.kv_heads, config.head_dim), (None, "kv_heads"), nodes)


def _zeros(config: ModelConfig, shape: tuple[int, ...], axes: tuple[str | None, ...], states: int) -> Cache:
    check(config)

    def zeros(count: int, shape: tuple[int, ...], dtype) -> Array:
        lead, rest = () if count == 1 else (count,), (None,) * (len(shape) - len(axes))
        return jnp.zeros((*lead, *shape), dtype, out_sharding=sharding(*(None for _ in lead), *axes, *rest))

    def of_group(first: int, stop: int) -> dict[str, tuple[Array, ...]]:
        count = collections.Counter(layers.kinds_of(config, layer)[0] for layer in range(first, stop))
        of_kind = {name: state.empty(config, states) for name in count if (state := _recurrent(name))}
        keys = ((shape, config.dtype),) * 2
        return {name: tuple(zeros(n, *array) for array in of_kind.get(name, keys)) for name, n in count.items()}

    return tuple(of_group(*span) for span in layers.spans(config))


def mapped(
    tokens: Callable[..., Array], states: Callable[..., Array] | None, cache: Cache, *others: Cache,
    config: ModelConfig | None = None,
) -> Cache:  # fmt: skip
    """Returns the cache with `tokens` applied to its keys and values, and `states` to its recurrent states.

    Both also take the corresponding arrays of `others`. `states` takes the index of the row axis first, and needs the
    `config`; without it states stay unchanged.
    """

    def of_mixer(name: str, *kept: tuple[Array, ...]) -> tuple[Array, ...]:
        if (state := _recurrent(name)) is None:
            return jax.tree.map(tokens, *kept)
        if states is None or config is None:
            return kept[0]
        axis = kept[0][0].ndim - len(state.empty(config, 0)[0][0])
        return tuple(states(axis, *arrays) for arrays in zip(*kept, strict=True))

    return tuple(
        {name: of_mixer(name, kept, *(other[name] for other in rest)) for name, kept in group.items()}
        for group, *rest in zip(cache, *others, strict=True)
    )


def check(config: ModelConfig) -> None:
    """Raises NotImplementedError, naming the mixers, if a layer cannot continue from a cache.

    Raises ValueError if `config.attention` is no softmax attention.
    """
    mixers = {layers.kinds_of(config, layer)[0] for layer in range(config.layers)}
    if unknown := sorted(name for name in mixers if layers.find(name).cached is None):
        raise NotImplementedError(
            f"model.mixers has {', '.join(unknown)}, which cannot continue from a cache. Set `cached` in its Kind"
        )
    custom = [name for name in mixers if layers.find(name).cached == layers.KEYS and not _is_attention(name)]
    if custom:
        raise NotImplementedError(
            f"model.mixers has {', '.join(sorted(custom))}, with cached=KEYS but an `apply` of its own."
            " Give it an `Attending` (jprm.methods.layers.attending) or a `Recurrent`"
        )
    if any(map(_is_attention, mixers)):
        attention.check_softmax(config.attention, "decoding with a cache")


def _is_attention(mixer: str) -> bool:
    return layers.find(mixer).apply is transformer.ATTENTION.apply


def recurrent(config: ModelConfig) -> bool:
    """Returns whether a mixer of the model has a recurrent state, e.g. deltanet."""
    return any(_recurrent(name) is not None for name in config.mixers)


def _recurrent(mixer: str) -> layers.Recurrent | None:
    """Returns the mixer's `Recurrent`, unless it caches keys and values."""
    cached = layers.find(mixer).cached
    return cached if isinstance(cached, layers.Recurrent) else None


def forward(
    params: Mapping,
    config: ModelConfig,
    tokens_BT: Int[Array, "B T"],
    position_BT: Int[Array, "B T"],
    past: Past | None = None,
    fresh: Cache | None = None,
    start: Int[Array, ""] | int = 0,
    length_B: Int[Array, " B"] | None = None,
    age_B: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T D"], Cache]:
    """Returns the new tokens' hidden states after the final norm, and their rows' updated cache.

    A row's token t sees the past, the row's own cache before `start`, and the new tokens up to itself, within the
    layer's window. A row's positions, from 0, must be consecutive. Padding must follow the tokens, and does not affect
    them. Without `fresh`, raises as `check`.

    Args:
      fresh: B rows' cache; new keys and values are written to it at `start`, where it must have room for all T. Absent
          for rows that begin with the new tokens.
      length_B: real new tokens per row, for recurrent states; by default all.
      age_B: each row's tokens in its own cache, if rows began at different times: `fresh` is then a ring, in which
          they are the last ones before `start`, and there must be one new token.
    """
    decoder = params["decoder"]
    x_BTD, cache = embed(tokens_BT, decoder["embed"], config), []
    plain = dataclasses.replace(config, remat="nothing")  # no backward pass: nothing is gathered or cut for it
    where = NewTokens(*transformer.positions(position_BT, config), position_BT, start, age_B)
    fresh = empty_cache(config, *tokens_BT.shape) if fresh is None else fresh
    length_B = jnp.sum(jnp.ones_like(tokens_BT), axis=1) if length_B is None else length_B

    def body(group: int, carry, layer: Mapping[str, Any], index: int):
        x_BTD, of_group = carry

        def apply(name: str, y_BTD, w):
            settings, at = layer[name]
            if name not in of_group:  # an MLP
                return layers.find(name).apply(y_BTD, w, None, settings, plain)[0], {}
            before = None if past is None else past.cache[group][name]
            own_part = of_group[name] if at is None else jax.tree.map(lambda x: x[at], of_group[name])
            if (recurrent := _recurrent(name)) is None:
                rule = layers.find(name).cached
                attend = _attend_by(rule, w) if isinstance(rule, layers.Attending) else _attend
                before = _read(past, before, at)
                y_BTD, new = _attention(attend, y_BTD, w, settings, before, own_part, where, config)
            else:
                y_BTD, new = recurrent.decode(y_BTD, w, _state(past, before, at, own_part, where), length_B, plain)
            if at is not None:
                put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=at, axis=0)
                new = jax.tree.map(put, of_group[name], tuple(new))
            return y_BTD, {name: tuple(new)}

        x_BTD, new = block(x_BTD, layer, apply, plain, index)
        return (x_BTD, of_group | new), {}

    for group, (first, stop) in enumerate(layers.spans(config)):
        places, settings = layers.places(config, first, stop), settings_of(config, first, stop)
        at = {name: None if len(places[name]) == 1 else jnp.arange(len(places[name])) for name in settings}
        stack = dict(decoder[f"layers_{group}"]) | {name: (settings[name], at[name]) for name in settings}
        parts = [(first, stop, functools.partial(body, group))]
        (x_BTD, of_group), _ = walk((x_BTD, fresh[group]), stack, config, parts)
        cache.append(of_group)
    return rms_norm(x_BTD, norm_scale(decoder["final_norm"], config), config.norm_eps), tuple(cache)


def _state(past: Past | None, of_group, index, fresh: tuple[Array, ...], place: NewTokens) -> tuple[Array, ...]:
    """Returns the recurrent state that each row starts from: its own if it has one, else the past's."""
    rows, before = len(fresh[0]), jax.tree.map(jnp.zeros_like, fresh)
    if past is not None:

        def of_rows(x):
            x = x if index is None else x[index]
            rest = (None,) * (x.ndim - 2)
            if past.state_R is not None:
                taken = x.at[jnp.maximum(past.state_R, 0)].get(out_sharding=sharding("batch", "kv_heads", *rest))
                x = jnp.where(past.state_R.reshape(-1, *[1] * (x.ndim - 1)) >= 0, taken, 0)
            R, *shape = x.shape
            x = jnp.broadcast_to(x[:, None], (R, rows // R, *shape))
            return reshape(x, (rows, *shape), "batch", "kv_heads")

        before = jax.tree.map(of_rows, of_group)

    def own_or_past(first: Array, later: Array) -> Array:
        age = place.start if place.age_B is None else reshape(place.age_B, (rows, *[1] * (first.ndim - 1)), "batch")
        return jnp.where(age == 0, first, later)

    return jax.tree.map(own_or_past, tuple(before), tuple(fresh))


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """The new tokens' rotations and positions, and the first one's index in the row's own cache."""

    rotations: tuple[Rotation, Rotation]
    growth: Array | None
    position_BT: Array
    start: Array | int
    age_B: Array | None = None


def _attention(attend, y_BTD, w: Mapping[str, Array], settings, before, fresh, place: NewTokens, config: ModelConfig):
    """Returns attention's output, and the rows' keys and values. `attend` is `_attend`, or another rule."""
    rotation = transformer.rotation_of(settings, place.rotations, config)
    q_BTKGH, *kv = transformer.project_heads(y_BTD, w, rotation, place.growth, config)
    kv = tuple(x.swapaxes(1, 2) for x in kv)
    kv = jax.tree.map(lambda cache, x: jax.lax.dynamic_update_slice_in_dim(cache, x, place.start, 2), fresh, kv)
    # Blocks of queries, each against the keys up to its own end, limit the logits in memory.
    T = y_BTD.shape[1]
    y_BTKGH = [
        attend(
            q_BTKGH[:, a:b],
            before,
            *(x[:, :, : b + x.shape[2] - T] for x in kv),
            start=place.start + a,
            position_BT=place.position_BT[:, a:b],
            window=settings["window"],
            config=config,
            age_B=place.age_B,
        )
        for a, b in ((i, min(i + QUERIES, T)) for i in range(0, T, QUERIES))
    ]
    return transformer.project_out(jnp.concatenate(y_BTKGH, axis=1), y_BTD, w, config), kv


def _read(past: Past | None, kv, index) -> tuple[tuple[Array, Array, Array], ...]:
    """Returns keys and values (R, K, S, H) for a group's layer `index` (`None`: its only layer), and their mask; ()
    without a past. `kv` are the group's arrays."""
    if past is None:
        return ()
    at = () if index is None else (index,)
    if past.slot_RS is None:
        k, v = (x[at] for x in kv)
    else:
        place = sharding("batch", None, "kv_heads", None)
        k, v = (x.at[(*at, past.slot_RS)].get(out_sharding=place).swapaxes(1, 2) for x in kv)
    return ((k, v, past.seen_RS),)


def _attend(q_BTKGH, before, k_BKSH, v_BKSH, start, position_BT, window, config: ModelConfig, age_B=None):
    """Returns float32 attention over cached and new keys: a partial softmax each, then combined."""
    B, T, _, G, _ = q_BTKGH.shape
    behind_TS, seen_TS = _own_keys(T, k_BKSH.shape[2], start, window, age_B)
    if age_B is None:
        seen = jnp.repeat(seen_TS, G, axis=0)
    else:
        seen = (seen_TS & (behind_TS <= age_B[:, None]))[:, None, None]
    parts = [_part(q_BTKGH, k_BKSH, v_BKSH, seen, config)]
    for k_RKSH, v_RKSH, seen_RS in before:
        seen = seen_RS[:, None, None]
        if window is not None:
            R, S = seen_RS.shape
            position_RQ = reshape(position_BT[..., None] + jnp.zeros(G, jnp.int32), (R, B // R * T * G), "batch")
            seen &= position_RQ[:, None, :, None] - jnp.arange(S) < window
        parts.append(_part(q_BTKGH, k_RKSH, v_RKSH, seen, config))
    y, total, top = zip(*parts, strict=True)
    most_BTKG = functools.reduce(jnp.maximum, top)
    share = [jnp.exp(t - most_BTKG) for t in top]
    y_BTKGH: Any = sum(a[..., None] * y for a, y in zip(share, y, strict=True))
    total_BTKG: Any = sum(a * t for a, t in zip(share, total, strict=True))
    return (y_BTKGH / total_BTKG[..., None]).astype(v_BKSH.dtype)


def _own_keys(T: int, S: int, start, window, age_B) -> tuple[Array, Array]:
    """Returns the distance from T new queries back to the row's own S keys, and the mask by order and window."""
    behind_TS = start + jnp.arange(T)[:, None] - jnp.arange(S)
    if age_B is not None:
        behind_TS %= S  # a ring
    return behind_TS, behind_TS >= 0 if window is None else (behind_TS >= 0) & (behind_TS < window)


def _attend_by(rule: layers.Attending, w: Mapping[str, Array]) -> Callable[..., Array]:
    """Returns an `_attend` by another rule, which takes cached and new keys side by side."""

    def attend_all(q_BTKGH, before, k_BKSH, v_BKSH, start, position_BT, window, config: ModelConfig, age_B=None):
        B, T = q_BTKGH.shape[:2]
        behind_TS, seen_TS = _own_keys(T, k_BKSH.shape[2], start, window, age_B)
        behind_BTS = behind_TS + jnp.zeros_like(position_BT)[..., None]  # split as the rows are
        seen_BTS = seen_TS & (behind_BTS <= (jnp.inf if age_B is None else age_B[:, None, None]))
        k, v, seen, behind = [k_BKSH], [v_BKSH], [seen_BTS], [behind_BTS]
        for k_RKSH, v_RKSH, seen_RS in before:
            R, K, S, H = k_RKSH.shape
            behind_BTS = position_BT[..., None] - jnp.arange(S)
            seen_BTS = reshape(jnp.broadcast_to(seen_RS[:, None], (R, B // R, S)), (B, S), "batch")[:, None]
            seen.insert(0, seen_BTS & (True if window is None else behind_BTS < window) & (behind_BTS > 0))
            behind.insert(0, behind_BTS)
            for kept, x_RKSH in ((k, k_RKSH), (v, v_RKSH)):
                x = jnp.broadcast_to(x_RKSH[:, None], (R, B // R, K, S, H))
                kept.insert(0, reshape(x, (B, K, S, H), "batch", "kv_heads"))
        k_BSKH, v_BSKH = (jnp.concatenate(parts, axis=2).swapaxes(1, 2) for parts in (k, v))
        seen_BTS, behind_BTS = (jnp.concatenate(parts, axis=2) for parts in (seen, behind))
        return rule(q_BTKGH, k_BSKH, v_BSKH, seen_BTS, behind_BTS, w, config)

    return attend_all


def _part(q_BTKGH, k_RKSH, v_RKSH, seen, config: ModelConfig):
    """Returns, for one set of keys: sum of exp(logit - top) x value, sum of exp(logit - top), and top, the largest
    logit. B must be a multiple of R, the rows of keys.
    """
    B, T, K, G, H = q_BTKGH.shape
    R, split = k_RKSH.shape[0], ("batch", "kv_heads")
    q_RXKGH = reshape(q_BTKGH, (R, B // R * T, K, G, H), "batch", None, "kv_heads")
    q_RKQH = reshape(q_RXKGH.swapaxes(1, 2), (R, K, B // R * T * G, H), *split)
    logit_RKQS = jnp.einsum("RKQH,RKSH->RKQS", q_RKQH, k_RKSH, preferred_element_type=jnp.float32)
    logit_RKQS = jnp.where(seen, capped(logit_RKQS * config.query_scale, config.attention_softcap), HIDDEN)
    top_RKQ = jnp.max(logit_RKQS, axis=-1)
    weight_RKQS = jnp.exp(logit_RKQS - top_RKQ[..., None])
    y_RKQH = jnp.einsum("RKQS,RKSH->RKQH", weight_RKQS.astype(v_RKSH.dtype), v_RKSH, preferred_element_type=jnp.float32)

    def back(x_RKQ):
        rest = x_RKQ.shape[3:]
        x_RKXG = reshape(x_RKQ, (R, K, B // R * T, G, *rest), *split)
        return reshape(x_RKXG.swapaxes(1, 2), (B, T, K, G, *rest), "batch", None, "kv_heads")

    return back(y_RKQH), back(jnp.sum(weight_RKQS, axis=-1)), back(top_RKQ)


# ---- The programs of a sampler.

RUNNING, STEP, STOP, FULL = range(4)
"""A sample's state; FULL: it has reached its token limit."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodingState:
    """The decoding loop's state for B samples, some unfinished.

    Tokens, keys and values are in rings: the loop's token number `count` is at `count` modulo the room. A sample owns
    its ring's last `length_B` entries, so that a row may begin a new sample at any time.
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
    cache: Cache
    entropy_BN: Array | None = None  # before every written token, where it is asked for


@functools.partial(jax.jit, static_argnums=1)
def prefill(
    params: Mapping, config: ModelConfig, tokens_US: Int[Array, "U S"], length_U: Int[Array, " U"],
    row_R: Int[Array, " R"],
) -> Past:  # fmt: skip
    """Returns the `Past` with row r for prompt row_R[r], without its last token, with which decoding begins.

    Args:
      tokens_US: U prompts, padded at the end.
      length_U: their lengths, at least 1.
    """
    S = tokens_US.shape[1]
    position_US = jnp.zeros_like(tokens_US) + jnp.arange(S)
    _, cache = forward(params, config, tokens_US, position_US, length_B=length_U - 1)

    def of_rows(x: Array) -> Array:
        return x.at[row_R].get(out_sharding=sharding("batch", "kv_heads", *(None,) * (x.ndim - 2)))

    length_R = length_U.at[row_R].get(out_sharding=sharding("batch"))
    return Past(jax.tree.map(of_rows, cache), jnp.arange(S) < length_R[:, None] - 1)


def next_token(
    params: Mapping, config: ModelConfig, temperature: float, top_p: float, s: DecodingState, past: Past,
    first_B: Int[Array, " B"], key_B: Key[Array, " B"], table_VP: Int8[Array, "V P"], stop_V: Bool[Array, " V"],
    at_step: Bool[Array, ""], limit: Int[Array, ""], entropies: int = 0,
) -> DecodingState:  # fmt: skip
    """Samples one more token per sample; ended samples stay, and `end_B` has the new ends.

    Args:
      temperature: as in `draw`, like `top_p`.
      first_B: position of each prompt's last token.
      key_B: from `keys`.
      s: if it has an array for entropies, they are written too.
      table_VP: `progress_table`, which finds the ends of steps.
      stop_V: whether a token is a stop token.
      at_step: if true, a sample also ends at the end of a step.
      limit: most tokens per sample, with those of `begun_B`.
      entropies: most probable tokens over which entropies are computed, e.g. 20; 0 skips them.
    """
    at = s.count % s.written_BN.shape[1]
    position_B1 = (first_B + s.length_B)[:, None]
    x_B1D, cache = forward(params, config, s.last_B[:, None], position_B1, past, s.cache, at, age_B=s.length_B)
    logit_BV = head_logits(params, config, x_B1D[:, 0])
    key = jax.vmap(jax.random.fold_in)(key_B, s.begun_B + s.length_B)
    token_B = draw(key, logit_BV, temperature, top_p)
    logprob_B, drawn_B = log_probabilities(logit_BV, token_B, temperature)
    entropy_B = top_entropy(logit_BV / (temperature or 1.0), entropies) if entropies else None
    running_B = s.end_B == RUNNING
    progress_B = table_VP.at[token_B, s.progress_B].get(out_sharding=sharding("batch"))
    ends_B = stop_V.at[token_B].get(out_sharding=sharding("batch"))
    length_B = s.length_B + running_B
    end_B = jnp.where(s.begun_B + length_B >= limit, FULL, RUNNING)
    end_B = jnp.where(at_step & (progress_B < 0), STEP, end_B)

    def write(x_BN: Array, new_B: Array) -> Array:
        """Writes a column, except for ended samples, which wait in the ring until they are collected."""
        both = new_B[:, None], jax.lax.dynamic_slice_in_dim(x_BN, at, 1, 1)
        if (place := sharding("batch", None)) is not None:
            both = jax.sharding.reshard(both, (place, place))  # from jax 0.12 on a slice forgets how one row is split
        return jax.lax.dynamic_update_slice_in_dim(x_BN, jnp.where(running_B[:, None], *both), at, 1)

    return DecodingState(
        count=s.count + 1,
        last_B=token_B,
        progress_B=jnp.maximum(progress_B, 0).astype(jnp.int32),
        end_B=jnp.where(running_B, jnp.where(ends_B, STOP, end_B), s.end_B),
        begun_B=s.begun_B,
        written_BN=write(s.written_BN, token_B),
        logprob_BN=write(s.logprob_BN, drawn_B),
        entropy_BN=None if s.entropy_BN is None or entropy_B is None else write(s.entropy_BN, entropy_B),
        length_B=length_B,
        logprob_B=s.logprob_B + jnp.where(running_B, logprob_B, 0),
        cache=cache,
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3), static_argnames="entropies", donate_argnums=4)
def decode_samples(
    params: Mapping, config: ModelConfig, temperature: float, top_p: float, samples: DecodingState, past: Past,
    first_B: Int[Array, " B"], key_B: Key[Array, " B"], table_VP: Int8[Array, "V P"], stop_V: Bool[Array, " V"],
    at_step: Bool[Array, ""], limit: Int[Array, ""], needed_B: Bool[Array, " B"], enough: Int[Array, ""],
    entropies: int = 0,
) -> DecodingState:  # fmt: skip
    """Decodes until all needed samples have ended, or all samples in `enough` rows, or a running sample has no room.

    Arguments as in `next_token`; `needed_B` marks the needed samples; `enough` counts rows that had ended before, too.
    The arrays of `samples` are reused (donated).
    """
    room, R = samples.written_BN.shape[1], len(past.seen_RS)

    def again(s: DecodingState):
        running_B = s.end_B == RUNNING
        ended_R = ~jnp.any(reshape(running_B, (R, len(running_B) // R), "batch"), axis=1)
        full = jnp.any(running_B & (s.length_B >= room))
        return jnp.any(running_B & needed_B) & (jnp.sum(ended_R) < enough) & ~full

    of_all = past, first_B, key_B, table_VP, stop_V, at_step, limit, entropies
    return jax.lax.while_loop(again, lambda s: next_token(params, config, temperature, top_p, s, *of_all), samples)


@functools.partial(jax.jit, static_argnums=1)
def grown(samples: DecodingState, size: int) -> DecodingState:
    """Returns samples with rings of `size` tokens, more than before; tokens keep their order.

    `count` becomes the old room, so the oldest token is at 0.
    """
    room = samples.written_BN.shape[1]

    def pad(x: Array, axis: int) -> Array:
        return padded(jnp.roll(x, -(samples.count % room), axis), axis, size)  # the oldest first

    cache, count = mapped(lambda x: pad(x, 2), None, samples.cache), jnp.full_like(samples.count, room)
    names = ("written_BN", "logprob_BN", "entropy_BN")
    by_token = jax.tree.map(lambda x: pad(x, 1), {name: getattr(samples, name) for name in names})
    return dataclasses.replace(samples, count=count, cache=cache, **by_token)


def padded(x: Array, axis: int, size: int) -> Array:
    """Pads an axis with zeros at the end to `size`, which must not be less."""
    return jnp.pad(x, [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)])


@functools.partial(jax.jit, donate_argnums=0)
def refilled(past: Past, new: Past, new_R: Bool[Array, " R"]) -> Past:
    """Returns `past` with the prompts of `new` in the rows marked by the mask `new_R`; reuses the arrays of `past`."""

    def either(a: Array, b: Array) -> Array:
        return jnp.where(reshape(new_R, (len(new_R), *[1] * (a.ndim - 1)), "batch"), b, a)

    return Past(jax.tree.map(either, past.cache, new.cache), either(past.seen_RS, new.seen_RS))


@functools.partial(jax.jit, static_argnums=1)
def longer(past: Past, size: int) -> Past:
    """Returns the past padded to prompts with `size` tokens; the new places are unseen."""
    cache = mapped(lambda x: padded(x, 2, size), None, past.cache)
    return Past(cache, padded(past.seen_RS, 1, size))


@functools.partial(jax.jit, static_argnums=2)
def of_rows(
    state: tuple[DecodingState, Array, Array, Past], row_Q: Int[Array, " Q"], m: int
) -> tuple[DecodingState, Array, Array, Past]:
    """Returns the rows row_Q, in this order, of a state (samples, first_B, key_B, past).

    A row has m samples, but one prompt in `past`.
    """
    index_B = (row_Q[:, None] * m + jnp.arange(m)).reshape(-1, out_sharding=sharding("batch"))
    samples, first_B, key_B, past = state

    def take(x: Array, index: Array) -> Array:
        rest = ("kv_heads", *(None,) * (x.ndim - 2)) if x.ndim >= 4 else (None,) * (x.ndim - 1)
        return x.at[index].get(out_sharding=sharding("batch", *rest)) if x.ndim else x

    of_samples = jax.tree.map(lambda x: take(x, index_B), (samples, first_B, key_B))
    return *of_samples, jax.tree.map(lambda x: take(x, row_Q), past)


@jax.jit
def keys(number_B: UInt32[Array, " B"], hash_B: UInt32[Array, " B"]) -> Key[Array, " B"]:
    """Returns random keys from sample numbers and text hashes (`jprm.methods.policy.sampler.text_hash`)."""
    return jax.vmap(lambda number, text: jax.random.fold_in(jax.random.key(number), text))(number_B, hash_B)


# ---- Where steps end in sampled tokens: a table that the decoding loop reads, a token at a time.


def step_text(text: str) -> str:
    """Strips line breaks around a step and white space after it, but not its indentation."""
    return text.lstrip("\r\n").rstrip()


def progress_table(tokenizer: Tokenizer, delimiter: str, vocab_size: int) -> Int8[np.ndarray, "V P"]:
    """Returns the progress after a token, by (token, progress before it); -1 if the token ends a step.

    Progress counts the delimiter characters at the text's end, plus the delimiter's length if anything but
    white space precedes them: a blank step does not count. It is 0 at first, and below P, twice the delimiter's length.
    A delimiter may end inside a token. Ids from the tokenizer's size to `vocab_size` count as empty text.
    """
    size, letters = len(delimiter), set(delimiter)
    table = np.zeros((vocab_size, 2 * size), np.int8)
    for token in range(vocab_size):
        text = tokenizer.decode([token]) if token < tokenizer.vocab_size else ""
        if text and letters.isdisjoint(text):  # most are
            table[token] = size
            if text.isspace():
                table[token, :size] = 0
            continue
        for progress in range(2 * size):
            table[token, progress] = _advance(text, progress % size, progress >= size, delimiter)
    return table


def _advance(text: str, matched: int, written: bool, delimiter: str) -> int:
    for letter in text:
        written = written or not letter.isspace()
        tail = delimiter[:matched] + letter
        matched = next(k for k in range(len(tail), -1, -1) if tail.endswith(delimiter[:k]))
        if matched == len(delimiter):
            if written:
                return -1
            matched = 0
    return matched + len(delimiter) * written


# ---- One token from logits, without sorting the vocabulary.

_BLOCK = 128
"""Vocabulary tokens whose weights are summed together."""


def draw(key_B: Key[Array, " B"], logit_BV: Float[Array, "B V"], temperature: float, top_p: float) -> Int[Array, " B"]:
    """Samples a token per row from softmax(logit / temperature), restricted to the fewest tokens with mass >= `top_p`.

    Returns int32 token ids. Temperature 0 takes the most probable token. Tokens as probable as the nucleus' last one
    belong to it.

    The nucleus is {v: mass of the tokens more probable than v < top_p}. Every round samples from all remaining tokens.
    A token outside the nucleus shows that no equally or less probable token is inside, so the next round samples from
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
    """Returns each row's entropy, in nats, of the softmax over its k largest logits, or all if there are fewer."""
    log_BK = jax.nn.log_softmax(jax.lax.top_k(logit_BV, min(k, logit_BV.shape[1]))[0])
    return -jnp.sum(jnp.exp(log_BK) * log_BK, axis=-1)


def pick(x_BN: Float[Array, "B N *W"], index_B: Int[Array, " B"]) -> Array:
    """Returns x_BN[b, index_B[b]] for every row b."""
    return jax.vmap(lambda x, i: x[i])(x_BN, index_B)


def _uniform(key_B: Key[Array, " B"], round) -> Float[Array, "B 2"]:
    return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, round), (2,)))(key_B)


def _in_blocks(x_BV: Float[Array, "B V"], filler: float) -> Float[Array, "B N W"]:
    """Splits the vocabulary axis into blocks; `filler` completes the last one."""
    B, V = x_BV.shape
    padded_BV = jnp.pad(x_BV, ((0, 0), (0, -V % _BLOCK)), constant_values=filler)
    return reshape(padded_BV, (B, padded_BV.shape[1] // _BLOCK, _BLOCK), "batch")


def _weights(logit_BNW: Float[Array, "B N W"], top_B: Float[Array, " B"], temperature: float) -> Float[Array, "B N"]:
    """Returns the sum of exp((logit - top) / temperature) per block."""
    return jnp.sum(jnp.exp((logit_BNW - top_B[:, None, None]) / temperature), axis=-1)


def _from_weights(uniform_B2: Float[Array, "B 2"], weight_BV: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Inverts the distribution function in two levels, with a uniform number each: a block, then a token."""
    weight_BNW = _in_blocks(weight_BV, 0)
    block_B = _invert(uniform_B2[:, 0], jnp.sum(weight_BNW, axis=-1))
    return block_B * _BLOCK + _invert(uniform_B2[:, 1], pick(weight_BNW, block_B))


def _invert(uniform_B: Float[Array, " B"], weight_BN: Float[Array, "B N"]) -> Int[Array, " B"]:
    """Samples by inversion: returns the first index with weight at which the running sum passes uniform x total.

    If rounding leaves no such index, returns the heaviest. An index without weight is never returned.
    """
    sum_BN = jnp.cumsum(weight_BN, axis=-1)
    passed_BN = (sum_BN > (uniform_B * sum_BN[:, -1])[:, None]) & (weight_BN > 0)
    index_B = jnp.where(jnp.any(passed_BN, axis=-1), jnp.argmax(passed_BN, axis=-1), jnp.argmax(weight_BN, axis=-1))
    return index_B.astype(jnp.int32)
