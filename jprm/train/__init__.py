"""Training, in one file that reads from top to bottom: the step, the run, its first state, its folder, log and loop.

    with jprm.Trainer(experiment, "runs/mine") as trainer:
        for rows in itertools.islice(trainer.batches, 100):
            metrics = trainer.step(rows)
        print(metrics.means(), trainer.evaluate())
        trainer.save()

`train` is this with a log, checkpoints at intervals, a stop on SIGTERM and a watchdog. Every process of a run makes the
same calls on the same batches, and computes its devices' rows; process 0 writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils
from jaxtyping import Array, Scalar

from jprm import data, multihost, objectives
from jprm.checkpoints import base, store
from jprm.devices import OPTIONS
from jprm.experiment import (
    RUN,
    Experiment,
    ObjectiveConfig,
    OptimizerConfig,
    from_json,
    read,
    to_json,
    written,
)
from jprm.io.folders import folder_lock
from jprm.io.jsonl import parse
from jprm.io.outputs import Bar, atomic_write, differing, digest, text_of_module, write_json
from jprm.io.storage import Place, path_of
from jprm.model import transformer
from jprm.model.config import ModelConfig, own_modules, own_parts
from jprm.model.heads import find
from jprm.model.mesh import check_mesh, gathered, make_mesh, put_rows
from jprm.model.parameters import (
    TRAINED,
    check_adapted,
    held_decoder,
    init_adapters,
    join,
    merge,
    model_flops,
    peak,
    split,
    without_adapters,
)
from jprm.objectives import COPY, Judged, Objective, divisor, means, names, source, summed
from jprm.options import find_part
from jprm.pack import PackReport
from jprm.rows import Rows
from jprm.tokenizer import Tokenizer, load_tokenizer, native_layout
from jprm.train.batches import (
    Streams,
    batches_of,
    check_rows,
    check_supervision,
    micro_batches,
    training_batches,
    unstacked,
)
from jprm.train.callbacks import Goodput, Profile, Trackers, Watchdog, changed_compiler, versions
from jprm.train.optimizer import Guarded, guard, make_optimizer, schedule, skipped

# ------------------------------------------------------------------------------------------------------------- the step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Parameters are flat dicts {path: array}, in two parts: only the trained one has optimizer state.

    `reference` are the nested parameters of the objective's second model. They may lack the decoder: it is then that of
    `frozen`, without adapters.
    """

    step: Scalar
    trained: dict[str, Array]
    frozen: dict[str, Array]
    optimizer: optax.OptState
    reference: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def params(self) -> dict:
        return join(self.trained, self.frozen)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metrics:
    """What one step reports. `loss`, `count`, `tokens` and `objective` are sums, divided on the host."""

    loss: Scalar
    count: Scalar
    tokens: Scalar  # real tokens, padding left out
    objective: dict[str, Any]  # as in `jprm.objectives`, summed
    gradient_norm: Scalar
    parameter_norm: Scalar  # of the trained parameters after the update; infinite where a square overflows
    learning_rate: Scalar
    skipped: Scalar  # 1 for a bad step that was left out

    def means(self) -> dict[str, float | None]:
        """Returns the mean loss and the objective's metrics, by the names in metrics.jsonl."""
        count = float(self.count)
        return {"loss": float(self.loss) / divisor(count), **means(self.objective, count)}


def models(params: dict[str, Any], reference: dict[str, Any], config: ObjectiveConfig) -> dict[str, Any]:
    """Returns what an objective takes as `params`: the model with its adapters merged, and the reference if any."""
    both = {"model": merge(params, config.lora)}
    if config.reference:
        decoder = {} if "decoder" in reference else {"decoder": without_adapters(params["decoder"])}
        both["reference"] = reference | decoder
    return both


@functools.lru_cache(maxsize=32)
def make_step(
    objective: Objective,
    tx: optax.GradientTransformationExtraArgs,
    config: ObjectiveConfig,
    backend: str | None = None,
) -> Callable[[State, Rows, Scalar], tuple[State, Metrics]]:
    """Returns the step for rows of shape (A, B, ...) and a learning rate; the same function for the same arguments.

    The gradients of A micro-batches of B rows are summed, divided by the objective's count, and given to `tx`. Where
    the loss or the gradient is not finite, the state stays as it is. `backend` is what the step is compiled for, by
    default jax's own.
    """

    def sums(trained, frozen, reference, rows: Rows):
        loss, count, metrics = objective(models(join(trained, frozen), reference, config), rows, config)
        real_BT = (rows.position > 0) | (rows.until > jnp.arange(rows.until.shape[1]) + 1)
        tokens = jnp.sum(real_BT.astype(jnp.float32))
        return loss, {"loss": loss, "count": count, "tokens": tokens, "objective": summed(metrics)}

    add = functools.partial(jax.tree.map, jnp.add)

    def step(state: State, rows: Rows, rate: Scalar) -> tuple[State, Metrics]:
        def micro(rows):
            return jax.grad(sums, has_aux=True)(state.trained, state.frozen, state.reference, rows)

        first = jax.tree.map(lambda x: x[0], rows)
        if rows.tokens.shape[0] == 1:  # for a loop of one turn, XLA's compiler for TPU makes two copies of the model
            gradients, total = micro(first)
        else:
            shapes = jax.eval_shape(sums, state.trained, state.frozen, state.reference, first)[1]
            zero = jax.tree.map(jnp.zeros_like, state.trained), jax.tree.map(lambda x: jnp.zeros(x.shape), shapes)
            (gradients, total), _ = jax.lax.scan(lambda sum, rows: (add(sum, micro(rows)), None), zero, rows)
        # Written out for every gradient: with one quotient XLA merges it with the clipping's, and last digits change.
        gradients = jax.tree.map(lambda g: g / jnp.where(total["count"] > 0, total["count"], 1.0), gradients)
        loss, norm = total["loss"] / jnp.where(total["count"] > 0, total["count"], 1.0), optax.tree.norm(gradients)
        updates, opt = tx.update(gradients, state.optimizer, state.trained, loss=loss, rate=rate)
        trained = cast(dict[str, Array], optax.apply_updates(state.trained, updates))
        metrics = Metrics(
            **total,
            gradient_norm=norm,
            parameter_norm=optax.tree.norm(trained),
            learning_rate=rate,
            skipped=jnp.float32(skipped(opt) - skipped(state.optimizer)),
        )
        after = state.step + 1, trained, opt
        if not isinstance(opt, Guarded):  # a guard leaves out bad steps itself
            good = jnp.isfinite(loss) & jnp.isfinite(norm)
            before = state.step, state.trained, state.optimizer
            after = jax.tree.map(lambda new, old: jnp.where(good, new, old), after, before)
        step, trained, opt = after
        return State(step, trained, state.frozen, opt, state.reference), metrics

    return jax.jit(step, donate_argnums=0, compiler_options=OPTIONS.get(backend or jax.default_backend()))


