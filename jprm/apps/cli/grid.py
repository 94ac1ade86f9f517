"""A grid of runs: one experiment file, and several values for some of its fields.

The runs follow each other in one process. What jax has compiled for one serves the others whose shapes and code agree:
a learning rate, a seed or a number of steps compiles nothing anew.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Sequence

from jprm import multihost
from jprm.checkpoints.kinds import RUN
from jprm.experiment import Experiment, load, override, read
from jprm.io.storage import Place, path_of
from jprm.train import Diverged, train, with_streams

Point = tuple[str, ...]
"""The assignments of one run, `a.b=value` each."""

_OPEN, _CLOSE = "([{", ")]}"


def grid(settings: Sequence[str]) -> dict[str, Point]:
    """Returns the runs of a grid: the name of each one's folder, and all its assignments.

    A setting is `a.b=value` or `a.b=value,value,...`; commas in brackets and in double quotes separate nothing. A name
    holds the settings with several values, in the order given.

    Raises ValueError for a setting without values, or where no setting has several.
    """
    axes = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        values = _values(text)
        if not equals or not key or not all(values):
            raise ValueError(f"--set {setting!r}: not of the form a.b=value,value,...")
        axes.append([f"{key}={value}" for value in values])
    if all(len(axis) == 1 for axis in axes):
        raise ValueError("--set gives no field several values: write a.b=value,value,..., or use `jprm train`")
    points = {}
    for point in itertools.product(*axes):
        varied = [one for one, axis in zip(point, axes, strict=True) if len(axis) > 1]
        points[re.sub(r"[^\w.,=+-]", "_", ",".join(varied))] = point
    if len(points) < len(list(itertools.product(*axes))):
        raise ValueError("--set: two values differ only in characters that a folder's name does not hold; rename one")
    return points


def _values(text: str) -> list[str]:
    values, depth, quoted = [""], 0, False
    for letter in text:
        quoted ^= letter == '"'
        depth += 0 if quoted else (letter in _OPEN) - (letter in _CLOSE)
        if letter == "," and depth == 0 and not quoted:
            values.append("")
        else:
            values[-1] += letter
    return values


def sweep(
    path: str | os.PathLike,
    settings: Sequence[str],
    workdir: str | os.PathLike,
    tell: Callable[[str], None] = lambda line: None,
) -> tuple[list[Place], list[str]]:
    """Runs the grid of an experiment file, each run in a folder of `workdir`; returns the folders and what diverged.

    A call that was stopped continues: finished runs are left as they are. A run whose loss is not finite does not end
    the others. `tell` receives a line for every run.

    Raises:
      ValueError: as `grid` and `train`. All experiments are made before the first one runs.
      Stopped: after SIGTERM, when the state of the current run is saved.
    """
    base, workdir = load(path), path_of(workdir)
    runs = {name: override(base, point) for name, point in grid(settings).items()}
    diverged = []
    for i, (name, experiment) in enumerate(runs.items(), start=1):
        folder = workdir / name
        done = multihost.first(lambda folder=folder, experiment=experiment: finished(folder, experiment))
        tell(f"{i} of {len(runs)}: {name}{': finished before' if done else ''}")
        if not done:
            try:
                train(experiment, folder)
            except Diverged as error:
                diverged.append(f"{name}: {error}")
                tell(f"diverged: {diverged[-1]}")
    return [workdir / name for name in runs], diverged


def finished(folder: Place, experiment: Experiment) -> bool:
    """Returns whether the folder holds this experiment's run, trained to its last step."""
    result = folder / "result.json"
    if not result.is_file() or not (folder / RUN).is_file():
        return False
    done = json.loads(result.read_bytes())["step"] >= experiment.steps
    return done and read(folder / RUN) == with_streams(experiment, path_of(folder))
