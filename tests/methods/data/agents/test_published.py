"""tau2-bench, AgentRx and inspect-ai: turns, outcomes and labels as their files say."""

import json
import math
import sys
import types
import zipfile

import pytest

from jprm.io.jsonl import RecordError
from jprm.methods.data.readers import find


def read(name, items, tmp_path, **options):
    path, left, dropped = tmp_path / "f.jsonl", {}, []
    path.write_text("\n".join(map(json.dumps, items)))
    records = find(name).read(path, on_left_out=lambda part: left.update({part.what: part.count}),
                              on_drop=dropped.append, **options)  # fmt: skip
    return [record for _, record in records], left, dropped


CALL = {"id": "t1", "name": "find_user", "arguments": {"email": "m@e.com"}, "requestor": "assistant"}
SIMULATION = {
    "id": "x", "task_id": 10, "trial": 1, "termination_reason": "user_stop",
    "reward_info": {"reward": 1.0, "db_check": {"db_match": True}},
    "messages": [
        {"role": "assistant", "content": "Hi! How can I help you today?", "tool_calls": None},
        {"role": "user", "content": "Return it."},
        {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "t2"}],
         "raw_data": {"thinking_blocks": [{"type": "thinking", "thinking": "Hm."}]}},
        {"role": "tool", "tool_messages": [{"id": "t1", "role": "tool", "content": "mia", "requestor": "assistant"},
                                           {"id": "t2", "role": "tool", "content": None, "requestor": "assistant"}]},
        {"role": "user", "content": None, "tool_calls": [{"id": "u", "name": "toggle", "requestor": "user"}]},
        {"role": "tool", "id": "u", "content": "on", "requestor": "user"},
        {"role": "assistant", "content": "Done."},
    ],
}  # fmt: skip


def test_tau2_bench_has_outcomes_thoughts_and_the_agents_own_turns(tmp_path):
    tasks = [{"id": "10", "user_scenario": {"instructions": {"reason_for_call": "return"}}}]
    for items in ([{"timestamp": "t", "tasks": tasks, "simulations": [SIMULATION]}], [SIMULATION]):
        (record,), left, _ = read("tau2_bench", items, tmp_path)
        assert [(m["role"], m["content"]) for m in record["messages"]] == [
            ("user", "Return it."), ("assistant", None), ("tool", "mia"), ("tool", ""), ("assistant", "Done.")
        ]  # fmt: skip
        assert record["messages"][1]["reasoning_content"] == "Hm." and record["outcome"] == 1
        assert record["reward_info"] == SIMULATION["reward_info"] and record["task_id"] == 10
        assert left == {"greeting that a script says": 1, "call of the user's own tools, or its result": 2}
    (record,), _, _ = read("tau2_bench", [{"info": 1, "tasks": tasks, "simulations": [SIMULATION]}], tmp_path)
    assert json.loads(record["problem"]) == {"reason_for_call": "return"}


def test_tau2_bench_reads_thoughts_of_every_place_and_skips_simulations_without_a_turn(tmp_path):
    thought, asked = {"reasoning_content": "Hm."}, SIMULATION["messages"][1]
    for more in (thought, {"raw_data": {"message": thought}}, {"raw_data": {"choices": [{"message": thought}]}}):
        said = {"role": "assistant", "content": "Done.", **more}
        (record,), left, _ = read("tau2_bench", [{**SIMULATION, "messages": [asked, said]}], tmp_path)
        assert record["messages"][1]["reasoning_content"] == "Hm." and not left
    failed = {**SIMULATION, "messages": [asked], "reward_info": {"reward": 0}}
    results = {"tasks": [{"id": "10"}], "simulations": [failed, {**SIMULATION, "reward_info": {"reward": True}}]}
    (record,), left, _ = read("tau2_bench", [results], tmp_path)
    assert record["outcome"] == 1 and left["simulation without a turn of the agent"] == 1


def failure(step, category="Invention of new information", number=1):
    return {"failure_id": number, "step_number": step, "failure_category": category, "failed_agent": "A",
            "step_reason": "r"}  # fmt: skip


def test_a_voice_run_of_tau2_bench_is_named(tmp_path):
    run = {"id": "x", "mode": "full_duplex", "ticks": [{"tick_id": 0, "agent_chunk": {}}]}
    for messages in ({}, {"messages": None}, {"messages": []}):
        with pytest.raises(RecordError, match="ticks: are a voice run"):
            read("tau2_bench", [run | messages], tmp_path)


