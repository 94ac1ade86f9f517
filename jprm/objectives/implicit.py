"""Implicit process rewards (Yuan et al. 2024, arXiv 2412.01981): a language model whose log ratio is the reward.

With pi the model, ref the frozen reference and y the tokens of a chain, r(y) = beta sum_i log pi(y_i) / ref(y_i), and

    cross_entropy   -l log sigmoid(r(y)) - (1 - l) log(1 - sigmoid(r(y))), l being the outcome
    dpo             -log sigmoid(r(y) - r(z)) over the correct chains y and incorrect z of one problem (Rafailov et al.
                    2023, arXiv 2305.18290); pairs that are in different rows are left out

Summed up to a step's end instead, r is the step's score: `jprm.score.implicit` computes both.

The reference is frozen, so that its log-probabilities need computing once: `jprm label reference` puts them into the
data. With data.extras=("reference",) they are read there, and the second model is neither loaded nor computed.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Scalar

from jprm.experiment import ObjectiveConfig
from jprm.model.heads import find
from jprm.objectives import Judged, pair_loss, targets
from jprm.rows import Rows
from jprm.score.implicit import BETA, log_probs, on_paths, path_sum
from jprm.token_tree import REFERENCE


@dataclasses.dataclass(frozen=True)
class Implicit:
    """The count is the number of chains, or of pairs."""

    beta: float = BETA
    loss: Literal["cross_entropy", "dpo"] = "cross_entropy"

    @property
    def log_ratio(self) -> float:
        """The factor of the score, a log ratio to the reference."""
        return self.beta

    def __call__(self, params: dict[str, Any], rows: Rows, config: ObjectiveConfig) -> tuple[Scalar, Scalar, dict]:
        some_BT = scored_tokens(rows, config)
        log_BS = path_sum(log_probs(params["model"], config.model, rows, some_BT), rows, rows.problem)
        if REFERENCE in rows.extras:
            reference_BS = rows.extras[REFERENCE]
        else:
            reference_BT = log_probs(params["reference"], config.model, rows, some_BT)
            reference_BS = jax.lax.stop_gradient(path_sum(reference_BT, rows, rows.problem))
        return self.of_log_probs(log_BS, reference_BS, rows, config)

    def of_log_probs(
        self, log_BS: Float[Array, "B S"], reference_BS: Float[Array, "B S"], rows: Rows, config: ObjectiveConfig
    ) -> tuple[Scalar, Scalar, dict]:
        """Returns the loss from both models' log-probabilities of the chains up to every step."""
        target_BS, weight_BS = targets(rows, config.target)
        # A step that no labelled chain goes through is not computed.
        r_BS = jnp.where(weight_BS > 0, self.beta * (log_BS - reference_BS), 0.0)
        metrics: dict[str, Any] = {"scores": Judged(jax.nn.sigmoid(r_BS), target_BS >= 0.5, weight_BS)}
        if self.loss == "dpo":
            better_BSS = rows.tree[:, :, None] == rows.tree[:, None, :]
            better_BSS &= target_BS[:, :, None] > target_BS[:, None, :]
            pair_BSS = better_BSS * weight_BS[:, :, None] * weight_BS[:, None, :]
            loss, count, correct = pair_loss(r_BS, pair_BSS)
            return loss, count, metrics | {"pair_accuracy": correct}
        likelihood_BS = target_BS * jax.nn.log_sigmoid(r_BS) + (1 - target_BS) * jax.nn.log_sigmoid(-r_BS)
        return -jnp.sum(weight_BS * likelihood_BS), jnp.sum(weight_BS), metrics

    def check(self, config: ObjectiveConfig) -> None:
        """Raises ValueError without a language head, a reference or outcomes."""
        if find(config.model.head).channels:
            raise ValueError(f"the objective implicit does not fit head {config.model.head!r}; it takes language")
        if not config.reference and REFERENCE not in config.extras:
            raise ValueError("the objective implicit needs `reference`, the frozen model of its log ratio")
        if config.supervise != "outcome":
            raise ValueError(f"the objective implicit needs data.supervise='outcome', not {config.supervise!r}")
        if self.loss == "dpo" and config.model.chain_rows:
            raise ValueError(
                f"loss='dpo' compares the chains of a row, and attention={config.model.attention!r} has one a row: use"
                " another, such as 'blocked'"
            )


def scored_tokens(rows: Rows, config: ObjectiveConfig) -> Bool[Array, "B T"]:
    """Marks the tokens of the steps of labelled chains, the only ones whose log-probabilities the loss takes."""
    _, weight_BS = targets(rows, config.target)
    return jnp.any(on_paths(rows, rows.problem) & (weight_BS > 0)[..., None], axis=1)


implicit = Implicit()
