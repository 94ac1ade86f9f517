"""Attention under the one rule of visibility: query i sees key j if and only if j <= i < until[j].

Three exact ways, chosen by `ModelConfig.attention`:

`reference`: the rule written out, memory O(T^2). What the others are tested against.
`blocked`: blocks of queries, each against all keys up to its own end. Memory O(block x T); half of the square skipped.
`paths`: blocks of queries, each against its own keys and the path that leads to its first token, gathered
    (`jprm.model.paths`). Its work follows the depth of the trees, not the length of the row: the fastest on a CPU.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jprm.model.config import ModelConfig
from jprm.model.paths import HIDDEN, Paths, find_paths, path_attention
from jprm.model.sharding import reshape

Plan = Int[Array, "B T"] | Paths
"""What attention needs to know of the rows, worked out once for all layers: `until`, or the paths of its blocks."""


def plan(until_BT: Int[Array, "B T"], config: ModelConfig) -> Plan:
    return find_paths(until_BT, config.attention_block) if config.attention == "paths" else until_BT


def attention(
    q_BTKGH: Float[Array, "B T K G H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    plan: Plan,
    config: ModelConfig,
) -> Float[Array, "B T K G H"]:
    """Grouped-query attention: G query heads share each of the K key-value heads. Softmax in float32."""
    if config.attention == "paths":
        return path_attention(q_BTKGH, k_BSKH, v_BSKH, plan, config.attention_block)
    # Heads before tokens and one contiguous matrix a key-value head: the products are then plain matrix products.
    q_BKGTH = q_BTKGH.transpose(0, 2, 3, 1, 4) * q_BTKGH.shape[-1] ** -0.5
    k_BKSH, v_BKSH = k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)
    T = q_BTKGH.shape[1]
    # At most 64 blocks, which bounds the size of the compiled program.
    block = T if config.attention == "reference" else max(config.attention_block, -(-T // 64))
    return _blocked(q_BKGTH, k_BKSH, v_BKSH, plan, block).transpose(0, 3, 1, 2, 4)


def _attend(q_BKGTH, k_BKSH, v_BKSH, seen_BTS: Bool[Array, "B T S"]):
    B, K, G, T, H = q_BKGTH.shape
    S, split = k_BKSH.shape[2], ("batch", "kv_heads")
    q_BKQH = reshape(q_BKGTH, (B, K, G * T, H), *split)
    logit_BKQS = jnp.einsum("BKQH,BKSH->BKQS", q_BKQH, k_BKSH, preferred_element_type=jnp.float32)
    logit_BKGTS = jnp.where(seen_BTS[:, None, None], reshape(logit_BKQS, (B, K, G, T, S), *split), HIDDEN)
    weight_BKGTS = jax.nn.softmax(logit_BKGTS, axis=-1).astype(v_BKSH.dtype)
    y_BKQH = jnp.einsum("BKQS,BKSH->BKQH", reshape(weight_BKGTS, (B, K, G * T, S), *split), v_BKSH)
    return reshape(y_BKQH, (B, K, G, T, H), *split)


def _blocked(q_BKGTH, k_BKSH, v_BKSH, until_BS, block: int):
    """A block's logits live only while it is computed, in the backward pass too: each block is rematerialised."""

    @functools.partial(jax.checkpoint, static_argnums=4)
    def attend(q_BKGTH, k_BKSH, v_BKSH, until_BS, start: int):
        query_T, key_S = start + jnp.arange(q_BKGTH.shape[3]), jnp.arange(k_BKSH.shape[2])
        seen_BTS = (key_S <= query_T[:, None]) & (query_T[:, None] < until_BS[:, None, :])
        return _attend(q_BKGTH, k_BKSH, v_BKSH, seen_BTS)

    ends = [(start, start + block) for start in range(0, q_BKGTH.shape[3], block)]
    return jnp.concatenate(
        [attend(q_BKGTH[:, :, :, a:b], k_BKSH[:, :, :b], v_BKSH[:, :, :b], until_BS[:, :b], a) for a, b in ends], axis=3
    )
