"""`jprm runs` and `jprm sweep`: several runs of one experiment, and how they compare."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, cast

from tyro.conf import Positional, arg

from jprm.cli.arguments import Distributed, Folder, Settings

Json = Annotated[Path | None, arg(name="json", metavar="OUT", help_behavior_hint="")]


def runs(
    folder: Annotated[Positional[tuple[Path, ...]], arg(metavar="DIR ...")],
    to: Json = None,
) -> None:
    """Compare runs: the settings in which they differ, and the last value of each metric.

    For example:
      jprm runs runs/short runs/long
      jprm runs runs/rates --json rates.json

    Args:
        folder: Runs of `jprm train`, finished or not, or folders of runs, such as a sweep's; also in a bucket.
        to: A file for everything that differs and every metric, beyond what the table shows.
    """
    from jprm.evaluate.terminal import show
    from jprm.outputs import write_json
    from jprm.report.runs import compare, tables

    comparison = compare(folder)
    if to:
        write_json(to, comparison)
    show(tables(comparison))


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
        to: A file for the comparison, as of `jprm runs --json`.
        distributed: For several processes, as in `jprm train`.
    """
    from jprm import multihost
    from jprm.train import sweep as sweeps
    from jprm.train.preemption import Stopped

    multihost.start(distributed)
    try:
        folders, diverged = sweeps.sweep(experiment, set_, workdir, lambda line: print(line, file=sys.stderr))
    except Stopped as stopped:
        print(f"stopped: {stopped}", file=sys.stderr)
        raise SystemExit(128 + signal.SIGTERM) from None  # as of a process that the signal had ended
    if multihost.is_first():
        runs(tuple(cast(list[Path], folders)), to)
    if diverged:
        raise FloatingPointError(f"{len(diverged)} of {len(folders)} runs diverged: {'; '.join(diverged)}")
