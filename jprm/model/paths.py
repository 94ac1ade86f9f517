"""Attention of blocks of queries over their own path: exact, forward and backward, in time that follows tree depth.

Rows lie depth first and `until` closes subtrees, so of the keys before a block its queries see only what the block's
first query sees: the path to it. (A key before the block that is closed at its first query is closed for all of them.)
Each block gathers that path, attends to it and to itself, and scatters the gradients back. Sizes are static under jit,
so the path is padded to the least of a few sizes, chosen while running.

Written for CPUs, where small exact work beats large regular work. Nothing here keeps a T x T array.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jprm.model.config import ModelConfig
from jprm.model.sharding import reshape

HIDDEN = -1e30  # finite, so that a row of hidden logits has no NaN; exp(-1e30 - max) is exactly 0 in float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Paths:
    """The path of every block of queries, worked out once for all layers."""

    until: Int[Array, "B T"]
    position: Int[Array, "B T"]
    index: Int[Array, "B N T"]  # keys before the block that its first query sees, in order; behind them, T
    size: Int[Array, " N"]  # how many there are, in the row that has most
    window: Int[Array, ""] | None = None  # of the layer, in positions; None: queries see the whole path


def capped(logit, softcap: float):
    """Soft-capped logits, softcap x tanh(logit / softcap), where it is not 0 (Gemma 2; Bello et al. 2016)."""
    return softcap * jnp.tanh(logit / softcap) if softcap else logit


def find_paths(until_BT: Int[Array, "B T"], position_BT: Int[Array, "B T"], block: int) -> Paths:
    T = until_BT.shape[1]
    if T % block:
        raise ValueError(f"attention='paths' takes rows of a multiple of {block} tokens (attention_block), not {T}")
    start_N = jnp.arange(0, T, block)
    seen_BNT = (jnp.arange(T) < start_N[:, None]) & (until_BT[:, None, :] > start_N[:, None])
    index_BNT = jnp.sort(jnp.where(seen_BNT, jnp.arange(T), T), axis=-1)
    return Paths(until_BT, position_BT, index_BNT, jnp.max(jnp.sum(seen_BNT, axis=-1), axis=0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def path_attention(
    q_BTKGH: Float[Array, "B T K G H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    paths: Paths,
    config: ModelConfig,
) -> Float[Array, "B T K G H"]:
    """Grouped-query attention under `until`; T must be a multiple of `attention_block`. Softmax in float32."""
    return _forward(q_BTKGH, k_BTKH, v_BTKH, paths, config)[0]


def _forward(q_BTKGH, k_BTKH, v_BTKH, paths: Paths, config: ModelConfig):
    T, G, block = q_BTKGH.shape[1], q_BTKGH.shape[3], config.attention_block

    def attend(size: int, n, q_BQKGH):
        index_BS = _index(paths, n, size, block)
        k_BKSH, v_BKSH = _gather(k_BTKH, index_BS), _gather(v_BTKH, index_BS)
        logit_BKXS = _logits(_heads_first(q_BQKGH), k_BKSH, index_BS, paths, n, config)
        top_BKX = jnp.max(logit_BKXS, axis=-1)
        weight_BKXS = jnp.exp(logit_BKXS - top_BKX[..., None])
        total_BKX = jnp.sum(weight_BKXS, axis=-1)
        y_BKXH = jnp.einsum("BKXS,BKSH->BKXH", weight_BKXS.astype(v_BKSH.dtype), v_BKSH) / total_BKX[..., None]
        return _tokens_first(y_BKXH.astype(v_BKSH.dtype), G), top_BKX + jnp.log(total_BKX)

    def body(_, inputs):
        n, q_BQKGH = inputs
        return None, _switch(attend, paths, T, block, n, q_BQKGH)

    q_NBQKGH = _blocks(q_BTKGH, block)
    _, (y_NBQKGH, log_NBKX) = jax.lax.scan(body, None, (jnp.arange(T // block), q_NBQKGH))
    y_BTKGH = _rows(y_NBQKGH)
    return y_BTKGH, (q_BTKGH, k_BTKH, v_BTKH, paths, y_BTKGH, log_NBKX)


def _backward(config: ModelConfig, saved, dy_BTKGH):
    """With p the weights: dv = p' dy, ds = p (dy v' - sum(dy y)), dq = ds k, dk = ds' q (Dao et al. 2022)."""
    q_BTKGH, k_BTKH, v_BTKH, paths, y_BTKGH, log_NBKX = saved
    T, G, block, scale = q_BTKGH.shape[1], q_BTKGH.shape[3], config.attention_block, config.query_scale
    inner_BTKG = jnp.sum(dy_BTKGH.astype(jnp.float32) * y_BTKGH.astype(jnp.float32), axis=-1)

    def attend(size: int, n, q_BQKGH, dy_BQKGH, inner_BQKG, log_BKX, dk_BTKH, dv_BTKH):
        index_BS = _index(paths, n, size, block)
        k_BKSH, v_BKSH = _gather(k_BTKH, index_BS), _gather(v_BTKH, index_BS)
        q_BKXH, dy_BKXH = _heads_first(q_BQKGH), _heads_first(dy_BQKGH)
        logit_BKXS = _logits(q_BKXH, k_BKSH, index_BS, paths, n, config)
        weight_BKXS = jnp.exp(logit_BKXS - log_BKX[..., None])
        dweight_BKXS = jnp.einsum("BKXH,BKSH->BKXS", dy_BKXH, v_BKSH, preferred_element_type=jnp.float32)
        inner_BKX = _heads_first(inner_BQKG[..., None])[..., 0]
        dlogit_BKXS = weight_BKXS * (dweight_BKXS - inner_BKX[..., None])
        if cap := config.attention_softcap:  # tanh' = 1 - tanh^2; hidden logits are no values of it
            dlogit_BKXS *= 1 - jnp.square(jnp.where(logit_BKXS > HIDDEN, logit_BKXS, 0) / cap)
        dlogit_BKXS = dlogit_BKXS.astype(k_BKSH.dtype)
        dq_BKXH = jnp.einsum("BKXS,BKSH->BKXH", dlogit_BKXS, k_BKSH) * scale
        dk_BKSH = jnp.einsum("BKXS,BKXH->BKSH", dlogit_BKXS, q_BKXH) * scale
        dv_BKSH = jnp.einsum("BKXS,BKXH->BKSH", weight_BKXS.astype(dy_BKXH.dtype), dy_BKXH)
        dk_BTKH, dv_BTKH = _scatter(dk_BTKH, index_BS, dk_BKSH), _scatter(dv_BTKH, index_BS, dv_BKSH)
        return _tokens_first(dq_BKXH, G), dk_BTKH, dv_BTKH

    def body(carry, inputs):
        dq_BQKGH, *carry = _switch(attend, paths, T, block, *inputs, *carry)
        return tuple(carry), dq_BQKGH

    blocks = [_blocks(x, block) for x in (q_BTKGH, dy_BTKGH, inner_BTKG)]
    inputs = (jnp.arange(T // block), *blocks, log_NBKX)
    zero = jnp.zeros_like(k_BTKH, jnp.float32)  # a key's gradient is a sum over many blocks
    (dk_BTKH, dv_BTKH), dq_NBQKGH = jax.lax.scan(body, (zero, zero), inputs)
    return _rows(dq_NBQKGH), dk_BTKH.astype(k_BTKH.dtype), dv_BTKH.astype(v_BTKH.dtype), None


path_attention.defvjp(_forward, _backward)


def _switch(attend, paths: Paths, T: int, block: int, n, *operands):
    """Runs `attend` with the least size that holds the path of block n."""
    sizes = _sizes(block, T - block)
    branches = [functools.partial(attend, size) for size in sizes]
    return jax.lax.switch(jnp.searchsorted(jnp.array(sizes), paths.size[n]), branches, n, *operands)


def _sizes(block: int, largest: int) -> list[int]:
    """0, 1, 2, 3, 4, 6, 8, 12, ... blocks up to `largest`: at most a third is padding, few branches to compile."""
    sizes, size = [0], block
    while size < largest:
        sizes.append(size)
        size += max(block, (1 << (size.bit_length() - 1)) // 2)
    return [*sizes, largest] if largest else sizes


def _index(paths: Paths, n, size: int, block: int) -> Int[Array, "B S"]:
    """Indices of the keys of block n: its path, padded with T, then the block itself."""
    path_BP = paths.index[:, n, :size]
    own_BQ = jnp.zeros_like(paths.until[:, :block]) + n * block + jnp.arange(block)
    return jnp.concatenate([path_BP, own_BQ], axis=1)


def _gather(x_BTKH, index_BS) -> Float[Array, "B K S H"]:
    return jax.vmap(lambda x, index: x.at[index].get(mode="clip"))(x_BTKH, index_BS).swapaxes(1, 2)


def _scatter(x_BTKH, index_BS, update_BKSH):
    """Adds updates to their keys; indices out of range, which pad the path, are dropped."""
    update_BSKH = update_BKSH.swapaxes(1, 2).astype(x_BTKH.dtype)
    return jax.vmap(lambda x, index, update: x.at[index].add(update, mode="drop"))(x_BTKH, index_BS, update_BSKH)


def _logits(q_BKXH, k_BKSH, index_BS, paths: Paths, n, config: ModelConfig):
    """Logits in float32 by the rule key <= query < until[key] and the window; X is (G, block) flattened."""

    def of_keys(x_BT):
        return jax.vmap(lambda x, index: x.at[index].get(mode="fill", fill_value=0))(x_BT, index_BS)

    block = config.attention_block
    logit_BKXS = jnp.einsum("BKXH,BKSH->BKXS", q_BKXH, k_BKSH, preferred_element_type=jnp.float32)
    logit_BKXS = capped(logit_BKXS * config.query_scale, config.attention_softcap)
    query_X = n * block + jnp.tile(jnp.arange(block), config.group)
    seen_BXS = (index_BS[:, None] <= query_X[:, None]) & (query_X[:, None] < of_keys(paths.until)[:, None])
    if paths.window is not None:
        position_BS = of_keys(paths.position)
        query_BX = jnp.tile(position_BS[:, -block:], (1, config.group))  # the block itself comes last
        seen_BXS &= query_BX[:, :, None] - position_BS[:, None] < paths.window
    return jnp.where(seen_BXS[:, None], logit_BKXS, HIDDEN)


def _heads_first(x_BQKGH) -> Float[Array, "B K X H"]:
    B, Q, K, G, H = x_BQKGH.shape
    return reshape(x_BQKGH.transpose(0, 2, 3, 1, 4), (B, K, G * Q, H), "batch", "kv_heads")


def _tokens_first(x_BKXH, G: int) -> Float[Array, "B Q K G H"]:
    B, K, X, H = x_BKXH.shape
    return reshape(x_BKXH, (B, K, G, X // G, H), "batch", "kv_heads").transpose(0, 3, 1, 2, 4)


def _blocks(x_BTK, block: int):
    """(B, T, K, ...) to (N, B, block, K, ...)"""
    B, T, *rest = x_BTK.shape
    return jnp.moveaxis(reshape(x_BTK, (B, T // block, block, *rest), "batch", None, None, "kv_heads"), 1, 0)


def _rows(x_NBQK):
    """The inverse of `_blocks`."""
    N, B, Q, *rest = x_NBQK.shape
    return reshape(jnp.moveaxis(x_NBQK, 0, 1), (B, N * Q, *rest), "batch", None, "kv_heads")
