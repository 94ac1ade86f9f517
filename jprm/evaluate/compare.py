"""Two models on one suite: every headline figure's difference, paired over the problems, and how sure it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jprm.evaluate.best_of_n import chosen_curves, pools_of
from jprm.evaluate.paired import mean_differences
from jprm.evaluate.processbench import average_draws, f1_draws
from jprm.evaluate.steps import auroc_draws
from jprm.score.aggregate import RULES
from jprm.statistics import difference

Scores = Mapping[str, Sequence[Mapping[str, Any]]]

KINDS = {"half": "at 0.5", "tuned": "tuned threshold", "cross_fit": "cross-fitted threshold"}


def compare(results: Mapping[str, Any], a: Scores, b: Scores) -> list[dict[str, Any]]:
    """Rows of `what`, `value` (A less B), `low`, `high`, `better`, for all sections of `results` that are compared:
    ProcessBench F1, step AUROC, and the accuracy of best-of-n by each rule at the largest n.

    `a` and `b` are scored records by the name of their file. Raises ValueError where they are not the same records.
    """
    seed, rows = results["seed"], []
    for name in results["data"]:
        if list(map(_content, a[name])) != list(map(_content, b.get(name, []))):
            raise ValueError(f"{name}: the two models have scored other records; run `jprm eval suite` on one suite")

    def row(what, found):
        rows.append({"what": what, **found.json()})

    if "processbench" in results:
        tuned_on, files = results["processbench"]["calibrate"], list(results["processbench"]["files"])
        names = dict.fromkeys([*files, tuned_on])
        drawn = [f1_draws({name: side[name] for name in names}, tuned_on, seed) for side in (a, b)]
        for kind, words in KINDS.items():
            sides = [by_kind[kind] for by_kind in drawn]
            for name in files:
                if None not in (sides[0][name], sides[1][name]):
                    row(f"ProcessBench {name}, F1 {words}", difference(sides[0][name], sides[1][name]))
            averages = [average_draws(side, files) for side in sides]
            if len(files) > 1 and averages[0][0] is not None and averages[1][0] is not None:
                row(f"ProcessBench, average F1 {words}", difference(*averages))
    if "steps" in results:
        records = ([record for name in results["sections"]["steps"] for record in side[name]] for side in (a, b))
        row("steps, AUROC", difference(*(auroc_draws(side, results["neutral"], seed) for side in records)))
    for name in results.get("best_of_n", {}):
        pools = [pools_of(side[name]) for side in (a, b)]
        curves = [chosen_curves(pool) for pool in pools]
        for rule in RULES:
            last_P1 = (curves[0][rule] - curves[1][rule])[:, -1:]
            found = mean_differences(last_P1, pools[0].problem, seed).json()
            what = f"{name}, best of {curves[0][rule].shape[1]} by {rule.replace('_', ' ')}"
            rows.append({"what": what} | {key: value[0] for key, value in found.items()})
    return rows


def _content(record: Mapping[str, Any]) -> list[Any]:
    """What a record says, without its scores."""
    if "nodes" in record:
        return [record["problem"], [(node["parent"], node["text"]) for node in record["nodes"]]]
    return [record["problem"], [sample["steps"] for sample in record.get("samples", [record])]]
