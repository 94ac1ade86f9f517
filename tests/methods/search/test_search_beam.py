"""Beams and tree searches by hand, and all methods in lockstep under one budget."""

import itertools

import numpy as np
import pytest
from refusing import refused
from test_search_files import Good
from toy_policy import Markov
from toy_search import Script, Table, chain

from jprm.methods.policy.protocol import Problem, Sample
from jprm.methods.policy.sample_cache import PolicyError
from jprm.methods.search.beam import DVTS, Beam, select_beams
from jprm.methods.search.best_of_n import BestOfN
from jprm.methods.search.jobs import answers_of, choose
from jprm.methods.search.lockstep import Rescorer, SearchConfig, search
from jprm.methods.search.mcts import MCTS, puct
from jprm.methods.search.refine import Refine, weakest

# The greedy first step, a, leads to worse chains than b.
STEPS = {(): ["a", "b"], ("a",): ["aa.", "ab."], ("b",): ["ba.", "bb."]}
SCORES = {"a": 0.9, "b": 0.8, "aa.": 0.5, "ab.": 0.4, "ba.": 0.3, "bb.": 0.7}


def run(method, table=STEPS, scores=SCORES, rule="prod", problems=1, **options):
    policy, scorer = Script(table), Table(scores)
    asked = [Problem(f"p{i}") for i in range(problems)]
    results = dict(search(asked, policy, scorer, SearchConfig(method, rule, **options)))
    return [results[i] for i in range(problems)], policy, scorer


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
    best, score = best_chain(tree, rule)
    assert best.split()[-1] == max(value, key=value.get) + "."
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
        def draw_one(self, steps, until, number):
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


# ---- MCTS and refinement against searches computed by hand.


VALUES = {"a": 0.6, "b": 0.5, "aa.": 0.2, "ab.": 0.3, "ba.": 0.9, "bb.": 0.1}


def grown(method, table=STEPS, scores=VALUES, rule="last", scorer=None, **options):
    policy, scorer = Script(table), scorer or Table(scores)
    ((_, tree),) = search([Problem("p")], policy, scorer, SearchConfig(method, rule, **options))
    return tree, policy, scorer


def most_valued(tree, rule="last"):
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
    tree, policy, scorer = grown(MCTS(simulations, 2, c_puct=1.0))
    notes_of = notes(tree)
    assert notes_of.keys() == expected.keys()
    for text, (visits, value) in expected.items():
        assert notes_of[text] == (visits, pytest.approx(value, abs=1e-6)), text  # scores are float32
    assert [prefixes for prefixes, *_ in policy.calls] == [[()], [("a",)], [("b",)]][: simulations + 1]
    assert scorer.tokens == len(tree.text) and scorer.gone == set(range(len(scorer.seen)))


def test_a_search_ends_when_all_is_visited():
    tree, _, _ = grown(MCTS(1000, 2, c_puct=1.0))
    assert sum(visits for text, (visits, _) in notes(tree).items() if text in "ab") == 6
    assert tree.ended == "done" and most_valued(tree) == "b ba."
    assert grown(MCTS(3, 2))[0].ended == "simulations"


def test_priors_are_shares_of_the_draws():
    """c is drawn three times of four: with equal values its prior of 3/4 brings it more visits than d."""
    table = {(): ["c", "c", "d", "c"], ("c",): ["c1", "c2"], ("d",): ["d1", "d2"]}
    table |= {(x, x + n): [f"{x}{n}{m}." for m in "12"] for x in "cd" for n in "12"}
    scores = dict.fromkeys([text for texts in table.values() for text in texts], 0.5)
    tree, _, _ = grown(MCTS(5, 4, c_puct=1.0), table, scores)
    # c: Q + 0.75 sqrt(N) / (1 + n), d: Q + 0.25 sqrt(N) / (1 + n). N = 0: c, the first; 1: c 0.375, d 0.25; 2: c 0.354
    # and d 0.354 tie to the last digit or so; what holds after five is that c leads.
    assert notes(tree)["c"][0] > notes(tree)["d"][0] >= 1


def test_visits_of_a_closed_step_still_count():
    """a. is a whole chain, so it is closed when it has been visited. Its visit is one of its parent's: then b has
    0.5 + 1/4 and c, drawn twice, 0.45 + 2/4."""
    table = {(): ["a.", "b", "c", "c"], ("b",): ["d."], ("c",): ["d."]}
    tree, _, _ = grown(MCTS(2, 4, c_puct=1.0), table, {"a.": 0.9, "b": 0.5, "c": 0.45, "d.": 0.1})
    assert list(notes(tree)) == ["a.", "c"]


def test_rollouts_are_the_value_and_candidates():
    tree, policy, scorer = grown(MCTS(1, 1, rollouts=2), STEPS | {(): ["b"]})
    # The leaf is b; its two completions end with 0.9 and 0.1.
    assert notes(tree) == {"b": (1, pytest.approx(0.5, abs=1e-6))}
    assert [call[1:3] for call in policy.calls] == [(1, "step"), (1, "step"), (2, "end")]
    assert most_valued(tree) == "b ba." and scorer.tokens == 3  # ba. was drawn as a step and in a rollout
    tree, *_ = grown(MCTS(1, 1, rollouts=2), STEPS | {(): ["b"], ("b",): ["ba.", "bb~"]})
    assert notes(tree)["b"] == (1, pytest.approx(0.45, abs=1e-6))  # a rollout that was cut off counts 0


