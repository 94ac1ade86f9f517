"""PQM's comparative loss of Q-values (Li and Li 2024, arXiv 2410.11287): correct steps above 0 above incorrect ones.

With C the correct and W the incorrect steps of a chain, and zeta a margin, the term of a correct step t is

    -log( e^Q_t / (e^Q_t + 1 + sum_{i in C before t} e^Q_i + sum_{w in W} e^(Q_w + zeta)) )

and a chain with incorrect steps has one more, of the problem: -log( 1 / (1 + sum_{w in W} e^(Q_w + zeta)) ). The loss
is the mean over all terms. The formulas are those of the published code, less its 1e-5 in denominators.

On a tree every correct step has one term, however many chains share it. Its i are the correct steps before it, its w
the incorrect steps before it and after it on any of its chains, each once. The problem has one term a tree. On a tree
of one chain that is the formula above. A tree that is split over rows is compared within each row.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jprm.model.heads import find
from jprm.objectives.metrics import Judged
from jprm.objectives.steps import OfSteps, log_odds
from jprm.objectives.targets import targets
from jprm.rows import ancestors

_NONE = -1e30
"""A logarithm of 0 with a gradient of 0."""


@dataclasses.dataclass(frozen=True)
class PQM(OfSteps):
    """Q is the head's log-odds. The weight of a correct step multiplies its term."""

    margin: float = 4.0  # zeta

    def of_logits(self, logit_BSC, rows, config):
        head = find(config.model.head)
        target_BS, weight_BS = targets(rows, config.target)
        q_BS, some_BS = log_odds(head, logit_BSC), weight_BS > 0
        right_BS, wrong_BS = some_BS & (target_BS >= 0.5), some_BS & (target_BS < 0.5)
        before_BSS = ancestors(rows)
        rival_BSS = before_BSS & right_BS[:, None, :]
        rival_BSS |= (before_BSS | jnp.swapaxes(before_BSS, 1, 2)) & wrong_BS[:, None, :]
        level_BS = q_BS + self.margin * wrong_BS
        below_BS = jnp.logaddexp(0.0, _log_sum(level_BS, rival_BSS))
        term_BS = jnp.where(right_BS, jnp.logaddexp(q_BS, below_BS) - q_BS, 0.0)

        in_tree_BSS = (rows.tree[:, :, None] == rows.tree[:, None, :]) & wrong_BS[:, None, :]
        first_BS = wrong_BS & ~jnp.any(jnp.tril(in_tree_BSS, -1), axis=-1)  # has the problem's term
        problem_BS = jnp.where(first_BS, jnp.logaddexp(0.0, _log_sum(level_BS, in_tree_BSS)), 0.0)
        judged = Judged(*head.judge(logit_BSC, target_BS), weight_BS)
        count = jnp.sum(weight_BS * right_BS) + jnp.sum(first_BS)
        return jnp.sum(weight_BS * term_BS) + jnp.sum(problem_BS), count, {"scores": judged}


def _log_sum(x_BS, some_BSS):
    """Returns log sum_j e^x_j over the marked j of every i."""
    return jax.nn.logsumexp(jnp.where(some_BSS, x_BS[:, None, :], _NONE), axis=-1)


pqm = PQM()
