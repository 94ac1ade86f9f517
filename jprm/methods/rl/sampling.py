"""The sources of an update's samples: problems by number, a policy that samples, verifier and PRMs that judge.

The loop only knows `Samples`: this process (`Here`, and `Carrying`, whose samples may span updates), servers
(`Servers`), or other hosts of the job (`jprm.methods.rl.sampling_hosts`). A `SampleSource` draws and judges on the
devices of its own process, together with the other processes of its group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np

from jprm import loading
from jprm.methods.formats.chat_template import template_of
from jprm.methods.policy.sampler import Sampler, SamplerConfig
from jprm.methods.rl import rollout
from jprm.methods.rl.config import METHODS, RLExperiment
from jprm.methods.rl.engine import RemoteSampler
from jprm.methods.rl.rollout import Group, Record
from jprm.methods.rl.samples import Begun, Carried, Rollout, ask, behind_T, go_on, sample, sample_episodes
from jprm.methods.verify import verifiers
from jprm.methods.worlds.environment import World
from jprm.methods.worlds.turns import EpisodeLimits, TurnLayout
from jprm.score.scale import check_scale
from jprm.score.scorer import PRM
from jprm.tokenizer import Layout, Tokenizer

OF_WORLD = verifiers.Verifier(judge=lambda chains: [], check=lambda record, where: None)
"""Replaces the verifier if an environment judges its own episodes."""


@dataclasses.dataclass(frozen=True)
class Problems:
    """A run's problems, equal in all processes, and the verifier for their answers."""

    config: RLExperiment
    verifier: verifiers.Verifier
    records: Sequence[Record]
    held_out: Sequence[Record]

    @staticmethod
    def read(config: RLExperiment) -> Problems:
        """Reads the experiment's files; raises like `rollout.read_records` and `verifiers.find`.

        Every process must call it, and waits.
        """
        verifier = OF_WORLD if config.environment else verifiers.find(config.verifier)
        records = rollout.read_records(config.problems, verifier, solved=not METHODS[config.method].samples)
        return Problems(config, verifier, records, rollout.read_records(config.held_out, verifier))

    def chosen(self, update: int) -> list[Record]:
        """Returns an update's problems; updates are numbered from 1."""
        return rollout.chosen(self.records, self.config.problems_an_update, self.config.seed, update - 1)


class SampleSource:
    """Draws and judges a run's samples.

    The caller must set `policy` once there are parameters. The construction loads the PRMs, `prm` and `second` (`None`
    if the experiment has none), and the environment. Every process must call each method, waits, and gets all results.

    Raises ValueError if the experiment's credit does not accept the scores of the PRM in folder `prm`, the PRMs' scales
    differ or there is no such environment; and as `jprm.loading.load`, e.g. FileNotFoundError.
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
        self._world: tuple[World, TurnLayout, EpisodeLimits] | None = None
        if env := config.environment:
            world = World(env.name, at_once=env.at_once, seconds=env.seconds, processes=env.processes)
            layout = TurnLayout(tokenizer, *template_of(env.template or config.policy))
            self._world = world, layout, EpisodeLimits(env.turns, config.tokens)

    def sample(
        self, records: Sequence[Record], n: int, update: int, costs: Sequence[float] = ()
    ) -> list[list[Rollout]]:
        """Returns n samples for each problem: chains, or episodes in the environment.

        `update` selects the random numbers; negative for evaluations. `costs`, each problem's expected tokens per
        sample, balance the parts of several processes (chains only). Raises as `samples.sample`.
        """
        seed = self.config.seed
        if self._world is None:
            problems = [record["problem"] for record in records]
            return sample(self.policy, problems, n, seed=seed, update=update, costs=costs)
        return sample_episodes(self.policy, *self._world, records, n, seed=seed, update=update)

    def judged(self, update: int, drawn: Sequence[Sequence[Rollout]]) -> list[Group]:
        """Returns an update's groups: its samples with rewards and, if there is a PRM, step scores.

        `drawn` must be in the order of its problems, `Problems.chosen`. Raises as `rollout.judged`.
        """
        problems, floor = self.problems, self.config.guards.floor
        return rollout.judged(problems.chosen(update), drawn, problems.verifier, floor, self.prm)

    def held_out_groups(self, stream: int) -> list[Group]:
        """Draws and judges `evaluate_samples` samples of each held-out problem, with the second PRM too.

        `stream` selects the random numbers, e.g. `rollout.STREAM`; equal streams give equal samples of a policy. Lost
        episodes stay in the groups. Raises as `rollout.judged`.
        """
        records, config = self.problems.held_out, self.config
        drawn = self.sample(records, config.evaluate_samples, stream)
        judge = self.problems.verifier, config.guards.floor, self.prm
        groups = rollout.judged(records, drawn, *judge, keep_lost=True)
        if self.second is None:
            return groups
        second = rollout.scored(self.second, records, [group.samples for group in groups])
        return [dataclasses.replace(group, second=scores_G) for group, scores_G in zip(groups, second, strict=True)]


def sampler_options(config: RLExperiment) -> SamplerConfig:
    """Returns the sampler's options. top_p is 1, because training needs log-probabilities over all tokens."""
    return SamplerConfig(
        config.temperature, 1.0, config.max_tokens, rows=config.sampler_rows, dtype=config.sampler_dtype
    )