def test_agentrx_labels_every_failure_and_names_the_root_cause(tmp_path):
    run = [{"role": "human", "content": "q"}, {"role": "A", "content": "a"}, {"role": "B", "content": "b"},
           {"role": "A", "content": "c"}]  # fmt: skip
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "r-1.json").write_text(json.dumps(run))
    marked = {"trajectory_id": "r-1", "root_cause": {"failure_id": "2"},
              "failures": [failure(2), failure(2, "System Failure"), failure(4, number=2)]}  # fmt: skip
    lost = {**marked, "trajectory_id": "../r-1"}
    (record,), _, dropped = read("agentrx", [marked, lost], tmp_path, runs=str(tmp_path / "runs"))
    assert [m.get("label") for m in record["messages"]] == [None, 0, 1, 0]
    assert record["classes"] == [
        ["invention_of_new_information", "system_failure"],
        [],
        ["invention_of_new_information"],
    ]
    assert record["root_cause"] == 3 and [f["root_cause"] for f in record["failures"]] == [False, False, True]
    assert record["messages"][2]["content"] == "[B]\nb" and len(dropped) == 1
    loose = {"trajectory_id": "r-1", "failures": [{"step_number": "2", "failure_category": "X"}], "root_cause": None}
    (record,), _, _ = read("agentrx", [loose], tmp_path, runs=str(tmp_path / "runs"))
    assert record["classes"] == [["x"], [], []] and record["root_cause"] is None
    for step in (0, 5, "last"):
        with pytest.raises(RecordError, match="step_number"):
            read("agentrx", [{**marked, "failures": [failure(step)]}], tmp_path, runs=str(tmp_path / "runs"))
    with pytest.raises(RecordError, match="no file and no folder"):
        read("agentrx", [marked], tmp_path, runs=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("truth", "runs", "figures"),
    [("tau_ground_truth", "tau_dataset_full.json", (27, 452, 26, 37)),
     ("magentic_one_ground_truth", "magentic_dataset", (44, 2157, 295, 295))],
)  # fmt: skip
def test_agentrx_is_read_whole(truth, runs, figures, shared_data):
    """All marked turns are the agent's but 11 of tau-bench, which blame the user or repeat a message."""
    folder = shared_data / "agents" / "agentrx"
    records = [r for _, r in find("agentrx").read(folder / "ground_truth" / f"{truth}.json", runs=str(folder / runs))]
    turns = [m for record in records for m in record["messages"] if m["role"] == "assistant"]
    bad = sum(turn["label"] == 0 for turn in turns)
    assert (len(records), len(turns), bad, sum(len(record["failures"]) for record in records)) == figures


INSPECT = {
    "id": 1, "epoch": 1, "target": "12", "scores": {"match": {"value": "C", "answer": "12"}},
    "attachments": {"h": "A long question."},
    "events": [{"event": "model", "tools": [
        {"name": "bash", "description": "Runs.", "parameters": {}, "options": None}]}],
    "messages": [
        {"role": "user", "content": "attachment://h", "source": "input"},
        {"role": "assistant", "content": [{"type": "reasoning", "reasoning": "EqQB", "redacted": True},
                                          {"type": "text", "text": "I look."}],
         "tool_calls": [{"id": "c", "function": "bash", "arguments": {"cmd": "ls"}, "type": "function"}]},
        {"role": "tool", "tool_call_id": "c", "function": "bash", "content": "a",
         "error": {"type": "timeout", "message": "Command timed out"}},
        {"role": "assistant", "content": "12"},
    ],
}  # fmt: skip


def test_inspects_samples_are_read_with_their_score(tmp_path):
    for items in ([{"version": 2, "samples": [INSPECT]}], [INSPECT]):
        (record,), _, _ = read("inspect", items, tmp_path)
        texts = [m["content"] for m in record["messages"]]
        assert texts == ["A long question.", [{"type": "text", "text": "I look."}], "Error: Command timed out", "12"]
        assert "reasoning_content" not in record["messages"][1] and record["tools"][0]["function"]["name"] == "bash"
        assert record["messages"][1]["tool_calls"][0]["function"] == {"name": "bash", "arguments": {"cmd": "ls"}}
        assert (record["outcome"], record["answer"], record["rewards"]) == (1, "12", {"match": 1})


