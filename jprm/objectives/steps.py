"""Objectives of the logits at step ends: one labelled step at a time, steps ranked, values of the steps after.

`OfSteps` is what they share. Each is a frozen dataclass whose `of_logits` returns the sum of the loss, its count and
the metrics; the formulas are in the classes' docstrings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

from jprm.experiment import ObjectiveConfig
from jprm.model.heads import CLASS, HEADS, PROBABILITY, TOKEN, Head, Target, find
from jprm.model.transformer import step_logits
from jprm.objectives.metrics import Judged
from jprm.objectives.targets import targets
from jprm.rows import Rows, ancestors, siblings


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


# --------------------------------------------------------------------------------------------------- one step at a time


Loss = Callable[[Head, Float[Array, "B S C"], Float[Array, "B S"], Float[Array, "B S"]], Scalar]
"""(head, logits, targets, weights) to the weighted sum, in float32."""


@dataclasses.dataclass(frozen=True)
class Pointwise(OfSteps):
    """One labelled slot at a time: a loss of its logits and its target, times its weight.

    For heads of one kind of target, or of any (None).
    """

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


def brier(head: Head, logit_BSC: Array, target_BS: Array, weight_BS: Array) -> Scalar:
    """Returns the sum of (p - t)^2, the Brier score of the head's score p."""
    assert head.readout is not None  # only heads of tokens have none
    return jnp.sum(weight_BS * jnp.square(head.readout.score(logit_BSC) - target_BS))


cross_entropy = Pointwise(likelihood, PROBABILITY)
"""Of the probability p that a step is correct: -t log p - (1 - t) log(1 - p), t in [0, 1]."""

ternary_cross_entropy = Pointwise(likelihood, CLASS)
"""Of three classes: -log p[class], classes 0, 1, 2 being negative, neutral, positive."""

squared_error = Pointwise(brier, PROBABILITY)

next_token = Pointwise(likelihood, TOKEN)
"""Language modelling: -log p[token], targets being the ids of tokens."""


# -------------------------------------------------------------------------------------------------------------- ranking


@dataclasses.dataclass(frozen=True)
class BradleyTerry(OfSteps):
    """Ranking of alternatives: -log sigmoid(s_i - s_j) where step i is labelled better than its alternative j.

    s are the head's log-odds (Bradley and Terry 1952). Alternatives continue the same step; with `among` "problem" all
    labelled steps of a tree are compared, such as the ends of its chains, as reward models of whole answers are
    trained. Each pair counts once, with the product of their weights. Pairs that the packer separates, by splitting a
    tree, are lost: `data.siblings` makes it separate the fewest alternatives, and training logs how many
    (`pairs_lost`).

    The count is the number of pairs; the metric `pair_accuracy` is the fraction in the right order.
    """

    among: Literal["alternatives", "problem"] = "alternatives"

    @property
    def pairs(self) -> bool:
        return self.among == "alternatives"

    def of_logits(self, logit_BSC, rows, config):
        head = find(config.model.head)
        target_BS, weight_BS = targets(rows, config.target)
        rival_BSS = siblings(rows) if self.pairs else rows.tree[:, :, None] == rows.tree[:, None, :]
        better_BSS = rival_BSS & (target_BS[:, :, None] > target_BS[:, None, :])
        loss, count, correct = pair_loss(
            log_odds(head, logit_BSC), better_BSS * weight_BS[:, :, None] * weight_BS[:, None, :]
        )
        judged = Judged(*head.judge(logit_BSC, target_BS), weight_BS)
        return loss, count, {"pair_accuracy": correct, "scores": judged}


bradley_terry = BradleyTerry()


_NONE = -1e30
"""A logarithm of 0 with a gradient of 0."""


@dataclasses.dataclass(frozen=True)
class PQM(OfSteps):
    """Comparative loss of Q-values (PQM, Li and Li 2024, arXiv 2410.11287): correct steps above 0 above incorrect.

    With C the correct and W the incorrect steps of a chain, and zeta a margin, the term of a correct step t is

        -log( e^Q_t / (e^Q_t + 1 + sum_{i in C before t} e^Q_i + sum_{w in W} e^(Q_w + zeta)) )

    and a chain with incorrect steps has one more, of the problem: -log( 1 / (1 + sum_{w in W} e^(Q_w + zeta)) ).

    `mean` says what is averaged. With `chains`, as in the published code, a chain's loss is the mean of its terms, and
    the loss is the mean over chains: a tree gives what its root-to-leaf chains give, each alone, also where it is
    split. With `steps` the loss is the mean over all terms, so that long chains weigh more. There a correct step of a
    tree has one term, however many chains share it: its i are the correct steps before it, its w the incorrect steps
    before it and after it on any of its chains, each once. The problem has one term a tree, and a split tree is
    compared within each row.

    The terms are those of the paper's equation 10. The published code differs in two places: it adds 1e-5 to
    denominators, and from a chain's second step on its running sum also has e^Q_t itself, which is then in its
    denominator twice.

    Q is the head's log-odds. The weight of a correct step multiplies its term. Counts chains or terms.
    """

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


# --------------------------------------------------------------------------------------------------------------- values


@dataclasses.dataclass(frozen=True)
class TemporalDifference(OfSteps):
    """TD(lambda): values learned from the outcomes of chains and from the values of the steps after them.

    On a chain of steps 1 to n with outcome y, step t learns the lambda-return (Sutton and Barto 2018, chapter 12)

        G_n = y,    G_t = (1 - lambda) V_(t+1) + lambda G_(t+1)

    by cross-entropy; V are the head's scores, without gradient. A shared step learns the mean return of the chains
    through it, and weighs as many: as cross-entropy is linear in its target, that is the sum over the chains, each
    alone. With lambda = 1 it is `data.supervise="outcome_steps"`. Every chain of known outcome is in one row with all
    its steps, so a split changes nothing.

    The count is the number of pairs of a chain and a step on it. Metrics are of the ends of chains.
    """

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
