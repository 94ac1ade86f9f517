"""The tool world's models: a policy that learns the authors' trajectories, a PRM of turns and an outcome model.

All are small. The reward models start from the policy's decoder and see the same trajectories for the same steps.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from experiments.tool_world import shop
from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig
from jprm.model.config import ModelConfig

TOKENS, ROWS = 256, 8
"""Of a row, and rows of a step: about 30 trajectories."""

POLICY_STEPS, REWARD_STEPS = 600, 150


def model(head: str) -> ModelConfig:
    return ModelConfig(
        vocab_size=shop.tokenizer().get_vocab_size(),
        layers=2,
        width=64,
        heads=2,
        kv_heads=2,
        head_dim=32,
        mlp_width=192,
        rope_theta=10000.0,
        norm_eps=1e-5,
        head=head,
        remat="nothing",
        attention="paths",
        attention_block=64,
    )


def policy(out: pathlib.Path, seed: int) -> Experiment:
    return Experiment(
        name="tool_world_policy",
        model=model("language"),
        tokenizer=str(out / "tokenizer"),
        data=_data(out / "demonstrations.jsonl", "token", seed),
        target=TargetConfig(labels="correctness", neutral="none", after_error="keep"),
        objective="next_token",
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=30, weight_decay=0.01),
        steps=POLICY_STEPS,
        checkpoint_every=POLICY_STEPS,
        seed=seed,
    )


def _data(file: pathlib.Path, supervise: Any, seed: int) -> DataConfig:
    return DataConfig(
        train=(str(file),), supervise=supervise, too_long="error", tokens=TOKENS, slots=TOKENS, rows=ROWS,
        micro_rows=ROWS, seed=seed,
    )  # fmt: skip


def save_tokenizer(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shop.tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(shop.tokenizer_config()) + "\n")


def reward(out: pathlib.Path, name: str, seed: int) -> Experiment:
    """`prm` learns the labels of turns, `orm` the outcome of a trajectory at each of its turns."""
    return Experiment(
        name=f"tool_world_{name}",
        base=str(out / "policy"),
        model=model("binary"),
        tokenizer=str(out / "tokenizer"),
        data=_data(out / "tasks_acted.jsonl", {"prm": "step", "orm": "outcome_steps"}[name], seed),
        target=TargetConfig(labels="correctness" if name == "prm" else "value", neutral="none", after_error="keep"),
        objective="cross_entropy",
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=20, weight_decay=0.01),
        steps=REWARD_STEPS,
        checkpoint_every=REWARD_STEPS,
        seed=seed,
    )
