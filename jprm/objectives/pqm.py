"""PQM's comparative loss of Q-values (Li and Li 2024, arXiv 2410.11287): correct steps above 0 above incorrect ones.

With C the correct and W the incorrect steps of a chain, and zeta a margin, the term of a correct step t is

    -log( e^Q_t / (e^Q_t + 1 + sum_{i in C before t} e^Q_i + sum_{w in W} e^(Q_w + zeta)) )

and a chain with incorrect steps has one more, of the problem: -log( 1 / (1 + sum_{w in W} e^(Q_w + zeta)) ).

`mean` says what is averaged. With `chains`, as in the published code, a chain's loss is the mean of its terms, and the
loss is the mean over chains: a tree gives what its root-to-leaf chains give, each alone, also where it is split. With
`steps` the loss is the mean over all terms, so that long chains weigh more. There a correct step of a tree has one
term, however many chains share it: its i are the correct steps before it, its w the incorrect steps before it and after
it on any of its chains, each once. The problem has one term a tree, and a split tree is compared within each row.

The terms are those of the paper's equation 10. The published code differs in two places: it adds 1e-5 to denominators,
and from a chain's second step on its running sum also has e^Q_t itself, which is then in its denominator twice.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Scalar

from jprm.experiment import ObjectiveConfig
from jprm.model.heads import find
from jprm.objectives.metrics import Judged
from jprm.objectives.steps import OfSteps, log_odds
from jprm.objectives.targets import targets
from jprm.rows import Rows, ancestors

_NONE = -1e30
"""A logarithm of 0 with a gradient of 0."""


@dataclasses.dataclass(frozen=True)
class PQM(OfSteps):
    """Q is the head's log-odds. The weight of a correct step multiplies its term. Counts chains or terms."""

    margin: float = 4.0  # zeta
    mean: Literal["chains", "steps"] = "chains"

    def of_logits(self, logit_BSC, rows, config):
        head = find(config.model.head)
        target_BS, weight_BS = targets(rows, config.target)
        metrics = {"scores": Judged(*head.judge(logit_BSC, target_BS), weight_BS)}
        total = self._of_chains if self.mean == "chains" else self._of_steps
        return *total(log_odds(head, logit_BSC), rows, config), metrics

    def _of_chains(self, q_BS: Array, rows: Rows, config: ObjectiveConfig) -> tuple[Scalar, Scalar]:
        """Every chain is in the row that owns its leaf, with all its steps: axis 1 of (B, S, S) is of leaves."""
        target_BS, weight_BS = targets(dataclasses.replace(rows, weight=rows.tree_weight), config.target)
        right_BS, wrong_BS = (weight_BS > 0) & (target_BS >= 0.5), (weight_BS > 0) & (target_BS < 0.5)
        before_BSS = ancestors(rows)
        on_BSS = (before_BSS | jnp.eye(q_BS.shape[1], dtype=bool)) & (rows.leaf & rows.owned)[..., None]
        below_BS = jnp.logaddexp(0.0, _log_sum(q_BS, before_BSS & right_BS[:, None, :]))
        wrong_BSS = on_BSS & wrong_BS[:, None, :]
        above_BS = _log_sum(q_BS + self.margin, wrong_BSS)
        term_BSS = jnp.logaddexp(jnp.logaddexp(q_BS, below_BS)[:, None, :], above_BS[..., None]) - q_BS[:, None, :]
        weight_BSS = on_BSS * (weight_BS * right_BS)[:, None, :]
        some_BS = jnp.any(wrong_BSS, axis=-1)
        sum_BS = jnp.sum(weight_BSS * term_BSS, axis=-1) + some_BS * jnp.logaddexp(0.0, above_BS)
        count_BS = jnp.sum(weight_BSS, axis=-1) + some_BS
        chain_BS = count_BS > 0
        return jnp.sum(sum_BS / jnp.where(chain_BS, count_BS, 1.0)), jnp.sum(chain_BS.astype(sum_BS.dtype))

    def _of_steps(self, q_BS: Array, rows: Rows, config: ObjectiveConfig) -> tuple[Scalar, Scalar]:
        target_BS, weight_BS = targets(rows, config.target)
        right_BS, wrong_BS = (weight_BS > 0) & (target_BS >= 0.5), (weight_BS > 0) & (target_BS < 0.5)
        before_BSS = ancestors(rows)
        rival_BSS = before_BSS & right_BS[:, None, :]
        rival_BSS |= (before_BSS | jnp.swapaxes(before_BSS, 1, 2)) & wrong_BS[:, None, :]
        level_BS = q_BS + self.margin * wrong_BS
        below_BS = jnp.logaddexp(0.0, _log_sum(level_BS, rival_BSS))
        term_BS = jnp.where(right_BS, jnp.logaddexp(q_BS, below_BS) - q_BS, 0.0)

        in_tree_BSS = (rows.tree[:, :, None] == rows.tree[:, None, :]) & wrong_BS[:, None, :]
        first_BS = wrong_BS & ~jnp.any(jnp.tril(in_tree_BSS, -1), axis=-1)  # has the problem's term
        problem_BS = jnp.where(first_BS, jnp.logaddexp(0.0, _log_sum(level_BS, in_tree_BSS)), 0.0)
        count = jnp.sum(weight_BS * right_BS) + jnp.sum(first_BS)
        return jnp.sum(weight_BS * term_BS) + jnp.sum(problem_BS), count


def _log_sum(x_BS, some_BSS):
    """Returns log sum_j e^x_j over the marked j of every i."""
    return jax.nn.logsumexp(jnp.where(some_BSS, x_BS[:, None, :], _NONE), axis=-1)


pqm = PQM()
