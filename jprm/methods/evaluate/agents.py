"""Agent turns: scores against ternary labels, first bad turns and outcomes, compared with trivial baselines.

A label is -1 (bad turn), 0 (neutral) or 1 (good). For semantics correctness or value, a label below 0.5 is bad and any
other good. Two thresholds turn a score into a class: bad below the lower one, good from the upper one on, neutral in
between. They are fitted on the files of `calibrate`; without such files both are the model's own threshold, so no turn
is neutral.

`step_accuracy` and `first_bad_turn` are the two figures of AgentProcessBench (Fan et al. 2026, arXiv 2603.14465, and
its `eval/compare.py`): the fraction of labelled turns with the right class, and the fraction of trajectories with the
right first turn of class -1 (or correctly without one).

Baselines are scores too. Their thresholds maximise step accuracy on the evaluated data itself, which favours them:

    all good         every turn is good
    position         late turns are bad
    last             the last turn of a trajectory is bad
    length           long turns are bad
    repeats          a turn is bad if it repeats a tool call of an earlier turn
    errors           turns are bad in proportion to the fraction of earlier tool results that contain "error"
    text features    a regression on all of these except `last`, fitted to the labels of other problems

`trials` covers trajectories with an outcome of 1 (solved) or 0. Trials of one task share their `problem`. If c of a
task's n trials are solved, pass^k is the probability that k different trials are all solved, C(c, k) / C(n, k), and
pass@k the probability that at least one is, 1 - C(n - c, k) / C(n, k). Both are means over tasks of unbiased estimates
(Yao et al. 2024, arXiv 2406.12045, and Chen et al. 2021, arXiv 2107.03374). A choice takes the trial with the highest
key; ties are broken at random. The keys of a model are its lowest, mean and last score in a trial. Trivial keys need no
model:

    any              a random trial; its expectation is pass^1
    fewest turns     and `most turns`
    shortest         the fewest characters written by the agent, including calls
    fewest errors    the lowest fraction of tool results that contain "error"
    fewest repeats   the fewest repeated calls

`first_bad` covers trajectories with a labelled bad turn: which turn, and which agent, is to blame. A prediction names
one turn. It is right within k if it is at most k turns from the first labelled one; `agent` is true if its turn belongs
to the agent to blame (`mistake_agent` of the record, or else the `name` of the labelled turn). Names are compared
without case and without a parenthesised suffix, e.g. "Orchestrator (thought)". `any_failure` is true if the turn has
any bad label (reported if a trajectory has several), `root_cause` if it is the message at the record's index
`root_cause`, e.g. from AgentRx. Predictions from scores are `lowest`, the first turn with the lowest score, and
`below`, the first turn below the threshold, or else the lowest. Predictions without a model are the `first`, `second`,
`last` and `longest` turn, `telemetry`, the lowest of a regression on turn number, repeats and errors that is fitted to
other tasks, and `any`, the expectation over random turns. `any agent` is the probability that a random agent of the
trajectory is the one to blame. Who&When is by Zhang et al. 2025, arXiv 2505.00212.

`interventions` is the cost of a critic that stops the agent at low-scoring turns (`interventions.py`).

Trials and first bad turns are reported without a model too; if there are scores, the model's figures are added.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jprm.methods.evaluate import baselines
from jprm.methods.evaluate.benchmark import Benchmark, Report, Request
from jprm.methods.evaluate.blocks import Block, Note, PageModel, Table, best_first, left_out_words, words
from jprm.methods.evaluate.findings import Finding
from jprm.methods.evaluate.interventions import RunOfTurns, interventions_report
from jprm.methods.evaluate.options import Agents
from jprm.methods.evaluate.run import UNREAD, PathLike, by_name, load_and_score, source_of, stored_trees
from jprm.methods.evaluate.scored import ScoreError
from jprm.methods.jobs.score import stored_scale
from jprm.methods.judge.critiques import KEY as CRITIQUES
from jprm.statistics import Draws, auroc, bootstrap, difference, draws, f1, interval, jsonable, numbered, weighted_mean
from jprm.tree import Node, ReasoningTree, chains_of, tree_of

CLASSES = (-1, 0, 1)
CANDIDATES = 32
"""Thresholds to try: quantiles of the scores."""

OF_TRIAL = {"lowest": np.min, "mean": np.mean, "last": lambda score_T: score_T[-1]}
"""Reductions of the turn scores in a trial to one key."""

WITHIN = (0, 1, 3, 5)
"""Distances, in turns, within which a predicted turn counts as right."""


class Features(NamedTuple):
    """Model-free features of the turns in one trajectory, one entry per turn."""

    texts: list[str]  # a turn's calls as JSON, or its text if it has no calls
    characters: list[int]  # of its text and its calls
    repeats: list[bool]  # whether it calls as an earlier turn did
    errors: list[float]  # the fraction of tools' answers before it that say "error"


def features(tree: ReasoningTree, chain: Sequence[int]) -> Features:
    """Computes `Features` of the turns in `chain` (node indices, first to last).

    A tool result is an error if its first 200 characters contain "error", in any case.
    """
    texts, characters, repeats, errors = [], [], [], []
    answers, wrong, at = 0, 0, -1
    for i in chain:
        node, above = tree.nodes[i], tree.nodes[i].parent
        while above != at and above >= 0:
            if tree.nodes[above].role == "tool":
                answers += 1
                wrong += "error" in tree.nodes[above].text[:200].lower()
            above = tree.nodes[above].parent
        calls = [call.get("function", call) for call in node.extra.get("tool_calls") or ()]
        call_text = json.dumps([[call.get("name"), call.get("arguments")] for call in calls], sort_keys=True)
        repeats.append(bool(calls) and call_text in texts)
        characters.append(len(node.text) + (len(call_text) if calls else 0))
        texts.append(call_text if calls else node.text)
        errors.append(wrong / max(answers, 1))
        at = i
    return Features(texts, characters, repeats, errors)


def telemetry_of(of_turns: Features) -> Float[np.ndarray, "T F"]:
    """Returns (T, 4) numbers that read no text: turn t from 0, log(1 + t), repeats up to it, fraction of errors."""
    place_T = np.arange(len(of_turns.texts))
    return np.column_stack([place_T, np.log1p(place_T), np.cumsum(of_turns.repeats), of_turns.errors])


class AgentRun(NamedTuple):
    """One trajectory; a tree may hold several."""

    tree: ReasoningTree
    turns: list[Node]
    features: Features
    where: str  # for errors, e.g. `record 3`


def runs_of(trees: Sequence[ReasoningTree]) -> list[AgentRun]:
    return [
        AgentRun(tree, [tree.nodes[j] for j in chain], features(tree, chain), f"record {i}")
        for i, tree in enumerate(trees, start=1)
        for chain in chains_of(tree)
    ]


def _shown(rows: Mapping[str, Mapping[str, Draws]]) -> dict[str, dict[str, Any]]:
    return {name: {key: interval(drawn).json() for key, drawn in row.items()} for name, row in rows.items()}


def _best(drawn: Mapping[str, Draws]) -> str:
    """Returns the name of the highest value; the first if tied."""
    return max(drawn, key=lambda name: np.nan_to_num(drawn[name].value, nan=-1))


# ---- Turns with labels and scores.


class LabelledTurns(NamedTuple):
    """The M labelled turns of K trajectories. A turn that trajectories share is repeated for each."""

    problem_M: Sequence[str]
    path_M: Int[np.ndarray, " M"]  # its trajectory
    place_M: Int[np.ndarray, " M"]  # from 0 on its trajectory
    class_M: Int[np.ndarray, " M"]  # -1 (bad), 0 or 1 (good)
    score_M: Float[np.ndarray, " M"]
    baseline: dict[str, Float[np.ndarray, " M"]]
    problem_K: Sequence[str]
    outcome_K: Float[np.ndarray, " K"]  # NaN where unknown
    reward_K: Float[np.ndarray, " K"]  # the lowest score of the trajectory
    last_K: Float[np.ndarray, " K"]  # the score of its last turn


def turns_of(trees: Sequence[ReasoningTree]) -> LabelledTurns:
    """Collects labelled turns as arrays.

    Raises ScoreError if any turn, labelled or not, has no score, no turn is labelled, or a label's semantics is not
    rating, correctness or value.
    """
    turns, ends, rows = [], [], []
    for tree, nodes, of_turns, where in runs_of(trees):
        score_T = np.array([node.score for node in nodes], float)
        if (missing_T := np.isnan(score_T)).any():
            raise ScoreError(f"{where}: turn {missing_T.argmax()} has no score. Score the file again")
        for place, node in enumerate(nodes):
            if node.label is None:
                continue
            of_label = _class(node.label, tree.semantics, f"{where}, turn {place}")
            trivial = (1.0, -place, float(place < len(nodes) - 1), -len(of_turns.texts[place]),
                       float(not of_turns.repeats[place]), -of_turns.errors[place])  # fmt: skip
            before = sum(of_turns.characters[: place + 1])
            rows.append([place, np.log1p(place), *np.log1p([of_turns.characters[place], before]), *trivial[3:]])
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
    labelled = problem_M, np.array(path_M), np.array(place_M), np.array(class_M), score_M, baseline
    problem_K, *of_ends = zip(*ends, strict=True)
    return LabelledTurns(*labelled, problem_K, *(np.array(column, float) for column in of_ends))


def _class(label: float, semantics: str, where: str) -> int:
    if semantics == "rating":
        return int(label)
    if semantics in ("correctness", "value"):
        return 1 if label >= 0.5 else -1
    raise ScoreError(f"{where}: a label of semantics {semantics!r} says neither good nor bad")


def classes_at(score_M: Float[np.ndarray, " M"], low: float, high: float) -> Int[np.ndarray, " M"]:
    """Returns -1 below `low`, 1 from `high` on, 0 in between (and for NaN)."""
    return np.where(score_M < low, -1, np.where(score_M >= high, 1, 0))


def best_thresholds(score_M: Float[np.ndarray, " M"], class_M: Int[np.ndarray, " M"]) -> tuple[float, float]:
    """Returns (low, high), the pair of score quantiles with the highest accuracy by `classes_at`; the lowest if tied.

    A threshold may lie just above the highest score: no turn is then good, or all are bad. `score_M` must have entries.
    """
    cuts = np.unique(np.quantile(score_M, np.linspace(0, 1, CANDIDATES)))
    cuts = np.append(cuts, np.nextafter(cuts[-1], np.inf))
    pairs = [(low, high) for i, low in enumerate(cuts) for high in cuts[i:]]
    right = [np.mean(classes_at(score_M, low, high) == class_M) for low, high in pairs]
    low, high = pairs[int(np.argmax(right))]
    return float(low), float(high)


def first_bad(turns: LabelledTurns, class_M: Int[np.ndarray, " M"]) -> Int[np.ndarray, " K"]:
    """Returns each trajectory's first turn of class -1 (from 0), or -1. `class_M` may be predictions."""
    none = np.iinfo(int).max
    first_K = np.full(len(turns.problem_K), none)
    np.minimum.at(first_K, turns.path_M[class_M == -1], turns.place_M[class_M == -1])
    return np.where(first_K == none, -1, first_K)


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
    shown, ahead = _shown(drawn), {}
    for key, figure in drawn.pop("scores").items():
        best = _best({name: row[key] for name, row in drawn.items()})
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
    """Returns {figure: (statistic of weights, bootstrap groups)} for one score."""
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
    """Returns the AUROC of solved over unsolved trajectories, by the lowest and by the last score."""
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
    """Returns the mean score and the fraction not bad, by turn number: 1, 2, 3 to 4, 5 to 8, ..."""
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


