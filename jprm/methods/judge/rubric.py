"""`Rubric`: a judge with several criteria, each a question and an output of its own; the score is their weighted mean.

    "judge": {"prompt": "rubric", "criteria": {
        "arithmetic": {"weight": 2, "text": "Every number in the step is computed correctly."},
        "relevance": {"weight": 1, "text": "The step helps to solve the problem."}}}

A prompt of one's own has {criterion} where the criterion's text is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jprm.methods.judge.critiques import COUNTS, cost
from jprm.methods.judge.judge import ByCritiques, Judge, Judgement
from jprm.score.scale import PROBABILITY, Scale
from jprm.tree import ReasoningTree


@dataclasses.dataclass(frozen=True)
class Criterion:
    """What one question asks about, and its weight in the score."""

    text: str
    weight: float = 1.0

    def __post_init__(self):
        if not self.text.strip():
            raise ValueError("text is blank: write what the step must fulfil")
        if not (self.weight >= 0 and np.isfinite(self.weight)):
            raise ValueError(f"weight is {self.weight}: it must be 0 or more")


@dataclasses.dataclass(frozen=True)
class Rubric(ByCritiques):
    """Judges of one policy, one for each criterion, ready to score.

    A step's score is the mean of its criteria's scores by their weights; NaN where one of them could not be read. A
    criterion of weight 0 is an output that does not count.
    """

    judges: Mapping[str, Judge]
    criteria: Mapping[str, Criterion]

    scale: Scale = dataclasses.field(default=PROBABILITY, init=False)

    def __post_init__(self):
        if not sum(criterion.weight for criterion in self.criteria.values()) > 0:
            raise ValueError("the criteria's weights sum to 0: give one a weight above 0")
        if "score" in self.criteria:
            raise ValueError("a criterion is called score, which is the name of their mean: rename it")

    @property
    def policy(self) -> Any:
        return next(iter(self.judges.values())).policy

    @property
    def name(self) -> str:
        """Identifies the policy, the prompt and the criteria."""
        about = [[judge.name, self.criteria[name].weight] for name, judge in self.judges.items()]
        return f"{self.policy.name}/rubric#{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:8]}"

    @property
    def rule(self) -> str:
        return next(iter(self.judges.values())).rule

    @property
    def output_names(self) -> tuple[str, ...]:
        return ("score", *self.judges)

    @property
    def identity(self) -> dict[str, Any]:
        """What the scores depend on, for the request of a file that holds them."""
        first = next(iter(self.judges.values()))
        return {"judge": self.name, "samples": first.samples, "seed": first.seed}

    def about(self, records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        return {"name": self.name, "folder": self.policy.name, "step": 0, "judge": cost(records)}

    def reported(self, trees: Sequence[ReasoningTree]) -> list[tuple[dict[str, np.ndarray], dict[str, Any]]]:
        """Returns the score and every criterion's score for each tree, (N,) each, and the report on all critiques."""
        judged = {name: judge.judgements(trees) for name, judge in self.judges.items()}
        return [self.joined({name: each[i] for name, each in judged.items()}) for i in range(len(trees))]

    def joined(self, of: Mapping[str, Judgement]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Returns the outputs and the report of one tree, from what each criterion's critiques say."""
        weights = {name: criterion.weight for name, criterion in self.criteria.items() if criterion.weight}
        total = sum(of[name].score_N.astype(np.float64) * weight for name, weight in weights.items())
        score_N = np.asarray(total / sum(weights.values()), np.float32)
        report: dict[str, Any] = {key: sum(one.report[key] for one in of.values()) for key in COUNTS}
        report["critiques"] = [
            {"criterion": name} | critique for name, one in of.items() for critique in one.report["critiques"]
        ]
        return {"score": score_N} | {name: one.score_N for name, one in of.items()}, report
