"""The study's figures, from scored pools: of one cell as numbers a chain, of several seeds with intervals."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from data import merged

from jprm.evaluate.best_of_n import Pools, chosen_curves, pools_of
from jprm.evaluate.calibration import ece
from jprm.evaluate.steps import steps_report
from jprm.evaluate.votes import vote_accuracy
from jprm.score.calibration_map import apply, fit
from jprm.score.scale import Scale
from jprm.statistics import auroc, difference, draws, interval, weighted_mean
from jprm.tree import ReasoningTree, with_scores

POWERS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Of the odds of being correct, as weights of votes. Validation pools choose one."""
TRIALS = 32
"""Random orders of a pool in votes; at all of a pool's samples, as here, every order has the same votes."""


def numbers(
    path: pathlib.Path, trees: Sequence[ReasoningTree], scale: Scale, rule: str, bounds: bool = False
) -> dict[str, Any]:
    """Returns the numbers of a scored file; `bounds`: its scores have `low` and `high`."""
    if all(tree.kind == "pool" for tree in trees):
        found = measured(trees, scale, rule)
        if bounds:  # best of n and votes by the lower bound
            found["by_low"] = measured(list(map(by_low, trees)), scale, rule)
        return found
    if path.stem == "held_out_values":
        return coverage(trees)
    return {"steps": steps_report(trees, "positive", 0, scale.threshold)}


def measured(trees: Sequence[ReasoningTree], scale: Scale, rule: str) -> dict[str, Any]:
    """Returns a test's numbers, as JSON: of every problem, and of every chain that has steps."""
    pools = pools_of(trees, scale)
    n = int(pools.size_P.min())
    some_PN = np.arange(pools.correct_PN.shape[1]) < (pools.size_P - pools.empty_P)[:, None]
    one_PN = np.ones(pools.correct_PN.shape)
    right_PN = np.clip(pools.weight[rule], 1e-6, 1 - 1e-6)
    odds = [(right_PN / (1 - right_PN)) ** power for power in POWERS]
    votes = _votes(pools, np.stack([one_PN, pools.weight[rule], *odds], -1), n)
    chance = [float(row[:size].mean()) for row, size in zip(pools.correct_PN, pools.size_P, strict=True)]
    return {
        "n": n,
        "problems": pools.problem,
        "best_of_n": chosen_curves(pools)[rule][:, -1].tolist(),
        "one_sample": chance,
        "majority": votes[:, 0].tolist(),
        "weighted_vote": votes[:, 1].tolist(),
        "votes_by_odds": votes[:, 2:].tolist(),  # a column for each of POWERS
        "chain_problem": np.nonzero(some_PN)[0].tolist(),
        "chain_key": _finite(pools.key[rule][some_PN]),
        "chain_score": np.clip(pools.weight[rule][some_PN], 0, 1).tolist(),
        "chain_correct": pools.correct_PN[some_PN].tolist(),
        **_steps(trees),
    }


def _steps(trees: Sequence[ReasoningTree]) -> dict[str, Any]:
    """Returns score and label of every distinct labelled step, where there are labels."""
    nodes = [(i, node) for i, tree in enumerate(map(merged, trees)) for node in tree.nodes if node.label is not None]
    if not nodes:
        return {}
    return {
        "step_problem": [i for i, _ in nodes],
        "step_score": [node.score for _, node in nodes],
        "step_right": [float((node.label or 0.0) > 0.5) for _, node in nodes],
    }


def by_low(tree: ReasoningTree) -> ReasoningTree:
    """Returns the tree with the lower bounds as scores."""
    return with_scores(tree, [node.outputs["low"] for node in tree.nodes])


def coverage(trees: Sequence[ReasoningTree]) -> dict[str, Any]:
    """Returns how many labels of rollouts the bounds hold, and how wide they are. Last steps have no rollouts.

    A label of k rollouts stands for all fractions within half a rollout, 1 / 2k: most labels are 0 or 1, which bounds
    between 0 and 1 never reach.
    """
    nodes = [(i, node) for i, tree in enumerate(trees) for node in tree.nodes if node.extra.get("rollouts")]
    label_N = np.array([node.label for _, node in nodes])
    low_N, high_N = (np.array([node.outputs[name] for _, node in nodes]) for name in ("low", "high"))
    half_N = np.array([0.5 / node.extra["rollouts"] for _, node in nodes])
    inside_N = (low_N - half_N <= label_N) & (label_N <= high_N + half_N)
    drawn = draws(lambda w_RN: weighted_mean(inside_N, w_RN), [i for i, _ in nodes], seed=0)
    return {"steps": len(nodes), "covered": interval(drawn).json(), "width": float(np.mean(high_N - low_N))}


def _votes(pools: Pools, weight_PNK: np.ndarray, n: int) -> np.ndarray:
    if pools.class_PN is None:
        raise ValueError("the pools have no answers to vote on")
    found = vote_accuracy(pools.class_PN, pools.correct_PN, weight_PNK, pools.size_P, n, trials=TRIALS, seed=0)
    return found.value_PnK[:, -1]


def _finite(key_N: np.ndarray) -> list[float]:
    return np.clip(key_N, -1e30, 1e30).tolist()


