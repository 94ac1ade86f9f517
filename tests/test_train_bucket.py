"""Training in a bucket: a killed run ends bit for bit like one on disk, and one run at a time holds the folder."""

import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid

import pytest
import tiny_run as tiny
from buckets import objects
from pod import Pod
from pod_storm import CHILD
from refusing import refused
from tiny import params

from jprm.apps.cli import main
from jprm.apps.report.runs import compare
from jprm.checkpoints import store
from jprm.checkpoints.store import MARK
from jprm.io import folders
from jprm.io.folders import BucketLock, local_copy
from jprm.io.jsonl import write_records
from jprm.io.storage import Remote
from jprm.methods.data.prepare import prepare
from jprm.methods.formats.export import writing
from jprm.tokenizer import load_tokenizer


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


@pytest.fixture(params=["memory", "s3", "gcs"])
def folder(request):
    """An empty folder of a bucket."""
    place = "memory://bucket" if request.param == "memory" else request.getfixturevalue(request.param)
    return Remote(f"{place}/{uuid.uuid4().hex}")


def upload(local, remote):
    if local.is_dir():
        remote.upload_folder(local)
    else:
        remote.upload(local)
    return remote.url


def in_bucket(experiment, folder):
    """The tiny experiment with its files in the bucket."""
    data = experiment.data
    files = {"train": data.train[0], "valid": data.valid[0], "tokenizer": experiment.tokenizer}
    urls = {key: upload(pathlib.Path(file), folder / "data" / os.path.basename(file)) for key, file in files.items()}
    data = dataclasses.replace(data, train=(urls["train"],), valid=(urls["valid"],))
    return dataclasses.replace(experiment, data=data, tokenizer=urls["tokenizer"])


def metrics(run):
    return tiny.untimed(map(json.loads, (run / "metrics.jsonl").read_bytes().splitlines()))


class Killed(BaseException):
    """No handler of the program takes it for an error."""


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
def test_a_run_that_dies_in_an_upload_continues_from_the_last_whole_checkpoint(
    tiny_run, folder, one_device, monkeypatch
):
    """At step 6 of 6, with the files of its second checkpoint half there."""
    experiment = in_bucket(tiny_run.experiment, folder)
    whole = Remote.upload

    def dying(self, file):
        if self.url.endswith(f"/6/{MARK}"):
            raise Killed
        whole(self, file)

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "upload", dying)
        with pytest.raises(Killed):
            tiny.training.train(experiment, folder / "run")
    assert store.committed(folder / "run/checkpoints") == [3] and (folder / "run/checkpoints/6").is_dir()
    with pytest.raises(ValueError, match="seed: 0.*1"):
        tiny.training.train(dataclasses.replace(experiment, seed=1), folder / "run")
    result = tiny.training.train(experiment, folder / "run")
    assert tiny.untimed([result]) == tiny.untimed([tiny_run.result])
    assert tiny.equal(tiny.params((folder / "run").url), tiny.params(tiny_run.folder))
    left = objects(folder / "run")
    assert metrics(folder / "run") == tiny.untimed(tiny.lines(tiny_run.folder))
    assert not [name for name in left if "lock" in name] and store.committed(folder / "run/checkpoints") == [3, 6]
    assert compare([folder.url])["runs"][0]["step"] == 6


def lock(folder, boot="", pid=None):
    """A lock as of a machine of this name ('' is this one)."""
    made = BucketLock(folder)
    made._me |= ({"boot": boot, "host": boot} if boot else {}) | ({"pid": pid} if pid else {})
    return made


def test_one_run_at_a_time_holds_a_bucket_s_folder(folder, monkeypatch):
    monkeypatch.setattr(folders, "BEAT", 0.05)
    monkeypatch.setattr(folders, "MISSED", 1000)  # a busy machine may miss many
    first, other = lock(folder), lock(folder, "elsewhere")
    assert first.attempt()
    with pytest.raises(ValueError, match="training.lock: .*process"):
        while not other.attempt():
            pass
    first.release()
    assert not objects(folder) and other.attempt()
    other._ended.set()  # its machine dies: no beat any more
    other._beating.join()
    monkeypatch.setattr(folders, "MISSED", 3)
    third, late = lock(folder, "third"), lock(folder, "late")
    while not third.attempt():
        pass
    with pytest.MonkeyPatch.context() as patch:  # another that found the same run gone, and comes a moment later
        (folder / "training.lock" / str(other._number)).write_bytes(b"{}")
        patch.setattr(late, "_numbers", lambda: [other._number])
        patch.setattr(late, "_gone", lambda *_: True)
        assert not late.attempt()
    assert third._mine() and not other._mine()  # at its next beat the other would end
    third.release()


