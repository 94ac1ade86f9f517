"""Kills processes again and again, and starts them again: what they leave must equal what nothing disturbed.

    python tests/storm.py pod FOLDER --kills 30 --seed 7

`STORMS` is the table: how each begins, what dies when, and what must be equal are its function; `make storm` and its
like run them. A kill is a SIGKILL, or where a storm says so a SIGTERM, at a point drawn from the seed: an event, and a
time after it. The last line printed is JSON: `kills`, `restarts`, `places` (how often something was hit where),
`differing_bytes`, and what else a storm counts.
"""

from __future__ import annotations

import contextlib
import functools
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
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import input_soak
import jax
import numpy as np
import tiny_rl
import tiny_run as tiny
import tyro
from pod import QUICK, Pod, Processes, Servers, environment
from storm_commands import COMMANDS, make_inputs, script
from stub_server import serving

from jprm.checkpoints import store
from jprm.experiment import OptimizerConfig, read
from jprm.io.jsonl import write_records
from jprm.io.storage import Local, Place
from jprm.model.mesh import make_mesh

Folder = tyro.conf.Positional[pathlib.Path]


class Storm:
    """A folder that is empty, a chance, and what is counted."""

    def __init__(self, folder: pathlib.Path, kills: int, seed: int):
        self.folder, self.most, self.rng = folder.absolute(), kills, random.Random(seed)
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(self.folder.iterdir()):
            raise SystemExit(f"{folder}: is not empty")
        self.kills, self.restarts, self.differing_bytes, self.places = 0, 0, 0, Counter()

    @property
    def over(self) -> bool:
        return self.kills >= self.most

    def comes(self, processes: Processes, seen: Callable[[], bool], most: float, *names: str, least: float = 0) -> bool:
        """Waits for what is to be seen, and `least` to `most` seconds more; False where one of these had ended."""
        if not processes.until(seen, names=names):
            return False
        time.sleep(self.rng.uniform(least, most))
        return not processes.ended(names)

    def hit(self, place: str) -> None:
        self.kills += 1
        self.places[place] += 1

    def told(self, **more) -> dict:
        """Prints the counts, and returns them."""
        counts = {name: getattr(self, name) for name in ("kills", "restarts", "differing_bytes")}
        counts |= {"places": dict(sorted(self.places.items()))} | more
        print(json.dumps(counts), flush=True)
        return counts


# ---- Equal to what nothing disturbed.

LEFT_OUT = {"checkpoints", "heartbeats", "training-goodput.svg", "training-mfu.svg"}  # checkpoints by their parameters
TIMED = re.compile(rb"<figure>(?:(?!</figure>).)*training-(?:goodput|mfu).*?</figure>", re.DOTALL)


def differing(whole: pathlib.Path, disturbed: pathlib.Path) -> int:
    """Returns how many bytes two files, or all files of two folders, differ by, and prints which."""
    paths = {path.relative_to(root) for root in (whole, disturbed) for path in (root, *root.rglob("*"))}
    lost = 0
    for path in sorted(path for path in paths if not LEFT_OUT & set(path.parts)):
        both = [root / path for root in (whole, disturbed)]
        a, b = map(content, both)
        apart = abs(len(a) - len(b)) + sum(x != y for x, y in zip(a, b, strict=False)) if a != b else 0
        apart += both[0].exists() != both[1].exists()
        if apart:
            print(f"{both[1]}: {apart} bytes differ", flush=True)
        lost += apart
    return lost


def content(path: pathlib.Path) -> bytes:
    """Returns the bytes that are to be equal; those of a run's configuration with its newest parameters."""
    if not path.is_file():
        return b""
    if path.name == "metrics.jsonl":
        return json.dumps(tiny.untimed(tiny.lines(path.parent))).encode()
    if path.name == "result.json":  # of a run, the last line of its metrics
        return json.dumps(tiny.untimed([json.loads(path.read_bytes())])).encode()
    if path.name == "rollouts.jsonl":  # a batch that was cut short is filled up, in another order
        return b"".join(sorted(path.read_bytes().splitlines(True)))
    if path.suffix == ".html":
        return re.sub(TIMED, b"", path.read_bytes())
    if path.name == "experiment.json":
        return path.read_bytes() + parameters(path.parent)
    return path.read_bytes()


