"""Speed of training beside TRL's PRMTrainer: SmolLM2-135M in float32, all of it trained, on PRM800K phase 1.

    python -m experiments.bench.train_speed [--data ../shared/data] [--rounds 3]

The figure is distinct rated completions a second. jprm packs a labelling record as one tree, many trees to a row; TRL
makes a sequence of every alternative. Each side's speed is that of its units (rows, sequences) on a fixed
sample, times the rated completions of the file over the units that hold them all. The two are measured in turns. A step
of ours is all of a training step: waiting for data, forward and backward, clipping, AdamW; compilation is left out.

The last line is one JSON object: `ours` and `peer`, rated completions a second, their `ratio`; and of jprm

    limit_share       model FLOP/s over the machine's float32 matrix-multiply limit, measured before every round
    flops_per_s       model FLOPs only: nothing that is computed again, no padding, visible pairs of attention
    tokens_per_s      real tokens; of the peer too
    wait_share        of the time, waiting for the next rows; host_rows_per_s is what the host can make alone
    cpu_seconds       of a step, which say more than the clock does where the machine is shared
    temporary_bytes   what the compiled step takes beside its state
    remats            time and memory of a step of fewer layers under each policy of rematerialisation
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import yardsticks
from jprm.checkpoints import base
from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig, override
from jprm.io.jsonl import write_records
from jprm.methods.data.readers import find
from jprm.model.mesh import make_mesh, put_rows
from jprm.model.transformer import REMAT
from jprm.tokenizer import Tokenizer, load_tokenizer
from jprm.train import Trainer
from jprm.train.batches import own_batches


def experiment(train: pathlib.Path, tokens: int) -> Experiment:
    smollm2 = str(yardsticks.smollm2())
    model = base.model_config(smollm2, remat="dots", attention="paths", attention_block=128)
    return Experiment(
        name="train_speed", base=smollm2, tokenizer=smollm2, model=model,
        data=DataConfig((str(train),), "step", "error", tokens=tokens, slots=1024, rows=1),
        target=TargetConfig(labels="rating", neutral="positive", after_error="keep"), objective="cross_entropy",
        optimizer=OptimizerConfig(learning_rate=1e-5, weight_decay=0.01), steps=1000,
    )  # fmt: skip


def epoch(config: Experiment, tokenizer: Tokenizer) -> dict[str, float]:
    """Returns what the file holds as rows, and how fast the host alone makes them, in one pass."""
    start = time.perf_counter()
    counts = [
        (1, int(np.sum(rows.weight > 0)), int(yardsticks.real_tokens(rows).sum()), yardsticks.visible_pairs(rows))
        for rows in own_batches(config, config.data.train, make_mesh(config.mesh), tokenizer, once=True)
    ]
    seconds = time.perf_counter() - start
    rows, labels, tokens, pairs = (sum(column) for column in zip(*counts, strict=True))
    return {"rows": rows, "rated_completions": labels, "tokens": tokens, "pairs": pairs,
            "host_rows_per_s": rows / seconds}  # fmt: skip


class TrainSpeed:
    """The training step on the pipeline's batches, ready to run."""

    def __init__(self, config: Experiment, completions: float):
        """completions: rated completions in a row, on average over the file."""
        self.config, self.completions, self.trainer = config, completions, Trainer(config)
        self.batches, self.step, mesh = self.trainer.batches, self.trainer._step, self.trainer.mesh
        with jax.set_mesh(mesh):
            rows = put_rows(next(self.batches), mesh, lead=1)
            compiled = self.step.lower(self.trainer.state, rows, jnp.float32(0)).compile()
        self.temporary_bytes = compiled.memory_analysis().temp_size_in_bytes
        self.run(1)  # warm

    def run(self, steps: int) -> dict[str, float]:
        waited, tokens, pairs, metrics = 0.0, 0, 0, None
        start, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            before = time.perf_counter()
            host = next(self.batches)
            waited += time.perf_counter() - before
            new = self.trainer.step(host)
            jax.block_until_ready(metrics)  # of the step before, as the loop reads them
            metrics = new
            tokens += int(yardsticks.real_tokens(host).sum())
            pairs += yardsticks.visible_pairs(host)
        jax.block_until_ready((self.trainer.state, metrics))
        seconds, cpu = time.perf_counter() - start, time.process_time() - busy
        assert np.isfinite(metrics.loss), "the loss is not finite"
        assert self.step._cache_size() <= 1, "the step was compiled again"
        flops = yardsticks.model_flops(self.config.model, tokens, pairs, training=True)
        return {
            "seconds": seconds / steps, "cpu_seconds": cpu / steps, "wait_share": waited / seconds,
            "tokens_per_s": tokens / seconds, "flops_per_s": flops / seconds,
            "labels_per_s": steps / seconds * self.completions,
        }  # fmt: skip


