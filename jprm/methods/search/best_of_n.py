"""Best of N: whole chains from the problem; one is chosen by score or by vote (`SearchConfig.choose`)."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from jprm.methods.search.growing_tree import ROOT, Ask, GrowingTree, Steps, at_least_one

FIRST = 4
"""Chains in the first round under a budget, to learn their length; and per round if a vote may stop early."""


@dataclasses.dataclass(frozen=True)
class BestOfN:
    r"""Best of N: sample n whole chains and return the one with the highest score, or the answer that wins a vote.

    The output is a pool file, which `jprm eval best-of-n` reads as well.

    For example:
      jprm search best-of-n --policy server.json --model runs/prm --input problems.jsonl --budget 20000 --n 64 \
        --output best.jsonl
      jprm search best-of-n --policy server.json --model runs/prm --input problems.jsonl --budget 20000 \
        --choose weighted --output votes.jsonl

    Attributes:
      n: Chains per problem, at most: fewer if the budget does not allow n.
      decided: For a majority vote: sample four chains at a time, and stop once the leading answer stays ahead of the
          second with this probability, e.g. 0.95 (Adaptive-Consistency). 0 samples all n.
    """

    kind: ClassVar[str] = "pool"
    n: int = 64
    decided: float = 0.0

    def __post_init__(self):
        at_least_one(self, "n")
        if not 0 <= self.decided < 1:
            raise ValueError(f"decided is {self.decided}: it must be a probability below 1, e.g. 0.95, or 0 for never")

    def steps(self, tree: GrowingTree, rule: str) -> Steps:
        drawn = 0
        while drawn < self.n:
            n = self.n - drawn
            if tree.budget is not None:
                room = min(n, tree.affordable("end") if drawn else FIRST)
                if room < n:  # a power of two, so that problems request alike and share a call
                    n = 1 << max(0, int(room).bit_length() - 1)
            if self.decided:
                n = min(n, FIRST)
            before = len(tree.text)
            yield [Ask(ROOT, n, "end")]
            tree.release(range(before, len(tree.text)))
            drawn += n
            if self.decided and lead(tree) >= self.decided:
                return "decided"
        return None


def lead(tree: GrowingTree) -> float:
    """Returns the probability in [1/2, 1) that the leading answer stays ahead of the second (`stays_ahead`).

    Counts the finished chains within the budget, equivalent answers as one. 1/2 if there are no answers.
    """
    from jprm.methods.evaluate.votes import answer_classes  # they need array libraries
    from jprm.methods.search.jobs import answers_of, is_candidate

    answers = answers_of(tree)
    classes = answer_classes([answers[draw.end][0] for draw in tree.draws if is_candidate(tree, draw)]).tolist()
    counts = sorted((classes.count(c) for c in {*classes} - {-1}), reverse=True)
    return stays_ahead(*[*counts, 0, 0][:2])


def stays_ahead(first: int, second: int) -> float:
    """Returns the probability in (0, 1) that the first of two answers is the likelier one, from their counts.

    It is the mass above 1/2 of Beta(first + 1, second + 1) (Aggarwal et al. 2023, arXiv 2305.11860), a binomial tail.
    """
    n = first + second + 1
    return sum(math.comb(n, i) for i in range(first + 1)) / 2**n