def parameters(run: pathlib.Path) -> bytes:
    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        params, _ = store.load_params(run, read(run / "experiment.json"), mesh)
    return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params))


def logged(run: Place | pathlib.Path) -> int:
    """The last step in the log; -1 where there is none."""
    path = run / "metrics.jsonl"
    whole = [line for line in path.read_bytes().splitlines(True) if line.endswith(b"\n")] if path.exists() else []
    return json.loads(whole[-1])["step"] if whole else -1


# ---- A pod: one training of several processes.


def steps_of(run: Place) -> tuple[list[int], bool]:
    """Returns the steps of the whole checkpoints, in order, and whether there is a part of another."""
    folder = run / "checkpoints"
    if folder.here:
        names = set(os.listdir(folder)) if folder.is_dir() else set()
        whole = {name for name in names if name.isdigit()}
        return sorted(map(int, whole)), any("tmp" in name for name in names)
    names = {file.url.removeprefix(f"{folder}/") for file in folder.files()}
    steps = {name.partition("/")[0] for name in names}
    whole = {step for step in steps if f"{step}/{store.MARK}" in names}
    return sorted(map(int, whole)), steps != whole


def newest(run: Place) -> int:
    return max(steps_of(run)[0], default=0)


POD = {  # what is seen of a run that began at a step, the seconds after it, the signal, and who gets it
    "all at any moment": (lambda run, step, more: True, 10, signal.SIGKILL, "all"),
    "all after a save": (lambda run, step, more: newest(run) > step, 0.3, signal.SIGKILL, "all"),
    "all in a save": (lambda run, step, more: steps_of(run)[1], 0.1, signal.SIGKILL, "all"),
    "one while it trains": (lambda run, step, more: logged(run) > step + more, 0.3, signal.SIGKILL, "one"),
    "SIGTERM to one": (lambda run, step, more: newest(run) > step, 0.3, signal.SIGTERM, "one"),
}


def survives(storm: Storm, both: Pod, run: Place, command: Callable[[float], Sequence[str]]) -> int:
    """Kills a training, given the seconds that it waits before a step, and restarts it as a scheduler does.

    As many starts as kills continue: one that dies before anything was saved is followed by another. Every start
    continues from the newest whole checkpoint, and what was saved stays. Returns how many continued.
    """
    resumes, ended = 0, set()
    while ended != {0}:
        before = newest(run)
        resumes += before > 0
        both.start(command(0.05))
        kind = storm.rng.choice(list(POD)) if min(storm.kills, resumes) < storm.most else ""
        hit, number = False, signal.SIGKILL
        if kind:
            seen, most, number, who = POD[kind]
            hit = storm.comes(both, functools.partial(seen, run, before, storm.rng.randint(0, 3)), most)
        if hit:
            storm.hit(kind)
            both.signal(number, *([storm.rng.choice(list(both.children))] if who == "one" else both.children))
        ended = set(both.wait(storm.rng.uniform(0, 1) if hit and number == signal.SIGKILL else 120))
        time.sleep(0 if run.here else 0.3)  # a store may be busy with what a process had sent
        said = both.log()
        begun = re.search(r"continuing from step (\d+)", said)
        assert begun is None or int(begun[1]) == before, f"continued from {begun[1]}, saved was {before}"
        assert newest(run) >= before, "a checkpoint has gone"
        if hit and number == signal.SIGTERM and ended != {0}:
            assert ended == {128 + number} and f"saved at step {newest(run)} of" in said, said[-3000:]
        assert hit or (ended == {0} and (before == 0 or begun)), f"{ended}: {said[-3000:]}"
        storm.restarts += ended != {0}
        storm.told(from_step=before, to=newest(run))
    assert min(storm.kills, resumes) >= storm.most, f"the run was over after {storm.kills} kills, {resumes} resumes"
    return resumes


