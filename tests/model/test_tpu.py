"""Compiled for TPUs without one: a slice's step, layers, and the kernel on a mesh."""

import collections
import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
from families import breadth
from jax.sharding import PartitionSpec as P
from tiny import Stepper, optimised

from jprm.devices import OPTIONS
from jprm.experiment import OptimizerConfig, TargetConfig
from jprm.methods.layers import deltanet
from jprm.model import layers, transformer
from jprm.model.attention import attend, plan
from jprm.model.config import DeltaNetConfig, ExpertsConfig, ModelConfig
from jprm.model.mesh import MeshConfig, abstract_rows, gathered_weight, make_mesh, row_parts, sharding, spec
from jprm.model.parameters import split
from jprm.model.transformer import CHUNKS, axes_of
from jprm.train.state import State, make_optimizer

OPTIMIZER = OptimizerConfig(learning_rate=1e-4)


def of_plan(module):
    """Returns a module of `jprm plan`, which reads compiled programs. Skips the test if the package is absent."""
    return pytest.importorskip(f"jprm.apps.plan.{module}")


def mesh_of(topology, **sizes):
    """A mesh over the devices of a slice that need not be there."""
    pytest.importorskip("libtpu", reason="needs libtpu: the extra `tpu`")
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return make_mesh(MeshConfig(**sizes), devices)


def compiled_step(mesh, config, A, B, T, S):
    """The training step for A micro-batches of B rows, and the state that it takes."""

    def start(key):
        trained, frozen = split(transformer.init(config, key), "")
        return State(jnp.int32(0), trained, frozen, make_optimizer(OPTIMIZER).init(trained))

    key = jax.random.key(0)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        state = jax.eval_shape(start, key)
        specs = jax.tree.map(lambda x: x.sharding.spec if x.sharding else P(), state)
        rows = abstract_rows(mesh, A, B, tokens=T, slots=S)

    def put(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))

    state = jax.tree.map(put, state, specs)
    target = TargetConfig("rating", neutral="positive", after_error="keep")
    step = Stepper(config, target, "cross_entropy", OPTIMIZER, 10, backend="tpu")
    with jax.set_mesh(mesh), optimised():
        return step.lower(state, rows).compile(), state