# -------------------------------------------------------------------------------------------------------------- the run


class Position(Protocol):
    """A place in a run's data, which JSON can hold."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


class Trainer:
    """Trains one experiment.

    Args:
        workdir: the run's folder, on this machine or in a bucket. Training continues from its newest checkpoint.
            None: nothing is saved, and the experiment's data are not read before `batches` is.
        objective: an objective in place of the one that `experiment.objective` names; it takes the same options. The
            run records it by the name of its module and itself, and continues only with an objective of that name.
        position: of a caller that makes the rows itself: what is saved with the run in place of the data's position.

    Raises:
        ValueError: parts of the experiment that do not fit each other, or a folder of another experiment's run, or one
            in which another process trains.
    """

    def __init__(
        self, experiment: Experiment, workdir: str | os.PathLike | None = None, *, objective: Objective | None = None,
        position: Position | None = None,
    ):  # fmt: skip
        self._position = position
        self.workdir = path_of(workdir) if workdir is not None else None
        self.experiment = experiment = with_streams(experiment, self.workdir)
        check_supervision(experiment)
        self.mesh = make_mesh(experiment.mesh)
        check_mesh(experiment.model, self.mesh, experiment.data.micro_rows, experiment.data.tokens)
        self.tokenizer = load_tokenizer(experiment.tokenizer, experiment.model.vocab_size)
        name, options = experiment.objective, experiment.objective_options
        if objective is None:
            self.objective = objectives.find(name, options, self.workdir)
        else:
            self.objective = objectives.with_options(objective, options, "given to Trainer")
            self.experiment = experiment = _recording(self.objective, experiment, self.workdir)
        objectives.check(self.objective, experiment.task)
        self._step = make_step(self.objective, make_optimizer(experiment.optimizer), experiment.task)
        self._compiled: set[tuple[int, ...]] = set()  # shapes of rows
        rates = schedule(experiment.optimizer, experiment.steps)
        self._rate = jax.jit(lambda step, skips: jnp.float32(rates(step - skips)))
        self.goodput, self.checkpoints, self.local, self._lock = Goodput(), None, None, None
        try:
            if (folder := self.workdir) is not None:
                self.position  # noqa: B018  (made first: where its files are missing, nothing is written)
                self._lock = folder_lock(folder)
                while not multihost.first(self._lock.attempt):
                    pass
                log_ratio = objectives.log_ratio(self.objective)
                multihost.first(lambda: claim(folder, experiment, self.tokenizer, log_ratio))
                if not multihost.everywhere((folder / RUN).is_file()):
                    raise ValueError(
                        f"{workdir}: is not the same folder on every host; --workdir must be where all can write"
                    )
                self.checkpoints = store.open_checkpoints(folder, experiment.keep, experiment.keep_every)
            with jax.set_mesh(self.mesh):
                self.state = self._start()
            self._calls = int(self.state.step)  # of `step`, which so does not wait for the device
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.local is not None:
                self.local.close()
            if self.checkpoints is not None:
                self.checkpoints.close()
        finally:
            if self._lock is not None:
                self._lock.release()

    @functools.cached_property
    def batches(self) -> Streams:
        """The endless batches of the experiment's data, (A, B, ...), from where the run stopped."""
        return training_batches(self.experiment, self.mesh, self.tokenizer)

    @property
    def position(self) -> Position:
        """What a checkpoint holds beside the state: by default the position in the data."""
        return self._position or self.batches

    @property
    def params(self) -> dict[str, Any]:
        """The model's parameters, adapters merged."""
        return self._models()["model"]

    def step(self, rows: Rows) -> Metrics:
        """Updates the parameters on rows of shape (A, B, ...), or (A x data.micro_rows, ...).

        Returns what the step reports, before it is computed: reading a number waits for it. A step whose loss or
        gradient is not finite changes no parameter.

        Raises:
            ValueError: names a field of the rows that the model cannot take; or after the last step of a schedule that
                has decayed to 0.
        """
        if rows.tokens.ndim == 2:
            rows = micro_batches(rows, self.experiment.data.micro_rows)
        check_rows(rows, self.experiment.model.vocab_size)
        self._check_schedule()
        with jax.set_mesh(self.mesh):
            rate = self._rate(self.state.step, skipped(self.state.optimizer))
            arguments = self.state, put_rows(rows, self.mesh, lead=1), rate
            if rows.tokens.shape not in self._compiled:
                multihost.compile_together(self._step, *arguments)
                self._compiled.add(rows.tokens.shape)
            self.state, metrics = self._step(*arguments)
            self._calls += 1
            return metrics

    def _check_schedule(self) -> None:
        """Raises ValueError where the next update would have a rate of 0."""
        optimizer, steps = self.experiment.optimizer, self.experiment.steps
        if optimizer.decay == "constant" or self._calls < steps:
            return
        if int(self.state.step) - int(skipped(self.state.optimizer)) >= steps:
            raise ValueError(
                f"all {steps} steps of the experiment are done, and optimizer.decay={optimizer.decay!r} has taken the"
                " rate to 0: make the Trainer with more `steps`, or with decay='constant'"
            )

    def evaluate(self, files: Sequence[str] = ()) -> dict[str, float | None]:
        """Returns `evaluated` over these files, by default the experiment's validation files."""
        with jax.set_mesh(self.mesh):
            return evaluated(self.experiment, self.objective, self._models(), self.tokenizer, files)

    def measure(self, rows: Rows, objective: Objective) -> dict[str, float | None]:
        """Returns an objective's mean loss and metrics on rows of shape (A, B, ...), and learns nothing from them."""
        with jax.set_mesh(self.mesh):
            return measured(objective, self._models(), unstacked(rows), self.experiment.task)

    def take(self, folder: str | os.PathLike) -> int:
        """Takes the trained parameters of another run of this model, from its newest checkpoint; returns its step."""
        experiment = read(path_of(folder) / RUN)
        with jax.set_mesh(self.mesh):
            params, step = store.load_params(folder, experiment, self.mesh)
        flat = flatten_dict(params, sep="/")
        self.state = dataclasses.replace(self.state, trained={path: flat[path] for path in self.state.trained})
        return step

    def save(self) -> None:
        """Saves a checkpoint in the run's folder, in the background: closing the trainer waits for it."""
        if self.checkpoints is None:
            raise ValueError("this trainer has no folder; make it with Trainer(experiment, workdir)")
        parts = {**saved_arrays(self.state), "run": self._run()}
        if self.local is not None:
            self.local.settle()
        with jax.set_mesh(self.mesh):
            self.checkpoints.save_checkpointables_async(int(self.state.step), store.savable(parts), overwrite=True)

    def save_local(self) -> None:
        """Saves a checkpoint on the hosts (`local_checkpoints`), in the background."""
        assert self.local is not None and self.checkpoints is not None
        self.checkpoints.wait()  # of two saves at a time, one would take the other's number
        self.local.save(int(self.state.step), saved_arrays(self.state), self._run())

    def _run(self) -> dict[str, Any]:
        """Returns what a checkpoint holds beside arrays."""
        data, experiment = self.position.get_state(), to_json(self.experiment)
        return {"data": data, "experiment": experiment, "versions": versions(), "goodput": self.goodput.saved}

    def _models(self) -> dict[str, Any]:
        with jax.set_mesh(self.mesh):
            return models(self.state.params, self.state.reference, self.experiment.task)

    def _start(self) -> State:
        """Returns the state of the newest checkpoint, or the initial one."""
        checkpoints = self.checkpoints
        latest = checkpoints.latest if checkpoints is not None else None
        state = initial_state(self.experiment, load_base=latest is None)
        newest = self._open_local(state)
        if newest is not None and (latest is None or newest > latest.step):
            assert self.local is not None
            state = self._continued(state, *self.local.restore(newest), newest)
            if multihost.is_first():
                print(f"continuing from step {newest} on the hosts of {self.workdir}")
        elif checkpoints is not None and latest is not None:
            state = self._resumed(state, checkpoints, latest.step)
            if multihost.is_first():
                print(f"continuing from step {int(state.step)} in {self.workdir}")
        elif self.experiment.probe_rows:
            state = with_fitted_head(self.experiment, state, self.tokenizer)
        return State(state.step, state.trained, state.frozen, state.optimizer, reference_params(self.experiment))

    def _open_local(self, state: State) -> int | None:
        """Opens the checkpoints of the hosts, if the run has such, and returns their newest step."""
        if not self.experiment.local_checkpoints or self.workdir is None or multihost.count() == 1:
            return None
        from jprm.checkpoints.local import LocalCheckpoints  # of runs that ask for it

        arrays = store.abstract(saved_arrays(state))
        self.local = LocalCheckpoints(self.experiment.local_checkpoints, self.mesh, arrays)
        self.local.settle()
        return self.local.latest

    def _resumed(self, state: State, checkpoints: store.Checkpoints, step: int) -> State:
        """Returns the newest checkpoint's state, its arrays placed like those of `state`."""
        run = store.restore(checkpoints, {"run": None})["run"]
        now = state.optimizer
        bare = now.inner if isinstance(now, Guarded) else now
        then = guard(bare) if from_json(OptimizerConfig, run["experiment"]["optimizer"]).guarded else bare
        wanted = {"params": store.abstract(state.params), "optimizer": store.abstract(then)}
        loaded = store.restore(checkpoints, wanted)
        optimizer = loaded["optimizer"]
        if isinstance(now, Guarded) and not isinstance(then, Guarded):
            optimizer = guard(optimizer)
        elif isinstance(then, Guarded) and not isinstance(now, Guarded):
            optimizer = optimizer.inner
        return self._continued(state, {"params": loaded["params"], "optimizer": optimizer}, run, step)

    def _continued(self, state: State, arrays: dict[str, Any], run: dict[str, Any], step: int) -> State:
        """Returns the state of a checkpoint's arrays, and takes the position in the data and the times from `run`."""
        trained, frozen = {}, {}
        for path, value in split(arrays["params"], "")[0].items():
            (trained if path in state.trained else frozen)[path] = value
        if multihost.is_first() and (sentence := changed_compiler(run.get("versions", {}))):
            print(f"warning: {sentence}", file=sys.stderr, flush=True)
        self.position.set_state(run["data"])
        self.goodput = Goodput(**run["goodput"])
        return State(jnp.int32(step), trained, frozen, arrays["optimizer"])


