"""Attention under the one rule of visibility: query i sees key j if and only if j <= i < until[j].

In a layer with a sliding window the key must also be less than so many positions before the query. Positions are depths
in the tree, so a window reaches up the query's own path, as it does in that chain alone.

Four exact ways, chosen by `ModelConfig.attention`:

`reference`: the rule written out, memory O(T^2). What the others are tested against.
`blocked`: blocks of queries, each against all keys up to its own end. Memory O(block x T); half of the square skipped.
`paths`: blocks of queries, each against its own keys and the path that leads to its first token, gathered
    (`jprm.model.paths`). Its work follows the depth of the trees, not the length of the row: the fastest on a CPU.
`kernel`: Pallas kernels for TPUs over the pairs of blocks that hold a visible pair (`jprm.model.kernels`). Memory O(T).
    On a CPU the same kernels are interpreted, slowly: for tests. They are chosen by the platform that the program is
    compiled for, so that a machine without TPUs compiles it for TPUs.

A GPU has no kernel of ours: it takes `blocked`, and `kernel` is refused there.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jprm.model.config import ModelConfig
from jprm.model.kernels.blocks import Blocks, block_sizes, find_blocks
from jprm.model.kernels.interval import interval_attention
from jprm.model.paths import HIDDEN, Paths, capped, find_paths, path_attention
from jprm.model.sharding import reshape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Whole:
    """The rows as they are."""

    until: Int[Array, "B T"]
    position: Int[Array, "B T"]


Plan = Whole | Paths | Blocks
"""What attention needs to know of the rows, worked out once for all layers."""


def plan(until_BT: Int[Array, "B T"], position_BT: Int[Array, "B T"], config: ModelConfig) -> Plan:
    if config.attention == "paths":
        return find_paths(until_BT, position_BT, config.attention_block)
    if config.attention == "kernel":
        if jax.default_backend() == "gpu":
            raise ValueError("attention='kernel' is for TPUs; a GPU takes attention='blocked'")
        itemsize = jnp.dtype(config.dtype).itemsize
        sizes = block_sizes(until_BT.shape[1], config.head_dim, config.group, itemsize)
        return find_blocks(until_BT, position_BT, sizes)
    return Whole(until_BT, position_BT)


def attention(
    q_BTKGH: Float[Array, "B T K G H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    plan: Plan,
    config: ModelConfig,
    window: Int[Array, ""] | None = None,
) -> Float[Array, "B T K G H"]:
    """Grouped-query attention: G query heads share each of the K key-value heads. Softmax in float32.

    `window` is the layer's, in positions; None lets queries see the whole path.
    """
    if config.attention in ("paths", "kernel"):
        ours = path_attention if config.attention == "paths" else interval_attention
        return ours(q_BTKGH, k_BSKH, v_BSKH, dataclasses.replace(plan, window=window), config)
    # Heads before tokens and one contiguous matrix a key-value head: the products are then plain matrix products.
    q_BKGTH = q_BTKGH.transpose(0, 2, 3, 1, 4) * config.query_scale
    k_BKSH, v_BKSH = k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)
    T = q_BTKGH.shape[1]
    # At most 64 blocks, which bounds the size of the compiled program.
    block = T if config.attention == "reference" else max(config.attention_block, -(-T // 64))
    return _blocked(q_BKGTH, k_BKSH, v_BKSH, plan, window, block, config.attention_softcap).transpose(0, 3, 1, 2, 4)


def _attend(q_BKGTH, k_BKSH, v_BKSH, seen_BTS: Bool[Array, "B T S"], softcap: float):
    B, K, G, T, H = q_BKGTH.shape
    S, split = k_BKSH.shape[2], ("batch", "kv_heads")
    q_BKQH = reshape(q_BKGTH, (B, K, G * T, H), *split)
    logit_BKQS = capped(jnp.einsum("BKQH,BKSH->BKQS", q_BKQH, k_BKSH, preferred_element_type=jnp.float32), softcap)
    logit_BKGTS = jnp.where(seen_BTS[:, None, None], reshape(logit_BKQS, (B, K, G, T, S), *split), HIDDEN)
    weight_BKGTS = jax.nn.softmax(logit_BKGTS, axis=-1).astype(v_BKSH.dtype)
    y_BKQH = jnp.einsum("BKQS,BKSH->BKQH", reshape(weight_BKGTS, (B, K, G * T, S), *split), v_BKSH)
    return reshape(y_BKQH, (B, K, G, T, H), *split)


def _blocked(q_BKGTH, k_BKSH, v_BKSH, rows: Whole, window, block: int, softcap: float):
    """A block's logits live only while it is computed, in the backward pass too: each block is rematerialised."""

    @functools.partial(jax.checkpoint, static_argnums=6)
    def attend(q_BKGTH, k_BKSH, v_BKSH, until_BS, position_BS, window, start: int):
        query_T, key_S = start + jnp.arange(q_BKGTH.shape[3]), jnp.arange(k_BKSH.shape[2])
        seen_BTS = (key_S <= query_T[:, None]) & (query_T[:, None] < until_BS[:, None, :])
        if window is not None:
            seen_BTS &= position_BS[:, start:, None] - position_BS[:, None] < window
        return _attend(q_BKGTH, k_BKSH, v_BKSH, seen_BTS, softcap)

    T = q_BKGTH.shape[3]
    ends = [(start, min(start + block, T)) for start in range(0, T, block)]
    return jnp.concatenate(
        [
            attend(q_BKGTH[:, :, :, a:b], k_BKSH[:, :, :b], v_BKSH[:, :, :b], rows.until[:, :b], rows.position[:, :b],
                   window, a)
            for a, b in ends
        ],
        axis=3,
    )  # fmt: skip
