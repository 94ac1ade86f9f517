"""Objectives: functions `objective(params, rows, config) -> (loss_sum, count, metrics)` that training minimises.

`params["model"]` are the model's parameters, adapters merged; `params["reference"]` belong to the frozen second model,
if any. `rows` is a micro-batch; `config` is an `ObjectiveConfig`. The loss is the sum over all micro-batches and
devices divided by the summed count. `metrics` are sums too (see below).

An objective may have a method `check(config)`, called before loading, to raise ValueError if the two do not fit. A
model scores by its head, unless its objective has a number `log_ratio`: then a score is that number times the sum of
log(p / p_reference) over a chain's tokens (`jprm.methods.implicit`), with the experiment's `reference`. The run records
the number, so that loading it does not need the objective.

Hyperparameters are fields of a frozen dataclass, with defaults. An experiment sets them in `objective_options`:

    @dataclasses.dataclass(frozen=True)
    class Hinge:
        margin: float = 1.0  # `--set objective_options.margin=0.5`

        def __call__(self, params, rows, config): ...

    hinge = Hinge()  # register or name this instance; or name the class, whose fields may then lack defaults

Fields of type bool, int, float, str or Literal are options; other fields are not.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Scalar

from jprm.experiment import LOG_RATIO, ObjectiveConfig, TargetConfig
from jprm.io.storage import path_of
from jprm.model import heads
from jprm.model.heads import CLASS, HEADS, NAMED, PROBABILITY, TOKEN, Head, Target
from jprm.model.mesh import at_tokens
from jprm.model.transformer import step_logits, step_logits_and_sums
from jprm.options import OptionError, defined, described, find_part, values_of
from jprm.rows import Rows, ancestors, at_slots, siblings

Objective = Callable[[dict[str, Any], Rows, ObjectiveConfig], tuple[Scalar, Scalar, dict[str, Any]]]


class OfSteps:
    """An objective on the logits at step ends. A subclass must be a frozen dataclass with a method `of_logits`."""

    target: Target | None = PROBABILITY  # what the head must predict; None: anything
    supervise: tuple[str, ...] = ()  # values of data.supervise; (): all that the head takes

    @property
    def pairs(self) -> bool | str:
        """True: compares alternatives; "problem": a tree's steps; `False`: no pairs. Training logs `pairs_lost`."""
        return False

    def __call__(self, params: dict[str, Any], rows: Rows, config: ObjectiveConfig) -> tuple[Scalar, Scalar, dict]:
        """Calls `of_logits`; for a mixture of experts adds the balancing loss and the experts' load."""
        experts = config.model.experts
        if not experts.count:
            return self.of_logits(step_logits(params["model"], config.model, rows), rows, config)
        logit_BSC, sums = step_logits_and_sums(params["model"], config.model, rows)
        loss, count, metrics = self.of_logits(logit_BSC, rows, config)
        uneven, tokens = balance(sums), sums["tokens"]
        metrics |= {"expert_balance": Mean(uneven * tokens, tokens), "experts": Load(sums["chosen"])}
        return loss + experts.balance * uneven * count, count, metrics

    def of_logits(
        self, logit_BSC: Float[Array, "B S C"], rows: Rows, config: ObjectiveConfig
    ) -> tuple[Scalar, Scalar, dict]:
        """Returns (loss sum, count, {name: scalar, `Mean`, `Judged` or `Load`}), all summed over the micro-batch.
        `targets` gives labels and weights; a scalar is logged divided by the count."""
        raise NotImplementedError

    def check(self, config: ObjectiveConfig) -> None:
        """Raises ValueError if the objective does not fit the head, or the head does not fit the labels."""
        name, neutral, supervise = config.model.head, config.target.neutral, config.supervise
        head = heads.find(name)
        if supervise not in head.target.supervise:
            takes = " or ".join(head.target.supervise)
            raise ValueError(f"data.supervise={supervise!r} does not fit head {name!r}; use {takes}")
        if self.supervise and supervise not in self.supervise:
            takes = " or ".join(self.supervise)
            raise ValueError(f"data.supervise={supervise!r} does not fit the objective; use {takes}")
        if self.target is not None and head.target != self.target:
            takes = " or ".join(name for name, other in HEADS.items() if other.target == self.target)
            raise ValueError(f"the objective does not fit head {name!r}; it takes {takes}")
        if neutral not in head.target.neutral:
            takes = " or ".join(head.target.neutral)
            raise ValueError(f"target.neutral={neutral!r} does not fit head {name!r}; use {takes}")


