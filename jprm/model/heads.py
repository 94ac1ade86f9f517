"""Heads: the meaning of step or token logits, one `Head` record each in `HEADS`.

Only the head knows how many logits there are and what they mean. Other code reads the record:

    head = find(config.head)                     # a name in HEADS, or "module:NAME" of the user's own module
    head.size(config.vocab_size)                 # logits
    head.readout(logit_BSC)                      # {"score": (B, S), ...}: scores and further named outputs
    head.log_likelihood(logit_BSC, target_BS)    # (B, S): the terms of likelihood losses
    head.judge(logit_BSC, target_BS)             # scores and correct steps, for metrics
    head.target                                  # the labels that it takes

A published model brings its own `Readout`. To add a head, write a record. A head with named outputs, e.g. error kinds,
needs none: `sigmoid=correct,wrong_sum,copied` gives each its own probability, and `softmax=correct,wrong_sum,copied`
gives probabilities summing to 1. The first is the score.

Outputs other than the score are written to records under `outputs`. `quantile` and `ensemble` give `low` and `high`,
which a search can use as the score (`jprm.score.scorer.PRM.by`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jprm.options import find_part

Output = Callable[[Float[Array, "*B C"]], Float[Array, "*B"]]
"""Maps logits to one number per step. It must be hashable, as a static argument to compiled programs."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, init=False)
class Readout:
    """Named functions of a step's logits: `score` and others, e.g. an uncertainty or error class probabilities."""

    outputs: tuple[tuple[str, Output], ...]

    def __init__(self, *, score: Output, **others: Output):
        object.__setattr__(self, "outputs", tuple({"score": score, **others}.items()))

    def __call__(self, logit_BSC: Float[Array, "*B C"]) -> dict[str, Float[Array, "*B"]]:
        return {name: output(logit_BSC) for name, output in self.outputs}

    def __getitem__(self, name: str) -> Output:
        return dict(self.outputs)[name]

    @property
    def score(self) -> Output:
        return self["score"]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Weighted:
    """An output: the sum of factor x activation over channels, in float32.

    After a softmax, (0, 1) is the second class' probability among two, (0, 1, 1) one minus the first one's among three,
    and (-1, 1) a difference. After a sigmoid, (1,) is the log-odds' probability.
    """

    activation: Literal["softmax", "sigmoid", "none"]
    factors: tuple[float, ...]  # of the channels, in order

    def __call__(self, logit_BSC: Float[Array, "*B C"]) -> Float[Array, "*B"]:
        logit_BSC = logit_BSC.astype(jnp.float32)
        if self.activation == "softmax":
            logit_BSC = jax.nn.softmax(logit_BSC, axis=-1)
        elif self.activation == "sigmoid":
            logit_BSC = jax.nn.sigmoid(logit_BSC)
        score_BS = jnp.sum(logit_BSC * jnp.array(self.factors, jnp.float32), axis=-1)
        if self.activation == "softmax":  # rounding may put a mean of the factors beyond the largest
            score_BS = jnp.clip(score_BS, min(self.factors), max(self.factors))
        return score_BS


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Unless:
    """An output that becomes 0 if another output is above a limit."""

    output: Output
    other: Output
    limit: float

    def __call__(self, logit_BSC: Float[Array, "*B C"]) -> Float[Array, "*B"]:
        return jnp.where(self.other(logit_BSC) > self.limit, 0.0, self.output(logit_BSC))


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of training target, and the experiment fields behind it."""

    name: str
    supervise: tuple[str, ...]  # values of data.supervise
    neutral: tuple[str, ...]  # values of target.neutral
    correct_from: float  # the least target that counts as correct in metrics


_STEPS = ("step", "outcome", "outcome_steps", "outcome_tokens")
PROBABILITY = Target("probability", _STEPS, ("positive", "negative", "drop", "none"), 0.5)
"""The probability that a step is correct, in [0, 1], hard or soft."""
CLASS = Target("class", ("step",), ("third",), 1.0)
"""0, 1 or 2: negative, neutral, positive."""
NAMED = Target("named outputs", ("step",), ("positive", "negative", "drop", "none"), 0.5)
"""Several named properties per step: the label for the first, `data.extras` for the others."""
TOKEN = Target("token", ("token",), ("none",), -math.inf)
"""The next token's id; every token counts as correct."""