# ---- Trials of tasks.


class Trials(NamedTuple):
    """K trials with an outcome, and the keys that may rank them."""

    task_K: Int[np.ndarray, " K"]  # equal for trials of one task, from 0
    solved_K: Float[np.ndarray, " K"]
    keys: Mapping[str, Float[np.ndarray, " K"]]  # of the scores, by the names in `OF_TRIAL`; none without scores
    trivial: Mapping[str, Float[np.ndarray, " K"]]  # by name, as `keys`: the highest is chosen


def trials_of(trees: Sequence[ReasoningTree]) -> Trials:
    """Returns the trials with an outcome, solved or not; `keys` is empty if a turn of any of these lacks a score."""
    tasks, solved, scores, trivial = [], [], [], []
    for tree, nodes, of_turns, _ in runs_of(trees):
        if (correct := nodes[-1].correct) is None:
            continue
        turns = len(nodes)
        tasks.append(str(tree.problem))
        solved.append(float(correct))
        scores.append(np.array([node.score for node in nodes], float))  # NaN for None
        trivial.append((0, -turns, turns, -sum(of_turns.characters), -of_turns.errors[-1], -sum(of_turns.repeats)))
    names = ("any", "fewest turns", "most turns", "shortest", "fewest errors", "fewest repeats")
    columns = np.array(trivial, float).reshape(-1, len(names)).T
    scored = bool(scores) and not any(np.isnan(score_T).any() for score_T in scores)
    keys = {name: np.array([key(score_T) for score_T in scores]) for name, key in OF_TRIAL.items() if scored}
    task_K = numbered(tasks)
    return Trials(task_K, np.array(solved), keys, dict(zip(names, columns, strict=True)))


