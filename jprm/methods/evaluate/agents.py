"""Turns of agents: scores against ternary labels, first bad turns and outcomes, beside trivial baselines.

A label is -1 (a bad turn), 0 (neutral) or 1 (good); of a correctness or a value, below 0.5 is bad and all else good. A
score becomes a class by two thresholds: bad below the lower one, good from the upper one on, neutral in between. They
are fitted on the files of `calibrate`; without such files both are the model's own threshold, and no turn is neutral.

`step_accuracy` and `first_bad_turn` are the two figures of AgentProcessBench (Fan et al. 2026, arXiv 2603.14465, and
its `eval/compare.py`): the fraction of all labelled turns whose class is right, and the fraction of trajectories whose
first turn of class -1 is the labelled one, or that have none in both.

Baselines are scores too. Their thresholds have the highest step accuracy on the very data they are judged on, which
favours them:

    all good         every turn is good
    position         late turns are bad
    last             the last turn of a trajectory is bad
    length           long turns are bad
    repeats          a turn is bad that calls a tool as an earlier turn of its trajectory did
    errors           turns are bad by the fraction of tools' answers before them that say "error"
    text features    a regression on all of these but `last`, fitted to the labels of other problems

Trajectories with outcomes have `trials` (`jprm.methods.evaluate.trials`), those with a bad turn `first_bad`
(`jprm.methods.evaluate.first_bad`). Both need no model, and have figures of a model where there are scores.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jprm.methods.evaluate import baselines
from jprm.methods.evaluate import first_bad as of_first_bad
from jprm.methods.evaluate import trials as of_trials
from jprm.methods.evaluate.benchmark import Benchmark, Report, Request
from jprm.methods.evaluate.blocks import Block, Note, PageModel, Table, left_out_words, words
from jprm.methods.evaluate.findings import Finding
from jprm.methods.evaluate.options import Agents
from jprm.methods.evaluate.run import by_name, load_and_score, source_of
from jprm.methods.evaluate.scored import ScoreError
from jprm.methods.scored_files import stored_scale
from jprm.statistics import Draws, auroc, bootstrap, draws, f1, interval, jsonable, weighted_mean
from jprm.tree import ReasoningTree, chains_of, tree_of

CLASSES = (-1, 0, 1)
CANDIDATES = 32
"""Thresholds that are tried: quantiles of the scores."""


class LabelledTurns(NamedTuple):
    """The M labelled turns of K trajectories. A turn that trajectories of one tree share is there for each."""

    problem_M: Sequence[str]
    path_M: Int[np.ndarray, " M"]  # its trajectory
    place_M: Int[np.ndarray, " M"]  # from 0 on its trajectory
    class_M: Int[np.ndarray, " M"]
    score_M: Float[np.ndarray, " M"]
    baseline: dict[str, Float[np.ndarray, " M"]]
    problem_K: Sequence[str]
    outcome_K: Float[np.ndarray, " K"]  # NaN where unknown
    reward_K: Float[np.ndarray, " K"]  # the lowest score of the trajectory
    last_K: Float[np.ndarray, " K"]  # the score of its last turn


def turns_of(trees: Sequence[ReasoningTree]) -> LabelledTurns:
    """Returns labelled turns as arrays. Raises ScoreError for a turn without a score, and where no turn has a label."""
    turns, ends, rows = [], [], []
    for i, tree in enumerate(trees):
        for chain in chains_of(tree):
            nodes = [tree.nodes[j] for j in chain]
            score_T = np.array([node.score for node in nodes], float)
            if (missing_T := np.isnan(score_T)).any():
                raise ScoreError(f"record {i}: turn {missing_T.argmax()} has no score. Score the file again")
            numbers = of_trials.features(tree, chain)
            for place, node in enumerate(nodes):
                if node.label is None:
                    continue
                of_label = _class(node.label, tree.semantics, f"record {i}, turn {place}")
                trivial = (1.0, -place, float(place < len(chain) - 1), -len(numbers.texts[place]),
                           float(not numbers.repeats[place]), -numbers.errors[place])  # fmt: skip
                before = sum(numbers.characters[: place + 1])
                rows.append([place, np.log1p(place), *np.log1p([numbers.characters[place], before]), *trivial[3:]])
                turns.append((tree.problem, len(ends), place, of_label, score_T[place], *trivial))
            outcome = np.array(nodes[-1].correct, float)  # NaN for None
            ends.append((tree.problem, outcome, score_T.min(), score_T[-1]))
    if not turns:
        raise ScoreError("no turn has a label. Give turns `label`, and the record its `semantics`")
    problem_M, path_M, place_M, class_M, *columns = zip(*turns, strict=True)
    score_M, *trivial = (np.array(column, float) for column in columns)
    names = ("all good", "position", "last", "length", "repeats", "errors")
    baseline: dict[str, np.ndarray] = dict(zip(names, trivial, strict=True))
    not_bad_M1 = (np.array(class_M) != -1)[:, None].astype(int)
    of_text = baselines.fitted([*np.array(rows, float)[:, None]], [*not_bad_M1], problem_M)
    if of_text is not None:
        baseline["text features"] = np.concatenate(of_text)
    of_turns = problem_M, np.array(path_M), np.array(place_M), np.array(class_M), score_M, baseline
    problem_K, *of_ends = zip(*ends, strict=True)
    return LabelledTurns(*of_turns, problem_K, *(np.array(column, float) for column in of_ends))


def _class(label: float, semantics: str, where: str) -> int:
    if semantics == "rating":
        return int(label)
    if semantics in ("correctness", "value"):
        return 1 if label >= 0.5 else -1
    raise ScoreError(f"{where}: a label of semantics {semantics!r} says neither good nor bad")


def classes_at(score_M: Float[np.ndarray, " M"], low: float, high: float) -> Int[np.ndarray, " M"]:
    """Returns -1 below `low`, 1 from `high` on, 0 in between."""
    return np.where(score_M < low, -1, np.where(score_M >= high, 1, 0))


def best_thresholds(score_M: Float[np.ndarray, " M"], class_M: Int[np.ndarray, " M"]) -> tuple[float, float]:
    """Returns the thresholds, of quantiles of the scores, with the highest accuracy; the lowest of equals."""
    cuts = np.unique(np.quantile(score_M, np.linspace(0, 1, CANDIDATES)))
    cuts = np.append(cuts, np.nextafter(cuts[-1], np.inf))
    pairs = [(low, high) for i, low in enumerate(cuts) for high in cuts[i:]]
    right = [np.mean(classes_at(score_M, low, high) == class_M) for low, high in pairs]
    low, high = pairs[int(np.argmax(right))]
    return float(low), float(high)


def first_bad(turns: LabelledTurns, class_M: Int[np.ndarray, " M"]) -> Int[np.ndarray, " K"]:
    """Returns the place of each trajectory's first turn of class -1; -1 where none is."""
    none = np.iinfo(int).max
    first_K = np.full(len(turns.problem_K), none)
    np.minimum.at(first_K, turns.path_M[class_M == -1], turns.place_M[class_M == -1])
    return np.where(first_K == none, -1, first_K)


