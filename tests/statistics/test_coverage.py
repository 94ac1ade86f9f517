"""Coverage of every interval over problems, and of the conformal thresholds' guarantees, at known truth.

A few populations have a level of their own: what is measured where an assumption of the interval fails.
"""

import functools

import numpy as np
import pytest
from scipy.stats import norm
from simulated import at_least, correlated

from jprm.methods.evaluate.calibration import reliability_curve
from jprm.methods.evaluate.prmbench import PRMBENCH, prm_scores
from jprm.methods.evaluate.processbench import average_draws, cross_fit, right_at, weighted_f1
from jprm.methods.evaluate.votes import best_of_n, vote_accuracy
from jprm.methods.label.monte_carlo import wilson
from jprm.statistics import (
    Draws,
    auroc,
    average_precision,
    difference,
    difference_of_runs,
    draws,
    interval,
    mean_differences,
    mean_draws,
    weighted_mean,
)

LARGE = 200_000
STEPS = 4  # a problem


def means(problems, p, correlation=0.4):
    """Steps that are right with probability p."""
    group_N = np.repeat(np.arange(problems), STEPS)

    def sample(rng, n, seed):
        right_N = correlated(rng, np.full((problems, STEPS), p), correlation).ravel()
        return interval(draws(lambda w: weighted_mean(right_N, w), group_N, n, seed=seed))

    return sample, p


def answers(problems, p):
    """One answer a problem, which is right with probability p."""

    def sample(rng, n, seed):
        right_N = rng.random(problems) < p
        return interval(draws(lambda w: weighted_mean(right_N, w), range(problems), n, seed=seed))

    return sample, p


def steps_of(rng, problems, apart, correlation=0.3):
    """(scores, whether right, problems) of steps: scores are N(apart, 1) where right, else N(0, 1)."""
    group_N, right_N = np.repeat(np.arange(problems), STEPS), rng.random(problems * STEPS) < 0.6
    noise_N = np.sqrt(1 - correlation) * rng.normal(size=len(group_N))
    shared_N = np.sqrt(correlation) * np.repeat(rng.normal(size=problems), STEPS)
    return noise_N + shared_N + apart * right_N, right_N, group_N


def areas(problems, apart):
    def sample(rng, n, seed):
        score_N, right_N, group_N = steps_of(rng, problems, apart)
        return interval(draws(lambda w: auroc(score_N, right_N, w), group_N, n, seed=seed))

    return sample, norm.cdf(apart / 2**0.5)


def precisions(problems, apart):
    """Average precision of errors."""

    def sample(rng, n, seed):
        score_N, right_N, group_N = steps_of(rng, problems, apart)
        return interval(draws(lambda w: average_precision(-score_N, ~right_N, w), group_N, n, seed=seed))

    score_N, right_N, _ = steps_of(np.random.default_rng(9), LARGE, apart, correlation=0.0)
    return sample, float(average_precision(-score_N, ~right_N))


def area_differences(problems, apart, other):
    """AUROC of two scorers of the same steps, whose errors correlate over problems."""

    def sample(rng, n, seed):
        score_N, right_N, group_N = steps_of(rng, problems, apart)
        its_N = 0.5 * score_N + 0.75**0.5 * rng.normal(size=len(score_N)) + (other - 0.5 * apart) * right_N
        return difference(
            *(draws(lambda w, s=s: auroc(s, right_N, w), group_N, n, seed=seed) for s in (score_N, its_N))
        )

    return sample, norm.cdf(apart / 2**0.5) - norm.cdf(other / 2**0.5)


def f1_of(error, correct):
    return 2 * error * correct / (error + correct)


def found_errors(rng, problems, share, error, correct):
    """Chains, a `share` with an error, judged right with probability `error` or `correct`; and their bootstrap."""
    first_error_N = np.where(rng.random(problems) < share, 0, -1)
    right_N = rng.random(problems) < np.where(first_error_N >= 0, error, correct)
    return lambda n, seed, right_N=right_N: draws(
        lambda w: weighted_f1(right_N, first_error_N, w).f1, range(problems), n, seed=seed
    )


def f1s(problems, share, error, correct):
    return (lambda rng, n, seed: interval(found_errors(rng, problems, share, error, correct)(n, seed))), f1_of(
        error, correct
    )


def average_f1s(problems):
    def sample(rng, n, seed):
        files = (found_errors(rng, problems, *args)(n, seed + i) for i, args in enumerate(FILES))
        return interval(average_draws(dict(enumerate(files)), range(len(FILES))))

    return sample, np.mean([f1_of(*args[1:]) for args in FILES])


FILES = ((0.5, 0.5, 0.8), (0.6, 0.35, 0.9))


