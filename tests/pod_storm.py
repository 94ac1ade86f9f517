"""Kills one short run again and again: `make storm`, or `python tests/pod_storm.py FOLDER --kills 30`.

Processes die at random moments (all, one, or during a save) or get SIGTERM, and are restarted as a scheduler does. The
run must equal an undisturbed one bit for bit. The last line printed is JSON: `kills`, `resumes`, `differing_bytes`.
"""

import argparse
import json
import os
import pathlib
import random
import re
import signal
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from pod import Pod
from tiny_run import experiment, lines, make_data, untimed, write_experiment

import jprm

CHILD = """
import sys, time
from jprm import train as training
put_rows = training.put_rows
def slowly(*args, **kwargs):
    time.sleep({pace})
    return put_rows(*args, **kwargs)
training.put_rows = slowly
from jprm.apps.cli import main
sys.exit(main(sys.argv[1:]))
"""
KINDS = ("all at any moment", "one while it trains", "all in a save", "SIGTERM to one")


def storm(folder: pathlib.Path, kills: int, count: int, devices: int, seed: int) -> dict:
    """`kills` kills over a run of `count` processes with `devices` devices each, and one more for each before anything
    was saved, so that as many starts resume; AssertionError for what is lost."""
    rng, steps = random.Random(seed), 6 * kills + 16
    data = make_data(folder / "data")
    run = experiment(
        data, steps=steps, rows=2 * count * devices, micro_rows=count * devices, streams=count, valid=(), log_every=1,
        checkpoint_every=4,
    )  # fmt: skip
    write_experiment(folder / "experiment.py", run)

    def command(name, pace):
        return ["-c", CHILD.format(pace=pace), "train", str(folder / "experiment.py"), "--workdir", str(folder / name)]

    with Pod(folder / "logs", count, devices) as pod:
        pod.start(command("whole", 0))
        assert set(pod.wait()) == {0}, pod.log()[-3000:]
        killed, done, resumes = folder / "killed", 0, 0
        while True:
            before = newest(killed)
            resumes += before > 0
            pod.start(command("killed", 0.05))
            kind = rng.choice(KINDS) if min(done, resumes) < kills else None
            hit = kind is not None and strike(pod, killed, before, kind, rng)
            statuses = pod.wait(grace=rng.uniform(0, 1) if hit and kind != KINDS[3] else 120)
            done += hit
            check(pod, killed, before, kind if hit else None, statuses)
            if set(statuses) == {0}:
                break
            print(f"{done:3} {kind}: from step {before}, now {newest(killed)} of {steps}", flush=True)
    assert min(done, resumes) >= kills, f"the run was over after {done} kills and {resumes} resumes"
    assert untimed(lines(killed)) == untimed(lines(folder / "whole")), "the logs differ"
    bytes_of = [
        [np.frombuffer(np.asarray(x).tobytes(), np.uint8) for x in jax.tree.leaves(jprm.load(folder / name).params)]
        for name in ("killed", "whole")
    ]
    differing = sum(np.count_nonzero(a != b) for a, b in zip(*bytes_of, strict=True))
    return {"kills": done, "resumes": resumes, "differing_bytes": int(differing)}


def strike(pod: Pod, folder: pathlib.Path, before: int, kind: str, rng: random.Random) -> bool:
    """Waits for the moment and kills; False where a process had ended by then."""
    if kind == KINDS[0]:
        time.sleep(rng.uniform(0, 10))
    elif kind == KINDS[1]:
        some = before + rng.randint(0, 3)
        if not pod.until(lambda: logged(folder) > some):
            return False
        time.sleep(rng.uniform(0, 0.3))
    elif kind == KINDS[2]:
        if not pod.until(lambda: any("tmp" in name for name in names(folder))):
            return False
        time.sleep(rng.uniform(0, 0.1))
    elif not pod.until(lambda: newest(folder) > before):
        return False
    else:
        time.sleep(rng.uniform(0, 0.3))
    if any(child.poll() is not None for child in pod.children):
        return False
    one = kind in (KINDS[1], KINDS[3])
    pod.signal(signal.SIGTERM if kind == KINDS[3] else signal.SIGKILL, rng.randrange(pod.count) if one else None)
    return True


def check(pod: Pod, folder: pathlib.Path, before: int, kind: str | None, statuses: list[int]) -> None:
    """The run continued from the newest whole checkpoint and no other, and has lost none of what was saved."""
    text = pod.log()
    begun = re.search(r"continuing from step (\d+)", text)
    assert begun is None or int(begun[1]) == before, f"continued from {begun[1]}, saved was {before}"
    assert newest(folder) >= before, "a checkpoint has gone"
    if kind == KINDS[3] and set(statuses) != {0}:
        assert set(statuses) == {128 + signal.SIGTERM}, f"{statuses}: {text[-3000:]}"
        assert f"saved at step {newest(folder)} of" in text
    if kind is None:
        assert set(statuses) == {0}, f"{statuses}: {text[-3000:]}"
        assert before == 0 or begun, "it did not continue"


def names(folder: pathlib.Path) -> list[str]:
    checkpoints = folder / "checkpoints"
    return os.listdir(checkpoints) if checkpoints.is_dir() else []


def newest(folder: pathlib.Path) -> int:
    """The step of the newest whole checkpoint; 0 where there is none."""
    return max((int(name) for name in names(folder) if name.isdigit()), default=0)


def logged(folder: pathlib.Path) -> int:
    path = folder / "metrics.jsonl"
    whole = [line for line in path.read_bytes().splitlines(True) if line.endswith(b"\n")] if path.exists() else []
    return json.loads(whole[-1])["step"] if whole else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="a folder that is not there yet")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True)
    print(json.dumps(storm(asked.folder.absolute(), asked.kills, asked.processes, asked.devices, asked.seed)))
