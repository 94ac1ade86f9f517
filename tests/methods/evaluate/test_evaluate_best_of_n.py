import itertools
import json
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused
from rich.console import Console

from jprm.methods.data.readers import find
from jprm.methods.evaluate import best_of_n as bon
from jprm.methods.evaluate import votes
from jprm.methods.evaluate.best_of_n import BENCHMARK
from jprm.methods.evaluate.blocks import show
from jprm.methods.evaluate.scored import ScoreError
from jprm.score.aggregate import RULES
from jprm.statistics import Draws
from jprm.tree import tree_of

SAMPLE = st.fixed_dictionaries(
    {
        "answer": st.sampled_from([None, 1, 2, 3]),
        "score": st.sampled_from([0.0, 0.25, 0.5, 1.0]),  # dyadic, so that sums are exact and ties are ties
        "steps": st.just(1),
    }
)
POOL = st.lists(SAMPLE, min_size=1, max_size=7)
TRUTH = 1


def record_of(pool):
    samples = [{"steps": ["x"] * s["steps"], "scores": [s["score"]] * s["steps"], "answer": s["answer"]} for s in pool]
    return {"problem": "p", "answer": TRUTH, "samples": samples}


def report_of(records, seed=0, **settings):
    return bon.best_of_n_report(map(tree_of, records), seed, **settings)


def expected(pool, n, result):
    """The mean of `result` over all subsets of n samples."""
    return float(np.mean([result(subset) for subset in itertools.combinations(pool, n)]))


def test_null_answers_of_correct_samples_are_as_if_absent():
    absent = [
        {"problem": p, "samples": [{"steps": ["x"], "scores": [s], "correct": s > 0.4} for s in (0.25, 0.5, 0.75)]}
        for p in "pq"
    ]
    null = [{**pool, "samples": [{**sample, "answer": None} for sample in pool["samples"]]} for pool in absent]
    assert report_of(null) == report_of(absent) and report_of(null)["pass_at_n"]["value"][1] == 1


def chosen(subset):
    """The correctness of the best sample that has an answer and a score; those that tie share."""
    valid = [s for s in subset if s["answer"] is not None and s["steps"]]
    best = [s["answer"] == TRUTH for s in valid if s["score"] == max(v["score"] for v in valid)]
    return np.mean(best) if best else 0.0


def voted(subset, weighted):
    totals = Counter()
    for s in subset:
        if s["answer"] is not None:
            totals[s["answer"]] += (s["score"] * s["steps"]) if weighted else 1
    best = [answer == TRUTH for answer, total in totals.items() if total == max(totals.values())]
    return np.mean(best) if best else 0.0


@given(POOL)
@settings(deadline=None, max_examples=40)
def test_curves_equal_brute_force_over_all_subsets(pool):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bon, "mean_draws", lambda value_PC, groups, seed: Draws(value_PC.mean(0), value_PC[:1], 1))
        patch.setattr(bon, "compare_curves", lambda *args: [])
        report = report_of([record_of(pool)])
    assert report["n"] == list(range(1, len(pool) + 1))
    for n in report["n"]:
        wanted = {
            "best": expected(pool, n, chosen),
            "majority": expected(pool, n, lambda subset: voted(subset, weighted=False)),
            "vote": expected(pool, n, lambda subset: voted(subset, weighted=True)),
            "pass": expected(pool, n, lambda subset: any(s["answer"] == TRUTH and s["steps"] for s in subset)),
        }
        # chains of one step have the same score by every rule but the log-odds, which the clip and sigmoid round
        for rule in ("min", "prod", "mean", "last", "max", "mean_log"):
            curves = report["rules"][rule]
            assert curves["best_of_n"]["value"][n - 1] == pytest.approx(wanted["best"], abs=1e-12)
            assert curves["weighted_vote"]["value"][n - 1] == pytest.approx(wanted["vote"], abs=1e-12)
        assert report["rules"]["sum_log_odds"]["best_of_n"]["value"][n - 1] == pytest.approx(wanted["best"], abs=1e-12)
        assert report["majority"]["value"][n - 1] == pytest.approx(wanted["majority"], abs=1e-12)
        assert report["pass_at_n"]["value"][n - 1] == pytest.approx(wanted["pass"], abs=1e-12)


