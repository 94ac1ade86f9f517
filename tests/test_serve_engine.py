"""The engine's two threads: what is packed while the device is busy, and what waits to be merged."""

import threading
import time

import jax
import numpy as np
import pytest
import tiny_run as tiny
from refusing import refused

import jprm
from jprm.apps.serve.engine import BATCH_TOKENS, Engine
from jprm.io.jsonl import write_records
from jprm.methods.scored_files import score_file
from jprm.model.mesh import MeshConfig
from jprm.score import scorer
from jprm.tree import tree_of


class Slow:
    """A model whose device waits for `go`. It keeps what was prepared, by problem, and scores steps by their length."""

    def __init__(self):
        self.prepared, self.go, self.packed = [], threading.Event(), threading.Semaphore(0)

    def prepare(self, trees, row=None):
        self.prepared.append([tree.problem for tree in trees])
        self.packed.release()
        if any(tree.problem == "bad" for tree in trees):
            raise ValueError("bad")
        return scorer.Prepared(trees, [], [])

    def outputs_of(self, prepared):
        assert self.go.wait(60)
        return [{"score": np.array([len(node.text) for node in tree.nodes], np.float32)} for tree in prepared.trees]


@pytest.fixture
def slow():
    prm = Slow()
    engine = Engine(prm, 256, "slow")
    yield prm, engine
    prm.go.set()
    engine.close()


def ask(engine, problem, tokens=1, steps=("a", "bb"), **more):
    return engine.score([tree_of({"problem": problem, "steps": list(steps)})], tokens, **more)


def test_a_full_batch_is_packed_while_one_runs(slow):
    prm, engine = slow
    futures = [ask(engine, "first")]
    assert prm.packed.acquire(timeout=60)
    futures += [ask(engine, name, BATCH_TOKENS // 2) for name in "ABC"]
    assert prm.packed.acquire(timeout=60)  # the device has not gone on
    assert prm.prepared == [["first"], ["A", "B"]] and not any(future.done() for future in futures)
    prm.go.set()
    assert [future.result(60)[0]["score"].tolist() for future in futures] == [[1, 2]] * 4
    assert prm.prepared[2:] == [["C"]]


def test_small_requests_do_not_make_the_server_look_slow(slow):
    """A row has 256 tokens however few are asked for: larger requests are refused by the rate that is measured."""
    prm, engine = slow
    began, future = time.monotonic(), ask(engine, "first")
    threading.Timer(0.2, prm.go.set).start()
    future.result(60)
    while engine.busy_tokens:
        time.sleep(0.001)
    assert scorer.SHORTEST / (time.monotonic() - began) <= engine.rate <= scorer.SHORTEST / 0.1


def test_a_job_of_its_own_is_packed_ahead_and_a_few_small_ones_wait_to_be_merged(slow):
    prm, engine = slow
    futures = [ask(engine, "first")]
    assert prm.packed.acquire(timeout=60)
    futures += [ask(engine, "lines", alone=True)]
    assert prm.packed.acquire(timeout=60)
    futures += [ask(engine, name, steps=("ccc",) * n) for n, name in enumerate("AAB", 1)]
    prm.go.set()
    assert [len(future.result(60)[0]["score"]) for future in futures] == [2, 2, 1, 2, 3]
    # Had the next batch been closed while the device was busy, "A" would have come alone.
    assert prm.prepared == [["first"], ["lines"], ["A", "B"]]


def test_equal_problems_count_once_in_a_full_batch(slow):
    prm, engine = slow
    futures = [ask(engine, "first")]
    assert prm.packed.acquire(timeout=60)
    long = "long" * (BATCH_TOKENS // 2)  # a token for four characters
    futures += [ask(engine, long, BATCH_TOKENS // 2 + 10) for _ in range(64)]  # with 640 tokens of their own
    futures += [ask(engine, "other", BATCH_TOKENS // 4) for _ in range(2)]
    assert prm.packed.acquire(timeout=60)
    assert prm.prepared == [["first"], [long, "other"]]
    prm.go.set()
    assert all(future.result(60) for future in futures)
    assert prm.prepared[2:] == [["other"]] and engine.waiting_tokens == engine.busy_tokens == 0


def test_callers_who_ask_again_join_those_who_wait(slow, monkeypatch):
    """Else they would form two groups, whose small batches alternate."""
    monkeypatch.setattr("jprm.apps.serve.engine.PAUSE", 60.0)
    monkeypatch.setattr("jprm.apps.serve.engine.PAUSE_SHARE", 1e9)
    prm, engine = slow
    futures = [ask(engine, "first")]
    assert prm.packed.acquire(timeout=60)
    futures.append(ask(engine, "waits"))
    prm.go.set()
    assert futures[0].result(60)
    futures.append(ask(engine, "again", BATCH_TOKENS - 1))
    assert all(future.result(60) for future in futures)
    assert prm.prepared == [["first"], ["waits", "again"]]


def test_what_cannot_be_packed_fails_alone(slow):
    prm, engine = slow
    first = ask(engine, "first")
    assert prm.packed.acquire(timeout=60)
    futures = [ask(engine, name, BATCH_TOKENS // 3) for name in ("A", "bad", "B", "C")]
    prm.go.set()
    assert first.result(60) and all(future.result(60) for future in futures if future is not futures[1])
    refused(ValueError, "bad", futures[1].result, 60)
    engine.close()
    assert engine.waiting_tokens == engine.busy_tokens == 0


@pytest.mark.slow
def test_copies_on_every_device_give_the_bytes_of_the_command(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(scorer, "LONGEST", 512)
    records = [{key: record[key] for key in ("problem", "steps")} for record in tiny.chains(100, seed=5)]
    write_records(tmp_path / "in.jsonl", records)
    score_file(jprm.load(tiny_run.folder), tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    copies = jprm.load(tiny_run.folder, mesh=MeshConfig(data=-1, fsdp=1))
    assert copies.mesh.size == 8
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(copies.params))
    score_file(copies, tmp_path / "in.jsonl", tmp_path / "copies.jsonl")
    assert (tmp_path / "copies.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