def balance(sums: Mapping[str, Array]) -> Scalar:
    """Returns N sum_n (choices of n / tokens) (mean probability of n), the experts per token if all are used alike.
    `sums` are as from `experts.apply`, over all layers like transformers' (Fedus et al. 2021, eq. 4 to 6)."""
    tokens = jnp.maximum(sums["tokens"], 1)
    return len(sums["chosen"]) * jnp.sum(sums["chosen"] / tokens * sums["probability"] / tokens)


# --------------------------------------------------------------------------------------------------- one step at a time


Loss = Callable[[Head, Float[Array, "B S C"], Float[Array, "B S"], Float[Array, "B S"]], Scalar]
"""(head, logits, targets, weights) to the weighted sum, in float32."""


@dataclasses.dataclass(frozen=True)
class Pointwise(OfSteps):
    """One labelled slot at a time: a loss of logits and target, times the weight. `target` `None` takes any head."""

    loss: Loss
    target: Target | None = None

    def of_logits(self, logit_BSC, rows, config):
        head = heads.find(config.model.head)
        target_BS, weight_BS = targets(rows, config.target)
        total = self.loss(head, logit_BSC, target_BS, weight_BS)
        judged = Judged(*head.judge(logit_BSC, target_BS), weight_BS)
        return total, jnp.sum(weight_BS), {"scores": judged}

    def check(self, config: ObjectiveConfig) -> None:
        super().check(config)
        if self.loss is likelihood and heads.find(config.model.head).log_likelihood is None:
            raise ValueError(f"the objective does not fit head {config.model.head!r}: it has no likelihood")


def likelihood(head: Head, logit_BSC: Array, target_BS: Array, weight_BS: Array) -> Scalar:
    """Returns the weighted sum of -log p(target). Raises ValueError if the head has no likelihood."""
    return -jnp.sum(weight_BS * head.likelihood(logit_BSC, target_BS))


def brier(head: Head, logit_BSC: Array, target_BS: Array, weight_BS: Array) -> Scalar:
    """Returns the weighted sum of (p - t)^2, the Brier score; p is the score of the head, which must have a readout."""
    assert head.readout is not None  # only heads of tokens have none
    return jnp.sum(weight_BS * jnp.square(head.readout.score(logit_BSC) - target_BS))


cross_entropy = Pointwise(likelihood, PROBABILITY)
"""-t log p - (1 - t) log(1 - p), with t in [0, 1] and p the probability that the step is correct."""

ternary_cross_entropy = Pointwise(likelihood, CLASS)
"""-log p[class], with classes 0, 1, 2 for negative, neutral, positive."""

squared_error = Pointwise(brier, PROBABILITY)


