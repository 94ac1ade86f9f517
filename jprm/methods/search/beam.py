"""Step beam search, and DVTS (diverse verifier tree search): several independent beams.

As in search-and-learn, a round samples and scores width * expand steps and keeps the best. Differences: a finished
chain keeps its place in the beam while its score suffices, so a search ends when the whole beam has finished; a chain
that was cut off is not finished; and the same step sampled twice takes one place.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from jprm.methods.search.growing_tree import ROOT, Ask, Draw, GrowingTree, Steps, at_least_one

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float


@dataclasses.dataclass(frozen=True)
class Beam:
    r"""Step beam search: sample next steps, score them, continue from the best `width`.

    It samples about width * expand times one chain's tokens. If the budget ends before a chain is finished, the
    tree has no result but a reason.

    For example:
      jprm search beam --policy server.json --model runs/prm --input problems.jsonl --budget 20000 --width 4 \
        --expand 4 --output beam.jsonl

    Attributes:
      width: Prefixes kept after every step.
      expand: Next steps sampled after each prefix. The first round samples width * expand.
      max_steps: Rounds, at most.
    """

    kind: ClassVar[str] = "tree"
    width: int = 4
    expand: int = 4
    max_steps: int = 40

    def __post_init__(self):
        at_least_one(self, "width", "expand", "max_steps")

    def steps(self, tree: GrowingTree, rule: str) -> Steps:
        return _beams(tree, rule, 1, self.width, self.expand, self.max_steps)


@dataclasses.dataclass(frozen=True)
class DVTS:
    r"""DVTS (diverse verifier tree search): independent subtrees, each continuing from its own best next step.

    With one subtree it is a beam of width 1. It samples about subtrees * expand times one chain's tokens. If the
    budget ends before a chain is finished, the tree has no result but a reason.

    For example:
      jprm search dvts --policy server.json --model runs/prm --input problems.jsonl --budget 20000 \
        --subtrees 4 --expand 4 --output dvts.jsonl

    Attributes:
      subtrees: Beams of width 1 that share only the problem.
      expand: Next steps sampled in each subtree.
      max_steps: Rounds, at most.
    """

    kind: ClassVar[str] = "tree"
    subtrees: int = 4
    expand: int = 4
    max_steps: int = 40

    def __post_init__(self):
        at_least_one(self, "subtrees", "expand", "max_steps")

    def steps(self, tree: GrowingTree, rule: str) -> Steps:
        return _beams(tree, rule, self.subtrees, 1, self.expand, self.max_steps)


def select_beams(
    key_C: Sequence[float] | Float[np.ndarray, " C"], finished_C: Sequence[bool], width: int
) -> tuple[list[int], list[int]]:
    """Returns (live, held): indices of the candidates with the `width` highest keys, unfinished and finished ones.

    Both lists are ordered from the highest key, and together hold at most `width`. Ties go to the earlier candidate. A
    NaN key is never kept.
    """
    order = sorted((i for i, key in enumerate(key_C) if key == key), key=lambda i: -key_C[i])[:width]
    return [i for i in order if not finished_C[i]], [i for i in order if finished_C[i]]


def _beams(tree: GrowingTree, rule: str, groups: int, width: int, expand: int, max_steps: int) -> Steps:
    """Runs `groups` beams in one tree."""
    share = width * expand
    (first,) = yield [Ask(ROOT, groups * share, "step")]
    drawn = [first[g * share : (g + 1) * share] for g in range(groups)]
    held: list[list[int]] = [[] for _ in range(groups)]  # per beam, the finished nodes that keep a place
    before: set[int] = set()
    for step in itertools.count(1):
        live = []
        for g in range(groups):
            candidates = dict.fromkeys([(node, True) for node in held[g]] + [c for d in drawn[g] for c in _ends(d)])
            nodes, finished = zip(*candidates, strict=True) if candidates else ((), ())
            _, key_C = tree.chain_scores(nodes, rule)
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
        draws = iter((yield [Ask(node, expand, "step") for node in going]))
        drawn = [[draw for _ in group for draw in next(draws)] for group in live]


def _ends(draw: Draw) -> list[tuple[int, bool]]:
    """Returns the (node, finished) candidates from a draw: [] if it was cut off or adds no step."""
    if draw.sample.finish_reason == "stop" and draw.end != ROOT:
        return [(draw.end, True)]
    return [(draw.end, False)] if draw.sample.finish_reason == "step" and draw.end != draw.start else []
