"""Which blocks of keys a block of queries needs, as tables that a kernel's grid walks: no step of it is idle.

A block of queries [a, b) needs a block of keys [c, d) if and only if c < b and the keys' largest `until` exceeds a. No
pair of blocks passes that test in vain, whatever `until` is, as long as every token sees itself (until[j] > j):

- Keys wholly before the queries, d <= a: let j be the key with the largest `until`. Query a sees it, as
  j < d <= a < until[j]. Where the test fails, every key is closed at a, and so for all later queries.
- Blocks that overlap: token max(a, c) lies in both and sees itself.
- Keys wholly behind the queries, c >= b: no query sees a later key, and the test says so.

Sliding windows hide more, inside blocks; the tables do not know them.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jprm.model.sharding import reshape

FIRST, LAST, LIVE = 1, 2, 4
"""Flags of a table's entry: the first and the last of its major block, and one that is not padding."""

MINOR = (1 << 14) - 1  # the bits of an entry's minor block

LANES = 128
VMEM = 12 * 2**20  # of the 16 MiB that the compiler gives a kernel on v5e and v5p; the rest is for what it spills
SMEM = 640 * 2**10  # of 1 MiB


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Sizes:
    """Tokens a block of queries and a block of keys."""

    query: int
    key: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """The pairs of blocks of every row that hold a visible pair of tokens, worked out once for all layers.

    An entry is major << 17 | minor << 3 | flags. Behind a row's pairs the last one is repeated without flags, so that
    nothing is fetched or computed for it.
    """

    until: Int[Array, "B T"]
    position: Int[Array, "B T"]
    by_query: Int[Array, "B P"]  # major: the block of queries
    by_key: Int[Array, "B P"]  # the same pairs; major: the block of keys
    count: Int[Array, " B"]  # pairs of the row
    sizes: Sizes
    window: Int[Array, ""] | None = None  # of the layer, in positions; None: queries see the whole path


def most_pairs(T: int, sizes: Sizes) -> int:
    """Pairs of blocks in a row of one chain: entries of a table, whatever the row."""
    return sum((start + sizes.query - 1) // sizes.key + 1 for start in range(0, T, sizes.query))


def block_sizes(T: int, H: int, G: int, itemsize: int) -> Sizes:
    """The largest blocks, of at most 512 tokens, that fit a TPU core's memories and make G x block_q at most 2,048.

    A step of the grid has a cost of its own, beside which its 4 x G x block_q x block_k x H operations must be many:
    0.5 G at G = 7, H = 128 and 256 x 512. Beyond that, larger blocks pass over less of what trees hide.

    SMEM: a table has about T^2 / (2 block_q block_k) entries of 4 bytes. At T = 131,072 with 256 x 512 that is
    512 x 256 / 2 = 65,536 and half the diagonal's 256: 257 KiB of 1 MiB; with 128 x 512 it is 514 KiB. (With 128 x 128
    it would be 2 MiB.)

    Raises:
        ValueError: T is not a multiple of 128, or no blocks fit: so many or so wide heads, or so long rows.
    """
    if T % LANES:
        raise ValueError(f"attention='kernel' takes rows of a multiple of {LANES} tokens, not {T}")
    lengths = [size for size in (512, 256, 128) if T % size == 0]
    for sizes in itertools.starmap(Sizes, itertools.product(lengths, lengths)):
        few = G * sizes.query <= 2048 or sizes.query == LANES
        if few and vmem_bytes(sizes, H, G, itemsize) <= VMEM and 4 * most_pairs(T, sizes) <= SMEM:
            return sizes
    raise ValueError(
        f"attention='kernel': no blocks of {G} query heads a key-value head, of size {H} and {itemsize} bytes an "
        f"element, fit a TPU core in rows of {T:,} tokens; use shorter rows, bfloat16 or attention='blocked'"
    )


def vmem_bytes(sizes: Sizes, H: int, G: int, itemsize: int) -> int:
    """What the largest of the three kernels keeps in VMEM, in bytes.

    Blocks that are fetched or written are there twice, since the next one travels while this one is computed. Sums are
    float32; the running maximum and total take 128 lanes a query. Heads narrower than 128 are padded to that.

    For G = 7, H = 128, bfloat16, 256 x 512: q = 7 x 256 x 128 = 229,376 elements, k = 65,536, pair = 131,072; forward
    4 (2 q + 2 k) + 4 (q + 2 q) + 10 pair = 6.4 MB, dq 4 (3 q + 2 k) + 4 q + 16 pair = 6.3 MB,
    dk and dv 4 (2 q + 4 k) + 8 k + 16 pair = 5.5 MB.
    """
    lanes = -(-H // LANES) * LANES
    q, k, pair = G * sizes.query * lanes, sizes.key * lanes, sizes.query * sizes.key
    state = 2 * G * sizes.query * LANES
    forward = 2 * itemsize * (2 * q + 2 * k) + 4 * (q + state) + (8 + itemsize) * pair  # q, y; k, v; logits, weights
    dq = 2 * itemsize * (3 * q + 2 * k) + 4 * q + 16 * pair  # q, dy, dq; k, v; logits, weights and their gradients
    dkv = 2 * itemsize * (2 * q + 4 * k) + 8 * k + 16 * pair
    return max(forward, dq, dkv)


def find_blocks(until_BT: Int[Array, "B T"], position_BT: Int[Array, "B T"], sizes: Sizes) -> Blocks:
    B, T = until_BT.shape
    start_N, start_S = jnp.arange(0, T, sizes.query), jnp.arange(0, T, sizes.key)
    last_BS = jnp.max(reshape(until_BT, (B, T // sizes.key, sizes.key), "batch"), axis=-1)
    needed_BNS = (start_S < start_N[:, None] + sizes.query) & (last_BS[:, None] > start_N[:, None])
    count_B = jnp.sum(needed_BNS, axis=(1, 2), dtype=jnp.int32)
    width = most_pairs(T, sizes)
    by_query_BP, by_key_BP = (_table(x, count_B, width) for x in (needed_BNS, needed_BNS.swapaxes(1, 2)))
    return Blocks(until_BT, position_BT, by_query_BP, by_key_BP, count_B, sizes)


def _table(needed_BMN, count_B, width: int) -> Int[Array, "B P"]:
    """The needed pairs in order, major first."""
    B, M, N = needed_BMN.shape
    pair_MN = jnp.arange(M)[:, None] << 17 | jnp.arange(N) << 3
    nowhere = jnp.iinfo(jnp.int32).max
    pair_BMN = jnp.where(needed_BMN, pair_MN, nowhere)
    pair_BP = jnp.sort(reshape(pair_BMN, (B, M * N), "batch"), axis=-1)[:, :width]
    live_BP = jnp.arange(width) < count_B[:, None]
    end_BP = jnp.max(jnp.where(live_BP, pair_BP, 0), axis=-1, keepdims=True)
    major_BP = jnp.where(live_BP, pair_BP >> 17, -1)
    change_BP = major_BP[:, 1:] != major_BP[:, :-1]
    first_BP = jnp.pad(change_BP, ((0, 0), (1, 0)), constant_values=True)
    last_BP = jnp.pad(change_BP, ((0, 0), (0, 1)), constant_values=True)
    return jnp.where(live_BP, pair_BP | LIVE | FIRST * first_BP | LAST * last_BP, end_BP).astype(jnp.int32)
