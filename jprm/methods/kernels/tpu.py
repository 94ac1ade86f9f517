"""Interval attention on a TPU: flash attention (Dao et al. 2022) over block pairs with a visible pair.

There are three kernels: forward, with an online softmax that stores every query's log-sum-exp; dq; dk and dv. Each
walks a table of block pairs (`find_blocks`), prefetched to scalar memory, in a grid as long as the table: hidden pairs
are neither fetched nor computed. A step handles a key-value head's G query heads together, so it reads keys and
values once and makes the mask once.

Products take the inputs' dtype and sum in float32; float32 products have full precision. Memory is linear in T.

Logits are (queries, keys) in the first two kernels and (keys, queries) in the third, so that no product transposes its
left side. Values per token are stored in T-wide rows, not in 128 lanes per token; a kernel turns a row into a column
when needed. 64-wide heads fill half the 128 lanes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from jprm.methods.kernels import PRODUCTS, numbers_of, on_mesh, saved
from jprm.model.attention import HIDDEN, Implementation, capped, unsplit, with_backward
from jprm.model.config import ModelConfig
from jprm.model.mesh import parts, reshape

KINDS = {
    "queries": ("batch", "kv_heads", None, "tokens"),
    "keys": ("batch", "kv_heads", "tokens"),
    "rows": ("batch", "kv_heads", None, None, "tokens"),
}
"""Logical axes for arrays (B, K, G, T, H), (B, K, S, H) and (B, K, G, 1, T)."""


def refuses(config: ModelConfig, backend: str | None, context: int) -> str | None:
    """Returns the reason if the kernel cannot run this model on the backend, or None. See `Implementation.refuses`."""
    if backend == "gpu":
        return "attention='kernel' is for TPUs; a GPU takes attention='gpu_kernel'"
    return None


def plan(until_BT: Int[Array, "B T"], position_BT: Int[Array, "B T"], config: ModelConfig) -> BlockLists:
    """Finds the block pairs. Raises ValueError if no blocks fit the rows or heads (`block_sizes`)."""
    T, split = until_BT.shape[1], parts(until_BT)
    sizes = block_sizes(T, config.head_dim, config.group, jnp.dtype(config.dtype).itemsize, split)
    until_BT, position_BT = unsplit(until_BT, position_BT)
    return find_blocks(until_BT, position_BT, sizes, split)


def flops(config: ModelConfig, rows: int, tokens: int, tensor: int, context: int = 1) -> dict[str, float]:
    """Returns {"forward_kernel", "dq_kernel", "dkv_kernel": FLOPs per call} on one device if one chain fills each row.

    Trees need fewer block pairs, and a kernel skips the others. `rows` are the device's; `tensor` and `context` are the
    mesh's sizes. If rows are split over `context`, the figures are for the device with the last queries and so most
    pairs: the others wait for it. Raises ValueError as `block_sizes`.
    """
    sizes = block_sizes(tokens, config.head_dim, config.group, jnp.dtype(config.dtype).itemsize, context)
    pairs = most_pairs(tokens, sizes, context) * sizes.query * sizes.key
    heads = config.group * config.kv_heads // tensor
    return {name: 2.0 * n * rows * heads * config.head_dim * pairs for name, n in PRODUCTS.items()}


def _forward(q_BTKGH, k_BTKH, v_BTKH, blocks: BlockLists, config: ModelConfig):
    q_BKGTH, k_BKTH, v_BKTH = q_BTKGH.transpose(0, 2, 3, 1, 4), k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2)
    heads = dict(queries=[q_BKGTH], keys=[k_BKTH, v_BKTH])
    y_BKGTH, log_BKG1T = _on_mesh(functools.partial(_attend, config), blocks, heads, ("queries", "rows"))
    y_BKGTH, log_BKG1T = saved(y_BKGTH, log_BKG1T)
    return y_BKGTH.transpose(0, 3, 1, 2, 4), (q_BKGTH, k_BKTH, v_BKTH, blocks, y_BKGTH, log_BKG1T)


def _backward(config: ModelConfig, kept, dy_BTKGH):
    q_BKGTH, k_BKTH, v_BKTH, blocks, y_BKGTH, log_BKG1T = kept
    dy_BKGTH = dy_BTKGH.transpose(0, 2, 3, 1, 4)
    inner_BKG1T = jnp.sum(dy_BKGTH.astype(jnp.float32) * y_BKGTH.astype(jnp.float32), axis=-1)[:, :, :, None]
    heads = dict(queries=[q_BKGTH, dy_BKGTH], keys=[k_BKTH, v_BKTH], rows=[log_BKG1T, inner_BKG1T])
    call = functools.partial(_gradients, config)
    dq_BKGTH, dk_BKTH, dv_BKTH = _on_mesh(call, blocks, heads, ("queries", "keys", "keys"))
    return dq_BKGTH.transpose(0, 3, 1, 2, 4), dk_BKTH.swapaxes(1, 2), dv_BKTH.swapaxes(1, 2), None


def _on_mesh(call, blocks: BlockLists, heads: dict, results: tuple[str, ...]):
    return on_mesh(call, blocks, heads, results, KINDS, blocks.count.shape[1] > 1)


def _attend(config: ModelConfig, blocks: BlockLists, heads: dict):
    (q_BKGTH,) = heads["queries"]
    G, T, H = q_BKGTH.shape[2:]
    acc, state = (pltpu.VMEM((G, blocks.sizes.query, width), jnp.float32) for width in (H, LANES))
    return _walk(
        _forward_kernel, blocks, config, "query",
        inputs=heads,
        outputs=dict(queries=[q_BKGTH], rows=[jax.ShapeDtypeStruct((*q_BKGTH.shape[:3], 1, T), jnp.float32)]),
        scratch=[acc, state, state],
    )  # fmt: skip


def _gradients(config: ModelConfig, blocks: BlockLists, heads: dict):
    _, _, G, _, H = heads["queries"][0].shape
    sums = pltpu.VMEM((G, blocks.sizes.query, H), jnp.float32)
    dq_BKGTH = _walk(_dq_kernel, blocks, config, "query", heads, dict(queries=heads["queries"][:1]), [sums])
    sums = pltpu.VMEM((blocks.sizes.key, H), jnp.float32)
    return *dq_BKGTH, *_walk(_dkv_kernel, blocks, config, "key", heads, dict(keys=heads["keys"]), [sums, sums])


def _pair(K: int, P: int, major: str, table, i, p):
    """Returns a grid step's table entry, with its flags, and its query and key block."""
    entry = table[jax.lax.div(i, K) * P + p]
    pair = entry >> 17, (entry >> 3) & MINOR
    return entry, *(pair if major == "query" else pair[::-1])


