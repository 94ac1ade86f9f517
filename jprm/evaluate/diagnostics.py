"""The known ways in which a PRM fails without its accuracy showing it. Each diagnostic gives a size, its interval over
problems, and `finding`: the interval is clear of a margin below which a flaw is too small to matter.

A margin, not only a test: with enough data every scorer differs from a perfect one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from jprm.evaluate.best_of_n import Pools, best_of_n, pools_of
from jprm.evaluate.scored import ScoreError, checked_scores
from jprm.score.aggregate import RULES
from jprm.statistics import auroc, bootstrap, jsonable, weighted_mean

PERMUTATIONS = 999


def lowest_at_end(records: Sequence[Mapping[str, Any]], seed: int, margin: float = 0.05) -> dict[str, Any]:
    """How often the lowest score of a chain is that of its final step, beyond what its length explains.

    A scorer that judges the answer instead of the process has its minimum there (Zhang et al. 2025, arXiv 2501.07301,
    section 4.3). Only chains without a wrong step count, since errors do come late: those with labels that are all
    positive; and of two steps at least. `share` splits ties evenly; `expected` is the mean of 1 / length, what a scorer
    that ignores position has; `excess` is the difference, with an interval. A finding is an excess above `margin`.
    """
    chains = [
        r for r in records if len(r["steps"]) > 1 and all(x is not None and x > 0 for x in r.get("labels") or [0])
    ]
    if not chains:
        raise ScoreError("no chain of two steps or more whose labels are all right")
    scores = _scores(chains)
    share_N = np.array([(s[-1] == s.min()) / (s == s.min()).sum() for s in scores])
    expected_N = np.array([1 / len(s) for s in scores])
    problems = [record["problem"] for record in chains]
    excess = bootstrap(lambda w: weighted_mean(share_N - expected_N, w), problems, seed=seed)
    return {
        "n": len(chains),
        "share": jsonable(share_N.mean()),
        "expected": jsonable(expected_N.mean()),
        "excess": excess.json(),
        "margin": margin,
        "finding": bool(excess.low > margin),
    }


def length_slopes(pools: Pools, seed: int, margin: float = 0.1) -> dict[str, dict[str, Any]]:
    """How chain scores by each rule change with the number of steps among the right chains of one problem.

    Problems differ in length and difficulty, and wrong chains may be longer with reason; so only chains with a right
    answer count, and their lengths and scores as distances from the mean of the problem's. By rule: `slope` per step,
    and `correlation` with an interval, whose distance from 0 beyond `margin` is a finding.

    A product falls with length by construction (even if every step scores 0.9), and a minimum of more steps is lower:
    a finding for `prod` or `min` alone speaks about the rule, for `mean` or `last` about the scorer.
    """
    problem_P1 = np.arange(len(pools.problem))[:, None]
    some_PN = (pools.correct_PN >= 0.5) & (pools.steps_PN > 0)
    if not some_PN.any():
        raise ScoreError("no right chain in any pool: nothing to compare lengths among")
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

        found = bootstrap(correlation, [pools.problem[p] for p in problem_M], seed=seed)
        total = moments_M3.sum(0)
        report[rule] = {
            "slope": jsonable(total[1] / total[0]) if total[0] > 0 else None,
            "correlation": found.json(),
            "margin": margin,
            "finding": bool(found.low > margin or found.high < -margin),
        }
    return report


def wrong_process(
    records: Sequence[Mapping[str, Any]], threshold: float, seed: int, margin: float = 0.1
) -> dict[str, Any]:
    """Whether wrong steps are noticed in chains whose final answer is right all the same.

    Of ProcessBench records (`first_error`, `correct`): `detected` is the share of chains with a right answer and a
    wrong step that have a step below `threshold`; `detected_wrong_answer` the same where the answer is wrong too;
    `false_alarms` among chains with neither. `auroc` ranks right-answer chains with an error below those without, by
    their lowest score; `auroc_wrong_answer` does so for wrong-answer ones. Their difference is `gap`, with an interval.

    A finding: `auroc` is not above a half, or the gap is above `margin`: the scorer sees the answer, not the process.
    """
    scores = _scores(records)
    low_N = np.array([score_P.min(initial=np.inf) for score_P in scores])
    error_N = np.array([record["first_error"] >= 0 for record in records], bool)
    right_N = np.array([record["correct"] for record in records], bool)
    problems = [record["problem"] for record in records]
    clean_N, hidden_N, open_N = right_N & ~error_N, right_N & error_N, ~right_N & error_N
    if not (clean_N.any() and hidden_N.any()):
        counts = f"{hidden_N.sum()} chains with a right answer and a wrong step, {clean_N.sum()} with a right answer"
        raise ScoreError(f"{counts} and none: both are needed")

    def flagged(of_N):
        return bootstrap(lambda w: weighted_mean(low_N < threshold, w * of_N), problems, seed=seed).json()

    def area(of_N, weight_RN):
        return auroc(low_N, clean_N, weight_RN * (clean_N | of_N))

    found = bootstrap(lambda w: area(hidden_N, w), problems, seed=seed)
    gap = bootstrap(lambda w: area(open_N, w) - area(hidden_N, w), problems, seed=seed)
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
        "finding": bool(found.low <= 0.5 or gap.low > margin),
    }


def over_optimisation(pools: Pools, seed: int, margin: float = 0.0) -> dict[str, dict[str, Any]]:
    """Whether choosing among more samples makes best-of-n worse, by rule (Gao et al. 2022, arXiv 2210.10760).

    `value` is the exact expected accuracy for `n` = 1, 2, ..; `peak` the n where it is highest. `drop` is what is lost
    from the peak to the largest n, with an interval over problems. Since the highest of many values is high by luck as
    well, the drop of one half of the problems is taken from the peak of the other half. A finding is a drop above
    `margin`.
    """
    n_max = int(pools.size_P.min())
    valid_PN = pools.answered_PN & (pools.steps_PN > 0)
    number = {problem: i for i, problem in enumerate(dict.fromkeys(pools.problem))}  # whose pools stay together
    fold_P = (np.random.default_rng(seed).permutation(len(number)) % 2)[[number[x] for x in pools.problem]]
    report = {}
    for rule in RULES:
        value_Pn = best_of_n(pools.key[rule], pools.correct_PN, valid_PN, pools.size_P, n_max)
        drop_P = np.zeros(len(value_Pn))
        for fold in (0, 1):
            if (fold_P != fold).any():
                peak = int(np.argmax(value_Pn[fold_P != fold].mean(0)))
                drop_P[fold_P == fold] = (value_Pn[:, peak] - value_Pn[:, -1])[fold_P == fold]
        drop = bootstrap(lambda w, drop_P=drop_P: weighted_mean(drop_P, w), pools.problem, seed=seed)
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


def drift(
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    seed: int,
    *,
    margin: float = 0.1,
    auroc_margin: float = 0.05,
    level: float = 0.01,
) -> dict[str, Any]:
    """Whether the step scores of two files of chains or pools come from one distribution.

    `ks` is the largest distance of their cumulative distributions (Kolmogorov-Smirnov). `p` comes from a permutation
    test that moves whole problems, since steps of one problem resemble each other: a problem in both files swaps its
    sides or does not, the others are dealt out anew. `mean_before`, `mean_after` are the mean scores.

    `verdict`: `same` where p >= `level` or ks <= `margin`; `shifted` otherwise, and then thresholds and recalibration
    maps no longer hold. Where both files have step labels, `auroc_before` and `auroc_after` say more: `retrain` where
    the latter lies below the former by `auroc_margin` and their intervals are apart (the ranking broke), otherwise
    `recalibrate` in place of `shifted` (only the scale moved). Samples of two policies seldom have step labels: where
    both files say which chains are correct, the areas are of chains by their lowest score. `auroc_of` tells which.
    """
    sides = [_steps("before", before), _steps("after", after)]
    problems = sorted({problem for side in sides for problem in side["problem"]})
    grid_K = np.unique(np.concatenate([side["score"] for side in sides]))
    if len(grid_K) > 512:
        grid_K = np.unique(np.quantile(grid_K, np.linspace(0, 1, 512)))
    # below[side, problem, k]: scores up to grid_K[k]; the last column counts all.
    below_SGK = np.zeros((2, len(problems), len(grid_K)))
    for below_GK, side in zip(below_SGK, sides, strict=True):
        place = np.searchsorted(grid_K, side["score"])
        np.add.at(below_GK, (np.searchsorted(problems, side["problem"]), place), 1)
    below_SGK = np.cumsum(below_SGK, -1)
    there_SG = below_SGK[:, :, -1] > 0
    both_G = there_SG.all(0)

    def distance(first_RSG):
        """KS distance where `first` says with which weight each side's problems make up the first sample."""
        flat_XK = below_SGK.reshape(-1, len(grid_K))
        first_RX = first_RSG.reshape(len(first_RSG), -1)
        one_RK = first_RX @ flat_XK
        two_RK = flat_XK.sum(0) - one_RK
        return np.abs(one_RK / one_RK[:, -1:] - two_RK / two_RK[:, -1:]).max(-1)

    rng = np.random.default_rng(seed)
    alone = np.flatnonzero(~both_G)
    first_RSG = np.zeros((1 + PERMUTATIONS, 2, len(problems)))
    first_RSG[:, 0] = 1.0
    for first_SG in first_RSG[1:]:
        swap_G = both_G & (rng.random(len(problems)) < 0.5)
        first_SG[:, swap_G] = [[0.0], [1.0]]
        first_SG[:, alone] = rng.permutation(there_SG[0, alone])
    ks_R = distance(first_RSG)
    ks, p = float(ks_R[0]), float((ks_R >= ks_R[0] - 1e-12).mean())
    report = {
        "n_before": len(sides[0]["score"]),
        "n_after": len(sides[1]["score"]),
        "mean_before": jsonable(sides[0]["score"].mean()),
        "mean_after": jsonable(sides[1]["score"].mean()),
        "ks": ks,
        "p": p,
        "level": level,
        "margin": margin,
        "auroc_of": None,
        "auroc_before": None,
        "auroc_after": None,
        "verdict": "shifted" if p < level and ks > margin else "same",
    }
    chains = (_chains(records) for records in (before, after))
    of, areas = "steps", _areas(sides, seed)
    if areas is None:
        of, areas = "chains", _areas(chains, seed)
    if areas is not None:
        report |= {"auroc_of": of, "auroc_before": areas[0].json(), "auroc_after": areas[1].json()}
        if areas[1].high < areas[0].low and areas[1].value < areas[0].value - auroc_margin:
            report["verdict"] = "retrain"
        elif report["verdict"] == "shifted":
            report["verdict"] = "recalibrate"
    return report | {"finding": report["verdict"] != "same"}


