"""Seconds until the first step of a run over several processes, by what its folder of compiled programs holds.

    PYTHONPATH=tests python -m experiments.bench.compile_cache [--processes 4] [--rounds 3] [--bucket]

Processes of two simulated CPU devices train `experiments/tiny.py`, all with one JAX_COMPILATION_CACHE_DIR: first empty,
then as that run left it, in turns. Prints the median of the rounds' seconds from the start of the processes to the
first line of metrics, and how many programs each process compiled and read.
"""

import argparse
import contextlib
import os
import pathlib
import re
import shutil
import statistics
import tempfile
import time

from buckets import gcs_server
from pod import Pod

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

SETTINGS = "data.rows=8 data.micro_rows=8 data.streams=4 steps=2 log_every=1 checkpoint_every=2".split()


def started(folder: pathlib.Path, processes: int, cache: str) -> tuple[float, list[tuple[int, ...]]]:
    """Returns the seconds to the first step, and (programs compiled, programs read) of every process."""
    shutil.rmtree(folder, ignore_errors=True)
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_DEBUG_LOG_MODULES": "jax._src.compiler"}
    metrics = folder / "run" / "metrics.jsonl"
    command = ["-m", "jprm", "train", str(REPOSITORY / "experiments/tiny.py"), "--workdir", str(folder / "run")]
    with Pod(folder / "logs", processes, 2) as pod:
        began = time.monotonic()
        pod.start([*command, "--set", *SETTINGS])
        seen = pod.until(lambda: metrics.exists() and '"step": 1,' in metrics.read_text())
        seconds = time.monotonic() - began
        statuses = pod.wait()
        assert seen and set(statuses) == {0}, pod.log()[-3000:]
        logs = [pod.log(index) for index in range(processes)]
    return seconds, [tuple(len(re.findall(what, log)) for what in ("CACHE MISS", "cache hit for")) for log in logs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bucket", action="store_true", help="keep the programs at a server of the protocol of gs://")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        place = stack.enter_context(gcs_server()) if asked.bucket else scratch
        times: dict[str, list[float]] = {"empty": [], "filled": []}
        for number in range(asked.rounds):
            for name in times:
                seconds, programs = started(pathlib.Path(scratch) / "pod", asked.processes, f"{place}/cache{number}")
                times[name].append(seconds)
                print(f"round {number}, {name}: {seconds:.1f} s; compiled, read: {programs}", flush=True)
    for name, measured in times.items():
        print(f"{name}: {statistics.median(measured):.1f} s ({min(measured):.1f} to {max(measured):.1f})")


if __name__ == "__main__":
    main()