def pod(folder: Folder, kills: int = 30, seed: int = 0, processes: int = 2, devices: int = 2) -> dict:
    """Processes of one training die, all or one."""
    storm, rows = Storm(folder, kills, seed), processes * devices
    config = tiny.experiment(
        tiny.make_data(storm.folder / "data"), steps=6 * kills + 16, rows=2 * rows, micro_rows=rows, streams=processes,
        valid=(), log_every=1, checkpoint_every=4,
    )  # fmt: skip
    file = tiny.write_experiment(storm.folder / "experiment.py", config)

    def command(run: Place, pace: float) -> list[str]:
        return ["-m", "storm_child", str(pace), "train", str(file), "--workdir", str(run)]

    whole, killed = (Local(storm.folder / name) for name in ("whole", "killed"))
    with Pod(storm.folder / "logs", processes, devices) as both:
        both.complete(command(whole, 0))
        resumes = survives(storm, both, killed, functools.partial(command, killed))
    storm.differing_bytes += differing(whole, killed)
    return storm.told(resumes=resumes)


# ---- A learner with its samplers.

RL = {"learner": 2, "one sampler": 4, "both samplers": 1}  # who dies, and how often of seven times


def rl(folder: Folder, kills: int = 50, seed: int = 0, stale: int = 1) -> dict:
    """A learner and two samplers (tests/sglang_server.py) run apart, as on hosts of their own, and die at any moment.

    The learner reaches its last update in one run. What it draws depends on who was there: its figures stand beside
    those of a run that nothing disturbed.
    """
    storm, updates = Storm(folder, kills, seed), max(8, 2 * kills)
    data, killed = tiny_rl.servable(storm.folder / "data"), storm.folder / "killed"
    sampler = ("-m", "sglang_server", str(data / "policy"))
    with Servers(storm.folder / "logs", 2, *sampler, env=QUICK | environment()) as processes:
        config = tiny_rl.by_engine(
            data, processes.urls, updates=updates, minibatches=1, evaluate_every=updates, evaluate_samples=8,
            checkpoint_every=2, reference=False, stale=stale,
            optimizer=OptimizerConfig(learning_rate=0.002, decay="constant", eps=0.1),
        )  # fmt: skip
        file = tiny.write_experiment(storm.folder / "rl.py", config)

        def learner(name: str) -> subprocess.Popen:
            processes.answer(any)  # a learner begins with one
            return processes.run(name, "-m", "jprm", "rl", str(file), "--workdir", str(storm.folder / name))

        assert learner("whole").wait(900) == 0, processes.log("whole")[-3000:]
        child = learner("killed")
        while not storm.over:
            update, moment = logged(killed), time.monotonic() + storm.rng.uniform(0.2, 3.0)
            if not storm.comes(processes, lambda: time.monotonic() > moment and logged(killed) > update, 0, "killed"):  # noqa: B023
                break
            kind, samplers = storm.rng.choices(list(RL), list(RL.values()))[0], list(processes.ports)
            names = {"learner": ["killed"], "one sampler": storm.rng.sample(samplers, 1), "both samplers": samplers}
            processes.kill(*names[kind])
            storm.hit(kind)
            processes.begin()
            if kind == "learner":
                child = learner("killed")
            storm.restarts += len(names[kind])
            storm.told(update=logged(killed))
        processes.begin()
        assert child.wait(900) == 0, processes.log("killed")[-3000:]
    assert storm.over, f"the run was over after {storm.kills} kills"
    results = {name: json.loads((storm.folder / name / "rl.json").read_text()) for name in ("whole", "killed")}
    last = {name: result["evaluations"][-1] for name, result in results.items()}
    change = np.array(last["killed"]["gold_P"]) - np.array(last["whole"]["gold_P"])
    learnt = [row for row in tiny.lines(killed) if "loss" in row]
    assert results["killed"]["finished"] and [row["update"] for row in learnt] == list(range(1, updates + 1))
    return storm.told(
        updates=updates, samples=updates * 16, left_out=int(sum(row["left_out"] for row in learnt)),
        drawn_by_the_learner=int(sum(row["drawn_here"] for row in learnt)),
        gold={name: evaluation["gold"] for name, evaluation in last.items()}, change=float(change.mean()),
        error=float(change.std(ddof=1) / len(change) ** 0.5),
    )  # fmt: skip


# ---- Commands of one process.

