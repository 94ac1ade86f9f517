"""Monte Carlo tree search over steps, with a process reward model as the value of a leaf.

As in AlphaZero (Silver et al., Science 362, 2018) a simulation walks down by PUCT to a leaf, expands it, and the leaf's
value is added along the walk. Here an action is a step that the policy drew, its prior the share of the node's draws
that it is, and its value before the first visit the model's, which is known from the moment it is drawn.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Int

from jprm.search.choose import chain_scores
from jprm.search.growing import ROOT, Draw, GrowingTree
from jprm.search.lockstep import Ask, Steps


@dataclasses.dataclass(frozen=True)
class MCTS:
    """Settings.

    Attributes:
      simulations: at most; a search ends before when everything that it may draw has been visited.
      expand: next steps drawn of a leaf when it is first visited.
      c_puct: of PUCT; AlphaZero's is 1.25. Values are taken to lie in [0, 1].
      rollouts: completions of a visited leaf whose mean chain score is its value, a chain that is cut off counting 0;
        0 takes the score of the leaf's own prefix. Either way what is completed is a candidate.
      max_steps: steps of a chain at most.
    """

    kind: ClassVar[str] = "tree"
    simulations: int
    expand: int
    c_puct: float = 1.25
    rollouts: int = 0
    max_steps: int = 40

    def __post_init__(self):
        if min(self.simulations, self.expand, self.max_steps) < 1 or self.rollouts < 0 or self.c_puct < 0:
            raise ValueError("simulations, expand and max_steps are at least 1, rollouts and c_puct at least 0")

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
                    found = yield asks
                    state.grow(tree, rule, leaf, found[0])
                    if self.rollouts and found[1]:
                        value = _rollout_value(tree, rule, found[1])
                state.back_up(path, value)
                state.close(tree, leaf)
            return "simulations"
        finally:  # a search that its budget ends has notes too
            for node, visits in state.visits.items():
                tree.notes[node] = {"visits": visits, "value": round(state.total[node] / visits, 7)}


def puct(
    value_A: Float[np.ndarray, " A"], visits_A: Int[np.ndarray, " A"], prior_A: Float[np.ndarray, " A"], c_puct: float
) -> Float[np.ndarray, " A"]:
    """Q(s, a) + c_puct P(s, a) sqrt(sum_b N(s, b)) / (1 + N(s, a)), for the actions of one state."""
    visits_A = np.asarray(visits_A)
    return np.asarray(value_A) + c_puct * np.asarray(prior_A) * np.sqrt(visits_A.sum()) / (1 + visits_A)


class _State:
    """What is known of the nodes: visits, the sum of values backed up, the model's value and the prior, children in the
    order in which they were drawn, which may go on, and which are closed because nothing below is left to visit."""

    def __init__(self):
        self.visits: collections.Counter[int] = collections.Counter()
        self.total: dict[int, float] = collections.defaultdict(float)
        self.value: dict[int, float] = {}
        self.prior: dict[int, float] = {}
        self.children: dict[int, list[int]] = {}
        self.goes_on: set[int] = set()
        self.closed: set[int] = set()

    def grow(self, tree: GrowingTree, rule: str, node: int, drawn: list[Draw]) -> None:
        """Makes children of the draws that finished or may go on and have a score."""
        drawn = [draw for draw in drawn if draw.end != node and draw.sample.finish_reason != "length"]
        value_D, _ = chain_scores(tree, [draw.end for draw in drawn], rule)
        share = collections.Counter()
        for draw, value in zip(drawn, value_D, strict=True):
            if not np.isnan(value):
                share[draw.end] += 1
                self.value[draw.end] = float(value)
                if draw.sample.finish_reason == "step":
                    self.goes_on.add(draw.end)
        self.children[node] = list(share)
        self.prior |= {child: n / share.total() for child, n in share.items()}
        if not share:
            self.close(tree, node)

    def descend(self, c_puct: float) -> list[int]:
        """The walk from the problem to a node without children, the first of equals at every turn."""
        path, node = [], ROOT
        while self.children.get(node):
            actions = self.children[node]
            visits_A = np.array([self.visits[child] for child in actions])
            value_A = [self.total[a] / n if n else self.value[a] for a, n in zip(actions, visits_A, strict=True)]
            key_A = puct(value_A, visits_A, [self.prior[a] for a in actions], c_puct)
            node = actions[int(np.argmax(np.where([a in self.closed for a in actions], -np.inf, key_A)))]
            path.append(node)
        return path

    def back_up(self, path: list[int], value: float) -> None:
        for node in path:
            self.visits[node] += 1
            self.total[node] += value

    def close(self, tree: GrowingTree, node: int) -> None:
        """Closes a node that has been visited if it has no open child, then its parents that have none left."""
        while all(child in self.closed for child in self.children.get(node, ())):
            self.closed.add(node)
            if node == ROOT:
                return
            node = tree.parent[node]


def _rollout_value(tree: GrowingTree, rule: str, drawn: list[Draw]) -> float:
    value_D, _ = chain_scores(tree, [draw.end for draw in drawn], rule)
    whole_D = [draw.sample.finish_reason == "stop" for draw in drawn]
    return float(np.where(whole_D, np.nan_to_num(value_D), 0.0).mean())
