"""Readers: published files give the known counts, lists and tables are read, and no input crashes a reader."""

import collections
import csv
import decimal
import gzip
import io
import itertools
import json
import pathlib
from typing import Any

import pytest
from families import breadth
from hypothesis import given
from hypothesis import strategies as st
from refusing import refused

from jprm.io import jsonl
from jprm.io.jsonl import Rejects
from jprm.methods.data.overlap import problems_of
from jprm.methods.data.reader import Dropped, Event, read_items
from jprm.methods.data.readers import READERS, find
from jprm.methods.judge.critiques import PROMPTS
from jprm.tree import RecordError, chains_of, read_records, tree_of

PRM800K = {"human_written": "positive", "control_questions": "drop"}
OPTIONS = {
    "columns": {"problem": "problem", "steps": "steps", "labels": "labels"},
    "gsm8k": {"calculator_marks": "strip"},
    "gsm8k_solutions": {"calculator_marks": "strip"},
    "math": {"steps": "sentences"},
    "prm800k": PRM800K,
    "programs": {"steps": "lines"},
}


def read(name, path, **options):
    return [record for _, record in find(name).read(path, **options)]


def write(path: pathlib.Path, *items) -> pathlib.Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def labels_of(records):
    return collections.Counter(node.label for record in records for node in tree_of(record).nodes)


@pytest.mark.parametrize(
    ("file", "records", "rated", "unrated", "human", "finished"),
    [("phase1_train", 942, 48_672, 822, 2_341, 808), ("phase1_test", 106, 5_082, 110, 257, 90)],
)
def test_prm800k_holds_every_completion(shared_data, file, records, rated, unrated, human, finished):
    path = shared_data / "prm800k" / f"{file}.jsonl"
    read_records = read("prm800k", path, human_written="unlabelled", control_questions="drop")
    assert len(read_records) == records
    nodes = [node for record in read_records for node in tree_of(record).nodes]
    origins = collections.Counter(node.origin for node in nodes)
    assert origins == {"human": rated, None: unrated, "human_written": human}
    assert sum(node.label is not None for node in nodes) == rated
    assert sum(node.correct is not None for node in nodes) == finished

    texts = []  # of the file, in its order, found another way
    for line in path.open():
        for step in json.loads(line)["label"]["steps"]:
            texts += [completion["text"] for completion in step["completions"]]
            texts += [step["human_completion"]] if step["human_completion"] is not None else []
    assert [node.text for node in nodes] == texts


def test_prm800k_ratings_have_the_published_shares(shared_data):
    records = read("prm800k", shared_data / "prm800k" / "phase1_train.jsonl", **PRM800K)
    labels = labels_of(records)
    assert (labels[1] - 2_341, labels[-1], labels[0], labels[None]) == (18_782, 19_656, 10_234, 822)
    depth = [max(map(len, chains_of(tree_of(record)))) for record in records]
    assert sum(depth) / len(depth) == pytest.approx(16.3, abs=0.05)  # published to one digit


def test_prm800k_path_goes_through_the_chosen_or_the_human_written_step(shared_data):
    raw = [json.loads(line) for line in (shared_data / "samples" / "prm800k_raw.jsonl").open()]
    tree = tree_of(next(find("prm800k").parse(raw[0], "raw:1", find("prm800k").options(**PRM800K))))
    path = []
    for step in raw[0]["label"]["steps"]:
        chosen = step["chosen_completion"]
        path.append(step["human_completion"]["text"] if chosen is None else step["completions"][chosen]["text"])
    chains = [[tree.nodes[i] for i in chain] for chain in chains_of(tree)]
    assert path in [[node.text for node in chain] for chain in chains]
    assert all(node.text in path for chain in chains for node in chain[:-1])
    (human,) = [node for node in tree.nodes if node.origin == "human_written"]
    assert (human.label, human.extra) == (1, {"source": "human", "flagged": False})
    assert tree.answer == "29" and tree.semantics == "rating"
    assert tree.extra["labeler"] == raw[0]["labeler"] and tree.extra["finish_reason"] == "solution"


def prm800k_item(*steps, finish_reason="solution", **keys):
    """Steps are (ratings, human text, chosen)."""
    written = []
    for depth, (ratings, human, chosen) in enumerate(steps):
        completions = [{"text": f"{depth}{i}", "rating": rating} for i, rating in enumerate(ratings)]
        written.append({"completions": completions, "human_completion": human, "chosen_completion": chosen})
    return {"question": {"problem": "p"}, "label": {"finish_reason": finish_reason, "steps": written}} | keys


