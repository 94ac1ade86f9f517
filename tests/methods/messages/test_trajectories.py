"""The record of trajectories: what is read, what is refused, and that no conversion loses anything."""

import copy

import numpy as np
import pytest
from trajectories import TOOLS, branched, labelled, trajectory

from jprm.methods.messages.records import as_messages, read_trajectory, trajectories_of, tree_of_trajectories
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
    assert read_trajectory(record) == record
    assert record_of(tree_of(record)) == record
    assert trajectories_of(tree_of(record)) == [record]


@pytest.mark.parametrize("seed", range(20))
def test_trajectories_of_one_task_are_a_tree_and_come_back(seed):
    record = branched(seed, turns=5)
    tree = tree_of(record)
    assert record_of(tree) == record
    apart = trajectories_of(tree)
    again = tree_of_trajectories(apart)
    assert trajectories_of(again) == apart
    assert len(again.nodes) <= sum(len(branch["messages"]) for branch in apart)
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
        turns = [messages.nodes[i] for i in messages.steps]
        assert [turn.text.rstrip("\n") for turn in turns] == [node.text.rstrip("\n") for node in tree.nodes]
        assert [turn.label for turn in turns] == [node.label for node in tree.nodes]
        for branch in trajectories_of(messages):
            assert read_trajectory(branch) == branch


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
    labelled = record_of(with_labels(tree, [None, 0.5, None, 1.0], "value", "monte_carlo"))
    assert [message.get("label") for message in labelled["messages"]] == [None, 0.5, None, 1.0]
    assert labelled["messages"][1]["origin"] == "monte_carlo" and labelled["semantics"] == "value"


def test_a_plain_exchange_stays_free_text():
    record = {"messages": [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "2+3=5.\n\nSo 5."}]}
    assert tree_of(record).kind == "chain"
    assert tree_of(record | {"segment": "turn"}).kind == "trajectory"


def test_long_trajectories_empty_contents_and_errors_of_tools_are_read():
    record = good(messages=[USER] + [TURN, ANSWER | {"content": ""}] * 200 + [LAST])
    assert len(tree_of(record).steps) == 201
    assert record_of(tree_of(record)) == record
