"""OmegaPRM against values, errors and counts computed by hand."""

import collections
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused
from toy_policy import Markov

from jprm.methods.label.monte_carlo import (
    OmegaConfig,
    Rollouts,
    Search,
    ValuedPrefix,
    first_error,
    label_problems,
    run_searches,
    select,
    tree_of_search,
)
from jprm.methods.policy.protocol import Prefix, Sample
from jprm.methods.policy.sample_cache import PolicyError
from jprm.methods.verify.verifiers import VERIFIERS
from jprm.tree import chains_of, record_of, tree_of

PROBLEM = {"problem": "p", "steps": ["unused"], "answer": 1}


class Cliff:
    """Every chain has `length` steps. Rollouts from a prefix that holds a "bad" step are wrong; from any other prefix
    the odd-numbered ones go wrong at step `error`."""

    name = "cliff"

    def __init__(self, length, error):
        self.length, self.error, self.asked = length, error, []

    def sample(self, prefixes, n, *, until, seed):
        self.asked += [prefix.steps for prefix in prefixes for _ in range(n)]
        return [[self.draw_one(prefix.steps, seed + j) for j in range(n)] for prefix in prefixes]

    def draw_one(self, steps, number):
        wrong = any(step.startswith("bad") for step in steps)
        goes_wrong = number % 2 and len(steps) <= self.error
        bad = self.error if goes_wrong else -1
        texts = [f"{'bad' if i == bad else 'fine'} {i}" for i in range(len(steps), self.length - 1)]
        return Sample((*texts, f"The answer is {int(not (wrong or goes_wrong))}"), 100, "stop")


def run_search(problem, answer, rollouts, config):
    search = Search({"problem": problem, "answer": answer})
    run_searches([search], rollouts, config)
    return search


def alone(steps, rollouts, config):
    """The result of a part of a search, with the rollouts that it requests. The answer is 1."""
    judged = None
    while True:
        try:
            prefix = steps.send(judged)
        except StopIteration as stop:
            return stop.value
        (samples,) = rollouts.draw([(prefix, config.seed, config.k)])
        (right,) = VERIFIERS["answer"].accepts([({"problem": "p", "answer": 1}, prefix, samples)])
        judged = list(zip(samples, right, strict=True))


def draw(tmp_path, policy):
    return Rollouts(policy, tmp_path / "rollouts.jsonl")


def test_selection_by_hand():
    config = OmegaConfig()
    search = Search(
        {"problem": "p", "answer": 1}, {(): ValuedPrefix(4, 8, visits=3), ("a",): ValuedPrefix(6, 8, visits=0)}
    )
    sample = {tokens: Sample(("x",), tokens, "stop") for tokens in (50, 500, 1500)}
    # Q + U, the sum of visits being 3: .7071 * .9^.1 + .0541 = .7538; .8409 * .9 + .2165 = .9733; .8409 * .729 + .2165
    search.wrong = [((), sample[50]), (("a",), sample[500]), (("a",), sample[1500])]
    assert select(search, config) == 1
    search.states["a",].visits = 30  # .8409 * .9 + .125 sqrt(33) / 31 = .7800; .7071 * .9895 + .1795 = .8792
    assert select(search, config) == 0


@given(st.integers(1, 40).flatmap(lambda length: st.tuples(st.just(length), st.integers(0, length - 1))))
@settings(max_examples=30, deadline=None)
def test_binary_search_finds_the_first_error_with_k_log_m_rollouts(tmp_path_factory, case):
    length, error = case
    policy = Cliff(length + 1, error)
    config = OmegaConfig(k=4)
    with draw(tmp_path_factory.mktemp("omega"), policy) as rollouts:
        wrong = policy.draw_one((), 1)
        assert len(wrong.steps) == length + 1 and wrong.steps[error] == f"bad {error}"
        search = Search({"problem": "p", "answer": 1}, {(): ValuedPrefix(2, 4)})
        assert alone(first_error(search, (), wrong.steps, config), rollouts, config) == error
    assert len(policy.asked) == rollouts.sampled == search.spent <= 4 * math.ceil(math.log2(length + 1))
    assert len(set(policy.asked)) == len(policy.asked) / 4  # no prefix twice


