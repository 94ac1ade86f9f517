"""A server as its users meet it: how long until it answers, and what many clients get, beside `jprm score`.

    python -m experiments.bench.serve_http MODEL CHAINS.jsonl [--clients 1 8 32] [--seconds 8] [--rounds 3]

Starts `jprm serve MODEL` in a process of its own, first with an empty cache of compiled programs, then with the cache
that the first start has left. Measured from the start of the process: until the port is open, until a first chain has
its scores, and until `/ready` says that nothing is left to compile.

Then a load over HTTP: every client sends one chain, waits for the answer and sends the next; scores are checked when
the time is over. Between the loads `PRM.score_many`, the loop of `jprm score`, scores the same chains, and the two
rates are compared. What was to be compiled is compiled before. An answer counts as an error if its status is not 200,
or if a score differs by more than 1e-4. On a machine that others use, processor time tells more than rates: `cpu` of
the server and `score_cpu`, both in seconds a chain.

The last line is one JSON object: seconds cold and warm, and by number of clients chains a second, their ratio to
`jprm score`, the 50th and 99th percentile of the seconds to an answer, and errors.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import itertools
import json
import os
import pathlib
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tyro

with socket.create_server(("127.0.0.1", 0)) as _free:
    PORT = _free.getsockname()[1]
TOLERANCE = 1e-4
"""Of a score: rows that are packed otherwise round otherwise."""

OFFLINE = """
import itertools, json, sys, time
import jprm
from jprm.tree import read_records
prm, records = jprm.load(sys.argv[1]), list(read_records(sys.argv[2]))
print(json.dumps([one["scores"] for one in prm.score_many(records)]), flush=True)
for line in sys.stdin:
    began, done, busy = time.perf_counter(), 0, time.process_time()
    while time.perf_counter() - began < float(line):
        some = itertools.islice(itertools.cycle(records), done % len(records), done % len(records) + 64)
        done += sum(1 for _ in prm.score_many(some))
    rate, busy = done / (time.perf_counter() - began), time.process_time() - busy
    print(json.dumps({"score": rate, "score_cpu": busy / done}), flush=True)
