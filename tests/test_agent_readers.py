"""Logs of coding agents and transcripts of command-line agents, as the trajectories that they tell."""

import io
import json
import pathlib

import pytest
import rich.console

from jprm.io.jsonl import RecordError
from jprm.methods.data.prepare import prepare
from jprm.methods.data.readers import find
from jprm.tree import record_of, tree_of

CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
RAW_CALL = {**CALL, "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
WANTED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "List."},
    {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
    {"role": "assistant", "content": "There is a.py."},
]

LOGS = json.loads((pathlib.Path(__file__).parent / "agent_logs.json").read_text(encoding="utf-8"))
SWE_AGENT, MINI, OPENHANDS_0, OPENHANDS_1, CLAUDE, CODEX = LOGS.values()
FILES = {
    "swe_agent": ("swe_agent", SWE_AGENT),
    "mini_swe_agent": ("mini_swe_agent", MINI),
    "openhands 0": ("openhands", OPENHANDS_0),
    "openhands 1": ("openhands", OPENHANDS_1),
    "claude_code": ("claude_code", CLAUDE),
    "codex": ("codex", CODEX),
}


def read(name, content, path, **options):
    path.write_text("\n".join(map(json.dumps, content)) if isinstance(content, list) else json.dumps(content, indent=1))
    return [record for _, record in find(name).read(path, **options)]


@pytest.mark.parametrize("file", FILES)
def test_a_log_is_the_trajectory_that_it_tells(file, tmp_path):
    name, content = FILES[file]
    (record,) = read(name, content, tmp_path / "log.json")
    messages = [{k: v for k, v in m.items() if v is not None or k == "content"} for m in record["messages"]]
    assert messages == (WANTED[1:] if name == "claude_code" else WANTED)  # its file has no prompt of the system
    assert record_of(tree_of(record)) | {"segment": "turn"} == record
    if name in ("swe_agent", "mini_swe_agent"):
        assert record["submission"] == "diff"
    if name == "swe_agent":
        assert record["outcome"] == 1 and record["environment"] == "repo-1"
    if name == "openhands":
        assert record["tools"][0]["function"]["name"] == "bash"


def test_a_list_of_events_is_one_trajectory_and_a_line_of_an_evaluation_too(tmp_path):
    (tmp_path / "list.json").write_text(json.dumps(OPENHANDS_0, indent=1))
    ((_, listed),) = find("openhands").read(tmp_path / "list.json")
    lines = [{"instance_id": i, "history": OPENHANDS_0, "resolved": bool(i)} for i in range(2)]
    records = read("openhands", lines, tmp_path / "output.jsonl")
    assert [record["outcome"] for record in records] == [0, 1]
    assert all(record["messages"] == listed["messages"] for record in records)


def test_parallel_calls_of_one_response_are_one_turn(tmp_path):
    calls = [{**RAW_CALL, "id": "c1"}, {**RAW_CALL, "id": "c2"}]
    response = {"id": "r", "choices": [{"message": {"content": None, "tool_calls": calls}}]}
    events: list[dict] = [{"source": "user", "action": "message", "args": {"content": "a"}}]
    for kind, key in (("action", "run"), ("observation", "run")):
        for name in ("c1", "c2"):
            meta = {"function_name": "bash", "tool_call_id": name, "model_response": response}
            events.append({"source": "agent", kind: key, "args": {}, "content": name, "tool_call_metadata": meta})
            if kind == "action":
                del events[-1]["content"]
    (record,) = read("openhands", events, tmp_path / "log.jsonl")
    assert [m["role"] for m in record["messages"]] == ["user", "assistant", "tool", "tool"]
    assert [call["id"] for call in record["messages"][1]["tool_calls"]] == ["c1", "c2"]


def test_a_prompt_in_the_place_of_another_takes_away_what_followed(tmp_path):
    again = {"type": "user", "uuid": "8", "parentUuid": "5", "message": {"role": "user", "content": "And b?"}}
    answer = {"type": "assistant", "uuid": "10", "message": {"id": "m9", "content": [{"type": "text", "text": "Yes."}]}}
    first = {**again, "uuid": "6b", "message": {"role": "user", "content": "And c?"}}
    (record,) = read("claude_code", [*CLAUDE[:8], first, CLAUDE[-1], again, answer], tmp_path / "s.jsonl")
    assert [m["content"] for m in record["messages"][3:]] == ["And b?", "Yes."]


@pytest.mark.parametrize(
    ("name", "events", "compacted"),
    [
        ("claude_code", CLAUDE, {"type": "user", "isCompactSummary": True, "isVisibleInTranscriptOnly": True,
                                 "message": {"role": "user", "content": "So far: listed."}}),
        ("codex", CODEX, {"type": "compacted", "payload": {"message": "So far: listed."}}),
        ("codex", CODEX, {"type": "compacted", "payload": {"message": "", "replacement_history": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "So far: listed."}]}]}}),
    ],
)  # fmt: skip
def test_a_compacted_context_begins_a_trajectory_of_its_own(name, events, compacted, tmp_path):
    last = events[-1]
    if name == "claude_code":
        last = {**last, "message": {**last["message"], "id": "m3"}}
    first, second = read(name, [*events, compacted, last], tmp_path / "s.jsonl")
    assert [m["content"] for m in second["messages"]] == ["So far: listed.", "There is a.py."]
    assert first["problem"] == second["problem"] == "List." and (first["part"], second["part"]) == (0, 1)


def test_a_subagents_own_file_and_a_stream_are_read(tmp_path):
    lines = [{**line, "isSidechain": True} for line in CLAUDE]
    (record,) = read("claude_code", [line for line in lines if line.get("uuid") != "9"], tmp_path / "agent.jsonl")
    assert [m["role"] for m in record["messages"]] == ["user", "assistant", "tool", "assistant"]
    stream = [{"type": "system", "subtype": "init", "tools": ["bash"]}, CLAUDE[3], CLAUDE[4], CLAUDE[5], CLAUDE[7],
              CLAUDE[-1], {"type": "result", "subtype": "success", "result": "There is a.py."}]  # fmt: skip
    (record,) = read("claude_code", stream, tmp_path / "stream.jsonl")
    assert [m["role"] for m in record["messages"]] == ["assistant", "tool", "assistant"]


def test_a_cut_transcript_is_refused_whole_or_skipped_whole(tmp_path):
    from jprm.io.jsonl import Rejects

    path = tmp_path / "s.jsonl"
    path.write_text("\n".join(map(json.dumps, CODEX)) + '\n{"type": "resp')
    with pytest.raises(RecordError, match=f"{path}:{len(CODEX) + 1}: "):
        list(find("codex").read(path))
    with Rejects(tmp_path / "rejects") as rejects:
        assert list(find("codex").read(path, on_error="skip", rejects=rejects)) == []
    assert (tmp_path / "rejects").read_text() == path.read_text() + "\n"


def test_preparing_prints_what_is_left_out(tmp_path):
    (tmp_path / "s.jsonl").write_text("\n".join(map(json.dumps, CODEX)))
    console = rich.console.Console(file=io.StringIO())
    report = prepare("codex", [tmp_path / "s.jsonl"], tmp_path / "out", console=console)
    assert (report.read, report.kept, report.steps) == (1, 1, 2)
    assert f"left out of every record: {find('codex').drops}" in console.file.getvalue()
