"""Collects the data of a page: results and scores of one or several models, and every chain once."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jprm.apps.web import around
from jprm.io.jsonl import dump, printable
from jprm.io.storage import Found, path_of
from jprm.methods.evaluate.benchmark import Scores
from jprm.methods.evaluate.benchmarks import registered
from jprm.methods.evaluate.blocks import PageModel, Results
from jprm.methods.evaluate.run import is_scored
from jprm.methods.evaluate.suite import read_results, read_scores
from jprm.methods.judge.critiques import KEY
from jprm.statistics import Draws, difference
from jprm.tree import ReasoningTree, chains_of, steps_only

AROUND = "around"
"""Key in `extra` of a trajectory's steps.

Holds `before`, the [role, text] of each message since the last turn; `thoughts`; and `calls`, as [name, arguments].
"""

BYTES = 2_000_000
"""The most bytes of chains on a page, as JSON. With figures and scripts the page stays below 3 MB."""

BINS, COLUMNS = 10, 12
"""Size of the heat maps: score bins, and steps; the last column holds all later steps."""


class Page(NamedTuple):
    """The data of a page. `comparisons` has `a`, `b` and `rows` for each pair of models."""

    models: list[PageModel]
    comparisons: list[dict[str, Any]]
    chains: dict[str, Any]
    heat: list[dict[str, list[list[int]]]]


def read_suites(folders: Sequence[str | os.PathLike]) -> tuple[list[dict[str, Any]], list[Scores]]:
    """Returns the results and scores in suite folders, in order, for records that all models scored.

    Results are `results.json` as a dict, in which `model.folder` becomes a `Found`. Scores are lists of trees by file
    name, reduced by `only_turns`.

    Raises ValueError if the folders are not of the same suite, models scored other records or a file is damaged,
    FileNotFoundError if a folder is not a finished suite.
    """
    results = [read_results(folder) for folder in folders]
    for result, folder in zip(results, folders, strict=True):
        file, model = path_of(folder) / "results.json", result["model"]
        result["model"] = model | {"folder": Found(file, "model.folder", str(model.get("folder", "")))}
        if any(result[key] != results[0][key] for key in ("sections", "neutral", "seed")):
            raise ValueError(f"{folder}: of another suite than {folders[0]}: their figures do not compare")
    pairs = zip(folders, results, strict=True)
    scores = _scored_by_all([read_scores(folder, result, unread=True) for folder, result in pairs])
    for of_other in scores[1:]:
        check_same_records(list(results[0]["data"]), scores[0], of_other)
    return results, [{name: list(map(only_turns, trees)) for name, trees in by_file.items()} for by_file in scores]


def only_turns(tree: ReasoningTree) -> ReasoningTree:
    """Returns a tree of messages reduced to its steps, with their context under `AROUND`; other trees unchanged.

    Node numbers of a judge's critiques are adapted.
    """
    if not tree.of_messages:
        return tree
    only = steps_only(tree)
    nodes = [
        dataclasses.replace(node, extra={**node.extra, AROUND: shown})
        for node, shown in zip(only.nodes, around(tree), strict=True)
    ]
    extra, place = dict(only.extra), {node: i for i, node in enumerate(tree.steps)}
    if critiques := _of_judge(only):  # their node numbers count messages
        moved = [
            critique | {"nodes": [place[node] for node in critique["nodes"] if node in place]} for critique in critiques
        ]
        extra[KEY] = {**extra[KEY], "critiques": moved}
    return dataclasses.replace(only, nodes=tuple(nodes), extra=extra)


def collect(folders: Sequence[str | os.PathLike]) -> Page:
    """Reads folders of `jprm eval suite`, one per model. Models of one name get their folder's name in brackets.

    Raises ValueError without a folder, or if they are not of the same suite, FileNotFoundError if one is not finished.
    """
    if not folders:
        raise ValueError("no folder: name one or several that `jprm eval suite` wrote")
    results, scores = read_suites(folders)
    names = [printable(result["model"]["name"]) for result in results]
    names = [
        f"{name} ({path_of(folder).name})" if names.count(name) > 1 else name
        for name, folder in zip(names, folders, strict=True)
    ]
    drawn = list(map(drawn_figures, results, scores)) if len(names) > 1 else []
    comparisons = [
        {"a": names[i], "b": names[j], "rows": compare(drawn[i], drawn[j])}
        for i, j in itertools.combinations(range(len(names)), 2)
    ]
    return Page(list(map(PageModel, names, results)), comparisons, chains(names, scores), list(map(heat, scores)))


def drawn_figures(results: Results, scores: Scores) -> dict[str, Draws]:
    """Returns a model's figures with their values on resampled problems, by description, as the page compares them.

    `scores` are scored trees by file name. Models of one suite share resamples. {} without a registered benchmark.
    """
    return {
        what: drawn
        for name, benchmark in registered().items()
        if name in results
        for what, drawn in benchmark.problem_draws(results, scores)
    }


def compare(a: Mapping[str, Draws], b: Mapping[str, Draws]) -> list[dict[str, Any]]:
    """Returns rows of `what`, `value` (A minus B), `low`, `high` and `better`, for the figures that both have.

    `a` and `b` are from `drawn_figures`; rows are in A's order. `better` is the fraction of resamples with A ahead
    (ties count half), `low` and `high` a 95 % interval. Undefined numbers are `None`.
    """
    return [{"what": what, **difference(a[what], b[what]).json()} for what in a if what in b]


def check_same_records(names: list[str], a: Scores, b: Scores) -> None:
    """Raises ValueError if two models scored different records in one of the files `names`; scores are not compared."""
    for name in names:
        if list(map(_content, a[name])) != list(map(_content, b.get(name, []))):
            raise ValueError(f"{name}: the two models have scored other records; run `jprm eval suite` on one suite")


def _content(tree: ReasoningTree) -> tuple[str, list[tuple[int, str]]]:
    """Returns the content of a tree, without its scores."""
    calls = [json.dumps(node.extra.get("tool_calls")) if node.role else "" for node in tree.nodes]
    return tree.problem, [(node.parent, node.text + calls[i]) for i, node in enumerate(tree.nodes)]


def _scored_by_all(scores: Sequence[Scores]) -> list[Scores]:
    """Removes the records that a judge left unscored in any of the models."""
    kept = {
        name: [all(map(is_scored, trees)) for trees in zip(*(of_model[name] for of_model in scores), strict=True)]
        for name in scores[0]
    }
    return [
        {name: list(itertools.compress(trees, kept[name])) for name, trees in by_file.items()} for by_file in scores
    ]


def chains(names: Sequence[str], scores: Sequence[Scores], placed: bool = False) -> dict[str, Any]:
    """Returns the browser's data: `models`, `files`, `problems`, and `items`, one per chain, sample or tree.

    `scores` has, per model of `names`, scored trees by file name; all models must have the same records. Keys of an
    item:

    - `f`, `p`: file and problem, by index. With `placed`, `r`: the record's line (from 1) and id, as text.
    - `t`: step texts; `d`: their depth (trees only); `l`: labels (1 right, 0 wrong, a probability between, or null).
    - `c`: scores by model, with four decimals, null for an unscored step; `o`: whether the answer is right, or null.
    - `m`: for trajectories, each turn's context (`AROUND`). `w` and `k`: see `ranked`.
    - `j`: for judges, by model: [step, status, tokens, text] of each critique that ends at a step.

    Equal chains are one item with their number in `n` (absent for 1). `all` and `distinct` count the chains. If they
    exceed `BYTES`, `items` holds the chains that the page's orders show first, and random others.
    """
    problems: dict[str, int] = {}
    items = []
    for f, name in enumerate(scores[0]):
        for line, trees in enumerate(zip(*(of_model[name] for of_model in scores), strict=True), start=1):
            p = problems.setdefault(trees[0].problem, len(problems))
            orders = chains_of(trees[0]) if trees[0].kind == "pool" else [_depth_first(trees[0])]
            columns = [[node.score for node in tree.nodes] for tree in trees]
            critiques = [_of_judge(tree) for tree in trees]
            where: dict[str, Any] = {"f": f, "p": p}
            if placed:
                where["r"] = f"{line} ({trees[0].extra['id']})" if "id" in trees[0].extra else str(line)
            items += [where | _item(trees[0], columns, order) | _critiques(critiques, order) for order in orders]
    data = {"models": list(names), "files": list(scores[0]), "all": len(items)}
    items = ranked(_merged(items))
    return data | {"distinct": len(items)} | _shown(items, list(problems))


_CRITIQUE = {"nodes": list, "status": str, "tokens": int, "text": str}


def _of_judge(tree: ReasoningTree) -> list[dict[str, Any]]:
    """Returns the judge's critiques in a record; skips malformed ones, since the file may come from anyone."""
    judged = tree.extra.get(KEY)
    critiques = judged.get("critiques") if isinstance(judged, Mapping) else None
    return [
        critique
        for critique in (critiques if isinstance(critiques, list) else [])
        if isinstance(critique, dict)
        and all(isinstance(critique.get(name), kind) for name, kind in _CRITIQUE.items())
        and all(isinstance(node, int) for node in critique["nodes"])
    ]


