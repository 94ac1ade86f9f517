import itertools
import tracemalloc

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refusing import refused

from jprm.statistics import auroc, average_precision, bootstrap, numbered, weighted_mean

# few distinct scores, so that ties are the rule
scores = hnp.arrays(float, 12, elements=st.sampled_from([-np.inf, -1.0, 0.0, 0.25, 0.5, 1.0]))
classes = hnp.arrays(bool, 12)
weights = hnp.arrays(float, 12, elements=st.integers(0, 3))
EXACT = 1e-12  # float64 sums of at most a few thousand small integers, and one division


@given(scores, classes, weights)
@settings(deadline=None)
def test_auroc_is_the_share_of_pairs_won(score, positive, weight):
    assume((weight[positive].sum() > 0) and (weight[~positive].sum() > 0))
    won = total = 0.0
    for i, j in itertools.product(np.flatnonzero(positive), np.flatnonzero(~positive)):
        pair = weight[i] * weight[j]
        won += pair * (1.0 if score[i] > score[j] else 0.5 if score[i] == score[j] else 0.0)
        total += pair
    assert auroc(score, positive, weight) == pytest.approx(won / total, abs=EXACT)


@given(scores, classes, weights)
@settings(deadline=None, max_examples=50)
def test_average_precision_equals_scikit_learns(score, positive, weight):
    sklearn = pytest.importorskip("sklearn.metrics")
    score = np.where(np.isinf(score), -9.0, score)  # scikit-learn refuses infinities
    assume((weight[positive].sum() > 0) and (weight[~positive].sum() > 0))
    wanted = sklearn.average_precision_score(positive, score, sample_weight=weight)
    assert average_precision(score, positive, weight) == pytest.approx(wanted, abs=EXACT)


@given(scores, classes, hnp.arrays(int, 12, elements=st.integers(0, 3)))
@settings(deadline=None)
def test_integer_weights_are_copies(score, positive, copies):
    for metric in (auroc, average_precision):
        repeated = metric(np.repeat(score, copies), np.repeat(positive, copies))
        rows = metric(score, positive, np.stack([copies, np.ones(12)]))
        np.testing.assert_allclose(rows, [repeated, metric(score, positive)], atol=EXACT)


def test_undefined_is_nan_and_nan_scores_are_refused():
    assert np.isnan(auroc(np.array([0.1, 0.2]), np.array([True, True])))
    assert np.isnan(average_precision(np.array([0.1, 0.2]), np.array([False, False])))
    assert np.isnan(auroc(np.zeros(0), np.zeros(0, bool)))
    refused(ValueError, "1 of 2", auroc, np.array([np.nan, 0.2]), np.array([True, False]))


def test_bootstrap_of_a_mean_has_the_textbook_width_and_draws_whole_groups():
    rng = np.random.default_rng(0)
    value = np.repeat(rng.normal(size=400), 5)  # five equal items a group: as informative as one
    groups = np.repeat(np.arange(400), 5)
    interval = bootstrap(lambda w: weighted_mean(value, w), groups, 4000, seed=1, fraction=False)
    assert interval.value == pytest.approx(value.mean())
    half = 1.96 * value.std() / np.sqrt(400)
    # a standard deviation of 4,000 draws is uncertain by 1.1 %
    assert interval.high - interval.value == pytest.approx(half, rel=0.05)
    assert interval.value - interval.low == pytest.approx(half, rel=0.05)
    assert interval == bootstrap(lambda w: weighted_mean(value, w), groups, 4000, seed=1, fraction=False)
    assert interval != bootstrap(lambda w: weighted_mean(value, w), groups, 4000, seed=2, fraction=False)
    refused(ValueError, "fraction", bootstrap, lambda w: weighted_mean(value, w), groups, seed=1)


def test_bootstrap_of_a_curve_is_that_of_its_points():
    value = np.random.default_rng(0).random((30, 3))
    groups = [f"problem {i % 10}" for i in range(30)]
    curve = bootstrap(lambda w: weighted_mean(value, w), groups, seed=0)
    for k in range(3):
        point = bootstrap(lambda w, k=k: weighted_mean(value[:, k], w), groups, seed=0)
        np.testing.assert_allclose([curve.low[k], curve.high[k]], [point.low, point.high], atol=EXACT)


def test_bootstrap_leaves_out_draws_without_a_class():
    # a third of the draws of 3 groups miss the only positive
    score, positive = np.array([0.9, 0.2, 0.95]), np.array([True, False, False])
    interval = bootstrap(lambda w: auroc(score, positive, w), [0, 1, 2], seed=0)
    assert 0 < interval.low < interval.value == 0.5 < interval.high < 1
    undefined = bootstrap(lambda w: auroc(score, positive & False, w), [0, 1, 2], seed=0)
    assert undefined.json() == {"value": None, "low": None, "high": None}


@pytest.mark.parametrize(
    "groups",
    [["b", "a", "b", ""], [3, 1, 3, -2], [2.5, 1.0, 2.5], ["2", "10", "2"], np.array([5, 2, 5]), ["é", "z", "é"]],
)
def test_groups_are_numbered_in_order(groups):
    wanted = np.unique(np.asarray(groups), return_inverse=True)[1]
    assert numbered(groups).tolist() == numbered(np.array(groups, object)).tolist() == wanted.tolist()
    assert numbered([]).shape == (0,)


@pytest.mark.parametrize("groups", [["b", 7, "a", "b", 7], [None, "q", None], ["1", 1, "1"], [(1, "a"), (0, "b")]])
def test_groups_of_several_types_are_apart(groups):
    wanted = [[a == b for b in groups] for a in groups]
    for items in (groups, np.fromiter(groups, object, len(groups))):
        number_N = numbered(items)
        assert (number_N[:, None] == number_N).tolist() == wanted
    assert bootstrap(lambda w: weighted_mean(np.arange(len(groups)) / 9, w), groups, seed=0).low >= 0


def test_one_long_problem_does_not_lengthen_the_others():
    tracemalloc.start()
    try:
        assert len(set(numbered(["p" * 30_000, *["q", "r"] * 10_000]).tolist())) == 3
        assert tracemalloc.get_traced_memory()[1] < 10e6  # as an array of texts 2.4 GB
    finally:
        tracemalloc.stop()
