"""`Scale`: which scores of a model mean that a step is correct. Probabilities are the default."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Scale:
    """Attributes:
    threshold: benchmarks call a step correct above it, where no threshold is tuned.
    redundancy: a step is called redundant where the named output `redundancy` is above it; None without such an output.
    """

    threshold: float = 0.5
    redundancy: float | None = None


PROBABILITY = Scale()
