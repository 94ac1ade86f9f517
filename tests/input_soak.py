"""Reads many tokens from shards while its processes are killed: `make soak-input`.

Shards of trees by shape (pools of 19 chains, random ids) are in a bucket, two processes read a stream each through a
cache that is smaller than the data, and save their positions. Each is killed in every phase: before its first batch,
while it copies a shard, between batches, and while it saves. The batches of both must equal, bit for bit, those of
processes that nothing disturbs. The last line is JSON.
"""

import argparse
import hashlib
import json
import pathlib
import random
import signal
import subprocess
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
PHASES = ("before the first batch", "copying", "between batches", "saving")
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
    """Reads one stream's batches from where it saved its position; the child process."""
    stream = TokenShards(bucket, cache=cache, most=most).stream(0, (host, HOSTS))
    found = iter(rows_of(stream.batch(CONFIG.window, batch_fn=list), CONFIG, divided=True))
    state = json.loads(saved.read_text()) if saved.exists() else {"done": 0, "digest": "", "tokens": 0, "cpu": 0.0}
    if state["done"]:
        found.set_state(state["position"])
    begun = time.process_time()
    for done in range(state["done"] + 1, batches + 1):
        rows, count_BK = next(found)
        seen = hashlib.sha256(state["digest"].encode())
        for x in jax.tree.leaves(rows):
            seen.update(np.ascontiguousarray(x))
        state |= {"done": done, "digest": seen.hexdigest(), "tokens": state["tokens"] + int(count_BK.sum(axis=0)[3])}
        print(done, flush=True)
        if done % SAVED == 0 or done == batches:
            state |= {"position": found.get_state(), "cpu": state["cpu"] + time.process_time() - begun}
            begun = time.process_time()
            write_json(saved, state)


class Readers:
    """One process a host, killed at will."""

    def __init__(self, folder: pathlib.Path, name: str, bucket: str, batches: int, most: float):
        self.folder, self.batches = folder / name, batches
        self.folder.mkdir()
        self.arguments = [str(batches), str(most)]
        self.bucket = bucket

    def state(self, host: int) -> pathlib.Path:
        return self.folder / f"{host}.json"

    def start(self, host: int) -> subprocess.Popen:
        places = [self.bucket, str(self.folder / f"cache{host}"), str(self.state(host)), str(host)]
        command = [sys.executable, __file__, "--child", *places, *self.arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def undisturbed(self, host: int) -> None:
        with self.start(host) as child:
            assert child.stdout is not None
            child.stdout.read()
        assert child.returncode == 0

    def strike(self, host: int, phase: str, rng: random.Random) -> None:
        """Starts a host's process and kills it in this phase."""
        with self.start(host) as child:
            assert child.stdout is not None
            if phase == PHASES[1]:
                self._wait(child, f"cache{host}/.*.partial")
            elif phase == PHASES[2]:
                for _ in range(rng.randint(1, 3 * SAVED)):
                    child.stdout.readline()
            elif phase == PHASES[3]:
                for _ in range(rng.randint(1, 3) * SAVED):
                    child.stdout.readline()
                self._wait(child, f"{host}.json.partial")
            else:
                time.sleep(rng.uniform(1, 3))
            child.send_signal(signal.SIGKILL)
            child.stdout.read()

    def _wait(self, child: subprocess.Popen, pattern: str) -> None:
        limit = time.monotonic() + 5  # the moment may pass between two looks
        while child.poll() is None and time.monotonic() < limit and not any(self.folder.glob(pattern)):
            time.sleep(0.0005)

    def results(self) -> list[dict]:
        return [json.loads(self.state(host).read_text()) for host in range(HOSTS)]


def soak(folder: pathlib.Path, tokens: float, kills: int, seed: int) -> dict:
    rng = random.Random(seed)
    about = write(folder / "bucket", tokens)
    print(f"{about}", flush=True)
    bucket, most = f"file://{folder / 'bucket'}", about["bytes"] / 3
    batches = int(about["tokens"] / HOSTS / (CONFIG.rows * CONFIG.tokens))
    whole, killed = (Readers(folder, name, bucket, batches, most) for name in ("whole", "killed"))
    struck = dict.fromkeys(PHASES, 0)
    start = time.perf_counter()
    for host in range(HOSTS):
        whole.undisturbed(host)
    print(f"undisturbed: {time.perf_counter() - start:.0f} s", flush=True)
    for number in range(kills):
        phase, host = PHASES[number % len(PHASES)], number // len(PHASES) % HOSTS
        killed.strike(host, phase, rng)
        struck[phase] += 1
    for host in range(HOSTS):
        killed.undisturbed(host)
        held = sum(file.stat().st_size for file in (folder / "killed" / f"cache{host}").glob("*.array_record"))
        assert held <= most, "the cache is larger than its bound"
    for one, other in zip(whole.results(), killed.results(), strict=True):
        assert (one["digest"], one["done"], one["tokens"]) == (other["digest"], other["done"], other["tokens"])
    read_tokens = sum(one["tokens"] for one in whole.results())
    rate = read_tokens / sum(one["cpu"] for one in whole.results())
    more = {"tokens_read": 2 * read_tokens, "batches_of_a_host": batches, "tokens_a_cpu_second": round(rate)}
    return about | more | {"kills": struck, "cache_bytes": round(most), "equal": True}


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        bucket, cache, saved, host, batches, most = sys.argv[2:]
        sys.exit(read(bucket, cache, pathlib.Path(saved), int(host), int(batches), float(most)))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="a folder that is not there yet")
    parser.add_argument("--tokens", type=float, default=200e6)
    parser.add_argument("--kills", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True)
    print(json.dumps(soak(asked.folder.absolute(), asked.tokens, asked.kills, asked.seed)))
