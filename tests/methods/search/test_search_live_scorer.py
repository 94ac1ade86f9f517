"""Scorers of live trees against the model that scores whole trees."""

import importlib
import types

import numpy as np
import pytest
from toy_policy import Markov

from jprm.methods.policy.protocol import Problem
from jprm.methods.search.beam import Beam
from jprm.methods.search.lockstep import Rescorer, SearchConfig, search
from jprm.tree import Node, ReasoningTree


@pytest.mark.parametrize("name", ["rescored", "cached"])
def test_a_beam_has_the_scores_of_its_tree(prm, name):
    if name == "cached":
        scorer = importlib.import_module("jprm.methods.decoding.cache").LiveTrees(prm)
    else:
        scorer = Rescorer(prm)
    problems = [Problem("add"), Problem("cut the far end")]
    trees = dict(search(problems, Markov(length=4), scorer, SearchConfig(Beam(2, 3), "prod")))
    whole = [
        ReasoningTree(tree.problem.text, tuple(map(Node, tree.parent, tree.text))) for tree in (trees[0], trees[1])
    ]
    for i, score_N in enumerate(prm.score_trees(whole)):
        assert len(score_N) > 6
        # Float32 in another order: the model's logits are near one, so far more than rounding is allowed for.
        np.testing.assert_allclose(trees[i].score, score_N, atol=1e-4, rtol=0)
    layout = prm.layout
    once = sum(len(layout.problem(tree.problem)) for tree in whole)
    once += sum(len(layout.step(node.text, 0)) for tree in whole for node in tree.nodes)
    assert scorer.tokens == once if name == "cached" else scorer.tokens > once


def test_rescoring_counts_every_token_that_it_computes():
    """Every path once more for every new step: what the cached scorer saves."""
    layout = types.SimpleNamespace(
        problem=lambda text, system: [1] * 5,
        step=lambda text, number: [ord(text[0])] * 3,
        last=lambda text, number: None,
    )
    scorer = Rescorer(types.SimpleNamespace(layout=layout, score_trees=depths))
    first, second = scorer.open(["p", "q"])
    (a, b), scores = scorer.extend([first, second], ["a", "b"])
    assert scores.tolist() == [1, 1] and scorer.tokens == 16
    _, scores = scorer.extend([a, a, first, b], ["c", "d", "e", "f"])
    assert scores.tolist() == [2, 2, 1, 2]  # p: a with c and d, and e: 5 + 4 * 3 tokens; q: b with f: 5 + 2 * 3
    assert scorer.tokens == 16 + 17 + 11


def depths(trees):
    """A step's depth as its score."""
    for tree in trees:
        depth = []
        for node in tree.nodes:
            depth.append(1 if node.parent < 0 else depth[node.parent] + 1)
        yield np.array(depth, np.float32)
