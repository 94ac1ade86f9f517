"""The study's figures, from scored pools: of one cell as numbers a chain, of several seeds with intervals.

Seeds and problems are both samples: another seed's head would score otherwise, and so would other problems. The squared
standard error of a mean over S seeds and P problems is s_S^2 / S + s_P^2 / P, with the variances of seeds' means and
of the problems' means. (The noise of single seeds on single problems is in both: the interval is a little wide.) The
interval is Student's t with Satterthwaite's degrees of freedom: up to 4.3 standard errors where three seeds differ.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit

from experiments.objectives.data import merged
from jprm.methods.evaluate import baselines
from jprm.methods.evaluate.best_of_n import Pools, pools_of
from jprm.methods.evaluate.calibration import ece
from jprm.methods.evaluate.steps import steps_report
from jprm.methods.evaluate.votes import best_of_n, vote_accuracy
from jprm.methods.jobs.calibration_map import apply, fit
from jprm.score.scale import PROBABILITY, Scale
from jprm.statistics import Draws, auroc, draws, interval, jsonable, weighted_mean
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
        results = measured(trees, scale, rule)
        if bounds:  # best of n and votes by the lower bound
            results["by_low"] = measured(list(map(by_low, trees)), scale, rule)
        return results
    if path.stem == "held_out_values":
        return coverage(trees)
    return {"steps": steps_report(trees, "positive", 0, scale.threshold)}


def measured(trees: Sequence[ReasoningTree], scale: Scale, rule: str) -> dict[str, Any]:
    """Returns a test's numbers, as JSON: of every problem, and of every chain that has steps."""
    pools = pools_of(trees, scale)
    return _of_pools(pools, pools.key[rule], pools.log_weight[rule]) | _steps(trees)


def trivial(trees: Sequence[ReasoningTree]) -> dict[str, dict[str, Any]]:
    """Returns the same numbers of the trivial baselines by name, of trees without scores."""
    pools = pools_of([with_scores(tree, [0.5] * len(tree.nodes)) for tree in trees])
    some_PN, results = _with_steps(pools), {}
    for name, chosen in baselines.of_pools(trees).items():
        key_PN, log_weight_PN = np.full((2, *some_PN.shape), -np.inf)
        key_PN[some_PN] = np.concatenate([part.key_K for part in chosen])
        log_weight_PN[some_PN] = PROBABILITY.log_weights(np.concatenate([part.weight_K for part in chosen]))
        results[name] = _of_pools(pools, key_PN, log_weight_PN)
    return results


def _with_steps(pools: Pools) -> np.ndarray:
    return np.arange(pools.correct_PN.shape[1]) < (pools.size_P - pools.empty_P)[:, None]


