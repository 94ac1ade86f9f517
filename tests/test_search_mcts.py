"""MCTS and refinement against searches computed by hand."""

import numpy as np
import pytest
from toy_search import Script, Table, chain

from jprm.methods.search.files import answers_of, choose
from jprm.methods.search.growing_tree import Problem
from jprm.methods.search.lockstep import SearchConfig, search
from jprm.methods.search.mcts import MCTS, puct
from jprm.methods.search.refine import Refine, weakest

STEPS = {(): ["a", "b"], ("a",): ["aa.", "ab."], ("b",): ["ba.", "bb."]}
VALUES = {"a": 0.6, "b": 0.5, "aa.": 0.2, "ab.": 0.3, "ba.": 0.9, "bb.": 0.1}


def run(method, table=STEPS, scores=VALUES, rule="last", scorer=None, **options):
    policy, scorer = Script(table), scorer or Table(scores)
    ((_, tree),) = search([Problem("p")], policy, scorer, SearchConfig(method, rule, **options))
    return tree, policy, scorer


def best_chain(tree, rule="last"):
    result = choose(tree, rule, "best", answers_of(tree))
    return result.draw if result.draw is None else chain(tree, tree.draws[result.draw].end)


def notes(tree):
    return {tree.text[node]: (note["visits"], note["value"]) for node, note in tree.notes.items()}


def test_puct_by_hand():
    # Q + 1.5 P sqrt(9) / (1 + N)
    np.testing.assert_allclose(puct([0.5, 0.2, 0.0], [8, 1, 0], [0.5, 0.25, 0.25], 1.5), [0.75, 0.7625, 1.125])
    np.testing.assert_array_equal(puct([0.5, 0.2], [0, 0], [0.5, 0.5], 1.5), [0.5, 0.2])


BY_HAND = [
    # Simulations: visits and mean value of every node visited so far, with priors of 1/2 and c_puct = 1.
    (1, {"a": (1, 0.6)}),  # nothing is visited: the model's values, 0.6 and 0.5
    (2, {"a": (1, 0.6), "b": (1, 0.5)}),  # a: 0.6 + 0.5 / 2 = 0.85, b: 0.5 + 0.5 = 1
    (3, {"a": (2, 0.45), "b": (1, 0.5), "ab.": (1, 0.3)}),  # a: 0.6 + 0.354, b: 0.5 + 0.354; then 0.3 against 0.2
    (4, {"a": (2, 0.45), "b": (2, 0.7), "ab.": (1, 0.3), "ba.": (1, 0.9)}),  # a: 0.45 + 0.289, b: 0.5 + 0.433
    (5, {"a": (2, 0.45), "b": (3, 0.5), "ab.": (1, 0.3), "ba.": (1, 0.9), "bb.": (1, 0.1)}),  # 0.783, 1.033; ba. closed
    (6, {"a": (3, 0.3666667), "b": (3, 0.5), "ab.": (1, 0.3), "aa.": (1, 0.2), "ba.": (1, 0.9), "bb.": (1, 0.1)}),
]  # fmt: skip


@pytest.mark.parametrize(("simulations", "expected"), BY_HAND)
def test_simulations_by_hand(simulations, expected):
    tree, policy, scorer = run(MCTS(simulations, 2, c_puct=1.0))
    notes_of = notes(tree)
    assert notes_of.keys() == expected.keys()
    for text, (visits, value) in expected.items():
        assert notes_of[text] == (visits, pytest.approx(value, abs=1e-6)), text  # scores are float32
    assert [prefixes for prefixes, *_ in policy.calls] == [[()], [("a",)], [("b",)]][: simulations + 1]
    assert scorer.tokens == len(tree.text) and scorer.gone == set(range(len(scorer.seen)))


def test_a_search_ends_when_all_is_visited():
    tree, _, _ = run(MCTS(1000, 2, c_puct=1.0))
    assert sum(visits for text, (visits, _) in notes(tree).items() if text in "ab") == 6
    assert tree.ended == "done" and best_chain(tree) == "b ba."
    assert run(MCTS(3, 2))[0].ended == "simulations"


def test_priors_are_shares_of_the_draws():
    """c is drawn three times of four: with equal values its prior of 3/4 brings it more visits than d."""
    table = {(): ["c", "c", "d", "c"], ("c",): ["c1", "c2"], ("d",): ["d1", "d2"]}
    table |= {(x, x + n): [f"{x}{n}{m}." for m in "12"] for x in "cd" for n in "12"}
    scores = dict.fromkeys([text for texts in table.values() for text in texts], 0.5)
    tree, _, _ = run(MCTS(5, 4, c_puct=1.0), table, scores)
    # c: Q + 0.75 sqrt(N) / (1 + n), d: Q + 0.25 sqrt(N) / (1 + n). N = 0: c, the first; 1: c 0.375, d 0.25; 2: c 0.354
    # and d 0.354 tie to the last digit or so; what holds after five is that c leads.
    assert notes(tree)["c"][0] > notes(tree)["d"][0] >= 1


def test_visits_of_a_closed_step_still_count():
    """a. is a whole chain, so it is closed when it has been visited. Its visit is one of its parent's: then b has
    0.5 + 1/4 and c, drawn twice, 0.45 + 2/4."""
    table = {(): ["a.", "b", "c", "c"], ("b",): ["d."], ("c",): ["d."]}
    tree, _, _ = run(MCTS(2, 4, c_puct=1.0), table, {"a.": 0.9, "b": 0.5, "c": 0.45, "d.": 0.1})
    assert list(notes(tree)) == ["a.", "c"]


