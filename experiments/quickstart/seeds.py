"""Tabulates several runs of the quickstart: the mean over seeds of every figure, and its lowest and highest.

for s in 0 1 2; do python -m experiments.quickstart.run --seed $s --out runs/quickstart_$s; done
python -m experiments.quickstart.seeds runs/quickstart_0 runs/quickstart_1 runs/quickstart_2
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import tyro

from jprm.methods.evaluate.blocks import Table, percent, show, words


def figures_of(results: Mapping[str, Any]) -> dict[str, float]:
    """Returns the headline figures of a run's results.json, by name."""
    figures = {words(key): row["value"] for key, row in results.items() if isinstance(row, Mapping) and "value" in row}
    figures |= {f"first error F1, {words(model)}": row["f1"] for model, row in results["first_error"].items()}
    for name, row in results["search"]["methods"].items():
        figures |= {
            name: row["accuracy"]["value"],
            f"{name} less best of n at its tokens": row["less_best_of_n"]["value"],
        }
    return figures


def table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Returns mean and range over runs of different seeds. Raises ValueError for two runs of one seed."""
    seeds = [run["seed"] for run in runs]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds {seeds}: two runs are of one seed, and say no more than one")
    figures = [figures_of(run) for run in runs]
    rows = []
    for name in figures[0]:
        values = [run[name] for run in figures]
        mean = percent(sum(values) / len(values))
        rows.append([name, mean, f"{percent(min(values))} to {percent(max(values))}", *map(percent, values)])
    columns = ("%", f"mean of {len(runs)}", "range", *(f"seed {seed}" for seed in seeds))
    return Table("Quickstart over seeds", columns, rows)


def main(runs: Annotated[tuple[pathlib.Path, ...], tyro.conf.Positional]) -> None:
    """Print the table.

    Args:
        runs: Folders of finished runs.
    """
    show([table([json.loads((run / "results.json").read_text()) for run in runs])])


if __name__ == "__main__":
    tyro.cli(main)