def _of_pools(pools: Pools, key_PN: np.ndarray, log_weight_PN: np.ndarray) -> dict[str, Any]:
    n, some_PN, equal_PN = int(pools.size_P.min()), _with_steps(pools), np.zeros(pools.correct_PN.shape)
    weight_PN = np.exp(log_weight_PN)
    right_PN = np.clip(weight_PN, 1e-6, 1 - 1e-6)
    log_odds = [power * np.log(right_PN / (1 - right_PN)) for power in POWERS]
    votes = _votes(pools, np.stack([equal_PN, log_weight_PN, *log_odds], -1), n)
    best = best_of_n(key_PN, pools.correct_PN, pools.answered_PN, pools.size_P, n)
    chance = [float(row[:size].mean()) for row, size in zip(pools.correct_PN, pools.size_P, strict=True)]
    return {
        "n": n,
        "problems": pools.problem,
        "best_of_n": best[:, -1].tolist(),
        "one_sample": chance,
        "majority": votes[:, 0].tolist(),
        "weighted_vote": votes[:, 1].tolist(),
        "votes_by_odds": votes[:, 2:].tolist(),  # a column for each of POWERS
        "chain_problem": np.nonzero(some_PN)[0].tolist(),
        "chain_key": _finite(key_PN[some_PN]),
        "chain_score": np.clip(weight_PN[some_PN], 0, 1).tolist(),
        "chain_correct": pools.correct_PN[some_PN].tolist(),
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


def _votes(pools: Pools, log_weight_PNK: np.ndarray, n: int) -> np.ndarray:
    if pools.class_PN is None:
        raise ValueError("the pools have no answers to vote on")
    accuracy = vote_accuracy(pools.class_PN, pools.correct_PN, log_weight_PNK, pools.size_P, n, trials=TRIALS, seed=0)
    return accuracy.value_PnK[:, -1]


def _finite(key_N: np.ndarray) -> list[float]:
    return np.clip(key_N, -1e30, 1e30).tolist()


def figures(seeds: Sequence[Mapping[str, Any]], valid: Sequence[Mapping[str, Any]] | None) -> dict[str, dict[str, Any]]:
    """Returns means over the seeds of one test with 95 % intervals over seeds and problems; `seeds` has each seed's.

    `valid` are the validation pools' numbers of the same cells, on which the calibration map (Platt's) is fitted.
    Without them there is no map: it is never fitted on what it is judged by.
    """
    first = seeds[0]
    chain_N, right_N = np.array(first["chain_problem"]), np.array(first["chain_correct"]) > 0.5

    def mean(name: str, less: str = "") -> dict[str, Any]:
        return of_values(first["problems"], [np.array(s[name]) - (np.array(s[less]) if less else 0.0) for s in seeds])

    def area(score: str, right_N: np.ndarray, group_N: np.ndarray) -> dict[str, Any]:
        def areas(w_RN: np.ndarray) -> np.ndarray:
            return np.mean([auroc(np.array(s[score]), right_N, w_RN) for s in seeds], axis=0)

        return over_both(draws(areas, group_N, seed=0), [float(auroc(np.array(s[score]), right_N)) for s in seeds])

    def within() -> dict[str, Any]:
        value_SP = np.array([_within(np.array(s["chain_key"]), right_N, chain_N) for s in seeds])
        some_P = np.isfinite(value_SP[0])
        names = [first["problems"][i] for i in np.unique(chain_N)[some_P]]
        return of_values(names, value_SP[:, some_P])

    results = {
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
        results["odds_vote_minus_majority"] = of_values(first["problems"], less)
    if "step_right" in first:
        results["step_auroc"] = area("step_score", np.array(first["step_right"]) > 0.5, np.array(first["step_problem"]))
    scores = {"ece": [np.array(s["chain_score"]) for s in seeds]}
    if valid is not None:
        scores["ece_recalibrated"] = list(map(_recalibrated, scores["ece"], valid))
    for name, score_SN in scores.items():
        error_S = np.array([ece(score_N, right_N) for score_N in score_SN])
        results[name] = {"value": float(error_S.mean()), "seeds": error_S.tolist()}
    return results


def apart(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Returns one objective's figure less the other's on one test, paired by seed and problem, as `figures` does."""
    value = [np.array(a[name]) - np.array(b[name]) for a, b in zip(first, second, strict=False)]
    return of_values(first[0]["problems"], value)


def of_values(problems: Sequence[str], values: Sequence[np.ndarray] | np.ndarray) -> dict[str, Any]:
    """Returns the mean of a value for each seed and problem."""
    value_SP = np.array(values)
    drawn = draws(lambda w_RP: weighted_mean(value_SP.mean(0), w_RP), problems, seed=0)
    return over_both(drawn, value_SP.mean(1).tolist())


def over_both(drawn: Draws, seeds: Sequence[float]) -> dict[str, Any]:
    """Returns a mean over seeds with its interval over seeds and problems, from its draws of problems and its seeds.

    Of one seed the interval is over problems.
    """
    value, low, high = interval(drawn, fraction=False)
    if (count := len(seeds)) > 1:
        of_problems = float(np.nanvar(drawn.drawn_R)) * drawn.groups / (drawn.groups - 1)
        of_seeds = float(np.var(seeds, ddof=1)) / count
        if (total := of_problems + of_seeds) > 0:
            freedom = total**2 / (of_problems**2 / (drawn.groups - 1) + of_seeds**2 / (count - 1))
            half = stdtrit(freedom, 0.975) * total**0.5
            low, high = value - half, value + half
    return {"value": jsonable(value), "low": jsonable(low), "high": jsonable(high), "seeds": list(seeds)}


def mean_over_tests(tests: Sequence[Sequence[Mapping[str, Any]]], name: str, less: str) -> dict[str, Any]:
    """Returns a difference, a problem's mean over tests, with its interval over seeds and problems."""
    problems: dict[str, list[float]] = {}
    value_TSP = [np.array([np.array(s[name]) - np.array(s[less]) for s in seeds]) for seeds in tests]
    for seeds, value_SP in zip(tests, value_TSP, strict=True):
        for problem, value in zip(seeds[0]["problems"], value_SP.mean(0).tolist(), strict=True):
            problems.setdefault(problem, []).append(value)
    value_P = np.array(list(map(np.mean, problems.values())))
    of_seeds = zip(*(value_SP.mean(1).tolist() for value_SP in value_TSP), strict=False)  # tests may have fewer
    drawn = draws(lambda w_RP: weighted_mean(value_P, w_RP), list(problems), seed=0)
    return over_both(drawn, [float(np.mean(values)) for values in of_seeds])


def _within(key_N: np.ndarray, right_N: np.ndarray, problem_N: np.ndarray) -> np.ndarray:
    """Returns every problem's AUROC over its own chains, NaN where all are right or none is."""
    masks = [problem_N == i for i in np.unique(problem_N)]
    mixed = [0 < right_N[m_N].sum() < m_N.sum() for m_N in masks]
    return np.array([auroc(key_N[m_N], right_N[m_N]) if ok else np.nan for m_N, ok in zip(masks, mixed, strict=True)])


def _recalibrated(score_N: np.ndarray, valid: Mapping[str, Any]) -> np.ndarray:
    """Returns the scores by a map fitted on the validation pools."""
    known_N, right_N = np.array(valid["chain_score"]), np.array(valid["chain_correct"]) > 0.5
    return np.asarray(apply(fit("platt", known_N, right_N), score_N))
