"""Attention under the one rule of visibility: query i sees key j if and only if j <= i < until[j].

In a layer with a sliding window the key must also be less than so many positions before the query. Positions are depths
in the tree, so a window reaches up the query's own path, as it does in that chain alone.

Five exact ways, chosen by `ModelConfig.attention`:

`reference`: the rule written out, memory O(T^2). What the others are tested against.
`blocked`: blocks of queries, each against all keys up to its own end. Memory O(block x T); half of the square skipped.
`paths`: blocks of queries, each against its own keys and the path that leads to its first token, gathered
    (`cpu_paths`). Its work follows the depth of the trees, not the length of the row: the fastest on a CPU.
`kernel`: Pallas kernels for TPUs over the pairs of blocks that hold a visible pair (`tpu_kernel`). Memory O(T).
    On a CPU the same kernels are interpreted, slowly: for tests. They are chosen by the platform that the program is
    compiled for, so that a machine without TPUs compiles it for TPUs.
`cudnn`: cuDNN's causal flash attention, for NVIDIA GPUs and rows that hold one chain each (`gpu_cudnn`), which
    the packer then lays out: what chains share is computed for each of them. Memory O(T). It has not run on a GPU yet.

A GPU has no kernel of ours: for trees and rows of several chains it takes `blocked`, and `kernel` is refused there.
Tokens that are decoded with a cache have a way of their own, whatever is chosen here (`jprm.model.decode`).

Where the mesh splits the tokens of a row over `context`, every device keeps its queries, and is sent the keys and
values of its rows and heads; what it adds to their gradients is summed and scattered. Shares are equal in queries, not
in work: of a row that one chain fills, the last device computes most. `paths` and `cudnn` take whole rows alone.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jprm.model.attention.cpu_paths import HIDDEN, Paths, capped, find_paths, path_attention
from jprm.model.attention.gpu_cudnn import Chains, chain_attention, find_chains
from jprm.model.attention.tpu_blocks import Blocks, block_sizes, find_blocks
from jprm.model.attention.tpu_kernel import interval_attention
from jprm.model.config import Attention, ModelConfig
from jprm.model.mesh import check_split, parts, reshape, spec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Whole:
    """The rows as they are, with all their tokens on every device."""

    until: Int[Array, "B S"]
    position: Int[Array, "B S"]
    window: Int[Array, ""] | None = None  # of the layer, in positions; None: queries see the whole path


Plan = Whole | Paths | Blocks | Chains
"""What attention needs to know of the rows, worked out once for all layers."""


def suited(config: ModelConfig) -> Attention:
    """The model's own way, or in place of a kernel of other machines one that runs here: for models from elsewhere."""
    here = jax.default_backend()
    if {"kernel": "tpu", "cudnn": "gpu"}.get(config.attention, here) == here:
        return config.attention
    return "paths" if here == "cpu" else "blocked"


def plan(until_BT: Int[Array, "B T"], position_BT: Int[Array, "B T"], config: ModelConfig) -> Plan:
    """Raises ValueError where the way of attention does not take such rows, or does not run here."""
    T, split = until_BT.shape[1], parts(until_BT)
    check_split(config, split)
    if split > 1:
        until_BT, position_BT = (jax.sharding.reshard(x, spec("batch", None)) for x in (until_BT, position_BT))
    if config.attention == "paths":
        return find_paths(until_BT, position_BT, config.attention_block)
    if config.attention == "kernel":
        if jax.default_backend() == "gpu":
            raise ValueError("attention='kernel' is for TPUs; a GPU takes attention='blocked', or 'cudnn' for chains")
        sizes = block_sizes(T, config.head_dim, config.group, jnp.dtype(config.dtype).itemsize, split)
        return find_blocks(until_BT, position_BT, sizes, split)
    if config.attention == "cudnn":
        return find_chains(until_BT, position_BT)
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
    if config.attention == "cudnn":
        return chain_attention(q_BTKGH, k_BSKH, v_BSKH, plan, config)
    rows = dataclasses.replace(plan, window=window)
    if config.attention in ("paths", "kernel"):
        ours = path_attention if config.attention == "paths" else interval_attention
        return ours(q_BTKGH, k_BSKH, v_BSKH, rows, config)
    # Heads before tokens and one contiguous matrix a key-value head: the products are then plain matrix products.
    q_BKGTH = q_BTKGH.transpose(0, 2, 3, 1, 4) * config.query_scale
    k_BKSH, v_BKSH = k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)
    way = _in_parts if parts(q_BTKGH) > 1 else _blocked
    return way(q_BKGTH, k_BKSH, v_BKSH, rows, config).transpose(0, 3, 1, 2, 4)


