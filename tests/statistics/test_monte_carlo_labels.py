"""Monte Carlo labels against the probabilities that they estimate: bias and coverage, with fixed and adaptive k."""

import functools
import itertools
import math

import numpy as np
import pytest

from jprm.methods.label.config import Adaptive, MonteCarloConfig
from jprm.methods.label.monte_carlo import confidence_sequence, label_trees, unbiased, undecided, wilson
from jprm.methods.policy.protocol import Sample
from jprm.methods.verify.verifiers import Outcome, Verifier
from jprm.tree import Node, ReasoningTree

PREFIXES = 1000


class Coins:
    """Rollouts that are right with probability p, the same for a prefix and number whenever they are drawn."""

    def __init__(self, p):
        self.outcome = np.random.default_rng(0).random((PREFIXES, 64)) < p

    def draw(self, requests):
        sides = np.array([Sample(("tails",), 1, "stop"), Sample(("heads",), 1, "stop")])
        drawn = [self.outcome[int(prefix.steps[0]), start : start + n] for prefix, start, n in requests]
        return [list(sides[outcome.astype(int)]) for outcome in drawn]


HEADS = Verifier(lambda chains: [Outcome(float(steps[-1] == "heads")) for _, steps in chains], lambda *_: None)


def label(p, k, estimate, adaptive):
    """(values, low, high, rollouts) of many prefixes of value p."""
    tree = ReasoningTree("p", tuple(Node(-1, str(i)) for i in range(PREFIXES)), answer=1)
    config = MonteCarloConfig(estimate, k, adaptive=adaptive, verifier=f"{__name__}:HEADS")
    (record,) = label_trees([tree], Coins(p), config)
    columns = [[node.label for node in record.nodes]]
    columns += [[node.extra[key] for node in record.nodes] for key in ("low", "high", "rollouts")]
    return [np.array(column) for column in columns]


CASES = list(itertools.product([0.1, 0.3, 0.5, 0.9], [4, 8, 16]))


@pytest.mark.parametrize(("p", "k"), CASES)
@pytest.mark.parametrize("mean", [64, 20])  # all that prefixes want, and a budget that ends before
def test_adaptive_values_are_unbiased_and_their_intervals_cover(p, k, mean):
    adaptive = Adaptive(threshold=0.5, most=64, mean=mean)
    value, low, high, rollouts = label(p, k, "soft", adaptive)
    assert rollouts.max() > k and rollouts.mean() <= mean
    assert abs(value.mean() - p) < 4 * value.std() / PREFIXES**0.5
    covered = (low <= p) & (p <= high)
    assert covered.mean() > 0.95 - 3 * (0.05 * 0.95 / PREFIXES) ** 0.5
    assert ((low <= value) & (value <= high)).mean() > 0.95  # the interval is of all rollouts, the value is not


@pytest.mark.parametrize(("p", "k"), CASES)
def test_hard_labels_are_of_the_first_k(p, k):
    fixed = label(p, k, "hard", None)[0]
    np.testing.assert_array_equal(label(p, k, "hard", Adaptive(0.5, 64, 64))[0], fixed)
    true = 1 - (1 - p) ** k
    assert abs(fixed.mean() - true) <= 4 * (true * (1 - true) / PREFIXES) ** 0.5


@pytest.mark.parametrize(("p", "k"), CASES)
def test_fixed_k_is_unbiased_and_its_interval_covers(p, k):
    """Wilson's interval covers 95 % on average over p. How often it does at one p and k is known by enumeration."""
    value, low, high, rollouts = label(p, k, "soft", None)
    assert (rollouts == k).all()
    assert abs(value.mean() - p) < 4 * (p * (1 - p) / k / PREFIXES) ** 0.5
    ends = [wilson(np.array(s), np.array(k)) for s in range(k + 1)]
    inside = sum(math.comb(k, s) * p**s * (1 - p) ** (k - s) for s in range(k + 1) if ends[s][0] <= p <= ends[s][1])
    assert inside >= 0.875  # the least of these cases, at p = 0.5 and k = 4
    assert abs(((low <= p) & (p <= high)).mean() - inside) < 4 * (inside * (1 - inside) / PREFIXES) ** 0.5 + 1e-9


def sequences(n, p):
    """All sequences of n trials and their probabilities."""
    trials = np.array(list(itertools.product([0, 1], repeat=n)))
    return trials, np.prod(np.where(trials, p, 1 - p), axis=1)


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize(("plan", "threshold"), [((2, 5, 12), 0.5), ((4, 8, 12), 0.2), ((1, 2, 3, 11), 0.7)])
def test_the_estimate_is_unbiased_over_all_sequences(plan, threshold, p):
    z, mean, stopped_early, covered = 1.0, 0.0, 0.0, 0.0
    goes_on = functools.cache(lambda right, total: bool(undecided(right, total, threshold, z)))
    interval = functools.cache(lambda right, total: confidence_sequence(right, total, z))
    for trial, probability in zip(*sequences(plan[-1], p), strict=True):
        for stop in range(1, len(plan) + 1):
            right = int(trial[: plan[stop - 1]].sum())
            if stop == len(plan) or not goes_on(right, plan[stop - 1]):
                break
        stopped_early += probability * (stop < len(plan))
        mean += probability * unbiased(right, plan[:stop], threshold, z)
        low, high = interval(right, plan[stop - 1])
        covered += probability * (low <= p <= high)
    assert 0 < stopped_early < 1
    assert mean == pytest.approx(p, abs=1e-12)
    assert covered >= 0.6827  # z = 1


def test_the_confidence_sequence_by_hand():
    """8 of 8: p is rejected where B(8.5, 0.5) / pi >= 20 p^8, that is 0.19638 >= 20 p^8."""
    low, high = confidence_sequence(np.array([8, 0, 3, 0]), np.array([8, 8, 8, 0]))
    assert low[0] == pytest.approx((0.19638 / 20) ** (1 / 8), abs=1e-3) and high[0] == 1
    assert (low[1], high[1]) == (0, pytest.approx(1 - low[0]))
    assert (low[3], high[3]) == (0, 1)
    for bound in (low[2], high[2]):
        ends = undecided(np.array([3, 3]), np.array([8, 8]), np.array([bound - 1e-6, bound + 1e-6]), 1.96)
        assert ends[0] != ends[1]
    narrow = wilson(np.array(3), np.array(8))
    assert low[2] < narrow[0] and narrow[1] < high[2]


def test_long_runs_do_not_underflow():
    assert unbiased(0, (2000, 4000), 0.5, 1e9) == 0
    assert 0.49 < unbiased(2000, (2000, 4000), 0.5, 30.0) < 0.51
