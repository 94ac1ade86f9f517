"""Where the samples of an update come from: problems by number, a policy that samples, verifier and PRMs that judge.

A `Source` draws and judges on the devices of its own process, together with the other processes of its group. In a run
with `sampling_hosts` that is the group of these hosts, and learners ask them through `SamplingHosts`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from jprm import loading, multihost
from jprm.io.storage import path_of
from jprm.methods.agents.environment import World
from jprm.methods.decoding import decode
from jprm.methods.decoding.sampler import Sampler, SamplerConfig
from jprm.methods.decoding.turns import Limits, TurnLayout
from jprm.methods.formats.chat_template import template_of
from jprm.methods.rl import rollout
from jprm.methods.rl.config import METHODS, RLExperiment, model_of
from jprm.methods.rl.rollout import Group, Record
from jprm.methods.rl.samples import Rollout, sample, sample_episodes
from jprm.methods.verify import verifiers
from jprm.model.mesh import mesh_by_heads, sent
from jprm.score.scale import check_scale
from jprm.tokenizer import Tokenizer, load_tokenizer, native_layout
from jprm.train import Stopped
from jprm.train.callbacks import Watchdog

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


# ---- Hosts of a job that sample for the others, at the same time as those learn: `sampling_hosts` of an experiment.
#
# Learners are a group of processes with a mesh of their own, and so are the last processes of the job, which sample.
# The learners write orders, which the sampling hosts carry out one after the other:
#
#     push      take the learners' parameters, layer by layer: the one thing that all processes compute together
#     draw      draw and judge the samples of an update
#     judge     judge the samples of an update that a checkpoint holds
#     evaluate  draw and judge samples of the held-out problems
#     end       leave, as the learners do
#
# Learners order the samples of update u + `stale` before they learn from update u, and wait for them before they push
# what they have learnt. So samples are a function of seed, update and parameters, as where all processes sample in
# turn.

ORDER, REPLY = "order", "reply"

DOING = {"push": "pushing", "draw": "sampling", "judge": "scoring", "evaluate": "evaluating"}
"""What the watchdog says of a sampling host, by order."""


def parted(config: RLExperiment) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the processes of the job that learn, and those that sample for them alone.

    Raises ValueError where none is left to learn.
    """
    count, sampling = jax.process_count(), config.sampling_hosts
    if sampling >= count:
        raise ValueError(
            f"sampling_hosts={sampling}: the job has {count} process{'es' * (count > 1)}, and none is left to learn;"
            f" start at least {sampling + 1} with --distributed, or lower sampling_hosts"
        )
    return tuple(range(count - sampling)), tuple(range(count - sampling, count))


class SamplingHosts:
    """What a learner sees of the hosts that sample: in place of a `Source`, and of its policy.

    `update` is the one that the learners are at, for the watchdog. `waited` are the seconds that they waited for the
    samples which `finish` returned last.
    """

    def __init__(self, problems: Problems, tokenizer: Tokenizer, params: Mapping, name: str):
        self.config, self.problems = problems.config, problems
        self.layout, self.update, self.waited = native_layout(tokenizer), 0, 0.0
        self._records = {record["problem"]: record for record in (*problems.records, *problems.held_out)}
        self._begun: collections.deque[tuple[int, int]] = collections.deque()
        self._model = model_of(self.config.policy, self.config.model)
        if self._reply() != _digest(problems):
            raise ValueError(
                f"{', '.join((*self.config.problems, *self.config.held_out))}: the hosts that sample and those that"
                " learn have different problems there; give all hosts the same files"
            )
        self.push(params, name)

    @property
    def policy(self) -> SamplingHosts:
        return self

    def push(self, params: Mapping, name: str) -> None:
        """Sends the parameters to the sampling hosts, which have finished their samples."""
        flat: dict[str, Any] = flatten_dict(params, sep="/")
        self._order("push", name=name, shapes={path: [x.shape, x.dtype.name] for path, x in flat.items()})
        mesh, dtype = mesh_by_heads(self._model), self.config.sampler_dtype or self._model.dtype
        decode.decoding_copy(params, self._model, mesh, dtype, functools.partial(_send, self.config))

    def begin(self, update: int, by: int, costs: Sequence[float]) -> None:
        """Orders the samples of an update, by the policy after update `by`, and does not wait for them."""
        self._order("draw", update=update, costs=list(costs))
        self._begun.append((update, by))

    def finish(self) -> Iterator[tuple[int, int, list[dict[str, Any]]]]:
        """Yields each begun update, the update after which its policy was, and its groups as JSON."""
        began, self.waited = time.perf_counter(), 0.0
        while self._begun:
            groups = self._reply()
            self.waited = time.perf_counter() - began
            yield *self._begun.popleft(), groups

    def judged(self, update: int, drawn: Sequence[Sequence[Rollout]]) -> list[Group]:
        """As `Source.judged`."""
        self._order("judge", update=update, drawn=[[one.json() for one in samples] for samples in drawn])
        return self.groups(self._reply())

    def held_out_groups(self, stream: int) -> list[Group]:
        """As `Source.held_out_groups`."""
        self._order("evaluate", stream=stream)
        return self.groups(self._reply())

    def groups(self, groups: Sequence[Mapping[str, Any]]) -> list[Group]:
        """Returns groups from JSON."""
        return [Group.of_json(group, self._records) for group in groups]

    def _order(self, do: str, **what: Any) -> None:
        multihost.post(ORDER, {"do": do, "at": self.update, **what})

    def _reply(self) -> Any:
        reply = multihost.received(REPLY)
        if "error" in reply:
            raise ValueError(f"a host that samples ended: {reply['error']}")
        return reply["value"]