"""


def main(
    model: tyro.conf.Positional[pathlib.Path],
    chains: tyro.conf.Positional[pathlib.Path],
    clients: tuple[int, ...] = (1, 8, 32),
    seconds: float = 8.0,
    longest: int = 8192,
    rounds: int = 3,
    starts: tuple[str, ...] = ("cold", "warm"),
) -> None:
    """Measure one model's server.

    Args:
        model: The folder of a model.
        chains: Chains of it, as JSON Lines.
        clients: Numbers of clients.
        seconds: Time of each load, and of scoring without a server beside it.
        longest: The server's `--longest`.
        rounds: How often every number of clients is measured, each time after scoring without a server.
        starts: Starts to time; the server of the last one has the load.
    """
    records = [json.loads(line) for line in chains.read_text(encoding="utf-8").splitlines()]
    offline = subprocess.Popen(
        [sys.executable, "-c", OFFLINE, str(model), str(chains)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    expected = json.loads(offline.stdout.readline())  # pyright: ignore[reportOptionalMemberAccess]
    result: dict = {"model": model.name}
    with tempfile.TemporaryDirectory() as cache:
        for start in starts:
            options = ["--port", str(PORT), "--longest", str(longest)]
            began = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, "-m", "jprm", "serve", str(model), *options],
                env=os.environ | {"JAX_COMPILATION_CACHE_DIR": cache},
            )
            try:
                result[start] = until(began, records[0])
                print(start, result[start], flush=True)
                if start == starts[-1]:
                    result |= loads(offline, process.pid, clients, rounds, records, expected, seconds)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(120)
    offline.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]
    print(json.dumps(result))


def loads(
    offline: subprocess.Popen,
    server: int,
    clients: Sequence[int],
    rounds: int,
    records: list[dict],
    expected: list,
    seconds: float,
) -> dict[str, dict[str, Any]]:
    """Returns for each number of clients the medians over rounds, and all ratios to scoring without a server."""
    rows_of: dict[int, list[dict[str, float]]] = {count: [] for count in clients}
    for turn in range(rounds):
        for count in clients if turn % 2 else clients[::-1]:
            offline.stdin.write(f"{seconds}\n")  # pyright: ignore[reportOptionalMemberAccess]
            offline.stdin.flush()  # pyright: ignore[reportOptionalMemberAccess]
            score = json.loads(offline.stdout.readline())  # pyright: ignore[reportOptionalMemberAccess]
            busy = cpu_seconds(server)
            got = load(count, records, expected, seconds)
            cpu = (cpu_seconds(server) - busy) / got["answers"]
            ratios = {"ratio": got["chains_per_second"] / score["score"], "cpu_ratio": score["score_cpu"] / cpu}
            rows_of[count].append(got | score | {"cpu": cpu} | ratios)
            print(count, rows_of[count][-1], flush=True)
    return {
        f"{count} clients": {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        | {"ratios": sorted(row["ratio"] for row in rows), "errors": sum(row["errors"] for row in rows)}
        for count, rows in rows_of.items()
    }


def cpu_seconds(process: int) -> float:
    """Returns the processor time of a process so far, of all its threads (Linux)."""
    words = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def until(began: float, record: dict) -> dict[str, float]:
    """Returns the seconds from the start until the port is open, a chain is scored, and nothing is left to compile."""
    seconds = {}
    for name, path in (("port", "/health"), ("score", "/v1/score"), ("ready", "/ready")):
        while not served(name, path, record):
            time.sleep(0.02)
        seconds[name] = time.perf_counter() - began
    return seconds


def served(name: str, path: str, record: dict) -> bool:
    try:
        status, body = ask(http.client.HTTPConnection("127.0.0.1", PORT, timeout=300), path, record)
    except OSError:
        return False
    return status == 200 and (name != "ready" or not body.startswith(b"{") or not json.loads(body)["left"])


def ask(connection: http.client.HTTPConnection, path: str, record: dict) -> tuple[int, bytes]:
    if path == "/v1/score":
        connection.request("POST", path, json.dumps(record), {"Content-Type": "application/json"})
    else:
        connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read()


def load(count: int, records: list[dict], expected: list[list[float]], seconds: float) -> dict[str, float]:
    """Returns what so many clients get, each with one chain under way."""
    waits: list[float] = []
    answers: list[tuple[int, bytes, bytes]] = []
    requests = [written(record) for record in records]
    began = time.perf_counter()

    def client(number: int) -> None:
        with socket.create_connection(("127.0.0.1", PORT), timeout=300) as connection:
            for turn in itertools.count(number, count):
                if (sent := time.perf_counter()) - began > seconds:
                    return
                connection.sendall(requests[turn % len(records)])
                status, body = answer_of(connection)
                waits.append(time.perf_counter() - sent)
                answers.append((turn % len(records), status, body))

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        for ended in [pool.submit(client, number) for number in range(count)]:
            ended.result()
    rate = len(waits) / (time.perf_counter() - began)
    p50, p99 = np.percentile(waits, [50, 99]).tolist()
    errors = sum(not right(status, body, expected[index]) for index, status, body in answers)
    return {"chains_per_second": rate, "p50": p50, "p99": p99, "answers": len(waits), "errors": errors}


def written(record: dict) -> bytes:
    body = json.dumps(record).encode()
    head = (
        f"POST /v1/score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    return head.encode() + b"\r\n\r\n" + body


def answer_of(connection: socket.socket) -> tuple[bytes, bytes]:
    """Returns the status line and the body of an answer, with as little work as may be: it takes the server's cores."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += received(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    (size,) = re.findall(rb"content-length: (\d+)", head.lower())
    while len(body) < int(size):
        body += received(connection)
    return head.partition(b"\r\n")[0], body


def received(connection: socket.socket) -> bytes:
    if data := connection.recv(1 << 16):
        return data
    raise ConnectionError("the server closed the connection")


def right(status: bytes, body: bytes, expected: list[float]) -> bool:
    scores = json.loads(body)["record"]["scores"] if b" 200 " in status else []
    return len(scores) == len(expected) and bool(np.allclose(scores, expected, rtol=0, atol=TOLERANCE))


if __name__ == "__main__":
    tyro.cli(main)
