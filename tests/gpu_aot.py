"""Compiles attention's gradient for an NVIDIA GPU that is not there, and prints what its kernels take as JSON.

    JAX_PLATFORMS=cpu python tests/gpu_aot.py '{"chip": "h100", "T": 16384, "H": 128}'

This needs the extra `gpu-aot`. It is a process of its own: Triton aborts where it cannot compile a kernel, and XLA
takes its flags from the environment.
"""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

TARGETS = pathlib.Path(__file__).parent.parent / "jprm/apps/plan/gpu_targets"
ARCH = {"a100": "sm_80", "h100": "sm_90a", "b200": "sm_100a"}
CASE = dict(chip="h100", B=1, T=2048, K=2, G=2, H=128, dtype="bfloat16", attention="gpu_kernel", windowed=False)
TENSOR_CORES = r"(wgmma\.mma_async|tcgen05\.mma|mma\.sync)\S*"


def compiled(case: dict):
    """Returns the compiled gradient of a sum over attention's output. `config`: more fields of the model."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from jprm.model.attention import attend, plan
    from jprm.model.config import ModelConfig
    from jprm.model.mesh import MeshConfig, make_mesh, spec

    B, T, K, G, H = (case[x] for x in "BTKGH")
    config = ModelConfig(
        vocab_size=64, layers=1, width=64, heads=K * G, kv_heads=K, head_dim=H, mlp_width=64, rope_theta=1e4,
        norm_eps=1e-6, dtype=case["dtype"], attention=case["attention"], windows=(512, 0) if case["windowed"] else (),
        **case.get("config", {}),
    )  # fmt: skip
    target = (TARGETS / f"{case['chip']}.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=target)
    mesh = make_mesh(MeshConfig(), topology.devices)

    def gradients(q, k, v, until_BT, position_BT, window):
        def total(*qkv):
            seen = plan(until_BT, position_BT, config)
            y_BTKGH = attend(*qkv, seen, config, window if case["windowed"] else None)
            return jnp.sum(jnp.square(y_BTKGH.astype(jnp.float32)))

        return jax.grad(total, argnums=(0, 1, 2))(q, k, v)

    def array(shape, *axes, dtype="int32"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec(*axes)))

    row, heads = array((B, T), "batch"), ("batch", None, "kv_heads")
    q, k = (array(shape, *heads, dtype=case["dtype"]) for shape in ((B, T, K, G, H), (B, T, K, H)))
    arguments = q, k, k, row, row, array(())
    with jax.set_mesh(mesh):  # from jax 0.11 on, Triton's lowering asks the mesh for the kind of GPU
        return jax.jit(gradients).lower(*arguments).compile()


def kernels(dump: pathlib.Path, arch: str) -> dict:
    """Returns registers, spilled and shared bytes and tensor-core instructions of the kernels that XLA dumped."""
    (launches,) = dump.glob("*.thunk_sequence.txt")
    shared = dict(re.findall(r"\b(\w+_kernel)\b.*shared_memory: (\d+) bytes", launches.read_text()))
    ptxas = importlib.util.find_spec("nvidia.cuda_nvcc").submodule_search_locations[0] + "/bin/ptxas"
    by_kernel = {}
    for path in dump.glob("*.ptx"):
        code = path.read_text()
        if not (named := re.search(r"\.entry (\w+_kernel)\(", code)):
            continue
        command = [ptxas, "-v", f"-arch={arch}", str(path), "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        registers, spilled = (int(re.search(rf"(\d+) {x}", said)[1]) for x in ("registers", "bytes spill stores"))
        tensor = sorted({match[1] for match in re.finditer(TENSOR_CORES, code)})
        by_kernel[named[1]] = dict(
            registers=registers, spilled=spilled, shared=int(shared[named[1]]), tensor_cores=tensor,
            warned=bool(re.search(r"warning|Performance Loss", said)),
        )  # fmt: skip
    return by_kernel


def main() -> None:
    case = CASE | json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as dump:
        # jax 0.12 dumps PTX by the latter, with which 0.10 takes eight times as long for the same files.
        emitters = "" if importlib.metadata.version("jax").startswith("0.10.") else " --xla_dump_emitter_re=.*"
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump}{emitters}"
        memory = compiled(case).memory_analysis()
        ours = case["attention"] == "gpu_kernel"
        registers = kernels(pathlib.Path(dump), ARCH[case["chip"]]) if ours else {}
    print(json.dumps(dict(temporaries=memory.temp_size_in_bytes, kernels=registers)))


if __name__ == "__main__":
    main()
