"""Trackers: they get every number of the log, go on with the same run, and cannot cost one."""

import dataclasses
import json
import math
import shutil
import sys

import pytest
from refusing import refused
from tiny_run import assert_same_run, lines, training

from jprm.train import callbacks
from jprm.train.callbacks import TrackedRun, Trackers

MINE, BROKEN = "test_trackers:Recorder", "test_trackers:Broken"
CONFIG = {"experiment": {"name": "n", "optimizer": {"learning_rate": 0.1}}, "versions": {"commit": "abc"}}


class Recorder:
    """A tracker of the test's own."""

    opened: list["Recorder"] = []

    def __init__(self, run: TrackedRun):
        self.run, self.id, self.logged, self.status = run, run.id or f"new {len(self.opened)}", [], None
        self.opened.append(self)

    def log(self, step, values):
        self.logged.append({"step": step} | values)

    def close(self, status):
        assert self.status is None
        self.status = status


class Broken(Recorder):
    def log(self, step, values):
        super().log(step, values)
        raise ConnectionError("the server is gone")


@pytest.fixture(autouse=True)
def opened():
    Recorder.opened.clear()
    return Recorder.opened


@pytest.fixture
def stopped(tiny_run, tmp_path):
    """A run that was stopped at step 3 of 6."""
    folder = tmp_path / "run"
    shutil.copytree(tiny_run.folder, folder)
    shutil.rmtree(folder / "checkpoints" / "6")
    return folder


def test_a_continued_run_is_the_trackers_same_run(tiny_run, stopped, opened, one_device, capsys):
    """And a tracker that breaks changes nothing but its own."""
    (stopped / callbacks.IDS).write_text(json.dumps({MINE: "seventh", "other": "kept"}))
    training.train(dataclasses.replace(tiny_run.experiment, trackers=(BROKEN, MINE)), stopped)
    broken, mine = opened
    assert (mine.run.id, mine.run.step, mine.run.name, mine.status) == ("seventh", 3, "tiny", "finished")
    assert mine.run.config["experiment"]["optimizer"]["learning_rate"] == 0.01
    assert {"jax", "jprm", "commit"} <= mine.run.config["versions"].keys()
    assert mine.logged == [
        {k: v for k, v in line.items() if v is not None} for line in lines(stopped) if line["step"] > 3
    ]
    assert (len(broken.logged), broken.status) == (1, None)
    assert capsys.readouterr().out.count("the server is gone; the run goes on without it") == 1
    assert json.loads((stopped / callbacks.IDS).read_text()) == {MINE: "seventh", BROKEN: "new 0", "other": "kept"}
    assert_same_run(stopped, tiny_run.folder)


def test_a_run_that_fails_tells_its_trackers(tiny_run, stopped, opened, one_device):
    def fails(line):
        raise RuntimeError("of the callback")

    with pytest.raises(RuntimeError, match="callback"):
        training.train(dataclasses.replace(tiny_run.experiment, trackers=(MINE,)), stopped, callbacks=[fails])
    assert [tracker.status for tracker in opened] == ["failed"]


def closed(run: TrackedRun):
    raise OSError("the file store is in maintenance mode")


def test_a_tracker_that_does_not_open_is_left_out_and_only_numbers_are_logged(tmp_path, opened, capsys):
    both = Trackers(["test_trackers:closed", MINE], tmp_path, "n", CONFIG, 0)
    both.log({"step": 1, "a": 2, "b": 0.5, "c": None, "d": "x", "e": True})
    both.close("finished")
    assert (opened[0].logged, opened[0].status) == ([{"step": 1, "a": 2, "b": 0.5}], "finished")
    assert "maintenance mode" in capsys.readouterr().out


def test_an_id_is_kept_for_the_next_time(tmp_path, opened):
    for step in (0, 4):
        Trackers([MINE], tmp_path, "n", CONFIG, step).close("stopped")
    assert [(tracker.run.id, tracker.run.step) for tracker in opened] == [("", 0), ("new 0", 4)]
    assert {tracker.status for tracker in opened} == {"stopped"}


@pytest.mark.parametrize("name", ["comet", "test_trackers:CONFIG", "wandb"])
def test_a_tracker_that_is_not_there_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    refused(ValueError, f"trackers='{name}'", Trackers, [name], tmp_path, "n", CONFIG, 0)
    assert not list(tmp_path.iterdir())


def logged_twice(name, folder):
    """Logs steps 1 and 2, and in a second session, which continues from step 1, steps 2 and 3."""
    for start in (0, 1):
        tracker = Trackers([name], folder, "n", CONFIG, start)
        for step in (start + 1, start + 2):
            tracker.log({"step": step, "loss": 1 / step, "seconds": None})
        tracker.close("stopped" if start == 0 else "finished")
        assert list(tracker._open) == [name]  # nothing of it failed


def test_tensorboard(tmp_path):
    """A kill loses no step that a later run would not log again: what is logged is on disk."""
    pytest.importorskip("tensorboardX", reason="needs tensorboardX: the extra `tensorboard`")
    tracker = Trackers(["tensorboard"], tmp_path, "n", CONFIG, 0)
    tracker.log({"step": 1, "loss": 0.5})
    assert any(b"loss" in file.read_bytes() for file in (tmp_path / "tensorboard").iterdir())
    tracker.close("stopped")
    logged_twice("tensorboard", tmp_path / "twice")
    files = list((tmp_path / "twice" / "tensorboard").iterdir())
    assert files and all(b"loss" in file.read_bytes() for file in files)


def test_wandb(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb: the extra `wandb`")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged_twice("wandb", tmp_path)
    run = json.loads((tmp_path / callbacks.IDS).read_text())["wandb"]
    assert {path.name.split("-")[-1] for path in (tmp_path / "wandb").glob("offline-run-*")} == {run}


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow: the extra `mlflow`")
    monkeypatch.setattr(mlflow, "MlflowClient", lambda make=mlflow.MlflowClient: make(f"sqlite:///{tmp_path}/m.db"))
    logged_twice("mlflow", tmp_path)
    client = mlflow.MlflowClient()
    run = client.get_run(json.loads((tmp_path / callbacks.IDS).read_text())["mlflow"])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "n")
    assert run.data.params["experiment.optimizer.learning_rate"] == "0.1"
    assert run.data.tags["mlflow.source.git.commit"] == "abc"
    history = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "loss")}
    assert history.keys() == {1, 2, 3} and math.isclose(history[3], 1 / 3)