@pytest.mark.parametrize("size", [1, 7, 100, 1860])
def test_best_rank_probability_is_exact_at_any_size(size):
    chance_Nn = votes.best_rank_probability(size, size)
    np.testing.assert_allclose(chance_Nn.sum(0), 1, rtol=1e-12)  # 1,860 float64 factors round to about 1e-13
    rng = np.random.default_rng(size)
    pairs = [(0, 1), (0, size), (size - 1, 1), *rng.integers([0, 1], [size, size + 1], (30, 2))]
    for rank, n in ((int(rank), int(n)) for rank, n in pairs):
        wanted = Fraction(math.comb(size - rank - 1, n - 1), math.comb(size, n))
        assert chance_Nn[rank, n - 1] == pytest.approx(float(wanted), rel=1e-10, abs=1e-300)


def test_pools_of_unequal_size_are_each_drawn_from_as_a_whole():
    rng = np.random.default_rng(0)
    pools = [
        [{"answer": int(rng.integers(3)), "score": rng.integers(9) / 8, "steps": 1} for _ in range(n)]
        for n in (3, 6, 5)
    ]
    report = report_of([record_of(pool) for pool in pools])
    assert (report["n_max"], report["largest_pool"], report["n_samples"]) == (3, 6, 14)
    for n in report["n"]:
        for key, result in (("best_of_n", chosen), ("weighted_vote", lambda subset: voted(subset, weighted=True))):
            wanted = np.mean([expected(pool, n, result) for pool in pools])
            assert report["rules"]["prod"][key]["value"][n - 1] == pytest.approx(wanted, abs=1e-12)


def test_sampled_votes_agree_with_enumerated_ones(monkeypatch):
    rng = np.random.default_rng(1)
    size = np.array([6, 8, 9, 7] * 5)
    classes, correct = rng.integers(-1, 4, (20, 9)), (rng.random((20, 9)) < 0.5) * 1.0
    log_weight_PNK = scipy.special.xlogy(1, rng.integers(0, 5, (20, 9, 3)) / 4)
    inputs = classes, correct, log_weight_PNK, size, 6
    exact = votes.vote_accuracy(*inputs, trials=2, seed=0)
    assert (exact.standard_error_nK == 0).all()
    monkeypatch.setattr(votes, "ENUMERATE", 0)
    sampled = votes.vote_accuracy(*inputs, trials=4000, seed=0)
    error = np.abs(sampled.value_PnK.mean(0) - exact.value_PnK.mean(0))
    # 18 estimates with a fixed seed: 4 standard errors; 1e-6 is float32's rounding of the mean where the s.e. is 0
    assert (error <= 4 * sampled.standard_error_nK + 1e-6).all()
    assert (sampled.standard_error_nK < 0.005).all()
    # the stated errors are of the size of the real ones
    assert np.sqrt((error**2).mean()) == pytest.approx(np.sqrt((sampled.standard_error_nK**2).mean()), rel=0.7)
    # at n = size there is one subset, whatever the order
    np.testing.assert_allclose(sampled.value_PnK[size == 6, -1], exact.value_PnK[size == 6, -1], atol=1e-6)


@pytest.mark.parametrize("enumerate", [10, 0])
def test_votes_weigh_by_ratio_however_small_the_weights(monkeypatch, enumerate):
    monkeypatch.setattr(votes, "ENUMERATE", enumerate)
    rng = np.random.default_rng(2)
    log_weight_PNK = scipy.special.xlogy(1, rng.integers(0, 5, (10, 7, 2)) / 4)  # with ties and zeros
    classes, correct, size = rng.integers(-1, 3, (10, 7)), (rng.random((10, 7)) < 0.5) * 1.0, np.full(10, 7)
    first, second = (
        votes.vote_accuracy(classes, correct, log_weight_PNK + np.log(scale), size, 7, trials=16, seed=0)
        for scale in (1.0, 2.0**-200)
    )
    np.testing.assert_array_equal(first.value_PnK, second.value_PnK)


