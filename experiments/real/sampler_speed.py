"""Tokens a second of jprm's sampler and of llama.cpp's server on the same GSM8K prompts, one after the other.

    python -m experiments.real.sampler_speed --model runs/models/qwen2.5-coder-0.5b.gguf --server-python PYTHON

PYTHON has the package xllamacpp (llama.cpp with its server). Both have as many threads as there are cores, the same
chat prompt, temperature 0.8 and the model's own ends. The server's slots are always busy, and its prompts are cached:
the samples of a problem follow each other. Memory is the largest resident size of each process.
"""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import resource
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import tyro

from jprm.methods.policy.protocol import Prefix
from jprm.methods.policy.sampler import SamplerConfig, load_sampler

HERE = pathlib.Path(__file__).parent
SERVER = """
import sys, time, xllamacpp as x
p = x.CommonParams()
slots, context, p.port, threads = map(int, sys.argv[2:])
p.model.path, p.n_parallel, p.n_ctx = sys.argv[1], slots, slots * context
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
p.cont_batching, p.cache_ram_mib = True, 0
server = x.Server(p)
while True:
    time.sleep(60)
"""


def main(
    model: pathlib.Path, server_python: pathlib.Path, problems: int = 64, samples: int = 8, tokens: int = 400,
    rows: int = 128, slots: int = 32, port: int = 18471,
) -> None:  # fmt: skip
    """Measure both and print one JSON object.

    Args:
        model: A GGUF file.
        server_python: A Python with xllamacpp.
        problems: The first ones of `pools/own_test.jsonl.gz`.
        samples: Of each problem.
        tokens: Of a sample, at most.
        rows: Samples that jprm decodes at once.
        slots: Samples that the server decodes at once.
        port: Of the server.
    """
    threads = len(os.sched_getaffinity(0))
    with gzip.open(HERE / "pools/own_test.jsonl.gz", "rt") as file:
        texts = [json.loads(line)["problem"] for _, line in zip(range(problems), file, strict=False)]
    prompt = (HERE / "prompt.txt").read_text().rstrip("\n")
    result: dict[str, Any] = {"threads": threads, "problems": problems, "samples": samples, "tokens": tokens}
    result["llama.cpp"] = of_server(model, server_python, texts, prompt, samples, tokens, slots, threads, port)
    print(json.dumps(result), flush=True)
    result["jprm"] = of_sampler(model, texts, prompt, samples, tokens, rows)
    result["ratio"] = result["jprm"]["tokens_per_s"] / result["llama.cpp"]["tokens_per_s"]
    print(json.dumps(result))


def of_sampler(
    model: pathlib.Path, texts: list[str], prompt: str, samples: int, tokens: int, rows: int
) -> dict[str, float]:
    compiling = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiling.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    options = SamplerConfig(temperature=0.8, max_tokens=tokens, prompt=prompt, chat=True, rows=rows)
    policy = load_sampler(model, options)
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    compiling.clear()
    start = time.perf_counter()
    drawn = policy.sample([Prefix(text) for text in texts], samples, until="end", seed=0)
    seconds, total = time.perf_counter() - start, sum(sample.tokens for samples in drawn for sample in samples)
    return {
        "tokens": total, "seconds": seconds, "compiling": sum(compiling),
        "tokens_per_s": total / (seconds - sum(compiling)), "tokens_per_s_with_compiling": total / seconds,
        "loaded_gb": loaded / 1e6, "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }  # fmt: skip


def of_server(
    model: pathlib.Path, python: pathlib.Path, texts: list[str], prompt: str, samples: int, tokens: int, slots: int,
    threads: int, port: int,
) -> dict[str, float]:  # fmt: skip
    arguments = map(str, (model, slots, tokens + 400, port, threads))
    server = subprocess.Popen([python, "-c", SERVER, *arguments], stderr=subprocess.DEVNULL)
    try:
        wait_for(port, server)
        jobs = [(prompt.replace("{problem}", text), seed) for text in texts for seed in range(samples)]
        start = time.perf_counter()
        with ThreadPoolExecutor(slots) as pool:
            counts = list(pool.map(lambda job: asked(port, job[0], job[1], tokens), jobs))
        seconds = time.perf_counter() - start
        status = pathlib.Path(f"/proc/{server.pid}/status").read_text()
        peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
        return {"tokens": sum(counts), "seconds": seconds, "tokens_per_s": sum(counts) / seconds, "peak_gb": peak / 1e6}
    finally:
        server.kill()


def asked(port: int, message: str, seed: int, tokens: int) -> int:
    """Returns the number of a sample's tokens."""
    body = {
        "messages": [{"role": "user", "content": message}],
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0,
    }
    body |= {"max_tokens": tokens, "seed": seed, "cache_prompt": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=7200) as answer:  # a slow machine answers late
        return json.load(answer)["usage"]["completion_tokens"]


def wait_for(port: int, server: subprocess.Popen) -> None:
    for _ in range(300):
        if server.poll() is not None:
            raise SystemExit("error: the server ended: does its Python have xllamacpp?")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise SystemExit("error: the server did not start in five minutes")


if __name__ == "__main__":
    tyro.cli(main)
