"""A fleet on one machine: Ray with four nodes and two policy servers scores and labels, while nodes and servers die.

    python tests/fleet_storm.py OUT [--chains 20000] [--problems 2000] [--kills 10] [--seed 7]

What the cluster writes must equal what one process writes, byte for byte, however often something died. It ends with
one JSON object: seconds of one process and of the cluster, undisturbed and disturbed, and the kills. Needs the extra
`ray`. The servers are stand-ins whose samples depend on prompt and seed alone.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from pod import free_port
from stub_server import Server, reply

NODES = 4


def completion(number: int, body: dict) -> tuple:
    """A policy's answer, which is a function of prompt and seed."""
    digit = hashlib.sha256(f"{body['prompt']}|{body['seed']}".encode()).digest()[0] % 4
    return reply(f"So it is {digit}.\n\nThe answer is \\boxed{{{digit}}}.", tokens=12)


class Servers:
    """Two policy servers, each a process of its own, that can be killed and started again."""

    def __init__(self):
        self.ports = [free_port() for _ in range(2)]
        self.processes = [self._start(port) for port in self.ports]

    def _start(self, port: int) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, __file__, "serve", "--port", str(port)])

    def kill(self, which: int) -> None:
        self.processes[which].kill()
        self.processes[which].wait()
        time.sleep(1.0)
        self.processes[which] = self._start(self.ports[which])

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def prepare(folder: Path, chains: int, problems: int, seed: int, ports: list[int]) -> None:
    """Trains a tiny PRM and writes its chains, the problems to label, and the policy's file."""
    import tiny_run

    from jprm.io.jsonl import write_records
    from jprm.train import train

    if not (folder / "run").exists():
        train(tiny_run.experiment(tiny_run.make_data(folder / "data")), folder / "run")
    write_records(folder / "chains.jsonl", tiny_run.chains(chains, seed=seed))
    draw = random.Random(seed)
    write_records(
        folder / "problems.jsonl",
        (
            {"problem": f"Problem {i}", "steps": [f"Step {i}.{k}." for k in range(draw.randint(1, 4))],
             "answer": str(draw.randrange(4))}
            for i in range(problems)
        ),
    )  # fmt: skip
    urls = [f"http://127.0.0.1:{port}/v1" for port in ports]
    settings = {"url": urls, "model": "stand-in", "backoff_s": 0.2, "retries": 20, "concurrency": 16}
    (folder / "policy.json").write_text(json.dumps(settings))


def commands(folder: Path, name: str, *more: str) -> list[list[str]]:
    """Returns the two commands of a fleet: scores and labels."""
    score = ["score", "--model", str(folder / "run"), "--input", str(folder / "chains.jsonl")]
    label = ["label", "mc", "--policy", str(folder / "policy.json"), "--input", str(folder / "problems.jsonl")]
    label += ["--rollouts", str(folder / f"{name}.rollouts.jsonl"), "--k", "4", "--estimate", "soft"]
    return [
        [*score, "--output", str(folder / f"{name}.scores.jsonl"), *more],
        [*label, "--output", str(folder / f"{name}.values.jsonl"), *more],
    ]


def seconds_of(command: list[str], environment: dict[str, str], trouble: Trouble | None = None) -> float:
    """Runs a command to its end and returns how long it took. In trouble it may fail, and is given again."""
    begun = time.monotonic()
    for attempt in range(20 if trouble else 1):
        running = subprocess.Popen([sys.executable, "-m", "jprm", *command], env=environment, stdin=subprocess.DEVNULL)
        while trouble and running.poll() is None:
            trouble.at(time.monotonic())
            time.sleep(0.1)
        if running.wait() == 0:
            return time.monotonic() - begun
        print(f"attempt {attempt + 1} of {command[0]} ended with {running.returncode}", flush=True)
    raise SystemExit(f"{command[0]}: failed")


class Trouble:
    """Kills nodes and servers in turn, one every `pause` seconds, and puts new ones in their place."""

    def __init__(self, cluster, nodes: list, servers: Servers, pause: float, most: int, seed: int):
        self.cluster, self.nodes, self.servers, self.pause, self.most = cluster, nodes, servers, pause, most
        self.kills = {"nodes": 0, "servers": 0}
        self._draw, self._next = random.Random(seed), time.monotonic() + pause

    def at(self, now: float) -> None:
        """Kills something if it is time."""
        if now < self._next or sum(self.kills.values()) == self.most:
            return
        if self.kills["nodes"] <= self.kills["servers"]:
            self.cluster.remove_node(self.nodes.pop(self._draw.randrange(len(self.nodes))), allow_graceful=False)
            self.kills["nodes"] += 1
            self.nodes.append(self.cluster.add_node(num_cpus=1))
        else:
            self.servers.kill(self._draw.randrange(2))
            self.kills["servers"] += 1
        self._next = time.monotonic() + self.pause


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", help="a new folder; `serve` starts a policy server alone")
    parser.add_argument("--chains", type=int, default=20_000)
    parser.add_argument("--problems", type=int, default=2_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--shards", type=int, default=32)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--port", type=int)
    args = parser.parse_args()
    if args.out == "serve":
        return Server(completion, args.port).serve_forever()
    from ray.cluster_utils import Cluster

    folder = Path(args.out).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    servers = Servers()
    try:
        prepare(folder, args.chains, args.problems, args.seed, servers.ports)
        alone = dict(os.environ)
        seconds = {"one process": [seconds_of(each, alone) for each in commands(folder, "one")]}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        nodes = [cluster.add_node(num_cpus=1) for _ in range(NODES - 1)]
        fleet = {**alone, "RAY_ADDRESS": cluster.address}
        on_ray = ["--engine", "ray", "--shards", str(args.shards), "--workers", "2", str(NODES)]
        seconds["cluster"] = [seconds_of(each, fleet) for each in commands(folder, "calm", *on_ray)]
        pause = max(1.0, 0.8 * sum(seconds["cluster"]) / args.kills)
        trouble = Trouble(cluster, nodes, servers, pause, args.kills, args.seed)
        seconds["disturbed"] = [seconds_of(each, fleet, trouble) for each in commands(folder, "storm", *on_ray)]
        kills = trouble.kills
        cluster.shutdown()
    finally:
        servers.close()
    result = {"seconds": {name: [round(each, 1) for each in both] for name, both in seconds.items()}, "kills": kills}
    for kind in ("scores", "values"):
        whole = (folder / f"one.{kind}.jsonl").read_bytes()
        for name in ("calm", "storm"):
            same = (folder / f"{name}.{kind}.jsonl").read_bytes() == whole
            result[f"{name} {kind}"] = "the bytes of one process" if same else "DIFFER"
    print(json.dumps(result))
    if "DIFFER" in result.values():
        raise SystemExit(1)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
