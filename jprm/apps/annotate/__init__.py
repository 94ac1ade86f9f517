"""`jprm annotate`: human step labels. Defines the settings of studies, selections and exports."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Literal

from tyro.conf import arg

from jprm.apps import FIRST, Hidden

Disagreements = Literal["cut", "each"]
"""Treatment of a tree with two labellings. `cut`: one record, without labels from the first differing step on. `each`:
one record per labelling."""


Written = Literal["positive", "unlabelled"]
"""Label of an annotator's own step, which has no rating; as in the PRM800K reader."""


@dataclasses.dataclass(frozen=True)
class StudyConfig:
    """How often each kind of task is labelled.

    Attributes:
      annotators: Names of the annotators: letters, digits, dots, dashes and underscores. Later calls may add more.
      double_fraction: Fraction of tasks (chains or trees) with two annotators.
      gold_fraction: Fraction of tasks with known labels per annotator.
      repeat_fraction: Fraction of repeated tasks per annotator.
      pass_screening: Minimum mean score over the screening tasks, from 0 to 1, to continue. A chain scores 1 if the
        annotator finds its first error; a tree scores the fraction of steps judged right (wrong or not wrong).
      anchored_fraction: Random fraction of an annotator's chains that show scores, to measure how far a model's opinion
        shifts ratings.
      seed: Seed of the task assignment.
    """

    annotators: Annotated[tuple[str, ...], arg(metavar="NAME ..."), FIRST] = ()
    double_fraction: Hidden[float] = 0.15
    gold_fraction: Hidden[float] = 0.05
    repeat_fraction: Hidden[float] = 0.02
    pass_screening: Hidden[float] = 0.75
    anchored_fraction: Hidden[float] = 0.0
    seed: Hidden[int] = 0

    def __post_init__(self):
        if len(set(self.annotators)) < len(self.annotators):
            raise ValueError("annotators: name each once")
        for name in self.annotators:
            if not re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII):
                raise ValueError(f"annotators: {name!r}: use up to 64 letters, digits, dots, dashes and underscores")
        for field in ("double_fraction", "gold_fraction", "repeat_fraction", "pass_screening", "anchored_fraction"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"{field} is {getattr(self, field)}: it must be from 0 to 1")
        if self.gold_fraction + self.repeat_fraction >= 1:
            raise ValueError("gold_fraction and repeat_fraction leave no task to label: their sum must be below 1")


@dataclasses.dataclass(frozen=True)
class SelectConfig:
    """How many chains are selected, by which criteria.

    Attributes:
      count: Chains to select.
      convincing: Fraction for the most convincing chains with an incorrect answer. A chain is as convincing as its
        lowest score.
      rest: Fraction for the most convincing of the other chains.
      disagreement: Fraction for chains whose scores differ most from their stored labels (by a checker, rollouts or
        another model). The remainder up to 1 is random.
      alternatives: 0 selects single chains. A larger number selects trees with at most so many alternatives per step,
        the most convincing ones: pools become trees by merging equal beginnings.
      seed: Seed of the random chains and the order.
    """

    count: int
    convincing: Hidden[float] = 0.7
    rest: Hidden[float] = 0.1
    disagreement: Hidden[float] = 0.1
    alternatives: int = 0
    seed: Hidden[int] = 0

    def __post_init__(self):
        parts = (self.convincing, self.rest, self.disagreement)
        if self.count < 1:
            raise ValueError(f"count is {self.count}: it must be at least 1")
        if self.alternatives < 0 or self.alternatives == 1:
            raise ValueError(f"alternatives is {self.alternatives}: it must be 0, for chains, or at least 2")
        if min(parts) < 0 or sum(parts) > 1 + 1e-9:
            raise ValueError("convincing, rest and disagreement are fractions whose sum is at most 1")
