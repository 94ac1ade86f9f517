"""Policies: given prefixes of chains, they sample next steps or whole completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

Until = Literal["step", "end"]
"""How far a sample goes: one step, or to the end of the chain."""

FINISH_REASONS = ("step", "stop", "length", "error")
"""`step`: at the end of a step; the chain may continue. `stop`: the policy ended the chain. `length`: a token limit cut
it off, so neither the last step nor the chain is whole. `error`: nothing was sampled, for the reason `Sample.error`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prefix:
    """A problem and the steps so far."""

    problem: str
    steps: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A policy's text after a prefix.

    The last four fields are empty where the policy was not told to report them or does not know them, and in files of
    kept samples.
    """

    steps: tuple[str, ...]  # the new ones, none blank; there are none if the policy takes the chain for finished
    tokens: int  # generated ones, with the end of text if the policy counts it
    finish_reason: str  # one of FINISH_REASONS
    logprob: float | None = None  # natural, of all generated tokens; with the temperature or not, as the policy says
    error: str | None = None  # the reason, only for `error`
    token_logprobs: tuple[tuple[str, float], ...] = ()  # (text, log-probability) of every generated token
    token_ids: tuple[int, ...] = ()  # of those tokens
    token_entropies: tuple[float, ...] = ()  # in nats, before each of them
    alternatives: tuple[Mapping[str, float], ...] = ()  # the likeliest tokens' log-probabilities in each place, by text

    def __post_init__(self):
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"finish_reason is {self.finish_reason!r}: use one of {', '.join(FINISH_REASONS)}")
        if (self.finish_reason == "error") != (self.error is not None):
            raise ValueError("an error has finish_reason='error' and a message, anything else has neither")
        if any(not step.strip() for step in self.steps):
            raise ValueError("a step is blank: remove it")


class Policy(Protocol):
    """A generator of steps.

    `name` identifies the sampled distribution: weights, prompt, temperature and everything else that changes it.
    Samples are cached under it.
    """

    name: str

    def sample(self, prefixes: Sequence[Prefix], n: int, *, until: Until, seed: int) -> list[list[Sample]]:
        """Returns n samples per prefix, in order: one step each (`until="step"`) or the rest of the chain (`"end"`).

        Sample j of a prefix has number `seed + j`. The same number gives an equally distributed sample, and the same
        one if the policy can; different numbers are independent.

        A sample that fails is marked `error` and the others are returned. A policy raises only for what no further
        attempt could fix.
        """
        ...
