"""What the page shows, as plain data: results and scores of one or several models, and every chain once."""

from __future__ import annotations

import itertools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jprm.evaluate.compare import compare
from jprm.evaluate.suite import read_results, read_scores

BINS, COLUMNS = 10, 12
"""Of the heat maps: bins of the score, and steps; the last column holds all later ones."""


def collect(folders: Sequence[str | os.PathLike]) -> dict[str, Any]:
    """`models` (`name`, `results`), `comparisons` of each pair (`a`, `b`, `rows`), `chains` for the browser, `heat`.

    Raises ValueError where there is no folder, or two are not of one suite.
    """
    if not folders:
        raise ValueError("no folder: name one or several that `jprm eval suite` wrote")
    models, scores = [], []
    for folder in folders:
        results = read_results(folder)
        models.append({"name": results["model"]["name"], "results": results})
        scores.append(read_scores(folder, results))
    names = [model["name"] for model in models]
    for model, folder in zip(models, folders, strict=True):
        if names.count(model["name"]) > 1:
            model["name"] = f"{model['name']} ({pathlib.Path(folder).name})"
    keys = ("sections", "neutral", "seed")
    for model, folder in zip(models, folders, strict=True):
        if any(model["results"][key] != models[0]["results"][key] for key in keys):
            raise ValueError(f"{folder}: of another suite than {folders[0]}: their figures do not compare")
    pairs = itertools.combinations(range(len(models)), 2)
    return {
        "models": models,
        "comparisons": [
            {"a": models[i]["name"], "b": models[j]["name"],
             "rows": compare(models[0]["results"], scores[i], scores[j])}
            for i, j in pairs
        ],
        "chains": chains([model["name"] for model in models], scores),
        "heat": [heat(of_model) for of_model in scores],
    }  # fmt: skip


def chains(names: Sequence[str], scores: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]]) -> dict[str, Any]:
    """The browser's data: `models`, `files`, `problems`, and `items`, one a chain or tree:

    `f`, `p` its file and problem by index, `t` texts of the steps, `d` their depth (trees), `l` labels (1 right, 0
    wrong, between the two as a probability, null), `c` scores by model, `o` whether its answer is right (or null).
    """
    problems: dict[str, int] = {}
    items = []
    for f, name in enumerate(scores[0]):
        for records in zip(*(of_model[name] for of_model in scores), strict=True):
            p = problems.setdefault(records[0]["problem"], len(problems))
            parts = [record.get("samples", [record]) for record in records]
            for same in zip(*parts, strict=True):
                items.append({"f": f, "p": p} | _item(records[0], same))
    return {"models": list(names), "files": list(scores[0]), "problems": list(problems), "items": items}


def _item(record: Mapping[str, Any], same: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = same[0]
    rating = record.get("semantics") == "rating"
    outcome = first.get("correct")
    if "nodes" in first:
        depth: list[int] = []
        for node in first["nodes"]:
            depth.append(depth[node["parent"]] + 1 if node["parent"] >= 0 else 0)
        order = _depth_first(first["nodes"])
        labels = [first["nodes"][i].get("label") for i in order]
        return {
            "t": [first["nodes"][i]["text"] for i in order],
            "d": [depth[i] for i in order],
            "l": [_label(x, rating) for x in labels],
            "c": [[_short(each["nodes"][i]["score"]) for i in order] for each in same],
            "o": outcome,
        }
    labels = first.get("labels") or [None] * len(first["steps"])
    return {
        "t": first["steps"],
        "l": [_label(x, rating) for x in labels],
        "c": [[_short(x) for x in each["scores"]] for each in same],
        "o": None if outcome is None else bool(outcome),
    }


def _depth_first(nodes: Sequence[Mapping[str, Any]]) -> list[int]:
    below: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        below.setdefault(node["parent"], []).append(i)
    order, stack = [], below.get(-1, [])[::-1]
    while stack:
        order.append(stack.pop())
        stack += below.get(order[-1], [])[::-1]
    return order


def _label(label: float | None, rating: bool) -> float | None:
    return None if label is None else (label + 1) / 2 if rating else label


def _short(score: float) -> float:
    return round(score, 4)


def heat(scores: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[list[int]]]:
    """Counts [bin of score][step] of right and of wrong steps, over all labelled steps of all files."""
    found = {"right steps": [[0] * COLUMNS for _ in range(BINS)], "wrong steps": [[0] * COLUMNS for _ in range(BINS)]}
    for record in (record for records in scores.values() for record in records if "samples" not in record):
        item = _item(record, [record])
        depth = item.get("d") or range(len(item["t"]))
        for j, label, score in zip(depth, item["l"], item["c"][0], strict=True):
            if label is not None and label != 0.5:
                rows = found["right steps" if label > 0.5 else "wrong steps"]
                rows[min(int(max(score, 0.0) * BINS), BINS - 1)][min(j, COLUMNS - 1)] += 1
    return found
