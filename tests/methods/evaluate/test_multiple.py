"""Many comparisons: false discoveries and the smallest difference that could be shown, by simulation."""

import numpy as np
import pytest
from scipy.special import ndtr
from scipy.stats import false_discovery_control

from jprm.methods.evaluate.multiple import discoveries, p_value, smallest_shown
from jprm.statistics import Draws, draws, weighted_mean


def differences(seed, true, groups, spread=1.0):
    """The draws of a mean of paired differences with this true mean."""
    value_N = np.random.default_rng(seed).normal(true, spread, groups)
    return draws(lambda weight_RN: weighted_mean(value_N, weight_RN), np.arange(groups), 200, seed=seed)


@pytest.mark.parametrize("rate", [0.05, 0.2])
def test_discoveries_are_those_of_benjamini_and_hochberg(rate):
    rng = np.random.default_rng(0)
    for size in (1, 2, 7, 40):
        p_N = np.where(rng.random(size) < 0.5, rng.random(size), 1e-3 * rng.random(size))
        assert (discoveries(p_N, rate) == (false_discovery_control(p_N) <= rate)).all()
    assert discoveries([]).tolist() == []
    assert discoveries([np.nan, 0.001, np.nan]).tolist() == [False, True, False]  # NaN is no comparison


def test_at_most_a_twentieth_of_the_reported_differences_is_false():
    rng, shares, alone = np.random.default_rng(1), [], []
    for _ in range(1000):
        true_N = np.arange(20) < 6
        z_N = rng.normal(3.0 * true_N, 1.0)
        p_N = 2 * ndtr(-np.abs(z_N))
        found_N = discoveries(p_N)
        shares.append((found_N & ~true_N).sum() / max(found_N.sum(), 1))
        alone.append(((p_N < 0.05) & ~true_N).sum() / max((p_N < 0.05).sum(), 1))
    assert np.mean(shares) < 0.05 * 14 / 20 + 0.01 < np.mean(alone)


def test_p_values_of_no_difference_are_uniform():
    p_N = np.array([p_value(differences(seed, 0.0, 40)) for seed in range(400)])
    for level in (0.05, 0.2, 0.5):
        assert abs((p_N < level).mean() - level) < 3 * np.sqrt(level * (1 - level) / 400) + 0.01
    assert p_value(differences(0, 5.0, 40)) < 1e-6
    assert np.isnan(p_value(Draws(1.0, np.ones(10), 1)))
    assert (p_value(Draws(0.0, np.zeros(10), 9)), p_value(Draws(1.0, np.ones(10), 9))) == (1.0, 2**-8)


def test_a_difference_of_the_smallest_size_is_shown_four_times_of_five():
    size = smallest_shown(differences(0, 0.0, 100))
    assert size == pytest.approx((1.984 + 0.846) / 10, rel=0.15)  # t quantiles of 99 over the root of 100
    expected = (1.984 + 0.846) / 10
    shown = np.mean([p_value(differences(seed, expected, 100)) < 0.05 for seed in range(300)])
    assert abs(shown - 0.8) < 0.08  # three standard errors of 300 draws
