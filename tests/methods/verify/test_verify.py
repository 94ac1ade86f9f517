"""`jprm label verify` and `jprm label teacher`, from file to file."""

import dataclasses
import os

import numpy as np
import pytest
import tiny_run as tiny

from jprm import loading
from jprm.apps import cli
from jprm.io.jsonl import write_records
from jprm.methods.label import jobs as files
from jprm.methods.verify import Verdict, sandbox
from jprm.tree import read_records

RECORDS = [
    {"problem": "p", "steps": ["2 + 2 = 4", "so 4 * 3 = 11", "fine"], "labels": [1, 1, None], "id": "a"},
    {"problem": "q", "samples": [{"steps": ["1 + 1 = 2"], "correct": True}, {"steps": ["1 + 1 = 3"]}], "answer": 2},
    {"problem": "r", "nodes": [{"parent": -1, "text": "5 - 1 = 4", "label": 0, "origin": "human"}]},
]


@pytest.fixture
def folder(tmp_path):
    write_records(tmp_path / "in.jsonl", RECORDS)
    return tmp_path


def run(folder, *options, input="in.jsonl", status=0):
    args = ["--input", str(folder / input), "--output", str(folder / "out.jsonl")]
    assert cli.main(["label", *options, *args]) == status


def test_arithmetic(folder):
    run(folder, "verify", "--kind", "arithmetic")
    chain, pool, tree = read_records(folder / "out.jsonl")
    assert chain == {
        "problem": "p",
        "nodes": [
            {"parent": -1, "text": "2 + 2 = 4", "label": 1, "origin": "formal", "checked": 1},
            {"parent": 0, "text": "so 4 * 3 = 11", "label": 0, "origin": "formal", "checked": 1, "false": "4 * 3 = 11"},
            {"parent": 1, "text": "fine", "checked": 0},
        ],
        "id": "a",
    }
    seen = [(node["parent"], node["label"], node.get("correct")) for node in pool["nodes"]]
    assert seen == [(-1, 1, True), (-1, 0, None)]
    assert tree["nodes"] == [{"parent": -1, "text": "5 - 1 = 4", "label": 1, "origin": "formal", "checked": 1}]


def test_a_killed_run_continues_where_it_was(folder, monkeypatch):
    """The tree that was cut off in the middle of its line is checked again, those before it are not."""
    seen = []

    def checker(kind, **_):
        def check(tree):
            if tree.problem == "r" and len(seen) < 3:
                raise KeyboardInterrupt
            seen.append(tree.problem)
            return [Verdict(1, 1)] * len(tree.nodes)

        return check

    monkeypatch.setattr(files, "checker", checker)
    with pytest.raises(KeyboardInterrupt):
        files.label_verify("arithmetic", folder / "in.jsonl", folder / "out.jsonl")
    part = folder / "out.jsonl.part"
    part.write_bytes(part.read_bytes()[:-10])
    assert not (folder / "out.jsonl").exists()
    seen.append("killed")
    counts = files.label_verify("arithmetic", folder / "in.jsonl", folder / "out.jsonl")
    assert seen == ["p", "q", "killed", "q", "r"]
    assert counts == {"trees": 3, "correct": 6, "incorrect": 0, "not checkable": 0} and not part.exists()
    assert [record["problem"] for record in read_records(folder / "out.jsonl")] == ["p", "q", "r"]
    assert files.label_verify("arithmetic", folder / "in.jsonl", folder / "out.jsonl") == counts
    assert len(seen) == 5  # a finished file is left alone


