"""Training: a run and its loop. The other chapters are `state`, `batches` and `callbacks`.

    with jprm.Trainer(experiment, "runs/mine") as trainer:
        for rows in itertools.islice(trainer.batches, 100):
            metrics = trainer.step(rows)
        print(metrics.means(), trainer.evaluate())
        trainer.save()

`train` is this with a log, checkpoints at intervals, a stop on SIGTERM and a watchdog. Every process in a run must make
the same calls on the same batches; each computes its devices' rows, and process 0 writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils

from jprm import multihost, objectives
from jprm.checkpoints import store
from jprm.experiment import ID, RUN, Experiment, ObjectiveConfig, read, to_json
from jprm.io.folders import folder_lock
from jprm.io.outputs import atomic_write
from jprm.io.storage import Place, mark_own, path_of
from jprm.model.mesh import check_mesh, gathered, make_mesh, put_rows
from jprm.model.parameters import model_flops, peak
from jprm.model.transformer import check_model
from jprm.objectives import Judged, Objective, divisor, means, prefixed
from jprm.rows import Rows
from jprm.tokenizer import load_tokenizer
from jprm.train.batches import Streams, check_rows, check_supervision, micro_batches, own_batches, unstacked
from jprm.train.callbacks import Callback, Goodput, Log, Profile, Watchdog, changed_compiler, versions
from jprm.train.state import (
    Metrics,
    State,
    continued,
    initial_state,
    make_optimizer,
    make_step,
    models,
    reference_params,
    restored,
    saved_arrays,
    schedule,
    skipped,
    with_fitted_head,
)


class Position(Protocol):
    """A position in a run's data, with a JSON state."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


