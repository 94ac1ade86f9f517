"""Every command that reads records takes a folder of `jprm prepare` as it takes the file that it was made from."""

import json

import pytest
from refusing import refused

from jprm.io.jsonl import count, read_lines, write_records
from jprm.io.outputs import check_output, input_of
from jprm.methods.data.overlap import problems_in
from jprm.methods.data.prepare import prepare
from jprm.methods.evaluate.diagnostics import _chain_reader
from jprm.methods.evaluate.run import read_all, source
from jprm.methods.evaluate.suite import read_suite
from jprm.methods.policy.protocol import read_problems
from jprm.tree import read_records, read_trees

RECORDS = [
    {"problem": f"{i} + 1?", "steps": [f"{i} + 1 = {i + 1}.", "Done."], "labels": [1, i % 2], "scores": [0.9, 0.2],
     "answer": str(i + 1), "correct": bool(i % 2), "id": f"r{i}"}
    for i in range(6)
]  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The same records as a file and as a prepared folder."""
    folder = tmp_path_factory.mktemp("places")
    write_records(folder / "held.jsonl", RECORDS)
    prepare("jsonl", [folder / "held.jsonl"], folder / "held_out")
    return folder / "held.jsonl", folder / "held_out"


def selected(path, out):
    study = pytest.importorskip("jprm.apps.annotate.study")
    study.select_file(path, out / f"{path.name}.queue", study.SelectConfig(count=4))
    return (out / f"{path.name}.queue").read_text()


def studied(path, out):
    study = pytest.importorskip("jprm.apps.annotate.study")
    study.create(out / f"{path.name}.study", path, study.StudyConfig(annotators=("ana",)), gold=path)
    return [(out / f"{path.name}.study" / f"{pool}.jsonl").read_text() for pool in ("work", "gold")]


def prepared_again(path, out):
    prepare("jsonl", [path], out / f"{path.name}.again", exclude=[])
    return [record for record in read_records(out / f"{path.name}.again")]


def suite_read(path, out):
    (out / "suite.json").write_text(json.dumps({"neutral": "drop", "steps": {"data": [str(path)]}}))
    (place,) = read_suite(out / "suite.json").data["steps"]
    return read_all({"it": (place, source("jsonl"))})


@pytest.mark.parametrize(
    "door",
    [
        lambda path, out: [json.loads(line) for _, line in read_lines(path)],
        lambda path, out: list(read_records(path)),
        lambda path, out: list(read_trees(path)),
        lambda path, out: count(path),
        lambda path, out: sorted(problems_in(path)),
        lambda path, out: [problem for _, problem in read_problems(path)],
        selected,
        studied,
        prepared_again,
        suite_read,
    ],
)
def test_a_prepared_folder_is_read_as_its_file(places, tmp_path, door):
    file, folder = places
    assert door(folder, tmp_path) == door(file, tmp_path)


def test_a_bad_record_of_a_folder_is_named_by_its_number(places):
    refused(ValueError, r"held_out:1: first_error: is absent.*prepare processbench", _chain_reader, places[1])


def test_diagnostics_read_processbench_as_published_and_prepared(tmp_path):
    item = {"problem": "p", "steps": ["a", "b"], "label": 1, "final_answer_correct": False, "id": "x"}
    (tmp_path / "gsm8k.json").write_text(json.dumps([item]))
    prepare("processbench", [tmp_path / "gsm8k.json"], tmp_path / "folder")
    assert [_chain_reader(tmp_path / name) for name in ("gsm8k.json", "folder")] == ["processbench", "jsonl"]


def test_a_folders_report_stands_for_its_records_in_requests_and_is_no_output(places, tmp_path):
    assert input_of(places[1])["input"].endswith("held_out/report.json")
    refused(ValueError, "is an input too", check_output, places[1] / "report.json", places[1])
    refused(FileNotFoundError, "is not a prepared folder", list, read_lines_of(tmp_path))


def read_lines_of(path):
    yield from read_lines(path)
