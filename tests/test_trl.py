"""The losses of TRL 1.13's PRM trainer, step by step."""

import json
import os
import pathlib
import subprocess

import jax
import numpy as np
import pytest
import tiny_run as tiny
from test_export import untrained

from jprm.checkpoints.base import model_config
from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig
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