def pass_hat(solved_T: Float[np.ndarray, " T"], k: int) -> float:
    """Returns the probability that k random different trials are all solved (1, else 0); k must be at most T."""
    return math.comb(int(solved_T.sum()), k) / math.comb(len(solved_T), k)


def pass_at(solved_T: Float[np.ndarray, " T"], k: int) -> float:
    """Returns the probability that at least one of k random different trials is solved, as for `pass_hat`."""
    return 1 - math.comb(int((1 - solved_T).sum()), k) / math.comb(len(solved_T), k)


def chosen(key_T: Float[np.ndarray, " T"], solved_T: Float[np.ndarray, " T"]) -> float:
    """Returns the probability that the trial with the highest key is solved; ties are broken at random."""
    return float(solved_T[key_T == key_T.max()].mean())


def trials_report(trees: Sequence[ReasoningTree], seed: int) -> dict[str, Any]:
    """Returns pass^k, pass@k and the success rate of chosen trials, with 95 % intervals.

    `k` lists 1 .. the smallest number of trials per task; `pass_hat` and `pass_at` have a figure for each. Tasks with a
    single trial are left out and counted as `n_single`. `chosen` (keys `lowest`, `mean` and `last`) and `trivial` have
    the success rates by key, `ahead` each key of the scores minus `best_trivial`, on the same resamples of tasks;
    `oracle` is the rate with the best trial per task. `chosen` and `ahead` are empty if any turn lacks a score. If all
    trials of every task have the same outcome, no choice matters: `chosen`, `trivial` and `ahead` are empty, and
    the name `best_trivial` is "". Also `n_tasks` and `n_trials`. Returns {} if no task has two trials with outcomes.
    """
    trials = trials_of(trees)
    all_tasks = [np.flatnonzero(trials.task_K == task) for task in range(int(trials.task_K.max(initial=-1)) + 1)]
    of_task = [index for index in all_tasks if len(index) > 1]
    if not of_task:
        return {}
    k = list(range(1, min(map(len, of_task)) + 1))
    solved = [trials.solved_K[index] for index in of_task]

    def over_tasks(value_P: Sequence[float]) -> Draws:
        return draws(lambda w: weighted_mean(np.array(value_P), w), np.arange(len(of_task)), seed=seed)

    def choices(keys: Mapping[str, np.ndarray]) -> dict[str, Draws]:
        of_tasks = [*zip(of_task, solved, strict=True)]
        return {name: over_tasks([chosen(key_K[k], s) for k, s in of_tasks]) for name, key_K in keys.items()}

    differ = any(s.min() < s.max() for s in solved)  # else every choice is as good
    keys, trivial = (choices(trials.keys), choices(trials.trivial)) if differ else ({}, {})
    best = _best(trivial) if trivial else ""
    return {
        "n_tasks": len(of_task),
        "n_trials": sum(map(len, of_task)),
        "n_single": len(all_tasks) - len(of_task),
        "k": k,
        "pass_hat": [interval(over_tasks([pass_hat(s, n) for s in solved])).json() for n in k],
        "pass_at": [interval(over_tasks([pass_at(s, n) for s in solved])).json() for n in k],
        **_shown({"chosen": keys, "trivial": trivial}),
        "oracle": interval(over_tasks([s.max() for s in solved])).json(),
        "best_trivial": best,
        "ahead": {name: difference(drawn, trivial[best]).json() for name, drawn in keys.items()},
    }