@pytest.mark.parametrize(
    "topology, data",
    [
        ("v5e:4x4", 1),
        *breadth([("v6e:4x4", 1), ("v5p:2x2x4", 2)]),
        pytest.param("v5p:2x2x4", 1, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_scattered_where_devices_make_more_than_one_ring(topology, data):
    """Neither the width, which is 56 a device as Qwen2.5-Math-7B's over 64, nor the product's fills whole tiles."""
    mesh, (D, F), T = mesh_of(topology, data=data), (16 * 56, 2368), 256

    def gradients(x_BTD, gate_DF, down_FD):
        def loss(gate_DF, down_FD):
            h_BTF = jax.nn.silu(jnp.einsum("BTD,DF->BTF", x_BTD, gathered_weight(gate_DF, 0)))
            y_BTD = jnp.einsum("BTF,FD->BTD", h_BTF, gathered_weight(down_FD, 1))
            return jnp.sum(jnp.sin(y_BTD), dtype=jnp.float32)

        return jax.grad(loss, argnums=(0, 1))(gate_DF, down_FD)

    def placed(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, sharding(*axes)))

    with jax.set_mesh(mesh), optimised():
        args = placed((16, T, D), "batch"), placed((D, F), "embed", None), placed((F, D), None, "embed")
        text = jax.jit(gradients, compiler_options=OPTIONS["tpu"]).lower(*args).compile().as_text()
    assert ('async_execution_thread="sparsecore"' in text) == (not topology.startswith("v5e"))  # which has none
    moved = of_plan("counts").count(of_plan("hlo").parse(text)).collectives
    size = collections.Counter()
    for c in moved:
        size[c.kind] += c.bytes
    # Both sums in bfloat16, and no more of each than the chip's share is sent on to where it belongs.
    assert size["all-gather"] == size["reduce-scatter"] == 2 * D * F * 2
    assert size.pop("collective-permute", 0) <= 3 * 2 * D * F * 2 / 16
    # What is scattered over 8 is summed with the other 8's.
    assert size.pop("all-reduce", 0) == (2 * D * F * 2 / 8 if data == 2 else 0) and len(size) == 2
    assert {c.moves for c in moved if c.kind == "all-reduce"} == ({"gradients"} if data == 2 else set())


@pytest.mark.slow
def test_the_step_compiles_for_a_slice():
    mesh = mesh_of("v5e:2x4", data=2, fsdp=2, tensor=2)
    config = ModelConfig(
        vocab_size=4096, layers=3, width=256, heads=8, kv_heads=2, head_dim=64, mlp_width=4096, rope_theta=1e4,
        norm_eps=1e-6, dtype="bfloat16", remat="full", attention="blocked",
    )  # fmt: skip
    compiled, state = compiled_step(mesh, config, A=2, B=8, T=512, S=64)
    memory = compiled.memory_analysis()
    # Parameters and two moments in float32, split over fsdp x tensor; norms and the head's few are not split.
    split_bytes = 3 * 4 * sum(x.size for x in state.trained.values()) / 4
    assert split_bytes < memory.argument_size_in_bytes < 1.1 * split_bytes
    assert memory.alias_size_in_bytes > 0.9 * split_bytes  # the state is donated
    # Nothing is as large as a device's two rows of 512 tokens and its half of the MLP: that is computed in pieces.
    computations = of_plan("hlo").parse(compiled.as_text()).computations.values()
    arrays = [array for c in computations for i in c.instructions.values() for array in i.arrays]
    assert max(array.size for array in arrays) < 2 * 512 * 4096 // 2


# ---- Steps of hybrids and of mixtures of experts compile for TPU slices without a TPU, through libtpu.


PLAIN = dict(
    vocab_size=512, width=256, heads=4, kv_heads=2, head_dim=128, mlp_width=256, rope_theta=1e4, norm_eps=1e-6,
    attention="kernel",
)  # fmt: skip
HYBRID = dict(
    layers=4, design="qwen3_next", attention_gate=True, rotary_dim=32, qk_norm=True,
    mixers=("deltanet", "attention"), deltanet=DeltaNetConfig(2, 4, 128, 128),
)  # fmt: skip
MIXED = dict(layers=2, mlps=("experts",), experts=ExpertsConfig(count=8, used=2, width=256, balance=0.01))


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize("name, topology, sizes", [
    pytest.param("hybrid", "v5e:2x2", dict(fsdp=2, tensor=2), marks=pytest.mark.slow),
    *breadth([("mixed", "v6e:2x2", dict(fsdp=2, expert=2))]),
])  # fmt: skip
def test_a_step_compiles_and_computes_what_the_model_needs(name, topology, sizes, dtype):
    """Of experts those that tokens use, though the gradient of a grouped product is of all by XLA itself."""
    config = ModelConfig(**PLAIN, **{"hybrid": HYBRID, "mixed": MIXED}[name], dtype=dtype)
    mesh = mesh_of(topology, **sizes)
    compiled, state = compiled_step(mesh, config, 1, 4, 512, 64)
    rows = 4 // row_parts(mesh)
    counts, hlo = of_plan("counts"), of_plan("hlo")
    program = counts.count(hlo.parse(compiled.as_text()), kernels=layers.kernels(config, rows, 512, mesh.shape))
    assert not program.uncounted
    ratio = program.flops * mesh.size / counts.model_flops(config, state.trained, 4, 512, 64)
    if name == "hybrid":  # what a chunk reads of the log of states is rounded for a product, and not all of the log
        assert f"bf16[1,{deltanet.bound(config, 512) + 1}," not in compiled.as_text()
    assert 1 < ratio < 2  # the forward pass is computed twice, 4/3; a block of keys is as long as half of a row


# ---- The kernel compiles for TPUs without a TPU, and so does a 7B model's step for a slice of 64 chips.


GIB = 2**30


@pytest.mark.parametrize(
    "topology, H, G, T, dtype, more",
    [
        ("v5e:2x2", 64, 3, 1024, "float32", {}),
        pytest.param("v5p:2x2x1", 128, 7, 131_072, "bfloat16", {}, marks=pytest.mark.slow),
        *breadth([("v6e:2x2", 256, 2, 1024, "float32", dict(windows=(512, 0), attention_softcap=50.0))]),
        *breadth([("tpu7x:2x2x1", 128, 8, 1024, "bfloat16", {})]),
        pytest.param("v5e:2x2", 64, 3, 131_072, "bfloat16", {}, marks=pytest.mark.slow),
        pytest.param("v6e:2x2", 256, 2, 131_072, "float32", {}, marks=pytest.mark.slow),
        pytest.param("tpu7x:2x2x1", 128, 16, 131_072, "bfloat16", {}, marks=pytest.mark.slow),
    ],
)
def test_forward_and_backward_compile_on_a_mesh_in_memory_linear_in_t(topology, H, G, T, dtype, more):
    mesh = mesh_of(topology, fsdp=-1, tensor=2)
    K, B, itemsize = 4, mesh.shape["fsdp"], jnp.dtype(dtype).itemsize
    config = ModelConfig(
        vocab_size=64, layers=1, width=64, heads=K * G, kv_heads=K, head_dim=H, mlp_width=64, rope_theta=1e4,
        norm_eps=1e-6, dtype=dtype, attention="kernel", **more,
    )  # fmt: skip

    def gradients(q, k, v, until_BT, position_BT, window):
        def total(*qkv):
            seen = plan(until_BT, position_BT, config)
            return jnp.sum(jnp.square(attend(*qkv, seen, config, window if more else None).astype(jnp.float32)))

        return jax.grad(total, argnums=(0, 1, 2))(q, k, v)

    def put(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec(*axes)))

    q = put((B, T, K, G, H), dtype, "batch", None, "kv_heads")
    k = put((B, T, K, H), dtype, "batch", None, "kv_heads")
    row = put((B, T), jnp.int32, "batch")
    with jax.set_mesh(mesh), optimised():
        compiled = jax.jit(gradients).lower(q, k, k, row, row, put((), jnp.int32)).compile()
    assert len(kernels(compiled)) == 3
    memory = compiled.memory_analysis()
    # Of a chip's one row and two key-value heads, at most: five copies of queries and of keys, heads of 64 padded to
    # 128; the sums of a row of logits, three float32 a query; the tables.
    queries, keys = 2 * G * T, 2 * T
    most = 5 * (queries + 2 * keys) * max(H, 128) * itemsize + 3 * 4 * queries + 4 * 2**20
    assert memory.temp_size_in_bytes < most


def kernels(compiled):
    return re.findall(r'custom_call_target="tpu_custom_call"', compiled.as_text())


QWEN = ModelConfig(
    vocab_size=152_064, layers=28, width=3584, heads=28, kv_heads=4, head_dim=128, mlp_width=18_944, rope_theta=1e6,
    norm_eps=1e-6, qkv_bias=True, tied_embeddings=False, dtype="bfloat16", remat="full", attention="kernel",
)  # fmt: skip
SMALL = dataclasses.replace(QWEN, vocab_size=4096, layers=4, width=896, heads=14, kv_heads=2, mlp_width=4864)


@pytest.mark.slow
@pytest.mark.parametrize("topology, config, T", [("v5p:2x2x1", SMALL, 2048), ("v5p:4x4x4", QWEN, 8192)])
def test_the_step_of_a_7b_model_holds_no_square_and_gathers_only_weights(topology, config, T):
    """Qwen2.5-7B as a PRM, and a small one: AdamW, a row a chip, weights and moments split over all chips."""
    mesh = mesh_of(topology)
    B = mesh.shape["fsdp"]
    compiled, state = compiled_step(mesh, config, A=1, B=B, T=T, S=512)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    print(f"{memory.argument_size_in_bytes / GIB:.2f} GiB arguments, {memory.temp_size_in_bytes / GIB:.2f} temporary")
    assert len(kernels(compiled)) == 4  # forward, once more in the backward pass, dq, dk and dv
    assert not [shape for _, shape in shapes(text) if shape.count(T) > 1]
    weights = {path.split("/")[-1]: x.shape for path, x in state.trained.items()}
    one_layer = {name: shape[1:] if len(axes_of(name)) > 2 else shape for name, shape in weights.items()}
    mlp = config.width * config.mlp_width
    of_weights = {math.prod(shape) for shape in one_layer.values()} - {mlp} | {mlp // CHUNKS}
    assert not {T * config.width, T * config.mlp_width, B * T * config.width} & of_weights  # a row's activations
    gathered = set(all_gathers(text))
    assert {size for dtype, size in gathered if dtype != "s32"} <= of_weights
    # The embedding is split by columns: every chip looks up the tokens of all rows in its own.
    assert {size for dtype, size in gathered if dtype == "s32"} <= {B * T}
    assert {math.prod(one_layer[name]) for name in ("query", "key", "out")} | {mlp // CHUNKS} <= {
        n for _, n in gathered
    }
    # Parameters and two moments in float32, of every chip its part; norms and biases are whole.
    split_bytes = 3 * 4 * sum(x.size for x in state.trained.values()) / B
    assert split_bytes < memory.argument_size_in_bytes < 1.1 * split_bytes


def shapes(text):
    """Every array in a compiled program, as its dtype and its dimensions."""
    matches = re.findall(r"\b([a-z]\w*)\[([\d,]+)\]", text)
    return [(dtype, tuple(map(int, dims.split(",")))) for dtype, dims in matches]


def all_gathers(text):
    """The dtype and the elements of what every all-gather results in: the largest array before its name."""
    for result in re.findall(r"= (.*?) all-gather(?:-start)?\(", text):
        yield max(((dtype, math.prod(dims)) for dtype, dims in shapes(result)), key=lambda x: x[1])
