"""Trajectories to label, turn by turn: what may be done, what the page shows, and labels back on the messages."""

import random
import time

import numpy as np
import pytest
from annotating import SECRET, Desk, log_of, make
from test_annotate_page import DOWN, ENTER, Page
from test_turn_ids import read_by_jprm
from trajectories import branched, trajectory

from jprm.apps import cli
from jprm.apps.annotate import SelectConfig, study
from jprm.apps.annotate.quality import export, figures, tasks_of
from jprm.apps.annotate.study import rated_tree, select_file
from jprm.apps.annotate.tasks import Tasks
from jprm.io.jsonl import write_records
from jprm.token_tree import token_tree
from jprm.tokenizer import native_layout
from jprm.tree import NONE, read_records, tree_of, with_labels

ONCE = {"repeat_fraction": 0.0, "gold_fraction": 0.0}


def bare(record):
    """The record without labels, scores and outcomes."""
    (where,) = record.keys() & {"messages", "nodes"}
    marks = ("label", "score", "outcome", "correct", "origin")
    messages = [{key: value for key, value in message.items() if key not in marks} for message in record[where]]
    return {key: value for key, value in record.items() if key not in ("outcome", "semantics")} | {where: messages}


def label_all(tmp_path, records, names=("ana",), seed=0, **mix):
    """Ratings drawn at random, by problem and name, and the study's folder."""
    draw, rated = random.Random(seed), {}
    folder = make(tmp_path, work=records, names=names, **{**ONCE, **mix})
    with Desk(folder) as desk:
        for name in names:
            while tasks := desk.next(name).json()["tasks"]:
                pair = desk.walk(name, tasks[0], lambda step: draw.choice((-1, 0, 1)), draw.choice)
                rated.setdefault(tasks[0]["problem"], {})[name] = pair
        assert Tasks(study.read(folder), log_of(folder)).by_id == desk.tasks.by_id  # as after a restart
    return folder, rated


def test_labels_come_back_on_the_messages_and_nothing_is_lost(tmp_path):
    records = [trajectory(seed) | {"id": f"r{seed}", "problem": f"Task {seed}?", "more": [seed]} for seed in range(6)]
    parts = [{"type": "text", "text": text} for text in ("I look. ", "It is 3.")]
    parts = [{"role": "user", "content": "parts?"}, {"role": "assistant", "content": parts}]
    records.append({"messages": parts, "segment": "parts", "problem": "parts?"})
    folder, rated = label_all(tmp_path, records)
    export(folder, tmp_path / "out.jsonl", disagreements="each")
    by_problem = {record["problem"]: record for record in read_records(tmp_path / "out.jsonl")}
    assert len(by_problem) == 7
    for record in records:
        ratings, path = rated[record["problem"]]["ana"]
        assert path == sorted(ratings)  # each turn once, also after a wrong one
        marks = iter([ratings[step] for step in path])
        messages = [
            message if message["role"] != "assistant"
            else message | {"origin": "human"}
            | ({"labels": [next(marks), next(marks)]} if "segment" in record else {"label": next(marks)})
            for message in record["messages"]
        ]  # fmt: skip
        wanted = record | {"messages": messages, "semantics": "rating", "annotators": ["ana"]}
        assert by_problem[record["problem"]] == wanted
    assert any(-1 in list(both["ana"][0].values())[:-1] for both in rated.values())


def test_a_tree_of_messages_trains_as_if_it_had_been_labelled_by_hand(tmp_path):
    layout = native_layout(read_by_jprm("qwen3"))
    records = [branched(seed, users=False) | {"problem": f"Task {seed}?"} for seed in range(2, 8)]
    folder, rated = label_all(tmp_path, list(map(bare, records)))
    export(folder, tmp_path / "out.jsonl", disagreements="cut")
    several = 0
    for exported in read_records(tmp_path / "out.jsonl"):
        tree = tree_of(next(bare(record) for record in records if record["problem"] == exported["problem"]))
        ratings, path = rated[exported["problem"]]["ana"]
        label_of = {tree.steps[step]: rating for step, rating in ratings.items()}
        by_hand = with_labels(tree, [label_of.get(i) for i in range(len(tree.nodes))], "rating", "human")
        ours, wanted = (token_tree(labelled, layout) for labelled in (tree_of(exported), by_hand))
        for field in ours.__dataclass_fields__:
            a, b = getattr(ours, field), getattr(wanted, field)
            np.testing.assert_array_equal(a, b) if isinstance(a, np.ndarray) else None
        chosen = {i for i, node in enumerate(exported["nodes"]) if node.get("chosen")}
        assert chosen == {tree.steps[step] for step in path}  # a turn is one node here
        several += len(ratings) > len(path)
        assert exported.get("tools") == tree.extra.get("tools")
        assert all(node.extra is NONE or "score" not in node.extra for node in tree_of(exported).nodes)
    assert several > 2


