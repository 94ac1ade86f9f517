"""Rehearses a pod's life in miniature: `make pod-rehearsal`, or `python tests/pod_rehearsal.py FOLDER`.

Four processes of two simulated devices train `experiments/tiny.py`. A host dies and all restart. One host gets SIGTERM.
Two processes of four devices finish the run, with every row split over two devices. The run must equal one process of
eight devices. Then four processes score a file and one dies; the file must equal, byte for byte, that of one process.
The last line printed is JSON.
"""

import argparse
import json
import pathlib
import signal
import time

import numpy as np
from pod import REPOSITORY, Pod
from pod_storm import logged, newest
from tiny_run import lines

from jprm.io.jsonl import write_records
from jprm.tree import read_records

STEPS = 32
SETTINGS = ["data.rows=8", "data.micro_rows=8", "data.streams=4", f"steps={STEPS}", "log_every=1", "checkpoint_every=4"]


def rehearse(folder: pathlib.Path) -> dict:
    begun, said = time.time(), {}
    tiny = str(REPOSITORY / "experiments" / "tiny.py")

    def train(name, *settings):
        return ["-m", "jprm", "train", tiny, "--workdir", str(folder / name), "--set", *SETTINGS, *settings]

    print("one process of eight devices: the whole run", flush=True)
    with Pod(folder / "logs", 1, 8) as pod:
        pod.start(train("one"))
        assert pod.wait() == [0], pod.log()[-3000:]

    many = folder / "many"
    with Pod(folder / "logs", 4, 2) as pod:
        print("four processes of two devices; process 2 is killed", flush=True)
        pod.start(train("many"))
        assert pod.until(lambda: newest(many) >= 4 and logged(many) >= 6), pod.log()[-3000:]
        pod.signal(signal.SIGKILL, 2)
        pod.wait(grace=1)
        said["killed_at"], said["saved"] = logged(many), newest(many)
        assert newest(many) < STEPS

        print("four again; process 3 gets SIGTERM", flush=True)
        pod.start(train("many"))
        assert pod.until(lambda: newest(many) > said["saved"]), pod.log()[-3000:]
        assert f"continuing from step {said['saved']} " in pod.log()
        pod.signal(signal.SIGTERM, 3)
        assert set(pod.wait()) == {128 + signal.SIGTERM}, pod.log()[-3000:]
        said["stopped_at"] = newest(many)
        assert f"saved at step {newest(many)} of {STEPS}" in pod.log()

    with Pod(folder / "logs", 2, 4) as pod:
        print("two processes of four devices finish it, with every row over two of them", flush=True)
        pod.start(train("many", "mesh.context=2"))
        assert pod.wait() == [0, 0], pod.log()[-3000:]
        assert f"continuing from step {said['stopped_at']} " in pod.log()
    said["largest_difference_of_loss"] = compare(many, folder / "one")

    records = folder / "chains.jsonl"
    tiny_chain = list(read_records(REPOSITORY / "examples" / "tiny_chain.jsonl"))
    write_records(records, [{**tiny_chain[i % 2], "id": i} for i in range(700)])

    def score(name):
        out = str(folder / f"{name}.jsonl")
        return ["-m", "jprm", "score", "--model", str(many), "--input", str(records), "--output", out]

    with Pod(folder / "logs", 4, 2) as pod:
        print("four processes score 700 chains; process 1 is killed", flush=True)
        part = folder / "four.jsonl.part"
        pod.start(score("four"))
        if pod.until(lambda: part.exists() and part.read_bytes().count(b"\n") >= 64):
            pod.signal(signal.SIGKILL, 1)
        pod.wait(grace=1)
        said["scored_before_the_kill"] = part.read_bytes().count(b"\n") if part.exists() else 700
        pod.start(score("four"))
        assert set(pod.wait()) == {0}, pod.log()[-3000:]
        print(pod.log().splitlines()[-1])
    with Pod(folder / "logs", 1, 2) as pod:
        print("one process scores them", flush=True)
        pod.start(score("one"))
        assert pod.wait() == [0], pod.log()[-3000:]
    one, four = ((folder / f"{name}.jsonl").read_bytes() for name in ("one", "four"))
    assert [json.loads(line)["id"] for line in four.splitlines()] == list(range(700))
    assert one == four, "the scores differ"
    return said | {"scores_equal": True, "seconds": round(time.time() - begun)}


def compare(many: pathlib.Path, one: pathlib.Path) -> float:
    """The largest relative difference of a step's loss; the batches must have been the same."""
    a, b = lines(many), lines(one)
    assert [line["step"] for line in a] == [line["step"] for line in b] == list(range(1, STEPS + 1))
    assert [line["labels"] for line in a] == [line["labels"] for line in b]
    data = [json.loads((run / f"checkpoints/{STEPS}/run/data.json").read_text())["data"] for run in (many, one)]
    assert data[0] == data[1]
    losses = [np.array([line["loss"] for line in log]) for log in (a, b)]
    # float32 sums in another order, 1e-7 a step, which Adam turns into up to a rate where a gradient is about zero
    np.testing.assert_allclose(*losses, rtol=1e-2)
    return float(np.max(np.abs(losses[0] / losses[1] - 1)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="a folder that is not there yet")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True)
    print(json.dumps(rehearse(asked.folder.absolute())))
