"""Objectives of trees: value and gradient in the logits against loops over the chains of enumerated trees."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY, Letters, path
from tiny_run import VALUE

from jprm.experiment import ObjectiveConfig
from jprm.objectives import find
from jprm.pack import pack, token_tree
from jprm.tree import Node, ReasoningTree

HEADS = {head: ObjectiveConfig(dataclasses.replace(TINY, head=head), VALUE) for head in ("binary", "scalar")}
PARENTS = [p for count in (1, 2, 3, 4) for p in itertools.product(*(range(-1, i) for i in range(count)))]
"""Every tree of up to four steps: 1 + 2 + 6 + 24."""


def trees():
    """Every shape, unlabelled nodes and inner outcomes among them, with few letters, so that texts coincide.

    The extra `node` of a node is its number among those of all trees.
    """
    rng, number = np.random.default_rng(0), itertools.count()
    for parents in PARENTS:
        inner = set(parents)
        nodes = []
        for i, parent in enumerate(parents):
            known = i not in inner or rng.random() < 0.2
            label = None if rng.random() < 0.15 else float(rng.choice([0.0, 0.25, 0.75, 1.0]))
            correct = bool(rng.integers(2)) if known and rng.random() < 0.85 else None
            extra = {"node": next(number)}
            nodes.append(Node(parent, str(rng.choice(list("abc"))), label, correct=correct, extra=extra))
        yield ReasoningTree("p", tuple(nodes), semantics="value")


TREES = list(trees())
OFFSETS = np.cumsum([0, *(len(tree.nodes) for tree in TREES)])


def log_odds(logit_NC):
    return logit_NC[:, -1] - (logit_NC[:, 0] if logit_NC.shape[1] == 2 else 0.0)


def compare(objective, head, supervise, brute, chains=False, tokens=16):
    """Asserts that the packed trees' loss, count and gradient are the sums of `brute(tree, log odds of its nodes)`."""
    token_trees = [token_tree(tree, Letters(), supervise, ("node",)) for tree in TREES]
    rows = pack(token_trees, tokens, 8, too_long="error", chains=chains).rows
    table = np.random.default_rng(1).normal(scale=2.0, size=(OFFSETS[-1], 2 if head == "binary" else 1))

    def packed(table):
        total, count, metrics = objective.of_logits(table[rows.extras["node"].astype(int)], rows, HEADS[head])
        return total, count

    def looped(table):
        s = log_odds(table)
        sums = [brute(tree, s[begin : begin + len(tree.nodes)]) for tree, begin in zip(TREES, OFFSETS, strict=False)]
        return sum(total for total, _ in sums), sum(count for _, count in sums)

    (actual, count), gradient = jax.jit(jax.value_and_grad(packed, has_aux=True))(jnp.asarray(table, jnp.float32))
    (wanted, number), slope = jax.jit(jax.value_and_grad(looped, has_aux=True))(jnp.asarray(table, jnp.float32))
    assert float(number) > 10
    np.testing.assert_allclose(count, number, rtol=1e-6)
    np.testing.assert_allclose(actual, wanted, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-5, atol=1e-5)  # float32; gradients are of size 1


def labelled(tree):
    return [i for i, node in enumerate(tree.nodes) if node.label is not None]


@pytest.mark.parametrize("among", ["alternatives", "problem"])
def test_bradley_terry_is_a_loop_over_pairs(among):
    def brute(tree, s):
        loss, count = 0.0, 0
        for i, j in itertools.permutations(labelled(tree), 2):
            first, second = tree.nodes[i], tree.nodes[j]
            if (among == "problem" or first.parent == second.parent) and first.label > second.label:
                loss, count = loss - jax.nn.log_sigmoid(s[i] - s[j]), count + 1
        return loss, count

    compare(find("bradley_terry", {"among": among}), "scalar", "step", brute)


def pqm_of_chain(s, right, margin):
    """The terms of one chain, by the paper's formula: their sum and their number."""
    correct, wrong = [i for i, r in enumerate(right) if r], [i for i, r in enumerate(right) if not r]
    wrongs = sum((jnp.exp(s[w] + margin) for w in wrong), 0.0)
    loss = sum((-jnp.log(jnp.exp(s[t]) / (jnp.exp(s[t]) + 1 + sum(jnp.exp(s[i]) for i in correct if i < t) + wrongs))
                for t in correct), 0.0)  # fmt: skip
    return (loss - jnp.log(1 / (1 + wrongs)), len(correct) + 1) if wrong else (loss, len(correct))


def chain_of(s, right):
    """Rows of one chain with these log-odds and marks, and its logits."""
    nodes = tuple(Node(i - 1, "a", float(mark)) for i, mark in enumerate(right))
    tree = token_tree(ReasoningTree("p", nodes, semantics="value"), Letters())
    s_S = jnp.pad(jnp.asarray(s, jnp.float32), (0, 8 - len(s)))
    return pack([tree], 16, 8, too_long="error").rows, s_S[None, :, None]


