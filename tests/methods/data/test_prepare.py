"""Preparing: records come out equal, every record is counted, and nothing half-written remains."""

import contextlib
import hashlib
import io
import json
import os
import pathlib
import pickle
import random
import subprocess
import sys
import types
from typing import Any

import pytest
import rich.console
from refusing import bad, refused

from jprm.apps import cli
from jprm.data import load
from jprm.methods.data.overlap import Texts, normalise, problems_in
from jprm.methods.data.prepare import fetch, prepare
from jprm.methods.data.readers import find
from jprm.methods.policy.protocol import read_problems
from jprm.tree import RecordError, read_records, tree_of

PRM800K = {"human_written": "positive", "control_questions": "drop"}


@pytest.fixture
def console():
    with open("/dev/null", "w") as file:
        yield rich.console.Console(record=True, width=200, file=file)


def lines(path: pathlib.Path, *records) -> pathlib.Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chain(problem, **keys):
    return {"problem": problem, "steps": ["a", "b\u00e9"], "labels": [1, 0.5]} | keys


def test_prepared_records_equal_those_of_the_reader(tmp_path, shared_data, console):
    source = [shared_data / "prm800k" / "phase1_test.jsonl", shared_data / "samples" / "prm800k_raw.jsonl"]
    report = prepare("prm800k", source, tmp_path / "out", console=console, **PRM800K)
    expected = [record for path in source for _, record in find("prm800k").read(path, **PRM800K)]
    stored = load(tmp_path / "out")
    assert [json.dumps(record) for record in stored] == [json.dumps(record) for record in expected]
    assert (len(stored), stored[3], stored[-1]) == (len(expected), expected[3], expected[-1])
    assert pickle.loads(pickle.dumps(stored))[7] == expected[7]
    assert (report.read, report.kept, report.rejected, report.excluded_records) == (112, 111, 0, 0)
    assert report.dropped == {"is_initial_screening_question": 1}
    assert report.steps == sum(report.labels.values()) == sum(len(tree_of(record).nodes) for record in expected)
    assert json.loads((tmp_path / "out" / "report.json").read_text())["labels"] == report.labels
    with pytest.raises(IndexError):
        stored[len(stored)]


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [
        ("prm800k/phase1_train.jsonl", "math500/test.jsonl", 0),
        ("prm800k/phase1_train.jsonl", "processbench/math.json", 0),
        ("prm800k/phase1_test.jsonl", "math500/test.jsonl", 101),
        ("processbench/gsm8k.json", "gsm8k/test.jsonl", 375),
        ("prmbench/prm800k_test_p1_4o_circular.jsonl", "math500/test.jsonl", 90),
    ],
)
def test_published_overlaps(shared_data, a, b, shared):
    assert len(problems_in(shared_data / a) & problems_in(shared_data / b)) == shared


def test_normalise():
    assert normalise("  What is\\, $X^2$ \\quad for~$x=1{\\!}0$?\n") == "what is x^2 for x=1{}0?"
    assert normalise("cost \\$1.24$") == normalise("Cost $1.24")
    assert normalise("$f\\left(x\\right)$") == normalise("f(x)")
    assert normalise("\\leftarrow x") != normalise("arrow x")


def test_problems_of_benchmarks_are_left_out_and_counted(tmp_path, shared_data, console):
    source = [shared_data / "prm800k" / "phase1_test.jsonl"]
    bench = [shared_data / "processbench" / "math.json", shared_data / "processbench" / "gsm8k.json"]
    report = prepare("prm800k", source, tmp_path / "out", bench, console=console, **PRM800K)
    banned = {normalise(item["problem"]) for item in json.loads(bench[0].read_text())}
    every = [json.loads(line)["question"]["problem"] for line in source[0].open()]
    hit = [problem for problem in every if normalise(problem) in banned]
    assert len({normalise(problem) for problem in hit}) == 28
    assert report.excluded == {str(bench[0]): len(hit), str(bench[1]): 0}
    assert report.kept == len(every) - len(hit) == len(load(tmp_path / "out"))
    assert not banned & {normalise(record["problem"]) for record in load(tmp_path / "out")}
    assert f"excluded, in {bench[0]}" in console.export_text()


