"""A job's hosts that sample while the others learn: an experiment's `sampling_hosts`.

Learners are a group of processes with a mesh of their own, and so are the last processes of the job, which sample. The
learners write orders, which the sampling hosts carry out one after the other:

    push      take the learners' parameters, layer by layer: the one thing that all processes compute together
    draw      draw and judge an update's samples
    judge     judge the samples that a checkpoint holds
    evaluate  draw and judge samples of the held-out problems
    end       leave, as the learners do

Learners order the samples of update u + `stale` before they learn from update u, and wait for them before they push the
new parameters. So samples are a function of seed, update and parameters, as if all processes sampled in turn.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from jprm import multihost
from jprm.io.storage import path_of
from jprm.methods.policy import sampler
from jprm.methods.policy.sampler import Sampler
from jprm.methods.policy.transfer import sent
from jprm.methods.rl import rollout
from jprm.methods.rl.config import RLExperiment, model_of
from jprm.methods.rl.rollout import Group
from jprm.methods.rl.samples import Rollout
from jprm.methods.rl.sampling import Ahead, Problems, SampleSource, expected_tokens, sampler_options
from jprm.model.mesh import mesh_by_heads
from jprm.score.scorer import PRM
from jprm.tokenizer import Tokenizer, load_tokenizer, native_layout
from jprm.train import Stopped
from jprm.train.callbacks import Watchdog

ORDER, REPLY = "order", "reply"

DOING = {"push": "pushing", "draw": "sampling", "judge": "scoring", "evaluate": "evaluating"}
"""The watchdog's word for each order."""


