"""A particle filter over steps (Puri et al. 2025, arXiv 2502.01618).

Every particle takes a step; then all particles are resampled in proportion to the odds of their scores. A beam keeps
the best and may keep the PRM's mistakes; the filter keeps the likely ones. Finished particles are resampled with the
others in every round, so an answer's share depends on its score and on when its chains end.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import random
import zlib
from collections.abc import Sequence
from typing import ClassVar

from jprm.methods.search.growing_tree import ROOT, Ask, GrowingTree, Steps, at_least_one


@dataclasses.dataclass(frozen=True)
class Particles:
    r"""Particle filter: every particle takes a step, and all are resampled by their scores' odds.

    It samples about `particles` times one chain's tokens. Particles at one prefix share its computation.

    For example:
      jprm search particles --policy server.json --model runs/prm --input problems.jsonl --budget 20000 \
        --particles 8 --output particles.jsonl

    Attributes:
      particles: Chains to follow.
      temperature: Above 0; a high one resamples evenly, a low one keeps the best.
      max_steps: Rounds, at most.
    """

    kind: ClassVar[str] = "tree"
    particles: int = 8
    temperature: float = 1.0
    max_steps: int = 40

    def __post_init__(self):
        at_least_one(self, "particles", "max_steps")
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}: it must be above 0")

    def steps(self, tree: GrowingTree, rule: str) -> Steps:
        draw = random.Random(zlib.crc32(tree.problem.text.encode()))  # the same for the same problem
        particles, seen = [ROOT] * self.particles, set()
        for _ in range(self.max_steps):
            held = [node for node in particles if node in tree.finished]
            going = collections.Counter(node for node in particles if node not in tree.finished)
            drawn = yield [Ask(node, count, "step") for node, count in going.items()]
            cut = {d.end for draws in drawn for d in draws if d.sample.finish_reason == "length"} - tree.finished
            moved = [d.end for draws in drawn for d in draws if d.end != ROOT and d.end not in cut]
            candidates = held + moved
            if not candidates:
                return None
            _, key_N = tree.chain_scores(candidates, rule)
            weights = odds(tree.scale.log_votes(key_N, rule).tolist(), self.temperature)
            particles = resampled(candidates, weights, self.particles, draw.random())
            seen |= {d.end for draws in drawn for d in draws if d.end != ROOT}
            gone = seen - set(particles)
            tree.release(gone)
            seen -= gone
            if all(node in tree.finished for node in particles):
                return None
        return "max_steps"


def odds(log_probabilities: Sequence[float], temperature: float) -> list[float]:
    """Returns (p / (1 - p)) ** (1 / temperature), divided by the largest; 0 if log p is NaN.

    Each p is given as its natural log. If every p is 0 or NaN, all odds are 1. 1 - p is at least 1e-9. Raises
    ValueError if the input is empty; `temperature` must be above 0.
    """
    logits = [
        -math.inf if log_p != log_p else log_p - math.log(max(-math.expm1(log_p), 1e-9)) for log_p in log_probabilities
    ]  # fmt: skip
    top = max(logits)
    return [1.0] * len(logits) if top == -math.inf else [math.exp((x - top) / temperature) for x in logits]


def resampled(items: Sequence[int], weights: Sequence[float], n: int, start: float) -> list[int]:
    """Returns n items, in their order, by systematic resampling: each occurs n w / sum(w) times, rounded down or up.

    `start` in [0, 1) is the only random number. Raises ZeroDivisionError if all weights are 0, IndexError if there
    are no items, ValueError if there are more or fewer weights than items.
    """
    total, passed, drawn = sum(weights), 0.0, []
    for item, weight in zip(items, weights, strict=True):
        passed += n * weight / total
        while len(drawn) < n and len(drawn) + start < passed:
            drawn.append(item)
    return drawn + [items[-1]] * (n - len(drawn))  # rounding may leave the last one out