def test_rollouts_are_the_value_and_candidates():
    tree, policy, scorer = run(MCTS(1, 1, rollouts=2), STEPS | {(): ["b"]})
    # The leaf is b; its two completions end with 0.9 and 0.1.
    assert notes(tree) == {"b": (1, pytest.approx(0.5, abs=1e-6))}
    assert [call[1:3] for call in policy.calls] == [(1, "step"), (1, "step"), (2, "end")]
    assert best_chain(tree) == "b ba." and scorer.tokens == 3  # ba. was drawn as a step and in a rollout
    tree, *_ = run(MCTS(1, 1, rollouts=2), STEPS | {(): ["b"], ("b",): ["ba.", "bb~"]})
    assert notes(tree)["b"] == (1, pytest.approx(0.45, abs=1e-6))  # a rollout that was cut off counts 0


def test_what_is_cut_off_or_fails_is_closed():
    tree, *_ = run(MCTS(9, 2), STEPS | {("a",): ["aa~", "!"]}, VALUES | {"aa~": 0.9})
    assert tree.ended == "done" and best_chain(tree) == "b ba."
    assert "aa~" not in notes(tree) and tree.failed == 1
    tree, *_ = run(MCTS(9, 2), {(): ["a~"]}, VALUES | {"a~": 1.0})
    assert (tree.ended, best_chain(tree), len(tree.text)) == ("done", None, 1)
    tree, *_ = run(MCTS(9, 2), scores={})
    assert best_chain(tree) is None and tree.text == ["a", "b"]


def test_a_budget_ends_a_search_and_its_notes_are_kept():
    tree, *_ = run(MCTS(9, 2, c_puct=1.0), budget=40)
    assert (tree.spent, tree.ended, notes(tree)) == (40, "budget", {"a": (1, pytest.approx(0.6, abs=1e-6))})


def test_weakest_by_hand():
    assert weakest([0.9, 0.2, 0.2, 0.4]) == 1


DRAFT = {(): ["a"], ("a",): ["b", "c"], ("a", "b"): ["bx.", "by."], ("a", "c"): ["cx~", "cy."]}
SCORES = {"a": 0.9, "b": 0.3, "c": 0.8, "bx.": 0.7, "by.": 0.2, "cx~": 1.0, "cy.": 0.6}


def test_refinement_by_hand():
    tree, policy, scorer = run(Refine(rounds=3), DRAFT, SCORES, "min")
    # Draft a b bx. (0.3), weakest b. Redrawn after a: draw 0 is the same chain, draw 1 is a c cy. (0.6), which is kept;
    # its weakest step is cy., so the third round draws after a c: cx~, which was cut off and is not kept.
    assert policy.calls == [([()], 1, "end", 0), ([("a",)], 1, "end", 0), ([("a",)], 1, "end", 1),
                            ([("a", "c")], 1, "end", 0)]  # fmt: skip
    assert best_chain(tree, "min") == "a c cy."
    assert tree.ended == "rounds" and scorer.tokens == len(tree.text) == 6


class Values(Table):
    semantics = "value"


def test_a_chain_of_values_is_cut_at_the_largest_drop():
    """After the mistake in b every value is low, the lowest by chance at the end: b is sampled again, not d."""
    table = {(): ["a"], ("a",): ["b", "x."], ("a", "b"): ["c"], ("a", "b", "c"): ["d."]}
    scores = {"a": 0.8, "b": 0.3, "c": 0.3, "d.": 0.2, "x.": 0.9}
    _, policy, _ = run(Refine(rounds=1), table, scores, "last")
    assert policy.calls[1][0] == [("a", "b", "c")]  # scores of steps: the lowest
    tree, policy, _ = run(Refine(rounds=1), table, scores, "last", scorer=Values(scores))
    assert policy.calls[1][0] == [("a",)]
    assert best_chain(tree, "last") == "a b c d."  # its sample 0 was b again


def test_the_first_step_drops_from_the_mean_of_first_steps():
    """Drafts a. and b c d.: the problem's value is the mean of a. and b, from which b drops little, or most."""
    table = {(): ["a.", "b"], ("b",): ["c"], ("b", "c"): ["d."]}
    scores = {"a.": 0.25, "b": 0.2, "c": 0.4, "d.": 0.3}
    _, policy, _ = run(Refine(rounds=1, drafts=2), table, scores, "last", scorer=Values(scores))
    assert policy.calls[1][0] == [("b", "c")]  # 0.225 -> 0.2 -> 0.4 -> 0.3
    scores |= {"a.": 0.29, "b": 0.1, "c": 0.35}
    _, policy, _ = run(Refine(rounds=1, drafts=2), table, scores, "last", scorer=Values(scores))
    assert policy.calls[1][0] == [()]  # 0.195 -> 0.1 -> 0.35 -> 0.3


def test_a_finished_chain_replaces_one_that_was_cut_off():
    table = {(): ["c"], ("c",): ["cx~", "cx~", "cy."]}
    tree, policy, _ = run(Refine(rounds=1), table, SCORES, "min")
    # The draft c cx~ has its lowest score, 0.8, at c: drawn again from the problem, and cut off again.
    assert policy.calls[1][0] == [()] and best_chain(tree, "min") is None
    tree, policy, _ = run(Refine(rounds=1, samples=3), table, SCORES | {"cx~": 0.7}, "min")
    # With 0.7 at cx~ it is drawn again after c, and c cy., though it scores 0.6, is whole.
    assert policy.calls[1][0] == [("c",)] and best_chain(tree, "min") == "c cy."
