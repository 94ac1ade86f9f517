"""Interval attention on an NVIDIA GPU: flash attention (Dao 2023) over block pairs with a visible pair.

There are three kernels: forward, with an online softmax that stores every query's log-sum-exp; dq; dk and dv. A
program in the first two has one head's query block and walks its key blocks (`find_blocks`). In the third
a program has a key block and walks the query blocks in all heads that share it, so no gradient is summed outside. Pairs
in which every query sees every key come first and are computed without a mask. Layers with a sliding window have their
own tables, without the pairs beyond it.

Products take the inputs' dtype and sum in float32. Float32 products are TF32, like XLA's, or full float32 under
`jax.default_matmul_precision("highest")`. Exponentials are `exp2`, for which GPUs have an instruction. Memory is linear
in T, apart from the tables with 4 bytes per block pair.

The kernels are written in Pallas and lowered by Triton. experiments/bench/gpu_kernels.md gives the reasons, and the
compiled kernels' resources.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int

from jprm.methods.kernels import PRODUCTS, logits, numbers_of, on_mesh, saved, too_old, weights
from jprm.model.attention import HIDDEN, Implementation, unsplit, with_backward
from jprm.model.config import ModelConfig
from jprm.model.mesh import parts, reshape
from jprm.model.transformer import UNBOUNDED

KINDS = {
    "queries": ("batch", "tokens", "kv_heads"),
    "keys": ("batch", "tokens", "kv_heads"),
    "rows": ("batch", "kv_heads", None, "tokens"),
}
"""Logical axes for arrays (B, T, K, G, H), (B, S, K, H) and (B, K, G, T)."""


def refuses(config: ModelConfig, backend: str | None, context: int) -> str | None:
    """Returns the reason if the kernel cannot run this model on the backend, or None. See `Implementation.refuses`."""
    if backend == "tpu":
        return "attention='gpu_kernel' is for NVIDIA GPUs; a TPU takes attention='kernel'"
    if config.head_dim > 256:
        return f"attention='gpu_kernel' takes heads of at most 256, not head_dim={config.head_dim}; choose 'blocked'"
    return too_old("gpu_kernel") if backend == "gpu" else None


def plan(until_BT: Int[Array, "B T"], position_BT: Int[Array, "B T"], config: ModelConfig) -> BlockTable:
    """Finds the block pairs. Raises ValueError if a block does not divide the parts of split rows."""
    T, split = until_BT.shape[1], parts(until_BT)
    sizes = launches(config.head_dim, jnp.dtype(config.dtype).itemsize)
    if split > 1 and T % (split * sizes.tile):
        raise ValueError(
            f"attention='gpu_kernel' takes rows of a multiple of {sizes.tile} tokens in each of {split} parts, not {T}"
        )
    until_BT, position_BT = unsplit(until_BT, position_BT)
    more = -T % sizes.tile  # of padding tokens, each of which sees only itself
    alone = jnp.broadcast_to(jnp.arange(T + 1, T + more + 1, dtype=until_BT.dtype), (len(until_BT), more))
    until_BS = jnp.concatenate([until_BT, alone], axis=1) if more else until_BT
    return find_blocks(until_BS, jnp.pad(position_BT, ((0, 0), (0, more))), sizes, split, bounded(config))


def bounded(config: ModelConfig) -> tuple[int, ...]:
    """Returns the different window sizes in the model, ascending, without 0."""
    return tuple(sorted({window for window in config.windows if window}))


def flops(config: ModelConfig, rows: int, tokens: int, tensor: int, context: int = 1) -> dict[str, float]:
    """Returns {kernel: FLOPs per call} like `tpu.flops`, averaged over layers; `rows` are one device's."""
    sizes = launches(config.head_dim, jnp.dtype(config.dtype).itemsize)
    heads = config.group * config.kv_heads // tensor
    of_pair = 2.0 * rows * heads * padded_head(config.head_dim)

    windows = [config.windows[i % len(config.windows)] for i in range(config.layers)] if config.windows else [0]

    def pairs(launch: Launch) -> float:
        blocks = 0
        for start in range(tokens - tokens // context, tokens, launch.query):
            last = -(-(start + launch.query) // launch.key)
            blocks += sum(last - (max(0, (start - window + 1) // launch.key) if window else 0) for window in windows)
        return blocks * launch.query * launch.key / len(windows)

    by_kernel = dict(zip(PRODUCTS, (sizes.forward, sizes.dq, sizes.dkv), strict=True))
    return {name: of_pair * PRODUCTS[name] * pairs(launch) for name, launch in by_kernel.items()}


def _forward(q_BTKGH, k_BTKH, v_BTKH, blocks: BlockTable, config: ModelConfig):
    T, H = q_BTKGH.shape[1], q_BTKGH.shape[-1]
    q, k, v = (_padded(x, blocks) for x in (q_BTKGH, k_BTKH, v_BTKH))
    heads = dict(queries=[q], keys=[k, v])
    y, log_BKGT = _on_mesh(functools.partial(_attend, config), _of_layer(blocks), heads, ("queries", "rows"))
    y, log_BKGT = saved(y, log_BKGT)
    return y[:, :T, ..., :H], (q_BTKGH, k_BTKH, v_BTKH, blocks, y, log_BKGT)


def _backward(config: ModelConfig, kept, dy_BTKGH):
    q_BTKGH, k_BTKH, v_BTKH, blocks, y, log_BKGT = kept
    T, H = q_BTKGH.shape[1], q_BTKGH.shape[-1]
    q, k, v, dy = (_padded(x, blocks) for x in (q_BTKGH, k_BTKH, v_BTKH, dy_BTKGH))
    inner_BKGT = jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), axis=-1).transpose(0, 2, 3, 1)
    heads = dict(queries=[q, dy], keys=[k, v], rows=[log_BKGT, inner_BKGT])
    gradients = _on_mesh(functools.partial(_gradients, config), _of_layer(blocks), heads, ("queries", "keys", "keys"))
    return *(x[:, :T, ..., :H] for x in gradients), None


def _of_layer(blocks: BlockTable) -> BlockTable:
    """Selects this layer's tables: with its window, or for the whole path."""
    if blocks.window is None:
        return blocks
    if blocks.local is None:
        raise ValueError("attention='gpu_kernel': a layer has a window, but the model's `windows` are empty. Set them")
    whole = (blocks.forward, blocks.dq, blocks.dkv)
    forward, dq, dkv = jax.tree.map(functools.partial(jnp.where, blocks.window < UNBOUNDED), blocks.local, whole)
    return dataclasses.replace(blocks, forward=forward, dq=dq, dkv=dkv, local=None)


def _padded(x_BTNH, blocks: BlockTable):
    """Pads heads to a power of two, and rows to the tables' tokens.

    A head's added elements are zero: they do not change a product, and their output is dropped.
    """
    tokens = blocks.until.shape[1] - x_BTNH.shape[1]
    head = padded_head(x_BTNH.shape[-1]) - x_BTNH.shape[-1]
    if not tokens and not head:
        return x_BTNH
    return jnp.pad(x_BTNH, [(0, 0), (0, tokens), *[(0, 0)] * (x_BTNH.ndim - 3), (0, head)])


def _on_mesh(call, blocks: BlockTable, heads: dict, results: tuple[str, ...]):
    return on_mesh(call, blocks, heads, results, KINDS, parts(heads["queries"][0]) > 1)


def _attend(config: ModelConfig, blocks: BlockTable, heads: dict):
    (q,) = heads["queries"]
    B, T, K, G, _ = q.shape
    log = jax.ShapeDtypeStruct((B, K, G, T), jnp.float32)
    return _run(_forward_kernel, blocks.launches.forward, blocks.forward, blocks, config, heads, [q], [log])


def _gradients(config: ModelConfig, blocks: BlockTable, heads: dict):
    dq = _run(_dq_kernel, blocks.launches.dq, blocks.dq, blocks, config, heads, heads["queries"][:1], [])
    return *dq, *_run(_dkv_kernel, blocks.launches.dkv, blocks.dkv, blocks, config, heads, heads["keys"], [])


def _run(kernel, launch: Launch, table, blocks: BlockTable, config: ModelConfig, inputs: dict, outputs, rows: list):
    """Runs a kernel in programs over its table's major blocks, heads and rows.

    inputs: `queries` (B, T, K, G, H), `keys` (B, S, K, H) and `rows` (B, K, G, T) by kind. A kernel takes them in this
        order, then `outputs` (like queries or keys), and `rows`. A program sees its own head; in its major blocks'
        kind, only its block.
    """
    B, T, K, G, H = inputs["queries"][0].shape
    S, by_key = blocks.until.shape[1], kernel is _dkv_kernel
    M = table.shape[1]

    def place(i, n, b):
        # The last queries of a row have most work, as have its first keys: programs with much work start first.
        k, g = (n, 0) if by_key else (jax.lax.div(n, G), jax.lax.rem(n, G))
        return b, (i if by_key else M - 1 - i), k, g

    def at(shape, index):
        return pl.BlockSpec(shape, lambda *ids: index(*place(*ids)))

    if by_key:
        queries = at((None, T, None, G, H), lambda b, i, k, g: (b, 0, k, 0, 0))
        keys = at((None, launch.key, None, H), lambda b, i, k, g: (b, i, k, 0))
        values = at((None, None, G, T), lambda b, i, k, g: (b, k, 0, 0))
    else:
        queries = at((None, launch.query, None, None, H), lambda b, i, k, g: (b, i, k, g, 0))
        keys = at((None, S, None, H), lambda b, i, k, g: (b, 0, k, 0))
        values = at((None, None, None, launch.query), lambda b, i, k, g: (b, k, g, i))
    kinds = dict(queries=queries, keys=keys, rows=values)
    taken = [(kinds[kind], x) for kind in kinds for x in inputs.get(kind, ())]
    line = at((None, None, table.shape[2]), lambda b, i, k, g: (b, i, 0))
    row, both = at((None, S), lambda b, i, k, g: (b, 0)), pl.BlockSpec((2,), lambda *_: (0,))
    results = [(keys if by_key else queries, x) for x in outputs] + [(values, x) for x in rows]

    def call(interpret: bool, *operands):
        return pl.pallas_call(
            functools.partial(kernel, config, launch, blocks.window is not None),
            grid=(M, K if by_key else K * G, B),
            in_specs=[both, line, row, row, *(where for where, _ in taken)],
            out_specs=[where for where, _ in results],
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in results],
            compiler_params=plgpu.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
            interpret=interpret,
            name=kernel.__name__.strip("_"),
        )(*operands)

    operands = (numbers_of(blocks, T), table, blocks.until, blocks.position, *(x for _, x in taken))
    # The program's platform need not be the platform of the machine that compiles it.
    return jax.lax.platform_dependent(*operands, cuda=functools.partial(call, False), cpu=functools.partial(call, True))


def _forward_kernel(config, launch, windowed, numbers, line, until, position, q, k, v, y, log):
    t, q_TH = pl.num_programs(0) - 1 - pl.program_id(0), q[...]

    def visit(masked: bool, p, state):
        top_T, total_T, acc_TH = state
        keys = pl.ds(line[2 + p] * launch.key, launch.key)
        logit_TS, _ = _logits(q_TH, k[keys, :], config)
        if masked:
            seen_TS = _seen(t, line[2 + p], launch, numbers, until, position, windowed, keys_first=False)
            logit_TS = jnp.where(seen_TS, logit_TS, HIDDEN)
        # A query that has seen no key so far has weights of exp2(HIDDEN - HIDDEN) = 1. The first key that it sees, at
        # the latest itself, removes them: exp2(HIDDEN - top) is exactly 0. A query of no pair at all has a total of 0.
        new_T = jnp.maximum(top_T, jnp.max(logit_TS, axis=1))
        weight_TS = jnp.exp2(logit_TS - new_T[:, None])
        fade_T = jnp.exp2(top_T - new_T)
        total_T = fade_T * total_T + jnp.sum(weight_TS, axis=1)
        acc_TH = fade_T[:, None] * acc_TH + _dot(weight_TS.astype(v.dtype), v[keys, :], (1, 0))
        return new_T, total_T, acc_TH

    start_T = jnp.zeros((launch.query,), jnp.float32)
    state = start_T + HIDDEN, start_T, jnp.zeros(q_TH.shape, jnp.float32)
    state = jax.lax.fori_loop(0, line[0], functools.partial(visit, False), state)
    top_T, total_T, acc_TH = jax.lax.fori_loop(line[0], line[1], functools.partial(visit, True), state)
    total_T = jnp.where(total_T > 0, total_T, 1.0)
    y[...] = (acc_TH / total_T[:, None]).astype(y.dtype)
    log[...] = top_T + jnp.log2(total_T)


def _dq_kernel(config, launch, windowed, numbers, line, until, position, q, dy, k, v, log, inner, dq):
    t, q_TH, dy_TH = pl.num_programs(0) - 1 - pl.program_id(0), q[...], dy[...]
    log_T1, inner_T1 = log[...][:, None], inner[...][:, None]

    def visit(masked: bool, p, acc_TH):
        keys = pl.ds(line[2 + p] * launch.key, launch.key)
        k_SH, seen_TS = k[keys, :], None
        if masked:
            seen_TS = _seen(t, line[2 + p], launch, numbers, until, position, windowed, keys_first=False)
        logit_TS, slope_TS = _logits(q_TH, k_SH, config)
        dweight_TS = _dot(dy_TH, v[keys, :], (1, 1))
        _, dlogit_TS = weights(logit_TS, slope_TS, dweight_TS, seen_TS, log_T1, inner_T1)
        return acc_TH + _dot(dlogit_TS.astype(k_SH.dtype), k_SH, (1, 0))

    acc_TH = jnp.zeros(q_TH.shape, jnp.float32)
    acc_TH = jax.lax.fori_loop(0, line[0], functools.partial(visit, False), acc_TH)
    acc_TH = jax.lax.fori_loop(line[0], line[1], functools.partial(visit, True), acc_TH)
    dq[...] = (acc_TH * config.query_scale).astype(dq.dtype)


def _dkv_kernel(config, launch, windowed, numbers, line, until, position, q, dy, k, v, log, inner, dk, dv):
    s, G, k_SH, v_SH = pl.program_id(0), q.shape[1], k[...], v[...]

    def visit(masked: bool, first, count, i, state):
        dk_SH, dv_SH = state
        g, t = jax.lax.div(i, count), line[2 + first + jax.lax.rem(i, count)]
        queries, seen_ST = pl.ds(t * launch.query, launch.query), None
        if masked:
            seen_ST = _seen(t, s, launch, numbers, until, position, windowed, keys_first=True)
        q_TH, dy_TH = q[queries, g, :], dy[queries, g, :]
        logit_ST, slope_ST = _logits(k_SH, q_TH, config)
        dweight_ST = _dot(v_SH, dy_TH, (1, 1))
        log_1T, inner_1T = log[g, queries][None], inner[g, queries][None]
        weight_ST, dlogit_ST = weights(logit_ST, slope_ST, dweight_ST, seen_ST, log_1T, inner_1T)
        dv_SH += _dot(weight_ST.astype(dy_TH.dtype), dy_TH, (1, 0))
        dk_SH += _dot(dlogit_ST.astype(q_TH.dtype), q_TH, (1, 0))
        return dk_SH, dv_SH

    zero_SH, whole, rest = jnp.zeros(k_SH.shape, jnp.float32), line[0], line[1] - line[0]
    state = zero_SH, zero_SH
    state = jax.lax.fori_loop(0, G * whole, functools.partial(visit, False, 0, whole), state)
    dk_SH, dv_SH = jax.lax.fori_loop(0, G * rest, functools.partial(visit, True, whole, rest), state)
    dk[...] = (dk_SH * config.query_scale).astype(dk.dtype)
    dv[...] = dv_SH.astype(dv.dtype)


def _seen(t, s, launch: Launch, numbers, until, position, windowed: bool, keys_first: bool):
    """Returns whether queries in block t see keys in block s. numbers: as from `numbers_of`."""
    query_T = numbers[1] + t * launch.query + jnp.arange(launch.query)
    key_S, keys = s * launch.key + jnp.arange(launch.key), pl.ds(s * launch.key, launch.key)

    def along(query, key):
        return (query[None, :], key[:, None]) if keys_first else (query[:, None], key[None, :])

    query, key = along(query_T, key_S)
    _, end = along(query_T, until[keys])
    seen = (key <= query) & (query < end)
    if windowed:
        at_query, at_key = along(position[pl.ds(numbers[1] + t * launch.query, launch.query)], position[keys])
        seen &= at_query - at_key < numbers[0]
    return seen


def _logits(a_MH, b_NH, config: ModelConfig):
    return logits(_dot(a_MH, b_NH, (1, 1)), config)


def _dot(a, b, contracted: tuple[int, int]):
    axes = (contracted[:1], contracted[1:])
    return jax.lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=jnp.float32)


# ---- Block sizes, and tables of the pairs of blocks that a row needs.
#
# The test of a pair is that of the TPU kernels (`jprm.methods.kernels.tpu`): a block of queries [a, b) needs a block of
# keys [c, d) if and only if c < b and the keys' largest `until` exceeds a. Of the needed pairs those are `whole` in
# which every query sees every key, d <= a + 1 and the keys' least `until` is at least b. A kernel visits them first and
# makes no mask for them. In layers with a window a pair is needed only if the least position of its queries is within
# the window of its keys' largest, and whole only if the largest is within the window of the least.

SMALLEST = 16
"""The shortest matrix side that Triton multiplies."""

TUNED = "gpu_blocks.json"
"""Blocks by device, then by `key`: the best sweep results from `experiments/bench/gpu_check.py`."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel's settings: tokens per query and key block, warps per program, pipeline stages."""

    query: int
    key: int
    warps: int
    stages: int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Launches:
    forward: Launch
    dq: Launch
    dkv: Launch

    @property
    def tile(self) -> int:
        """Rows are padded to a multiple of this many tokens; all sizes are powers of two."""
        return max(max(x.query, x.key) for x in (self.forward, self.dq, self.dkv))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockTable:
    """The block pairs in every row that hold a visible token pair, computed once for all layers.

    A table has one line per major block: how many whole minor blocks, how many needed ones, and their
    indices, whole ones first. If rows are split, the C query parts' tables are side by side, and query blocks are
    counted within their part.
    """

    until: Int[Array, "B S"]
    position: Int[Array, "B S"]
    forward: Int[Array, "B M 2+N"]  # major: queries
    dq: Int[Array, "B M 2+N"]  # major: queries
    dkv: Int[Array, "B C*N 2+M/C"]  # major: keys
    launches: Launches
    local: tuple[Array, Array, Array] | None = None  # the three tables of layers with a window
    window: Int[Array, ""] | None = None  # of the layer, in positions; None: queries see the whole path


def padded_head(H: int) -> int:
    """Returns the head size `H` padded to a power of two, as Triton requires, at least 16."""
    return max(SMALLEST, 1 << (H - 1).bit_length())


def key(H: int, itemsize: int) -> str:
    """Returns the key into the tuned blocks: padded head size, bytes per element, e.g. `128x2`."""
    return f"{padded_head(H)}x{itemsize}"


def default_launches(H: int, itemsize: int) -> Launches:
    """Returns blocks for head size `H`, in `itemsize` bytes, that keep all values in registers on A100, H100 and B200.

    tests/model/test_gpu_aot.py checks it.
    """
    if itemsize == 4:  # with full precision, products take no tensor cores and hold their operands in registers
        if H <= 64:
            return Launches(*[Launch(32, 32, 4, 2)] * 3)
        if H <= 128:
            return Launches(Launch(32, 32, 8, 1), Launch(16, 16, 4, 2), Launch(16, 32, 8, 1))
        return Launches(Launch(32, 16, 8, 1), Launch(16, 16, 4, 2), Launch(16, 16, 8, 2))
    if H <= 64:
        return Launches(Launch(128, 64, 4, 3), Launch(128, 64, 8, 2), Launch(64, 128, 8, 2))
    if H <= 128:
        return Launches(Launch(128, 64, 8, 2), Launch(64, 64, 4, 2), Launch(64, 64, 8, 2))
    return Launches(Launch(64, 32, 8, 2), Launch(32, 32, 8, 2), Launch(32, 32, 8, 2))


def launches(H: int, itemsize: int) -> Launches:
    """Returns the fastest measured blocks for this machine's GPU (`tuned`), or `default_launches`."""
    default = default_launches(padded_head(H), itemsize)
    if jax.default_backend() == "gpu":
        measured = tuned().get(jax.local_devices()[0].device_kind, {}).get(key(H, itemsize))
        if measured:
            return dataclasses.replace(default, **{name: Launch(**measured[name]) for name in ("forward", "dq", "dkv")})
    return default


@functools.cache
def tuned() -> dict:
    """Returns {device kind: {`key`: {"forward", "dq", "dkv": fields of a `Launch`}}}, as measured. Cached."""
    return json.loads((pathlib.Path(__file__).parent / TUNED).read_text(encoding="utf-8"))


def find_blocks(
    until_BS: Int[Array, "B S"], position_BS: Int[Array, "B S"], sizes: Launches, parts: int = 1,
    windows: tuple[int, ...] = (),
) -> BlockTable:  # fmt: skip
    """Returns each row's visible block pairs, for all layers.

    Args:
      until_BS: a token is visible to queries before this index.
      position_BS: its depth, to which windows refer.
      sizes: blocks of the forward and backward kernels; `sizes.tile` must divide S / parts.
      parts: devices that split each row's queries.
      windows: the model's window sizes, without 0; if given, layers with a window get tables of their own.
    """
    pairs = functools.partial(_pairs, until_BS, position_BS)
    local = None if not windows else _tables(functools.partial(pairs, windows=windows), sizes, parts)
    return BlockTable(until_BS, position_BS, *_tables(pairs, sizes, parts), sizes, local)


def _tables(pairs, sizes: Launches, parts: int) -> tuple[Array, Array, Array]:
    forward, dq = (_table(*pairs(x.query, x.key)) for x in (sizes.forward, sizes.dq))
    return forward, dq, _table(*(_keys_first(x, parts) for x in pairs(sizes.dkv.query, sizes.dkv.key)))


def _pairs(until_BS, position_BS, query: int, key: int, windows: tuple[int, ...] = ()):
    """Returns whether query blocks need key blocks, and whether all queries see all keys, both (B, M, N).

    `query` and `key` are tokens per block. A row's tokens must be a multiple of both.
    """
    B, S = until_BS.shape

    def blocked(x_BS, size):
        x_BNS = reshape(x_BS, (B, S // size, size), "batch")
        return jnp.min(x_BNS, axis=-1), jnp.max(x_BNS, axis=-1)

    start_M1, start_N = jnp.arange(0, S, query)[:, None], jnp.arange(0, S, key)
    least_B1N, most_B1N = (x[:, None] for x in blocked(until_BS, key))
    needed_BMN = (start_N < start_M1 + query) & (most_B1N > start_M1)
    whole_BMN = (start_N + key <= start_M1 + 1) & (least_B1N >= start_M1 + query)
    if windows:
        lowest_BM1, highest_BM1 = (x[:, :, None] for x in blocked(position_BS, query))
        nearest_B1N, farthest_B1N = (x[:, None] for x in reversed(blocked(position_BS, key)))
        needed_BMN &= lowest_BM1 - nearest_B1N < max(windows)
        whole_BMN &= highest_BM1 - farthest_B1N < min(windows)
    return needed_BMN, whole_BMN


def _keys_first(x_BMN, parts: int):
    """Transposes to (B, C x N, M / C): the key blocks as each of C query parts sees them. M must be a multiple of C."""
    B, M, N = x_BMN.shape
    x_BCMN = reshape(x_BMN, (B, parts, M // parts, N), "batch")
    return reshape(x_BCMN.swapaxes(2, 3), (B, parts * N, M // parts), "batch")


def _table(needed_BMN, whole_BMN) -> Int[Array, "B M 2+N"]:
    N = needed_BMN.shape[-1]
    index_N = jnp.arange(N, dtype=jnp.int32)
    order_BMN = jnp.where(whole_BMN, index_N, jnp.where(needed_BMN, N + index_N, 2 * N))
    minor_BMN = jnp.sort(order_BMN, axis=-1) % N
    counts = [jnp.sum(x, axis=-1, keepdims=True, dtype=jnp.int32) for x in (whole_BMN, needed_BMN)]
    return jnp.concatenate([*counts, minor_BMN], axis=-1)


GPU_KERNEL = Implementation(plan, with_backward(_forward, _backward), refuses, backend="gpu", flops=flops)
