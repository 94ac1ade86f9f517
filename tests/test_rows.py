"""What rows say of their steps' trees: structure and extras survive packing and splitting, siblings and ancestors."""

import dataclasses

import jax
import numpy as np
import pytest
import test_pack
from families import breadth
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused
from tiny import Letters, filled, packed_batches, path, random_tree, reasoning_trees, with_nodes

from jprm.experiment import TargetConfig
from jprm.methods.rl.policy_gradient import path_sum
from jprm.model.mesh import make_mesh, put_rows
from jprm.objectives import returns, targets
from jprm.pack import pack
from jprm.rows import PER_TOKEN, Rows, ancestors, empty_rows, siblings
from jprm.token_tree import token_tree
from jprm.train.batches import PipelineConfig
from jprm.tree import Node, ReasoningTree


def numbered(trees):
    """The trees with (tree, node) of every node as extras, so that repeated slots can be told apart too."""
    return [
        with_nodes(tree, lambda n, node, t=t: {"extra": {"tree": t, "node": n, "other": "x"}})
        for t, tree in enumerate(trees)
    ]


def packed(trees, tokens, slots, chains=False):
    token_trees = [token_tree(tree, Letters(), extras=("tree", "node")) for tree in numbered(trees)]
    return pack(token_trees, tokens, slots, too_long="error", chains=chains)


def longest(trees):
    tokens, slots = test_pack.longest(trees)
    return tokens + 1, slots  # here a problem has an end


@jax.jit
def both(rows):
    return ancestors(rows), siblings(rows)


def relations(rows):
    """Ancestors and siblings, compiled for one shape: tokens do not matter, unused slots and rows are cut off again."""
    (B, S), extras = rows.tree.shape, tuple(rows.extras)
    slots = empty_rows(B, 1, 64 - S, extras)
    wide = {n: v for n, v in vars(rows).items() if n not in PER_TOKEN}
    wide = jax.tree.map(lambda x, y: np.concatenate([x, y], 1), wide, {n: getattr(slots, n) for n in wide})
    wide |= {name: getattr(empty_rows(B, 1, 1), name) for name in PER_TOKEN}
    return [np.asarray(x)[:B, :S, :S] for x in both(filled(Rows(**wide), 64))]


@settings(max_examples=20, deadline=None)
@given(st.lists(reasoning_trees(), min_size=1, max_size=4), st.integers(0, 15), st.integers(0, 5), st.booleans())
def test_structure_equals_brute_force_whatever_the_row(trees, spare_tokens, spare_slots, chains):
    """With the nodes' numbers as extras, every pair of slots of a row is a pair of nodes whose relation is known."""
    tokens, slots = longest(trees)
    packed_rows = packed(trees, tokens + spare_tokens, slots + spare_slots, chains)
    rows, seen, together = packed_rows.rows, [], set()
    before, alike = relations(rows)
    for b in range(len(rows.tokens)):
        used = np.flatnonzero(rows.tree[b] >= 0)
        node = {s: (int(rows.extras["tree"][b, s]), int(rows.extras["node"][b, s])) for s in used}
        np.testing.assert_array_equal(rows.owned[b], packed_rows.node_BS[b] >= 0)
        for s in range(rows.tree.shape[1]):
            if s not in node:
                unused = rows.parent[b, s], rows.problem[b, s], rows.step_end[b, s], rows.weight[b, s]
                assert unused == (-1, 0, 0, 0) and not rows.owned[b, s]
                assert rows.tree_weight[b, s] == 0 and not rows.leaf[b, s]
                assert not before[b, s].any() and not before[b, :, s].any()
                assert not alike[b, s].any() and not alike[b, :, s].any()
                continue
            tree, n = node[s]
            if rows.owned[b, s]:
                assert node[s] == (packed_rows.tree_BS[b, s], packed_rows.node_BS[b, s])
            assert rows.problem[b, s] == len(trees[tree].problem) + 1
            assert rows.weight[b, s] == rows.tree_weight[b, s] * rows.owned[b, s]
            assert rows.leaf[b, s] == all(other.parent != n for other in trees[tree].nodes)
            above = trees[tree].nodes[n].parent
            assert node.get(int(rows.parent[b, s]), (tree, -1)) == (tree, above)
            assert [node[j][1] for j in np.flatnonzero(before[b, s])] == path(trees[tree], n)[:-1]
        above = np.array([trees[t].nodes[n].parent for t, n in node.values()], int)
        of_tree = np.array([t for t, _ in node.values()], int)
        part = np.equal.outer(rows.tree[b, used], rows.tree[b, used])
        assert (part <= np.equal.outer(of_tree, of_tree)).all()
        wanted = part & np.equal.outer(above, above) & ~np.eye(len(used), dtype=bool)
        owned = np.logical_or.outer(rows.owned[b, used], rows.owned[b, used])
        np.testing.assert_array_equal(alike[b][np.ix_(used, used)], wanted & owned)
        seen += [(node[used[i]], node[used[j]]) for i, j in np.argwhere(wanted & owned)]
        together |= {(node[used[i]], node[used[j]]) for i, j in np.argwhere(wanted)}
    assert len(seen) == len(set(seen))  # no pair twice
    assert set(seen) == together  # and none that some row holds is missing


