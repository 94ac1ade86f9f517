"""Scores that are no probabilities: thresholds, best of n and votes against brute force."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from refusing import refused

from jprm.apps import cli
from jprm.io.jsonl import write_records
from jprm.methods.evaluate.benchmark import Request
from jprm.methods.evaluate.best_of_n import best_of_n_report
from jprm.methods.evaluate.processbench import average_f1, processbench_report
from jprm.methods.evaluate.steps import figures as steps_figures
from jprm.methods.evaluate.steps import steps_report
from jprm.methods.formats.adapters.published import PUBLISHED
from jprm.methods.policy.protocol import Problem
from jprm.methods.search.growing_tree import GrowingTree
from jprm.methods.search.jobs import choose
from jprm.methods.search.particles import odds
from jprm.score.scale import PROBABILITY, PROBABILITY_RULES
from jprm.tree import tree_of

PURE, PQM = PUBLISHED["pure"].score_scale, PUBLISHED["pqm"].score_scale
REDUCE = {
    "min": np.min,
    "soft_min": lambda x: (x * np.exp(-x / 0.1)).sum() / np.exp(-x / 0.1).sum(),
    "last": lambda x: x[-1],
    "mean": np.mean,
    "max": np.max,
}


def pools(seed, shift):
    """Four pools of five samples of two steps, all scores below 0 with shift -1."""
    rng = np.random.default_rng(seed)
    drawn = []
    for p in range(4):
        samples = [
            {"steps": ["a", "b"], "scores": (rng.random(2) + shift).round(2).tolist(), "answer": answer,
             "correct": answer == "1"}
            for answer in rng.choice(["1", "2", "3"], 5).tolist()
        ]  # fmt: skip
        drawn.append({"problem": f"p{p}", "answer": "1", "samples": samples})
    return drawn


@pytest.mark.parametrize("rule", REDUCE)
@pytest.mark.parametrize("scale", [PURE, PQM])
def test_best_of_n_and_votes_take_scores_below_0(rule, scale):
    records = pools(0, -1.0)
    report = best_of_n_report(map(tree_of, records), 0, scale=scale)
    chosen, voted = np.zeros((4, 5)), np.zeros((4, 5))
    for p, record in enumerate(records):
        score = np.array([REDUCE[rule](np.array(x["scores"], np.float32)) for x in record["samples"]], float)
        right = np.array([x["correct"] for x in record["samples"]], float)
        answer = np.array([x["answer"] for x in record["samples"]])
        weight = (1 + score) / 2 if scale is PURE else 1 / (1 + np.exp(-score))
        for n in range(1, 6):
            subsets = [list(s) for s in itertools.combinations(range(5), n)]
            chosen[p, n - 1] = np.mean([right[s][score[s] == score[s].max()].mean() for s in subsets])
            for s in subsets:
                total = {a: round(weight[s][answer[s] == a].sum(), 9) for a in set(answer[s])}
                top = [a for a in total if total[a] == max(total.values())]
                voted[p, n - 1] += np.mean([a == "1" for a in top]) / len(subsets)
    np.testing.assert_allclose(report["rules"][rule]["best_of_n"]["value"], chosen.mean(0), atol=1e-6)
    np.testing.assert_allclose(report["rules"][rule]["weighted_vote"]["value"], voted.mean(0), atol=1e-6)


def test_rules_that_multiply_take_the_probability_that_a_difference_is_of():
    """PURE's score is p - (1 - p): by its weight a product is that of the probabilities p."""
    as_p, as_difference = pools(1, 0.0), pools(1, 0.0)
    for sample in (x for record in as_difference for x in record["samples"]):
        sample["scores"] = [2 * score - 1 for score in sample["scores"]]
    of_p = best_of_n_report(map(tree_of, as_p), 0)["rules"]
    of_difference = best_of_n_report(map(tree_of, as_difference), 0, scale=PURE)["rules"]
    for rule in PROBABILITY_RULES:
        np.testing.assert_allclose(of_difference[rule]["best_of_n"]["value"], of_p[rule]["best_of_n"]["value"])


def test_processbench_takes_the_natural_threshold():
    """Scores around 0 whose signs are right: at 0 all is found, at 0.5 every first step is called wrong."""
    cases = [([0.3, 0.2], -1) if i % 2 else ([0.3, -0.2], 1) for i in range(12)]
    records = [
        {"problem": f"p{i}", "steps": ["a", "b"], "scores": scores, "first_error": first}
        for i, (scores, first) in enumerate(cases)
    ]
    scored = {"math": list(map(tree_of, records))}
    report = processbench_report(scored, "math", 0, PURE.threshold)["math"]
    assert (report["f1"], report["threshold"]) == (1.0, 0.0)
    assert average_f1(scored, "math", 0, ["math"], PURE.threshold)["half"]["value"] == 1.0
    assert processbench_report(scored, "math", 0)["math"]["f1"] == 0.0


@pytest.mark.parametrize(("scale", "winner"), [(PQM, 1), (PROBABILITY, None)])
def test_a_weighted_vote_of_scores_below_0_is_no_vote_for_the_first(scale, winner):
    tree = grown([-3.0, -1.0, -1.0], scale)
    answers = {draw.end: (answer, None) for draw, answer in zip(tree.draws, ["5", "7", "7"], strict=True)}
    if winner is None:
        refused(ValueError, "weights", choose, tree, "last", "weighted", answers)
    else:
        assert choose(tree, "last", "weighted", answers).answer == "7"


