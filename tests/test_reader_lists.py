"""JSON lists as sources, with edge cases."""

import csv
import decimal
import gzip
import io
import json
from typing import Any

import pytest
from refusing import refused

from jprm.io import jsonl
from jprm.io.jsonl import Rejects
from jprm.methods.data.reader import read_items
from jprm.methods.data.readers import find
from jprm.tree import RecordError, read_records


def read(path, name="jsonl", **options):
    return [record for _, record in find(name).read(path, **options)]


LIST = '[{"problem": "p", "steps": ["a"]},\n{"problem": "q", "steps": ["b"]}\n]'


def test_a_list_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "f.json").write_text(LIST, encoding="utf-8-sig")
    assert [record["problem"] for record in read(tmp_path / "f.json")] == ["p", "q"]


@pytest.mark.parametrize("more", [LIST, "[]", "x", '{"problem": "r", "steps": ["c"]}'])
def test_what_follows_a_list_is_not_lost_in_silence(tmp_path, more):
    (tmp_path / "f.json").write_text(LIST + "\n" + more)
    refused(RecordError, "f.json:3: line", read, tmp_path / "f.json")
    with Rejects(tmp_path / "rejects") as rejects:
        records = read(tmp_path / "f.json", on_error="skip", rejects=rejects)
    assert len(records) == 2 and (tmp_path / "rejects").read_text() == f"]\n{more}\n"


ONE = {"problem": "p", "steps": ["a"]}


@pytest.mark.parametrize("indent", [None, 2])
def test_one_object_of_lists_is_their_elements(tmp_path, indent):
    """As Mr-Ben is published: a list of records for every subject."""
    content = {"logic": [ONE, ONE | {"problem": "q"}], "coding": [ONE | {"problem": "r"}]}
    (tmp_path / "f.json").write_text(json.dumps(content, indent=indent))
    assert [record["problem"] for record in read(tmp_path / "f.json")] == ["p", "q", "r"]
    (tmp_path / "f.json").write_text(json.dumps(ONE, indent=indent))
    assert read(tmp_path / "f.json") == [ONE]