def _in_parts(q_BKGTH, k_BKTH, v_BKTH, rows: Whole, config: ModelConfig):
    """The queries of every device against the keys of all: its own, and those that it is sent."""

    def own(q_BKGTH, k_BKTH, v_BKTH, rows: Whole):
        k_BKSH, v_BKSH = (jax.lax.all_gather(x, "context", axis=2, tiled=True) for x in (k_BKTH, v_BKTH))
        first = jax.lax.axis_index("context") * q_BKGTH.shape[3]
        return _blocked(q_BKGTH, k_BKSH, v_BKSH, rows, config, first)

    queries, keys = spec("batch", "kv_heads", None, "tokens"), spec("batch", "kv_heads", "tokens")
    places = queries, keys, keys, jax.tree.map(lambda x: spec("batch") if x.ndim else spec(), rows)
    arguments = jax.tree.map(jax.sharding.reshard, (q_BKGTH, k_BKTH, v_BKTH, rows), places)
    return jax.shard_map(own, in_specs=places, out_specs=queries)(*arguments)


def _attend(q_BKGTH, k_BKSH, v_BKSH, seen_BTS: Bool[Array, "B T S"], softcap: float):
    B, K, G, T, H = q_BKGTH.shape
    S, split = k_BKSH.shape[2], ("batch", "kv_heads")
    q_BKQH = reshape(q_BKGTH, (B, K, G * T, H), *split)
    logit_BKQS = capped(jnp.einsum("BKQH,BKSH->BKQS", q_BKQH, k_BKSH, preferred_element_type=jnp.float32), softcap)
    logit_BKGTS = jnp.where(seen_BTS[:, None, None], reshape(logit_BKQS, (B, K, G, T, S), *split), HIDDEN)
    weight_BKGTS = jax.nn.softmax(logit_BKGTS, axis=-1).astype(v_BKSH.dtype)
    y_BKQH = jnp.einsum("BKQS,BKSH->BKQH", reshape(weight_BKGTS, (B, K, G * T, S), *split), v_BKSH)
    return reshape(y_BKQH, (B, K, G, T, H), *split)


def _blocked(q_BKGTH, k_BKSH, v_BKSH, rows: Whole, config: ModelConfig, first: Int[Array, ""] | int = 0):
    """A block's logits live only while it is computed, in the backward pass too: each block is rematerialised.

    `first` is the index of the first query, where they are not all of the row's.
    """
    T, S = q_BKGTH.shape[3], k_BKSH.shape[2]
    # At most 64 blocks, which bounds the size of the compiled program.
    block = T if config.attention == "reference" else max(config.attention_block, -(-T // 64))

    @functools.partial(jax.checkpoint, static_argnums=4)
    def attend(q_BKGTH, k_BKSH, v_BKSH, rows: Whole, start: int, first):
        T, S = q_BKGTH.shape[3], k_BKSH.shape[2]
        query_T, key_S = first + start + jnp.arange(T), jnp.arange(S)
        seen_BTS = (key_S <= query_T[:, None]) & (query_T[:, None] < rows.until[:, None, :S])
        if rows.window is not None:
            position_BT = jax.lax.dynamic_slice_in_dim(rows.position, first + start, T, axis=1)
            seen_BTS &= position_BT[:, :, None] - rows.position[:, None, :S] < rows.window
        return _attend(q_BKGTH, k_BKSH, v_BKSH, seen_BTS, config.attention_softcap)

    blocks = []
    for a in range(0, T, block):
        b = min(a + block, T)
        end = b if S == T else S  # of keys: the device that has the row's last queries needs them all
        blocks.append(attend(q_BKGTH[:, :, :, a:b], k_BKSH[:, :, :end], v_BKSH[:, :, :end], rows, a, first))
    return jnp.concatenate(blocks, axis=3)
