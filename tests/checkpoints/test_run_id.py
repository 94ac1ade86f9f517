"""A checkpoint, a calibration and results belong to the run that made them, wherever they are copied."""

import dataclasses
import json
import shutil

import pytest
from refusing import refused

import jprm
from jprm.checkpoints.store import claim
from jprm.experiment import ID, RUN, read, run_id
from jprm.io.storage import path_of
from jprm.methods.jobs.calibration_map import NAME, store_calibration, stored_calibration
from jprm.tokenizer import load_tokenizer

MAP = {"kind": "temperature", "slope": 1.0, "intercept": 0.0}


@pytest.fixture
def copy(tiny_run, tmp_path):
    """A copy of a run, and a function that changes the ids in its experiment and its checkpoints; None removes one."""
    folder = tmp_path / "copy"
    shutil.copytree(tiny_run.folder, folder)
    checkpoints = dict.fromkeys((folder / "checkpoints").glob("*/run/*.json"), "checkpoint")

    def ids(**changes):
        for file, name in {folder / RUN: "run", **checkpoints}.items():
            values, id = json.loads(file.read_text()), changes[name]
            values.pop(ID)
            file.write_text(json.dumps(values | ({ID: id} if id else {})))

    return folder, ids


@pytest.mark.parametrize(
    ("run", "checkpoint", "good"),
    [("a" * 16, "a" * 16, True), (None, None, True), ("a" * 16, "b" * 16, False), ("a" * 16, None, False),
     (None, "b" * 16, False)],
)  # fmt: skip
def test_a_checkpoint_is_read_in_its_own_run_only(copy, tiny_run, one_device, run, checkpoint, good):
    """Runs of earlier releases have no id, nor do their checkpoints."""
    folder, ids = copy
    assert len(run_id(path_of(folder))) == 16
    ids(run=run, checkpoint=checkpoint)
    if good:
        assert jprm.load(folder).step == jprm.load(tiny_run.folder).step
        return
    both = f"run {checkpoint or 'without id'} .* is the run {run or 'without id'}"
    refused(ValueError, both, jprm.load, folder)
    refused(ValueError, both, jprm.Trainer, read(folder / RUN), folder)


def test_an_id_is_drawn_at_the_start_and_stays(tiny_run, tmp_path, copy):
    tokenizer, experiment = load_tokenizer(tiny_run.folder), read(tiny_run.folder / RUN)
    started = [claim(path_of(tmp_path / name), experiment, tokenizer) for name in "ab"]
    assert started[0] != started[1] and run_id(path_of(tmp_path / "a")) == started[0]
    folder, ids = copy
    assert claim(path_of(folder), dataclasses.replace(experiment, log_every=7), tokenizer) == run_id(
        path_of(tiny_run.folder)
    )
    assert read(folder / RUN).log_every == 7
    ids(run=None, checkpoint=None)
    assert claim(path_of(folder), experiment, tokenizer) == "" == run_id(path_of(folder))


def test_a_calibration_of_another_run_is_refused(copy, one_device):
    folder, _ = copy
    prm = jprm.load(folder)
    store_calibration(prm, MAP, ["x.jsonl"], "drop")
    assert stored_calibration(prm).to_json() == MAP
    record = json.loads((folder / NAME).read_text())
    (folder / NAME).write_text(json.dumps(record | {"run": "b" * 16}))
    refused(ValueError, f"{'b' * 16}, and the model is {run_id(path_of(folder))}", stored_calibration, prm)
    del record["run"]
    (folder / NAME).write_text(json.dumps(record))  # as an earlier release wrote it
    assert stored_calibration(prm).to_json() == MAP
