"""Online PRM: the PRM goes on learning from steps of the current policy, labelled by the check of the working.

A PRM knows the mistakes of the policy that its data came from. As the policy moves, it makes others.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from jprm.checkpoints import store
from jprm.checkpoints.kinds import RUN, kind_of
from jprm.experiment import Experiment, read
from jprm.jsonl import write_records
from jprm.rl.config import RLExperiment
from jprm.rl.rollout import Group
from jprm.rl.verifiers import Working
from jprm.statistics import auroc
from jprm.train.trainer import Trainer

FOLDER = "prm"


def check(config: RLExperiment) -> None:
    """Raises ValueError where the PRM cannot go on learning from labels of steps."""
    if kind_of(config.prm) != "run":
        raise ValueError(f"refresh.every={config.refresh.every} trains the PRM on, and {config.prm} is no run of jprm")
    labels = read(pathlib.Path(config.prm) / RUN).target.labels
    if labels == "value":
        raise ValueError(
            f"{config.prm}: predicts values, and refresh labels steps as correct or not: set refresh.every=0"
        )


def labelled(groups: Sequence[Group], working: Working, rating: bool) -> list[dict[str, Any]]:
    """Returns pool records of the groups' chains with a label for each step that can be checked."""
    records = []
    for group in groups:
        samples = []
        for one in group.trajectories:
            labels = [None if x is None else _label(x, rating) for x in working(group.record, one.steps)]
            if one.steps and any(label is not None for label in labels):
                samples.append({"steps": list(one.steps), "labels": labels})
        if samples:
            record = {"problem": group.record["problem"], "samples": samples}
            records.append(record | ({"semantics": "rating"} if rating else {}))
    return records


def _label(right: bool, rating: bool) -> float:
    return float(right) if not rating else 1.0 if right else -1.0


def refreshed(config: RLExperiment, workdir: pathlib.Path, prm: str, groups: Sequence[Group], working: Working,
              update: int) -> pathlib.Path | None:  # fmt: skip
    """Trains the PRM in folder `prm` on an update's steps and returns the new run's folder; None without a label.

    Earlier updates' steps and `refresh.replay` are trained on too. A finished refresh is not computed again.
    """
    folder, experiment = workdir / FOLDER / str(update), read(pathlib.Path(prm) / RUN)
    records = labelled(groups, working, experiment.target.labels == "rating")
    if not records:
        return None
    fresh = [workdir / FOLDER / f"{n}.jsonl" for n in range(config.refresh.every, update, config.refresh.every)]
    file = workdir / FOLDER / f"{update}.jsonl"
    file.parent.mkdir(exist_ok=True)
    write_records(file, records)
    files = (file, *(path for path in fresh if path.is_file()), *map(pathlib.Path, config.refresh.replay))
    experiment = _experiment(config, experiment, prm, tuple(map(str, files)), update)
    with Trainer(experiment, folder) as trainer:
        with jax.set_mesh(trainer.mesh):
            if not int(trainer.state.step):  # the head too: a base gives its decoder alone
                params, _ = store.load_params(prm, read(pathlib.Path(prm) / RUN), trainer.mesh)
                flat = flatten_dict(params, sep="/")
                trained = {path: flat[path] for path in trainer.state.trained}
                trainer.state = dataclasses.replace(trainer.state, trained=trained)
        left = experiment.steps - int(trainer.state.step)
        for rows in itertools.islice(trainer.batches, left):
            trainer.step(rows)
        if left:
            trainer.save()
    return folder


def _experiment(config: RLExperiment, prm: Experiment, folder: str, files: tuple[str, ...], update: int) -> Experiment:
    optimizer = dataclasses.replace(
        prm.optimizer, learning_rate=config.refresh.learning_rate, warmup_steps=0, decay="constant"
    )
    return dataclasses.replace(
        prm, name=f"{config.name}_prm_{update}", base=folder, tokenizer=folder, optimizer=optimizer, probe_rows=0,
        data=dataclasses.replace(prm.data, train=files, valid=(), seed=update), steps=config.refresh.steps,
        checkpoint_every=config.refresh.steps, keep=1, keep_every=0, mesh=config.mesh,
    )  # fmt: skip


def step_auroc(groups: Sequence[Group], scores: Sequence[Sequence[np.ndarray]], working: Working) -> float | None:
    """Returns the AUROC of scores by problem and sample against the check of the working; None without both classes."""
    pairs = [
        (score, right)
        for group, scores_G in zip(groups, scores, strict=True)
        for one, score_P in zip(group.trajectories, scores_G, strict=True)
        for score, right in zip(score_P, working(group.record, one.steps), strict=True)
        if right is not None
    ]
    if len({right for _, right in pairs}) < 2:
        return None
    score_N, right_N = map(np.array, zip(*pairs, strict=True))
    return float(auroc(score_N, right_N))
