"""The result of checking a step."""

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
