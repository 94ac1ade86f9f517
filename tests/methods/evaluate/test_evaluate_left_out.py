"""Evaluations count records without scores, name them by file and line, and say which problems a run was trained on."""

import dataclasses
import json

import pytest
from refusing import refused
from tiny_run import experiment, make_data

from jprm.experiment import RUN, written
from jprm.io.jsonl import write_records
from jprm.methods.data.prepare import prepare
from jprm.methods.evaluate import agents, best_of_n
from jprm.methods.evaluate.options import Agents, BestOfNOptions
from jprm.methods.evaluate.run import trained_on, trained_on_words, unread_words
from jprm.methods.evaluate.scored import ScoreError


def trajectory(i, scores, judged):
    turns = [{"role": "assistant", "content": f"turn {k}", "label": [1, -1][k % 2]} for k in range(len(scores))]
    turns = [turn | ({} if score is None else {"score": score}) for turn, score in zip(turns, scores, strict=True)]
    record = {"messages": [{"role": "user", "content": f"task {i}"}, *turns], "semantics": "rating", "id": f"t{i}"}
    return record | ({"judge": {"asked": 2, "read": 1, "unreadable": 1}} if judged else {})


def pool(i, score, judged):
    scores = {} if score is None else {"scores": [score]}
    samples = [{"steps": ["a"], "correct": True, **scores}, {"steps": ["b"], "scores": [0.1], "correct": False}]
    return {"problem": f"p{i}", "answer": "1", "samples": samples} | ({"judge": {"asked": 2}} if judged else {})


def evaluated(kind, path, on_error):
    if kind == "agents":
        return agents.run(Agents(data=(path,), on_error=on_error))
    return best_of_n.run(BestOfNOptions(input=path, on_error=on_error))


@pytest.mark.parametrize("kind", ["agents", "pools"])
@pytest.mark.parametrize(
    ("judged", "on_error", "stops"),
    [(True, "stop", False), (True, "skip", False), (False, "skip", False), (False, "stop", True)],
)
def test_a_record_without_a_score_is_left_out_and_counted_by_file_and_line(tmp_path, kind, judged, on_error, stops):
    path = tmp_path / "judged.jsonl"
    records = [
        trajectory(i, [0.9, None if i == 1 else 0.2], judged)
        if kind == "agents" else pool(i, None if i == 1 else 0.9, judged)
        for i in range(4)
    ]  # fmt: skip
    write_records(path, records)
    if stops:
        refused(ScoreError, r"judged.jsonl:2: step \d: no score. .*--on-error skip", evaluated, kind, path, on_error)
        return
    report = evaluated(kind, path, on_error)
    assert report["unread"] == [f"{path}:2"]
    assert "1 left out" in unread_words(report)[0] and "judged.jsonl:2" in unread_words(report)[0]
    assert report[{"agents": "n_trajectories", "pools": "n_problems"}[kind]] == 3


def test_trajectories_without_any_score_need_none(tmp_path):
    write_records(tmp_path / "t.jsonl", [trajectory(i, [None, None], False) for i in range(3)])
    report = agents.run(Agents(data=(tmp_path / "t.jsonl",)))
    assert report["first_bad"]["n"] == 3 and not report.get("unread") and not unread_words(report)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run, as `jprm train` leaves it, and the folder with its data."""
    data = make_data(tmp_path_factory.mktemp("trained") / "data")
    run = data.with_name("run")
    run.mkdir()
    (run / RUN).write_text(written(experiment(data), None))
    return run, data


@pytest.mark.parametrize("name", ["/dev/zero", "/proc", "hf://a/b", "s3://a/../b", "\0", "deep.jsonl"])
def test_training_data_that_cannot_be_read_counts_nothing(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write_records("new.jsonl", [{"problem": "new", "steps": ["a"]}])
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "\n" + '{"question": ' * 900 + "{}" + "}" * 900 + "\n")
    run = experiment(tmp_path)
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, train=(name,)))
    (tmp_path / RUN).write_text(written(run))
    assert trained_on(tmp_path, ["new.jsonl"]) == {}


def test_the_problems_that_a_run_was_trained_on_are_counted(trained, tmp_path):
    run, data = trained
    (train,) = json.loads((run / RUN).read_text())["data"]["train"]
    records = [json.loads(line) for line in open(train)]
    problems = len({record["problem"] for record in records})
    write_records(tmp_path / "some.jsonl", [*records[:4], {"problem": "new", "steps": ["a"]}])
    write_records(tmp_path / "new.jsonl", [{"problem": "new", "steps": ["a"]}])
    prepare("jsonl", [train], tmp_path / "prepared")
    seen = trained_on(run, [train, tmp_path / "some.jsonl", tmp_path / "new.jsonl", tmp_path / "prepared"])
    some = {record["problem"] for record in records[:4]}
    assert seen["some"] == {"problems": len(some) + 1, "seen": len(some)}
    assert seen["prepared"] == {"problems": problems, "seen": problems} and "new" not in seen
    lines = trained_on_words({"trained_on": seen})
    assert any(f"some: {len(some)} of {len(some) + 1} problems are in data.train of this run" in line for line in lines)


def test_training_data_that_are_gone_are_known_by_their_path(trained, tmp_path):
    run, data = trained
    other = tmp_path / "run"
    other.mkdir()
    gone = tmp_path / "gone.jsonl"
    (other / RUN).write_text((run / RUN).read_text().replace(str(data), str(tmp_path)))
    (path,) = json.loads((other / RUN).read_text())["data"]["train"]
    write_records(path, [{"problem": "p", "steps": ["a"]}])
    write_records(gone, [{"problem": "q", "steps": ["a"]}])
    assert trained_on(other, [path]) and not trained_on(other, [gone]) and not trained_on(None, [path])
    assert trained_on(tmp_path / "published", [path]) == {}