def saved_arrays(state: State) -> dict[str, Any]:
    """Returns the arrays of a checkpoint, by part."""
    return {"params": join(state.trained, state.frozen), "optimizer": state.optimizer}


def _recording(objective: Objective, experiment: Experiment, workdir: Place | None) -> Experiment:
    """Returns the experiment with this objective's name and options in place of its own, unless they find it."""
    with contextlib.suppress(ValueError):
        if objectives.find(experiment.objective, experiment.objective_options, workdir) == objective:
            return experiment
    name, options = objectives.recorded(objective)
    return dataclasses.replace(experiment, objective=name, objective_options=options)


def evaluated(
    experiment: Experiment, objective: Objective, params: dict[str, Any], tokenizer: Tokenizer,
    files: Sequence[str] = (),
) -> dict[str, float | None]:  # fmt: skip
    """Returns the loss and the metrics over files, by default the validation files, on the mesh that is set.

    Scores that the objective judges give `valid_step_accuracy` and the exact `valid_auroc`, which is None where the
    labels are all correct or all incorrect. `params` are as an objective takes them.
    """
    config = experiment.data
    if not (files or config.valid):
        raise ValueError("data.valid names no file: pass files to evaluate, such as trainer.evaluate(['valid.jsonl'])")
    batches = batches_of(experiment, files or config.valid, native_layout(tokenizer), once=True)
    micro = itertools.chain.from_iterable(unstacked(micro_batches(rows, config.micro_rows)) for rows, _ in batches)
    return {f"valid_{name}": value for name, value in measured(objective, params, micro, experiment.task).items()}


