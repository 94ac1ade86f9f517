"""Agreement of step scores with step labels: ranking, first errors and alternatives, with trivial baselines.

A label becomes a class: a rating by its sign, with an explicit choice for neutral; a correctness or value is positive
if it is at least 0.5.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jprm.methods.evaluate import baselines
from jprm.methods.evaluate.benchmark import Benchmark, Report, Request
from jprm.methods.evaluate.blocks import Block, Note, PageModel, Table, best_first, left_out_words, words
from jprm.methods.evaluate.findings import Finding
from jprm.methods.evaluate.scored import NothingToMeasure, ScoreError, ahead, scores_of, weighted_f1
from jprm.statistics import Draws, auroc, average_precision, bootstrap, draws, jsonable, weighted_mean
from jprm.tree import ReasoningTree

Scores = Sequence[Float[np.ndarray, " _"]]
"""One array of scores per tree."""

NEUTRAL = ("positive", "negative", "drop")
UNLABELLED = -1


class Labelled(NamedTuple):
    """A scored tree as arrays over its nodes. `class_N` is 1 (right), 0 (wrong) or `UNLABELLED`.

    `parent_N` and `depth_N` are -1 and 0 for first steps; `length_N` counts characters.
    """

    problem: str
    parent_N: Int[np.ndarray, " N"]
    class_N: Int[np.ndarray, " N"]
    depth_N: Int[np.ndarray, " N"]
    length_N: Int[np.ndarray, " N"]
    score_N: Float[np.ndarray, " N"]


def label_class(label: float | None, semantics: str, neutral: str | None, where: str = "label") -> int:
    """Returns the class of a label: 1, 0, or `UNLABELLED` (for a missing label, and for neutral under `drop`).

    A `rating` is -1, 0 (neutral) or 1; `correctness` and `value` labels are 1 from 0.5 on. Raises ScoreError if a
    rating is neutral and `neutral` is `None`, or the label has no class, and ValueError if `neutral` is not positive,
    negative, drop or `None`.
    """
    if neutral not in (*NEUTRAL, None):
        raise ValueError(f"neutral must be one of {', '.join(NEUTRAL)}, not {neutral!r}")
    if label is None:
        return UNLABELLED
    if semantics == "rating" and label == 0 and neutral is None:
        raise ScoreError(f"{where}: is a neutral rating. Say what it counts as: --neutral {'|'.join(NEUTRAL)}")
    if semantics == "rating" and label in (-1, 0, 1):
        return {1: 1, -1: 0, 0: {"positive": 1, "negative": 0}.get(neutral or "", UNLABELLED)}[int(label)]
    if semantics in ("correctness", "value") and 0 <= label <= 1:
        return int(label >= 0.5)
    raise ScoreError(f"{where}: {label!r} is no label of semantics {semantics!r} that says right or wrong")


def judged_chains(
    parent_N: Int[np.ndarray, " N"], class_N: Int[np.ndarray, " N"]
) -> tuple[Int[np.ndarray, " M"], Bool[np.ndarray, " M"]]:
    """Returns a tree's distinct labelled chains: (last node, whether it is an error).

    Every root-to-leaf path ends at its first wrong step, or at its leaf. It counts if every step up to there is
    labelled. Paths that only branch after the first error are one chain. `parent_N` is -1 at a root, and parents come
    first.
    """
    leaf_N = np.ones(len(parent_N), bool)
    leaf_N[parent_N[parent_N >= 0]] = False
    clean_N = np.zeros(len(parent_N), bool)  # this step and all before it are labelled right
    wrong_N = np.zeros(len(parent_N), bool)  # the first error of its chain
    for i, parent in enumerate(parent_N):
        if parent < 0 or clean_N[parent]:
            clean_N[i], wrong_N[i] = class_N[i] == 1, class_N[i] == 0
    end_M = np.flatnonzero(wrong_N | (clean_N & leaf_N))
    return end_M, wrong_N[end_M]


def judged_right(
    parent_N: Int[np.ndarray, " N"],
    score_N: Float[np.ndarray, " N"],
    end_M: Int[np.ndarray, " M"],
    wrong_M: Bool[np.ndarray, " M"],
    threshold: float,
) -> Bool[np.ndarray, " M"]:
    """Returns whether each chain's first step below the threshold is its first error, or neither exists.

    `end_M` and `wrong_M` are from `judged_chains`.
    """
    before_N = np.full(len(parent_N), np.inf)  # the lowest score before each step
    for i, parent in enumerate(parent_N):
        if parent >= 0:
            before_N[i] = min(before_N[parent], score_N[parent])
    return (before_N[end_M] >= threshold) & ((score_N[end_M] < threshold) == wrong_M)


def alternatives(parent_N: Int[np.ndarray, " N"], class_N: Int[np.ndarray, " N"]) -> Int[np.ndarray, "Q 2"]:
    """Returns all pairs (right, wrong) of steps with the same parent, as node indices; (0, 2) without such pairs.

    First steps are siblings too (parent -1); unlabelled steps are in no pair.
    """
    siblings: dict[int, tuple[list[int], list[int]]] = {}
    for i in np.flatnonzero(class_N != UNLABELLED):
        siblings.setdefault(int(parent_N[i]), ([], []))[1 - class_N[i]].append(i)
    pairs = [pair for right, wrong in siblings.values() for pair in itertools.product(right, wrong)]
    return np.array(pairs, int).reshape(-1, 2)


def steps_report(
    scored: Sequence[ReasoningTree], neutral: str | None, seed: int, threshold: float = 0.5
) -> dict[str, Any]:
    """Returns the figures of scored trees and of `baselines`. Raises NothingToMeasure unless steps are right and wrong.

    Each figure is `{"value", "low", "high"}` with a 95 % interval over problems:

    - `auroc`, and `average_precision_of_errors` and `_of_correct`, with wrong or right steps as positives.
    - `accuracy` at `threshold`; a step is right from it on.
    - `alternatives`: the fraction of right/wrong sibling pairs that the scores rank correctly; ties count half; with
      `n_pairs`.
    - `first_error`: `accuracy` and `f1`, as in ProcessBench, over `judged_chains` at `threshold`, with plain
      `error_accuracy`, `correct_accuracy`, `n_error` and `n_correct`.
    - `ahead`: for `auroc` and `alternatives`, the paired difference from the best baseline, with its name as `baseline`
      and its `baseline_value`.
    - `n_problems`, `n_records` (trees), `n_steps` (also unlabelled ones), `n_right` and `n_wrong`.

    Figures are null if undefined, e.g. `alternatives` without pairs. Baselines with several features are fitted to the
    labels of other problems; `position` and `step_length` have no `accuracy` and no `first_error`, as they have no
    threshold. The keys `neutral` and `threshold` repeat the arguments. Raises ScoreError or ValueError as `labelled`.
    """
    trees = labelled(scored, neutral)
    class_N = np.concatenate([tree.class_N for tree in trees] or [np.zeros(0, int)])
    right, wrong = (int((class_N == kind).sum()) for kind in (1, 0))
    if not (right and wrong):
        raise NothingToMeasure(
            f"{right} steps are labelled right and {wrong} wrong, and ranking needs both. Add labels"
        )
    trivial = {
        "constant": [np.ones(len(tree.parent_N)) for tree in trees],
        "position": [-tree.depth_N.astype(float) for tree in trees],
        "step_length": [-tree.length_N.astype(float) for tree in trees],
    }
    trivial |= baselines.of_labelled(scored, [tree.class_N for tree in trees])
    scores = [tree.score_N for tree in trees]
    return {
        "neutral": neutral,
        "threshold": threshold,
        "n_problems": len({tree.problem for tree in trees}),
        "n_records": len(trees),
        "n_steps": len(class_N),
        "n_right": right,
        "n_wrong": wrong,
        **_figures(trees, scores, seed, threshold=threshold),
        "baselines": {
            # Depth and length by themselves are no probabilities and have no threshold.
            name: _figures(trees, score, seed, threshold=None if name in ("position", "step_length") else 0.5)
            for name, score in trivial.items()
        },
        "ahead": _ahead(trees, scores, trivial, seed),
    }


def _ahead(trees: Sequence[Labelled], scores: Scores, trivial: Mapping[str, Scores], seed: int) -> dict[str, Any]:
    """Returns AUROC and alternatives minus those of the best `baseline` for each, paired."""
    _, right_N, problem_N = _labelled_steps(trees, scores)

    def area(scores: Scores) -> Draws:
        score_N = _labelled_steps(trees, scores)[0]
        return draws(lambda weight_RN: auroc(score_N, right_N, weight_RN), problem_N, seed=seed)

    def won(scores: Scores) -> Draws:
        won_Q, problem_Q = _won(trees, scores)
        return draws(lambda weight_RQ: weighted_mean(won_Q, weight_RQ), problem_Q, seed=seed)

    rows = {}
    for key, drawn in (("auroc", area), ("alternatives", won)):
        of_trivial = {name: drawn(score) for name, score in trivial.items()}
        rows[key] = ahead(drawn(scores), of_trivial)
        rows[key]["baseline_value"] = jsonable(of_trivial[rows[key]["baseline"]].value)
    return rows


def auroc_draws(scored: Sequence[ReasoningTree], neutral: str | None, seed: int) -> Draws:
    """Returns the AUROC of all labelled steps (NaN if all are right or all wrong) and its draws over problems.

    `neutral` is the class of neutral ratings, as in `label_class`. Raises the errors of `labelled`.
    """
    trees = labelled(scored, neutral)
    score_N, right_N, problem_N = _labelled_steps(trees, [tree.score_N for tree in trees])
    return draws(lambda weight_RN: auroc(score_N, right_N, weight_RN), problem_N, seed=seed)


def _labelled_steps(trees: Sequence[Labelled], scores: Scores):
    """Returns (scores, whether correct, problems) of all labelled steps."""
    known = [tree.class_N != UNLABELLED for tree in trees]
    score_N = np.concatenate([score_N[known_N] for score_N, known_N in zip(scores, known, strict=True)])
    right_N = np.concatenate([tree.class_N[known_N] for tree, known_N in zip(trees, known, strict=True)]) == 1
    problem_N = [tree.problem for tree, known_N in zip(trees, known, strict=True) for _ in range(known_N.sum())]
    return score_N, right_N, problem_N


def _won(trees: Sequence[Labelled], scores: Scores) -> tuple[Float[np.ndarray, " Q"], list[str]]:
    """Returns whether the right step of each alternative pair wins, and its problem."""
    won, problem_Q = [], []
    for tree, score in zip(trees, scores, strict=True):
        right_Q, wrong_Q = alternatives(tree.parent_N, tree.class_N).T
        won.extend((score[right_Q] > score[wrong_Q]) + 0.5 * (score[right_Q] == score[wrong_Q]))
        problem_Q.extend([tree.problem] * len(right_Q))
    return np.array(won, float), problem_Q


def _figures(trees: Sequence[Labelled], scores: Scores, seed: int, threshold: float | None) -> dict[str, Any]:
    score_N, right_N, problem_N = _labelled_steps(trees, scores)
    won_Q, won_problem = _won(trees, scores)

    def interval(statistic, groups):
        return bootstrap(statistic, groups, seed=seed).json()

    figures = {
        "auroc": interval(lambda w: auroc(score_N, right_N, w), problem_N),
        "average_precision_of_errors": interval(lambda w: average_precision(-score_N, ~right_N, w), problem_N),
        "average_precision_of_correct": interval(lambda w: average_precision(score_N, right_N, w), problem_N),
        "alternatives": {**interval(lambda w: weighted_mean(won_Q, w), won_problem), "n_pairs": len(won_Q)},
    }
    if threshold is not None:
        agree_N = (score_N >= threshold) == right_N
        figures["accuracy"] = interval(lambda w: weighted_mean(agree_N, w), problem_N)
        figures["first_error"] = _first_error(trees, scores, threshold, interval)
    return figures


def _first_error(trees: Sequence[Labelled], scores, threshold: float, interval) -> dict[str, Any]:
    problem_M, first_error_M, right_M = [], [], []
    for tree, score_N in zip(trees, scores, strict=True):
        end_M, wrong_M = judged_chains(tree.parent_N, tree.class_N)
        problem_M += [tree.problem] * len(end_M)
        first_error_M.extend(np.where(wrong_M, tree.depth_N[end_M], -1))
        right_M.extend(judged_right(tree.parent_N, score_N, end_M, wrong_M, threshold))
    first_error_M, right_M = np.array(first_error_M, int), np.array(right_M, bool)
    point = weighted_f1(right_M, first_error_M, np.ones(len(right_M)))
    return {
        "accuracy": interval(lambda w: weighted_mean(right_M, w), problem_M),
        "f1": interval(lambda w: weighted_f1(right_M, first_error_M, w).f1, problem_M),
        "error_accuracy": jsonable(point.error_accuracy),
        "correct_accuracy": jsonable(point.correct_accuracy),
        "n_error": int((first_error_M >= 0).sum()),
        "n_correct": int((first_error_M < 0).sum()),
    }


def labelled(trees: Sequence[ReasoningTree], neutral: str | None, first: int = 0) -> list[Labelled]:
    """Returns scored trees as arrays. Error messages number the records from `first` + 1.

    `neutral` is the class of neutral ratings, as in `label_class`. Raises ScoreError if a score is missing, and the
    errors of `label_class`.
    """
    arrays, names = [], [f"record {first + i}" for i in range(1, len(trees) + 1)]
    for tree, name, score_N in zip(trees, names, scores_of(trees, names), strict=True):
        nodes = tree.nodes
        parent_N = np.array([node.parent for node in nodes], int)
        depth_N = np.zeros(len(nodes), int)
        for j, parent in enumerate(parent_N):
            depth_N[j] = depth_N[parent] + 1 if parent >= 0 else 0
        class_N = np.array(
            [label_class(x.label, tree.semantics, neutral, f"{name}, step {j}") for j, x in enumerate(nodes)], int
        )
        length_N = np.array([len(node.text) for node in nodes], int)
        arrays.append(Labelled(tree.problem, parent_N, class_N, depth_N, length_N, score_N))
    return arrays


def figures(request: Request) -> Report:
    report = steps_report(request.trees, request.neutral, request.seed, request.scale.threshold)
    return report | {"too_long": request.left_out}


KEYS = ("auroc", "average_precision_of_errors", "average_precision_of_correct", "accuracy", "alternatives")


def tables(report: Report) -> Iterator[Table]:
    yield from _tables({"scores": report}, report)


def section(models: Sequence[PageModel]) -> Iterator[Block]:
    reports = {model.name: model.results["steps"] for model in models}
    yield from _tables(reports, next(iter(reports.values())))
    yield Note(
        "AUROC: how often a right step scores above a wrong one; 50 is chance. Average precision of errors: the"
        " fraction of wrong steps among those that score lowest, over all cut-offs; chance is the fraction of wrong"
        " steps. Alternatives: as AUROC, within one step of one problem, where nothing but content differs. Accuracy"
        " and first errors are at 0.5, or the threshold that the model's adapter states."
    )


def _tables(reports: Mapping[str, Report], first: Report) -> Iterator[Table]:
    """Yields differences from the best baselines, then all figures, with a column for each of `reports` (by model)."""
    if "ahead" in first:  # reports of 0.1 have none
        rows = [
            [words(key), words(first["ahead"][key]["baseline"]), *(report["ahead"][key] for report in reports.values())]
            for key in first["ahead"]
            if any(report["ahead"][key]["value"] is not None for report in reports.values())
        ]
        yield Table("Steps: less the best trivial baseline, points", ("", "baseline", *reports), rows)
    columns = {**reports, **best_first(first["baselines"], "auroc")}
    rows = [[words(key), *(column.get(key) for column in columns.values())] for key in KEYS]
    for key in ("accuracy", "f1"):
        rows.append([f"first error, {key}", *(column.get("first_error", {}).get(key) for column in columns.values())])
    rows = [row for row in rows if any(cell and cell["value"] is not None for cell in row[1:])]  # not without pairs
    title = f"Steps: {first['n_right']} right, {first['n_wrong']} wrong, {first['n_problems']} problems;"
    thresholds = dict.fromkeys(f"{report.get('threshold', 0.5):g}" for report in reports.values())
    title += f" threshold {', '.join(thresholds)}; neutral: {first['neutral'] or 'none'}{left_out_words(first)}"
    yield Table(title, ("", *columns), rows)


def findings(results: Mapping[str, Any]) -> Iterator[Finding]:
    steps = results["steps"]
    named = {"auroc": "Right steps above wrong ones (AUROC)", "alternatives": "Right steps above wrong alternatives"}
    for key, title in named.items():
        less = steps.get("ahead", {}).get(key)  # results of 0.1 have none
        if steps[key]["value"] is not None:
            yield Finding(title, steps[key], words(less["baseline"]) if less else "", less)


def problem_draws(results: Mapping[str, Any], scores: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    trees = [tree for name in results["sections"]["steps"] for tree in scores[name]]
    yield "steps, AUROC", auroc_draws(trees, results["neutral"], results["seed"])


BENCHMARK = Benchmark(
    name="steps",
    title="Step labels",
    tables=tables,
    figures=figures,
    needs=("data", "neutral"),
    section=section,
    findings=findings,
    problem_draws=problem_draws,
)