class Trainer:
    """Trains one experiment. Leaving its `with` block waits for checkpoints and releases the folder. Every process of
    a run must make the same calls.

    Args:
        workdir: the run's folder, local or in a bucket, made if absent; experiment.json, digests and the tokenizer are
            written to it. Training continues from its newest checkpoint. `None`: nothing is saved, and the experiment's
            data are read only by `batches`.
        objective: replaces `experiment.objective` and takes the same options. The run records its module and name, and
            continues only with an objective by that name.
        position: replaces the position in the data in checkpoints, for a caller that makes the rows itself.

    Raises ValueError if the experiment's parts do not fit together, the folder holds another experiment's run, or
    another process trains in it; FileNotFoundError or ValueError if a file of data, tokenizer or base is missing or
    damaged; OSError if a model at `hf://` cannot be downloaded.
    """

    def __init__(
        self, experiment: Experiment, workdir: str | os.PathLike | None = None, *, objective: Objective | None = None,
        position: Position | None = None,
    ):  # fmt: skip
        self.workdir = path_of(workdir) if workdir is not None else None
        if not (data := experiment.data).streams:
            count = multihost.first(store.stream_count, self.workdir, multihost.count(), data.micro_rows)
            experiment = dataclasses.replace(experiment, data=dataclasses.replace(data, streams=count))
        self.experiment = experiment
        check_supervision(experiment)
        self.mesh = make_mesh(experiment.mesh)
        check_mesh(experiment.model, self.mesh, experiment.data.micro_rows, experiment.data.tokens)
        check_model(experiment.model, context=self.mesh.shape["context"])
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
        self.goodput, self.checkpoints, self._lock = Goodput(), None, None
        try:
            if (folder := self.workdir) is not None:
                # The data first: if a file is missing, nothing is written.
                self.position: Position = position or self.batches  # saved in checkpoints
                self._lock = folder_lock(folder)
                while not multihost.first(self._lock.attempt):
                    pass
                log_ratio = objectives.log_ratio(self.objective)
                self._id = store.claim(folder, experiment, self.tokenizer, log_ratio)
                if not multihost.everywhere((folder / RUN).is_file()):
                    raise ValueError(f"{workdir}: differs between hosts. Set --workdir to a folder all hosts share")
                mark_own(folder / RUN)  # on every host: each reads the base again that it names
                self.checkpoints = store.open_checkpoints(folder, experiment.keep, experiment.keep_every)
            with jax.set_mesh(self.mesh):
                self.state = self._start()
            self._calls = int(self.state.step)  # calls of `step`, so that `step` need not wait for the device
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.checkpoints is not None:
                self.checkpoints.close()
        finally:
            if self._lock is not None:
                self._lock.release()

    @functools.cached_property
    def batches(self) -> Streams:
        """Endless batches of `data.train` from the checkpoint's position: A x B = `rows`, B = `micro_rows`.

        The same iterator at each access. Errors are those of `own_batches`.
        """
        return own_batches(self.experiment, self.experiment.data.train, self.mesh, self.tokenizer)

    @property
    def params(self) -> dict[str, Any]:
        """The model's nested parameters, e.g. `{"decoder", "head"}`, adapters merged; copy them before the next `step`,
        which may overwrite their memory."""
        return self._models()["model"]

    def step(self, rows: Rows) -> Metrics:
        """Updates the parameters on host rows (A, B, ...), or (A x data.micro_rows, ...), B over all processes.

        Returns metrics the device may still be computing; reading a number waits for it. A new shape compiles first. If
        the loss or gradient is not finite, no parameter changes (`Metrics.skipped` counts only a guard's skips).

        Raises ValueError if the model cannot take the rows, naming the field; or after a decaying schedule's last step.
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
        """Raises ValueError if the next update's rate would be 0."""
        optimizer, steps = self.experiment.optimizer, self.experiment.steps
        if optimizer.decay == "constant" or self._calls < steps:
            return
        if int(self.state.step) - int(skipped(self.state.optimizer)) >= steps:
            reason = f"all {steps} steps are done, and optimizer.decay={optimizer.decay!r} has taken the rate to 0"
            raise ValueError(f"{reason}: make the Trainer with more `steps`, or with decay='constant'")

    def evaluate(self, files: Sequence[str] = ()) -> dict[str, float | None]:
        """Returns `valid_loss`, `valid_labels` (their count) and metrics over files (default: `data.valid`), e.g.
        `valid_auroc` (`None` if labels are all alike). Raises ValueError if there is no file or no row, and as
        `own_batches`."""
        if not (files := files or self.experiment.data.valid):
            raise ValueError("data.valid names no file: pass files to evaluate, e.g. trainer.evaluate(['valid.jsonl'])")
        batches = own_batches(self.experiment, files, self.mesh, self.tokenizer, once=True)
        micro = itertools.chain.from_iterable(map(unstacked, batches))
        with jax.set_mesh(self.mesh):
            values = measured(self.objective, self._models(), micro, self.experiment.task)
        return {f"valid_{name}": value for name, value in values.items()}

    def measure(self, rows: Rows, objective: Objective) -> dict[str, float | None]:
        """Returns `loss` (per label), `labels` (their count) and the objective's metrics on rows (A, B, ...).

        `loss` is 0 without labels, a metric `None` if undefined. Raises ValueError if A is 0 or rows do not fit.
        """
        with jax.set_mesh(self.mesh):
            return measured(objective, self._models(), unstacked(rows), self.experiment.task)

    def take(self, folder: str | os.PathLike) -> int:
        """Loads the trained parameters, not the optimizer state, from a run's newest checkpoint; returns its step.

        Shapes are unchecked. Raises FileNotFoundError if `folder` is no run, ValueError if it has no checkpoint or a
        damaged one, KeyError if it lacks a trained parameter.
        """
        experiment = read(path_of(folder) / RUN)
        with jax.set_mesh(self.mesh):
            params, step = store.load_params(folder, experiment, self.mesh)
        flat = flatten_dict(params, sep="/")
        self.state = dataclasses.replace(self.state, trained={path: flat[path] for path in self.state.trained})
        return step

    def save(self) -> None:
        """Saves a checkpoint in the background, in place of the step's earlier one; old ones go as `experiment.keep`.

        The next `save`, and closing the trainer, wait for it. Raises ValueError if there is no workdir.
        """
        if self.checkpoints is None:
            raise ValueError("this trainer has no folder; make it with Trainer(experiment, workdir)")
        step, arrays = int(self.state.step), saved_arrays(self.state, self.experiment)
        data, experiment = self.position.get_state(), to_json(self.experiment)
        run = {ID: self._id, "data": data, "experiment": experiment, "versions": versions()}
        run["goodput"] = self.goodput.saved
        with jax.set_mesh(self.mesh):
            self.checkpoints.save_checkpointables_async(step, store.savable({**arrays, "run": run}), overwrite=True)

    def _models(self) -> dict[str, Any]:
        with jax.set_mesh(self.mesh):
            return models(self.state.params, self.state.reference, self.experiment.task)

    def _start(self) -> State:
        """Returns the newest checkpoint's state, or the initial one."""
        checkpoints = self.checkpoints
        latest = checkpoints.latest if checkpoints is not None else None
        state = initial_state(self.experiment, load_base=latest is None or self.experiment.rereads)
        if checkpoints is not None and latest is not None:
            state = self._continued(state, *restored(checkpoints, state, self.experiment), latest.step)
            if multihost.is_first():
                print(f"continuing from step {int(state.step)} in {self.workdir}")
        elif self.experiment.probe_rows:
            state = with_fitted_head(self.experiment, state, self.tokenizer)
        if self.experiment.task.reference:
            state = dataclasses.replace(state, reference=reference_params(self.experiment))
        return state

    def _continued(self, state: State, arrays: dict[str, Any], run: dict[str, Any], step: int) -> State:
        """Returns the checkpoint's state; restores the data position and the times from `run`."""
        if multihost.is_first() and (sentence := changed_compiler(run.get("versions", {}))):
            print(f"warning: {sentence}", file=sys.stderr, flush=True)
        self.position.set_state(run["data"])
        self.goodput = Goodput(**run["goodput"])
        return continued(state, arrays, step)


def _recording(objective: Objective, experiment: Experiment, workdir: Place | None) -> Experiment:
    """Sets the experiment's objective name and options to this objective's, unless they already find it."""
    with contextlib.suppress(ValueError):
        if objectives.find(experiment.objective, experiment.objective_options, workdir) == objective:
            return experiment
    name, options = objectives.recorded(objective)
    return dataclasses.replace(experiment, objective=name, objective_options=options)


