"""Budgets, failures, seeds and tokens: what holds for every method."""

import pytest
from refusing import refused
from test_search_files import Good
from toy_policy import Markov
from toy_search import Script, Table

from jprm.methods.decoding.sample_cache import PolicyError
from jprm.methods.search.beam import DVTS, Beam
from jprm.methods.search.best_of_n import BestOfN
from jprm.methods.search.files import answers_of, choose
from jprm.methods.search.growing_tree import Problem
from jprm.methods.search.lockstep import Rescorer, SearchConfig, search

METHODS = [BestOfN(8), Beam(2, 3), DVTS(2, 3)]
NAMES = [type(method).__name__ for method in METHODS]


def run(method, policy=None, problems=3, scorer=None, **options):
    asked = [Problem(f"p{i}", "1") for i in range(problems)]
    config = SearchConfig(method, "prod", **options)
    return dict(search(asked, policy or Markov(), scorer or Rescorer(Good()), config))


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_equal_seeds_give_equal_results(method):
    one, again, other = run(method), run(method), run(method, seed=1000)
    assert all(one[i].draws == again[i].draws and one[i].score == again[i].score for i in one)
    assert any(one[i].text != other[i].text for i in one)


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_problems_do_not_depend_on_their_company(method):
    together, alone = run(method, problems=5), run(method, problems=5, at_once=2)
    assert all(together[i].draws == alone[i].draws for i in range(5))


@pytest.mark.parametrize("budget", [45, 100, 233])
@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_the_budget_is_honoured(method, budget):
    for tree in run(method, budget=budget).values():
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
    for tree in run(method, budget=9).values():
        assert tree.ended == "budget" and tree.text  # what was drawn is kept
        result = choose(tree, "prod", "best", answers_of(tree))
        assert result.draw is None and "budget of 9 tokens is smaller than the first draw" in result.reason
    refused(ValueError, "0 tokens", SearchConfig, method, "prod", budget=0)


def test_a_policy_that_is_down_is_an_error():
    with pytest.raises(PolicyError, match="24 .*down"):
        run(BestOfN(8), Script({(): ["!"]}))


def test_a_problem_that_always_fails_does_not_stop_the_others():
    class Poison(Markov):
        def one(self, prefix, until, number):
            if prefix.problem == "p1":
                return Script({(): ["!"]}).one((), until, number)
            return super().one(prefix, until, number)

    for method in METHODS:
        trees = run(method, Poison())
        assert not trees[1].text and trees[1].failed and trees[1].ended == "done"
        assert choose(trees[1], "prod", "best", {}).reason == "the policy failed: the server is down"
        assert all(tree.finished for i, tree in trees.items() if i != 1)
        assert run(method, Poison(), at_once=1)[1].failed  # alone, after others were answered


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_every_step_is_scored_once(method):
    scorer = Table({f"{kind} {i}{end}": 0.5 for kind in ("good", "bad") for i in range(6)
                    for end in ("", ". The answer is 0", ". The answer is 1")})  # fmt: skip
    trees = run(method, scorer=scorer)
    assert scorer.tokens == sum(len(tree.text) for tree in trees.values())
    assert len({tuple(tree.steps(i)) for tree in trees.values() for i in range(len(tree.text))}) <= scorer.tokens
    assert scorer.gone == set(range(len(scorer.seen)))
