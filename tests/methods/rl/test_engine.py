"""Policies on a server: the files of a push, draws, and the refusal of a server that goes on with its old weights."""

import contextlib
import copy
import dataclasses
import gzip
import itertools
import json
import math
import shutil
import threading
import types

import jax
import numpy as np
import pytest
from refusing import refused
from tiny_rl import POLICY, by_engine, experiment, make, save_run, servable
from tiny_run import one_device

from jprm.checkpoints.safetensors import Tensors
from jprm.methods.export.export import export
from jprm.methods.policy import sampler
from jprm.methods.policy.protocol import Prefix
from jprm.methods.policy.sampler import SamplerConfig, load_sampler
from jprm.methods.rl import engine as engines
from jprm.methods.rl import loop
from jprm.methods.rl.credit import CreditConfig
from jprm.methods.rl.engine import EngineConfig, Probes, RemoteSampler, refusal
from jprm.model.mesh import make_mesh

TIED = dataclasses.replace(POLICY, qk_norm=False)  # a Qwen2
MODEL = dataclasses.replace(TIED, tied_embeddings=False)
OPTIONS = SamplerConfig(1.0, max_tokens=12, rows=8)
PROBLEMS = [Prefix(f"{a}+{b}=?") for a in range(10) for b in range(10)]


class Served:
    """What SGLang and vLLM do with these calls, by jprm's own sampler of the folder that was pushed.

    `stale`: it reports updates, and goes on with its old weights; `trim`: it leaves out the end of text.
    """

    def __init__(self, serve):
        self.stale = self.trim = False
        self.behind = ""  # the part of the parameters that an update leaves as it was
        self.lock, self.sampler, self.updates = threading.Lock(), None, []
        self.server = serve(self.answer)
        self.url = self.server.url.removesuffix("/v1")

    def answer(self, number, body):
        with self.lock:
            return 200, {}, self.reply(self.server.requests[number][0], body)

    def reply(self, path, body):
        if path in ("/update_weights_from_disk", "/collective_rpc"):
            folder = body["model_path"] if "model_path" in body else body["kwargs"]["weights_path"]
            self.updates.append(folder)
            if self.sampler is None or not self.stale:
                old, self.sampler = self.sampler, load_sampler(folder, OPTIONS)
                if self.behind and old is not None:
                    self.sampler = self.mixed(old, self.sampler)
                self.prompts = {tuple(self.sampler.prompt(prefix)): prefix for prefix in PROBLEMS}
            return {"success": True, "message": "loaded"}
        if path == "/reset_prefix_cache":
            return {}
        sglang = path == "/generate"
        if sglang and "logprob_start_len" in body or "prompt_logprobs" in body:
            ids = body["input_ids" if sglang else "prompt"]
            forced = [None, *self.log_probabilities([(ids[:1], ids[1:])]).tolist()]
            if sglang:
                return {"meta_info": {"input_token_logprobs": [[x, i, None] for x, i in zip(forced, ids, strict=True)]}}
            by_id = [None if x is None else {str(i): {"logprob": x}} for x, i in zip(forced, ids, strict=True)]
            return {"choices": [{"prompt_logprobs": by_id}]}
        prompt = self.prompts[tuple(body["input_ids" if sglang else "prompt"])]
        seed = body["sampling_params"]["sampling_seed"] if sglang else body["seed"]
        sample = self.sampler.draw([prompt], 1, until="end", seed=seed)[0][0]
        ids, logprobs, end = sample.ids, sample.logprob_N.tolist(), sample.finish_reason
        if self.trim and end == "stop":
            ids, logprobs = ids[:-1], logprobs[:-1]
        if sglang:
            pairs = [[x, i, None] for x, i in zip(logprobs, ids, strict=True)]
            return {"meta_info": {"output_token_logprobs": pairs, "finish_reason": {"type": end}}}
        return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": end}]}

    def mixed(self, old, new):
        """Returns the new sampler with the embedding or the head of the old one."""
        params, config = dict(new.params), dataclasses.replace(new._stacked, tied_embeddings=False)
        heads = [s.params.get("head", {}).get("kernel", s.params["decoder"]["embed"].T) for s in (old, new)]
        params["head"] = {"kernel": heads[self.behind != "head"]}
        if self.behind == "embedding":
            params["decoder"] = params["decoder"] | {"embed": old.params["decoder"]["embed"]}
        return sampler.Sampler(params, config, new.tokenizer, new.mesh, OPTIONS, "mixed")

    def log_probabilities(self, sequences):
        sampler = self.sampler
        return engines.log_probabilities(sampler.params, sampler.config, sampler.mesh, sequences)


@pytest.fixture(scope="module", autouse=True)
def samplers_on_one_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "make_mesh", lambda config, devices=None: make_mesh(config, jax.devices()[:1]))
        yield


@pytest.fixture
def served(serve):
    return Served(serve)


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    """Parameters and a tokenizer."""
    folder = tmp_path_factory.mktemp("learner") / "run"
    save_run(folder, MODEL, 0, 0.3)
    return folder, load_sampler(folder, OPTIONS)


def moved(params, size):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + size * rng.normal(size=x.shape).astype(np.float32), params)