def _specs(pair, shape: tuple[int, ...], sizes) -> tuple[dict[str, pl.BlockSpec], list[pl.BlockSpec]]:
    """Returns block specs for arrays by kind (`_walk`), and for the queries' and keys' `until` and positions."""
    K, G, H = shape

    def place(*index):
        def of_step(i, p, table, _):
            _, query, key = pair(table, i, p)
            named = dict(b=jax.lax.div(i, K), k=jax.lax.rem(i, K), query=query, key=key)
            return tuple(named.get(x, x) for x in index)

        return of_step

    kinds = dict(
        queries=pl.BlockSpec((None, None, G, sizes.query, H), place("b", "k", 0, "query", 0)),
        keys=pl.BlockSpec((None, None, sizes.key, H), place("b", "k", "key", 0)),
        rows=pl.BlockSpec((None, None, G, 1, sizes.query), place("b", "k", 0, 0, "query")),
    )
    marks = [pl.BlockSpec((None, 2, n), place("b", 0, x)) for n, x in ((sizes.query, "query"), (sizes.key, "key"))]
    return kinds, marks


def _walk(kernel, blocks: BlockLists, config: ModelConfig, major: str, inputs: dict, outputs: dict, scratch: list):
    """Runs a kernel over rows, key-value heads and a row's pairs, in the order of `major`'s table.

    inputs, outputs: arrays by kind: `queries` (B, K, G, T, H) and `rows` (B, K, G, 1, T), whose query block a step
    sees, and `keys` (B, K, S, H), whose key block it sees. A kernel takes them in this order.
    The queries are the whole row's, or one device's part.
    """
    B, K, G, T, H = inputs["queries"][0].shape
    S, table_BP = blocks.until.shape[1], blocks.by_query if major == "query" else blocks.by_key
    P = table_BP.shape[1]
    if 4 * B * P > SMEM:
        raise ValueError(
            f"attention='kernel': the tables of {B} rows of {S:,} tokens take {4 * B * P:,} bytes of a TPU core's "
            f"scalar memory, and {SMEM:,} are for them; give a device fewer rows at a time"
        )
    pair = functools.partial(_pair, K, P, major)
    kinds, marks = _specs(pair, (K, G, H), blocks.sizes)
    taken = [(kinds[kind], x) for kind in kinds for x in inputs.get(kind, ())]
    results = [(kinds[kind], x) for kind, arrays in outputs.items() for x in arrays]

    def run(interpret: bool, steps, *operands):
        return pl.pallas_call(
            functools.partial(kernel, config, blocks.window is not None, pair),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(B * K, steps),  # rows and heads in one axis, so that a chip's two cores can share it
                in_specs=[*marks, *(place for place, _ in taken)],
                out_specs=[place for place, _ in results],
                scratch_shapes=scratch,
            ),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in results],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
            ),
            interpret=interpret,
            name=kernel.__name__.strip("_"),
        )(*operands)

    of_layer = numbers_of(blocks, T)
    marks_B2S = jnp.stack([blocks.until, blocks.position], axis=1)
    marks_B2T = jax.lax.dynamic_slice_in_dim(marks_B2S, of_layer[1], T, axis=2)
    operands = (table_BP.reshape(-1), of_layer, marks_B2T, marks_B2S, *(x for _, x in taken))
    # The program's platform need not be the platform of the machine that compiles it.
    platforms = dict(tpu=functools.partial(run, False), cpu=functools.partial(run, True))
    return jax.lax.platform_dependent(jnp.max(blocks.count), *operands, **platforms)