# ---- First bad turns.


class Failed(NamedTuple):
    """A trajectory with a labelled bad turn."""

    task: str
    place: int  # of its first bad turn, from 0
    root: int | None  # the turn of the root cause; None if unknown, or if no turn is it
    bad_T: Float[np.ndarray, " T"]  # 1 for a bad turn, 0 for another, NaN without a label
    telemetry_TF: Float[np.ndarray, "T F"]
    agents: list[str]  # of each turn; "" if it has no name
    to_blame: str  # the agent, as in `agents`
    scores: list[float] | None  # if every turn has one
    characters: list[int]  # of each turn


def agent_of(name: str) -> str:
    """Normalises an agent's name for comparison: lower case, without a parenthesised suffix."""
    return re.sub(r"\s*\(.*\)\s*$", "", name).strip().casefold()


def failed_of(trees: Sequence[ReasoningTree]) -> list[Failed]:
    """Returns the trajectories with a labelled bad turn: a negative rating, or another label below 0.5."""
    failed = []
    for tree, nodes, of_turns, _ in runs_of(trees):
        bound = 0 if tree.semantics == "rating" else 0.5
        bad_T = np.array([np.nan if node.label is None else node.label < bound for node in nodes], float)
        if not (bad_T == 1).any():
            continue
        place, root = int(np.argmax(bad_T == 1)), tree.extra.get("root_cause")
        turn_of = {message: k for k, message in enumerate(tree.steps)} if len(nodes) == len(tree.steps) else {}
        agents = [agent_of(str(node.extra.get("name") or "")) for node in nodes]
        blamed = tree.extra.get("mistake_agent")
        to_blame = agent_of(blamed) if isinstance(blamed, str) else agents[place]
        scores = [float(node.score) for node in nodes if node.score is not None]
        known = scores if len(scores) == len(nodes) else None
        about = (bad_T, telemetry_of(of_turns), agents, to_blame, known, of_turns.characters)
        failed.append(Failed(tree.problem, place, turn_of.get(root) if type(root) is int else None, *about))
    return failed


