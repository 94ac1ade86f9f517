"""Tabulates the study: every objective's figures on every test, with intervals over seeds and problems.

    python -m experiments.objectives.table runs/objectives

Cells that are not finished are left out; `seeds` says how many there are. Each seed's figure follows the interval.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Annotated, Any

import tyro
from rich.console import Console

from experiments.objectives import measure, recipes
from experiments.objectives.data import POLICIES
from jprm.methods.evaluate.blocks import Table, percent, show, words
from jprm.tree import read_trees

COLUMNS = {
    "step_auroc": "step AUROC", "chain_auroc": "chain AUROC", "within_auroc": "in problem", "best_of_n": "best of n",
    "weighted_vote": "vote", "vote_minus_majority": "less majority", "odds_vote_minus_majority": "by odds",
    "ece": "ECE", "ece_recalibrated": "by Platt",
}  # fmt: skip


PAIRS = (
    ("pqm", "cross_entropy"), ("pqm", "pqm_steps"), ("monte_carlo_hard", "monte_carlo"), ("entropy", "monte_carlo"),
    ("progress", "monte_carlo"), ("outcome_tokens", "outcome_steps"), ("td_lambda", "outcome_steps"),
    ("dpo", "implicit"),
)  # fmt: skip
"""Objectives whose differences are tabulated: what papers claim, of labels of one kind."""


def cells(out: pathlib.Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Returns the finished cells by data set and objective, in the order of `recipes.OBJECTIVES`."""
    finished: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for source in sorted(path.name for path in out.iterdir() if path.is_dir()):
        for objective in recipes.OBJECTIVES:
            paths = sorted((out / source / objective).glob("*/cell.json"))
            if paths:
                finished[source, objective] = [json.loads(path.read_text()) for path in paths]
    return finished


def tables(out: pathlib.Path) -> Iterator[Table]:
    """Yields a table for every data set and test."""
    finished = cells(out)
    tests = dict.fromkeys((source, test) for (source, _), runs in finished.items() for test in runs[0]["tests"])
    for source, test in tests:
        by_name = {
            name: runs for (other, name), runs in finished.items() if other == source and test in runs[0]["tests"]
        }
        if test == "valid":
            continue
        kinds = {
            kind for kind in ("chain_key", "steps", "covered") if kind in next(iter(by_name.values()))[0]["tests"][test]
        }
        title = f"trained on {source}, tested on {test}"
        if "chain_key" in kinds:
            yield _of_pools(title, by_name, test, out / source / f"data/{test}.jsonl")
        elif "covered" in kinds:
            yield _of_bounds(title, by_name, test)
        else:
            yield _of_steps(title, by_name, test)


def differences(out: pathlib.Path) -> Iterator[Table]:
    """Yields, for every data set and test of pools, how far objectives of labels of one kind are apart."""
    finished = cells(out)
    for source in dict.fromkeys(source for source, _ in finished):
        pairs = [pair for pair in PAIRS if all((source, name) in finished for name in pair)]
        for test in dict.fromkeys(test for pair in pairs for test in finished[source, pair[0]][0]["tests"]):
            rows = []
            for pair in pairs:
                first, second = (
                    {cell["seed"]: cell["tests"].get(test, {}) for cell in finished[source, name]} for name in pair
                )
                both = [seed for seed in first if "best_of_n" in first[seed] and "best_of_n" in second.get(seed, {})]
                if both and test != "valid":
                    figures = [measure.apart([first[s] for s in both], [second[s] for s in both], name)
                               for name in ("best_of_n", "weighted_vote")]  # fmt: skip
                    rows.append([*pair, *map(_worded, figures)])
            if rows:
                columns = ("points", "less", "best of n", "vote")
                yield Table(f"differences, trained on {source}, tested on {test}", columns, rows)


