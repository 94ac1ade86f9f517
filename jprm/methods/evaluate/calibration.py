"""Calibration: are 80 % of the steps with score 0.8 right?

Bins have equal mass. In bins of equal width, most steps of a PRM share the top bin, and the error of the others is
noise. Steps with equal scores share a bin, so the order of records does not matter.

ECE is never 0 on a finite sample, even for a perfect scorer, and a bootstrap interval of it does not cover, because
resampling adds noise to noise. `ece_interval` debiases it and bounds it from below. An ECE is a finding only if it
exceeds the 95 % quantile under noise alone (`ece_if_calibrated`). A perfect scorer exceeds that estimate in 5 to 9 % of
samples.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jprm.io.storage import path_of
from jprm.methods.evaluate.benchmark import Benchmark, Report, Request
from jprm.methods.evaluate.blocks import Block, Cell, Figure, Note, PageModel, Table, left_out_words, percent, words
from jprm.methods.evaluate.conformal import Threshold, accept_threshold, false_alarm_threshold
from jprm.methods.evaluate.findings import Finding
from jprm.methods.evaluate.options import Calibration
from jprm.methods.evaluate.plots import reliability, slug
from jprm.methods.evaluate.run import load_and_score
from jprm.methods.evaluate.scored import NothingToMeasure, ScoreError
from jprm.methods.evaluate.steps import UNLABELLED, labelled
from jprm.methods.jobs.calibration_map import KINDS, NAME, Recalibration, apply, fit, store_calibration
from jprm.statistics import Interval, auroc, equal_mass_bins, group_numbers, interval, jsonable, mean_draws, ratio
from jprm.tree import ReasoningTree, read_trees

BINS = 15
"""As in Guo et al. 2017 (arXiv 1706.04599)."""

PROBLEMS_PER_BIN = 10
"""The problems needed per bin; with fewer problems there are fewer bins.

The noise of ECE cannot be estimated from a handful of steps per bin; a perfect scorer would often be called
miscalibrated.
"""

NULL_DRAWS = 500
LEVEL = 0.95
FOLDS = 5
"""Folds of problems for choosing a map."""

AT_ONCE = 1024
"""Records read together."""

DEPTHS = 8
"""Step indices with their own group; later steps share one."""

ALPHAS = (0.05, 0.1, 0.2)
CONFIDENCE = 0.9
"""Confidence of the report's conformal thresholds."""


class Brier(NamedTuple):
    """`brier` = `reliability` - `resolution` + `uncertainty` + `within_bin`, exactly, for any bins."""

    brier: Any
    reliability: Any
    resolution: Any
    uncertainty: Any
    within_bin: Any


def ece(score_N: Float[np.ndarray, " N"], right_N: Bool[np.ndarray, " N"], bins: int = BINS) -> float:
    """Returns the expected calibration error: the mean over steps of |fraction right - mean score| in their bin.

    Guo et al. 2017, equation 3, with equal-mass bins. NaN if there are no steps.
    """
    gap_N = np.asarray(right_N, float) - np.asarray(score_N, float)
    return float(ratio(np.abs(np.bincount(equal_mass_bins(score_N, bins), gap_N)).sum(), len(gap_N)))


def ece_if_calibrated(
    score_N: Float[np.ndarray, " N"],
    right_N: Bool[np.ndarray, " N"],
    groups: Sequence[Any] | np.ndarray,
    bins: int = BINS,
    *,
    seed: int,
) -> Float[np.ndarray, " R"]:
    """Returns `NULL_DRAWS` draws of the ECE under noise alone, as if each bin were perfectly calibrated.

    Wild cluster bootstrap (Cameron, Gelbach & Miller 2008, Review of Economics and Statistics 90, 414): the distance of
    each label from its score, centred within the bin, keeps its size and gets a random sign that is shared by all steps
    of a group (problem). Too small if there are few groups; zeros if there are no steps.
    """
    return np.abs(_gaps(score_N, right_N, groups, bins, seed)[1]).sum(-1)


