"""Qwen2.5-Math-72B on PRM800K: a process reward model from human step ratings, on 256 chips.

    export JPRM_BASE=models/Qwen2.5-Math-72B JPRM_PREPARED=data/prm800k
    jprm plan experiments/qwen2p5_math_72b_prm800k.py --topology v5p-512
    jprm train experiments/qwen2p5_math_72b_prm800k.py --workdir /shared/runs/qwen_72b --distributed auto

The last on every host of the slice. It has not been run. All but the size, the rows and the rate is
`qwen2p5_math_7b_prm800k.py`'s.

Its plan (tpu/README.md), with libtpu 0.0.42.1, for v5p-512: 3.14 GiB of state and 15.00 of temporaries a chip, of
95.74; 1.29 times the model's FLOPs; at most 201,000 tokens a second.
"""

import dataclasses
import os
import pathlib
import runpy

from jprm.checkpoints import base
from jprm.experiment import Experiment

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
        data=dataclasses.replace(seven.data, rows=256, micro_rows=256),  # a row a chip
        optimizer=dataclasses.replace(seven.optimizer, learning_rate=5e-6),
    )
