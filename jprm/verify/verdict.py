"""What a check says of a step."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`label`: 1 right, 0 wrong, None not checkable. `checked`: how many equations, tests or tactics were decided.
    `false`: for a wrong step, what does not hold."""

    label: int | None
    checked: int = 0
    false: str | None = None
