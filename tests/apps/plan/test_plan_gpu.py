"""Plans for NVIDIA GPUs, compiled on a machine without one: the extra `gpu-aot`."""

import json

import pytest
from test_plan import file  # noqa: F401  (a fixture)
from tiny import optimised

from jprm.apps import cli


@pytest.mark.parametrize("options", ["", " --scoring", " --slices 2 --set mesh.data=2 data.rows=16 data.micro_rows=16"])
def test_a_plan_for_gpus(file, options, tmp_path, monkeypatch):  # noqa: F811
    pytest.importorskip("jax_plugins.xla_cuda12", reason="needs XLA's compiler for CUDA: the extra `gpu-aot`")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    out, sets = tmp_path / "plan.json", "" if "--set" in options else " --set"
    line = f"plan {file} --topology h100-8 --output {out}{options}{sets} model.attention=gpu_kernel data.tokens=1024"
    with optimised():
        assert cli.main(line.split()) == 0
    report = json.loads(out.read_text())
    memory, program, bounds = report["memory"], report["program"], report["bounds"]
    assert memory["available"] == 0.92 * 84_942_979_072 and memory["total"] < memory["available"]
    assert program["uncounted_kernels"] == []
    # Forward once more in the backward pass, and blocks of a chain's diagonal in full.
    assert 1 < program["flops_over_model"] < (1.2 if "scoring" in options else 1.6)
    sent = {name: sum(row["bytes"] for row in program["collectives"] if row["moves"] == name and row["in_layers"])
            for name in ("weights", "gradients", "other")}  # fmt: skip
    assert sent["weights"] > 0 and sent["other"] < 0.01 * sent["weights"]
    assert ({row["network"] for row in program["collectives"]} == {True, False}) == ("slices" in options)
    assert bounds["step"] == max(bounds[x] for x in ("compute", "hbm", "interconnect", "network"))
