"""Attention by XLA: blocks of queries, each against all keys up to its own end.

Memory is O(block x T), and half of the square is skipped. Where the mesh splits the tokens of a row over `context`,
every device keeps its queries and receives the keys and values of its rows and heads. Parts are equal in queries, not
in work: of a row that one chain fills, the last device computes most.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jprm.model.attention import HIDDEN, Implementation, capped
from jprm.model.config import ModelConfig
from jprm.model.mesh import parts, reshape, spec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unsplit:
    """The rows with all their tokens on every device."""

    until: Int[Array, "B S"]
    position: Int[Array, "B S"]
    window: Int[Array, ""] | None = None  # of the layer, in positions; None: queries see the whole path


def plan(until_BT: Int[Array, "B T"], position_BT: Int[Array, "B T"], config: ModelConfig) -> Unsplit:
    return Unsplit(*unsplit(until_BT, position_BT))


def unsplit(*arrays: Array) -> list[Array]:
    """Returns arrays (B, T) with all tokens of a row on every device."""
    return [jax.sharding.reshard(x, spec("batch", None)) if parts(x) > 1 else x for x in arrays]


def attend(
    q_BTKGH: Float[Array, "B T K G H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    rows: Unsplit,
    config: ModelConfig,
    window: Int[Array, ""] | None = None,
    at_once: bool = False,
) -> Float[Array, "B T K G H"]:
    """Attends in blocks of `attention_block` queries, or with all queries `at_once`."""
    rows = dataclasses.replace(rows, window=window)
    # Heads before tokens and one contiguous matrix a key-value head: the products are then plain matrix products.
    q_BKGTH = q_BTKGH.transpose(0, 2, 3, 1, 4) * config.query_scale
    k_BKSH, v_BKSH = k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)
    blocks = functools.partial(_blocks, config=config, at_once=at_once)
    if parts(q_BTKGH) > 1:
        blocks = functools.partial(_split, blocks)
    return blocks(q_BKGTH, k_BKSH, v_BKSH, rows).transpose(0, 3, 1, 2, 4)


def _split(blocks, q_BKGTH, k_BKTH, v_BKTH, rows: Unsplit):
    """Attends where tokens are split: each device gathers all keys and values of its rows for its own queries."""

    def own(q_BKGTH, k_BKTH, v_BKTH, rows: Unsplit):
        k_BKSH, v_BKSH = (jax.lax.all_gather(x, "context", axis=2, tiled=True) for x in (k_BKTH, v_BKTH))
        return blocks(q_BKGTH, k_BKSH, v_BKSH, rows, first=jax.lax.axis_index("context") * q_BKGTH.shape[3])

    queries, keys = spec("batch", "kv_heads", None, "tokens"), spec("batch", "kv_heads", "tokens")
    places = queries, keys, keys, jax.tree.map(lambda x: spec("batch") if x.ndim else spec(), rows)
    arguments = jax.tree.map(jax.sharding.reshard, (q_BKGTH, k_BKTH, v_BKTH, rows), places)
    return jax.shard_map(own, in_specs=places, out_specs=queries)(*arguments)


def _blocks(q_BKGTH, k_BKSH, v_BKSH, rows: Unsplit, config: ModelConfig, at_once: bool, first=0):
    """Attends a block of queries at a time, and rematerialises it in the backward pass: only its logits are in memory.

    `first` is the index, in its row, of the first query.
    """
    T, S = q_BKGTH.shape[3], k_BKSH.shape[2]
    # At most 64 blocks, which bounds the size of the compiled program.
    block = T if at_once else max(config.attention_block, -(-T // 64))

    @functools.partial(jax.checkpoint, static_argnums=4)
    def of_block(q_BKGTH, k_BKSH, v_BKSH, rows: Unsplit, start: int, first):
        T, S = q_BKGTH.shape[3], k_BKSH.shape[2]
        query_T, key_S = first + start + jnp.arange(T), jnp.arange(S)
        seen_BTS = (key_S <= query_T[:, None]) & (query_T[:, None] < rows.until[:, None, :S])
        if rows.window is not None:
            position_BT = jax.lax.dynamic_slice_in_dim(rows.position, first + start, T, axis=1)
            seen_BTS &= position_BT[:, :, None] - rows.position[:, None, :S] < rows.window
        return _softmax(q_BKGTH, k_BKSH, v_BKSH, seen_BTS, config.attention_softcap)

    found = []
    for a in range(0, T, block):
        b = min(a + block, T)
        end = b if S == T else S  # of keys: the device with the row's last queries needs them all
        found.append(of_block(q_BKGTH[:, :, :, a:b], k_BKSH[:, :, :end], v_BKSH[:, :, :end], rows, a, first))
    return jnp.concatenate(found, axis=3)


def _softmax(q_BKGTH, k_BKSH, v_BKSH, seen_BTS: Bool[Array, "B T S"], softcap: float):
    B, K, G, T, H = q_BKGTH.shape
    S, split = k_BKSH.shape[2], ("batch", "kv_heads")
    q_BKQH = reshape(q_BKGTH, (B, K, G * T, H), *split)
    logit_BKQS = capped(jnp.einsum("BKQH,BKSH->BKQS", q_BKQH, k_BKSH, preferred_element_type=jnp.float32), softcap)
    logit_BKGTS = jnp.where(seen_BTS[:, None, None], reshape(logit_BKQS, (B, K, G, T, S), *split), HIDDEN)
    weight_BKGTS = jax.nn.softmax(logit_BKGTS, axis=-1).astype(v_BKSH.dtype)
    y_BKQH = jnp.einsum("BKQS,BKSH->BKQH", reshape(weight_BKGTS, (B, K, G * T, S), *split), v_BKSH)
    return reshape(y_BKQH, (B, K, G, T, H), *split)


BLOCKED = Implementation(plan, attend)

REFERENCE = Implementation(plan, functools.partial(attend, at_once=True))
"""The rule written out, with memory O(T^2): what the other implementations are tested against."""
