"""Qwen2.5-Math-7B on PRM800K on one GPU: LoRA and head on a base stored in 4 bits (QLoRA).

    jprm prepare prm800k --input phase1_train.jsonl --output data/prm800k \
      --set human_written=unlabelled control_questions=drop
    export JPRM_BASE=hf://Qwen/Qwen2.5-Math-7B@main JPRM_PREPARED=data/prm800k
    jprm plan experiments/qwen2p5_math_7b_one_gpu.py --topology h100-1
    jprm train experiments/qwen2p5_math_7b_one_gpu.py --workdir runs/qwen2p5_math_7b_one_gpu

It has not been run. A GGUF file of the model can be the base too, with --set base_dtype=gguf; its blocks are then kept
as they are. docs/small_cards.md has what it takes on cards of other sizes.
"""

import dataclasses
import os
import pathlib

from jprm.experiment import Experiment, load
from jprm.model.parameters import LoraConfig


def experiment() -> Experiment:
    whole = load(pathlib.Path(__file__).with_name("qwen2p5_math_7b_prm800k.py"))
    return dataclasses.replace(
        whole,
        name="qwen2p5_math_7b_one_gpu",
        base_dtype="nf4",
        lora=LoraConfig(rank=16, alpha=32.0),
        model=dataclasses.replace(whole.model, remat="full", attention=os.environ.get("JPRM_ATTENTION", "gpu_kernel")),
        data=dataclasses.replace(whole.data, tokens=2048, slots=512, rows=16, micro_rows=1, window=128),
        optimizer=dataclasses.replace(whole.optimizer, learning_rate=1e-4),
        steps=400,
    )