@dataclasses.dataclass(frozen=True)
class Head:
    """The meaning of step or token logits."""

    channels: tuple[str, ...]
    """Logit names, in order; () means one logit per vocabulary entry."""
    readout: Readout | None
    """Logits to named outputs; `None` if the head scores no steps."""
    target: Target
    log_likelihood: Callable[[Array, Array], Array] | None = None
    """(logits (..., C), targets (...)) to (...), natural logarithms up to a constant, or `None`."""
    log_odds: tuple[float, ...] = ()
    """The channel logits for log-odds 1. `jprm.methods.layers.head_init` scales its fitted log-odds by them. () if the
    score does not depend on log-odds; such a head is not fitted before training."""
    bias: tuple[float, ...] = ()
    """Initial bias per channel; () is 0."""
    spread: float = 0.0
    """Standard deviation of the initial logits, so channels with equal meaning become different; 0: kernel at 0."""

    def size(self, vocab_size: int) -> int:
        return len(self.channels) or vocab_size

    @property
    def classifier(self) -> bool:
        """Whether channels are softmax classes or named sigmoids, like other libraries' classifiers; not `scalar`."""
        score = self.readout.score if self.readout else None
        return isinstance(score, Weighted) and (score.activation == "softmax" or self.target == NAMED)

    def likelihood(self, logit_BSC: Float[Array, "*B C"], target_BS: Float[Array, "*B"]) -> Float[Array, "*B"]:
        """Returns each target's natural log-likelihood, up to a constant. Raises ValueError if the head has none."""
        if self.log_likelihood is None:
            raise ValueError(f"a head with channels {self.channels} has no log_likelihood")
        return self.log_likelihood(logit_BSC, target_BS)

    def judge(self, logit_BSC: Float[Array, "*B C"], target_BS: Float[Array, "*B"]) -> tuple[Array, Array]:
        """Returns (score, whether the target is at least `target.correct_from`) per step. Without a readout, e.g. a
        policy's, the score is the token's probability; raises as `likelihood`."""
        if self.readout is not None:
            score_BS = self.readout.score(logit_BSC)
        else:
            score_BS = jnp.exp(self.likelihood(logit_BSC, target_BS))
        return score_BS, target_BS >= self.target.correct_from


def token_log_probability(logit_BSV: Array, token_BS: Array) -> Float[Array, "B S"]:
    """Returns log softmax(logits)[token] per slot; NaN for a token out of range."""
    chosen_BS1 = jnp.take_along_axis(logit_BSV, token_BS.astype(jnp.int32)[..., None], axis=-1)
    return chosen_BS1[..., 0] - jax.nn.logsumexp(logit_BSV, axis=-1)


def class_log_probability(logit_BSC: Array, target_BS: Array) -> Float[Array, "*B"]:
    """Returns log softmax(logits)[class]; 0 for a class out of range."""
    log_BSC = jax.nn.log_softmax(logit_BSC, axis=-1)
    chosen_BSC = jax.nn.one_hot(target_BS.astype(jnp.int32), logit_BSC.shape[-1], dtype=log_BSC.dtype)
    return jnp.sum(chosen_BSC * log_BSC, axis=-1)


def two_class_log_likelihood(logit_BSC: Array, target_BS: Array) -> Float[Array, "*B"]:
    """Returns t log p + (1 - t) log(1 - p) for target t, with p the second class' softmax."""
    log_BSC = jax.nn.log_softmax(logit_BSC, axis=-1)
    return target_BS * log_BSC[..., 1] + (1.0 - target_BS) * log_BSC[..., 0]


def log_odds_log_likelihood(logit_BS1: Array, target_BS: Array) -> Float[Array, "*B"]:
    """Returns t log p + (1 - t) log(1 - p), (B, S), for target t, with p the sigmoid of the head's only logit."""
    return two_class_log_likelihood(jnp.concatenate([jnp.zeros_like(logit_BS1), logit_BS1], axis=-1), target_BS)


LEVELS = (0.05, 0.95)
"""Quantile levels for `low` and `high`: nine labels in ten lie between them."""

MEMBERS, NORMAL = 5, 1.645
"""Ensemble size; and the standard deviations that enclose 90% in a normal distribution."""


def _mean(logit_BSC: Array) -> Float[Array, "*B"]:
    return jax.nn.sigmoid(logit_BSC[..., 0].astype(jnp.float32))


def _lower(logit_BSC: Array) -> Float[Array, "*B"]:
    logit_BSC = logit_BSC.astype(jnp.float32)
    return jax.nn.sigmoid(logit_BSC[..., 0] - jax.nn.softplus(logit_BSC[..., 1]))


def _upper(logit_BSC: Array) -> Float[Array, "*B"]:
    logit_BSC = logit_BSC.astype(jnp.float32)
    return jax.nn.sigmoid(logit_BSC[..., 0] + jax.nn.softplus(logit_BSC[..., 2]))


def quantile_log_likelihood(logit_BSC: Array, target_BS: Array) -> Float[Array, "*B"]:
    """Returns the mean's t log p + (1 - t) log(1 - p), less the quantiles' pinball losses.

    Channels are the mean's log-odds and two distances, `mean`, `below`, `above`. Pinball losses are negative
    log-likelihoods of asymmetric Laplace distributions (Koenker and Machado 1999); they leave the mean alone.
    """
    around_BSC = jnp.concatenate([jax.lax.stop_gradient(logit_BSC[..., :1]), logit_BSC[..., 1:]], axis=-1)
    loss_BS = sum(
        jnp.maximum(q * (target_BS - quantile(around_BSC)), (q - 1) * (target_BS - quantile(around_BSC)))
        for q, quantile in zip(LEVELS, (_lower, _upper), strict=True)
    )
    return log_odds_log_likelihood(logit_BSC[..., :1], target_BS) - loss_BS


