"""Objectives that look at one labelled slot at a time: a loss of its logits and its target, times its weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

from jprm.experiment import ObjectiveConfig
from jprm.model.heads import Head, Target, find
from jprm.objectives.metrics import Judged
from jprm.objectives.steps import OfSteps
from jprm.objectives.targets import targets

Loss = Callable[[Head, Float[Array, "B S C"], Float[Array, "B S"], Float[Array, "B S"]], Scalar]
"""(head, logits, targets, weights) to the weighted sum, in float32."""


@dataclasses.dataclass(frozen=True)
class Pointwise(OfSteps):
    """An objective: `loss` over the labelled slots, for heads of one kind of target, or of any (None)."""

    loss: Loss
    target: Target | None = None

    def of_logits(self, logit_BSC, rows, config):
        head = find(config.model.head)
        target_BS, weight_BS = targets(rows, config.target)
        total = self.loss(head, logit_BSC, target_BS, weight_BS)
        judged = Judged(*head.judge(logit_BSC, target_BS), weight_BS)
        return total, jnp.sum(weight_BS), {"scores": judged}

    def check(self, config: ObjectiveConfig) -> None:
        super().check(config)
        if self.loss is likelihood and find(config.model.head).log_likelihood is None:
            raise ValueError(f"the objective does not fit head {config.model.head!r}, which has no likelihood")


def likelihood(head: Head, logit_BSC: Array, target_BS: Array, weight_BS: Array) -> Scalar:
    """Returns the sum of -log p(target), by the head's own likelihood."""
    return -jnp.sum(weight_BS * head.likelihood(logit_BSC, target_BS))
