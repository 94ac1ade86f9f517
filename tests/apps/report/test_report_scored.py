"""`jprm report SCORED.jsonl`: the chains and runs of a scored file, the one with the lowest step first."""

import json
import re

import pytest
from refusing import refused

from jprm.apps import cli
from jprm.io.jsonl import write_records
from jprm.methods.data.prepare import prepare

CHAIN = {"problem": "1 + 1?", "steps": ["1 + 1 = 3.", "So 3."], "scores": [0.1, 0.4], "id": "c"}
POOL = {
    "problem": "2 + 2?", "answer": "4",
    "samples": [
        {"steps": ["4."], "scores": [0.9], "correct": True}, {"steps": ["5."], "scores": [0.05], "correct": False},
    ],
}  # fmt: skip
TREE = {
    "problem": "3 + 3?",
    "nodes": [{"parent": -1, "text": "6.", "score": 0.3}, {"parent": 0, "text": "ok", "score": 0.7}],
}
RUN = {
    "messages": [
        {"role": "user", "content": "book a flight"},
        {"role": "assistant", "content": "I look.", "score": 0.8},
        {"role": "tool", "content": "two flights"},
        {"role": "assistant", "content": "I take the wrong one."},
        {"role": "assistant", "content": "Done.", "score": 0.02},
    ],
    "outcome": 0, "id": "r7",
}  # fmt: skip


def page_of(path, tmp_path):
    assert cli.main(["report", str(path), "--output", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    (data,) = re.findall(r'<script type="application/json" id="chains">(.*?)</script>', text, re.S)
    return text, json.loads(data)


@pytest.mark.parametrize(
    ("record", "count", "lowest"), [(CHAIN, 1, 0.1), (POOL, 2, 0.05), (TREE, 1, 0.3), (RUN, 1, 0.02)]
)
def test_any_scored_record_is_a_page(record, count, lowest, tmp_path):
    write_records(tmp_path / "scored.jsonl", [record])
    text, data = page_of(tmp_path / "scored.jsonl", tmp_path)
    scores = [score for item in data["items"] for score in item["c"][0] if score is not None]
    assert len(data["items"]) == count and min(scores) == lowest
    assert 'id="verdict"' not in text  # no empty section
    assert re.search(r'<select id="sort">\s*<option value="lowest">', text)


def test_turns_without_a_score_stay_and_records_have_their_line_and_id(tmp_path):
    write_records(tmp_path / "judged.jsonl", [RUN | {"id": "a"}, RUN])
    text, data = page_of(tmp_path / "judged.jsonl", tmp_path)
    assert [item["r"] for item in data["items"]] == ["1 (a)", "2 (r7)"]
    assert data["items"][0]["c"] == [[0.8, None, 0.02]] and "2 steps of 2 records have no score" in text


def test_folders_and_reports_of_eval_stand_for_their_scored_chains(tmp_path):
    (tmp_path / "steps.json.scores").mkdir()
    write_records(tmp_path / "steps.json.scores" / "held.jsonl", [CHAIN])
    (tmp_path / "steps.json").write_text("{}")
    write_records(tmp_path / "scored.jsonl", [CHAIN])
    prepare("jsonl", [tmp_path / "scored.jsonl"], tmp_path / "folder")
    for path in ("steps.json", "folder"):
        assert len(page_of(tmp_path / path, tmp_path)[1]["items"]) == 1


def test_a_file_without_scores_or_with_scores_of_two_scales_is_refused(tmp_path, capsys):
    from jprm.apps.report.scored import collect_scored

    write_records(tmp_path / "plain.jsonl", [{"problem": "p", "steps": ["a"]}])
    refused(ValueError, r"no step has a score\. Score it first: jprm score", collect_scored, [tmp_path / "plain.jsonl"])
    write_records(tmp_path / "empty.jsonl", [])
    refused(ValueError, r"empty.jsonl: holds no record", collect_scored, [tmp_path / "empty.jsonl"])
    for name in ("a", "b"):
        write_records(tmp_path / f"{name}.jsonl", [CHAIN])
    info = {"version": 2, "scale": {"threshold": 0.0, "weight": "sigmoid", "redundancy": None}}
    (tmp_path / "b.jsonl.info.json").write_text(json.dumps(info))
    refused(ValueError, "different meaning", collect_scored, [tmp_path / "a.jsonl", tmp_path / "b.jsonl"])


def test_a_critique_stands_at_the_turn_that_it_is_about(tmp_path):
    """Nodes of a critique are messages; the page's are turns."""
    critiques = [{"nodes": [node], "status": "read", "tokens": 5, "text": f"of message {node}"} for node in (1, 3, 4)]
    write_records(tmp_path / "judged.jsonl", [RUN | {"judge": {"name": "j", "critiques": critiques}}])
    _, data = page_of(tmp_path / "judged.jsonl", tmp_path)
    ((of_model,),) = [item["j"] for item in data["items"]]
    assert [(at, text) for at, _, _, text in of_model] == [
        (0, "of message 1"),
        (1, "of message 3"),
        (2, "of message 4"),
    ]


CRITIQUE = {"nodes": [1], "status": "read", "tokens": 5, "text": "x"}


@pytest.mark.parametrize(
    "critiques", [None, 5, "x", {}, [5], [{}], [CRITIQUE | {"nodes": [[]]}], [CRITIQUE | {"text": 5}]]
)
def test_critiques_of_another_form_are_left_out(critiques, tmp_path):
    said = [{"judge": {"critiques": value}} for value in (critiques, [CRITIQUE])]
    records = [RUN | said[0], CHAIN | said[0] | {"scores": [1e308, -1e308]}, RUN | said[1] | {"id": "r8"}]
    write_records(tmp_path / "judged.jsonl", records)
    _, data = page_of(tmp_path / "judged.jsonl", tmp_path)
    assert [item["r"] for item in data["items"] if "j" in item] == ["3 (r8)"]


def test_critiques_that_could_not_be_read_are_named_and_so_is_a_file_that_is_not_there(tmp_path, capsys):
    unread = {"problem": "p", "steps": ["a"], "judge": {"asked": 1, "read": 0, "critiques": []}}
    write_records(tmp_path / "judged.jsonl", [unread])
    for name, said in (
        ("judged.jsonl", "None of the judge's critiques could be read"),
        ("gone.jsonl", "does not exist"),
    ):
        assert cli.main(["report", str(tmp_path / name), "--output", str(tmp_path / "page.html")]) == 2
        assert said in capsys.readouterr().err


def test_the_browser_shows_the_lowest_turn_first(browser, tmp_path):
    other = RUN | {"id": "ok", "messages": [*RUN["messages"][:2], {"role": "assistant", "content": "x", "score": 0.6}]}
    write_records(tmp_path / "judged.jsonl", [other, RUN])
    page_of(tmp_path / "judged.jsonl", tmp_path)
    browser.logs("browser")
    browser.open((tmp_path / "page.html").as_uri())
    browser.wait("return document.querySelectorAll('article').length === 2")
    first = browser.run("return document.querySelector('article').innerText")
    assert "judged.jsonl:2 (r7): run, not solved" in first and "lowest: turn 3 of 3, 0.020" in first
    assert "no score" in first and "no label" not in first
    assert browser.run("return document.querySelector('article .lowest .text').textContent") == "Done."
    assert browser.logs("browser") == []
