"""`ReasoningTree`: a problem is the root, a step is a node, a chain is a path.

Every source of step labels becomes trees, and everything downstream (packing, training, labelling, scoring, search)
takes trees. A single chain is a tree with one branch; a pool of N samples is a tree with N branches, whose common
prefixes the packer finds by their token ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

SEMANTICS = ("correctness", "rating", "value", "advantage", "implicit")
"""What a label means. `correctness`: probability in [0, 1] that the step is right. `rating`: a human's three-way
judgement, -1, 0 (neutral) or +1, which a training config turns into targets by an explicit policy. `value`:
probability in [0, 1] that a completion from here is right (Monte Carlo). `advantage` and `implicit`: real numbers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One step. `parent` is an index into the tree's nodes, -1 for the problem; a parent comes before its children."""

    parent: int
    text: str
    label: float | None = None
    origin: str | None = None  # human, monte_carlo, formal, model
    correct: bool | None = None  # outcome of the chain that ends at this node, where it is known
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # keys that jprm does not know, untouched


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningTree:
    problem: str
    nodes: tuple[Node, ...]
    answer: str | float | None = None
    semantics: str = "correctness"
    kind: str = "tree"  # the record it came from: chain, pool or tree
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