def _forward_kernel(
    config, windowed, pair, table, numbers, of_query, of_key,
    q_GTH, k_SH, v_SH, y_GTH, log_G1T, acc_GTH, top_GTL, total_GTL,
):  # fmt: skip
    entry, t, s = pair(table, pl.program_id(0), pl.program_id(1))
    G, bq, H = q_GTH.shape

    @pl.when(entry & FIRST != 0)
    def _():
        top_GTL[...] = jnp.full_like(top_GTL, HIDDEN)
        total_GTL[...] = jnp.zeros_like(total_GTL)
        acc_GTH[...] = jnp.zeros_like(acc_GTH)

    @pl.when(entry & LIVE != 0)
    def _():
        seen_TS = _seen(t, s, of_query, of_key, numbers, windowed, keys_first=False)

        @pl.loop(0, G)
        def _(g):
            # A query that has seen no key so far has weights of exp(HIDDEN - HIDDEN) = 1. The first key that it sees,
            # at the latest itself, removes them: exp(HIDDEN - top) is exactly 0.
            logit_TS = jnp.where(seen_TS, _logits(q_GTH[g], k_SH[...], config), HIDDEN)
            top_TL = jnp.maximum(top_GTL[g], jnp.max(logit_TS, axis=1, keepdims=True))
            weight_TS = jnp.exp(logit_TS - _lanes(top_TL, logit_TS.shape[1]))
            fade_TL = jnp.exp(top_GTL[g] - top_TL)
            total_GTL[g] = fade_TL * total_GTL[g] + jnp.sum(weight_TS, axis=1, keepdims=True)
            acc_GTH[g] = _lanes(fade_TL, H) * acc_GTH[g] + _dot(weight_TS.astype(v_SH.dtype), v_SH[...], (1, 0))
            top_GTL[g] = top_TL

    @pl.when(entry & LAST != 0)
    def _():
        @pl.loop(0, G)
        def _(g):
            y_GTH[g] = (acc_GTH[g] / _lanes(total_GTL[g], H)).astype(y_GTH.dtype)
            log_G1T[g] = (top_GTL[g] + jnp.log(total_GTL[g])).T[:1]