@dataclasses.dataclass(frozen=True)
class NamedOutputs(OfSteps):
    """Cross-entropy on named outputs (head `sigmoid=...` or `softmax=...`), e.g. error kinds.

    The first output learns the labels, by `TargetConfig`. The others learn the numbers in [0, 1] in `data.extras` under
    their names, e.g. records' `classes`, at every step that has one. In a softmax the first is the remainder, and
    a step with several classes gives each an equal share. Counts the steps with any target.
    """

    target = NAMED
    supervise = ("step",)

    def of_logits(self, logit_BSC, rows, config):
        head = heads.find(config.model.head)
        assert head.readout is not None
        first, *others = head.channels
        extra_BSK = jnp.stack([rows.extras[name] for name in others], axis=-1)
        known_BSK = ~jnp.isnan(extra_BSK) & rows.owned[..., None]
        extra_BSK = jnp.where(known_BSK, extra_BSK, 0.0)
        if config.model.head.startswith("softmax"):
            target_BS, weight_BS = 1.0 - jnp.max(extra_BSK, axis=-1), jnp.any(known_BSK, axis=-1).astype(jnp.float32)
            target_BSC = jnp.concatenate([target_BS[..., None], extra_BSK], axis=-1)
            share_BSC = target_BSC / jnp.sum(target_BSC, axis=-1, keepdims=True)
            total = -jnp.sum(weight_BS[..., None] * share_BSC * jax.nn.log_softmax(logit_BSC, axis=-1))
            weight_BSC = jnp.broadcast_to(weight_BS[..., None], target_BSC.shape)
        else:
            target_BS, weight_BS = targets(rows, config.target)
            target_BSC = jnp.concatenate([target_BS[..., None], extra_BSK], axis=-1)
            weight_BSC = jnp.concatenate([weight_BS[..., None], known_BSK.astype(weight_BS.dtype)], axis=-1)
            log_BSC = target_BSC * jax.nn.log_sigmoid(logit_BSC) + (1 - target_BSC) * jax.nn.log_sigmoid(-logit_BSC)
            total = -jnp.sum(weight_BSC * log_BSC)
        judged = {
            "scores" if name == first else name: Judged(
                head.readout[name](logit_BSC), target_BSC[..., i] >= 0.5, weight_BSC[..., i]
            )
            for i, name in enumerate(head.channels)
        }
        return total, jnp.sum(jnp.max(weight_BSC, axis=-1)), judged

    def check(self, config: ObjectiveConfig) -> None:
        super().check(config)
        if missing := [name for name in heads.find(config.model.head).channels[1:] if name not in config.extras]:
            raise ValueError(
                f"head {config.model.head!r}: data.extras lacks {', '.join(missing)}: it names the numbers, or the"
                " `classes` of records, that outputs after the first learn"
            )


next_token = Pointwise(likelihood, TOKEN)
"""Language modelling: -log p[token], with token ids as targets."""


# -------------------------------------------------------------------------------------------------------------- ranking


@dataclasses.dataclass(frozen=True)
class BradleyTerry(OfSteps):
    """Ranking: -log sigmoid(s_i - s_j) if step i is labelled better than its alternative j.

    s are the head's log-odds (Bradley and Terry 1952). Alternatives continue the same step; with `among` "problem" all
    labelled steps in a tree are compared, e.g. its chains' ends, as for outcome reward models. Each pair counts
    once, weighted by the product of both weights. Splitting a tree loses pairs: `data.siblings` makes the packer
    separate as few alternatives as possible, and training logs the number (`pairs_lost`).

    Counts pairs; the metric `pair_accuracy` is the fraction in the right order.
    """

    among: Literal["alternatives", "problem"] = "alternatives"

    @property
    def pairs(self) -> bool | str:
        return self.among == "alternatives" or self.among

    def of_logits(self, logit_BSC, rows, config):
        head = heads.find(config.model.head)
        target_BS, weight_BS = targets(rows, config.target)
        rival_BSS = siblings(rows) if self.pairs is True else rows.tree[:, :, None] == rows.tree[:, None, :]
        better_BSS = rival_BSS & (target_BS[:, :, None] > target_BS[:, None, :])
        loss, count, correct = pair_loss(
            log_odds(head, logit_BSC), better_BSS * weight_BS[:, :, None] * weight_BS[:, None, :]
        )
        judged = Judged(*head.judge(logit_BSC, target_BS), weight_BS)
        return loss, count, {"pair_accuracy": correct, "scores": judged}


bradley_terry = BradleyTerry()


_NONE = -1e30
"""A logarithm of 0 with gradient 0."""


