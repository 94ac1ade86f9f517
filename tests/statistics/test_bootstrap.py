import numpy as np
import pytest
from scipy.stats import norm
from simulated import at_least, correlated

from jprm.statistics import auroc, bootstrap, weighted_mean


@pytest.mark.parametrize(("problems", "level"), [(30, 0.92), (100, 0.95)])
def test_the_cluster_bootstrap_of_a_mean_covers(problems, level):
    """Four correlated steps a problem. Percentile intervals of few problems are too narrow."""
    rng, covered = np.random.default_rng(0), []
    for _ in range(300):
        right_N = correlated(rng, np.full((problems, 4), 0.7), 0.4).ravel()
        group_N = np.repeat(range(problems), 4)
        found = bootstrap(lambda w_RN, x=right_N: weighted_mean(x, w_RN), group_N, n=400, seed=0)
        covered.append(found.low <= 0.7 <= found.high)
    assert at_least(covered, level)


@pytest.mark.parametrize(
    ("problems", "steps", "correlation", "repetitions"),
    [
        (100, 4, 0.3, 100),
        *[pytest.param(*of, 1000, marks=pytest.mark.slow) for of in [(400, 1, 0.0), (100, 4, 0.3), (30, 4, 0.3)]],
    ],
)
def test_the_cluster_bootstrap_of_auroc_covers(problems, steps, correlation, repetitions):
    """Scores are N(0.6, 1) for correct steps and N(0, 1) for others, correlated within a problem."""
    rng, covered, truth = np.random.default_rng(0), [], norm.cdf(0.6 / np.sqrt(2))
    group_N = np.repeat(np.arange(problems), steps)
    for seed in range(repetitions):
        correct_N = rng.random(len(group_N)) < 0.6
        own_N, shared_N = rng.normal(size=len(group_N)), np.repeat(rng.normal(size=problems), steps)
        score_N = np.sqrt(1 - correlation) * own_N + np.sqrt(correlation) * shared_N + 0.6 * correct_N
        found = bootstrap(lambda w_RN, s=score_N, c=correct_N: auroc(s, c, w_RN), group_N, seed=seed)
        covered.append(found.low <= truth <= found.high)
    assert at_least(covered, 0.95)