@pytest.mark.parametrize(
    ("steps", "finish_reason", "outcome"),
    [
        ([([1], None, 0), ([0], None, 0)], "solution", True),
        ([([1], None, 0), ([-1], None, 0)], "solution", False),
        ([([-1], None, 0), ([1], None, 0)], "solution", False),
        ([([None], None, 0), ([-1], None, 0)], "solution", False),
        ([([None], None, 0), ([1], None, 0)], "solution", None),
        ([([-1], "written", None), ([1], None, 0)], "solution", True),
        ([([1], None, 0), ([-1], None, 0)], "found_error", None),
    ],
)
def test_prm800k_outcome_follows_from_the_ratings_on_the_path(tmp_path, steps, finish_reason, outcome):
    path = write(tmp_path / "f.jsonl", prm800k_item(*steps, finish_reason=finish_reason))
    (record,) = read("prm800k", path, **PRM800K)
    assert tree_of(record).nodes[-1].correct is outcome
    assert all(node.correct is None for node in tree_of(record).nodes[:-1])


def test_prm800k_answer_heading_ends_alternatives_too(shared_data):
    records = read("prm800k", shared_data / "samples" / "prm800k_raw.jsonl", **PRM800K)
    nodes = [node for record in records for node in tree_of(record).nodes if "# Answer" in node.text]
    assert len(nodes) > len(records) and all(node.correct is not None for node in nodes)


def test_prm800k_control_questions_and_empty_records_are_dropped_with_a_reason(tmp_path):
    items = [
        prm800k_item(([1], None, 0)),
        prm800k_item(([1], None, 0), is_quality_control_question=True),
        prm800k_item(([1], None, 0), is_initial_screening_question=True),
        prm800k_item(([], None, None), finish_reason="give_up"),
    ]
    path, reasons = write(tmp_path / "f.jsonl", *items), []
    for choice, count in (("drop", 1), ("keep", 3)):
        reasons.clear()
        options = {"human_written": "positive", "control_questions": choice}
        assert len(list(find("prm800k").read(path, on_drop=reasons.append, **options))) == count
        assert len(reasons) == 4 - count
    assert reasons == ["no step has a completion"]


def test_prm800k_phase2_chains(shared_data):
    records = read("prm800k", shared_data / "prm800k" / "phase2_sample.jsonl", **PRM800K)
    assert len(records) == 1_384
    assert labels_of(records) == {1: 7_270, 0: 551, -1: 1_172}
    assert {record["semantics"] for record in records} == {"rating"}
    finished = [record for record in records if "# Answer" in record["steps"][-1]]
    assert all(record["correct"] == (-1 not in record["labels"]) for record in finished)
    assert [record for record in records if "correct" in record] == finished


def test_math_shepherd_labels_belong_to_their_steps(shared_data):
    path = shared_data / "samples" / "math_shepherd_raw.jsonl"
    records, raw = read("math_shepherd", path), [json.loads(line) for line in path.open()]
    assert len(records) == len(raw) == 7
    for record, item in zip(records, raw, strict=True):
        signs = ["+" if label else "-" for label in record["labels"]]
        steps = "\n".join(f"{step} {sign}" for step, sign in zip(record["steps"], signs, strict=True))
        assert f"{record['problem']} {steps}" == item["label"]
        assert all(step.startswith(f"Step {k}: ") for k, step in enumerate(record["steps"], 1))
        assert record["correct"] == (signs[-1] == "+") and record["semantics"] == "value"
        assert record["task"] == item["task"]


@pytest.mark.parametrize(("file", "wrong", "right"), [("gsm8k", 207, 193), ("math", 594, 406)])
def test_processbench_marks_the_first_error(shared_data, file, wrong, right):
    path = shared_data / "processbench" / f"{file}.json"
    records = read("processbench", path)
    assert len(records) == wrong + right
    assert sum(record["first_error"] == -1 for record in records) == right
    for record, item in zip(records, json.loads(path.read_text()), strict=True):
        labels, first = record["labels"], record["first_error"]
        assert first == item["label"] == (labels.index(0) if 0 in labels else -1)
        assert set(labels[:first] if first >= 0 else labels) <= {1}
        assert first == -1 or set(labels[first + 1 :]) <= {None}
        assert record["correct"] == item["final_answer_correct"]
        assert all(record[key] == item[key] for key in item if key != "label")


