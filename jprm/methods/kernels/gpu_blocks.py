"""Block sizes of the GPU kernels, and tables of the pairs of blocks that a row needs.

The test of a pair is that of `tpu_blocks`: a block of queries [a, b) needs a block of keys [c, d) if and only if c < b
and the keys' largest `until` exceeds a. Of the needed pairs those are `whole` in which every query sees every key,
d <= a + 1 and the keys' least `until` is at least b. A kernel visits them first and makes no mask for them.

The tables ignore sliding windows, which hide more inside blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jprm.model.mesh import reshape

SMALLEST = 16
"""The shortest side of a matrix that Triton multiplies."""

TUNED = "gpu_blocks.json"
"""Blocks by device, then by `key`. `experiments/bench/gpu_check.py` writes the winners of its sweep here."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """How one kernel runs: tokens in a block of queries and of keys, warps of a program, stages of its pipeline."""

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
        """Tokens that rows are padded to a multiple of; all sizes are powers of two."""
        return max(max(x.query, x.key) for x in (self.forward, self.dq, self.dkv))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """The pairs of blocks of every row that hold a visible pair of tokens, computed once for all layers.

    A table has a line for each major block: how many minor blocks are whole, how many are needed in all, and their
    indices, whole ones first. Where rows are split, the tables of the C parts of the queries are side by side, and
    blocks of queries are counted within their part.
    """

    until: Int[Array, "B S"]
    position: Int[Array, "B S"]
    forward: Int[Array, "B M 2+N"]  # major: queries
    dq: Int[Array, "B M 2+N"]  # major: queries
    dkv: Int[Array, "B C*N 2+M/C"]  # major: keys
    launches: Launches
    window: Int[Array, ""] | None = None  # of the layer, in positions; None: queries see the whole path


def padded_head(H: int) -> int:
    """Returns the size that heads are padded to: Triton's arrays have powers of two."""
    return max(SMALLEST, 1 << (H - 1).bit_length())


def key(H: int, itemsize: int) -> str:
    """Returns the name of a case in the table of tuned blocks, such as `128x2`: padded head size, bytes an element."""
    return f"{padded_head(H)}x{itemsize}"


def default_launches(H: int, itemsize: int) -> Launches:
    """Returns blocks that keep all values in registers on A100, H100 and B200 (tests/test_gpu_aot.py)."""
    if itemsize == 4:  # products without tensor cores hold their operands in registers
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
    """Returns the blocks that were fastest on this machine's GPU if it was measured, otherwise the default ones."""
    if jax.default_backend() == "gpu":
        measured = tuned().get(jax.local_devices()[0].device_kind, {}).get(key(H, itemsize))
        if measured:
            return Launches(**{name: Launch(**measured[name]) for name in ("forward", "dq", "dkv")})
    return default_launches(padded_head(H), itemsize)


@functools.cache
def tuned() -> dict:
    """Returns the measured blocks, by device and case."""
    return json.loads((pathlib.Path(__file__).parent / TUNED).read_text(encoding="utf-8"))


def find_blocks(until_BS: Int[Array, "B S"], position_BS: Int[Array, "B S"], found: Launches, parts: int = 1) -> Blocks:
    """Returns the tables for rows of a multiple of `tile` tokens in each of `parts` parts of the queries."""
    forward, dq = (_table(*_pairs(until_BS, x.query, x.key)) for x in (found.forward, found.dq))
    needed_BMN, whole_BMN = _pairs(until_BS, found.dkv.query, found.dkv.key)
    by_key = _table(*(_keys_first(x, parts) for x in (needed_BMN, whole_BMN)))
    return Blocks(until_BS, position_BS, forward, dq, by_key, found)


def _pairs(until_BS, query: int, key: int):
    """Returns whether blocks of queries need blocks of keys, and whether all queries see all keys, both (B, M, N)."""
    B, S = until_BS.shape
    start_M1, start_N = jnp.arange(0, S, query)[:, None], jnp.arange(0, S, key)
    until_BNS = reshape(until_BS, (B, S // key, key), "batch")
    most_B1N, least_B1N = jnp.max(until_BNS, axis=-1)[:, None], jnp.min(until_BNS, axis=-1)[:, None]
    needed_BMN = (start_N < start_M1 + query) & (most_B1N > start_M1)
    whole_BMN = (start_N + key <= start_M1 + 1) & (least_B1N >= start_M1 + query)
    return needed_BMN, whole_BMN


def _keys_first(x_BMN, parts: int):
    """Returns (B, C x N, M / C): the blocks of keys as each of C parts of the queries sees them."""
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