def agents_report(
    trees: Sequence[ReasoningTree], thresholds: tuple[float, float], seed: int, fitted: bool = False
) -> dict[str, Any]:
    """Returns the figures of trajectories, each with a 95 % interval over problems.

    `trials` and `first_bad` are there where outcomes and bad turns are. The other figures are of turns that have both
    labels and scores: `baselines` has those of trivial scores, and `ahead` the model's less the best baseline's of each
    figure, paired on the same resamples.

    Raises ScoreError where some turns have a score and others none, and where there is nothing to judge by.
    """
    nodes = [node for tree in trees for node in tree.nodes if node.is_step]
    scored, labelled = (any(getattr(node, key) is not None for node in nodes) for key in ("score", "label"))
    trials, first = of_trials.trials_report(trees, seed), of_first_bad.first_bad_report(trees, thresholds[0], seed)
    report = {key: figures for key, figures in {"trials": trials, "first_bad": first}.items() if figures}
    if scored and (labelled or not report):
        report |= _turns_report(trees, thresholds, seed, fitted)
    if not report:
        raise ScoreError("nothing to judge by: give turns `label`, or two trajectories of each `problem` an `outcome`")
    return report


def _turns_report(
    trees: Sequence[ReasoningTree], thresholds: tuple[float, float], seed: int, fitted: bool
) -> dict[str, Any]:
    turns = turns_of(trees)
    labelled_K = np.isin(np.arange(len(turns.problem_K)), turns.path_M)
    drawn: dict[str, dict[str, Draws]] = {}
    for name, score_M in {"scores": turns.score_M, **turns.baseline}.items():
        at = thresholds if name == "scores" else best_thresholds(score_M, turns.class_M)
        figures_of = _figures(turns, score_M, at, labelled_K)
        drawn[name] = {key: draws(figure, groups, seed=seed) for key, (figure, groups) in figures_of.items()}
    shown = {name: {key: interval(figure).json() for key, figure in row.items()} for name, row in drawn.items()}
    ahead = {}
    for key, figure in drawn.pop("scores").items():
        best = max(drawn, key=lambda name: np.nan_to_num(drawn[name][key].value, nan=-1))
        other = drawn[best][key]
        less = figure._replace(value=figure.value - other.value, drawn_R=figure.drawn_R - other.drawn_R)
        ahead[key] = interval(less, fraction=False).json() | {"baseline": best}
    return {
        "n_turns": len(turns.class_M), "n_trajectories": int(labelled_K.sum()),
        "n_problems": len(set(turns.problem_M)),
        "n_by_class": {str(c): int((turns.class_M == c).sum()) for c in CLASSES},
        "thresholds": list(thresholds), "fitted": fitted, **shown.pop("scores"), "baselines": shown, "ahead": ahead,
        "outcome": _outcomes(turns, seed), "calibration": _calibration(turns, seed),
    }  # fmt: skip