def ece_interval(
    score_N: Float[np.ndarray, " N"],
    right_N: Bool[np.ndarray, " N"],
    groups: Sequence[Any] | np.ndarray,
    bins: int = BINS,
    *,
    seed: int,
) -> Interval:
    """Returns the debiased ECE with an interval of about 95 % coverage.

    In simulations it covers in 93 to 98 %, least if all scores are near 1. NaN if there are no steps.

    With population gaps g per bin and noise e, the plain ECE is sum |g_b + e_b|. With s the signs of g it is at least s
    (g + e), so the ECE s g exceeds it by at most -s e: `high` adds the 97.5 % quantile of that, the larger one for the
    measured signs and for equal signs. The plain ECE exceeds the ECE by at most sum |e_b|, and the ECE is at least |sum
    g_b|: `low` is the higher of the two resulting bounds, each at 98.75 %. `value` is c times the plain ECE, where c
    scales the measured gaps so that the plain ECE is the median of sum |c gap_b + e_b|. The noise is that of
    `ece_if_calibrated`.
    """
    gap_B, noise_RB = _gaps(score_N, right_N, groups, bins, seed)
    plain, tail = np.abs(gap_B).sum(), (1 - LEVEL) / 4
    if not len(gap_B):
        return Interval(np.nan, np.nan, np.nan)
    beyond_noise = plain - np.quantile(np.abs(noise_RB).sum(-1), 1 - tail)
    overall = np.abs(gap_B.sum()) - np.quantile(np.abs(noise_RB.sum(-1)), 1 - tail)
    scale_K = np.linspace(0, 1, 41)
    median_K = [np.median(np.abs(scale * gap_B + noise_RB).sum(-1)) for scale in scale_K]
    signed_2R = np.stack([noise_RB @ np.where(gap_B < 0, -1, 1), noise_RB.sum(-1)])
    low, high = max(0.0, beyond_noise, overall), min(1.0, plain + np.quantile(signed_2R, 1 - 2 * tail, axis=1).max())
    value = plain * np.interp(plain, np.maximum.accumulate(median_K), scale_K) if plain > median_K[0] else 0.0
    return Interval(float(np.clip(value, low, high)), low, high)