def _merged(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merges equal items; `n` is their number if above 1."""
    count = collections.Counter(texts := [dump(item) for item in items])
    first = dict(zip(reversed(texts), reversed(items), strict=True))
    return [first[text] | ({"n": times} if times > 1 else {}) for text, times in count.items()]


def _shown(items: Sequence[dict[str, Any]], problems: Sequence[str]) -> dict[str, Any]:
    """Returns as many `problems` and `items` as fit in `BYTES`.

    Items are taken in turns from each of the page's orders, and at random.
    """
    models = range(len(items[0]["c"])) if items else ()
    orders = [
        np.argsort([-item["k"][m][o] for item in items], kind="stable") for o in range(len(ORDERS)) for m in models
    ]
    orders.append(np.random.default_rng(0).permutation(len(items)))
    size = [len(dump(item).encode()) for item in items]
    taken: set[int] = set()
    shown: set[int] = set()
    room = BYTES
    for i in itertools.chain.from_iterable(zip(*orders, strict=True)):
        i = int(i)
        p: int = items[i]["p"]
        cost = size[i] + (0 if p in shown else len(problems[p].encode()))
        if i not in taken and cost <= room:
            taken.add(i)
            shown.add(p)
            room -= cost
    place = {p: new for new, p in enumerate(sorted(shown))}
    return {
        "problems": [problems[p] for p in place],
        "items": [items[i] | {"p": place[items[i]["p"]]} for i in sorted(taken)],
    }


def ranked(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns copies of items of `chains`, in order, with `w`, whether the item is wrong, and `k`, its sort keys.

    `k[m]` has a number per order in `ORDERS` for model m; larger comes first. An item is wrong if a step is labelled
    wrong (below 0.5), or, if no step has a label, if its answer is wrong; `None` if unknown.
    """
    with_keys = []
    for item in items:
        labels = [label for label in item["l"] if label is not None]
        wrong = min(labels) < 0.5 if labels else None if item["o"] is None else not item["o"]
        judged: dict[str, Any] = {**item, "w": wrong}
        with_keys.append(judged | {"k": [[round(key(judged, m), 4) for key in ORDERS] for m in range(len(item["c"]))]})
    return with_keys


def _convincing(item: Mapping[str, Any], m: int) -> float:
    """Returns how convincing a wrong chain is: its lowest score, which an error should have lowered.

    For a tree, the maximum over paths that end in a wrong step. Nodes come depth first, so `path` holds the lowest
    score so far at each depth.
    """
    if not item["w"]:
        return -1.0
    if "d" not in item:
        return min(_known(item, m), default=0.0)
    top, path = 0.0, []
    for depth, score, label in zip(item["d"], item["c"][m], item["l"], strict=True):
        score = 1.0 if score is None else score
        path[depth:] = [min([score, *path[max(depth - 1, 0) : depth]])]
        if label is not None and label < 0.5:
            top = max(top, path[depth])
    return top


def _known(item: Mapping[str, Any], m: int) -> list[float]:
    return [score for score in item["c"][m] if score is not None]


def _lowest(item: Mapping[str, Any], m: int) -> float:
    return -min(_known(item, m), default=1e9)


def _doubted(item: Mapping[str, Any], m: int) -> float:
    return 1.0 - min(_known(item, m), default=1.0) if item["w"] is False else -1.0


def _far_from_label(item: Mapping[str, Any], m: int) -> float:
    pairs = zip(item["c"][m], item["l"], strict=True)
    return max((abs(score - label) for score, label in pairs if None not in (score, label)), default=0.0)


def _apart(item: Mapping[str, Any], _: int) -> float:
    steps = [scores for scores in zip(*item["c"], strict=True) if None not in scores]
    return max((max(scores) - min(scores) for scores in steps), default=0.0)


ORDERS = (_convincing, _doubted, _far_from_label, _apart, _lowest)
"""Sort keys of an item for a model, in the order of page.js."""


def _item(tree: ReasoningTree, scores: Sequence[Sequence[float | None]], order: Sequence[int]) -> dict[str, Any]:
    """Builds an item of `chains` from the nodes `order`; `m` is the context around each turn."""
    labels = [tree.nodes[i].label for i in order]
    if tree.semantics == "rating":
        labels = [None if label is None else (label + 1) / 2 for label in labels]
    item: dict[str, Any] = {"t": [tree.nodes[i].text for i in order], "l": labels}
    if any(AROUND in node.extra for node in tree.nodes):
        item["m"] = [tree.nodes[i].extra[AROUND] for i in order]
    if tree.kind == "tree":
        depth: list[int] = []
        for node in tree.nodes:
            depth.append(depth[node.parent] + 1 if node.parent >= 0 else 0)
        item["d"] = [depth[i] for i in order]
    outcome = tree.extra.get("correct") if tree.kind == "tree" else tree.nodes[order[-1]].correct
    return item | {"c": [[_rounded(column[i]) for i in order] for column in scores], "o": outcome}


def _rounded(score: float | None) -> float | None:
    return None if score is None else round(float(score), 4)


def _critiques(of_models: Sequence[Sequence[dict[str, Any]]], order: Sequence[int]) -> dict[str, Any]:
    """Returns each model's critiques that end at a node in `order`; {} without critiques."""
    place = {node: i for i, node in enumerate(order)}
    critiques = [
        [
            [place[node], critique["status"], critique["tokens"], critique["text"]]
            for critique in of_model
            for node in critique["nodes"]
            if node in place
        ]
        for of_model in of_models
    ]
    return {"j": critiques} if any(critiques) else {}


def _depth_first(tree: ReasoningTree) -> list[int]:
    after: list[list[int]] = [[] for _ in range(len(tree.nodes) + 1)]  # the children of each parent, from -1 on
    for i in reversed(range(len(tree.nodes))):
        after[tree.nodes[i].parent + 1].append(i)
    order, waiting = [], after[0]
    while waiting:
        order.append(waiting.pop())
        waiting += after[order[-1] + 1]
    return order


def heat(scores: Scores) -> dict[str, list[list[int]]]:
    """Counts `right steps` and `wrong steps` by [score bin][step], over all labelled steps outside pools.

    Both are lists of BINS rows (low scores first; clipped to 0 to 1) with COLUMNS counts, the last also of later steps.
    Labels of 0.5 are left out. Every other labelled step must have a score.
    """
    counts = {name: [[0] * COLUMNS for _ in range(BINS)] for name in ("right steps", "wrong steps")}
    for tree in (tree for trees in scores.values() for tree in trees if tree.kind != "pool"):
        item = _item(tree, [[node.score for node in tree.nodes]], range(len(tree.nodes)))
        depth = item.get("d") or range(len(item["t"]))
        for j, label, score in zip(depth, item["l"], item["c"][0], strict=True):
            if label is not None and label != 0.5:
                rows = counts["right steps" if label > 0.5 else "wrong steps"]
                rows[min(int(min(max(score, 0.0), 1.0) * BINS), BINS - 1)][min(j, COLUMNS - 1)] += 1
    return counts