# ---- Samples of updates, as the loop asks for them.


def expected_tokens(problems: Sequence[str], lengths: Mapping[str, float]) -> list[float]:
    """Returns each problem's expected tokens per sample: the mean of its last samples, or the overall mean.

    lengths: mean tokens of the last samples, by problem. If it is empty, all are 1.0.
    """
    usual = float(np.mean(list(lengths.values()))) if lengths else 1.0
    return [lengths.get(problem, usual) for problem in problems]


@dataclasses.dataclass
class Ahead:
    """Samples for a future update, drawn by the policy after update `by`, or begun by it (`groups`).

    With `sampling_hosts` they are already judged: `judged` are groups in the form of `rollout.Group.json`.
    """

    update: int
    by: int
    drawn: list[list[Rollout]]
    groups: list[Carried] = dataclasses.field(default_factory=list)
    judged: list[dict[str, Any]] | None = None

    def json(self) -> dict[str, Any]:
        drawn = [[draw.json() for draw in samples] for samples in self.drawn]
        return vars(self) | {"drawn": drawn, "groups": [dataclasses.asdict(group) for group in self.groups]}

    @staticmethod
    def of_json(value: dict[str, Any]) -> Ahead:
        drawn = [[Rollout.of_json(fields) for fields in samples] for samples in value["drawn"]]
        groups = [
            Carried(group["problem"], group["update"], tuple(map(Begun.of_json, group["chains"])))
            for group in value.get("groups", [])
        ]
        return Ahead(value["update"], value["by"], drawn, groups, value.get("judged"))


class Samples(Protocol):
    """The loop's source of samples. `ahead` are finished samples of later updates, saved in checkpoints.

    For each update the loop calls `begin`, `take`, `judged`, `settle` and `push`, in every process. Methods raise as
    `samples.sample`, `rollout.judged` and `Sampler.push`; ValueError if a sampling host failed.

    waited: the seconds for which the last `settle` waited.
    """

    waited: float
    ahead: list[Ahead]

    @property
    def layout(self) -> Layout:
        """The policy's chain layout, also if it is on sampling hosts."""
        ...

    @property
    def policy(self) -> Sampler:
        """The sampling policy. Raises ValueError if it is on sampling hosts."""
        ...

    def adopt(self, prm: PRM) -> None:
        """Judges with another PRM from now on. Raises ValueError if sampling hosts judge."""
        ...

    def push(self, params: Mapping, name: str) -> None:
        """Copies the policy's parameters, {"decoder", "head"}, to the sampler; waits until they are there.

        `name` identifies them, e.g. "WORKDIR@120" after optimizer step 120.
        """
        ...

    def begin(self, update: int, due: int) -> None:
        """Starts sampling for the updates up to `due` that are not started, with the policy after `update` - 1.

        It may return only when some or all of the samples are drawn; `take` waits for the rest.
        """
        ...

    def take(self, update: int) -> Ahead:
        """Waits for an update's samples, removes and returns them. Updates must be taken in order, after `begin`."""
        ...

    def settle(self) -> None:
        """Waits for all samples that must finish before a push; often there are none."""
        ...

    def judged(self, ahead: Ahead) -> list[Group]:
        """Returns an update's groups, samples with rewards and scores; judges them unless `ahead.judged` is set."""
        ...

    def held_out(self, stream: int) -> list[Group]:
        """See `SampleSource.held_out_groups`; waits for the result."""
        ...

    def figures(self, ahead: Ahead, update: int) -> dict[str, float]:
        """Returns figures for the update's line, {} if there are none.

        `behind`, with `stale`: by how many updates the sampling policy was behind, a mean over tokens with `carry`.
        From servers also two counts since the last push: `left_out`, servers that failed, and `drawn_here`, samples
        from this process.
        """
        ...


