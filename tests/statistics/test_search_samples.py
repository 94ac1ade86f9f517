"""Samples of one node in one search are independent, whatever they were requested for."""

import numpy as np
from toy_policy import Markov
from toy_search import Script, Table

from jprm.methods.policy.protocol import Problem
from jprm.methods.search.lockstep import SearchConfig, search
from jprm.methods.search.mcts import MCTS


class Same:
    """A live scorer that gives every step the score 0.5."""

    def open(self, problems):
        return [0] * len(problems)

    def extend(self, parents, steps):
        return [0] * len(steps), np.full(len(steps), 0.5, np.float32)

    def release(self, handles):
        pass


def run(method, problems, policy, scorer):
    return [tree for _, tree in search(problems, policy, scorer, SearchConfig(method, "last"))]


def test_rollouts_of_a_leaf_are_other_samples_than_its_steps():
    """With the numbers of the steps, both samples after "a" are "b." and "c." is never seen."""
    policy = Script({(): ["a"], ("a",): ["b.", "c."]})
    (tree,) = run(MCTS(1, 1, rollouts=1), [Problem("p")], policy, Table({"a": 0.5, "b.": 0.2, "c.": 0.9}))
    assert sorted(tree.text) == ["a", "b.", "c."]
    assert [(until, seed) for _, _, until, seed in policy.calls] == [("step", 0), ("step", 0), ("end", 1)]
    (note,) = tree.notes.values()
    assert abs(note["value"] - 0.9) < 1e-6  # the rollout's, which is not the child's


def test_rollouts_begin_with_the_step_sample_as_often_as_chance():
    """After a leaf the next step is good with probability p: two samples agree with probability p^2 + (1 - p)^2."""
    policy = Markov(length=4, keep=0.8, heal=0.25)
    trees = run(MCTS(1, 1, rollouts=1), [Problem(f"p{i}") for i in range(2000)], policy, Same())
    agree, expected, variance = 0, 0.0, 0.0
    for tree in trees:
        step, rollout = (draw for draw in tree.draws if draw.start != -1)
        agree += step.sample.steps[0] == rollout.sample.steps[0]
        p = 0.8 if tree.text[step.start].startswith("good") else 0.25
        same = p * p + (1 - p) ** 2
        expected, variance = expected + same, variance + same * (1 - same)
    assert abs(agree - expected) < 4 * variance**0.5