def test_the_error_may_be_the_last_step(tmp_path):
    """Wrong only in the answer itself: no prefix short of the whole chain has value 0, and none of it is sampled."""

    class LastStep(Cliff):
        def draw_one(self, steps, number):
            texts = [f"fine {i}" for i in range(len(steps), self.length - 1)]
            return Sample((*texts, f"The answer is {number % 2}"), 100, "stop")

    policy = LastStep(8, None)
    with draw(tmp_path, policy) as rollouts:
        search = Search({"problem": "p", "answer": 1}, {(): ValuedPrefix(2, 4)})
        steps = policy.draw_one((), 0).steps
        config = OmegaConfig(k=4)
        assert alone(first_error(search, (), steps, config), rollouts, config) == 7
        assert search.spent == 4 * 3


def test_tree_of_a_whole_search(tmp_path):
    policy = Cliff(8, 3)
    config = OmegaConfig(k=4)
    with draw(tmp_path, policy) as rollouts:
        (tree,) = label_problems([tree_of(PROBLEM)], rollouts, config)
    assert (tree.semantics, tree.kind, tree.extra["value"]) == ("value", "tree", 0.5)
    assert tree_of(record_of(tree)) == tree
    labelled = {}
    for chain in chains_of(tree):
        for depth, i in enumerate(chain):
            labelled[tuple(tree.nodes[j].text for j in chain[: depth + 1])] = tree.nodes[i]
    for steps, node in labelled.items():
        if node.label is None:
            continue
        wrong = any(step.startswith("bad") for step in steps)
        # past the error's place without it, every rollout is right
        truth = 0.0 if wrong else 0.5 if len(steps) <= 3 else 1.0
        assert (node.label, node.origin) == (truth, "monte_carlo")
    errors = [steps for steps, node in labelled.items() if node.label == 0.0 and labelled[steps[:-1]].label]
    assert errors == [("fine 0", "fine 1", "fine 2", "bad 3")]


def test_only_wrong_whole_rollouts_are_candidates(tmp_path):
    class Mixed(Cliff):
        def draw_one(self, steps, number):
            finish = "length" if number == 3 else "stop"
            return Sample((f"step {number}", f"The answer is {int(number < 2)}"), 10, finish)

    with draw(tmp_path, Mixed(2, 0)) as rollouts:
        search = run_search("p", 1, rollouts, OmegaConfig(k=5, budget=5))
    assert search.states[()].right == 2 and search.states[()].total == 5
    candidates = [sample.steps[0] for _, sample in search.wrong]
    assert candidates == ["step 4"]  # of 2, 3 (cut off) and 4, one was popped for the search that the budget ended


def test_budgets_end_the_search(tmp_path):
    for config in (OmegaConfig(k=4, searches=3), OmegaConfig(k=4, budget=30)):
        with Rollouts(Markov(length=8), tmp_path / f"{config.searches}.jsonl") as rollouts:
            search = run_search("p", 1, rollouts, config)
            assert search.searches <= config.searches
            assert search.spent == rollouts.sampled <= (config.budget or 1000)
    refused(ValueError, "7 rollouts", OmegaConfig, budget=7)


def test_a_search_of_a_markov_chain_is_consistent_and_repeats_from_the_file(tmp_path):
    policy, config = Markov(length=8), OmegaConfig(k=8, searches=20)
    with draw(tmp_path, policy) as rollouts:
        search = run_search("p", 1, rollouts, config)
    assert sum(state.visits for state in search.states.values()) == search.searches == 20
    assert policy.sampled == search.spent
    errors = [abs(s.mc - policy.value_of(Prefix("p", steps))) for steps, s in search.states.items()]
    assert np.mean(errors) < 0.25  # the standard error of 8 rollouts is at most 0.18
    again = Markov(length=8)
    with draw(tmp_path, again) as rollouts:
        assert run_search("p", 1, rollouts, config) == search
    assert again.sampled == 0
    nodes = tree_of_search(search, tree_of(PROBLEM)).nodes
    assert all(node.label is not None for node in nodes if node.extra or node.correct is False)


