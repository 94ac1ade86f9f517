"""What a policy is: given prefixes of chains, it samples next steps or whole completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

FINISH_REASONS = ("step", "stop", "length", "error")
"""`step`: at the end of a step, the chain may go on. `stop`: the policy ended the chain. `length`: cut off by a token
limit, so neither the last step nor the chain is whole. `error`: nothing was sampled, `Sample.error` says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prefix:
    """A problem and the steps so far."""

    problem: str
    steps: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """What a policy wrote after a prefix.

    Attributes:
      steps: the new steps, none of them blank; none at all where the policy held the chain for finished.
      tokens: generated tokens, the end of text included where the policy counts it.
      finish_reason: one of FINISH_REASONS.
      logprob: natural logarithm of the probability of the generated tokens, under the sampling temperature or not as
        the policy documents; None where it is not known.
      error: the reason, for `error` alone.
    """

    steps: tuple[str, ...]
    tokens: int
    finish_reason: str
    logprob: float | None = None
    error: str | None = None

    def __post_init__(self):
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"finish_reason is {self.finish_reason!r}: use one of {', '.join(FINISH_REASONS)}")
        if (self.finish_reason == "error") != (self.error is not None):
            raise ValueError("an error has finish_reason='error' and a message, anything else has neither")
        if any(not step.strip() for step in self.steps):
            raise ValueError("a step is blank: leave it out")


class Policy(Protocol):
    """A generator of steps.

    `name` identifies the distribution that is sampled: weights, prompt, temperature and all else that changes what is
    drawn. Samples are cached under it.
    """

    name: str

    def sample(
        self, prefixes: Sequence[Prefix], n: int, *, until: Literal["step", "end"], seed: int
    ) -> list[list[Sample]]:
        """n samples for each prefix, in order: one step each (`until="step"`) or the rest of the chain (`"end"`).

        Sample j of a prefix is draw number `seed + j` of that prefix: the same number asked for again gives an equally
        distributed sample, and the same one where the policy can; different numbers are independent.

        A sample that fails is marked `error` and the others are returned: a policy raises only for what no further
        attempt could mend.
        """
        ...