def test_a_record_in_two_benchmarks_counts_for_both_and_once(tmp_path, console):
    source = lines(tmp_path / "s.jsonl", chain("What is $x$?"), chain("other"))
    first = lines(tmp_path / "one.jsonl", {"question": "what is  x?", "answer": "#### 1"})
    second = lines(tmp_path / "two.jsonl", {"input": "What is $x$? Step 1: a", "label": ""})
    report = prepare("jsonl", [source], tmp_path / "out", [first, second], console=console)
    assert report.excluded == {str(first): 1, str(second): 1} and report.excluded_records == 1 and report.kept == 1
    nothing = lines(tmp_path / "three.jsonl", {"text": "?"})
    refused(RecordError, "problem", prepare, "jsonl", [source], tmp_path / "new", [nothing], console=console)


def test_skip_keeps_the_rejects_beside_the_records(tmp_path, console):
    first = lines(tmp_path / "1.jsonl", chain("p", id=1), chain("q", labels=[1, 2]))
    second = lines(tmp_path / "2.jsonl", chain("r", id=2))
    tail = b'{"problem": "cut off'
    first.write_bytes(first.read_bytes() + b"\xff\n" + tail)
    report = prepare("jsonl", [first, second], tmp_path / "out", on_error="skip", console=console)
    assert [record["problem"] for record in load(tmp_path / "out")] == ["p", "r"]
    bad = first.read_bytes().splitlines(keepends=True)
    assert (tmp_path / "out" / "rejects.jsonl").read_bytes() == b"".join(bad[1:]) + b"\n"
    assert (report.read, report.kept, report.rejected) == (5, 2, 3)
    assert [reason.split(": ")[0] for reason in report.reasons] == [f"{first}:{n}" for n in (2, 3, 4)]
    assert "labels[1]: is 2" in console.export_text()


@pytest.mark.parametrize("ids", [[[1, 2, 1]], [[1, 2], [3, 1]], [["a", "a"]]], ids=["line", "file", "text"])
def test_repeated_ids_are_refused_as_by_score(tmp_path, console, ids):
    files = [
        lines(tmp_path / f"{i}.jsonl", *(chain(f"{i} {j}", id=x) for j, x in enumerate(of_file)))
        for i, of_file in enumerate(ids)
    ]
    last = f"{files[-1]}:{len(ids[-1])}: id: {ids[-1][-1]!r} is the id of {files[0]}:1 too"
    refused(RecordError, last, prepare, "jsonl", files, tmp_path / "out", console=console)
    report = prepare("jsonl", files, tmp_path / "out", on_error="skip", console=console)
    assert (report.kept, report.rejected) == (sum(map(len, ids)) - 1, 1)
    assert len(list(read_records(tmp_path / "out"))) == report.kept


def test_ids_of_several_types_and_absent_ones_do_not_repeat(tmp_path, console):
    records = [chain(str(i), **about) for i, about in enumerate([{"id": 1}, {"id": "1"}, {}, {}, {"id": None}])]
    source = lines(tmp_path / "s.jsonl", *records)
    assert prepare("jsonl", [source], tmp_path / "out", console=console).kept == 5


def test_rejects_are_counted_by_their_reason(tmp_path, console):
    items = [chain(f"p{i}", labels=[1]) for i in range(13)] + [chain("q", steps=["a", 5])] * 10 + [chain("r")]
    source = lines(tmp_path / "s.jsonl", *items)
    report = prepare("jsonl", [source], tmp_path / "out", on_error="skip", console=console)
    assert [count for count in report.rejections.values()] == [13, 10] and len(report.reasons) == 23
    assert list(report.rejections)[0].startswith(f"{source}:1: labels: has 1 entries for 2 steps")
    assert console.export_text().count("has 1 entries") == 1