def test_problems_without_an_error_to_find_are_counted(tmp_path):
    class Always(Cliff):
        def draw_one(self, steps, number):
            return Sample((f"The answer is {self.error}",), 10, "stop")

    for answer, reason in ((1, "too easy"), (0, "too hard")):
        left_out = collections.Counter()
        with Rollouts(Always(1, answer), tmp_path / f"{answer}.jsonl") as rollouts:
            assert not list(label_problems([tree_of(PROBLEM)], rollouts, OmegaConfig(), left_out=left_out))
        assert left_out == {reason: 1}


def test_problems_advance_together_and_give_the_trees_that_they_give_alone(tmp_path):
    class Counting(Markov):
        calls = 0

        def sample(self, prefixes, n, *, until, seed):
            self.calls += 1
            return super().sample(prefixes, n, until=until, seed=seed)

    problems = [tree_of(PROBLEM | {"problem": f"p{i}"}) for i in range(6)]
    by_chunk, calls = {}, {}
    for at_once in (1, 4, 32):
        policy = Counting(length=8)
        with Rollouts(policy, tmp_path / f"{at_once}.jsonl") as rollouts:
            config = OmegaConfig(k=4, searches=5, problems_at_once=at_once)
            by_chunk[at_once] = list(label_problems(problems, rollouts, config))
        calls[at_once] = policy.calls
    assert by_chunk[1] == by_chunk[4] == by_chunk[32] and len(by_chunk[1]) > 3
    assert calls[32] < calls[4] < calls[1]


class Failing(Cliff):
    """Fails at problem "r", and when it is first asked to continue 4 steps of problem "q"."""

    def sample(self, prefixes, n, *, until, seed):
        gone = [p.problem == "r" or (p.problem == "q" and len(p.steps) == 4) for p in prefixes]
        gone = [bad and (p.problem == "r" or p.steps not in self.asked) for bad, p in zip(gone, prefixes, strict=True)]
        error = Sample((), 0, "error", error="the prompt is too long")
        drawn = super().sample(prefixes, n, until=until, seed=seed)
        return [[error] * n if bad else samples for bad, samples in zip(gone, drawn, strict=True)]


def test_a_failed_sample_ends_neither_a_problem_nor_the_run(tmp_path):
    """The first search of q fails at its first prefix; the next candidate is searched all the same."""
    problems = [tree_of(PROBLEM | {"problem": name}) for name in "qpr"]
    for at_once in (1, 3):
        left_out, policy = collections.Counter(), Failing(8, 3)
        with Rollouts(policy, tmp_path / f"{at_once}.jsonl") as rollouts:
            config = OmegaConfig(k=4, problems_at_once=at_once)
            q, p = label_problems(problems, rollouts, config, left_out=left_out)
        assert left_out == {"no rollouts": 1} and rollouts.failed == 8
        for tree in (q, p):
            assert "bad 3" in {node.text for node in tree.nodes if node.label == 0}


def test_a_policy_that_is_down_ends_the_run(tmp_path):
    problems = [tree_of(PROBLEM | {"problem": "r"})] * 40
    with Rollouts(Failing(8, 3), tmp_path / "never.jsonl") as rollouts, pytest.raises(PolicyError, match="too long"):
        list(label_problems(problems, rollouts, OmegaConfig(k=4)))
    records = [tree_of(PROBLEM), *(tree_of(PROBLEM | {"problem": "q", "answer": i}) for i in range(40))]
    records += problems
    with Rollouts(Failing(8, 3), tmp_path / "later.jsonl") as rollouts, pytest.raises(PolicyError, match="too long"):
        list(label_problems(records, rollouts, OmegaConfig(k=4, problems_at_once=1)))
