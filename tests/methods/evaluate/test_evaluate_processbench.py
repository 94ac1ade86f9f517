import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused
from rich.console import Console

from jprm.methods.evaluate import processbench as pb
from jprm.methods.evaluate.blocks import show
from jprm.methods.evaluate.processbench import BENCHMARK
from jprm.methods.evaluate.scored import ScoreError
from jprm.tree import tree_of, with_scores

# few distinct scores: ties, and thresholds that several chains share
SCORE = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0])
CHAIN = st.lists(SCORE, min_size=1, max_size=5).flatmap(
    lambda scores: st.tuples(st.integers(-1, len(scores) - 1), st.just(scores))
)


def predicted(scores, threshold):
    return next((i for i, score in enumerate(scores) if score < threshold), -1)


def brute_force(chains, threshold):
    """As QwenLM/ProcessBench computes it."""
    right = [[predicted(s, threshold) == e for e, s in chains if (e >= 0) == kind] for kind in (True, False)]
    error, correct = (np.mean(x) if x else np.nan for x in right)
    return (2 * error * correct / (error + correct) if error + correct else 0.0), error, correct


def split(chains):
    return np.array([e for e, _ in chains]), [np.array(s) for _, s in chains]


@pytest.mark.parametrize(
    ("error", "correct", "published"), [(53.1, 95.3, 68.2), (48.0, 90.1, 62.6), (35.7, 87.3, 50.7), (29.8, 86.3, 44.3)]
)
def test_f1_of_the_published_accuracies(error, correct, published):
    """Qwen2.5-Math-7B-PRM800K in table 3 of arXiv 2412.06559."""
    # The accuracies are rounded to 0.05; for 53.1 and 95.3 that moves F1 by at most 0.05 and its rounding by 0.05.
    assert pb.f1_of(error, correct).f1 == pytest.approx(published, abs=0.1)


@given(st.lists(CHAIN, min_size=1, max_size=8), st.floats(-0.5, 1.5))
@settings(deadline=None)
def test_f1_and_its_curve_equal_the_definition(chains, threshold):
    first_error, scores = split(chains)
    right = pb.right_at(first_error, scores, threshold)
    actual = pb.weighted_f1(right, first_error, np.ones(len(scores)))
    np.testing.assert_allclose(actual, brute_force(chains, threshold), atol=1e-12)
    threshold_K, curve = pb.f1_curve(first_error, scores)
    assert (np.diff(threshold_K) > 0).all()
    for k, t in enumerate(threshold_K):
        np.testing.assert_allclose([x[k] for x in curve], brute_force(chains, t), atol=1e-12)


@given(st.lists(CHAIN, min_size=1, max_size=8))
@settings(deadline=None)
def test_no_threshold_beats_the_best(chains):
    first_error, scores = split(chains)
    if min(first_error) >= 0 or max(first_error) < 0:
        refused(ScoreError, "without", pb.best_threshold, first_error, scores)
        return
    best = brute_force(chains, pb.best_threshold(first_error, scores))[0]
    every = np.unique(np.concatenate(scores))
    for t in np.r_[every, (every[:-1] + every[1:]) / 2, np.nextafter(every, 2), -1, 2]:
        assert brute_force(chains, t)[0] <= best + 1e-12


def test_thresholds_of_neighbouring_floats_stay_apart():
    low, high = 0.5, np.nextafter(0.5, 1)
    threshold = pb.best_threshold(np.array([0, -1]), [np.array([low]), np.array([high])])
    assert pb.right_at(np.array([0, -1]), [np.array([low]), np.array([high])], threshold).all()


def record(first_error, scores):
    steps = ["x" * (i + 1) for i in range(len(scores))]
    return {"problem": "p", "steps": steps, "first_error": first_error, "scores": scores}


def trees(files):
    return {name: list(map(tree_of, records)) for name, records in files.items()}


