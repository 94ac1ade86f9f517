"""A server as its users meet it: how long until it answers, and what many clients get, beside `jprm score`.

    python experiments/bench/serve_http.py MODEL CHAINS.jsonl [--clients 1 8 32] [--seconds 15] [--longest 8192]

Starts `jprm serve MODEL` in a process of its own, first with an empty cache of compiled programs, then with the cache
that the first start has left. Measured from the start of the process: until the port is open, until a first chain has
its scores, and until `/ready` says that nothing is left to compile. Then a closed loop over HTTP: every client sends
one chain, and the next when it has the answer. Its rate is compared with `PRM.score_many`, the loop of `jprm score`, on
the same chains, compiled before and timed alone on the machine; a score that differs from it by more than 1e-4 is an
error, as is any status but 200.

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
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import tyro

PORT = 8765
TOLERANCE = 1e-4
"""Of a score: rows that are packed otherwise round otherwise."""

OFFLINE = """
import itertools, json, sys, time
import jprm
from jprm.tree import read_records
prm, records = jprm.load(sys.argv[1]), list(read_records(sys.argv[2]))
scored = list(prm.score_many(records))
many = list(itertools.islice(itertools.cycle(records), int(sys.argv[3]) * len(records)))
began = time.perf_counter()
for _ in prm.score_many(many):
    pass
print(json.dumps({"rate": len(many) / (time.perf_counter() - began), "scores": [one["scores"] for one in scored]}))
"""


def main(
    model: tyro.conf.Positional[pathlib.Path],
    chains: tyro.conf.Positional[pathlib.Path],
    clients: tuple[int, ...] = (1, 8, 32),
    seconds: float = 15.0,
    longest: int = 8192,
    rounds: int = 1,
    starts: tuple[str, ...] = ("cold", "warm"),
) -> None:
    """Measure one model's server.

    Args:
        model: The folder of a model.
        chains: Chains of it, as JSON Lines.
        clients: Numbers of clients, one after the other.
        seconds: Time of each load.
        longest: The server's `--longest`.
        rounds: How often `jprm score` goes through the chains.
        starts: Starts to time; the server of the last one has the load.
    """
    records = [json.loads(line) for line in chains.read_text(encoding="utf-8").splitlines()]
    offline = [sys.executable, "-c", OFFLINE, str(model), str(chains), str(rounds)]
    expected = json.loads(subprocess.run(offline, capture_output=True, text=True, check=True).stdout)
    result: dict = {"model": model.name, "score": expected["rate"]}
    print("jprm score", result["score"], flush=True)
    with tempfile.TemporaryDirectory() as cache:
        for start in starts:
            command = [
                sys.executable,
                "-m",
                "jprm",
                "serve",
                str(model),
                "--port",
                str(PORT),
                "--longest",
                str(longest),
            ]
            began = time.perf_counter()
            process = subprocess.Popen(command, env=os.environ | {"JAX_COMPILATION_CACHE_DIR": cache})
            try:
                result[start] = until(began, records[0])
                print(start, result[start], flush=True)
                if start == starts[-1]:
                    for count in clients:
                        found = load(count, records, expected["scores"], seconds)
                        result[f"{count} clients"] = found | {"ratio": found["chains_per_second"] / result["score"]}
                        print(count, result[f"{count} clients"], flush=True)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(120)
    print(json.dumps(result))


def until(began: float, record: dict) -> dict[str, float]:
    """Returns the seconds from the start until the port is open, a chain is scored, and nothing is left to compile."""
    seconds = {}
    for name, path in (("port", "/health"), ("score", "/v1/score"), ("ready", "/ready")):
        while not there(name, path, record):
            time.sleep(0.02)
        seconds[name] = time.perf_counter() - began
    return seconds


def there(name: str, path: str, record: dict) -> bool:
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
    errors: list[object] = []
    began = time.perf_counter()

    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=300)
        for turn in itertools.count(number, count):
            if (sent := time.perf_counter()) - began > seconds:
                return
            status, body = ask(connection, "/v1/score", records[turn % len(records)])
            waits.append(time.perf_counter() - sent)
            scores = json.loads(body)["record"]["scores"] if status == 200 else []
            if not np.allclose(scores, expected[turn % len(records)], rtol=0, atol=TOLERANCE):
                errors.append(status)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        for ended in [pool.submit(client, number) for number in range(count)]:
            ended.result()
    rate = len(waits) / (time.perf_counter() - began)
    p50, p99 = np.percentile(waits, [50, 99]).tolist()
    return {"chains_per_second": rate, "p50": p50, "p99": p99, "errors": len(errors)}


if __name__ == "__main__":
    tyro.cli(main)
