import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused

from jprm.score.aggregate import LOG_ODDS_CLIP, RULES, aggregate, chain_scores, rank_keys
from jprm.score.scale import LOG_ODDS

SHAPE = (6, 9)
PROBABILITY = st.one_of(st.sampled_from([0.0, 1.0, 0.5]), st.floats(0, 1, width=32))
LOGARITHMS = {"prod", "mean_log"}


def brute_force(score_P):
    """All rules for one chain in float64, by their definitions."""
    p = np.asarray(score_P, np.float64)
    if not len(p):
        return dict.fromkeys(RULES, -np.inf)
    inner = np.clip(p, np.float32(LOG_ODDS_CLIP), np.float32(1 - LOG_ODDS_CLIP)).astype(np.float64)
    return {
        "min": p.min(),
        "soft_min": (p * np.exp(-p / 0.1)).sum() / np.exp(-p / 0.1).sum(),
        "prod": np.prod(p),
        "mean": p.mean(),
        "last": p[-1],
        "max": p.max(),
        "sum_log_odds": np.log(inner / (1 - inner)).sum(),
        "mean_log": np.prod(p ** (1 / len(p))),
    }


@given(hnp.arrays(np.float32, SHAPE, elements=PROBABILITY), hnp.arrays(bool, SHAPE))
@settings(deadline=None, max_examples=100)
def test_every_rule_equals_its_definition(score_BP, mask_BP):
    by_rule = rank_keys(np.where(mask_BP, score_BP, np.nan), mask_BP)  # masked scores must not be read
    assert tuple(sorted(by_rule)) == tuple(sorted(RULES))
    for b in range(SHAPE[0]):
        wanted = brute_force(score_BP[b][mask_BP[b]])
        for rule in RULES:
            # a float32 sum of nine logarithms up to 103 is off by 1e-5, a relative error in the product
            value = np.exp(by_rule[rule][b]) if rule in LOGARITHMS and mask_BP[b].any() else by_rule[rule][b]
            np.testing.assert_allclose(value, wanted[rule], rtol=5e-5, atol=1e-5, err_msg=rule)


def test_a_probability_of_zero_or_one_keeps_its_step():
    score_BP, mask_BP = np.array([[1.0, 0.0, 1.0], [1.0, 1.0, 0.25], [1.0, 1.0, 1.0]]), np.ones((3, 3), bool)
    by_rule = rank_keys(score_BP, mask_BP)
    np.testing.assert_array_equal(np.exp(by_rule["prod"]), [0, 0.25, 1])
    np.testing.assert_array_equal(np.exp(by_rule["mean_log"][[0, 2]]), [0, 1])
    np.testing.assert_array_equal(by_rule["mean"], np.float32([2 / 3, 0.75, 1]))  # three steps, not two
    assert not any(np.isnan(key_B).any() for key_B in by_rule.values())


def test_rank_keys_order_long_chains_whose_products_underflow():
    score_BP = np.full((2, 400), 0.5, np.float32)
    score_BP[0, 7] = 0.75
    mask_BP = np.ones(score_BP.shape, bool)
    key_B = rank_keys(score_BP, mask_BP)["prod"]
    assert key_B[0] > key_B[1] > -np.inf and (np.exp(key_B) == 0).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("score", [0.0, 0.2, 1.0])
def test_two_thousand_steps_are_as_many_as_two(score):
    for rule in set(RULES) - {"prod", "sum_log_odds"}:
        assert aggregate([score] * 2000, rule) == pytest.approx(score, abs=1e-6)
    at_end = {0.0: 0.0, 0.2: 0.0, 1.0: 1.0}[score]
    assert aggregate([score] * 2000, "prod") == aggregate([score] * 2000, "sum_log_odds") == at_end


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_scores_of_any_precision_are_aggregated(dtype):
    for rule in RULES:
        assert aggregate(np.array([0.5, 0.25], dtype), rule) == pytest.approx(aggregate([0.5, 0.25], rule))


def test_products_of_log_odds_are_exact_beyond_the_floats():
    """log p for log odds x is -log(1 + e^-x), even if p rounds to 0 or 1."""
    odds_N = np.array([-900.0, -800.0, -40.0, 25.0, 30.0])
    for rule in ("prod", "mean_log"):
        _, key_N = chain_scores(odds_N[:, None].tolist(), rule, LOG_ODDS)
        np.testing.assert_allclose(key_N, -np.logaddexp(0, -odds_N), rtol=1e-6)
        assert (np.diff(key_N) > 0).all()
    weight_N = LOG_ODDS.weights(odds_N)
    np.testing.assert_allclose(weight_N[2:], [np.exp(-40), 1 - np.exp(-25), 1 - np.exp(-30)], rtol=1e-12)


def test_sums_of_log_odds_are_exact_up_to_the_clip():
    odds_N = np.array([-20.0, -12.02, -12.01, 0.0, 12.01, 12.02, 20.0])
    _, key_N = chain_scores(odds_N[:, None].tolist(), "sum_log_odds", LOG_ODDS)
    most = np.log1p(-LOG_ODDS_CLIP) - np.log(LOG_ODDS_CLIP)
    np.testing.assert_allclose(key_N, np.clip(odds_N, -most, most), rtol=1e-6)


def test_a_nan_score_stays_in_its_row():
    by_rule = rank_keys(np.array([[np.nan, 0.5], [0.5, 0.5]]), np.ones((2, 2), bool))
    for rule in set(RULES) - {"last", "max", "min"}:
        assert np.isnan(by_rule[rule][0])
    alone = rank_keys(np.array([[0.5, 0.5]]), np.ones((1, 2), bool))
    assert all(by_rule[rule][1] == alone[rule][0] for rule in RULES)


def test_a_person_names_one_rule():
    """One chain gives a number, several of any lengths an array; each equals its definition."""
    chains = [[0.9, 0.8], [0.5], [0.25, 0.5, 1.0]]
    for rule in RULES:
        wanted = np.array([brute_force(chain)[rule] for chain in chains])
        if rule == "sum_log_odds":
            wanted = 1 / (1 + np.exp(-wanted))
        np.testing.assert_allclose(aggregate(chains, rule), wanted, rtol=1e-5)
        np.testing.assert_allclose([aggregate(np.array(chain), rule) for chain in chains], wanted, rtol=1e-5)
    assert aggregate([0.9, 0.8], "min") == 0.8 and isinstance(aggregate((0.9, 0.8), "mean"), float)
    assert np.isnan(aggregate([], "min")) and np.isnan(aggregate([0.5, np.nan], "min"))
    refused(ValueError, "it must be one of min", aggregate, [0.5], "median")
    refused(ValueError, "it must be one of min", aggregate, np.ones((2, 2)), np.ones((2, 2), bool))
    refused(ValueError, "needs probabilities", aggregate, [-0.5], "prod")