def test_pqm_is_the_mean_over_chains_of_their_means():
    """Chains of 2 and 8 steps whose last step is incorrect: sums and counts of the two rows add up."""
    rng = np.random.default_rng(0)
    q = {8: rng.normal(size=8), 2: rng.normal(size=2)}
    marks = {n: [True] * (n - 1) + [False] for n in q}
    terms = [pqm_of_chain(q[n], marks[n], 4.0) for n in q]
    wanted = {
        "chains": np.mean([total / count for total, count in terms]),
        "steps": sum(total for total, _ in terms) / sum(count for _, count in terms),
    }
    for mean, value in wanted.items():
        of_rows = [find("pqm", {"mean": mean}).of_logits(logit, rows, HEADS["scalar"])[:2]
                   for rows, logit in (chain_of(q[n], marks[n]) for n in q)]  # fmt: skip
        actual = sum(total for total, _ in of_rows) / sum(count for _, count in of_rows)
        np.testing.assert_allclose(actual, value, rtol=1e-6)
    np.testing.assert_allclose([wanted["chains"], wanted["steps"]], [3.958, 4.434], atol=5e-4)
    assert find("pqm").mean == "chains"


@pytest.mark.parametrize(("chains", "tokens"), [(False, 16), (True, 16), (False, 6)])
def test_pqm_of_a_tree_is_that_of_its_chains_alone(chains, tokens):
    """Also where trees are split, at every leaf or to fit rows of 6 tokens."""

    def brute(tree, s):
        loss, count = 0.0, 0
        for end in sorted(set(range(len(tree.nodes))) - {node.parent for node in tree.nodes}):
            labelled_steps = [i for i in path(tree, end) if tree.nodes[i].label is not None]
            total, terms = pqm_of_chain(
                s[np.array(labelled_steps, int)], [tree.nodes[i].label >= 0.5 for i in labelled_steps], 4.0
            )
            if terms:
                loss, count = loss + total / terms, count + 1
        return loss, count

    compare(find("pqm"), "binary", "step", brute, chains, tokens)


@pytest.mark.parametrize("margin", [0.0, 4.0])
def test_pqm_by_steps_counts_each_step_of_a_tree_once(margin):
    """A correct step's rivals are collected chain by chain, each once."""

    def brute(tree, s):
        labelled_steps = labelled(tree)
        chains = [[i for i in path(tree, end) if i in labelled_steps] for end in range(len(tree.nodes))]
        right = {i: tree.nodes[i].label >= 0.5 for i in labelled_steps}
        loss, count = 0.0, 0
        for t in (i for i in labelled_steps if right[i]):
            on = {i for chain in chains if t in chain for i in chain}
            rivals = {i for i in on if not right[i]} | {i for i in path(tree, t)[:-1] if right.get(i)}
            below = 1 + sum(jnp.exp(s[i] + (0.0 if right[i] else margin)) for i in rivals)
            loss, count = loss - jnp.log(jnp.exp(s[t]) / (jnp.exp(s[t]) + below)), count + 1
        if wrong := [i for i in labelled_steps if not right[i]]:
            loss, count = loss - jnp.log(1 / (1 + sum(jnp.exp(s[i] + margin) for i in wrong))), count + 1
        line = [node.parent for node in tree.nodes] == list(range(-1, len(tree.nodes) - 1))
        if line and labelled_steps:  # on one chain it is the published loss
            published = pqm_of_chain(s[np.array(labelled_steps)], [right[i] for i in labelled_steps], margin)
            assert published[1] == count
            return published
        return loss, count

    compare(find("pqm", {"margin": margin, "mean": "steps"}), "binary", "step", brute)


@pytest.mark.parametrize(("decay", "chains"), [(0.0, True), (0.6, False), (1.0, True)])
def test_td_lambda_is_the_sum_over_chains_alone(decay, chains):
    """Also where a tree is split at every leaf."""

    def brute(tree, s):
        loss, count = 0.0, 0
        for end, node in enumerate(tree.nodes):
            if node.correct is None:
                continue
            target, later = float(node.correct), None
            for t in reversed(path(tree, end)):
                if later is not None:
                    target = (1 - decay) * jax.lax.stop_gradient(jax.nn.sigmoid(s[later])) + decay * target
                loss -= target * jax.nn.log_sigmoid(s[t]) + (1 - target) * jax.nn.log_sigmoid(-s[t])
                count, later = count + 1, t
        return loss, count

    compare(find("td_lambda", {"trace_decay": decay}), "scalar", "outcome", brute, chains)
