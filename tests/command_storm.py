"""Kills every command again and again: `make storm-commands`, or `python tests/command_storm.py FOLDER --kills 100`.

Each command runs once undisturbed. Then it starts anew, dies by SIGKILL at points drawn from the seed, and is run again
until it is done. Points are changes of files (a name is opened to write, renamed, removed), counted in the process,
moments after the first of them, and for `jprm rl` moments in the phases of its updates. What stands under a final
name after a kill must be whole, and what the command leaves must equal the undisturbed run byte for byte: of metrics
and their curves all but times, of checkpoints the parameters, of kept rollouts the set of lines. Every line but the
first is JSON: `kills`, `restarts`, `differing_bytes` so far, and `places`, where the commands died.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import tiny_rl
import tiny_run as tiny
from pod import environment
from stub_server import Server, reply
from test_evaluate_run import pool_file, processbench_file

from jprm.checkpoints import store
from jprm.experiment import read
from jprm.io.jsonl import write_records
from jprm.model.mesh import make_mesh

CHILD = """
import collections, json, os, signal, sys, threading, time
folder, name, number, delay = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
counts, times = collections.Counter(), []
NAMES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def happens(event):
    counts[event] += 1
    times.append((event, time.monotonic()))
    if event == name and counts[event] == number:
        if not delay:
            die()
        threading.Thread(target=lambda: (time.sleep(delay), die()), daemon=True).start()
def hook(event, args):
    if event not in NAMES and not (event == "open" and isinstance(args[2], int) and args[2] & WRITES):
        return
    if isinstance(args[0], str) and os.path.abspath(args[0]).startswith(folder):
        happens("change")
sys.addaudithook(hook)
if sys.argv[5] == "rl":
    from jprm.train.callbacks import Watchdog
    at = Watchdog.at
    def entered(self, update, phase):
        print("at " + phase, file=sys.stderr, flush=True)
        happens(phase)
        at(self, update, phase)
    Watchdog.at = entered
from jprm.apps.cli import main
status = main(sys.argv[5:])
end, seconds = time.monotonic(), collections.defaultdict(list)
phases = [each for each in times if each[0] != "change"] + [("", end)]
for (phase, a), (_, b) in zip(phases, phases[1:]):
    seconds[phase].append(b - a)
seconds["change"] = [end - next((t for event, t in times if event == "change"), end)]
print("measured", json.dumps({event: [counts[event], max(seconds[event])] for event in counts}), file=sys.stderr)
sys.exit(status)
"""
SERVE = f"""import json, os, sys
import jprm.apps.cli, jprm.methods.evaluate.suite, jprm.loading, jprm.train
import jprm.methods.label.files, jprm.methods.search.files
CHILD = {CHILD!r}
for line in sys.stdin:
    said, *argv = json.loads(line)
    if not (pid := os.fork()):
        descriptor = os.open(said, os.O_WRONLY | os.O_TRUNC)
        os.dup2(descriptor, 2)
        os.dup2(descriptor, 1)
        sys.argv = ["-c", *argv]
        status = 1
        try:
            exec(compile(CHILD, "child", "exec"), {{"__name__": "__main__"}})
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""
"""Imports jprm once, and runs `CHILD` in a fork for every line."""

COMMANDS = {  # name: the arguments, and the final names that the command writes
    "prepare": ("prepare jsonl --input {inputs}/trees.jsonl --output prepared", ("prepared",)),
    "tokenise": ("tokenise {inputs}/shards.py --shards 8 --workers 1 --output tokens", ("tokens/tokens.json",)),
    "train": ("train {inputs}/experiment.py --workdir model", ()),
    "score": ("score --model model --input {inputs}/chains.jsonl --output scored.jsonl", ("scored.jsonl",)),
    "label mc": (
        "label mc --policy {inputs}/policy.json --input {inputs}/problems.jsonl --output values.jsonl"
        " --rollouts rollouts.jsonl --estimate soft --k 4 --trees-at-once 2",
        ("values.jsonl",),
    ),
    "sample": (
        "sample --policy {inputs}/policy.json --input {inputs}/problems.jsonl --output pools.jsonl --n 4 --at-once 2",
        ("pools.jsonl",),
    ),
    "search": (
        "search best-of-n --policy {inputs}/policy.json --model model --input {inputs}/problems.jsonl"
        " --budget 1000 --n 4 --at-once 2 --output best.jsonl",
        ("best.jsonl",),
    ),
    "eval suite": (
        "eval suite --model model --suite {inputs}/suite.json --output results",
        ("results/results.json", "results/scores/easy.jsonl", "results/scores/pool.jsonl"),
    ),
    "convert": ("convert model exported", ("exported",)),
    "report": ("report results --output report.html --figures figures", ("report.html",)),
    "rl": ("rl {inputs}/rl.py --workdir learnt", ()),
}


