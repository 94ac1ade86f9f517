"""Qwen2.5-Math-72B on PRM800K: a process reward model from human step ratings, on 256 chips.

    jprm prepare prm800k --input phase1_train.jsonl --output data/prm800k \
      --set human_written=unlabelled control_questions=drop
    export JPRM_BASE=models/Qwen2.5-Math-72B JPRM_PREPARED=data/prm800k
    jprm plan experiments/qwen2p5_math_72b_prm800k.py --topology v5p-512
    jprm train experiments/qwen2p5_math_72b_prm800k.py --workdir /shared/runs/qwen_72b --distributed auto

The last on every host of the slice. It has not been run. All but the size, the rows and the rate is
`qwen2p5_math_7b_prm800k.py`'s.

Its plan (tpu/README.md), with libtpu 0.0.42.1, for v5p-512: 3.15 GiB of state and 72.89 of temporaries a chip, of
95.74; 1.04 times the model's FLOPs; at most 249,000 tokens a second. With a row a chip the products of all 80 layers
do not fit (121 GiB); two chips share the heads and the MLP of a row.
"""

import dataclasses
import os
import pathlib
import runpy

from jprm.checkpoints import base
from jprm.experiment import Experiment
from jprm.model.mesh import MeshConfig

BASE = os.environ.get("JPRM_BASE", "models/Qwen2.5-Math-72B")
SMALLER = runpy.run_path(str(pathlib.Path(__file__).with_name("qwen2p5_math_7b_prm800k.py")))
# For a plan; see there. As litgpt/config.py has them, of Qwen/Qwen2.5-Math-72B's config.json.
PUBLISHED = dataclasses.replace(
    SMALLER["PUBLISHED"],
    layers=80,
    width=8192,
    heads=64,
    kv_heads=8,
    mlp_width=29568,
    norm_eps=1e-5,
)


def experiment() -> Experiment:
    seven = SMALLER["experiment"]()
    return dataclasses.replace(
        seven,
        name="qwen2p5_math_72b_prm800k",
        base=BASE,
        tokenizer=BASE,
        model=base.model_config(BASE, **SMALLER["CHOSEN"]) if pathlib.Path(BASE).exists() else PUBLISHED,
        data=dataclasses.replace(seven.data, rows=128, micro_rows=128),  # a row for two chips
        mesh=MeshConfig(tensor=2),
        optimizer=dataclasses.replace(seven.optimizer, learning_rate=5e-6),
    )
