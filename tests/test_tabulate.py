"""Tables: every chain is a row, and other programs read what the records hold."""

import json
import random

import jax
import numpy as np
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from tiny_run import chains, pool_of, trees

from jprm import statistics
from jprm.apps import cli
from jprm.io.jsonl import write_records
from jprm.methods.data import tables
from jprm.methods.evaluate import calibration
from jprm.methods.evaluate.best_of_n import pools_of
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
    assert cli.main(["tabulate", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out"), "--rows", "3"]) == 0
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
    chosen = [row for row in table if row["steps"]]
    assert [(row["record"], row["steps"], row["labels"] or [None] * len(row["steps"])) for row in chosen] == expected
    sizes = [pq.ParquetFile(file).metadata.num_rows for file in sorted((tmp_path / "out").glob("*.parquet"))]
    assert len(sizes) > 1 and sum(sizes) == len(table)  # and no record is in two files
    written = (tmp_path / "out").glob("*.parquet")
    files = [{row["record"] for row in pq.read_table(file).to_pylist()} for file in written]
    assert sum(map(len, files)) == len(records)


def test_tables_that_are_there_are_not_replaced(tmp_path, capsys):
    write_records(tmp_path / "in.jsonl", chains(2))
    command = ["tabulate", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out")]
    assert cli.main(command) == 0
    before = rows(tmp_path / "out")
    assert cli.main(command) == 2 and rows(tmp_path / "out") == before


def test_a_bad_record_leaves_no_table(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text(json.dumps(chains(1)[0]) + '\n{"problem": "p", "steps": 3}\n')
    assert cli.main(["tabulate", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out")]) == 2
    assert "in.jsonl:2" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("harm", ["no mark", "none"])
def test_half_a_folder_is_not_read(tmp_path, harm):
    tables.write(chains(2), tmp_path / "out")
    (tmp_path / "out" / tables.MARK).unlink()
    with pytest.raises(ValueError, match="tabulate"):
        list(tables.trees(tmp_path / ("out" if harm == "no mark" else "other")))


def scored_pools(count, seed=0):
    """Returns scored pools of unequal sizes, some without an outcome, an answer or steps."""
    draw = random.Random(seed)
    pools = []
    for i in range(count):
        samples = []
        for _ in range(draw.randint(2, 5)):
            steps = [draw.choice(["a", "bé", "ccc"]) for _ in range(draw.randint(1, 4))]
            answer = draw.choice(["1", "1.0", "2", "50%", "0.5", None])
            sample = {"steps": steps, "scores": [round(draw.random(), 7) for _ in steps], "answer": answer}
            samples.append(sample | ({"correct": draw.random() < 0.5} if draw.random() < 0.5 else {}))
        pools.append({"problem": f"p{i % 17}", "answer": draw.choice([1, "2", 0.5]), "samples": samples})
        if draw.random() < 0.3:
            pools[-1]["empty_samples"] = draw.randint(1, 2)
    return pools


def test_best_of_n_of_tables_is_that_of_the_records(tmp_path):
    records = scored_pools(40)
    tables.write(records, tmp_path / "tables", rows=7)
    of_records, of_tables = pools_of(map(tree_of, records)), pools_of(tables.trees(tmp_path / "tables"))
    for expected, actual in zip(of_records, of_tables, strict=True):
        jax.tree.map(np.testing.assert_array_equal, expected, actual)
    write_records(tmp_path / "in.jsonl", records)
    reports = []
    for input in ("in.jsonl", "tables"):
        out = tmp_path / f"{input}.report.json"
        assert cli.main(["eval", "best-of-n", "--input", str(tmp_path / input), "--output", str(out)]) == 0
        reports.append(json.loads(out.read_text()))
    assert reports[0] == reports[1]


@pytest.mark.parametrize("harm", ["no score", "no pool", "no probability"])
def test_tables_without_what_best_of_n_needs_are_refused(tmp_path, harm, capsys):
    records = scored_pools(3)
    if harm == "no score":
        del records[1]["samples"][0]["scores"]
    elif harm == "no probability":
        records[1]["samples"][0]["scores"][0] = 1.5
    else:
        records[1] = chains(1)[0]
    tables.write(records, tmp_path / "tables")
    command = ["eval", "best-of-n", "--input", str(tmp_path / "tables"), "--output", str(tmp_path / "out.json")]
    assert cli.main(command) == 2 and "record" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def rated(count, first, kind):
    """Returns scored and labelled chains, or pools of them, of problems that are not in the order of their names."""
    draw = random.Random(first)
    records = []
    for i in range(first, first + count):
        samples = []
        for _ in range(1 if kind == "chain" else 3):
            steps = [draw.choice(["a", "bé", "ccc"]) for _ in range(draw.randint(1, 4))]
            scores = [round(draw.random(), 7) for _ in steps]
            labels = [draw.choice([1, -1, 0, None]) if draw.random() < 0.5 else int(x > 0.3) * 2 - 1 for x in scores]
            samples.append({"steps": steps, "scores": scores, "labels": labels})
        samples[0] = samples[0] if i % 5 else {key: x for key, x in samples[0].items() if key != "labels"}
        body = samples[0] if kind == "chain" else {"samples": samples}
        records.append({"problem": f"p{i * 7 % 1009}", "semantics": "rating", **body})
    return records


@pytest.mark.parametrize("kind", ["chain", "pool"])
def test_calibration_of_tables_is_that_of_the_records(tmp_path, kind):
    data, fitted = rated(60, 10, kind), rated(50, 100, kind) + rated(4, 10, kind)
    trees = [list(map(tree_of, records)) for records in (data, fitted)]
    tables.write(data, tmp_path / "data", rows=7)
    tables.write(fitted, tmp_path / "fitted", rows=11)
    expected = calibration.calibration_report({"data": trees[0]}, trees[1], "negative", 0)
    paths = tmp_path / "data", tmp_path / "fitted"
    command = ["eval", "calibration", "--input", str(paths[0]), "--calibrate", str(paths[1]), "--neutral", "negative"]
    assert cli.main([*command, "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text()) == expected | {"too_long": 0}


@pytest.mark.parametrize("harm", ["no score", "no probability", "tree", "column", "store"])
def test_tables_without_what_calibration_needs_are_refused(tmp_path, harm, capsys):
    records = rated(20, 0, "chain")
    if harm == "no score":
        del records[3]["scores"]
    elif harm == "no probability":
        records[3]["scores"][0] = 1.5
    elif harm == "tree":
        records[3] = trees(1)[0]
    tables.write(records, tmp_path / "tables")
    if harm == "column":
        (file,) = (tmp_path / "tables").glob("*.parquet")
        pq.write_table(pq.read_table(file).drop_columns(["semantics"]), file)
    command = ["eval", "calibration", "--input", str(tmp_path / "tables"), "--calibrate", str(tmp_path / "tables")]
    more = ["--store", "platt"] if harm == "store" else []
    assert cli.main([*command, "--neutral", "drop", "--json", str(tmp_path / "out.json"), *more]) == 2
    named = {"column": "semantics", "store": "--model"}.get(harm, "record")
    assert named in capsys.readouterr().err and not (tmp_path / "out.json").exists()


def test_many_problems_are_drawn_in_parts(monkeypatch):
    """The value is the same to rounding, and the standard error is, within that of its estimate."""
    draw = np.random.default_rng(0)
    value_NC = draw.random((6000, 2)) + draw.random((3000, 1)).repeat(2, axis=0)
    problem_N = np.arange(3000).repeat(2)
    single = statistics.mean_draws(value_NC, problem_N, seed=0)
    monkeypatch.setattr(statistics, "MOST_GROUPS", 500)
    parts = statistics.mean_draws(value_NC, problem_N, seed=0)
    np.testing.assert_allclose(parts.value, single.value, rtol=1e-12)
    np.testing.assert_allclose(parts.drawn_R.std(0), single.drawn_R.std(0), rtol=0.12)
    numbers = statistics.group_numbers(problem_N)
    assert len(set(numbers)) == 500 and (numbers[::2] == numbers[1::2]).all()  # no problem is torn
    assert (np.bincount(numbers) == 12).all()
