"""Two processes equal one: batches, losses, bytes, an agreed stop, and one error for all."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from pod import Pod
from refusing import refused
from tiny_run import chains, lines, make_data, of_two_processes, training, untimed

import jprm
from jprm import multihost
from jprm.checkpoints.store import data_digests
from jprm.io.jsonl import write_records
from jprm.io.storage import path_of
from jprm.methods.jobs.score import score_file
from jprm.model.mesh import MeshConfig
from jprm.score import scorer

AGREE = """
import os, pathlib, shutil, signal, sys
from jprm import multihost
folder, where = pathlib.Path(sys.argv[1]), sys.argv[-1]
multihost.start(where)
import jax
own = jax.process_index()

assert multihost.first(lambda: {"of": jax.process_index()}) == {"of": 0}
assert multihost.spread(lambda some: [10 * i for i in some], [3, 1, 2]) == [30, 10, 20]
assert multihost.spread(lambda some: some[:], [5]) == [5]  # of more processes than items
try:
    multihost.spread(lambda some: some if own == 0 else {}["of only process 1"], [1, 2])
except (KeyError, ValueError) as error:
    print("spread raised", type(error).__name__, error)
assert multihost.everywhere(True) and not multihost.everywhere(own == 0)
try:
    multihost.first(lambda: {}["of only process 0"])
except (KeyError, ValueError) as error:
    print("first raised", type(error).__name__, error)
"""
CHILD = """
import tiny_run as tiny
import jprm
from jprm.score import scorer
from jprm.methods.jobs.score import score_file
from jprm.score.scorer import PRM
from jprm.train import Stopped

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jprm.methods.policy.transfer import on_own_mesh
from jprm.model.mesh import MeshConfig, make_mesh, own_mesh, put
grid, whole = make_mesh(MeshConfig(tensor=2, context=2)), np.arange(64.0).reshape(8, 8)
own_grid = own_mesh(grid)
copy = on_own_mesh(put(whole, NamedSharding(grid, PartitionSpec(("fsdp", "context"), "tensor"))), own_grid)
assert copy.sharding == NamedSharding(own_grid, PartitionSpec("fsdp", "tensor")) and np.array_equal(copy, whole)
assert {piece.data.shape for piece in copy.addressable_shards} == {(2, 8)}

import dataclasses, json
from jprm.checkpoints import store
from jprm.io.storage import path_of
from jprm.train import batches
work = []
def counting(module, name):
    function = getattr(module, name)
    setattr(module, name, lambda *args, **options: work.append(name) or function(*args, **options))
counting(batches, "tokens_of")
counting(store, "sha256_of")
run = dataclasses.replace(tiny.of_two_processes(folder), probe_rows=16)
with jprm.Trainer(run) as trainer:
    work.clear()
    part = {"values": trainer.evaluate(), "records": work.count("tokens_of")}
part["digests"] = store.data_digests({name: path_of(folder / name) for name in ("train.jsonl", "valid.jsonl")})
print("part:", json.dumps(part | {"files": work.count("sha256_of")}))

put_rows, calls = tiny.training.put_rows, []
def put(*args, lead=0):
    calls.append(lead)
    if own == 1 and calls.count(1) == 2:
        os.kill(os.getpid(), signal.SIGTERM)
        multihost._service().blocking_key_value_get_bytes("RECEIVED_PREEMPTION_NOTICE", 300_000)  # up to a second later
    return put_rows(*args, lead=lead)
tiny.training.put_rows = put
try:
    tiny.training.train(tiny.of_two_processes(folder), folder / "many")
    print("not stopped")
except Stopped as stopped:
    print("stopped:", stopped)
multihost.meet()  # process 1 writes no heartbeat any more
multihost.first(lambda: str(shutil.copytree(folder / "many", folder / "stopped")))
print("result:", tiny.training.train(tiny.of_two_processes(folder), folder / "many")["step"])
scorer.SHORTEST = scorer.FILLED = scorer.LONGEST = 512
prm = jprm.load(folder / "model")
for name in ("scored", "continued"):
    print(score_file(prm, folder / "chains.jsonl", folder / f"{name}.jsonl"))
def broken(*_):
    raise ValueError("broken here")
if own == 1:
    PRM.outputs_of = broken
try:
    score_file(prm, folder / "chains.jsonl", folder / "never.jsonl")
except ValueError as error:
    print("refused:", error)
