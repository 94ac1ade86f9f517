"""A minute from a fresh clone: a tiny random decoder learns the two chains of `examples/tiny_chain.jsonl` by heart.

    jprm train experiments/tiny.py --workdir runs/tiny
    jprm score --model runs/tiny --input examples/tiny_chain.jsonl --output runs/tiny/scored.jsonl

It shows the commands, not a model: it has seen nothing but these chains, whose bytes are its tokens. On two busy
CPU cores: 16 seconds to train (most of them to start and compile), 4 to score.
"""

import pathlib

from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig
from jprm.model.config import ModelConfig

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def experiment() -> Experiment:
    return Experiment(
        name="tiny",
        tokenizer=str(EXAMPLES / "bytes"),
        model=ModelConfig(
            vocab_size=256,
            layers=2,
            width=64,
            heads=4,
            kv_heads=2,
            head_dim=16,
            mlp_width=128,
            rope_theta=10000.0,
            norm_eps=1e-5,
        ),  # fmt: skip
        data=DataConfig(
            train=(str(EXAMPLES / "tiny_chain.jsonl"),),
            supervise="step",
            too_long="error",
            tokens=512,
            slots=32,
            rows=1,
            window=2,
        ),
        target=TargetConfig(labels="correctness", neutral="none", after_error="keep"),
        objective="cross_entropy",
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=5),
        steps=40,
        checkpoint_every=40,
    )