def f1_differences(problems):
    """Two scorers of the same chains: the second is right with another probability, and often where the first is."""

    def sample(rng, n, seed):
        first_error_N, luck_N = np.where(rng.random(problems) < 0.5, 0, -1), rng.random(problems)
        again_N = np.where(rng.random(problems) < 0.5, luck_N, rng.random(problems))
        p_N, q_N = np.where(first_error_N >= 0, 0.5, 0.8), np.where(first_error_N >= 0, 0.4, 0.85)
        both = (luck_N < p_N, again_N < q_N)
        return difference(
            *(draws(lambda w, x=x: weighted_f1(x, first_error_N, w).f1, range(problems), n, seed=seed) for x in both)
        )

    return sample, f1_of(0.5, 0.8) - f1_of(0.4, 0.85)


def chains(rng, n):
    """(first errors, scores) of chains of five steps; an error lowers its step's score by 2."""
    error_N = np.where(rng.random(n) < 0.5, rng.integers(5, size=n), -1)
    return error_N, rng.normal(size=(n, 5)) - 2 * (np.arange(5) == error_N[:, None])


def cross_fits(problems):
    """F1 at cross-fitted thresholds. The truth is the mean F1 at thresholds tuned on four fifths of the problems."""

    def sample(rng, n, seed):
        error_N, score_NP = chains(rng, problems)
        right_N, _ = cross_fit(error_N, list(score_NP), range(problems), seed)
        return interval(draws(lambda w: weighted_f1(right_N, error_N, w).f1, range(problems), n, seed=seed))

    rng = np.random.default_rng(9)
    tuned = [
        cross_fit(error_N, list(s_NP), range(problems), 0)[1]
        for error_N, s_NP in (chains(rng, problems) for _ in range(40))
    ]
    error_N, score_NP = chains(rng, 20_000)
    at = [weighted_f1(right_at(error_N, list(score_NP), x), error_N, np.ones(20_000)).f1 for x in np.ravel(tuned)[::5]]
    return sample, float(np.mean(at))


def prm_score_of(problems, column):
    """Chains of eight steps in two classes of each source; a quarter of the steps is wrong."""
    two = [PRMBENCH.classes.index(name) for name in ("redundency", "counterfactual")]

    def counts(rng, sources):
        count_SC4 = np.zeros((sources, len(PRMBENCH.classes), 4))
        for c in two:
            right_SP = rng.random((sources, 8)) < 0.75
            called_SP = correlated(rng, np.where(right_SP, 0.8, 0.4), 0.3)
            kinds = (right_SP & called_SP, ~right_SP & called_SP, ~right_SP & ~called_SP, right_SP & ~called_SP)
            count_SC4[:, c] = np.stack([kind.sum(1) for kind in kinds], -1)
        return count_SC4.reshape(sources, -1)

    def scores(flat_SK):
        return lambda w: prm_scores((w @ flat_SK).reshape(*w.shape[:-1], len(PRMBENCH.classes), 4))[..., column]

    def sample(rng, n, seed):
        return interval(draws(scores(counts(rng, problems)), range(problems), n, seed=seed))

    rng = np.random.default_rng(9)
    return sample, float(scores(counts(rng, LARGE))(np.ones(LARGE)))


@functools.cache
def pools():
    """The exact accuracies of 1,500 pools of eight samples, which are the population: curves by choosers."""
    rng = np.random.default_rng(9)
    p_P1 = rng.beta(1, 1.5, (1500, 1))
    correct_PN = (rng.random((1500, 8)) < p_P1).astype(float)
    class_PN = np.where(correct_PN > 0, 0, rng.integers(1, 4, (1500, 8)))
    score_PN = 1 / (1 + np.exp(-rng.normal(size=(1500, 8)) - correct_PN + 0.5 * rng.normal(size=(1500, 1))))
    size_P = np.full(1500, 8)
    log_weight_PNK = np.log(np.stack([np.ones((1500, 8)), score_PN], -1))
    votes = vote_accuracy(class_PN, correct_PN, log_weight_PNK, size_P, 8, trials=2, seed=0).value_PnK
    chosen = best_of_n(score_PN, correct_PN, np.ones((1500, 8), bool), size_P, 8)
    return {"best of n": chosen, "majority": votes[..., 0], "weighted vote": votes[..., 1]}


def curves(problems, name, n_samples):
    def sample(rng, n, seed):
        value_P = pools()[name][rng.integers(1500, size=problems), n_samples - 1]
        return interval(draws(lambda w: weighted_mean(value_P, w), range(problems), n, seed=seed))

    return sample, pools()[name][:, n_samples - 1].mean()