"""


@pytest.fixture(scope="module")
def agreed(tmp_path_factory):
    """Returns the logs of two processes that ran AGREE."""
    with Pod(folder := tmp_path_factory.mktemp("agreed"), 2, 1) as pod:
        return pod.complete(["-c", AGREE, str(folder)])


@pytest.fixture(scope="module")
def both(tiny_run, tmp_path_factory):
    """The folder in which two processes of four devices ran CHILD, and their logs."""
    folder = make_data(tmp_path_factory.mktemp("both"))
    (folder / "model").symlink_to(tiny_run.folder)
    write_records(folder / "chains.jsonl", chains(150))
    with pytest.MonkeyPatch.context() as patch:  # rows of one length: one program
        for name in ("SHORTEST", "FILLED", "LONGEST"):
            patch.setattr(scorer, name, 512)
        score_file(jprm.load(folder / "model"), folder / "chains.jsonl", folder / "continued.jsonl")
    whole = (folder / "continued.jsonl").read_bytes()
    (folder / "continued.jsonl").unlink()  # as after a kill: one chunk and a half of 64 records
    (folder / "continued.jsonl.part").write_bytes(b"".join(whole.splitlines(keepends=True)[:100]))
    (folder / "alone.jsonl").write_bytes(whole)
    with Pod(folder, 2, 4) as pod:
        return folder, pod.complete(["-c", AGREE + CHILD, str(folder)])


@pytest.mark.parametrize(
    ("index", "here", "message"),
    [
        (0, "first raised KeyError ", "process 0 refused: KeyError: 'of only process 0'"),
        (1, "spread raised KeyError ", "process 1 failed: KeyError: 'of only process 1'"),
    ],
)
def test_where_one_fails_all_hear(agreed, index, here, message):
    assert here in agreed[index] and message in agreed[1 - index]


@pytest.mark.breadth
def test_where_one_cannot_score_all_hear(both):
    assert "refused: broken here" in both[1][1]
    assert "refused: process 1 failed: ValueError: broken here" in both[1][0]


@pytest.mark.breadth
def test_a_signal_to_one_stops_both_at_the_same_step_and_two_or_one_go_on(both):
    folder, logs = both
    said = [line for log in logs for line in log.splitlines() if "stopped" in line]
    assert len(said) == 2 and said[0] == said[1] and "SIGTERM: saved at step" in said[0]
    step = max(int(path.name) for path in (folder / "stopped" / "checkpoints").iterdir())
    assert f"saved at step {step} of 6" in said[0] and step < 6
    assert [line["step"] for line in lines(folder / "stopped")] == list(range(1, step + 1))
    assert f"continuing from step {step} in" in logs[0] and "continuing" not in logs[1]
    assert all("result: 6" in log for log in logs)
    assert sorted(path.name for path in (folder / "many" / "heartbeats").iterdir()) == ["0.json", "1.json"]

    whole_rows = of_two_processes(folder, mesh=MeshConfig(), keep=9)
    training.train(whole_rows, folder / "stopped")  # eight devices in one process, every row on one of them
    training.train(whole_rows, folder / "one")
    alone = untimed(lines(folder / "one"))
    run = {
        name: json.loads((folder / name / "checkpoints/6/run/data.json").read_text())
        for name in ("many", "stopped", "one")
    }
    for name in ("many", "stopped"):
        log = untimed(lines(folder / name))
        assert [line["step"] for line in log] == [line["step"] for line in alone]
        for a, b in zip(log, alone, strict=True):  # the same rows, so exactly as many labels
            assert a.get("labels") == b.get("labels") and a.get("valid_labels") == b.get("valid_labels")
            # Devices of two processes are summed in another order; Adam turns that into up to a rate (0.01) where a
            # gradient is about zero.
            np.testing.assert_allclose(a.get("loss", 0), b.get("loss", 0), rtol=1e-3)
        assert log[0]["loss"] == pytest.approx(alone[0]["loss"], rel=1e-5)
        assert run[name]["data"] == run["one"]["data"]


@pytest.mark.breadth
def test_two_validate_fit_and_hash_a_part_each_with_the_figures_of_one(both, capsys):
    folder, logs = both
    run = of_two_processes(folder, mesh=MeshConfig())
    with jprm.Trainer(dataclasses.replace(run, probe_rows=16)) as trainer:
        alone = trainer.evaluate()
    assert capsys.readouterr().out.splitlines()[-1] in logs[0].splitlines()  # as many labelled steps, the same AUROC
    digests = data_digests({name: path_of(folder / name) for name in ("train.jsonl", "valid.jsonl")})
    for log in logs:
        (part,) = (json.loads(line.removeprefix("part:")) for line in log.splitlines() if line.startswith("part:"))
        assert part["values"] == pytest.approx(alone, rel=1e-5)
        assert (part["records"], part["files"], part["digests"]) == (6, 1, digests)  # of 12 records and 2 files


@pytest.mark.breadth
def test_two_score_the_same_bytes_as_one(both):
    folder, logs = both
    alone = (folder / "alone.jsonl").read_bytes()
    assert (folder / "scored.jsonl").read_bytes() == (folder / "continued.jsonl").read_bytes() == alone
    assert "150 records scored (64 were there already)" in logs[0]
    assert not (folder / "never.jsonl").exists()  # one could not score a record


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("2", "INDEX/COUNT@HOST:PORT"),
        ("1/2@host", "neither"),
        ("2/2@host:1", "2 processes"),
        ("auto", "coordinator_address"),
    ],
)
def test_a_start_that_cannot_be_is_refused(where, message):
    code = "import sys; from jprm import multihost; multihost.start(sys.argv[1])"
    if where != "auto":  # which asks jax, and jax only asks in a process of its own
        refused(ValueError, message.replace(".", r"\."), multihost.start, where)
        return
    run = subprocess.run([sys.executable, "-c", code, where], capture_output=True, text=True, timeout=300)
    assert run.returncode == 1 and message in run.stderr


def test_a_process_that_stays_alone_says_what_to_check():
    code = "import sys; from jprm import multihost; multihost.start('1/2@localhost:9', together=1); print('on')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout) == (142, "")
    assert "--distributed" in run.stderr


def test_one_process_asks_nobody(tiny_run):
    assert multihost.is_first() and multihost.first(lambda: 3) == 3 and multihost.everywhere(True)
    assert jprm.load(tiny_run.folder).step == 6
