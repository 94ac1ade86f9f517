"""Best of N: whole chains from the problem, of which one is chosen by score or by vote (`SearchConfig.choose`)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jprm.methods.search.growing_tree import ROOT, Ask, GrowingTree, Steps, at_least_one

FIRST = 4
"""Chains sampled first under a budget, to learn their length."""


@dataclasses.dataclass(frozen=True)
class BestOfN:
    """Best of N: sample n whole chains and return the one with the highest score, or the answer that wins a vote.

    The output is a file of pools, which `jprm eval best-of-n` reads as well.

    For example:
      jprm search best-of-n --policy server.json --model runs/prm --input problems.jsonl --budget 20000 --n 64 \\
        --output best.jsonl
      jprm search best-of-n --policy server.json --model runs/prm --input problems.jsonl --budget 20000 \\
        --choose weighted --output votes.jsonl

    Attributes:
      n: Chains per problem, at most: fewer where the budget does not allow n.
    """

    kind: ClassVar[str] = "pool"
    n: int = 64

    def __post_init__(self):
        at_least_one(self, "n")

    def steps(self, tree: GrowingTree, rule: str) -> Steps:
        drawn = 0
        while drawn < self.n:
            n = self.n - drawn
            if tree.budget is not None:
                room = min(n, tree.affordable("end") if drawn else FIRST)
                if room < n:  # a power of two, so that problems request alike and share a call
                    n = 1 << max(0, int(room).bit_length() - 1)
            before = len(tree.text)
            yield [Ask(ROOT, n, "end")]
            tree.release(range(before, len(tree.text)))
            drawn += n
        return None
