"""From TRL's PRM trainer: its settings as an experiment, and the same losses, step by step, as TRL 1.13 itself."""

import ast
import dataclasses
import json
import os
import pathlib
import subprocess

import jax
import numpy as np
import pytest
import tiny_run as tiny
from test_export import untrained

from jprm import experiment as experiments
from jprm.apps import cli
from jprm.apps.cli.migrate import experiment_file, read
from jprm.methods.formats.export.export import export
from jprm.pack import pack
from jprm.rows import empty_rows
from jprm.token_tree import token_tree
from jprm.tokenizer import native_layout
from jprm.train import Trainer
from jprm.tree import tree_of

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


def migrated(script, tmp_path, *options):
    out = tmp_path / "migrated.py"
    assert cli.main(["migrate", "trl", str(script), "--out", str(out), *options]) == 0
    return experiments.load(out, [f"data.train=[{json.dumps(str(tmp_path / 'train.jsonl'))}]"])


def test_a_script_becomes_an_experiment_and_is_not_executed(script, tmp_path, capsys):
    script.write_text(script.read_text() + f"\nopen({str(tmp_path / 'executed')!r}, 'w')\n")
    config = migrated(script, tmp_path)
    o = config.optimizer
    assert (o.learning_rate, o.decay, o.warmup_steps, o.b2, o.weight_decay, o.clip_norm) == (
        3e-3, "linear", 0, 0.999, 0.01, 1.0
    )  # fmt: skip
    assert (config.steps, config.data.rows, config.data.micro_rows, config.data.tokens) == (20, 4, 4, 128)
    assert (config.model.dtype, config.model.remat, config.model.head) == ("float32", "nothing", "binary")
    assert config.base == str(tmp_path / "base") and config.target.labels == "correctness"
    assert "PRMConfig.seed (line 26)" in capsys.readouterr().out and config.seed == 42  # TRL's default
    assert not (tmp_path / "executed").exists()
    assert cli.main(["migrate", "trl", str(script), "--out", str(tmp_path / "migrated.py")]) == 2  # it is there


def test_what_has_no_counterpart_is_named(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "model_name_or_path: Qwen/Qwen2-0.5B\ndataset_name: trl-lib/math_shepherd\nlearning_rate: 2e-5\n"
        "lr_scheduler_type: inverse_sqrt\nstep_separator: '\\n\\n'\ntrain_on_last_step_only: true\noptim: adafactor\n"
        "neftune_noise_alpha: 5\nuse_peft: true\nlora_r: 4\nlora_target_modules: [q_proj, v_proj, conv]\nbf16: true\n"
        "gradient_accumulation_steps: 4\nreport_to: [tensorboard]\nwarmup_ratio: 0.1\nlogging_steps: 5\n"
    )
    text, lost = experiment_file(read(path), examples=1000)
    ast.parse(text)
    for word in ("inverse_sqrt", "step_separator", "train_on_last", "adafactor", "neftune", "conv"):
        assert any(word in line for line in lost) and word in text
    assert not any("logging" in line or "bf16" in line or "report" in line for line in lost)
    for part in (
        "rank=4", 'targets=r"/(query|value)$"', "rows=32", "micro_rows=8", "steps=94", "warmup_steps=9", "'bfloat16'",
        "trackers=('tensorboard',)", "log_every=5", "learning_rate=2e-05",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "x = 1\n", "calls no PRMConfig"),
        ("a.py", "x = (\n", "is no Python"),
        ("a.py", "PRMConfig(learning_rate=1e-4)\n", "give --examples"),
        ("a.py", "PRMConfig(learning_rate='fast', max_steps=3)\n", "learning_rate: is 'fast'"),
        ("a.json", "[1]", "is no object of settings"),
        ("a.yaml", "a: [", "neither JSON nor YAML"),
    ],
)
def test_what_is_no_setting_of_the_trainer_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        experiment_file(read(tmp_path / name))


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
    config = migrated(script, tmp_path)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, slots=128))
    records = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    records = [record | {"prompt": record["prompt"].rstrip("\n")} for record in records]  # jprm writes the newline
    done = subprocess.run([python, str(script)], capture_output=True, text=True, timeout=900, check=False)
    found = next((line for line in done.stdout.splitlines() if line.startswith("LOSSES")), None)
    assert found, done.stderr[-2000:]
    theirs, ours = np.array(json.loads(found.removeprefix("LOSSES "))), own_losses(config, records)
    assert len(theirs) == 20 and ours[0] == pytest.approx(np.log(2), rel=1e-5) and ours.min() < 0.6
    print("largest relative difference", np.abs(ours / theirs - 1).max())
    np.testing.assert_allclose(ours, theirs, rtol=2e-4)  # TRL logs losses rounded to four digits
