"""Heads: what the logits of a step or a token mean, one `Head` record each in `HEADS`.

Only the head knows how many logits there are and what they mean. Everything else asks the record:

    head = find(config.head)                     # a name in HEADS, or "module:NAME" of the user's own module
    head.size(config.vocab_size)                 # logits
    head.readout(logit_BSC)                      # {"score": (B, S), ...}: scores and further named outputs
    head.log_likelihood(logit_BSC, target_BS)    # (B, S): what likelihood losses sum
    head.judge(logit_BSC, target_BS)             # scores and correct steps, for metrics
    head.target                                  # which labels it takes

A published model brings its own `Readout` in place of the record's. To add a head, write a record:

    QUANTILES = Head(("low", "median", "high"), Readout(score=median, low=low, high=high), PROBABILITY, pinball)

Outputs beyond the score go with it into records, under `outputs`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jprm import registry

Output = Callable[[Float[Array, "*B C"]], Float[Array, "*B"]]
"""A function of logits that gives one number a step. It must be hashable: programs are compiled for it."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, init=False)
class Readout:
    """Named outputs of a step's logits: `score`, and others that accompany it, such as an uncertainty."""

    outputs: tuple[tuple[str, Output], ...]

    def __init__(self, *, score: Output, **others: Output):
        object.__setattr__(self, "outputs", tuple({"score": score, **others}.items()))

    def __call__(self, logit_BSC: Float[Array, "*B C"]) -> dict[str, Float[Array, "*B"]]:
        return {name: output(logit_BSC) for name, output in self.outputs}

    @property
    def score(self) -> Output:
        """Logits (..., C) to scores (...)."""
        return dict(self.outputs)["score"]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Weighted:
    """An output: the sum of factor x activation over the channels, in float32.

    After a softmax, (0, 1) is the probability of the second of two classes, (0, 1, 1) one minus the probability of the
    first of three, and (-1, 1) a difference. After a sigmoid, (1,) is the probability of one log-odds.
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


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of target, and the fields of an experiment that give it."""

    name: str
    supervise: tuple[str, ...]  # values of data.supervise
    neutral: tuple[str, ...]  # values of target.neutral
    correct_from: float  # the least target that counts as correct in metrics


_STEPS = ("step", "outcome", "outcome_steps", "outcome_tokens")
PROBABILITY = Target("probability", _STEPS, ("positive", "negative", "drop", "none"), 0.5)
"""The probability that a step is correct, in [0, 1], hard or soft."""
CLASS = Target("class", ("step",), ("third",), 1.0)
"""0, 1 or 2: negative, neutral, positive."""
TOKEN = Target("token", ("token",), ("none",), -math.inf)
"""The id of the token that comes next; every token counts as correct."""


@dataclasses.dataclass(frozen=True)
class Head:
    """What the logits of a step or a token mean."""

    channels: tuple[str, ...]
    """Names of the logits, in order; () for one logit a token of the vocabulary."""
    readout: Readout | None
    """Logits to named outputs; None for a head that scores no steps."""
    target: Target
    log_likelihood: Callable[[Array, Array], Array] | None = None
    """(logits (..., C), targets (...)) to (...), natural logarithms up to a constant; None where there is none."""
    log_odds: tuple[float, ...] = ()
    """The channels' logits for log-odds of 1, by which `jprm.train.head_init` multiplies the log-odds that it fits; ()
    for a head whose score is no function of log-odds, which is not fitted before training."""
    bias: tuple[float, ...] = ()
    """Initial bias of every channel; () is 0. Kernels start at 0."""

    def size(self, vocab_size: int) -> int:
        """Returns the number of logits for a step or token."""
        return len(self.channels) or vocab_size

    @property
    def classifier(self) -> bool:
        """Whether the channels are classes of one softmax, as other libraries' token classifiers have them."""
        score = self.readout.score if self.readout else None
        return isinstance(score, Weighted) and score.activation == "softmax"

    def likelihood(self, logit_BSC: Float[Array, "*B C"], target_BS: Float[Array, "*B"]) -> Float[Array, "*B"]:
        """Returns the logarithm of the targets' likelihood. Raises ValueError where the head has none."""
        if self.log_likelihood is None:
            raise ValueError(f"a head with channels {self.channels} has no log_likelihood")
        return self.log_likelihood(logit_BSC, target_BS)

    def judge(self, logit_BSC: Float[Array, "*B C"], target_BS: Float[Array, "*B"]) -> tuple[Array, Array]:
        """Returns scores and which steps count as correct, both (...): what metrics are made of.

        A policy's score is the probability of the token that came next.
        """
        if self.readout is not None:
            score_BS = self.readout.score(logit_BSC)
        else:
            score_BS = jnp.exp(self.likelihood(logit_BSC, target_BS))
        return score_BS, target_BS >= self.target.correct_from


def token_log_probability(logit_BSV: Array, token_BS: Array) -> Float[Array, "B S"]:
    """Returns the natural logarithm of the softmax at one token a slot."""
    chosen_BS1 = jnp.take_along_axis(logit_BSV, token_BS.astype(jnp.int32)[..., None], axis=-1)
    return chosen_BS1[..., 0] - jax.nn.logsumexp(logit_BSV, axis=-1)


def class_log_probability(logit_BSC: Array, target_BS: Array) -> Float[Array, "*B"]:
    """Returns log p[class], with p the softmax and the target the class."""
    log_BSC = jax.nn.log_softmax(logit_BSC, axis=-1)
    chosen_BSC = jax.nn.one_hot(target_BS.astype(jnp.int32), logit_BSC.shape[-1], dtype=log_BSC.dtype)
    return jnp.sum(chosen_BSC * log_BSC, axis=-1)


def two_class_log_likelihood(logit_BSC: Array, target_BS: Array) -> Float[Array, "*B"]:
    """Returns t log p + (1 - t) log(1 - p), with t the target and p the softmax's second class."""
    log_BSC = jax.nn.log_softmax(logit_BSC, axis=-1)
    return target_BS * log_BSC[..., 1] + (1.0 - target_BS) * log_BSC[..., 0]


def log_odds_log_likelihood(logit_BS1: Array, target_BS: Array) -> Float[Array, "*B"]:
    """Returns t log p + (1 - t) log(1 - p), with t the target and p the logit's sigmoid."""
    return two_class_log_likelihood(jnp.concatenate([jnp.zeros_like(logit_BS1), logit_BS1], axis=-1), target_BS)


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
}  # fmt: skip
"""Name to head. An experiment may also name a `Head` of the user's own module, as `module:NAME`."""


def find(name: str) -> Head:
    """Returns the registered head, or the one that `module:NAME` names. Raises ValueError where there is none."""
    return registry.find(name, HEADS, "head", Head)


def of_channels(count: int) -> str:
    """Returns the name of the first registered head with so many channels; 0 is the vocabulary.

    Raises ValueError where no head has so many.
    """
    for name, head in HEADS.items():
        if len(head.channels) == count:
            return name
    raise ValueError(f"{count} channels; a head has one of {', '.join(str(len(h.channels)) for h in HEADS.values())}")
