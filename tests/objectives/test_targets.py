"""Every target policy against a loop over the nodes of the tree."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from refusing import refused
from tiny import Letters, chain_ids, filled, packed_trees, path, random_tree, reasoning_trees, with_nodes

from jprm.experiment import TargetConfig
from jprm.objectives import targets
from jprm.pack import pack
from jprm.token_tree import token_tree
from jprm.tree import Node, ReasoningTree

LINES = Letters(newline=(28,))  # no step begins another
TARGETS = jax.jit(targets, static_argnums=1)


def by_node(packed, config):
    """{(tree, node): (target, weight)}; nothing else has a weight."""
    rows = packed.rows if len(packed.rows.tokens) > 4 else filled(packed.rows, 4)
    target_BS, weight_BS = map(np.asarray, TARGETS(rows, config))
    assert not weight_BS[len(packed.node_BS) :].any() and not weight_BS[: len(packed.node_BS)][packed.node_BS < 0].any()
    return {
        (int(packed.tree_BS[b, s]), int(packed.node_BS[b, s])): (float(target_BS[b, s]), float(weight_BS[b, s]))
        for b, s in np.argwhere(packed.node_BS >= 0)
    }


def expected(trees, config, layout):
    """The policies, a node at a time. A step is behind an error if its chain goes on from the tokens of a wrong one."""
    answer = {}
    for t, tree in enumerate(trees):
        # Unlabelled nodes have label 1: neither wrong nor neutral.
        label = [1.0 if node.label is None else node.label for node in tree.nodes]
        counts_as_wrong = (-1, 0) if config.labels != "rating" or config.neutral == "negative" else (-1,)
        wrong = [x in counts_as_wrong for x in label]
        ids = [chain_ids(tree, n, layout) for n in range(len(tree.nodes))]
        for n, node in enumerate(tree.nodes):
            weight = float(node.label is not None)
            if config.labels != "rating":
                target = float(label[n] > 0) if config.soft == "hard" else label[n]
            elif config.neutral == "third":
                target = {-1: 0, 0: 1, 1: 2}[label[n]]
            elif label[n] == 0:
                target = float(config.neutral != "negative")
                weight = 0.0 if config.neutral == "drop" else weight
            else:
                target = float(label[n] > 0)
            shorter = [w for w in range(len(ids)) if wrong[w] and len(ids[w]) < len(ids[n])]
            behind = [w for w in shorter if ids[n][: len(ids[w])] == ids[w]]
            if config.after_error == "mask" and behind:
                weight = 0.0
            assert set(path(tree, n)[:-1]) & {w for w, is_wrong in enumerate(wrong) if is_wrong} <= set(behind)
            answer[t, n] = (np.float32(target), weight)
    return answer


RATING = [TargetConfig("rating", n, e) for n in ("positive", "negative", "third", "drop") for e in ("keep", "mask")]
PROBABILITIES = [TargetConfig("correctness", "none", e, s) for e in ("keep", "mask") for s in ("soft", "hard")]


EQUAL = (Node(-1, "a", -1.0), Node(-1, "a", 1.0), Node(-1, "a", -1.0), Node(1, "b", 1.0), Node(-1, "b", 1.0))
NEUTRAL = (Node(-1, "a", 0.0), Node(0, "b", 1.0), Node(1, "c", -1.0))
TWO = [ReasoningTree("p", (Node(-1, "a", -1.0), Node(0, "b", 1.0))), ReasoningTree("q", (Node(-1, "c", 1.0),))]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(reasoning_trees(), min_size=1, max_size=3),
    st.sampled_from(RATING + PROBABILITIES),
    st.sampled_from([Letters(), LINES]),
)
@example([ReasoningTree("p", EQUAL)], TargetConfig("rating", "drop", "mask"), LINES)  # not behind each other
@example([ReasoningTree("p", NEUTRAL)], TargetConfig("rating", "negative", "mask"), LINES)  # masks what follows
@example(TWO, TargetConfig("rating", "positive", "mask"), LINES)  # an error reaches neither the next tree nor padding
def test_policies_equal_a_loop_over_nodes(trees, config, layout):
    if config.labels != "rating":
        as_probability = {-1.0: 0.0, 0.0: 0.25}
        trees = [with_nodes(tree, lambda _, n: {"label": as_probability.get(n.label, n.label)}) for tree in trees]
    packed = packed_trees(trees, 64, 16, layout)  # a tree of 12 steps may be split: its parts repeat what leads to them
    assume(len(packed.rows.tokens) <= 4)
    assert by_node(packed, config) == expected(trees, config, layout)


def test_policies_that_contradict_the_labels_are_refused():
    refused(ValueError, "labels='rating'", TargetConfig, "rating", "none", "keep")
    refused(ValueError, "ratings", TargetConfig, "correctness", "drop", "keep")
    named = {field.name for field in dataclasses.fields(TargetConfig) if field.default is dataclasses.MISSING}
    assert named == {"labels", "neutral", "after_error"}  # nothing that changes what is learned has a default


OF_VALUES = {
    "hard above": (dict(soft="hard", threshold=0.25), lambda v, u: float(v > 0.25)),
    "entropy": (dict(soft="entropy", eta=2.0), lambda v, u: np.log(np.mean(np.exp(2.0 * (np.arange(4) < 4 * v)))) / 2),
    "relative": (dict(soft="relative", threshold=0.8), lambda v, u: None if u is None else float(v > 0 and v / u >= 0.8)
                 if u else float(v > 0)),
    "progress": (dict(soft="progress"), lambda v, u: None if u is None else (1 + v - u) / 2),
    "smooth": (dict(smoothing=0.1), lambda v, u: 0.9 * v + 0.05),
    "smooth progress": (dict(soft="progress", smoothing=0.2),
                        lambda v, u: None if u is None else 0.4 * (1 + v - u) + 0.1),
}  # fmt: skip
"""Settings, and the target of a step of value v after one of value u, None where it has none."""


@pytest.mark.parametrize("name", OF_VALUES)
def test_targets_of_values_are_their_formulas(name):
    """Values are of four rollouts: ER-PRM's expectation is a mean over them."""
    changes, formula = OF_VALUES[name]
    config = TargetConfig("value", "none", "keep", **changes)
    trees = [random_tree(seed, 9, (None, 0.0, 0.25, 0.5, 1.0)) for seed in range(8)]
    targets_of = by_node(packed_trees(trees), config)
    assert len(targets_of) == 8 * 9
    for (t, n), (target, weight) in targets_of.items():
        node = trees[t].nodes[n]
        before = trees[t].nodes[node.parent].label if node.parent >= 0 else None
        wanted = None if node.label is None else formula(node.label, before)
        assert weight == (wanted is not None)
        assert wanted is None or np.isclose(target, wanted, rtol=1e-6)


