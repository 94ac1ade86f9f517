"""Step beam search, and DVTS (diverse verifier tree search): several independent beams.

As in search-and-learn, width * expand steps are drawn a round and scored, and the best go on. Different from it:
a finished chain keeps its place in the beam as long as its score earns it, so a search ends when the whole beam has
finished; a chain that was cut off is not finished; the same step drawn twice takes one place, not two.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float

from jprm.search.choose import chain_scores
from jprm.search.growing import ROOT, Draw, GrowingTree
from jprm.search.lockstep import Ask, Steps


@dataclasses.dataclass(frozen=True)
class Beam:
    """Keeps the best `width` prefixes and draws `expand` next steps from each; width * expand first steps.

    `max_steps`: rounds at most.
    """

    kind: ClassVar[str] = "tree"
    width: int
    expand: int
    max_steps: int = 40

    def __post_init__(self):
        _positive(width=self.width, expand=self.expand, max_steps=self.max_steps)

    def steps(self, tree: GrowingTree, rule: str) -> Steps:
        return _beams(tree, rule, 1, self.width, self.expand, self.max_steps)


@dataclasses.dataclass(frozen=True)
class DVTS:
    """`subtrees` beams of width 1 that share nothing but the problem: each keeps the best of its own `expand` steps.

    With one subtree it is `Beam(1, expand)`.
    """

    kind: ClassVar[str] = "tree"
    subtrees: int
    expand: int
    max_steps: int = 40

    def __post_init__(self):
        _positive(subtrees=self.subtrees, expand=self.expand, max_steps=self.max_steps)

    def steps(self, tree: GrowingTree, rule: str) -> Steps:
        return _beams(tree, rule, self.subtrees, 1, self.expand, self.max_steps)


def select_beams(
    key_C: Float[np.ndarray, " C"], finished_C: Bool[np.ndarray, " C"], width: int
) -> tuple[list[int], list[int]]:
    """(live, held): of the `width` highest keys, the first of equals, those that may go on and those that are finished.

    A key that is NaN is never kept.
    """
    order = np.argsort(-np.asarray(key_C, float), kind="stable")[:width]
    kept = [int(i) for i in order if not np.isnan(key_C[i])]
    return [i for i in kept if not finished_C[i]], [i for i in kept if finished_C[i]]


def _beams(tree: GrowingTree, rule: str, groups: int, width: int, expand: int, max_steps: int) -> Steps:
    """`groups` beams in one tree. Of each: the draws of the round, and the finished nodes that hold a place."""
    share = width * expand
    (first,) = yield [Ask(ROOT, groups * share, "step")]
    drawn = [first[g * share : (g + 1) * share] for g in range(groups)]
    held: list[list[int]] = [[] for _ in range(groups)]
    before: set[int] = set()
    for step in itertools.count(1):
        live = []
        for g in range(groups):
            candidates = dict.fromkeys([(node, True) for node in held[g]] + [c for d in drawn[g] for c in _ends(d)])
            nodes, finished = zip(*candidates, strict=True) if candidates else ((), ())
            _, key_C = chain_scores(tree, nodes, rule)
            goes_on, holds = select_beams(key_C, finished, width)
            live.append([nodes[i] for i in goes_on])
            held[g] = [nodes[i] for i in holds]
        going = [node for group in live for node in group]
        before |= {draw.end for group in drawn for draw in group if draw.end != ROOT}
        tree.release(before - set(going))
        before = set(going)
        if not going:
            return None
        if step == max_steps:
            return "max_steps"
        found = iter((yield [Ask(node, expand, "step") for node in going]))
        drawn = [[draw for _ in group for draw in next(found)] for group in live]
    raise AssertionError("unreachable")


def _ends(draw: Draw) -> list[tuple[int, bool]]:
    """The (node, finished) that a draw makes a candidate: none where it was cut off or has nothing new."""
    if draw.sample.finish_reason == "stop" and draw.end != ROOT:
        return [(draw.end, True)]
    return [(draw.end, False)] if draw.sample.finish_reason == "step" and draw.end != draw.start else []


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} is {value}: it is at least 1")