def test_parts_are_made_by_problem(tmp_path, console):
    records = [chain(f"P ${i}$", id=i) for i in range(20)] + [chain(f"p {i}", steps=["c", "d"]) for i in range(20)]
    source = lines(tmp_path / "s.jsonl", *records)
    report = prepare("jsonl", [source], tmp_path / "out", parts={"held_out": 0.1, "valid": 0.2}, console=console)
    parts = {name: load(tmp_path / "out" / name) for name in ("train", "held_out", "valid")}
    assert {name: len(part) for name, part in parts.items()} == {"train": 28, "held_out": 4, "valid": 8}
    problems = [{normalise(record["problem"]) for record in part} for part in parts.values()]
    assert sum(map(len, problems)) == len(set.union(*problems)) == 20
    assert (report.read, report.kept, report.other_part) == (40, 28, 12)
    again = prepare("jsonl", [source], tmp_path / "out", parts={"held_out": 0.1, "valid": 0.2}, console=console)
    assert again == report
    for parts in ({"held_out": 1.0}, {"train": 0.1}, {"a": 0.6, "b": 0.4}, {"../x": 0.1}):
        refused(ValueError, "part", prepare, "jsonl", [source], tmp_path / "new", parts=parts, console=console)
    one = lines(tmp_path / "one.jsonl", chain("p"))
    refused(ValueError, "too few", prepare, "jsonl", [one], tmp_path / "new", parts={"held_out": 0.1}, console=console)


def test_items_that_become_several_records_are_counted(tmp_path, console):
    source = lines(tmp_path / "s.jsonl", {"problem": "p", "steps": [["a", "b"], ["c", "d"]]}, chain("q", labels=None))
    report = prepare("columns", [source], tmp_path / "out", console=console)
    assert (report.several, report.kept) == (1, 3)
    assert "items that became several records" in console.export_text()


def test_a_column_of_labels_that_labels_nothing_is_refused(tmp_path, console):
    source = lines(tmp_path / "s.jsonl", chain("p"))
    refused(ValueError, "lables: is in no record", prepare, "columns", [source], tmp_path / "out", labels="lables")
    empty = lines(tmp_path / "e.jsonl", chain("p") | {"lables": None})
    refused(ValueError, "'lables'", prepare, "columns", [empty], tmp_path / "out", labels="lables", console=console)
    assert not (tmp_path / "out").exists()


def test_a_split_of_a_file_is_an_option(tmp_path, console):
    (tmp_path / "s.json").write_text(json.dumps({"train": [chain("p")], "test": [chain("q")]}))
    refused(
        ValueError, "splits train, test", prepare, "jsonl", [tmp_path / "s.json"], tmp_path / "out", console=console
    )
    prepare("jsonl", [tmp_path / "s.json"], tmp_path / "out", split="test", console=console)
    assert [record["problem"] for record in load(tmp_path / "out")] == ["q"]
    command = ["prepare", "jsonl", "--input", str(tmp_path / "s.json"), "--output", str(tmp_path / "new")]
    assert cli.main([*command, "--set", "split=train"]) == 0
    assert [record["problem"] for record in load(tmp_path / "new")] == ["p"]


def test_problems_without_solutions_are_prepared(tmp_path, console):
    source = lines(tmp_path / "s.jsonl", {"question": "p", "gold": 3}, {"question": "q", "gold": 4})
    prepare("columns", [source], tmp_path / "out", console=console, problem="question", steps="", answer="gold")
    assert list(load(tmp_path / "out")) == [{"problem": "p", "answer": 3}, {"problem": "q", "answer": 4}]
    problems = [problem for _, problem in read_problems(tmp_path / "out")]  # as `jprm sample` and `search` do
    assert [(problem.text, problem.answer) for problem in problems] == [("p", 3), ("q", 4)]


