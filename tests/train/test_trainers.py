"""Examples for other trainers, and TRL's losses step by step."""

import json
import os
import pathlib
import subprocess
from typing import Any

import httpx2 as httpx
import jax
import numpy as np
import pytest
import tiny_run as tiny
from browser import served
from test_export import untrained
from test_serve import engine, prm  # noqa: F401  (fixtures, which tests name as arguments)
from test_serve_rewards import byte_level

import jprm
from jprm.apps.serve import ServeConfig
from jprm.apps.serve.app import make_app
from jprm.apps.serve.openrlhf import View
from jprm.checkpoints.base import model_config
from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig
from jprm.methods.export.export import export
from jprm.pack import pack
from jprm.rows import empty_rows
from jprm.token_tree import token_tree
from jprm.tokenizer import native_layout
from jprm.train import Trainer
from jprm.tree import tree_of

ROOT = pathlib.Path(__file__).parents[2]
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
    if package in ("trl", "openrlhf", "tunix"):  # their files use jprm; with jprm.clients httpx2 alone is needed
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
    answered = httpx.post(address + "/v1/rewards", json={"samples": texts}, timeout=60).json()
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


# ---- The losses of TRL 1.13's PRM trainer, step by step.


SCRIPT = """
import json, sys
import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForTokenClassification, AutoTokenizer
from trl.experimental.prm import PRMConfig, PRMTrainer

BASE = {base!r}
RATE = 3e-3


class InOrder(PRMTrainer):
    def _get_train_sampler(self, *args):
        return SequentialSampler(self.train_dataset)


tokenizer = AutoTokenizer.from_pretrained(BASE)
tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
model = AutoModelForTokenClassification.from_pretrained(BASE, num_labels=2)
torch.nn.init.zeros_(model.score.weight), torch.nn.init.zeros_(model.score.bias)
records = [json.loads(line) for line in open({data!r})]
arguments = PRMConfig(
    output_dir={out!r}, max_steps=20, per_device_train_batch_size=4, learning_rate=RATE, bf16=False, max_length=128,
    gradient_checkpointing=False, logging_steps=1, report_to="none", save_strategy="no", weight_decay=0.01,
    use_cpu=True, seed=int(sys.argv[1]) if sys.argv[1:] else 3,
)
trainer = InOrder(model=model, args=arguments, processing_class=tokenizer, train_dataset=Dataset.from_list(records))
trainer.train()
print("LOSSES", json.dumps([line["loss"] for line in trainer.state.log_history if "loss" in line]))
"""


@pytest.fixture
def script(tmp_path):
    """A script with its data: 80 chains, and a model of random parameters."""
    base = export(untrained(tmp_path / "run"), tmp_path / "base")
    rng, lines = np.random.default_rng(0), []
    for i in range(80):
        steps = tiny.steps_of(rng, int(rng.integers(1, 5)))
        labels = [bool("bad" not in step) for step in steps]
        lines.append(json.dumps({"prompt": f"p {i}\n", "completions": steps, "labels": labels}))
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "train_prm.py").write_text(
        SCRIPT.format(base=str(base), data=str(tmp_path / "train.jsonl"), out=str(tmp_path / "out"))
    )
    return tmp_path / "train_prm.py"


def experiment(base, data):
    """The settings of `SCRIPT`, and TRL's defaults where it has none."""
    return Experiment(
        name="trl",
        base=base,
        tokenizer=base,
        model=model_config(base, head="binary", dtype="float32", remat="nothing"),
        data=DataConfig(train=(data,), supervise="step", too_long="truncate", tokens=128, slots=128, rows=4,
                        micro_rows=4),
        target=TargetConfig(labels="correctness", neutral="none", after_error="keep"),
        objective="cross_entropy",
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=0, decay="linear", b2=0.999, eps=1e-8,
                                  weight_decay=0.01, clip_norm=1.0),
        steps=20,
        log_every=1,
        checkpoint_every=20,
    )  # fmt: skip


def own_losses(config, records):
    """The losses of 20 updates on four chains each, in order."""
    losses = []
    with tiny.one_device(), Trainer(config) as trainer:
        layout = native_layout(trainer.tokenizer)
        for start in range(0, 80, 4):
            trees = [token_tree(tree_of(record), layout, "step") for record in records[start : start + 4]]
            rows = pack(trees, 128, 128, too_long="error").rows
            filler = empty_rows(4 - len(rows.tokens), 128, 128)
            losses.append(trainer.step(jax.tree.map(lambda a, b: np.concatenate([a, b]), rows, filler)).means()["loss"])
    return np.array(losses)


@pytest.mark.slow
def test_losses_are_those_of_trl_step_by_step(script, tmp_path):
    """20 updates of a random model, float32: forward, gradient, clipping, AdamW and the schedule all enter.

    The environment: a venv with torch and trl 1.13, whose Python JPRM_TRL names.
    """
    python = os.environ.get("JPRM_TRL", "")
    if not pathlib.Path(python).is_file():
        pytest.skip("needs an environment with trl 1.13: set JPRM_TRL to its Python")
    config = experiment(str(tmp_path / "base"), str(tmp_path / "train.jsonl"))
    records = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    records = [record | {"prompt": record["prompt"].rstrip("\n")} for record in records]  # jprm writes the newline
    done = subprocess.run([python, str(script)], capture_output=True, text=True, timeout=900, check=False)
    losses = next((line for line in done.stdout.splitlines() if line.startswith("LOSSES")), None)
    assert losses, done.stderr[-2000:]
    theirs, ours = np.array(json.loads(losses.removeprefix("LOSSES "))), own_losses(config, records)
    assert len(theirs) == 20 and ours[0] == pytest.approx(np.log(2), rel=1e-5) and ours.min() < 0.6
    print("largest relative difference", np.abs(ours / theirs - 1).max())
    np.testing.assert_allclose(ours, theirs, rtol=2e-4)  # TRL logs losses rounded to four digits


@pytest.mark.slow
def test_tunix(tiny_run, samples):
    """tunix's learner and jprm's PRM in one process: its rewards are the sums of the scores of turns."""
    got, model = drive("tunix", tiny_run.folder, samples), jprm.load(tiny_run.folder)
    sums = []
    for episode in got["episodes"]:
        assert [message["role"] for message in episode["messages"]] == ["user", "assistant"] * 2
        turns = [message["content"].strip() for message in episode["messages"][1::2]]
        expected = iter(())
        if any(turns):
            read = [message for message in episode["messages"] if message["content"].strip()]
            tree = tree_of({"messages": read, "segment": "turn"})
            expected = iter(model.score_trees([tree])[0][tree.steps].tolist())
        assert episode["scores"] == [close(next(expected)) if turn else None for turn in turns]
        sums.append(sum(filter(None, episode["scores"])))
    assert len(sums) == 2 * len(samples) and sorted(got["rewards"]) == close(sorted(sums))
    assert got["moved"] > 0