def on(served, learner, tmp_path, **changes):
    _, policy = learner
    config = EngineConfig(served.url, **{"dtype": "float32", "tolerance": 1e-3, **changes})
    probes = Probes(PROBLEMS[:4], tmp_path / "engine", 64)
    return RemoteSampler(config, probes, policy.params, policy.config, policy.tokenizer, policy.mesh, OPTIONS, "run@0")


def test_a_server_that_drips_or_compresses_is_given_up(serve, learner, tmp_path, monkeypatch):
    """The limit is that of a whole request, a few bytes of gzip stand for no gigabytes, and no error quotes the key."""
    monkeypatch.setenv("ENGINE_KEY", "SECRET")
    drip, pack = (200, {}, (b" ",) * 6000), (200, {"Content-Encoding": "gzip"}, gzip.compress(bytes(10**6)))
    unkind = (401, {}, b"no SECRET here")
    for reply, limit, said in ((drip, 0.3, "longer than 0.3"), (pack, 60, "compressed"), (unkind, 60, "401")):
        served = types.SimpleNamespace(url=serve(lambda number, body, reply=reply: reply).url.removesuffix("/v1"))
        with pytest.raises(ConnectionError, match=said) as raised:
            on(served, learner, tmp_path, timeout_s=limit, key_variable="ENGINE_KEY")._post(served.url, "/generate", {})
        assert "SECRET" not in str(raised.value)


@pytest.mark.parametrize("kind", ["sglang", pytest.param("vllm", marks=pytest.mark.slow)])
def test_draws_are_the_learners_and_every_push_arrives(served, learner, tmp_path, kind):
    _, policy = learner
    engine = on(served, learner, tmp_path, kind=kind, model="tiny")
    drawn = engine.draw(PROBLEMS[:3], 2, until="end", seed=0, stream=(1, 2))
    sequences = [
        (policy.prompt(p), sample.ids) for p, samples in zip(PROBLEMS, drawn, strict=False) for sample in samples
    ]
    wanted = engines.log_probabilities(policy.params, policy.config, policy.mesh, sequences)
    actual = np.concatenate([sample.logprob_N for samples in drawn for sample in samples])
    np.testing.assert_allclose(actual, wanted, atol=1e-4)  # the sampler's against the learner's, float32
    assert {sample.finish_reason for samples in drawn for sample in samples} <= {"stop", "length"}
    taken = {}
    engine.took = taken.__setitem__
    sampled = engine.sample(PROBLEMS[:3], 2, until="end", seed=0)
    assert [taken[i] for i in range(6)] == [sample for samples in sampled for sample in samples]
    new = moved(policy.params, 1e-3)
    engine.push(new, "run@1")
    assert [path.rpartition("/")[2] for path in served.updates] == ["step_0", "step_1"]
    assert [path.name for path in (tmp_path / "engine").iterdir()] == ["step_1"]
    after = served.log_probabilities(sequences)
    np.testing.assert_allclose(after, engines.log_probabilities(new, policy.config, policy.mesh, sequences), atol=1e-4)
    assert np.abs(after - wanted).max() > 1e-3


@pytest.mark.parametrize(("size", "tolerance", "message"), [
    pytest.param(0.1, 1e-3, "engine.tolerance=0.001",
                 marks=pytest.mark.slow),
    (1e-3, 0.1, "-?0.0"),
])  # fmt: skip
def test_a_server_that_keeps_its_old_weights_is_found(served, learner, tmp_path, size, tolerance, message):
    """Also where the update is far smaller than the tolerance."""
    engine = on(served, learner, tmp_path, tolerance=tolerance)
    served.stale = True
    refused(ValueError, f"run@1.*{message}", engine.push, moved(learner[1].params, size), "run@1")


def test_noise_of_another_precision_is_no_old_weight():
    rng = np.random.default_rng(0)
    before = rng.normal(size=400).astype(np.float32) - 3
    learner = before + 0.002 * rng.normal(size=400)
    noise = 0.01 * rng.normal(size=400)
    old = {"the last push": before}
    assert refusal(learner + noise, learner, 0.05, learner, old) == ""
    assert refusal(learner + noise, learner, 0.05, learner, {}) == ""
    assert refusal(learner, learner, 0.05, learner, {"the last push": learner}) == ""
    assert "lie 0.1" in refusal(learner + 0.1, learner, 0.05, learner, old)
    assert "lie nan" in refusal(learner * np.nan, learner, 0.05, learner, old)
    assert "still serves" in refusal(before + 0.0005 * rng.normal(size=400), learner, 0.05, learner, old)
    for seed in range(300):  # noise alone raises no alarm, however small the move
        noise = np.random.default_rng(seed).normal(size=400)
        assert refusal(learner + 0.01 * noise, learner, 0.05, learner, old) == ""


