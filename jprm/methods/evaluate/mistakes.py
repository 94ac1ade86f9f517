"""MR-Ben, BIG-Bench-Mistake and Hard2Verify: is a solution right, and where is its first mistake?

The prediction is the first step with a score below the model's threshold, or "no mistake" without such a step.

    mcc               Matthews' correlation of predicting "no mistake" with a correct solution; 0 if undefined (0 / 0)
    error_accuracy    fraction of chains with a known first mistake that is predicted exactly
    correct_accuracy  fraction of chains without a mistake that are predicted so
    f1                the harmonic mean of the two, as in ProcessBench
    accuracy          fraction of correct predictions, without chains with a mistake at an unknown place

MR-Ben (Zeng et al. 2024, arXiv 2406.13975, `script/evaluate.py` and `script/utils.py`) adds 0.2 max(0, mcc), 0.3 times
the mistakes found and 0.5 times the accuracy of reasons for each subject (one file each), and averages over subjects. A
score gives no reasons, so `mr_score` has the first two parts, at most 0.5: `value` is the mean over subjects, like the
script, `pooled` is over all chains. The script divides the mistakes found by all solutions with a mistake,
`error_accuracy` by those with a known place: in a program it is a line, which is missing for 13 of 164 programs. (The
script leaves programs to a judge of reasons.) BIG-Bench-Mistake (Tyen et al. 2024, arXiv 2311.08516) reports
`accuracy`, which it calls mistake finding.

Hard2Verify (Pandit et al. 2025, arXiv 2510.13744, `utils.py`) reports the accuracy on right and on wrong items, their
mean (balanced accuracy) and their harmonic mean (balanced F1) at three levels:

    steps         every step, also after the first mistake; predicted right from the threshold on
    responses     a solution is right if all of its steps are, and predicted right if all of them are
    first error   `correct_accuracy` and `error_accuracy`, so that balanced F1 is `f1`

Its authors tune a PRM's threshold on a hundred of the 200 solutions; here it is the model's own.

Baselines: no chain has a mistake; every chain has one at its first step; and position, length etc. with thresholds
fitted to the other folds (`jprm.methods.evaluate.processbench.cross_fit`), beside the model's scores with such
thresholds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jprm.methods.evaluate import baselines
from jprm.methods.evaluate.benchmark import Benchmark, Report, Request
from jprm.methods.evaluate.blocks import Block, Cell, Note, PageModel, Table, best_first, left_out_words, words
from jprm.methods.evaluate.findings import Finding
from jprm.methods.evaluate.mistakes_reader import TASKS
from jprm.methods.evaluate.processbench import cross_fit
from jprm.methods.evaluate.scored import NothingToMeasure, ScoreError, ahead, harmonic_mean, or_none, scores_of
from jprm.statistics import Interval, draws, interval, ratio, weighted_mean
from jprm.tree import ReasoningTree

KEYS = ("mcc", "error_accuracy", "correct_accuracy", "f1", "accuracy")


class MarkedChains(NamedTuple):
    """N chains. `first_N` is the index of the first mistake, -1 without a mistake, -2 if its place is unknown.

    `correct_N` is the truth for a verdict on the whole chain.
    """

    problem: Sequence[str]
    task_N: np.ndarray
    first_N: Int[np.ndarray, " N"]
    correct_N: Bool[np.ndarray, " N"]
    scores: Sequence[Float[np.ndarray, " _"]]


def chains_of_files(trees: Sequence[ReasoningTree]) -> MarkedChains:
    """Returns scored chains, with `first_error` and `task` from `extra`; `task` is "" if absent.

    Raises ScoreError if a `first_error` is missing or invalid, or a score is missing; NothingToMeasure without records.
    """
    first = []
    for i, tree in enumerate(trees, start=1):
        place = tree.extra.get("first_error", "")
        if not (place is None or type(place) is int and -1 <= place < len(tree.nodes)):
            raise ScoreError(f"record {i}: first_error is {place!r}, not null, -1 or the index of a step")
        first.append(-2 if place is None else place)
    if not first:
        raise NothingToMeasure("no record")
    tasks = np.array([str(tree.extra.get("task", "")) for tree in trees])
    first_N, scores = np.array(first), scores_of(trees, [f"record {i}" for i in range(1, len(trees) + 1)])
    return MarkedChains([tree.problem for tree in trees], tasks, first_N, first_N == -1, scores)


def predicted(scores: Sequence[Float[np.ndarray, " _"]], threshold: float) -> Int[np.ndarray, " N"]:
    """Returns the index of each chain's first step below the threshold, or -1."""
    return np.array([int(np.argmax(low)) if (low := score_P < threshold).any() else -1 for score_P in scores])