def test_a_commit_needs_no_checksum(tmp_path, console, monkeypatch):
    commit, fetched = "0123456789" * 4, []

    def opened(address, timeout):
        fetched.append(address)
        return contextlib.closing(Reply(json.dumps(chain("p")).encode()))

    class Reply(io.BytesIO):
        headers: dict[str, str] = {}

    monkeypatch.setattr("urllib.request.urlopen", opened)
    url = f"hf://datasets/o/n@{commit}/train/f.jsonl"
    for out in ("out", "new"):  # downloaded once
        assert prepare("jsonl", [url], tmp_path / out, console=console).kept == 1
    prepare("jsonl", [url.replace("train", "test")], tmp_path / "test", console=console)  # another file of that name
    assert len(fetched) == 2 and f"/datasets/o/n/resolve/{commit}/train/f.jsonl" in fetched[0]
    refused(ValueError, "Name a commit", prepare, "jsonl", [url.replace(commit, "v1")], tmp_path / "x", console=console)


def test_stop_leaves_nothing_and_keeps_what_was_there(tmp_path, console):
    source, out = lines(tmp_path / "s.jsonl", chain("p")), tmp_path / "out"
    prepare("jsonl", [source], out, console=console)
    lines(source, chain("q"), chain("", id=2))
    for target, overwrite in ((tmp_path / "new", False), (out, True)):
        with pytest.raises(RecordError) as caught:
            prepare("jsonl", [source], target, overwrite=overwrite, console=console)
        remedy = "Remove it or give it text: nothing can be read from it."
        assert str(caught.value) == f"{source}:2: problem: is empty. {remedy}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "s.jsonl"]
    assert [record["problem"] for record in load(out)] == ["p"]


def test_a_finished_folder_is_left_alone_unless_it_is_another_or_overwritten(tmp_path, console):
    source, out = lines(tmp_path / "s.jsonl", chain("p")), tmp_path / "out"
    report = prepare("jsonl", [source], out, console=console)
    stamps = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert prepare("jsonl", [source], out, console=console) == report
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == stamps
    assert "is there already, with 1 records; nothing to do" in console.export_text()
    refused(ValueError, "on_error", prepare, "jsonl", [source], out, on_error="skip", console=console)
    lines(source, chain("q"), chain("r"))
    refused(ValueError, "sha256", prepare, "jsonl", [source], out, console=console)
    prepare("jsonl", [source], out, overwrite=True, console=console)
    assert [record["problem"] for record in load(out)] == ["q", "r"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "s.jsonl"]


def test_a_folder_of_something_else_is_not_touched(tmp_path, console):
    source, out = lines(tmp_path / "s.jsonl", chain("p")), tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        refused(ValueError, "prepared", prepare, "jsonl", [source], out, overwrite=overwrite, console=console)
    refused(FileNotFoundError, r"no report\.json", load, out)
    assert (out / "thesis.tex").read_text() == "years of work"


def test_a_killed_run_leaves_no_folder_that_looks_whole(tmp_path, console):
    source, out = lines(tmp_path / "s.jsonl", *[chain(f"p{i}") for i in range(300)]), tmp_path / "out"
    code = """
import os, sys, jprm.tree, jprm.methods.data.prepare as p
seen, check = 0, p.check_record
def check_record(record, *where):
    global seen
    seen += 1
    if seen == 200: os.kill(os.getpid(), 9)
    return check(record, *where)
p.check_record = check_record
p.prepare("jsonl", [sys.argv[1]], sys.argv[2])
"""
    root = pathlib.Path(__file__).resolve().parents[3]
    assert subprocess.run([sys.executable, "-c", code, source, out], cwd=root, capture_output=True).returncode == -9
    assert not out.exists() and (tmp_path / "out.partial").exists()
    assert prepare("jsonl", [source], out, console=console).kept == len(load(out)) == 300
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "s.jsonl"]


@pytest.mark.parametrize(("arguments", "message"), bad("a request to prepare"))
def test_bad_requests_say_what_to_do(tmp_path, console, arguments, message):
    source = lines(tmp_path / "s.jsonl", chain("p"))
    request = {"name": "jsonl", "source": [source], "out": tmp_path / "out", "console": console} | arguments
    error = FileNotFoundError if message.startswith(("absent", "/tmp")) else ValueError
    refused(error, message, prepare, **request)
    assert list(tmp_path.iterdir()) == [source]