def measured(
    objective: Objective, params: dict[str, Any], micro: Iterable[Rows], config: ObjectiveConfig
) -> dict[str, float | None]:
    """Returns the mean loss, the metrics and the count (`labels`) over micro-batches, on the mesh that is set."""
    mesh, sums = jax.sharding.get_mesh(), []
    for rows in micro:
        check_rows(rows, config.model.vocab_size)
        arguments = objective, params, put_rows(rows, mesh), config
        if not sums:
            multihost.compile_together(_evaluate, *arguments)
        sums.append(gathered(_evaluate(*arguments)))
    if not sums:
        raise ValueError("there are no rows to measure the objective on: the files hold no record that fits a row")
    losses, counts, metrics = zip(*sums, strict=True)
    count = float(np.sum(counts, dtype=np.float64))
    values: dict[str, float | None] = {"loss": float(np.sum(losses, dtype=np.float64)) / divisor(count)}
    for name in metrics[0]:
        parts = [part[name] for part in metrics]
        if isinstance(parts[0], Judged):
            judged = jax.tree.map(lambda *xs: np.concatenate([x.ravel() for x in xs]), *parts)
            values |= names(metrics[0], name, _judgement(judged))
        else:
            total = jax.tree.map(lambda *xs: np.sum(xs, dtype=np.float64), *parts)
            values |= means({name: total}, count)
    return {**values, "labels": count}


def _judgement(judged: Judged) -> dict[str, float | None]:
    from jprm.statistics import auroc, jsonable  # of validation alone

    score_N, positive_N = np.asarray(judged.score_BS), np.asarray(judged.positive_BS)
    weight_N = np.asarray(judged.weight_BS, np.float64)
    right = np.sum(weight_N * ((score_N > 0.5) == positive_N))
    return {
        "step_accuracy": float(right / divisor(weight_N.sum())),
        "auroc": jsonable(auroc(score_N, positive_N, weight_N)),
    }


@functools.partial(jax.jit, static_argnums=(0, 3))
def _evaluate(objective: Objective, params: dict[str, Any], rows: Rows, config: ObjectiveConfig):
    return objective(params, rows, config)


# ------------------------------------------------------------------------------------------------------ its first state


def initial_state(experiment: Experiment, load_base: bool = True) -> State:
    """Returns parameters, adapters and the optimizer's state, sharded over the mesh that is set; no reference."""
    model, key = experiment.model, jax.random.key(experiment.seed)
    loaded: dict[str, Any] = {}
    if experiment.base and load_base:
        loaded = {"decoder": base.load_decoder(experiment.base, model, new=experiment.new_parameters)}
        if not find(model.head).channels:  # a policy starts from its base's head, which may be the embedding
            loaded |= _language_head(experiment.base, experiment)
        elif not experiment.probe_rows:
            loaded |= _of_heads("kept_head")(experiment.base, experiment)
    loaded = flatten_dict(loaded, sep="/")
    params = {**loaded, **_random(model, frozenset(loaded), key)}
    freeze, lora = experiment.optimizer.freeze, experiment.lora
    if lora.rank:
        check_adapted(params, freeze)
    adapters = jax.jit(init_adapters, static_argnums=(0, 1, 2))(lora, model, freeze, jax.random.fold_in(key, 1))
    trained, frozen = split(join(params, adapters), freeze, TRAINED if lora.rank else "")
    optimizer = jax.jit(make_optimizer(experiment.optimizer).init)(trained)
    return State(jnp.int32(0), trained, frozen, optimizer)


