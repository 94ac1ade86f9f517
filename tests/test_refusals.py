"""Odd names and odd JSON end in one line."""

import json
import os
import resource
import subprocess
import sys
import tempfile
from typing import Any, cast

import pytest
from conftest import REPOSITORY
from refusing import refused
from test_export import untrained

from jprm import experiment
from jprm.apps import cli
from jprm.apps.report import runs
from jprm.checkpoints.safetensors import check_sums
from jprm.io.jsonl import parse
from jprm.io.shards import merge
from jprm.io.storage import path_of
from jprm.methods.data import prepare as preparing
from jprm.methods.data import stored_trees
from jprm.methods.data.prepare import prepare
from jprm.methods.evaluate.suite import read_results
from jprm.methods.export import export as exporting
from jprm.methods.export.export import export
from jprm.methods.formats.adapters import published
from jprm.methods.formats.huggingface import model_config
from jprm.methods.jobs.calibration_map import stored_calibration
from jprm.methods.label import jobs as files
from jprm.methods.policy.load import load_policy
from jprm.methods.verify import Verdict
from jprm.tokenizer import load_tokenizer
from jprm.tree import RecordError

CHAIN = json.dumps({"problem": "p", "steps": ["a"], "labels": [1]}) + "\n"


class Step1:
    """Stands in for a model; has only a folder and step 1."""

    def __init__(self, folder):
        self.name, self.step = os.fspath(folder), 1


DAMAGED: dict[str, Any] = {
    "results.json": read_results, "config.json": model_config, "tokenizer.json": load_tokenizer,
    "experiment.json": lambda folder: experiment.read(folder / "experiment.json"),
    "calibration.json": lambda folder: stored_calibration(cast(Any, Step1(folder))),
    "study.json": lambda folder: pytest.importorskip("jprm.apps.annotate.study").read(folder),
    "metrics.jsonl": lambda folder: runs.lines_of(path_of(folder / "metrics.jsonl")),
    "adapter.json": lambda folder: published.read(folder / "adapter.json"),
    stored_trees.SHARDS: stored_trees.TokenTrees,
    "s.jsonl.00000-of-00001.manifest.json": lambda folder: merge([folder / "s.jsonl.00000-of-00001"]),
}  # fmt: skip
"""Readers of files that may be damaged or come from anyone, by name."""

SUITE = {"version": 1, "model": {"name": "m", "rule": "min"}, "sections": {}, "neutral": None, "seed": 0}
SHARD = {"version": 1, "source": {"input": "x"}, "settings": {}, "counts": {}, "unit": 1, "seconds": 10**400}
TREES = {"version": stored_trees.CACHE_VERSION, "about": {}, "shards": [{"records": 10**400}]}
CONTENTS = ['{"a":' + "[" * 100_000 + "]" * 100_000 + "}", "5", "[[1]]", "{}", '{"version": 1}', "null", '"x"', "",
            *map(json.dumps, (SUITE, SUITE | {"data": [3]}, SHARD, TREES))]  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS, ids=map(str, range(len(CONTENTS))))
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_read_or_one_error_with_its_name(tmp_path, name, content):
    (tmp_path / name).write_text(content + "\n")
    (tmp_path / name.removesuffix(".manifest.json")).touch()
    try:
        DAMAGED[name](tmp_path)
    except ValueError as error:
        assert name in str(error)


def test_a_card_holds_no_number_beyond_a_float(tmp_path):
    figure = {"value": 1, "low": 0, "high": 1}
    (tmp_path / "result.json").write_text(json.dumps({"a": 10**400, "b": 0.5, "c": "x"}))
    (tmp_path / "steps.json").write_text(json.dumps({"a": figure | {"low": -(10**400)}, "b": figure}))
    assert exporting._result(path_of(tmp_path)) == {"b": "0.5"}
    assert "| b | 1 [0, 1] |" in (card := exporting._evaluations(path_of(tmp_path))) and "| a |" not in card
    for name, read in (("result.json", exporting._result), ("steps.json", exporting._evaluations)):
        for content in ("5", '{"a":' * 100_000):
            (tmp_path / name).write_text(content)
            refused(ValueError, name, read, path_of(tmp_path))


def test_a_full_standard_output_is_one_line():
    command = f"exec {sys.executable} -m jprm score --help > /dev/full"
    run = subprocess.run(command, shell=True, cwd=REPOSITORY, capture_output=True, timeout=300)
    assert (run.returncode, run.stderr) == (2, b"error: standard output: No space left on device\n")