def _figures(
    turns: LabelledTurns, score_M: np.ndarray, thresholds: tuple[float, float], labelled_K: np.ndarray
) -> dict:
    """Returns (statistic of weights, groups) of each figure of a score."""
    class_M, wanted_M = classes_at(score_M, *thresholds), turns.class_M
    hit_K = (first_bad(turns, class_M) == first_bad(turns, wanted_M))[labelled_K]
    problem_K = list(itertools.compress(turns.problem_K, labelled_K))
    figures: dict[str, Any] = {
        "step_accuracy": (lambda w: weighted_mean(class_M == wanted_M, w), turns.problem_M),
        "first_bad_turn": (lambda w: weighted_mean(hit_K, w), problem_K),
        "auroc": (lambda w: auroc(score_M, wanted_M != -1, w), turns.problem_M),
    }
    for c, name in zip(CLASSES, ("bad", "neutral", "good"), strict=True):
        figures[f"f1_{name}"] = (lambda w, c=c: f1(class_M == c, wanted_M == c, w), turns.problem_M)
    return figures


def _outcomes(turns: LabelledTurns, seed: int) -> dict[str, Any]:
    """Returns how often a solved trajectory scores above one that is not, by the lowest and by the last score."""
    known_K = np.isfinite(turns.outcome_K)
    problems = list(itertools.compress(turns.problem_K, known_K))
    right_K = turns.outcome_K[known_K] == 1
    if right_K.all() or not right_K.any():
        return {"n": int(known_K.sum())}
    scores = {"lowest": turns.reward_K[known_K], "last": turns.last_K[known_K]}
    return {"n": int(known_K.sum()), "solved": jsonable(np.mean(right_K))} | {
        f"auroc_{name}": bootstrap(lambda w, s=s: auroc(s, right_K, w), problems, seed=seed).json()
        for name, s in scores.items()
    }


def _calibration(turns: LabelledTurns, seed: int) -> list[dict[str, Any]]:
    """Returns the mean score and the fraction of turns that are not bad, by place: turns 1, 2, 3 to 4, 5 to 8, ..."""
    rows, begin = [], 0
    while begin <= turns.place_M.max():
        end = 2 * begin if begin > 1 else begin + 1
        some_M = (turns.place_M >= begin) & (turns.place_M < end)
        if some_M.any():
            problems = list(itertools.compress(turns.problem_M, some_M))
            fine = turns.class_M[some_M] != -1
            rows.append({
                "turns": f"{begin + 1} to {end}" if end > begin + 1 else f"{begin + 1}", "n": int(some_M.sum()),
                "score": jsonable(turns.score_M[some_M].mean()),
                "not_bad": bootstrap(lambda w, fine=fine: weighted_mean(fine, w), problems, seed=seed).json(),
            })  # fmt: skip
        begin = end
    return rows


def run(options: Agents) -> Report:
    """Returns the command's report; without a model, of the scores that the files hold, or of none."""
    if options.model is not None:
        return figures(load_and_score(BENCHMARK, options)[1])
    files = by_name([*options.data, *options.calibrate])
    scales = {stored_scale(path) for path in files.values()}
    if len(scales) > 1:
        named = ", ".join(map(str, files.values()))
        raise ValueError(f"{named}: hold scores of different meaning. Evaluate them apart")
    trees = {name: list(map(tree_of, source_of(BENCHMARK, path).records(path))) for name, path in files.items()}
    data, fitted = ({name: trees[name] for name in by_name(paths)} for paths in (options.data, options.calibrate))
    return figures(Request(data, fitted, scale=scales.pop()))