def diagnostics_report(
    chains: Sequence[Mapping[str, Any]] | None,
    pools: Mapping[str, Sequence[Mapping[str, Any]]],
    threshold: float,
    seed: int,
) -> dict[str, Any]:
    """All diagnostics of scored ProcessBench chains and of scored pools, the latter by file.

    One that finds nothing to look at is `{"not_computed": reason}`; those of chains are left out where None are given.
    """
    found: dict[str, Any] = {}
    if chains is not None:
        found["lowest_at_end"] = _or_reason(lowest_at_end, _without_error(chains), seed)
        found["wrong_process"] = _or_reason(wrong_process, chains, threshold, seed)
    for name, records in pools.items():
        pooled = pools_of(records)
        found.setdefault("length_slopes", {})[name] = _or_reason(length_slopes, pooled, seed)
        found.setdefault("over_optimisation", {})[name] = over_optimisation(pooled, seed)
    return found


def _or_reason(diagnostic, *args) -> dict[str, Any]:
    try:
        return diagnostic(*args)
    except ScoreError as error:
        return {"not_computed": str(error)}


def _without_error(chains):
    return [record for record in chains if record.get("first_error", -1) < 0]


def _scores(records) -> list[Float[np.ndarray, " P"]]:
    return checked_scores((f"record {i}", len(r["steps"]), r.get("scores")) for i, r in enumerate(records))