def test_two_annotators_count_by_turns_and_differ_on_turns_alone(tmp_path):
    records = [trajectory(seed) | {"problem": f"Task {seed}?"} for seed in range(8)]
    folder, rated = label_all(tmp_path, records, ("ana", "ben"), double_fraction=1.0)
    export(folder, tmp_path / "cut.jsonl", disagreements="cut")
    by_problem = {record["problem"]: record for record in read_records(tmp_path / "cut.jsonl")}
    apart = set()
    for index, record in enumerate(records):
        (ana, _), (ben, _) = rated[record["problem"]].values()
        wanted = [ana[step] if ana[step] == ben[step] else None for step in sorted(ana)]
        apart |= {(index, step) for step in ana if (ana[step] == -1) != (ben[step] == -1)}
        if any(label is not None for label in wanted):
            messages = by_problem[record["problem"]]["messages"]
            assert [message.get("label") for message in messages if message["role"] == "assistant"] == wanted
    agreement = figures(tasks_of(folder))["agreement"]
    assert {(pair["task"], step) for pair in agreement["apart"] for step in pair["wrong"]} == apart != set()
    assert agreement["steps"] == sum(len(both["ana"][0]) for both in rated.values()) and agreement["chains"] == 0


def agent(number, wrong=(), turns=5):
    """A trajectory of so many turns, with labels, scores and an outcome, which no page may show."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Task {number}?"}]
    for i in range(turns):
        message = {"role": "assistant", "content": "", "reasoning_content": f"Row {i} next.", "score": SECRET}
        message["label"] = -1 if i in wrong else 1
        message["tool_calls"] = [
            {"id": f"c{i}", "type": "function", "function": {"name": "lookup", "arguments": {"row": i}}}
        ]
        messages += [message, {"role": "tool", "tool_call_id": f"c{i}", "content": f"row {i}\n" * (i % 7 + 1)}]
    messages.append({"role": "assistant", "content": "Done.", "score": SECRET, "label": 1})
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}]
    return {"messages": messages, "tools": tools, "outcome": 0, "semantics": "rating"}


def test_known_turns_measure_by_their_fraction_and_the_page_gets_no_label(tmp_path):
    folder = make(tmp_path, work=[agent(i, (1,)) for i in range(30)], names=("ana",), repeat_fraction=0.0,
                  gold_fraction=0.3, seed=1)  # fmt: skip
    write_records(folder / "gold.jsonl", [agent(1000 + i, wrong=(1, 2)) for i in range(6)])
    with Desk(folder) as desk:
        answer = desk.next("ana")
        for secret in (str(SECRET), "score", "label", "outcome", "semantics", "gold"):
            assert secret not in answer.text
        shown = answer.json()["tasks"][0]
        assert shown["steps"] == ["", "", "", "", "", "Done."] and shown["after"] == [[0], [1], [2], [3], [4], [5], []]
        assert shown["around"][2] == {
            "before": [["tool", "row 1\nrow 1\n"]], "thoughts": "Row 2 next.", "calls": [["lookup", '{"row": 2}']]
        }  # fmt: skip
        assert shown["around"][0]["before"] == [["system", "Be brief."]] and shown["tools"][0][0] == "lookup"
        assert desk.post("ana", shown["task"], "write", text="better", seconds=1.0).status_code == 409
        while tasks := desk.next("ana").json()["tasks"]:
            desk.walk("ana", tasks[0], lambda step: -1 if step == 1 else 1)
    ana = figures(tasks_of(folder))["annotators"]["ana"]
    assert ana["gold"]["n"] > 3 and ana["gold"]["value"] == pytest.approx(5 / 6)


def test_trajectories_are_selected_whole(tmp_path):
    pool = [agent(i) for i in range(40)]
    for number, record in enumerate(pool):
        record["outcome"] = number % 2
        for message in record["messages"]:
            if message["role"] == "assistant":
                message["score"] = (number + 1) / 50
    write_records(tmp_path / "in.jsonl", pool)
    line = ["annotate", "select", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert cli.main([*line, "--count", "10"]) == 0
    records = list(read_records(tmp_path / "out.jsonl"))
    assert all({**record, "selection": 0} in [{**sample, "selection": 0} for sample in pool] for record in records)
    convincing = [record for record in records if record["selection"]["stratum"] == "convincing"]
    assert [record["outcome"] for record in convincing] == [0] * 7
    with pytest.raises(ValueError, match="Leave --alternatives out"):
        select_file(tmp_path / "in.jsonl", tmp_path / "x.jsonl", SelectConfig(4, alternatives=2))
    assert rated_tree(tree_of(pool[0])).of_messages


def test_60_turns_are_labelled_by_keys_alone(browser, tmp_path):
    with Page(browser, make(tmp_path, work=[agent(0, turns=59), two_ways()], names=("ana",), **ONCE)) as page:
        assert page.says("problem") == "Task 0?" and page.says("solution") == "TRAJECTORY"
        source = page.browser.run("return document.documentElement.outerHTML")
        assert "Done." not in source and str(SECRET) not in source and "outcome" not in source

        def now():
            text = page.browser.run("return document.querySelector('.step.now').innerText")
            return [line for line in text.split("\n") if line]

        assert now()[0] == "Turn 1" and now()[1:] == [
            "system Be brief.",
            "thoughts Row 0 next.",
            'calls lookup {"row": 0}',
        ]
        for k in range(5):
            page.browser.press("1" if k == 2 else "3")  # a wrong turn does not end the task
        page.wait("document.querySelectorAll('#steps li').length === 6")
        folds = "[...document.querySelectorAll('.step.now details')]"
        assert page.browser.run(f"return {folds}.map(e => e.open)") == [False]  # what the tool answered, in five lines
        page.browser.press("o")
        assert page.browser.run(f"return {folds}.every(e => e.open)") and now().count("row 4") == 5
        page.browser.press("f")  # what is open stays open
        page.wait("!document.getElementById('flagged').hidden")
        assert page.browser.run(f"return {folds}.every(e => e.open)")
        page.browser.run("document.querySelector('.step.now summary').focus()")
        page.browser.press(ENTER)  # folds it, and does not go on
        assert page.browser.run(f"return {folds}.map(e => e.open)") == [False]
        page.browser.press("u", "2")
        for _ in range(54):
            page.browser.press("3")
        page.wait("document.querySelectorAll('#steps li').length === 60")
        page.browser.press("3")
        page.wait("document.getElementById('end-text').textContent === '60 turns, 1 rated wrong.'")
        page.browser.press(ENTER)
        page.wait("document.getElementById('problem').textContent === 'Two ways?'")
        page.browser.press("3")
        page.wait("document.querySelectorAll('#alternatives li').length === 2")
        assert page.says("common") == "tool a row"  # once, above both
        assert page.browser.run("return document.querySelectorAll('#alternatives .before > *').length") == 0
        page.browser.press("1", "1", DOWN, ENTER)  # both are wrong; the agent goes on
        page.wait("document.getElementById('end-text').textContent === '2 turns, 1 rated wrong.'")
        page.browser.press(ENTER)
        events = page.stored()
        ratings = [event["rating"] for event in events if event["kind"] == "rate" and event["step"] not in (4,)]
        assert [event["kind"] for event in events].count("undo") == 1 and ratings.count(-1) == 3
        assert page.browser.logs("browser") == []
    export(page.folder, tmp_path / "out.jsonl", disagreements="each")
    first, second = read_records(tmp_path / "out.jsonl")
    labels = [message["label"] for message in first["messages"] if message["role"] == "assistant"]
    assert labels == [1, 1, -1, 1, 0, *([1] * 55)]
    assert [node.get("label") for node in second["nodes"]] == [None, 1, None, -1, -1]


@pytest.mark.slow
def test_axe_finds_no_violation_around_turns(browser, tmp_path):
    record = agent(0, turns=3)
    record["messages"][5]["content"] = "a row\n" * 200  # opened, it scrolls
    with Page(browser, make(tmp_path, work=[record, two_ways()], names=("ana",), **ONCE)) as page:
        for keys in (["3"], ["1"], ["o"], ["3", "3", ENTER], ["3"], ["1"], ["3"]):
            page.browser.press(*keys)
            time.sleep(0.3)  # the turn's appearance ends: axe reads colours as they are
            assert page.browser.axe() == [], keys
        page.stored()


def two_ways():
    call = [{"id": "c", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}]
    nodes = [{"role": "user", "content": "Two ways?"}, {"role": "assistant", "content": "I look.", "tool_calls": call},
             {"role": "tool", "tool_call_id": "c", "content": "a row"},
             {"role": "assistant", "content": "way 0"}, {"role": "assistant", "content": "way 1"}]  # fmt: skip
    return {"nodes": [{"parent": min(i - 1, 2), **node} for i, node in enumerate(nodes)]}
