"""Parquet and Arrow: the same records as from JSON, in bounded memory, and errors that name file and row."""

import functools
import hashlib
import http.server
import itertools
import json
import threading

import pyarrow
import pytest
from pyarrow import ipc, parquet
from refusing import refused

from jprm.apps import cli
from jprm.data import load
from jprm.io import jsonl
from jprm.methods.data import reader
from jprm.methods.data.overlap import problems_in
from jprm.methods.data.prepare import resolved
from jprm.methods.data.reader import read_items
from jprm.methods.data.readers import find
from jprm.tree import RecordError

CHAIN = {"problem": "p", "steps": ["a", "b\u00e9"], "labels": [1.0, None]}
STEPWISE = [
    {"prompt": "p", "completions": ["a", "b"], "labels": [True, False]},
    {"prompt": "q", "completions": ["c"], "labels": [True]},
]


def as_parquet(path, items, **options):
    parquet.write_table(pyarrow.Table.from_pylist(items), path, **options)
    return path


def as_arrow(path, items):
    table = pyarrow.Table.from_pylist(items)
    with ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=2)
    return path


def as_stream(path, items):
    """As Hugging Face's `datasets` stores what it has loaded."""
    table = pyarrow.Table.from_pylist(items)
    with ipc.new_stream(path, table.schema) as file:
        file.write_table(table, max_chunksize=2)
    return path


WRITERS = [as_parquet, as_arrow, as_stream]


def read(name, path, **options):
    return [record for _, record in find(name).read(path, **options)]


def without_nulls(value):
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("as_table", WRITERS)
@pytest.mark.parametrize(
    ("name", "file", "options"),
    [
        ("math_shepherd", "samples/math_shepherd_raw.jsonl", {}),
        ("prm800k", "samples/prm800k_raw.jsonl", {"human_written": "positive", "control_questions": "drop"}),
        ("prm800k", "prm800k/phase2_sample.jsonl", {"human_written": "unlabelled", "control_questions": "keep"}),
        ("processbench", "processbench/gsm8k.json", {}),
        ("prmbench", "prmbench/prm800k_test_p1_4o_circular.jsonl", {"outside": "ignore"}),
        ("pools", "pools/gsm8k_chatgpt_n19.jsonl", {}),
    ],
)
def test_a_table_gives_the_records_of_its_json(tmp_path, shared_data, as_table, name, file, options):
    """But for null fields, since a table cannot tell them from absent ones."""
    raw = [line for _, line in itertools.islice(read_items(shared_data / file), 20)]
    (tmp_path / "f.jsonl").write_bytes(b"".join(line.strip().replace(b"\n", b" ") + b"\n" for line in raw))
    path = as_table(tmp_path / "table", [json.loads(line) for line in raw])
    expected = read(name, tmp_path / "f.jsonl", **options)
    assert len(expected) == len(raw) - (name == "prm800k" and "samples" in file)
    assert without_nulls(read(name, path, **options)) == without_nulls(expected)
    assert problems_in(path) == problems_in(tmp_path / "f.jsonl")


def test_trl_prompts_may_be_messages(tmp_path):
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "p"}]
    path = as_parquet(tmp_path / "f.parquet", [STEPWISE[0] | {"prompt": prompt}])
    (record,) = read("trl", path)
    assert record == {"problem": "p", "steps": ["a", "b"], "labels": [1, 0], "prompt": prompt, "system": "Be brief."}
    (tmp_path / "f.jsonl").write_text(json.dumps(record) + "\n")
    assert read("jsonl", tmp_path / "f.jsonl") == [record]  # what was written is read again
    assert problems_in(path) == {"p"}
    for bad, reason in (
        ([{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}], r"prompt\[1\].role"),
        ([{"role": "system", "content": "p"}], "problem"),
    ):
        refused(RecordError, rf"f.parquet:1: {reason}", read, "trl", as_parquet(path, [STEPWISE[0] | {"prompt": bad}]))