def curve_differences(problems):
    """Best of 8 less a majority of 8, as `jprm eval best-of-n` and `equal-cost` pair choosers over problems."""
    less_P = pools()["best of n"][:, -1] - pools()["majority"][:, -1]

    def sample(rng, n, seed):
        ahead = mean_differences(less_P[rng.integers(1500, size=problems)][:, None], range(problems), seed)
        return ahead._replace(low=ahead.low[0], high=ahead.high[0])

    return sample, less_P.mean()


CASES = {
    "mean, 10 problems of 4 steps": (means, (10, 0.7), 0.95),
    "mean, 30 problems of 4 steps": (means, (30, 0.7), 0.95),
    "mean, 100 problems of 4 steps": (means, (100, 0.7), 0.95),
    "mean of 0.95, 30 problems of 4 steps": (means, (30, 0.95), 0.95),
    "mean of 0.95, 30 problems": (answers, (30, 0.95), 0.95),
    "mean of 0.97, 100 problems": (answers, (100, 0.97), 0.95),
    "AUROC 0.66, 30 problems": (areas, (30, 0.6), 0.95),
    "AUROC 0.66, 100 problems": (areas, (100, 0.6), 0.95),
    "AUROC 0.96, 30 problems": (areas, (30, 2.5), 0.93),
    "AUROC 0.96, 100 problems": (areas, (100, 2.5), 0.95),
    "average precision 0.56, 30 problems": (precisions, (30, 0.6), 0.93),
    "average precision 0.56, 100 problems": (precisions, (100, 0.6), 0.93),
    "average precision 0.95, 100 problems": (precisions, (100, 2.5), 0.93),
    "difference of AUROC, 100 problems": (area_differences, (100, 1.0, 0.6), 0.95),
    "F1, 30 chains": (f1s, (30, 0.5, 0.5, 0.8), 0.95),
    "F1, 100 chains": (f1s, (100, 0.5, 0.5, 0.8), 0.95),
    "F1, 300 chains, 30 with errors": (f1s, (300, 0.1, 0.5, 0.8), 0.95),
    "F1 of 0.33, 100 chains": (f1s, (100, 0.5, 0.2, 0.95), 0.95),
    "F1 of 0.10, 100 chains": (f1s, (100, 0.5, 0.05, 0.99), 0.87),
    "F1, cross-fitted, 100 chains": (cross_fits, (100,), 0.95),
    "average F1, two files of 100 chains": (average_f1s, (100,), 0.95),
    "difference of F1, 100 chains": (f1_differences, (100,), 0.95),
    "PRMScore, 30 sources": (prm_score_of, (30, 0), 0.95),
    "PRMScore, 100 sources": (prm_score_of, (100, 0), 0.95),
    "PRMScore of a class, 100 sources": (prm_score_of, (100, 1 + PRMBENCH.classes.index("redundency")), 0.95),
    "best of 4, 30 problems": (curves, (30, "best of n", 4), 0.95),
    "best of 8, 100 problems": (curves, (100, "best of n", 8), 0.95),
    "majority of 8, 30 problems": (curves, (30, "majority", 8), 0.95),
    "majority of 8, 100 problems": (curves, (100, "majority", 8), 0.95),
    "weighted vote of 8, 100 problems": (curves, (100, "weighted vote", 8), 0.95),
    "best of 8 less majority, 30 problems": (curve_differences, (30,), 0.95),
    "best of 8 less majority, 100 problems": (curve_differences, (100,), 0.95),
}

FAST = [name for name in CASES if name.startswith(("mean", "F1", "best of 8 less")) and "cross" not in name]
FAST += ["AUROC 0.66, 30 problems", "difference of AUROC, 100 problems", "PRMScore, 30 sources"]


def covered(name, repetitions, n):
    make, arguments, _ = CASES[name]
    sample, truth = make(*arguments)
    rng = np.random.default_rng(0)
    intervals = [sample(rng, n, seed) for seed in range(repetitions)]
    return [low <= truth <= high for _, low, high, *_ in intervals]