def first_bad_report(trees: Sequence[ReasoningTree], threshold: float, seed: int) -> dict[str, Any]:
    """Returns the figures of every prediction with 95 % intervals over tasks; {} if no turn is labelled bad.

    `scores` (`lowest`, and `below` the `threshold`) and `trivial` have the figures by prediction; `scores` is empty if
    a turn lacks a score. `figures` lists those reported: `step`, `within_1`, `within_3`, `within_5`, and if known
    `agent`, `any_failure` and `root_cause`. `best_trivial` names the best trivial prediction by figure; `ahead`, by
    prediction and figure, is the scores minus it, on the same resamples. `n` counts trajectories, `n_tasks` tasks.
    """
    failed = failed_of(trees)
    if not failed:
        return {}
    named = all(run.to_blame and any(run.agents) for run in failed)
    told = {"agent": named, "any_failure": any((run.bad_T == 1).sum() > 1 for run in failed),
            "root_cause": any(run.root is not None for run in failed)}  # fmt: skip
    figures = [figure for figure in _FIGURES if told.get(figure, True)]

    def drawn(value_KC: list[list[float]]) -> dict[str, Draws]:
        value, tasks = np.array(value_KC), [run.task for run in failed]
        all_C = draws(lambda weight_RK: weighted_mean(value, weight_RK), tasks, seed=seed)
        columns = {f: Draws(all_C.value[c], all_C.drawn_R[:, c], all_C.groups) for c, f in enumerate(_FIGURES)}
        return {figure: columns[figure] for figure in figures}

    rows = {name: drawn([_certain(run, at(run)) for run in failed]) for name, at in _TRIVIAL.items()}
    classes = [np.where(np.isnan(run.bad_T), -1, 1 - run.bad_T).astype(int) for run in failed]
    fitted = baselines.fitted([run.telemetry_TF for run in failed], classes, [run.task for run in failed])
    if fitted is not None:
        rows["telemetry"] = drawn([_certain(run, int(np.argmin(s_T))) for run, s_T in zip(failed, fitted, strict=True)])
    rows["any"] = drawn([_random(run) for run in failed])
    if named:  # this baseline has no other figures
        chance = [[(run.to_blame in run.agents) / len({*run.agents})] * len(_FIGURES) for run in failed]
        rows["any agent"] = {"agent": drawn(chance)["agent"]}
    scores: dict[str, dict[str, Draws]] = {}
    if all(run.scores is not None for run in failed):
        scores["lowest"] = drawn([_certain(run, _lowest(run)) for run in failed])
        scores["below"] = drawn([_certain(run, _below(run, threshold)) for run in failed])
    best = {f: _best({name: row[f] for name, row in rows.items() if f in row}) for f in figures}
    return {
        "n": len(failed), "n_tasks": len({run.task for run in failed}), "figures": figures,
        "scores": _shown(scores), "trivial": _shown(rows), "best_trivial": best,
        "ahead": {name: {f: difference(row[f], rows[best[f]][f]).json() for f in figures}
                  for name, row in scores.items()},
    }  # fmt: skip


