"""Requests of clients who have gone are not worked on."""

import asyncio
import json
import socket
import threading
import time
import types

import httpx2
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from jprm.apps.web import http


@pytest.fixture
def served():
    """Yields (requests' start times, `left`, port) for a server that works on each request until `left` is set."""
    begun, left = [], threading.Event()

    def work():
        begun.append(time.monotonic())
        left.wait(300)

    async def answer(request):
        body = await http.json_of(request)
        await http.worked(request, work, body["items"])
        return JSONResponse({})

    app = Starlette(routes=[Route("/", answer, methods=["POST"])], exception_handlers=http.HANDLERS)
    app.state.listen = types.SimpleNamespace(body_bytes=2**20, body_seconds=10)
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    yield begun, left, listener.getsockname()[1]
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize("items", [1, 1000])
def test_clients_who_leave_at_once_cost_the_next_one_nothing(served, items):
    """Of 100 requests without a client, the server works only on the ones that began before it could notice.

    These are at most one per thread, and Python makes at most 32 threads."""
    begun, left, port = served
    body = json.dumps({"items": items}).encode()
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head + body)
    left.set()
    answer = httpx2.post(f"http://127.0.0.1:{port}/", json={"items": items}, timeout=300)
    assert answer.status_code == 200 and len(begun) <= 40
