"""Every objective on the same data: trains and measures one cell (data, objective, seed) of the study, or all.

    python -m experiments.objectives.run quickstart pqm 0 --shared runs/quickstart --out runs/objectives
    nice -n 19 timeout 3600 python -m experiments.objectives.run gsm8k_llama7b outcome_steps 0 --shared ../shared/data
    python -m experiments.objectives.table runs/objectives

SIGTERM, which `timeout` sends, saves; the same command continues, in training as in scoring. A cell's result is
OUT/DATA/OBJECTIVE/SEED/cell.json. Data sets: `quickstart` (in --shared a finished run of experiments/quickstart),
`prm800k`, `gsm8k_POLICY`, trained on the pool of that policy and tested on all of them, and
`gsm8k_but_POLICY`, trained on the others'.
"""

from __future__ import annotations

import pathlib
import sys
import time
from typing import Annotated, Any

import jax
import tyro

import jprm
from experiments.objectives import data, measure, recipes
from jprm.io.jsonl import parse
from jprm.io.outputs import write_json
from jprm.methods.jobs.score import score_file
from jprm.score.scorer import PRM
from jprm.train import Stopped, train
from jprm.tree import read_trees

Positional = tyro.conf.Positional


def main(
    source: Annotated[str, Positional], objective: Annotated[str, Positional], seed: Annotated[int, Positional] = 0,
    shared: pathlib.Path = pathlib.Path("../shared/data"), out: pathlib.Path = pathlib.Path("runs/objectives"),
) -> None:  # fmt: skip
    """Run one cell.

    Args:
        source: The data set.
        objective: A name of `recipes.OBJECTIVES`.
        seed: Of the order of the data.
        shared: The folder of the data.
        out: The folder of all cells.
    """
    cell(source, objective, seed, shared, out)


def cell(
    source: str, objective: str, seed: int, shared: pathlib.Path, out: pathlib.Path, **sizes: Any
) -> dict[str, Any]:
    """Trains, scores and measures what is not done yet; returns what it wrote to `cell.json`."""
    folder = out / source / objective / str(seed)
    if (folder / "cell.json").is_file():
        return parse((folder / "cell.json").read_bytes(), str(folder / "cell.json"))
    files = data.files(source, shared, out / source / "data")
    experiment = recipes.experiment(source, objective, seed, files, shared, **sizes)
    began = time.perf_counter()
    if not (folder / "run/result.json").is_file():
        train(experiment, folder / "run")
    prm = jprm.load(folder / "run")
    tests = {name: scored(prm, path, folder) for name, path in {"valid": files.valid, **files.tests}.items()}
    results = {
        "source": source, "objective": objective, "seed": seed, "steps": experiment.steps, "rule": prm.rule,
        "tokens": experiment.steps * experiment.data.rows * experiment.data.tokens,  # of rows, padding included
        "seconds_of_last_call": round(time.perf_counter() - began, 1),
        "tests": {name: results for name, results in tests.items() if results},
    }  # fmt: skip
    write_json(folder / "cell.json", results)
    return results


def scored(prm: PRM, path: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
    """Returns the numbers of a file: of pools; of trees with rated steps; of trees with values, if there are bounds."""
    bounds = "low" in prm.output_names
    if path.stem == "held_out_values" and not bounds:
        return {}
    output = folder / "scores" / path.name
    output.parent.mkdir(exist_ok=True)
    score_file(prm, path, output)
    return measure.numbers(path, list(read_trees(output)), prm.scale, prm.rule, bounds)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # its recipes are made for one
    try:
        tyro.cli(main)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        raise SystemExit(143) from None
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