@pytest.mark.parametrize("soft", ["progress", "relative"])
def test_a_split_tree_keeps_the_values_before_its_steps(soft):
    """12 trees of 120 labelled steps, of which each has first steps: a split loses no other target."""
    config = TargetConfig("value", "none", "keep", soft, threshold=0.8)
    trees = [random_tree(seed, 120, (0.0, 0.25, 0.5, 1.0)) for seed in range(12)]
    token_trees = [token_tree(tree, Letters()) for tree in trees]
    targets_of = lambda packed: {node: target for node, (target, weight) in by_node(packed, config).items() if weight}  # noqa: E731
    whole = targets_of(pack(token_trees, 2048, 128, too_long="error"))
    first = sum(node.parent < 0 for tree in trees for node in tree.nodes)
    for tokens, slots, chains in [(64, 32, False), (64, 24, False), (64, 32, True)]:
        split = pack(token_trees, tokens, slots, too_long="error", chains=chains)
        assert split.report.repeated > 0 and targets_of(split) == whole
        assert float(targets(split.rows, config)[1].sum()) == len(whole) == 12 * 120 - first


def test_consensus_keeps_steps_up_to_the_first_disagreement():
    rng = np.random.default_rng(0)
    trees = [random_tree(seed, 9, (0.0, 0.25, 1.0)) for seed in range(8)]
    trees = [with_nodes(tree, lambda *_: {"extra": {"judge": float(rng.random())}}) for tree in trees]
    packed = pack([token_tree(tree, Letters(), extras=("judge",)) for tree in trees], 64, 32, too_long="error")
    config = TargetConfig("value", "none", "keep", "hard", threshold=0.25, consensus="judge")
    kept = 0
    for (t, n), (target, weight) in by_node(packed, config).items():
        above = [trees[t].nodes[i] for i in path(trees[t], n)]
        agree = [(node.label > 0.25) == (node.extra["judge"] > 0.5) for node in above]
        assert weight == all(agree) and target == (trees[t].nodes[n].label > 0.25)
        kept += int(weight)
    assert 0 < kept < 72
