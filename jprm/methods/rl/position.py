"""What a checkpoint of a run holds beside the state."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from jprm.methods.rl.trajectory import Trajectory


@dataclasses.dataclass
class Ahead:
    """Samples of an update to come, drawn by the policy after update `by`."""

    update: int
    by: int
    drawn: list[list[Trajectory]]

    def json(self) -> dict[str, Any]:
        return vars(self) | {"drawn": [[one.json() for one in samples] for samples in self.drawn]}

    @staticmethod
    def of_json(value: dict[str, Any]) -> Ahead:
        drawn = [[Trajectory.of_json(one) for one in samples] for samples in value["drawn"]]
        return Ahead(value["update"], value["by"], drawn)


@dataclasses.dataclass
class Progress:
    """A `Position` of the trainer."""

    update: int = 0
    tokens: int = 0  # sampled, or of demonstrations, in all updates
    evaluations: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    ended: str = ""  # the guard that ended the run, in words
    fresh: dict[str, Any] | None = None  # at the end of the run, the best policy's evaluation on fresh samples
    prm: str = ""  # the adopted refresh, a folder in that of the run; empty: the experiment's PRM
    refreshes: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    ahead: list[Ahead] = dataclasses.field(default_factory=list)

    def get_state(self) -> dict[str, Any]:
        ahead = [each.json() for each in self.ahead]
        return copy.deepcopy({name: value for name, value in vars(self).items() if name != "ahead"}) | {"ahead": ahead}

    def set_state(self, state: dict[str, Any]) -> None:
        known = {field.name for field in dataclasses.fields(self)}
        vars(self).update({name: value for name, value in state.items() if name in known})
        self.ahead = [Ahead.of_json(each) for each in state.get("ahead", [])]