def ensemble_log_likelihood(logit_BSC: Array, target_BS: Array) -> Float[Array, "*B"]:
    """Returns the mean over members, one channel each, of t log p + (1 - t) log(1 - p).

    Each member learns alone; all share and train one decoder (Lakshminarayanan et al. 2017, arXiv 1612.01474).
    """
    log_BSC = target_BS[..., None] * jax.nn.log_sigmoid(logit_BSC) + (1 - target_BS[..., None]) * jax.nn.log_sigmoid(
        -logit_BSC
    )
    return jnp.mean(log_BSC, axis=-1)


def _members_mean(logit_BSC: Array) -> Float[Array, "*B"]:
    return jnp.mean(jax.nn.sigmoid(logit_BSC.astype(jnp.float32)), axis=-1)


def _band(logit_BSC: Array) -> Float[Array, "*B"]:
    return NORMAL * jnp.std(jax.nn.sigmoid(logit_BSC.astype(jnp.float32)), axis=-1, ddof=1)


HEADS: dict[str, Head] = {
    "binary": Head(
        ("wrong", "right"), Readout(score=Weighted("softmax", (0.0, 1.0))), PROBABILITY, two_class_log_likelihood,
        log_odds=(-0.5, 0.5),
    ),
    "ternary": Head(
        ("negative", "neutral", "positive"), Readout(score=Weighted("softmax", (0.0, 1.0, 1.0))), CLASS,
        class_log_probability,
    ),
    "scalar": Head(
        ("right",), Readout(score=Weighted("sigmoid", (1.0,))), PROBABILITY, log_odds_log_likelihood, log_odds=(1.0,)
    ),
    "language": Head((), None, TOKEN, token_log_probability),
    "quantile": Head(
        ("mean", "below", "above"), Readout(score=_mean, low=_lower, high=_upper), PROBABILITY, quantile_log_likelihood,
        log_odds=(1.0, 0.0, 0.0),
    ),
    "ensemble": Head(
        tuple(f"member_{i}" for i in range(MEMBERS)),
        Readout(
            score=_members_mean, low=lambda logit_BSC: jnp.maximum(_members_mean(logit_BSC) - _band(logit_BSC), 0.0),
            high=lambda logit_BSC: jnp.minimum(_members_mean(logit_BSC) + _band(logit_BSC), 1.0),
        ),
        PROBABILITY, ensemble_log_likelihood, log_odds=(1.0,) * MEMBERS, spread=1.0,
    ),
}  # fmt: skip
"""Heads by name. An experiment may also name the user's own `Head` as `module:NAME`."""


UNREAD = Readout(score=lambda logit_BSC: jnp.full(logit_BSC.shape[:-1], jnp.nan))


def find(name: str) -> Head:
    """Returns the head in `HEADS`, e.g. `binary`, or `module:NAME`. Raises ValueError if unknown, or as `of_names`.

    `HEADS`: binary, ternary, scalar, language, quantile, ensemble. `channels=N` has N (1 to 9999) uninterpreted logits,
    scored NaN. `sigmoid=NAME,NAME,...` and `softmax=NAME,NAME,...` have an output per name; the first is the score.
    """
    if match := re.fullmatch(r"(sigmoid|softmax)=(\w+(?:,\w+)+)", name):
        return of_names(cast(Any, match[1]), tuple(match[2].split(",")))
    if match := re.fullmatch(r"channels=([1-9]\d{0,3})", name):
        return Head(tuple(f"channel_{i}" for i in range(int(match[1]))), UNREAD, PROBABILITY)
    return find_part(name, HEADS, "head", Head)


def of_names(activation: Literal["sigmoid", "softmax"], names: tuple[str, ...]) -> Head:
    """Returns a head with an output per name; the first is the score. Raises ValueError for equal names or `score`."""
    if len(set(names)) < len(names) or "score" in names:
        raise ValueError(
            f"head {activation}={','.join(names)}: names must differ, and `score` is reserved for the first"
        )
    outputs = {name: Weighted(activation, tuple(float(name == other) for other in names)) for name in names}
    log_odds = outputs[names[0]].factors if activation == "sigmoid" else ()
    return Head(names, Readout(score=outputs[names[0]], **outputs), NAMED, log_odds=log_odds)


def of_channels(count: int) -> str:
    """Returns a one-output head's name, e.g. `binary` for 2 channels, `channels=7` for 7, `language` for 0."""
    plain = {name: head for name, head in HEADS.items() if head.readout is None or len(head.readout.outputs) == 1}
    for name, head in plain.items():
        if len(head.channels) == count:
            return name
    return f"channels={count}"