def reference_params(experiment: Experiment, load: bool = True) -> dict[str, Any]:
    """Returns the parameters of the reference model, sharded over the mesh that is set; {} without one.

    The head is a language head, or that of a run with the same head and step layer; else there is none. Where adapters
    train on the reference itself, the decoder is left out: the state has it already. Without `load` the parameters are
    random.
    """
    path, model = experiment.reference, experiment.model
    if not experiment.task.reference:
        return {}
    if not load:
        params = jax.jit(transformer.init, static_argnums=0)(model, jax.random.key(0))
    elif not find(model.head).channels:
        params = {"decoder": {}, **_language_head(path, experiment)}
    else:
        params = {"decoder": {}, **_of_heads("head_of_run")(path, experiment)}
    dtype = experiment.reference_dtype
    if experiment.lora.rank and path == experiment.base and dtype == "float32":
        del params["decoder"]
    elif load:
        params["decoder"] = base.load_decoder(path, model, dtype)
    else:
        params["decoder"] = held_decoder(params["decoder"], dtype)
    return params


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random(model: ModelConfig, loaded: frozenset[str], key: jax.Array) -> dict[str, jax.Array]:
    """Returns random parameters as a flat dict, those left out that are loaded."""
    params: dict[str, Any] = flatten_dict(transformer.init(model, key), sep="/")
    return {path: x for path, x in params.items() if path not in loaded}


def _of_heads(name: str) -> Any:
    return find_part(f"jprm.methods.layers.head_init:{name}", {}, "head")


def _language_head(path: str, experiment: Experiment) -> dict[str, Any]:
    model, tied = experiment.model, base.model_config(path).tied_embeddings
    if tied != model.tied_embeddings:
        raise ValueError(f"{path}: tied_embeddings is {tied}, the config says {model.tied_embeddings}")
    return {} if tied else {"head": base.load_language_head(path, model)}


def with_fitted_head(experiment: Experiment, state: State, tokenizer: Tokenizer) -> State:
    """Returns the state with its head fitted on the first rows of training."""
    labelled_steps, fitted_head = map(_of_heads, ("labelled_steps", "fitted_head"))
    batches = training_batches(experiment, jax.sharding.get_mesh(), tokenizer)
    params = merge(state.params, experiment.lora)
    micro_batches = itertools.chain.from_iterable(map(unstacked, batches))
    steps = labelled_steps(params, experiment.model, experiment.target, micro_batches, experiment.probe_rows)
    head, area = fitted_head(experiment.model.head, steps)
    left_out = "" if area is None else f": AUROC {area:.3f} on the last fifth, when that was left out"
    if multihost.is_first():
        print(f"the head is fitted on {len(steps.target_N):,} labelled steps{left_out}")
    fitted = {
        f"head/{name}": jax.device_put(value + state.trained[f"head/{name}"], state.trained[f"head/{name}"].sharding)
        for name, value in head.items()
    }
    return dataclasses.replace(state, trained=state.trained | fitted)


# ----------------------------------------------------------------------------------------------------------- its folder


FREE = ("mesh", "steps", "log_every", "valid_every", "checkpoint_every", "keep", "keep_every", "stall_seconds",
        "stall_action", "local_checkpoints", "local_every", "base", "tokenizer", "trackers", "profile", "data.cache",
        "data.cache_gb", "optimizer.bad_steps", "optimizer.spike")  # fmt: skip
"""Fields that may differ when a run continues: they change neither the parameters' meaning nor the data's order. The
tokenizer may be at another path, but must be the same. With other `steps` the schedule is computed anew."""


DIGESTS = "digests.json"
"""In a run's folder: digests of its data and of the user's own parts of its model, by path and by field."""


def with_streams(experiment: Experiment, workdir: Place | None) -> Experiment:
    """Returns the experiment with a number of streams: the run's own, or else as many as processes can have."""
    if experiment.data.streams:
        return experiment

    def chosen() -> int:
        if workdir is not None and (workdir / RUN).exists() and store.saved(workdir):
            return max(1, read(workdir / RUN).data.streams)
        most = min(multihost.count(), experiment.data.micro_rows)
        return next(count for count in range(most, 0, -1) if experiment.data.micro_rows % count == 0)

    return dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, streams=multihost.first(chosen)))


def claim(workdir: Place, experiment: Experiment, tokenizer: Tokenizer, log_ratio: float | None = None) -> None:
    """Writes the experiment, and its objective's `log_ratio`, into its folder.

    Raises ValueError where checkpoints of another experiment are there.
    """
    path = workdir / RUN
    if path.exists() and store.saved(workdir):
        check_experiment(path, to_json(read(path)), to_json(experiment), FREE)
        _check_tokenizer(workdir, tokenizer, experiment.tokenizer)
    objective = source(experiment.objective, workdir)
    parts, data = own_parts(experiment.model), (*experiment.data.train, *experiment.data.valid)
    digests = {name: digest(part) for name, part in parts.items()}
    keep_digests(workdir, digests | {path: data_digest(path) for path in data if path_of(path).exists()})
    copies = {f"{name}.py": text_of_module(sys.modules[place]) for name, place in own_modules(experiment.model).items()}
    for name, text in {RUN: written(experiment, log_ratio), COPY: objective, **copies}.items():
        if text is not None:
            atomic_write(workdir / name, text)
    tokenizer.save(workdir)