def remats(config: Experiment, layers: int, rounds: int) -> list[dict]:
    """Returns time and memory of a step with so many layers under each remat policy; the fastest round counts."""
    rows = []
    for name in REMAT:
        model = dataclasses.replace(config.model, layers=layers, remat=name)
        ours = TrainSpeed(dataclasses.replace(config, model=model), 0)
        best = min((ours.run(1) for _ in range(rounds)), key=lambda row: row["cpu_seconds"])
        rows.append({"remat": name, "layers": layers, "temporary_bytes": ours.temporary_bytes}
                    | {key: best[key] for key in ("seconds", "cpu_seconds")})  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    args = yardsticks.parser(__doc__)
    args.add_argument("--steps", type=int, default=1, help="of jprm in a round, of one row each (default 1)")
    args.add_argument("--tokens", type=int, default=8192, help="of a row (default 8192)")
    args.add_argument("--examples", type=int, default=8, help="of TRL in a round, a multiple of 4 (default 8)")
    args.add_argument("--remat-layers", type=int, default=6, help="of the comparison of remat policies; 0: none")
    args.add_argument("--set", nargs="*", default=[], metavar="A.B=VALUE", help="as of jprm train: model.remat=full")
    args = args.parse_args()
    phase1 = yardsticks.dataset(args.data, "prm800k/phase1_train.jsonl")
    script = yardsticks.peer_script(args, "peer_train.py")
    options = {"human_written": "unlabelled", "control_questions": "keep"}  # TRL's layout rates and keeps as many
    records = [record for _, record in find("prm800k").read(phase1, **options)]
    with tempfile.TemporaryDirectory() as folder:
        train = pathlib.Path(folder) / "trees.jsonl"
        write_records(train, records)
        config = override(experiment(train, args.tokens), args.set)
        whole = epoch(config, load_tokenizer(config.tokenizer))
        ours = TrainSpeed(config, whole["rated_completions"] / whole["rows"])
        policies = remats(config, args.remat_layers, args.rounds) if args.remat_layers else []

    def peer() -> dict:
        speed = yardsticks.peer(script, "--data", phase1, "--examples", args.examples)
        assert speed["rated_completions"] == whole["rated_completions"], "not the same data"
        return speed

    step = yardsticks.beside_limit(lambda: ours.run(args.steps))
    speeds, theirs = yardsticks.measure(args.rounds, ours=step, peer=peer if script else None).values()
    yardsticks.report(
        "train_speed", speeds.pop("labels_per_s"), theirs.get("labels_per_s"), unit="rated completions a second",
        **speeds, peer_tokens_per_s=theirs.get("real_tokens_per_s"), temporary_bytes=ours.temporary_bytes,
        epoch=whole, remats=policies, rounds=args.rounds, steps=args.steps, examples=args.examples,
        row_tokens=args.tokens,
        **{name: getattr(ours.config.model, name) for name in ("remat", "attention", "attention_block", "dtype")},
    )  # fmt: skip


if __name__ == "__main__":
    main()