_FIGURES = (*(f"within_{k}" if k else "step" for k in WITHIN), "agent", "any_failure", "root_cause")
_TRIVIAL = {
    "first": lambda run: 0,
    "second": lambda run: min(1, len(run.agents) - 1),
    "last": lambda run: len(run.agents) - 1,
    "longest": lambda run: int(np.argmax(run.characters)),
}


def _lowest(run: Failed) -> int:
    return int(np.argmin(np.array(run.scores)))


def _below(run: Failed, threshold: float) -> int:
    below = np.array(run.scores) < threshold
    return int(np.argmax(below)) if below.any() else _lowest(run)


def _certain(run: Failed, place: int) -> list[float]:
    """Returns the figures of one predicted turn, in the order of `_FIGURES`."""
    others = (run.agents[place] == run.to_blame, run.bad_T[place] == 1, place == run.root)
    return [float(abs(place - run.place) <= k) for k in WITHIN] + [*map(float, others)]


def _random(run: Failed) -> list[float]:
    """Returns the mean of `_certain` over all turns."""
    return np.mean([_certain(run, place) for place in range(len(run.agents))], 0).tolist()


# ---- The benchmark.


def agents_report(
    trees: Sequence[ReasoningTree], thresholds: tuple[float, float], seed: int, fitted: bool = False
) -> dict[str, Any]:
    """Returns the figures of trajectories, each with a 95 % interval over problems.

    A turn is bad below the first of `thresholds` and good from the second on; `fitted`: whether they were fitted to
    other files. `trials` (`trials_report`) and `first_bad` (`first_bad_report`) are present if there are outcomes and
    bad turns. The rest needs labels, and a score for every turn: `step_accuracy`, `first_bad_turn`, `auroc`, `f1_bad`,
    `f1_neutral` and `f1_good`; the same by name in `baselines`; `ahead`, the model minus the best `baseline` per
    figure, paired on the same resamples; `outcome`, `calibration` (by turn number), counts (`n_turns`, ...), and
    `interventions` if `interventions_report` allows.

    Raises ScoreError if labels exist but only some turns have a score, or no trajectory can be evaluated.
    """
    nodes = [node for tree in trees for node in tree.nodes if node.is_step]
    scored, labelled = (any(getattr(node, key) is not None for node in nodes) for key in ("score", "label"))
    trials, first = trials_report(trees, seed), first_bad_report(trees, thresholds[0], seed)
    report = {key: figures for key, figures in {"trials": trials, "first_bad": first}.items() if figures}
    if scored and (labelled or not report):
        report |= _turns_report(trees, thresholds, seed, fitted)
        if (costs := interventions_report(_turns_of_runs(trees), seed)) is not None:
            report["interventions"] = costs
    if not report:
        raise ScoreError("nothing to judge by: give turns `label`, or two trajectories of each `problem` an `outcome`")
    return report


def _turns_of_runs(trees: Sequence[ReasoningTree]) -> list[RunOfTurns]:
    runs = []
    for tree, nodes, of_turns, where in runs_of(trees):
        classes = [None if node.label is None else _class(node.label, tree.semantics, where) for node in nodes]
        bad_T = np.array([np.nan if of_turn is None else of_turn == -1 for of_turn in classes], float)
        score_T = np.array([node.score for node in nodes], float)
        runs.append(RunOfTurns(str(tree.problem), score_T, bad_T, telemetry_of(of_turns), nodes[-1].correct is True))
    return runs


def run(options: Agents) -> Report:
    """Returns the report of the command; without a model, uses the scores in the files, if any.

    Raises ValueError if files without a model hold scores of different scales.
    """
    if options.model is not None:
        return figures(load_and_score(BENCHMARK, options)[1])
    files = by_name([*options.data, *options.calibrate])
    scales = {stored_scale(path) for path in files.values()}
    if len(scales) > 1:
        named = ", ".join(map(str, files.values()))
        raise ValueError(f"{named}: hold scores of different meaning. Evaluate them apart")
    unread: list[str] = []
    trees = {name: _trees_of(path, options.on_error, unread) for name, path in files.items()}
    data, fitted = ({name: trees[name] for name in by_name(paths)} for paths in (options.data, options.calibrate))
    return figures(Request(data, fitted, scale=scales.pop())) | ({UNREAD: unread} if unread else {})


