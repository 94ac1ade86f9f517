"""Diagnostics: known failures of a PRM that its accuracy does not show.

Each diagnostic reports a size, its interval over problems, and `finding`: whether the interval is clear of a margin
below which a flaw is too small to matter. With enough data every scorer differs from a perfect one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jprm.evaluate.best_of_n import Pools, chosen_curves, pools_of
from jprm.evaluate.scored import ScoreError, scores_of
from jprm.score.aggregate import RULES
from jprm.score.scale import PROBABILITY, Scale
from jprm.statistics import auroc, bootstrap, jsonable, weighted_mean
from jprm.tree import ReasoningTree

LEAST = 10
"""Problems of a kind from which `wrong_process` draws conclusions. The bootstrap of fewer has too narrow intervals."""


def lowest_at_end(trees: Sequence[ReasoningTree], seed: int, margin: float = 0.05) -> dict[str, Any]:
    """Returns how often the final step of a chain has its lowest score, beyond what the length explains.

    A scorer that judges the answer instead of the process has its minimum there (Zhang et al. 2025, arXiv 2501.07301,
    section 4.3). Only chains of two steps or more with positive labels count, since errors do come late. `share` splits
    ties evenly; `expected` is the mean of 1 / length, that of a scorer that ignores position; `excess` is the
    difference, with an interval. A finding is an excess above `margin`.
    """
    chains = [
        tree for tree in trees
        if len(tree.nodes) > 1 and all(node.label is not None and node.label > 0 for node in tree.nodes)
    ]  # fmt: skip
    if not chains:
        raise ScoreError("no chain of two steps or more whose labels are all right")
    share_N = np.array(
        [(score_P[-1] == score_P.min()) / (score_P == score_P.min()).sum() for score_P in scores_of(chains)]
    )
    expected_N = np.array([1 / len(tree.nodes) for tree in chains])
    problems = [tree.problem for tree in chains]
    excess = bootstrap(lambda w: weighted_mean(share_N - expected_N, w), problems, seed=seed, fraction=False)
    return {
        "n": len(chains),
        "share": jsonable(share_N.mean()),
        "expected": jsonable(expected_N.mean()),
        "excess": excess.json(),
        "margin": margin,
        "finding": bool(excess.low > margin),
    }


def length_slopes(pools: Pools, seed: int, margin: float = 0.1) -> dict[str, dict[str, Any]]:
    """Returns how chain scores by each rule change with the number of steps among the correct samples of one problem.

    Problems differ in length and difficulty, and incorrect samples may be longer with reason. So only correct samples
    count, with lengths and scores as distances from the problem's mean. By rule: `slope` per step, and `correlation`
    with an interval, whose distance from 0 beyond `margin` is a finding.

    A product falls with length by construction, and a minimum over more steps is lower: a finding for `prod` or `min`
    alone is about the rule, for `mean` or `last` about the scorer.
    """
    problem_P1 = np.arange(len(pools.problem))[:, None]
    some_PN = pools.correct_PN >= 0.5
    if not some_PN.any():
        raise ScoreError("no correct sample in any pool: nothing to compare lengths among")
    problem_M = np.broadcast_to(problem_P1, some_PN.shape)[some_PN]
    length_M = _centred(pools.steps_PN[some_PN].astype(float), problem_M)
    report = {}
    for rule in RULES:
        score_M = _centred(pools.weight[rule][some_PN], problem_M)
        moments_M3 = np.stack([length_M * length_M, length_M * score_M, score_M * score_M], 1)
        moments_M3[:, 2] *= np.abs(score_M) > 1e-7  # the aggregation is float32: what is below is its rounding

        def correlation(weight_RM, moments_M3=moments_M3):
            ll_R, ls_R, ss_R = (weight_RM @ moments_M3).T
            with np.errstate(invalid="ignore", divide="ignore"):
                return np.where((ll_R > 0) & (ss_R > 0), ls_R / np.sqrt(ll_R * ss_R), np.where(ll_R > 0, 0.0, np.nan))

        found = bootstrap(correlation, [pools.problem[p] for p in problem_M], seed=seed, fraction=False)
        total = moments_M3.sum(0)
        report[rule] = {
            "slope": jsonable(total[1] / total[0]) if total[0] > 0 else None,
            "correlation": found.json(),
            "margin": margin,
            "finding": bool(found.low > margin or found.high < -margin),
        }
    return report


def wrong_process(trees: Sequence[ReasoningTree], threshold: float, seed: int, margin: float = 0.1) -> dict[str, Any]:
    """Returns whether wrong steps are noticed in ProcessBench chains whose final answer is correct all the same.

    `detected` is the fraction of chains with a correct answer and a wrong step that have a step below `threshold`;
    `detected_wrong_answer` is the same for an incorrect answer, and `false_alarms` for chains with neither. `auroc`
    ranks correct-answer chains with an error below those without, by their lowest score; `auroc_wrong_answer` does so
    for incorrect answers. `gap` is their difference, with an interval.

    A finding: the interval of `auroc` is below a half plus `margin`, or that of the gap above `margin`. The scorer sees
    the answer, not the process. An interval that spans both sides is no finding. Raises ScoreError where fewer than
    `LEAST` problems have a correct answer with a wrong step, or without; the gap counts if as many have an incorrect
    answer.
    """
    low_N = np.array([score_P.min() for score_P in scores_of(trees)])
    error_N = np.array([tree.extra["first_error"] >= 0 for tree in trees], bool)
    right_N = np.array([tree.nodes[-1].correct for tree in trees], bool)
    problems = [tree.problem for tree in trees]
    clean_N, hidden_N, open_N = right_N & ~error_N, right_N & error_N, ~right_N & error_N
    hidden, clean, wrong = (len({problems[i] for i in np.flatnonzero(of_N)}) for of_N in (hidden_N, clean_N, open_N))
    if min(hidden, clean) < LEAST:
        counts = f"{hidden} problems with a correct answer and a wrong step, {clean} with a correct answer and none"
        raise ScoreError(f"{counts}: {LEAST} of each are needed")

    def flagged(of_N):
        some = np.flatnonzero(of_N)
        return bootstrap(
            lambda w: weighted_mean(low_N[some] < threshold, w), [problems[i] for i in some], seed=seed
        ).json()

    def area(of_N, weight_RN):
        return auroc(low_N, clean_N, weight_RN * (clean_N | of_N))

    found = bootstrap(lambda w: area(hidden_N, w), problems, seed=seed)
    gap = bootstrap(lambda w: area(open_N, w) - area(hidden_N, w), problems, seed=seed, fraction=False)
    return {
        "n": int(hidden_N.sum()),
        "threshold": threshold,
        "detected": flagged(hidden_N),
        "detected_wrong_answer": flagged(open_N),
        "false_alarms": flagged(clean_N),
        "auroc": found.json(),
        "auroc_wrong_answer": bootstrap(lambda w: area(open_N, w), problems, seed=seed).json(),
        "gap": gap.json(),
        "margin": margin,
        "finding": bool(found.high < 0.5 + margin or (wrong >= LEAST and gap.low > margin)),
    }


def over_optimisation(pools: Pools, seed: int, margin: float = 0.0) -> dict[str, dict[str, Any]]:
    """Returns whether choosing among more samples makes best-of-n worse, by rule (Gao et al. 2022, arXiv 2210.10760).

    `value` is the exact expected accuracy for `n` = 1, 2, ..., and `peak` the n where it is highest. `drop` is the loss
    from the peak to the largest n, with an interval over problems. Since a maximum is also high by luck, each half of
    the problems takes the peak of the other half. A finding is a drop above `margin`.
    """
    n_max = int(pools.size_P.min())
    number = {problem: i for i, problem in enumerate(dict.fromkeys(pools.problem))}  # whose pools stay together
    fold_P = (np.random.default_rng(seed).permutation(len(number)) % 2)[[number[x] for x in pools.problem]]
    report = {}
    for rule, value_Pn in chosen_curves(pools).items():
        drop_P = np.zeros(len(value_Pn))
        for fold in (0, 1):
            if (fold_P != fold).any():
                peak = int(np.argmax(value_Pn[fold_P != fold].mean(0)))
                drop_P[fold_P == fold] = (value_Pn[:, peak] - value_Pn[:, -1])[fold_P == fold]
        drop = bootstrap(lambda w, drop_P=drop_P: weighted_mean(drop_P, w), pools.problem, seed=seed, fraction=False)
        curve_n = value_Pn.mean(0)
        report[rule] = {
            "n": list(range(1, n_max + 1)),
            "value": jsonable(curve_n),
            "peak": int(np.argmax(curve_n)) + 1,
            "drop": drop.json(),
            "margin": margin,
            "finding": bool(drop.low > margin),
        }
    return report


def diagnostics_report(
    chains: Sequence[ReasoningTree] | None,
    pools: Mapping[str, Sequence[ReasoningTree]],
    threshold: float,
    seed: int,
    scale: Scale = PROBABILITY,
) -> dict[str, Any]:
    """Returns all diagnostics of scored ProcessBench chains, and of scored pools by file.

    A diagnostic without anything to look at is `{"not_computed": reason}`. `chains` may be None.
    """
    found: dict[str, Any] = {}
    if chains is not None:
        right = [tree for tree in chains if tree.extra.get("first_error", -1) < 0]
        found["lowest_at_end"] = _or_reason(lowest_at_end, right, seed)
        found["wrong_process"] = _or_reason(wrong_process, chains, threshold, seed)
    for name, trees in pools.items():
        pooled = pools_of(trees, scale)
        found.setdefault("length_slopes", {})[name] = _or_reason(length_slopes, pooled, seed)
        found.setdefault("over_optimisation", {})[name] = over_optimisation(pooled, seed)
    return found


def _or_reason(diagnostic, *args) -> dict[str, Any]:
    try:
        return diagnostic(*args)
    except ScoreError as error:
        return {"not_computed": str(error)}


def _centred(x_M, group_M):
    return x_M - (np.bincount(group_M, x_M) / np.maximum(np.bincount(group_M), 1))[group_M]