def test_labels_that_no_option_names_are_not_lost(tmp_path, console):
    source = lines(tmp_path / "s.jsonl", chain("p"))
    refused(RecordError, "--set labels=labels", prepare, "columns", [source], tmp_path / "out", console=console)
    prepare("columns", [source], tmp_path / "out", console=console, labels="labels")
    assert load(tmp_path / "out")[0]["labels"] == chain("p")["labels"]


def test_nothing_kept_is_an_error_with_the_account_printed(tmp_path, console):
    source = lines(tmp_path / "s.jsonl", chain("p"))
    refused(ValueError, "1 items", prepare, "jsonl", [source], tmp_path / "out", [source], console=console)
    assert f"excluded, in {source}" in console.export_text() and not (tmp_path / "out").exists()


def test_nothing_read_names_the_parts_left_out(tmp_path, console):
    source = lines(tmp_path / "s.jsonl", {"attributes": {"mlflow.spanInputs": "x"}})
    refused(
        ValueError,
        r"left out: span with mlflow.spanInputs \(MLflow\)",
        prepare,
        "otel",
        [source],
        tmp_path / "out",
        console=console,
    )


def test_records_without_a_label_and_all_right_ones_are_counted(tmp_path, console):
    source = lines(tmp_path / "s.jsonl", chain("p"), chain("q", labels=[None, None]), chain("r", labels=[1, 1]))
    report = prepare("jsonl", [source], tmp_path / "out", console=console)
    assert (report.unlabelled, report.all_right) == (1, 1)
    assert "records without a label" in console.export_text()


def test_a_download_must_have_its_checksum(tmp_path, console):
    remote = tmp_path / "remote"
    remote.mkdir()
    url = lines(remote / "f.jsonl", chain("p")).as_uri()
    right = hashlib.sha256((remote / "f.jsonl").read_bytes()).hexdigest()
    refused(ValueError, f"{right}", prepare, "jsonl", [url], tmp_path / "out", sha256=["0" * 64], console=console)
    assert not (tmp_path / "out").exists() and not list((tmp_path / "downloads").iterdir())
    assert prepare("jsonl", [url], tmp_path / "out", sha256=[right], console=console).kept == 1
    (remote / "f.jsonl").unlink()  # what was downloaded is not fetched again
    assert prepare("jsonl", [url], tmp_path / "out", sha256=[right], overwrite=True, console=console).kept == 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_only_folders_of_prepare_are_deleted(tmp_path, console, overwrite):
    source, out = lines(tmp_path / "s.jsonl", chain("p")), tmp_path / "out"
    if overwrite:
        prepare("jsonl", [source], out, console=console)
    for name in ("out.old", "out.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("years of work")
    refused(ValueError, r"out\.partial", prepare, "jsonl", [source], out, overwrite=overwrite, console=console)
    assert (tmp_path / "out.partial" / "thesis.tex").read_text() == "years of work"
    (tmp_path / "out.partial").rename(tmp_path / "elsewhere")
    assert prepare("jsonl", [source], out, overwrite=overwrite, console=console).kept == 1
    assert (tmp_path / "out.old" / "thesis.tex").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "out", "out.old", "s.jsonl"]
    assert sorted(path.name for path in out.iterdir() if path.name.startswith(".")) == []


