"""Tables of the blocks of keys that each block of queries needs. A kernel's grid walks them.

The grid is as long as the longest table of the device's rows: rows with fewer pairs have idle steps.

A block of queries [a, b) needs a block of keys [c, d) if and only if c < b and the keys' largest `until` exceeds a.
Every pair that passes holds a visible pair of tokens, whatever `until` is, if every token sees itself (until[j] > j):

- Keys wholly before the queries, d <= a: let j be the key with the largest `until`. Query a sees it, as
  j < d <= a < until[j]. Where the test fails, every key is closed at a, and so for all later queries.
- Blocks that overlap: token max(a, c) is in both and sees itself.
- Keys after all queries, c >= b: no query sees a later key, and the test fails.

The tables ignore sliding windows, which hide more inside blocks.

Where rows are split over the mesh's `context`, each part of the queries has tables of its own. A block of keys that
none of its queries needs has an entry that computes nothing, but writes the zero gradient.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jprm.model.mesh import reshape

FIRST, LAST, LIVE = 1, 2, 4
"""Flags of a table's entry: the first of its major block, the last, and not padding."""

MINOR = (1 << 14) - 1  # the bits of an entry's minor block

LANES = 128
VMEM_LIMIT = 16 * 2**20  # what a kernel asks for: the cores of v5e and v6e have 128 MiB, of v5p and tpu7x 64 MiB
VMEM = 12 * 2**20  # of that, for what is counted here; the rest is for what the compiler spills
SMEM = 640 * 2**10  # for a table, of 1 MiB


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Sizes:
    """Tokens in a block of queries and in a block of keys."""

    query: int
    key: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """The pairs of blocks of every row that hold a visible pair of tokens, computed once for all layers.

    Tables of the C parts of the queries are side by side. An entry is major << 17 | minor << 3 | flags; blocks of
    queries are counted within their part. A table is padded with its last entry without flags, for which nothing is
    fetched or computed.
    """

    until: Int[Array, "B S"]
    position: Int[Array, "B S"]
    by_query: Int[Array, "B C*P"]  # major: the block of queries
    by_key: Int[Array, "B C*P"]  # the same pairs; major: the block of keys
    count: Int[Array, "B C"]  # entries of the longer of the two
    sizes: Sizes
    window: Int[Array, ""] | None = None  # of the layer, in positions; None: queries see the whole path


def most_pairs(T: int, sizes: Sizes, parts: int = 1) -> int:
    """Returns the most entries of a table: the pairs of blocks in the last part of a row of one chain.

    (A table by keys has no more: the last part of such a row needs all blocks of keys.)
    """
    return sum((start + sizes.query - 1) // sizes.key + 1 for start in range(T - T // parts, T, sizes.query))


def block_sizes(T: int, H: int, G: int, itemsize: int, parts: int = 1) -> Sizes:
    """Returns the largest blocks of at most 512 tokens that fit a TPU core's memories, with G x block_q at most 2,048.

    A step of the grid has a fixed cost, so its 4 x G x block_q x block_k x H operations must be many: 0.5 G at G = 7,
    H = 128 and 256 x 512. Larger blocks skip less of what trees hide.

    SMEM: a table has about T^2 / (2 block_q block_k) entries of 4 bytes. At T = 131,072 with 256 x 512 that is
    512 x 256 / 2 = 65,536 and half the diagonal's 256: 257 KiB of 1 MiB; with 128 x 512 it is 514 KiB. (With 128 x 128
    it would be 2 MiB.)

    Raises:
        ValueError: a part of T is not a multiple of 128, or no blocks fit: so many or so wide heads, or so long rows.
    """
    if T % (parts * LANES):
        each = f" in each of {parts} parts" if parts > 1 else ""
        raise ValueError(f"attention='kernel' takes rows of a multiple of {LANES} tokens{each}, not {T}")
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
    """Returns the bytes that the largest of the three kernels keeps in VMEM.

    Fetched and written blocks count twice, since the next one is transferred while one is computed. Sums are float32;
    the running maximum and total take 128 lanes a query. Heads narrower than 128 are padded.

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


def find_blocks(until_BS: Int[Array, "B S"], position_BS: Int[Array, "B S"], sizes: Sizes, parts: int = 1) -> Blocks:
    B, S = until_BS.shape
    start_T, start_S = jnp.arange(0, S, sizes.query), jnp.arange(0, S, sizes.key)
    last_BS = jnp.max(reshape(until_BS, (B, S // sizes.key, sizes.key), "batch"), axis=-1)
    needed_BTS = (start_S < start_T[:, None] + sizes.query) & (last_BS[:, None] > start_T[:, None])
    needed_BCTS = reshape(needed_BTS, (B, parts, len(start_T) // parts, len(start_S)), "batch")
    width = most_pairs(S, sizes, parts)
    (by_query_BP, count_BC), (by_key_BP, longer_BC) = (
        _table(x, width) for x in (needed_BCTS, needed_BCTS.swapaxes(2, 3))
    )
    return Blocks(until_BS, position_BS, by_query_BP, by_key_BP, jnp.maximum(count_BC, longer_BC), sizes)


def _table(needed_BCMN, width: int) -> tuple[Int[Array, "B C*P"], Int[Array, "B C"]]:
    """Returns the needed pairs in order, major first, and their number. A major block without any has one entry too."""
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
