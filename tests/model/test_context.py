"""Rows split over the mesh's `context` axis: equal attention, and only keys and values are gathered."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import breadth
from refusing import refused
from test_attention import KERNEL, arrays_of, by_rule, close, long_rows
from test_sharding import OPTIMIZER, STEPS, TARGET
from test_tpu import all_gathers
from tiny import GEMMA, TINY, Stepper, filled, init, optimised, packed_trees, params, placed, random_tree

from jprm.experiment import TargetConfig
from jprm.methods.implicit import log_probs
from jprm.methods.kernels.tpu import FIRST, LAST, LIVE, MINOR, Sizes, find_blocks, most_pairs
from jprm.model.mesh import MeshConfig, at_tokens, make_mesh, put_rows, spec
from jprm.model.parameters import split
from jprm.model.transformer import step_logits
from jprm.objectives import targets
from jprm.rows import empty_rows
from jprm.train.state import State, make_optimizer

B, T = 2, 512


def attended(config, heads, until_BT, position_BT, window, mesh=None):
    """The output and the gradients, on a mesh where one is given."""
    if mesh is None:
        return by_rule(*heads, until_BT, position_BT, config, window)
    place = jax.NamedSharding(mesh, spec("batch", "tokens", "kv_heads", mesh=mesh))
    rows = jax.NamedSharding(mesh, spec("batch", "tokens", mesh=mesh))
    with jax.set_mesh(mesh):
        outputs = by_rule(*jax.device_put(heads, place), *jax.device_put((until_BT, position_BT), rows), config, window)
    assert all(tuple(x.sharding.spec)[:3] == tuple(place.spec) for x in outputs)
    return outputs


@pytest.mark.parametrize(
    "way, sizes", [("reference", (1, 2, 1, 4)), ("blocked", (1, 1, 2, 4)), ("kernel", (1, 2, 2, 2))]
)
@pytest.mark.parametrize("windowed", [False, *breadth([True])])
def test_attention_in_parts_is_that_of_whole_rows(way, sizes, windowed):
    """A row of one chain but for its end, where nothing of the first part is seen any more, and one of many trees."""
    until_BT, _ = (x[[0, 3], :T].clip(max=T) for x in long_rows())
    until_BT[0] = np.where(np.arange(T) < 400, 400, T)
    position_BT = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    config = dataclasses.replace(KERNEL, attention=way, **({"windows": (100, 0)} if windowed else {}))
    window = np.int32(100) if windowed else None
    heads = arrays_of(0, B, T)
    expected = attended(dataclasses.replace(config, attention="reference"), heads, until_BT, position_BT, window)
    actual = attended(config, heads, until_BT, position_BT, window, make_mesh(MeshConfig(*sizes)))
    # float32 sums of up to 512 numbers of size 1, in another order: some 512 x 6e-8 = 3e-5 at worst.
    close(actual, expected, 5e-5)


@pytest.mark.parametrize("sizes, parts", [(Sizes(8, 8), 3), (Sizes(4, 12), 2), (Sizes(12, 4), 3)])
def test_each_part_has_tables_of_its_own(sizes, parts):
    """By queries the visible pairs; by keys these, and an entry that computes nothing for each block without one."""
    S = 72
    until_BS = np.array([np.full(S, S), np.arange(1, S + 1), np.where(np.arange(S) < 30, 30, S)], np.int32)
    find = jax.jit(find_blocks, static_argnums=(2, 3))
    whole, blocks = find(until_BS, until_BS, sizes), find(until_BS, until_BS, sizes, parts)
    part = S // parts // sizes.query
    assert blocks.count[0, -1] == blocks.count.max() == most_pairs(S, sizes, parts) == blocks.by_key.shape[1] // parts
    for b in range(3):
        pairs = {(x >> 17, x >> 3 & MINOR) for x in np.asarray(whole.by_query)[b].tolist() if x & LIVE}
        for c in range(parts):
            visible = {(t - c * part, s) for t, s in pairs if c * part <= t < (c + 1) * part}
            tables = blocks.by_query, blocks.by_key
            by_query, by_key = (np.asarray(x)[b].reshape(parts, -1)[c].tolist() for x in tables)
            assert {(x >> 17, x >> 3 & MINOR) for x in by_query if x & LIVE} == visible
            assert {(x >> 3 & MINOR, x >> 17) for x in by_key if x & LIVE} == visible
            for table, majors in ((by_query, part), (by_key, S // sizes.key)):  # every sum is begun and written once
                used = [x for x in table if x & (FIRST | LAST | LIVE)]
                firsts, lasts = ([x >> 17 for x in used if x & end] for end in (FIRST, LAST))
                assert firsts == lasts == list(range(majors))
                assert len(used) <= blocks.count[b, c] and table[: len(used)] == used


def model_gradient(config, rows, weights):
    def total(weights):
        logit_BSC = step_logits(weights, config, rows)
        return jnp.sum(logit_BSC * (1 + jnp.arange(logit_BSC.shape[1]))[:, None]), logit_BSC

    return jax.grad(total, has_aux=True)(weights)


def check_parts(config, rows, expected, mesh, of_largest):
    """Logits and gradients on a mesh, up to the order of float32 sums of many addends of either sign."""
    with jax.set_mesh(mesh):
        actual = jax.jit(model_gradient, static_argnums=0)(config, put_rows(rows, mesh), placed(params(config), mesh))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=10 * of_largest, atol=of_largest * np.abs(b).max())


@pytest.mark.slow
def test_a_gemma_model_in_parts():
    """Windows, soft caps, thetas of their own, and states at step ends of every part, with their gradients."""
    config = dataclasses.replace(GEMMA, attention="blocked", attention_block=8)
    rows = filled(packed_trees([random_tree(seed) for seed in range(8)], 64, 16).rows, 8)
    expected = jax.jit(model_gradient, static_argnums=0)(config, rows, params(config))
    check_parts(config, rows, expected, make_mesh(MeshConfig(1, 2, 1, 4)), 1e-5)  # hundreds of addends


@pytest.mark.slow
def test_a_thought_of_16384_tokens_in_parts():
    """A chain of a reasoning model: scores of its steps and gradients, by four devices and by one."""
    config = dataclasses.replace(TINY, layers=1, attention="blocked", attention_block=512, rope_theta=1e6)
    length, ends = 16384, np.arange(511, 16384, 512)
    rows = empty_rows(1, length, len(ends))
    rows.tokens[0] = np.random.default_rng(0).integers(0, config.vocab_size, length)
    rows.position[0], rows.until[0] = np.arange(length), length
    rows.step_end[0], rows.weight[0] = ends, 1
    whole = dataclasses.replace(config, attention="paths")
    expected = jax.jit(model_gradient, static_argnums=0)(whole, rows, params(config))
    mesh = make_mesh(MeshConfig(1, 1, 1, 4), jax.devices()[:4])
    check_parts(config, rows, expected, mesh, 1e-4)  # tens of thousands of addends


def test_step_ends_and_targets_are_those_of_whole_rows():
    rows = filled(packed_trees([random_tree(seed) for seed in range(8)], 64, 16).rows, 8)
    config = TargetConfig("rating", neutral="positive", after_error="mask")
    expected = targets(rows, config)
    with jax.set_mesh(make_mesh(MeshConfig(2, 1, 1, 4))):
        put = put_rows(rows, jax.sharding.get_mesh())
        assert put.tokens.sharding.spec == jax.P(("data", "fsdp"), "context")
        at_ends_BS = np.take_along_axis(rows.tokens, rows.step_end, 1)
        np.testing.assert_array_equal(jax.jit(at_tokens)(put.tokens, put.step_end), at_ends_BS)
        for a, b in zip(jax.jit(targets, static_argnums=1)(put, config), expected, strict=True):
            np.testing.assert_array_equal(a, b)
    assert np.any(expected[1] != rows.weight)


@pytest.mark.slow
def test_nothing_is_gathered_but_weights_keys_values_and_what_is_told_of_rows():
    """Of the compiled step: no all-gather is as large as hidden states or the MLP's of a row or of a device's part."""
    mesh, T, S = make_mesh(MeshConfig(1, 2, 2, 2)), 96, 24
    sizes = dict(width=40, mlp_width=56, kv_heads=2, head_dim=6)
    config = dataclasses.replace(TINY, attention="blocked", dtype="bfloat16", **sizes)
    rows = filled(packed_trees([random_tree(seed) for seed in range(4)], T, S).rows, 4)
    with jax.set_mesh(mesh):
        trained, frozen = split(jax.jit(init, static_argnums=0)(config, jax.random.key(0)), "")
        state = State(jnp.int32(0), trained, frozen, jax.jit(make_optimizer(OPTIMIZER).init)(trained))
        rows = put_rows(jax.tree.map(lambda x: x[None], rows), mesh, lead=1)
        with optimised():
            text = Stepper(config, TARGET, "cross_entropy", OPTIMIZER, STEPS).lower(state, rows).compile().as_text()
    rows_here, D, F, H = 2, config.width, config.mlp_width, config.head_dim
    gathered = {size for _, size in all_gathers(text)}
    activations = {b * t * w for b in (1, 2, 4) for t in (T, T // 2) for w in (D, D // 2, F, F // 2)}
    assert rows_here * T * H in gathered  # the keys of one head
    assert not gathered & activations
    gate = optax.tree.get(state.optimizer, "mu")["decoder/layers_0/gate"]
    assert gate.sharding.spec == jax.P(None, ("fsdp", "context"), "tensor")


def test_what_takes_whole_rows_is_refused():
    rows = filled(packed_trees([random_tree(0)], 64, 16).rows, 2)
    with jax.set_mesh(make_mesh(MeshConfig(1, 2, 1, 4))):
        put = put_rows(rows, jax.sharding.get_mesh())
        abstract = jax.eval_shape(init, TINY, jax.random.key(0))
        for call, attention, message in [
            (step_logits, "paths", "'paths'"),
            (step_logits, "kernel", "128"),
            (log_probs, TINY.attention, "context=1"),
        ]:
            config = dataclasses.replace(TINY, attention=attention)
            refused(ValueError, message, jax.eval_shape, lambda w, r: call(w, config, r), abstract, put)  # noqa: B023