def measured(
    objective: Objective, params: dict[str, Any], micro: Iterable[Rows], config: ObjectiveConfig
) -> dict[str, float | None]:
    """Returns `loss` (per label; 0 without labels), `labels` (their count) and metrics (`None` if undefined).

    `params` are of `state.models`, on the current mesh. Raises ValueError without micro-batches, or as `check_rows`.
    """
    mesh, sums = jax.sharding.get_mesh(), []
    for rows in micro:
        check_rows(rows, config.model.vocab_size)
        arguments = objective, params, put_rows(rows, mesh), config
        if not sums:
            multihost.compile_together(_evaluate, *arguments)
        sums.append(_evaluate(*arguments))
        jax.block_until_ready(sums[-2:][0])  # at most one micro-batch waits for the devices
    if not sums:
        raise ValueError("there are no rows to measure the objective on: the files hold no record that fits a row")
    losses, counts, metrics = zip(*gathered(sums), strict=True)
    count = float(np.sum(counts, dtype=np.float64))
    values: dict[str, float | None] = {"loss": float(np.sum(losses, dtype=np.float64)) / divisor(count)}
    for name in metrics[0]:
        parts = [part[name] for part in metrics]
        if isinstance(parts[0], Judged):
            judged = jax.tree.map(lambda *xs: np.concatenate([x.ravel() for x in xs]), *parts)
            values |= prefixed(metrics[0], name, _judgement(judged))
        else:
            total = jax.tree.map(lambda *xs: np.sum(xs, dtype=np.float64), *parts)
            values |= means({name: total}, count)
    return {**values, "labels": count}


def _judgement(judged: Judged) -> dict[str, float | None]:
    from jprm.statistics import auroc, jsonable  # only of validation

    score_N, positive_N = np.asarray(judged.score_BS), np.asarray(judged.positive_BS)
    weight_N = np.asarray(judged.weight_BS, np.float64)
    right = np.sum(weight_N * ((score_N > 0.5) == positive_N))
    area = jsonable(auroc(score_N, positive_N, weight_N))
    return {"step_accuracy": float(right / divisor(weight_N.sum())), "auroc": area}


@functools.partial(jax.jit, static_argnums=(0, 3))
def _evaluate(objective: Objective, params: dict[str, Any], rows: Rows, config: ObjectiveConfig):
    return objective(params, rows, config)


# ------------------------------------------------------------------------------------------------------------- the loop


def train(experiment: Experiment, workdir: str | os.PathLike, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Trains to `experiment.steps`, from the newest checkpoint in `workdir` if there is one.

    Returns the last value of each metric in `metrics.jsonl` (process 0: also earlier starts), and `step`, also written
    to `result.json`. Every process calls every callback with each new line of `metrics.jsonl` as a dict. If all steps
    are done, it trains none.

    Raises:
        ValueError, FileNotFoundError, OSError: as `Trainer`, and ValueError for data without labels or a bad tracker.
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
            contextlib.closing(Profile(workdir, experiment.profile)) as profile,
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
    """Returns the seconds per update of full rows at all devices' peak bfloat16 rate, or `None` if it is unknown."""
    data, rate = trainer.experiment.data, peak(jax.devices()[0].device_kind)
    if rate is None:
        return None
    flops = model_flops(trainer.experiment.model, tuple(trainer.state.trained), data.rows, data.tokens, data.slots)
    return flops / (rate * jax.device_count())


def _steps(trainer: Trainer, log: Log, watchdog: Watchdog, profile: Profile, to_stop: Callable[[int], bool]) -> bool:
    """Trains to the last step; returns whether it was stopped."""
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
        end, stop = done == experiment.steps, to_stop(done)
        save = end or stop or done % experiment.checkpoint_every == 0
        due = experiment.valid_every > 0 and done % experiment.valid_every == 0
        validate = bool(experiment.data.valid) and (end or due)
        if save or validate:
            log.add(*pending, trainer.checkpoints, close=save)  # a step that has diverged is never saved
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
        if save or validate:
            goodput.rest()
        if stop:
            return True
    return False


class Stopped(Exception):
    """The run received SIGTERM, saved its state and ended before its last step."""


@contextlib.contextmanager
def stop_signal() -> Iterator[Callable[[int], bool]]:
    """Yields a function to call after each step with its number; it returns whether to save and stop now.

    It returns `True` after SIGTERM, which schedulers send before a preemption. If one process receives it, jax makes
    all of them stop at the next common step. The earlier handler returns at the end. A thread other than the main one
    cannot receive it: without `jax.distributed` the function then returns `False`.
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
    """Returns the function of `stop_signal` for several processes, on which they agree."""
    last: int | None = None

    def reached(step: int) -> bool:
        # jax agrees on the number after the latest of all processes' calls, which is 0 before the first. Orbax calls
        # too, with the steps that it saves.
        nonlocal last
        numbers = (1, step) if last is None else range(last + 1, step + 1)
        last = step
        return any([multihost_utils.reached_preemption_sync_point(number) for number in numbers])

    return reached
