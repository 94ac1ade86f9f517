"""How well first errors are found without a model: by OmegaPRM's binary search, exactly, and by arithmetic.

    python -m experiments.studies.first_errors --processbench ../shared/data/processbench      # seconds

The search: a chain of 8 steps has its first error at any step, equally likely. A prefix's k rollouts include a correct
one with probability 1 - (1 - value)^k. The search calls a prefix wrong if none of them is correct.
"""

from __future__ import annotations

import json
import pathlib

import numpy as np
import tyro
from jaxtyping import Float

from jprm.methods.verify.arithmetic import label_of

RIGHT, WRONG = (0.15, 0.3, 0.6), (0.0, 0.05, 0.15)
"""Values of prefixes before and after the first error."""


def named(error: int, right: float, wrong: float, steps: int, k: int) -> Float[np.ndarray, " steps"]:
    """Returns the probability of each step to be named, if step `error` (from 0) is the first error."""
    named_P = np.zeros(steps)

    def search(low: int, high: int, probability: float) -> None:
        """Follows `jprm.methods.label.monte_carlo.first_error` along both results of each prefix."""
        if high - low == 1:
            named_P[high - 1] += probability
            return
        middle = (low + high) // 2
        solved = 1 - (1 - (right if middle <= error else wrong)) ** k
        search(middle, high, probability * solved)
        search(low, middle, probability * (1 - solved))

    search(0, steps, 1.0)
    return named_P


def by_search(steps: int, k: int) -> None:
    """Prints the fractions of chains whose named step is the first error / too early / too late."""
    print("| value of right prefixes | " + " | ".join(f"value after the error {wrong:g}" for wrong in WRONG) + " |")
    print("|---" * (1 + len(WRONG)) + "|")
    for right in RIGHT:
        cells = []
        for wrong in WRONG:
            named_EP = np.array([named(error, right, wrong, steps, k) for error in range(steps)]) / steps
            shares = np.trace(named_EP), np.tril(named_EP, -1).sum(), np.triu(named_EP, 1).sum()
            cells.append(" / ".join(f"{share:.2f}" for share in shares))
        print(f"| {right:g} | " + " | ".join(cells) + " |")


def by_arithmetic(path: pathlib.Path) -> None:
    """Prints how many steps the arithmetic checker decides, and how often those it rejects are first errors."""
    records = json.loads(path.read_text())
    labels = [[label_of(step) for step in record["steps"]] for record in records]
    checked = [label is not None for chain in labels for label in chain]
    rejected = [
        (i, record["label"])
        for record, chain in zip(records, labels, strict=True) for i, label in enumerate(chain) if label == 0
    ]  # fmt: skip
    early = [i == error for i, error in rejected if error < 0 or i <= error]
    print(
        f"{path.stem}: {len(checked):,} steps, {np.mean(checked):.1%} checkable, {len(rejected)} called incorrect; of"
        f" these, at or before the first marked error: {sum(early)} of {len(early)} correctly;"
        f" {sum(record['label'] >= 0 for record in records)} errors marked"
    )


def main(processbench: pathlib.Path | None = None, steps: int = 8, k: int = 8) -> None:
    """Print both tables.

    Args:
        processbench: The folder with ProcessBench's files.
        steps: Steps of a chain, for the search.
        k: Rollouts per prefix, for the search.
    """
    by_search(steps, k)
    if processbench is not None:
        for name in ("gsm8k", "math"):
            by_arithmetic(processbench / f"{name}.json")


if __name__ == "__main__":
    tyro.cli(main)
