"""Beam search and DVTS against results computed by hand."""

import itertools

import numpy as np
import pytest
from toy_search import Script, Table, chain

from jprm.methods.policy.protocol import Sample
from jprm.methods.search.beam import DVTS, Beam, select_beams
from jprm.methods.search.files import answers_of, choose
from jprm.methods.search.growing_tree import Problem
from jprm.methods.search.lockstep import SearchConfig, search

# The greedy first step, a, leads to worse chains than b.
STEPS = {(): ["a", "b"], ("a",): ["aa.", "ab."], ("b",): ["ba.", "bb."]}
SCORES = {"a": 0.9, "b": 0.8, "aa.": 0.5, "ab.": 0.4, "ba.": 0.3, "bb.": 0.7}


def run(method, table=STEPS, scores=SCORES, rule="prod", problems=1, **options):
    policy, scorer = Script(table), Table(scores)
    asked = [Problem(f"p{i}") for i in range(problems)]
    found = dict(search(asked, policy, scorer, SearchConfig(method, rule, **options)))
    return [found[i] for i in range(problems)], policy, scorer


def best_chain(tree, rule="prod"):
    result = choose(tree, rule, "best", answers_of(tree))
    return chain(tree, tree.draws[result.draw].end), result.score


def test_selection_by_hand():
    assert select_beams([0.2, 0.9, 0.5, 0.7], [False, True, False, False], 3) == ([3, 2], [1])
    assert select_beams([0.5, 0.5, 0.5], [False] * 3, 2) == ([0, 1], [])  # the first of equals
    assert select_beams([np.nan, 0.1, -np.inf], [False] * 3, 3) == ([1, 2], [])  # of 0 the product is a score
    assert select_beams([], [], 3) == ([], [])


def test_a_narrow_beam_is_greedy_and_a_wide_one_is_not():
    (tree,), policy, scorer = run(Beam(1, 2))
    assert best_chain(tree) == ("a aa.", pytest.approx(0.45))
    assert [call[:3] for call in policy.calls] == [([()], 2, "step"), ([("a",)], 2, "step")]
    assert tree.text == ["a", "b", "aa.", "ab."]

    (tree,), policy, scorer = run(Beam(2, 2))
    assert best_chain(tree) == ("b bb.", pytest.approx(0.56))
    assert [call[:3] for call in policy.calls] == [([()], 4, "step"), ([("a",), ("b",)], 2, "step")]
    # Four draws of the problem are two steps drawn twice; every step is scored once, in one call a round.
    assert tree.text == ["a", "b", "aa.", "ab.", "ba.", "bb."]
    assert [tree.text[draw.end] for draw in tree.draws] == ["a", "b", "a", "b", "aa.", "ab.", "ba.", "bb."]
    assert (scorer.tokens, scorer.calls) == (6, 2)
    assert (tree.spent, tree.ended) == (80, "done")


@pytest.mark.parametrize("rule", ["min", "prod", "mean", "last", "mean_log"])
def test_a_beam_of_full_width_is_exhaustive(rule):
    """All 27 chains of a random tree, by brute force."""
    rng = np.random.default_rng(0)
    names = ["".join(letters) for length in (1, 2, 3) for letters in itertools.product("xyz", repeat=length)]
    table, scores = {(): ["x", "y", "z"]}, {}
    for name in names:
        text = name + "." * (len(name) == 3)
        scores[text] = float(rng.uniform(0.05, 0.95))
        if len(name) < 3:
            after = tuple(name[: i + 1] for i in range(len(name)))
            table[after] = [name + letter + "." * (len(name) == 2) for letter in "xyz"]
    (tree,), _, scorer = run(Beam(27, 3), table, scores, rule)
    fold = {"min": min, "prod": np.prod, "mean": np.mean, "last": lambda p: p[-1],
            "mean_log": lambda p: np.prod(p) ** (1 / 3)}[rule]  # fmt: skip
    value = {name: fold([scores[name[:1]], scores[name[:2]], scores[name + "."]]) for name in names if len(name) == 3}
    found, score = best_chain(tree, rule)
    assert found.split()[-1] == max(value, key=value.get) + "."
    assert score == pytest.approx(max(value.values()), abs=1e-6)  # float32
    assert scorer.tokens == len(names) == 39