def mcc(
    said_N: Bool[np.ndarray, " N"], true_N: Bool[np.ndarray, " N"], weight_RN: Float[np.ndarray, "*R N"]
) -> Float[np.ndarray, "*R"]:
    """Returns Matthews' correlation of predictions and truth, in [-1, 1], under each row of weights.

    It is 0 if a marginal sum is 0, as in MR-Ben.
    """
    tp, tn = weight_RN @ (said_N & true_N), weight_RN @ (~said_N & ~true_N)
    fp, fn = weight_RN @ (said_N & ~true_N), weight_RN @ (~said_N & true_N)
    return np.nan_to_num(ratio(tp * tn - fp * fn, np.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))))


def mistakes_report(
    trees: Sequence[ReasoningTree], threshold: float, seed: int, subjects: Sequence[str] | None = None
) -> dict[str, Any]:
    """Returns all figures, overall and by `tasks`, as `{"value", "low", "high"}` (95 %), and `baselines`.

    A step is wrong below `threshold`. A value is null without chains to judge. `ahead` is the F1 of the cross-fitted
    scores (`cross_fit`) minus the best baseline's, paired; absent with too few chains. `mr_score` averages over
    `subjects`, one name per chain; by default each task is a subject.

    The report has `threshold`. It, each task and the baselines `none` and `first step` have the counts `n`, `n_error`
    and `n_not_located`, and the figures `mcc`, `error_accuracy`, `correct_accuracy`, `f1` and `accuracy`. Other
    baselines and `cross_fit` have the last four, and are absent with too few chains. `mr_score` has the numbers
    `value`, the mean over subjects, and `pooled`, the score of all chains together. Raises ScoreError or
    NothingToMeasure as `chains_of_files` does.
    """
    chains = chains_of_files(trees)
    own_N, none_N = predicted(chains.scores, threshold), np.full(len(trees), -1)
    report: dict[str, Any] = {"threshold": threshold, **_figures(chains, own_N, seed)}
    report["tasks"] = _by_name(chains, chains.task_N, own_N, seed)
    by_subject = report["tasks"] if subjects is None else _by_name(chains, np.array(subjects), own_N, seed)
    of_subjects = list(map(mr_score, by_subject.values()))
    report["mr_score"] = {"value": sum(of_subjects) / len(of_subjects), "pooled": mr_score(report)}
    rows = report["baselines"] = {
        "none": _figures(chains, none_N, seed),
        "first step": _figures(chains, np.zeros_like(none_N), seed),
    }
    known_N = chains.first_N >= -1
    right = {"none": none_N == chains.first_N, "first step": chains.first_N == 0}
    known = np.flatnonzero(known_N).tolist()
    scorers = {"scores": [chains.scores[i] for i in known], **baselines.of_steps([trees[i] for i in known])}
    problems = [chains.problem[i] for i in known]
    for name, scores in scorers.items():
        if folds := or_none(cross_fit, chains.first_N[known], scores, problems, seed):
            right[name] = np.zeros(len(trees), bool)
            right[name][known] = folds[0]
    fitted = {name: _drawn(chains, right_N, known_N, seed) for name, right_N in right.items()}
    shown = {name: {key: interval(drawn).json() for key, drawn in by_key.items()} for name, by_key in fitted.items()}
    f1_of = {name: by_key["f1"] for name, by_key in fitted.items()}
    if "scores" in fitted:
        report["cross_fit"] = shown.pop("scores")
        report["ahead"] = ahead(f1_of.pop("scores"), f1_of)
    rows |= {name: figures for name, figures in shown.items() if name not in rows}
    return report


