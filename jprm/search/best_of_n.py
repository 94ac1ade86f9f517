"""Best of N: whole chains from the problem, of which one is chosen by score or by vote (`SearchConfig.choose`)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jprm.search.growing import ROOT, GrowingTree
from jprm.search.lockstep import Ask, Steps

FIRST = 4
"""Chains drawn first where a budget limits them, to learn how long they are."""


@dataclasses.dataclass(frozen=True)
class BestOfN:
    """n chains, or as many of them as the budget has room for."""

    kind: ClassVar[str] = "pool"
    n: int

    def __post_init__(self):
        if self.n < 1:
            raise ValueError(f"n is {self.n}: best of N draws at least one chain")

    def steps(self, tree: GrowingTree, rule: str) -> Steps:
        drawn = 0
        while drawn < self.n:
            n = self.n - drawn
            if tree.budget is not None:
                room = min(n, tree.affordable("end") if drawn else FIRST)
                if room < n:  # a power of two, so that problems ask alike and share a call
                    n = 1 << max(0, int(room).bit_length() - 1)
            before = len(tree.text)
            yield [Ask(ROOT, n, "end")]
            tree.release(range(before, len(tree.text)))
            drawn += n
        return None
