"""Tables of any names and layouts: the right records, or an error with file, line and column; and never a traceback."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused

from jprm.io import jsonl
from jprm.io.jsonl import Rejects
from jprm.methods.data.cells import TextRow, label_of, literal, place_of, verdict_of
from jprm.methods.data.columns import ColumnOptions, parse_columns
from jprm.methods.data.reader import Dropped, Event, LeftOut, check_record
from jprm.methods.data.readers import READERS, find, options_of, readers_of
from jprm.methods.messages.free_text import are_solutions
from jprm.methods.policy.protocol import read_problems
from jprm.tree import RecordError, chains_of, read_records, tree_of


def read(path, name="columns", **options):
    return [record for _, record in find(name).read(path, **options)]


def written(tmp_path, *items, name="f.jsonl"):
    (tmp_path / name).write_text("".join(json.dumps(item) + "\n" for item in items))
    return tmp_path / name


def columns(tmp_path, *items, **options):
    return read(written(tmp_path, *items), **({"problem": "q", "steps": "s"} | options))


def texts_of(record):
    tree = tree_of(record)
    return [[tree.nodes[i].text for i in chain] for chain in chains_of(tree)]


# ---- Steps: nested, tagged, whole solutions.

NESTED = [["1. a"], ["2. b", "more"], ["3. c"]]


@pytest.mark.parametrize(
    ("item", "options", "steps", "labels"),
    [
        ({"s": [["a"], ["b"]]}, {}, [["a", "b"]], [None]),
        ({"s": NESTED}, {"nested": "steps"}, [["1. a", "2. b\nmore", "3. c"]], [None]),
        ({"s": [["a"], ["b"]]}, {"nested": "chains"}, [["a"], ["b"]], [None, None]),
        ({"s": [["a"], ["b"]], "l": [1, 0]}, {"labels": "l"}, [["a", "b"]], [[1, 0]]),
        ({"s": [["a", "b"], ["c"]], "l": [1, 0]}, {"labels": "l"}, [["a\nb", "c"]], [[1, 0]]),
        (
            {"s": NESTED, "f": 2},
            {"first_error": "f", "first_step": 1},
            [["1. a", "2. b\nmore", "3. c"]],
            [[1, 0, None]],
        ),
        (
            {"s": NESTED, "f": "N/A"},
            {"first_error": "f", "first_step": 1},
            [["1. a", "2. b\nmore", "3. c"]],
            [[1, 1, 1]],
        ),
        ({"s": [["a", "b"], ["c", "d"]]}, {}, [["a", "b"], ["c", "d"]], [None, None]),
        ({"s": [["a"], ["b"]], "l": [[1], [0]]}, {"labels": "l"}, [["a"], ["b"]], [[1], [0]]),
        ({"s": "One. ки\nTwo. ки", "l": [1, 0]}, {"labels": "l"}, [["One.", "Two."]], [[1, 0]]),
        ({"s": "One.<extra_0>Two.<extra_0>", "l": ["+", "-"]}, {"labels": "l"}, [["One.", "Two."]], [[1, 0]]),
        ({"s": ["One. ки", "Two. ки"]}, {}, [["One.", "Two."]], [None]),
        ({"s": ["Раскроем скобки", "Ответ: 4"]}, {}, [["Раскроем скобки", "Ответ: 4"]], [None]),
        ({"s": "Раскроем скобки.\nОтвет: 4"}, {}, [["Раскроем скобки.", "Ответ: 4"]], [None]),
        ({"s": "2 + 2 = $4$.ки\nSo 4ки", "l": [1, 0]}, {"labels": "l"}, [["2 + 2 = $4$.", "So 4"]], [[1, 0]]),
        (
            {"s": "p\nStep 1: a ки\nStep 2: b ки", "l": ["+", "-"]},
            {"labels": "l"},
            [["Step 1: a", "Step 2: b"]],
            [[1, 0]],
        ),
        ({"s": ["a", "b"], "l": None}, {"labels": "l"}, [["a", "b"]], [None]),
        (
            {"t": [{"steps": ["a"], "labels": None}, {"steps": ["b"], "labels": [1]}, {"steps": ["c"]}]},
            {"steps": "t.steps", "labels": "t.labels"},
            [["a"], ["b"], ["c"]],
            [None, [1], None],
        ),
    ],
)
def test_steps_are_read_from_every_nesting(tmp_path, item, options, steps, labels):
    records = columns(tmp_path, {"q": "p"} | item, **options)
    assert [record["steps"] for record in records] == steps
    assert [record.get("labels") for record in records] == labels


def test_objects_with_lists_of_steps_are_chains(tmp_path):
    thoughts = [{"steps": ["a"], "labels": None}, {"steps": ["b", "c"], "labels": None}]
    records = columns(tmp_path, {"q": "p", "t": thoughts}, steps="t.steps", labels="t.labels")
    assert [record["steps"] for record in records] == [["a"], ["b", "c"]]


def test_prefixes_of_one_solution_are_no_steps(tmp_path):
    refused(
        RecordError, "s: holds prefixes", columns, tmp_path, {"q": "p", "s": ["2 + 2", "2 + 2 = 4", "2 + 2 = 4. So 4."]}
    )
    for steps in (["2", "2 + 2 = 4"], ["a", "a", "a"], ["a", "ab", "ac"]):
        assert columns(tmp_path, {"q": "p", "s": steps})[0]["steps"] == steps


def test_lists_that_may_be_steps_or_chains_need_a_word(tmp_path):
    refused(RecordError, "s: holds 3 lists.*nested=steps or nested=chains", columns, tmp_path, {"q": "p", "s": NESTED})


def test_problem_and_steps_of_one_text_are_parted(tmp_path):
    text = "What is 1? Step 1: It is. ки\nStep 2: So 1. ки"
    (record,) = columns(tmp_path, {"i": text, "v": ["+", "-"]}, problem="i", steps="i", labels="v")
    assert (record["problem"], record["steps"]) == ("What is 1?", ["Step 1: It is.", "Step 2: So 1."])
    assert record["labels"] == [1, 0]


@pytest.mark.parametrize("option", ["labels", "first_error", "correct"])
def test_a_column_may_be_absent_from_some_records_but_not_from_all(tmp_path, option):
    values = {"labels": [[1, 0]], "first_error": 1, "correct": [True]}
    steps = {"s": ["a", "b"]} if option == "first_error" else {"s": [["a", "b"]]}
    options = {"samples": "s"} if option != "first_error" else {"first_step": 1}
    assert (
        len(columns(tmp_path, {"q": "p", "x": values[option]} | steps, {"q": "r"} | steps, **options, **{option: "x"}))
        == 2
    )
    refused(
        RecordError, "y: is in no record", columns, tmp_path, {"q": "p", "x": 1} | steps, **options, **{option: "y"}
    )
    nested = {"q": "p", "m": {"x": 1}} | steps
    refused(RecordError, "m.y: is in no record", columns, tmp_path, nested, **options, **{option: "m.y"})


SOLUTIONS = ["2 + 2 = 4.\n\nThe answer is 4.", "2 + 2 = 5.\n\nThe answer is 5."]


@pytest.mark.parametrize("column", ["completions", "responses", "code", "answers"])
def test_whole_solutions_never_become_a_chain(tmp_path, column):
    item = {"problem": "What is 2 + 2?", column: SOLUTIONS, "answer": "4"}
    path = written(tmp_path, item)
    refused(RecordError, f"{column}: holds 2 whole solutions.*--set samples={column}", read, path, steps=column)
    assert read(path, steps=column, nested="steps")[0]["steps"] == SOLUTIONS
    (pool,) = read(path, samples=column, answer="answer")
    assert texts_of(pool) == [["2 + 2 = 4.", "The answer is 4."], ["2 + 2 = 5.", "The answer is 5."]]
    assert pool["answer"] == "4" and [sample["response"] for sample in pool["samples"]] == SOLUTIONS
    refused(RecordError, "labels", read, written(tmp_path, item | {"labels": [1, 0]}), samples=column)


def test_stepwise_records_of_whole_solutions_are_refused(tmp_path):
    path = written(tmp_path, {"prompt": "What is 2 + 2?", "completions": SOLUTIONS})
    refused(RecordError, "completions: hold whole solutions.*prepare pools", list, read_records(path))
    path = written(tmp_path, {"problem": "What is 2 + 2?", "completions": ["a", "b"], "scores": [[1], [0]]})
    refused(RecordError, "prompt: is absent.*prepare pools", list, read_records(path))
    assert not are_solutions(["2 + 2 = 4.", "So the answer is 4."])


# ---- Pools.


@pytest.mark.parametrize(
    "samples", [SOLUTIONS, [{"response": text} for text in SOLUTIONS], [{"text": text} for text in SOLUTIONS]]
)
def test_samples_may_be_texts(tmp_path, samples):
    record = {"problem": "p", "answer": "4", "samples": samples}
    pools = list(read_records(written(tmp_path, record)))
    for pool in (*pools, *read(written(tmp_path, record), "pools"), *read(written(tmp_path, record), "jsonl")):
        assert texts_of(pool)[1] == ["2 + 2 = 5.", "The answer is 5."]
    refused(RecordError, r"samples\[0\]", list, read_records(written(tmp_path, {"problem": "p", "samples": [5]})))


@pytest.mark.parametrize("tagged", ["2 = 2.\nIt is. ки\nSo 4.ки", "2 = 2.\nIt is.<extra_0>So 4.<extra_0>"])
def test_samples_end_their_steps_at_tags(tmp_path, tagged):
    steps, response = ["2 = 2.\nIt is.", "So 4."], "2 = 2.\nIt is.\nSo 4."
    item = {"q": "p", "r": [{"response": tagged, "l": [1, 0]}]}
    for sample in (
        columns(tmp_path, item, samples="r.response", labels="r.l")[0]["samples"][0],
        columns(tmp_path, item, samples="r")[0]["samples"][0],
        read(written(tmp_path, {"problem": "p", "completions": [tagged]}), "pools")[0]["samples"][0],
        *read(written(tmp_path, {"problem": "p", "response": tagged}), "jsonl"),
    ):
        assert (sample["steps"], sample["response"]) == (steps, response)


LAYOUTS = {
    "search-and-learn": {"problem": "p", "answer": "4", "completions": SOLUTIONS, "scores": [[0.1, 0.2], [0.3, 0.4]]},
    "its_hub": {"prompt": "p", "responses": SOLUTIONS, "answer": "4", "selected_index": 0},
    "lm-eval": {"doc_id": 0, "doc": {"question": "p", "answer": "x #### 4"}, "target": "x #### 4", "resps": [SOLUTIONS],
                "filtered_resps": ["4"], "exact_match": 1.0},
    "Qwen2.5-Math": {"idx": 0, "question": "p", "gt": "4", "code": SOLUTIONS, "pred": ["4", "5"],
                     "score": [True, False], "pred_score": [3.5, 1.0]},
    "RLHFlow": {"prompt": "p", "answers": SOLUTIONS, "labels": [1, 0], "gt": "4"},
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_pools_of_other_projects_are_read(tmp_path, name):
    (pool,) = read(written(tmp_path, LAYOUTS[name]), "pools")
    assert (pool["problem"], pool["answer"]) == ("p", "4")
    assert texts_of(pool)[0] == ["2 + 2 = 4.", "The answer is 4."]
    if name == "search-and-learn":
        assert [sample["scores"] for sample in pool["samples"]] == [[0.1, 0.2], [0.3, 0.4]] and pool[
            "semantics"
        ] == "value"
    if name in ("Qwen2.5-Math", "RLHFlow"):
        assert [sample["correct"] for sample in pool["samples"]] == [True, False]
    if name == "Qwen2.5-Math":
        assert [sample["answer"] for sample in pool["samples"]] == ["4", "5"] and pool["pred_score"] == [3.5, 1.0]


MARKED = "Intro:\n\nStep 1: a\n\n```\nx\n\ny\n```\nStep 2: b"


@pytest.mark.parametrize("option", ["scores", "labels"])
def test_entries_for_the_pieces_between_blank_lines_make_them_steps(tmp_path, option):
    pieces, entries = MARKED.split("\n\n"), [1, 1, 0, 1]
    (chain,) = columns(tmp_path, {"q": "p", "s": MARKED, "x": entries}, **{option: "x"})
    (pool,) = columns(
        tmp_path, {"q": "p", "s": [MARKED], "x": [entries]}, samples="s", semantics="value", **{option: "x"}
    )
    (sample,) = pool["samples"]
    assert (chain["steps"], chain[option]) == (sample["steps"], sample[option]) == (pieces, entries)
    assert (pool["semantics"], sample["segmentation"]) == ("value", "paragraphs")
    blank = {"q": "p", "s": MARKED + "\n\n\n\nEnd", "x": [*entries, 0.5, 1]}
    assert columns(tmp_path, blank, **{option: "x"})[0]["steps"] == [*pieces, "End"]
    both = columns(tmp_path, blank | {"s": [blank["s"]], "x": [blank["x"]]}, samples="s", scores="x", labels="x")[0]
    assert both["samples"][0]["scores"] == both["samples"][0]["labels"] == [*entries, 1]
    rule = columns(tmp_path, {"q": "p", "s": MARKED, "x": [1, 0, 1]}, **{option: "x"})  # three by the rule of texts
    assert rule[0][option] == [1, 0, 1] and rule[0]["segmentation"] == "markers"
    refused(RecordError, "x: has 5 entries", columns, tmp_path, {"q": "p", "s": MARKED, "x": [1] * 5}, **{option: "x"})


@pytest.mark.parametrize("scores", [None, 0.5, [[0.5] * 4], [[0.5] * 2, [0.5] * 3], [0.5, 0.5], [["a"], 1]])
def test_scores_that_are_not_of_the_steps_stay_as_they_are(tmp_path, scores):
    item = {"problem": "p", "completions": SOLUTIONS, "scores": scores}
    (pool,) = read(written(tmp_path, item), "pools")
    assert len(pool["samples"]) == 2 and pool["columns"] == {"scores": scores}


def test_columns_of_samples_have_one_entry_each(tmp_path):
    item = {"q": "p", "r": SOLUTIONS, "ok": ["correct", "wrong"], "l": [[1, 1], [1, 0]], "flat": [1, 0]}
    (pool,) = columns(tmp_path, item, samples="r", correct="ok", labels="l")
    assert [sample["correct"] for sample in pool["samples"]] == [True, False]
    assert [sample["labels"] for sample in pool["samples"]] == [[1, 1], [1, 0]]
    refused(RecordError, r"flat\[0\].*correct=flat", columns, tmp_path, item, samples="r", labels="flat")
    refused(RecordError, "ok: has 1 entries for 2", columns, tmp_path, item | {"ok": [1]}, samples="r", correct="ok")
    empty = item | {"r": ["", *SOLUTIONS]}
    refused(RecordError, r"samples\[0\].steps: is empty", columns, tmp_path, empty, samples="r")
    assert columns(tmp_path, empty, samples="r", empty_samples="drop")[0]["empty_samples"] == 1


def test_a_sample_without_an_answer_is_incorrect_and_does_not_vote(tmp_path):
    item = {
        "q": "p",
        "r": [{"t": "2 + 2 = 4.", "a": "4", "ok": True}, {"t": "Hm.", "a": "[invalid]", "ok": "[invalid]"}],
    }
    (pool,) = columns(tmp_path, item, samples="r.t", predictions="r.a", correct="r.ok")
    assert [(sample["answer"], sample["correct"]) for sample in pool["samples"]] == [("4", True), (None, False)]


# ---- Other projects' files.


def test_openr_files_are_trees_and_chains(tmp_path):
    states = [("q?", 0.5), ("q?\n\na", 0.75), ("q?\n\na\n\nb", 1.0), ("q?\n\nc", 0.0)]
    prefixes = {"question": "q?", "final_answer": "3", "reasoning_steps": [
        {"solution_prefix": text, "mc_value": value} for text, value in states]}  # fmt: skip
    leaf = {"text": "b", "mc_value": 1.0, "children": []}
    inner = [{"text": "a", "mc_value": 0.75, "children": [leaf]}, {"text": "c", "mc_value": 0.0, "children": []}]
    root = {"text": "q?", "mc_value": 0.5, "children": inner}
    nested = {"question": "q?", "final_answer": "3", "reasoning_steps": root}
    nodes = [{"parent": -1, "text": "a", "label": 0.75}, {"parent": 0, "text": "b", "label": 1.0},
             {"parent": -1, "text": "c", "label": 0.0}]  # fmt: skip
    for item in (prefixes, nested):
        (record,) = read(written(tmp_path, item), "math_aps")
        assert record == {"problem": "q?", "nodes": nodes, "semantics": "value", "answer": "3"}
    tagged = {"question": "q?", "process": "Step 1: a ки\nStep 2: b ки", "labels": [1, 0]}
    (record,) = read(written(tmp_path, tagged), "math_aps")
    assert (record["steps"], record["labels"]) == (["Step 1: a", "Step 2: b"], [1, 0])
    wrong = {"question": "q?", "reasoning_steps": [{"solution_prefix": "other", "mc_value": 1.0}]}
    refused(RecordError, r"reasoning_steps\[0\].solution_prefix", read, written(tmp_path, wrong), "math_aps")


def test_published_trees_are_read(shared_data):
    records = read(shared_data / "samples" / "omegaprm_trees.jsonl", "math_aps")
    assert len(records) == 3 and {record["semantics"] for record in records} == {"value"}
    first = json.loads((shared_data / "samples" / "omegaprm_trees.jsonl").open().readline())
    count, waiting = -1, [first["reasoning_steps"]]
    while waiting:
        node = waiting.pop()
        count, waiting = count + 1, waiting + node["children"]
    assert len(records[0]["nodes"]) == count and records[0]["answer"] == "3"


@pytest.mark.parametrize("key", ["value", "label", "labels"])
def test_math_shepherd_with_a_list_of_signs(tmp_path, key):
    item = {"input": "p Step 1: a ки\nStep 2: The answer is: 3 ки", key: ["+", "-"]}
    (record,) = read(written(tmp_path, item), "math_shepherd")
    assert (record["problem"], record["labels"], record["correct"]) == ("p", [1, 0], False)
    refused(RecordError, f"{key}: has 1 entries for 2", read, written(tmp_path, item | {key: ["+"]}), "math_shepherd")


def test_versaprm_chains_without_labels_are_unlabelled(tmp_path):
    thoughts = [{"steps": ["a", "b"], "labels": [1, -1]}, {"steps": ["c"], "labels": None}, {"steps": ["d"]}]
    records = read(written(tmp_path, {"question": "q", "chain_of_thoughts": thoughts}), "versaprm")
    assert [record.get("labels") for record in records] == [[1, 0], None, None]


# ---- Prompts, problems, and columns that no option names.


def test_a_prompt_may_be_messages(tmp_path):
    prompt = [{"role": "system", "content": "Think."}, {"role": "user", "content": "What is 1?"}]
    verl = {"prompt": prompt, "reward_model": {"ground_truth": "18", "style": "rule"}, "extra_info": {"index": 7}}
    (record,) = columns(tmp_path, verl, problem="prompt", steps="", answer="reward_model.ground_truth")
    assert record == {"problem": "What is 1?", "system": "Think.", "answer": "18", "reward_model": {"style": "rule"},
                      "extra_info": {"index": 7}}  # fmt: skip
    (record,) = columns(tmp_path, {"prompt": prompt[1:]}, problem="prompt.content", steps="")
    assert record["problem"] == "What is 1?"
    shared = [{"from": "system", "value": "Think."}, {"from": "human", "value": "What is 1?"}]
    item = {"c": shared, "chosen": {"from": "gpt", "value": "1."}}
    (record,) = columns(tmp_path, item, problem="c", steps="chosen.value")
    assert (record["system"], record["problem"], record["steps"]) == ("Think.", "What is 1?", ["1."])
    refused(RecordError, "role: is 'assistant'", columns, tmp_path, {"c": [{"from": "gpt"}]}, problem="c", steps="")
    refused(RecordError, "prompt.content: holds 2", columns, tmp_path, verl, problem="prompt.content", steps="")


def test_a_table_of_problems_is_read_by_samplers(tmp_path):
    records = columns(
        tmp_path, {"q": "p", "gold": 3, "id": "a"}, {"q": "r", "gold": 4, "id": "b"}, steps="", answer="gold"
    )
    assert records[0] == {"problem": "p", "answer": 3, "id": "a"}
    problems = [problem for _, problem in read_problems(written(tmp_path, *records))]
    assert [(problem.text, problem.answer) for problem in problems] == [("p", 3), ("r", 4)]


def test_problems_of_earlier_pools_keep_only_keys_about_the_problem(tmp_path):
    about = {"id": "a", "level": 3, "tests": ["assert f()"]}
    earlier = {
        "samples": [],
        "empty_samples": 2,
        "failed_samples": 1,
        "judge": {"tokens": 7},
        "search": {"chosen": None},
    }
    chain = {"steps": ["x"], "labels": [1], "correct": False, "outputs": {"low": [0.5]}, "scores": [0.5]}
    records = [{"problem": "p", "answer": "3", **about, **earlier}, {"problem": "q", "level": 1, **chain}]
    problems = [problem for _, problem in read_problems(written(tmp_path, *records))]
    assert [(problem.answer, problem.extra) for problem in problems] == [("3", about), (None, {"level": 1})]


def test_other_columns_stay_in_the_record(tmp_path):
    item = {"q": "p", "t": [{"text": "a", "label": 1, "by": "x"}], "id": "x7", "annotator": "ana", "answer": "long",
            "scores": [1]}  # fmt: skip
    (record,) = columns(tmp_path, item, steps="t.text", labels="t.label")
    assert (record["id"], record["annotator"], record["t"]) == ("x7", "ana", [{"by": "x"}])
    assert record["columns"] == {"answer": "long", "scores": [1]} and "answer" not in record
    nested = {"q": "p", "s": [["a", "b"], ["c", "d"]], "id": "x"}
    assert [record["id"] for record in columns(tmp_path, nested)] == ["x.0", "x.1"]


# ---- Words and numbers.


@pytest.mark.parametrize(
    ("value", "correctness", "rating"),
    [
        ("good", 1, 1), ("bad", 0, -1), ("Correct", 1, 1), ("INCORRECT", 0, -1), ("yes", 1, 1), ("no", 0, -1),
        ("right", 1, 1), ("wrong", 0, -1), ("POSITIVE", 1, 1), ("negative", 0, -1), (" + ", 1, 1), ("-", 0, -1),
        (True, 1, 1), (False, 0, -1), ("1", 1, 1), ("0", 0, 0), ("-1", -1, -1), ("-1.0", -1, -1), ("+1", 1, 1),
        ("0.5", 0.5, 0.5), ("1e-1", 0.1, 0.1), ("", None, None), ("N/A", None, None), ("null", None, None),
        ("nan", None, None), (None, None, None), (0.25, 0.25, 0.25), ("true", 1, 1), ("False", 0, -1),
    ],
)  # fmt: skip
def test_labels_are_words_and_numbers(value, correctness, rating):
    assert label_of(value, "correctness", "f:1", "l") == correctness
    assert label_of(value, "rating", "f:1", "l") == rating


def test_neutral_is_a_rating():
    assert label_of("neutral", "rating", "f:1", "l") == 0
    refused(RecordError, "semantics=rating", label_of, "neutral", "correctness", "f:1", "l")
    for value in ("perhaps", [], {}, [1], "1 2", "++"):
        refused(RecordError, "f:1: l: holds", label_of, value, "correctness", "f:1", "l")


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(True, True), (0, False), (1.0, True), ("1.0", True), ("0.0", False), ("GOOD", True), ("bad", False), ("", None),
     ("pass", True), (None, None), ("POSITIVE", True)],
)  # fmt: skip
def test_verdicts_are_words_and_numbers(value, verdict):
    assert verdict_of(value, "f:1", "c") is verdict
    for wrong in ("perhaps", 2, 0.5, [True], {}):
        refused(RecordError, "f:1: c:", verdict_of, wrong, "f:1", "c")


@pytest.mark.parametrize(
    ("value", "place"),
    [(1, 1), (1.0, 1), ("1.0", 1), ("1", 1), (-1.0, -1), ("-1.0", -1), ("nan", -1), ("N/A", -1), (None, -1), ("0", 0)],
)
def test_places_are_integers_of_any_type(value, place):
    assert place_of(value, 0, 3, "f:1", "first") == place
    for wrong in (1.5, "x", True, [1], {}, 3, "1.5"):
        refused(RecordError, "f:1: first:", place_of, wrong, 0, 3, "f:1", "first")


# ---- CSV as libraries write it.

LISTS = {
    "['a, b' 'c']": ["a, b", "c"],
    "['First 2 + 3 = 5.' 'Then 5 + 4 = 9.'\n 'So 9.']": ["First 2 + 3 = 5.", "Then 5 + 4 = 9.", "So 9."],
    "[\"it's\" 'so']": ["it's", "so"],
    "['a', 'b']": ["a", "b"],
    '["a", "b"]': ["a", "b"],
    "[1. 0.]": [1.0, 0.0],
    "[ True False]": [True, False],
    "[1.0, nan]": [1.0, None],
    "[nan 1.]": [None, 1.0],
    "[np.float64(1.0), np.float64(0.0)]": [1.0, 0.0],
    "[array(['a', 'b'], dtype=object)\n array(['c'], dtype=object)]": [["a", "b"], ["c"]],
    "[list(['a']) list(['b'])]": [["a"], ["b"]],
    "[{'text': 'a', 'label': 1} {'text': 'b', 'label': 0}]": [{"text": "a", "label": 1}, {"text": "b", "label": 0}],
    "[NULL, 1]": [None, 1],
    "[]": [],
    "{'a': array([1, 2])}": {"a": [1, 2]},
}


@pytest.mark.parametrize("text", LISTS)
def test_a_list_is_read_as_libraries_write_it(text):
    assert literal(text) == LISTS[text]


@pytest.mark.parametrize(
    "text",
    ["[First a., Then b.]", "['a', b]", "['a' 'b', 'c']", "[0 ... 5]", "[0,1)", "['a", "[1]]", "{1: 2}", "[f(1) 2 g]",
     "[" * 5000 + "]" * 5000, "[dtype=object]", "[array(['a'], 'b')]", "['a': 1]"],
)  # fmt: skip
def test_a_text_that_is_no_list_stays_text(text):
    assert literal(text) is None


plain = st.text() | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans()


@given(st.lists(st.recursive(plain, lambda inner: st.lists(inner, max_size=3), max_leaves=4), max_size=4))
def test_what_python_writes_is_read_back(value):
    assert literal(repr(value)) == value


@given(st.text("[]{}()'\",: a1.\\\n", max_size=30))
def test_no_text_crashes(text):
    literal(f"[{text}]")
    literal(f"{{{text}}}")


def as_csv(tmp_path, rows, write):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(rows)
    if write == "numpy":  # as datasets and read_parquet have lists
        numpy = pytest.importorskip("numpy")
        frame = frame.map(lambda value: numpy.array(value, dtype=object) if isinstance(value, list) else value)
    frame.to_csv(tmp_path / f"{write}.csv", index=False)
    return tmp_path / f"{write}.csv"


@pytest.mark.parametrize("write", ["pandas", "numpy"])
def test_csv_of_processbench_gives_its_records(tmp_path, shared_data, write):
    rows = json.loads((shared_data / "processbench" / "gsm8k.json").read_text())
    expected = read(shared_data / "processbench" / "gsm8k.json", "processbench")
    assert read(as_csv(tmp_path, rows, write), "processbench") == expected


def test_csv_of_nested_objects_gives_the_records(tmp_path, shared_data):
    path = shared_data / "samples" / "prm800k_raw.jsonl"
    options = {"human_written": "positive", "control_questions": "keep"}
    expected = read(path, "prm800k", **options)
    csv = as_csv(tmp_path, [json.loads(line) for line in path.open()], "pandas")
    assert [record["nodes"] for record in read(csv, "prm800k", **options)] == [record["nodes"] for record in expected]


def test_numbers_and_booleans_of_csv_are_typed_by_the_reader(tmp_path):
    (tmp_path / "f.csv").write_text(
        'problem,steps,labels,correct,answer,id,n,code\n12,"[\'a\', \'b\']","[1, 0]",True,"[0,1]",7,0.5,007\n'
    )
    chain = {"problem": "12", "steps": ["a", "b"], "labels": [1, 0], "answer": "[0,1]"}
    (record,) = read(tmp_path / "f.csv", "jsonl")
    assert {key: record[key] for key in chain} == chain and record["correct"] is True
    assert (record["id"], record["n"], record["code"]) == (7, 0.5, "007")
    (record,) = read(tmp_path / "f.csv", labels="labels", answer="answer", correct="correct")
    assert {key: record[key] for key in chain} == chain and record["correct"] is True and record["id"] == 7


def test_a_list_in_a_text_is_a_list(tmp_path):
    """As tables of text columns have it, in Parquet and JSON Lines too."""
    item = {"q": "p", "s": "['a', 'b']", "l": "[1, 0]", "r": "['x y', 'z']", "c": "[True, False]"}
    (record,) = columns(tmp_path, item, labels="l")
    assert (record["steps"], record["labels"]) == (["a", "b"], [1, 0])
    (pool,) = columns(tmp_path, item, samples="r", correct="c")
    assert [sample["correct"] for sample in pool["samples"]] == [True, False]
    refused(RecordError, "l: is str, not list", columns, tmp_path, item | {"l": "1, 0"}, labels="l")
    refused(RecordError, "r: is str, not list", columns, tmp_path, item | {"r": "x"}, samples="r")


def test_a_null_answer_is_none_and_an_absent_column_is_refused(tmp_path):
    item = {"q": "p", "s": ["a"], "gold": None}
    assert "answer" not in columns(tmp_path, item, answer="gold")[0]
    refused(RecordError, "gould: .*gold=None", columns, tmp_path, item, answer="gould")


def test_the_index_of_pandas_is_no_column(tmp_path):
    (tmp_path / "f.csv").write_text(",problem,steps\n0,p,\"['a']\"\n")
    assert read(tmp_path / "f.csv") == [{"problem": "p", "steps": ["a"]}]


def test_a_list_without_quotes_is_refused(tmp_path):
    (tmp_path / "f.csv").write_text('problem,steps\np,"[First 2 + 3 = 5., Then 5 + 4 = 9.]"\n')
    refused(RecordError, r"f.csv:2: steps: .*cannot be told from text.*Parquet", read, tmp_path / "f.csv")
    refused(RecordError, r"f.csv:2: steps", read, tmp_path / "f.csv", "jsonl")


# ---- Files that hold their splits, wrappers, and one conversation.

ONE, TWO = {"problem": "p", "steps": ["a"]}, {"problem": "q", "steps": ["b"]}


def in_json(tmp_path, content):
    (tmp_path / "f.json").write_text(json.dumps(content))
    return tmp_path / "f.json"


@pytest.mark.parametrize(
    "content",
    [{"train": [ONE, TWO], "test": [TWO]}, {"train": [ONE, TWO], "validation": [ONE], "note": "x"},
     {"train_sft": [ONE, TWO], "test_sft": [TWO]}],
)  # fmt: skip
def test_splits_are_named_and_one_is_read(tmp_path, content):
    path = in_json(tmp_path, content)
    first, second = list(content)[:2]
    refused(ValueError, f"f.json: holds the splits {first}, {second}.*--set split=", read, path, "jsonl")
    assert read(path, "jsonl", split=first) == [ONE, TWO]
    refused(ValueError, "holds no split 'x'", read, path, "jsonl", split="x")
    refused(ValueError, "holds no split", read, written(tmp_path, ONE), "jsonl", split="x")


@pytest.mark.parametrize(
    "content",
    [{"version": "1.0", "data": [ONE, TWO]}, {"errors": [], "data": [ONE, TWO]}, {"results": [ONE, TWO]},
     {"data": [ONE, TWO], "meta": {"n": 2}}, {"train": [ONE, TWO], "info": "x"}, {"logic": [ONE], "coding": [TWO]}],
)  # fmt: skip
def test_a_wrapper_is_its_items(tmp_path, content):
    assert read(in_json(tmp_path, content), "jsonl") == [ONE, TWO]


def test_an_object_with_a_problem_is_one_record(tmp_path):
    record = ONE | {"data": [{"x": 1}]}
    assert read(in_json(tmp_path, record), "jsonl") == [record]


def test_a_list_of_messages_is_one_conversation(tmp_path):
    messages = [{"role": "system", "content": "Do {it}."}, {"content": "[x]", "role": "user"},
                {"role": "assistant", "content": "Done."}, {"role": "user", "content": "And?"},
                {"role": "assistant", "content": "That too."}]  # fmt: skip
    (record,) = read(in_json(tmp_path, messages), "openai")
    assert [message["content"] for message in record["messages"]] == [message["content"] for message in messages]


# ---- Errors name the reader.


def test_an_error_names_the_reader_of_the_record(tmp_path, shared_data):
    shepherd = shared_data / "samples" / "math_shepherd_raw.jsonl"
    refused(RecordError, "jprm prepare math_shepherd", read, shepherd, "processbench")
    refused(RecordError, "jprm prepare math_shepherd", list, read_records(shepherd))
    refused(RecordError, "jprm prepare processbench", read, shared_data / "processbench" / "gsm8k.json", "prmbench")
    refused(RecordError, "jprm prepare pools", list, read_records(written(tmp_path, LAYOUTS["Qwen2.5-Math"])))
    refused(RecordError, "samples=NAME", list, read_records(written(tmp_path, {"question": "p"})))
    message = written(tmp_path, {"role": "user", "content": "hi"})
    refused(RecordError, "one message", read, message, "openai")
    refused(
        RecordError, "jprm prepare columns", read, written(tmp_path, {"question": "p", "cot": ["a"]}), "processbench"
    )
    assert readers_of({"x": 1}) == readers_of([]) == readers_of(None) == []


# ---- Any cell, in any nesting, is a record or an error.

scalar = st.none() | st.booleans() | st.integers(-2, 3) | st.floats(-2, 2) | st.sampled_from(
    ["", "a", "nan", "1", "+", "good", "p Step 1: a ки", "x\n\ny", "\\boxed{1}", "\u200b"]
)  # fmt: skip
cell = st.recursive(
    scalar,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "role", "content"]), inner),
    max_leaves=6,
)
NAMES = ("problem", "steps", "samples", "labels", "first", "answer", "correct", "predictions", "id")


@given(
    item=st.dictionaries(st.sampled_from(NAMES), cell) | cell,
    named=st.sets(st.sampled_from(["samples", "labels", "first_error", "answer", "correct", "predictions"])),
    steps=st.sampled_from(["steps", "", "steps.text"]),
    semantics=st.sampled_from(["correctness", "rating"]),
)
def test_any_cell_gives_a_record_or_an_error_with_its_place(item, named, steps, semantics):
    options = {name: name for name in named} | {"steps": steps, "semantics": semantics}
    if "first_error" in named:
        options |= {"first_error": "first", "first_step": 0}
        options.pop("labels", None)
        options.pop("samples", None)
    try:
        for record in parse_columns(item, "f:1", ColumnOptions(**options)):
            check_record(record, "f:1")
            jsonl.dump(record)
    except RecordError as error:
        assert str(error).startswith("f:1: ") and error.field


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\x00\r\n"), max_size=12), min_size=3, max_size=3)
)
def test_any_cell_of_csv_gives_a_record_or_an_error(tmp_path_factory, cells):
    path = tmp_path_factory.mktemp("csv") / "f.csv"
    quoted = ",".join('"' + text.replace('"', '""') + '"' for text in cells)
    path.write_text(f"problem,steps,correct\n{quoted}\np,s,true\n", encoding="utf-8")
    with Rejects(path.with_suffix(".rejects")) as rejects:
        records = list(find("columns").read(path, on_error="skip", rejects=rejects, correct="correct"))
    assert len(records) + rejects.count == 1 + bool(any(cells))


@pytest.mark.parametrize("name", READERS)
@given(
    cells=st.dictionaries(
        st.sampled_from(
            "problem steps labels samples question label input answer solution value text completions".split()
        ),
        st.sampled_from(
            ["", "a", "1", "1.0", "True", "nan", "[]", "['a' 'b']", "[1. 0.]", "{'a': 1}", "[x, y]", "p ки"]
        ),
    )
)
@settings(max_examples=25)
def test_any_row_gives_records_or_an_error(name, cells):
    reader = find(name)
    item = TextRow(cells)
    try:
        for record in reader.parse([Event("f:1", item)] if reader.whole else item, "f:1", options_of(reader)):
            check_record(record, "f:1") if not isinstance(record, LeftOut) else None
    except (RecordError, Dropped) as error:
        assert str(error)