def test_a_pair_repeated_by_a_split_is_counted_once():
    """The alternatives end on one path, so that both later rows repeat them."""
    ab, abc = Node(-1, "ab"), Node(-1, "abc")
    tree = ReasoningTree("p", (ab, abc, Node(1, "defg"), Node(1, "hijk")))
    rows = packed([tree], 9, 4).rows
    assert len(rows.tokens) == 2 and (~rows.owned & (rows.tree >= 0)).sum(1).tolist() == [0, 2]
    assert np.asarray(siblings(rows))[:, :2, :2].sum((1, 2)).tolist() == [2, 0]


def test_structure_and_extras_reach_batches_and_the_mesh():
    trees = numbered([random_tree(seed, 6) for seed in range(7)])
    config = PipelineConfig(
        ("none",), "step", "error", rows=4, tokens=64, slots=16, window=3, shuffle=False, epochs=1, extras=("node",)
    )
    batches = list(packed_batches(trees, Letters(), config))
    assert all(batch.extras["node"].shape == batch.tree.shape for batch in batches)  # filled up with rows of padding
    owned = np.concatenate([batch.extras["node"][batch.owned] for batch in batches])
    assert sorted(owned.tolist()) == sorted(list(range(6)) * 7)
    mesh = make_mesh(devices=jax.devices()[:2])
    put = put_rows(batches[0], mesh)
    jax.tree.map(np.testing.assert_array_equal, put, batches[0])
    assert all(array.sharding.spec[0] == ("data", "fsdp") for array in jax.tree.leaves(put))
    assert set(PER_TOKEN) < set(vars(put))
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.jit(ancestors)(put), ancestors(batches[0]))
        np.testing.assert_array_equal(jax.jit(siblings)(put), siblings(batches[0]))


def test_extras_that_do_not_fit_are_refused():
    def tree(*extras):
        return ReasoningTree("p", tuple(Node(-1, "a", extra=extra) for extra in extras))

    flat = token_tree(tree({"v": 2}, {}, {"v": None}), Letters(), extras=("v",))
    np.testing.assert_array_equal(flat.extras["v"], [2, np.nan, np.nan])  # an absent class is not class 0
    for call, named in [
        (lambda: token_tree(tree({}, {"w": 1}), Letters(), extras=("v",)), "'v'"),
        (lambda: token_tree(tree({"v": 1}, {"v": "high"}), Letters(), extras=("v",)), "node 1: v"),
        (lambda: token_tree(tree({"v": 1}), Letters(end=0), "token", ("v",)), "every"),
        (lambda: pack([flat, token_tree(tree({}), Letters())], 8, 4, too_long="error"), "tree 1"),
    ]:
        refused(ValueError, named, call)


@pytest.mark.parametrize("rows", [1, *breadth([2])])
def test_rows_of_one_slot_have_no_relations_on_a_mesh_either(rows):
    single = dataclasses.replace(empty_rows(rows, 8, 1), weight=np.ones((rows, 1), np.float32))
    target = TargetConfig("value", "none", "mask", soft="progress")
    with jax.set_mesh(mesh := make_mesh(devices=jax.devices()[:1])):
        put = put_rows(single, mesh)
        assert not ancestors(put).any() and not siblings(put).any()
        np.testing.assert_array_equal(path_sum(put.label, put), single.label)
        np.testing.assert_array_equal(returns(put, put.label, put.label, put.weight, 0.5)[0], single.label)
        assert not targets(put, target)[1].any()