@pytest.mark.parametrize("as_table", WRITERS)
def test_rows_are_numbered_across_batches_and_row_groups(tmp_path, monkeypatch, as_table):
    monkeypatch.setattr(reader, "BATCH", 3)
    rows = [{"problem": f"p{i}", "steps": ["a"]} for i in range(8)]
    more = {"row_group_size": 5} if as_table is as_parquet else {}
    path = as_table(tmp_path / "table", rows, **more)
    assert [(number, json.loads(raw)) for number, raw in read_items(path)] == list(enumerate(rows, start=1))
    path = as_table(path, [*rows, {"problem": "", "steps": ["a"]}, {"problem": "r"}], **more)
    refused(RecordError, "table:9: problem", read, "jsonl", path)
    with jsonl.Rejects(tmp_path / "rejects") as rejects:
        records = list(find("jsonl").read(path, on_error="skip", rejects=rejects))
    assert [key for key, _ in records] == [f"{i}.0" for i in range(1, 9)]
    assert (tmp_path / "rejects").read_text() == '{"problem": "", "steps": ["a"]}\n{"problem": "r"}\n'


def test_a_large_table_is_read_a_row_group_at_a_time(tmp_path):
    """The first of 16 row groups of 1 MB is read without the others' memory."""
    table = pyarrow.table({"problem": [f"{i:04}" + "x" * 1020 for i in range(16 * 1024)]})
    parquet.write_table(table, tmp_path / "f.parquet", row_group_size=1024, use_dictionary=False, compression="none")
    del table
    before = pyarrow.total_allocated_bytes()
    rows = reader.read_rows(tmp_path / "f.parquet")
    peak = max(pyarrow.total_allocated_bytes() - before for _ in itertools.islice(rows, 4096))
    assert 0 < peak < 6e6


@pytest.mark.parametrize("as_table", WRITERS)
def test_a_broken_table_is_refused_with_its_row(tmp_path, as_table):
    path = as_table(tmp_path / "table", [CHAIN] * 5)
    whole = path.read_bytes()
    for cut in (12, len(whole) // 2, len(whole) - 20):
        path.write_bytes(whole[:cut])
        refused(RecordError, "table:[1-5]: row", read, "jsonl", path)


@pytest.mark.parametrize(("value", "kind"), [(b"\x00", "bytes"), (float("nan"), "NaN")])
def test_values_that_json_lacks_are_refused_with_their_row(tmp_path, value, kind):
    path = as_parquet(tmp_path / "f.parquet", [CHAIN | {"image": None}, CHAIN | {"image": value}])
    refused(RecordError, rf"f.parquet:2: .*{kind}", read, "jsonl", path)


def test_a_table_in_place_of_json_lines_names_what_reads_it(tmp_path):
    for as_table in WRITERS:
        path = as_table(tmp_path / "table", [CHAIN])
        refused(ValueError, "Parquet", load, path)


FREE = {"question": {"text": "p"}, "cot": ["a", "b"], "ok": [True, False], "gold": "3", "right": True, "id": 7}
NAMES = {"problem": "question.text", "steps": "cot", "labels": "ok", "answer": "gold", "correct": "right"}


def test_columns_of_any_name(tmp_path):
    path = as_parquet(tmp_path / "f.parquet", [FREE])
    chain = {"problem": "p", "steps": ["a", "b"], "labels": [1.0, 0.0], "answer": "3", "correct": True, "id": 7}
    assert read("columns", path, **NAMES) == [chain | {"semantics": "correctness"}]
    assert read("columns", path, **NAMES, semantics="value") == [chain | {"semantics": "value"}]
    (split,) = read("columns", as_parquet(path, [{"q": "p", "text": "One.\n\nTwo."}]), problem="q", steps="text")
    assert split["steps"] == ["One.", "Two."] and split["segmentation"] == "paragraphs"


def test_a_column_that_is_not_there_shows_those_that_are(tmp_path):
    path = as_parquet(tmp_path / "f.parquet", [FREE])
    refused(RecordError, "f.parquet:1: answers: .*gold='3'", read, "columns", path, **NAMES | {"answer": "answers"})
    refused(RecordError, "f.parquet:1: steps: .*cot=", read, "columns", path, problem="question.text")


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("hf://datasets/o/n/data/a b.parquet", "o/n/resolve/main/data/a%20b.parquet"),
        ("hf://datasets/o/n@v1.0/f.parquet", "o/n/resolve/v1.0/f.parquet"),
        ("hf://datasets/o/n@refs/convert/parquet/d/0.parquet", "o/n/resolve/refs%2Fconvert%2Fparquet/d/0.parquet"),
    ],
)
def test_addresses_of_the_hub(monkeypatch, address, path):
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    assert resolved(address) == f"https://huggingface.co/datasets/{path}"