def mr_score(row: Mapping[str, Any]) -> float:
    """Returns MR-Ben's score without reasons, 0.2 MCC (at least 0) + 0.3 accuracy of first errors: at most 0.5.

    `row` has the figures of a subject (`mistakes_report`). First errors at an unknown place count as missed.
    """
    located = row["n_error"] - row["n_not_located"]
    step_accuracy = (row["error_accuracy"]["value"] or 0.0) * located / max(row["n_error"], 1)
    return 0.2 * max(0.0, row["mcc"]["value"]) + 0.3 * step_accuracy


def _by_name(chains: MarkedChains, name_N: np.ndarray, predicted_N: np.ndarray, seed: int) -> dict[str, Any]:
    return {str(name): _figures(chains, predicted_N, seed, name_N == name) for name in sorted(set(name_N))}


def _drawn(chains: MarkedChains, right_N: np.ndarray, of_N: np.ndarray, seed: int) -> dict[str, Any]:
    """Returns draws of the accuracies over the chains `of_N`, except mistakes at an unknown place."""
    some_N = of_N & (chains.first_N >= -1)
    error_N, none_N = (some_N & part_N for part_N in (chains.first_N >= 0, chains.first_N == -1))
    statistic: dict[str, Any] = {
        key: functools.partial(_mean, right_N, part_N)
        for key, part_N in (("error_accuracy", error_N), ("correct_accuracy", none_N), ("accuracy", some_N))
    }
    statistic["f1"] = lambda w: harmonic_mean(statistic["error_accuracy"](w), statistic["correct_accuracy"](w))
    return {key: draws(statistic[key], chains.problem, seed=seed) for key in KEYS[1:]}


def _mean(right_N: np.ndarray, of_N: np.ndarray, weight_RN: np.ndarray) -> Any:
    return weighted_mean(right_N, weight_RN * of_N)


def _figures(
    chains: MarkedChains, predicted_N: np.ndarray, seed: int, of_N: np.ndarray | None = None
) -> dict[str, Any]:
    of_N = np.ones(len(predicted_N), bool) if of_N is None else of_N
    said_N = predicted_N == -1
    drawn = {
        "mcc": draws(lambda w: mcc(said_N, chains.correct_N, w * of_N), chains.problem, seed=seed),
        **_drawn(chains, predicted_N == chains.first_N, of_N, seed),
    }
    first_N = chains.first_N[of_N]
    counts = {"n": int(of_N.sum()), "n_error": int((first_N != -1).sum()), "n_not_located": int((first_N == -2).sum())}
    between = {key: interval(draws_of, fraction=key != "mcc") for key, draws_of in drawn.items()}
    value, low, high = between["mcc"]
    between["mcc"] = Interval(value, np.maximum(low, -1), np.minimum(high, 1))  # of few chains, s is large
    return counts | {key: figure.json() for key, figure in between.items()}


def balanced(
    called_N: Bool[np.ndarray, " N"], right_N: Bool[np.ndarray, " N"], problems: Sequence[str], seed: int
) -> dict[str, Any]:
    """Returns Hard2Verify's `right`, `wrong`, `accuracy` and `f1` for N verdicts, with 95 % intervals over problems.

    `called_N` is predicted right, `right_N` the truth. Each figure is `{"value", "low", "high"}`, null without items.
    `right` and `wrong` are the recalls of right and wrong items, `accuracy` their mean and `f1` their harmonic mean.
    """
    statistic: dict[str, Any] = {
        "right": functools.partial(_mean, called_N, right_N),
        "wrong": functools.partial(_mean, ~called_N, ~right_N),
    }
    statistic["accuracy"] = lambda w: (statistic["right"](w) + statistic["wrong"](w)) / 2
    statistic["f1"] = lambda w: harmonic_mean(statistic["right"](w), statistic["wrong"](w))
    return {key: interval(draws(statistic_of, problems, seed=seed)).json() for key, statistic_of in statistic.items()}