def test_load_takes_a_file_of_records(tmp_path):
    path = lines(tmp_path / "s.jsonl", chain("p"), chain("q"))
    assert list(load(path)) == [chain("p"), chain("q")]
    refused(FileNotFoundError, "exist", load, tmp_path / "absent")
    refused(FileNotFoundError, "not a prepared folder", load, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    refused(ValueError, "pipe: is not a file on disk", load, tmp_path / "pipe")
    lines(path, chain("p"), chain("q", labels=[1]))
    refused(RecordError, ":2: labels", load, path)


def test_tensorflow_is_never_imported(tmp_path):
    source = lines(tmp_path / "s.jsonl", chain("p"))
    code = """
import sys
from jprm.data import load
from jprm.apps import cli
from jprm.methods.data.prepare import fetch, prepare
prepare("jsonl", [sys.argv[1]], sys.argv[2])
print(load(sys.argv[2])[0]["problem"], "tensorflow" in sys.modules)
"""
    root = pathlib.Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", code, source, tmp_path / "out"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.stdout == "p False\n", done.stderr


@pytest.mark.parametrize("setting", ["out=x", "name=x", "console=x", "overwrite=True", "sha256=x"])
def test_the_command_takes_no_argument_of_prepare_for_an_option(tmp_path, capsys, setting):
    source = lines(tmp_path / "s.jsonl", chain("p"))
    command = ["prepare", "jsonl", "--input", str(source), "--output", str(tmp_path / "out"), "--set", setting]
    assert cli.main(command) == 2
    assert "unknown" in capsys.readouterr().err and not (tmp_path / "out").exists()


def words(count, seed=0):
    draw = random.Random(seed)
    return [f"w{draw.randrange(10**6)}" for _ in range(count)]


def test_repeated_records_are_left_out_and_counted(tmp_path, console):
    records = chain("P $1$"), chain("p 1"), chain("p 1", steps=["c", "d"]), chain("q"), chain("q")
    source = lines(tmp_path / "in.jsonl", *records)
    report = prepare("jsonl", [source], tmp_path / "out", duplicates="drop", console=console)
    assert (report.read, report.repeated, report.kept) == (5, 2, 3)  # typing and labels aside
    assert [record["problem"] for record in load(tmp_path / "out")] == ["P $1$", "p 1", "q"]
    kept = prepare("jsonl", [source], tmp_path / "all", console=console)
    assert (kept.repeated, kept.kept) == (0, 5)


def test_near_texts_are_found_by_what_they_share(tmp_path, console):
    """A fifth of the words changed at one end leaves a similarity of 2/3, one word of 200 changed one of 0.95."""
    pytest.importorskip("rensa", reason="needs the extra `near`")
    text = words(200)
    nearly, partly, other = [*text[:-1], "x"], [*text[:160], *words(40, 1)], words(200, 2)
    known = Texts([" ".join(text)], near=0.8)
    assert [known.holds(" ".join(words)) for words in (text, nearly, partly, other)] == [True, True, False, False]
    source = lines(tmp_path / "in.jsonl", *(chain(" ".join(words)) for words in (nearly, text, partly, other)))
    benchmark = lines(tmp_path / "benchmark.jsonl", chain(" ".join(partly)))
    options = {"exclude": [benchmark], "duplicates": "drop", "near": 0.8, "console": console}
    report = prepare("jsonl", [source], tmp_path / "out", **options)
    assert (report.excluded_records, report.repeated, report.kept) == (1, 1, 2)


@pytest.mark.parametrize("near", [0.0, 1.5, -1.0])
def test_a_similarity_is_a_fraction(near):
    refused(ValueError, "near", Texts, near=near)


@pytest.mark.parametrize(("pieces", "headers", "said"), [
    ([b"x"] * 10, {}, "sent 1 bytes in"),
    ([b"x" * 100], {"Content-Length": "200"}, "ended after 100 of 200 bytes"),
    ([b"x"], {"Content-Encoding": "gzip"}, "compresses it"),
])  # fmt: skip
def test_a_download_that_drips_or_is_cut_or_compressed_is_given_up(tmp_path, monkeypatch, pieces, headers, said):
    if not headers:
        monkeypatch.setattr("jprm.methods.data.prepare._PATIENCE_S", 0.0)
        monkeypatch.setattr("jprm.methods.data.prepare._SLOWEST", 10**12)
    parts = iter([*pieces, b""])
    response: Any = types.SimpleNamespace(headers=headers, read1=lambda size: next(parts), close=lambda: None)
    monkeypatch.setattr("urllib.request.urlopen", lambda address, timeout: contextlib.closing(response))
    with pytest.raises(OSError, match=said):
        fetch("https://a/b/f.jsonl", tmp_path, ["0" * 64])
    assert not (tmp_path / "f.jsonl").exists()
