"""What objectives of the logits at step ends share: which heads and labels they take, and sums over pairs of steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

from jprm.experiment import ObjectiveConfig
from jprm.model.heads import HEADS, PROBABILITY, Head, Target, find
from jprm.model.transformer import step_logits
from jprm.rows import Rows


class OfSteps:
    """An objective of the logits at step ends. A subclass is a frozen dataclass with a method `of_logits`."""

    target: Target | None = PROBABILITY  # what the head must predict; None: anything
    supervise: tuple[str, ...] = ()  # values of data.supervise; (): all that the head takes

    @property
    def pairs(self) -> bool:
        """Whether it compares alternatives: training then counts those that splitting separates."""
        return False

    def __call__(self, params: dict[str, Any], rows: Rows, config: ObjectiveConfig) -> tuple[Scalar, Scalar, dict]:
        return self.of_logits(step_logits(params["model"], config.model, rows), rows, config)

    def of_logits(
        self, logit_BSC: Float[Array, "B S C"], rows: Rows, config: ObjectiveConfig
    ) -> tuple[Scalar, Scalar, dict]:
        """Returns the sum of the loss, its count and the metrics."""
        raise NotImplementedError

    def check(self, config: ObjectiveConfig) -> None:
        """Raises ValueError where the objective does not fit the head, or the head the labels."""
        name, neutral, supervise = config.model.head, config.target.neutral, config.supervise
        head = find(name)
        if supervise not in head.target.supervise:
            takes = " or ".join(head.target.supervise)
            raise ValueError(f"data.supervise={supervise!r} does not fit head {name!r}, which takes {takes}")
        if self.supervise and supervise not in self.supervise:
            takes = " or ".join(self.supervise)
            raise ValueError(f"data.supervise={supervise!r} does not fit the objective, which takes {takes}")
        if self.target is not None and head.target != self.target:
            takes = " or ".join(name for name, other in HEADS.items() if other.target == self.target)
            raise ValueError(f"the objective does not fit head {name!r}; it takes {takes}")
        if neutral not in head.target.neutral:
            takes = " or ".join(head.target.neutral)
            raise ValueError(f"target.neutral={neutral!r} does not fit head {name!r}, which takes {takes}")


def log_odds(head: Head, logit_BSC: Float[Array, "B S C"]) -> Float[Array, "B S"]:
    """Returns log(p / (1 - p)) of a head of probabilities: of `scalar` its logit, of `binary` their difference.

    Of an ensemble it is the members' mean.
    """
    if head.log_odds:
        factor_C = jnp.array(head.log_odds) / sum(factor * factor for factor in head.log_odds)
        return jnp.sum(logit_BSC * factor_C, axis=-1)
    one_BS = jnp.ones(logit_BSC.shape[:-1])
    return head.likelihood(logit_BSC, one_BS) - head.likelihood(logit_BSC, 0 * one_BS)


def pair_loss(s_BS: Float[Array, "B S"], pair_BSS: Float[Array, "B S S"]) -> tuple[Scalar, Scalar, Scalar]:
    """Returns sums over the pairs (i, j) in which i is better, with their weights: Bradley-Terry, all, those correct.

    Bradley and Terry (1952): -log sigmoid(s_i - s_j), s being log-odds.
    """
    margin_BSS = s_BS[:, :, None] - s_BS[:, None, :]
    loss = -jnp.sum(pair_BSS * jax.nn.log_sigmoid(margin_BSS))
    return loss, jnp.sum(pair_BSS), jnp.sum(pair_BSS * (margin_BSS > 0))
