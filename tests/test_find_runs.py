"""Runs are found at any depth, and none within another."""

import json
import os

from buckets import in_memory
from refusing import refused

from jprm.apps.cli import main
from jprm.apps.report.runs import METRICS, find_runs, left_out
from jprm.experiment import RUN
from jprm.io.storage import path_of


def test_nested_runs(place):
    for name in ("b", "a/deep/er", "a/deep/er/checkpoints/1", "c"):
        (place / name).mkdir(parents=True, exist_ok=True)
        (place / name / RUN).write_bytes(b"{}")
    (place / "d").mkdir(exist_ok=True)
    (place / "d" / "notes.txt").write_bytes(b"x")
    assert find_runs([place]) == [place / "a/deep/er", place / "b", place / "c"]
    assert find_runs([place / "b", place / "a"]) == [place / "b", place / "a/deep/er"]
    refused(FileNotFoundError, "d", find_runs, [place / "d"])


@in_memory
def test_a_bucket_of_runs_is_compared_like_a_folder(tiny_run, bucket, tmp_path, capsys):
    for rate in ("0.01", "0.02"):
        for folder in (path_of(tmp_path / "runs"), bucket):
            run = folder / f"rate={rate}"
            run.mkdir(parents=True, exist_ok=True)
            for name in (RUN, "metrics.jsonl", "result.json"):
                text = (tiny_run.folder / name).read_text().replace('"learning_rate": 0.01', f'"learning_rate": {rate}')
                (run / name).write_bytes(text.encode())
    reports = []
    for name, folder in (("disk", tmp_path / "runs"), ("bucket", bucket)):
        assert main(["runs", str(folder), "--output", str(tmp_path / f"{name}.json")]) in (0, None)
        reports.append((tmp_path / f"{name}.json").read_text().replace(str(folder), "RUNS"))
        assert "rate=0.02" in capsys.readouterr().out
    assert json.loads(reports[0]) == json.loads(reports[1])


def test_what_is_not_shown_is_told_with_the_reason(place):
    for name, file in (("a", RUN), ("a/prm/10", RUN), ("b", RUN), ("half", METRICS)):
        (place / name).mkdir(parents=True, exist_ok=True)
        (place / name / file).write_bytes(b"{}")
    told = dict(left_out([place], find_runs([place])))
    assert set(told) == {os.fspath(place / "a/prm/10"), os.fspath(place / "half")}
    assert os.fspath(place / "a") in told[os.fspath(place / "a/prm/10")]
    named = [place, place / "a/prm/10"]
    assert set(dict(left_out(named, find_runs(named)))) == {os.fspath(place / "half")}