def test_prmbench_error_steps_are_counted_from_one(shared_data):
    records = read("prmbench", shared_data / "prmbench" / "prm800k_test_p1_4o_domain_inconsistency.jsonl")
    assert len(records) == 90
    for record in records:
        assert [i for i, label in enumerate(record["labels"], 1) if label == 0] == sorted(record["error_steps"])
        assert record["steps"] == record["modified_process"]
    path = shared_data / "prmbench" / "prm_test_p12_multi_solutions.jsonl"
    assert set(labels_of(read("prmbench", path))) == {1}
    originals = read("prmbench", path, process="original")
    assert set(labels_of(originals)) == {1} and originals[0]["steps"] == originals[0]["original_process"]


def test_prmbench_error_steps_beyond_the_chain_need_a_decision(shared_data):
    path = shared_data / "prmbench" / "prm800k_test_p1_4o_circular.jsonl"
    refused(RecordError, "error_steps", read, "prmbench", path)
    assert len(read("prmbench", path, outside="ignore")) == 90


def test_prmbench_step_without_text_is_dropped_with_its_label(shared_data):
    path = shared_data / "prmbench" / "prm800k_test_p1_4o_deception.jsonl"
    refused(RecordError, r":73: steps\[15\]", read, "prmbench", path, outside="ignore")
    record = read("prmbench", path, outside="ignore", empty="drop")[72]
    assert record["steps"] == [step for step in record["modified_process"] if step] and len(record["steps"]) == 16
    assert [i for i, label in enumerate(record["labels"], 1) if label == 0] == record["error_steps"] == [11, 13]


@pytest.mark.parametrize(("file", "count"), [("train", 7_473), ("test", 1_319)])
def test_gsm8k(shared_data, file, count):
    path = shared_data / "gsm8k" / f"{file}.jsonl"
    kept = read("gsm8k", path, calculator_marks="keep")
    raw = [json.loads(line) for line in path.open()]
    assert len(kept) == count
    for record, item in zip(kept, raw, strict=True):
        lines = [*record["steps"], f"#### {record['answer']}"]
        assert lines == [line.strip() for line in item["answer"].split("\n") if line.strip()]
    stripped = read("gsm8k", path, calculator_marks="strip")
    assert not any("<<" in step for record in stripped for step in record["steps"])
    assert stripped[0]["steps"] != kept[0]["steps"]


def test_gsm8k_model_solutions_are_pools_of_four(shared_data):
    path = shared_data / "gsm8k" / "example_model_solutions.jsonl"
    pools = read("gsm8k_solutions", path, calculator_marks="keep")
    assert len(pools) == 1_319 and {len(pool["samples"]) for pool in pools} == {4}
    right = collections.Counter(s["generator"] for pool in pools for s in pool["samples"] if s["correct"])
    raw = [json.loads(line) for line in path.open()]
    assert right == {model: sum(item[model]["is_correct"] for item in raw) for model in right} and len(right) == 4
    agree = [(s["answer"] == pool["answer"]) == s["correct"] for pool in pools for s in pool["samples"]]
    assert sum(agree) / len(agree) > 0.97  # the rest write one number in two ways, such as 14 and 14.0


@pytest.mark.parametrize("steps", ["none", "paragraphs", "sentences"])
def test_math_steps_joined_are_the_solution(shared_data, steps):
    path = shared_data / "math500" / "test.jsonl"
    records = read("math", path, steps=steps)
    assert ["".join(record["steps"]) for record in records] == [json.loads(line)["solution"] for line in path.open()]
    assert (sum(len(record["steps"]) for record in records) == 500) == (steps == "none")


@given(st.text("aB.! \n$", min_size=1).filter(str.strip), st.sampled_from(["none", "paragraphs", "sentences"]))
def test_math_steps_lose_nothing(solution, steps):
    reader = find("math")
    (record,) = reader.parse({"problem": "p", "solution": solution}, "here", reader.options(steps=steps))
    assert "".join(record["steps"]) == solution
    tree_of(record)  # no step is empty


def test_pools(shared_data):
    path = shared_data / "pools" / "gsm8k_chatgpt_n19.jsonl"
    pools = read("pools", path, empty_samples="drop")
    assert len(pools) == 1_319
    assert sum(pool.get("empty_samples", 0) for pool in pools) == 2
    samples = list(itertools.chain.from_iterable(pool["samples"] for pool in pools))
    assert sum(sample["correct"] for sample in samples) / (1_319 * 19) == pytest.approx(0.519, abs=5e-4)
    refused(RecordError, r"samples\[\d+\]\.steps", read, "pools", path)


