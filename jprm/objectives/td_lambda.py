"""TD(lambda): values learned from the outcomes of chains and from the values of the steps after them.

On a chain of steps 1 to n with outcome y, step t learns the lambda-return (Sutton and Barto 2018, chapter 12)

    G_n = y,    G_t = (1 - lambda) V_(t+1) + lambda G_(t+1)

by cross-entropy; V are the head's scores, without gradient. A shared step learns the mean return of the chains through
it, and weighs as many: as cross-entropy is linear in its target, that is the sum over the chains, each alone. With
lambda = 1 it is `data.supervise="outcome_steps"`. Every chain of known outcome is in one row with all its steps, so a
split changes nothing.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jprm.model.heads import find
from jprm.objectives.metrics import Judged
from jprm.objectives.steps import OfSteps
from jprm.objectives.targets import targets
from jprm.rows import Rows, ancestors


@dataclasses.dataclass(frozen=True)
class TemporalDifference(OfSteps):
    """The count is the number of pairs of a chain and a step on it. Metrics are of the ends of chains."""

    supervise = ("outcome",)
    trace_decay: float = 0.95  # lambda: 0 learns from the next step's value alone, 1 from the outcome alone

    def __post_init__(self):
        if not 0 <= self.trace_decay <= 1:
            raise ValueError(f"trace_decay={self.trace_decay} must be from 0 to 1")

    def of_logits(self, logit_BSC, rows, config):
        head = find(config.model.head)
        outcome_BS, weight_BS = targets(rows, config.target)
        score_BS, positive_BS = head.judge(logit_BSC, outcome_BS)
        target_BS, chains_BS = returns(rows, jax.lax.stop_gradient(score_BS), outcome_BS, weight_BS, self.trace_decay)
        loss = -jnp.sum(chains_BS * head.likelihood(logit_BSC, target_BS))
        return loss, jnp.sum(chains_BS), {"scores": Judged(score_BS, positive_BS, weight_BS)}


def returns(
    rows: Rows,
    value_BS: Float[Array, "B S"],
    outcome_BS: Float[Array, "B S"],
    weight_BS: Float[Array, "B S"],
    decay: float,
) -> tuple[Float[Array, "B S"], Float[Array, "B S"]]:
    """Returns every step's mean lambda-return over the chains through it, and their weight.

    Chains end where the weight is above 0. A chain's return at i is the sum of lambda^d y over its end, d steps after
    i, and of (1 - lambda) lambda^(d - 1) V over the steps d after i.
    """
    before_BSS = ancestors(rows)  # (later, earlier)
    depth_BS = jnp.sum(before_BSS, axis=-1)
    after_BSS = jnp.swapaxes(before_BSS, 1, 2)  # (i, j): j is a step after i
    distance_BSS = depth_BS[:, None, :] - depth_BS[:, :, None]
    from_BSS = after_BSS | jnp.eye(depth_BS.shape[1], dtype=bool)
    trace_BSS = jnp.where(from_BSS, jnp.power(decay, jnp.where(from_BSS, distance_BSS, 0)), 0.0)
    step_BSS = jnp.where(after_BSS, jnp.power(decay, jnp.where(after_BSS, distance_BSS - 1, 0)), 0.0)
    precise = jax.lax.Precision.HIGHEST
    chains_BS = jnp.einsum("bij,bj->bi", from_BSS.astype(weight_BS.dtype), weight_BS, precision=precise)
    total_BS = jnp.einsum("bij,bj->bi", trace_BSS, weight_BS * outcome_BS, precision=precise)
    total_BS += (1 - decay) * jnp.einsum("bij,bj->bi", step_BSS, chains_BS * value_BS, precision=precise)
    return total_BS / jnp.where(chains_BS > 0, chains_BS, 1.0), chains_BS


td_lambda = TemporalDifference()