Events = dict[str, tuple[int, float]]
"""How often there was each event of a command, and the seconds that it may last: see `storm_child.doomed`."""
Point = tuple[str, int, float]
"""The event at which a command dies, by name and number, and the seconds after it."""
NEVER: Point = ("", 0, 0.0)


class Commands(Storm):
    """Runs commands in `FOLDER/run`; what they make undisturbed is kept in `FOLDER/whole`, and of edits beside it."""

    def __init__(self, folder: pathlib.Path, kills: int, seed: int, url: str):
        super().__init__(folder, kills, seed)
        self.run, self.made, self.events = self.folder / "run", {}, {}
        self.run.mkdir()
        make_inputs(self.folder / "inputs", url)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "storm_child"]
        self.server = subprocess.Popen(command, cwd=self.run, env=QUICK | environment(), **pipes)

    def start(self, name: str, point: Point = NEVER) -> tuple[int, str]:
        """Runs a command; returns its status, and what it wrote."""
        with tempfile.NamedTemporaryFile("r") as said:
            words = COMMANDS[name].words.format(inputs=self.folder / "inputs").split()
            assert self.server.stdin is not None and self.server.stdout is not None
            self.server.stdin.write(json.dumps([said.name, str(self.run), *point, words]) + "\n")
            self.server.stdin.flush()
            return int(self.server.stdout.readline()), said.read()

    def clear(self, name: str) -> None:
        for path in itertools.chain(*(self.run.glob(f"{file_name}*") for file_name in self.made[name])):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def undisturbed(self, name: str, kept: str = "whole") -> None:
        """Runs a command, and keeps what it makes; the first time learns what that is, and its events."""
        before = set(os.listdir(self.run))
        status, said = self.start(name)
        assert status == 0, f"{name}, {kept}: {said[-3000:]}"
        self.made.setdefault(name, set(os.listdir(self.run)) - before)
        self.events.setdefault(name, measured(said))
        (self.folder / kept).mkdir(exist_ok=True)
        for file_name in self.made[name]:
            copy = shutil.copytree if (self.run / file_name).is_dir() else shutil.copy
            copy(self.run / file_name, self.folder / kept / file_name)

    def lost(self, name: str = "", kept: str = "whole") -> int:
        """Returns how many bytes what the commands have made, or a name of it, differs by from what was kept."""
        return differing(self.folder / kept / name, self.run / name)

    def point(self, name: str) -> Point:
        """Draws where to kill: in a phase of an update, at a change of a file, or at any moment after the first."""
        rng, events = self.rng, self.events[name]
        phases = sorted(set(events) - {"change"})
        if phases and rng.random() < 0.7:
            phase = rng.choice(phases)
            return phase, rng.randint(1, events[phase][0]), rng.uniform(0, events[phase][1]) + 1e-3
        count, seconds = events["change"]
        if rng.random() < 0.7:
            return "change", rng.randint(1, count), 0.0
        return "change", 1, rng.uniform(0, seconds) + 1e-3

    def disturbed(self, name: str, most: int) -> None:
        """Starts a command anew, kills it `most` times at the most, and lets it end."""
        self.clear(name)
        command = COMMANDS[name]
        for attempt in itertools.count():
            point = self.point(name) if attempt < most else NEVER
            status, said = self.start(name, point)
            self.restarts += attempt > 0
            if status != -signal.SIGKILL:
                break
            self.hit(" ".join([name, *re.findall(r"^at (\w+)$", said, re.M)[-1:]]))
            for final in (command.output,) if command.finals is None else command.finals:
                assert not (self.run / final).exists() or self.lost(final) == 0, f"{name}, killed at {point}"
        assert status == 0, f"{name} after {attempt} kills: {said[-3000:]}"
        if attempt == 0:  # the undisturbed run may have compiled
            now = measured(said)
            self.events[name] = {event: (n, min(s, now[event][1])) for event, (n, s) in self.events[name].items()}
        self.differing_bytes += self.lost()

    @contextlib.contextmanager
    def edit(self, file: str, before: str, after: str) -> Iterator[None]:
        """Edits a file: its size and time stay."""
        path = self.folder / file
        text, stat = path.read_bytes(), path.stat()
        changed = text.replace(before.encode(), after.encode(), 1)
        assert changed != text and len(changed) == len(text), file
        path.write_bytes(changed)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        try:
            yield
        finally:
            path.write_bytes(text)

    def edited(self, name: str, kind: str) -> Counter:
        """Kills a command, calls it with an edited file and then as it was; returns what became of that."""
        self.clear(name)
        command, point, counts = COMMANDS[name], self.point(name), Counter()
        if self.start(name, point)[0] == -signal.SIGKILL:
            self.hit(f"{name} {kind}")
        with self.edit(*command.edits[kind]):
            status, said = self.start(name)
            self.restarts += 1
            counts["anew" if status == 0 else "refused"] += 1
            if status == 0:
                counts["stale"] += self.lost(command.output, f"{name} {kind}") > 0
            else:
                assert status == 2 and ("another" in said or "changed" in said), (name, kind, point, said[-3000:])
                if (self.run / command.output).is_file():  # it was whole before the edit
                    counts["stale"] += self.lost(command.output) > 0
        again, said = self.start(name)
        if status != 0:
            assert again == 0, (name, kind, point, said[-3000:])
            self.differing_bytes += self.lost(command.output)
        elif again == 0:  # nothing of the edited run may be left
            counts["stale"] += self.lost(command.output) > 0
        counts["refused_afterwards"] += again == 2
        return counts