def test_a_run_that_was_killed_on_this_machine_is_followed_at_once(folder):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = lock(folder, pid=dead.pid)
    left._number = 7
    left._write(3, new=True)
    new = lock(folder)
    assert new.attempt() and list(objects(folder)) == ["/training.lock/8"]
    new.release()
    assert not objects(folder)


STEPS, KILLS = 40, 10
LLAMA = dataclasses.replace(tiny.MODEL, qk_norm=False, qkv_bias=False, tied_embeddings=True)


def experiment_in(data):
    """A run with everything that it reads in a folder, prepared data and a base model among it."""
    return tiny.experiment(
        data, model=LLAMA, base=str(data / "base"), train=(str(data / "train"),), steps=STEPS, log_every=1,
        checkpoint_every=4, valid_every=8, keep=2, keep_every=16,
    )  # fmt: skip


def command(folder, experiment, workdir, pace=0.0):
    file = tiny.write_experiment(folder / "experiment.py", experiment)
    return [sys.executable, "-c", CHILD.format(pace=pace), "train", str(file), "--workdir", str(workdir)]


def steps_in(checkpoints):
    """The steps with their marker and those without it, from one listing."""
    names = {file.url.removeprefix(f"{checkpoints}/") for file in checkpoints.files()}
    steps = {name.partition("/")[0] for name in names}
    whole = {step for step in steps if f"{step}/{MARK}" in names}
    return sorted(map(int, whole)), sorted(map(int, steps - whole))


def killed(process, kind, checkpoints, rng):
    """Whether SIGKILL came, at a moment of this kind, before the process had ended. None: it may end."""
    before, began, moment, saves = steps_in(checkpoints)[0], time.monotonic(), rng.uniform(1, 12), rng.randint(0, 1)
    while process.poll() is None and time.monotonic() < began + 300:
        whole, half = steps_in(checkpoints)
        new = len(set(whole) - set(before))
        if (kind == "in a save" and half and new >= saves) or (kind == "after a save" and new):
            time.sleep(rng.uniform(0, 0.3))
            break
        if kind == "any" and time.monotonic() > began + moment:
            break
        time.sleep(0.01)
    running = process.poll() is None
    process.kill()
    process.wait()
    time.sleep(0.3)  # the server may be busy with what the process had sent
    return running


