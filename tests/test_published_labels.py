"""Readers of published step labels: the layouts that the projects' own code reads or writes, in small."""

import json

import pytest

from jprm.methods.data.readers import find
from jprm.methods.judge.critiques import PROMPTS
from jprm.tree import RecordError, tree_of


def turns(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


SOURCES = {
    "rlhflow": (
        {"conversations": turns("What is 2 + 3?\n\nFor all n.\n\nAdd them.", "+", "It is 6.\n\n", "-")},
        {"problem": "What is 2 + 3?\n\nFor all n.", "steps": ["Add them.", "It is 6."], "labels": [1, 0]},
    ),
    "rlhflow Mistral": (
        {"conversations": turns("What is 2 + 3? Step 1: Add them.", "+", "Step 2: It is 6.", "-")},
        {"problem": "What is 2 + 3?", "steps": ["Step 1: Add them.", "Step 2: It is 6."], "labels": [1, 0]},
    ),
    "er_prm": (
        {"text": "What is 2 + 3? Step 1: Add. ки\nStep 2: It is 5. The answer is 5", "value": [0.7, 0.25]},
        {"problem": "What is 2 + 3?", "steps": ["Step 1: Add.", "Step 2: It is 5. The answer is 5"],
         "labels": [0.7, 0.25], "semantics": "value"},
    ),
    "er_prm tags": (
        {"text": "p Step 1: a ки\nStep 2: b ки", "value": [1]},
        {"problem": "p", "steps": ["Step 1: a", "Step 2: b"], "labels": [1, None]},
    ),
    "math_aps": (
        {"question": "q?", "process": "First.\n\nThen. \n\n\n\n\n", "label": ["-"]},
        {"problem": "q?", "steps": ["First.", "Then."], "labels": [None, 0], "semantics": "value"},
    ),
    "versaprm": (
        {"question": "q?", "chain_of_thoughts": "['a', \"it's b\"]", "labels": "[1, -1]", "answer": "C",
         "parsed_answer_correctness": False, "category": "law"},
        {"problem": "q?", "steps": ["a", "it's b"], "labels": [1, 0], "answer": "C", "correct": False,
         "category": "law"},
    ),
    "actprm": (
        {"question": "q?", "steps": ["a", "b", "c"], "hard_labels": [1, 0]},
        {"problem": "q?", "steps": ["a", "b", "c"], "labels": [1, 0, None]},
    ),
    "genprm_math": (
        {"conversations": [{"role": "system", "content": "You are a math teacher."}] + turns(
            "Question: q?\n\nFirst.", "<analyze>\\boxed{3}</analyze><output>\\boxed{Yes}</output>",
            "Then.", "<output>\\boxed{No}</output>")},
        {"problem": "q?", "steps": ["First.", "Then."], "labels": [1, 0]},
    ),
    "ultra_interact": (
        {"task": "Math_CoT", "trajectory": [{"from": "user", "value": "q?"}], "chosen": "Step 1: a\nStep 2: b",
         "rejected": "Step 1: a\nstill\nStep 2: c", "id": "x"},
        {"problem": "q?", "task": "Math_CoT", "samples": [
            {"steps": ["Step 1: a", "Step 2: b"], "correct": True},
            {"steps": ["Step 1: a\nstill", "Step 2: c"], "correct": False}]},
    ),
}  # fmt: skip

BROKEN = {
    "rlhflow": [{"conversations": turns("p\n\na", "?")}, {"conversations": turns("p\n\na")},
                {"conversations": turns("no step", "+")}, {"conversations": "x"}, {}],
    "er_prm": [{"text": "p Step 1: a ки", "value": [1, 1]}, {"text": "ки", "value": []},
               {"text": "no step", "value": [1]}],
    "math_aps": [{"question": "q", "process": "a", "label": ["+", "-"]},
                 {"question": "q", "process": " ", "label": ["+"]}],
    "versaprm": [{"question": "q", "chain_of_thoughts": "['a']", "labels": "[1, 1]"},
                 {"question": "q", "chain_of_thoughts": "__import__('os')", "labels": "[1]"},
                 {"question": "q", "chain_of_thoughts": ["a"], "labels": [2]}],
    "actprm": [{"question": "q", "steps": ["a"], "hard_labels": [1, 0]}],
    "genprm_math": [{"conversations": turns("Question: q\n\na", "no verdict")}],
    "ultra_interact": [{"trajectory": [{}, {}], "chosen": "a", "rejected": "b"},
                       {"trajectory": [{"value": "q"}], "chosen": " ", "rejected": "b"}],
}  # fmt: skip


def read(name, tmp_path, item, **options):
    (tmp_path / "f.jsonl").write_text(json.dumps(item) + "\n")
    return [record for _, record in find(name.split()[0]).read(tmp_path / "f.jsonl", **options)]


@pytest.mark.parametrize("name", SOURCES)
def test_a_published_layout_is_read(tmp_path, name):
    item, wanted = SOURCES[name]
    (found,) = read(name, tmp_path, item)
    tree_of(found)
    assert {key: found.get(key) for key in wanted} == wanted


@pytest.mark.parametrize(("name", "item"), [(name, item) for name, items in BROKEN.items() for item in items])
def test_another_layout_is_refused(tmp_path, name, item):
    with pytest.raises(RecordError):
        read(name, tmp_path, item)


def test_soft_labels_of_actprm(tmp_path):
    item = {"question": "q", "steps": ["a", "b"], "soft_labels": [0.5, 0.25]}
    assert read("actprm", tmp_path, item, labels="soft_labels")[0]["labels"] == [0.5, 0.25]


def test_r_prm_asks_about_the_last_step_after_the_others():
    prompt = PROMPTS["r-prm"]
    first, third = prompt.filled("q?", ["a"]), prompt.filled("q?", ["a", "b {last}", "c"])
    assert "Previous Steps: Since the Now Step is the first step, there are no Previous Steps.\nNow Step: a\n" in first
    assert "Question: q?\nPrevious Steps: a\nb {last}\nNow Step: c\nPlease" in third