def _dq_kernel(
    config, windowed, pair, table, numbers, of_query, of_key,
    q_GTH, dy_GTH, k_SH, v_SH, log_G1T, inner_G1T, dq_GTH, acc_GTH,
):  # fmt: skip
    entry, t, s = pair(table, pl.program_id(0), pl.program_id(1))

    @pl.when(entry & FIRST != 0)
    def _():
        acc_GTH[...] = jnp.zeros_like(acc_GTH)

    @pl.when(entry & LIVE != 0)
    def _():
        seen_TS = _seen(t, s, of_query, of_key, numbers, windowed, keys_first=False)

        @pl.loop(0, q_GTH.shape[0])
        def _(g):
            logit_TS = _logits(q_GTH[g], k_SH[...], config)
            dweight_TS = _dot(dy_GTH[g], v_SH[...], (1, 1))
            log_T1, inner_T1 = log_G1T[g, 0][:, None], inner_G1T[g, 0][:, None]
            _, dlogit_TS = _weights(logit_TS, dweight_TS, seen_TS, log_T1, inner_T1, config)
            acc_GTH[g] += _dot(dlogit_TS.astype(k_SH.dtype), k_SH[...], (1, 0))

    @pl.when(entry & LAST != 0)
    def _():
        dq_GTH[...] = (acc_GTH[...] * config.query_scale).astype(dq_GTH.dtype)


def _dkv_kernel(
    config, windowed, pair, table, numbers, of_query, of_key,
    q_GTH, dy_GTH, k_SH, v_SH, log_G1T, inner_G1T, dk_SH, dv_SH, dk_acc_SH, dv_acc_SH,
):  # fmt: skip
    entry, t, s = pair(table, pl.program_id(0), pl.program_id(1))

    @pl.when(entry & FIRST != 0)
    def _():
        dk_acc_SH[...] = jnp.zeros_like(dk_acc_SH)
        dv_acc_SH[...] = jnp.zeros_like(dv_acc_SH)

    @pl.when(entry & LIVE != 0)
    def _():
        seen_ST = _seen(t, s, of_query, of_key, numbers, windowed, keys_first=True)

        @pl.loop(0, q_GTH.shape[0])
        def _(g):
            logit_ST = _logits(k_SH[...], q_GTH[g], config)
            dweight_ST = _dot(v_SH[...], dy_GTH[g], (1, 1))
            weight_ST, dlogit_ST = _weights(logit_ST, dweight_ST, seen_ST, log_G1T[g], inner_G1T[g], config)
            dv_acc_SH[...] += _dot(weight_ST.astype(dy_GTH.dtype), dy_GTH[g], (1, 0))
            dk_acc_SH[...] += _dot(dlogit_ST.astype(q_GTH.dtype), q_GTH[g], (1, 0))

    @pl.when(entry & LAST != 0)
    def _():
        dk_SH[...] = (dk_acc_SH[...] * config.query_scale).astype(dk_SH.dtype)
        dv_SH[...] = dv_acc_SH[...].astype(dv_SH.dtype)


def _seen(t, s, of_query, of_key, numbers, windowed: bool, keys_first: bool):
    """Returns whether queries in block t see keys in block s; `of_query` and `of_key` hold `until` and positions.
    numbers: as from `numbers_of`."""
    bq, bk = of_query.shape[1], of_key.shape[1]
    shape = (bk, bq) if keys_first else (bq, bk)
    query = numbers[1] + t * bq + jax.lax.broadcasted_iota(jnp.int32, shape, int(keys_first))
    key = s * bk + jax.lax.broadcasted_iota(jnp.int32, shape, 1 - int(keys_first))

    def broadcast(row, along_columns: bool):
        return row[:, None] if along_columns else row[None, :]

    seen = (key <= query) & (query < broadcast(of_key[0], keys_first))
    if windowed:
        seen &= broadcast(of_query[1], not keys_first) - broadcast(of_key[1], keys_first) < numbers[0]
    return seen


def _logits(a_MH, b_NH, config: ModelConfig):
    return capped(_dot(a_MH, b_NH, (1, 1)) * config.query_scale, config.attention_softcap)


def _weights(logit, dweight, seen, log, inner, config: ModelConfig):
    """Returns weights, recomputed from the log-sum-exp, and the uncapped logits' unscaled gradient."""
    weight = jnp.exp(jnp.where(seen, logit, HIDDEN) - log)
    dlogit = weight * (dweight - inner)
    if cap := config.attention_softcap:  # tanh' = 1 - tanh^2
        dlogit *= 1 - jnp.square(logit / cap)
    return weight, dlogit


