"""Turns stored trees into batches of `Rows`: a Grain pipeline whose order is a function of (seed, position).

    source -> shuffled anew every epoch -> tokenised -> windows of trees, packed together -> rows shuffled -> batches

Only two windows are in memory at a time. The iterator's state is a few integers. A restored iterator gives the same
batches bit for bit, also from the middle of a window.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import grain
import jax
import numpy as np
from jaxtyping import Int64

from jprm.layout import Layout
from jprm.pack import PackReport, TooLong, pack
from jprm.rows import Rows, empty_rows
from jprm.token_tree import Supervise, TokenTree, token_tree
from jprm.tree import ReasoningTree


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    rows: int  # of a batch
    tokens: int  # of a row
    slots: int  # of a row
    too_long: TooLong  # what to do with chains that exceed a row; see `jprm.pack.pack`
    supervise: Supervise = "step"
    extras: tuple[str, ...] = ()  # keys of nodes; see `jprm.token_tree.token_tree`
    weight: str = ""  # a key of nodes, or none
    window: int = 256  # trees packed together: more leave less padding and take more memory
    seed: int = 0
    shuffle: bool = True  # trees within an epoch, and the rows of a window
    epochs: int | None = None  # None repeats for ever
    stream: tuple[int, int] = (0, 1)  # (k, n): the k-th of n streams, which packs every n-th window
    chains: bool = False  # a row holds one chain; see `jprm.pack.pack`
    siblings: bool = False  # a split keeps alternatives together; see `jprm.pack.pack`

    def __post_init__(self):
        for name in ("rows", "tokens", "slots", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


COUNTS = tuple(field.name for field in dataclasses.fields(PackReport))
"""The counts that `counted_batches` gives, in order."""


def packed_batches(*args: Any, **kwargs: Any) -> grain.IterDataset[Rows]:
    """Returns the rows of `counted_batches` alone."""
    return counted_batches(*args, **kwargs).map(lambda batch: batch[0])


def counted_batches(
    source: Sequence[Any] | grain.MapDataset, layout: Layout | None, config: PipelineConfig,
    tree_of: Callable[[Any], ReasoningTree] | None = None,
) -> grain.IterDataset[tuple[Rows, Int64[np.ndarray, "B K"]]]:  # fmt: skip
    """Returns batches of rows, and the counts of packing them: a window's are beside its first row.

    A batch has exactly `config.rows` rows of numpy arrays. Nothing is dropped: rows that do not fill a batch at the end
    of an epoch begin the first batch of the next. Empty rows, whose weights are 0, complete the last batch of all.

    Args:
        source: random access (`len` and `[i]`) to trees, or to items that `tree_of` turns into trees.
        layout: turns trees into token trees; None where `source` has token trees (`jprm.data.token_cache`).

    Raises:
        ValueError: an empty source; while iterating, what `token_tree` and `pack` refuse.
    """
    if len(source) == 0:
        raise ValueError("the data source is empty; there is nothing to train on")
    trees: grain.MapDataset[Any] = grain.MapDataset.source(source).seed(config.seed)
    if config.shuffle:
        trees = trees.shuffle()
    if tree_of is not None:
        trees = trees.map(tree_of)
    if layout is not None:
        given = dict(supervise=config.supervise, extras=config.extras, weight=config.weight)
        trees = trees.map(functools.partial(token_tree, layout=layout, **given))
    windows = trees.batch(config.window, batch_fn=list).repeat(config.epochs)
    packed = windows.map_with_index(functools.partial(_pack_window, config))
    first, count = config.stream
    packed = packed[first::count] if count > 1 else packed
    # One thread packs one window ahead, so that the accelerator does not wait for the host between windows.
    stream = packed.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
    return grain.experimental.RebatchIterDataset(stream, config.rows).map(functools.partial(_fill_up, config.rows))


def _pack_window(config: PipelineConfig, index: int, trees: list[TokenTree]) -> tuple[Rows, np.ndarray]:
    c = config
    packed = pack(trees, c.tokens, c.slots, too_long=c.too_long, chains=c.chains, siblings=c.siblings)
    rows = packed.rows
    if len(rows.tokens) == 0:  # no tree of the window has a step; an empty row keeps the stream going
        rows = empty_rows(1, c.tokens, c.slots, tuple(rows.extras))
    count = len(rows.tokens)
    order_B = np.random.default_rng([c.seed, index]).permutation(count) if c.shuffle else np.arange(count)
    count_BK = np.zeros((count, len(COUNTS)), np.int64)
    count_BK[0] = dataclasses.astuple(packed.report)
    return jax.tree.map(lambda x_BX: x_BX[order_B], rows), count_BK


def _fill_up(count: int, batch: tuple[Rows, np.ndarray]) -> tuple[Rows, np.ndarray]:
    rows, count_BK = batch
    missing = count - len(rows.tokens)
    if missing == 0:
        return batch
    empty = empty_rows(missing, rows.tokens.shape[1], rows.step_end.shape[1], tuple(rows.extras))
    none_BK = np.zeros((count - len(count_BK), len(COUNTS)), np.int64)
    return jax.tree.map(lambda *pair: np.concatenate(pair), batch, (empty, none_BK))
