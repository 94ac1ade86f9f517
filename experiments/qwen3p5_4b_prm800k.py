"""A hybrid of Qwen3.5's design with 4 billion parameters on PRM800K: three of four layers are gated DeltaNet.

    jprm prepare prm800k --input phase1_train.jsonl --output data/prm800k \
      --set human_written=unlabelled control_questions=drop
    export JPRM_BASE=models/Qwen3.5-4B-text JPRM_PREPARED=data/prm800k
    jprm plan experiments/qwen3p5_4b_prm800k.py --topology v6e-16
    jprm train experiments/qwen3p5_4b_prm800k.py --workdir /shared/runs/qwen3p5_4b --distributed auto

The base is the text model (model_type qwen3_5_text). It has not been run. Its plan (tpu/README.md), on v6e-16 with
16 rows of 4,096 tokens at a time: 2.95 GiB of state and 10.31 of temporaries a chip, of 31.25; at most 218,000 tokens a
second. Without the base its sizes are those below, which are of the design and were not compared with a published
config.json.
"""

import os
import pathlib
from typing import Any

from jprm.checkpoints import base
from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig
from jprm.model.config import DeltaNetConfig, ModelConfig
from jprm.model.mesh import MeshConfig

BASE = os.environ.get("JPRM_BASE", "models/Qwen3.5-4B-text")
DATA = os.environ.get("JPRM_PREPARED", "data/prm800k")
CHOSEN: dict[str, Any] = dict(dtype="bfloat16", remat="full", attention="kernel")  # TPUs; elsewhere "blocked"
SIZES = ModelConfig(
    vocab_size=248320,
    layers=32,
    width=2560,
    heads=16,
    kv_heads=4,
    head_dim=256,
    mlp_width=9216,
    rope_theta=10000000.0,
    norm_eps=1e-6,
    qk_norm=True,
    attention_gate=True,
    rotary_dim=64,
    design="qwen3_next",
    mixers=("deltanet", "deltanet", "deltanet", "attention"),
    deltanet=DeltaNetConfig(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
    **CHOSEN,
)


def experiment() -> Experiment:
    return Experiment(
        name="qwen3p5_4b_prm800k",
        base=BASE,
        tokenizer=BASE,
        model=base.model_config(BASE, **CHOSEN) if pathlib.Path(BASE).exists() else SIZES,
        data=DataConfig(
            train=(DATA,),
            supervise="step",
            too_long="truncate",
            tokens=4096,
            slots=512,
            rows=64,
            micro_rows=16,
            window=1024,
        ),
        target=TargetConfig(labels="rating", neutral="positive", after_error="keep"),
        objective="cross_entropy",
        optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=10, decay="cosine", weight_decay=0.01),
        mesh=MeshConfig(),  # fsdp: weights and rows split over all chips
        steps=100,
        checkpoint_every=25,
    )
