"""Ranking metrics and bootstrap intervals, in numpy's float64: sums over millions of pairs lose digits in float32.

Every metric takes weights with leading axes. A bootstrap over problems is the metric under R integer weight rows, so
scores are sorted once and not copied.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import scipy  # its parts are loaded when they are first used
from jaxtyping import Bool, Float, Int

DRAWS = 1000
TIE = 1e-12  # what is smaller is rounding
MOST_GROUPS = 20_000
"""Groups resampled one by one. If there are more, they are joined at random into this many: the standard error stays
the same to 0.5 %, and time and memory do not grow with the groups."""

_CHUNK = 2_000_000  # weights in memory at a time (16 MB): a bootstrap over 50,000 steps must fit a laptop


def auroc(
    score_N: Float[np.ndarray, " N"], positive_N: Bool[np.ndarray, " N"],
    weight_RN: Float[np.ndarray, "*R N"] | None = None,
) -> Float[np.ndarray, "*R"]:  # fmt: skip
    """Returns the probability that a positive scores above a negative; ties count half (Mann-Whitney U / its maximum).

    NaN if either class has no weight. `weight_RN` defaults to 1 per item. Raises ValueError if a score is NaN.
    """
    positive_RU, negative_RU = _class_weights(score_N, positive_N, weight_RN)
    below_RU = np.cumsum(negative_RU, -1) - negative_RU / 2
    return ratio((positive_RU * below_RU).sum(-1), positive_RU.sum(-1) * negative_RU.sum(-1))


def average_precision(
    score_N: Float[np.ndarray, " N"], positive_N: Bool[np.ndarray, " N"],
    weight_RN: Float[np.ndarray, "*R N"] | None = None,
) -> Float[np.ndarray, "*R"]:  # fmt: skip
    """Returns sum_k (R_k - R_{k-1}) P_k over the distinct scores, highest first, with recall R and precision P.

    Does not interpolate, as scikit-learn's `average_precision_score`. NaN if the positives have no weight. Weights and
    errors are as in `auroc`.
    """
    positive_RU, negative_RU = (x_RU[..., ::-1] for x_RU in _class_weights(score_N, positive_N, weight_RN))
    hit_RU = np.cumsum(positive_RU, -1)
    precision_RU = hit_RU / np.maximum(hit_RU + np.cumsum(negative_RU, -1), np.finfo(float).tiny)
    return ratio((positive_RU * precision_RU).sum(-1), positive_RU.sum(-1))


def weighted_mean(
    value_N: Float[np.ndarray, " N *C"], weight_RN: Float[np.ndarray, "*R N"]
) -> Float[np.ndarray, "*R *C"]:
    """Returns the mean over N by each row of weights >= 0; NaN if they sum to 0, or for a NaN, even of weight 0."""
    value_N = np.asarray(value_N, float)
    total_R = weight_RN.sum(-1)
    return ratio(weight_RN @ value_N, total_R.reshape(total_R.shape + (1,) * (value_N.ndim - 1)))


def equal_mass_bins(score_N: Float[np.ndarray, " N"], bins: int) -> Int[np.ndarray, " N"]:
    """Returns each score's bin, from 0 (lowest; NaN: last) without gaps. Ties share one: there may be under `bins`."""
    score_N = np.asarray(score_N, float)
    _, value_N, count_U = np.unique(score_N, return_inverse=True, return_counts=True)
    middle_U = np.cumsum(count_U) - count_U / 2  # the middle rank of those that tie
    bin_N = np.floor(bins * middle_U / max(len(score_N), 1)).astype(int)[value_N.reshape(-1)]
    return np.unique(bin_N, return_inverse=True)[1].reshape(-1)


def f1(
    alarm_N: Bool[np.ndarray, " N"], positive_N: Bool[np.ndarray, " N"], weight_RN: Float[np.ndarray, "*R N"]
) -> Float[np.ndarray, "*R"]:
    """Returns 2 TP / (2 TP + FP + FN) under each weight row; NaN if there are neither positives nor alarms."""
    return ratio(2 * (weight_RN @ (alarm_N & positive_N)), weight_RN @ (alarm_N * 1.0 + positive_N))


class Interval(NamedTuple):
    """A statistic and its 95 % interval: scalars, or arrays of one shape for a curve. NaN where undefined."""

    value: Any
    low: Any
    high: Any

    def json(self: Interval | Difference) -> dict[str, Any]:
        """Returns `{"value", "low", "high"}` as numbers or lists, null if undefined; a difference adds `better`."""
        return {key: jsonable(x) for key, x in self._asdict().items()}


class Difference(NamedTuple):
    """A less B with its 95 % interval. `better`: the fraction of defined draws with A ahead, ties half."""

    value: Any
    low: Any
    high: Any
    better: Any
    json = Interval.json


