"""`jprm runs`, `jprm table`, `jprm sweep` and `jprm report`: several runs, and what they show; and `jprm plan`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from tyro.conf import FlagCreatePairsOff, Positional, arg

from jprm.apps.cli.arguments import Distributed, Folder, Settings, run_of
from jprm.io.storage import Place, path_of

if TYPE_CHECKING:
    from jprm.experiment import Experiment

Json = Annotated[Path | None, arg(name="output", metavar="OUT.json", help_behavior_hint="")]


def runs(folder: Annotated[Positional[tuple[Path, ...]], arg(metavar="DIR ...")], to: Json = None) -> None:
    """Compare runs: the settings in which they differ, and the last value of each metric.

    For example:
      jprm runs runs/short runs/long
      jprm runs runs/rates --output rates.json

    Args:
        folder: Runs of `jprm train`, finished or not, or folders of runs, such as a sweep's; also in a bucket.
        to: A file for everything that differs and every metric, beyond what the table shows.
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
    csv: FlagCreatePairsOff[bool] = False,
    latex: FlagCreatePairsOff[bool] = False,
    markdown: FlagCreatePairsOff[bool] = False,
) -> None:
    """Print a table for a paper: the mean, spread and interval of every figure over seeds, and tests between settings.

    Runs that are equal but for the fields of --over are one group. The other groups are compared with the first. What
    `jprm eval suite` found is known for every problem: its intervals draw seeds and problems both, and differences
    pair the problems. With one seed an interval has only the problems. A metric of training has only the seeds.

    For example:
      jprm table results/seed0 results/seed1 results/seed2
      jprm table results runs --over seed data.seed --latex > table.tex

    Args:
        folder: Folders of `jprm eval suite` or `jprm train`, or folders of such. The first one's group is what the
            others are compared with.
        over: Fields in which the runs of a group may differ.
        csv: Print all figures with all digits, a line each.
        latex: Print LaTeX, for the package booktabs.
        markdown: Print Markdown.
    """
    from jprm.apps.report.table import as_csv, table_of, tables
    from jprm.methods.evaluate.blocks import as_latex, as_markdown, show

    if csv + latex + markdown > 1:
        raise ValueError("--csv, --latex and --markdown: give one of them")
    rows = table_of(folder, over)
    if csv:
        print(as_csv(rows), end="")
    elif latex or markdown:
        print((as_latex if latex else as_markdown)(list(tables(rows))), end="")
    else:
        show(tables(rows))


def sweep(
    experiment: Annotated[Positional[Path], arg(metavar="EXPERIMENT.py")],
    workdir: Folder,
    set_: Settings,
    to: Json = None,
    distributed: Distributed = None,
) -> None:
    """Train an experiment at every point of a grid of settings; the same command continues a stopped sweep.

    The runs follow each other in one process, so runs of equal shapes compile once. Each has its folder in DIR, named
    by its settings. Ends with the table of `jprm runs DIR`. A run that diverges does not end the others.

    For example:
      jprm sweep experiments/prm800k_smollm2.py --workdir runs/rates --set optimizer.learning_rate=1e-5,3e-5 seed=0,1,2
      jprm sweep experiments/tiny.py --workdir runs/lists --set 'data.train=["a.jsonl"],["a.jsonl","b.jsonl"]'

    Args:
        experiment: The file that describes the runs.
        workdir: The folder for the runs, on this machine or in a bucket.
        set_: Values that replace the experiment's, by their path in its configuration; several, separated by commas,
            for a field that varies.
        to: A file for the comparison, as of `jprm runs --output`.
        distributed: For several processes, as in `jprm train`.
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
    """One page with verdict, figures and every chain with its scores: a single file that works without a network.

    Several folders of one suite are compared on one page. A scored file gives a page of its chains or runs, the one
    with the lowest step first.

    For example:
      jprm report scored.jsonl --output scored.html
      jprm report results/mine --output report.html
      jprm report results/prm results/orm --output report.html --figures figures
      jprm report runs/rl --output rl.html

    Args:
        folder: What `jprm eval suite` wrote, runs of `jprm rl`, or files of chains, pools, trees or trajectories that
            `jprm score` wrote. The report of another `jprm eval`, e.g. steps.json, stands for the chains it scored.
        output: The page to write.
        figures: A folder to write every figure into, as SVG.
    """
    from jprm.apps.report.page import report

    report(folder, output, figures)
    print(f"{output}: written")


# ---------------------------------------------------------------------------------------------------- a grid of runs
#
# One experiment file, and several values for some of its fields. The runs follow each other in one process. What jax
# has compiled for one serves the others whose shapes and code agree: a learning rate, a seed or a number of steps
# compiles nothing anew.

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
    """Runs the grid of an experiment file, each run in a folder of `workdir`; returns the folders and what diverged.

    A call that was stopped continues: finished runs are left as they are. A run whose loss is not finite does not end
    the others. `tell` receives a line for every run.

    Raises:
      ValueError: as `grid` and `train`. All experiments are made before the first one runs.
      Stopped: after SIGTERM, when the state of the current run is saved.
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
    """Returns whether the folder holds this experiment's run, trained to its last step."""
    from jprm.experiment import RUN, read

    result = folder / "result.json"
    if not result.is_file() or not (folder / RUN).is_file():
        return False
    recorded = read(folder / RUN)
    streams = experiment.data.streams or recorded.data.streams  # a run writes how many it has where none are named
    experiment = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, streams=streams))
    return json.loads(result.read_bytes())["step"] >= experiment.steps and recorded == experiment


