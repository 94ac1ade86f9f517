"""Qwen3-4B-Base on Math-Shepherd: a process reward model from automatic step labels, on 16 chips.

    jprm prepare math_shepherd --input math-shepherd.jsonl --output data/math_shepherd
    export JPRM_BASE=models/Qwen3-4B-Base JPRM_PREPARED=data/math_shepherd
    jprm plan experiments/qwen3_4b_math_shepherd.py --topology v6e-16
    jprm train experiments/qwen3_4b_math_shepherd.py --workdir /shared/runs/qwen3_4b_math_shepherd --distributed auto

The last on every host of the slice. It has not been run.

Its plan (tpu/README.md), with libtpu 0.0.42.1, for v6e-16: 24.80 GiB at once of a chip's 31.25, 2.81 of them state;
1.15 times the model's FLOPs; at most 440,000 tokens a second. --set model.remat=full takes far less: 6.45 of
temporaries, 1.42 times the model's FLOPs, at most 355,000 tokens a second.
"""

import os
import pathlib
from typing import Any

from jprm.checkpoints import base
from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig
from jprm.model.config import ModelConfig
from jprm.model.mesh import MeshConfig

BASE = os.environ.get("JPRM_BASE", "models/Qwen3-4B-Base")
DATA = os.environ.get("JPRM_PREPARED", "data/math_shepherd")
VALID = os.environ.get("JPRM_PREPARED_VALID", "")  # problems apart, by which to choose anything; never the test split
CHOSEN: dict[str, Any] = dict(dtype="bfloat16", remat="dots", attention="kernel")  # TPUs; elsewhere "blocked"
# For a plan, which needs no weights. Where the base is there, its own config.json decides. The values are as
# litgpt/config.py has them, of Qwen/Qwen3-4B-Base's config.json.
PUBLISHED = ModelConfig(
    vocab_size=151936,
    layers=36,
    width=2560,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp_width=9728,
    rope_theta=1000000.0,
    norm_eps=1e-6,
    qk_norm=True,
    **CHOSEN,
)


def experiment() -> Experiment:
    return Experiment(
        name="qwen3_4b_math_shepherd",
        base=BASE,
        tokenizer=BASE,
        model=base.model_config(BASE, **CHOSEN) if pathlib.Path(BASE).exists() else PUBLISHED,
        # A row a chip, four times for an update.
        data=DataConfig(
            train=(DATA,),
            valid=(VALID,) if VALID else (),
            supervise="step",
            too_long="truncate",
            tokens=8192,
            slots=1024,
            rows=64,
            micro_rows=16,
            window=1024,
        ),
        target=TargetConfig(labels="value", neutral="none", after_error="keep"),
        objective="cross_entropy",
        optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=10, decay="cosine", weight_decay=0.01),
        mesh=MeshConfig(),  # fsdp: weights and rows split over all chips
        steps=100,
        checkpoint_every=25,
    )