def parted(config: RLExperiment) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the indices of the job's learning processes, and of the sampling ones, which are the last.

    Raises ValueError if no process is left to learn.
    """
    count, sampling = jax.process_count(), config.sampling_hosts
    if sampling >= count:
        raise ValueError(
            f"sampling_hosts={sampling}: the job has {count} process{'es' * (count > 1)}, and none is left to learn;"
            f" start at least {sampling + 1} with --distributed, or lower sampling_hosts"
        )
    return tuple(range(count - sampling)), tuple(range(count - sampling, count))


class SamplingHosts:
    """`Samples` from the sampling hosts. They are already judged, and finished before the next push.

    `update` is the learners' current update, for the watchdog. `waited` are the seconds of the last `settle`. The
    construction waits until the hosts have read their problems, and pushes the parameters.

    Raises ValueError if the hosts have other problems. Methods raise it if a sampling host ended with an error.
    """

    def __init__(
        self,
        problems: Problems,
        tokenizer: Tokenizer,
        params: Mapping,
        name: str,
        ahead: list[Ahead],
        lengths: Mapping[str, float],
    ):
        self.config, self.problems, self.ahead, self._lengths = problems.config, problems, ahead, lengths
        self.layout, self.update, self.waited = native_layout(tokenizer), 0, 0.0
        self._records = {record["problem"]: record for record in (*problems.records, *problems.held_out)}
        self._begun: collections.deque[tuple[int, int]] = collections.deque()
        self._model = model_of(self.config.policy, self.config.model)
        if self._reply() != _digest(problems):
            raise ValueError(
                f"{', '.join((*self.config.problems, *self.config.held_out))}: sampling and learning hosts have"
                " different problems there. Give all hosts the same files"
            )
        self.push(params, name)

    @property
    def policy(self) -> Sampler:
        raise ValueError("sampling_hosts: the policy is on the hosts that sample, and `refresh` needs it here")

    def adopt(self, prm: PRM) -> None:
        raise ValueError("sampling_hosts: the PRM is on the hosts that sample, and `refresh` needs it here")

    def push(self, params: Mapping, name: str) -> None:
        """Sends the parameters to the sampling hosts; waits until they have received them.

        `settle` must come first.
        """
        flat: dict[str, Any] = flatten_dict(params, sep="/")
        self._order("push", name=name, shapes={path: [x.shape, x.dtype.name] for path, x in flat.items()})
        mesh, dtype = mesh_by_heads(self._model), self.config.sampler_dtype or self._model.dtype
        sampler.decoding_copy(params, self._model, mesh, dtype, functools.partial(_send, self.config))

    def begin(self, update: int, due: int) -> None:
        """Orders the samples of the updates up to `due`, and waits for those of `update` if they are missing."""
        self.update = update
        for later in range(self.ahead[-1].update + 1 if self.ahead else update, due + 1):
            costs = expected_tokens([record["problem"] for record in self.problems.chosen(later)], self._lengths)
            self._order("draw", update=later, costs=costs)
            self._begun.append((later, update - 1))
            if later == update:
                self.settle()

    def take(self, update: int) -> Ahead:
        return self.ahead.pop(0)

    def settle(self) -> None:
        """Waits for all ordered samples and appends them to `ahead`: a push must come after them."""
        began, self.waited = time.perf_counter(), 0.0
        while self._begun:
            judged = self._reply()
            self.waited = time.perf_counter() - began
            self.ahead.append(Ahead(*self._begun.popleft(), [], judged=judged))

    def judged(self, ahead: Ahead) -> list[Group]:
        if ahead.judged is not None:
            return self._groups(ahead.judged)
        self._order(
            "judge", update=ahead.update, drawn=[[sample.json() for sample in samples] for samples in ahead.drawn]
        )
        return self._groups(self._reply())

    def figures(self, ahead: Ahead, update: int) -> dict[str, float]:
        return {"behind": update - 1 - ahead.by}

    def held_out(self, stream: int) -> list[Group]:
        self._order("evaluate", stream=stream)
        return self._groups(self._reply())

    def _groups(self, groups: Sequence[Mapping[str, Any]]) -> list[Group]:
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
    """Ends the sampling hosts after the block, with its error or the result that it gives to the yielded function.

    The block must call the function once, with a JSON value. Its own error passes on.
    """
    results: list[Any] = []
    try:
        yield results.append
    except BaseException as error:
        end = {"error": f"{type(error).__name__}: {error}"}
        multihost.post(ORDER, {"do": "end", **({"stopped": str(error)} if isinstance(error, Stopped) else end)})
        raise
    multihost.post(ORDER, {"do": "end", "result": results[0]})


def serve(config: RLExperiment, workdir: Any) -> dict[str, Any]:
    """Carries out the learners' orders in a sampling host until they end, and returns their result, as `loop.train`.

    `workdir` is the run's folder, for the watchdog. An error here is also sent to the learners.

    Raises:
        Stopped: the learners saved and stopped after SIGTERM.
        ValueError: the learners ended with an error, or this host's problems or models do not fit the experiment.
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
        self.source = SampleSource(Problems.read(config), self._tokenizer, config.prm)

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
            drawn = [[Rollout.of_json(sample) for sample in samples] for samples in order["drawn"]]
            groups = self.source.judged(order["update"], drawn)
        else:
            groups = self.source.held_out_groups(order["stream"])
        multihost.post(REPLY, {"value": [group.json() for group in groups]})

    def _take(self, order: Mapping[str, Any]) -> None:
        shapes = {path: jax.ShapeDtypeStruct(shape, dtype) for path, (shape, dtype) in order["shapes"].items()}
        params, name = unflatten_dict(shapes, sep="/"), order["name"]
        if not hasattr(self.source, "policy"):
            mesh, options = mesh_by_heads(self._model), sampler_options(self.config)
            move = functools.partial(_receive, self.config)
            self.source.policy = Sampler(params, self._model, self._tokenizer, mesh, options, name, move)
        else:
            self.source.policy.push(params, name)


def _send(config: RLExperiment, stored: sampler.Stored, part: Mapping, mesh: Mesh) -> dict:
    """Sends a part of the parameters; every learner temporarily has a copy."""
    _moved(config, sampler.stored_here(stored, part, mesh), mesh)
    return {}


def _receive(config: RLExperiment, stored: sampler.Stored, part: Mapping, mesh: Mesh) -> dict:
    """Returns a part of the parameters that the learners send; `part` are shapes and types."""
    return _moved(config, jax.eval_shape(stored, part), mesh)


def _moved(config: RLExperiment, params: dict, mesh: Mesh) -> dict:
    """Moves arrays from the learners, each with such a mesh, to the sampling hosts."""
    learners, samplers = parted(config)
    with multihost.among((*learners, *samplers)):
        multihost.meet()  # compiling, and waiting for the last samples, may take long
        return jax.tree.map(
            lambda x, place: sent(x, mesh, place, learners, samplers), params, sampler.places_of(params, mesh)
        )


def _digest(problems: Problems) -> str:
    return rollout.digest([*problems.records, *problems.held_out])