@dataclasses.dataclass(frozen=True)
class PQM(OfSteps):
    """Comparative loss on Q-values (PQM, Li and Li 2024, arXiv 2410.11287): correct steps above 0 above incorrect.

    With C the correct and W the incorrect steps of a chain, and zeta a margin, the term for a correct step t is

        -log( e^Q_t / (e^Q_t + 1 + sum_{i in C before t} e^Q_i + sum_{w in W} e^(Q_w + zeta)) )

    and a chain with incorrect steps has one more, for the problem: -log( 1 / (1 + sum_{w in W} e^(Q_w + zeta)) ).

    With `mean` "chains", as in the published code, the loss is the mean over chains of each chain's mean term; a tree
    gives the same as its root-to-leaf chains alone, even if it is split. With "steps" the loss is the mean over all
    terms, so long chains weigh more. A correct step of a tree then has one term, however many chains share it: its i
    are the correct steps before it, its w the incorrect steps before it and after it on any of its chains, each once.
    The problem has one term per tree, and a split tree is compared within each row.

    Terms follow the paper's equation 10. The published code adds 1e-5 to denominators, and from a chain's second step
    on its running sum includes e^Q_t itself, which its denominator then has twice.

    Q is the head's log-odds. A correct step's weight multiplies its term. Counts chains or terms.
    """

    margin: float = 4.0  # zeta
    mean: Literal["chains", "steps"] = "chains"

    def of_logits(self, logit_BSC, rows, config):
        head = heads.find(config.model.head)
        target_BS, weight_BS = targets(rows, config.target)
        metrics = {"scores": Judged(*head.judge(logit_BSC, target_BS), weight_BS)}
        total = self._of_chains if self.mean == "chains" else self._of_steps
        return *total(log_odds(head, logit_BSC), rows, config), metrics

    def _of_chains(self, q_BS: Array, rows: Rows, config: ObjectiveConfig) -> tuple[Scalar, Scalar]:
        """Computes chain by chain, in the row that owns the leaf; axis 1 of (B, S, S) is leaves."""
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
    """Returns log sum_j e^x_j over each i's marked j."""
    return jax.nn.logsumexp(jnp.where(some_BSS, x_BS[:, None, :], _NONE), axis=-1)


pqm = PQM()


def log_odds(head: Head, logit_BSC: Float[Array, "B S C"]) -> Float[Array, "B S"]:
    """Returns a probability head's log-odds, e.g. `binary`'s difference, the ensemble members' mean. Raises ValueError
    if the head has neither `log_odds` nor a likelihood."""
    if head.log_odds:
        factor_C = jnp.array(head.log_odds) / sum(factor * factor for factor in head.log_odds)
        return jnp.sum(logit_BSC * factor_C, axis=-1)
    one_BS = jnp.ones(logit_BSC.shape[:-1])
    return head.likelihood(logit_BSC, one_BS) - head.likelihood(logit_BSC, 0 * one_BS)


def pair_loss(s_BS: Float[Array, "B S"], pair_BSS: Float[Array, "B S S"]) -> tuple[Scalar, Scalar, Scalar]:
    """Returns weighted sums over pairs (i, j), i better (weight 0: no pair): -log sigmoid(s_i - s_j), 1, s_i > s_j."""
    margin_BSS = s_BS[:, :, None] - s_BS[:, None, :]
    loss = -jnp.sum(pair_BSS * jax.nn.log_sigmoid(margin_BSS))
    return loss, jnp.sum(pair_BSS), jnp.sum(pair_BSS * (margin_BSS > 0))


# --------------------------------------------------------------------------------------------------------------- values


