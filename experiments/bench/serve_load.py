"""Throughput of the server's engine beside scoring one request after another: SmolLM2-135M in float32.

    python -m experiments.bench.serve_load [--data ../shared/data] [--seconds 30]

Closed loop: every client sends its next request when it has its answer. `random` are single chains of different GSM8K
problems, `samples` are requests of 8 clients for 8 samples of one problem at a time. One at a time is `PRM.score_trees`
with one chain a call; offline is one call with all chains that 64 clients had under way. Compilation is left out, and
the count of compiled programs after the warm-up must not grow.

The last line is one JSON object: chains a second, ratios, and the 50th and 99th percentile of the seconds to an answer.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import json
import pathlib
import time

import jax
import numpy as np
import tyro

from experiments.bench import yardsticks
from experiments.bench.score_speed import made_up_prm
from jprm.apps.serve.engine import Engine
from jprm.score.scorer import PRM
from jprm.token_tree import token_tree
from jprm.tree import ReasoningTree, read_records, tree_of

LONGEST = 1024


def main(data: pathlib.Path = yardsticks.REPOSITORY.parent / "shared" / "data", seconds: float = 30.0) -> None:
    """Measure the engine under load.

    Args:
        data: The folder that holds pools/.
        seconds: Time of each measurement.
    """
    prm = made_up_prm()
    prm.warm_up(8192)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, _, **__: compiled.append(event))
    pools = [tree_of(record) for record in itertools.islice(read_records(data / "pools/gsm8k_chatgpt_n19.jsonl"), 256)]
    single = [chain for tree in pools for chain in chains_of_pool(tree, prm)[:1]]
    eight = [chain for tree in pools for chain in chains_of_pool(tree, prm)[:8]]
    result = {"alone": one_at_a_time(prm, single, seconds), "offline": offline(prm, single[:64])}
    result["alone_samples"] = one_at_a_time(prm, eight, seconds)
    for name, chains, clients in (("1", single, 1), ("8", single, 8), ("64", single, 64), ("64_samples", eight, 64)):
        engine = Engine(prm, LONGEST, "model")
        result[name] = closed_loop(engine, chains, clients, seconds)
        base = result["alone_samples" if "samples" in name else "alone"]
        result[name]["ratio"] = result[name]["chains_per_second"] / base
        engine.close()
        print(name, result[name], flush=True)
    result["compiled_after_ready"] = compiled.count("/jax/core/compile/backend_compile_duration")
    print(json.dumps(result))


def one_at_a_time(prm, chains: list[ReasoningTree], seconds: float) -> float:
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        prm.score_trees([chains[done % len(chains)]])
        done += 1
    return done / (time.perf_counter() - began)


def offline(prm, chains: list[ReasoningTree]) -> float:
    began = time.perf_counter()
    prm.score_trees(chains)
    return len(chains) / (time.perf_counter() - began)


def closed_loop(engine: Engine, chains: list[ReasoningTree], clients: int, seconds: float) -> dict[str, float]:
    """Returns chains a second and seconds to an answer with so many clients, each with one request under way."""
    waits: collections.deque[float] = collections.deque()
    began = time.perf_counter()

    def client(number: int) -> None:
        turn = number
        while time.perf_counter() - began < seconds:
            sent, tree = time.perf_counter(), chains[turn % len(chains)]
            engine.score([tree], engine.tokens_of([tree])).result()
            waits.append(time.perf_counter() - sent)
            turn += clients

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        for ended in [pool.submit(client, number) for number in range(clients)]:
            ended.result()
    rate = len(waits) / (time.perf_counter() - began)
    p50, p99 = np.percentile(waits, [50, 99]).tolist()
    return {"chains_per_second": rate, "p50": p50, "p99": p99}


def chains_of_pool(pool: ReasoningTree, prm: PRM) -> list[ReasoningTree]:
    """Returns every sample of a pool as a chain. One of 4,017 tokens, longer than the server takes, is left out."""
    starts = [i for i, node in enumerate(pool.nodes) if node.parent == -1]
    ends = [*starts[1:], len(pool.nodes)]
    chains = [
        tree_of({"problem": pool.problem, "steps": [node.text for node in pool.nodes[start:end]]})
        for start, end in zip(starts, ends, strict=True)
    ]
    return [chain for chain in chains if len(token_tree(chain, prm.layout).tokens_N) <= LONGEST]


if __name__ == "__main__":
    tyro.cli(main)
