"""Comparing samples beside judging each alone, at equal tokens, by a simulated judge whose errors are known.

    python -m experiments.studies.comparing

The judges are jprm's (`jprm.methods.judge`): prompts, verdicts and pairs are theirs, and a simulated policy writes the
critiques. What it sees of a sample in one question, in log odds, is

    quality (1 if correct, else -1)  +  its own error, the same however often it is asked  (sd 1)
      +  noise of every look at a sample  (sd 1)  +  where its scale is in this question  (sd `wander`)

In a pair the first place has 0.5 more. `wander` is what comparing takes out: all samples of one question share it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console

from jprm.methods.evaluate.blocks import Table, interval, points, show
from jprm.methods.evaluate.votes import best_of_n
from jprm.methods.judge.compare import Comparison
from jprm.methods.judge.critiques import PROMPTS
from jprm.methods.judge.judge import Judge
from jprm.methods.policy.protocol import LogProb, Prefix, Sample, Until
from jprm.statistics import Draws, difference, draws, weighted_mean
from jprm.statistics import interval as interval_of
from jprm.tree import tree_of

PROBLEMS, SAMPLES, CORRECT = 600, 8, 0.3
READ, WRITTEN = 300, 100
"""Tokens of a sample, and of a judge's reasons."""

WANDERS = (0.0, 1.0, 2.0, 4.0)
PLACE = 0.5
BASE = 2
"""The way that others are compared with: `scale` by its tokens."""


@dataclasses.dataclass
class Simulated:
    """Writes verdicts.

    careless: a look at a sample of a list has so many times the noise.
    tokens: reports the probabilities of the numbers 1 to 5, whose mean is what it saw.
    """

    wander: float
    careless: float = 1.0
    tokens: bool = False
    seed: int = 0
    name: str = "simulated"

    def sample(self, prefixes: Sequence[Prefix], n: int, *, until: Until, seed: int) -> list[list[Sample]]:
        return [[self._one(prefix.problem, seed + j) for j in range(n)] for prefix in prefixes]

    def _one(self, question: str, number: int) -> Sample:
        rng = np.random.default_rng([zlib.crc32(question.encode()), number, self.seed])
        seen = np.array([float(q) for q in re.findall(r"quality (-?[\d.]+)", question)])
        noise = 1.0 if len(seen) <= 2 else self.careless
        seen += noise * rng.standard_normal(len(seen)) + self.wander * rng.standard_normal()
        if "Solution 1:" not in question:
            good = 1 / (1 + np.exp(-seen[0]))
            if self.tokens:
                return _by_tokens(1 + 4 * good)
            scale = "from 1 (certainly wrong) to 5" in question
            verdict = str(1 + round(4 * good)) if scale else "Yes" if good > 0.5 else "No"
        elif len(seen) == 2 and "Which solution is better" in question:
            verdict = "1" if seen[0] + PLACE > seen[1] else "2"
        else:
            verdict = ", ".join(f"{1 / (1 + np.exp(-score)):.3f}" for score in seen)
        return Sample((f"\\boxed{{{verdict}}}",), WRITTEN, "stop")


def _by_tokens(number: float) -> Sample:
    """Returns a rating by the likelier of the two whole numbers around it, with the probabilities of both."""
    below = int(number)
    of_token = {str(below): 1 - (number - below), str(below + 1): number - below}
    logprob = {token: LogProb(np.log(p)) for token, p in of_token.items() if p > 0}
    written = max(logprob, key=lambda token: logprob[token])
    tokens = (("\\boxed{", LogProb(0)), (written, logprob[written]), ("}", LogProb(0)))
    steps = (f"\\boxed{{{written}}}",)
    return Sample(steps, WRITTEN, "stop", token_logprobs=tokens, alternatives=({}, logprob, {}))


@dataclasses.dataclass(frozen=True)
class Asked:
    """A way to ask. tokens: read and written for a pool."""

    name: str
    judge: Any
    tokens: int


def ways(wander: float) -> list[Asked]:
    """Returns the ways to ask, each with as many questions as four a sample alone cost."""
    policy, alone = Simulated(wander), READ + WRITTEN
    budget = 4 * SAMPLES * alone
    in_list = SAMPLES * READ + WRITTEN + 6 * SAMPLES
    lists, rounds = budget // in_list, budget // (2 * SAMPLES * (alone + READ))
    listwise = [("listwise", 1.0, lists), ("listwise, four looks", 1.0, 4), ("listwise, noise doubled", 2.0, lists)]
    return [
        Asked("pointwise, Yes or No", Judge(policy, PROMPTS["plain"], samples=4), budget),
        Asked("pointwise, 1 to 5", Judge(policy, PROMPTS["scale"], samples=4), budget),
        Asked("the same, by its tokens", Judge(Simulated(wander, tokens=True), PROMPTS["scale"], samples=4), budget),
        Asked("pairwise", Comparison(policy, "pairwise", rounds=rounds), rounds * 2 * SAMPLES * (alone + READ)),
        *(
            Asked(name, Comparison(Simulated(wander, more), "listwise", samples=looks), looks * in_list)
            for name, more, looks in listwise
        ),
    ]


def pools(seed: int = 0) -> list[dict[str, Any]]:
    """Returns pools of samples whose text is their quality, as the judge sees it."""
    rng = np.random.default_rng(seed)
    records = []
    for i in range(PROBLEMS):
        correct = rng.random(SAMPLES) < CORRECT
        quality = np.where(correct, 1, -1) + rng.standard_normal(SAMPLES)
        samples = [
            {"steps": [f"Sample {j}, quality {q:.3f}"], "correct": bool(c)}
            for j, (q, c) in enumerate(zip(quality, correct, strict=True))
        ]
        records.append({"problem": f"Problem {i}.", "samples": samples})
    return records


def solved(asked: Asked, records: Sequence[dict[str, Any]]) -> Draws:
    """Returns how often the sample of the highest score is correct; equal ones share."""
    trees = [tree_of(record) for record in records]
    score_PK = np.array(asked.judge.score_trees(trees), float).reshape(len(records), SAMPLES)
    correct_PK = np.array([[sample["correct"] for sample in record["samples"]] for record in records], float)
    valid_PK, size_P = np.ones(correct_PK.shape, bool), np.full(len(records), SAMPLES)
    chosen_P = best_of_n(score_PK, correct_PK, valid_PK, size_P, SAMPLES)[:, -1]
    return draws(lambda w: weighted_mean(chosen_P, w), np.arange(len(records)), seed=0)


def main() -> None:
    records, rows = pools(), []
    every = {wander: [(asked, solved(asked, records)) for asked in ways(wander)] for wander in WANDERS}
    for k, asked in enumerate(ways(0.0)):
        cells = []
        for wander in WANDERS:
            base, estimate = every[wander][BASE][1], every[wander][k][1]
            gap = f"; {points(_json(difference(estimate, base)))}" if k != BASE else ""
            cells.append(interval(_json(interval_of(estimate))) + gap)
        rows.append([asked.name, f"{asked.tokens:,}", *cells])
    columns = ("", "tokens", *(f"wander {wander:g}" for wander in WANDERS))
    show([Table("best of 8, %, and points from pointwise 1 to 5 by its tokens", columns, rows)], Console(width=160))
    any_P = [any(sample["correct"] for sample in record["samples"]) for record in records]
    print(json.dumps({"any": np.mean(any_P), "one": CORRECT}))


def _json(estimate: Any) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


if __name__ == "__main__":
    main()