def test_what_is_cut_off_or_fails_is_closed():
    tree, *_ = grown(MCTS(9, 2), STEPS | {("a",): ["aa~", "!"]}, VALUES | {"aa~": 0.9})
    assert tree.ended == "done" and most_valued(tree) == "b ba."
    assert "aa~" not in notes(tree) and tree.failed == 1
    tree, *_ = grown(MCTS(9, 2), {(): ["a~"]}, VALUES | {"a~": 1.0})
    assert (tree.ended, most_valued(tree), len(tree.text)) == ("done", None, 1)
    tree, *_ = grown(MCTS(9, 2), scores={})
    assert most_valued(tree) is None and tree.text == ["a", "b"]


def test_a_budget_ends_a_search_and_its_notes_are_kept():
    tree, *_ = grown(MCTS(9, 2, c_puct=1.0), budget=40)
    assert (tree.spent, tree.ended, notes(tree)) == (40, "budget", {"a": (1, pytest.approx(0.6, abs=1e-6))})


def test_weakest_by_hand():
    assert weakest([0.9, 0.2, 0.2, 0.4]) == 1


DRAFT = {(): ["a"], ("a",): ["b", "c"], ("a", "b"): ["bx.", "by."], ("a", "c"): ["cx~", "cy."]}
PRIORS = {"a": 0.9, "b": 0.3, "c": 0.8, "bx.": 0.7, "by.": 0.2, "cx~": 1.0, "cy.": 0.6}


def test_refinement_by_hand():
    tree, policy, scorer = grown(Refine(rounds=3), DRAFT, PRIORS, "min")
    # Draft a b bx. (0.3), weakest b. Redrawn after a: draw 0 is the same chain, draw 1 is a c cy. (0.6), which is kept;
    # its weakest step is cy., so the third round draws after a c: cx~, which was cut off and is not kept.
    assert policy.calls == [([()], 1, "end", 0), ([("a",)], 1, "end", 0), ([("a",)], 1, "end", 1),
                            ([("a", "c")], 1, "end", 0)]  # fmt: skip
    assert most_valued(tree, "min") == "a c cy."
    assert tree.ended == "rounds" and scorer.tokens == len(tree.text) == 6


class Values(Table):
    semantics = "value"


def test_a_chain_of_values_is_cut_at_the_largest_drop():
    """After the mistake in b every value is low, the lowest by chance at the end: b is sampled again, not d."""
    table = {(): ["a"], ("a",): ["b", "x."], ("a", "b"): ["c"], ("a", "b", "c"): ["d."]}
    scores = {"a": 0.8, "b": 0.3, "c": 0.3, "d.": 0.2, "x.": 0.9}
    _, policy, _ = grown(Refine(rounds=1), table, scores, "last")
    assert policy.calls[1][0] == [("a", "b", "c")]  # scores of steps: the lowest
    tree, policy, _ = grown(Refine(rounds=1), table, scores, "last", scorer=Values(scores))
    assert policy.calls[1][0] == [("a",)]
    assert most_valued(tree, "last") == "a b c d."  # its sample 0 was b again


def test_the_first_step_drops_from_the_mean_of_first_steps():
    """Drafts a. and b c d.: the problem's value is the mean of a. and b, from which b drops little, or most."""
    table = {(): ["a.", "b"], ("b",): ["c"], ("b", "c"): ["d."]}
    scores = {"a.": 0.25, "b": 0.2, "c": 0.4, "d.": 0.3}
    _, policy, _ = grown(Refine(rounds=1, drafts=2), table, scores, "last", scorer=Values(scores))
    assert policy.calls[1][0] == [("b", "c")]  # 0.225 -> 0.2 -> 0.4 -> 0.3
    scores |= {"a.": 0.29, "b": 0.1, "c": 0.35}
    _, policy, _ = grown(Refine(rounds=1, drafts=2), table, scores, "last", scorer=Values(scores))
    assert policy.calls[1][0] == [()]  # 0.195 -> 0.1 -> 0.35 -> 0.3


def test_a_finished_chain_replaces_one_that_was_cut_off():
    table = {(): ["c"], ("c",): ["cx~", "cx~", "cy."]}
    tree, policy, _ = grown(Refine(rounds=1), table, PRIORS, "min")
    # The draft c cx~ has its lowest score, 0.8, at c: drawn again from the problem, and cut off again.
    assert policy.calls[1][0] == [()] and most_valued(tree, "min") is None
    tree, policy, _ = grown(Refine(rounds=1, samples=3), table, PRIORS | {"cx~": 0.7}, "min")
    # With 0.7 at cx~ it is drawn again after c, and c cy., though it scores 0.6, is whole.
    assert policy.calls[1][0] == [("c",)] and most_valued(tree, "min") == "c cy."


