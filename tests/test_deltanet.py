"""Gated DeltaNet on trees: against a scan over tokens, chains alone, a cache and a split mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import TINY, Letters, chain_ids, chain_rows, filled, hidden, logits, packed_trees, params, path, random_tree

from jprm.methods.decoding.cache import LiveTrees
from jprm.methods.layers import deltanet
from jprm.model import transformer
from jprm.model.config import DeltaNetConfig
from jprm.model.mesh import MeshConfig, check_mesh, make_mesh, put_rows
from jprm.model.transformer import check_model
from jprm.rows import empty_rows
from jprm.score.scorer import PRM

HYBRID = dataclasses.replace(
    TINY, layers=4, qkv_bias=False, attention_gate=True, rotary_dim=2, design="qwen3_next", attention="reference",
    mixers=("deltanet", "deltanet", "attention"), deltanet=DeltaNetConfig(2, 4, 4, 6, chunk=8),
)  # fmt: skip
"""Two deltanet layers before every one of attention, and one left over."""

TREES = [random_tree(seed, nodes=10) for seed in range(3)]


@jax.jit
def sum_and_gradient(p, rows, weight_BS):
    """Of bent logits. All tests give it four rows of 64 tokens and 32 slots: one program for each mesh."""
    loss = lambda p: jnp.sum(jnp.sin(transformer.step_logits(p, HYBRID, rows)) * weight_BS[..., None])  # noqa: E731
    return jax.value_and_grad(loss)(p)


@pytest.fixture(scope="module")
def rows():
    return packed_trees(TREES).rows


def by_tokens(q, k, v, g, b, start, previous):
    """The rule, a token at a time: every state is kept."""
    q, k = deltanet._unit(q) * q.shape[-1] ** -0.5, deltanet._unit(k)

    def row(q, k, v, g, b, start, previous):
        def step(states, inputs):
            t, q, k, v, g, b, before = inputs
            state = jnp.where(before >= 0, states[jnp.maximum(before, 0)], start) * jnp.exp(g)[..., None, None]
            new = (v - jnp.einsum("kh,kghv->kgv", k, state)) * b[..., None]
            state = state + jnp.einsum("kh,kgv->kghv", k, new)
            return states.at[t].set(state), jnp.einsum("kh,kghv->kgv", q, state)

        index = jnp.arange(len(q))
        return jax.lax.scan(step, jnp.zeros((len(q), *start.shape)), (index, q, k, v, g, b, previous))[1]

    return jax.vmap(row)(q, k, v, g, b, start, previous)


def test_previous_tokens_are_those_of_the_path(rows):
    previous_BT = np.asarray(deltanet.previous_of(jnp.asarray(rows.until)))
    for b, t in np.ndindex(*previous_BT.shape):
        seen = [j for j in range(t) if rows.until[b, j] > t]
        assert previous_BT[b, t] == (seen[-1] if seen else -1)


def test_chunks_are_a_scan_over_tokens_forward_and_backward(rows):
    (B, T), (K, G, H, V) = rows.tokens.shape, (2, 2, 4, 6)
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=(B, *shape)).astype(np.float32)  # noqa: E731
    q, k, v, start, wanted = draw(T, K, H), draw(T, K, H), draw(T, K, G, V), draw(K, G, H, V), draw(T, K, G, V)
    g, b = -np.abs(draw(T, K, G)), rng.uniform(size=(B, T, K, G)).astype(np.float32)
    plan = deltanet.plan(rows.position, jnp.asarray(rows.until), HYBRID)
    assert bool(jnp.all(plan.fits)) and int(jnp.max(plan.reads)) > 1 and int(jnp.max(plan.writes)) > 1
    previous = deltanet.previous_of(jnp.asarray(rows.until))
    rules = {
        "chunks": lambda q, k, v, g, b, s: deltanet._rule(q, k, v, g, b, plan, s, HYBRID)[0],
        "tokens": functools.partial(by_tokens, previous=previous),
    }
    results = {}
    for name, rule in rules.items():

        def loss(*args, rule=rule):
            y = rule(*args)
            return jnp.sum(wanted * y), y

        results[name] = jax.jit(jax.value_and_grad(loss, range(6), has_aux=True))(q, k, v, g, b, start)
    # Sums of float32 in another order, on values of size up to 10.
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-4), *results.values())


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_triangles_are_inverted_with_their_gradients(size):
    rng = np.random.default_rng(size)
    lower = np.tril(0.3 * rng.normal(size=(3, 2, size, size)), -1)
    lower[0] = np.tril(np.ones((size, size)), -1)  # a key that repeats: its powers are as large as binomials
    weight = rng.normal(size=lower.shape)
    inverse = np.linalg.inv(np.eye(size) + lower)
    turned = np.swapaxes(inverse, -1, -2)
    actual, gradient = jax.value_and_grad(lambda x: jnp.sum(weight * deltanet._inverse(x)))(jnp.float32(lower))
    np.testing.assert_allclose(actual, np.sum(weight * inverse), rtol=1e-4, atol=1e-3)
    scale = np.abs(inverse).max() ** 2 * np.abs(weight).max() * size
    np.testing.assert_allclose(gradient, -np.tril(turned @ weight @ turned, -1), atol=1e-6 * scale)


def test_nothing_waits_in_the_pool_that_it_runs_in(rows):
    """Two batched calls of LAPACK at once waited for each other without end, in rows of 2,048 tokens on two cores."""
    loss = lambda p: jnp.sum(hidden(p, HYBRID, rows))  # noqa: E731
    assert "lapack" not in jax.jit(jax.grad(loss)).lower(params(HYBRID)).as_text()


def test_a_row_with_too_many_states_is_not_a_number(rows):
    few = dataclasses.replace(HYBRID, deltanet=dataclasses.replace(HYBRID.deltanet, states=1))
    assert np.isnan(np.asarray(hidden(params(few), few, rows))).any()


def test_trees_are_chains_alone_and_padding_and_siblings_are_inert(rows):
    packed, layout = packed_trees(TREES), Letters()
    score = np.asarray(logits(params(HYBRID), HYBRID, rows))
    slots = [(b, s) for b, s in np.argwhere(packed.node_BS >= 0)]
    chains = [chain_ids(TREES[packed.tree_BS[b, s]], packed.node_BS[b, s], layout) for b, s in slots]
    alone = np.asarray(logits(params(HYBRID), HYBRID, chain_rows(chains, 64)))[:, 0]
    np.testing.assert_allclose(np.array([score[b, s] for b, s in slots]), alone, atol=2e-5, rtol=2e-5)

    # One token of one branch changed: the scores that move are those of steps that see it.
    b, s = next((b, s) for b, s in slots if packed.node_BS[b, s] == len(TREES[packed.tree_BS[b, s]].nodes) // 2)
    at = rows.step_end[b, s]
    tokens = rows.tokens.copy()
    tokens[b, at] = 40
    changed = np.asarray(logits(params(HYBRID), HYBRID, dataclasses.replace(rows, tokens=tokens)))
    for other_b, other in slots:
        end = rows.step_end[other_b, other]
        sees = other_b == b and at <= end < rows.until[b, at]
        moved = np.abs(changed[other_b, other] - score[other_b, other]).max()
        assert (moved > 1e-4) == sees and (sees or moved == 0)


def test_gradients_of_trees_are_those_of_their_chains():
    """Every leaf's chain alone, with a step's weight shared among the chains through it."""
    tree = random_tree(10, nodes=9)
    packed = filled(packed_trees([tree]).rows, 4)
    inner = {node.parent for node in tree.nodes}
    leaves = [i for i in range(len(tree.nodes)) if i not in inner]
    through = [sum(i in path(tree, leaf) for leaf in leaves) for i in range(len(tree.nodes))]
    alone = empty_rows(4, 64, 32)
    chains = chain_rows([chain_ids(tree, leaf, Letters()) for leaf in leaves], 64, 4)
    weight = np.zeros_like(alone.weight)
    for row, leaf in enumerate(leaves):
        for s, node in enumerate(path(tree, leaf)):
            alone.step_end[row, s] = len(chain_ids(tree, node, Letters())) - 1
            weight[row, s] = 1 / through[node]
    alone = dataclasses.replace(alone, tokens=chains.tokens, position=chains.position, until=chains.until)
    # Sums of float32 over other tokens, in another order: gradients are as large as 840, and differ by 1.3e-4 at most.
    packed_sums, alone_sums = (
        sum_and_gradient(params(HYBRID), *args) for args in ((packed, packed.owned), (alone, weight))
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-4, rtol=2e-3), packed_sums, alone_sums)


def test_a_split_mesh_computes_what_one_device_does(rows):
    rows = jax.tree.map(lambda x: np.concatenate([x, x[:1]])[:4], rows)
    wanted = sum_and_gradient(params(HYBRID), rows, rows.owned)
    mesh = make_mesh(MeshConfig(1, 2, 2), jax.devices()[:4])
    check_mesh(HYBRID, mesh, 4, 64)
    with jax.set_mesh(mesh):
        placed_rows = put_rows(rows, mesh)
        actual = sum_and_gradient(tiny.placed(params(HYBRID), mesh), placed_rows, placed_rows.owned)
    # Sums of float32 in another order: gradients are as large as 400, and differ by 2.3e-3 at most.
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=5e-4, rtol=1e-3), actual, wanted)
    split = make_mesh(MeshConfig(1, 2, 1, 2), jax.devices()[:4])
    with pytest.raises(ValueError, match="mesh.context=2 would split it"):
        check_model(dataclasses.replace(HYBRID, attention="blocked"), context=split.shape["context"])


def test_live_trees_start_from_their_parents_states():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    prm = PRM(tiny.placed(params(HYBRID), mesh), HYBRID, Letters(end=(28,)), mesh, "correctness", "tiny", 1)
    trees = LiveTrees(prm)
    (root,) = trees.open(["ab"])
    handles, scores = trees.extend([root, root], ["abc", "b"])
    trees.release(handles[1:])
    more, deeper = trees.extend([handles[0], handles[0], root], ["c", "dddddddddddd", "ca"])
    last, deepest = trees.extend([more[1]], ["e"])
    chains = [["abc"], ["b"], ["abc", "c"], ["abc", "dddddddddddd"], ["ca"], ["abc", "dddddddddddd", "e"]]
    wanted = [prm.score("ab", steps)[-1] for steps in chains]
    np.testing.assert_allclose([*scores, *deeper, *deepest], wanted, atol=1e-5)
    assert last
