"""Servers that sample, while the learner learns where samples are drawn ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from jprm.methods.policy.engine import RemoteSampler
from jprm.methods.rl.samples import Rollout, ask
from jprm.methods.rl.sampling import Ahead, Costs, Here, SampleSource


class Servers(Here):
    """`Samples` that a source whose policy is a `RemoteSampler` asks for.

    What servers have not returned yet is no part of a checkpoint. A run that continues asks for it again.
    """

    def __init__(self, source: SampleSource, ahead: list[Ahead], costs: Costs):
        super().__init__(source, ahead, costs)
        self._asked: dict[int, tuple[int, Callable[[], list[list[Rollout]]]]] = {}  # by update

    def begin(self, update: int, due: int) -> None:
        config, problems = self.source.config, self.source.problems
        known = [update - 1, *(begun.update for begun in self.ahead), *self._asked]
        for later in range(max(known) + 1, due + 1):
            texts = [record["problem"] for record in problems.chosen(later)]
            costs = self._costs(texts)
            drawn = ask(self.policy, texts, config.samples, seed=config.seed, update=later, costs=costs)
            self._asked[later] = update - 1, drawn

    def take(self, update: int) -> Ahead:
        if update not in self._asked:  # drawn ahead before the run had servers
            return self.ahead.pop(0)
        by, drawn = self._asked.pop(update)
        return Ahead(update, by, drawn())

    def figures(self, ahead: Ahead, update: int) -> dict[str, float]:
        policy = cast(RemoteSampler, self.policy)
        out = {"left_out": len(policy.failures), "drawn_here": policy.drawn_here}
        return super().figures(ahead, update) | out
