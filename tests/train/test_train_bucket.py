"""Training in a bucket: a killed run ends bit for bit like one on disk."""

import dataclasses
import functools
import json
import os
import shutil
import signal
import uuid

import pytest
import tiny_run as tiny
from buckets import in_memory, objects
from pod import Pod
from refusing import refused
from storm import Storm, steps_of, survives
from test_rl_loop import Killed
from tiny import params

from jprm.apps.cli import main
from jprm.apps.report.runs import compare
from jprm.checkpoints import store
from jprm.checkpoints.store import MARK
from jprm.io.jsonl import write_records
from jprm.io.storage import Remote
from jprm.methods.data.prepare import prepare
from jprm.methods.formats import writing
from jprm.tokenizer import load_tokenizer


def metrics(run):
    return tiny.untimed(map(json.loads, (run / "metrics.jsonl").read_bytes().splitlines()))


@pytest.mark.breadth
@in_memory
def test_a_run_that_dies_in_an_upload_continues_from_the_last_whole_checkpoint(
    tiny_run, bucket, one_device, monkeypatch
):
    """At step 6 of 6, with the files of its second checkpoint half there."""
    (bucket / "data").upload_folder(tiny_run.folder.with_name("data"))
    experiment, whole = tiny.experiment(bucket / "data"), Remote.upload

    def dying(self, file):
        if self.url.endswith(f"/6/{MARK}"):
            raise Killed
        whole(self, file)

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "upload", dying)
        with pytest.raises(Killed):
            tiny.training.train(experiment, bucket / "run")
    assert store.committed(bucket / "run/checkpoints") == [3] and (bucket / "run/checkpoints/6").is_dir()
    with pytest.raises(ValueError, match="seed: 0.*1"):
        tiny.training.train(dataclasses.replace(experiment, seed=1), bucket / "run")
    result = tiny.training.train(experiment, bucket / "run")
    assert tiny.untimed([result]) == tiny.untimed([tiny_run.result])
    assert tiny.equal(tiny.params((bucket / "run").url), tiny.params(tiny_run.folder))
    left = objects(bucket / "run")
    assert metrics(bucket / "run") == tiny.untimed(tiny.lines(tiny_run.folder))
    assert not [name for name in left if "lock" in name] and store.committed(bucket / "run/checkpoints") == [3, 6]
    assert compare([bucket.url])["runs"][0]["step"] == 6


KILLS, STEPS = 10, 76
LLAMA = dataclasses.replace(tiny.MODEL, qk_norm=False, qkv_bias=False, tied_embeddings=True)


def experiment_in(data):
    """A run with everything that it reads in a folder, prepared data and a base model among it."""
    return tiny.experiment(
        data, model=LLAMA, base=str(data / "base"), train=(str(data / "train"),), steps=STEPS, log_every=1,
        checkpoint_every=4, valid_every=8, keep=2, keep_every=16,
    )  # fmt: skip


def command(folder, experiment, workdir, pace=0.0):
    file = tiny.write_experiment(folder / "experiment.py", experiment)
    return ["-m", "storm_child", str(pace), "train", str(file), "--workdir", str(workdir)]


@pytest.mark.slow  # starts `jprm train` a dozen times
@pytest.mark.parametrize("bucket", ["s3", "gcs"], indirect=True)
def test_a_run_in_a_bucket_that_is_killed_ten_times_is_the_one_on_disk(bucket, tmp_path):
    data, local, run = tiny.make_data(tmp_path / "data"), tmp_path / "run", bucket / "run"
    writing.causal_lm(data / "base", params(LLAMA), LLAMA, load_tokenizer(data / "tokenizer.json"), 128, "float32")
    prepare("jsonl", [data / "train.jsonl"], data / "train")
    storm = Storm(tmp_path / "storm", KILLS, seed=0)
    with Pod(storm.folder / "logs", 1, 1) as pod:
        pod.complete(command(tmp_path, experiment_in(data), local))
        (bucket / "data").upload_folder(data)
        shutil.rmtree(data)
        survives(storm, pod, run, functools.partial(command, tmp_path, experiment_in(bucket / "data"), run))
    assert storm.places["all in a save"] and steps_of(run) == ([16, 32, 48, 64, 72, 76], False)
    assert tiny.equal(tiny.params(run.url), tiny.params(local)) and metrics(run) == metrics(local)
    results = [tiny.untimed([json.loads((place / "result.json").read_bytes())]) for place in (run, local)]
    assert results[0] == results[1]
    assert set(os.listdir(local)) == {name.split("/")[1] for name in objects(run)}
    write_records(tmp_path / "in.jsonl", tiny.chains(20))
    (bucket / "in.jsonl").upload(tmp_path / "in.jsonl")
    for place, model in ((bucket, run), (tmp_path, local)):
        names = ["--input", f"{place}/in.jsonl", "--output", f"{place}/out.jsonl", "--model", str(model)]
        assert main(["score", *names]) == 0
    assert (bucket / "out.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()


@pytest.mark.slow  # two processes, started three times
def test_two_processes_write_one_checkpoint_in_a_bucket(gcs, tmp_path):
    """Killed in a save, they continue, and end like two with a shared folder."""
    data, local, run = tiny.make_data(tmp_path / "data"), tmp_path / "run", Remote(f"{gcs}/{uuid.uuid4().hex}/run")
    experiment = tiny.of_two_processes(data, steps=12)
    with Pod(tmp_path / "logs", 2, 4) as pod:
        pod.complete(command(tmp_path, experiment, local))
        pod.start(command(tmp_path, experiment, run, pace=0.1))
        assert pod.until(lambda: all(steps_of(run))), pod.log()[-3000:]
        pod.signal(signal.SIGKILL)
        pod.wait()
        (whole, cut), parts = steps_of(run), objects(run / "checkpoints/4/params")
        assert len(whole) == 1 and cut
        assert {"/ocdbt.process_0", "/ocdbt.process_1"} <= {os.path.dirname(name) for name in parts}
        assert f"continuing from step {whole[0]}" in pod.complete(command(tmp_path, experiment, run))[0]
    assert tiny.equal(tiny.params(run.url), tiny.params(local)) and metrics(run) == metrics(local)


def test_several_processes_do_not_upload_from_their_disks(monkeypatch):
    monkeypatch.setattr(store.jax, "process_count", lambda: 2)
    refused(ValueError, "memory://b/run/checkpoints", store.open_checkpoints, "memory://b/run", keep=2)
