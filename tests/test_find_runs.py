"""Runs are found at any depth, and none within another."""

import json
import os
import uuid

import pytest
from refusing import refused

from jprm.apps.cli import main
from jprm.apps.report.runs import METRICS, find_runs, left_out
from jprm.experiment import RUN
from jprm.io.storage import path_of


@pytest.fixture(params=["disk", "bucket"])
def root(request, tmp_path):
    return path_of(tmp_path if request.param == "disk" else f"{request.getfixturevalue('s3')}/{uuid.uuid4().hex}")


def test_nested_runs(root):
    for name in ("b", "a/deep/er", "a/deep/er/checkpoints/1", "c"):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / RUN).write_bytes(b"{}")
    (root / "d").mkdir(exist_ok=True)
    (root / "d" / "notes.txt").write_bytes(b"x")
    assert find_runs([root]) == [root / "a/deep/er", root / "b", root / "c"]
    assert find_runs([root / "b", root / "a"]) == [root / "b", root / "a/deep/er"]
    refused(FileNotFoundError, "d", find_runs, [root / "d"])


def test_a_bucket_of_runs_is_compared_like_a_folder(tiny_run, tmp_path, capsys):
    bucket = path_of(f"memory://bucket/{uuid.uuid4().hex}")
    for rate in ("0.01", "0.02"):
        for folder in (path_of(tmp_path / "runs"), bucket):
            place = folder / f"rate={rate}"
            place.mkdir(parents=True, exist_ok=True)
            for name in (RUN, "metrics.jsonl", "result.json"):
                text = (tiny_run.folder / name).read_text().replace('"learning_rate": 0.01', f'"learning_rate": {rate}')
                (place / name).write_bytes(text.encode())
    found = []
    for name, folder in (("disk", tmp_path / "runs"), ("bucket", bucket)):
        assert main(["runs", str(folder), "--output", str(tmp_path / f"{name}.json")]) in (0, None)
        found.append((tmp_path / f"{name}.json").read_text().replace(str(folder), "RUNS"))
        assert "rate=0.02" in capsys.readouterr().out
    assert json.loads(found[0]) == json.loads(found[1])


def test_what_is_not_shown_is_told_with_the_reason(root):
    for name, file in (("a", RUN), ("a/prm/10", RUN), ("b", RUN), ("half", METRICS)):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / file).write_bytes(b"{}")
    told = dict(left_out([root], find_runs([root])))
    assert set(told) == {os.fspath(root / "a/prm/10"), os.fspath(root / "half")}
    assert os.fspath(root / "a") in told[os.fspath(root / "a/prm/10")]
    named = [root, root / "a/prm/10"]
    assert set(dict(left_out(named, find_runs(named)))) == {os.fspath(root / "half")}
