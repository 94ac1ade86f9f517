"""`jprm annotate`: human step labels. Here are the settings of a study, of a selection and of an export."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Literal

from tyro.conf import arg

Disagreements = Literal["cut", "each"]
"""What becomes of a tree with two labellings. `cut`: one record, without labels from any step on which they differ.
`each`: one record for each."""


Written = Literal["positive", "unlabelled"]
"""The label of a step that an annotator wrote, which has no rating, as for the reader of PRM800K."""


@dataclasses.dataclass(frozen=True)
class StudyConfig:
    """How often each kind of task is labelled.

    Attributes:
      annotators: Names of the annotators, of letters, digits, dots, dashes and underscores. Later calls may add some.
      double_fraction: Fraction of the tasks, chains or trees, that two annotators label.
      gold_fraction: Fraction of an annotator's tasks that have known labels.
      repeat_fraction: Fraction of an annotator's tasks that come a second time.
      pass_screening: Fraction of the screening tasks that an annotator must label as known to go on: chains whose first
        error they find, and of a tree the fraction of the steps that they tell wrong from not wrong.
      anchored_fraction: Fraction of an annotator's chains, drawn at random, whose scores the page shows: an experiment
        on how far a model's opinion moves the ratings.
      seed: Of who gets what.
    """

    annotators: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ()
    double_fraction: float = 0.15
    gold_fraction: float = 0.05
    repeat_fraction: float = 0.02
    pass_screening: float = 0.75
    anchored_fraction: float = 0.0
    seed: int = 0

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
    """How many chains are selected, and why.

    Attributes:
      count: Chains to select.
      convincing: Fraction that are the most convincing chains with an incorrect answer. A chain is as convincing as its
        lowest score.
      rest: Fraction that are the most convincing of the other chains.
      disagreement: Fraction whose scores are farthest from the labels that they carry: of a checker, of rollouts, or of
        another model. What is left of 1 is drawn at random.
      alternatives: 0 selects single chains. More selects trees with at most so many alternatives at a step, the most
        convincing ones: pools become trees, in which equal beginnings are one.
      seed: Of the random chains and of the order.
    """

    count: int
    convincing: float = 0.7
    rest: float = 0.1
    disagreement: float = 0.1
    alternatives: int = 0
    seed: int = 0

    def __post_init__(self):
        parts = (self.convincing, self.rest, self.disagreement)
        if self.count < 1:
            raise ValueError(f"count is {self.count}: it must be at least 1")
        if self.alternatives < 0 or self.alternatives == 1:
            raise ValueError(f"alternatives is {self.alternatives}: it must be 0, for chains, or at least 2")
        if min(parts) < 0 or sum(parts) > 1 + 1e-9:
            raise ValueError("convincing, rest and disagreement are fractions whose sum is at most 1")