class Draws(NamedTuple):
    """A statistic, its values on resamples, and how many groups were resampled."""

    value: Any
    drawn_R: Any
    groups: int


def draws(
    statistic: Callable[[Float[np.ndarray, "R N"]], Float[np.ndarray, " R *C"]], groups: Sequence[Any] | np.ndarray,
    n: int = DRAWS, *, seed: int,
) -> Draws:  # fmt: skip
    """Returns the statistic (*C) and its values (n, *C) on `n` resamples by whole groups with replacement.

    `groups` names each item's group (N items), e.g. each step's problem: steps in one problem depend on each other.
    `statistic` takes R rows of item weights: how often each item's group was drawn. Calls with the same seed and groups
    draw the same resamples, so their draws can be subtracted. Without items, every draw is the statistic's value. (It
    is a cluster bootstrap. Many groups take less time by `group_numbers`.)
    """
    group_N = numbered(groups)
    size = len(group_N)
    value = statistic(np.ones((1, size)))[0]
    if not size:
        return Draws(value, np.repeat(np.asarray(value)[None], n, 0), 0)
    n_groups = int(group_N.max()) + 1
    rng = np.random.default_rng(seed)
    rows = max(1, _CHUNK // size)
    drawn = []
    for start in range(0, n, rows):
        chosen_RG = rng.integers(n_groups, size=(min(rows, n - start), n_groups))
        chosen_RG += n_groups * np.arange(len(chosen_RG))[:, None]
        count_RG = np.bincount(chosen_RG.ravel(), minlength=chosen_RG.size).reshape(chosen_RG.shape)
        drawn.append(statistic(count_RG[:, group_N].astype(float)))
    return Draws(value, np.concatenate(drawn), n_groups)


def bootstrap(
    statistic: Callable[[Float[np.ndarray, "R N"]], Float[np.ndarray, " R *C"]], groups: Sequence[Any] | np.ndarray,
    n: int = DRAWS, *, seed: int, fraction: bool = True,
) -> Interval:  # fmt: skip
    """Returns `interval(draws(...))`: a statistic's 95 % interval from `n` resamples of its groups, e.g. problems."""
    return interval(draws(statistic, groups, n, seed=seed), fraction=fraction)


def interval(drawn: Draws, *, fraction: bool = True) -> Interval:
    """Returns a statistic's 95 % interval by its draws' standard error s and Student's t, groups less one.

    If not `fraction`: value +- t s. A `fraction` is a mean, ranking probability or score in [0, 1]; it gets Wilson's
    interval (JASA 22, 1927) with the effective sample size n = value (1 - value) / s^2 (Korn & Graubard, Survey
    Methodology 24, 1998). At 0 or 1, where all resamples are equal, n counts the groups. NaN for fewer than two groups.
    Raises ValueError if a `fraction` is outside [0, 1]; NaN passes.
    """
    value, groups = np.asarray(drawn.value, float), drawn.groups
    if fraction and ((value < -TIE) | (value > 1 + TIE)).any():
        raise ValueError(f"a fraction is in [0, 1], not {value}: name `fraction=False`")
    error, t = standard_error(drawn), scipy.special.stdtrit(groups - 1, 0.975)
    if not fraction:
        return Interval(value, value - t * error, value + t * error)
    spread = np.clip(value * (1 - value), 0, None)
    r = t**2 * np.where(spread < TIE, 1 / max(groups, 1), ratio(error**2, spread))  # t^2 / n
    middle, half = (value + r / 2) / (1 + r), np.sqrt(r * spread + r**2 / 4) / (1 + r)
    return Interval(value, np.clip(middle - half, 0, 1), np.clip(middle + half, 0, 1))


def standard_error(drawn: Draws, *, of_fractions: bool = False) -> Any:
    """Returns a statistic's standard error s, (*C), over its groups, without NaN draws; NaN if all are.

    If all groups differ equally, e.g. by 0, resamples do not show s. Then for a difference d `of_fractions` t s is
    q (1 + |d|): Wilson's bound q = t^2 / (groups + t^2) on the fraction of unlike groups, times their largest effect.
    """
    groups, t = drawn.groups, scipy.special.stdtrit(drawn.groups - 1, 0.975)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Degrees of freedom", RuntimeWarning)
        error = np.nanstd(drawn.drawn_R, axis=0) * np.sqrt(groups / max(groups - 1, 1))
    return np.where(of_fractions & (error < TIE), (1 + np.abs(drawn.value)) * t / (groups + t**2), error)


def difference(a: Draws, b: Draws | None = None) -> Difference:
    """Returns A - B, two fractions drawn with the same seed and groups; if B is omitted, A is the difference.

    NaN bounds for fewer than two groups, and `better` without defined draws.
    """
    if b is not None:
        a = Draws(a.value - b.value, a.drawn_R - b.drawn_R, a.groups)
    half = scipy.special.stdtrit(a.groups - 1, 0.975) * standard_error(a, of_fractions=True)
    defined_R, tied_R = ~np.isnan(a.drawn_R), np.abs(a.drawn_R) < TIE
    ahead_R = np.where(defined_R, np.where(tied_R, 0.5, a.drawn_R > 0), 0.0)
    return Difference(a.value, a.value - half, a.value + half, ratio(ahead_R.sum(0), defined_R.sum(0)))


def group_numbers(groups: Sequence[Any] | np.ndarray) -> Int[np.ndarray, " N"]:
    """Returns each item's group number, from 0; more than `MOST_GROUPS` groups are joined at random."""
    group_N = numbered(groups)
    count = int(group_N.max(initial=-1)) + 1
    if count <= MOST_GROUPS:
        return group_N
    return (np.random.default_rng(0).permutation(count) % MOST_GROUPS)[group_N]


def numbered(groups: Sequence[Any] | np.ndarray) -> Int[np.ndarray, " N"]:
    """Returns each item's number among the distinct groups, sorted within their types, e.g. numbers before texts."""
    if isinstance(groups, np.ndarray) and groups.dtype != object:
        return np.unique(groups, return_inverse=True)[1].reshape(-1)
    # Not by an array of texts, in which each would take the longest one's memory.
    distinct = sorted(set(groups), key=lambda group: (type(group).__name__, group))
    number_of = {group: number for number, group in enumerate(distinct)}
    return np.array([number_of[group] for group in groups], int)


def mean_draws(value_NC: Float[np.ndarray, " N *C"], groups: Sequence[Any] | np.ndarray, *, seed: int) -> Draws:
    """Returns 1000 `draws` (`seed`) of the items' mean, (*C), by `group_numbers`; NaN without items, or if one is."""
    group_N = group_numbers(groups)
    value_NC = np.asarray(value_NC, float)
    if len(group_N) <= MOST_GROUPS:
        return draws(lambda weight_RN: weighted_mean(value_NC, weight_RN), group_N, seed=seed)
    size_G = np.bincount(group_N)
    columns = [np.bincount(group_N, column_N) / size_G for column_N in value_NC.reshape(len(group_N), -1).T]
    mean_GC = np.stack(columns, -1).reshape(len(size_G), *value_NC.shape[1:])
    return draws(lambda weight_RG: weighted_mean(mean_GC, weight_RG * size_G), np.arange(len(size_G)), seed=seed)


def mean_differences(difference_PC: Float[np.ndarray, "P C"], problems: Sequence | np.ndarray, seed: int) -> Difference:
    """Returns each column's mean (C,), A less B in [-1, 1], with 95 % intervals; resamples the problems."""
    return difference(mean_draws(difference_PC, problems, seed=seed))


class Estimate(NamedTuple):
    """A mean over runs. `terms`: (variance, degrees of freedom) over runs, then over problems, of each that is known;
    `over_problems`: for a fraction, the problems' `interval`."""

    value: float
    terms: Sequence[tuple[float, float]]
    over_problems: Interval | None = None

    def half(self, level: float) -> float:
        """Returns the half-width of the interval at this level, e.g. 0.95; NaN if no variance is known."""
        of_terms = [math.sqrt(v) * scipy.special.stdtrit(freedom, (1 + level) / 2) for v, freedom in self.terms]
        return math.hypot(*of_terms) if self.terms else math.nan

    def interval(self) -> Interval:
        """Returns the 95 % interval; for a fraction, in [0, 1], with Wilson's distances in place of the problems' half
        (Zou & Donner, Statistics in Medicine 27, 2008: the parts' distances add as squares)."""
        if self.over_problems is None:
            return Interval(self.value, self.value - self.half(0.95), self.value + self.half(0.95))
        of_runs = Estimate(self.value, self.terms[:-1]).half(0.95) if len(self.terms) > 1 else 0.0
        below, above = (math.hypot(bound - self.value, of_runs) for bound in self.over_problems[1:])
        return Interval(self.value, max(self.value - below, 0.0), min(self.value + above, 1.0))  # NaN stays

    @property
    def p(self) -> float:
        """The two-sided p value for a mean of 0 (NaN without terms): one minus the level whose interval reaches 0."""
        if not self.terms:
            return math.nan
        highest = 1 - 1e-12
        if self.half(highest) <= abs(self.value) or self.half(0.95) < TIE:  # or all runs and all resamples are equal
            return float(abs(self.value) < TIE)
        return 1 - cast(float, scipy.optimize.brentq(lambda level: self.half(level) - abs(self.value), 0, highest))


def mean_of_runs(runs: Sequence[Draws], *, fraction: bool) -> Estimate:
    """Returns a statistic's mean over runs (at least one) with different seeds, tested on the same problems.

    The runs' draws must share their resamples (`draws`). The variance of the mean m over S runs covers drawing both
    runs and problems, in the limit of many draws and without its bias for few runs: s^2 / S (S - 1 degrees of freedom),
    s^2 the variance between the runs' values, and (`standard_error`)^2 of m over G problems (G - 1). One run has only
    the second term; if G < 2, there is only the first. The half-width is the root of both terms' sum, each times its
    squared Student's t (for a `fraction`, see `Estimate.interval`). It covers even with two or three runs, unlike with
    Satterthwaite's degrees of freedom. Variation shared by runs and problems is in both terms, so it is too wide.
    """
    mean = _estimate([(1.0, runs)], of_fractions=False)
    if not fraction or runs[0].groups < 2:
        return mean
    drawn_R = np.mean([run.drawn_R for run in runs], axis=0)
    return mean._replace(over_problems=interval(Draws(mean.value, drawn_R, runs[0].groups)))


def difference_of_runs(a: Sequence[Draws], b: Sequence[Draws], *, same_seeds: bool) -> Estimate:
    """Returns A's mean over runs less B's, two fractions, as `mean_of_runs`; problems are paired.

    With `same_seeds` a[i] and b[i] share a seed and are paired too; raises ValueError if their counts differ. Else both
    sides' run variances are added, with Welch's degrees of freedom (Biometrika 34, 1947). If one side has a single run,
    the interval covers the problems alone.
    """
    sides = [(1.0, a), (-1.0, b)]
    if same_seeds:
        sides = [(1.0, [Draws(x.value - y.value, x.drawn_R - y.drawn_R, x.groups) for x, y in zip(a, b, strict=True)])]
    return _estimate(sides, of_fractions=True)


def _estimate(sides: Sequence[tuple[float, Sequence[Draws]]], of_fractions: bool) -> Estimate:
    """Returns the sum over sides: sign times the mean over runs."""
    value = float(sum(sign * np.mean([run.value for run in runs]) for sign, runs in sides))
    terms = []
    if all(len(runs) > 1 for _, runs in sides):
        of_sides = [(float(np.var([x.value for x in runs], ddof=1)) / len(runs), len(runs) - 1) for _, runs in sides]
        variance = sum(v for v, _ in of_sides)
        terms.append((variance, variance**2 / sum(v**2 / n for v, n in of_sides) if variance else of_sides[0][1]))
    if (groups := sides[0][1][0].groups) > 1:
        drawn_R = np.sum([sign * np.mean([run.drawn_R for run in runs], axis=0) for sign, runs in sides], axis=0)
        terms.append((float(standard_error(Draws(value, drawn_R, groups), of_fractions=of_fractions)) ** 2, groups - 1))
    return Estimate(value, terms)


def jsonable(x: Any) -> Any:
    """Returns a number as a float, an array as nested lists of floats; non-finite values become `None`."""
    if isinstance(x, np.ndarray) and x.ndim:
        return [jsonable(item) for item in x]
    return float(x) if np.isfinite(x) else None


def _class_weights(score_N, positive_N, weight_RN):
    """Returns the weights of positives and negatives at each distinct score (U), in rising order."""
    score_N, positive_N = np.asarray(score_N), np.asarray(positive_N, bool)
    if np.isnan(score_N).any():
        raise ValueError(f"{np.isnan(score_N).sum()} of {score_N.size} scores are NaN")
    weight_RN = np.ones(score_N.shape) if weight_RN is None else np.asarray(weight_RN, float)
    order_N = np.argsort(score_N, kind="stable")
    sorted_N, weight_RN = score_N[order_N], weight_RN[..., order_N]
    start_U = np.flatnonzero(np.r_[True, sorted_N[1:] != sorted_N[:-1]][: score_N.size])
    if not score_N.size:
        return np.zeros(weight_RN.shape), np.zeros(weight_RN.shape)
    all_RU = np.add.reduceat(weight_RN, start_U, axis=-1)
    positive_RU = np.add.reduceat(weight_RN * positive_N[order_N], start_U, axis=-1)
    return positive_RU, all_RU - positive_RU


def ratio(numerator: Any, denominator: Any) -> Any:
    """Returns numerator / denominator as a numpy array, element by element; NaN if the denominator is not above 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(np.asarray(denominator) > 0, np.true_divide(numerator, denominator), np.nan)
