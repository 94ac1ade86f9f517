"""Speed of reinforcement learning beside TRL's GRPOTrainer, its newest release: the quickstart's policy and problems.

    python -m experiments.bench.rl_speed [--quickstart runs/quickstart] [--rounds 3] [--updates 4]

An update samples 16 chains of each of 16 problems at temperature 1, up to 96 tokens, has their answers verified, and
makes one step of AdamW in float32 on all of them, without a KL term or a PRM. Both start from the same parameters, with
the same token ids of prompts. TRL samples by transformers' `generate` and makes a sequence of each sample; jprm makes a
tree of each problem's samples. The two run in turns, and the median of a round's updates counts, compilation left out.

The last line is one JSON object: `ours` and `peer`, updates a second, their `ratio`; and of both, means an update of

    sampled_tokens    tokens that the policy wrote
    cells             tokens computed in training, padding included
    packed_tokens     without padding, and separate_tokens, as sequences; of jprm only
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import statistics
import tempfile
import time
from typing import Any

import jax

from experiments.bench import yardsticks
from experiments.quickstart import rl
from jprm.io.storage import Place, path_of
from jprm.methods.export.export import export
from jprm.methods.policy.protocol import Prefix
from jprm.methods.rl.config import RLExperiment, learner
from jprm.methods.rl.loop import Loop, Progress
from jprm.train import Trainer
from jprm.train.callbacks import Log

HERE = pathlib.Path(__file__).parent
WARM = 4  # updates that may compile: rows come in few sizes


class RlSpeed:
    """The updates of one run, one after the other."""

    def __init__(self, config: RLExperiment, folder: Place, stack: contextlib.ExitStack):
        progress, experiment = Progress(), learner(config)
        trainer = stack.enter_context(Trainer(experiment, folder, position=progress))
        log = stack.enter_context(Log(folder, experiment, 0, trainer.goodput))
        self.metrics = folder / "metrics.jsonl"
        self.loop, self.number = Loop(config, trainer, progress, log, lambda *_: None), 0
        self.cells: list[int] = []
        step = trainer.step
        trainer.step = lambda rows: (self.cells.append(rows.tokens.size), step(rows))[1]
        self.run(WARM)

    def run(self, updates: int) -> dict[str, float]:
        seconds = []
        for _ in range(updates):
            self.number += 1
            start = time.perf_counter()
            self.loop.update(self.number)
            jax.block_until_ready(self.loop.trainer.state)
            seconds.append(time.perf_counter() - start)
        lines = [json.loads(line) for line in self.metrics.read_text().splitlines()[-updates:]]
        mean = {
            key: statistics.mean(line[key] for line in lines) for key in ("packed_tokens", "separate_tokens", "reward")
        }
        chains = self.loop.config.problems_an_update * self.loop.config.samples
        sampled = chains * statistics.mean(line["chain_tokens"] for line in lines)
        return {"seconds": statistics.median(seconds), "sampled_tokens": sampled,
                "cells": statistics.mean(self.cells[-updates:]), **mean}  # fmt: skip


def main() -> None:
    args = yardsticks.parser(__doc__)
    args.add_argument("--quickstart", type=pathlib.Path, default=rl.QUICKSTART, help="folder of a finished quickstart")
    args.add_argument("--updates", type=int, default=4, help="timed in a round, of each (default 4)")
    args.add_argument("--batch", type=int, default=256, help="of TRL: samples of a forward pass (default 256)")
    args = args.parse_args()
    yardsticks.needed(args.quickstart / "policy", "Run `make quickstart` first, or name its folder with --quickstart")
    config = dataclasses.replace(rl.experiment("verifier", args.quickstart), prm="", reference=False)
    if args.peer:
        yardsticks.peer_python("grpo")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        ours = RlSpeed(config, path_of(folder) / "run", stack)
        asked = request(config, ours.loop, pathlib.Path(folder) / "model", args.batch, args.updates + 1)
        peer = lambda: yardsticks.peer(HERE / "peer_grpo.py", stdin=json.dumps(asked), environment="grpo")  # noqa: E731
        middle, other = yardsticks.measure(
            args.rounds, ours=lambda: ours.run(args.updates), peer=peer if args.peer else None
        ).values()
    name = other.pop("peer", None)
    yardsticks.report(
        "rl_speed", 1 / middle["seconds"], 1 / other["seconds"] if other else None, rounds=args.rounds,
        **middle, **{f"peer_{key}": x for key, x in other.items()}, peer_name=name,
    )  # fmt: skip


def request(config: RLExperiment, loop: Loop, folder: pathlib.Path, batch: int, updates: int) -> dict[str, Any]:
    """Returns what the peer is to do, its model written into `folder`."""
    export(config.policy, folder)
    policy = loop.samples.policy
    prompts = [policy.prompt(Prefix(record["problem"])) for record in loop.records]
    return {
        "model": str(folder), "problems": config.problems_an_update, "samples": config.samples, "batch": batch,
        "max_tokens": config.max_tokens, "learning_rate": config.optimizer.learning_rate, "updates": updates,
        "records": [
            {"prompt": policy.tokenizer.decode(ids), "ids": ids, "answer": record["answer"]}
            for record, ids in zip(loop.records, prompts, strict=True)
        ],
    }  # fmt: skip


if __name__ == "__main__":
    main()
