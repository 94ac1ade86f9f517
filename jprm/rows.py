"""`Rows`: the one array layout for trees under jit.

Trees are stored depth first, many per row. Visibility is one comparison: query i sees key j if and only if `j <= i <
until[j]`. Plain causal attention, packed documents, padding and trees differ only in `until`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

PER_TOKEN = ("tokens", "position", "until")
"""The fields of shape (B, T). All others, and every extra, have shape (B, S)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """B rows with T tokens and S step slots each.

    A row's slots are ordered by `step_end` (depth first). An unused slot has `step_end`, `weight` and `problem` 0,
    `tree` and `parent` -1. A padding token sees only itself (`until[j] == j + 1`) and has position 0.

    If a tree is split over rows, each part repeats the steps it continues. A repeated slot is not `owned` and has
    weight 0, but keeps its label, tree, parent and `tree_weight`: one slot owns each step.
    """

    tokens: Int[Any, "B T"]
    position: Int[Any, "B T"]  # depth in tokens from the tree's own root: siblings repeat positions
    until: Int[Any, "B T"]  # first index of the row that no longer sees this token
    step_end: Int[Any, "B S"]  # index of the last token of the step; where its score is read
    label: Float[Any, "B S"]  # as in the data (a rating stays -1, 0 or 1); 1 where there is none
    weight: Float[Any, "B S"]  # 0 where unlabelled, unused or not owned
    tree: Int[Any, "B S"]  # which tree of the row; two parts of a split tree are two
    parent: Int[Any, "B S"]  # slot of the step before it on its chain; -1 for a first step
    problem: Int[Any, "B S"]  # length of its tree's problem in tokens
    owned: Bool[Any, "B S"]
    tree_weight: Float[Any, "B S"]  # the weight of its label in the whole tree: also where the slot is not owned
    leaf: Bool[Any, "B S"]  # no step of the whole tree continues it, in this row or in another
    # Numbers of the nodes, NaN where a node has none, 0 in unused slots.
    extras: dict[str, Float[Any, "B S"]] = dataclasses.field(default_factory=dict)


def empty_rows(count: int, tokens: int, slots: int, extras: tuple[str, ...] = ()) -> Rows:
    """Returns `count` padding rows of `tokens` tokens and `slots` unused steps, as numpy arrays; `extras` are zeros."""
    none = np.full((count, slots), -1, np.int32)
    zero = np.zeros((count, slots), np.float32)
    return Rows(
        tokens=np.zeros((count, tokens), np.int32), position=np.zeros((count, tokens), np.int32),
        until=np.tile(np.arange(1, tokens + 1, dtype=np.int32), (count, 1)),
        step_end=np.zeros((count, slots), np.int32), label=np.ones((count, slots), np.float32), weight=zero.copy(),
        tree=none.copy(), parent=none.copy(), problem=np.zeros((count, slots), np.int32),
        owned=np.zeros((count, slots), bool), tree_weight=zero.copy(), leaf=np.zeros((count, slots), bool),
        extras={name: zero.copy() for name in extras},
    )  # fmt: skip


def padded_size(count: int, least: int = 1, factor: int = 2) -> int:
    """Returns the smallest least x factor^n, n >= 0, that is at least `count`: few sizes, so few compiled shapes."""
    return padded_sizes(count, least, factor)[-1]


def padded_sizes(most: int, least: int = 1, factor: int = 2) -> list[int]:
    """Returns the sizes least, least * factor, ... up to the first that is at least `most`."""
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(factor * sizes[-1])
    return sizes


def at_slots(x_BSX: Shaped[Any, "B S *X"], slot_BN: Int[Any, "B N"]) -> Shaped[Array, "B N *X"]:
    """Gathers x at N slots (or tokens) of each row, by indices that must be from 0 to S - 1 (unchecked)."""
    if x_BSX.shape[1] == 1:
        return jnp.repeat(x_BSX, slot_BN.shape[1], axis=1)
    alone = slot_BN.shape == (1, 1)  # taken twice: JAX could not tell how one number of a split axis is split
    index_BN = jnp.repeat(slot_BN, 2, axis=1) if alone else slot_BN
    y_BNX = jnp.take_along_axis(x_BSX, jnp.expand_dims(index_BN, range(2, x_BSX.ndim)), axis=1)
    return y_BNX[:, :1] if alone else y_BNX


def siblings(rows: Rows) -> Bool[Array, "B S S"]:
    """Marks pairs (i, j) of alternatives: two slots in one tree that continue the same step, or the problem.

    The relation is symmetric and irreflexive. Over all rows of a split tree every pair occurs at most once: if both
    its slots are repeated, it belongs to an earlier row.
    """
    same = (rows.tree[:, :, None] == rows.tree[:, None, :]) & (rows.parent[:, :, None] == rows.parent[:, None, :])
    owned = rows.owned[:, :, None] | rows.owned[:, None, :]
    return same & owned & ~jnp.eye(rows.tree.shape[1], dtype=bool)


def ancestors(rows: Rows) -> Bool[Array, "B S S"]:
    """Marks the pairs (i, j) with step j before step i on its chain; no slot is its own ancestor.

    Each round doubles the distance at which ancestors are found.
    """
    slots = rows.parent.shape[1]
    jump_BS = jnp.asarray(rows.parent)
    found_BSS = jump_BS[:, :, None] == jnp.arange(slots)
    for _ in range(max(slots - 1, 1).bit_length()):
        has_BS, at_BS = jump_BS >= 0, jnp.maximum(jump_BS, 0)
        found_BSS |= at_slots(found_BSS, at_BS) & has_BS[:, :, None]
        jump_BS = jnp.where(has_BS, at_slots(jump_BS, at_BS), -1)
    return found_BSS
