"""Outcomes as targets of every step or token: a packed tree trains like its chains, each alone."""

import functools

import jax
import numpy as np
import pytest
from tiny import TINY, Letters, filled, params, path
from tiny_run import VALUE, chains, experiment, make_data, pool_of, training

import jprm
from jprm.experiment import ObjectiveConfig
from jprm.io.jsonl import write_records
from jprm.objectives import find
from jprm.pack import pack
from jprm.token_tree import token_tree
from jprm.tree import Node, ReasoningTree, tree_of

TASK = ObjectiveConfig(TINY, VALUE)
TREE = ReasoningTree("p", (
    Node(-1, "ab"), Node(0, "c", correct=True), Node(0, "cd"), Node(2, "e", correct=False), Node(2, "f", correct=True),
    Node(2, "ff"),  # nobody knows how this chain ends
    Node(-1, "ax", correct=False), Node(6, "y", correct=True),  # a chain that ends where another continues
))  # fmt: skip
POOL = tree_of({"problem": "p", "samples": [
    {"steps": ["ab", "c"], "correct": True}, {"steps": ["ab", "d"], "correct": False},
    {"steps": ["ab", "c"], "correct": True}, {"steps": ["abc"], "correct": False},
]})  # fmt: skip


@functools.partial(jax.jit, static_argnums=1)
def value(model, name, rows):
    def loss(model):
        total, count, _ = find(name)({"model": model}, rows, TASK)
        return total, count

    return jax.value_and_grad(loss, has_aux=True)(model)


def alone(tree):
    """Yields the steps and the outcome of every chain of known outcome."""
    for index, node in enumerate(tree.nodes):
        if node.correct is not None:
            yield [tree.nodes[i].text for i in path(tree, index)], node.correct


def rows_of(trees, supervise):
    return filled(pack([token_tree(tree, Letters(), supervise) for tree in trees], 32, 32, too_long="error").rows, 8)


@pytest.mark.parametrize("tree", [TREE, POOL], ids=["tree", "pool"])
@pytest.mark.parametrize("supervise", ["outcome_steps", "outcome_tokens"])
@pytest.mark.parametrize("name", ["cross_entropy", "squared_error"])
def test_a_packed_tree_trains_like_its_chains_alone(tree, supervise, name):
    weights, apart = params(), []
    for steps, correct in alone(tree):
        texts = steps if supervise == "outcome_steps" else [letter for step in steps for letter in step]
        nodes = (Node(i - 1, text, float(correct)) for i, text in enumerate(texts))
        apart.append(ReasoningTree(tree.problem, tuple(nodes), semantics="value"))
    (wanted, count), slope = value(weights, name, rows_of(apart, "step"))
    (actual, weight), gradient = value(weights, name, rows_of([tree], supervise))
    assert weight == count > 0
    if name == "cross_entropy":  # linear in the target; of squares only the gradient is the chains'
        np.testing.assert_allclose(actual, wanted, rtol=1e-5)  # sums of thirty float32 terms in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradient, slope)


def test_a_shared_step_has_the_mean_over_its_chains_and_their_number():
    tokens_of_tree = token_tree(TREE, Letters(), "outcome_steps")
    by_node = {
        int(n): (float(a), float(w))
        for n, a, w in zip(tokens_of_tree.node_M, tokens_of_tree.label_M, tokens_of_tree.weight_M, strict=True)
    }
    third = float(np.float32(2 / 3))
    assert by_node == {0: (third, 3), 1: (1, 1), 2: (0.5, 2), 3: (0, 1), 4: (1, 1), 5: (1, 0), 6: (0.5, 2), 7: (1, 1)}


def test_a_tree_split_over_rows_keeps_targets_and_weights():
    whole, rows = token_tree(TREE, Letters(), "outcome_tokens"), None
    for slots in (10, 32):
        rows = pack([whole], 8, slots, too_long="error").rows
        assert len(rows.tokens) > 1
        assert rows.weight.sum() == whole.weight_M.sum()
        assert np.isclose((rows.weight * rows.label).sum(), (whole.weight_M * whole.label_M).sum())


def test_weights_of_labels_come_from_the_records():
    nodes = tuple(
        Node(i - 1, "a", 0.5, correct=known, extra=extra)
        for i, (known, extra) in enumerate([(None, {"rollouts": 8}), (None, {}), (None, {"rollouts": 0}),
                                            (True, {"rollouts": 0})])
    )  # fmt: skip
    tree = ReasoningTree("p", nodes, semantics="value")
    assert token_tree(tree, Letters(), weight="rollouts").weight_M.tolist() == [8, 1, 0, 1]
    assert token_tree(tree, Letters()).weight_M.tolist() == [1, 1, 1, 1]
    for key, message in [("confidence", "'confidence'"), ("x", "number")]:
        with pytest.raises(ValueError, match=message):
            token_tree(ReasoningTree("p", (Node(-1, "a", 1.0, extra={"x": "y"}),)), Letters(), weight=key)
    with pytest.raises(ValueError, match="data.weight"):
        token_tree(ReasoningTree("p", (Node(-1, "a", 1.0, extra={"x": -1}),)), Letters(), weight="x")


def test_chains_and_pools_train_from_their_files(tmp_path, one_device):
    """On every token: both kinds of record, and scores that are values."""
    data = make_data(tmp_path / "data")
    write_records(data / "train.jsonl", [*chains(8), pool_of(chains(4, seed=1))])
    run = experiment(data, supervise="outcome_tokens", target=VALUE, slots=128, steps=2, valid=())
    result = training.train(run, tmp_path / "run")
    assert np.isfinite(result["loss"])
    assert jprm.load(tmp_path / "run").semantics == "value"
