"""Objectives that look at one labelled slot at a time: a loss of its logits and its target, times its weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

from jprm.experiment import ObjectiveConfig
from jprm.model.heads import HEADS, Head, Target, find
from jprm.model.transformer import step_logits
from jprm.objectives.metrics import Judged
from jprm.objectives.targets import targets
from jprm.rows import Rows

Loss = Callable[[Head, Float[Array, "B S C"], Float[Array, "B S"], Float[Array, "B S"]], Scalar]
"""(head, logits, targets, weights) to the weighted sum, in float32."""


@dataclasses.dataclass(frozen=True)
class Pointwise:
    """An objective: `loss` over the labelled slots, for heads of one kind of target, or of any (None)."""

    loss: Loss
    target: Target | None = None

    def __call__(self, params: dict[str, Any], rows: Rows, config: ObjectiveConfig) -> tuple[Scalar, Scalar, dict]:
        head = find(config.model.head)
        logit_BSC = step_logits(params["model"], config.model, rows)
        target_BS, weight_BS = targets(rows, config.target)
        total = self.loss(head, logit_BSC, target_BS, weight_BS)
        judged = Judged(*head.judge(logit_BSC, target_BS), weight_BS)
        return total, jnp.sum(weight_BS), {"scores": judged}

    def check(self, config: ObjectiveConfig) -> None:
        """Raises ValueError where the loss does not fit the head, or the head the target."""
        name, neutral = config.model.head, config.target.neutral
        head = find(name)
        if self.target is not None and head.target != self.target:
            takes = " or ".join(name for name, other in HEADS.items() if other.target == self.target)
            raise ValueError(f"the objective does not fit head {name!r}; it takes {takes}")
        if self.loss is likelihood and head.log_likelihood is None:
            raise ValueError(f"the objective does not fit head {name!r}, which has no likelihood")
        if neutral not in head.target.neutral:
            takes = " or ".join(head.target.neutral)
            raise ValueError(f"target.neutral={neutral!r} does not fit head {name!r}, which takes {takes}")


def likelihood(head: Head, logit_BSC: Array, target_BS: Array, weight_BS: Array) -> Scalar:
    """Returns the sum of -log p(target), by the head's own likelihood."""
    return -jnp.sum(weight_BS * head.likelihood(logit_BSC, target_BS))