def over_policies(out: pathlib.Path) -> Table | None:
    """Returns gains of votes and of best of n, a problem's mean over the policies, by what was trained on.

    None where there are no cells of GSM8K.
    """
    finished = cells(out)
    trained = {
        "the policy itself": [(f"gsm8k_{policy}", policy) for policy in POLICIES],
        "one other policy": [(f"gsm8k_{policy}", test) for policy in POLICIES for test in POLICIES if policy != test],
        "the two other policies": [(f"gsm8k_but_{policy}", policy) for policy in POLICIES],
    }
    rows = []
    for name in recipes.OBJECTIVES:
        for on, pairs in trained.items():
            if any((source, name) not in finished for source, _ in pairs):
                continue
            tests = [[cell["tests"][test] for cell in finished[source, name]] for source, test in pairs]
            gains = (("weighted_vote", "majority"), ("best_of_n", "one_sample"))
            rows.append([name, on, *(_worded(measure.mean_over_tests(tests, *gain)) for gain in gains)])
    columns = ("points", "trained on", "vote less majority", "best of n less one sample")
    return Table("on all policies' chains, the mean of a problem over them", columns, rows) if rows else None


def _of_pools(title: str, by_name: dict[str, list[dict]], test: str, data: pathlib.Path) -> Table:
    """Returns a row for every objective, and for every trivial baseline on the same problems."""
    rows, first = [], None
    for name, runs in by_name.items():
        for label, key in ((name, None), (f"{name}, by low", "by_low")):
            seeds = [cell["tests"][test] for cell in runs]
            if key and key not in seeds[0]:
                continue
            valid = [cell["tests"]["valid"] for cell in runs]
            seeds, valid = ([part[key] for part in parts] if key else parts for parts in (seeds, valid))
            figures = measure.figures(seeds, valid if "chain_key" in valid[0] else None)  # PRM800K's are no pools
            first = first or figures
            drifts = ", ".join(dict.fromkeys(cell["tests"][test].get("drift", "-") for cell in runs))
            rows.append([label, str(len(runs)), *(_worded(figures.get(column)) for column in COLUMNS), drifts])
    assert first is not None  # a title has cells
    if data.is_file():
        count = len(next(iter(by_name.values()))[0]["tests"][test]["problems"])
        for name, numbers in measure.trivial(list(itertools.islice(read_trees(data), count))).items():
            figures = measure.figures([numbers], None)
            shown = [None if column.startswith("ece") else figures.get(column) for column in COLUMNS]
            rows.append([f"baseline: {words(name)}", "", *map(_worded, shown), "-"])
    n = next(iter(by_name.values()))[0]["tests"][test]["n"]
    about = f"{title}, n = {n}: one sample {_worded(first['one_sample'])}, majority {_worded(first['majority'])}"
    return Table(about, ("%", "seeds", *COLUMNS.values(), "drift"), rows)


def _of_steps(title: str, by_name: dict[str, list[dict]], test: str) -> Table:
    names = ("auroc", "average_precision_of_errors", "alternatives", "accuracy")
    rows = [
        [name, str(cell["seed"]), *(_worded(cell["tests"][test]["steps"][figure]) for figure in names)]
        for name, runs in by_name.items()
        for cell in runs
    ]
    return Table(title, ("%", "seed", "step AUROC", "precision of errors", "alternatives", "accuracy"), rows)


def _of_bounds(title: str, by_name: dict[str, list[dict]], test: str) -> Table:
    rows = [
        [name, str(cell["seed"]), _worded(cell["tests"][test]["covered"]), percent(cell["tests"][test]["width"])]
        for name, runs in by_name.items()
        for cell in runs
    ]
    return Table(f"{title}: labels between low and high", ("%", "seed", "covered", "mean width"), rows)


def _worded(figure: dict[str, Any] | None) -> str:
    """Returns the value, its interval if it has one, and each seed's value if there are several."""
    if figure is None:
        return "-"
    text = percent(figure["value"])
    if figure.get("low") is not None:
        text += f" [{percent(figure['low'])}, {percent(figure['high'])}]"
    seeds = figure.get("seeds", ())
    return text + (f" ({', '.join(map(percent, seeds))})" if len(seeds) > 1 else "")


def main(out: Annotated[pathlib.Path, tyro.conf.Positional] = pathlib.Path("runs/objectives")) -> None:
    """Print the tables.

    Args:
        out: The folder of all cells.
    """
    show([*tables(out), *differences(out), *filter(None, [over_policies(out)])], Console(width=200))


if __name__ == "__main__":
    tyro.cli(main)
