"""`jprm runs`, `jprm table`, `jprm sweep` and `jprm report`, which compare runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

from tyro.conf import Positional, arg

from jprm.apps.cli.arguments import Distributed, Folder, Settings, run_of
from jprm.io.storage import Place, path_of

if TYPE_CHECKING:
    from jprm.experiment import Experiment

Json = Annotated[Path | None, arg(name="output", metavar="OUT.json", help_behavior_hint="")]


def runs(folder: Annotated[Positional[tuple[Path, ...]], arg(metavar="DIR ...")], to: Json = None) -> None:
    """Compare runs: their differing settings, and the last value of each metric.

    Prints a table. An existing file OUT.json is replaced.

    For example:
      jprm runs runs/short runs/long
      jprm runs runs/rates --output rates.json

    Args:
        folder: Runs of `jprm train`, finished or not, or folders of runs (e.g. a sweep), local or in a bucket.
        to: File for all differing settings and all metrics; the table shows only some.
    """
    from jprm.apps.report.runs import compare, tables
    from jprm.io.outputs import write_json
    from jprm.methods.evaluate.blocks import show

    comparison = compare(folder)
    if to:
        write_json(to, comparison)
    show(tables(comparison))


def table(
    folder: Annotated[Positional[tuple[Path, ...]], arg(metavar="DIR ...")],
    over: Annotated[tuple[str, ...], arg(metavar="FIELD ...")] = ("seed",),
    format: Literal["text", "csv", "latex", "markdown"] = "text",
) -> None:
    """Print a table for a paper: mean, spread and interval over seeds, and tests between settings.

    Runs that differ only in the fields of --over form one group; all groups are compared with the first. Results of
    `jprm eval suite` are stored per problem: their intervals resample seeds and problems, and differences are paired by
    problem. With a single seed, intervals resample only problems; intervals of training metrics resample only seeds.

    For example:
      jprm table results/seed0 results/seed1 results/seed2
      jprm table results runs --over seed data.seed --format latex > table.tex

    Args:
        folder: Folders from `jprm eval suite` or `jprm train`, or folders containing them. The first folder's group is
            the baseline.
        over: Fields in which the runs of one group may differ.
        format: text for the terminal; csv has all figures with all digits, one per line; latex needs the package
            booktabs.
    """
    from jprm.apps.report.table import as_csv, table_of, tables
    from jprm.methods.evaluate.blocks import as_latex, as_markdown, show

    rows = table_of(folder, over)
    if format == "csv":
        print(as_csv(rows), end="")
    elif format != "text":
        print({"latex": as_latex, "markdown": as_markdown}[format](list(tables(rows))), end="")
    else:
        show(tables(rows))


def sweep(
    experiment: Annotated[Positional[Path], arg(metavar="EXPERIMENT.py")],
    workdir: Folder,
    set_: Settings,
    to: Json = None,
    distributed: Distributed = None,
) -> None:
    """Train an experiment at each point of a settings grid. Rerun to continue a stopped sweep.

    The runs share one process, so runs with equal shapes compile once. Each run has a folder in DIR, named after its
    settings. Prints the table of `jprm runs DIR` at the end. If one run diverges, the others continue, and the exit
    status is 2. SIGTERM saves the current run and exits with status 143.

    For example:
      jprm sweep experiments/prm800k_smollm2.py --workdir runs/rates --set optimizer.learning_rate=1e-5,3e-5 seed=0,1,2
      jprm sweep experiments/tiny.py --workdir runs/lists --set 'data.train=["a.jsonl"],["a.jsonl","b.jsonl"]'

    Args:
        experiment: Experiment file of the runs.
        workdir: Folder for the runs, local or in a bucket.
        set_: Values that override the experiment. Separate several values by commas to vary a field, e.g. seed=0,1,2.
        to: File for the comparison, as `jprm runs --output` writes it.
        distributed: Run as one of several processes, as in `jprm train`.
    """
    from jprm import multihost

    with run_of(distributed):
        folders, diverged = run_grid(experiment, set_, workdir, lambda line: print(line, file=sys.stderr))
    if multihost.is_first():
        runs(tuple(cast(list[Path], folders)), to)
    if diverged:
        raise FloatingPointError(f"{len(diverged)} of {len(folders)} runs diverged: {'; '.join(diverged)}")


def report(
    folder: Annotated[Positional[tuple[Path, ...]], arg(metavar="DIR|SCORED.jsonl ...")],
    output: Annotated[Path, arg(metavar="PAGE.html")],
    figures: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None,
) -> None:
    """Write one HTML page with verdict, figures and every scored chain; it works offline.

    Several results of one suite are compared on one page. For a scored file, the page lists its chains or trajectories,
    with the lowest step score first. An existing page is replaced. Folders of several kinds or suites are an error.

    For example:
      jprm report scored.jsonl --output scored.html
      jprm report results/mine --output report.html
      jprm report results/prm results/orm --output report.html --figures figures
      jprm report runs/rl --output rl.html

    Args:
        folder: Results of `jprm eval suite`, runs of `jprm rl`, or scored files (chains, pools, trees, trajectories).
            The report of another `jprm eval`, e.g. steps.json, shows the chains that it scored.
        output: Page to write.
        figures: Folder for the figures as SVG files.
    """
    from jprm.apps.report.page import report

    report(folder, output, figures)
    print(f"{output}: written")


# ---------------------------------------------------------------------------------------------------- a grid of runs
#
# One experiment file, and several values for some of its fields. The runs share one process, so jax compiles once for
# runs with equal shapes and code, e.g. if only the learning rate, seed or number of steps differs.

Point = tuple[str, ...]
"""The assignments of one run, e.g. `("seed=1", "steps=20")`."""

_OPEN, _CLOSE = "([{", ")]}"


def grid(settings: Sequence[str]) -> dict[str, Point]:
    """Returns the assignments for each run in a grid, by folder name.

    The runs are the product of all values, the last setting fastest; a run's assignments include settings with one
    value. A setting is `a.b=value` or `a.b=value,value,...`; commas within brackets or double quotes do not separate
    values. A folder name joins the settings that vary, e.g. `seed=0,steps=20`; characters other than letters, digits
    and `_.,=+-` become `_`.

    Raises ValueError if a setting has no value, no setting has several, or two runs would share a folder name.
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
        varied = [field for field, axis in zip(point, axes, strict=True) if len(axis) > 1]
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


