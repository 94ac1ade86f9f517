"""Readers: published files give the known counts, and no input crashes a reader."""

import collections
import itertools
import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusing import refused

from jprm.io.jsonl import Rejects
from jprm.methods.data.overlap import problems_of
from jprm.methods.data.reader import Dropped, Event, read_items
from jprm.methods.data.readers import READERS, find
from jprm.tree import RecordError, chains_of, tree_of

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


@pytest.mark.parametrize("name", READERS)
@given(item=any_item)
def test_any_item_gives_records_or_a_record_error(name, item):
    reader = find(name)
    given = [Event("f:1", item)] if reader.whole else item
    try:
        for record in reader.parse(given, "f:1", reader.options(**OPTIONS.get(name, {}))):
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
