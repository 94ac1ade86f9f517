"""`attention="cudnn"`: one chain per row, equal numbers by XLA on a CPU, and the program compiled for a GPU."""

import dataclasses
import functools
import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused
from tiny import TINY, filled, logits, packed_trees, params, random_tree
from tiny_run import MODEL, experiment, lines, make_data, one_device, training

from jprm.apps.plan.plan import plan as plan_of
from jprm.apps.plan.topologies import find
from jprm.experiment import TargetConfig
from jprm.methods.kernels.gpu_cudnn import CUDNN as IMPLEMENTATION
from jprm.model.attention import attend, plan
from jprm.model.heads import HEADS
from jprm.model.mesh import MeshConfig, check_mesh, make_mesh, put_rows, spec
from jprm.model.transformer import init, step_logits
from jprm.objectives import likelihood, targets
from jprm.pack import empty_rows

B, T, K, G, H = 3, 128, 2, 2, 16
CUDNN = dataclasses.replace(TINY, attention="cudnn", dtype="bfloat16", head_dim=H)
PLAIN = dataclasses.replace(TINY, attention="reference", head_dim=H)


def heads(seed, rows=B):
    rng = np.random.default_rng(seed)
    shapes = (rows, T, K, G, H), (rows, T, K, H), (rows, T, K, H)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def rows_of(lengths):
    """(until, position): a chain of so many tokens a row, and padding."""
    index_T, length_B1 = np.arange(T, dtype=np.int32), np.array(lengths, np.int32)[:, None]
    chain_BT = index_T < length_B1
    return np.where(chain_BT, length_B1, index_T + 1), np.where(chain_BT, index_T, 0)


def flash(q, k, v, until_BT, position_BT):
    """In float32 too, which `ModelConfig` refuses for the sake of GPUs."""
    return IMPLEMENTATION.attend(q, k, v, IMPLEMENTATION.plan(until_BT, position_BT, CUDNN), CUDNN)


def by_rule(q, k, v, until_BT, position_BT):
    return attend(q, k, v, plan(until_BT, position_BT, PLAIN), PLAIN)


@functools.partial(jax.jit, static_argnums=0)
def run(way, q, k, v, until_BT, position_BT):
    """The output at the chain's tokens, and gradients of a sum of it that tells all elements apart."""
    real_BT = (position_BT > 0) | (until_BT > jnp.arange(T) + 1)

    def total(q, k, v):
        y_BTKGH = jnp.where(real_BT[..., None, None, None], way(q, k, v, until_BT, position_BT), 0)
        return jnp.sum(y_BTKGH * jnp.cos(jnp.arange(y_BTKGH.size).reshape(y_BTKGH.shape))), y_BTKGH

    gradients, y_BTKGH = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return y_BTKGH, *gradients


# float32 sums of at most 128 numbers of size 1, in another order: a few times 128 x 6e-8.
close = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=2e-5)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, T), min_size=B, max_size=B), st.integers(0, 9))
def test_it_equals_the_reference_with_its_gradients(lengths, seed):
    arrays = (*heads(seed), *rows_of(lengths))
    found = run(flash, *arrays)
    for a, b in zip(found, run(by_rule, *arrays), strict=True):
        close(a, b)
    for gradient in found[1:]:  # nothing reads padding, though padding sees the chain
        for row, length in enumerate(lengths):
            assert not np.any(gradient[row, length:])


def test_rows_of_anything_else_are_nan_and_no_other_row_is():
    until_BT, position_BT = (np.repeat(x, 9, axis=0) for x in rows_of([30]))
    until_BT[1, 30:40], position_BT[1, 30:40] = 40, np.arange(10)  # a second chain
    until_BT[2, 20:25], position_BT[2, 25:30] = 25, np.arange(20, 25)  # a branch
    until_BT[3], position_BT[3] = rows_of([T])  # a whole row
    until_BT[4], position_BT[4] = rows_of([1])  # padding alone
    position_BT[5, 3] = 7  # not its depth
    until_BT[6, 35] = 40  # behind the chain, yet more than padding
    until_BT[7, 0] = 1  # a chain behind padding
    until_BT[8, 29] = T  # padding that sees the last token of the chain
    alone = [True, False, False, True, True, False, False, False, False]
    np.testing.assert_array_equal(IMPLEMENTATION.plan(until_BT, position_BT, CUDNN).alone, alone)
    y_BTKGH = np.asarray(flash(*heads(0, rows=9), until_BT, position_BT))
    assert np.isfinite(y_BTKGH[alone]).all() and np.isnan(y_BTKGH[~np.array(alone)]).all()


