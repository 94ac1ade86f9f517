"""The quickstart's four models: a policy, two process reward models and an outcome reward model.

The reward models start from the policy's decoder, as reward models do, and see the same number of tokens.
"""

from __future__ import annotations

import pathlib
from typing import Literal

from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig
from jprm.model.config import ModelConfig
from jprm.token_tree import Supervise

TOKENS = 512  # of a row
ROWS = 4  # of an update: small steps, and many, suit models so small
POLICY_STEPS, REWARD_STEPS = 280, 260
"""280 x 4 x 512 = 0.57 M tokens for the policy, 260 x 4 x 512 = 0.53 M for each reward model."""

OPTIMIZER = OptimizerConfig(
    learning_rate=0.02, name="muon", warmup_steps=20, weight_decay=0.01, rate_factors=(("embed|norm|head", 0.1),)
)
"""Muon: after 150 updates the policy's loss is that of Adam (rate 2e-3) after 400, with slightly harder stories."""


def model(vocabulary: int, head: str) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocabulary,
        layers=4,
        width=128,
        heads=4,
        kv_heads=4,
        head_dim=32,
        mlp_width=384,
        rope_theta=10000.0,
        norm_eps=1e-5,
        head=head,
        remat="nothing",
        attention="paths",
        attention_block=64,
    )


def policy(out: pathlib.Path, vocabulary: int, seed: int) -> Experiment:
    return Experiment(
        name="quickstart_policy",
        model=model(vocabulary, "language"),
        tokenizer=str(out / "tokenizer"),
        data=_data(out / "solutions.jsonl", "token", seed),
        target=_target("correctness"),
        objective="next_token",
        optimizer=OPTIMIZER,
        steps=POLICY_STEPS,
        checkpoint_every=POLICY_STEPS,
        seed=seed,
    )


def reward(out: pathlib.Path, vocabulary: int, labels: str, seed: int) -> Experiment:
    """`labels` is `formal` or `monte_carlo` (a PRM on the labels of that file), or `outcome`.

    That is an ORM: the outcome of a chain at each of its steps, as Lightman et al. trained theirs.
    """
    file, supervise = ("formal", "outcome_steps") if labels == "outcome" else (labels, "step")
    return Experiment(
        name=f"quickstart_{labels}",
        base=str(out / "policy"),
        model=model(vocabulary, "binary"),
        tokenizer=str(out / "tokenizer"),
        data=_data(out / f"{file}.jsonl", supervise, seed),
        target=_target("correctness" if labels == "formal" else "value"),
        objective="cross_entropy",
        optimizer=OPTIMIZER,
        steps=REWARD_STEPS,
        checkpoint_every=REWARD_STEPS,
        seed=seed,
    )


def _target(labels: Literal["correctness", "value"]) -> TargetConfig:
    return TargetConfig(labels=labels, neutral="none", after_error="keep")


def _data(file: pathlib.Path, supervise: Supervise, seed: int) -> DataConfig:
    return DataConfig(
        train=(str(file),), supervise=supervise, too_long="error", tokens=TOKENS, slots=TOKENS, rows=ROWS,
        micro_rows=ROWS, window=256, seed=seed,
    )  # fmt: skip