def test_code_is_refused_without_a_sandbox_unless_told(folder, capsys, monkeypatch):
    monkeypatch.setattr(sandbox, "refusal", lambda: "bwrap is not installed (Debian's package bubblewrap)")
    write_records(folder / "code.jsonl", [{"problem": "p", "steps": ["a = 1", "a = 2"], "tests": ["assert a == 1"]}])
    run(folder, "verify", "--kind", "python", input="code.jsonl", status=2)
    assert "installed" in capsys.readouterr().err and set(os.listdir(folder)) == {"in.jsonl", "code.jsonl"}
    run(folder, "verify", "--kind", "python", "--unsafe-no-sandbox", input="code.jsonl")
    (tree,) = read_records(folder / "out.jsonl")
    assert [node.get("label") for node in tree["nodes"]] == [1, 0] and tree["tests"] == ["assert a == 1"]


@pytest.mark.skipif(sandbox.refusal() is not None, reason=f"needs a sandbox: {sandbox.refusal()}")
def test_a_record_without_tests_is_named_before_any_code_runs(folder, capsys):
    run(folder, "verify", "--kind", "python", status=2)
    assert "in.jsonl" in capsys.readouterr().err
    assert not (folder / "out.jsonl.part").exists()


@dataclasses.dataclass
class Teacher:
    """Scores a step by its length."""

    semantics: str = "rating"
    name: str = "/runs/teacher"
    step: int = 7
    calls: int = 0

    def score_trees(self, trees):
        self.calls += 1
        return [np.array([len(node.text) / 100 for node in tree.nodes], np.float32) for tree in trees]


@pytest.fixture
def identified(monkeypatch):
    """A teacher without parameters is identified by its name and step."""
    monkeypatch.setattr(files, "identity", lambda prm: {"model": prm.name, "step": prm.step})


@pytest.mark.usefixtures("identified")
@pytest.mark.parametrize(("semantics", "said"), [("rating", "correctness"), ("value", "value")])
def test_a_teacher_gives_its_scores(folder, monkeypatch, capsys, semantics, said):
    teacher = Teacher(semantics)
    monkeypatch.setattr(loading, "load", lambda folder, **_: teacher)
    run(folder, "teacher", "--model", "teacher")
    for record in read_records(folder / "out.jsonl"):
        assert record.get("semantics", "correctness") == said
        for node in record["nodes"]:
            assert (node["label"], node["origin"]) == (len(node["text"]) / 100, "model:teacher@7")
    run(folder, "teacher", "--model", "teacher")
    assert teacher.calls == 1  # the file was finished
    teacher.step = 8
    run(folder, "teacher", "--model", "teacher", status=2)
    assert "request" in capsys.readouterr().err


@pytest.mark.usefixtures("identified")
@pytest.mark.parametrize("semantics", ["advantage", "implicit"])
def test_scores_that_are_no_probabilities_are_no_labels(folder, monkeypatch, capsys, semantics):
    # in [0, 1] all the same, as PURE's may be
    monkeypatch.setattr(loading, "load", lambda folder, **_: Teacher(semantics))
    run(folder, "teacher", "--model", "teacher", status=2)
    assert f"semantics {semantics!r}, are no probabilities" in capsys.readouterr().err
    assert not (folder / "out.jsonl").exists()


def test_a_trained_teacher_gives_its_scores(folder, tiny_run, one_device, monkeypatch):
    records = tiny.chains(3) + [tiny.pool_of(tiny.chains(2, seed=3))] + tiny.trees(2)
    write_records(folder / "in.jsonl", records)
    prm = loading.load(tiny_run.folder)
    run(folder, "teacher", "--model", str(tiny_run.folder))
    labels = []
    for record in read_records(folder / "out.jsonl"):
        assert record.get("semantics", "correctness") == "correctness"  # a probability, though trained on ratings
        assert {node["origin"] for node in record["nodes"]} == {f"model:run@{prm.step}"}
        labels.append([node["label"] for node in record["nodes"]])
    expected = []
    for record in prm.score_many(records):
        branches = record.get("samples") or [record]
        actual = [s for b in branches for s in b["scores"]] if "nodes" not in record else None
        expected.append(actual or [node["score"] for node in record["nodes"]])
    for actual, scores in zip(labels, expected, strict=True):
        np.testing.assert_array_equal(actual, scores)