@dataclasses.dataclass
class Undisturbed:
    """What a command did when nothing killed it.

    events: how often there was each, and the seconds it may last: changes of files, from the first on, and for `rl` the
        phases of its updates.
    made: the new names.
    """

    events: dict[str, tuple[int, float]]
    made: set[str]

    def point(self, rng: random.Random) -> tuple[str, int, float]:
        """Returns where to kill: `seconds` after the event of a name and number; at a change itself if 0."""
        phases = sorted(set(self.events) - {"change"})
        if phases and rng.random() < 0.7:
            phase = rng.choice(phases)
            return phase, rng.randint(1, self.events[phase][0]), rng.uniform(0, self.events[phase][1]) + 1e-3
        if rng.random() < 0.7:
            return "change", rng.randint(1, self.events["change"][0]), 0.0
        return "change", 1, rng.uniform(0, self.events["change"][1]) + 1e-3


def script(number, body):
    """A policy whose samples depend on prompt and seed alone; every third is incorrect."""
    return reply(f"so {body['seed']}\n\nthen\n\nthe answer is {3 if body['seed'] % 3 else 4}", stop_reason=None)


def make_inputs(folder: pathlib.Path, url: str) -> None:
    tiny.make_data(folder)
    write_records(folder / "trees.jsonl", tiny.trees(40))
    write_records(folder / "chains.jsonl", tiny.chains(150))
    problems = [{"id": i, "problem": f"{i}: 1+2", "steps": ["so", "then"], "answer": "3"} for i in range(6)]
    write_records(folder / "problems.jsonl", problems)
    (folder / "policy.json").write_text(json.dumps({"url": url, "model": "tiny", "retries": 0, "concurrency": 4}))
    processbench_file(folder / "easy.json", 12, 1)
    pool_file(folder / "pool.jsonl")
    suite = {"processbench": {"data": "easy.json", "calibrate": "easy.json"}, "best_of_n": {"data": ["pool.jsonl"]}}
    (folder / "suite.json").write_text(json.dumps(suite))
    run = tiny.experiment(
        folder, train=(str(folder.with_name("run") / "prepared"),), valid=(), steps=12, log_every=1, checkpoint_every=3,
        model=dataclasses.replace(tiny.MODEL, qk_norm=False),
    )  # fmt: skip
    tiny.write_experiment(folder / "experiment.py", run)
    tiny.write_experiment(folder / "shards.py", tiny.experiment(folder, train=(str(folder / "trees.jsonl"),)))
    tiny_rl.make(folder / "rl")
    tiny.write_experiment(folder / "rl.py", tiny_rl.stormy(folder / "rl"))


