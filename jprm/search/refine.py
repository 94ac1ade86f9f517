"""Iterative refinement: a chain is drawn again from its weakest step on; the new one is kept if it scores higher."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from jprm.search.choose import chain_scores
from jprm.search.growing import ROOT, Draw, GrowingTree
from jprm.search.lockstep import Ask, Steps


@dataclasses.dataclass(frozen=True)
class Refine:
    """Starts from the best of `drafts` chains, then for at most `rounds` rounds draws `samples` chains that keep the
    steps before the weakest one. A chain that is finished is better than one that was cut off, whatever its score."""

    kind: ClassVar[str] = "tree"
    rounds: int
    drafts: int = 1
    samples: int = 1

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}: it is at least 1")

    def steps(self, tree: GrowingTree, rule: str) -> Steps:
        (drawn,) = yield [Ask(ROOT, self.drafts, "end")]
        current = _better(tree, rule, None, drawn)
        for _ in range(self.rounds):
            if current is None:
                return None
            path = tree.path(current.end)
            start = tree.parent[path[weakest([tree.score[node] for node in path])]]
            (drawn,) = yield [Ask(start, self.samples, "end")]
            current = _better(tree, rule, current, drawn)
        return "rounds"


def weakest(score_P: Float[np.ndarray, " P"]) -> int:
    """The index of the lowest score, the first of equals."""
    return int(np.argmin(score_P))


def _better(tree: GrowingTree, rule: str, current: Draw | None, drawn: Iterable[Draw]) -> Draw | None:
    """The best chain; one already there stays unless another is truly better. None where none has scores."""
    draws = [draw for draw in (current, *drawn) if draw is not None and draw.end != ROOT]
    _, key_D = chain_scores(tree, [draw.end for draw in draws], rule)
    ranked = [(d.sample.finish_reason == "stop", key, d) for d, key in zip(draws, key_D, strict=True) if key == key]
    return max(ranked, key=lambda item: item[:2])[2] if ranked else None  # max takes the first of equals
