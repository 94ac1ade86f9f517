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

from jprm.layout import Layout
from jprm.pack import TooLong, pack
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

    def __post_init__(self):
        for name in ("rows", "tokens", "slots", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


def packed_batches(
    source: Sequence[Any] | grain.MapDataset, layout: Layout, config: PipelineConfig,
    tree_of: Callable[[Any], ReasoningTree] | None = None,
) -> grain.IterDataset[Rows]:  # fmt: skip
    """Returns batches of exactly `config.rows` rows of numpy arrays.

    Nothing is dropped: rows that do not fill a batch at the end of an epoch begin the first batch of the next. Empty
    rows, whose weights are 0, complete the last batch of all.

    Args:
        source: random access (`len` and `[i]`) to trees, or to items that `tree_of` turns into trees.

    Raises:
        ValueError: an empty source; while iterating, what `token_tree` and `pack` refuse.
    """
    if len(source) == 0:
        raise ValueError("the data source is empty; there is nothing to train on")
    trees = grain.MapDataset.source(source).seed(config.seed)
    if config.shuffle:
        trees = trees.shuffle()
    if tree_of is not None:
        trees = trees.map(tree_of)
    given = dict(supervise=config.supervise, extras=config.extras, weight=config.weight)
    trees = trees.map(functools.partial(token_tree, layout=layout, **given))
    windows = trees.batch(config.window, batch_fn=list).repeat(config.epochs)
    packed = windows.map_with_index(functools.partial(_pack_window, config))
    first, count = config.stream
    packed = packed[first::count] if count > 1 else packed
    # One thread packs one window ahead, so that the accelerator does not wait for the host between windows.
    stream = packed.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
    return grain.experimental.RebatchIterDataset(stream, config.rows).map(functools.partial(_fill_up, config.rows))


def _pack_window(config: PipelineConfig, index: int, trees: list[TokenTree]) -> Rows:
    rows = pack(trees, config.tokens, config.slots, too_long=config.too_long, chains=config.chains).rows
    count = len(rows.tokens)
    if count == 0:  # no tree of the window has a step; an empty row keeps the stream going
        return _fill_up(1, rows)
    order_B = np.random.default_rng([config.seed, index]).permutation(count) if config.shuffle else np.arange(count)
    return jax.tree.map(lambda x_BX: x_BX[order_B], rows)


def _fill_up(count: int, rows: Rows) -> Rows:
    missing = count - len(rows.tokens)
    if missing == 0:
        return rows
    empty = empty_rows(missing, rows.tokens.shape[1], rows.step_end.shape[1], tuple(rows.extras))
    return jax.tree.map(lambda *pair: np.concatenate(pair), rows, empty)
