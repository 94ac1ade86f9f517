"""Named outputs against class labels, e.g. error types: each class is a separate binary decision.

A chain's `classes` has one entry per step: a name, a list of names, or null if unlabelled. If a class of the model
never occurs as a label, it has no positives, and its AUROC and average precision are null.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jprm.methods.evaluate.benchmark import Benchmark, Report, Request
from jprm.methods.evaluate.blocks import Block, Cell, PageModel, Table, left_out_words
from jprm.methods.evaluate.calibration import ece, ece_if_calibrated
from jprm.methods.evaluate.scored import NothingToMeasure, ScoreError
from jprm.statistics import auroc, average_precision, bootstrap, f1, jsonable
from jprm.tree import ReasoningTree


class Classes(NamedTuple):
    """The labelled steps of several files."""

    problem_N: list[str]
    value: dict[str, Float[np.ndarray, " N"]]  # of every named output
    positive: dict[str, Bool[np.ndarray, " N"]]  # whether the step has this class


def classes_of(trees: Sequence[ReasoningTree]) -> Classes:
    """Collects the labelled steps. A record's `classes` has for each step an output's name, a list of names, or null.

    A step of null is left out; [] labels it as of no class. All steps must have the outputs of the first one. Raises
    ScoreError if `classes` is missing, has another length or names an unknown output; NothingToMeasure, which is one,
    if no step has a class.
    """
    nodes, labels, problems = [], [], []
    for i, tree in enumerate(trees, start=1):
        classes = tree.extra.get("classes")
        if not isinstance(classes, list) or len(classes) != len(tree.steps):
            raise ScoreError(f"record {i}: classes must be a list with one entry a step: a name, a list of names, null")
        for j, (node, label) in enumerate(zip((tree.nodes[i] for i in tree.steps), classes, strict=True)):
            if label is None:
                continue
            names = {label} if isinstance(label, str) else set(label) if isinstance(label, list) else {None}
            if unknown := names - node.outputs.keys():
                known = ", ".join(node.outputs) or "none"
                raise ScoreError(f"record {i}, step {j}: class {unknown.pop()!r} is no output; the outputs are {known}")
            nodes.append(node)
            labels.append(names)
            problems.append(tree.problem)
    if not nodes:
        raise NothingToMeasure("the records hold no step with a class")
    outputs = list(nodes[0].outputs)
    return Classes(
        problems,
        {name: np.array([node.outputs[name] for node in nodes]) for name in outputs},
        {name: np.array([name in names for names in labels]) for name in outputs},
    )


def best_threshold(value_N: Float[np.ndarray, " N"], positive_N: Bool[np.ndarray, " N"]) -> float | None:
    """Returns the threshold, inclusive, with the largest F1 (the highest one if tied); `None` if all are negative."""
    if not positive_N.any():
        return None
    order_N = np.argsort(-value_N, kind="stable")
    value_N, hits_N = value_N[order_N], np.cumsum(positive_N[order_N])
    f1_N = 2 * hits_N / (np.arange(1, len(hits_N) + 1) + positive_N.sum())
    last_N = np.append(value_N[1:] != value_N[:-1], True)  # a threshold takes all steps of equal value
    return float(value_N[np.flatnonzero(last_N)[np.argmax(f1_N[last_N])]])


def figures(request: Request) -> Report:
    """Returns `classes`, the figures by class, with 95 % intervals over problems, and the top class's `accuracy`.

    Each class has the figures `auroc`, `average_precision`, `f1` (at 0.5) and `f1_tuned`, `{"value", "low", "high"}` as
    is `accuracy`, and the numbers `n` (its steps), `threshold`, `ece` and `ece_if_calibrated`. `f1_tuned` uses the
    `threshold` fitted on `calibrate`; both are null if it holds no step of the class, or no file. `ece` is the
    calibration error of the class output as a probability, and `ece_if_calibrated` its 95 % quantile under noise alone.
    Also `n_steps`, `n_problems`, `too_long`, and `most_frequent_class`, the share of the most frequent class. Raises
    NothingToMeasure or ScoreError as `classes_of` does.
    """
    classes = classes_of(request.trees)
    tuning = [tree for trees in request.calibrate.values() for tree in trees]
    tuned = classes_of(tuning) if tuning else None
    rows = {}
    for name, value_N in classes.value.items():
        threshold = best_threshold(tuned.value[name], tuned.positive[name]) if tuned else None
        rows[name] = _figures(value_N, classes.positive[name], classes.problem_N, threshold, request.seed)
    top_N = np.array(list(classes.value))[np.argmax(np.stack(list(classes.value.values())), axis=0)]
    right_N = np.array([bool(classes.positive[name][i]) for i, name in enumerate(top_N)])
    common = max(float(positive_N.mean()) for positive_N in classes.positive.values())
    return {
        "n_steps": len(classes.problem_N),
        "n_problems": len(set(classes.problem_N)),
        "classes": rows,
        "accuracy": bootstrap(lambda w: (w @ right_N) / w.sum(-1), classes.problem_N, seed=request.seed).json(),
        "most_frequent_class": common,
        "too_long": request.left_out,
    }


def _figures(
    value_N: Float[np.ndarray, " N"], positive_N: Bool[np.ndarray, " N"], problems: list[str], threshold: float | None,
    seed: int,
) -> dict[str, Any]:  # fmt: skip
    def interval(statistic: Callable[[np.ndarray], Any]) -> dict[str, Any]:
        return bootstrap(statistic, problems, seed=seed).json()

    noise_R = ece_if_calibrated(value_N, positive_N, problems, seed=seed)
    return {
        "n": int(positive_N.sum()),
        "auroc": interval(lambda w: auroc(value_N, positive_N, w)),
        "average_precision": interval(lambda w: average_precision(value_N, positive_N, w)),
        "f1": interval(lambda w: f1(value_N >= 0.5, positive_N, w)),
        "f1_tuned": None if threshold is None else interval(lambda w: f1(value_N >= threshold, positive_N, w)),
        "threshold": threshold,
        "ece": ece(value_N, positive_N),
        "ece_if_calibrated": jsonable(np.quantile(noise_R, 0.95)),
    }


KEYS = ("auroc", "average_precision", "f1", "f1_tuned")


def tables(report: Report) -> Iterator[Table]:
    yield _table("", report)


def section(models: Sequence[PageModel]) -> Iterator[Block]:
    for model in models:
        yield _table(f"{model.name}: ", model.results["classes"])


def _table(name: str, report: Mapping[str, Any]) -> Table:
    def row(title: str, entry: Mapping[str, Any]) -> list[Cell]:
        threshold = "" if entry["threshold"] is None else f"{entry['threshold']:.3g}"
        return [title, entry["n"], *(entry[key] for key in KEYS), threshold, entry["ece"], entry["ece_if_calibrated"]]

    rows = [row(title, entry) for title, entry in report["classes"].items()]
    title = f"{name}Classes: {report['n_steps']} steps, {report['n_problems']} problems{left_out_words(report)}"
    columns = ("class", "n", "AUROC", "average precision", "F1 at 0.5", "F1 tuned", "threshold", "ECE", "by noise")
    top = [["highest class is right", report["n_steps"], report["accuracy"]], ["baseline: most frequent class", "",
           report["most_frequent_class"]]]  # fmt: skip
    return Table(title, columns, [*rows, None, *([*line, *[""] * (len(columns) - 3)] for line in top)])


BENCHMARK = Benchmark(name="classes", title="Classes of steps", tables=tables, figures=figures, section=section)