@pytest.mark.parametrize("more", [{}, {"labels": [1]}, {"final_answer_correct": True, "label": -1}], ids=sorted)
def test_a_chain_is_no_pool(more, tmp_path):
    path = write(tmp_path / "f.jsonl", {"problem": "p", "steps": ["a"], **more})
    refused(RecordError, r"f.jsonl:1: samples: .*one chain, not a pool\. Group", read, "pools", path)


def test_stepwise_records(tmp_path):
    path = write(tmp_path / "f.jsonl", {"prompt": "p", "completions": ["a", "b"], "labels": [True, False]})
    assert read("trl", path) == read("jsonl", path) == [{"problem": "p", "steps": ["a", "b"], "labels": [1.0, 0.0]}]
    refused(RecordError, "completions", read, "trl", write(path, {"problem": "p", "steps": ["a"]}))


any_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.floats()
    | st.sampled_from(["", "a", "q Step 1: a ки", "#### 3"]),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
KEYS = """problem steps ratings labels samples nodes question label completions prompt input answer solution text rating
human_completion chosen_completion final_answer_correct error_steps modified_process modified_question ground_truth
is_correct parent""".split()
any_item = st.recursive(
    any_json,
    lambda inner: st.dictionaries(st.sampled_from(KEYS), inner, max_size=6) | st.lists(inner, max_size=2),
    max_leaves=12,
)


@pytest.mark.parametrize("name", breadth(READERS, but=["columns", "jsonl", "openai", "otel", "pools", "prm800k"]))
@given(item=any_item)
def test_any_item_gives_records_or_a_record_error(name, item):
    reader = find(name)
    events = [Event("f:1", item)] if reader.whole else item
    try:
        for record in reader.parse(events, "f:1", reader.options(**OPTIONS.get(name, {}))):
            tree_of(record, "f:1")
    except RecordError as error:
        assert str(error).startswith("f:1: ")
    except Dropped as drop:
        assert str(drop)
    list(problems_of(item))


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("prm800k", {}, "human_written"),
        ("prm800k", PRM800K | {"neutral": 1}, "neutral"),
        ("prm800k", PRM800K | {"human_written": "yes"}, "'yes'"),
        ("gsm8k", {}, "missing calculator_marks"),
        ("processbench", {"a": 1}, "reader"),
    ],
)
def test_options_have_no_silent_default(name, options, complaint):
    refused(ValueError, f"reader option.*{complaint}", find(name).read, "absent", **options)


ITEM = {"id": 1, "problem": "p", "steps": ["a\u00e9"], "final_answer_correct": True, "label": -1}


@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_is_read_as_its_elements(tmp_path, indent):
    path = tmp_path / "f.json"
    path.write_text("\n " + json.dumps([ITEM, ITEM, {"label": 0}], indent=indent, ensure_ascii=False))
    items = list(read_items(path))
    assert [json.loads(raw) for _, raw in items] == [ITEM, ITEM, {"label": 0}]
    lines = path.read_bytes().split(b"\n")
    assert all(lines[number - 1].count(raw.split(b"\n")[0]) for number, raw in items)
    with Rejects(tmp_path / "rejects") as rejects:
        assert len(list(find("processbench").read(path, on_error="skip", rejects=rejects))) == 2
    assert (tmp_path / "rejects").read_bytes() == items[2][1] + b"\n"


@given(st.data())
def test_a_list_cut_anywhere_or_broken_is_noticed(tmp_path_factory, data):
    whole = json.dumps([ITEM, ITEM], ensure_ascii=False).encode()
    folder = tmp_path_factory.mktemp("cut")
    cut = data.draw(st.integers(1, len(whole) - 1))
    (folder / "f.json").write_bytes(whole[:cut])
    refused(RecordError, "f.json", read, "processbench", folder / "f.json")
    at = data.draw(st.integers(0, len(whole) - 1))
    (folder / "g.json").write_bytes(whole[:at] + b"\xff" + whole[at:])
    refused(RecordError, "g.json", read, "processbench", folder / "g.json")


# ---- JSON lists as sources, with edge cases.


def listed(path, name="jsonl", **options):
    return [record for _, record in find(name).read(path, **options)]


LIST = '[{"problem": "p", "steps": ["a"]},\n{"problem": "q", "steps": ["b"]}\n]'


def test_a_list_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "f.json").write_text(LIST, encoding="utf-8-sig")
    assert [record["problem"] for record in listed(tmp_path / "f.json")] == ["p", "q"]