def grown(scores, scale, steps=1):
    """Returns a tree of finished chains with `steps` steps, each step with its chain's score."""
    from jprm.methods.policy.protocol import Sample

    tree = GrowingTree(Problem("p", "7"), 0, None, scale)
    for i, score in enumerate(scores):
        tree.add(-1, Sample(tuple(f"step {i}.{j}" for j in range(steps)), 1, "stop"), "end")
        tree.score[i * steps : (i + 1) * steps] = [score] * steps
    return tree


FAR = [
    (PROBABILITY, "prod", 0.4, 0.3, 1000),
    (PROBABILITY, "sum_log_odds", 0.3, 0.2, 2000),
    (PQM, "last", -50.0, -60.0, 1),
    (PQM, "min", -900.0, -910.0, 1),
    (PQM, "prod", -900.0, -910.0, 1),
    (PQM, "prod", -30.0, -40.0, 100),
]
"""(scale, rule, good score, bad score, steps) whose vote weights all round to 0 in floats."""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("scale", "rule", "good", "bad", "steps"), FAR)
def test_a_vote_of_weights_below_all_floats_is_no_tie(scale, rule, good, bad, steps):
    """One chain at `good` outweighs two at `bad` in a search's vote, best of n, and particles.

    A fourth chain, which is better but has no answer, changes nothing.
    """
    answers, scores = ["7", "5", "5", None], [good, bad, bad, 0.9 if scale == PROBABILITY else 0.0]
    tree = grown(scores, scale, steps)
    by_end = {draw.end: (answer, None) for draw, answer in zip(tree.draws, answers, strict=True)}
    assert choose(tree, rule, "weighted", by_end).answer == "7"
    samples = [
        {"steps": ["a"] * steps, "scores": [score] * steps, "answer": answer, "correct": answer == "7"}
        for answer, score in zip(answers, scores, strict=True)
    ]
    record = {"problem": "p", "answer": "7", "samples": samples}
    report = best_of_n_report([tree_of(record), tree_of(record | {"problem": "q"})], 0, scale=scale)
    assert report["rules"][rule]["weighted_vote"]["value"][-1] == report["rules"][rule]["best_of_n"]["value"][-1] == 1
    ends = [draw.end for draw in tree.draws[:3]]
    weights = odds(scale.log_votes(tree.chain_scores(ends, rule)[1], rule).tolist(), 1.0)
    assert weights[0] == 1 and max(weights[1:]) < 1e-3


def test_particles_weigh_a_product_of_log_odds_once():
    """Two steps at log odds 0 have the product 1/4, so odds of 1 to 3, a third of even odds."""
    tree = grown([0.0], PQM, 2)
    key_N = tree.chain_scores([1], "prod")[1]
    assert odds([*PQM.log_votes(key_N, "prod").tolist(), np.log(0.5)], 1.0) == pytest.approx([1 / 3, 1])


def test_step_figures_take_the_natural_threshold():
    """PURE's 2p - 1 at 0 judges as p does at 0.5; the old 0.5 called every p below 0.75 wrong."""
    rng = np.random.default_rng(3)
    of_p, of_difference = [], []
    for i in range(20):
        p = rng.random(3).round(2)
        chain = {"problem": f"p{i}", "steps": ["a", "b", "c"], "labels": rng.integers(0, 2, 3).tolist()}
        of_p.append(tree_of(chain | {"semantics": "correctness", "scores": p.tolist()}))
        of_difference.append(tree_of(chain | {"semantics": "correctness", "scores": (2 * p - 1).tolist()}))
    expected, old = (steps_report(of_p, "drop", 0, threshold) for threshold in (0.5, 0.75))
    report = steps_figures(Request({"chains": of_difference}, scale=PURE))
    for key in ("accuracy", "first_error", "auroc", "alternatives"):
        assert report[key] == expected[key]
    assert (report["threshold"], expected["threshold"]) == (0.0, 0.5)
    assert report["accuracy"] != old["accuracy"] and report["first_error"] != old["first_error"]


def test_stored_scores_are_read_on_their_own_scale(tmp_path, capsys):
    """Scores below 0 are refused with the fix; `--adapter`, or the request beside the file, says what they mean."""
    path, out = tmp_path / "scored.jsonl", tmp_path / "out.json"
    write_records(path, pools(0, -1.0))
    call = ["eval", "best-of-n", "--input", str(path), "--output", str(out)]
    assert cli.main(call) == 2 and "adapter" in capsys.readouterr().err
    assert not out.exists()
    expected = best_of_n_report(map(tree_of, pools(0, -1.0)), 0, scale=PURE) | {"too_long": 0}
    assert cli.main([*call, "--adapter", "pure"]) == 0
    assert json.loads(out.read_text()) == json.loads(json.dumps(expected))
    out.unlink()
    (tmp_path / "scored.jsonl.info.json").write_text(json.dumps({"version": 1, "scale": dataclasses.asdict(PURE)}))
    assert cli.main(call) == 0
    assert json.loads(out.read_text()) == json.loads(json.dumps(expected))