# ---- Budgets, failures, seeds and tokens: what holds for every method.


METHODS = [BestOfN(8), Beam(2, 3), DVTS(2, 3)]
NAMES = [type(method).__name__ for method in METHODS]


def searched(method, policy=None, problems=3, scorer=None, **options):
    asked = [Problem(f"p{i}", "1") for i in range(problems)]
    config = SearchConfig(method, "prod", **options)
    return dict(search(asked, policy or Markov(), scorer or Rescorer(Good()), config))


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_equal_seeds_give_equal_results(method):
    first, again, other = searched(method), searched(method), searched(method, seed=1000)
    assert all(first[i].draws == again[i].draws and first[i].score == again[i].score for i in first)
    assert any(first[i].text != other[i].text for i in first)


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_problems_do_not_depend_on_their_company(method):
    together, alone = searched(method, problems=5), searched(method, problems=5, at_once=2)
    assert all(together[i].draws == alone[i].draws for i in range(5))


@pytest.mark.parametrize("budget", [45, 100, 233])
@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_the_budget_is_honoured(method, budget):
    for tree in searched(method, budget=budget).values():
        within = [draw for draw in tree.draws if not draw.over_budget]
        assert tree.spent == sum(draw.sample.tokens for draw in within) <= budget
        assert tree.draws[: len(within)] == within  # what is over the budget comes last
        # Every draw of a kind costs the same here, so after the first round nothing is drawn that does not fit.
        first = {"BestOfN": 4, "Beam": 6, "DVTS": 6}[type(method).__name__]
        assert not tree.overspent or len(tree.draws) <= first
        result = choose(tree, "prod", "best", answers_of(tree))
        assert result.draw is None or not tree.draws[result.draw].over_budget


def test_best_of_n_takes_as_many_chains_as_fit():
    table = {(): ["The answer is 1."]}
    for budget, drawn in ((79, 7), (80, 8), (1000, 8)):
        ((_, tree),) = search([Problem("p")], Script(table), Table({"The answer is 1.": 0.5}),
                              SearchConfig(BestOfN(8), "prod", budget=budget))  # fmt: skip
        assert (len(tree.draws), tree.overspent) == (drawn, 0)
        assert tree.ended == ("done" if drawn == 8 else "budget")


def test_draws_behind_the_one_that_breaks_the_budget_do_not_count():
    table = {(): ["one.", "two.", "three.", "four."]}
    policy = Script(table, cost={"one.": 10, "two.": 30, "three.": 10, "four.": 10})
    scorer = Table({"one.": 0.1, "two.": 0.2, "three.": 0.9, "four.": 0.9})
    ((_, tree),) = search([Problem("p")], policy, scorer, SearchConfig(BestOfN(4), "prod", budget=25))
    assert [draw.over_budget for draw in tree.draws] == [False, True, True, True]
    assert (tree.spent, tree.overspent, tree.ended) == (10, 50, "budget")
    assert tree.score == [pytest.approx(x) for x in (0.1, 0.2, 0.9, 0.9)]  # kept, with their scores
    assert choose(tree, "prod", "best", answers_of(tree)).draw == 0


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_a_budget_smaller_than_a_step_is_a_marked_result(method):
    for tree in searched(method, budget=9).values():
        assert tree.ended == "budget" and tree.text  # what was drawn is kept
        result = choose(tree, "prod", "best", answers_of(tree))
        assert result.draw is None and "budget of 9 tokens is smaller than the first draw" in result.reason
    refused(ValueError, "0 tokens", SearchConfig, method, "prod", budget=0)


def test_a_policy_that_is_down_is_an_error():
    with pytest.raises(PolicyError, match="24 .*down"):
        searched(BestOfN(8), Script({(): ["!"]}))


def test_a_problem_that_always_fails_does_not_stop_the_others():
    class Poison(Markov):
        def draw_one(self, prefix, until, number):
            if prefix.problem == "p1":
                return Script({(): ["!"]}).draw_one((), until, number)
            return super().draw_one(prefix, until, number)

    for method in METHODS:
        trees = searched(method, Poison())
        assert not trees[1].text and trees[1].failed and trees[1].ended == "done"
        assert choose(trees[1], "prod", "best", {}).reason == "the policy failed: the server is down"
        assert all(tree.finished for i, tree in trees.items() if i != 1)
        assert searched(method, Poison(), at_once=1)[1].failed  # alone, after others were answered


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_every_step_is_scored_once(method):
    scorer = Table({f"{kind} {i}{end}": 0.5 for kind in ("good", "bad") for i in range(6)
                    for end in ("", ". The answer is 0", ". The answer is 1")})  # fmt: skip
    trees = searched(method, scorer=scorer)
    assert scorer.tokens == sum(len(tree.text) for tree in trees.values())
    assert len({tuple(tree.steps(i)) for tree in trees.values() for i in range(len(tree.text))}) <= scorer.tokens
    assert scorer.gone == set(range(len(scorer.seen)))
