"""Where the samples of an update come from: problems by number, a policy that samples, verifier and PRMs that judge.

A `Source` draws and judges on the devices of its own process, together with the other processes of its group. In a run
with `sampling_hosts` that is the group of these hosts, and learners ask them through `jprm.methods.rl.hosts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jprm import loading
from jprm.methods.chat_template import template_of
from jprm.methods.environment import World
from jprm.methods.policy.sampler import Sampler, SamplerConfig
from jprm.methods.policy.turns import Limits, TurnLayout
from jprm.methods.rl import rollout
from jprm.methods.rl.config import METHODS, RLExperiment
from jprm.methods.rl.rollout import Group, Record
from jprm.methods.rl.samples import Rollout, sample, sample_episodes
from jprm.methods.verify import verifiers
from jprm.score.scale import check_scale
from jprm.tokenizer import Tokenizer

OF_WORLD = verifiers.Verifier(judge=lambda chains: [], check=lambda record, where: None)
"""In place of a verifier where an environment judges its own episodes."""


@dataclasses.dataclass(frozen=True)
class Problems:
    """The problems of a run, equal in all processes, and the verifier of their answers."""

    config: RLExperiment
    verifier: verifiers.Verifier
    records: Sequence[Record]
    held_out: Sequence[Record]

    @staticmethod
    def read(config: RLExperiment) -> Problems:
        """Reads the files that the experiment names; errors as `rollout.read_records`."""
        verifier = OF_WORLD if config.environment else verifiers.find(config.verifier)
        records = rollout.read_records(config.problems, verifier, solved=not METHODS[config.method].samples)
        return Problems(config, verifier, records, rollout.read_records(config.held_out, verifier))

    def chosen(self, update: int) -> list[Record]:
        """Returns the problems of an update."""
        return rollout.chosen(self.records, self.config.problems_an_update, self.config.seed, update - 1)


class Source:
    """Draws and judges the samples of a run.

    `policy` is set by the caller, when there are parameters. `prm` and `second` are None where the experiment has none.

    Raises ValueError for a PRM, of the folder `prm`, whose scores the experiment's credit cannot take.
    """

    policy: Sampler

    def __init__(self, problems: Problems, tokenizer: Tokenizer, prm: str):
        self.config, self.problems = config, problems = problems.config, problems
        stored = config.prm_dtype or None
        self.prm = loading.load(prm, dtype=stored) if prm else None
        self.second = loading.load(config.second_prm, dtype=stored) if config.second_prm else None
        if self.prm is not None and config.method == "policy_gradient":
            config.credit.check(self.prm.scale, config.prm)
        if self.prm is not None and self.second is not None:
            check_scale(self.second.scale, (self.prm.scale.weight,), config.second_prm, "a comparison with prm")
        self._world: tuple[World, TurnLayout, Limits] | None = None
        if there := config.environment:
            world = World(there.name, at_once=there.at_once, seconds=there.seconds, processes=there.processes)
            layout = TurnLayout(tokenizer, *template_of(there.template or config.policy))
            self._world = world, layout, Limits(there.turns, config.tokens)

    def sample(
        self, records: Sequence[Record], n: int, update: int, costs: Sequence[float] = ()
    ) -> list[list[Rollout]]:
        """Returns n samples of each problem: chains, or episodes in the environment.

        `costs`, the tokens that are expected of a sample of each problem, balance the parts of several processes.
        """
        seed = self.config.seed
        if self._world is None:
            problems = [record["problem"] for record in records]
            return sample(self.policy, problems, n, seed=seed, update=update, costs=costs)
        return sample_episodes(self.policy, *self._world, records, n, seed=seed, update=update)

    def judged(self, update: int, drawn: Sequence[Sequence[Rollout]]) -> list[Group]:
        """Returns the groups of an update."""
        problems, floor = self.problems, self.config.guards.floor
        return rollout.judged(problems.chosen(update), drawn, problems.verifier, floor, self.prm)

    def held_out_groups(self, stream: int) -> list[Group]:
        """Returns groups of the held-out problems, with the second PRM's scores; `stream` numbers their draws."""
        records, config = self.problems.held_out, self.config
        drawn = self.sample(records, config.evaluate_samples, stream)
        judge = self.problems.verifier, config.guards.floor, self.prm
        groups = rollout.judged(records, drawn, *judge, keep_lost=True)
        if self.second is None:
            return groups
        second = rollout.scored(self.second, records, [group.samples for group in groups])
        return [dataclasses.replace(group, second=some) for group, some in zip(groups, second, strict=True)]


def sampler_options(config: RLExperiment) -> SamplerConfig:
    """Returns how the policy is sampled: from all tokens, whose log-probabilities training needs."""
    return SamplerConfig(
        config.temperature, 1.0, config.max_tokens, rows=config.sampler_rows, dtype=config.sampler_dtype
    )
