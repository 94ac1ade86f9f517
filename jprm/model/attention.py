"""Attention under the one rule of visibility: query i sees key j if and only if j <= i < until[j]."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jprm.model.config import ModelConfig

_HIDDEN = -1e30  # finite, so that a row of hidden logits has no NaN; exp(-1e30 - max) is exactly 0 in float32


def attention(
    q_BTKGH: Float[Array, "B T K G H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    until_BS: Int[Array, "B S"],
    config: ModelConfig,
) -> Float[Array, "B T K G H"]:
    """Grouped-query attention; G query heads share each of the K key-value heads. Softmax in float32."""
    T = q_BTKGH.shape[1]
    # Heads before tokens and one contiguous matrix a key-value head: the products are then plain matrix products.
    q_BKGTH = q_BTKGH.transpose(0, 2, 3, 1, 4) * q_BTKGH.shape[-1] ** -0.5
    k_BKSH, v_BKSH = k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)
    block = T if config.attention == "reference" else max(config.attention_block, -(-T // 64))
    y_BKGTH = _blocked(q_BKGTH, k_BKSH, v_BKSH, until_BS, block)
    return y_BKGTH.transpose(0, 3, 1, 2, 4)


def _attend(q_BKGTH, k_BKSH, v_BKSH, until_BS, start: int):
    """The rule, written out, for queries `start`, `start + 1`, ... against keys 0, 1, ..."""
    B, K, G, T, H = q_BKGTH.shape
    S = k_BKSH.shape[2]
    q_BKQH = q_BKGTH.reshape(B, K, G * T, H)
    logit_BKQS = jnp.einsum("BKQH,BKSH->BKQS", q_BKQH, k_BKSH, preferred_element_type=jnp.float32)
    query_T = start + jnp.arange(T)
    seen_BTS = (jnp.arange(S) <= query_T[:, None]) & (query_T[:, None] < until_BS[:, None, :])
    logit_BKGTS = jnp.where(seen_BTS[:, None, None], logit_BKQS.reshape(B, K, G, T, S), _HIDDEN)
    weight_BKGTS = jax.nn.softmax(logit_BKGTS, axis=-1).astype(v_BKSH.dtype)
    y_BKQH = jnp.einsum("BKQS,BKSH->BKQH", weight_BKGTS.reshape(B, K, G * T, S), v_BKSH)
    return y_BKQH.reshape(B, K, G, T, H)


def _blocked(q_BKGTH, k_BKSH, v_BKSH, until_BS, block: int):
    """Blocks of queries, each against the keys up to its own end, so that half of the square is never computed.

    A block's logits live only while it is computed, in the backward pass too (each block is rematerialised), so memory
    is O(block x T). Rows longer than 64 blocks take larger blocks, which bounds the size of the compiled program.
    """
    attend = [
        jax.checkpoint(functools.partial(_attend, start=start))(
            q_BKGTH[:, :, :, start : start + block], k_BKSH[:, :, : start + block], v_BKSH[:, :, : start + block],
            until_BS[:, : start + block],
        )
        for start in range(0, q_BKGTH.shape[3], block)
    ]  # fmt: skip
    return jnp.concatenate(attend, axis=3)