@pytest.mark.parametrize("more", [LIST, "[]", "x", '{"problem": "r", "steps": ["c"]}'])
def test_what_follows_a_list_is_not_lost_in_silence(tmp_path, more):
    (tmp_path / "f.json").write_text(LIST + "\n" + more)
    refused(RecordError, "f.json:3: line", listed, tmp_path / "f.json")
    with Rejects(tmp_path / "rejects") as rejects:
        records = listed(tmp_path / "f.json", on_error="skip", rejects=rejects)
    assert len(records) == 2 and (tmp_path / "rejects").read_text() == f"]\n{more}\n"


ONE = {"problem": "p", "steps": ["a"]}


@pytest.mark.parametrize("indent", [None, 2])
def test_one_object_of_lists_is_their_elements(tmp_path, indent):
    """As Mr-Ben is published: a list of records for every subject."""
    content = {"logic": [ONE, ONE | {"problem": "q"}], "coding": [ONE | {"problem": "r"}]}
    (tmp_path / "f.json").write_text(json.dumps(content, indent=indent))
    assert [record["problem"] for record in listed(tmp_path / "f.json")] == ["p", "q", "r"]
    (tmp_path / "f.json").write_text(json.dumps(ONE, indent=indent))
    assert listed(tmp_path / "f.json") == [ONE]


