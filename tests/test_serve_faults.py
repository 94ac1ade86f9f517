"""The server on a real socket: slow, broken and vanishing clients, and its end while requests are under way."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import pytest
import uvicorn
from test_serve import CHAIN, chains, prm  # noqa: F401  (a fixture)

from jprm.serve.app import make_app
from jprm.serve.config import ServeConfig
from jprm.serve.engine import Engine
from jprm.serve.run import serve


class Running:
    """A server on a free port, in a thread."""

    def __init__(self, model, **changes):
        self.engine = Engine(model, 256, "tiny")
        self.config = ServeConfig(longest=256, port=0, **changes)
        app = make_app([self.engine], self.config)
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=60))
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *error):
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()

    def score(self, record):
        return httpx.post(self.url + "/v1/score", json=record, timeout=60)

    def raw(self, *parts):
        """Sends bytes as they are and returns the connection."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        for part in parts:
            connection.sendall(part)
        return connection


def head(length):
    return f"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


def test_what_was_admitted_is_answered_after_the_signal(prm):  # noqa: F811
    """64 requests wait behind a busy device when the server is told to end: all are answered, and no new one is."""
    started, go = threading.Event(), threading.Event()
    with Running(prm) as running, ThreadPoolExecutor(64) as pool:
        running.engine.run(lambda: (started.set(), go.wait(60)))
        assert started.wait(60)
        answers = [pool.submit(running.score, record) for record in chains(64)]
        while len(running.engine._jobs) < 64:
            time.sleep(0.01)
        running.server.should_exit = True
        go.set()
        assert {answer.result().status_code for answer in answers} == {200}


def test_a_client_that_vanishes_takes_its_work_along(prm):  # noqa: F811
    started, go = threading.Event(), threading.Event()
    with Running(prm) as running:
        blocked = running.engine.run(lambda: (started.set(), go.wait(60)))
        assert started.wait(60)
        body = json.dumps(CHAIN).encode()
        connections = [running.raw(head(len(body)), body) for _ in range(8)]
        while len(running.engine._jobs) < 8:
            time.sleep(0.01)
        jobs = list(running.engine._jobs)
        for connection in connections:
            connection.close()
        while not all(job.future.cancelled() for job in jobs):
            time.sleep(0.01)
        go.set()
        blocked.result(60)
        assert running.score(CHAIN).status_code == 200


def test_slow_and_oversized_bodies_are_refused(prm):  # noqa: F811
    with Running(prm, body_seconds=0.3, body_bytes=1000) as running:
        slow = running.raw(head(100), b"{")
        assert b" 408 " in slow.recv(100)
        chunk = b"400\r\n" + b" " * 1024 + b"\r\n"  # no Content-Length says how much is to come
        begin = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert b" 413 " in running.raw(begin, chunk).recv(100)
        assert running.raw(b"\x00garbage\r\n\r\n").recv(100).startswith(b"HTTP/1.1 400")
        assert running.score(CHAIN).status_code == 200


def test_an_address_that_others_reach_needs_a_key(monkeypatch):
    monkeypatch.delenv("JPRM_API_KEY", raising=False)
    with pytest.raises(ValueError, match="others can reach it. Set JPRM_API_KEY"):
        serve(["no model is loaded"], ServeConfig(host="0.0.0.0"))
    assert ServeConfig(host="::1").loopback and ServeConfig(host="localhost").loopback
