"""Equal numbers on every mesh, split parameters and optimizer state, and a pod's shardings without a pod."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import breadth
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from refusing import refused
from tiny import GEMMA, TINY, Stepper, filled, init, packed_trees, params, placed, random_tree

from jprm.experiment import OptimizerConfig, TargetConfig
from jprm.model.config import ModelConfig
from jprm.model.mesh import (
    MESH_AXES,
    RULES,
    MeshConfig,
    _arranged,
    abstract_rows,
    check_mesh,
    embedding_lookup,
    gathered_weight,
    make_mesh,
    put_rows,
    spec,
)
from jprm.model.parameters import held_decoder, split
from jprm.model.transformer import axes_of, step_logits
from jprm.train.state import State, make_optimizer

TARGET = TargetConfig("rating", neutral="positive", after_error="keep")
OPTIMIZER = OptimizerConfig(learning_rate=0.01, warmup_steps=2, weight_decay=0.1, clip_norm=1.0)
CONFIG = dataclasses.replace(TINY, kv_heads=4, attention="reference")
STEPS = 8


def train(mesh, lead, config=CONFIG, steps=STEPS):
    """Losses of `steps` steps on the same eight rows, in micro-batches; the last state and metrics."""
    rows = filled(packed_trees([random_tree(seed) for seed in range(8)], 64, 16).rows, 8)
    rows = jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), rows)
    weights = params(config) if mesh is None else placed(params(config), mesh)
    trained, frozen = split(jax.tree.map(jnp.asarray, weights), "embed")
    count = jnp.int32(0) if mesh is None else jax.device_put(jnp.int32(0), jax.NamedSharding(mesh, P()))
    state = State(count, trained, frozen, jax.jit(make_optimizer(OPTIMIZER).init)(trained))
    step = Stepper(config, TARGET, "cross_entropy", OPTIMIZER, STEPS)  # equal configs share their compiled steps
    compiled = step.cache_size()
    rows = rows if mesh is None else put_rows(rows, mesh, lead=1)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, rows)
        losses.append(float(metrics.loss / metrics.count))
    assert step.cache_size() <= compiled + 1  # one compilation, whatever was put where
    return np.array(losses), state, jax.tree.map(np.asarray, metrics)


@pytest.fixture(scope="module")
def alone():
    return train(None, (1, 8))


def test_parameters_are_born_split_and_equal_those_of_one_device():
    expected = init(CONFIG, jax.random.key(0))
    with jax.set_mesh(make_mesh(MeshConfig(2, 2, 2))):
        params = init(CONFIG, jax.random.key(0))
    # The same random bits, made normal by a loop that rounds the last bit as it likes.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-7), params, expected)
    for path, array in jax.tree_util.tree_leaves_with_path(params):
        place = spec(*axes_of(path[-1].key))
        assert array.sharding.spec == place
        pieces = 2 ** sum(axis is not None for axis in place)
        assert array.addressable_shards[0].data.size * pieces == array.size
    assert not np.any(params["head"]["kernel"]) and not np.any(params["head"]["bias"])  # a new head says one half
    assert params["decoder"]["layers_0"]["query"].sharding.spec == P(None, "fsdp", "tensor", None, None)
    assert params["decoder"]["layers_0"]["down"].sharding.spec == P(None, "tensor", "fsdp")


@pytest.mark.parametrize(
    "sizes, attention, remat",
    [
        ((2, 2, 2), "paths", "full"),
        *breadth([((8, 1, 1), "blocked", "full"), ((1, 4, 2), "reference", "full")]),
        # the same with `context`
        ((1, 2, 2, 2), "blocked", "full"),
        *breadth([((4, 1, 1, 2), "blocked", "dots"), ((1, 2, 1, 4), "reference", "nothing")]),
    ],
)  # fmt: skip
def test_every_mesh_trains_as_one_device_does(alone, sizes, attention, remat):
    mesh = make_mesh(MeshConfig(*sizes))
    config = dataclasses.replace(CONFIG, attention=attention, attention_block=8, remat=remat)
    with jax.set_mesh(mesh):
        check_mesh(config, mesh, rows=8, tokens=64)
        losses, state, metrics = train(mesh, (1, 8), config)
    # float32 sums over devices in another order are off by some 1e-7 a step, and Adam divides a gradient by its own
    # size, so that where a gradient is about zero such a difference moves a parameter by up to the learning rate.
    np.testing.assert_allclose(losses, alone[0], rtol=1e-3)
    np.testing.assert_allclose(losses[:3], alone[0][:3], rtol=1e-5)
    assert losses[-1] < 0.8 * losses[0]
    for field in ("count", "tokens"):
        assert getattr(metrics, field) == getattr(alone[2], field)
    for path, array in state.trained.items():
        place = jax.NamedSharding(mesh, spec(*axes_of(path.split("/")[-1]), mesh=mesh))
        moments = (optax.tree.get(state.optimizer, name)[path] for name in ("mu", "nu"))
        assert {x.sharding for x in (array, *moments)} == {place}


def test_accumulation_changes_nothing(alone):
    mesh = make_mesh(MeshConfig(2, 1, 1), jax.devices()[:2])
    with jax.set_mesh(mesh):
        sharded, *_ = train(mesh, (2, 4), steps=3)
    for losses in (sharded, train(None, (4, 2), steps=3)[0]):
        np.testing.assert_allclose(losses, alone[0][:3], rtol=1e-5)  # the order of float32 sums


@pytest.mark.parametrize("sizes", [(1, 8, 1, 1), (2, 2, 2, 1), (1, 2, 2, 2), (2, 2, 1, 2)])
@pytest.mark.parametrize("axis", [0, 2])
def test_a_gathered_weight_has_the_gradient_of_all_tokens(sizes, axis):
    """Whole numbers, so that sums in any order are equal; the gradient lies as the weight does."""
    mesh, rng = make_mesh(MeshConfig(*sizes)), np.random.default_rng(0)
    heads, width = ("BTKH", (8, 6, 4, 3), ("batch", "tokens", "kv_heads")), ("BTD", (8, 6, 16), ("batch", "tokens"))
    if axis == 0:
        arrays = width, ("DKH", (16, 4, 3), ("embed", "kv_heads")), heads
    else:
        arrays = heads, ("KHD", (4, 3, 16), ("kv_heads", None, "embed")), width
    (of_x, of_w, of_y), _, axes = zip(*arrays, strict=True)
    x, w, dy = (rng.integers(-3, 4, shape).astype(np.float32) for _, shape, _ in arrays)

    def run(x, w, dy):
        product = functools.partial(jnp.einsum, f"{of_x},{of_w}->{of_y}", x, out_sharding=spec(*axes[2]))
        y, back = jax.vjp(lambda w: product(gathered_weight(w, axis)), w)
        return y, *back(dy)

    with jax.set_mesh(mesh):
        at = [
            jax.device_put(a, jax.NamedSharding(mesh, spec(*places)))
            for a, places in zip((x, w, dy), axes, strict=True)
        ]
        y, dw = jax.jit(run)(*at)
    np.testing.assert_array_equal(y, np.einsum(f"{of_x},{of_w}->{of_y}", x, w))
    np.testing.assert_array_equal(dw, np.einsum(f"{of_x},{of_y}->{of_w}", x, dy))
    assert dw.sharding.is_equivalent_to(at[1].sharding, 3)


def test_a_weight_that_no_device_has_a_part_of_is_not_gathered():
    """Neither on one device nor on copies of the weights: XLA keeps a scatter over one device, with its copies."""
    for sizes, parts in [((1, 1, 1), 1), ((8, 1, 1), 1), ((2, 1, 4), 1), ((1, 2, 4), 2), ((1, 1, 1, 8), 8)]:
        mesh = make_mesh(MeshConfig(*sizes), jax.devices()[: np.prod(sizes)])
        with jax.set_mesh(mesh):
            w = jax.device_put(np.ones((8, 4), np.float32), jax.NamedSharding(mesh, spec("embed", "mlp")))
            assert (gathered_weight(w, 0) is w) == (parts == 1)
    w = jnp.ones((8, 4))
    assert gathered_weight(w, 0) is w  # without a mesh


@pytest.mark.parametrize("sizes", [(1, 8, 1, 1), (2, 4, 1, 1), (2, 2, 2, 1), (2, 2, 1, 2)])
def test_no_device_has_the_gradient_of_the_whole_embedding(sizes):
    mesh, (V, D, T), rng = make_mesh(MeshConfig(*sizes)), (48, 24, 400), np.random.default_rng(0)
    tokens_BT, dx_BTD = rng.integers(0, V, (8, T)), rng.integers(-3, 4, (8, T, D)).astype(np.float32)

    def gradient(table_VD, tokens_BT, dx_BTD):
        return jax.vjp(lambda table_VD: embedding_lookup(table_VD, tokens_BT), table_VD)[1](dx_BTD)[0]

    table_VD, rows = np.zeros((V, D), np.float32), ("batch", "tokens")
    with jax.set_mesh(mesh):
        arrays = (table_VD, ("vocab", "embed")), (tokens_BT, rows), (dx_BTD, rows)
        args = [jax.device_put(x, jax.NamedSharding(mesh, spec(*axes))) for x, axes in arrays]
        compiled = jax.jit(gradient).lower(*args).compile()
        found_VD = compiled(*args)
    expected_VD = np.zeros((V, D), np.float32)
    np.add.at(expected_VD, tokens_BT, dx_BTD)
    np.testing.assert_array_equal(found_VD, expected_VD)  # whole numbers: sums in any order are equal
    columns = {int(n) for n in re.findall(rf"f32\[{V // sizes[2]},(\d+)\]", compiled.as_text())}
    assert columns == {D // (sizes[1] * sizes[3])}


@pytest.mark.parametrize("attention", ["blocked", "paths"])
def test_gemma_and_int8_type_check_on_a_mesh(attention):
    """Explicit shardings are types: a product or a window that could not be placed would be an error here."""
    config = dataclasses.replace(GEMMA, attention=attention)
    rows = filled(packed_trees([random_tree(seed) for seed in range(2)], 64, 16).rows, 4)

    def everything(key, rows):
        weights = init(config, key)
        small = weights | {"decoder": held_decoder(weights["decoder"], "int8")}
        gradient = jax.grad(lambda weights: step_logits(weights, config, rows).sum())(weights)
        return step_logits(small, config, rows), gradient

    with jax.set_mesh(make_mesh(MeshConfig(2, 2, 2))):
        logit_BSC, gradient = jax.eval_shape(everything, jax.random.key(0), put_rows(rows, jax.sharding.get_mesh()))
    assert logit_BSC.sharding.spec[0] == ("data", "fsdp")
    assert gradient["decoder"]["layers_1"]["up"].sharding.spec == spec(*axes_of("up"))


def test_a_mesh_that_does_not_fit_is_refused():
    mesh = make_mesh(MeshConfig(2, 2, 2))
    for config, rows, message in [
        (CONFIG, 6, "rows"),
        (dataclasses.replace(CONFIG, heads=3, kv_heads=3), 8, "kv_heads"),
        (dataclasses.replace(CONFIG, mlp_width=33), 8, "mlp_width"),
        (dataclasses.replace(CONFIG, vocab_size=65), 8, "vocab_size"),
        (dataclasses.replace(CONFIG, width=15), 8, "width = 15"),
    ]:
        refused(ValueError, message, check_mesh, config, mesh, rows)
    mesh = make_mesh(MeshConfig(1, 2, 1, 4))
    refused(ValueError, "66.*context", check_mesh, CONFIG, mesh, 8, tokens=66)
    refused(ValueError, "width = 20", check_mesh, dataclasses.replace(CONFIG, width=20), mesh, 8, tokens=64)
    for sizes in [(3, -1, 1), (2, 2, 1), (-1, -1, 1), (0, -1, 1), (-2, -1, 1), (4, 4, 4)]:
        refused(ValueError, "8 devices", make_mesh, MeshConfig(*sizes))
    assert make_mesh(MeshConfig(data=-1, fsdp=1, tensor=2)).shape == dict(zip(MESH_AXES, (4, 1, 2, 1, 1), strict=True))
    assert make_mesh(MeshConfig(), jax.devices()[:3]).shape == dict(zip(MESH_AXES, (1, 3, 1, 1, 1), strict=True))


def tpus(sizes, slices=1):
    """Devices as jax lists those of TPU slices, in the order of their hosts."""
    device = functools.partial(types.SimpleNamespace, platform="tpu", device_kind="TPU v5", core_on_chip=0)
    coords = [tuple(reversed(c)) for c in np.ndindex(tuple(reversed(sizes)))]
    return [device(coords=c, slice_index=i) for i in range(slices) for c in coords]


@pytest.mark.parametrize("mesh", [(1, 64, 1, 1), (1, 16, 4, 1), (2, 8, 4, 1), (1, 4, 4, 4), (1, 2, 8, 4)])
def test_devices_of_a_slice_lie_as_its_links(mesh):
    """Four devices along `tensor` or `context` have links between them: they differ in only one direction."""
    devices = tpus((4, 4, 4))
    order = _arranged(list(mesh), devices)
    assert order.shape == mesh and {d.coords for d in order.flat} == {d.coords for d in devices}
    coords = np.array([d.coords for d in order.flat]).reshape(*mesh, 3)
    for axis in (2, 3):
        if mesh[axis] == 4:
            assert np.all((np.ptp(coords, axis=axis) > 0).sum(-1) == 1)


def test_slices_lie_along_data_and_other_devices_in_their_order():
    order = _arranged([4, 16, 2, 1], tpus((4, 4, 4), slices=2))
    slice_of = np.vectorize(lambda d: d.slice_index)(order)
    np.testing.assert_array_equal(slice_of, np.broadcast_to(np.repeat([0, 1], 2)[:, None, None, None], order.shape))
    refused(ValueError, "mesh.data=2", _arranged, [1, 128, 1, 1], tpus((4, 4, 4), slices=2))
    assert list(make_mesh(MeshConfig(2, 2, 2)).devices.flat) == jax.devices()


def test_two_axes_of_an_array_on_one_mesh_axis_are_refused(monkeypatch):
    assert spec("batch", None, None) == P(("data", "fsdp"), None, None)
    split = make_mesh(MeshConfig(context=2))  # `context` is named where there is one
    assert spec("batch", "tokens", mesh=split) == P(("data", "fsdp"), "context")
    assert spec("embed", "mlp", mesh=split) == P(("fsdp", "context"), "tensor")
    assert spec("batch", "tokens") == P(("data", "fsdp"), None) and spec("embed") == P("fsdp")
    refused(ValueError, "mesh axis", spec, "tokens", "embed", mesh=split)
    refused(ValueError, "mesh axis", spec, "batch", "embed")
    refused(ValueError, "mesh axis", spec, "kv_heads", "mlp")
    monkeypatch.setitem(RULES, "embed", ("fsdp", "tensor"))
    refused(ValueError, "mesh axis", spec, "vocab", "embed")


def test_a_step_on_64_chips_type_checks_without_them():
    """Explicit shardings are types: tracing alone finds a product or a gather that JAX cannot place."""
    config = ModelConfig(
        vocab_size=32768, layers=24, width=2048, heads=16, kv_heads=8, head_dim=128, mlp_width=8192, rope_theta=1e6,
        norm_eps=1e-6, qk_norm=True, dtype="bfloat16", attention="paths",
    )  # fmt: skip
    tx = make_optimizer(OPTIMIZER)

    def start(key):
        trained, frozen = split(init(config, key), "")
        return State(jnp.int32(0), trained, frozen, tx.init(trained))

    mesh = AbstractMesh((2, 8, 4, 1, 1), MESH_AXES, axis_types=(AxisType.Explicit,) * 5)
    with jax.sharding.use_abstract_mesh(mesh):
        state = jax.eval_shape(lambda: start(jax.random.key(0)))
        assert sum(x.size for x in jax.tree.leaves(state.params)) > 1e9
        rows = abstract_rows(mesh, 4, 32, tokens=2048, slots=128)
        step = Stepper(config, TARGET, "cross_entropy", OPTIMIZER, 100)
        after, metrics = jax.eval_shape(step.step, state, rows, jax.ShapeDtypeStruct((), "float32"))
    form = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert form(after) == form(state)
    place = lambda tree: jax.tree.map(lambda x: x.sharding, tree)  # noqa: E731
    moments = (optax.tree.get(after.optimizer, name) for name in ("mu", "nu"))
    assert all(place(x) == place(state.trained) for x in (after.trained, *moments))
    assert after.params["decoder"]["layers_0"]["gate"].sharding.spec == P(None, "fsdp", "tensor")
    assert metrics.loss.sharding.is_fully_replicated