def test_a_compressed_file_is_its_content_and_a_cut_one_is_refused(tmp_path):
    lines = b"".join(json.dumps(ONE | {"problem": str(i)}).encode() + b"\n" for i in range(50))
    for name, content in (("lines", lines), ("list", b"[" + lines.strip().replace(b"\n", b",") + b"]")):
        (tmp_path / name).write_bytes(zipped := gzip.compress(content))
        assert len(read(tmp_path / name)) == 50
        (tmp_path / name).write_bytes(zipped[: len(zipped) // 2])
        refused(ValueError, "is cut off", read, tmp_path / name)
    (tmp_path / "f.jsonl.gz").write_bytes(gzip.compress(lines))
    assert len(list(read_records(tmp_path / "f.jsonl.gz"))) == 50


def test_a_compressed_file_stands_for_no_more_than_a_machine_holds(tmp_path, monkeypatch):
    """Three megabytes of gzip can be three gigabytes of blanks."""
    monkeypatch.setattr(jsonl, "LINE_BYTES", 1000)
    monkeypatch.setattr(jsonl, "WHOLE_BYTES", 4000)
    line = json.dumps(ONE).encode() + b"\n"
    file = tmp_path / "f.jsonl.gz"
    file.write_bytes(gzip.compress(line * 1000))
    assert len(list(read_records(file))) == 1000
    for content in (line + b" " * 2000, line + b'"' + b"x" * 2000):
        file.write_bytes(gzip.compress(content))
        for records in (find("jsonl").read, read_records):
            refused(ValueError, "f.jsonl.gz: has more than 1,000 bytes", list, records(file))
    file.write_bytes(gzip.compress(b"[" + b",".join([line] * 1000) + b"]"))
    refused(ValueError, "f.jsonl.gz: has more than 4,000 bytes", read, file)


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 9\n"
    (tmp_path / "f.jsonl").write_text(pointer)
    for records in (find("jsonl").read, read_records):
        refused(ValueError, "git-LFS pointer", list, records(tmp_path / "f.jsonl"))


def columns(tmp_path, *items, **more):
    (tmp_path / "f.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    options: dict[str, Any] = {"problem": "q", "steps": "s"} | more
    return read(tmp_path / "f.jsonl", "columns", **options)


def test_columns_take_the_place_of_the_first_error(tmp_path):
    places = [2, "2", -1, "N/A", None, 1]
    items = [{"q": "p", "s": ["a", "b", "c"], "first": place} for place in places]
    found = columns(tmp_path, *items, first_error="first", first_step=1)
    right = [1, 1, 1]
    assert [record["labels"] for record in found] == [[1, 0, None], [1, 0, None], right, right, right, [0, None, None]]
    assert [record["first_error"] for record in found] == [1, 1, -1, -1, -1, 0]
    assert columns(tmp_path, items[0], first_error="first", first_step=0)[0]["labels"] == [1, 1, 0]
    for wrong in (4, "x", 1.5, True):
        refused(RecordError, "first", columns, tmp_path, items[0] | {"first": wrong}, first_error="first", first_step=1)
    for options in ({"first_error": "first"}, {"first_error": "first", "first_step": 0, "labels": "l"}):
        refused(ValueError, "first_error", columns, tmp_path, items[0], **options)


@pytest.mark.parametrize("none", ["N/A", "", None, "null", "none", -1, 0, "-1"])
def test_a_wrong_solution_without_a_first_error_has_no_labels(tmp_path, none):
    item = {"q": "p", "s": ["a", "b"], "first": none}
    options = {"first_error": "first", "first_step": 1, "correct": "ok"}
    for wrong in (False, 0, "wrong", "Incorrect", "no"):
        (record,) = columns(tmp_path, item | {"ok": wrong}, **options)
        assert record["labels"] == [None, None] and record["correct"] is False and "first_error" not in record
    for right in (True, 1, "correct", "Right", "yes", None):
        (record,) = columns(tmp_path, item | {"ok": right}, **options)
        assert (record["labels"], record["first_error"]) == ([1, 1], -1)
    nested = {"q": "p", "s": [["a", "b"], ["c"]], "first": [none, none], "ok": [False, True]}
    first, second = columns(tmp_path, nested, **options)
    assert first["labels"] == [None, None] and second["labels"] == [1]
    refused(RecordError, "ok", columns, tmp_path, item | {"ok": "perhaps"}, **options)


def test_benchmarks_without_a_first_error_are_not_all_right_by_themselves(tmp_path):
    item = {"problem": "p", "steps": ["a"], "label": -1, "final_answer_correct": False}
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps(item))
    refused(RecordError, "label", read, path, "processbench")
    item = {"modified_question": "p", "modified_process": ["a"], "error_steps": [], "classification": "circular"}
    path.write_text(json.dumps(item))
    refused(RecordError, "error_steps", read, path, "prmbench")
    path.write_text(json.dumps(item | {"classification": "multi_solutions"}))
    assert [record["labels"] for record in read(path, "prmbench")] == [[1]]


def test_columns_go_through_lists_of_objects(tmp_path):
    item = {"q": "p", "s": [{"text": "a", "label": 1}, {"text": "b", "label": 0}]}
    (record,) = columns(tmp_path, item, steps="s.text", labels="s.label")
    assert (record["steps"], record["labels"]) == (["a", "b"], [1, 0])
    chains = columns(tmp_path, {"q": "p", "s": [item["s"], item["s"][:1]]}, steps="s.text", labels="s.label")
    assert [(r["steps"], r["labels"]) for r in chains] == [(["a", "b"], [1, 0]), (["a"], [1])]
    refused(RecordError, "s.label", columns, tmp_path, {"q": "p", "s": ["a"]}, labels="s.label")


@pytest.mark.parametrize("name", ["jsonl", "trl"])
def test_stepwise_records_that_say_label_have_labels(tmp_path, name):
    (tmp_path / "f.jsonl").write_text(json.dumps({"prompt": "p", "completions": ["a", "b"], "label": [True, False]}))
    (record,) = read(tmp_path / "f.jsonl", name)
    assert record["labels"] == [1, 0] and "label" not in record


def test_a_list_under_a_name_is_its_items(tmp_path):
    (tmp_path / "f.json").write_text(json.dumps({"data": [ONE, ONE]}))
    assert read(tmp_path / "f.json") == [ONE, ONE]


ODD = {
    "zst": (b"\x28\xb5\x2f\xfd....", "is compressed"),
    "xz": (b"\xfd7zXZ\x00....", "is compressed"),
    "bz2": (b"BZh91AY", "is compressed"),
    "zip": (b"PK\x03\x04...", "is compressed"),
    "csv": (b"problem,steps\nx,y\n", "Is it CSV"),
    "digits": (b'{"problem": "p", "steps": ["a"], "n": ' + b"9" * 5000 + b"}", "has 5000 digits. Write one"),
    "unseen": (json.dumps({"problem": "p", "steps": ["a", "\u200b"]}).encode(), r"steps\[1\]: is empty"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_files_are_named_for_what_they_are(tmp_path, name):
    content, said = ODD[name]
    (tmp_path / "f").write_bytes(content)
    for records in (find("jsonl").read, read_records):
        refused(ValueError, said, list, records(tmp_path / "f"))


def test_decimals_of_a_table_are_numbers(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    labels = [decimal.Decimal("1.00"), decimal.Decimal("0.25")]
    table = pyarrow.table({"problem": ["p"], "steps": [["a", "b"]], "labels": [labels]})
    parquet.write_table(table, tmp_path / "f.parquet")
    (record,) = read(tmp_path / "f.parquet")
    assert record["labels"] == [1, 0.25]


def test_columns_take_signs_and_lists_of_lists(tmp_path):
    item = {"q": "p", "s": [["a", "b"], ["c"]], "l": [["+", "-"], ["+"]], "right": [False, True], "gold": "3"}
    first, second = columns(tmp_path, item, labels="l", correct="right", answer="gold")
    assert (first["steps"], first["labels"], first["correct"]) == (["a", "b"], [1, 0], False)
    assert (second["steps"], second["labels"], second["correct"], second["answer"]) == (["c"], [1], True, "3")
    for wrong in ({"l": [["+", "-"]]}, {"l": [["+", "?"], ["+"]]}, {"right": True}):
        refused(RecordError, "f.jsonl:1", columns, tmp_path, item | wrong, labels="l", correct="right", answer="gold")


CSV = """problem,steps,labels,note
"What is 1, twice?","[""1 + 1 = 2"", ""So 2.""]","[1, ""0""]",
p,"['a', 'b']","['true', '-']",x
q,"One. Then, two.",,
"""


@pytest.mark.parametrize(("name", "separator"), [("f.csv", ","), ("f.TSV", "\t")])
def test_csv_is_read_as_a_table(tmp_path, name, separator):
    """Lists as JSON and as pandas writes them; text with commas; a byte order mark; an empty cell is absent."""
    rows = csv.reader(io.StringIO(CSV))
    with open(tmp_path / name, "w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter=separator).writerows(rows)
    items = [json.loads(item) for _, item in read_items(tmp_path / name)]
    assert [list(item) for item in items] == [
        ["problem", "steps", "labels"], ["problem", "steps", "labels", "note"], ["problem", "steps"]
    ]  # fmt: skip
    names = {"problem": "problem", "steps": "steps", "labels": "labels"}
    first, second = (columns(tmp_path, item, **names)[0] for item in items[:2])
    assert (first["problem"], first["steps"]) == ("What is 1, twice?", ["1 + 1 = 2", "So 2."])
    assert first["labels"] == second["labels"] == [1, 0]
    assert second["steps"] == ["a", "b"]
    refused(RecordError, "labels", read, tmp_path / name, "columns")  # none is dropped in silence
    with open(tmp_path / name, "w", newline="") as file:
        csv.writer(file, delimiter=separator).writerows([row[:2] for row in csv.reader(io.StringIO(CSV))])
    assert read(tmp_path / name, "columns")[1]["steps"] == ["a", "b"]  # the usual names


@pytest.mark.parametrize("content", ["problem,steps\np\n", 'problem,steps\n"p,a\n', "problem,steps\np,a\x00\xff"])
def test_broken_csv_names_its_row(tmp_path, content):
    (tmp_path / "f.csv").write_bytes(content.encode("latin-1"))
    refused(RecordError, r"f\.csv:\d", list, read_items(tmp_path / "f.csv"))


def test_columns_of_other_names_are_told_how_to_be_read(tmp_path):
    (tmp_path / "f.jsonl").write_text(json.dumps({"question": "p", "solution": "a"}))
    named = r"`question`, `solution`.*jprm prepare columns --input"
    refused(RecordError, named, list, read_records(tmp_path / "f.jsonl"))
