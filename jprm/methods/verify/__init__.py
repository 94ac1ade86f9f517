"""Formal labels: steps and whole chains judged by computation, without a human or a model."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
      label: 1 correct, 0 incorrect, None not checkable.
      checked: how many equations, tests or tactics were decided.
      false: what does not hold in an incorrect step.
    """

    label: int | None
    checked: int = 0
    false: str | None = None

    def __post_init__(self):
        if self.false is not None:  # written by the program under test: any length, any code points
            object.__setattr__(self, "false", self.false[:200].encode(errors="backslashreplace").decode())
