"""The server on a real socket: slow, broken and vanishing clients, and its end while requests are under way."""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest
from browser import served
from refusing import refused
from test_serve import CHAIN, chains, prm  # noqa: F401  (a fixture)

from jprm.apps.serve import ServeConfig, Served
from jprm.apps.serve.app import make_app, serve, serving
from jprm.apps.serve.engine import Engine


class Running:
    """A server on a free port, in a thread."""

    def __init__(self, model, **changes):
        self.engine = Engine(model, 256, "tiny")
        self.config = ServeConfig(longest=256, port=0, **changes)
        self.serving = served(make_app([self.engine], self.config), **serving(self.config))

    def __enter__(self):
        self.server, self.port = self.serving.__enter__()
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *error):
        self.serving.__exit__(*error)

    def score(self, record):
        return httpx.post(self.url + "/v1/score", json=record, timeout=60)

    def raw(self, *parts):
        """Sends bytes as they are and returns the connection."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
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
    blocked = running.engine.run(lambda: (started.set(), go.wait(60)))
    assert started.wait(60)

    def waiting(count):
        while len(running.engine._jobs) < count:
            time.sleep(0.01)
        return list(running.engine._jobs)

    yield waiting
    go.set()
    blocked.result(60)


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
    with Running(prm, body_seconds=0.3, body_bytes=1000) as running:
        slow = running.raw(head(100), b"{")
        assert b" 408 " in slow.recv(100)
        chunk = b"400\r\n" + b" " * 1024 + b"\r\n"  # no Content-Length says how much is to come
        begin = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        assert b" 413 " in running.raw(begin, chunk).recv(100)
        assert running.raw(b"\x00garbage\r\n\r\n").recv(100).startswith(b"HTTP/1.1 400")
        assert running.score(CHAIN).status_code == 200


def test_slow_headers_are_cut_off(prm):  # noqa: F811
    """A connection that sends nothing, one that sends a byte at a time, and one that stalls after its first answer."""
    with Running(prm, body_seconds=0.5) as running:
        begin, body = time.monotonic(), json.dumps(CHAIN).encode()
        silent, half, dripping = running.raw(), running.raw(head(10)[:-5]), running.raw(head(10)[:-10])
        again = running.raw(head(len(body)), body)
        assert b" 200 " in again.recv(100)
        again.sendall(b"POST /v1/score")
        for _ in range(4):
            time.sleep(0.1)
            dripping.sendall(b"x")
        for connection in (silent, half, dripping, again):
            while connection.recv(1 << 16):
                pass
        assert time.monotonic() - begin < 10  # 0.5 s, and the answer
        long = running.raw(head(10)[:-4])
        with pytest.raises(ConnectionError):
            for _ in range(4096):
                long.sendall(b"\r\nX-More: " + b"y" * 1000)
        assert running.score(CHAIN).status_code == 200


def test_equal_samples_are_computed_once(prm):  # noqa: F811
    """100,000 samples of one step took 96 seconds, in which nobody else was served, and counted as one token."""
    with Running(prm, items=100_000) as running:
        first = running.score(CHAIN).json()["record"]["scores"]
        rate = running.engine.rate
        begin, body = time.monotonic(), {"problem": CHAIN["problem"], "samples": [{"steps": CHAIN["steps"]}] * 5000}
        got = running.score(body)
        assert time.monotonic() - begin < 20  # 1
        for sample in got.json()["record"]["samples"][::1000]:
            assert sample["scores"] == pytest.approx(first, abs=1e-6)
        assert running.engine.rate < 10 * rate


def test_more_work_than_an_answer_may_take_is_refused_before_it_begins(prm):  # noqa: F811
    with Running(prm, answer_seconds=10) as running:
        running.engine.rate = 100.0  # tokens a second
        body = {"problem": "p", "samples": [{"steps": [f"{i}"]} for i in range(2000)]}
        assert running.score(body).status_code == 413
        lines = json.dumps({"problem": "p", "samples": [{"steps": ["a"]}] * 2000})  # as `jprm score` packs them
        kind = {"Content-Type": "application/x-ndjson"}
        assert httpx.post(running.url + "/v1/score", content=lines, headers=kind).status_code == 413
        chains = httpx.post(
            running.url + "/pooling", json={"input": [[1, i] for i in range(100)], "use_activation": False}
        )
        assert chains.status_code == 413
        assert running.engine.waiting_tokens == 0 and running.score(CHAIN).status_code == 200


def test_what_a_page_of_another_site_can_send_is_refused(prm):  # noqa: F811
    with Running(prm) as running:
        for path in ("/v1/score", "/v1/rerank", "/v1/continue", "/get_reward", "/pooling"):
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
                got = httpx.post(running.url + path, content=json.dumps(CHAIN), headers={"Content-Type": kind})
                assert got.status_code == 415 and "application/json" in got.json()["error"]["message"]
        kind = {"Content-Type": "Application/JSON; charset=utf-8"}
        got = httpx.post(running.url + "/v1/score", content=json.dumps(CHAIN), headers=kind, timeout=60)
        assert got.status_code == 200


@pytest.mark.parametrize("kind", ["application/json", "application/x-ndjson"])
@pytest.mark.parametrize("depth", [99, 900, 100_000])
def test_nested_objects_are_refused(prm, kind, depth):  # noqa: F811
    nested = b'{"a":' * depth + b"1" + b"}" * depth
    content = json.dumps(CHAIN).encode()[:-1] + b', "note": ' + nested + b"}"
    with Running(prm) as running:
        got = httpx.post(running.url + "/v1/score", content=content, headers={"Content-Type": kind}, timeout=60)
        assert got.status_code == (200 if depth == 99 else 400)


def test_an_address_that_others_reach_needs_a_key(monkeypatch):
    monkeypatch.delenv("JPRM_API_KEY", raising=False)
    refused(ValueError, "JPRM_API_KEY", serve, Served(model=(Path("no model is loaded"),), host="0.0.0.0"))
    assert ServeConfig(host="::1").loopback and ServeConfig(host="localhost").loopback
