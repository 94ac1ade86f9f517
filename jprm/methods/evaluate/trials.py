"""Trials of tasks: pass^k and pass@k, and which trial of a task a score chooses, beside trivial choices.

A trial is a trajectory whose outcome is 1 (solved) or 0. Trials of one task share their `problem`. With c of a task's n
trials solved, pass^k is the probability that k different trials are all solved, C(c, k) / C(n, k), and pass@k that one
of them is, 1 - C(n - c, k) / C(n, k): means over tasks, each by its unbiased estimate (Yao et al. 2024, arXiv
2406.12045, and Chen et al. 2021, arXiv 2107.03374).

A choice takes the trial with the highest key, at equal keys one of those at random. Keys of a score are its lowest,
mean and last value on a trial. Trivial keys need no model:

    any              a trial at random, whose expectation is pass^1
    fewest turns     and `most turns`
    shortest         the fewest characters that the agent wrote, calls included
    fewest errors    the lowest fraction of tools' answers that say "error"
    fewest repeats   the fewest calls that repeat an earlier one
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jprm.methods.evaluate.blocks import Table
from jprm.statistics import Draws, difference, draws, interval, weighted_mean
from jprm.tree import ReasoningTree, chains_of

KEYS = {"lowest": np.min, "mean": np.mean, "last": lambda score_T: score_T[-1]}
"""How the scores of a trial's turns become one key."""


class Features(NamedTuple):
    """What the turns of one trajectory show without a model: an entry a turn."""

    texts: list[str]  # a turn's calls as JSON, or its text where it calls nothing
    characters: list[int]  # of its text and its calls
    repeats: list[bool]  # whether it calls as an earlier turn did
    errors: list[float]  # the fraction of tools' answers before it that say "error"


def features(tree: ReasoningTree, chain: Sequence[int]) -> Features:
    """Returns the features of a path's turns. `chain` has its steps' nodes."""
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
        said = json.dumps([[call.get("name"), call.get("arguments")] for call in calls], sort_keys=True)
        repeats.append(bool(calls) and said in texts)
        characters.append(len(node.text) + (len(said) if calls else 0))
        texts.append(said if calls else node.text)
        errors.append(wrong / max(answers, 1))
        at = i
    return Features(texts, characters, repeats, errors)


class Trials(NamedTuple):
    """K trials, of which each has an outcome, and the keys by which a choice may order them."""

    task_K: Int[np.ndarray, " K"]
    solved_K: Float[np.ndarray, " K"]
    keys: Mapping[str, Float[np.ndarray, " K"]]  # of the scores, by the names in `KEYS`; none without scores
    trivial: Mapping[str, Float[np.ndarray, " K"]]


def trials_of(trees: Sequence[ReasoningTree]) -> Trials:
    """Returns the trials of trajectories, or of trees of them, that have an outcome of 0 or 1."""
    tasks, solved, scores, trivial = [], [], [], []
    for tree in trees:
        for chain in chains_of(tree):
            if (correct := tree.nodes[chain[-1]].correct) is None:
                continue
            numbers, turns = features(tree, chain), len(chain)
            tasks.append(str(tree.problem))
            solved.append(float(correct))
            scores.append(np.array([tree.nodes[i].score for i in chain], float))  # NaN for None
            trivial.append((0, -turns, turns, -sum(numbers.characters), -numbers.errors[-1], -sum(numbers.repeats)))
    names = ("any", "fewest turns", "most turns", "shortest", "fewest errors", "fewest repeats")
    columns = np.array(trivial, float).reshape(-1, len(names)).T
    scored = bool(scores) and not any(np.isnan(score_T).any() for score_T in scores)
    keys = {name: np.array([key(score_T) for score_T in scores]) for name, key in KEYS.items() if scored}
    task_K = np.unique(np.array(tasks, str), return_inverse=True)[1].reshape(-1)
    return Trials(task_K, np.array(solved), keys, dict(zip(names, columns, strict=True)))


def pass_hat(solved_T: Float[np.ndarray, " T"], k: int) -> float:
    """Returns the probability that k different ones of T trials are all solved."""
    return math.comb(int(solved_T.sum()), k) / math.comb(len(solved_T), k)


def pass_at(solved_T: Float[np.ndarray, " T"], k: int) -> float:
    """Returns the probability that one of k different trials is solved."""
    return 1 - math.comb(int((1 - solved_T).sum()), k) / math.comb(len(solved_T), k)


def chosen(key_T: Float[np.ndarray, " T"], solved_T: Float[np.ndarray, " T"]) -> float:
    """Returns the probability that the trial of the highest key is solved, one of the highest at random."""
    return float(solved_T[key_T == key_T.max()].mean())


def trials_report(trees: Sequence[ReasoningTree], seed: int) -> dict[str, Any]:
    """Returns pass^k and pass@k, and how often the chosen trial is solved, with 95 % intervals over tasks.

    k goes up to the fewest trials that a task has. A task with a single trial is left out and counted as `n_single`.
    `ahead` is each key of the scores less the best trivial one, on the same resamples of tasks. {} where no task has
    two trials with outcomes.
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
        chances = {
            name: [chosen(key_K[index], s) for index, s in zip(of_task, solved, strict=True)]
            for name, key_K in keys.items()
        }
        return {name: over_tasks(chance) for name, chance in chances.items()}

    keys, trivial = choices(trials.keys), choices(trials.trivial)
    best = max(trivial, key=lambda name: trivial[name].value)
    return {
        "n_tasks": len(of_task),
        "n_trials": sum(map(len, of_task)),
        "n_single": len(all_tasks) - len(of_task),
        "k": k,
        "pass_hat": [interval(over_tasks([pass_hat(s, n) for s in solved])).json() for n in k],
        "pass_at": [interval(over_tasks([pass_at(s, n) for s in solved])).json() for n in k],
        "chosen": {name: interval(drawn).json() for name, drawn in keys.items()},
        "trivial": {name: interval(drawn).json() for name, drawn in trivial.items()},
        "oracle": interval(over_tasks([s.max() for s in solved])).json(),
        "best_trivial": best,
        "ahead": {name: difference(drawn, trivial[best]).json() for name, drawn in keys.items()},
    }


def tables(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[Table]:
    """Yields the tables of the `trials` of one or several models' reports, by name; pass^k is only of the data."""
    first = next(iter(reports.values()))
    title = f"Trials: {first['n_trials']} of {first['n_tasks']} tasks"
    title += f"; {first['n_single']} tasks with a single trial left out" * bool(first["n_single"])
    rows = [["pass^k", *first["pass_hat"]], ["pass@k", *first["pass_at"]]]
    yield Table(title, ("", *(f"k={k}" for k in first["k"])), rows)
    rows = [[f"{key} score", *(report["chosen"].get(key) for report in reports.values())] for key in first["chosen"]]
    rows += [[f"trivial: {key}", *[figure] * len(reports)] for key, figure in first["trivial"].items()]
    rows += [["any solved trial", *[first["oracle"]] * len(reports)]]
    yield Table(f"Solved, of one trial chosen for each of {first['n_tasks']} tasks", ("by", *reports), rows)
    if first["ahead"]:
        rows = [[f"{key} score", *(report["ahead"].get(key) for report in reports.values())] for key in first["ahead"]]
        title = f"Less the best trivial choice ({first['best_trivial']})"
        yield Table(title, ("by", *reports), rows)
