"""The record of trajectories: what is read, what is refused, and that no conversion loses anything."""

import copy

import numpy as np
import pytest
from trajectories import TOOLS, branched, labelled, trajectory

from jprm.io.jsonl import RecordError
from jprm.methods.agents.records import as_messages, as_steps, read_trajectory, trajectories_of, tree_of_trajectories
from jprm.tree import chains_of, record_of, scored, tree_of, with_labels

USER = {"role": "user", "content": "What does a lamp cost?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": {"x": "lamp"}}}
TURN = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWER = {"role": "tool", "tool_call_id": "c1", "content": "12"}
LAST = {"role": "assistant", "content": "It costs 12."}


def good(**fields) -> dict:
    return copy.deepcopy({"messages": [USER, TURN, ANSWER, LAST], "tools": TOOLS, "outcome": 1} | fields)


def with_message(index: int, **fields) -> dict:
    record = good()
    record["messages"][index] |= fields
    return record


def test_a_trajectory_is_a_tree_whose_context_has_roles():
    tree = tree_of(with_message(1, label=1, score=0.25))
    assert [node.role for node in tree.nodes] == ["user", "assistant", "tool", "assistant"]
    assert tree.steps == [1, 3] and chains_of(tree) == [[1, 3]]
    assert tree.problem == USER["content"] and list(tree.tools) == TOOLS
    assert tree.nodes[1].label == 1 and tree.nodes[1].score == 0.25
    assert tree.nodes[3].correct is True  # the outcome is the last turn's


@pytest.mark.parametrize("seed", range(40))
def test_records_come_back_as_they_were(seed):
    record = labelled(trajectory(seed, turns=6), seed) if seed % 2 else trajectory(seed, turns=6)
    assert read_trajectory(record).record() == record
    assert record_of(tree_of(record)) == record
    assert [one.record() for one in trajectories_of(tree_of(record))] == [record]


@pytest.mark.parametrize("seed", range(20))
def test_trajectories_of_one_task_are_a_tree_and_come_back(seed):
    record = branched(seed, turns=5)
    tree = tree_of(record)
    assert record_of(tree) == record
    apart = trajectories_of(tree)
    again = tree_of_trajectories(apart)
    assert [one.record() for one in trajectories_of(again)] == [one.record() for one in apart]
    assert len(again.nodes) <= sum(len(one.messages) for one in apart)
    assert len(chains_of(tree)) <= len(apart)


def test_chains_pools_and_trees_are_trees_of_messages_with_one_turn_a_chain():
    for record in (
        {"problem": "2+3?", "steps": ["2+3=5", "So 5\n"], "labels": [1, None], "system": "Be brief.", "id": 3},
        {"problem": "2+3?", "answer": 5, "samples": [{"steps": ["a", "b"], "correct": True}, {"steps": ["c"], "x": 1}]},
        {"problem": "p", "nodes": [{"parent": -1, "text": "a", "label": 0.5}, {"parent": 0, "text": "b"},
                                   {"parent": 0, "text": "c"}], "semantics": "value"},
    ):  # fmt: skip
        tree = tree_of(record)
        messages = as_messages(tree)
        assert record_of(as_steps(messages, tree.kind)) == record
        for one in trajectories_of(messages):
            assert read_trajectory(one.record()) == one


def test_a_rule_cuts_turns_into_steps_with_labels_of_their_own():
    text = "First I look.\n\nThen I add 3 and 4.\n\nSo 7."
    record = good(segment="paragraphs")
    record["messages"][3] = {"role": "assistant", "content": text, "labels": [1, None, 0], "scores": [0.5, 0.25, 0.125]}
    tree = tree_of(record)
    assert tree.steps == [1, 3, 4, 5]
    assert "".join(tree.nodes[i].text for i in tree.steps) == text
    assert [tree.nodes[i].label for i in tree.steps] == [None, 1, None, 0]
    assert record_of(tree) == record
    parts = good(segment="parts")
    parts["messages"][3]["content"] = [{"type": "text", "text": "It costs "}, {"type": "text", "text": "12."}]
    assert [tree_of(parts).nodes[i].text for i in tree_of(parts).steps] == ["", "It costs ", "12."]
    assert record_of(tree_of(parts)) == parts


def test_scores_and_labels_go_to_turns_alone():
    record = good()
    tree = tree_of(record)
    written = scored(record, tree, {"score": np.array([np.nan, 0.5, np.nan, 0.25])})
    assert [message.get("score") for message in written["messages"]] == [None, 0.5, None, 0.25]
    assert list(written["messages"][1]) == [*TURN, "score"]
    made = record_of(with_labels(tree, [None, 0.5, None, 1.0], "value", "monte_carlo"))
    assert [message.get("label") for message in made["messages"]] == [None, 0.5, None, 1.0]
    assert made["messages"][1]["origin"] == "monte_carlo" and made["semantics"] == "value"


