"""Synthetic scorers with one known flaw each: its diagnostic finds it and passes the clean scorer."""

import json

import numpy as np
import pytest
from refusing import refused

from experiments.studies.drift import drift
from jprm.methods.evaluate.best_of_n import pools_of
from jprm.methods.evaluate.scored import ScoreError
from jprm.methods.studies import diagnostics as dg
from jprm.tree import tree_of

SEEDS = range(3)


def squash(x):
    return 1 / (1 + np.exp(-x))


def scored(rng, labels, correct, flaw=None):
    """A clean scorer's log-odds are 2 at right steps and -1 at wrong ones, with noise of 1."""
    odds = np.where(np.array(labels) > 0, 2.0, -1.0) + rng.normal(size=len(labels))
    if flaw == "last_step":
        odds[-1] -= 1.5
    if flaw == "length":
        odds += 0.3 * (len(labels) - 6)
    if flaw == "outcome":
        odds = np.where(correct, 2.0, -1.0) + rng.normal(size=len(labels))
    return squash(odds).tolist()


def chains(n, seed, flaw=None):
    rng = np.random.default_rng(seed)
    records = []
    for i in range(n):
        length = int(rng.integers(2, 10))
        error = int(rng.integers(length)) if rng.random() < 0.5 else -1
        labels = [float(error < 0 or k < error) for k in range(length)]
        correct = error < 0 or rng.random() < 0.3
        records.append({"problem": f"p{i}", "steps": ["step"] * length, "labels": labels, "first_error": error,
                        "correct": correct, "scores": scored(rng, labels, correct, flaw)})  # fmt: skip
    return records


def pools(n, seed, flaw=None, size=12):
    """Wrong chains are longer on average, as they are: no flaw of the scorer."""
    rng = np.random.default_rng(seed)
    records = []
    for i in range(n):
        samples = []
        for _ in range(size):
            correct = rng.random() < 0.5
            labels = [1] * int(rng.integers(3, 8)) if correct else [1] * int(rng.integers(2, 8)) + [0, 0]
            samples.append({"steps": ["step"] * len(labels), "correct": bool(correct),
                            "scores": scored(rng, labels, correct, flaw)})  # fmt: skip
        records.append({"problem": f"p{i}", "samples": samples})
    return records


def lowest_at_end(records, seed):
    return dg.lowest_at_end(list(map(tree_of, records)), seed)


def pooled(records):
    return pools_of(map(tree_of, records))


def drift_of(before, after, seed):
    return drift(list(map(tree_of, before)), list(map(tree_of, after)), seed)


def diagnostics_report(chains, pools, threshold, seed):
    pools = {name: list(map(tree_of, records)) for name, records in pools.items()}
    return dg.diagnostics_report(None if chains is None else list(map(tree_of, chains)), pools, threshold, seed)


