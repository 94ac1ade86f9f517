import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused
from scipy import stats
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from jprm import statistics
from jprm.apps import cli
from jprm.io.jsonl import write_records
from jprm.methods.evaluate import calibration as cal
from jprm.methods.evaluate import conformal
from jprm.methods.evaluate.calibration import findings
from jprm.methods.evaluate.scored import ScoreError
from jprm.methods.jobs import calibration_map
from jprm.statistics import equal_mass_bins
from jprm.tree import tree_of

SCORE = st.sampled_from([0.0, 1e-12, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0])
LABELLED = st.lists(st.tuples(SCORE, st.booleans()), min_size=2, max_size=40)
BOTH = LABELLED.filter(lambda items: {right for _, right in items} == {True, False})


def split(items):
    return np.array([score for score, _ in items]), np.array([right for _, right in items])


def sample(n, seed, sharpness=1.0):
    """Scores whose log-odds are `sharpness` times the true ones: 1 is calibrated, 3 overconfident."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(0.7, 1.5, n)
    return 1 / (1 + np.exp(-sharpness * truth)), rng.random(n) < 1 / (1 + np.exp(-truth))


def test_bins_hold_equally_many_and_ties_share_one():
    rng = np.random.default_rng(0)
    assert np.bincount(equal_mass_bins(rng.permutation(1000) / 1000, 8)).tolist() == [125] * 8
    assert equal_mass_bins(np.array([0.5, 1, 1, 1, 1, 1, 0, 0.5]), 4).tolist() == [1, 2, 2, 2, 2, 2, 0, 1]


def test_ece_by_hand():
    score = np.array([0.1, 0.3, 0.8, 0.8])
    right = np.array([False, True, True, True])
    # bins {0.1, 0.3}: |0.5 - 0.2|; {0.8, 0.8}: |1 - 0.8|
    assert cal.ece(score, right, 2) == pytest.approx((2 * 0.3 + 2 * 0.2) / 4)
    assert np.isnan(cal.ece(np.zeros(0), np.zeros(0, bool)))


@given(LABELLED, st.integers(1, 9), st.randoms())
@settings(deadline=None)
def test_brier_is_the_sum_of_its_parts(items, bins, random):
    part = cal.brier(*split(items), bins)
    assert part.brier == pytest.approx(np.mean([(score - right) ** 2 for score, right in items]))
    # sums of at most 40 numbers in [0, 1] in float64
    assert part.brier == pytest.approx(
        part.reliability - part.resolution + part.uncertainty + part.within_bin, abs=1e-13
    )
    random.shuffle(items)
    np.testing.assert_allclose(cal.brier(*split(items), bins), part, atol=1e-13)


def test_parts_of_brier_in_the_extremes():
    right = np.arange(100) % 4 > 0
    perfect = cal.brier(right.astype(float), right)
    assert (perfect.brier, perfect.reliability) == (0, 0) and perfect.resolution == pytest.approx(perfect.uncertainty)
    constant = cal.brier(np.full(100, 0.75), right)
    assert constant.resolution == 0 and constant.reliability == 0 and constant.brier == constant.uncertainty == 0.1875


def test_the_noise_of_ece_is_known():
    """Over 200 samples of a calibrated scorer, ECE passes the 95 % quantile of its noise in about 5 %."""
    above, clustered = [], []
    for seed in range(200):
        score, right = sample(400, seed)
        above.append(cal.ece(score, right) > np.quantile(cal.ece_if_calibrated(score, right, range(400), seed=0), 0.95))
        # problems of 8 steps that share score and label: as if there were 400 steps, not 3,200
        score, right, problem = (np.repeat(x, 8) for x in (score, right, np.arange(400)))
        null = cal.ece_if_calibrated(score, right, problem, seed=0)
        clustered.append(cal.ece(score, right) > np.quantile(null, 0.95))
    # The quantile is an estimate, and passed in up to 9 %; 3 standard errors of a share of 200 are 0.06.
    assert np.mean(above) < 0.15 and np.mean(clustered) < 0.15
    score, right = sample(400, 0, sharpness=3)
    assert cal.ece(score, right) > np.quantile(cal.ece_if_calibrated(score, right, range(400), seed=0), 0.999)


@pytest.mark.parametrize("kind", calibration_map.KINDS)
@given(BOTH)
@settings(deadline=None, max_examples=40)
def test_maps_are_monotone_and_keep_to_probabilities(kind, items):
    fitted = calibration_map.fit(kind, *split(items))
    score = np.sort(np.r_[0, 1, [s for s, _ in items], np.linspace(0, 1, 50)])
    mapped = calibration_map.apply(fitted, score)
    assert ((mapped >= 0) & (mapped <= 1)).all() and (np.diff(mapped) >= 0).all()
    again = calibration_map.from_json(json.loads(json.dumps(fitted.to_json())))
    assert again == fitted and np.isnan(calibration_map.apply(again, np.array([np.nan]))).all()


def test_isotonic_is_that_of_scikit_learn():
    score, right = sample(500, 1, sharpness=3)
    score = np.round(score, 2)  # ties
    grid = np.linspace(0, 1, 333)
    expected = IsotonicRegression(out_of_bounds="clip").fit(score, right).predict(grid)
    # scikit-learn's thresholds are float64 like ours: only the order of the sums differs
    np.testing.assert_allclose(
        calibration_map.apply(calibration_map.fit("isotonic", score, right), grid), expected, atol=1e-12
    )


@pytest.mark.parametrize("kind", ["temperature", "platt"])
def test_logistic_maps_are_those_of_scikit_learn(kind):
    score, right = sample(500, 2, sharpness=2)
    n = right.sum()
    high, low = (n + 1) / (n + 2), 1 / (500 - n + 2)
    target = np.where(right, high, low)
    z = np.log(score / (1 - score))
    model = LogisticRegression(C=np.inf, fit_intercept=kind == "platt", tol=1e-10)
    model.fit(np.r_[z, z][:, None], np.r_[np.ones(500), np.zeros(500)], np.r_[target, 1 - target])
    fitted = calibration_map.fit(kind, score, right)
    # two optimisers of one smooth convex loss, each stopped near gradient 1e-6 or better
    np.testing.assert_allclose([fitted.slope, fitted.intercept], [model.coef_[0, 0], np.r_[model.intercept_, 0][0]],
                               atol=1e-4)  # fmt: skip


@pytest.mark.parametrize("kind", calibration_map.KINDS)
def test_recalibration_repairs_an_overconfident_scorer(kind):
    fitted = calibration_map.fit(kind, *sample(4000, 3, sharpness=3))
    score, right = sample(4000, 4, sharpness=3)
    mapped = calibration_map.apply(fitted, score)
    # the noise of ECE with 15 bins of 267 steps is about 0.02; before it is above 0.1
    assert cal.ece(score, right) > 0.1 and cal.ece(mapped, right) < 0.035
    assert cal.brier(mapped, right).brier < cal.brier(score, right).brier
    if kind == "temperature":  # the truth is 3; its standard error is about 1.5 %
        assert 1 / fitted.slope == pytest.approx(3, rel=0.06)


def test_a_scorer_worse_than_none_becomes_a_constant():
    score, right = sample(300, 5)
    for kind in calibration_map.KINDS:
        mapped = calibration_map.apply(calibration_map.fit(kind, 1 - score, right), np.array([0, 0.3, 1.0]))
        # the base rate, but for a temperature, which can only say 0.5; noise at the ends of an isotonic map may stay
        assert mapped[1] == pytest.approx(0.5 if kind == "temperature" else right.mean(), abs=0.05)


def test_bad_input_is_refused():
    refused(ValueError, "2 of 2", calibration_map.fit, "platt", np.array([0.1, 0.2]), np.array([True, True]))
    refused(ValueError, r"\[0, 1\]", calibration_map.fit, "platt", np.array([0.1, 1.2]), np.array([True, False]))
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        calibration_map.apply(calibration_map.Logistic("platt", 1.0, 0.0), np.array([-0.1]))
    for record in ({"kind": "magic"}, {"kind": "platt", "slope": 1.0}, [],
                   {"kind": "platt", "slope": -1, "intercept": 0}, {"kind": "platt", "slope": None, "intercept": 0},
                   {"kind": "isotonic", "score": [0, 1], "probability": [1, 0]},
                   {"kind": "quantile", "score": [], "probability": []}):  # fmt: skip
        with pytest.raises(ValueError):
            calibration_map.from_json(record)


def test_false_alarms_are_as_rare_as_promised():
    """For uniform scores the false-alarm rate of a threshold is the threshold itself."""
    rng = np.random.default_rng(0)
    for n, alpha in [(19, 0.1), (50, 0.1), (99, 0.05)]:
        rate = [conformal.false_alarm_threshold(rng.random(n), alpha).threshold for _ in range(2000)]
        k = int(alpha * (n + 1) + 1e-9)
        error = np.std(rate) / np.sqrt(2000)
        assert np.mean(rate) == pytest.approx(k / (n + 1), abs=4 * error) and k / (n + 1) <= alpha
    rate = np.array(
        [conformal.false_alarm_threshold(rng.random(200), 0.1, confidence=0.9).threshold for _ in range(2000)]
    )
    # at most 10 % of the calibration sets exceed alpha, within 3 standard errors; and not much rarer than that
    assert 0.05 < (rate > 0.1).mean() < 0.1 + 3 * np.sqrt(0.09 / 2000)


def test_false_alarms_with_ties_and_few_chains():
    assert conformal.false_alarm_threshold(np.full(8, 0.2), 0.1).threshold == -np.inf
    # all tie: flagging what is below 0.2 flags none of them
    assert conformal.false_alarm_threshold(np.full(100, 0.2), 0.1).threshold == 0.2
    assert conformal.false_alarm_threshold(np.arange(29) / 29, 0.1).threshold == 2 / 29  # the third of 29 + 1 chains


def test_clopper_pearson_inverts_the_binomial():
    for wrong, n in [(0, 10), (3, 50), (49, 50)]:
        bound = conformal.clopper_pearson(wrong, n, 0.95)
        assert stats.binom.cdf(wrong, n, bound) == pytest.approx(0.05)
    assert conformal.clopper_pearson([0, 5], [0, 5], 0.95).tolist() == [1, 1]


@pytest.mark.parametrize("shape", ["rising", "wavy"])
def test_accepted_chains_are_as_good_as_promised(shape):
    """The error rate above every threshold of the grid is known; it must exceed alpha in at most 10 % of the trials."""
    fine = np.linspace(0, 1, 100_001)
    wrong = 0.5 * (1 - fine) if shape == "rising" else 0.1 + 0.1 * np.sin(25 * fine)
    above = np.cumsum(wrong[::-1])[::-1] / np.arange(len(fine), 0, -1)  # mean error of scores >= each point
    rng = np.random.default_rng(1)
    broken, accepting = 0, 0
    for _ in range(300):
        score = rng.random(2000)
        right = rng.random(2000) >= np.interp(score, fine, wrong)
        accepted = conformal.accept_threshold(score, right, 0.1, confidence=0.9)
        if np.isfinite(accepted.threshold):
            accepting += 1
            broken += np.interp(accepted.threshold, fine, above) > 0.1
            assert accepted.bound <= 0.1
    assert broken / 300 <= 0.1 + 3 * np.sqrt(0.09 / 300)
    if shape == "rising":  # of the 200 chains from 0.9 up, 2.5 % are wrong: far enough below alpha to be seen
        assert accepting > 290


def test_scores_above_099_are_told_apart():
    """A sure scorer: chains from 0.999 up are right, those of 0.99 to 0.999 wrong half of the time."""
    score = np.repeat([0.9995, 0.995], 500)
    right = np.r_[np.ones(500, bool), np.arange(500) % 2 == 0]
    accepted = conformal.accept_threshold(score, right, 0.1, confidence=0.9)
    assert 0.995 < accepted.threshold <= 0.9995 and accepted.bound < 0.01
    coarse = conformal.accept_threshold(score, right, 0.1, confidence=0.9, grid=np.linspace(1, 0, 101))
    assert coarse.threshold == np.inf  # it accepts nothing


def test_thresholds_survive_json():
    accepted = conformal.accept_threshold(np.zeros(5), np.zeros(5, bool), 0.1, confidence=0.9)
    assert accepted.threshold == np.inf and accepted.to_json()["threshold"] is None
    for threshold in (accepted, conformal.false_alarm_threshold(np.arange(99) / 99, 0.05)):
        assert conformal.Threshold.from_json(json.loads(json.dumps(threshold.to_json()))) == threshold
    with pytest.raises(ValueError):
        conformal.Threshold.from_json({"kind": "accept"})
    refused(ValueError, "finite", conformal.false_alarm_threshold, np.array([np.nan]), 0.1)


def records(n, seed, sharpness, name):
    score, right = sample(5 * n, seed, sharpness)
    chains = zip(score.reshape(n, 5).tolist(), right.reshape(n, 5).astype(float).tolist(), strict=True)
    return [
        {"problem": f"{name} {i}", "steps": [f"step {'x' * j}" for j in range(5)], "scores": scores, "labels": labels}
        for i, (scores, labels) in enumerate(chains)
    ]


def report_of(files, calibrate):
    trees = {name: list(map(tree_of, items)) for name, items in files.items()}
    return cal.calibration_report(trees, list(map(tree_of, calibrate)), "drop", 0)


def test_report_finds_miscalibration_and_says_how_to_repair_it():
    calibrate = records(150, 0, 3.0, "calibrate")
    files = {"bad": [*records(100, 1, 3.0, "bad"), *calibrate[:3]], "good": records(100, 2, 1.0, "good")}
    report = report_of(files, calibrate)
    json.dumps(report, allow_nan=False)
    assert report["n_steps"] == 1000 and report["n_problems"] == 200 and report["left_out"] == 15
    bad, good = report["by"]["subset"]
    assert (bad["group"], bad["miscalibrated"], good["group"], good["miscalibrated"]) == ("bad", True, "good", False)
    assert [group["n"] for group in report["by"]["step"]] == [200] * 5
    assert sum(group["n"] for group in report["by"]["length"]) == 1000
    assert sum(bad["curve"]["n"]) == 500
    # one chain a problem; the calibration chains are those without an error
    chains = [all(record["labels"]) for record in calibrate]
    held_out = [all(record["labels"]) for records in files.values() for record in records]
    for row in report["conformal"]:
        threshold = conformal.Threshold.from_json({key: x for key, x in row.items() if key != "held_out"})
        false_alarm = threshold.kind == "false_alarm"
        assert threshold.n == (sum(chains) if false_alarm else len(chains))
        assert not false_alarm or row["held_out"]["n"] == sum(held_out) - sum(chains[:3])
    few = report_of({"few": records(5, 3, 3.0, "few")}, calibrate)
    assert few["raw"]["miscalibrated"] is None and few["raw"]["bins"] == 1
    for figures in report["recalibrated"].values():
        calibration_map.from_json(figures["map"])
    refused(ScoreError, "nothing is left", report_of, {"bad": calibrate}, calibrate)
    calibrate[0]["scores"][0] = 1.5
    refused(ScoreError, "calibrate: record 1: .*jprm fuse fit --sources", report_of, {"bad": calibrate}, calibrate)


def test_a_value_model_is_not_judged_by_the_calibration_of_its_steps():
    """A correct step from which most completions fail has a low value, and is no fault of the model."""
    ece = {"value": 0.3, "low": 0.2, "high": 0.4, "plain": 0.31}
    raw = {"ece": ece, "ece_if_calibrated": {"high": 0.05}, "miscalibrated": True}
    results = {"calibration": {"raw": raw, "recalibrated": {"temperature": {"ece": ece}}}}
    kinds = {s: [x.kind for x in findings(results | {"model": {"semantics": s}})] for s in ("correctness", "value")}
    assert kinds == {"correctness": ["bad"], "value": ["open"]}


def rated(count, first, kind):
    """Returns scored and labelled chains, or pools of them, of problems that are not in the order of their names."""
    draw = random.Random(first)
    records = []
    for i in range(first, first + count):
        samples = []
        for _ in range(1 if kind == "chain" else 3):
            steps = [draw.choice(["a", "bé", "ccc"]) for _ in range(draw.randint(1, 4))]
            scores = [round(draw.random(), 7) for _ in steps]
            labels = [draw.choice([1, -1, 0, None]) if draw.random() < 0.5 else int(x > 0.3) * 2 - 1 for x in scores]
            samples.append({"steps": steps, "scores": scores, "labels": labels})
        samples[0] = samples[0] if i % 5 else {key: x for key, x in samples[0].items() if key != "labels"}
        body = samples[0] if kind == "chain" else {"samples": samples}
        records.append({"problem": f"p{i * 7 % 1009}", "semantics": "rating", **body})
    return records


@pytest.mark.parametrize("kind", ["chain", "pool"])
def test_calibration_without_a_model_takes_the_stored_scores(tmp_path, kind):
    data, fitted = rated(60, 10, kind), rated(50, 100, kind) + rated(4, 10, kind)
    write_records(tmp_path / "data.jsonl", data)
    write_records(tmp_path / "fitted.jsonl", fitted)
    expected = cal.calibration_report({"data.jsonl": map(tree_of, data)}, map(tree_of, fitted), "negative", 0)
    command = ["eval", "calibration", "--input", str(tmp_path / "data.jsonl"), "--neutral", "negative"]
    command += ["--calibrate", str(tmp_path / "fitted.jsonl"), "--json", str(tmp_path / "out.json")]
    assert cli.main(command) == 0
    assert json.loads((tmp_path / "out.json").read_text()) == expected | {"too_long": 0}


def test_many_problems_are_drawn_in_parts(monkeypatch):
    """The value is the same to rounding, and the standard error is, within that of its estimate."""
    draw = np.random.default_rng(0)
    value_NC = draw.random((6000, 2)) + draw.random((3000, 1)).repeat(2, axis=0)
    problem_N = np.arange(3000).repeat(2)
    single = statistics.mean_draws(value_NC, problem_N, seed=0)
    monkeypatch.setattr(statistics, "MOST_GROUPS", 500)
    parts = statistics.mean_draws(value_NC, problem_N, seed=0)
    np.testing.assert_allclose(parts.value, single.value, rtol=1e-12)
    np.testing.assert_allclose(parts.drawn_R.std(0), single.drawn_R.std(0), rtol=0.12)
    numbers = statistics.group_numbers(problem_N)
    assert len(set(numbers)) == 500 and (numbers[::2] == numbers[1::2]).all()  # no problem is torn
    assert (np.bincount(numbers) == 12).all()