def check_experiment(path: Place, there: Any, here: Any, free: Collection[str]) -> None:
    """Raises ValueError where two experiments differ in a field that is not free, as JSON values."""
    old, new = (flatten_dict(each, sep=".") for each in (there, here))
    names = [name for name in sorted(differing(old, new)) if not {name, name.split(".")[0]} & set(free)]
    if names:
        detail = "; ".join(f"{name}: {old.get(name)} there, {new.get(name)} here" for name in names)
        fix = "Use another --workdir"
        if "objective" in names:
            fix += f", or continue with objective {old['objective']!r}: name it, or Trainer(objective=...)"
        raise ValueError(f"{path}: is another experiment's run ({detail}). {fix}")


def keep_digests(workdir: Place, digests: Mapping[str, str]) -> None:
    """Writes what a run depends on, by part, into its folder. Raises ValueError where a part was another one.

    What an earlier release has not written is taken as it is.
    """
    path = workdir / DIGESTS
    there = parse(path.read_bytes(), str(path)) if path.exists() else {}
    changed = [part for part in differing(there, {**there, **digests}) if part in there]
    if changed and store.saved(workdir):
        raise ValueError(
            f"{path}: {', '.join(changed)} changed since the run started. Restore what the run started with (copies of"
            f" code are in {workdir}), or use another --workdir"
        )
    workdir.mkdir(parents=True, exist_ok=True)
    write_json(path, {**there, **digests})


def data_digest(path: str) -> str:
    """Returns a digest of the content of a file or a folder; in a bucket, of what the store says of it.

    Shards of tokens are told by their index, which holds the digest of each.
    """
    place = path_of(path)
    if (place / data.SHARDS).is_file():
        return digest((place / data.SHARDS).read_text())
    return digest(place.contents())


def _check_tokenizer(workdir: Place, tokenizer: Tokenizer, path: str) -> None:
    """Raises ValueError where the tokenizer that the run started with differs from this one."""
    with tempfile.TemporaryDirectory() as folder:  # compared as files: they hold all that a tokenizer is
        tokenizer.save(folder)
        for file in sorted(pathlib.Path(folder).iterdir()):
            there = workdir / file.name
            if not there.is_file() or there.read_bytes() != file.read_bytes():
                raise ValueError(
                    f"{there}: is not the tokenizer that {path} holds, and the parameters were trained with it. Set"
                    f" tokenizer={workdir}, or use another --workdir"
                )


# -------------------------------------------------------------------------------------------------------------- the log


SKIPS = 10
"""Bad steps in a row after which a run that leaves them out ends: the next would be bad too."""

REWRITE_S = 10
"""Seconds between two writings of a metrics file in a bucket, which stores limit to one a second."""

Callback = Callable[[dict[str, Any]], None]


class Diverged(FloatingPointError):
    """The loss, its gradient or the parameters after the step are not finite, or a spike."""


class MetricsFile:
    """`metrics.jsonl`. On this machine every line is appended at once.

    An object of a bucket cannot grow: it is written anew, at most every `REWRITE_S` seconds and at `flush`.

    Args:
      start: the step that training continues from. Lines of later steps go: these steps are logged again.
    """

    def __init__(self, path: Place, start: int):
        self.path = path
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        whole = [(line, json.loads(line)) for line in lines if line.endswith(b"\n")]  # a kill may leave half a line
        self.kept: list[dict[str, Any]] = [values for _, values in whole if values["step"] <= start]
        self._text = b"".join(line for line, values in whole if values["step"] <= start)
        self._flushed, self._since = len(self._text), time.monotonic()
        if whole:
            atomic_write(path, self._text)

    def add(self, values: dict[str, Any]) -> None:
        line = (json.dumps(values) + "\n").encode()
        if not self.path.append(line):
            self._text += line
            if time.monotonic() - self._since > REWRITE_S:
                self.flush()

    def flush(self) -> None:
        if len(self._text) > self._flushed:
            self.path.write_bytes(self._text)
            self._flushed, self._since = len(self._text), time.monotonic()


