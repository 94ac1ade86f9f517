"""How many tokens a second one host packs, from records, the cache of token trees and shards: PRM800K phase 1.

    python -m experiments.bench.host_speed [--data ../shared/data] [--rounds 3]

A round is one epoch of the training pipeline, rows of 8,192 tokens, by one thread. The ways take turns. The rows of
records and cache are compared bit for bit. The last line is one JSON object: `ours`, real tokens a second from the
cache, `peer`, the same from records, `ratio`; `shards`, of shards of tokens; `write_seconds`, what the cache took to
write; `cache_bytes_a_token`; and `packing`, tokens a second of packing alone, with the trees in memory.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import tempfile
import time

import jax
import numpy as np

from experiments.bench import yardsticks
from experiments.bench.train_speed import experiment
from jprm.experiment import Experiment
from jprm.io.jsonl import write_records
from jprm.methods.data.readers import find
from jprm.methods.data.stored_trees import TokenTrees, tokenise
from jprm.model.mesh import make_mesh
from jprm.pack import pack
from jprm.tokenizer import Tokenizer, load_tokenizer
from jprm.train.batches import own_batches


def epoch(config: Experiment, tokenizer: Tokenizer) -> tuple[list, dict[str, float]]:
    start, busy = time.perf_counter(), time.process_time()
    rows = list(own_batches(config, config.data.train, make_mesh(config.mesh), tokenizer, once=True))
    spent = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}
    tokens = sum(int(yardsticks.real_tokens(batch).sum()) for batch in rows)
    return rows, {"tokens_per_s": tokens / spent["seconds"], "tokens_per_cpu_s": tokens / spent["cpu_seconds"]}


def packing(trees: TokenTrees, config: Experiment) -> float:
    """Returns tokens a second of packing trees that are in memory."""
    tokenised, data = list(trees), config.data
    start = time.perf_counter()
    for first in range(0, len(tokenised), data.window):
        pack(tokenised[first : first + data.window], data.tokens, data.slots, too_long="error")
    return sum(len(tree.tokens_N) for tree in tokenised) / (time.perf_counter() - start)


def main() -> None:
    args = yardsticks.parser(__doc__).parse_args()
    phase1 = yardsticks.dataset(args.data, "prm800k/phase1_train.jsonl")
    read = find("prm800k").read(phase1, human_written="unlabelled", control_questions="keep")
    with tempfile.TemporaryDirectory() as folder:
        train = pathlib.Path(folder) / "trees.jsonl"
        write_records(train, [record for _, record in read])
        plain = experiment(train, 8192)
        stored = dataclasses.replace(plain, data=dataclasses.replace(plain.data, cache=f"{folder}/cache"))
        tokenizer = load_tokenizer(plain.tokenizer)
        start = time.perf_counter()
        next(own_batches(stored, stored.data.train, make_mesh(stored.mesh), tokenizer, once=True))
        written = time.perf_counter() - start
        tokenise(plain, f"{folder}/tokens", shards=8, workers=1)
        shards = dataclasses.replace(plain, data=dataclasses.replace(plain.data, train=(f"{folder}/tokens",)))
        rows = {}

        def timed(name: str, config: Experiment) -> dict[str, float]:
            rows[name], figures = epoch(config, tokenizer)
            return figures

        sides = {"records": plain, "cache": stored, "shards": shards}
        medians = yardsticks.measure(
            args.rounds, **{name: functools.partial(timed, name, config) for name, config in sides.items()}
        )
        jax.tree.map(np.testing.assert_array_equal, rows["cache"], rows["records"])
        (place,) = (pathlib.Path(folder) / "cache").iterdir()
        size = sum(file.stat().st_size for file in place.iterdir())
        trees = TokenTrees(place)
        ours = medians["cache"]
        yardsticks.report(
            "host_speed", ours.pop("tokens_per_s"), medians["records"]["tokens_per_s"], unit="tokens a second", **ours,
            write_seconds=written, cache_bytes_a_token=size / sum(len(tree.tokens_N) for tree in trees),
            packing=packing(trees, plain), rounds=args.rounds,
            shards=medians["shards"],
        )  # fmt: skip


if __name__ == "__main__":
    main()
