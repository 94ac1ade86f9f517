"""`train`: a `Trainer` with a log, checkpoints at intervals, a stop on SIGTERM and a watchdog.

Every process runs this loop on the same batches and computes its devices' rows; process 0 writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from jprm import multihost
from jprm.experiment import Experiment
from jprm.io.outputs import atomic_file
from jprm.io.storage import path_of
from jprm.train.log import Callback, Log
from jprm.train.preemption import Stopped, Watchdog, stop_signal
from jprm.train.profile import Profile
from jprm.train.step import Metrics
from jprm.train.trainer import Trainer


def train(experiment: Experiment, workdir: str | os.PathLike, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Trains to `experiment.steps`, from the newest checkpoint in `workdir` if there is one.

    Returns the last metrics, which are also written to `result.json`. Every callback is called, in every process, with
    each line of `metrics.jsonl` as a dict.

    Raises:
        ValueError: `workdir` holds another experiment's run.
        Diverged: the loss is not finite, or `optimizer` calls the step bad; names the last good checkpoint.
        Stopped: after SIGTERM, when the state is saved.
    """
    workdir = path_of(workdir)
    with (
        stop_signal() as asked_to_stop,
        Watchdog(workdir, experiment.stall_seconds) as watchdog,
        Trainer(experiment, workdir) as trainer,
    ):
        with (
            Log(workdir, experiment, int(trainer.state.step), trainer.goodput, callbacks) as log,
            Profile(workdir, experiment.profile) as profile,
        ):
            stopped = _steps(trainer, log, watchdog, profile, asked_to_stop)
            assert trainer.checkpoints is not None  # this trainer has a folder
            trainer.checkpoints.wait()
        done = int(trainer.state.step)
        if stopped and done < experiment.steps:
            raise Stopped(f"SIGTERM: saved at step {done} of {experiment.steps}; the same command continues")
    result = {**log.last, "step": done}
    if multihost.is_first():
        with atomic_file(workdir / "result.json") as file:
            file.write((json.dumps(result, indent=2) + "\n").encode())
    return result


def _steps(
    trainer: Trainer, log: Log, watchdog: Watchdog, profile: Profile, asked_to_stop: Callable[[int], bool]
) -> bool:
    """Trains to the last step; returns whether it was asked to stop."""
    experiment, batches = trainer.experiment, trainer.batches
    pending: tuple[int, Metrics] | None = None  # read one step late, so that the device never waits for the host
    for done in range(int(trainer.state.step) + 1, experiment.steps + 1):
        watchdog.at(done, "data")
        profile.before(done)
        rows = next(batches)
        watchdog.at(done, "step")
        metrics = trainer.step(rows)
        profile.after(done, metrics)
        if pending:
            log.add(*pending, trainer.checkpoints)
        pending = (done, metrics)
        end, stop = done == experiment.steps, asked_to_stop(done)
        save = end or stop or done % experiment.checkpoint_every == 0
        due = experiment.valid_every > 0 and done % experiment.valid_every == 0
        validate = bool(experiment.data.valid) and (end or due)
        if save or validate:
            log.add(*pending, trainer.checkpoints, close=save)  # a step that has diverged is never saved
            pending = None
        if validate:
            watchdog.at(done, "validation")
            log.write({"step": done, **trainer.evaluate()})
        if save:
            watchdog.at(done, "checkpoint")
            log.write_losses(done, trainer.batches.report, getattr(trainer.objective, "pairs", False))
            log.flush()  # a run that continues from the checkpoint does not log these steps again
            trainer.save()
        if save or validate:
            trainer.goodput.rest()
        if stop:
            return True
    return False
