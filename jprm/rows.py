"""`Rows`: the one array layout that carries trees through jit.

Trees lie depth first, many to a row. Visibility is one comparison: query i sees key j if and only if
`j <= i < until[j]`. Plain causal attention, packed documents, padding and trees are this rule with different `until`.
"""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """B rows of T tokens with S step slots each.

    Slots of a row are ordered by `step_end` (depth first). An unused slot has `step_end` 0 and weight 0.
    A padding token sees only itself (`until[j] == j + 1`) and has position 0.
    """

    tokens: Int[Array, "B T"]
    position: Int[Array, "B T"]  # depth in tokens from the tree's own root: siblings repeat positions
    until: Int[Array, "B T"]  # first index of the row that no longer sees this token
    step_end: Int[Array, "B S"]  # index of the last token of the step; where its score is read
    label: Float[Array, "B S"]  # as in the data (a rating stays -1, 0 or 1); 1 where there is none
    weight: Float[Array, "B S"]  # 0 where unlabelled, unused, or repeated from another row


def visible(until_BT: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """The rule itself, as a (query, key) matrix: for tests and for the reference attention."""
    index_T = jax.numpy.arange(until_BT.shape[-1])
    return (index_T[None, None, :] <= index_T[None, :, None]) & (index_T[None, :, None] < until_BT[:, None, :])
