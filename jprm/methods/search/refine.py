"""Iterative refinement: resamples a chain from its weakest step on and keeps the new one if it scores higher.

The weakest step has the lowest score. If a score is the value of the whole chain so far, it is the step with the
largest drop: after one mistake every later value is low.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import ClassVar

from jprm.methods.search.growing_tree import ROOT, Ask, Draw, GrowingTree, Steps, at_least_one
from jprm.score.scale import OF_CHAINS


@dataclasses.dataclass(frozen=True)
class Refine:
    r"""Iterative refinement: resample a chain from its weakest step on, and keep the new one if it scores higher.

    A finished chain beats a cut-off one, whatever their scores.

    For example:
      jprm search refine --policy server.json --model runs/prm --input problems.jsonl --budget 20000 \
        --rounds 8 --drafts 4 --output refine.jsonl

    Attributes:
      rounds: Times that a chain is resampled, at most.
      drafts: Chains sampled first; the best one is refined.
      samples: New endings sampled per round, each keeping the steps before the weakest one.
    """

    kind: ClassVar[str] = "tree"
    rounds: int = 8
    drafts: int = 1
    samples: int = 1

    def __post_init__(self):
        at_least_one(self, "rounds", "drafts", "samples")

    def steps(self, tree: GrowingTree, rule: str) -> Steps:
        (drawn,) = yield [Ask(ROOT, self.drafts, "end")]
        current = _better(tree, rule, None, drawn)
        for _ in range(self.rounds):
            if current is None:
                return None
            path = tree.path(current.end)
            start = tree.parent[path[weakest(_own_scores(tree, path))]]
            (drawn,) = yield [Ask(start, self.samples, "end")]
            current = _better(tree, rule, current, drawn)
        return "rounds"


def weakest(score_P: Sequence[float]) -> int:
    """Returns the index (from 0) of the lowest score, the first if tied. No score may be NaN. ValueError if empty."""
    return min(range(len(score_P)), key=lambda i: score_P[i])


def _own_scores(tree: GrowingTree, path: Sequence[int]) -> list[float]:
    """Returns per-step scores; for a value model, the difference from the previous step.

    The problem's value is the mean over the first steps sampled so far, an estimate of its expectation.
    """
    score_P = [tree.score[node] for node in path]
    if tree.semantics not in OF_CHAINS:
        return score_P
    first = [score for score, parent in zip(tree.score, tree.parent, strict=True) if parent == ROOT and score == score]
    return [after - before for before, after in zip([sum(first) / len(first), *score_P], score_P, strict=False)]


def _better(tree: GrowingTree, rule: str, current: Draw | None, drawn: Iterable[Draw]) -> Draw | None:
    """Returns the best of the chains with scores, if any; ties keep `current`."""
    draws = [draw for draw in (current, *drawn) if draw is not None and draw.end != ROOT]
    _, key_D = tree.chain_scores([draw.end for draw in draws], rule)
    ranked = [(d.sample.finish_reason == "stop", key, d) for d, key in zip(draws, key_D, strict=True) if key == key]
    return max(ranked, key=lambda item: item[:2])[2] if ranked else None  # max takes the first of equals
