"""Choosers at equal cost: what a budget buys, against a count by hand."""

import dataclasses

import numpy as np
import pytest
from refusing import refused

import jprm
from experiments.studies.cost import Chooser, at_equal_cost, equal_cost_report, parameters
from jprm.io.jsonl import write_records
from jprm.methods.evaluate.run import scored_trees, source

PROBLEMS = ["a", "b"]
RISING_Pn = np.array([[0.0, 0.2, 0.4, 0.6], [0.1, 0.3, 0.5, 0.7]])


def test_a_budget_buys_whole_samples():
    cheap = Chooser("cheap", RISING_Pn, 1.0 * np.arange(1, 5))
    dear = Chooser("dear", RISING_Pn + 0.1, 1.5 * np.arange(1, 5))
    report = at_equal_cost([cheap, dear], [1, 2, 3, 100], PROBLEMS, seed=0)
    first, second = report["choosers"]
    assert first["n"] == [1, 2, 3, 4]
    # 1 does not pay for a scored sample: one is taken as it comes; 2 pays for one, 3 for two, 100 for all four.
    assert second["n"] == [1, 1, 2, 4] and second["cost"] == [1.5, 1.5, 3, 6]
    np.testing.assert_allclose(first["value"], RISING_Pn.mean(0))
    np.testing.assert_allclose(second["value"], (RISING_Pn + 0.1).mean(0)[[0, 0, 1, 3]])
    # Both problems differ by the same, so the draws of the paired difference show no spread: its bound is of 2 ties.
    np.testing.assert_allclose(second["less"]["value"], [0.1, -0.1, -0.1, 0.1], atol=1e-6)
    np.testing.assert_allclose(second["less"]["low"], [-0.987, -1.187, -1.187, -0.987], atol=1e-3)


def test_a_budget_below_a_sample_is_refused():
    with pytest.raises(ValueError, match="budget"):
        at_equal_cost([Chooser("x", RISING_Pn, np.arange(1.0, 5))], [0.5, 2], PROBLEMS, seed=0)


def test_costs_are_tokens_times_parameters(tiny_run, tmp_path, one_device):
    """Two samples that are alike are written twice, and scored once where both are drawn."""
    same = {"steps": ["one two", "three"], "answer": "1", "correct": True, "tokens": 7}
    other = {"steps": ["four"], "answer": "2", "correct": False, "tokens": 3}
    write_records(tmp_path / "pool.jsonl", [{"problem": f"problem {i}", "samples": [same, same, other]} for i in "ab"])
    prm = jprm.load(tiny_run.folder)
    scored = scored_trees(prm, tmp_path / "pool.jsonl", source("pools"), tmp_path / "scores")
    report = equal_cost_report({"tiny": scored}, {"tiny": prm}, 1e6, None, seed=0)
    assert report["policy_tokens"] == pytest.approx((7 + 7 + 3) / 3)
    ids = prm.layout.problem("problem a"), *(prm.layout.step(step, 0) for step in ("one two", "three", "four"))
    problem, long, short = len(ids[0]), len(ids[1]) + len(ids[2]), len(ids[3])
    expected = problem + np.array([2 / 3 * long + 1 / 3 * short, long + 2 / 3 * short, long + short])
    np.testing.assert_allclose(report["scorers"]["tiny"]["tokens"], expected)
    majority, best, _ = report["flops"]["choosers"]
    np.testing.assert_allclose(majority["cost"], 2e6 * 17 / 3 * np.array([1, 2, 3]))
    cost_n = 2e6 * 17 / 3 * np.array([1, 2, 3]) + 2 * parameters(prm) * expected
    np.testing.assert_allclose(best["cost"], cost_n[np.array(best["n"]) - 1])
    config = prm.config
    in_layer = (
        2 * config.width * config.head_dim * (config.heads + config.kv_heads) + 3 * config.width * config.mlp_width
    )
    assert parameters(prm) >= config.layers * in_layer


def test_seconds_are_measured_and_a_majority_needs_answers(tiny_run, tmp_path, one_device):
    sample = {"steps": ["one"], "correct": True, "answer": "1"}
    records = [{"problem": "problem", "samples": [sample, sample | {"answer": "2", "correct": False}]}]
    write_records(tmp_path / "pool.jsonl", records)
    prm = jprm.load(tiny_run.folder)
    scored = scored_trees(prm, tmp_path / "pool.jsonl", source("pools"), tmp_path / "scores")
    report = equal_cost_report({"tiny": scored}, {"tiny": prm}, 1e6, 100.0, seed=0)
    majority, best, _ = report["seconds"]["choosers"]
    # No `tokens` in the samples: as the tokenizer counts the step.
    assert majority["cost"][0] == pytest.approx(len(prm.layout.step("one", 0)) / 100)
    assert best["cost"][0] > majority["cost"][0]
    nodes = [tuple(dataclasses.replace(node, extra={}) for node in tree.nodes) for tree in scored]
    nameless = [dataclasses.replace(tree, nodes=replaced) for tree, replaced in zip(scored, nodes, strict=True)]
    refused(ValueError, "no `answer`", equal_cost_report, {"tiny": nameless}, {"tiny": prm}, 1e6, None, seed=0)


@pytest.mark.parametrize("count", [0.0, -1.0, float("nan"), float("inf")])
def test_costs_that_are_none_are_refused(count):
    refused(ValueError, "policy_parameters", equal_cost_report, {}, {}, count, None, 0)
    refused(ValueError, "policy_tokens_per_second", equal_cost_report, {}, {}, 1e9, count, 0)
