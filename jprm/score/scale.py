"""`Scale`: what a model's scores mean to those who compare them with a threshold or weigh votes by them."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

Weight = Literal["score", "half", "sigmoid"]
WEIGHTS: tuple[str, ...] = get_args(Weight)


@dataclasses.dataclass(frozen=True)
class Scale:
    """The scale of a model's scores; the default is that of probabilities.

    Attributes:
      threshold: benchmarks call a step correct above it, where no threshold is tuned.
      weight: how a score becomes a vote's weight in [0, 1]. `score`: it is a probability. `half`: (1 + score) / 2, of a
        difference of two probabilities. `sigmoid`: of log odds.
      redundancy: a step is called redundant where the named output `redundancy` is above it; None without that output.
    """

    threshold: float = 0.5
    weight: Weight = "score"
    redundancy: float | None = None

    def weights(self, score: Any) -> Any:
        """Returns the weights (*N) of scores (*N), in float64; rising, so that the order stays. NaN stays NaN."""
        import numpy as np  # commands import this file for their help

        score = np.asarray(score, float)
        if self.weight == "sigmoid":
            return 0.5 + 0.5 * np.tanh(score / 2)
        return (1 + score) / 2 if self.weight == "half" else score


PROBABILITY = Scale()
LOG_ODDS = Scale(threshold=0.0, weight="sigmoid")