def _steps(which: str, records) -> dict[str, Any]:
    chains = [(r["problem"], chain) for r in records for chain in r.get("samples", [r])]
    for i, (_, chain) in enumerate(chains):
        if "steps" not in chain:
            raise ScoreError(f"{which}, chain {i}: no steps: drift needs chains or pools, and this is a tree")
    scores = checked_scores(
        (f"{which}, chain {i}", len(c["steps"]), c.get("scores")) for i, (_, c) in enumerate(chains)
    )
    if not sum(map(len, scores)):
        raise ScoreError("drift needs scored steps in both files")
    labels = [c.get("labels") or [None] * len(c["steps"]) for _, c in chains]
    return {
        "score": np.concatenate(scores),
        "label": [label for chain in labels for label in chain],
        "problem": [problem for (problem, c) in chains for _ in c["steps"]],
    }


def _chains(records) -> dict[str, Any]:
    chains = [(r["problem"], c) for r in records for c in r.get("samples", [r]) if c["steps"]]
    return {
        "score": np.array([min(c["scores"]) for _, c in chains]),
        "label": [c.get("correct") for _, c in chains],
        "problem": [problem for problem, _ in chains],
    }


def _areas(sides, seed: int):
    """The areas under the ROC curves of both sides; None where one of them has nothing to tell right from wrong."""
    found = []
    for side in sides:
        found.append(_area(side, seed))
        if found[-1] is None:
            return None
    return found


def _area(side, seed: int):
    some = [i for i, label in enumerate(side["label"]) if label is not None]
    right_N: Bool[np.ndarray, " N"] = np.array([side["label"][i] > 0 for i in some], bool)
    if right_N.all() or not right_N.any():
        return None
    score_N = side["score"][some]
    return bootstrap(lambda w: auroc(score_N, right_N, w), [side["problem"][i] for i in some], seed=seed)


def _centred(x_M, group_M):
    return x_M - (np.bincount(group_M, x_M) / np.maximum(np.bincount(group_M), 1))[group_M]