@pytest.mark.parametrize("part", ["embedding", "head"])
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_part_that_stays_behind_is_found(served, learner, tmp_path, tied, part):
    """At the push after it, also where the overall distance is far below the tolerance."""
    folder, policy = learner
    if tied:
        save_run(tmp_path / "tied", TIED, 0, 0.3)
        policy = load_sampler(tmp_path / "tied", OPTIONS)
    engine = on(served, (folder, policy), tmp_path, tolerance=0.5, kind="vllm")
    served.behind = part
    with pytest.raises(ValueError, match=rf"of the learner's move since the (first|last) push( .{part}.)?: it still"):
        engine.push(moved(policy.params, 1e-3), "run@1")


def test_servers_that_answer_otherwise_are_refused(served, learner, tmp_path, serve):
    engine = on(served, learner, tmp_path)
    served.trim = True
    refused(ValueError, "end of text", engine.draw, PROBLEMS[:20], 4, until="end", seed=0)
    for reply, error, message in [
        ((500, {}, {"error": "out of memory"}), ConnectionError, "status 500"),
        ((200, {}, {"success": False, "message": "no such file"}), ConnectionError, "parameters"),
        ((200, {}, {"text": "2"}), ValueError, "KeyError"),
    ]:
        other = Served(serve)
        other.server.script = lambda number, body, reply=reply: reply
        refused(error, message, on, other, learner, tmp_path)
    with pytest.raises(ValueError, match="temperature=0.5"):
        experiment(tmp_path, temperature=0.5, engine=EngineConfig("http://localhost:1"))


@pytest.mark.slow
def test_a_policy_is_exported_whole(learner, tmp_path):
    """jprm reads the same parameters, and transformers computes the same probabilities."""
    folder, policy = learner
    out = export(folder, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"] and "lm_head.weight" in set(Tensors(out))
    assert export(folder, out) == out  # it is whole
    again = load_sampler(out, OPTIONS)
    jax.tree.map(np.testing.assert_array_equal, again.params, policy.params)
    refused(ValueError, "transformers", export, folder, tmp_path / "peft", format="peft")
    torch = pytest.importorskip("torch", reason="the extra 'parity' is not installed")
    transformers = pytest.importorskip("transformers", reason="the extra 'parity' is not installed")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), "a tensor is missing, left over or of another shape"
    prompt, ids = policy.prompt(PROBLEMS[12]), (3, 1, 4, 1, 0)
    with torch.no_grad():
        log = torch.log_softmax(model.eval()(torch.tensor([[*prompt, *ids]])).logits[0], dim=-1).numpy()
    wanted = engines.log_probabilities(policy.params, policy.config, policy.mesh, [(prompt, ids)])
    np.testing.assert_allclose(log[np.arange(len(ids)) + len(prompt) - 1, ids], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_run_samples_from_a_server(served, tmp_path):
    config = by_engine(servable(tmp_path / "data"), served.url, tmp_path / "pushed", updates=3)
    with one_device():
        result = loop.train(config, tmp_path / "run")
    best = result["evaluations"][result["best"]]["update"]
    names = [f"step_{2 * update}" for update in (0, 1, 2, 3, *([] if best == 3 else [best]))]  # which is measured again
    assert result["finished"] and [path.rpartition("/")[2] for path in served.updates] == names
    assert [path.name for path in (tmp_path / "pushed").iterdir()] == names[-1:]
    assert "lm_head.weight" in set(Tensors(tmp_path / "pushed" / names[-1]))  # though it is tied: vLLM keeps it apart


def test_overlaps_are_found_before_anything_is_pushed(tmp_path):
    """No server is at the address: it is not asked."""
    data = make(tmp_path / "data")
    shutil.copy(data / "problems.jsonl", data / "held_out.jsonl")
    credit = CreditConfig("verifier", "rloo", "constant", length=16)
    config = experiment(data, prm="", credit=credit, engine=EngineConfig("http://localhost:1"))
    with one_device(), pytest.raises(ValueError, match="problems are in problems and in held_out"):
        loop.train(config, tmp_path / "run")


ODD = [None, True, -1, 0.5, 10**400, math.nan, math.inf, 3.0, "a", [], {}, [[]], [None], {"a": 1}, [3, "a"]]


@pytest.mark.parametrize("kind", engines.DIALECTS)
def test_a_sample_of_another_form_is_refused(kind):
    """Each value in each place of a reply is taken, or raises an error that `_read` puts into one line."""
    whole = {
        "sglang": {"meta_info": {"output_token_logprobs": [[-0.5, 7, None]], "finish_reason": {"type": "stop"}}},
        "vllm": {"choices": [{"token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "stop"}]},
    }[kind]
    assert engines._checked(*engines.DIALECTS[kind].drawn(whole)) == ([7], [-0.5], True)
    for path, odd in itertools.product(list(places(whole)), ODD):
        reply = mutated(whole, path, odd)
        with contextlib.suppress(KeyError, IndexError, TypeError, ValueError):
            ids, logprobs, ended = engines._checked(*engines.DIALECTS[kind].drawn(reply))
            assert (
                all(type(i) is int for i in ids) and all(value <= 0 for value in logprobs) and len(ids) == len(logprobs)
            )


def places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def mutated(value, path, odd):
    """The value, with another one in a place."""
    if not path:
        return odd
    copied = copy.copy(value)
    copied[path[0]] = mutated(value[path[0]], path[1:], odd)
    return copied