@dataclasses.dataclass(frozen=True)
class TemporalDifference(OfSteps):
    """TD(lambda): values learned from chain outcomes and from later steps' values.

    On a chain of steps 1 to n with outcome y, step t learns the lambda-return (Sutton and Barto 2018, chapter 12)

        G_n = y,    G_t = (1 - lambda) V_(t+1) + lambda G_(t+1)

    by cross-entropy; V are the head's scores, without gradient. A shared step learns its chains' mean return,
    weighted by their number: cross-entropy is linear in its target, so this equals the sum over separate chains. lambda
    = 1 is `data.supervise="outcome_steps"`. Every chain with a known outcome has all its steps in one row, so splitting
    changes nothing.

    Counts (chain, step) pairs. Metrics cover the chain ends.
    """

    supervise = ("outcome",)
    trace_decay: float = 0.95  # lambda: 0 learns only from the next step's value, 1 only from the outcome

    def __post_init__(self):
        if not 0 <= self.trace_decay <= 1:
            raise ValueError(f"trace_decay={self.trace_decay} must be from 0 to 1")

    def of_logits(self, logit_BSC, rows, config):
        head = heads.find(config.model.head)
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
    """Returns each step's mean lambda-return over its chains, and the chains' weight; both 0 if it has none.

    Chains end where the weight is positive. A chain's return at i is lambda^d y, with its end d steps after i, plus the
    sum of (1 - lambda) lambda^(d - 1) V over the steps d after i: lambda is `decay`, y the outcome, V the value.
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


# ---------------------------------------------------------------------------------------------------- labels as targets


def targets(rows: Rows, config: TargetConfig) -> tuple[Float[Array, "B S"], Float[Array, "B S"]]:
    """Returns (target, weight) per slot.

    A target is the probability in [0, 1] that the step is correct, or with neutral='third' the class 0, 1 or 2
    (negative, neutral, positive). A weight is 0 if the step has no label, or `config` leaves it out of the loss.
    Raises KeyError if the rows lack the extra `config.consensus`.
    """
    label, weight = rows.label, rows.weight
    if config.labels == "rating":
        neutral = label == 0
        wrong = label <= 0 if config.neutral == "negative" else label < 0
        target = label + 1.0 if config.neutral == "third" else jnp.where(wrong, 0.0, 1.0)
        if config.neutral == "drop":
            weight = jnp.where(neutral, 0.0, weight)
    else:
        target, wrong, weight = _of_probability(rows, config)
    if config.consensus:
        verdict = rows.extras[config.consensus]
        differ = jnp.isnan(verdict) | (~wrong != (verdict > 0.5))  # no verdict agrees with nothing
        weight = jnp.where(differ | after_error(rows, differ), 0.0, weight)
    if config.after_error == "mask":
        weight = jnp.where(after_error(rows, wrong), 0.0, weight)
    if config.smoothing:
        target = (1.0 - config.smoothing) * target + 0.5 * config.smoothing
    return target, weight


def _of_probability(rows: Rows, config: TargetConfig) -> tuple[Array, Array, Array]:
    """Returns (target, is incorrect, weight) per slot, by `TargetConfig.soft`."""
    value, weight, soft = rows.label, rows.weight, config.soft
    right = value > (0.0 if soft == "relative" else config.threshold)
    if soft in ("relative", "progress"):
        before, has_before = _before(rows)
        weight = jnp.where(has_before, weight, 0.0)
        if soft == "progress":
            return 0.5 * (1.0 + value - before), ~right, weight
        right &= value >= config.threshold * before
    if soft == "entropy":
        target = jnp.log1p(value * jnp.expm1(config.eta)) / config.eta
    else:
        target = value if soft == "soft" else jnp.where(right, 1.0, 0.0)
    return target, ~right, weight


def _before(rows: Rows) -> tuple[Float[Array, "B S"], Bool[Array, "B S"]]:
    """Returns the previous step's label, and whether there is one (also if a split repeats that step)."""
    at_BS = jnp.maximum(rows.parent, 0)
    label_BS, weight_BS = (at_slots(x_BS, at_BS) for x_BS in (rows.label, rows.tree_weight))
    return label_BS, (rows.parent >= 0) & (weight_BS > 0)


