"""The engine and its server: what is packed while the device is busy, how it begins, and clients that vanish."""

import concurrent.futures
import contextlib
import dataclasses
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import jax
import numpy as np
import pytest
import tiny_run as tiny
from browser import served
from prometheus_client.parser import text_string_to_metric_families
from refusing import refused
from test_serve import CHAIN, PATIENT, call, chains, post, prm  # noqa: F401  (a fixture)
from tiny import compiling

import jprm
from jprm.apps.serve import ServeConfig, Served
from jprm.apps.serve.app import _application, make_app, serve, serving
from jprm.apps.serve.engine import BATCH_TOKENS, Engine
from jprm.io.jsonl import write_records
from jprm.methods.jobs.score import score_file
from jprm.model.mesh import MeshConfig
from jprm.score import scorer
from jprm.score.scorer import PRM
from jprm.tree import tree_of


class Slow:
    """A model whose device waits for `go`. It keeps what was prepared, by problem, and scores steps by their length."""

    def __init__(self):
        self.prepared, self.packed = [], threading.Semaphore(0)
        self.begun, self.go = threading.Event(), threading.Event()

    def prepare(self, trees, row=None):
        self.prepared.append([tree.problem for tree in trees])
        self.packed.release()
        if any(tree.problem == "bad" for tree in trees):
            raise ValueError("bad")
        return scorer.Prepared(trees, [], [])

    def outputs_of(self, prepared):
        self.begun.set()
        assert self.go.wait(300)
        return [{"score": np.array([len(node.text) for node in tree.nodes], np.float32)} for tree in prepared.trees]


@pytest.fixture
def slow():
    model = Slow()
    engine = Engine(model, 256, "slow")
    yield model, engine
    model.go.set()
    engine.close()


def ask(engine, problem, tokens=1, steps=("a", "bb"), **more):
    return engine.score([tree_of({"problem": problem, "steps": list(steps)})], tokens, **more)


