"""Ranking of alternatives: -log sigmoid(s_i - s_j) where step i is labelled better than its alternative j.

s are the head's log-odds (Bradley and Terry 1952). Alternatives continue the same step; with `among` "problem" all
labelled steps of a tree are compared, such as the ends of its chains, as reward models of whole answers are trained.
Each pair counts once, with the product of their weights. Pairs that the packer separates, by splitting a tree, are
lost: `data.siblings` makes it separate the fewest alternatives, and training logs how many (`pairs_lost`).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jprm.model.heads import find
from jprm.objectives.metrics import Judged
from jprm.objectives.steps import OfSteps, log_odds, pair_loss
from jprm.objectives.targets import targets
from jprm.rows import siblings


@dataclasses.dataclass(frozen=True)
class BradleyTerry(OfSteps):
    """The count is the number of pairs; the metric `pair_accuracy` is the fraction in the right order."""

    among: Literal["alternatives", "problem"] = "alternatives"

    @property
    def pairs(self) -> bool:
        return self.among == "alternatives"

    def of_logits(self, logit_BSC, rows, config):
        head = find(config.model.head)
        target_BS, weight_BS = targets(rows, config.target)
        rival_BSS = siblings(rows) if self.pairs else rows.tree[:, :, None] == rows.tree[:, None, :]
        better_BSS = rival_BSS & (target_BS[:, :, None] > target_BS[:, None, :])
        loss, count, correct = pair_loss(
            log_odds(head, logit_BSC), better_BSS * weight_BS[:, :, None] * weight_BS[:, None, :]
        )
        judged = Judged(*head.judge(logit_BSC, target_BS), weight_BS)
        return loss, count, {"pair_accuracy": correct, "scores": judged}


bradley_terry = BradleyTerry()