def test_long_chains_of_low_scores_still_vote():
    """Forty steps at 0.05 and at 0.06: products of 9e-53 and 1e-49, the one chain outvoting the other two."""
    samples = [(1, 0.06), (2, 0.05), (2, 0.05)]
    pool = [{"steps": ["x"] * 40, "scores": [score] * 40, "answer": answer} for answer, score in samples]
    report = report_of([{"problem": "p", "answer": 1, "samples": pool}])
    # Of one sample a third is right. Of two, 1 wins wherever it is: two pairs of three. Of all, it wins.
    assert report["rules"]["prod"]["weighted_vote"]["value"] == pytest.approx([1 / 3, 2 / 3, 1])
    assert report["majority"]["value"] == pytest.approx([1 / 3, 1 / 3, 0])


def test_canonical_answers():
    same = [
        [18, 18.0, "18", " 18.0 ", "+18", "1.8e1"],
        [1000, "1,000", "1000.00"],
        ["x = 2", " x = 2\n"],
        ["-0.5", -0.5],
    ]
    classes = [votes.answer_classes(group).tolist() for group in same]
    assert classes == [[0] * len(group) for group in same]
    assert votes.answer_classes([None, "", "  ", float("nan")]).tolist() == [-1] * 4
    different = ["1,2", "12", "1,00", 100, "(1, 2)", "1/2", 0.5, "e", ".", "-", "nan", "inf", "18%", 18, True, 1]
    different += ["1e99999", "E2", "e2", ".e2"]  # an exponent of nothing is a name
    assert len({votes.canonical_answer(answer) for answer in different}) == len(different)
    refused(ValueError, "number", votes.canonical_answer, [1])


@given(st.one_of(st.text(max_size=8), st.integers(), st.floats()))
@settings(deadline=None)
def test_a_canonical_answer_is_its_own_canonical_form(answer):
    once = votes.canonical_answer(answer)
    assert votes.canonical_answer(once) == once


def test_a_file_without_answers_has_no_votes_but_all_else():
    samples = [{"steps": ["a"], "scores": [0.9], "correct": True}, {"steps": ["b"], "scores": [0.1], "correct": False}]
    report = report_of([{"problem": "p", "samples": samples}])
    assert report["majority"] is None
    assert report["rules"]["prod"]["weighted_vote"] is None
    assert report["rules"]["prod"]["best_of_n"]["value"] == [0.5, 1.0]
    show(BENCHMARK.tables(report), Console(record=True, quiet=True))


def test_bad_records_are_named():
    good = record_of([{"answer": 1, "score": 0.5, "steps": 2}])
    sample = good["samples"][0]
    for bad, message in [
        (good | {"samples": [sample | {"scores": [0.1, 1.5]}]}, "step 1"),
        (good | {"samples": [{"steps": ["x"], "answer": 1}]}, "record 2"),
        (good | {"samples": [sample, {"steps": ["x", "y"]}]}, "record 2"),
        ({"problem": "p", "steps": ["x"], "scores": [0.5]}, "record 2"),
        (good | {"answer": None}, "record 2"),
    ]:
        refused(ScoreError, message, report_of, [good, bad])
    refused(ScoreError, "records", report_of, [])