def test_a_plain_exchange_stays_free_text():
    record = {"messages": [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "2+3=5.\n\nSo 5."}]}
    assert tree_of(record).kind == "chain"
    assert tree_of(record | {"segment": "turn"}).kind == "trajectory"


def test_long_trajectories_empty_contents_and_errors_of_tools_are_read():
    record = good(messages=[USER] + [TURN, ANSWER | {"content": ""}] * 200 + [LAST])
    assert len(tree_of(record).steps) == 201
    assert record_of(tree_of(record)) == record


BAD = {
    "not an object": (["a"], "record"),
    "no turn": (good(messages=[USER]), "messages"),
    "messages null": (good(messages=None), "messages"),
    "message a string": (good(messages=[USER, "hi", LAST]), "messages[1]"),
    "no role": (with_message(1, role=None), "messages[1].role"),
    "unknown role": (with_message(0, role="developer"), "messages[0].role"),
    "content a number": (with_message(3, content=3), "messages[3].content"),
    "user's content null": (with_message(0, content=None), "messages[0].content"),
    "tool's content an object": (with_message(2, content={"price": 12}), "messages[2].content"),
    "half a surrogate pair": (with_message(3, content="\ud83d"), "messages[3].content"),
    "an image": (with_message(0, content=[{"type": "image_url", "image_url": {}}]), "messages[0].content[0]"),
    "a part without text": (with_message(0, content=[{"type": "text"}]), "messages[0].content[0].text"),
    "a part that is a string": (with_message(0, content=["hi"]), "messages[0].content[0]"),
    "thoughts a list": (with_message(3, reasoning_content=["so"]), "messages[3].reasoning_content[0]"),
    "thoughts of a user": (with_message(0, reasoning_content="so"), "messages[0].reasoning_content"),
    "the older call": (with_message(3, function_call={"name": "f"}), "messages[3].function_call"),
    "calls an object": (with_message(1, tool_calls=CALL), "messages[1].tool_calls"),
    "a call of a tool": (with_message(2, tool_calls=[CALL]), "messages[2].tool_calls"),
    "a call a string": (with_message(1, tool_calls=["lookup"]), "messages[1].tool_calls[0]"),
    "a call without a name": (
        with_message(1, tool_calls=[{"function": {}}]),
        "messages[1].tool_calls[0].function.name",
    ),
    "arguments a list": (
        with_message(1, tool_calls=[{"function": {"name": "f", "arguments": [1]}}]),
        "messages[1].tool_calls[0].function.arguments",
    ),
    "call id a number": (with_message(1, tool_calls=[CALL | {"id": 1}]), "messages[1].tool_calls[0].id"),
    "two calls of one id": (with_message(1, tool_calls=[CALL, CALL]), "messages[1].tool_calls[1].id"),
    "answer to another call": (with_message(2, tool_call_id="c2"), "messages[2].tool_call_id"),
    "answer before a turn": (good(messages=[USER, ANSWER, LAST]), "messages[1].role"),
    "label of a user": (with_message(0, label=1), "messages[0].label"),
    "label beyond 1": (with_message(1, label=2), "messages[1].label"),
    "label a boolean": (with_message(1, label=True), "messages[1].label"),
    "a rating of a half": (with_message(1, label=0.5) | {"semantics": "rating"}, "messages[1].label"),
    "labels of a turn": (with_message(1, labels=[1]), "messages[1].labels"),
    "label where a rule cuts": (with_message(1, label=1) | {"segment": "lines"}, "messages[1].label"),
    "too few labels": (with_message(3, labels=[1, 1]) | {"segment": "lines"}, "messages[3].labels"),
    "score not finite": (with_message(1, score=float("nan")), "messages[1].score"),
    "score of a tool": (with_message(2, score=0.5), "messages[2].score"),
    "outcome text": (good(outcome="won"), "outcome"),
    "unknown segment": (good(segment="words"), "segment"),
    "unknown semantics": (good(semantics="stars"), "semantics"),
    "tools an object": (good(tools=TOOLS[0]), "tools"),
    "a tool without a name": (good(tools=[{"type": "function", "function": {}}]), "tools[0]"),
    "a child before its parent": ({"nodes": [USER | {"parent": 1}, LAST | {"parent": 0}]}, "nodes[0].parent"),
    "a node without a role": ({"nodes": [USER | {"parent": -1}, {"parent": 0, "text": "a"}]}, "nodes[1].role"),
    "steps and messages": (good(steps=["a"]), "record"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_malformed_trajectories_are_one_error_that_names_the_field(name):
    record, field = BAD[name]
    with pytest.raises(RecordError) as caught:
        tree_of(record, "file.jsonl:7")
    assert (caught.value.where, caught.value.field) == ("file.jsonl:7", field)
    assert caught.value.remedy
    assert len(str(caught.value).splitlines()) == 1