def test_lowest_at_end_by_hand():
    def chain(scores, labels=None):
        return {"problem": str(scores), "steps": ["s"] * len(scores), "labels": labels or [1] * len(scores),
                "scores": scores}  # fmt: skip

    report = lowest_at_end([chain([0.2, 0.1]), chain([0.5, 0.5]), chain([0.1, 0.9, 0.2]), chain([0.3]),
                               chain([0.9, 0.1], [1, 0])], 0)  # fmt: skip
    assert report["n"] == 3 and report["share"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert report["expected"] == pytest.approx((1 / 2 + 1 / 2 + 1 / 3) / 3)
    with pytest.raises(ScoreError):
        lowest_at_end([chain([0.3])], 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_length_slopes(seed):
    clean = dg.length_slopes(pooled(pools(150, seed)), seed)
    # Only rules that do not fall with length by construction can be silent.
    assert not clean["last"]["finding"] and not clean["mean"]["finding"]
    assert clean["prod"]["finding"] and clean["prod"]["slope"] < 0
    flawed = dg.length_slopes(pooled(pools(150, seed, "length")), seed)
    assert flawed["last"]["finding"] and flawed["mean"]["finding"] and flawed["last"]["slope"] > 0


def test_length_slope_by_hand():
    """Two problems: within each the slope is 0.1 a step, across them it is negative."""
    records = [
        {"problem": f"p{p}", "samples": [{"steps": ["s"] * k, "scores": [0.6 - 0.4 * p + 0.1 * (k - 2 - 5 * p)] * k,
         "correct": True} for k in (1 + 5 * p, 3 + 5 * p)]}
        for p in (0, 1)
    ]  # fmt: skip
    report = dg.length_slopes(pooled(records), 0)
    assert report["mean"]["slope"] == pytest.approx(0.1, abs=1e-6)  # float32 scores
    assert report["mean"]["correlation"]["value"] == pytest.approx(1, abs=1e-6)


def test_the_peak_is_that_of_other_problems():
    """A problem in several records is in one half: written down twice, all problems give what they give once."""
    once = pools(20, seed=0)
    twice = [record for record in once for _ in range(2)]
    one, two = (dg.over_optimisation(pooled(records), 0)["mean"] for records in (once, twice))
    assert two["value"] == pytest.approx(one["value"])
    assert two["drop"]["value"] == pytest.approx(one["drop"]["value"])
    assert one["value"][one["peak"] - 1] == max(one["value"]) and 1 <= one["peak"] <= 12


def test_drift_verdicts():
    before = chains(200, 0)
    moved = [r | {"scores": [s**0.5 for s in r["scores"]]} for r in chains(200, 1)]
    assert drift_of(before, moved, 0)["verdict"] == "recalibrate"
    broken = chains(200, 2, "outcome")
    assert drift_of(before, broken, 0)["verdict"] == "retrain"
    unlabelled = [{key: record[key] for key in ("problem", "steps", "scores")} for record in moved]
    report = drift_of(before, unlabelled, 0)
    assert report["verdict"] == "shifted" and report["finding"] and report["p"] == 1 / 1000
    json.dumps(report, allow_nan=False)


def test_drift_between_two_policies():
    """Their samples have no step labels: whether chains end right tells whether their ranking holds."""
    before = pools(100, 0)
    moved, broken = pools(100, 1), pools(100, 2)
    for record in moved:
        record["samples"] = [s | {"scores": [x**0.3 for x in s["scores"]]} for s in record["samples"]]
    for record in broken:
        record["samples"] = [s | {"scores": [1 - x for x in s["scores"]]} for s in record["samples"]]
    for after, verdict in ((pools(100, 3), "same"), (moved, "recalibrate"), (broken, "retrain")):
        report = drift_of(before, after, 0)
        assert (report["auroc_of"], report["verdict"]) == ("chains", verdict)


def relabelled(n, seed, power, centre=0.5, name="p"):
    """Problems of six steps, correct with probability score^power; scores of a problem are alike."""
    rng = np.random.default_rng(seed)
    records = []
    for i in range(n):
        scores = squash(centre + 0.5 * rng.normal() + rng.normal(size=6))
        labels = (rng.random(6) < scores**power).astype(float)
        records.append({"problem": f"{name}{i}", "steps": ["s"] * 6, "labels": labels.tolist(),
                        "scores": scores.tolist()})  # fmt: skip
    return records


@pytest.mark.parametrize("name", ["p", "q"])
def test_drift_tells_that_calibration_is_lost(name):
    """Scores are distributed as before, and rank as before, but mean less: on the same problems or on others."""
    for seed in range(5):
        before, after = relabelled(100, [seed, 7], 1.0), relabelled(100, [seed, 9], 3.0, name=name)
        report = drift_of(before, after, seed)
        assert report["p"] >= 0.01 or report["ks"] <= report["margin"]  # the scores alone do not tell
        assert report["verdict"] == "recalibrate" and report["calibration_of"] == "steps"
        assert report["calibration_gap"] > 2 * report["calibration_gap_if_unchanged"]
        unlabelled = [{key: record[key] for key in ("problem", "steps", "scores")} for record in after]
        assert drift_of(before, unlabelled, seed)["calibration_of"] is None


def test_drift_seldom_calls_an_unchanged_calibration_lost(monkeypatch):
    """On equal distributions the test is exact: of 80 p-values, 4 are expected at 0.05 and 16 at 0.2."""
    monkeypatch.setattr("experiments.studies.drift.PERMUTATIONS", 99)
    p, moved = [], 0
    for seed in range(80):
        before, after = relabelled(30, [seed, 7], 1.0), relabelled(30, [seed, 9], 1.0, name="pq"[seed % 2])
        p.append(drift_of(before, after, seed)["calibration_p"])
    for seed in range(40):  # other scores of one meaning
        report = drift_of(relabelled(30, [seed, 7], 1.0), relabelled(30, [seed, 9], 1.0, 1.5, "q"), seed)
        moved += report["calibration_p"] <= 0.05
    # within three standard errors, 1.9 and 3.6; of `moved` 2 are expected
    assert (np.array(p) <= 0.05).sum() <= 9 and (np.array(p) <= 0.2).sum() <= 26 and moved <= 6


def test_drift_p_values_are_uniform_under_dependence():
    """Steps of a problem share a score: a test that took steps for independent would find drift nearly always."""
    p = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        files = [
            [
                {"problem": f"{side}{i}", "steps": ["s"] * 20, "scores": [x] * 20}
                for i, x in enumerate(rng.random(15).tolist())
            ]
            for side in "ab"
        ]
        p.append(drift_of(*files, seed)["p"])
    # a share of 60 at 0.2, within 3 standard errors of 0.052
    assert 0.045 < np.mean(np.array(p) <= 0.2) < 0.355


def test_drift_of_a_file_from_itself():
    report = drift_of(chains(30, 0), chains(30, 0), 0)
    assert (report["ks"], report["p"], report["verdict"]) == (0, 1, "same")


def test_all_at_once():
    report = diagnostics_report(chains(100, 0), {"a": pools(20, 0), "b": pools(20, 1)}, 0.5, 0)
    json.dumps(report, allow_nan=False)
    assert set(report) == {"lowest_at_end", "wrong_process", "length_slopes", "over_optimisation"}
    assert set(report["length_slopes"]) == {"a", "b"} and "prod" in report["over_optimisation"]["b"]
    assert set(diagnostics_report(None, {"a": pools(20, 0)}, 0.5, 0)) == {"length_slopes", "over_optimisation"}
    hopeless = [record for record in chains(100, 0) if record["first_error"] >= 0]
    for name in ("lowest_at_end", "wrong_process"):
        assert "not_computed" in diagnostics_report(hopeless, {}, 0.5, 0)[name]
        assert "not_computed" in diagnostics_report([], {}, 0.5, 0)[name]


def test_drift_of_trees():
    """A chain written as a tree record has the drift of the chain."""
    before, after = chains(60, 0), chains(60, 1, "outcome")

    def tree(record):
        columns = zip(record["steps"], record["labels"], record["scores"], strict=True)
        nodes = [{"parent": i - 1, "text": t, "label": x, "score": s} for i, (t, x, s) in enumerate(columns)]
        return {"problem": record["problem"], "nodes": nodes}

    assert drift_of(list(map(tree, before)), list(map(tree, after)), 0) == drift_of(before, after, 0)
    refused(ScoreError, "before, record 0, step 0", drift_of, [{"problem": "p", "steps": ["s"]}], after, 0)