class Log:
    """Sums metrics over `log_every` steps and writes them: a JSON line, the progress bar, the experiment's trackers.

    Every process sums, since every process must see a step that has diverged. Process 0 writes. A context manager,
    which shows the bar and tells the trackers how the run ended.
    """

    def __init__(
        self, workdir: Place, experiment: Experiment, start: int, goodput: Goodput,
        callbacks: Sequence[Callback] = (), least_seconds: float | None = None,
    ):  # fmt: skip
        self._times: list[float] = []  # seconds of the steps of a line
        self._least_seconds, self._cells = least_seconds, experiment.data.rows * experiment.data.tokens
        self.callbacks = callbacks
        self.every, self.goodput = experiment.log_every, goodput
        self.skips, self.skipped, self.in_a_row = experiment.optimizer.bad_steps == "skip", 0, 0
        self.last: dict[str, Any] = {}
        self.writes, self.steps_due = multihost.is_first(), experiment.steps
        self.sum: Metrics | None = None
        self.steps, self.since, self.labels = 0, time.perf_counter(), 0.0
        note = "compiling" if start < experiment.steps else "finished"
        self.bar = Bar(experiment.name, experiment.steps, start, note, shown=self.writes)
        self.lines: MetricsFile | None = None  # of process 0
        if self.writes:
            self.lines = MetricsFile(workdir / "metrics.jsonl", start)
            for values in self.lines.kept:
                self.last |= values
        self.trackers: Trackers | None = None  # of process 0

        def track() -> None:
            config = {"experiment": to_json(experiment), "versions": versions()}
            self.trackers = Trackers(experiment.trackers, workdir, experiment.name, config, start)

        if experiment.trackers:
            multihost.first(track)

    def __enter__(self) -> Self:
        self.bar.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.bar.__exit__(kind, error, trace)
        self.flush()
        if self.trackers:
            whole = self.last.get("step", 0) >= self.steps_due
            self.trackers.close("failed" if kind else "finished" if whole else "stopped")

    def add(
        self, step: int, metrics: Metrics, checkpoints, *, close: bool = False, more: dict[str, Any] | None = None
    ) -> None:
        """Adds a step's sums, which become a line at every `log_every`-th step, and at this one with `close`.

        Every checkpoint closes a line, because sums are not saved: a run that was stopped logs the same lines. `more`
        goes into the line, of a loop that makes its own batches; it may have nothing to learn from in a step.
        """
        metrics = jax.tree.map(np.asarray, metrics)
        left_out = bool(metrics.skipped)
        self.in_a_row = self.in_a_row + 1 if left_out else 0
        finite = all(map(math.isfinite, (metrics.loss, metrics.gradient_norm, metrics.parameter_norm)))
        if self.in_a_row >= SKIPS or (left_out and not self.skips) or not (left_out or finite):
            good = f"step {checkpoints.latest.step}" if checkpoints.latest else "none yet"
            raise Diverged(
                f"step {step}: loss {float(metrics.loss)}, gradient norm {float(metrics.gradient_norm)}, norm of the"
                f" parameters after it {float(metrics.parameter_norm)}{', a spike' if finite else ''}"
                f"{f', the {SKIPS}th bad step in a row' if self.in_a_row >= SKIPS else ''}; last good checkpoint:"
                f" {good}. Lower optimizer.learning_rate or clip_norm, look at the data of this step"
                f"{'' if self.skips else ', or set optimizer.bad_steps=skip'}"
            )
        if (seconds := self.goodput.step(counts=not left_out)) is not None:
            self._times.append(seconds)
        self.bar.add()
        if left_out:
            self.skipped += 1
        else:
            self.labels += float(metrics.count)
            self.sum = metrics if self.sum is None else jax.tree.map(np.add, self.sum, metrics)
            self.steps += 1
        if close or step % self.every == 0:
            if self.steps and self.labels == 0 and more is None:
                raise ValueError(
                    f"no labelled step in {self.steps} updates: data.supervise and target leave every step of the data"
                    " without a label; `outcome` needs records with `correct`"
                )
            now = time.perf_counter()
            means = {} if self.sum is None else self._means(self.sum, metrics, now - self.since)
            skips = {"skipped_steps": self.skipped} if self.skips else {}
            self.write({"step": step, **(more or {}), **means, **skips})
            self.sum, self.steps, self.skipped, self.since, self._times = None, 0, 0, now, []

    def write_losses(self, step: int, report: PackReport, pairs: bool) -> None:
        """Writes what the packer lost since training began, if anything: labels, and pairs where they are compared."""
        lost = {"truncated_labels": report.truncated_labelled, "pairs_lost": report.pairs_lost if pairs else 0}
        if any(lost.values()):
            self.write({"step": step, **{name: count for name, count in lost.items() if count}})

    def write(self, values: dict[str, Any]) -> None:
        self.last |= values
        for callback in self.callbacks:
            callback(values)
        if self.lines is None:
            return
        self.lines.add(values)
        if self.trackers:
            self.trackers.log(values)
        note = " ".join(
            f"{k} {v:.4g}"
            for k, v in values.items()
            if k in ("loss", "auroc", "valid_auroc", "tokens_per_second", "reward", "proxy", "gold", "pairs_lost")
            and v is not None
        )
        self.bar.add(0, note)
        if not self.bar.console.is_terminal:  # a log file gets lines
            print(json.dumps(values), flush=True)

    def flush(self) -> None:
        """Returns when all lines are in the run's folder."""
        if self.lines is not None:
            self.lines.flush()

    def _means(self, total: Metrics, newest: Metrics, seconds: float) -> dict[str, float | None]:
        return {
            **total.means(),
            "learning_rate": float(newest.learning_rate),
            "gradient_norm": float(total.gradient_norm) / self.steps,
            "labels": float(total.count),
            "labels_per_second": float(total.count) / seconds,
            "tokens_per_second": float(total.tokens) / seconds,
            "seconds": seconds,
            **self._step_seconds(),
            **self._utilisation(float(total.tokens)),
            **self.goodput.fractions(),
        }

    def _step_seconds(self) -> dict[str, float]:
        """Returns the median, the 95th percentile and the longest time of the line's steps."""
        if not self._times:
            return {}
        names = ("step_seconds_p50", "step_seconds_p95", "step_seconds_max")
        return dict(zip(names, np.percentile(self._times, (50, 95, 100)).tolist(), strict=True))

    def _utilisation(self, tokens: float) -> dict[str, float]:
        """Returns `mfu`: the model's FLOPs for the real tokens over what the devices could do in the steps' time.

        Where rows hold trees it is an upper estimate: their attention has fewer pairs than that of a row-long chain.
        """
        if self._least_seconds is None or not self._times:
            return {}
        filled = tokens / (self.steps * self._cells)
        return {"mfu": filled * self._least_seconds / float(np.mean(self._times))}


