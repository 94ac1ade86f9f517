"""Drift: whether the scores of two files come from one distribution, and mean the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from scipy.optimize import isotonic_regression
from tyro.conf import Positional, arg

from jprm.methods.evaluate.benchmark import Benchmark, CommandOptions, Report
from jprm.methods.evaluate.calibration import BINS, PROBLEMS_PER_BIN
from jprm.methods.evaluate.scored import ScoreError, scores_of
from jprm.statistics import Interval, auroc, bootstrap, equal_mass_bins, jsonable
from jprm.tree import ReasoningTree, chains_of

PERMUTATIONS = 999


def drift(
    before: Sequence[ReasoningTree],
    after: Sequence[ReasoningTree],
    seed: int,
    *,
    margin: float = 0.1,
    auroc_margin: float = 0.05,
    calibration_margin: float = 0.05,
    level: float = 0.01,
) -> dict[str, Any]:
    """Returns whether the step scores of two files come from one distribution, and mean the same.

    `ks` is the largest distance of their cumulative distributions (Kolmogorov-Smirnov). `p` comes from a permutation
    test over whole problems, since steps of one problem depend on each other: a problem in both files may swap its
    sides, the others are dealt out anew.

    Labels of steps in both files, or else outcomes of chains (by their lowest score), tell more; `calibration_of` and
    `auroc_of` name which were used. `calibration_gap` is how far apart the fractions right are at equal scores
    (`_calibration_gaps`), `calibration_gap_if_unchanged` what noise alone shows on average; `calibration_p` comes from
    the same permutations.

    `verdict` is the first of:
        `retrain`: AUROC fell by `auroc_margin` and the intervals are apart: the ranking broke.
        `recalibrate`: the fractions right moved by more than `calibration_margin` with calibration_p < `level`, or the
            scores did as for `shifted` and labels show that the ranking held: only the scale moved.
        `shifted`: ks > `margin` and p < `level`, without labels: thresholds and recalibration maps no longer hold.
        `same`: none of these. Without labels it says nothing about what the scores mean.
    """
    sides = [_steps("before", before), _steps("after", after)]
    ks_R = _distances(sides, seed)
    ks, p = float(ks_R[0]), _p_value(ks_R)
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
        "calibration_margin": calibration_margin,
        "verdict": "shifted" if p < level and ks > margin else "same",
    }
    ends = [_chains(trees) for trees in (before, after)]
    report |= (moved := _calibration(sides, ends, seed))
    if moved["calibration_of"] and moved["calibration_gap"] > calibration_margin and moved["calibration_p"] < level:
        report["verdict"] = "recalibrate"
    what, (old, new) = "steps", (_area(side, seed) for side in sides)
    if old is None or new is None:
        what, (old, new) = "chains", (_area(side, seed) for side in ends)
    if old is not None and new is not None:
        report |= {"auroc_of": what, "auroc_before": old.json(), "auroc_after": new.json()}
        if new.high < old.low and new.value < old.value - auroc_margin:
            report["verdict"] = "retrain"
        elif report["verdict"] == "shifted":
            report["verdict"] = "recalibrate"
    return report | {"finding": report["verdict"] != "same"}


class _Scores(NamedTuple):
    """Scores of steps or chains. A label above 0 is right; None is unknown."""

    score_N: Float[np.ndarray, " N"]
    label: Sequence[float | None]
    problem: Sequence[str]

    def known(self) -> _Scores:
        """Returns those with a label."""
        labelled = [i for i, label in enumerate(self.label) if label is not None]
        return _Scores(self.score_N[labelled], [self.label[i] for i in labelled], [self.problem[i] for i in labelled])


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
    one_RK, two_RK = _resampled(below_SGK, below_SGK[:, :, -1] > 0, seed)
    return np.abs(one_RK / one_RK[:, -1:] - two_RK / two_RK[:, -1:]).max(-1)


def _calibration(sides: Sequence[_Scores], ends: Sequence[_Scores], seed: int) -> dict[str, Any]:
    """Returns what `drift` reports of the calibration, by steps, or else by the ends of chains; None without labels."""
    for what, pair in (("steps", sides), ("chains", ends)):
        if gaps := _calibration_gaps([side.known() for side in pair], seed):
            gap_R, statistic_R = gaps
            return {"calibration_of": what, "calibration_gap": float(gap_R[0]), "calibration_p": _p_value(statistic_R),
                    "calibration_gap_if_unchanged": float(gap_R[1:].mean())}  # fmt: skip
    names = ("calibration_of", "calibration_gap", "calibration_p", "calibration_gap_if_unchanged")
    return dict.fromkeys(names)


def _calibration_gaps(
    sides: Sequence[_Scores], seed: int
) -> tuple[Float[np.ndarray, " R"], Float[np.ndarray, " R"]] | None:
    """Returns the calibration gap of two labelled files and of `PERMUTATIONS` permutations, and the test's statistic.

    Bins of the scores of both files have equal mass. A bin's gap D is the difference of the files' mean of y - f(s),
    y being 1 where right and f the rising function of the score that fits both files best (isotonic regression), so
    that other scores within a bin make no gap. The calibration gap is the mean of |D| over bins with the weights m =
    n_before n_after / (n_before + n_after): where one file has no scores, nothing is compared. The test's statistic
    is the sum of m D^2 / v, v being the bin's variance. Its terms keep their size where a permutation deals the
    scores of a bin out more evenly than the files do. None where there are no labels, or no bin has scores of both.
    """
    score_N = np.concatenate([side.score_N for side in sides])
    if not all(len(side.score_N) for side in sides):
        return None
    problems = sorted({problem for side in sides for problem in side.problem})
    right_N = np.array([label is not None and label > 0 for side in sides for label in side.label], float)
    _, value_N, count_U = np.unique(score_N, return_inverse=True, return_counts=True)
    fit_U = isotonic_regression(np.bincount(value_N, right_N) / count_U, weights=count_U).x
    bin_N = equal_mass_bins(score_N, min(BINS, max(1, len(problems) // PROBLEMS_PER_BIN)))
    side_N = np.repeat([0, 1], [len(side.score_N) for side in sides])
    place = side_N, np.searchsorted(problems, [problem for side in sides for problem in side.problem]), bin_N
    rest_SGB, count_SGB = np.zeros((2, 2, len(problems), bin_N.max() + 1))
    rest_N = right_N - fit_U[value_N]
    np.add.at(rest_SGB, place, rest_N)
    np.add.at(count_SGB, place, 1)
    variance_B = np.bincount(bin_N, rest_N**2) / np.bincount(bin_N)
    there_SG = count_SGB.sum(-1) > 0
    rest_2RB, count_2RB = (np.stack(_resampled(x_SGB, there_SG, seed)) for x_SGB in (rest_SGB, count_SGB))
    weight_RB = count_2RB.prod(0) / np.maximum(count_2RB.sum(0), 1)
    if not weight_RB[0].any():
        return None
    one_RB, two_RB = rest_2RB / np.maximum(count_2RB, 1)
    apart_RB = one_RB - two_RB
    gap_R = (weight_RB * np.abs(apart_RB)).sum(-1) / np.maximum(weight_RB.sum(-1), 1e-12)
    return gap_R, (weight_RB * apart_RB**2 / np.maximum(variance_B, 1e-12)).sum(-1)


def _resampled(
    x_SGK: Float[np.ndarray, "2 G K"], there_SG: Bool[np.ndarray, "2 G"], seed: int
) -> tuple[Float[np.ndarray, "R K"], Float[np.ndarray, "R K"]]:
    """Returns the sums over problems in the first and in the second sample: the files, then `PERMUTATIONS` others."""
    both_G = there_SG.all(0)
    rng = np.random.default_rng(seed)
    alone = np.flatnonzero(~both_G)
    first_RSG = np.zeros((1 + PERMUTATIONS, *there_SG.shape))  # whether a side's problem is in the first sample
    first_RSG[:, 0] = 1.0
    for first_SG in first_RSG[1:]:
        swap_G = both_G & (rng.random(there_SG.shape[1]) < 0.5)
        first_SG[:, swap_G] = [[0.0], [1.0]]
        first_SG[:, alone] = rng.permutation(there_SG[0, alone])
    flat_XK = x_SGK.reshape(-1, x_SGK.shape[-1])
    one_RK = first_RSG.reshape(len(first_RSG), -1) @ flat_XK
    return one_RK, flat_XK.sum(0) - one_RK


def _p_value(statistic_R: Float[np.ndarray, " R"]) -> float:
    return float((statistic_R >= statistic_R[0] - 1e-12).mean())


def _area(side: _Scores, seed: int) -> Interval | None:
    """Returns the area under the ROC curve; None without both right and wrong labels."""
    known = side.known()
    right_N = np.array([label is not None and label > 0 for label in known.label], bool)
    if right_N.all() or not right_N.any():
        return None
    return bootstrap(lambda w: auroc(known.score_N, right_N, w), known.problem, seed=seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriftOptions(CommandOptions):
    """Drift: whether two scored files have scores of one distribution, and whether to recalibrate or to retrain.

    For example:
      jprm eval experiments/studies/drift.py:DRIFT scored_may.jsonl scored_june.jsonl --output drift.json
    """

    before: Annotated[Positional[Path], arg(metavar="BEFORE.jsonl")]
    """Chains or pools that `jprm score` wrote."""
    after: Annotated[Positional[Path], arg(metavar="AFTER.jsonl")]
    """The same later: of another policy, other problems or another model."""


def run(options: DriftOptions) -> Report:
    from jprm.tree import read_trees

    return drift(list(read_trees(options.before)), list(read_trees(options.after)), 0)


def tables(report: Report) -> Iterator[str]:
    numbers = f"largest distance {report['ks']:.3f}, p = {report['p']:.3f}"
    means = f"mean score {report['mean_before']:.3f} before, {report['mean_after']:.3f} after"
    yield f"verdict: {report['verdict']} ({numbers}; {means})"
    if report["calibration_of"]:
        gap, noise = report["calibration_gap"], report["calibration_gap_if_unchanged"]
        p = f"p = {report['calibration_p']:.3f}"
        yield f"calibration of {report['calibration_of']}: moved by {gap:.3f} ({noise:.3f} by noise alone; {p})"
    else:
        yield "no labels in both files: whether the scores mean the same is not tested"


DRIFT = Benchmark(name="drift", title="Drift", options=DriftOptions, tables=tables, run=run)
