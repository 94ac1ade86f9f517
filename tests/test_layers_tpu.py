"""Steps of hybrids and of mixtures of experts compile for TPU slices without a TPU, through libtpu."""

import pytest
from test_tpu import compiled_step, mesh_of

from jprm.apps.plan import counts, hlo
from jprm.methods.layers import deltanet
from jprm.model import layers
from jprm.model.config import DeltaNetConfig, ExpertsConfig, ModelConfig
from jprm.model.mesh import row_parts

PLAIN = dict(
    vocab_size=512, width=256, heads=4, kv_heads=2, head_dim=128, mlp_width=256, rope_theta=1e4, norm_eps=1e-6,
    attention="kernel",
)  # fmt: skip
HYBRID = dict(
    layers=4, design="qwen3_next", attention_gate=True, rotary_dim=32, qk_norm=True,
    mixers=("deltanet", "attention"), deltanet=DeltaNetConfig(2, 4, 128, 128),
)  # fmt: skip
MIXED = dict(layers=2, mlps=("experts",), experts=ExpertsConfig(count=8, used=2, width=256, balance=0.01))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name, topology, sizes", [
    pytest.param("hybrid", "v5e:2x2", dict(fsdp=2, tensor=2), marks=pytest.mark.slow),
    ("mixed", "v6e:2x2", dict(fsdp=2, expert=2)),
])  # fmt: skip
def test_a_step_compiles_and_computes_what_the_model_needs(name, topology, sizes, dtype):
    """Of experts those that tokens use, though the gradient of a grouped product is of all by XLA itself."""
    config = ModelConfig(**PLAIN, **{"hybrid": HYBRID, "mixed": MIXED}[name], dtype=dtype)
    mesh = mesh_of(topology, **sizes)
    compiled, state = compiled_step(mesh, config, 1, 4, 512, 64)
    rows = 4 // row_parts(mesh)
    program = counts.count(hlo.parse(compiled.as_text()), kernels=layers.kernels(config, rows, 512, mesh.shape))
    assert not program.uncounted
    ratio = program.flops * mesh.size / counts.model_flops(config, state.trained, 4, 512, 64)
    if name == "hybrid":  # what a chunk reads of the log of states is rounded for a product, and not all of the log
        assert f"bf16[1,{deltanet.bound(config, 512) + 1}," not in compiled.as_text()
    assert 1 < ratio < 2  # the forward pass is computed twice, 4/3; a block of keys is as long as half of a row
