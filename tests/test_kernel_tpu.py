"""The kernel compiles for TPUs without a TPU, and so does a 7B model's step for a slice of 64 chips."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
from test_tpu import compiled_step, mesh_of
from tiny import optimised

from jprm.model.attention import attend, plan
from jprm.model.config import ModelConfig
from jprm.model.mesh import spec
from jprm.model.transformer import CHUNKS, axes_of

GIB = 2**30


@pytest.mark.parametrize(
    "topology, H, G, T, dtype, more",
    [
        ("v5e:2x2", 64, 3, 1024, "float32", {}),
        pytest.param("v5p:2x2x1", 128, 7, 131_072, "bfloat16", {}, marks=pytest.mark.slow),
        ("v6e:2x2", 256, 2, 1024, "float32", dict(windows=(512, 0), attention_softcap=50.0)),
        ("tpu7x:2x2x1", 128, 8, 1024, "bfloat16", {}),
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
