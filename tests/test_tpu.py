"""The training step compiles for TPU slices without a TPU, through libtpu."""

import collections

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from tiny import Stepper, optimised

from jprm.apps.plan import counts, hlo
from jprm.apps.plan.plan import abstract_rows
from jprm.devices import OPTIONS
from jprm.experiment import OptimizerConfig, TargetConfig
from jprm.model import transformer
from jprm.model.config import ModelConfig
from jprm.model.mesh import MeshConfig, gathered_weight, make_mesh, sharding
from jprm.model.parameters import split
from jprm.train.state import State, make_optimizer

OPTIMIZER = OptimizerConfig(learning_rate=1e-4)


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


@pytest.mark.parametrize("topology, data", [("v5e:4x4", 1), ("v5p:2x2x4", 1), ("v6e:4x4", 1), ("v5p:2x2x4", 2)])
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
    moved = counts.count(hlo.parse(text)).collectives
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
    computations = hlo.parse(compiled.as_text()).computations.values()
    arrays = [array for c in computations for i in c.instructions.values() for array in i.arrays]
    assert max(array.size for array in arrays) < 2 * 512 * 4096 // 2