def measured(said: str) -> Events:
    return {event: tuple(seen) for event, seen in json.loads(said.rsplit("measured ", 1)[1]).items()}


@contextlib.contextmanager
def commands_of(folder: pathlib.Path, kills: int, seed: int, names: Iterable[str]) -> Iterator[Commands]:
    """Yields a storm after the undisturbed runs of these commands and of those whose output they read."""
    needed = set(names)
    for name in reversed(COMMANDS):
        needed |= {COMMANDS[name].needs} if name in needed else set()
    with serving(script) as server:
        storm = Commands(folder, kills, seed, server.url)
        for name in COMMANDS:
            if name in needed:
                storm.undisturbed(name)
        yield storm


def commands(folder: Folder, kills: int = 100, seed: int = 0, most: int = 4, only: tuple[str, ...] = ()) -> dict:
    """Every command, or only some, dies up to `most` times before it ends."""
    names = only or tuple(COMMANDS)
    with commands_of(folder, kills, seed, names) as storm:
        for name in itertools.cycle(names):
            if storm.over:
                break
            storm.disturbed(name, min(most, kills - storm.kills))
            storm.told(after=name)
        return storm.told()


def edits(folder: Folder, kills: int = 100, seed: int = 0) -> dict:
    """A config, a file of code or the data changes between a kill and the next call, with the same size and time.

    The call must refuse, or write what an undisturbed run writes of the edited files: anything else is `stale`. Then
    the edit is undone: where the call had refused, the next writes the bytes of an undisturbed run.
    """
    pairs = [(name, kind) for name, command in COMMANDS.items() for kind in command.edits]
    with commands_of(folder, kills, seed, {name for name, _ in pairs}) as storm:
        for name, kind in pairs:
            storm.clear(name)
            with storm.edit(*COMMANDS[name].edits[kind]):
                storm.undisturbed(name, f"{name} {kind}")
        counts = Counter()
        while not storm.over:
            name, kind = storm.rng.choice(pairs)
            counts.update(storm.edited(name, kind))
            storm.told(**counts, after=[name, kind])
        return storm.told(**counts)


# ---- A Ray cluster with its servers.


ANSWER = "import sys, stub_server as s; s.Server(s.completion, int(sys.argv[-1])).serve_forever()"


