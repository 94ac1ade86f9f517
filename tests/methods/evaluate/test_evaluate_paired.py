import numpy as np
import pytest
from scipy.stats import norm

from jprm.methods.evaluate.best_of_n import best_of_n_report, chosen_curves, compare_curves, pools_of
from jprm.score.scale import RULES
from jprm.statistics import difference, draws, mean_differences, weighted_mean
from jprm.tree import tree_of


def test_differences_agree_with_the_general_bootstrap_and_with_the_textbook():
    rng = np.random.default_rng(0)
    difference_PC = rng.normal(0.02, 0.3, (400, 3))
    problems = [f"p{i}" for i in range(400)]
    ahead = mean_differences(difference_PC, problems, seed=0)
    np.testing.assert_allclose(ahead.value, difference_PC.mean(0), rtol=1e-12)
    error = difference_PC.std(0) / 20
    # The standard deviation of 1,000 draws is uncertain by 2.2 %, so an end by 0.044 errors.
    np.testing.assert_allclose(ahead.low, ahead.value - 1.966 * error, atol=0.15 * error.max())
    np.testing.assert_allclose(ahead.high, ahead.value + 1.966 * error, atol=0.15 * error.max())
    np.testing.assert_allclose(ahead.better, norm.cdf(ahead.value / error), atol=0.06)
    # The same by subtracting the draws of two statistics, other random numbers: both within that error.
    a_N = rng.random(400)
    drawn = [
        draws(lambda w, x=x: weighted_mean(x, w), problems, 4000, seed=1) for x in (a_N + difference_PC[:, 0], a_N)
    ]
    other = difference(*drawn)
    assert other.value == pytest.approx(ahead.value[0])
    assert [other.low, other.high] == pytest.approx([ahead.low[0], ahead.high[0]], abs=0.2 * error[0])
    assert other.better == pytest.approx(ahead.better[0], abs=0.04)


def test_items_of_one_problem_are_drawn_together():
    rng = np.random.default_rng(1)
    difference_P = rng.normal(0, 1, 60)
    once = mean_differences(difference_P[:, None], [f"p{i}" for i in range(60)], seed=0)
    thrice = mean_differences(np.repeat(difference_P, 3)[:, None], np.repeat(np.arange(60), 3), seed=0)
    # Copies are no evidence: the intervals are of one width (the groups' draws differ by their names' order).
    assert thrice.high - thrice.low == pytest.approx(once.high - once.low, rel=0.15)


def test_no_difference_is_a_half_and_a_sure_one_is_one():
    ahead = mean_differences(np.array([[0.0, 0.1, -0.1]] * 30), [str(i) for i in range(30)], seed=0)
    assert ahead.better.tolist() == [0.5, 1.0, 0.0]


def pools(seed, quality, n=60, size=12):
    """Right chains score higher by `quality` standard deviations; the pools of one seed are the same."""
    rng, noise = np.random.default_rng(seed), np.random.default_rng(100 + seed)
    records = []
    for i in range(n):
        samples = []
        for _ in range(size):
            correct = bool(rng.random() < 0.4)
            odds = quality * correct + noise.normal(size=3)
            samples.append({"steps": ["a", "b", "c"], "correct": correct, "answer": int(correct),
                            "scores": (1 / (1 + np.exp(-odds))).tolist()})  # fmt: skip
        records.append({"problem": f"p{i}", "samples": samples})
    return records


def test_rules_and_models_are_compared_on_the_same_problems():
    good, bad = pools(0, 2.0, 300), pools(0, 0.0, 300)
    report = best_of_n_report(map(tree_of, good), seed=0, trials=20)
    row_of = {(row["a"], row["b"]): row for row in report["paired"]}
    assert len(row_of) == len(RULES) * (len(RULES) - 1) / 2 + len(RULES)  # pairs, and each with the majority
    row = row_of["prod", "max"]
    assert row["n"] == [1, 2, 4, 8, 12]
    for n, value in zip(row["n"], row["value"], strict=True):
        curves = (report["rules"][rule]["best_of_n"]["value"][n - 1] for rule in ("prod", "max"))
        assert value == pytest.approx(next(curves) - next(curves), abs=1e-12)
    # The best of one is any one, whatever chose it; 1e-6 is far above the rounding of the two sums.
    assert max(abs(row["low"][0]), abs(row["high"][0])) < 1e-6 and row["better"][0] == 0.5
    assert row["better"][-1] > 0.9 and row["value"][-1] > 0  # three steps say more than the highest alone

    curves = [chosen_curves(pools_of(map(tree_of, records))) for records in (good, bad)]
    problems = [record["problem"] for record in good]
    (between,) = compare_curves(*curves, [("prod", "prod")], problems, seed=0)
    assert between["low"][-1] > 0 and between["better"][-1] == 1.0
    (same,) = compare_curves(curves[0], curves[0], [("prod", "prod")], problems, seed=0)
    assert same["value"] == [0.0] * 5 and same["better"] == [0.5] * 5
    assert same["low"] == pytest.approx([0.0] + [-0.0127] * 4, abs=5e-5)  # 300 problems without a difference