@pytest.mark.breadth
def test_the_real_pool_with_a_scorer_that_knows_nothing(shared_data, monkeypatch):
    """1,319 GSM8K problems x 19 chains: published mean 0.519, any-correct 0.883, majority vote 0.657."""
    path = shared_data / "pools/gsm8k_chatgpt_n19.jsonl"
    rng = np.random.default_rng(0)
    records = [record for _, record in find("pools").read(path, empty_samples="drop")]
    for record in records:
        for sample in record["samples"]:
            sample["scores"] = rng.random(len(sample["steps"])).tolist()
    monkeypatch.setattr(bon.baselines, "MOST_SAMPLES", 0)  # baselines that read text take most of the time
    report = report_of(records, trials=20)
    json.dumps(report, allow_nan=False)
    assert (report["n_problems"], report["n_max"], report["without_answer"]) == (1319, 19, 206)
    assert report["without_steps"] == 2  # they have no answer either, and take their places
    assert report["mean_accuracy"] == pytest.approx(0.519, abs=5e-4)
    assert report["pass_at_n"]["value"][-1] == pytest.approx(0.883, abs=5e-4)
    # Chains without an answer (0.8 %) cannot be chosen, so choosing blindly among the answered gains up to 0.003.
    random = np.array(report["baselines"]["random"]["value"])
    assert random[0] == pytest.approx(0.5189, abs=1e-4)
    assert (random >= random[0]).all()
    assert (random < random[0] + 0.004).all()
    for rule in RULES:
        curve = report["rules"][rule]["best_of_n"]
        assert (np.array(curve["low"]) < random).all()
        assert (random < np.array(curve["high"])).all()
    # The published vote takes the first of tied answers, this one their mean: 0.6528 by hand, 6 % of the problems tie.
    assert report["majority"]["value"][-1] == pytest.approx(0.652767, abs=1e-6)
    assert max(report["majority"]["standard_error"]) < 0.003


def test_pools_without_a_correct_sample_say_so_in_place_of_zeros():
    report = report_of([record_of([{"answer": 2, "score": 0.5, "steps": 1}, {"answer": 3, "score": 0.4, "steps": 1}])])
    (said,) = BENCHMARK.tables(report)
    assert "No sample of these 1 problems is correct" in said and "max_tokens" in said


def test_the_models_own_rule_is_marked():
    report = report_of([record_of([{"answer": 1, "score": 0.5, "steps": 1}, {"answer": 3, "score": 0.4, "steps": 1}])])
    first = next(iter(BENCHMARK.tables(report | {"own_rule": "prod"})))
    assert [row[0] for row in first.lines if row and "its own rule" in row[0]] == [
        "best by prod (its own rule)",
        "vote by prod (its own rule)",
    ]


@pytest.mark.parametrize(
    ("semantics", "scores", "weight"),
    [("value", [3.5, -1.0], "sigmoid"), ("implicit", [0.2, -0.3], "sigmoid"), ("advantage", [0.2, -0.3], "half"),
     ("advantage", [2.0, 0.1], "sigmoid"), ("value", [0.2, 0.9], "score")],
)  # fmt: skip
def test_semantics_say_what_stored_scores_are(tmp_path, semantics, scores, weight):
    samples = [{"steps": ["a"], "scores": [score], "correct": i == 0} for i, score in enumerate(scores)]
    record = {"problem": "p", "samples": samples, "semantics": semantics}
    (tmp_path / "f.jsonl").write_text(json.dumps(record) + "\n")
    assert bon._told_scale(tmp_path / "f.jsonl").weight == weight
    report = bon.run(bon.BestOfNOptions(input=tmp_path / "f.jsonl", to=tmp_path / "out.json"))
    assert report["rules"]["last"]["best_of_n"]["value"][-1] == float(scores[0] == max(scores))


def test_rewards_without_semantics_are_refused_with_the_way(tmp_path):
    samples = [{"steps": ["a"], "scores": [3.5], "correct": True}]
    (tmp_path / "f.jsonl").write_text(json.dumps({"problem": "p", "samples": samples}) + "\n")
    options = bon.BestOfNOptions(input=tmp_path / "f.jsonl", to=tmp_path / "out.json")
    refused(ScoreError, "write `semantics`", bon.run, options)