def levels_report(
    trees: Sequence[ReasoningTree], threshold: float, seed: int, subjects: Sequence[str] | None = None
) -> dict[str, Any]:
    """Returns `mistakes_report` plus Hard2Verify's `levels`: balanced accuracy of steps, responses and first errors.

    A step is right from `threshold` on; `subjects` has the subject of every tree (default: its task). `levels` has
    `steps`, `responses` and `first error`, each as `balanced` returns. Raises ScoreError unless every label is 0 or 1.
    """
    report, chains = mistakes_report(trees, threshold, seed, subjects), chains_of_files(trees)
    labels = [node.label for tree in trees for node in tree.nodes]
    if not set(labels) <= {0, 1}:
        raise ScoreError("labels are not 0 or 1 for every step")
    of_step = [tree.problem for tree in trees for _ in tree.nodes]
    said_N, predicted_N = np.concatenate(chains.scores) >= threshold, predicted(chains.scores, threshold)
    located_N = predicted_N == chains.first_N
    return report | {"levels": {
        "steps": balanced(said_N, np.array(labels) == 1, of_step, seed),
        "responses": balanced(predicted_N == -1, chains.correct_N, chains.problem, seed),
        "first error": balanced(located_N == chains.correct_N, chains.correct_N, chains.problem, seed),
    }}  # fmt: skip


def figures(report_of: Callable[..., dict[str, Any]], request: Request) -> Report:
    files = [name for name, trees in request.data.items() for _ in trees]
    several = {"subjects": files} if len(set(files)) > 1 else {}
    return report_of(request.trees, request.scale.threshold, request.seed, **several) | {"too_long": request.left_out}


def _rows(report: Report) -> Iterator[list[Cell] | None]:
    yield ["all", *(report[key] for key in KEYS)]
    for task, row in report["tasks"].items() if len(report["tasks"]) > 1 else ():
        yield [f"  {words(task)}", *(row[key] for key in KEYS)]
    yield None
    if "cross_fit" in report:
        yield ["cross-fitted", *(report["cross_fit"].get(key, "") for key in KEYS)]
    for label, row in best_first(report["baselines"], "f1").items():
        yield [label, *(row.get(key, "") for key in KEYS)]


def tables(report: Report) -> Iterator[Table]:
    columns = ("", "MCC", "mistake found [95 %]", "none found where none is [95 %]", "F1 [95 %]", "both [95 %]")
    title = f"{report['n']} chains, {report['n_error']} with a mistake" + left_out_words(report)
    yield Table(title, columns, list(_rows(report)))
    if levels := report.get("levels"):
        columns = ("", "right called so [95 %]", "wrong called so [95 %]", "balanced accuracy [95 %]",
                   "balanced F1 [95 %]")  # fmt: skip
        yield Table("three levels", columns, [[level, *row.values()] for level, row in levels.items()])


def _section(name: str, models: Sequence[PageModel]) -> Iterator[Block]:
    for model in models:
        for table in tables(model.results[name]):
            yield Table(f"{model.name}: {table.title}", table.columns, table.rows)
    yield Note(
        "A mistake is found where the first step below the threshold is exactly it. MCC: correlation of the verdict on"
        " the whole solution with the truth. Cross-fitted, and baselines: thresholds fitted to other folds."
    )


def _findings(name: str, title: str, headline: tuple[str, str], results: Mapping[str, Any]) -> Iterator[Finding]:
    report, (figure, key) = results[name], headline
    yield Finding(f"{title}, {figure}", report[key])
    if less := report.get("ahead"):
        yield Finding(f"{title}, F1, cross-fitted threshold", report["cross_fit"]["f1"], words(less["baseline"]), less)


def _benchmark(
    name: str, title: str, headline: tuple[str, str], standard: Sequence[str],
    report_of: Callable[..., dict[str, Any]] = mistakes_report,
) -> Benchmark:  # fmt: skip
    return Benchmark(
        name=name,
        title=title,
        tables=tables,
        figures=functools.partial(figures, report_of),
        reader=name,
        standard=standard,
        section=functools.partial(_section, name),
        findings=functools.partial(_findings, name, title, headline),
    )


MR_BEN = _benchmark(  # but for its math, a file of ProcessBench's name
    "mr_ben", "MR-Ben", ("first mistake found", "error_accuracy"),
    [f"mrben/{name}.json" for name in ("biology", "chemistry", "coding", "logic", "medicine", "physics")],
)  # fmt: skip
BIG_BENCH_MISTAKE = _benchmark(
    "big_bench_mistake", "BIG-Bench-Mistake", ("mistake finding", "accuracy"),
    [f"big_bench_mistake/{name}.jsonl" for name, _ in TASKS],
)  # fmt: skip
HARD2VERIFY = _benchmark(
    "hard2verify", "Hard2Verify", ("first error, balanced F1", "f1"), ["hard2verify/test.jsonl"], levels_report
)