@pytest.mark.parametrize(
    "address", ["hf://o/n/f.parquet", "hf://datasets/o/n", "hf://datasets/n/", "hf://models/o/n/f"]
)
def test_a_malformed_address_of_the_hub_shows_the_form(address):
    refused(ValueError, "hf://", resolved, address)


def test_a_file_of_the_hub_is_downloaded_with_its_checksum(tmp_path, monkeypatch, capsys):
    """From a stub of the Hub, which answers at the path that the Hub has."""
    folder = tmp_path / "hub" / "datasets" / "o" / "n" / "resolve" / "abc" / "data"
    folder.mkdir(parents=True)
    right = hashlib.sha256(as_parquet(folder / "f.parquet", STEPWISE).read_bytes()).hexdigest()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "hub")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
        source = "hf://datasets/o/n@abc/data/f.parquet"
        command = ["prepare", "trl", "--input", source, "--output", str(tmp_path / "out")]
        assert cli.main(command) == 2
        assert f"{source}: no SHA-256 is known for it" in capsys.readouterr().err
        assert cli.main([*command, "--sha256", right]) == 0
        server.shutdown()
    assert [record["problem"] for record in load(tmp_path / "out")] == ["p", "q"]


def one_text(path, rows, text):
    """A table whose column `problem` is one text of a dictionary in all rows."""
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), pyarrow.array([text]))
    table = pyarrow.table({"problem": column, "id": range(rows)})
    if path.suffix == ".parquet":
        parquet.write_table(table, path, compression="zstd", dictionary_pagesize_limit=2**30, store_schema=False)
    else:
        with ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    return path


@pytest.mark.parametrize("name", ["f.parquet", "f.arrow"])
def test_a_text_that_all_rows_share_is_decoded_for_a_few_rows_at_a_time(tmp_path, monkeypatch, name):
    """600 rows of 100 kB from a file of at most 110 kB: 512 rows at a time would take 51 MB."""
    monkeypatch.setattr(jsonl, "WHOLE_BYTES", 2**20)
    path = one_text(tmp_path / name, 600, "a" * 100_000)
    assert path.stat().st_size < 120_000
    parts = list(reader._batches(str(path)))
    assert {len(rows) for rows in parts} <= set(range(1, 12)) and [row["id"] for rows in parts for row in rows] == [
        *range(600)
    ]
    assert all(row["problem"] == "a" * 100_000 for rows in parts for row in rows)


def test_parquet_pages_and_rows_beyond_the_limits_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "WHOLE_BYTES", 2**20)
    monkeypatch.setattr(reader, "PAGE_ROW_BYTES", 2**12)
    items = [{"problem": f"{i}" + "a" * 100_000, "steps": ["a"]} for i in range(40)]
    zipped = {"compression": "zstd", "use_dictionary": False}
    bomb = as_parquet(tmp_path / "bomb.parquet", items, **zipped)
    assert bomb.stat().st_size < 20_000
    refused(RecordError, r"bomb.parquet: row group 1: size: has 4,0\d\d,\d+ bytes in 40 rows", read, "jsonl", bomb)
    assert len(read("jsonl", as_parquet(tmp_path / "f.parquet", items, row_group_size=10, **zipped))) == 40
    short = [{"problem": f"{i}" + "a" * 1000, "steps": ["a"]} for i in range(4000)]  # large, and its pages are small
    assert len(read("jsonl", as_parquet(tmp_path / "g.parquet", short, **zipped))) == 4000
    monkeypatch.setattr(jsonl, "LINE_BYTES", 90_000)
    refused(
        RecordError, r"f.parquet:1: row: has 100,\d+ bytes, more than 90,000", read, "jsonl", tmp_path / "f.parquet"
    )