def test_report_has_the_promised_keys_and_tunes_on_the_calibration_split_only():
    # in "a" the scores separate at 0.15, in "b" at 0.85
    a = [record(1, [0.9, 0.1, 0.9]), record(-1, [0.2, 0.9])] * 3
    b = [record(0, [0.8, 0.95]), record(-1, [0.9, 0.9])] * 3
    report = json.loads(json.dumps(pb.processbench_report(trees({"a": a, "b": b}), "a", seed=0), allow_nan=False))
    assert set(report) == {"a", "b"}
    for name, error, correct in (("a", 1, 0), ("b", 0, 1)):
        file = report[name]
        figures = [file[key] for key in ("error_accuracy", "correct_accuracy", "threshold", "n")]
        assert figures == [error, correct, 0.5, 6]
        assert file["tuned"]["calibrated_on"] == "a"
        assert file["tuned"]["in_sample"] == (name == "a")
        assert file["tuned"]["threshold"] == pytest.approx(0.15)
        assert file["upper_bound"]["f1"] == 1 and file["upper_bound"]["in_sample"]
        assert file["cross_fit"] is None  # all chains are of one problem
        assert file["baselines"]["always_correct"]["correct_accuracy"] == 1
        assert file["baselines"]["always_correct"]["error_accuracy"] == 0
        assert file["baselines"]["always_first_step"]["error_accuracy"] == (1 if name == "b" else 0)
        assert {"position", "step_length"} <= set(file["baselines"])
        assert file["f1_low"] is None  # nor is there an interval
    assert report["a"]["tuned"]["f1"] == 1
    assert report["b"]["tuned"]["f1"] == 0
    show(BENCHMARK.tables(report), Console(width=120, quiet=True))


@pytest.mark.parametrize(
    "bad",
    [{"scores": (0.5, float("nan"))}, {"scores": (None, None)}, {"first_error": 2}, {"first_error": None}],
)
def test_bad_records_are_named(bad):
    good, other = tree_of(record(-1, [0.5, 0.5])), tree_of(record(1, [0.5, 0.5]))
    other = with_scores(other, bad.pop("scores", [0.5, 0.5]))
    broken = dataclasses.replace(other, extra={**other.extra, **bad})
    refused(ScoreError, "record 2", pb.processbench_report, {"math": [good, broken]}, "math", seed=0)


def test_an_unknown_calibration_split_is_named():
    refused(ScoreError, "'gsm8k'", pb.processbench_report, trees({"math": [record(-1, [0.5])]}), "gsm8k", seed=0)


def random_chains(rng, count, repeats=1):
    """Uniform scores without a relation to the first errors; `repeats` chains a problem."""
    length = rng.integers(2, 9, count)
    error = np.where(rng.random(count) < 0.5, rng.integers(0, length), -1)
    return [f"p{i // repeats}" for i in range(count)], error, [rng.random(k) for k in length]


def test_cross_fit_judges_no_chain_by_a_threshold_that_saw_its_problem(monkeypatch):
    problems, error, scores = random_chains(np.random.default_rng(1), 60, repeats=2)
    seen = []
    whole = pb.best_threshold
    monkeypatch.setattr(pb, "best_threshold", lambda e, s: seen.append({id(x) for x in s}) or whole(e, s))
    right, thresholds = pb.cross_fit(error, scores, problems, seed=3, folds=4)
    assert len(thresholds) == len(seen) == 4
    judged = np.zeros(60, int)
    for threshold, tuned_on in zip(thresholds, seen, strict=True):
        held_out = [i for i in range(60) if id(scores[i]) not in tuned_on]
        assert not {problems[i] for i in held_out} & {problems[i] for i in range(60) if i not in held_out}
        judged[held_out] += 1
        for i in held_out:
            assert right[i] == (predicted(scores[i], threshold) == error[i])
    assert (judged == 1).all()


def test_average_f1_is_the_mean_of_the_files_with_intervals_that_cover_it():
    rng = np.random.default_rng(4)
    files = {}
    for name in "ab":
        problems, error, scores = random_chains(rng, 40)
        files[name] = [
            record(int(e), s.tolist()) | {"problem": p} for p, e, s in zip(problems, error, scores, strict=True)
        ]
    files = trees(files)
    report, average = pb.processbench_report(files, "a", seed=0), pb.average_f1(files, "a", seed=0, files="ab")
    for kind, figure_of in [
        ("half", lambda f: f),
        ("tuned", lambda f: f["tuned"]),
        ("cross_fit", lambda f: f["cross_fit"]),
    ]:
        assert average[kind]["value"] == pytest.approx(np.mean([figure_of(report[name])["f1"] for name in "ab"]))
        assert average[kind]["low"] < average[kind]["value"] < average[kind]["high"]
    # Of two independent files the mean's interval is narrower than either's, by about the square root of two.
    widths = [report[name]["f1_high"] - report[name]["f1_low"] for name in "ab"]
    assert average["half"]["high"] - average["half"]["low"] < 0.85 * max(widths)
    few = pb.average_f1({"a": files["a"], "b": files["b"][:3]}, "a", seed=0, files="ab")
    assert few["cross_fit"] is None and few["half"] is not None