def test_a_name_that_is_not_utf8_is_refused_before_any_work(tmp_path, capsys):
    name = os.fsdecode(b"n\xff.jsonl")
    (tmp_path / name).write_text(CHAIN)
    assert cli.main(["prepare", "jsonl", "--input", str(tmp_path / name), "--output", str(tmp_path / "out")]) == 2
    assert "n\\udcff.jsonl': is not UTF-8" in capsys.readouterr().err
    assert os.listdir(tmp_path) == [name]


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
from jprm.apps.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("limit", [1, 600])  # ArrayRecord's file, TFDS's JSON
def test_a_full_disk_ends_prepare_in_one_line(tmp_path, limit):
    (tmp_path / "in.jsonl").write_text(CHAIN * 100)
    command = [sys.executable, "-c", LIMITED.format(limit=limit), "prepare", "jsonl", "--source", "in.jsonl"]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run([*command, "--out", "out"], cwd=tmp_path, env=env, text=True, capture_output=True, timeout=300)
    said = run.stderr.splitlines()[-1]
    assert run.returncode == 2 and "Traceback" not in run.stderr
    assert said.startswith("error: out.partial") and "File too large" in said
    assert os.listdir(tmp_path) == ["in.jsonl"]
    assert prepare("jsonl", [tmp_path / "in.jsonl"], tmp_path / "out").kept == 100


@pytest.mark.parametrize("limit", [100, 20_000])  # the request, the tensors
def test_a_full_disk_ends_convert_in_one_line_and_convert_continues(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(exporting, "identity", lambda prm: {})  # it writes the tokenizer to a temporary folder
    prm, out = untrained(tmp_path / "run"), tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(cli.REFUSALS) as error:
            export(prm, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "out.partial" in cli._line(error.value) and "File too large" in cli._line(error.value)
    assert not out.exists()
    assert not list((tmp_path / "out.partial").rglob("*.partial"))
    check_sums(export(prm, out))
    assert not (tmp_path / "out.partial").exists()


def test_a_source_replaced_while_it_is_prepared_is_noticed(tmp_path, monkeypatch):
    path, other = tmp_path / "in.jsonl", tmp_path / "other"
    path.write_text(CHAIN)
    other.write_text(CHAIN * 2)
    write = preparing.write_folder
    monkeypatch.setattr(preparing, "write_folder", lambda *args: (write(*args), os.replace(other, path))[0])
    refused(ValueError, "in.jsonl", prepare, "jsonl", [path], tmp_path / "out")
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_an_input_replaced_while_it_is_labelled_is_noticed(tmp_path, monkeypatch):
    path = tmp_path / "in.jsonl"
    path.write_text(CHAIN)

    def check(tree):
        (tmp_path / "other").write_text(CHAIN * 2)
        os.replace(tmp_path / "other", path)
        return [Verdict(None)] * len(tree.nodes)

    monkeypatch.setattr(files, "checker", lambda kind, in_sandbox: check)
    refused(ValueError, "in.jsonl: .*out.jsonl.part", files.label_verify, "arithmetic", path, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_messages_are_of_bounded_length(capsys):
    refused(RecordError, "'problem'", parse, b'{"problem": "p", "problem": "q", "steps": ["s"]}', "F:1")
    text = "x" * 1_000_000
    with pytest.raises(RecordError) as error:
        parse(f'{{"{text}": 1, "{text}": 2}}'.encode(), "F:1")
    assert len(str(error.value)) < 1000
    assert cli.main(["score", "--model", text, "--input", text, "--output", "out"]) == 2
    assert len(capsys.readouterr().err) < 3000


@pytest.mark.parametrize("settings", [{"url": "http://" + "a" * 70_000}, {"prompt": "{problem}" + "x" * 1_000_000},
                                      {"temperature": 10**400}])  # fmt: skip
def test_messages_of_long_settings_are_short(tmp_path, settings):
    (tmp_path / "policy.json").write_text(json.dumps({"url": "http://localhost:1/v1", "model": "m"} | settings))
    with pytest.raises(RecordError) as error:
        load_policy(tmp_path / "policy.json")
    assert len(str(error.value)) < 1500


def test_a_pipe_as_policy_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "policy.json")
    refused(FileNotFoundError, "policy.json", load_policy, tmp_path / "policy.json")


@pytest.mark.parametrize("left", [["out.partial", "out.partial/.jprm"], ["out.partial"], []])  # in the order they go
def test_what_a_kill_left_beside_a_whole_folder_goes(tmp_path, monkeypatch, left):
    """And a preparation leaves nothing in the temporary folder."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "in.jsonl").write_text(CHAIN)
    assert prepare("jsonl", [tmp_path / "in.jsonl"], tmp_path / "out").kept == 1
    for name in left:
        (tmp_path / name).write_text("") if name.endswith(".jprm") else (tmp_path / name).mkdir()
    (tmp_path / "out.partial.lock").write_text("")
    prepare("jsonl", [tmp_path / "in.jsonl"], tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out", "tmp"] and not os.listdir(tmp_path / "tmp")
