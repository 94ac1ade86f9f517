import numpy as np
import pytest
from simulated import at_least, correlated

from jprm.statistics import bootstrap, weighted_mean


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