# ------------------------------------------------------------------------------------------------------------- the loop


def train(experiment: Experiment, workdir: str | os.PathLike, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Trains to `experiment.steps`, from the newest checkpoint in `workdir` if there is one.

    Returns the last metrics, which are also written to `result.json`. Every callback is called, in every process, with
    each line of `metrics.jsonl` as a dict.

    Raises:
        ValueError: `workdir` holds another experiment's run.
        Diverged: the loss is not finite, or `optimizer` calls the step bad; names the last good checkpoint.
        Stopped: after SIGTERM, when the state is saved.
    """
    workdir, begun, first_began = path_of(workdir), time.perf_counter(), time.time()
    with (
        stop_signal() as asked_to_stop,
        Watchdog(workdir, experiment.stall_seconds, experiment.stall_action) as watchdog,
        Trainer(experiment, workdir) as trainer,
    ):
        experiment, start, least = trainer.experiment, int(trainer.state.step), least_seconds(trainer)
        with (
            Log(workdir, experiment, start, trainer.goodput, callbacks, least) as log,
            Profile(workdir, experiment.profile) as profile,
        ):
            trainer.goodput.began = min(trainer.goodput.began, first_began)
            trainer.goodput.add("starting", time.perf_counter() - begun)
            stopped = _steps(trainer, log, watchdog, profile, asked_to_stop)
            assert trainer.checkpoints is not None  # this trainer has a folder
            trainer.checkpoints.wait()
        done = int(trainer.state.step)
        if stopped and done < experiment.steps:
            raise Stopped(f"SIGTERM: saved at step {done} of {experiment.steps}; the same command continues")
    result = {**log.last, "step": done}
    if multihost.is_first():
        atomic_write(workdir / "result.json", json.dumps(result, indent=2) + "\n")
    return result


def least_seconds(trainer: Trainer) -> float | None:
    """Returns the seconds that an update would take at the devices' published rate; None where that is unknown."""
    data, rate = trainer.experiment.data, peak(jax.devices()[0].device_kind)
    if rate is None:
        return None
    flops = model_flops(trainer.experiment.model, tuple(trainer.state.trained), data.rows, data.tokens, data.slots)
    return flops / (rate * jax.device_count())


def _steps(
    trainer: Trainer, log: Log, watchdog: Watchdog, profile: Profile, asked_to_stop: Callable[[int], bool]
) -> bool:
    """Trains to the last step; returns whether it was asked to stop."""
    experiment, batches = trainer.experiment, trainer.batches
    goodput, first = trainer.goodput, True
    pending: tuple[int, Metrics] | None = None  # read one step late, so that the device never waits for the host
    for done in range(int(trainer.state.step) + 1, experiment.steps + 1):
        watchdog.at(done, "data")
        profile.before(done)
        asked = time.perf_counter()
        rows = next(batches)
        if pending and cast(Any, pending[1].loss).is_ready():  # the devices had nothing left to do
            goodput.add("input", time.perf_counter() - asked)
        watchdog.at(done, "step")
        with goodput.doing("compiling") if first else contextlib.nullcontext():
            metrics = trainer.step(rows)
        first = False
        profile.after(done, metrics)
        if pending:
            log.add(*pending, trainer.checkpoints)
        pending = (done, metrics)
        end, stop = done == experiment.steps, asked_to_stop(done)
        save = end or stop or done % experiment.checkpoint_every == 0
        due = experiment.valid_every > 0 and done % experiment.valid_every == 0
        validate = bool(experiment.data.valid) and (end or due)
        local = trainer.local is not None and done % experiment.local_every == 0 and not save
        if save or validate or local:
            log.add(*pending, trainer.checkpoints, close=save or local)  # a step that has diverged is never saved
            pending = None
        if validate:
            watchdog.at(done, "validation")
            with goodput.doing("validating"):
                log.write({"step": done, **trainer.evaluate()})
        if save:
            watchdog.at(done, "checkpoint")
            with goodput.doing("saving"):
                log.write_losses(done, trainer.batches.report, getattr(trainer.objective, "pairs", False))
                log.flush()  # a run that continues from the checkpoint does not log these steps again
                trainer.save()
        elif local:
            watchdog.at(done, "checkpoint")
            with goodput.doing("saving"):
                log.flush()
                trainer.save_local()
        if save or validate or local:
            goodput.rest()
        if stop:
            return True
    return False


class Stopped(Exception):
    """The run received SIGTERM, saved its state and ended before its last step."""


@contextlib.contextmanager
def stop_signal() -> Iterator[Callable[[int], bool]]:
    """Yields a function to call after steps with the last one's number. It returns whether to save now and stop.

    It returns True after SIGTERM, which schedulers send before a preemption. If one of several processes receives it,
    jax makes all of them stop at the next step that none has passed.
    """
    if jax.distributed.is_initialized():
        yield _agreed()
        return
    asked = threading.Event()
    main = threading.current_thread() is threading.main_thread()  # only the main thread may set a handler
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set()) if main else None
    try:
        yield lambda step: asked.is_set()
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


def _agreed() -> Callable[[int], bool]:
    """Returns the function of `stop_signal` on which jax's processes agree."""
    last: int | None = None

    def reached(step: int) -> bool:
        # jax agrees on the number after the latest of all processes' calls, which is 0 before the first. Orbax calls
        # too, with the steps that it saves.
        nonlocal last
        numbers = (1, step) if last is None else range(last + 1, step + 1)
        last = step
        return any([multihost_utils.reached_preemption_sync_point(number) for number in numbers])

    return reached