@pytest.mark.parametrize("name", FAST)
def test_intervals_cover(name):
    """A tenth of the repetitions, for every kind of interval."""
    assert at_least(covered(name, 100, 200), CASES[name][-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_intervals_cover_in_1000_repetitions(name):
    inside = covered(name, 1000, 400)
    print(f"\ncoverage: {name}: {100 * np.mean(inside):.1f} %")
    assert at_least(inside, CASES[name][-1])


def test_an_interval_of_a_fraction_is_wilsons():
    """30 of 100 answers, whose bootstrap has the variance p (1 - p) / n; and all right, where the draws say nothing."""
    binomial = np.sqrt(0.3 * 0.7 / 100 * 99 / 100)
    t = 1.984217  # Student's t, 99 degrees, 97.5 %
    for value, right, error in ((0.3, 30, binomial), (1.0, 100, 0.0), (0.0, 0, 0.0)):
        between = interval(Draws(value, value + error * np.array([-1.0, 1.0]), 100))
        np.testing.assert_allclose(between[1:], wilson(np.array(right), np.array(100), t), atol=1e-6)
    plain = interval(Draws(0.3, 0.3 + 0.01 * np.array([-1.0, 1.0]), 100), fraction=False)
    np.testing.assert_allclose(
        plain[1:], [0.3 - t * 0.01 * np.sqrt(100 / 99), 0.3 + t * 0.01 * np.sqrt(100 / 99)], atol=1e-8
    )
    assert np.isnan(interval(Draws(1.0, np.ones(2), 1)).low)  # one problem has no interval


def test_an_interval_of_what_cannot_vary_has_no_width():
    assert interval(Draws(0.5, np.full(10, 0.5), 30))[1:] == (0.5, 0.5)


@pytest.mark.parametrize(("problems", "other"), [(2, 0.994), (3, 0.861), (30, 0.122), (1000, 0.00384)])
def test_equal_differences_leave_out_problems_that_would_differ(problems, other):
    """`other`: Wilson's bound on their fraction. The rule of three, 3 / n, is the one-sided bound of many problems."""
    for equal in (0.0, 0.25, -1.0):
        of_mean = mean_differences(np.full((problems, 1), equal), range(problems), seed=0)
        sides = (max(equal, 0.0), max(-equal, 0.0))
        of_sides = ([mean_draws(np.full(problems, x), range(problems), seed=0)] for x in sides)
        of_runs = difference_of_runs(*of_sides, same_seeds=True)
        for value, low, high in ((x[0] for x in of_mean[:3]), of_runs.interval()):
            assert (value, high - value) == pytest.approx((equal, other * (1 + abs(equal))), rel=0.01)
            assert low == pytest.approx(2 * equal - high)


@pytest.mark.parametrize("problems", [pytest.param(60, id="60"), pytest.param(300, id="300", marks=pytest.mark.slow)])
def test_the_reliability_diagram_covers(problems):
    """Each bin's fraction right against the mean probability of its steps. Five correlated steps a problem."""
    rng, inside = np.random.default_rng(0), []
    for seed in range(40 if problems < 100 else 200):
        p_PS = rng.beta(4, 1.5, (problems, 5))
        right_N, group_N = correlated(rng, p_PS, 0.3).ravel(), np.repeat(range(problems), 5)
        curve = reliability_curve(p_PS.ravel(), right_N, group_N, seed=seed, bins=problems // 10)
        inside += [low <= p <= high for p, low, high in zip(*(curve[k] for k in ("score", "low", "high")), strict=True)]
    assert at_least(inside, 0.95)


def test_the_fraction_of_draws_ahead_is_uniform_without_a_difference():
    rng = np.random.default_rng(0)
    better = [mean_differences(rng.normal(size=(50, 1)), range(50), seed).better[0] for seed in range(300)]
    for level in (0.025, 0.25, 0.5, 0.75, 0.975):  # 300 at a rate of a half: 0.1 is 3.5 standard errors
        assert abs(np.mean(np.array(better) < level) - level) < 3.5 * (level * (1 - level) / 300) ** 0.5


def test_a_model_as_good_as_its_baselines_is_called_worse_as_often_as_the_pages_say():
    """The best of five baselines is chosen on the problems it is compared on: 9.1 % of 10,000 files of 100 pools are
    called worse, 8.4 % of 30 pools, 9.2 % of 300 pools, and 0.1 % better."""
    less, P, N = [], 100, 16
    for seed in range(600):
        rng = np.random.default_rng(seed)
        right_PN = (rng.random((P, N)) < rng.beta(0.8, 0.8, (P, 1))).astype(float)
        sizes = np.full(P, N)
        keys = rng.normal(size=(6, P, N))
        of_model, *of_rivals = (best_of_n(key, right_PN, np.ones((P, N), bool), sizes, N)[:, -1] for key in keys)
        best_P = max(of_rivals, key=np.mean)
        less.append(mean_differences((of_model - best_P)[:, None], range(P), 0))
    worse, better = np.mean([x.high[0] < 0 for x in less]), np.mean([x.low[0] > 0 for x in less])
    assert abs(worse - 0.091) < 3 * (0.091 * 0.909 / 600) ** 0.5  # 2.5 % where the baseline is chosen beforehand
    assert better < 0.01
