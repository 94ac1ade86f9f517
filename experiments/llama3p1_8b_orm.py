"""Llama-3.1-8B on outcomes: a reward model that judges whole solutions (an ORM), on 32 chips.

    jprm sample --policy POLICY --input problems.jsonl --output pools.jsonl --n 16    # problems with answers
    jprm prepare pools --input pools.jsonl --output data/outcomes
    export JPRM_BASE=models/Llama-3.1-8B JPRM_PREPARED_OUTCOMES=data/outcomes
    jprm plan experiments/llama3p1_8b_orm.py --topology v5p-64
    jprm train experiments/llama3p1_8b_orm.py --workdir /shared/runs/llama3p1_8b_orm --distributed auto

The last on every host of the slice. It has not been run.

Its plan (tpu/README.md), with libtpu 0.0.42.1, for v5p-64: 2.62 GiB of state and 6.78 of temporaries a chip, of 95.74;
1.34 times the model's FLOPs; at most 227,000 tokens a second.
"""

import os
import pathlib
from typing import Any

from jprm.checkpoints import base
from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig
from jprm.model.config import ModelConfig, RopeScaling
from jprm.model.mesh import MeshConfig

BASE = os.environ.get("JPRM_BASE", "models/Llama-3.1-8B")
DATA = os.environ.get("JPRM_PREPARED_OUTCOMES", "data/outcomes")
VALID = os.environ.get("JPRM_PREPARED_VALID", "")  # problems apart, by which to choose anything; never the test split
CHOSEN: dict[str, Any] = dict(dtype="bfloat16", remat="full", attention="kernel")  # TPUs; elsewhere "blocked"
# For a plan, which needs no weights. Where the base is there, its own config.json decides. The values are as
# litgpt/config.py has them, of meta-llama/Llama-3.1-8B's config.json.
PUBLISHED = ModelConfig(
    vocab_size=128256,
    layers=32,
    width=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp_width=14336,
    rope_theta=500000.0,
    norm_eps=1e-5,
    rope_scaling=RopeScaling("llama3", factor=8.0, positions=8192, low=1.0, high=4.0),
    tied_embeddings=False,
    **CHOSEN,
)


def experiment() -> Experiment:
    return Experiment(
        name="llama3p1_8b_orm",
        base=BASE,
        tokenizer=BASE,
        model=base.model_config(BASE, **CHOSEN) if pathlib.Path(BASE).exists() else PUBLISHED,
        # A row a chip, twice for an update.
        data=DataConfig(
            train=(DATA,),
            valid=(VALID,) if VALID else (),
            supervise="outcome",
            too_long="truncate",
            tokens=8192,
            slots=256,
            rows=64,
            micro_rows=32,
            window=1024,
        ),
        target=TargetConfig(labels="value", neutral="none", after_error="keep"),
        objective="cross_entropy",
        optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=10, decay="cosine", weight_decay=0.01),
        mesh=MeshConfig(),  # fsdp: weights and rows split over all chips
        steps=100,
        checkpoint_every=25,
    )
