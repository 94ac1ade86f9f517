"""`--limit N`: a command on the first N records of any kind of input."""

import gzip
import json

import pytest
from refusing import refused

from jprm.apps import cli
from jprm.apps.cli.arguments import first_records, of_inputs
from jprm.apps.cli.evaluate import _Copies
from jprm.io.jsonl import read_lines, write_records
from jprm.methods.data.prepare import prepare
from jprm.methods.evaluate.options import OPTIONS

RECORDS = [{"problem": f"{i} + 1?", "steps": [f"{i} + 1 = {i + 1}."], "answer": str(i + 1)} for i in range(5)]


def as_lines(path):
    write_records(path, RECORDS)


def as_list(path):
    path.write_text(json.dumps(RECORDS, indent=2))


def as_gzip(path):
    path.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in RECORDS).encode()))


def as_folder(path):
    write_records(path.with_suffix(".source"), RECORDS)
    prepare("jsonl", [path.with_suffix(".source")], path)


@pytest.mark.parametrize("write", [as_lines, as_list, as_gzip, as_folder])
@pytest.mark.parametrize("limit", [2, 5, 9])
def test_the_first_records_of_any_input_keep_their_name_and_order(write, limit, tmp_path):
    write(tmp_path / "held")
    copy = first_records(tmp_path / "held", limit, str(tmp_path / "out.jsonl.first"))
    assert [json.loads(line) for _, line in read_lines(copy)] == RECORDS[:limit] and copy.stem == "held"


def test_a_bad_record_stays_bad_and_scores_keep_their_meaning(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"problem": 1}\nnot json\n{"a": 2}\n')
    (tmp_path / "bad.jsonl.info.json").write_text('{"scale": {}}')
    copy = first_records(tmp_path / "bad.jsonl", 2, str(tmp_path / "copy"))
    assert copy.read_text() == '{"problem": 1}\nnot json\n'
    assert copy.with_name("bad.jsonl.info.json").read_text() == '{"scale": {}}'


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_is_positive(limit, tmp_path):
    as_lines(tmp_path / "held")
    refused(ValueError, f"--limit {limit}: must be 1 or more", first_records, tmp_path / "held", limit, str(tmp_path))


def test_files_of_one_name_have_copies_of_their_own_and_one_file_one_copy(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        as_lines(tmp_path / folder / "held")
    copies = _Copies(1, str(tmp_path / "out.first1"))
    first, second = copies.copy_of((tmp_path / "a" / "held", tmp_path / "b" / "held"))
    assert first != second and copies.copy_of(tmp_path / "a" / "held") == first


def test_commands_on_records_take_it(tmp_path, capsys):
    as_lines(tmp_path / "chains.jsonl")
    line = ["label", "verify", "--kind", "arithmetic", "--input", str(tmp_path / "chains.jsonl")]
    for limit in (2, 3):
        out = tmp_path / f"checked{limit}.jsonl"
        assert cli.main([*line, "--output", str(out), "--limit", str(limit)]) == 0
        assert len(list(read_lines(out))) == limit
    assert cli.main([*line, "--output", str(out), "--limit", "1"]) == 2
    assert "is there, but of another model, input or request" in capsys.readouterr().err


@pytest.mark.parametrize("text, line", [
    ("\n{good}\n{bad}\n", 3),  # after a blank line
    ("[{good},\n\n{bad}]", 3),  # a list
    ("{good}\n{good}\n{good}\n{bad}\n", None),  # beyond the limit
])  # fmt: skip
def test_errors_name_the_input_and_its_line(text, line, tmp_path, capsys):
    good, bad = json.dumps(RECORDS[0]), json.dumps({"problem": "p", "steps": []})
    (tmp_path / "a b.jsonl").write_text(text.replace("{good}", good).replace("{bad}", bad))
    command = ["label", "verify", "--kind", "arithmetic", "--input", str(tmp_path / "a b.jsonl")]
    code = cli.main([*command, "--output", str(tmp_path / "out.jsonl"), "--limit", "2"])
    error = capsys.readouterr().err
    assert code == (2 if line else 0) and ".first" not in error
    assert line is None or f"{tmp_path / 'a b.jsonl'}:{line}: steps" in error


def test_messages_name_files_beside_a_copy_as_they_are(tmp_path):
    as_lines(tmp_path / "held.jsonl")
    copy = first_records(tmp_path / "held.jsonl", 2, str(tmp_path / "out"))
    held = tmp_path / "held.jsonl"
    assert of_inputs(f"{copy}:2: steps, {copy}, {copy}. And {copy}") == f"{held}:2: steps, {held}, {held}. And {held}"
    assert of_inputs(f"{copy}.info.json, {copy}:9") == f"{copy}.info.json, {copy}:9"


def test_evaluations_take_it(tmp_path):
    turns = [{"role": "assistant", "content": "x", "label": label} for label in (1, -1)]
    runs = [{"messages": [{"role": "user", "content": f"t{i}"}, turns[i % 2]], "semantics": "rating"} for i in range(5)]
    write_records(tmp_path / "runs.jsonl", runs)
    line = ["eval", "agents", "--input", str(tmp_path / "runs.jsonl"), "--output", str(tmp_path / "report.json")]
    assert cli.main([*line, "--limit", "3"]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["first_bad"]["n"] == 1


@pytest.mark.parametrize("command", ["score", "sample", "label mc", "search best-of-n", "eval steps", "eval suite"])
def test_help_names_it(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "--help"])
    assert "--limit N" in capsys.readouterr().out.replace("INT", "N")


def test_another_output_needs_a_model(tmp_path, capsys):
    turns = [{"role": "assistant", "content": "x", "label": 1, "score": 0.5}]
    runs = [{"messages": [{"role": "user", "content": "t"}, *turns], "semantics": "rating"}]
    write_records(tmp_path / "runs.jsonl", runs)
    assert cli.main(["eval", "agents", "--input", str(tmp_path / "runs.jsonl"), "--by", "low"]) == 2
    assert "Give --model" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in OPTIONS if "model" in OPTIONS[name].__dataclass_fields__])
def test_every_benchmark_takes_an_output(name):
    assert "by" in OPTIONS[name].__dataclass_fields__