def test_a_full_batch_is_packed_while_one_runs(slow):
    model, engine = slow
    futures = [ask(engine, "first")]
    assert model.packed.acquire(timeout=300)
    futures += [ask(engine, name, BATCH_TOKENS // 2) for name in "ABC"]
    assert model.packed.acquire(timeout=300)  # the device has not gone on
    assert model.prepared == [["first"], ["A", "B"]] and not any(future.done() for future in futures)
    model.go.set()
    assert [future.result(300)[0]["score"].tolist() for future in futures] == [[1, 2]] * 4
    assert model.prepared[2:] == [["C"]]


def test_small_requests_do_not_make_the_server_look_slow(slow):
    """A row has 256 tokens however few are asked for: larger requests are refused by the rate that is measured."""
    model, engine = slow
    began, future = time.monotonic(), ask(engine, "first")
    assert model.begun.wait(300)
    time.sleep(0.1)
    model.go.set()
    future.result(300)
    while not engine.rate:
        time.sleep(0.001)
    assert scorer.SHORTEST / (time.monotonic() - began) <= engine.rate <= scorer.SHORTEST / 0.1


def test_a_job_of_its_own_is_packed_ahead_and_a_few_small_ones_wait_to_be_merged(slow):
    model, engine = slow
    futures = [ask(engine, "first")]
    assert model.packed.acquire(timeout=300)
    futures += [ask(engine, "lines", alone=True)]
    assert model.packed.acquire(timeout=300)
    futures += [ask(engine, name, steps=("ccc",) * n) for n, name in enumerate("AAB", 1)]
    model.go.set()
    assert [len(future.result(300)[0]["score"]) for future in futures] == [2, 2, 1, 2, 3]
    # Had the next batch been closed while the device was busy, "A" would have come alone.
    assert model.prepared == [["first"], ["lines"], ["A", "B"]]


def test_equal_problems_count_once_in_a_full_batch(slow):
    model, engine = slow
    futures = [ask(engine, "first")]
    assert model.packed.acquire(timeout=300)
    long = "long" * (BATCH_TOKENS // 2)  # a token for four characters
    futures += [ask(engine, long, BATCH_TOKENS // 2 + 10) for _ in range(64)]  # with 640 tokens of their own
    futures += [ask(engine, "other", BATCH_TOKENS // 4) for _ in range(2)]
    assert model.packed.acquire(timeout=300)
    assert model.prepared == [["first"], [long, "other"]]
    model.go.set()
    assert all(future.result(300) for future in futures)
    engine.run(lambda: None).result(300)  # by then the last batch is counted as done
    assert model.prepared[2:] == [["other"]] and engine.waiting_tokens == engine.busy_tokens == 0


def test_callers_who_ask_again_join_those_who_wait(slow, monkeypatch):
    """Else they would form two groups, whose small batches alternate."""
    monkeypatch.setattr("jprm.apps.serve.engine.PAUSE", 60.0)
    monkeypatch.setattr("jprm.apps.serve.engine.PAUSE_SHARE", 1e9)
    model, engine = slow
    futures = [ask(engine, "first")]
    assert model.packed.acquire(timeout=300)
    futures.append(ask(engine, "waits"))
    model.go.set()
    assert futures[0].result(300)
    futures.append(ask(engine, "again", BATCH_TOKENS - 1))
    assert all(future.result(300) for future in futures)
    assert model.prepared == [["first"], ["waits", "again"]]


def test_what_cannot_be_packed_fails_alone(slow):
    model, engine = slow
    first = ask(engine, "first")
    assert model.packed.acquire(timeout=300)
    futures = [ask(engine, name, BATCH_TOKENS // 3) for name in ("A", "bad", "B", "C")]
    model.go.set()
    assert first.result(300) and all(future.result(300) for future in futures if future is not futures[1])
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


# ---- How a server begins: the port before the models, lengths of rows one by one.


LONG = {"problem": "long", "steps": [f"dot {i}" for i in range(60)]}
"""More than 256 tokens."""


@pytest.fixture
def gates(prm, monkeypatch):  # noqa: F811
    """Events by length of rows, each of which compiling that length waits for; and the lengths in their order."""
    gate, order, compile_rows = {256: threading.Event(), 512: threading.Event()}, [], PRM.compile

    def compile_after(self, tokens):
        order.append(tokens)
        assert gate[tokens].wait(300)
        compile_rows(self, tokens)

    monkeypatch.setattr(PRM, "compile", compile_after)
    engine = Engine(prm, 512, "tiny")
    yield engine, gate, order
    for event in gate.values():
        event.set()
    engine.close()


def ready(engine):
    (got,) = call(engine, ("GET", "/ready", {}))
    return got.status_code, got.json()


def test_what_is_compiled_is_served_while_the_rest_is_compiled(gates, prm):  # noqa: F811
    engine, gate, order = gates
    said = []
    engine.warm_up(said.append)
    status, body = ready(engine)
    assert status == 503 and body["left"][:2] == ["tiny: 256", "tiny: 512"] and "compiled" in body["reason"]
    gate[256].set()
    got = call(engine, *(post("/v1/score", chain) for chain in chains(12, seed=4)))  # together more than a row of 256
    assert {answer.status_code for answer in got} == {200}
    status, body = ready(engine)
    assert status == 200 and body["left"][0] == "tiny: 512" and list(body["models"]["tiny"]["compiled"]) == ["256"]
    gate[512].set()
    (long,) = call(engine, post("/v1/score", LONG))
    assert long.json()["record"]["scores"] == pytest.approx(
        prm.score(LONG["problem"], LONG["steps"]).tolist(), abs=1e-6
    )
    while not said:
        threading.Event().wait(0.01)
    assert order == [256, 512] and ready(engine)[1]["left"] == []


def test_a_longer_chain_has_its_rows_compiled_once(gates):
    engine, gate, order = gates
    waiting = engine.score([tree_of(LONG)], 400)
    while order != [512]:
        threading.Event().wait(0.01)
    engine.warm_up(lambda text: None)
    for event in gate.values():
        event.set()
    assert len(waiting.result(300)[0]["score"]) == 60
    while engine.programs.left:
        threading.Event().wait(0.01)
    assert order.count(256) == 1


def test_rows_of_the_server_are_bounded_by_its_longest_chain(prm):  # noqa: F811
    with contextlib.closing(Engine(prm, 256, "tiny")) as engine:
        engine.warm_up(lambda text: None)
        while engine.programs.left:
            threading.Event().wait(0.01)
        pool = {"problem": "wide", "samples": [{"steps": [f"end {j}", "far 2"]} for j in range(60)]}
        with compiling() as compiled:
            (got,) = call(engine, post("/v1/score", pool))
        assert got.status_code == 200 and not compiled and list(engine.programs.seconds) == [256]


def test_a_length_that_does_not_fit_is_told_and_the_others_are_served(prm, monkeypatch):  # noqa: F811
    compile_rows = PRM.compile

    def small(self, tokens):
        if tokens > 256:
            raise MemoryError("too large")
        compile_rows(self, tokens)

    monkeypatch.setattr(PRM, "compile", small)
    with contextlib.closing(Engine(prm, 512, "tiny")) as engine:
        engine.warm_up(lambda text: None)
        while engine.programs.left:
            threading.Event().wait(0.01)
        status, body = ready(engine)
        assert status == 200 and "too large" in body["models"]["tiny"]["failed"]["512"]
        assert call(engine, post("/v1/score", CHAIN))[0].status_code == 200


def test_a_device_that_fails_is_not_ready_until_it_works_again(prm, monkeypatch):  # noqa: F811
    with contextlib.closing(Engine(prm, 256, "tiny")) as engine:
        assert ready(engine)[0] == 200
        with monkeypatch.context() as patch:

            def broken(self, prepared):
                raise RuntimeError("the device is lost")

            patch.setattr(PRM, "outputs_of", broken)
            assert call(engine, post("/v1/score", CHAIN))[0].status_code == 500
            engine.run(lambda: None).result(300)  # after the chain that tries the device
            status, body = ready(engine)
            assert status == 503 and "RuntimeError" in body["reason"]
            engine.run(lambda: None).result(300)
            assert ready(engine)[0] == 503
            engine.run(lambda: None).result(300)
        ready(engine)  # has it tried again
        engine.run(lambda: None).result(300)
        assert ready(engine)[0] == 200 and call(engine, post("/v1/score", CHAIN))[0].status_code == 200


def test_while_models_load_the_server_lives_and_says_so():
    import asyncio

    import httpx2 as httpx

    app = _application(ServeConfig(), None, False)

    async def send():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            paths = ("/health", "/ready", "/metrics", "/v1/models")
            gets = [await client.get(path) for path in paths]
            return [*gets, await client.post("/v1/score", json=CHAIN)]

    health, not_ready, metrics, models, score = asyncio.run(send())
    assert health.status_code == 200 and metrics.status_code == 200
    assert not_ready.status_code == 503 and "loading" in not_ready.json()["reason"]
    assert models.status_code == score.status_code == 503 and "Retry-After" in score.headers


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path):
    """The port is open by then, so the error comes from the thread that loads."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool, pytest.raises(FileNotFoundError, match="nothing"):
        pool.submit(serve, Served(model=(tmp_path / "nothing",), port=0)).result(300)


def test_counters_are_prometheus_counters(prm):  # noqa: F811
    with contextlib.closing(Engine(prm, 256, "tiny")) as engine:
        call(engine, *(post("/v1/score", chain) for chain in chains(3)))
        engine.run(lambda: None).result(300)
        (metrics,) = call(engine, ("GET", "/metrics", {}))
        families = {family.name: family for family in text_string_to_metric_families(metrics.text)}
        assert all(family.documentation for family in families.values())
        samples = {s.name: s.value for f in families.values() for s in f.samples if s.labels.get("model") == "tiny"}
        tokens = sum(engine.tokens_of([tree_of(chain)]) for chain in chains(3))
        assert families["jprm_tokens"].type == "counter" and samples["jprm_tokens_total"] == tokens
        assert samples["jprm_trees_total"] == 3 and samples["jprm_failures_total"] == 0
        assert 0 < samples["jprm_device_seconds_total"] and samples["jprm_waiting_tokens"] == 0
        assert not any("per_second" in name for name in families)
        assert CHAIN["problem"] not in metrics.text


# ---- The server on a real socket: slow, broken and vanishing clients, and its end while requests are under way.


class Running:
    """A server on a free port, in a thread."""

    def __init__(self, model, **changes):
        self.engine = Engine(model, 256, "tiny")
        self.config = ServeConfig(**PATIENT | {"port": 0} | changes)
        self.app = make_app([self.engine], self.config)
        self.serving = served(self.app, **serving(self.config))

    def __enter__(self):
        self.server, self.port = self.serving.__enter__()
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *error):
        self.serving.__exit__(*error)

    def score(self, record):
        return httpx.post(self.url + "/v1/score", json=record, timeout=300)

    def raw(self, *parts):
        """Sends bytes as they are and returns the connection."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=300)
        for part in parts:
            connection.sendall(part)
        return connection


def head(length):
    fields = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": length}
    lines = ["POST /v1/score HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode()


@contextlib.contextmanager
def busy(running):
    """Keeps the device busy; yields a function that waits until so many jobs wait for it."""
    started, go = threading.Event(), threading.Event()
    blocked = running.engine.run(lambda: (started.set(), go.wait(300)))
    assert started.wait(300)

    def waiting(count):
        while len(running.engine._jobs) < count:
            time.sleep(0.01)
        return list(running.engine._jobs)

    yield waiting
    go.set()
    blocked.result(300)


def test_what_was_admitted_is_answered_after_the_signal(prm):  # noqa: F811
    """64 requests wait behind a busy device when the server is told to end: all are answered, and no new one is."""
    with Running(prm) as running, ThreadPoolExecutor(64) as pool:
        with busy(running) as waiting:
            answers = [pool.submit(running.score, record) for record in chains(64)]
            waiting(64)
            running.server.should_exit = True
        assert {answer.result().status_code for answer in answers} == {200}


def test_a_client_that_vanishes_takes_its_work_along(prm):  # noqa: F811
    with Running(prm) as running:
        with busy(running) as waiting:
            body = json.dumps(CHAIN).encode()
            connections = [running.raw(head(len(body)), body) for _ in range(8)]
            jobs = waiting(8)
            for connection in connections:
                connection.close()
            while not all(job.future.cancelled() for job in jobs):
                time.sleep(0.01)
        assert running.score(CHAIN).status_code == 200


def test_slow_and_oversized_bodies_are_refused(prm):  # noqa: F811
    with Running(prm, body_bytes=1000) as running:
        running.app.state.listen = dataclasses.replace(running.config, body_seconds=0.3)
        assert b" 408 " in running.raw(head(100), b"{").recv(100)
        running.app.state.listen = running.config  # the default limits, since this machine may be slow
        chunk = b"400\r\n" + b" " * 1024 + b"\r\n"  # no Content-Length says how much is to come
        begin = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        assert b" 413 " in running.raw(begin, chunk).recv(100)
        assert running.raw(b"\x00garbage\r\n\r\n").recv(100).startswith(b"HTTP/1.1 400")
        assert running.score(CHAIN).status_code == 200


def test_slow_headers_are_cut_off(prm):  # noqa: F811
    """The client sends nothing, sends a byte at a time, or stalls after its first answer.

    On a busy machine an honest client may miss the limit too; it is then cut off and tries again."""

    def answered():
        with contextlib.suppress(ConnectionError):
            connection = running.raw(head(len(body)), body)
            return connection if b" 200 " in connection.recv(100) else None

    with Running(prm, body_seconds=0.5) as running:
        body = json.dumps(CHAIN).encode()
        silent, half, dripping = running.raw(), running.raw(head(10)[:-5]), running.raw(head(10)[:-10])
        again = next(filter(None, (answered() for _ in range(100))))
        with contextlib.suppress(ConnectionError):
            again.sendall(b"POST /v1/score")
        with contextlib.suppress(ConnectionError):
            for _ in range(3000):  # 300 seconds
                time.sleep(0.1)
                dripping.sendall(b"x")
        for connection in (silent, half, dripping, again):
            with contextlib.suppress(ConnectionError):
                while connection.recv(1 << 16):  # a timeout after 60 seconds is an error
                    pass
        long = running.raw(head(10)[:-4])
        with pytest.raises(ConnectionError):
            for _ in range(4096):
                long.sendall(b"\r\nX-More: " + b"y" * 1000)
        assert any(answered() for _ in range(100))


def test_equal_samples_are_computed_once(prm, monkeypatch):  # noqa: F811
    """100,000 samples of one step took 96 seconds, in which nobody else was served, and counted as one token."""
    prepare, steps, tokens = PRM.prepare, [], []
    monkeypatch.setattr(PRM, "prepare", lambda self, trees, row=None: (
        steps.append(sum(len(tree.nodes) for tree in trees)), prepare(self, trees, row))[1])  # fmt: skip

    def counted(record):
        got = running.score(record)
        running.engine.run(lambda: None).result(300)
        tokens.append(running.engine.counts["tokens"] - sum(tokens))
        return got

    with Running(prm, items=100_000) as running:
        first = counted(CHAIN).json()["record"]["scores"]
        got = counted({"problem": CHAIN["problem"], "samples": [{"steps": CHAIN["steps"]}] * 5000})
        for sample in got.json()["record"]["samples"][::1000]:
            assert sample["scores"] == pytest.approx(first, abs=1e-6)
    assert steps == [len(CHAIN["steps"])] * 2 and tokens[0] == tokens[1] > 0


def test_more_work_than_an_answer_may_take_is_refused_before_it_begins(prm):  # noqa: F811
    with Running(prm, answer_seconds=1000) as running:
        running.engine.rate = 1.0  # a token a second
        body = {"problem": "p", "samples": [{"steps": [f"{i}"]} for i in range(2000)]}
        assert running.score(body).status_code == 413
        lines = json.dumps({"problem": "p", "samples": [{"steps": ["a"]}] * 2000})  # as `jprm score` packs them
        kind = {"Content-Type": "application/x-ndjson"}
        assert httpx.post(running.url + "/v1/score", content=lines, headers=kind, timeout=300).status_code == 413
        chains = httpx.post(
            running.url + "/pooling", json={"input": [[1, i] for i in range(100)], "use_activation": False}, timeout=300
        )
        assert chains.status_code == 413
        assert running.engine.waiting_tokens == 0 and running.score(CHAIN).status_code == 200


def test_what_a_page_of_another_site_can_send_is_refused(prm):  # noqa: F811
    with Running(prm) as running:
        for path in ("/v1/score", "/v1/rerank", "/v1/continue", "/get_reward", "/pooling"):
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
                content, headers = json.dumps(CHAIN), {"Content-Type": kind}
                got = httpx.post(running.url + path, content=content, headers=headers, timeout=300)
                assert got.status_code == 415 and "application/json" in got.json()["error"]["message"]
        kind = {"Content-Type": "Application/JSON; charset=utf-8"}
        got = httpx.post(running.url + "/v1/score", content=json.dumps(CHAIN), headers=kind, timeout=300)
        assert got.status_code == 200


@pytest.mark.parametrize("kind", ["application/json", "application/x-ndjson"])
@pytest.mark.parametrize("depth", [99, 900, 100_000])
def test_nested_objects_are_refused(prm, kind, depth):  # noqa: F811
    nested = b'{"a":' * depth + b"1" + b"}" * depth
    content = json.dumps(CHAIN).encode()[:-1] + b', "note": ' + nested + b"}"
    with Running(prm) as running:
        got = httpx.post(running.url + "/v1/score", content=content, headers={"Content-Type": kind}, timeout=300)
        assert got.status_code == (200 if depth == 99 else 400)


def test_an_address_that_others_reach_needs_a_key(monkeypatch):
    monkeypatch.delenv("JPRM_API_KEY", raising=False)
    refused(ValueError, "JPRM_API_KEY", serve, Served(model=(Path("no model is loaded"),), host="0.0.0.0"))
    assert ServeConfig(host="::1").loopback and ServeConfig(host="localhost").loopback