class Here:
    """`Samples` that this process draws and judges, when they are begun."""

    waited = 0.0

    def __init__(self, source: SampleSource, ahead: list[Ahead], lengths: Mapping[str, float]):
        self.source, self.ahead, self._lengths = source, ahead, lengths

    @property
    def policy(self) -> Sampler:
        return self.source.policy

    @property
    def layout(self) -> Layout:
        return self.policy.layout

    def adopt(self, prm: PRM) -> None:
        self.source.prm = prm

    def push(self, params: Mapping, name: str) -> None:
        self.policy.push(params, name)

    def begin(self, update: int, due: int) -> None:
        for later in range(self.ahead[-1].update + 1 if self.ahead else update, due + 1):
            self.ahead.append(self._drawn(later, update - 1))

    def _drawn(self, update: int, by: int) -> Ahead:
        records = self.source.problems.chosen(update)
        costs = expected_tokens([record["problem"] for record in records], self._lengths)
        return Ahead(update, by, self.source.sample(records, self.source.config.samples, update, costs))

    def take(self, update: int) -> Ahead:
        return self.ahead.pop(0)

    def settle(self) -> None:
        pass

    def judged(self, ahead: Ahead) -> list[Group]:
        if ahead.judged is None:
            return self.source.judged(ahead.update, ahead.drawn)
        records = {record["problem"]: record for record in self.source.problems.chosen(ahead.update)}
        return [Group.of_json(group, records) for group in ahead.judged]

    def held_out(self, stream: int) -> list[Group]:
        return self.source.held_out_groups(stream)

    def figures(self, ahead: Ahead, update: int) -> dict[str, float]:
        return {"behind": update - 1 - ahead.by} if self.source.config.stale else {}


class Carrying(Here):
    """`Here`, but an update's sampling stops with its own samples: unfinished later ones continue in the next."""

    def _drawn(self, update: int, by: int) -> Ahead:
        begun = (Begun(),) * self.source.config.samples
        records = self.source.problems.chosen(update)
        return Ahead(update, by, [], [Carried(record["problem"], update, begun) for record in records])

    def take(self, update: int) -> Ahead:
        groups = [group for ahead in self.ahead for group in ahead.groups]
        expected = expected_tokens([group.problem for group in groups], self._lengths)
        costs = [
            sum(max(length - len(chain.ids), 1.0) for chain in group.chains if chain.reason == "open")
            for group, length in zip(groups, expected, strict=True)
        ]
        chains = iter(go_on(self.policy, groups, seed=self.source.config.seed, by=update - 1, costs=costs))
        for ahead in self.ahead:
            ahead.groups = [dataclasses.replace(group, chains=next(chains)) for group in ahead.groups]
        first = self.ahead.pop(0)
        return Ahead(
            first.update, first.by, [[chain.rollout(self.policy) for chain in group.chains] for group in first.groups]
        )

    def figures(self, ahead: Ahead, update: int) -> dict[str, float]:
        tokens = [behind_T(sample, update) for samples in ahead.drawn for sample in samples]
        return {"behind": float(np.concatenate(tokens).mean())}


class Servers(Here):
    """`Samples` from servers; if drawn ahead, they are sampled while the learner learns. The policy is a
    `RemoteSampler`.

    Pending requests are not part of a checkpoint. A run that continues repeats them.
    """

    def __init__(self, source: SampleSource, ahead: list[Ahead], lengths: Mapping[str, float]):
        super().__init__(source, ahead, lengths)
        self._asked: dict[int, tuple[int, Callable[[], list[list[Rollout]]]]] = {}  # by update

    def begin(self, update: int, due: int) -> None:
        config, problems = self.source.config, self.source.problems
        known = [update - 1, *(begun.update for begun in self.ahead), *self._asked]
        for later in range(max(known) + 1, due + 1):
            texts = [record["problem"] for record in problems.chosen(later)]
            costs = expected_tokens(texts, self._lengths)
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