class Commands:
    """Runs commands in `FOLDER/run`, each in a fork of one process that has imported jprm, and counts."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.run = folder, folder / "run"
        self.kills, self.restarts, self.places = Counter(), Counter(), Counter()
        self.run.mkdir(exist_ok=True)
        env = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | environment()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.server = subprocess.Popen([sys.executable, "-c", SERVE], cwd=self.run, env=env, **pipes)

    def start(self, words: str, event: str = "", number: int = 0, delay: float = 0.0) -> tuple[int, str]:
        """Runs a command, which dies `delay` seconds after the event of that name and number, if there is one.

        Returns its status, and what it wrote to stderr.
        """
        with tempfile.NamedTemporaryFile("r") as said:
            child = [said.name, str(self.run), event, str(number), str(delay)]
            child += words.format(inputs=self.folder / "inputs").split()
            assert self.server.stdin is not None and self.server.stdout is not None
            self.server.stdin.write(json.dumps(child) + "\n")
            self.server.stdin.flush()
            return int(self.server.stdout.readline()), said.read()

    @staticmethod
    def measured(said: str) -> dict[str, tuple[int, float]]:
        """Returns the events of a command that has ended."""
        return {event: tuple(found) for event, found in json.loads(said.rsplit("measured ", 1)[1]).items()}

    def undisturbed(self, name: str) -> Undisturbed:
        before = set(os.listdir(self.run))
        status, said = self.start(COMMANDS[name][0])
        assert status == 0, said[-3000:]
        return Undisturbed(self.measured(said), set(os.listdir(self.run)) - before)

    def disturbed(self, name: str, whole: Undisturbed, rng: random.Random, most: int) -> None:
        """Starts the command anew, kills it `most` times at the most, and lets it end."""
        for made in whole.made:
            path = self.run / made
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for attempt in itertools.count():
            point = whole.point(rng) if attempt < most else ()
            status, said = self.start(COMMANDS[name][0], *point)
            self.restarts[name] += attempt > 0
            if status != -signal.SIGKILL:
                break
            self.kills[name] += 1
            self.places[(name, *re.findall(r"^at (\w+)$", said, re.M)[-1:])] += 1
            for final in COMMANDS[name][1]:
                lost = differing(self.folder / "whole" / final, self.run / final) if (self.run / final).exists() else 0
                assert lost == 0, f"{name}, killed at {point}: {final} differs by {lost} bytes"
        assert status == 0, f"{name} after {self.kills[name]} kills: {said[-3000:]}"
        if attempt == 0:  # the undisturbed run may have compiled
            now = self.measured(said)
            whole.events = {event: (n, min(s, now[event][1])) for event, (n, s) in whole.events.items()}


def differing(whole: pathlib.Path, run: pathlib.Path) -> int:
    """Returns how many bytes two files, or all files of two folders, differ by."""
    if whole.is_dir() or run.is_dir():
        below = {path.relative_to(root) for root in (whole, run) for path in root.rglob("*") if path.is_file()}
        return sum(differing(whole / path, run / path) for path in sorted(below) if "checkpoints" not in path.parts)
    a, b = content(whole), content(run)
    lost = different(a, b)
    if lost or whole.exists() != run.exists():
        print(f"{run}: {lost} bytes differ", flush=True)
    return lost + (whole.exists() != run.exists())


def different(a: bytes, b: bytes) -> int:
    return abs(len(a) - len(b)) + sum(x != y for x, y in zip(a, b, strict=False))


# A page's curves of what a clock says.
TIMED = re.compile(rb"<figure>(?:(?!</figure>).)*training-(?:goodput|mfu).*?</figure>", re.DOTALL)


def content(path: pathlib.Path) -> bytes:
    """Returns the bytes of a file that are to be equal; none where there is no file."""
    if not path.exists():
        return b""
    if path.name == "metrics.jsonl":
        return json.dumps(tiny.untimed(tiny.lines(path.parent))).encode()
    if path.name == "result.json":  # of a run, the last line of its metrics
        return json.dumps(tiny.untimed([json.loads(path.read_bytes())])).encode()
    if path.name == "rollouts.jsonl":  # a batch that was cut short is filled up, in another order
        return b"".join(sorted(path.read_bytes().splitlines(True)))
    if path.suffix == ".html":
        return re.sub(TIMED, b"", path.read_bytes())
    if path.name in ("training-goodput.svg", "training-mfu.svg"):
        return b""
    return path.read_bytes()


def parameters(folder: pathlib.Path) -> bytes:
    """Returns the parameters of all runs in a folder, of their newest checkpoints."""
    found, mesh = [], make_mesh(devices=jax.devices()[:1])
    for path in sorted(folder.rglob("experiment.json")):
        with jax.set_mesh(mesh):
            params, _ = store.load_params(path.parent, read(path), mesh)
        found += [np.asarray(x).tobytes() for x in jax.tree.leaves(params)]
    return b"".join(found)


def storm(folder: pathlib.Path, kills: int, seed: int, most: int = 4, only: tuple[str, ...] = ()) -> dict:
    """Kills until there were `kills`, at most `most` times before a command ends; returns the counts.

    Only some commands may be killed: they need no other's output.
    """
    rng = random.Random(seed)
    with serving(script) as url:
        make_inputs(folder / "inputs", url)
        commands = Commands(folder)
        whole = {name: commands.undisturbed(name) for name in only or COMMANDS}
        print({name: each.events for name, each in whole.items()}, flush=True)
        shutil.copytree(folder / "run", folder / "whole")
        counts = {"kills": 0, "restarts": 0, "differing_bytes": 0}
        for name in itertools.cycle(whole):
            if counts["kills"] >= kills:
                break
            commands.disturbed(name, whole[name], rng, min(most, kills - counts["kills"]))
            counts["kills"], counts["restarts"] = commands.kills.total(), commands.restarts.total()
            counts["differing_bytes"] += differing(folder / "whole", folder / "run")
            for made in sorted(whole[name].made):
                models = [parameters(folder / each / made) for each in ("whole", "run")]
                counts["differing_bytes"] += different(*models)
            places = {" ".join(place): n for place, n in sorted(commands.places.items())}
            print(json.dumps(counts | {"after": name, "places": places}), flush=True)
        return counts


@contextlib.contextmanager
def serving(answer: Callable) -> Iterator[str]:
    """Yields the address of a server that answers so."""
    server = Server(answer)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server.url
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="a folder that is not there yet")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", nargs="*", default=[], choices=["tokenise", "train", "rl"], help="commands that need no other's"
    )
    parser.add_argument(
        "--edits", action="store_true", help="edit config, code or data between a kill and the next call"
    )
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=asked.edits)
    if asked.edits:
        import edited_storm

        edited_storm.storm(asked.folder.absolute(), asked.kills, asked.seed)
        sys.exit()
    storm(asked.folder.absolute(), asked.kills, asked.seed, only=tuple(asked.only))