@contextlib.contextmanager
def ending() -> Iterator[Callable[[Any], None]]:
    """Ends the sampling hosts with the learners. Yields what takes the learners' result; an error is passed on."""
    results: list[Any] = []
    try:
        yield results.append
    except BaseException as error:
        end = {"error": f"{type(error).__name__}: {error}"}
        multihost.post(ORDER, {"do": "end", **({"stopped": str(error)} if isinstance(error, Stopped) else end)})
        raise
    multihost.post(ORDER, {"do": "end", "result": results[0]})


def serve(config: RLExperiment, workdir: Any) -> dict[str, Any]:
    """Carries out the learners' orders in a sampling host until they end, and returns what they return.

    Raises:
        Stopped: where the learners saved and stopped after SIGTERM.
        ValueError: where they ended with an error, or what is sampled and judged here does not fit the experiment.
    """
    with Watchdog(path_of(workdir), config.stall_seconds) as watchdog:
        try:
            host = _Host(config)
            multihost.post(REPLY, {"value": _digest(host.source.problems)})
            while (order := multihost.received(ORDER))["do"] != "end":
                watchdog.at(order["at"], DOING[order["do"]])
                host.carry_out(order)
        except Exception as error:  # any error: the learners must not wait for a reply
            multihost.post(REPLY, {"error": f"{type(error).__name__}: {error}"})
            raise
    if "stopped" in order:
        raise Stopped(order["stopped"])
    if "error" in order:
        raise ValueError(f"the hosts that learn ended: {order['error']}")
    return order["result"]


class _Host:
    """A sampling host, together with the others of its kind."""

    def __init__(self, config: RLExperiment):
        self.config, model = config, model_of(config.policy, config.model)
        self._model, self._tokenizer = model, load_tokenizer(config.policy, model.vocab_size)
        self.source = Source(Problems.read(config), self._tokenizer, config.prm)

    def carry_out(self, order: Mapping[str, Any]) -> None:
        if order["do"] == "push":
            self._take(order)
            return
        if order["do"] == "draw":
            records, update = self.source.problems.chosen(order["update"]), order["update"]
            groups = self.source.judged(
                update, self.source.sample(records, self.config.samples, update, order["costs"])
            )
        elif order["do"] == "judge":
            drawn = [[Rollout.of_json(one) for one in samples] for samples in order["drawn"]]
            groups = self.source.judged(order["update"], drawn)
        else:
            groups = self.source.held_out_groups(order["stream"])
        multihost.post(REPLY, {"value": [group.json() for group in groups]})

    def _take(self, order: Mapping[str, Any]) -> None:
        """Takes the learners' parameters."""
        shapes = {path: jax.ShapeDtypeStruct(shape, dtype) for path, (shape, dtype) in order["shapes"].items()}
        params, name = unflatten_dict(shapes, sep="/"), order["name"]
        if not hasattr(self.source, "policy"):
            mesh, options = mesh_by_heads(self._model), sampler_options(self.config)
            move = functools.partial(_receive, self.config)
            self.source.policy = Sampler(params, self._model, self._tokenizer, mesh, options, name, move)
        else:
            self.source.policy.push(params, name)


def _send(config: RLExperiment, stored: decode.Stored, part: Mapping, mesh: Mesh) -> dict:
    """Sends a part of the parameters, of which every learner has a copy for this long."""
    _moved(config, decode.stored_here(stored, part, mesh), mesh)
    return {}


def _receive(config: RLExperiment, stored: decode.Stored, part: Mapping, mesh: Mesh) -> dict:
    """Returns a part of the parameters that the learners send; `part` are shapes and types."""
    return _moved(config, jax.eval_shape(stored, part), mesh)


def _moved(config: RLExperiment, some: dict, mesh: Mesh) -> dict:
    """Moves arrays from the learners, which have them on a mesh of this kind each, to the sampling hosts."""
    learners, samplers = parted(config)
    with multihost.among((*learners, *samplers)):
        multihost.meet()  # compiling, and waiting for the last samples, may take long
        return jax.tree.map(
            lambda x, place: sent(x, mesh, place, learners, samplers), some, decode.places_of(some, mesh)
        )


def _digest(problems: Problems) -> str:
    return rollout.digest([*problems.records, *problems.held_out])
