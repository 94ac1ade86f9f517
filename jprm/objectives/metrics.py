"""Metrics of an objective: sums that add up over micro-batches, devices and steps, and are divided on the host.

An objective returns a dict. A scalar is a sum, logged divided by the objective's count; a `Mean` has a divisor of its
own. `Judged` scores are logged as `step_accuracy` and `auroc`. Of several, those named `scores` are logged so, and
others after their names: `NAME_step_accuracy`, `NAME_auroc`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Scalar

BINS = 512
"""Score bins of the training AUROC: two classes' histograms add up over steps, devices and micro-batches."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A sum and what it is divided by; both add up. Of nothing, the mean is None."""

    total: Scalar
    weight: Scalar

    def value(self) -> float | None:
        return float(self.total) / float(self.weight) if float(self.weight) else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoreSums:
    """Sums of judged scores, which add up."""

    right: Scalar  # weight of steps on the correct side of one half
    histogram_CN: Float[Array, "2 N"]  # weight by class (incorrect, correct) and bin of the score

    def means(self) -> dict[str, float | None]:
        """Returns accuracy and AUROC, which is None where all steps are of one class."""
        wrong_N, right_N = np.asarray(self.histogram_CN).astype(np.float64)
        below_N = np.cumsum(wrong_N) - wrong_N
        pairs = wrong_N.sum() * right_N.sum()
        area = float(np.sum(right_N * (below_N + 0.5 * wrong_N)) / pairs) if pairs else None
        return {"step_accuracy": float(self.right) / divisor(wrong_N.sum() + right_N.sum()), "auroc": area}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Judged:
    """Scores, which steps count as correct, and weights. Training sums them; validation sorts them, exactly."""

    score_BS: Float[Array, "B S"]
    positive_BS: Bool[Array, "B S"]
    weight_BS: Float[Array, "B S"]

    def sums(self) -> ScoreSums:
        bin_BSN = jax.nn.one_hot(jnp.clip((self.score_BS * BINS).astype(jnp.int32), 0, BINS - 1), BINS)
        class_CBS = self.weight_BS * jnp.stack([~self.positive_BS, self.positive_BS])
        return ScoreSums(
            right=jnp.sum(self.weight_BS * ((self.score_BS > 0.5) == self.positive_BS)),
            histogram_CN=jnp.sum(class_CBS[..., None] * bin_BSN, axis=(1, 2)),
        )


def divisor(count: float) -> float:
    """Returns what sums over `count` labels are divided by: the count, and 1 for none, where all sums are 0."""
    return count if count > 0 else 1.0


def names(metrics: dict[str, Any], name: str, values: dict[str, float | None]) -> dict[str, float | None]:
    """Returns the values of the judged scores `name`, by the names that tell those of one objective apart."""
    judged = [value for value in metrics.values() if isinstance(value, Judged | ScoreSums)]
    return values if len(judged) == 1 or name == "scores" else {f"{name}_{key}": x for key, x in values.items()}


def summed(metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns the metrics with `Judged` scores summed, so that all of them add up."""
    return {name: value.sums() if isinstance(value, Judged) else value for name, value in metrics.items()}


def means(metrics: dict[str, Any], count: float) -> dict[str, float | None]:
    """Returns the values to log of metrics summed over `count` labels."""
    values: dict[str, float | None] = {}
    for name, value in metrics.items():
        if isinstance(value, ScoreSums):
            values |= names(metrics, name, value.means())
        else:
            values[name] = value.value() if isinstance(value, Mean) else float(value) / divisor(count)
    return values
