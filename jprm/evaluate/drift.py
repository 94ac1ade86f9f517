"""Drift: whether the scores of two files come from one distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jprm.evaluate.scored import ScoreError, scores_of
from jprm.statistics import Interval, auroc, bootstrap, jsonable
from jprm.tree import ReasoningTree, chains_of

PERMUTATIONS = 999


def drift(
    before: Sequence[ReasoningTree],
    after: Sequence[ReasoningTree],
    seed: int,
    *,
    margin: float = 0.1,
    auroc_margin: float = 0.05,
    level: float = 0.01,
) -> dict[str, Any]:
    """Returns whether the step scores of two files come from one distribution.

    `ks` is the largest distance of their cumulative distributions (Kolmogorov-Smirnov). `p` comes from a permutation
    test over whole problems, since steps of one problem depend on each other: a problem in both files may swap its
    sides, the others are dealt out anew.

    `verdict` is `same` if p >= `level` or ks <= `margin`. Otherwise it is `shifted`: thresholds and recalibration maps
    no longer hold. Step labels in both files, or else outcomes of chains (ranked by their lowest score; `auroc_of`
    names which), decide more: `retrain` if AUROC fell by `auroc_margin` and the intervals are apart (the ranking
    broke), `recalibrate` in place of `shifted` if not (only the scale moved).
    """
    sides = [_steps("before", before), _steps("after", after)]
    ks_R = _distances(sides, seed)
    ks, p = float(ks_R[0]), float((ks_R >= ks_R[0] - 1e-12).mean())
    report = {
        "n_before": len(sides[0].score_N),
        "n_after": len(sides[1].score_N),
        "mean_before": jsonable(sides[0].score_N.mean()),
        "mean_after": jsonable(sides[1].score_N.mean()),
        "ks": ks,
        "p": p,
        "level": level,
        "margin": margin,
        "auroc_of": None,
        "auroc_before": None,
        "auroc_after": None,
        "verdict": "shifted" if p < level and ks > margin else "same",
    }
    of, (one, other) = "steps", (_area(side, seed) for side in sides)
    if one is None or other is None:
        of, (one, other) = "chains", (_area(_chains(trees), seed) for trees in (before, after))
    if one is not None and other is not None:
        report |= {"auroc_of": of, "auroc_before": one.json(), "auroc_after": other.json()}
        if other.high < one.low and other.value < one.value - auroc_margin:
            report["verdict"] = "retrain"
        elif report["verdict"] == "shifted":
            report["verdict"] = "recalibrate"
    return report | {"finding": report["verdict"] != "same"}


class _Scores(NamedTuple):
    """Scores of steps or chains. A label above 0 is right; None is unknown."""

    score_N: Float[np.ndarray, " N"]
    label: Sequence[float | None]
    problem: Sequence[str]


def _steps(which: str, trees: Sequence[ReasoningTree]) -> _Scores:
    scores = scores_of(trees, [f"{which}, record {i}" for i in range(len(trees))])
    if not scores:
        raise ScoreError("drift needs scored steps in both files")
    nodes = [(tree.problem, node.label) for tree in trees for node in tree.nodes]
    return _Scores(np.concatenate(scores), [label for _, label in nodes], [problem for problem, _ in nodes])


def _chains(trees: Sequence[ReasoningTree]) -> _Scores:
    """Every chain by its lowest score, labelled with its outcome."""
    pairs = zip(trees, scores_of(trees), strict=True)
    chains = [(tree, score_N, chain) for tree, score_N in pairs for chain in chains_of(tree)]
    lowest = [score_N[chain].min() for _, score_N, chain in chains]
    outcome = [tree.nodes[chain[-1]].correct for tree, _, chain in chains]
    return _Scores(np.array(lowest), outcome, [tree.problem for tree, _, _ in chains])


def _distances(sides: Sequence[_Scores], seed: int) -> Float[np.ndarray, " R"]:
    """Returns the KS distance of two files, then those of `PERMUTATIONS` permutations of their problems."""
    problems = sorted({problem for side in sides for problem in side.problem})
    grid_K = np.unique(np.concatenate([side.score_N for side in sides]))
    if len(grid_K) > 512:
        grid_K = np.unique(np.quantile(grid_K, np.linspace(0, 1, 512)))
    # below[side, problem, k]: scores up to grid_K[k]; the last column counts all.
    below_SGK = np.zeros((2, len(problems), len(grid_K)))
    for below_GK, side in zip(below_SGK, sides, strict=True):
        place = np.searchsorted(grid_K, side.score_N)
        np.add.at(below_GK, (np.searchsorted(problems, side.problem), place), 1)
    below_SGK = np.cumsum(below_SGK, -1)
    there_SG = below_SGK[:, :, -1] > 0
    both_G = there_SG.all(0)
    rng = np.random.default_rng(seed)
    alone = np.flatnonzero(~both_G)
    first_RSG = np.zeros((1 + PERMUTATIONS, 2, len(problems)))  # whether a side's problem is in the first sample
    first_RSG[:, 0] = 1.0
    for first_SG in first_RSG[1:]:
        swap_G = both_G & (rng.random(len(problems)) < 0.5)
        first_SG[:, swap_G] = [[0.0], [1.0]]
        first_SG[:, alone] = rng.permutation(there_SG[0, alone])
    flat_XK = below_SGK.reshape(-1, len(grid_K))
    one_RK = first_RSG.reshape(len(first_RSG), -1) @ flat_XK
    two_RK = flat_XK.sum(0) - one_RK
    return np.abs(one_RK / one_RK[:, -1:] - two_RK / two_RK[:, -1:]).max(-1)


def _area(side: _Scores, seed: int) -> Interval | None:
    """Returns the area under the ROC curve; None without both right and wrong labels."""
    known = {i: label > 0 for i, label in enumerate(side.label) if label is not None}
    some, right_N = list(known), np.array(list(known.values()), bool)
    if right_N.all() or not right_N.any():
        return None
    score_N = side.score_N[some]
    return bootstrap(lambda w: auroc(score_N, right_N, w), [side.problem[i] for i in some], seed=seed)
