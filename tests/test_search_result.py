"""Chain scores, votes and the record of a search, against values worked out by hand."""

import math

import numpy as np
import pytest
from refusing import refused
from toy_search import Script, Table

from jprm.methods.evaluate.best_of_n import best_of_n_report
from jprm.methods.search.beam import Beam
from jprm.methods.search.best_of_n import BestOfN
from jprm.methods.search.files import best, choose, record, vote
from jprm.methods.search.growing_tree import GrowingTree, Problem
from jprm.methods.search.lockstep import SearchConfig, search
from jprm.score.aggregate import RULES, by_every_rule, rank_keys
from jprm.tree import record_of, tree_of

TABLE = {(): ["a", "b", "c~", "a"], ("a",): ["The answer is 1."], ("b",): ["The answer is 2."]}
SCORES = {"a": 0.5, "b": 0.9, "c~": 1.0, "The answer is 1.": 0.6, "The answer is 2.": 0.8}


def run(method, table=TABLE, scores=SCORES, truth="1", choose_by="best", **options):
    config = SearchConfig(method, "prod", choose_by, **options)
    policy = Script(table, cost=options.pop("cost", None))
    ((_, tree),) = search([Problem("p", truth, {"id": 7})], policy, Table(scores), config)
    return tree, record(tree, config.rule, config.choose, method.kind, {"method": type(method).__name__}), policy


@pytest.mark.parametrize("rule", RULES)
def test_chain_scores_are_those_of_the_aggregation(rule):
    tree = GrowingTree(Problem("p"), 0, None)
    tree.parent, tree.text, tree.score = [-1, 0, 1, 0, -1], list("abcde"), [0.5, 0.0, 1.0, 0.25, math.nan]
    value_N, key_N = tree.chain_scores([0, 2, 3, 4, -1], rule)
    score_BP = np.array([[0.5, 0, 0], [0.5, 0, 1], [0.5, 0.25, 0]], np.float32)
    mask_BP = np.array([[1, 0, 0], [1, 1, 1], [1, 1, 0]], bool)
    expected = np.asarray(by_every_rule(score_BP, mask_BP)[rule])
    if rule == "sum_log_odds":
        expected = 1 / (1 + np.exp(-expected))
    np.testing.assert_allclose(value_N[:3], expected, rtol=1e-6)  # float32
    np.testing.assert_allclose(key_N[:3], rank_keys(score_BP, mask_BP)[rule], rtol=1e-6)
    assert np.isnan(value_N[3:]).all() and np.isnan(key_N[3:]).all()


def test_a_rule_of_probabilities_refuses_other_scores():
    tree = GrowingTree(Problem("p"), 0, None)
    tree.parent, tree.text, tree.score = [-1], ["a"], [-0.5]
    refused(ValueError, "'prod'", tree.chain_scores, [0], "prod")
    assert tree.chain_scores([0], "min")[0] == [-0.5]


def test_the_best_by_hand():
    yes, no = np.ones(3, bool), np.zeros(3, bool)
    assert best([0.1, 0.7, 0.7], yes) == 1
    assert best([0.1, 0.7, np.nan], np.array([True, False, True])) == 0  # an answer comes before a score
    assert best([0.1, 0.7, np.nan], no) == 1
    assert best([-np.inf, np.nan, -np.inf], yes) == 0  # a product of 0 is a score
    assert best([np.nan] * 3, yes) is None


def test_votes_by_hand():
    assert vote([0, 1, 1, -1, -1, -1], [1, 1, 1, 1, 1, 1]) == 1
    assert vote([0, 1, 1], [0.9, 0.3, 0.4]) == 0
    assert vote([0, 1, 0, 1], [0.1, 0.3, 0.2, 0.0]) == 0  # 0.1 + 0.2 ties with 0.3, the first to appear wins
    assert vote([-1, -1], [1, 1]) is None
    assert vote([0, 1, 0], [1e-14, 3e-14, 1e-14]) == 1  # products of many scores: what counts is their ratio
    assert vote([1, 0, 1], [1e-14, 3e-14, 2e-14]) == 0 and vote([1, 0], [0.0, 0.0]) == 0  # and they tie as others do


