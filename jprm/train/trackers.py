"""Where a run's metrics go beside `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow, or a tracker of the user's.

A tracker is a function in `TRACKERS`, or the user's own as `module:NAME`, from a `TrackedRun` to a `Tracker`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from flax.traverse_util import flatten_dict

from jprm import registry
from jprm.io.outputs import atomic_file
from jprm.io.storage import Place, is_remote

IDS = "trackers.json"
"""The file in a run's folder that holds each tracker's id of the run."""

Status = Literal["finished", "stopped", "failed"]


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """What a tracker learns of a run.

    config: {"experiment": its configuration, "versions": those of the libraries, and jprm's git commit}, of JSON.
    step: the step from which training continues. A tracker may have seen later steps, which are logged again.
    id: `Tracker.id` of the same run when it was started first; empty for a new run.
    """

    folder: Place
    name: str
    config: Mapping[str, Any]
    step: int
    id: str


class Tracker(Protocol):
    """Takes the metrics of one run. An exception of `log` or `close` ends the tracker, not the run."""

    id: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the numbers of one line of `metrics.jsonl`; a step may have several lines."""
        ...

    def close(self, status: Status) -> None: ...


class TensorBoard:
    """Curves in the folder `tensorboard` of the run."""

    id = ""

    def __init__(self, run: TrackedRun):
        tensorboard = importlib.import_module("tensorboardX")
        again = {"purge_step": run.step + 1} if run.step else {}
        self._writer = tensorboard.SummaryWriter(str(run.folder / "tensorboard"), **again)
        self._writer.add_text("config", f"```json\n{json.dumps(run.config, indent=2)}\n```", run.step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, status: Status) -> None:
        self._writer.close()


class WandB:
    """A run of the project in WANDB_PROJECT, `jprm` by default. wandb's environment variables hold, as WANDB_MODE."""

    def __init__(self, run: TrackedRun):
        wandb = importlib.import_module("wandb")
        project = os.environ.get("WANDB_PROJECT", "jprm")
        place = {} if is_remote(run.folder) else {"dir": str(run.folder)}  # wandb's own files, on this machine
        self._run = wandb.init(project=project, name=run.name, id=run.id or None, resume="allow", **place)
        self._run.config.update(dict(run.config), allow_val_change=True)
        self.id = self._run.id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, status: Status) -> None:
        self._run.finish(exit_code=int(status == "failed"))


class MLflow:
    """A run of the MLflow experiment in MLFLOW_EXPERIMENT_NAME, `jprm` by default, at MLFLOW_TRACKING_URI."""

    def __init__(self, run: TrackedRun):
        mlflow = importlib.import_module("mlflow")
        self._client, self._metric = mlflow.MlflowClient(), mlflow.entities.Metric
        if run.id:
            self._client.update_run(run.id, status="RUNNING")
            self.id = run.id
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "jprm")
        there = self._client.get_experiment_by_name(name)
        experiment = there.experiment_id if there else self._client.create_experiment(name)
        commit = run.config["versions"]["commit"]
        tags = {"mlflow.source.git.commit": commit} if commit else {}
        self.id = self._client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
        for key, value in flatten_dict(run.config, sep=".").items():
            self._client.log_param(self.id, key, str(value)[:6000])  # MLflow's limit

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self.id, [self._metric(name, value, now, step) for name, value in values.items()])

    def close(self, status: Status) -> None:
        self._client.set_terminated(self.id, {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[status])


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
"""The trackers by name. Each needs the extra of its name."""


class Trackers:
    """The trackers of one run, opened; each continues its own run where `folder` knows of one.

    Raises:
        ValueError: an unknown tracker, or one whose package is not installed.
    """

    def __init__(self, names: Sequence[str], folder: Place, name: str, config: Mapping[str, Any], step: int):
        makers = {key: registry.find(key, TRACKERS, "trackers") for key in names}
        if wrong := [key for key, make in makers.items() if not callable(make)]:
            raise ValueError(f"trackers={wrong[0]!r} is not a function from a TrackedRun to a Tracker")
        path = folder / IDS
        ids = json.loads(path.read_text()) if path.is_file() else {}
        self._open: dict[str, Tracker] = {}
        for key, make in makers.items():
            try:
                self._open[key] = make(TrackedRun(folder, name, config, step, ids.get(key, "")))
            except ModuleNotFoundError as error:
                hint = f"pip install 'jprm[{key}]'" if key in TRACKERS else "install it"
                raise ValueError(f"trackers={key!r} needs {error.name}, which is not installed: {hint}") from error
        if new := {key: tracker.id for key, tracker in self._open.items() if tracker.id}:
            with atomic_file(path) as file:
                file.write((json.dumps(ids | new, indent=2) + "\n").encode())

    def log(self, values: Mapping[str, Any]) -> None:
        """Gives every tracker the numbers of a line of `metrics.jsonl`."""
        numbers = {
            name: value for name, value in values.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        }  # fmt: skip
        for key, tracker in list(self._open.items()):
            self._guarded(key, lambda tracker=tracker: tracker.log(values["step"], numbers))

    def close(self, status: Status) -> None:
        for key, tracker in list(self._open.items()):
            self._guarded(key, lambda tracker=tracker: tracker.close(status))

    def _guarded(self, key: str, call: Callable[[], None]) -> None:
        """Calls a tracker. Its errors, of any class, must not cost the run: it is left out from then on."""
        try:
            call()
        except Exception as error:
            self._open.pop(key)
            print(f"tracker {key}: {type(error).__name__}: {error}; the run goes on without it, in metrics.jsonl")