def test_a_compressed_file_is_its_content_and_a_cut_one_is_refused(tmp_path):
    lines = b"".join(json.dumps(ONE | {"problem": str(i)}).encode() + b"\n" for i in range(50))
    for name, content in (("lines", lines), ("list", b"[" + lines.strip().replace(b"\n", b",") + b"]")):
        (tmp_path / name).write_bytes(zipped := gzip.compress(content))
        assert len(listed(tmp_path / name)) == 50
        (tmp_path / name).write_bytes(zipped[: len(zipped) // 2])
        refused(ValueError, "is cut off", listed, tmp_path / name)
    (tmp_path / "f.jsonl.gz").write_bytes(gzip.compress(lines))
    assert len(list(read_records(tmp_path / "f.jsonl.gz"))) == 50


@pytest.mark.parametrize("packed", [gzip.compress, bytes])
def test_a_line_and_a_list_are_no_larger_than_a_machine_holds(tmp_path, monkeypatch, packed):
    """Three megabytes of gzip can be three gigabytes of blanks."""
    monkeypatch.setattr(jsonl, "LINE_BYTES", 1000)
    monkeypatch.setattr(jsonl, "WHOLE_BYTES", 4000)
    line = json.dumps(ONE).encode() + b"\n"
    file = tmp_path / "f.jsonl"
    file.write_bytes(packed(line * 1000))
    assert len(list(read_records(file))) == 1000
    for content in (line + b" " * 2000, line + b'"' + b"x" * 2000):
        file.write_bytes(packed(content))
        for records in (find("jsonl").read, read_records):
            refused(ValueError, "f.jsonl: has more than 1,000 bytes", list, records(file))
    file.write_bytes(packed(b"[" + b",".join([line] * 1000) + b"]"))
    refused(ValueError, "f.jsonl: has more than 4,000 bytes", listed, file)


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 9\n"
    (tmp_path / "f.jsonl").write_text(pointer)
    for records in (find("jsonl").read, read_records):
        refused(ValueError, "git-LFS pointer", list, records(tmp_path / "f.jsonl"))


def columns(tmp_path, *items, **more):
    (tmp_path / "f.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    options: dict[str, Any] = {"problem": "q", "steps": "s"} | more
    return listed(tmp_path / "f.jsonl", "columns", **options)


def test_columns_take_the_place_of_the_first_error(tmp_path):
    places = [2, "2", -1, "N/A", None, 1]
    items = [{"q": "p", "s": ["a", "b", "c"], "first": place} for place in places]
    records = columns(tmp_path, *items, first_error="first", first_step=1)
    right = [1, 1, 1]
    assert [record["labels"] for record in records] == [
        [1, 0, None],
        [1, 0, None],
        right,
        right,
        right,
        [0, None, None],
    ]
    assert [record["first_error"] for record in records] == [1, 1, -1, -1, -1, 0]
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
    refused(RecordError, "label", listed, path, "processbench")
    item = {"modified_question": "p", "modified_process": ["a"], "error_steps": [], "classification": "circular"}
    path.write_text(json.dumps(item))
    refused(RecordError, "error_steps", listed, path, "prmbench")
    path.write_text(json.dumps(item | {"classification": "multi_solutions"}))
    assert [record["labels"] for record in listed(path, "prmbench")] == [[1]]


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
    (record,) = listed(tmp_path / "f.jsonl", name)
    assert record["labels"] == [1, 0] and "label" not in record


def test_a_list_under_a_name_is_its_items(tmp_path):
    (tmp_path / "f.json").write_text(json.dumps({"data": [ONE, ONE]}))
    assert listed(tmp_path / "f.json") == [ONE, ONE]


ODD = {
    "zst": (b"\x28\xb5\x2f\xfd....", "is compressed"),
    "xz": (b"\xfd7zXZ\x00....", "is compressed"),
    "bz2": (b"BZh91AY", "is compressed"),
    "zip": (b"PK\x03\x04...", "is compressed"),
    "csv": (b"problem,steps\nx,y\n", "Is it CSV"),
    "digits": (b'{"problem": "p", "steps": ["a"], "n": ' + b"9" * 5000 + b"}", "has 5000 digits. Write whole"),
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
    (record,) = listed(tmp_path / "f.parquet")
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
    first, second, third = listed(tmp_path / name, "columns", labels="labels")
    assert (first["problem"], first["steps"]) == ("What is 1, twice?", ["1 + 1 = 2", "So 2."])
    assert first["labels"] == second["labels"] == [1, 0]
    assert (second["steps"], second["note"]) == (["a", "b"], "x")
    assert third["steps"] == ["One.", "Then, two."] and "labels" not in third
    refused(RecordError, "labels", listed, tmp_path / name, "columns")  # none is dropped in silence
    with open(tmp_path / name, "w", newline="") as file:
        csv.writer(file, delimiter=separator).writerows([row[:2] for row in csv.reader(io.StringIO(CSV))])
    assert listed(tmp_path / name, "columns")[1]["steps"] == ["a", "b"]  # the usual names


@pytest.mark.parametrize("content", ["problem,steps\np\n", 'problem,steps\n"p,a\n', "problem,steps\np,a\x00\xff"])
def test_broken_csv_names_its_row(tmp_path, content):
    (tmp_path / "f.csv").write_bytes(content.encode("latin-1"))
    refused(RecordError, r"f\.csv:\d", list, read_items(tmp_path / "f.csv"))


def test_columns_of_other_names_are_told_how_to_be_read(tmp_path):
    (tmp_path / "f.jsonl").write_text(json.dumps({"question": "p", "solution": "a"}))
    named = r"`question`, `solution`.*jprm prepare columns --input"
    refused(RecordError, named, list, read_records(tmp_path / "f.jsonl"))


# ---- Readers of published step labels: the layouts that the projects' own code reads or writes, in small.


LAYOUTS = json.loads((pathlib.Path(__file__).parent / "step_label_layouts.json").read_text(encoding="utf-8"))
SOURCES, BROKEN = LAYOUTS["sources"], LAYOUTS["broken"]


def laid_out(name, tmp_path, item, **options):
    (tmp_path / "f.jsonl").write_text(json.dumps(item) + "\n")
    return [record for _, record in find(name.split()[0]).read(tmp_path / "f.jsonl", **options)]


@pytest.mark.parametrize("name", SOURCES)
def test_a_published_layout_is_read(tmp_path, name):
    item, wanted = SOURCES[name]
    (record,) = laid_out(name, tmp_path, item)
    tree_of(record)
    assert {key: record.get(key) for key in wanted} == wanted


@pytest.mark.parametrize(("name", "item"), [(name, item) for name, items in BROKEN.items() for item in items])
def test_another_layout_is_refused(tmp_path, name, item):
    refused(RecordError, "f.jsonl:1", laid_out, name, tmp_path, item)


def test_soft_labels_of_actprm(tmp_path):
    item = {"question": "q", "steps": ["a", "b"], "soft_labels": [0.5, 0.25]}
    assert laid_out("actprm", tmp_path, item, labels="soft_labels")[0]["labels"] == [0.5, 0.25]


def test_r_prm_asks_about_the_last_step_after_the_others():
    prompt = PROMPTS["r-prm"]
    first, third = prompt.filled("q?", ["a"]), prompt.filled("q?", ["a", "b {last}", "c"])
    assert "Previous Steps: Since the Now Step is the first step, there are no Previous Steps.\nNow Step: a\n" in first
    assert "Question: q?\nPrevious Steps: a\nb {last}\nNow Step: c\nPlease" in third