def _trees_of(path: PathLike, on_error: str, unread: list[str]) -> list[ReasoningTree]:
    """Reads a file's trees; if the file has scores, only trees with a score for every turn."""
    read, source = [], source_of(BENCHMARK, path)
    for key, record in source.reader.read(path, **source.options):
        read.append((f"{path}:{key.partition('.')[0]}", tree_of(record)))
    scored = any(CRITIQUES in tree.extra or any(node.score is not None for node in tree.nodes) for _, tree in read)
    return list(stored_trees(read, on_error, unread)) if scored else [tree for _, tree in read]


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
    if "interventions" in first:
        yield from _tables_of_interventions({name: report["interventions"] for name, report in reports.items()})
    for key, tables_of in (("first_bad", _tables_of_first_bad), ("trials", _tables_of_trials)):
        if key in first:
            yield from tables_of({name: report[key] for name, report in reports.items()})


def _tables_of_turns(reports: dict[str, Report], first: Report) -> Iterator[Table]:
    columns = {**reports, **best_first(first["baselines"], "auroc")}
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


def _tables_of_interventions(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[Table]:
    first = next(iter(reports.values()))
    rows = {f"{model}: scores" if len(reports) > 1 else "scores": report["figures"]["scores"]
            for model, report in reports.items()}  # fmt: skip
    rows |= {name: figures for name, figures in first["figures"].items() if name != "scores"}
    keys = {"over": "good turns stopped", "under": "bad turns passed", "false": "solved runs stopped"}
    keys = {key: title for key, title in keys.items() if key in first["figures"]["scores"]}
    title = f"Interventions: {first['n_good']} good turns, {first['n_bad']} bad ones, {first['n_solved']} solved runs"
    yield Table(title, ("by", *keys.values()), [[name, *(row.get(key) for key in keys)] for name, row in rows.items()])


def _tables_of_trials(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[Table]:
    """Yields the tables of `trials`, by model; pass^k depends on the data only."""
    first = next(iter(reports.values()))
    title = f"Trials: {first['n_trials']} of {first['n_tasks']} tasks"
    title += f"; {first['n_single']} tasks with a single trial left out" * bool(first["n_single"])
    rows = [["pass^k", *first["pass_hat"]], ["pass@k", *first["pass_at"]]]
    yield Table(title, ("", *(f"k={k}" for k in first["k"])), rows)
    if not first["trivial"]:
        return
    rows = [[f"{key} score", *(report["chosen"].get(key) for report in reports.values())] for key in first["chosen"]]
    rows += [[f"trivial: {key}", *[figure] * len(reports)] for key, figure in first["trivial"].items()]
    rows += [["any solved trial", *[first["oracle"]] * len(reports)]]
    yield Table(f"Solved, of one trial chosen for each of {first['n_tasks']} tasks", ("by", *reports), rows)
    if first["ahead"]:
        rows = [[f"{key} score", *(report["ahead"].get(key) for report in reports.values())] for key in first["ahead"]]
        title = f"Less the best trivial choice ({first['best_trivial']})"
        yield Table(title, ("by", *reports), rows)


def _tables_of_first_bad(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[Table]:
    """Yields the tables of `first_bad`, by model."""
    first = next(iter(reports.values()))
    heads = ["right turn" if figure == "step" else figure.replace("_", " ") for figure in first["figures"]]

    def row(name: str, figures: Mapping[str, Any]) -> list[Any]:
        return [name, *(figures.get(figure) for figure in first["figures"])]

    def of_models(key: str) -> list[Any]:
        return [
            row(f"{model}: {name}" if len(reports) > 1 else name, figures)
            for model, report in reports.items() for name, figures in report[key].items()
        ]  # fmt: skip

    rows = of_models("scores")
    rows += [None] * bool(rows) + [row(f"trivial: {name}", figures) for name, figures in first["trivial"].items()]
    title = f"First bad turn of {first['n']} trajectories, {first['n_tasks']} tasks"
    yield Table(title, ("named by", *heads), rows)
    if rows := of_models("ahead"):
        yield Table("Less the best trivial one", ("named by", *heads), [*rows, row("it is", first["best_trivial"])])


def findings(results: Any) -> Iterator[Finding]:
    report = results["agents"]
    named = {"auroc": "Turns that are not bad above bad ones (AUROC)", "step_accuracy": "Turns of the right class"}
    for key, title in named.items():
        if key in report:
            yield Finding(title, report[key], words(report["ahead"][key]["baseline"]), report["ahead"][key])
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
