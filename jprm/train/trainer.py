"""`Trainer`: one experiment as an object. Builds the model, steps on rows, evaluates and saves.

    with jprm.Trainer(experiment, "runs/mine") as trainer:
        for rows in itertools.islice(trainer.batches, 100):
            metrics = trainer.step(rows)
        print(metrics.means(), trainer.evaluate())
        trainer.save()

`jprm.train.loop.train` is this with logging, signals and a watchdog. Every process of a run makes the same calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jprm import multihost, objectives
from jprm.checkpoints import store
from jprm.checkpoints.kinds import RUN
from jprm.data.streams import Streams
from jprm.experiment import Experiment, ObjectiveConfig, OptimizerConfig, from_json, to_json
from jprm.io.folder_lock import folder_lock
from jprm.io.storage import Place, path_of
from jprm.layout import native_layout
from jprm.model.mesh import check_mesh, gathered, make_mesh, put_rows
from jprm.model.parameters import join, split
from jprm.objectives import Objective
from jprm.objectives.metrics import Judged, divisor, means, names
from jprm.rows import Rows
from jprm.statistics import auroc, jsonable
from jprm.tokenizer import Tokenizer, load_tokenizer
from jprm.train.batches import batches_of, check_rows, check_supervision, micro_batches, training_batches, unstacked
from jprm.train.initial import initial_state, reference_params, with_fitted_head
from jprm.train.optimizer import Guarded, guard, make_optimizer, schedule, skipped
from jprm.train.preemption import Goodput, changed_compiler, versions
from jprm.train.run_folder import claim
from jprm.train.step import Metrics, State, make_step, models


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
        self.experiment, self.workdir = experiment, path_of(workdir) if workdir is not None else None
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
        self.goodput, self.checkpoints, self._lock = Goodput(), None, None
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

    def save(self) -> None:
        """Saves a checkpoint in the run's folder, in the background: closing the trainer waits for it."""
        if self.checkpoints is None:
            raise ValueError("this trainer has no folder; make it with Trainer(experiment, workdir)")
        state, data, experiment = self.state, self.position.get_state(), to_json(self.experiment)
        run = {"data": data, "experiment": experiment, "versions": versions(), "goodput": self.goodput.saved}
        parts = {"params": join(state.trained, state.frozen), "optimizer": state.optimizer, "run": run}
        with jax.set_mesh(self.mesh):
            self.checkpoints.save_checkpointables_async(int(state.step), parts, overwrite=True)

    def _models(self) -> dict[str, Any]:
        with jax.set_mesh(self.mesh):
            return models(self.state.params, self.state.reference, self.experiment.task)

    def _start(self) -> State:
        """Returns the state of the newest checkpoint, or the initial one."""
        checkpoints = self.checkpoints
        latest = checkpoints.latest if checkpoints is not None else None
        state = initial_state(self.experiment, load_base=latest is None)
        if checkpoints is not None and latest is not None:
            state = self._resumed(state, checkpoints, latest.step)
            if multihost.is_first():
                print(f"continuing from step {int(state.step)} in {self.workdir}")
        elif self.experiment.probe_rows:
            state = with_fitted_head(self.experiment, state, self.tokenizer)
        return State(state.step, state.trained, state.frozen, state.optimizer, reference_params(self.experiment))

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
        trained, frozen = {}, {}
        for path, value in split(loaded["params"], "")[0].items():
            (trained if path in state.trained else frozen)[path] = value
        if multihost.is_first() and (sentence := changed_compiler(run.get("versions", {}))):
            print(f"warning: {sentence}", file=sys.stderr, flush=True)
        self.position.set_state(run["data"])
        self.goodput = Goodput(**run["goodput"])
        return State(jnp.int32(step), trained, frozen, optimizer)


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
    mesh, found = jax.sharding.get_mesh(), []
    for rows in micro:
        check_rows(rows, config.model.vocab_size)
        arguments = objective, params, put_rows(rows, mesh), config
        if not found:
            multihost.compile_together(_evaluate, *arguments)
        found.append(gathered(_evaluate(*arguments)))
    if not found:
        raise ValueError("there are no rows to measure the objective on: the files hold no record that fits a row")
    losses, counts, metrics = zip(*found, strict=True)
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