def test_steps_of_a_tree_are_nan_and_chains_beside_it_are_scored():
    tree, chain = random_tree(0, 6), random_tree(1, 1)
    rows = [packed_trees(some, T, 16).rows for some in ([tree], [chain], [tree, chain])]
    rows.append(packed_trees([tree], T, 16, chains=True).rows)
    rows = jax.tree.map(lambda *x: np.concatenate(x), *rows, empty_rows(1, T, 16))
    finite_BSC = np.isfinite(logits(params(CUDNN), CUDNN, rows))
    assert finite_BSC[1].all() and finite_BSC[3:].all() and len(finite_BSC) > 6
    assert not finite_BSC[[0, 2]].any()


@functools.partial(jax.jit, static_argnums=(1, 2))
def step(weights, config, target, rows):
    """What training differentiates, and its gradient."""

    def loss(weights):
        return likelihood(HEADS["binary"], step_logits(weights, config, rows), *targets(rows, target))

    return jax.value_and_grad(loss)(weights)


@pytest.mark.parametrize("after_error", ["keep", "mask"])
def test_chains_train_as_their_trees_do(after_error):
    """First in float32 by the reference, so that rows are at stake alone; then in bfloat16 by this way."""
    target = TargetConfig("rating", neutral="negative", after_error=after_error)
    trees = [random_tree(seed, 9) for seed in range(3)]
    whole, single = packed_trees(trees, T, 32), packed_trees(trees, T, 32, chains=True)
    assert len(single.rows.tokens) > 8 > len(whole.rows.tokens)
    whole, single = filled(whole.rows, 4), filled(single.rows, 24)
    assert targets(whole, target)[1].sum() == targets(single, target)[1].sum()
    loss, gradient = step(params(PLAIN), PLAIN, target, whole)
    low_loss, low_gradient = step(params(PLAIN), CUDNN, target, single)
    for (name, x), y, low in zip(
        jax.tree_util.tree_leaves_with_path(step(params(PLAIN), PLAIN, target, single)),
        jax.tree.leaves((loss, gradient)),
        jax.tree.leaves((low_loss, low_gradient)),
        strict=True,
    ):
        size = np.abs(y).max()
        # Sums over other rows, on the scale of the largest: of some 30 steps, each off by a few 6e-8.
        np.testing.assert_allclose(x, y, atol=2e-5 * size, rtol=2e-5, err_msg=str(name))
        # Two layers round some twenty times forward and as often back, each time by up to 2^-9: 40 / 512 = 0.08.
        np.testing.assert_allclose(low, y, atol=0.08 * size, rtol=0, err_msg=str(name))


def test_a_run_packs_chains_for_training_and_validation(tmp_path):
    """Rows of anything else would make its loss, or its validation's scores, NaN."""
    model = dataclasses.replace(MODEL, attention="cudnn", dtype="bfloat16", head_dim=8)
    folder = make_data(tmp_path / "data")
    with one_device():
        result = training.train(experiment(folder, model=model, steps=2, log_every=1), tmp_path / "run")
    assert all(np.isfinite(line["loss"]) for line in lines(tmp_path / "run") if "loss" in line)
    trees = [json.loads(line) for line in (folder / "valid.jsonl").read_text().splitlines()]
    assert result["valid_labels"] == sum(len(tree["nodes"]) for tree in trees)
    assert result["valid_auroc"] is not None


def test_a_mesh_changes_nothing():
    arrays = (*heads(1, rows=4), *rows_of([T, 3, 100, 1]))
    expected = run(flash, *arrays)
    mesh = make_mesh(MeshConfig(2, 2, 2))
    with jax.set_mesh(mesh):
        place = jax.NamedSharding(mesh, spec("batch", None, "kv_heads"))
        found = run(flash, *(jax.device_put(x, place) for x in arrays[:3]), *put_rows(arrays[3:], mesh))
    for a, b in zip(found, expected, strict=True):
        close(a, b)
        assert a.sharding.spec[0] == ("data", "fsdp") and a.sharding.spec[2] == "tensor"


