"""Shards of pools of 19 chains with random ids, and a process that reads a stream of them: `storm.input` kills it."""

import hashlib
import json
import pathlib
import sys
import time

import jax
import numpy as np

from jprm.data import SHARDS
from jprm.io.outputs import write_json
from jprm.methods.data.stored_trees import CACHE_VERSION, TokenShards, shard_name, write_shard
from jprm.token_tree import TokenTree
from jprm.train.batches import PipelineConfig, rows_of

HOSTS, SAVED, SHARD = 2, 10, 1 << 21  # processes; batches between two saved positions; tokens of a shard
CONFIG = PipelineConfig(("none",), "step", "truncate", rows=16, tokens=8192, slots=1024, window=128)


def pool(rng: np.random.Generator, index: int) -> TokenTree:
    """A problem with 19 chains of four to eight steps."""
    length, parent, run, above = [int(rng.integers(50, 150))], [-1], [], []
    for _ in range(19):
        for step in range(int(rng.integers(4, 9))):
            length.append(int(rng.integers(15, 40)))
            parent.append(len(length) - 2 if step else 0)
            above.append(len(run) - 1 if step else -1)
            run.append(len(length) - 1)
    count = len(run)
    ids_N = (49_000 * rng.random(sum(length)) ** 3).astype(np.int32)
    some_M = [np.array(x, np.int64) for x in (run, above, range(count))]
    label_M, weight_M = rng.integers(0, 2, count).astype(np.float32), np.ones(count, np.float32)
    shape = (np.array(length, np.int64), np.array(parent, np.int64))
    return TokenTree(f"pool {index}", ids_N, *shape, *some_M, label_M, weight_M, length[0])


def write(folder: pathlib.Path, tokens: float) -> dict:
    """Writes shards of about so many tokens."""
    count, shards, start = max(HOSTS, round(tokens / SHARD)), [], time.perf_counter()
    folder.mkdir(parents=True)
    for index in range(count):
        rng = np.random.default_rng(index)
        trees = (pool(rng, i) for i in range(SHARD // 2900))
        file = folder / shard_name(index, count)
        shards.append(write_shard(file, trees, ()) | {"bytes": file.stat().st_size})
    write_json(folder / SHARDS, {"version": CACHE_VERSION, "about": {"extras": []}, "shards": shards})
    total = {key: sum(shard[key] for shard in shards) for key in ("tokens", "records", "bytes")}
    return {"shards": count, **total, "written_s": time.perf_counter() - start}


def read(bucket: str, cache: str, saved: pathlib.Path, host: int, batches: int, most: float) -> None:
    """Reads one stream's batches from where it saved its position."""
    stream = TokenShards(bucket, cache=cache, most=most).stream(0, (host, HOSTS))
    position = iter(rows_of(stream.batch(CONFIG.window, batch_fn=list), CONFIG, divided=True))
    state = json.loads(saved.read_text()) if saved.exists() else {"done": 0, "digest": "", "tokens": 0, "cpu": 0.0}
    if state["done"]:
        position.set_state(state["position"])
    begun = time.process_time()
    for done in range(state["done"] + 1, batches + 1):
        rows, count_BK = next(position)
        seen = hashlib.sha256(state["digest"].encode())
        for x in jax.tree.leaves(rows):
            seen.update(np.ascontiguousarray(x))
        state |= {"done": done, "digest": seen.hexdigest(), "tokens": state["tokens"] + int(count_BK.sum(axis=0)[3])}
        print(done, flush=True)
        if done % SAVED == 0 or done == batches:
            state |= {"position": position.get_state(), "cpu": state["cpu"] + time.process_time() - begun}
            begun = time.process_time()
            write_json(saved, state)


if __name__ == "__main__":
    bucket, cache, saved, host, batches, most = sys.argv[1:]
    read(bucket, cache, pathlib.Path(saved), int(host), int(batches), float(most))
