"""Tables: every chain is a row, and other programs read what the records hold."""

import json

import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from tiny_run import chains, pool_of, trees

from jprm.apps import cli
from jprm.io.jsonl import write_records
from jprm.methods.data import tables
from jprm.tree import chains_of, tree_of

POOL = {
    "problem": "p",
    "answer": 3,
    "samples": [
        {"steps": ["a", "b"], "scores": [0.25, 1e-9], "answer": "3", "correct": True, "tokens": 7},
        {"steps": ["c"], "scores": [0.5], "answer": None, "correct": False},
    ],
    "empty_samples": 1,
}


def rows(folder):
    return pyarrow.dataset.dataset(sorted(folder.glob("*.parquet"))).to_table().to_pylist()


def test_rows_hold_what_records_hold(tmp_path):
    records = [POOL, *chains(3), *trees(2), pool_of(chains(2))]
    write_records(tmp_path / "in.jsonl", records)
    assert cli.main(["tabulate", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out"), "--rows", "3"]) == 0
    table = rows(tmp_path / "out")
    first, second, empty = table[:3]
    assert (first["steps"], first["scores"], first["answer"], first["gold"]) == (["a", "b"], [0.25, 1e-9], "3", "3")
    assert json.loads(first["rest"]) == {"tokens": 7} and first["correct"] is True
    assert (second["answer"], second["correct"], second["labels"]) == (None, False, None)
    assert (empty["steps"], empty["correct"], empty["chain"]) == ([], False, 2)
    expected = [
        (number, [tree.nodes[i].text for i in chain], [tree.nodes[i].label for i in chain])
        for number, tree in enumerate(map(tree_of, records))
        for chain in chains_of(tree)
    ]
    found = [
        (row["record"], row["steps"], row["labels"] or [None] * len(row["steps"])) for row in table if row["steps"]
    ]
    assert found == expected
    sizes = [pq.ParquetFile(file).metadata.num_rows for file in sorted((tmp_path / "out").glob("*.parquet"))]
    assert len(sizes) > 1 and sum(sizes) == len(table)  # and no record is in two files
    files = [
        {row["record"] for row in pq.read_table(file).to_pylist()} for file in (tmp_path / "out").glob("*.parquet")
    ]
    assert sum(map(len, files)) == len(records)


def test_tables_that_are_there_are_not_replaced(tmp_path, capsys):
    write_records(tmp_path / "in.jsonl", chains(2))
    command = ["tabulate", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out")]
    assert cli.main(command) == 0
    before = rows(tmp_path / "out")
    assert cli.main(command) == 2 and rows(tmp_path / "out") == before


def test_a_bad_record_leaves_no_table(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text(json.dumps(chains(1)[0]) + '\n{"problem": "p", "steps": 3}\n')
    assert cli.main(["tabulate", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert "in.jsonl:2" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("harm", ["no mark", "none"])
def test_half_a_folder_is_not_read(tmp_path, harm):
    tables.write(chains(2), tmp_path / "out")
    (tmp_path / "out" / tables.MARK).unlink()
    with pytest.raises(ValueError, match="tabulate"):
        list(tables.read(tmp_path / ("out" if harm == "no mark" else "other"), ["problem"]))