def fleet(
    folder: Folder, kills: int = 10, seed: int = 0, chains: int = 20_000,
    problems: int = 2_000, shards: int = 32,
) -> dict:  # fmt: skip
    """Four nodes of Ray score, and label by two policy servers, while nodes and servers die in turn.

    They write the bytes of one process. Needs the extra `ray`. `seconds` are of scores and labels, by one process, and
    by the cluster undisturbed and disturbed.
    """
    from ray.cluster_utils import Cluster

    from jprm.train import train

    storm, seconds = Storm(folder, kills, seed), {}
    here, draw = storm.folder, random.Random(seed)
    train(tiny.experiment(tiny.make_data(here / "data")), here / "run")
    write_records(here / "chains.jsonl", tiny.chains(chains, seed=seed))
    write_records(here / "problems.jsonl", (
        {"problem": f"Problem {i}", "steps": [f"Step {i}.{k}." for k in range(draw.randint(1, 4))],
         "answer": str(draw.randrange(4))} for i in range(problems)
    ))  # fmt: skip
    with Servers(here / "logs", 2, "-c", ANSWER) as processes:
        processes.begin()
        settings = {"url": [f"{url}/v1" for url in processes.urls], "model": "stand-in", "backoff_s": 0.2}
        (here / "policy.json").write_text(json.dumps(settings | {"retries": 20, "concurrency": 16}))

        def run(name: str, *more: str, pause: float = float("inf")) -> None:
            """Scores and labels; every `pause` seconds something dies, and a command that fails is given again."""
            out = here / name
            out.mkdir()
            seconds[name], due = [], time.monotonic() + pause
            for words in (
                f"score --model {here}/run --input {here}/chains.jsonl --output {out}/scores.jsonl",
                f"label mc --policy {here}/policy.json --input {here}/problems.jsonl --output {out}/values.jsonl"
                f" --rollouts {out}/rollouts.jsonl --k 4 --estimate soft",
            ):
                begun, status = time.monotonic(), 1
                for attempt in range(20 if pause < float("inf") else 1):
                    child = processes.run(name, "-m", "jprm", *words.split(), *more)
                    while storm.comes(processes, lambda: time.monotonic() > due and not storm.over, 0, name):  # noqa: B023
                        trouble()
                        due = time.monotonic() + pause
                    storm.restarts += attempt > 0
                    if (status := child.wait()) == 0:
                        break
                assert status == 0, processes.log(name)[-3000:]
                seconds[name].append(round(time.monotonic() - begun, 1))

        def trouble() -> None:
            if storm.places["nodes"] <= storm.places["servers"]:
                cluster.remove_node(nodes.pop(storm.rng.randrange(len(nodes))), allow_graceful=False)
                storm.hit("nodes")
                nodes.append(cluster.add_node(num_cpus=1))
            else:
                processes.kill(storm.rng.choice(list(processes.ports)))
                storm.hit("servers")
                time.sleep(1.0)
                processes.begin()
            storm.told()

        run("one")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
        processes.env["RAY_ADDRESS"] = cluster.address
        on_ray = ["--engine", "ray", f"shards={shards}", "workers=2,4"]
        run("calm", *on_ray)
        run("disturbed", *on_ray, pause=max(1.0, 0.8 * sum(seconds["calm"]) / kills))
        cluster.shutdown()
    for name, kind in itertools.product(("calm", "disturbed"), ("scores", "values")):
        storm.differing_bytes += differing(here / "one" / f"{kind}.jsonl", here / name / f"{kind}.jsonl")
    return storm.told(seconds=seconds)


# ---- Readers of shards, and annotators.

INPUT = ("before the first batch", "copying", "between batches", "saving")