def after_error(rows: Rows, wrong_BS: Bool[Array, "B S"]) -> Bool[Array, "B S"]:
    """Marks the steps after an incorrect step on their chain.

    Slots are in depth-first order, so an earlier slot leads to this one if and only if its subtree extends past this
    step's end. The farthest extent among incorrect slots that end earlier decides. Alternatives with equal text end at
    one token: they do not follow each other, and their continuations follow all of them.
    """
    until_BS = at_tokens(rows.until, rows.step_end)
    reach_BS = jax.lax.cummax(jnp.where(wrong_BS, until_BS, 0), axis=1)
    before_BS = jnp.pad(reach_BS, ((0, 0), (1, 0)))[:, :-1]
    new_BS = rows.step_end != jnp.pad(rows.step_end, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    first_BS = jax.lax.cummax(jnp.where(new_BS, jnp.arange(new_BS.shape[1]), 0), axis=1)  # of those with its end
    return at_slots(before_BS, first_BS) > rows.step_end


# -------------------------------------------------------------------------------------------- what an objective reports
#
# Sums that add up over micro-batches, devices and steps, and are divided on the host. An objective returns a dict. A
# scalar is logged divided by the objective's count; a `Mean` has a divisor of its own. `Judged` scores are logged as
# `step_accuracy` and `auroc`. Of several, those named `scores` are logged so, and others after their names:
# `NAME_step_accuracy`, `NAME_auroc`.

BINS = 512
"""Score bins for the training AUROC: class histograms add up over steps, devices and micro-batches."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A sum and its divisor; both add up. The mean is `None` if the divisor is 0."""

    total: Scalar
    weight: Scalar

    def value(self) -> float | None:
        return float(self.total) / float(self.weight) if float(self.weight) else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoreSums:
    """Sums of `Judged` scores; they add up."""

    right: Scalar  # weight of steps on the correct side of one half
    histogram_CN: Float[Array, "2 N"]  # weight by class (incorrect, correct) and bin of the score

    def means(self) -> dict[str, float | None]:
        """Returns `step_accuracy` at 0.5 (0 without steps) and `auroc`, which is `None` if all steps share a class."""
        wrong_N, right_N = np.asarray(self.histogram_CN).astype(np.float64)
        below_N = np.cumsum(wrong_N) - wrong_N
        pairs = wrong_N.sum() * right_N.sum()
        area = float(np.sum(right_N * (below_N + 0.5 * wrong_N)) / pairs) if pairs else None
        return {"step_accuracy": float(self.right / divisor(wrong_N.sum() + right_N.sum())), "auroc": area}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Judged:
    """Scores in [0, 1], correct steps and weights. Training sums them into bins; validation's AUROC is exact."""

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Load:
    """Choices per expert, over layers and real tokens; adds up."""

    chosen_N: Float[Array, " N"]

    def means(self) -> dict[str, float | None]:
        """Returns `expert_load`, the largest load over the mean (`None` if all are 0), and the share `experts_idle`."""
        chosen_N = np.asarray(self.chosen_N).astype(np.float64)
        largest = float(chosen_N.max() / chosen_N.mean()) if chosen_N.any() else None
        return {"expert_load": largest, "experts_idle": float((chosen_N == 0).mean())}


def divisor(count: float) -> float:
    """Returns the count, or 1 if it is 0 (all sums are then 0)."""
    return count if count > 0 else 1.0


def prefixed(metrics: dict[str, Any], name: str, values: dict[str, float | None]) -> dict[str, float | None]:
    """Returns `values`, with keys `NAME_key` if `metrics` has several judged scores and `name` is not `scores`."""
    judged = [value for value in metrics.values() if isinstance(value, Judged | ScoreSums)]
    return values if len(judged) == 1 or name == "scores" else {f"{name}_{key}": x for key, x in values.items()}


def summed(metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns the metrics with `ScoreSums` for `Judged` scores, so all add up."""
    return {name: value.sums() if isinstance(value, Judged) else value for name, value in metrics.items()}


def means(metrics: dict[str, Any], count: float) -> dict[str, float | None]:
    """Returns {name to log: value or `None`} from `summed` metrics over `count` labels: `ScoreSums` and `Load` by their
    `means`, a `Mean` by its own divisor, other sums divided by `count` (0 if it is 0)."""
    values: dict[str, float | None] = {}
    for name, value in metrics.items():
        if isinstance(value, ScoreSums):
            values |= prefixed(metrics, name, value.means())
        elif isinstance(value, Load):
            values |= value.means()
        else:
            values[name] = value.value() if isinstance(value, Mean) else float(value) / divisor(count)
    return values


# --------------------------------------------------------------------------------------------------- objectives by name


OBJECTIVES: dict[str, Objective | str] = {
    "cross_entropy": cross_entropy,
    "ternary_cross_entropy": ternary_cross_entropy,
    "squared_error": squared_error,
    "next_token": next_token,
    "named_outputs": NamedOutputs(),
    "likelihood": Pointwise(likelihood),  # of any head that has one
    "policy_gradient": "jprm.methods.rl.policy_gradient:policy_gradient",  # on groups that `jprm.methods.rl` samples
    "bradley_terry": bradley_terry,
    "pqm": pqm,
    "td_lambda": td_lambda,
    "implicit": "jprm.methods.implicit:implicit",
}
"""Objectives by name. A string `module:NAME` is imported on first use."""

MOVED = {"jprm.objectives.implicit:implicit": "implicit"}
"""Old names for registered objectives, as earlier runs recorded them."""

PLAIN = (bool, int, float, str)
"""Option types, besides Literal."""

COPY = "objective.py"
"""The run folder's copy of its objective's file."""


def find(name: str, options: Mapping[str, Any] | None = None, workdir: str | os.PathLike | None = None) -> Objective:
    """Returns an experiment's objective. Equal names and options give equal objectives, which hash alike.

    Args:
        name: a registered name, `module:NAME`, or `FILE.py:NAME` (executed once; its errors pass through). NAME is a
            function or a dataclass with `__call__`.
        options: hyperparameters instead of the objective's defaults.
        workdir: the run's folder. Its copy of FILE.py is read if FILE.py is gone.

    Raises ValueError if there is none, if FILE.py differs from the run's copy, or as `with_options`.
    """
    text = source(name, workdir)
    if text is None:
        return with_options(find_part(MOVED.get(name, name), OBJECTIVES, "objective"), options or {}, name)
    path, _, function = name.rpartition(":")
    objective = defined(path, text).get(function)
    if not callable(objective):
        raise ValueError(f"objective={name!r}: {path} defines no function {function}")
    return with_options(objective, options or {}, name)


def with_options(objective: Any, options: Mapping[str, Any], name: str) -> Objective:
    """Returns a copy of an objective, or an instance of a class, with these options; `name` is for errors.

    Raises ValueError, listing the options, if one is unknown, missing, or has a wrong type or range, or if the
    objective does not hash.
    """
    kinds = option_types(objective)
    try:
        values = values_of(kinds, options)
        if isinstance(objective, type):
            objective = objective(**values)
        elif values:
            objective = dataclasses.replace(objective, **values)
        hash(objective)  # a step is compiled once for each objective: a dataclass must be frozen
    except (TypeError, ValueError) as error:
        reason = f"{error.field}: {error.reason}" if isinstance(error, OptionError) else error
        known = described(kinds)
        raise ValueError(f"objective={name!r}: objective_options may set: {known}: {reason}") from error
    return cast(Objective, objective)


def recorded(objective: Objective) -> tuple[str, dict[str, Any]]:
    """Returns the name and options under which a run records an objective: `module:NAME`, or a registered name.

    With a registered name, options at its defaults are omitted; a function's are {}. `find` accepts both, unless the
    object is not importable, e.g. a function in a notebook or in another function.
    """
    if not dataclasses.is_dataclass(objective):
        kind = objective if hasattr(objective, "__qualname__") else type(objective)
        return f"{kind.__module__}:{kind.__qualname__}", {}
    kind = type(objective)
    for name in OBJECTIVES:
        known = find_part(name, OBJECTIVES, "objective")
        if type(known) is kind:
            values = {option: getattr(objective, option) for option in option_types(known)}
            options = {option: value for option, value in values.items() if value != getattr(known, option)}
            if dataclasses.replace(cast(Any, known), **options) == objective:
                return name, options
    return f"{kind.__module__}:{kind.__qualname__}", {name: getattr(objective, name) for name in option_types(kind)}


def option_types(objective: Any) -> dict[str, Any]:
    """Returns {field: type} of a dataclass's (or instance's) bool, int, float, str and Literal fields; else {}."""
    if not dataclasses.is_dataclass(objective):
        return {}
    kinds = typing.get_type_hints(objective if isinstance(objective, type) else type(objective))
    plain = {field.name: kinds[field.name] for field in dataclasses.fields(objective) if field.init}
    return {name: kind for name, kind in plain.items() if kind in PLAIN or typing.get_origin(kind) is typing.Literal}


def check(objective: Objective, config: ObjectiveConfig) -> None:
    """Calls the objective's `check`, if it has one. Raises ValueError if it does not fit the head or the labels."""
    if hasattr(objective, "check"):
        objective.check(config)


def log_ratio(objective: Objective) -> float | None:
    """Returns the objective's log-ratio factor, or `None` if its model scores by the head."""
    return getattr(objective, LOG_RATIO, None)


def source(name: str, workdir: str | os.PathLike | None = None) -> str | None:
    """Returns the text of FILE.py in `name`, or of its copy in the run's `workdir` if it is gone; `None` for other
    names. Raises ValueError if both are gone, or they differ."""
    path = pathlib.Path(name.rpartition(":")[0])
    if path.suffix != ".py":
        return None
    files = [path, path_of(workdir) / COPY] if workdir else [path]
    texts = [file.read_text() for file in files if file.is_file()]
    if not texts:
        raise ValueError(f"objective={name!r}: there is no file {path}")
    if len(set(texts)) > 1:
        raise ValueError(f"{path}: differs from the run's copy {files[1]}. Use another --workdir")
    return texts[0]
