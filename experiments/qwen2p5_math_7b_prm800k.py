"""Qwen2.5-Math-7B on PRM800K: a process reward model from human step ratings, on 64 chips.

    jprm prepare prm800k --input phase1_train.jsonl --output data/prm800k \
      --set human_written=unlabelled control_questions=drop
    export JPRM_BASE=models/Qwen2.5-Math-7B JPRM_PREPARED=data/prm800k
    jprm plan experiments/qwen2p5_math_7b_prm800k.py --topology v5p-128
    jprm train experiments/qwen2p5_math_7b_prm800k.py --workdir /shared/runs/qwen2p5_math_7b_prm800k --distributed auto

The last on every host of the slice. It has not been run.

Its plan (tpu/README.md), with libtpu 0.0.42.1, for v5p-128: 1.24 GiB of state and 25.56 of temporaries a chip, of
95.74; 1.07 times the model's FLOPs; at most 625,000 tokens a second. A v5e chip holds less: with --set
model.remat=attention model.product_layers=11, v5e-64 has 15.50 GiB at once of a chip's 15.75, 1.24 of them state; 1.17
times the model's FLOPs; at most 244,000 tokens a second.
"""

import os
import pathlib
from typing import Any

from jprm.checkpoints import base
from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig
from jprm.model.config import ModelConfig
from jprm.model.mesh import MeshConfig

BASE = os.environ.get("JPRM_BASE", "models/Qwen2.5-Math-7B")
DATA = os.environ.get("JPRM_PREPARED", "data/prm800k")
VALID = os.environ.get("JPRM_PREPARED_VALID", "")  # problems apart, by which to choose anything; never the test split
CHOSEN: dict[str, Any] = dict(dtype="bfloat16", remat="dots", attention="kernel")  # TPUs; on GPUs "gpu_kernel"
# For a plan, which needs no weights. Where the base is there, its own config.json decides. The values are as
# litgpt/config.py has them, of Qwen/Qwen2.5-Math-7B's config.json.
PUBLISHED = ModelConfig(
    vocab_size=152064,
    layers=28,
    width=3584,
    heads=28,
    kv_heads=4,
    head_dim=128,
    mlp_width=18944,
    rope_theta=10000.0,
    norm_eps=1e-6,
    qkv_bias=True,
    tied_embeddings=False,
    **CHOSEN,
)


def experiment() -> Experiment:
    return Experiment(
        name="qwen2p5_math_7b_prm800k",
        base=BASE,
        tokenizer=BASE,
        model=base.model_config(BASE, **CHOSEN) if pathlib.Path(BASE).exists() else PUBLISHED,
        # A row a chip.
        data=DataConfig(
            train=(DATA,),
            valid=(VALID,) if VALID else (),
            supervise="step",
            too_long="truncate",
            tokens=8192,
            slots=1024,
            rows=64,
            micro_rows=64,
            window=1024,
        ),
        target=TargetConfig(labels="rating", neutral="positive", after_error="keep"),
        objective="cross_entropy",
        optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=10, decay="cosine", weight_decay=0.01),
        mesh=MeshConfig(),  # fsdp: weights and rows split over all chips
        steps=100,
        checkpoint_every=25,
    )
