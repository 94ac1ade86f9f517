"""Every objective on a frozen decoder, whose states are computed once for all cells of the study.

    python -m experiments.objectives.frozen gsm8k_llama7b outcome_steps 0 --shared ../shared/data
    python -m experiments.objectives.table runs/objectives_frozen

The first cell of a data set computes the states. After that a cell of a head (`heads.py`) takes half a minute, and one
of an implicit PRM (`language.py`) ten. What is compared is the objective: data, states and rates are the same for all.
A kill loses the cell at work and none of the states; the same command continues.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from typing import Annotated, Any

import jax
import tyro

from experiments.objectives import data, heads, language, measure, recipes
from experiments.studies.drift import drift
from jprm import objectives
from jprm.io.jsonl import parse
from jprm.io.outputs import write_json
from jprm.score.aggregate import DEFAULT_RULE
from jprm.score.scale import LOG_ODDS, PROBABILITY

Positional = tyro.conf.Positional


def cell(
    source: str, objective: str, seed: int, shared: pathlib.Path, out: pathlib.Path,
    problems: int | None = None, tests: int | None = None, **fit: Any,
) -> dict[str, Any]:  # fmt: skip
    """Trains and measures a cell; returns what it wrote to `cell.json`. `fit` changes how it is trained.

    Raises ValueError where the data or the frozen states do not fit the objective.
    """
    folder = out / source / objective / str(seed)
    if (folder / "cell.json").is_file():
        return parse((folder / "cell.json").read_bytes(), str(folder / "cell.json"))
    files = data.files(source, shared, out / source / "data")
    experiment = recipes.experiment(source, objective, seed, files, shared)
    beta = objectives.log_ratio(objectives.find(experiment.objective, experiment.objective_options))
    kind, scale = (heads, PROBABILITY) if beta is None else (language, LOG_ODDS)
    fitted, began = kind.Fit(**fit), time.perf_counter()
    train, states = pathlib.Path(experiment.data.train[0]), out / "states"
    known = kind.known(train, states / f"{source}_{train.stem}", problems, experiment.data.supervise)
    score = kind.fitted(experiment, known, fitted)
    rule, results, before = DEFAULT_RULE[experiment.semantics if beta is None else "implicit"], {}, None
    for name, path in {"valid": files.valid, **files.tests}.items():
        if name == "held_out_values":  # of heads with bounds
            continue
        part = f"{source}_valid" if name == "valid" else name
        test = score(kind.known(path, states / part, None if name == "valid" else tests))
        before = before or test
        results[name] = measure.numbers(path, test, scale, rule)
        results[name]["drift"] = drift(before, test, seed=0)["verdict"]  # from the validation problems
    result = {
        "source": source, "objective": objective, "seed": seed, "fit": dataclasses.asdict(fitted), "rule": rule,
        "problems": len(known.trees), "seconds_of_last_call": round(time.perf_counter() - began, 1), "tests": results,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "cell.json", result)
    print(f"{folder / 'cell.json'}: written")
    return result


def main(
    source: Annotated[str, Positional], objective: Annotated[str, Positional], seed: Annotated[int, Positional] = 0,
    shared: pathlib.Path = pathlib.Path("../shared/data"), out: pathlib.Path = pathlib.Path("runs/objectives_frozen"),
    problems: int | None = None, tests: int | None = None,
) -> None:  # fmt: skip
    """Run one cell.

    Args:
        source: The data set: `prm800k`, or `gsm8k_` or `gsm8k_but_` and a policy.
        objective: A name of `recipes.OBJECTIVES`.
        seed: Of the head's start and the order of the data.
        shared: The folder of the data.
        out: The folder of all cells and of the states.
        problems: Train only on the first ones; a multiple of 32.
        tests: Test only on the first problems of every test; a multiple of 32.
    """
    try:
        cell(source, objective, seed, shared, out, problems, tests)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    tyro.cli(main)