def figures(request: Request) -> Report:
    fitting = [tree for trees in request.calibrate.values() for tree in trees]
    thresholds = (request.scale.threshold, request.scale.threshold)
    if fitting:
        known = turns_of(fitting)
        thresholds = best_thresholds(known.score_M, known.class_M)
    return agents_report(request.trees, thresholds, request.seed, bool(fitting)) | {"too_long": request.left_out}


KEYS = ("step_accuracy", "first_bad_turn", "auroc", "f1_bad", "f1_neutral", "f1_good")


def tables(report: Report) -> Iterator[Table]:
    yield from _tables({"scores": report}, report)


def section(models: Sequence[PageModel]) -> Iterator[Block]:
    reports = {model.name: model.results["agents"] for model in models}
    yield from _tables(reports, next(iter(reports.values())))
    yield Note(
        "Step accuracy: turns whose class (bad, neutral, good) is right. First bad turn: trajectories whose first bad"
        " turn, or that there is none, is right. AUROC: how often a turn that is not bad scores above a bad one."
        " Baselines have the thresholds that are best on these very turns. Ahead: less the best baseline of the row."
        " pass^k: that k different trials of a task are all solved; pass@k: that one of them is."
    )


def _tables(reports: dict[str, Report], first: Report) -> Iterator[Table]:
    if "n_turns" in first:
        yield from _tables_of_turns(reports, first)
    for key, tables_of in (("first_bad", of_first_bad.tables), ("trials", of_trials.tables)):
        if key in first:
            yield from tables_of({name: report[key] for name, report in reports.items()})


def _tables_of_turns(reports: dict[str, Report], first: Report) -> Iterator[Table]:
    columns = {**reports, **{f"baseline: {name}": row for name, row in first["baselines"].items()}}
    counts = ", ".join(f"{n} of class {c}" for c, n in first["n_by_class"].items())
    title = f"Turns: {first['n_turns']} ({counts}) of {first['n_trajectories']} trajectories, {first['n_problems']}"
    low, high = first["thresholds"]
    title += f" problems; bad below {low:.3g}, good from {high:.3g}{left_out_words(first)}"
    rows = [[words(key), *(column.get(key) for column in columns.values())] for key in KEYS]
    ahead = [
        [words(key), *(r["ahead"][key] for r in reports.values()), first["ahead"][key]["baseline"]] for key in KEYS
    ]
    yield Table("Turns: less the best trivial baseline, points", ("", *reports, "best baseline"), ahead)
    yield Table(title, ("", *columns), rows)
    outcome = [
        [words(key), *(r["outcome"].get(key) for r in reports.values())] for key in ("auroc_lowest", "auroc_last")
    ]
    if any(cell for row in outcome for cell in row[1:]):
        yield Table(f"Solved above unsolved trajectories, {first['outcome']['n']}", ("score", *reports), outcome)
    for name, report in reports.items():
        rows = [[row["turns"], row["n"], row["score"], row["not_bad"]] for row in report["calibration"]]
        yield Table(f"Calibration by turn: {name}", ("turns", "number", "mean score", "not bad"), rows)


def findings(results: Any) -> Iterator[Finding]:
    report = results["agents"]
    named = {"auroc": "Turns that are not bad above bad ones (AUROC)", "step_accuracy": "Turns of the right class"}
    for key, said in named.items():
        if key in report:
            yield Finding(said, report[key], words(report["ahead"][key]["baseline"]), report["ahead"][key])
    first, trials = report.get("first_bad", {}), report.get("trials", {})
    if first.get("scores"):
        base, less = words(first["best_trivial"]["step"]), first["ahead"]["lowest"]["step"]
        yield Finding("First bad turn named by the lowest score", first["scores"]["lowest"]["step"], base, less)
    if trials.get("chosen"):
        base, less = words(trials["best_trivial"]), trials["ahead"]["lowest"]
        yield Finding("Solved, of trials chosen by the lowest score", trials["chosen"]["lowest"], base, less)


BENCHMARK = Benchmark(
    name="agents",
    title="Agents' turns",
    tables=tables,
    run=run,
    figures=figures,
    context=True,
    section=section,
    findings=findings,
)
