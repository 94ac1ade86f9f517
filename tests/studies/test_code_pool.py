"""The pool of programs: choices in closed form, pass@k by brute force, and programs judged in the sandbox."""

import itertools

import numpy as np
import pytest

from experiments.code_pool import choose, judged, prm
from experiments.objectives import heads
from jprm.methods.verify.sandbox import refusal
from jprm.tree import tree_of, with_scores


def test_pass_at_k_is_the_mean_over_subsets():
    rng = np.random.default_rng(0)
    for n, k in ((5, 1), (6, 2), (7, 5), (6, 6)):
        correct = rng.random(n) < 0.4
        subsets = [correct[list(subset)].any() for subset in itertools.combinations(range(n), k)]
        assert choose.pass_at(correct, k) == pytest.approx(np.mean(subsets))
    assert choose.pass_at(np.ones(4, bool), 2) == 1 and choose.pass_at(np.zeros(4, bool), 4) == 0


def sample(passes, behaviour, correct):
    return {"passes": passes, "behaviour": behaviour, "correct": correct, "steps": ["return 1"]}


POOL = {
    "problem": "p", "weights": [3, 1, 1],
    "samples": [sample([0, 1], "a", True), sample([0, 1], "a", False), sample([0, 1, 2], "b", False),
                sample([], None, False), sample([], None, False), sample([], None, False)],
}  # fmt: skip


def test_choices_in_closed_form():
    # a group's score is the root of its number times its tests: sqrt(2) * 4, 1 * 5, 0
    np.testing.assert_allclose(choose.dual_agreement(POOL), [np.sqrt(2) * 4] * 2 + [5, 0, 0, 0])
    assert choose.most_tests(POOL).tolist() == [4, 4, 5, 0, 0, 0]
    assert choose.share(POOL).tolist() == [2, 2, 1, 0, 0, 0]
    assert choose.share(POOL, np.array([1, 2, 5, 9, 9, 9]) / 8).tolist() == [3 / 8, 3 / 8, 5 / 8, 0, 0, 0]
    correct = np.array([sample["correct"] for sample in POOL["samples"]])
    assert choose.chosen(choose.dual_agreement(POOL), correct) == 0.5
    assert choose.chosen(choose.most_tests(POOL), correct) == 0
    keys = {"share": [choose.share(POOL)] * 2, "dual agreement": [-choose.share(POOL)] * 2}
    report = choose.report([POOL, {**POOL, "problem": "q"}], keys)
    assert report["chosen"]["dual agreement"]["over_share"]["value"] == pytest.approx(-1 / 2)
    assert report["pass_at"]["1"]["value"] == pytest.approx(1 / 6)
    assert report["chosen"]["share"]["gain"]["value"] == pytest.approx(1 / 2 - 1 / 6)


def test_the_models_tests_are_the_first_assertions_that_compile():
    text = "f(1) == 2, 'why'\nassert f(2) == 3\nassert f(\nassert g(1)\nassert f(3) == 4\n\ndef h(): pass"
    counts = {"assert f(1) == 2": 1, "assert f(2) == 3": 2, "assert f(3) == 4": 1}
    assert judged.tests_of([text, "f(2)==3"], "f") == counts


@pytest.mark.skipif(bool(refusal()), reason=str(refusal()))
def test_programs_are_judged_by_both_kinds_of_tests():
    hidden = "def check(f):\n    assert f(3) == 4\ncheck(f)\n"
    bodies = ["    return x + 1", "    return 2 * x", "    while x < 3: pass\n    return x + 1", "", "    return 2 * x"]
    tests = {"assert f(1) == 2": 5, "assert f(3) == 4": 1}
    pool = judged.judged(judged.HumanEvalProblem("def f(x):\n", "f", hidden, bodies, tests))
    assert [item["correct"] for item in pool["samples"]] == [True, False, True, False, False]
    assert [item["passes"] for item in pool["samples"]] == [[0, 1], [0], [1], [], [0]]  # the third hangs at f(1)
    assert pool["samples"][1] == pool["samples"][4] and pool["samples"][3]["steps"] == [judged.NOTHING]
    assert pool["weights"] == [5, 1]


def test_the_pool_is_read_whole(shared_data):
    problems = judged.read(shared_data / "code")
    assert len(problems) == 164 and {len(problem.programs) for problem in problems} == {100}
    assert sum(len(problem.tests) for problem in problems) == 7795


def test_each_half_is_scored_by_what_was_trained_on_the_other(monkeypatch):
    trees = [
        tree_of({"problem": f"p{i}", "samples": [{"steps": ["a"] * (1 + i % 3), "correct": True}]}) for i in range(11)
    ]
    sizes = np.array([len(tree.nodes) for tree in trees])
    of_node = np.repeat(np.arange(11), sizes)
    known = heads.Known(trees, sizes, of_node[:, None].astype(np.float16))

    def fitted(experiment, train, fit):
        seen = {tree.problem for tree in train.trees}
        assert len(seen) in (5, 6)

        def score(test):
            assert not seen & {tree.problem for tree in test.trees}
            parts = np.split(test.state_ND[:, 0], np.cumsum(test.size_K)[:-1])
            return [with_scores(tree, part.tolist()) for tree, part in zip(test.trees, parts, strict=True)]

        return score

    monkeypatch.setattr(heads, "fitted", fitted)
    scored = prm.scored(None, known)
    assert [tree.problem for tree in scored] == [tree.problem for tree in trees]
    assert [[node.score for node in tree.nodes] for tree in scored] == [[i] * sizes[i] for i in range(11)]
    first, second = prm.halves([f"p{i}" for i in range(11)])
    turned = [10 - i for i in first[::-1]], [10 - i for i in second[::-1]]
    assert prm.halves([f"p{i}" for i in range(11)][::-1]) == turned
