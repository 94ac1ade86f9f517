"""Qwen2.5-Coder as a process reward model: human step ratings of PRM800K, or outcomes of its own samples.

    python -m experiments.real.download qwen2.5-coder-0.5b
    make data/prm800k.prepared
    jprm train experiments/real/prm.py --workdir runs/real/prm800k

Of outcomes, at every step of a sample (README.md has a command for two CPU cores, which trains the upper layers):

    python -m experiments.real.outcomes --output runs/real
    export JPRM_PREPARED=runs/real/fit.jsonl JPRM_PREPARED_VALID=runs/real/valid.jsonl
    jprm train experiments/real/prm.py --workdir runs/real/outcomes \\
      --set data.supervise=outcome_steps target.labels=value target.neutral=none optimizer.learning_rate=1e-5 steps=60

`JPRM_BASE` names another base, `JPRM_PREPARED` other data (`JPRM_PREPARED_VALID`: for validation). The whole decoder is
trained in bfloat16 with float32 parameters, after the head was fitted on the decoder as it is. Figures: README.md.
"""

import os

import jax

from jprm.checkpoints import base
from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig

BASE = os.environ.get("JPRM_BASE", "runs/models/qwen2.5-coder-0.5b.gguf")
DATA = os.environ.get("JPRM_PREPARED", "data/prepared/prm800k")
VALID = os.environ.get("JPRM_PREPARED_VALID", "data/prepared/prm800k_valid")


def experiment() -> Experiment:
    attention = "gpu_kernel" if jax.default_backend() == "gpu" else "paths"
    return Experiment(
        name="real_prm800k",
        base=BASE,
        tokenizer=BASE,
        model=base.model_config(BASE, dtype="bfloat16", remat="dots", attention=attention),
        data=DataConfig(
            train=(DATA,), valid=(VALID,), supervise="step", too_long="truncate",
            tokens=4096, slots=512, rows=8, micro_rows=4,
        ),
        target=TargetConfig(labels="rating", neutral="positive", after_error="keep"),
        objective="cross_entropy",
        optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=10, decay="cosine", b2=0.98, weight_decay=0.01),
        probe_rows=64,
        steps=90,
        log_every=5,
        valid_every=50,
        checkpoint_every=1000,
    )  # fmt: skip
