"""Attention by query blocks over their own path: exact, forward and backward, in time that follows tree depth.

Rows are in depth-first order and `until` closes subtrees. So a block's queries see only the earlier keys visible to its
first query: the path to it. (A key that is closed at the first query is closed for all.) Each
block attends to itself and then, a chunk at a time, to that path: it gathers the keys, and scatters their gradients
back. Partial softmaxes are combined (Milakov and Gimelshein 2018). Chunks are counted at run time: under
jit sizes are static, but loop counts are not.

This is for CPUs, where small exact work beats large regular work. No T x T array is stored.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jprm.methods.kernels import saved
from jprm.model.attention import HIDDEN, Implementation, capped, unsplit_only, with_backward
from jprm.model.config import ModelConfig
from jprm.model.mesh import reshape

CHUNK = 256
"""Path keys per chunk. A path's last chunk is half padding on average."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Paths:
    """Every query block's path, computed once for all layers."""

    until: Int[Array, "B T"]
    position: Int[Array, "B T"]
    index: Int[Array, "B N S"]  # keys before the block that its first query sees, in order; then T or more
    chunks: Int[Array, " N"]  # needed for them, in the row that has most
    window: Int[Array, ""] | None = None  # of the layer, in positions; None: queries see the whole path


def plan(until_BT: Int[Array, "B T"], position_BT: Int[Array, "B T"], config: ModelConfig) -> Paths:
    """Finds the paths. Raises ValueError if `attention_block` does not divide the row length."""
    T, block = until_BT.shape[1], config.attention_block
    if T % block:
        raise ValueError(f"attention='paths' takes rows of a multiple of {block} tokens (attention_block), not {T}")
    start_N, key_S = jnp.arange(0, T, block), jnp.arange(-(-T // CHUNK) * CHUNK)
    until_BS = jnp.pad(until_BT, ((0, 0), (0, len(key_S) - T)))
    seen_BNS = (key_S < start_N[:, None]) & (until_BS[:, None, :] > start_N[:, None])
    index_BNS = jnp.sort(jnp.where(seen_BNS, key_S, T + key_S), axis=-1)
    chunks_N = -(-jnp.max(jnp.sum(seen_BNS, axis=-1), axis=0) // CHUNK)
    return Paths(until_BT, position_BT, index_BNS, chunks_N)


def _forward(q_BTKGH, k_BTKH, v_BTKH, paths: Paths, config: ModelConfig):
    T, G, block = q_BTKGH.shape[1], q_BTKGH.shape[3], config.attention_block

    def body(_, inputs):
        n, q_BQKGH = inputs
        q_BKXH = _heads_first(q_BQKGH)

        def attend(index_BS):
            k_BKSH, v_BKSH = _gather(k_BTKH, index_BS), _gather(v_BTKH, index_BS)
            logit_BKXS = _logits(q_BKXH, k_BKSH, index_BS, paths, n, config)
            top_BKX = jnp.max(logit_BKXS, axis=-1)
            weight_BKXS = jnp.exp(logit_BKXS - top_BKX[..., None])
            y_BKXH = _product("BKXS,BKSH->BKXH", weight_BKXS.astype(v_BKSH.dtype), v_BKSH)
            return top_BKX, jnp.sum(weight_BKXS, axis=-1), y_BKXH

        def chunk(c, state):
            return _merged(state, attend(_index(paths, n, c)))

        top_BKX, total_BKX, y_BKXH = jax.lax.fori_loop(0, paths.chunks[n], chunk, attend(_own(paths, n, block)))
        y_BKXH = (y_BKXH / total_BKX[..., None]).astype(v_BTKH.dtype)
        return None, (_tokens_first(y_BKXH, G), top_BKX + jnp.log(total_BKX))

    _, (y_NBQKGH, log_NBKX) = jax.lax.scan(body, None, (jnp.arange(T // block), _blocks(q_BTKGH, block)))
    y_BTKGH, log_NBKX = saved(_rows(y_NBQKGH), log_NBKX)
    return y_BTKGH, (q_BTKGH, k_BTKH, v_BTKH, paths, y_BTKGH, log_NBKX)


def _merged(first, second):
    """Merges partial softmaxes over two key sets, each (largest logits, weight sums, weighted values)."""
    top_BKX = jnp.maximum(first[0], second[0])
    (a_BKX, total_BKX, y_BKXH), (b_BKX, more_BKX, z_BKXH) = ((jnp.exp(x[0] - top_BKX), *x[1:]) for x in (first, second))
    y_BKXH = a_BKX[..., None] * y_BKXH + b_BKX[..., None] * z_BKXH
    return top_BKX, a_BKX * total_BKX + b_BKX * more_BKX, y_BKXH


def _backward(config: ModelConfig, kept, dy_BTKGH):
    q_BTKGH, k_BTKH, v_BTKH, paths, y_BTKGH, log_NBKX = kept
    T, G, block, scale = q_BTKGH.shape[1], q_BTKGH.shape[3], config.attention_block, config.query_scale
    inner_BTKG = jnp.sum(dy_BTKGH.astype(jnp.float32) * y_BTKGH.astype(jnp.float32), axis=-1)

    def body(carry, inputs):
        n, q_BQKGH, dy_BQKGH, inner_BQKG, log_BKX = inputs
        q_BKXH, dy_BKXH = _heads_first(q_BQKGH), _heads_first(dy_BQKGH)
        inner_BKX = _heads_first(inner_BQKG[..., None])[..., 0]

        def attend(index_BS, dq_BKXH, dk_BTKH, dv_BTKH):
            k_BKSH, v_BKSH = _gather(k_BTKH, index_BS), _gather(v_BTKH, index_BS)
            logit_BKXS = _logits(q_BKXH, k_BKSH, index_BS, paths, n, config)
            weight_BKXS = jnp.exp(logit_BKXS - log_BKX[..., None])
            dlogit_BKXS = weight_BKXS * (_product("BKXH,BKSH->BKXS", dy_BKXH, v_BKSH) - inner_BKX[..., None])
            if cap := config.attention_softcap:  # tanh' = 1 - tanh^2; hidden logits are not capped
                dlogit_BKXS *= 1 - jnp.square(jnp.where(logit_BKXS > HIDDEN, logit_BKXS, 0) / cap)
            dlogit_BKXS = dlogit_BKXS.astype(k_BKSH.dtype)
            dq_BKXH += _product("BKXS,BKSH->BKXH", dlogit_BKXS, k_BKSH)
            dk_BKSH = _product("BKXS,BKXH->BKSH", dlogit_BKXS, q_BKXH) * scale
            dv_BKSH = _product("BKXS,BKXH->BKSH", weight_BKXS.astype(dy_BKXH.dtype), dy_BKXH)
            return dq_BKXH, _scatter(dk_BTKH, index_BS, dk_BKSH), _scatter(dv_BTKH, index_BS, dv_BKSH)

        def chunk(c, state):
            return attend(_index(paths, n, c), *state)

        state = attend(_own(paths, n, block), jnp.zeros_like(q_BKXH, jnp.float32), *carry)
        dq_BKXH, *carry = jax.lax.fori_loop(0, paths.chunks[n], chunk, state)
        return tuple(carry), _tokens_first((dq_BKXH * scale).astype(q_BTKGH.dtype), G)

    blocks = [_blocks(x, block) for x in (q_BTKGH, dy_BTKGH, inner_BTKG)]
    inputs = (jnp.arange(T // block), *blocks, log_NBKX)
    zero = jnp.zeros_like(k_BTKH, jnp.float32)  # a key's gradient is a sum over many blocks
    (dk_BTKH, dv_BTKH), dq_NBQKGH = jax.lax.scan(body, (zero, zero), inputs)
    return _rows(dq_NBQKGH), dk_BTKH.astype(k_BTKH.dtype), dv_BTKH.astype(v_BTKH.dtype), None


PATHS = Implementation(
    plan, with_backward(_forward, _backward), lambda config, backend, context: unsplit_only("paths", context),
    backend="cpu", flat=True,
)  # fmt: skip


def path_pairs(paths: Paths, config: ModelConfig) -> int:
    """Returns the computed (query, key) pairs per head in all rows, hidden ones included."""
    block, (B, N, _) = config.attention_block, paths.index.shape
    return B * block * int(N * block + CHUNK * jnp.sum(paths.chunks))


def _index(paths: Paths, n, c) -> Int[Array, "B S"]:
    """Returns key indices in chunk c on the path to block n."""
    return jax.lax.dynamic_slice_in_dim(paths.index[:, n], c * CHUNK, CHUNK, axis=1)


def _own(paths: Paths, n, block: int) -> Int[Array, "B S"]:
    """Returns block n's own key indices."""
    return jnp.zeros_like(paths.until[:, :block]) + n * block + jnp.arange(block)


def _product(form: str, a: Array, b: Array) -> Array:
    return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)


def _gather(x_BTKH, index_BS) -> Float[Array, "B K S H"]:
    return jax.vmap(lambda x, index: x.at[index].get(mode="clip"))(x_BTKH, index_BS).swapaxes(1, 2)


def _scatter(x_BTKH, index_BS, update_BKSH):
    """Adds updates to their keys. Indices beyond the range pad the path and are dropped."""
    update_BSKH = update_BKSH.swapaxes(1, 2).astype(x_BTKH.dtype)
    return jax.vmap(lambda x, index, update: x.at[index].add(update, mode="drop"))(x_BTKH, index_BS, update_BSKH)


def _logits(q_BKXH, k_BKSH, index_BS, paths: Paths, n, config: ModelConfig):
    """Returns float32 logits, masked by key <= query < until[key] and the window; X is (G, block) flattened."""

    def of_keys(x_BT, index_BS=index_BS):
        return jax.vmap(lambda x, index: x.at[index].get(mode="fill", fill_value=0))(x_BT, index_BS)

    block = config.attention_block
    logit_BKXS = capped(_product("BKXH,BKSH->BKXS", q_BKXH, k_BKSH) * config.query_scale, config.attention_softcap)
    query_X = n * block + jnp.tile(jnp.arange(block), config.group)
    seen_BXS = (index_BS[:, None] <= query_X[:, None]) & (query_X[:, None] < of_keys(paths.until)[:, None])
    if paths.window is not None:
        query_BX = jnp.tile(of_keys(paths.position, _own(paths, n, block)), (1, config.group))
        seen_BXS &= query_BX[:, :, None] - of_keys(paths.position)[:, None] < paths.window
    return jnp.where(seen_BXS[:, None], logit_BKXS, HIDDEN)


def _heads_first(x_BQKGH) -> Float[Array, "B K X H"]:
    B, Q, K, G, H = x_BQKGH.shape
    return reshape(x_BQKGH.transpose(0, 2, 3, 1, 4), (B, K, G * Q, H), "batch", "kv_heads")


def _tokens_first(x_BKXH, G: int) -> Float[Array, "B Q K G H"]:
    B, K, X, H = x_BKXH.shape
    return reshape(x_BKXH, (B, K, G, X // G, H), "batch", "kv_heads").transpose(0, 3, 1, 2, 4)


def _blocks(x_BTK, block: int):
    """Cuts tokens into N blocks: (B, T, K, ...) to (N, B, block, K, ...). T must be a multiple of `block`."""
    B, T, *rest = x_BTK.shape
    return jnp.moveaxis(reshape(x_BTK, (B, T // block, block, *rest), "batch", None, None, "kv_heads"), 1, 0)


def _rows(x_NBQK):
    """Inverts `_blocks`: (N, B, block, K, ...) to (B, T, K, ...)."""
    N, B, Q, *rest = x_NBQK.shape
    return reshape(jnp.moveaxis(x_NBQK, 0, 1), (B, N * Q, *rest), "batch", None, "kv_heads")
