"""Monte Carlo tree search over steps, with a process reward model's score as a leaf's value.

As in AlphaZero (Silver et al., Science 362, 2018), a simulation descends by PUCT to a leaf, expands it, and adds the
leaf's value along the path. An action is a step that the policy sampled; its prior is its fraction of the node's
samples. Before its first visit, its value is the model's score, known as soon as the step is sampled.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

from jprm.methods.search.growing_tree import ROOT, Ask, Draw, GrowingTree, Steps


@dataclasses.dataclass(frozen=True)
class MCTS:
    r"""Monte Carlo tree search: PUCT decides where to continue, the model's score is a leaf's value.

    For example:
      jprm search mcts --policy server.json --model runs/prm --input problems.jsonl --budget 20000 \
        --simulations 64 --expand 4 --rollouts 1 --output mcts.jsonl

    Attributes:
      simulations: Walks from the problem to a leaf, at most. The search ends earlier once everything within reach has
          been visited.
      expand: Next steps sampled after every visited leaf.
      c_puct: Exploration weight in PUCT; AlphaZero's is 1.25. Made for values in [0, 1].
      rollouts: Completions per visited leaf; their mean chain score is then its value, and one that is cut off or
          unscored counts as 0. With 0 the value is the score of the leaf's own prefix. Completions are candidates for
          the result.
      max_steps: Steps per chain, at most.
    """

    kind: ClassVar[str] = "tree"
    simulations: int = 64
    expand: int = 4
    c_puct: float = 1.25
    rollouts: int = 0
    max_steps: int = 40

    def __post_init__(self):
        if min(self.simulations, self.expand, self.max_steps) < 1 or self.rollouts < 0 or self.c_puct < 0:
            raise ValueError("simulations, expand and max_steps must be at least 1, rollouts and c_puct at least 0")

    def steps(self, tree: GrowingTree, rule: str) -> Steps:
        state = _State()
        try:
            (drawn,) = yield [Ask(ROOT, self.expand, "step")]
            state.grow(tree, rule, ROOT, drawn)
            for _ in range(self.simulations):
                if ROOT in state.closed:
                    return None
                path = state.descend(self.c_puct)
                leaf = path[-1]
                value = state.value[leaf]
                if leaf in state.goes_on and len(path) < self.max_steps:
                    asks = [Ask(leaf, self.expand, "step")]
                    if self.rollouts:
                        asks.append(Ask(leaf, self.rollouts, "end"))
                    draws = yield asks
                    state.grow(tree, rule, leaf, draws[0])
                    if self.rollouts and draws[1]:
                        value = _rollout_value(tree, rule, draws[1])
                state.back_up(path, value)
                state.close(tree, leaf)
            return "simulations"
        finally:  # also when the budget ends the search
            for node, visits in state.visits.items():
                tree.notes[node] = {"visits": visits, "value": round(state.total[node] / visits, 7)}


def puct(value_A: Sequence[float], visits_A: Sequence[int], prior_A: Sequence[float], c_puct: float) -> list[float]:
    """Returns Q(s, a) + c_puct P(s, a) sqrt(sum_b N(s, b)) / (1 + N(s, a)) for the A actions of one state.

    `value_A` is Q, `visits_A` N and `prior_A` P. Raises ValueError if their lengths differ.
    """
    root = math.sqrt(sum(visits_A))
    return [q + c_puct * p * root / (1 + n) for q, n, p in zip(value_A, visits_A, prior_A, strict=True)]


class _State:
    def __init__(self):
        self.visits: collections.Counter[int] = collections.Counter()
        self.total: dict[int, float] = collections.defaultdict(float)  # the sum of backed-up values
        self.value: dict[int, float] = {}  # the model's
        self.prior: dict[int, float] = {}  # the policy's
        self.children: dict[int, list[int]] = {}  # in the order in which they were sampled
        self.goes_on: set[int] = set()  # nodes that may continue
        self.closed: set[int] = set()  # nodes with nothing left to visit below them

    def grow(self, tree: GrowingTree, rule: str, node: int, drawn: list[Draw]) -> None:
        """Makes children from the draws that have a score and were not cut off."""
        drawn = [draw for draw in drawn if draw.end != node and draw.sample.finish_reason != "length"]
        value_D, _ = tree.chain_scores([draw.end for draw in drawn], rule)
        share = collections.Counter()
        for draw, value in zip(drawn, value_D, strict=True):
            if not math.isnan(value):
                share[draw.end] += 1
                self.value[draw.end] = float(value)
                if draw.sample.finish_reason == "step":
                    self.goes_on.add(draw.end)
        self.children[node] = list(share)
        self.prior |= {child: n / share.total() for child, n in share.items()}
        if not share:
            self.close(tree, node)

    def descend(self, c_puct: float) -> list[int]:
        """Returns the path from the problem to a node without children; ties go to the first child."""
        path, node = [], ROOT
        while self.children.get(node):
            actions = self.children[node]
            visits_A = [self.visits[child] for child in actions]
            value_A = [self.total[a] / n if n else self.value[a] for a, n in zip(actions, visits_A, strict=True)]
            key_A = puct(value_A, visits_A, [self.prior[a] for a in actions], c_puct)
            node = max(zip(actions, key_A, strict=True), key=lambda item: (item[0] not in self.closed, item[1]))[0]
            path.append(node)
        return path

    def back_up(self, path: list[int], value: float) -> None:
        for node in path:
            self.visits[node] += 1
            self.total[node] += value

    def close(self, tree: GrowingTree, node: int) -> None:
        """Closes a visited node without open children, then every ancestor left without any."""
        while all(child in self.closed for child in self.children.get(node, ())):
            self.closed.add(node)
            if node == ROOT:
                return
            node = tree.parent[node]


def _rollout_value(tree: GrowingTree, rule: str, drawn: list[Draw]) -> float:
    """Returns the mean score of the completions; a cut-off one, or one without a score, counts as 0."""
    value_D, _ = tree.chain_scores([draw.end for draw in drawn], rule)
    for i, draw in enumerate(drawn):
        if draw.sample.finish_reason != "stop" or math.isnan(value_D[i]):
            value_D[i] = 0.0
    return float(value_D.mean())