@pytest.mark.slow  # starts `jprm train` a dozen times
@pytest.mark.parametrize("folder", ["s3", "gcs"], indirect=True)
def test_a_run_in_a_bucket_that_is_killed_ten_times_is_the_one_on_disk(folder, tmp_path):
    """SIGKILL at seeded moments: at any time, while a checkpoint is written, and after it was."""
    data, rng, local = tiny.make_data(tmp_path / "data"), random.Random(0), tmp_path / "run"
    writing.causal_lm(data / "base", params(LLAMA), LLAMA, load_tokenizer(data / "tokenizer.json"), 128, "float32")
    prepare("jsonl", [data / "train.jsonl"], data / "train")
    subprocess.run(command(tmp_path, experiment_in(data), local), check=True, timeout=300)
    (folder / "data").upload_folder(data)
    shutil.rmtree(data)
    run, kills, cut, begun = folder / "run", 0, 0, None
    for _ in range(3 * KILLS):
        before, kind = steps_in(run / "checkpoints")[0], rng.choice(["any", "in a save", "after a save"])
        going = kills == KILLS
        start = command(tmp_path, experiment_in(folder / "data"), run, pace=0 if going else 0.1)
        with open(tmp_path / "log", "wb") as log:
            process = subprocess.Popen(start, stdout=log, stderr=log)
        hit = killed(process, None if going else kind, run / "checkpoints", rng)
        text = (tmp_path / "log").read_text()
        begun = re.search(r"continuing from step (\d+)", text)
        assert begun is None or int(begun[1]) == before[-1], text[-3000:]
        if not hit:
            assert process.returncode == 0, text[-3000:]
            break
        kills, (whole, half) = kills + 1, steps_in(run / "checkpoints")
        cut += bool(half)
        print(f"{kills:2} {kind}: from {before[-1:]}, whole {whole}, cut {half}", flush=True)
    assert kills == KILLS and cut and begun, (kills, cut)
    assert steps_in(run / "checkpoints") == ([16, 32, 36, 40], [])
    assert tiny.equal(tiny.params(run.url), tiny.params(local))
    assert metrics(run) == metrics(local)
    assert tiny.untimed([json.loads((run / "result.json").read_bytes())]) == tiny.untimed(
        [json.loads((local / "result.json").read_bytes())]
    )
    assert set(os.listdir(local)) == {name.split("/")[1] for name in objects(run)}
    write_records(tmp_path / "in.jsonl", tiny.chains(20))
    (folder / "in.jsonl").upload(tmp_path / "in.jsonl")
    for place, model in ((folder, run), (tmp_path, local)):
        names = ["--input", f"{place}/in.jsonl", "--output", f"{place}/out.jsonl", "--model", str(model)]
        assert main(["score", *names]) == 0
    assert (folder / "out.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()


@pytest.mark.slow  # two processes, started three times
def test_two_processes_write_one_checkpoint_in_a_bucket(gcs, tmp_path):
    """Killed in a save, they continue, and end like two with a shared folder."""
    data, local, run = tiny.make_data(tmp_path / "data"), tmp_path / "run", Remote(f"{gcs}/{uuid.uuid4().hex}/run")
    experiment = tiny.of_two_processes(data, steps=12)
    with Pod(tmp_path / "logs", 2, 4) as pod:
        pod.start(command(tmp_path, experiment, local)[1:])
        assert set(pod.wait()) == {0}, pod.log()[-3000:]
        pod.start(command(tmp_path, experiment, run, pace=0.1)[1:])
        assert pod.until(lambda: all(steps_in(run / "checkpoints"))), pod.log()[-3000:]
        pod.signal(signal.SIGKILL)
        pod.wait()
        (whole, cut), parts = steps_in(run / "checkpoints"), objects(run / "checkpoints/4/params")
        assert len(whole) == len(cut) == 1 and {"/ocdbt.process_0", "/ocdbt.process_1"} <= {
            os.path.dirname(name) for name in parts
        }
        pod.start(command(tmp_path, experiment, run)[1:])
        assert set(pod.wait()) == {0}, pod.log()[-3000:]
        assert f"continuing from step {whole[0]}" in pod.log()
    assert tiny.equal(tiny.params(run.url), tiny.params(local)) and metrics(run) == metrics(local)


def test_several_processes_do_not_upload_from_their_disks(monkeypatch):
    monkeypatch.setattr(store.jax, "process_count", lambda: 2)
    refused(ValueError, "memory://b/run/checkpoints", store.open_checkpoints, "memory://b/run", keep=2)


def test_what_a_bucket_holds_is_copied_once_and_again_when_it_changes(folder, monkeypatch, tmp_path):
    (folder / "m/a").write_bytes(b"one")
    (folder / "m/b").write_bytes(b"two")
    (folder / "m/deeper/c").write_bytes(b"three")
    here = local_copy(folder / "m")
    assert {file.name: file.read_bytes() for file in here.iterdir()} == {"a": b"one", "b": b"two"}
    assert str(here).endswith(folder.url.replace("://", "/") + "/m") and local_copy(tmp_path) == tmp_path
    assert local_copy((folder / "m/b").url).read_bytes() == b"two"
    assert [file.name for file in local_copy(folder / "m", names=["a", "none"]).iterdir()] == ["a"]
    with monkeypatch.context() as patch:
        patch.setattr(Remote, "download", lambda *_: pytest.fail("it is there"))
        assert local_copy(folder / "m") == here
    (folder / "m/b").write_bytes(b"four")
    assert (local_copy(folder / "m") / "b").read_bytes() == b"four"
    refused(FileNotFoundError, "/n", local_copy, folder / "n", names=["x", "y"])
    download = Remote.download

    def changing(self, file):
        download(self, file)
        self.write_bytes(b"longer than before")

    (folder / "m/a").write_bytes(b"five")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="m/a"):
        patch.setattr(Remote, "download", changing)
        local_copy(folder / "m/a")
