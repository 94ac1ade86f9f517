"""Odd names and odd JSON end in one line."""

import json
import tempfile

import pytest

from jprm import experiment
from jprm.data.prepare import prepare
from jprm.evaluate.suite import read_results
from jprm.jsonl import parse
from jprm.progress import Bar
from jprm.tree import RecordError


@pytest.mark.parametrize("name", ["a{0}.jsonl", "b[/red].jsonl", "c{}.jsonl"])
def test_a_name_with_brackets_and_braces_is_shown(name):
    with Bar(f"scoring {name}", 3) as bar:
        bar.add()
        assert bar.columns[0](bar.tasks[0]).plain == f"scoring {name}"


@pytest.mark.parametrize("read", [lambda folder: read_results(folder), lambda f: experiment.read(f / "results.json")])
def test_a_hundred_thousand_brackets_are_refused(tmp_path, read):
    (tmp_path / "results.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ValueError, match="results.json: .*is not JSON"):
        read(tmp_path)


def test_a_key_that_is_there_twice_is_refused():
    with pytest.raises(RecordError, match="key 'problem' is there twice"):
        parse(b'{"problem": "p", "problem": "q", "steps": ["s"]}', "F:1")


def test_a_preparation_leaves_nothing_in_the_temporary_folder(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "in.jsonl").write_text(json.dumps({"problem": "p", "steps": ["a"], "labels": [1]}) + "\n")
    assert prepare("jsonl", [tmp_path / "in.jsonl"], tmp_path / "out").kept == 1
    assert list((tmp_path / "tmp").iterdir()) == []