def _gaps(score_N, right_N, groups, bins: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns each bin's mean gap times its fraction of steps, (B,), and draws of it if there were no gap, (R, B)."""
    gap_N, bin_N = np.asarray(right_N, float) - np.asarray(score_N, float), equal_mass_bins(score_N, bins)
    gap_B = np.bincount(bin_N, gap_N)
    noise_N = gap_N - (gap_B / np.maximum(np.bincount(bin_N), 1))[bin_N]
    group_N = np.unique(np.asarray(groups), return_inverse=True)[1].reshape(-1)
    G, B = int(group_N.max(initial=-1)) + 1, len(gap_B)
    cell_N = group_N * B + bin_N
    noise_GB = np.bincount(cell_N, noise_N, G * B).reshape(G, B)
    groups_B = (np.bincount(cell_N, minlength=G * B).reshape(G, B) > 0).sum(0)
    noise_GB = noise_GB * np.sqrt(groups_B / np.maximum(groups_B - 1, 1))  # the mean was itself estimated
    sign_RG = np.random.default_rng(seed).choice([-1.0, 1.0], size=(NULL_DRAWS, G))
    total = max(len(gap_N), 1)
    return gap_B / total, sign_RG @ noise_GB / total


def brier(score_N: Float[np.ndarray, " N"], right_N: Bool[np.ndarray, " N"], bins: int = BINS) -> Brier:
    """Returns the mean squared error of the scores, and Murphy's decomposition over equal-mass bins; NaN without steps.

    With n_b steps in bin b, mean score p_b, fraction right o_b, and overall fraction right o: reliability = sum n_b
    (p_b - o_b)^2 / N, resolution = sum n_b (o_b - o)^2 / N, uncertainty = o (1 - o). Scores that differ within a bin
    add `within_bin`, their variance minus twice their covariance with the labels, without which the identity is not
    exact (Stephenson, Coelho & Jolliffe 2008, Weather and Forecasting 23, 752): brier = reliability - resolution +
    uncertainty + within_bin. Equal scores share a bin, so there may be fewer bins than `bins`.
    """
    score_N, right_N = np.asarray(score_N, float), np.asarray(right_N, float)
    if not len(score_N):
        return Brier(*[np.nan] * 5)
    bin_N = equal_mass_bins(score_N, bins)
    n_B = np.bincount(bin_N)
    p_N, o_N = ((np.bincount(bin_N, x_N) / n_B)[bin_N] for x_N in (score_N, right_N))
    mean = right_N.mean()
    return Brier(
        brier=np.mean((score_N - right_N) ** 2),
        reliability=np.mean((p_N - o_N) ** 2),
        resolution=np.mean((o_N - mean) ** 2),
        uncertainty=mean * (1 - mean),
        within_bin=np.mean((score_N - p_N) ** 2) - 2 * np.mean((score_N - p_N) * (right_N - o_N)),
    )


def reliability_curve(
    score_N: Float[np.ndarray, " N"],
    right_N: Bool[np.ndarray, " N"],
    groups: Sequence[Any] | np.ndarray,
    *,
    seed: int,
    bins: int = BINS,
) -> dict[str, list[float | None]]:
    """Returns the reliability diagram as lists over bins, empty if there are no steps.

    `n` counts steps, `score` is their mean score, `value` the fraction right; `low` and `high` are a 95 % interval over
    groups (problems), absent (`None`) in a bin with a single group.
    """
    score_N, right_N = np.asarray(score_N, float), np.asarray(right_N, float)
    if not len(score_N):
        return {"n": [], "score": [], "value": [], "low": [], "high": []}
    bin_N, groups = equal_mass_bins(score_N, bins), np.asarray(groups)
    of_bin = [np.flatnonzero(bin_N == b) for b in range(bin_N.max() + 1)]
    intervals = [interval(mean_draws(right_N[i], groups[i], seed=seed)) for i in of_bin]
    curve = Interval(*map(np.array, zip(*intervals, strict=True))).json()
    return {"n": [len(i) for i in of_bin], "score": [float(score_N[i].mean()) for i in of_bin], **curve}


def calibration_report(
    files: Mapping[str, Iterable[ReasoningTree]], calibrate: Iterable[ReasoningTree], neutral: str | None, seed: int
) -> dict[str, Any]:
    """Returns the calibration of scored trees by file, before and after maps fitted on `calibrate`.

    `neutral` is the class of neutral ratings (positive, negative or drop; with `None`, a neutral one raises
    ScoreError). `n_steps` and `n_problems` count the steps judged, i.e. without those `left_out`. Raises ScoreError if
    a score is missing or outside [0, 1], and NothingToMeasure if a side lacks labels, `calibrate` a class, or the files
    problems that are not in `calibrate`.

    - `raw`: the figures on all files: `n`, `bins`, `mean_score`, `share_right`, `ece` (with `plain`),
      `ece_if_calibrated` (`mean`, `high`), `miscalibrated` (`None` below `PROBLEMS_PER_BIN` problems), `brier` (with
      its parts), `auroc` and `curve`. `by`: a list of them with `group`, by `step` (from 1), `length` (quartiles of
      characters) and `subset` (file).
    - `recalibrated`: the figures by kind of map, with `map` and `calibration_steps`. `chosen` is the kind with the
      lowest cross-fitted Brier score on `calibrate` (`choose_map`).
    - `left_out`: the number of steps of problems that are also in `calibrate`; they are used for the fit only.
    - `conformal`: thresholds on the lowest step score, from the chains of `calibrate`, one per problem. Each has the
      fields of `Threshold` and `held_out`: the `n` chains of the files, and their `rate`, which `alpha` bounds.
    """
    numbers: dict[str, int] = {}
    judged = [_Judged.of_trees(calibrate, neutral, "calibrate", 0, numbers)]
    judged += [_Judged.of_trees(scored, neutral, name, i, numbers) for i, (name, scored) in enumerate(files.items())]
    rank_U = np.argsort(sorted(range(len(numbers)), key=list(numbers).__getitem__))  # of a problem among all texts
    fitting, *judged = (part.numbered(rank_U) for part in judged)
    fitted, steps = fitting.steps, _Steps(*map(np.concatenate, zip(*(x.steps for x in judged), strict=True)))
    if not (len(fitted.score_N) and len(steps.score_N)):
        raise NothingToMeasure(
            f"no step of the {'records' if len(fitted.score_N) else 'calibration split'} has a label. Add labels"
        )
    if len(set(fitted.right_N)) < 2:
        raise NothingToMeasure("the calibration split holds no step labelled right, or none labelled wrong")
    apart_N = ~np.isin(steps.problem_N, fitted.problem_N)
    if not apart_N.any():
        raise NothingToMeasure("every labelled step is of a problem in the calibration split: nothing is left to judge")
    left_out, steps = int((~apart_N).sum()), steps.only(apart_N)
    maps = {kind: fit(kind, fitted.score_N, fitted.right_N) for kind in KINDS}
    recalibrated = {kind: _figures(steps.mapped(fitted_map), seed) for kind, fitted_map in maps.items()}
    first = _First(*map(np.concatenate, zip(*(x.first for x in judged), strict=True)))
    held_out = first.only(~np.isin(first.problem_C, fitted.problem_N)).of_each_problem()
    return {
        "neutral": neutral,
        "n_steps": len(steps.score_N),
        "n_problems": len(set(steps.problem_N)),
        "left_out": left_out,
        "raw": _figures(steps, seed),
        "by": _by_group(steps, list(files), seed),
        "recalibrated": {
            kind: {"map": maps[kind].to_json(), "calibration_steps": len(fitted.score_N), **figures}
            for kind, figures in recalibrated.items()
        },
        "chosen": choose_map(fitted.score_N, fitted.right_N, fitted.problem_N, seed),
        "conformal": _conformal(fitting.first.of_each_problem(), held_out),
    }


def choose_map(score_N: np.ndarray, right_N: np.ndarray, problem_N: np.ndarray, seed: int) -> str:
    """Returns the kind of map with the lowest Brier score, cross-validated by problem.

    Kinds are `temperature`, `platt`, `isotonic` and `quantile`. If a training fold would lack right or wrong steps,
    returns `temperature`, which has one parameter. `seed` deals the problems to folds.
    """
    problem_N = group_numbers(problem_N)
    fold_N = (np.random.default_rng(seed).permutation(problem_N.max() + 1) % FOLDS)[problem_N]
    if any(len(set(right_N[fold_N != fold])) < 2 for fold in range(FOLDS)):
        return next(iter(KINDS))

    def loss(kind: str) -> float:
        of_folds = (
            (fit(kind, score_N[fold_N != fold], right_N[fold_N != fold]), fold_N == fold) for fold in range(FOLDS)
        )
        return sum(((apply(fitted, score_N[in_N]) - right_N[in_N]) ** 2).sum() for fitted, in_N in of_folds)

    return min(KINDS, key=loss)


def _by_group(steps: _Steps, files: Sequence[str], seed: int) -> dict[str, list[dict[str, Any]]]:
    """Returns the figures by step index, by length and by file."""
    quartile_N = np.searchsorted(np.quantile(steps.length_N, [0.25, 0.5, 0.75]), steps.length_N)
    edges = np.quantile(steps.length_N, [0, 0.25, 0.5, 0.75, 1]).astype(int)
    depths = {d: str(d + 1) if d < DEPTHS else f"{d + 1} and later" for d in range(DEPTHS + 1)}
    groupings = {
        "step": (np.minimum(steps.depth_N, DEPTHS), depths),
        "length": (quartile_N, {q: f"{edges[q]} to {edges[q + 1]} characters" for q in range(4)}),
        "subset": (steps.file_N, dict(enumerate(files))),
    }
    return {
        name: [
            {"group": label, **_figures(steps.only(group_N == value), seed)}
            for value, label in labels.items()
            if (group_N == value).any()
        ]
        for name, (group_N, labels) in groupings.items()
    }


def _conformal(calibrate: _First, held_out: _First) -> list[dict[str, Any]]:
    lowest_N, right_N = calibrate.lowest_C, calibrate.right_C
    thresholds = [
        *(false_alarm_threshold(lowest_N[right_N], alpha) for alpha in ALPHAS),
        *(false_alarm_threshold(lowest_N[right_N], alpha, confidence=CONFIDENCE) for alpha in ALPHAS),
        *(accept_threshold(lowest_N, right_N, alpha, confidence=CONFIDENCE) for alpha in ALPHAS),
    ]
    return [
        threshold.to_json() | {"held_out": _held_out(threshold, held_out.lowest_C, held_out.right_C)}
        for threshold in thresholds
    ]


def _held_out(threshold: Threshold, lowest_N, right_N) -> dict[str, Any]:
    if threshold.kind == "false_alarm":
        counted_N, bad_N = right_N, lowest_N < threshold.threshold
    else:
        counted_N, bad_N = lowest_N >= threshold.threshold, ~right_N
    return {"n": int(counted_N.sum()), "rate": jsonable(bad_N[counted_N].mean()) if counted_N.any() else None}


class _Steps(NamedTuple):
    score_N: Float[np.ndarray, " N"]
    right_N: Bool[np.ndarray, " N"]
    problem_N: Int[np.ndarray, " N"]
    file_N: Int[np.ndarray, " N"]
    depth_N: Int[np.ndarray, " N"]
    length_N: Int[np.ndarray, " N"]

    def only(self, some_N: Bool[np.ndarray, " N"]) -> _Steps:
        return _Steps(*(x_N[some_N] for x_N in self))

    def mapped(self, recalibration: Recalibration) -> _Steps:
        return self._replace(score_N=apply(recalibration, self.score_N))


class _First(NamedTuple):
    """Chains with a step labelled wrong, or with every step labelled right (`right_C`)."""

    problem_C: Int[np.ndarray, " C"]
    lowest_C: Float[np.ndarray, " C"]
    right_C: Bool[np.ndarray, " C"]

    def only(self, some_C: Any) -> _First:
        return _First(*(x_C[some_C] for x_C in self))

    def of_each_problem(self) -> _First:
        """Returns the first chain of each problem, in order."""
        return self.only(np.sort(np.unique(self.problem_C, return_index=True)[1]))


class _Judged(NamedTuple):
    """The data of one file. Branching trees are left out of `first`, because their chains share steps."""

    steps: _Steps
    first: _First

    @classmethod
    def of_trees(
        cls, scored: Iterable[ReasoningTree], neutral: str | None, name: str, file: int, numbers: dict[str, int]
    ) -> _Judged:
        """Reads trees in batches; adds the number of each new problem to `numbers`."""
        steps = [_Steps(*(np.zeros(0, kind) for kind in (float, bool, int, int, int, int)))]
        chains, trees = [], iter(scored)
        for start in itertools.count(step=AT_ONCE):
            arrays = labelled(list(itertools.islice(trees, AT_ONCE)), neutral, start)
            if not arrays:
                break
            parts = []
            for i, tree in enumerate(arrays, start):
                score_N, class_N, size = tree.score_N, tree.class_N, len(tree.score_N)
                if not ((score_N >= 0) & (score_N <= 1)).all():
                    raise ScoreError(
                        f"{name}: record {i + 1}: a score is outside [0, 1], and only probabilities have a calibration."
                        " Fit a verifier to get probabilities: jprm fuse fit --sources prm=DIR"
                    )
                problem = numbers.setdefault(tree.problem, len(numbers))
                same = np.full(size, problem), np.full(size, file)
                all_steps = _Steps(score_N, class_N == 1, *same, tree.depth_N, tree.length_N)
                parts.append(all_steps.only(class_N != UNLABELLED))
                chain = size > 0 and (tree.parent_N == np.arange(size) - 1).all()
                if chain and ((class_N == 0).any() or (class_N == 1).all()):
                    chains.append((problem, score_N.min(), (class_N == 1).all()))
            steps.append(_Steps(*map(np.concatenate, zip(*parts, strict=True))))
        problem_C, lowest_C, right_C = zip(*chains, strict=True) if chains else ((), (), ())
        return cls(
            _Steps(*map(np.concatenate, zip(*steps, strict=True))),
            _First(np.array(problem_C, int), np.array(lowest_C, float), np.array(right_C, bool)),
        )

    def numbered(self, number_U: Int[np.ndarray, " U"]) -> _Judged:
        """Renumbers the problems."""
        steps = self.steps._replace(problem_N=number_U[self.steps.problem_N])
        return _Judged(steps, self.first._replace(problem_C=number_U[self.first.problem_C]))


def _figures(steps: _Steps, seed: int) -> dict[str, Any]:
    score_N, right_N, problem_N = steps.score_N, steps.right_N, group_numbers(steps.problem_N)
    problems = len(np.unique(problem_N))
    enough = problems >= PROBLEMS_PER_BIN
    bins = int(np.clip(problems // PROBLEMS_PER_BIN, 1, BINS))
    null_R = ece_if_calibrated(score_N, right_N, problem_N, bins, seed=seed)
    plain = ece(score_N, right_N, bins)
    square_N = (score_N - right_N) ** 2
    return {
        "n": len(score_N),
        "bins": bins,
        "mean_score": jsonable(score_N.mean()),
        "share_right": jsonable(right_N.mean()),
        "ece": ece_interval(score_N, right_N, problem_N, bins, seed=seed).json() | {"plain": jsonable(plain)},
        "ece_if_calibrated": {"mean": jsonable(null_R.mean()), "high": jsonable(np.quantile(null_R, 0.95))},
        "miscalibrated": bool(plain > np.quantile(null_R, 0.95)) if enough else None,
        "brier": interval(mean_draws(square_N, problem_N, seed=seed)).json()
        | {key: jsonable(x) for key, x in brier(score_N, right_N, bins)._asdict().items() if key != "brier"},
        "auroc": jsonable(auroc(score_N, right_N)),
        "curve": reliability_curve(score_N, right_N, problem_N, seed=seed, bins=bins),
    }


def run(options: Calibration) -> Report:
    if options.model is None:
        if options.store is not None:
            raise ValueError("--store keeps the map in a model's folder: name it with --model")
        files = {path_of(path).name: read_trees(path) for path in options.data}
        fitted = itertools.chain.from_iterable(map(read_trees, options.calibrate))
        return calibration_report(files, fitted, options.neutral, seed=0) | {"too_long": 0}
    prm, request = load_and_score(BENCHMARK, options)
    report = figures(request)
    if options.store is not None:
        fitted = report["recalibrated"][options.store]["map"]
        store_calibration(prm, fitted, list(map(os.fspath, options.calibrate)), options.neutral)
        print(f"{options.model}/{NAME}: the map {options.store}, which `jprm score --calibrated` applies")
    return report


def figures(request: Request) -> Report:
    fitted = [tree for trees in request.calibrate.values() for tree in trees]
    report = calibration_report(request.data, fitted, request.neutral, request.seed)
    return report | {"too_long": request.left_out}


COLUMNS = ("steps", "mean score, %", "right, %", "ECE [95 %]", "plain / noise", "Brier [95 %]", "AUROC")


def tables(report: Report) -> Iterator[Table]:
    title = f"Calibration: {report['n_steps']} steps of {report['n_problems']} problems; neutral: "
    title += report["neutral"] or "none"
    title += left_out_words(report)
    yield Table(title, ("", *COLUMNS), list(_rows(report)))
    rows = []
    for row in report["conformal"]:
        threshold = "none" if row["threshold"] is None else f"{row['threshold']:.4g}"
        sure = "average" if row["confidence"] is None else row["confidence"]
        held_out = f"{percent(row['held_out']['rate'])} of {row['held_out']['n']}"
        rows.append([words(row["kind"]), f"<= {percent(row['alpha'])}", sure, threshold, row["n"], held_out])
    columns = ("", "promised", "confidence", "threshold", "calibration chains", "held out")
    yield Table("Conformal thresholds", columns, rows)


def _rows(report: Report) -> Iterator[list[Cell]]:
    named = {
        "as scored": report["raw"],
        **{f"by {kind}": row for kind, row in report["recalibrated"].items()},
        **{f"  {name} {row['group']}": row for name, rows in report["by"].items() for row in rows},
    }
    for label, row in named.items():
        noise = f"{percent(row['ece'].get('plain'))} / {percent(row['ece_if_calibrated']['high'])}"
        noise += " <" if row["miscalibrated"] else ""
        cells = (row["n"], row["mean_score"], row["share_right"], row["ece"])
        yield [label, *cells, noise, row["brier"], row["auroc"]]


def section(models: Sequence[PageModel]) -> Iterator[Block]:
    for model in models:
        report = model.results["calibration"]
        curves = {"as scored": report["raw"]["curve"], "by platt": report["recalibrated"]["platt"]["curve"]}
        yield Figure(
            name=f"reliability-{slug(model.name)}",
            title="Reliability diagram",
            description=f"Reliability of {model.name}: fraction of right steps by score.",
            caption=model.name,
            note="Each point is a bin of equally many steps. Across: their mean score. Up: the fraction that is right,"
            " with a 95 % interval. On the diagonal a score is a probability; below it the model is too sure.",
            draw=functools.partial(reliability, curves=curves),
            size=(5.6, 3.9),
        )
        title = f"{report['left_out']} steps of the problems fitted on are left out"
        yield Table(title, (model.name, *COLUMNS), list(_rows(report)))
    yield Note(
        "ECE is the mean distance between score and fraction right, debiased; the plain one of a finite sample is never"
        " 0, so what noise alone would show stands beside it; “<” marks a finding, a plain ECE above that. The maps are"
        " fitted on other problems."
    )


def findings(results: Mapping[str, Any]) -> Iterator[Finding]:
    report = results["calibration"]
    raw, chosen = report["raw"], report.get("chosen", "temperature")
    kind, note = "good", ""
    if results.get("model", {}).get("semantics") == "value":
        kind = "open"
        note = "The model scores values, how likely the chain is to end correct: a right step may well have a low one."
    elif raw["miscalibrated"] is None:
        kind, note = "open", "There are too few problems to say more."
    elif raw["miscalibrated"]:
        brought = percent(report["recalibrated"][chosen]["ece"]["value"])
        kind, note = "bad", f"The {chosen} map brings it to {brought} % on other problems."
    noise = (
        "It is how far a step's score is from its fraction of right steps on average,"
        f" {percent(raw['ece'].get('plain'))} % before the bias of noise is taken off; a calibrated scorer would show"
        f" up to {percent(raw['ece_if_calibrated']['high'])} % by noise."
    )
    yield Finding("Calibration error (ECE)", raw["ece"], note=f"{noise} {note}".strip(), kind=kind)


def left_out(report: Report) -> Iterator[tuple[str, int]]:
    yield "calibration: steps of problems fitted on", report["left_out"]


BENCHMARK = Benchmark(
    name="calibration",
    title="Calibration",
    tables=tables,
    run=run,
    figures=figures,
    needs=("data", "calibrate", "neutral"),
    section=section,
    findings=findings,
    left_out=left_out,
)
