"""Readers of published step labels: the layouts that the projects' own code reads or writes, in small."""

import json
import pathlib

import pytest
from refusing import refused

from jprm.methods.data.readers import find
from jprm.methods.judge.critiques import PROMPTS
from jprm.tree import RecordError, tree_of

LAYOUTS = json.loads((pathlib.Path(__file__).parent / "step_label_layouts.json").read_text(encoding="utf-8"))
SOURCES, BROKEN = LAYOUTS["sources"], LAYOUTS["broken"]


def read(name, tmp_path, item, **options):
    (tmp_path / "f.jsonl").write_text(json.dumps(item) + "\n")
    return [record for _, record in find(name.split()[0]).read(tmp_path / "f.jsonl", **options)]


@pytest.mark.parametrize("name", SOURCES)
def test_a_published_layout_is_read(tmp_path, name):
    item, wanted = SOURCES[name]
    (record,) = read(name, tmp_path, item)
    tree_of(record)
    assert {key: record.get(key) for key in wanted} == wanted


@pytest.mark.parametrize(("name", "item"), [(name, item) for name, items in BROKEN.items() for item in items])
def test_another_layout_is_refused(tmp_path, name, item):
    refused(RecordError, "f.jsonl:1", read, name, tmp_path, item)


def test_soft_labels_of_actprm(tmp_path):
    item = {"question": "q", "steps": ["a", "b"], "soft_labels": [0.5, 0.25]}
    assert read("actprm", tmp_path, item, labels="soft_labels")[0]["labels"] == [0.5, 0.25]


def test_r_prm_asks_about_the_last_step_after_the_others():
    prompt = PROMPTS["r-prm"]
    first, third = prompt.filled("q?", ["a"]), prompt.filled("q?", ["a", "b {last}", "c"])
    assert "Previous Steps: Since the Now Step is the first step, there are no Previous Steps.\nNow Step: a\n" in first
    assert "Question: q?\nPrevious Steps: a\nb {last}\nNow Step: c\nPlease" in third
