"""Attention under the one rule of visibility: query i sees key j if and only if j <= i < until[j].

Three exact ways, chosen by `ModelConfig.attention`:

`reference`: the rule written out, memory O(T^2). What the others are tested against.
`blocked`: blocks of queries, each against all keys up to its own end. Memory O(block x T); half of the square skipped.
`paths`: blocks of queries, each against its own keys and the path that leads to its first token, gathered. Of the keys
    before a block, its queries see only what its first token sees, because subtrees are intervals: a key that is closed
    at the first query is closed for all. So the work follows the depth of the trees, not the length of the row.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jprm.model.config import ModelConfig

_HIDDEN = -1e30  # finite, so that a row of hidden logits has no NaN; exp(-1e30 - max) is exactly 0 in float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """What attention needs to know of the rows, worked out once for all layers."""

    until: Int[Array, "B T"]
    path: Int[Array, "B N T"] | None = None  # per block of queries: the keys before it that it sees, in order, first
    depth: Int[Array, " N"] | None = None  # and how many there are, in the row that has most


def plan(until_BT: Int[Array, "B T"], config: ModelConfig) -> Plan:
    if config.attention != "paths":
        return Plan(until_BT)
    index_T = jnp.arange(until_BT.shape[1])
    start_N = jnp.arange(0, until_BT.shape[1], config.attention_block)
    seen_BNT = (index_T < start_N[:, None]) & (until_BT[:, None, :] > start_N[:, None])
    path_BNT = jnp.argsort(~seen_BNT, axis=-1, stable=True)
    return Plan(until_BT, path_BNT, jnp.max(jnp.sum(seen_BNT, axis=-1), axis=0))


def attention(
    q_BTKGH: Float[Array, "B T K G H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    plan: Plan,
    config: ModelConfig,
) -> Float[Array, "B T K G H"]:
    """Grouped-query attention: G query heads share each of the K key-value heads. Softmax in float32."""
    # Heads before tokens and one contiguous matrix a key-value head: the products are then plain matrix products.
    q_BKGTH = q_BTKGH.transpose(0, 2, 3, 1, 4) * q_BTKGH.shape[-1] ** -0.5
    k_BKSH, v_BKSH = k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)
    if config.attention == "paths":
        y_BKGTH = _paths(q_BKGTH, k_BKSH, v_BKSH, plan, config.attention_block)
    else:
        T = q_BTKGH.shape[1]
        # At most 64 blocks, which bounds the size of the compiled program.
        block = T if config.attention == "reference" else max(config.attention_block, -(-T // 64))
        y_BKGTH = _blocked(q_BKGTH, k_BKSH, v_BKSH, plan.until, block)
    return y_BKGTH.transpose(0, 3, 1, 2, 4)


def _attend(q_BKGTH, k_BKSH, v_BKSH, seen_BTS: Bool[Array, "B T S"]):
    B, K, G, T, H = q_BKGTH.shape
    q_BKQH = q_BKGTH.reshape(B, K, G * T, H)
    logit_BKQS = jnp.einsum("BKQH,BKSH->BKQS", q_BKQH, k_BKSH, preferred_element_type=jnp.float32)
    logit_BKGTS = jnp.where(seen_BTS[:, None, None], logit_BKQS.reshape(B, K, G, T, -1), _HIDDEN)
    weight_BKGTS = jax.nn.softmax(logit_BKGTS, axis=-1).astype(v_BKSH.dtype)
    y_BKQH = jnp.einsum("BKQS,BKSH->BKQH", weight_BKGTS.reshape(B, K, G * T, -1), v_BKSH)
    return y_BKQH.reshape(B, K, G, T, H)


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


def _paths(q_BKGTH, k_BKSH, v_BKSH, plan: Plan, block: int):
    """One scan over blocks of queries; the number of keys gathered is the least of a few sizes that holds the path."""
    B, K, G, T, H = q_BKGTH.shape
    if T % block:
        raise ValueError(f"attention='paths' takes rows of a multiple of {block} tokens (attention_block), not {T}")
    sizes = [0, *_sizes(block, T - block)]

    def gathered(size: int, n, q_BKGQH):
        start = n * block
        path_BP = plan.path[:, n, :size]
        own = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=block)
        take = lambda x_BKSH: jnp.concatenate(
            [jnp.take_along_axis(x_BKSH, path_BP[:, None, :, None], axis=2), own(x_BKSH, axis=2)], axis=2
        )
        query_Q = start + jnp.arange(block)
        until_BP, until_BQ = jnp.take_along_axis(plan.until, path_BP, axis=1), own(plan.until, axis=1)
        # What follows the path in its list are keys of the block or behind it, or closed ones: the first are hidden
        # here (their own copy is in the block), the others by the rule.
        before_BQP = (path_BP[:, None, :] < start) & (query_Q[:, None] < until_BP[:, None, :])
        own_BQQ = (query_Q <= query_Q[:, None]) & (query_Q[:, None] < until_BQ[:, None, :])
        seen_BQS = jnp.concatenate([before_BQP, own_BQQ], axis=-1)
        return _attend(q_BKGQH, take(k_BKSH), take(v_BKSH), seen_BQS)

    @jax.checkpoint
    def body(_, inputs):
        n, q_BKGQH = inputs
        branch = jnp.searchsorted(jnp.array(sizes), plan.depth[n])
        return None, jax.lax.switch(branch, [functools.partial(gathered, size) for size in sizes], n, q_BKGQH)

    q_NBKGQH = jnp.moveaxis(q_BKGTH.reshape(B, K, G, T // block, block, H), 3, 0)
    _, y_NBKGQH = jax.lax.scan(body, None, (jnp.arange(T // block), q_NBKGQH))
    return jnp.moveaxis(y_NBKGQH, 0, 3).reshape(B, K, G, T, H)


def _sizes(block: int, largest: int) -> list[int]:
    """block, 2 block, 3 block, 4 block, then growing by half or a third, up to `largest`: at most a third is waste."""
    sizes, size, step = [], block, block
    while size < largest:
        sizes.append(size)
        if size >= 4 * step:
            step *= 2
        size += step
    return [*sizes, largest] if largest else []