def run_grid(
    path: str | os.PathLike,
    settings: Sequence[str],
    workdir: str | os.PathLike,
    tell: Callable[[str], None] = lambda line: None,
) -> tuple[list[Place], list[str]]:
    """Trains every run of a grid in its own folder of `workdir`, one after the other, and blocks until all have ended.

    `path` is the experiment file. Returns the folders, and messages ("NAME: reason") of diverged runs, both in the
    grid's order. A repeated call skips finished runs and continues the others. If a run's loss is not finite, the next
    run starts. `tell` receives one line per run.

    Raises:
      ValueError: as `grid` and `train`. All experiments are built before the first run starts.
      Stopped: after SIGTERM, once the state of the current run is saved.
    """
    from jprm import multihost
    from jprm.experiment import load, override
    from jprm.methods.formats.hub import pinned
    from jprm.train import train
    from jprm.train.callbacks import Diverged

    base, workdir = load(path), path_of(workdir)
    runs = {name: pinned(override(base, point)) for name, point in grid(settings).items()}
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
    """Returns whether the folder holds a finished run of exactly this experiment; `False` if there is no run.

    Raises ValueError if the run's settings are damaged.
    """
    from jprm.experiment import RUN, read

    result = folder / "result.json"
    if not result.is_file() or not (folder / RUN).is_file():
        return False
    recorded = read(folder / RUN)
    streams = experiment.data.streams or recorded.data.streams  # a run writes how many it has where none are named
    experiment = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, streams=streams))
    return json.loads(result.read_bytes())["step"] >= experiment.steps and recorded == experiment
