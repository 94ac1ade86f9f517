"""The files in examples/trainers, run by the packages that they are for.

Each package has its interpreter, named by an environment variable such as JPRM_VERL=/venvs/verl/bin/python. A package
without one is left out. The server is the real one, on a socket.
"""

import json
import os
import pathlib
import subprocess
from typing import Any

import httpx2 as httpx
import pytest
from browser import served
from test_serve import engine, prm  # noqa: F401  (fixtures, which tests name as arguments)
from test_serve_rewards import byte_level

from jprm.apps.serve import ServeConfig
from jprm.apps.serve.app import make_app
from jprm.apps.serve.openrlhf import View

ROOT = pathlib.Path(__file__).parents[1]
TEXTS = ["We add 3.5 and 4.\n\nThat is 7.5.\n\nSo the answer is 7.5.", "4 − 2 = 2.\n\nIt is 2.", "So 2.\n\n#### 4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    byte_level(120).save(path)
    return path


@pytest.fixture(scope="module")
def samples():
    """Samples as a trainer has them: the ids end with the end of the turn."""
    tokenizer = byte_level(120)
    end = tokenizer.token_id("<|im_end|>")
    return [
        {"problem": f"q{i // 2}", "text": text, "ids": [*tokenizer.encode(text), end]} for i, text in enumerate(TEXTS)
    ]


@pytest.fixture
def address(engine, monkeypatch):  # noqa: F811
    view = View(prompt="<q>{problem}</q>", ends=("<|im_end|>",))
    tokenizers: dict[str, Any] = {"policy": byte_level(120)}
    with served(make_app([engine], ServeConfig(longest=256), view=view, tokenizers=tokenizers)) as (_, port):
        monkeypatch.setenv("JPRM_URL", f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"


def drive(package, folder, samples):
    """Returns what a driver prints, run by the package's interpreter."""
    python = os.environ.get(f"JPRM_{package.upper()}")
    if not python:
        pytest.skip(f"JPRM_{package.upper()} names no interpreter with {package}")
    adapter = ROOT / "examples" / "trainers" / f"{package}_rewards.py"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    if package in ("trl", "openrlhf"):  # their files use jprm.clients, which needs only httpx2 of that environment
        environment["PYTHONPATH"] = str(ROOT)
    if package == "slime":  # it is no package of the index: a checkout
        environment["PYTHONPATH"] = os.environ["JPRM_SLIME_CHECKOUT"]
    done = subprocess.run(
        [python, ROOT / "tests" / "trainers" / "run.py", package, adapter, folder], input=json.dumps(samples),
        capture_output=True, text=True, env=environment, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def rewarded(url, samples, **body):
    keys = ("problem", "ids", "outcome")
    sent = [{key: sample[key] for key in keys if key in sample} for sample in samples]
    answer = httpx.post(url + "/v1/rewards", json={"credit": "min_form", "samples": sent} | body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["samples"]


def close(numbers):
    """A request of one sample packs other rows, which round otherwise."""
    return pytest.approx(numbers, abs=1e-6)


@pytest.mark.slow
def test_verl(address, folder, samples):
    got, expected = drive("verl", folder, samples), rewarded(address, samples)
    assert got["scores"] == close([sample["score"] for sample in expected])
    for row, scored in zip(got["token_rewards"], expected, strict=True):
        assert row == close(scored["token_rewards"] + [0.0] * (len(row) - len(scored["token_rewards"])))


@pytest.mark.slow
def test_openrlhf(address, folder, samples):
    got, expected = drive("openrlhf", folder, samples), rewarded(address, samples)
    for reward, sample in zip(got, expected, strict=True):
        assert reward["reward"] == close(sum(sample["token_rewards"])) and reward["scores"] == close(sample["score"])
        assert reward["extra_logs"]["steps"] == len(sample["steps"])


@pytest.mark.slow
def test_trl(address, folder, samples):
    got = drive("trl", folder, samples)
    (seen,) = got["seen"]
    texts = [{"problem": p, "response": c} for p, c in zip(seen["prompts"], seen["completions"], strict=True)]
    answered = httpx.post(address + "/v1/rewards", json={"samples": texts}).json()
    expected = [sample["score"] for sample in answered["samples"]]
    assert seen["rewards"] == [None if score is None else close(score) for score in expected]
    log = got["log"]
    mean = sum(score for score in expected if score is not None) / sum(score is not None for score in expected)
    assert log["rewards/looked_at/mean"] == close(mean) == log["rewards/step_reward_async/mean"]
    assert log["lowest_step"] <= mean + 1e-6 or len(texts) > 0


@pytest.mark.slow
def test_skyrl(address, folder, samples):
    got = drive("skyrl", folder, samples)
    correct = [0.0, 0.0, 1.0]  # of SkyRL's environment: the last text has the answer after ####
    expected = rewarded(address, [s | {"outcome": x} for s, x in zip(samples, correct, strict=True)])
    for row, ids, expected_sample, sample in zip(got["rewards"], got["response_ids"], expected, samples, strict=True):
        assert ids == sample["ids"] and row == close(expected_sample["token_rewards"])


@pytest.mark.slow
def test_slime(address, folder, samples):
    got, expected = drive("slime", folder, samples), rewarded(address, samples)
    for single, batched, value, sample in zip(got["single"], got["batched"], got["values"], expected, strict=True):
        assert single["token_rewards"] == close(sample["token_rewards"]) == batched["token_rewards"]
        assert value == close(sample["score"])


@pytest.mark.slow
def test_nemo_gym(address, folder, samples):
    got, expected = drive("nemo_gym", folder, samples), rewarded(address, samples)
    for verified, stepped, sample in zip(got[::2], got[1::2], expected, strict=True):
        assert verified["reward"] == close(sample["score"]) == stepped["reward"]
        assert verified["token_rewards"] == close(sample["token_rewards"]) and stepped["token_rewards"] is None
        assert verified["step_rewards"] == close([sum(sample["token_rewards"])]) == stepped["step_rewards"]


@pytest.mark.slow
def test_verifiers(address, folder, samples):
    got, expected = drive("verifiers", folder, samples), rewarded(address, samples)
    for with_ids, without, sample in zip(got[::2], got[1::2], expected, strict=True):
        assert with_ids["reward"] == close(sample["score"]) == without["reward"]
        assert with_ids["info"] == [None, close(sample["token_rewards"])]
        assert without["info"] == [None, close([step["reward"] for step in sample["steps"]])]
        assert with_ids["metrics"]["lowest_step"] == close(min(step["score"] for step in sample["steps"]))