def test_inspects_attachments_stand_in_thoughts_and_arguments_too(tmp_path):
    thought = {"type": "reasoning", "reasoning": "attachment://h"}
    call = {"id": "c", "function": "bash", "arguments": {"cmd": ["attachment://h"]}}
    said = {"role": "assistant", "content": [thought], "tool_calls": [call]}
    (record,), _, _ = read("inspect", [{**INSPECT, "messages": [INSPECT["messages"][0], said]}], tmp_path)
    assert record["messages"][1]["reasoning_content"] == "A long question."
    assert record["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"cmd": ["A long question."]}


def test_inspects_older_names_are_read(tmp_path):
    """Of 2024: one `score`, and a tool's error as text."""
    failed = {"role": "tool", "tool_call_id": "c", "content": "", "tool_error": "Timed out."}
    old = {**INSPECT, "scores": None, "score": {"value": "C"}, "target": ["12"],
           "messages": [*INSPECT["messages"][:2], failed]}  # fmt: skip
    (record,), _, _ = read("inspect", [old], tmp_path)
    assert (record["outcome"], record["answer"], record["messages"][-1]["content"]) == (1, "12", "Error: Timed out.")


@pytest.mark.parametrize(
    ("value", "outcome"), [("I", 0), ("P", 0.5), ("N", 0), (True, 1), (0.25, 0.25), ("text", None)]
)
def test_values_of_inspects_scorers(value, outcome, tmp_path):
    (record,), _, _ = read("inspect", [{**INSPECT, "scores": {"match": {"value": value}}}], tmp_path)
    assert record.get("outcome") == outcome


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_number_that_inspect_lacks_is_null(number, tmp_path):
    """inspect-ai writes NaN for metrics without samples and for samples without a score."""
    log = {"results": {"scores": [{"metrics": {"stderr": {"value": number}}}]}, "samples": [
        {**INSPECT, "scores": {"match": {"value": number}}}]}  # fmt: skip
    (record,), _, _ = read("inspect", [log], tmp_path)
    assert "outcome" not in record and record["rewards"] == {"match": None}
    with pytest.raises(RecordError, match="not JSON"):
        list(find("inspect").read(written(tmp_path / "f.json", '{"a": NaN, "a": 1}')))


def written(path, text):
    path.write_text(text)
    return path


def test_several_scorers_need_a_name(tmp_path):
    several = {**INSPECT, "scores": {"match": {"value": "C"}, "rubric": {"value": {"style": 0.5, "length": 1}}}}
    with pytest.raises(RecordError, match="score=NAME"):
        read("inspect", [several], tmp_path)
    (record,), _, _ = read("inspect", [several], tmp_path, score="rubric.style")
    assert record["outcome"] == 0.5 and record["rewards"] == {"match": 1, "rubric.style": 0.5, "rubric.length": 1}


def test_a_log_without_samples_or_turns_says_so(tmp_path):
    with pytest.raises(RecordError, match="header alone"):
        read("inspect", [{"version": 2, "status": "error"}], tmp_path)
    _, left, _ = read("inspect", [{"samples": [{**INSPECT, "messages": INSPECT["messages"][:1]}]}], tmp_path)
    assert left == {"sample without a turn of the agent": 1}


def test_an_eval_file_is_read_by_the_package_or_names_its_command(tmp_path, monkeypatch):
    """Ten real files of inspect-ai's tests were read by 0.3.285; here a stub stands for it."""
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("header.json", "{}")
    sample = types.SimpleNamespace(model_dump_json=lambda exclude_none: json.dumps(INSPECT))
    log = types.SimpleNamespace(read_eval_log_samples=lambda path, **options: iter([sample, sample]))
    monkeypatch.setitem(sys.modules, "inspect_ai", types.SimpleNamespace(log=log))
    monkeypatch.setitem(sys.modules, "inspect_ai.log", log)
    assert [record["outcome"] for _, record in find("inspect").read(path)] == [1, 1]
    monkeypatch.setitem(sys.modules, "inspect_ai.log", None)
    with pytest.raises(RecordError, match=r"inspect log dump .*log\.eval > log\.json"):
        list(find("inspect").read(path))