# ------------------------------------------------------------------------------------------------------------ jprm plan


def plan(
    experiment: Annotated[Positional[Path | None], arg(metavar="EXPERIMENT.py", help_behavior_hint="")] = None,
    topology: Annotated[str, arg(metavar="NAME", help_behavior_hint="")] = "",
    fits: FlagCreatePairsOff[bool] = False,
    slices: int = 1,
    scoring: FlagCreatePairsOff[bool] = False,
    search: FlagCreatePairsOff[bool] = False,
    to: Json = None,
    set_: Settings = (),
) -> None:
    """Compile an experiment's step for TPUs or GPUs, here: memory, FLOPs, collectives, and how fast it can be at most.

    The step is the one that `jprm train` runs, compiled only from shapes, without device, weights, data or tokenizer:
    by libtpu (pip install -e '.[train,tpu]') or XLA ('.[train,gpu-aot]'). A 7B model takes minutes. Times are lower
    bounds, from what the program does and the rates that the chip is sold with: no run is faster, and real ones are
    slower.

    For example:
      jprm plan experiments/qwen2p5_math_7b_prm800k.py --topology v5p-128
      jprm plan experiments/qwen2p5_math_7b_prm800k.py --topology v5e-64 --scoring
      jprm plan experiments/qwen3_4b_math_shepherd.py --topology v6e-16 --slices 2 --set mesh.data=2 data.micro_rows=32
      jprm plan experiments/qwen3_4b_math_shepherd.py --topology v6e-16 --search --output plans.json
      jprm plan experiments/llama3p1_8b_orm.py --topology v5p-64 --set mesh.context=4 data.rows=8 data.micro_rows=8
      jprm plan experiments/qwen2p5_math_7b_prm800k.py --topology h100-8 --set model.attention=gpu_kernel
      jprm plan --fits --output fits.json

    Args:
        experiment: The file that describes the run.
        topology: The slice: v4-32, v5e-16, v5p-128, v6e-64, tpu7x-128, ... The number counts cores, two per chip, for
            v4, v5p and tpu7x, and chips for v5e and v6e. Or GPUs of a node: a100-8, h100-8, b200-8, h100-1, ... The
            error for an unknown name lists the known ones.
        fits: The table of what fits on one card of 24 to 141 GB: models of 0.5B to 32B, trained and scored, by rows of
            2,048 and 8,192 tokens, compiled for an H100. With --json a stopped table goes on.
        slices: Slices or nodes joined by the data centre's network. `mesh.data` must be a multiple of them.
        scoring: Plan the step of `jprm score`, with one row per device, and not the training step.
        search: Try meshes, then remat policies, then rows per micro-batch; print the fastest that fits.
        to: A file for the figures, with every candidate of a search.
        set_: Values that replace the experiment's, by their path in its configuration.
    """
    # Before jax is imported: planning must not take this machine's TPU from a run that uses it.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from rich.console import Console

    from jprm.apps.plan import fits as cards
    from jprm.apps.plan import plan as steps
    from jprm.apps.plan.topologies import find
    from jprm.experiment import load
    from jprm.io.outputs import check_output, write_json
    from jprm.methods.evaluate.blocks import show

    errors = Console(stderr=True)
    if fits:
        if experiment or topology or scoring or search or set_:
            raise ValueError("--fits takes only --json: its models and its card are its own")
        show(cards.tables(cards.fits(to, errors.print)))
        return
    if experiment is None or not topology:
        raise ValueError("jprm plan: name an experiment file and --topology, or --fits")
    if to is not None:
        check_output(to, experiment)
    slice_ = find(topology, slices)
    with errors.status("starting") as status:
        say = status.update if errors.is_terminal else errors.print  # a log has no line that changes
        if search:
            plans, best = steps.search(load(experiment, set_), slice_, say=say, scoring=scoring)
            planned, shown = {"plans": plans, "best": best}, steps.tables_of_search(plans, best)
        else:
            planned = steps.plan(load(experiment, set_), slice_, say=say, scoring=scoring)
            shown = steps.tables(planned)
    show(shown)
    if to is not None:
        write_json(to, planned)
        print(f"{to}: written")