def test_a_finished_chain_holds_its_place():
    """c. finishes first and stays in a beam of two until two better chains push it out, or all are finished."""
    table = STEPS | {(): ["a", "c."]}
    (tree,), policy, _ = run(Beam(2, 2), table, SCORES | {"c.": 0.6})
    assert [prefixes for prefixes, *_ in policy.calls] == [[()], [("a",)]]  # one place left: one prefix goes on
    assert best_chain(tree) == ("c.", pytest.approx(0.6))


def test_dvts_with_one_subtree_is_a_beam_of_one():
    (tree,), _, _ = run(DVTS(1, 2))
    (beam,), _, _ = run(Beam(1, 2))
    assert tree.text == beam.text and tree.draws == beam.draws and tree.score == beam.score


def test_dvts_keeps_the_best_of_every_subtree():
    table = STEPS | {(): ["a", "b", "c", "d"], ("d",): ["da.", "db."]}
    (tree,), policy, scorer = run(DVTS(2, 2), table, SCORES | {"c": 0.1, "d": 0.2, "da.": 0.9, "db.": 0.8})
    # Subtree one drew a and b and keeps a; subtree two drew c and d and keeps d, which a beam of two would not.
    assert [prefixes for prefixes, *_ in policy.calls] == [[()], [("a",), ("d",)]]
    assert best_chain(tree) == ("a aa.", pytest.approx(0.45))
    assert scorer.tokens == 8


def test_dvts_subtrees_that_meet_draw_on_independently():
    """Both subtrees keep a: the second draws the numbers behind the first's, not the same again."""
    table = STEPS | {("a",): ["aa.", "ab.", "ac.", "ad."]}
    (tree,), policy, _ = run(DVTS(2, 2), table, SCORES | {"ac.": 0.2, "ad.": 0.95})
    assert [call[1:] for call in policy.calls] == [(4, "step", 0), (2, "step", 0), (2, "step", 2)]
    assert best_chain(tree) == ("a ad.", pytest.approx(0.855))


def test_problems_advance_in_lockstep():
    trees, policy, scorer = run(Beam(2, 2), problems=5)
    assert [len(prefixes) for prefixes, *_ in policy.calls] == [5, 10]
    assert (scorer.calls, scorer.tokens) == (2, 30)
    assert scorer.gone == set(range(len(scorer.seen)))  # everything is released in the end
    assert len({tuple(tree.text) for tree in trees}) == 1


def test_a_policy_that_never_ends_is_stopped():
    class Endless(Script):
        def one(self, steps, until, number):
            return Sample(("on",), 10, "step")

    tree = dict(search([Problem("p")], Endless({}), Table({"on": 0.5}), SearchConfig(Beam(2, 2, 5), "min")))[0]
    assert (tree.ended, len(tree.text), tree.finished) == ("max_steps", 5, set())
    assert choose(tree, "min", "best", {}).reason == "no chain finished"


def test_a_chain_that_was_cut_off_is_not_finished():
    table = {(): ["a~", "b."]}
    (tree,), policy, _ = run(Beam(2, 2), table, {"a~": 0.9, "b.": 0.3})
    assert len(policy.calls) == 1 and best_chain(tree) == ("b.", pytest.approx(0.3))


def test_the_end_of_a_chain_without_a_further_step():
    """The policy holds the chain for finished after a: a is both a whole chain and a prefix that went on."""
    table = STEPS | {("a",): ["", "ab."]}
    (tree,), policy, _ = run(Beam(1, 2), table)
    assert best_chain(tree) == ("a", pytest.approx(0.9))
    assert len(policy.calls) == 2  # a is not drawn from again
