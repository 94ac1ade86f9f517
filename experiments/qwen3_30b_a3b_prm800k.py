"""Qwen3-30B-A3B on PRM800K: a mixture of 128 experts, of which a token uses 8, on a slice of v5p.

    jprm prepare prm800k --input phase1_train.jsonl --output data/prm800k \
      --set human_written=unlabelled control_questions=drop
    export JPRM_BASE=models/Qwen3-30B-A3B-Base JPRM_PREPARED=data/prm800k
    jprm plan experiments/qwen3_30b_a3b_prm800k.py --topology v5p-64 --set data.micro_rows=32
    jprm train experiments/qwen3_30b_a3b_prm800k.py --workdir /shared/runs/qwen3_30b_a3b --distributed auto

It has not been run; tpu/README.md has its plan. The router is trained, with transformers' load-balancing loss;
--set optimizer.freeze=/router$ model.experts.balance=0 freezes it.
"""

import dataclasses
import os
import pathlib
from typing import Any

from jprm.checkpoints import base
from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig
from jprm.model.config import ExpertsConfig, ModelConfig
from jprm.model.mesh import MeshConfig

BASE = os.environ.get("JPRM_BASE", "models/Qwen3-30B-A3B-Base")
DATA = os.environ.get("JPRM_PREPARED", "data/prm800k")
CHOSEN: dict[str, Any] = dict(dtype="bfloat16", remat="full", attention="kernel")  # TPUs; elsewhere "blocked"
# For a plan, which needs no weights. Where the base is there, its own config.json decides.
SIZES = ModelConfig(
    vocab_size=151936,
    layers=48,
    width=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    mlp_width=6144,
    rope_theta=1000000.0,
    norm_eps=1e-6,
    qk_norm=True,
    mlps=("experts",),
    experts=ExpertsConfig(count=128, used=8, width=768),
    tied_embeddings=False,
    **CHOSEN,
)


def experiment() -> Experiment:
    model = base.model_config(BASE, **CHOSEN) if pathlib.Path(BASE).exists() else SIZES
    return Experiment(
        name="qwen3_30b_a3b_prm800k",
        base=BASE,
        tokenizer=BASE,
        model=dataclasses.replace(model, experts=dataclasses.replace(model.experts, balance=0.001)),
        data=DataConfig(
            train=(DATA,),
            supervise="step",
            too_long="truncate",
            tokens=4096,
            slots=512,
            rows=64,
            micro_rows=64,
            window=1024,
        ),
        target=TargetConfig(labels="rating", neutral="positive", after_error="keep"),
        objective="cross_entropy",
        optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=10, decay="cosine", weight_decay=0.01),
        mesh=MeshConfig(fsdp=-1, expert=8),
        steps=100,
        checkpoint_every=25,
    )