def figures(seeds: Sequence[Mapping[str, Any]], valid: Sequence[Mapping[str, Any]] | None) -> dict[str, dict[str, Any]]:
    """Returns means over the seeds of one test with 95 % intervals over its problems; `seeds` is the range over them.

    `valid` are the validation pools' numbers of the same cells, on which the calibration map (Platt's) is fitted.
    Without them there is no map: it is never fitted on what it is judged by.
    """
    first = seeds[0]
    chain_N, right_N = np.array(first["chain_problem"]), np.array(first["chain_correct"]) > 0.5

    def mean(name: str, less: str = "") -> dict[str, Any]:
        return of_values([np.array(s[name]) - (np.array(s[less]) if less else 0.0) for s in seeds], less)

    def of_values(values: Sequence[np.ndarray], less: str = "") -> dict[str, Any]:
        value_SP = np.array(values)
        drawn = draws(lambda w_RP: weighted_mean(value_SP.mean(0), w_RP), first["problems"], seed=0)
        found = difference(drawn).json() if less else interval(drawn).json()
        return found | {"seeds": _range(value_SP.mean(1))}

    def area(score: str, right_N: np.ndarray, group_N: np.ndarray) -> dict[str, Any]:
        def of(w_RN: np.ndarray) -> np.ndarray:
            return np.mean([auroc(np.array(s[score]), right_N, w_RN) for s in seeds], axis=0)

        each = [float(auroc(np.array(s[score]), right_N)) for s in seeds]
        return interval(draws(of, group_N, seed=0)).json() | {"seeds": _range(each)}

    def within() -> dict[str, Any]:
        value_SP = np.array([_within(np.array(s["chain_key"]), right_N, chain_N) for s in seeds])
        some_P = np.isfinite(value_SP[0])
        names = [first["problems"][i] for i in np.unique(chain_N)[some_P]]
        drawn = draws(lambda w_RP: weighted_mean(value_SP.mean(0)[some_P], w_RP), names, seed=0)
        return interval(drawn).json() | {"seeds": _range(value_SP[:, some_P].mean(1))}

    found = {
        "chain_auroc": area("chain_key", right_N, chain_N),
        "within_auroc": within(),
        "one_sample": mean("one_sample"),
        "majority": mean("majority"),
        "best_of_n": mean("best_of_n"),
        "weighted_vote": mean("weighted_vote"),
        "vote_minus_majority": mean("weighted_vote", "majority"),
    }
    if valid is not None and all("votes_by_odds" in s for s in (*seeds, *valid)):
        best = [int(np.mean(s["votes_by_odds"], 0).argmax()) for s in valid]
        by_odds = [np.array(s["votes_by_odds"])[:, k] for s, k in zip(seeds, best, strict=True)]
        less = [values - np.array(s["majority"]) for s, values in zip(seeds, by_odds, strict=True)]
        found["odds_vote_minus_majority"] = of_values(less, "majority")
    if "step_right" in first:
        found["step_auroc"] = area("step_score", np.array(first["step_right"]) > 0.5, np.array(first["step_problem"]))
    scores = {"ece": [np.array(s["chain_score"]) for s in seeds]}
    if valid is not None:
        scores["ece_recalibrated"] = list(map(_recalibrated, scores["ece"], valid))
    for name, score_SN in scores.items():
        error_S = np.array([ece(score_N, right_N) for score_N in score_SN])
        found[name] = {"value": float(error_S.mean()), "seeds": _range(error_S)}
    return found


def mean_over_tests(tests: Sequence[Sequence[Mapping[str, Any]]], name: str, less: str) -> dict[str, Any]:
    """Returns a difference, its mean over seeds and then over tests problem by problem, with its 95 % interval."""
    problems: dict[str, list[float]] = {}
    for seeds in tests:
        value_P = np.mean([np.array(s[name]) - np.array(s[less]) for s in seeds], axis=0)
        for problem, value in zip(seeds[0]["problems"], value_P, strict=True):
            problems.setdefault(problem, []).append(float(value))
    value_P = np.array(list(map(np.mean, problems.values())))
    return difference(draws(lambda w_RP: weighted_mean(value_P, w_RP), list(problems), seed=0)).json()


def _within(key_N: np.ndarray, right_N: np.ndarray, problem_N: np.ndarray) -> np.ndarray:
    """Returns every problem's AUROC over its own chains, NaN where all are right or none is."""
    some = [problem_N == i for i in np.unique(problem_N)]
    mixed = [0 < right_N[m_N].sum() < m_N.sum() for m_N in some]
    return np.array([auroc(key_N[m_N], right_N[m_N]) if ok else np.nan for m_N, ok in zip(some, mixed, strict=True)])


def _recalibrated(score_N: np.ndarray, valid: Mapping[str, Any]) -> np.ndarray:
    """Returns the scores by a map fitted on the validation pools."""
    known_N, right_N = np.array(valid["chain_score"]), np.array(valid["chain_correct"]) > 0.5
    return np.asarray(apply(fit("platt", known_N, right_N), score_N))


def _range(values: Sequence[float] | np.ndarray) -> list[float]:
    return [float(np.min(values)), float(np.max(values))]