@pytest.fixture
def gpu(monkeypatch):
    """What this module and JAX ask of the machine while they trace, answered as by an A100 with cuDNN 9.10."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    device = types.SimpleNamespace(compute_capability="8.0")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    return device


CALL = re.compile(
    r"custom_call @__cudnn\$fmha(\w+)\(.*?fmha_scale\\22: ([\d.]+),.*?mask_type\\22: \\22(\w+)\\22.* : (.*)"
)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)])
def test_a_gpu_is_given_cudnns_causal_attention(gpu, sizes):
    """The model's gradient, lowered for CUDA: calls for each device's own rows and heads, forward and backward."""
    rows = filled(packed_trees([random_tree(0, 4)], T, 8, chains=True).rows, 8)
    mesh = make_mesh(MeshConfig(*sizes), jax.devices()[: np.prod(sizes)])

    def gradient(weights, rows):
        return jax.grad(lambda weights: step_logits(weights, CUDNN, rows).sum())(weights)

    with jax.set_mesh(mesh):
        weights = jax.eval_shape(lambda key: init(CUDNN, key), jax.random.key(0))
        lowered = jax.jit(gradient).trace(weights, put_rows(rows, mesh)).lower(lowering_platforms=("cuda",))
    calls = CALL.findall(lowered.as_text())
    b, k = 8 // (sizes[0] * sizes[1]), K // sizes[2]
    query, key = f"tensor<{b}x{T}x{k * G}x{H}xbf16>", f"tensor<{b}x{T}x{k}x{H}xbf16>"
    out, key_out, stats = f"tensor<{b}x{k * G}x{T}x{H}xbf16>", f"tensor<{b}x{k}x{T}x{H}xbf16>", f"{b}x{k * G}x{T}xf32"
    expected = {
        # In the backward pass the forward one again, since remat="full" keeps nothing.
        ("Softmax", f"({query}, {key}, {key}) -> ({out}, tensor<{stats}>, tensor<0xui8>)"),
        (
            "SoftmaxBackward",
            f"({query}, {key}, {key}, tensor<{stats}>, {query}, {query}) -> "
            f"({out}, {key_out}, {key_out}, tensor<0xui8>)",
        ),
    }
    assert {(name, types) for name, _, _, types in calls} >= expected
    assert {name for name, *_ in calls} == {"Softmax", "SoftmaxBackward"}
    assert {(float(scale), mask) for _, scale, mask, _ in calls} == {(H**-0.5, "CAUSAL")}
    assert f"{T}x{T}x" not in lowered.as_text()  # no matrix of all pairs


def test_machines_that_cudnn_does_not_run_on_are_refused(gpu, monkeypatch):
    for capability in ("7.5", "gfx942:sramecc+:xnack-"):
        gpu.compute_capability = capability
        with pytest.raises(ValueError, match=f"{re.escape(capability)}.*attention='blocked'"):
            plan(*rows_of([3]), CUDNN)
    for capability in ("8.0", "10.3", "12.0"):
        gpu.compute_capability = capability
        assert plan(*rows_of([3]), CUDNN).alone
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(ValueError, match="attention='kernel'"):
        plan(*rows_of([3]), CUDNN)
    with pytest.raises(ValueError, match="NVIDIA"):
        plan_of(types.SimpleNamespace(model=CUDNN, data=None), find("v5e-16"))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dtype": "float32"}, "dtype='bfloat16'"),
        ({"head_dim": 12}, "head_dim=12"),
        ({"head_dim": 256}, "head_dim=256"),
        ({"windows": (0, 8)}, "windows="),
        ({"attention_softcap": 50.0}, "attention_softcap=50.0"),
    ],
)
def test_models_that_cudnn_does_not_take_are_refused(change, message):
    refused(ValueError, f"attention='cudnn'.*{message}", dataclasses.replace, CUDNN, **change)


def test_rows_that_tiles_do_not_divide_are_refused():
    refused(ValueError, "128", plan, *(np.ones((1, 200), np.int32),) * 2, CUDNN)


def test_rows_split_over_context_are_refused():
    message = "'cudnn' does not split rows over the mesh's context=2; .* 'blocked' elsewhere, or mesh.context=1"
    mesh = make_mesh(MeshConfig(1, 2, 2, 2))
    refused(ValueError, message, check_mesh, CUDNN, mesh, 2, T)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda rows: plan(rows.until, rows.position, CUDNN), put_rows(empty_rows(2, T, 8), mesh))
