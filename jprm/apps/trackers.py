"""Trackers for a run's metrics (`jprm.train.callbacks`): TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Mapping

from flax.traverse_util import flatten_dict

from jprm.io.storage import is_remote
from jprm.train.callbacks import Status, TrackedRun


class TensorBoard:
    """Curves in the run's folder `tensorboard`."""

    id = ""

    def __init__(self, run: TrackedRun):
        tensorboard = importlib.import_module("tensorboardX")
        again = {"purge_step": run.step + 1} if run.step else {}
        self._writer = tensorboard.SummaryWriter(str(run.folder / "tensorboard"), **again)
        self._writer.add_text("config", f"```json\n{json.dumps(run.config, indent=2)}\n```", run.step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a run that is killed logs no step before its checkpoint again

    def close(self, status: Status) -> None:
        self._writer.close()


class WandB:
    """A run in the project WANDB_PROJECT, `jprm` by default. wandb's environment variables hold, as WANDB_MODE."""

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
    """A run in the MLflow experiment MLFLOW_EXPERIMENT_NAME, `jprm` by default, at MLFLOW_TRACKING_URI."""

    def __init__(self, run: TrackedRun):
        mlflow = importlib.import_module("mlflow")
        self._client, self._metric = mlflow.MlflowClient(), mlflow.entities.Metric
        if run.id:
            self._client.update_run(run.id, status="RUNNING")
            self.id = run.id
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "jprm")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
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
