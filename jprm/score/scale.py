"""`Scale`: the meaning of a model's scores, for evaluations, votes, credit and chain selection.

A score consumer names its accepted scales (`check_scale`) or maps scores to [0, 1] (`Scale.fractions`). The aggregation
rules' names are here too, because this file imports no array library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, Literal, get_args

Rule = Literal["min", "soft_min", "prod", "mean", "last", "max", "sum_log_odds", "mean_log"]
"""From step scores to a chain score, as `jprm.score.aggregate` computes them."""
RULES: tuple[str, ...] = get_args(Rule)
PROBABILITY_RULES = ("prod", "sum_log_odds", "mean_log")
"""Rules that multiply probabilities; the others take any scores."""

OF_CHAINS = ("value", "implicit")
"""Semantics whose scores rate the whole chain up to a step; the others rate the step alone."""

Weight = Literal["score", "half", "sigmoid"]
WEIGHTS: tuple[str, ...] = get_args(Weight)
MEANING: dict[str, str] = {
    "score": "probabilities",
    "half": "differences of two probabilities",
    "sigmoid": "log odds or log ratios",
}
"""Score meanings by `Scale.weight`: e.g. correctness gives probabilities, implicit PRMs log ratios."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """A model's score scale; the default is probabilities.

    threshold: benchmarks call a step correct above it, if no threshold is tuned.
    weight: the map from a score to a vote's weight in [0, 1]. `score`: the identity, for probabilities. `half`: (1 +
        score) / 2, for differences between two probabilities. `sigmoid`: for log odds.
    redundancy: a step is redundant if the named output `redundancy` is above it; `None` without that output.
    """

    threshold: float = 0.5
    weight: Weight = "score"
    redundancy: float | None = None

    def weights(self, score: Any) -> Any:
        """Returns the weights (*N) for scores (*N), in float64. The map is increasing; NaN stays NaN."""
        import numpy as np  # commands import this file for their help
        import scipy

        score = np.asarray(score, float)
        if self.weight == "sigmoid":
            return scipy.special.expit(score)
        return (1 + score) / 2 if self.weight == "half" else score

    def log_weights(self, score: Any) -> Any:
        """Returns log `weights` (*N), exact even if log odds give weights that round to 0 or 1, e.g. -800 or 40."""
        import scipy

        if self.weight == "sigmoid":
            return scipy.special.log_expit(score, dtype=float)
        return scipy.special.xlogy(1, self.weights(score).clip(0))  # np.log without a warning for 0

    def log_votes(self, key: Any, rule: str) -> Any:
        """Returns log vote weights (*N) for chains with these sort keys by `rule` (`score.aggregate.rank_keys`)."""
        if rule in ("prod", "mean_log"):
            return key  # already a log weight
        return (LOG_ODDS if rule == "sum_log_odds" else self).log_weights(key)

    def fractions(self, score: Any, where: str) -> Any:
        """Returns an array's `weights`, in [0, 1]. Raises ValueError, naming `where`, for a NaN or off-scale score."""
        weight = self.weights(score)
        if (wrong := ~((weight >= 0) & (weight <= 1))).any():
            outside = float(score[wrong.argmax()])
            raise ValueError(
                f"{where}: the score {outside:g} is outside the scale of {MEANING[self.weight]}. Other scales need the"
                " file OUT.info.json that `jprm score` writes beside them"
            )
        return weight


PROBABILITY = Scale()
LOG_ODDS = Scale(threshold=0.0, weight="sigmoid")


def check_scale(scale: Scale, weights: Collection[str], model: str, consumer: str) -> None:
    """Raises ValueError, naming model and consumer, if the scale is not among the consumer's accepted `weights`."""
    if scale.weight not in weights:
        taken = " or ".join(MEANING[weight] for weight in WEIGHTS if weight in weights)
        raise ValueError(f"{model}: its scores are {MEANING[scale.weight]}, and {consumer} takes {taken}")
