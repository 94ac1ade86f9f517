"""Folders of runs: found, compared, and swept over settings."""

import dataclasses
import json
import os
import signal

import pytest
from buckets import in_memory
from refusing import refused
from tiny_run import assert_same_run, experiment, make_data, one_device, training

from jprm.apps import cli
from jprm.apps.cli import main
from jprm.apps.cli.runs import finished, grid, run_grid
from jprm.apps.report.runs import METRICS, compare, find_runs, left_out
from jprm.experiment import RUN, load, written
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


# ---- `jprm sweep` and `jprm runs`: the grid, one compilation, a stop in the middle, and the table of both.


FILE = """
import pathlib

from jprm.experiment import OptimizerConfig
from tiny_run import experiment as tiny


def experiment():
    rates = OptimizerConfig(learning_rate=0.01, warmup_steps=1, clip_norm=0.7)
    return tiny(pathlib.Path({folder!r}), optimizer=rates, steps=3, checkpoint_every=2, log_every=1, profile=(2, 2))
"""

RATES = ("0.01", "0.02", "1e38")


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep of three rates, of which the last diverges; it was stopped in the second run, and called again."""
    folder = tmp_path_factory.mktemp("sweep")
    make_data(folder / "data")
    (folder / "e.py").write_text(FILE.format(folder=str(folder / "data")))
    steps, trained, whole = [], [], training.train

    def train(experiment, workdir):
        trained.append(workdir.name)
        preempted = len(trained) == 2
        whole(experiment, workdir, [lambda line: preempted and os.kill(os.getpid(), signal.SIGTERM)])

    line = ["sweep", folder / "e.py", "--workdir", folder / "runs", "--output", folder / "runs.json"]
    line += ["--set", f"optimizer.learning_rate={','.join(RATES)}", "seed=3"]
    with one_device(), pytest.MonkeyPatch.context() as patch:
        make_step = training.make_step
        patch.setattr(training, "make_step", lambda *args: steps.append(make_step(*args)) or steps[-1])
        patch.setattr(training, "train", train)
        with pytest.raises(SystemExit) as stop:
            cli.main(list(map(str, line)))
        statuses = stop.value.code, cli.main(list(map(str, line)))
    return folder, steps, trained, statuses


def test_a_stopped_sweep_continues_trains_nothing_twice_and_compiles_once(swept):
    folder, steps, trained, statuses = swept
    names = [f"optimizer.learning_rate={rate}" for rate in RATES]
    assert trained == [names[0], names[1], names[1], names[2]]
    assert statuses == (143, 2)  # stopped; then all ran, and one diverged
    ended = [finished(folder / "runs" / name, load(folder / "e.py", [name, "seed=3"])) for name in names]
    assert ended == [True, True, False]
    assert len(steps) == 4 and len(set(map(id, steps))) == 1 == steps[0]._cache_size()


def test_a_run_of_a_sweep_is_the_run_alone(swept, one_device, tmp_path):
    folder, _, _, _ = swept
    alone = load(folder / "e.py", ["optimizer.learning_rate=0.02", "seed=3", "profile=[0,0]"])
    training.train(alone, tmp_path / "run")
    assert_same_run(tmp_path / "run", folder / "runs/optimizer.learning_rate=0.02")
    assert not (tmp_path / "run/profile").exists()
    traces = (folder / "runs/optimizer.learning_rate=0.01/profile").rglob("*.xplane.pb")
    assert [path.stat().st_size > 0 for path in traces] == [True]


def test_the_comparison_and_its_table(swept):
    folder, _, _, _ = swept
    (folder / "runs/notes").mkdir(exist_ok=True)  # no run: left out
    assert cli.main(["runs", str(folder / "runs")]) == 0
    comparison = json.loads((folder / "runs.json").read_text())
    assert comparison == compare([folder / "runs"])
    assert comparison["differ"] == ["optimizer.learning_rate"]
    first, second, third = comparison["runs"]
    assert [run["settings"] for run in comparison["runs"]] == [
        {"optimizer.learning_rate": float(rate)} for rate in RATES
    ]
    result = json.loads((folder / "runs/optimizer.learning_rate=0.01/result.json").read_text())
    assert {**first["metrics"], "step": 3} == result and {"valid_auroc", "loss"} <= first["metrics"].keys()
    assert (first["step"], second["step"], third["steps"]) == (3, 3, 3) and third["step"] < 3


def test_a_damaged_line_is_named_and_half_a_line_is_not_there(swept, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "experiment.json").write_text((swept[0] / "runs/optimizer.learning_rate=0.01/experiment.json").read_text())
    nothing = {"folder": str(run), "step": 0, "steps": 3, "settings": {}, "metrics": {}}
    assert compare([run])["runs"][0] | {"folder": str(run)} == nothing
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    assert compare([run])["runs"][0]["metrics"] == {"loss": 0.5}
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step"\n{"step": 2}\n')
    refused(ValueError, "metrics.jsonl:2", compare, [run])
    refused(FileNotFoundError, "no run", compare, [tmp_path / "none"])


def test_the_grid_of_settings():
    points = grid(["a.b=1,2", 'data.train=["x","y"],["z"]', "c=(1,2)", 's="p,q"'])
    train = 'data.train=["x","y"]', 'data.train=["z"]'
    assert list(points.values()) == [(f"a.b={i}", path, "c=(1,2)", 's="p,q"') for i in (1, 2) for path in train]
    assert next(iter(points)) == "a.b=1,data.train=__x_,_y__"
    assert list(grid(["base=runs/a,runs/b"])) == ["base=runs_a", "base=runs_b"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["a"], "form"),
        (["a=1,,2"], "form"),
        (["a="], "form"),
        (["a=1", "b=2"], "several"),
        (["base=x/y,x_y"], "characters"),
    ],
)
def test_a_grid_that_is_none_is_refused(settings, message):
    refused(ValueError, message, grid, settings)


def test_a_wrong_value_is_refused_before_anything_runs(swept, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "train", None)
    refused(ValueError, "seed", run_grid, swept[0] / "e.py", ["seed=1,x"], tmp_path)
    refused(ValueError, r"profile=\(3, 2\)", run_grid, swept[0] / "e.py", ["profile=[1,2],[3,2]"], tmp_path)


@pytest.mark.parametrize(
    ("head", "log_ratio", "command"),
    [("binary", None, "score --model"), ("language", None, "sample --policy"), ("language", 0.05, "score --model")],
)
def test_the_next_command_of_a_policy_samples_and_of_a_prm_scores(head, log_ratio, command, tmp_path):
    config = experiment(tmp_path)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, head=head))
    (tmp_path / RUN).write_text(written(config, log_ratio))
    assert cli.follow_up(tmp_path).startswith(f"{command} {tmp_path} ")
