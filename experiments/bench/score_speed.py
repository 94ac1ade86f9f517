"""Speed of scoring a best-of-N pool beside transformers: SmolLM2-135M in float32, 19 chains for a GSM8K problem.

    python -m experiments.bench.score_speed [--data ../shared/data] [--problems 4] [--rounds 3]

The figure is chains a second, every chain scored in full. jprm merges the chains of a problem by common token prefix;
the peer, a Hugging Face token classifier, scores them sorted by length and padded in batches of 8. The two are measured
in turns on the same problems. Ours begins with text and includes tokenising, merging, packing and reading the scores.
The peer's includes only the forward passes. Compilation is left out.

The last line is one JSON object: `ours` and `peer`, chains a second, their `ratio`; and of jprm

    limit_share       model FLOP/s over the machine's float32 matrix-multiply limit, measured before every round
    tokens            computed, shared prefixes once; chain_tokens: of all chains; cells: computed with padding
    growth            the same problems with fewer chains each: how tokens and seconds grow with N
"""

from __future__ import annotations

import collections
import json
import random
import threading
import time
from typing import ClassVar

import jax

from experiments.bench import yardsticks
from jprm.checkpoints import base
from jprm.model.mesh import make_mesh
from jprm.score.scorer import PRM
from jprm.tokenizer import load_tokenizer, native_layout

SAMPLES = (1, 4, 19)


class Counting(PRM):
    """A scorer that counts the cells of its rows, the tokens in them, and the visible pairs of query and key."""

    counts: ClassVar[collections.Counter] = collections.Counter()
    one: ClassVar[threading.Lock] = threading.Lock()  # several threads run batches

    def _run(self, batch, readout):
        tokens, pairs = int(yardsticks.real_tokens(batch.rows).sum()), yardsticks.visible_pairs(batch.rows)
        with self.one:
            self.counts.update(cells=batch.rows.tokens.size, tokens=tokens, pairs=pairs)
        return super()._run(batch, readout)


def made_up_prm() -> Counting:
    """Returns SmolLM2-135M with a random head, whose scores cost as much as a trained one's."""
    path = yardsticks.smollm2()
    config, mesh = base.model_config(path, attention="paths", attention_block=128), make_mesh()
    with jax.set_mesh(mesh):
        params = yardsticks.parameters(config)
    return Counting(params, config, native_layout(load_tokenizer(path)), mesh, "correctness", "made up", 0)


def score(prm: Counting, pools: list[dict]) -> dict[str, float]:
    prm.counts.clear()
    start, busy = time.perf_counter(), time.process_time()
    scored = list(prm.score_many(pools))
    seconds, cpu = time.perf_counter() - start, time.process_time() - busy
    chains = sum(len(pool["samples"]) for pool in scored)
    flops = yardsticks.model_flops(prm.config, prm.counts["tokens"], prm.counts["pairs"], training=False)
    return {"seconds": seconds, "cpu_seconds": cpu, "chains": chains, "chains_per_s": chains / seconds,
            "flops_per_s": flops / seconds, **prm.counts}  # fmt: skip


def chain_tokens(prm: Counting, pools: list[dict]) -> int:
    """Returns the tokens of all chains, each packed alone."""
    layout = prm.layout
    return sum(
        len(layout.problem(pool["problem"])) + sum(len(layout.step(step, n)) for n, step in enumerate(sample["steps"]))
        for pool in pools
        for sample in pool["samples"]
    )


def main() -> None:
    args = yardsticks.parser(__doc__)
    args.add_argument("--problems", type=int, default=4, help="pools of 19 chains, drawn from seed 0 (default 4)")
    args = args.parse_args()
    file = yardsticks.dataset(args.data, "pools/gsm8k_chatgpt_n19.jsonl")
    script = yardsticks.peer_script(args, "peer_score.py")
    lines = file.read_text(encoding="utf-8").splitlines()
    pools = [json.loads(line) for line in random.Random(0).sample(lines, args.problems)]  # those that the peer draws
    prm = made_up_prm()
    fewer = {n: [pool | {"samples": pool["samples"][:n]} for pool in pools] for n in SAMPLES}
    for subset in fewer.values():
        score(prm, subset)  # compiles

    def peer() -> dict:
        theirs = yardsticks.peer(script, "--data", file, "--problems", args.problems)
        assert theirs["chains"] == sum(len(pool["samples"]) for pool in pools), "not the same chains"
        return theirs

    ours = yardsticks.beside_limit(lambda: score(prm, pools))
    speeds, theirs = yardsticks.measure(args.rounds, ours=ours, peer=peer if script else None).values()
    growth = [{"samples": n, **score(prm, subset)} for n, subset in fewer.items()]
    yardsticks.report(
        "score_speed", speeds.pop("chains_per_s"), theirs.get("chains_per_s"), unit="chains a second",
        **speeds, chain_tokens=chain_tokens(prm, pools), peer_tokens_per_s=theirs.get("tokens_per_s"),
        problems=args.problems, rounds=args.rounds,
        growth=[{key: row[key] for key in ("samples", "chains", "tokens", "cells", "seconds")} for row in growth],
    )  # fmt: skip


if __name__ == "__main__":
    main()
