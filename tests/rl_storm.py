"""Kills the learner and the samplers of one run again and again: `make storm-rl`, or
`python tests/rl_storm.py FOLDER --kills 50`.

A learner and two samplers (`jprm engine`) run apart, as on hosts of their own. Each is killed at random moments and
started again, as a scheduler does; also both samplers at once. The learner must reach its last update, and its figures
stand beside those of a run that nobody disturbed. The last line printed is JSON: kills by kind, how often the learner
continued, samples that it drew itself, and both runs' correct answers.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from pod import environment, free_port
from tiny_rl import experiment, servable
from tiny_run import write_experiment

from jprm.experiment import OptimizerConfig
from jprm.methods.policy.engine import EngineConfig
from jprm.methods.rl.credit import CreditConfig

KINDS = ("learner", "one sampler", "both samplers")


class Processes:
    """The learner and its samplers; those that were killed are started again."""

    def __init__(self, folder: pathlib.Path, samplers: int):
        self.folder, self.children = folder, {}
        cached = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        self.env = cached | environment()  # most of a start is compiling
        self.ports = [free_port() for _ in range(samplers)]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(f"http://localhost:{port}" for port in self.ports)

    def start(self, name: str, *command: str) -> subprocess.Popen:
        with (self.folder / f"{name}.log").open("a") as log:
            command = (sys.executable, "-m", "jprm", *command)
            self.children[name] = subprocess.Popen(command, env=self.env, stdout=log, stderr=log, cwd=self.folder)
        return self.children[name]

    def samplers(self) -> None:
        """Starts the samplers that are not there."""
        for port in self.ports:
            name = f"sampler_{port}"
            if name not in self.children or self.children[name].poll() is not None:
                self.start(name, "engine", str(self.folder / "data" / "policy"), "--port", str(port), "--rows", "16")

    def kill(self, *names: str) -> None:
        for name in names:
            if name in self.children:
                self.children[name].send_signal(signal.SIGKILL)
                self.children[name].wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill(*self.children)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")


def storm(folder: pathlib.Path, kills: int, seed: int, stale: int) -> dict:
    """`kills` kills over one run; AssertionError where the learner does not reach its last update."""
    rng, updates = random.Random(seed), max(8, 2 * kills)
    data = servable(folder / "data")
    with Processes(folder, 2) as processes:
        config = experiment(
            data, prm="", credit=CreditConfig("verifier", "rloo", "constant", length=16), updates=updates,
            minibatches=1, max_tokens=12, evaluate_every=updates, evaluate_samples=8, checkpoint_every=2,
            reference=False, stale=stale,
            optimizer=OptimizerConfig(learning_rate=0.002, decay="constant", eps=0.1),
            engine=EngineConfig(processes.urls, dtype="float32", tolerance=1e-3, timeout_s=60, patience_s=2.0),
        )  # fmt: skip
        write_experiment(folder / "rl.py", config)

        def learner(name: str) -> subprocess.Popen:
            return processes.start(name, "rl", str(folder / "rl.py"), "--workdir", str(folder / name))

        def up() -> bool:
            """Whether a sampler answers: a learner begins with one."""
            for port in processes.ports:
                with socket.socket() as client:
                    if client.connect_ex(("localhost", port)) == 0:
                        return True
            return False

        def until_up() -> None:
            while not up():
                processes.samplers()
                time.sleep(0.2)

        until_up()
        assert learner("whole").wait(900) == 0, processes.log("whole")[-3000:]
        done, killed = dict.fromkeys(KINDS, 0), folder / "killed"
        until_up()
        child, starts = learner("killed"), 1
        while sum(done.values()) < kills:
            began = logged(killed)
            pause = time.monotonic() + rng.uniform(0.2, 3.0)
            while child.poll() is None and (time.monotonic() < pause or logged(killed) <= began):
                time.sleep(0.05)
            if child.poll() is not None:
                break
            kind = rng.choices(KINDS, (2, 4, 1))[0]
            names = [f"sampler_{port}" for port in processes.ports]
            processes.kill(*{"learner": ["killed"], "one sampler": rng.sample(names, 1), "both samplers": names}[kind])
            done[kind] += 1
            print(f"{sum(done.values()):3} {kind} at update {logged(killed)} of {updates}", flush=True)
            processes.samplers()
            if kind == "learner":
                until_up()
                child, starts = learner("killed"), starts + 1
        processes.samplers()
        if child.poll() is None:
            child.wait(900)
        assert child.poll() == 0, processes.log("killed")[-3000:]
    assert sum(done.values()) >= kills, f"the run was over after {done}"
    results = {name: json.loads((folder / name / "rl.json").read_text()) for name in ("whole", "killed")}
    gold = {name: result["evaluations"][-1]["gold"] for name, result in results.items()}
    pairs = [np.array(result["evaluations"][-1]["gold_P"]) for result in results.values()]
    change = pairs[1] - pairs[0]
    rows = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    learnt = [row for row in rows if "loss" in row]
    assert results["killed"]["finished"] and [row["update"] for row in learnt] == list(range(1, updates + 1))
    return {
        "kills": done, "continued": starts - 1, "updates": updates,
        "left_out": int(sum(row["left_out"] for row in learnt)),
        "drawn_by_the_learner": int(sum(row["drawn_here"] for row in learnt)),
        "samples": updates * 16, "gold": gold, "change": float(change.mean()),
        "error": float(change.std(ddof=1) / len(change) ** 0.5),
    }  # fmt: skip


def logged(folder: pathlib.Path) -> int:
    """The last update in the log; -1 where there is none."""
    path = folder / "metrics.jsonl"
    whole = [line for line in path.read_bytes().splitlines(True) if line.endswith(b"\n")] if path.exists() else []
    return json.loads(whole[-1])["step"] if whole else -1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="a folder that is not there yet")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stale", type=int, default=1)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True)
    print(json.dumps(storm(asked.folder.absolute(), asked.kills, asked.seed, asked.stale)))