def _dot(a, b, contracted: tuple[int, int]):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    axes = (contracted[:1], contracted[1:])
    return jax.lax.dot_general(a, b, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _lanes(x_TL, width: int):
    """Widens or narrows a column that is stored in all lanes."""
    return jnp.tile(x_TL, (1, -(-width // LANES)))[:, :width]


# ---- Tables of the blocks of keys that each block of queries needs. A kernel's grid walks them.
#
# The grid is as long as the longest table of the device's rows: rows with fewer pairs have idle steps.
#
# A block of queries [a, b) needs a block of keys [c, d) if and only if c < b and the keys' largest `until` exceeds a.
# Every pair that passes holds a visible pair of tokens, whatever `until` is, if every token sees itself (until[j] > j):
#
# - Keys wholly before the queries, d <= a: let j be the key with the largest `until`. Query a sees it, as
#   j < d <= a < until[j]. Where the test fails, every key is closed at a, and so for all later queries.
# - Blocks that overlap: token max(a, c) is in both and sees itself.
# - Keys after all queries, c >= b: no query sees a later key, and the test fails.
#
# The tables ignore sliding windows, which hide more inside blocks.
#
# Where rows are split over the mesh's `context`, each part of the queries has tables of its own. A block of keys that
# none of its queries needs has an entry that computes nothing, but writes the zero gradient.

FIRST, LAST, LIVE = 1, 2, 4
"""A table entry's flags: first in its major block, last in it, and not padding."""

MINOR = (1 << 14) - 1  # the bits of an entry's minor block

LANES = 128
VMEM_LIMIT = 16 * 2**20  # what a kernel asks for: the cores of v5e and v6e have 128 MiB, of v5p and tpu7x 64 MiB
VMEM = 12 * 2**20  # of that, for what is counted here; the rest is for what the compiler spills
SMEM = 640 * 2**10  # for a table, of 1 MiB


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Sizes:
    """Tokens per query block and per key block."""

    query: int
    key: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockLists:
    """The block pairs in every row that hold a visible token pair, computed once for all layers.

    The C query parts' tables are side by side. An entry is major << 17 | minor << 3 | flags; query blocks
    are counted within their part. A table is padded with its last entry without flags, which is neither fetched nor
    computed.
    """

    until: Int[Array, "B S"]
    position: Int[Array, "B S"]
    by_query: Int[Array, "B C*P"]  # major: the block of queries
    by_key: Int[Array, "B C*P"]  # the same pairs; major: the block of keys
    count: Int[Array, "B C"]  # entries of the longer of the two
    sizes: Sizes
    window: Int[Array, ""] | None = None  # of the layer, in positions; None: queries see the whole path


def most_pairs(T: int, sizes: Sizes, parts: int = 1) -> int:
    """Returns the most entries per table: the block pairs in the last of `parts` parts of a one-chain row of T tokens.

    (A table by keys has no more: such a row's last part needs all key blocks.)
    """
    return sum((start + sizes.query - 1) // sizes.key + 1 for start in range(T - T // parts, T, sizes.query))


def block_sizes(T: int, H: int, G: int, itemsize: int, parts: int = 1) -> Sizes:
    """Returns the largest blocks, at most 512 tokens, that fit a TPU core's memories, with G x block_q at most 2,048.

    T: tokens per row, in `parts` parts. H: head size, each number in `itemsize` bytes. G: query heads per key head.

    A grid step has a fixed cost, so its 4 x G x block_q x block_k x H operations must be many: 0.5 G at G = 7, H
    = 128 and 256 x 512. Larger blocks skip fewer hidden pairs in trees.

    SMEM: a table has about T^2 / (2 block_q block_k) 4-byte entries: 257 KiB of 1 MiB at T = 131,072 and 256 x 512.

    Raises ValueError if 128 does not divide a part of T, or no blocks fit so many or wide heads, or so long rows.
    """
    if T % (parts * LANES):
        where = f" in each of {parts} parts" if parts > 1 else ""
        raise ValueError(f"attention='kernel' takes rows of a multiple of {LANES} tokens{where}, not {T}")
    lengths = [size for size in (512, 256, 128) if T // parts % size == 0]
    for sizes in itertools.starmap(Sizes, itertools.product(lengths, lengths)):
        few = G * sizes.query <= 2048 or sizes.query == LANES
        if few and vmem_bytes(sizes, H, G, itemsize) <= VMEM and 4 * most_pairs(T, sizes, parts) <= SMEM:
            return sizes
    raise ValueError(
        f"attention='kernel': no blocks of {G} query heads a key-value head, of size {H} and {itemsize} bytes an "
        f"element, fit a TPU core in rows of {T:,} tokens; use shorter rows, bfloat16 or attention='blocked'"
    )


def vmem_bytes(sizes: Sizes, H: int, G: int, itemsize: int) -> int:
    """Returns the VMEM bytes for the largest of the three kernels. Arguments are as in `block_sizes`.

    Fetched and written blocks count twice, since the next one is transferred while one is computed. Sums are float32;
    the running maximum and total take 128 lanes per query. Heads narrower than 128 are padded.
    """
    lanes = -(-H // LANES) * LANES
    q, k, pair = G * sizes.query * lanes, sizes.key * lanes, sizes.query * sizes.key
    state = 2 * G * sizes.query * LANES
    forward = 2 * itemsize * (2 * q + 2 * k) + 4 * (q + state) + (8 + itemsize) * pair  # q, y; k, v; logits, weights
    dq = 2 * itemsize * (3 * q + 2 * k) + 4 * q + 16 * pair  # q, dy, dq; k, v; logits, weights and their gradients
    dkv = 2 * itemsize * (2 * q + 4 * k) + 8 * k + 16 * pair
    return max(forward, dq, dkv)


def find_blocks(
    until_BS: Int[Array, "B S"], position_BS: Int[Array, "B S"], sizes: Sizes, parts: int = 1
) -> BlockLists:
    """Returns the pairs of a query block and a key block with a visible pair, by query and by key.

    `sizes` are the tokens per block; `parts` are those into which the mesh splits the tokens. Each part
    must be a multiple of the block sizes.
    """
    B, S = until_BS.shape
    start_T, start_S = jnp.arange(0, S, sizes.query), jnp.arange(0, S, sizes.key)
    last_BS = jnp.max(reshape(until_BS, (B, S // sizes.key, sizes.key), "batch"), axis=-1)
    needed_BTS = (start_S < start_T[:, None] + sizes.query) & (last_BS[:, None] > start_T[:, None])
    needed_BCTS = reshape(needed_BTS, (B, parts, len(start_T) // parts, len(start_S)), "batch")
    width = most_pairs(S, sizes, parts)
    (by_query_BP, count_BC), (by_key_BP, longer_BC) = (
        _table(x, width) for x in (needed_BCTS, needed_BCTS.swapaxes(2, 3))
    )
    return BlockLists(until_BS, position_BS, by_query_BP, by_key_BP, jnp.maximum(count_BC, longer_BC), sizes)


def _table(needed_BCMN, width: int) -> tuple[Int[Array, "B C*P"], Int[Array, "B C"]]:
    """Returns the needed pairs in order, major first, and their number. An unneeded major block has one entry too."""
    B, C, M, N = needed_BCMN.shape
    pair_MN = jnp.arange(M)[:, None] << 17 | jnp.arange(N) << 3
    bare_BCMN = ~jnp.any(needed_BCMN, axis=-1, keepdims=True) & (jnp.arange(N) == 0)
    nowhere = jnp.iinfo(jnp.int32).max
    pair_BCMN = jnp.where(needed_BCMN, pair_MN | LIVE, jnp.where(bare_BCMN, pair_MN, nowhere))
    pair_BCP = jnp.sort(reshape(pair_BCMN, (B, C, M * N), "batch"), axis=-1)[..., :width]
    count_BC = jnp.sum(needed_BCMN | bare_BCMN, axis=(2, 3), dtype=jnp.int32)
    used_BCP = jnp.arange(width) < count_BC[..., None]
    end_BCP = jnp.max(jnp.where(used_BCP, pair_BCP & ~LIVE, 0), axis=-1, keepdims=True)
    major_BCP = jnp.where(used_BCP, pair_BCP >> 17, -1)
    change_BCP = major_BCP[..., 1:] != major_BCP[..., :-1]
    first_BCP = jnp.pad(change_BCP, ((0, 0), (0, 0), (1, 0)), constant_values=True)
    last_BCP = jnp.pad(change_BCP, ((0, 0), (0, 0), (0, 1)), constant_values=True)
    table_BCP = jnp.where(used_BCP, pair_BCP | FIRST * first_BCP | LAST * last_BCP, end_BCP).astype(jnp.int32)
    return reshape(table_BCP, (B, C * width), "batch"), count_BC


KERNEL = Implementation(plan, with_backward(_forward, _backward), refuses, backend="tpu", flops=flops)