def test_best_of_n_and_votes_on_one_pool():
    tree, found, policy = run(BestOfN(4))
    assert [call[1:] for call in policy.calls] == [(4, "end", 0)]
    # Chains: a 1 (0.30) twice, b 2 (0.72), and one cut off, whose score would be the best.
    assert found["search"]["chosen"] == 1 and found["search"]["score"] == pytest.approx(0.72)
    assert (found["search"]["answer"], found["search"]["correct"]) == ("2", False)
    for how, answer, score in (("majority", "1", 0.30), ("weighted", "2", 0.72)):
        result = choose(tree, "prod", how, {1: ("1", True), 3: ("2", False)})
        assert (result.answer, result.score) == (answer, pytest.approx(score))


def test_a_low_score_is_kept_as_it_is():
    _, result, _ = run(BestOfN(4), scores=SCORES | {"a": 3e-9, "b": 2e-8})
    assert [sample["scores"][0] for sample in result["samples"]] == [3e-9, 2e-8, 1.0, 3e-9]


def test_a_pool_is_read_by_the_evaluation():
    _, result, _ = run(BestOfN(4))
    assert record_of(tree_of(result)) == result
    assert [sample["steps"][0] for sample in result["samples"]] == ["a", "b", "c~", "a"]
    assert [sample["correct"] for sample in result["samples"]] == [True, False, False, True]
    assert result["samples"][2]["answer"] is None and result["samples"][2]["finish_reason"] == "length"
    assert result["samples"][0] | {"scores": None} == {
        "steps": ["a", "The answer is 1."], "answer": "1", "answer_rule": "statement", "correct": True, "scores": None,
        "finish_reason": "stop", "tokens": 20, "logprob": -1.0}  # fmt: skip
    assert result["id"] == 7
    report = best_of_n_report([tree_of(result)], seed=0)
    assert report["rules"]["prod"]["best_of_n"]["value"][-1] == 0  # b, which is wrong, as chosen above
    assert report["majority"]["value"][-1] == 1 and report["without_answer"] == 1


def test_a_tree_holds_every_draw():
    _, result, _ = run(Beam(2, 2), {k: v[:2] for k, v in TABLE.items()})
    assert record_of(tree_of(result)) == result
    # Four first draws are two steps drawn twice, and each of them is drawn from twice, with one result.
    assert [(node["text"], len(node["draws"])) for node in result["nodes"]] == [
        ("a", 2), ("b", 2), ("The answer is 2.", 2), ("The answer is 1.", 2)]  # fmt: skip
    node = result["nodes"][result["search"]["chosen"]]
    assert (node["answer"], node["correct"], node["parent"]) == ("2", False, 1)
    assert node["draws"] == [{"from": 1, "finish_reason": "stop", "tokens": 10, "logprob": -1.0}] * 2
    assert result["search"]["policy_tokens"] == 80 == sum(d["tokens"] for n in result["nodes"] for d in n["draws"])


def test_scores_that_are_not_numbers_are_marked():
    tree, result, _ = run(BestOfN(4), scores={})
    assert (result["search"]["chosen"], result["search"]["unscored_steps"]) == (None, 5)
    assert result["search"]["reason"] == "no finished chain has a finite score at every step"
    assert len(result["samples"]) == 4 and all(sample["unscored"] for sample in result["samples"])
    tree_of(result)
    answers = {1: ("1", True), 3: ("2", False)}
    assert choose(tree, "prod", "majority", answers).answer == "1"  # a majority asks for no score
    _, result, _ = run(Beam(2, 2), scores={})
    assert result["search"]["chosen"] is None and [node["text"] for node in result["nodes"]] == ["a", "b", "c~"]


def test_a_problem_without_an_answer_has_a_result_that_is_not_judged():
    _, result, _ = run(BestOfN(4), truth=None)
    assert result["search"]["answer"] == "2" and result["search"]["correct"] is None
    assert "answer" not in result and not any("correct" in sample for sample in result["samples"])


def test_empty_chains_and_failures_are_counted():
    _, result, _ = run(BestOfN(4), TABLE | {(): ["", "!", "a", "b"]})
    assert len(result["samples"]) == 2
    assert (result["search"]["empty"], result["search"]["failed"]) == (1, 1)
    assert result["empty_samples"] == 1  # an evaluation of the record draws from three samples
    assert best_of_n_report([tree_of(result)], seed=0)["n_samples"] == 3
    assert result["search"]["error"] == "the server is down"
    tree, result, _ = run(BestOfN(4), {(): [""]})
    assert result is None and len(tree.draws) == 4