def input(folder: Folder, kills: int = 16, seed: int = 0, tokens: float = 200e6) -> dict:
    """Two processes read a stream each from shards in a bucket, through a cache that is smaller than the data.

    Each dies in every phase. The batches of both must equal, bit for bit, those of processes that nothing disturbs.
    """
    storm = Storm(folder, kills, seed)
    about = input_soak.write(storm.folder / "bucket", tokens)
    most, saved, hosts = about["bytes"] / 3, input_soak.SAVED, input_soak.HOSTS
    batches = int(about["tokens"] / hosts / (input_soak.CONFIG.rows * input_soak.CONFIG.tokens))
    with Processes(storm.folder / "logs") as processes:

        def start(run: pathlib.Path, host: int) -> subprocess.Popen:
            places = f"file://{storm.folder}/bucket", f"{run}/cache{host}", f"{run}/{host}.json"
            return processes.run("reader", "-m", "input_soak", *places, str(host), str(batches), str(most))

        def reached(pattern: str, name: str) -> Callable[[], bool]:
            limit = time.monotonic() + 20  # the moment may pass between two looks
            return lambda: time.monotonic() > limit or any((storm.folder / name).glob(pattern))

        def strike(host: int, phase: str) -> bool:
            if phase == INPUT[0]:
                return storm.comes(processes, lambda: True, 3, least=1)
            if phase == INPUT[1]:
                return storm.comes(processes, reached("*.partial", f"killed/cache{host}"), 0)
            count = storm.rng.randint(1, 3 * saved) if phase == INPUT[2] else storm.rng.randint(1, 3) * saved
            come = storm.comes(processes, lambda: processes.log("reader").count("\n") >= count, 0)
            return come and (phase == INPUT[2] or storm.comes(processes, reached(f"{host}.json.partial", "killed"), 0))

        whole, killed = storm.folder / "whole", storm.folder / "killed"
        for run in (whole, killed):
            run.mkdir()
        for number in range(kills):
            phase, host = INPUT[number % len(INPUT)], number // len(INPUT) % hosts
            start(killed, host)
            if strike(host, phase):
                storm.hit(phase)
                storm.restarts += 1  # in a later round, or below
            processes.kill()
            storm.told(host=host)
        states = []
        for host, run in itertools.product(range(hosts), (whole, killed)):
            assert start(run, host).wait() == 0, processes.log("reader")[-3000:]
            states.append(json.loads((run / f"{host}.json").read_text()))
            held = sum(file.stat().st_size for file in (run / f"cache{host}").glob("*.array_record"))
            assert held <= most, "the cache is larger than its bound"
    for first, second in zip(states[::2], states[1::2], strict=True):
        assert all(first[name] == second[name] for name in ("digest", "done", "tokens"))
    read = sum(state["tokens"] for state in states[::2])
    rate = round(read / sum(state["cpu"] for state in states[::2]))
    return storm.told(
        **about, tokens_read=2 * read, batches_of_a_host=batches, tokens_a_cpu_second=rate, cache_bytes=round(most)
    )


def annotate(folder: Folder, kills: int = 200, seed: int = 0) -> dict:
    """Three annotators rate chains at once while their server dies.

    As the page does, an event without an answer is sent again, with its uuid, until it is confirmed. What was confirmed
    is in the log once, and in each annotator's order.
    """
    storm, names = Storm(folder, kills, seed), ("ana", "ben", "cyd")
    from annotating import Process, log_of, make

    study = make(storm.folder, count=100 + 10 * kills, names=names)
    server, confirmed = Process(study), {name: [] for name in names}

    def post(name: str, path: str, body: dict) -> dict:
        while True:
            status, answer = server.post(path, body, name)
            assert status in (None, 200), answer
            if status:
                return answer

    def label(name: str) -> None:
        while not storm.over and (shown := post(name, "next", {})["tasks"]):
            rated = [{"kind": "rate", "step": step, "rating": 1} for step in range(len(shown[0]["steps"]))]
            for event in [*rated[len(shown[0]["acts"]) :], {"kind": "finish", "reason": "solution"}]:
                uuid = f"{name}-{len(confirmed[name]):06}"
                body = {"uuid": uuid, "task": shown[0]["task"], "seconds": 1.0}
                confirmed[name].append(post(name, "events", body | event)["acknowledged"])

    with ThreadPoolExecutor(len(names)) as pool:
        labelling = [pool.submit(label, name) for name in names]
        while not storm.over and not any(part.done() for part in labelling):
            time.sleep(storm.rng.uniform(0, 0.1))
            server.kill()
            storm.hit("server")
            server.start()
            storm.restarts += 1
        for part in labelling:
            part.result()
    server.stop()
    events = log_of(study)
    assert storm.over and len({event["uuid"] for event in events}) == len(events)
    for name in names:
        sent = [event["uuid"] for event in events if event["annotator"] == name and event["kind"] != "open"]
        assert sent == confirmed[name]
    return storm.told(events=len(events))


STORMS = {
    "pod": pod, "commands": commands, "edits": edits, "rl": rl, "fleet": fleet, "input": input, "annotate": annotate,
}  # fmt: skip

if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(STORMS)
