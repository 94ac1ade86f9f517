"""Sessions of Claude Code and rollouts of Codex: the live chain, each line once, and what is left out, counted."""

import io
import json

import pytest
import rich.console
from growth import check_at_once

from jprm.io.jsonl import RecordError
from jprm.methods.data.prepare import prepare
from jprm.methods.data.readers import find


def read(name, lines, tmp_path, **options):
    """Returns (trajectories, counts of parts left out) of a file of lines."""
    path, left = tmp_path / "s.jsonl", {}
    path.write_text("\n".join(map(json.dumps, lines)))
    read = find(name).read(path, on_left_out=lambda part: left.update({part.what: part.count}), **options)
    return [record for _, record in read], left


def told(record):
    """Returns a trajectory's messages in short: "user: text", and the names of calls in brackets."""
    return [
        f"{m['role']}: {m['content'] or ''}" + "".join(f"[{c['function']['name']}]" for c in m.get("tool_calls") or ())
        for m in record["messages"]
    ]


def user(uuid, parent, text, **more):
    return {"type": "user", "uuid": uuid, "parentUuid": parent, "message": {"role": "user", "content": text}, **more}


def agent(uuid, parent, response, *blocks, **more):
    content = [{"type": "text", "text": block} if isinstance(block, str) else block for block in blocks]
    message = {"id": response, "role": "assistant", "content": content}
    return {"type": "assistant", "uuid": uuid, "parentUuid": parent, "message": message, **more}


def use(call, name="Bash"):
    return {"type": "tool_use", "id": call, "name": name, "input": {}}


def result(uuid, parent, call, content: object = "ok"):
    return user(uuid, parent, [{"type": "tool_result", "tool_use_id": call, "content": content}])


def boundary(uuid, last, **about):
    return {"type": "system", "subtype": "compact_boundary", "uuid": uuid, "parentUuid": None,
            "logicalParentUuid": last, **about}  # fmt: skip


def hook(uuid, parent):
    return {"type": "progress", "uuid": uuid, "parentUuid": parent, "data": {"type": "hook_progress"}}


START = [user("u1", None, "Fix."), agent("a1", "u1", "m1", "Fixed.")]
CALL = [user("u1", None, "Fix."), agent("a1", "u1", "m1", "I look."), agent("a2", "a1", "m1", use("t1"))]
NOTE = {"promptSource": "system", "origin": {"kind": "task-notification"}}
QUEUED = {"type": "attachment", "uuid": "q", "attachment": {"type": "queued_command", "prompt": "Only b!"}}
FIXED, LOOKED = ["user: Fix.", "assistant: Fixed."], ["user: Fix.", "assistant: I look.[Bash]", "tool: ok"]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
SUMMARY = user("cs", "cb", "So far.", isCompactSummary=True)
SEARCHED = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": [
                {"title": "T", "encrypted_content": "E"}]}]  # fmt: skip

CHAINS = {
    "a prompt in the place of another": (
        [*START, user("u2", "a1", "Drop."), agent("a2", "u2", "m2", "Dropped."), user("u3", "a1", "Add."),
         agent("a3", "u3", "m3", "Added.")], [[*FIXED, "user: Add.", "assistant: Added."]]),
    "a first prompt in the place of another": (
        [user("x", None, "Drop."), agent("y", "x", "m0", "Dropped."), *START], [FIXED]),
    "a prompt below a tool's result": (
        [*CALL, result("r1", "a2", "t1"), agent("a3", "r1", "m2", "I drop."), agent("a4", "a3", "m2", use("t2")),
         result("r2", "a4", "t2"), user("u2", "r1", "No."), agent("a5", "u2", "m4", "Read.")],
        [[*LOOKED, "user: No.", "assistant: Read."]]),
    "a prompt in the middle of a response": (
        [*CALL, result("r1", "a2", "t1"), user("u2", "a1", "No."), agent("a5", "u2", "m4", "Well.")],
        [["user: Fix.", "assistant: I look.", "user: No.", "assistant: Well."]]),
    "a line of the system before the undone prompt": (
        [*START, {"type": "system", "uuid": "s", "parentUuid": "a1"}, user("u2", "s", "Drop."),
         agent("a2", "u2", "m2", "Dropped."), user("u3", "a1", "Add."), agent("a3", "u3", "m3", "Added.")],
        [[*FIXED, "user: Add.", "assistant: Added."]]),
    "an injected message beside the live chain": (
        [*START, user("n1", "a1", "b1 ended.", **NOTE), agent("a2", "n1", "m2", "Go on."),
         user("n2", "a1", "b2 ended.", **NOTE), agent("a3", "a2", "m3", "Done.")],
        [[*FIXED, "user: b1 ended.", "assistant: Go on.", "assistant: Done."]]),
    "an injected message at the end of the file": (
        [*START, user("n1", "u1", "b1 ended.", **NOTE)], [FIXED]),
    "a turn whose end names its beginning as parent": (
        [*CALL, result("r1", "a2", "t1"), agent("a3", "r1", "m2", "Done."), hook("h1", "a2"), hook("h2", "h1"),
         {"type": "system", "uuid": "s", "parentUuid": "h2"}, user("u2", "s", "Add."),
         agent("a4", "u2", "m3", "Added.")],
        [[*LOOKED, "assistant: Done.", "user: Add.", "assistant: Added."]]),
    "an error of a request, logged after its second try": (
        [*CALL, result("r1", "a2", "t1"), agent("a3", "r1", "m2", "Done."),
         {"type": "system", "subtype": "api_error", "uuid": "s", "parentUuid": "r1"}, user("u2", "s", "Add."),
         agent("a4", "u2", "m3", "Added.")], [[*LOOKED, "assistant: Done.", "user: Add.", "assistant: Added."]]),
    "a hook on a prompt in the place of another": (
        [*START, user("u2", "a1", "Drop."), agent("a2", "u2", "m2", "Dropped."), hook("h1", "a1"),
         user("u3", "h1", "Add."), agent("a3", "u3", "m3", "Added.")], [[*FIXED, "user: Add.", "assistant: Added."]]),
    "a retried response": (
        [START[0], agent("x", "u1", "m0", "Fixed, but"), START[1]], [FIXED]),
    "parallel calls of one response": (
        [user("u1", None, "Both."), agent("a1", "u1", "m1", use("t1", "A")), result("r1", "a1", "t1"),
         agent("a2", "a1", "m1", use("t2", "B")), result("r2", "a2", "t2"), agent("a3", "r2", "m2", "Done.")],
        [["user: Both.", "assistant: [A][B]", "tool: ok", "tool: ok", "assistant: Done."]]),
    "a chain through the first of two parallel calls": (
        [user("u1", None, "Both."), agent("a1", "u1", "m1", use("t1", "A")), agent("a2", "a1", "m1", use("t2", "B")),
         result("r1", "a1", "t1", "1"), result("r2", "a2", "t2", "2"), agent("a3", "r1", "m2", "Done.")],
        [["user: Both.", "assistant: [A][B]", "tool: 2", "tool: 1", "assistant: Done."]]),
    "every line twice": ([*CALL, result("r1", "a2", "t1"), agent("a3", "r1", "m2", "Done.")] * 2,
                         [[*LOOKED, "assistant: Done."]]),
    "a history written again under new uuids": (
        [*START, user("v1", None, "Fix."), agent("b1", "v1", "m1", "Fixed."), user("u2", "b1", "Add."),
         agent("a2", "u2", "m2", "Added.")], [[*FIXED, "user: Add.", "assistant: Added."]]),
    "a block of one response twice": (
        [user("u1", None, "Fix."), agent("a1", "u1", "m1", "I look."), agent("a2", "u1", "m1", "I look.", use("t1")),
         result("r1", "a2", "t1")], [LOOKED]),
    "a line written while the model wrote": (
        [user("u1", None, "Fix."), agent("a1", "u1", "m1", "I lo"), agent("a2", "u1", "m1", "I look.", use("t1")),
         result("r1", "a2", "t1")], [LOOKED]),
    "a link that leads nowhere": ([START[0], agent("a1", "lost", "m1", "Fixed.")], [FIXED]),
    "no links at all": ([{**line, "parentUuid": None} for line in (*START, *START[1:])], [FIXED]),
    "a queued command": ([*CALL, result("r1", "a2", "t1"), {**QUEUED, "parentUuid": "r1"},
                          agent("a3", "q", "m2", "Then b.")], [[*LOOKED, "user: Only b!", "assistant: Then b."]]),
    "a queued command beside the chain": (
        [*CALL, result("r1", "a2", "t1"), {**QUEUED, "parentUuid": "r1"}, agent("a3", "r1", "m2", "Then b.")],
        [[*LOOKED, "user: Only b!", "assistant: Then b."]]),
    "a compaction after which the old messages are written again": (
        [*START, boundary("cb", "a1"), SUMMARY, *START, user("u2", "cs", "Go on."), agent("a2", "u2", "m2", "Done.")],
        [FIXED, ["user: So far.", "user: Go on.", "assistant: Done."]]),
    "a compaction that keeps messages, one of them written anew": (
        [*START, user("u2", "a1", "And?"),
         boundary("cb", "a2", compactMetadata={"preservedMessages": {"uuids": ["a1", "u2", "a2"]}}), SUMMARY,
         agent("a2", "cs", "m2", "Kept."), user("u3", "a2", "Go on."), agent("a3", "u3", "m3", "Done.")],
        [[*FIXED, "user: And?", "assistant: Kept."], ["user: So far.", "assistant: Fixed.", "user: And?",
         "assistant: Kept.", "user: Go on.", "assistant: Done."]]),
    "a compaction that keeps a segment": (
        [*START, boundary("cb", "a1", compactMetadata={"preservedSegment": {"headUuid": "a1", "tailUuid": "a1"}}),
         SUMMARY, user("u3", "a1", "Go on."), agent("a3", "u3", "m3", "Done.")],
        [FIXED, ["user: So far.", "assistant: Fixed.", "user: Go on.", "assistant: Done."]]),
    "a rewind to before a compaction": (
        [*START, boundary("cb", "a1"), SUMMARY, agent("a2", "cs", "m2", "Done."), user("u3", "a1", "Add."),
         agent("a3", "u3", "m3", "Added.")], [[*FIXED, "user: Add.", "assistant: Added."]]),
    "images, files and references to tools": (
        [user("u1", None, [{"type": "text", "text": "See "}, IMAGE, {"type": "document"}]),
         agent("a1", "u1", "m1", {"type": "fallback"}, use("t1")),
         result("r1", "a1", "t1", [IMAGE, {"type": "tool_reference", "tool_name": "Fetch"}])],
        [["user: See [image][document]", "assistant: [Bash]", "tool: [image][tool: Fetch]"]]),
    "a tool of the server": (
        [START[0], agent("a1", "u1", "m1", *SEARCHED, "Fixed.")],
        [["user: Fix.", "assistant: [web_search]", 'tool: [{"title": "T"}]', "assistant: Fixed."]]),
    "lines of kinds that are not known": (
        [*START, "a text", {"type": "new", "uuid": "z", "parentUuid": "a1"}, user("u2", "z", "Add."),
         agent("a2", "u2", "m2", {"type": "new"}, "Added.")], [[*FIXED, "user: Add.", "assistant: [new]Added."]]),
    "a session of the web": ([{"loglines": START}], [FIXED]),
    "copies of old lines at the end": (
        [*START, user("u2", "a1", "Add."), agent("a2", "u2", "m2", "Added."), *START],
        [[*FIXED, "user: Add.", "assistant: Added."]]),
    "a result that is written before its call": (
        [CALL[0], result("r1", "a2", "t1"), *CALL[1:], agent("a3", "r1", "m2", "Done.")],
        [[*LOOKED, "assistant: Done."]]),
    "a queued command without a uuid": (
        [*CALL, result("r1", "a2", "t1"), {"parentUuid": "r1", **{k: QUEUED[k] for k in ("type", "attachment")}},
         agent("a3", "r1", "m2", "Then b.")], [[*LOOKED, "user: Only b!", "assistant: Then b."]]),
    "blocks without a text": (
        [START[0], agent("a1", "u1", "m1", {"type": "thinking", "signature": "E"}, {"type": "text", "text": None},
                         "Fixed.")],
        [FIXED]),
    "a result that is one part": (
        [*CALL, result("r1", "a2", "t1", {"type": "text", "text": "ok"}), agent("a3", "r1", "m2", "Done.")],
        [[*LOOKED, "assistant: Done."]]),
    "two compactions, the first of which keeps a message": (
        [*START, boundary("cb", "a1", compactMetadata={"preservedMessages": {"uuids": ["a1"]}}), SUMMARY,
         user("u2", "a1", "Add."), agent("a2", "u2", "m2", "Added."), boundary("cd", "a2"),
         user("ct", "cd", "So far, 2.", isCompactSummary=True), user("u3", "ct", "Go on."),
         agent("a3", "u3", "m3", "Done.")],
        [FIXED, ["user: So far.", "assistant: Fixed.", "user: Add.", "assistant: Added."],
         ["user: So far, 2.", "user: Go on.", "assistant: Done."]]),
    "a rewind across the second of two compactions": (
        [*START, boundary("cb", "a1"), SUMMARY, user("u2", "cs", "Add."), agent("a2", "u2", "m2", "Added."),
         boundary("cd", "a2"), user("ct", "cd", "So far, 2.", isCompactSummary=True),
         agent("x", "ct", "m0", "Dropped."), user("u3", "a2", "Go on."), agent("a3", "u3", "m3", "Done.")],
        [FIXED, ["user: So far.", "user: Add.", "assistant: Added.", "user: Go on.", "assistant: Done."]]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_a_session_is_the_chain_of_its_newest_message(name, tmp_path):
    lines, wanted = CHAINS[name]
    records, _ = read("claude_code", lines, tmp_path)
    assert [told(record) for record in records] == wanted


def test_lines_that_are_no_message_are_counted_by_name_in_the_report(tmp_path):
    undone = [user("u0", None, "Drop."), agent("a0", "u0", "m0", "Dropped.")]
    lines = [{"type": "summary"}, *undone, *START, {"type": "system", "subtype": "turn_duration"}, {"type": "new"},
             user("u2", "a1", [IMAGE, IMAGE]), agent("a2", "u2", "m2", "A cat.")]  # fmt: skip
    path, printed = tmp_path / "s.jsonl", io.StringIO()
    path.write_text("\n".join(map(json.dumps, lines)))
    report = prepare("claude_code", [path], tmp_path / "out", console=rich.console.Console(file=printed, width=200))
    assert report.left_out == {
        "image in a message": 2, "message off the live chain, e.g. undone by the user": 2,
        "line of type 'summary'": 1, "line of type 'system', turn_duration": 1, "line of type 'new'": 1}  # fmt: skip
    assert "left out: image in a message" in printed.getvalue()
    with pytest.raises(RecordError, match="'image' of the user"):
        read("claude_code", lines, tmp_path, images="error")


def test_sessions_of_a_stream_are_separate(tmp_path):
    """A loop of `claude -p` may append the streams of all its runs to one file."""
    runs = [{**agent(f"a{i}", None, f"m{i}", f"Done {i}."), "session_id": f"s{i}"} for i in (1, 2, 3)]
    runs[1]["isApiErrorMessage"] = True
    for line in runs:
        del line["parentUuid"]
    records, left = read("claude_code", [{"type": "system", "subtype": "init", "session_id": "s1"}, *runs], tmp_path)
    assert [(record["session"], told(record)) for record in records] == [
        ("s1", ["assistant: Done 1."]), ("s3", ["assistant: Done 3."])]  # fmt: skip
    assert left == {"line of type 'system', init": 1, "error message of the program": 1}


def test_a_session_without_a_turn_is_dropped_and_counted(tmp_path):
    """E.g. because each request failed. Real folders hold many such files beside whole sessions."""
    failed = agent("a1", "u1", "m1", "Please log in.", isApiErrorMessage=True)
    for name, lines in (("s", START), ("failed", [START[0], failed]), ("left", [START[0]])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    console = rich.console.Console(file=io.StringIO())
    report = prepare("claude_code", sorted(tmp_path.glob("*.jsonl")), tmp_path / "out", console=console)
    assert (report.read, report.kept) == (3, 1) and report.dropped == {"the agent has no turn": 2}


@pytest.mark.parametrize("at", [0, 1, 2], ids=["first", "middle", "last"])
def test_a_line_that_was_cut_off_is_left_out_and_counted(at, tmp_path):
    """The program may have been stopped while it wrote a line."""
    path, left = tmp_path / "s.jsonl", []
    lines = [json.dumps(line) for line in START]
    path.write_text("\n".join([*lines[:at], lines[0][:40], *lines[at:]]))
    ((_, record),) = find("claude_code").read(path, on_left_out=left.append)
    assert told(record) == FIXED and left == [("line that is not JSON", 1)]
    path.write_text(lines[0][:40])
    with pytest.raises(RecordError, match="is not JSON"):
        list(find("claude_code").read(path))


@pytest.mark.parametrize(("name", "field"), [("swe_agent", "history"), ("mini_swe_agent", "messages")])
def test_a_run_without_a_turn_is_dropped(name, field, tmp_path):
    path, dropped = tmp_path / "run.traj", []
    path.write_text(json.dumps({field: [{"role": "system", "content": "Fix."}, {"role": "user", "content": "a.py"}]}))
    assert not list(find(name).read(path, on_drop=dropped.append)) and dropped == ["the agent has no turn"]


def test_a_compaction_without_a_turn_after_it_is_counted(tmp_path):
    (record,), left = read("claude_code", [*START, boundary("cb", "a1"), SUMMARY], tmp_path)
    assert told(record) == FIXED and left == {"messages without a turn after them, e.g. after a last compaction": 1}


def test_commands_that_were_queued_on_an_undone_branch_are_counted(tmp_path):
    lines = [*CALL, result("r1", "a2", "t1"), {**QUEUED, "parentUuid": "r1"}, agent("x", "q", "m2", "Then b."),
             user("u2", "r1", "No."), agent("a3", "u2", "m3", "Well.")]  # fmt: skip
    (record,), left = read("claude_code", lines, tmp_path)
    assert told(record) == [*LOOKED, "user: No.", "assistant: Well."]
    assert left == {"message off the live chain, e.g. undone by the user": 2}


def test_a_long_session_is_read_in_linear_time(tmp_path):
    lines = [user("u0", None, "Fix.")]
    for i in range(4000):
        lines += [agent(f"a{i}", lines[-1]["uuid"], f"m{i}", use(f"t{i}")), result(f"r{i}", f"a{i}", f"t{i}")]
    found = []
    check_at_once(
        lambda lines: found.append(read("claude_code", lines, tmp_path)), lines, 15.0
    )  # minutes, if quadratic
    (record,), _ = found[-1]
    assert len(record["messages"]) == 8001


# ---- Codex.

META = {"type": "session_meta", "payload": {"id": "s", "base_instructions": {"text": "You are Codex."}}}


def item(kind, **more):
    return {"type": "response_item", "payload": {"type": kind, **more}}


def said(role, text):
    return item(
        "message", role=role, content=[{"type": "input_text" if role == "user" else "output_text", "text": text}]
    )


def event(kind, **more):
    return {"type": "event_msg", "payload": {"type": kind, **more}}


def compacted(*history, **more):
    return {"type": "compacted", "payload": {**more, "replacement_history": [line["payload"] for line in history]}}


BACK = event("thread_rolled_back", num_turns=1)
OPEN = [META, said("developer", "Sandbox."), said("user", "Fix."), said("assistant", "Fixed.")]
OPENED = ["system: You are Codex.", "system: Sandbox.", "user: Fix.", "assistant: Fixed."]
MORE = [said("user", "Go on."), said("assistant", "Done.")]
MORE_TOLD = ["user: Go on.", "assistant: Done."]
UNREADABLE = "user: [The conversation before this point was compacted. Its summary is not in the log.]"
CONTEXT = said("user", "<environment_context>x</environment_context>")
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}

ROLLOUTS = {
    "a rolled back turn": ([*OPEN, said("user", "Drop."), item("function_call", name="rm", call_id="c", arguments="{}"),
                            item("function_call_output", call_id="c", output="ok"), BACK, *MORE], [OPENED + MORE_TOLD]),
    "its context goes too": ([*OPEN, CONTEXT, said("user", "Drop."), BACK, *MORE], [OPENED + MORE_TOLD]),
    "two rolled back turns": ([*OPEN, *MORE, said("user", "Drop."), said("assistant", "Dropped."),
                               event("thread_rolled_back", num_turns=2), *MORE], [OPENED + MORE_TOLD]),
    "more turns than there are": ([*OPEN, event("thread_rolled_back", num_turns=9), *MORE], [OPENED[:2] + MORE_TOLD]),
    "a compaction that was rolled back": (
        [*OPEN, said("user", "Drop."), compacted(said("user", "So far.")), said("assistant", "Dropped."), BACK, *MORE],
        [OPENED + MORE_TOLD]),
    "instructions after a compaction": ([*OPEN, compacted(said("user", "So far.")), *MORE],
                                        [OPENED, [*OPENED[:2], "user: So far.", *MORE_TOLD]]),
    "instructions that the log repeats": ([*OPEN, compacted(said("user", "So far.")), said("developer", "Sandbox."),
                                           *MORE], [OPENED, [*OPENED[:2], "user: So far.", *MORE_TOLD]]),
    "an encrypted compaction": ([*OPEN, compacted(said("user", "Fix."), item("compaction")), *MORE],
                                [OPENED, [*OPENED[:3], UNREADABLE, *MORE_TOLD]]),
    "an empty compaction": ([*OPEN, compacted(message=""), *MORE], [OPENED, [*OPENED[:2], UNREADABLE, *MORE_TOLD]]),
    "a compaction of nothing": ([*OPEN, {"type": "compacted", "payload": {"turn_id": "t"}}, *MORE],
                                [OPENED, [*OPENED[:2], UNREADABLE, *MORE_TOLD]]),
    "a compaction that is an item": ([*OPEN, item("context_compaction"), *MORE],
                                     [OPENED, [*OPENED[:2], UNREADABLE, *MORE_TOLD]]),
    "lines and items that are not the model's": (
        [*OPEN, {"type": "world_state", "payload": {}}, {"type": "inter_agent_communication_metadata", "payload": {}},
         {"id": "t"}, item("new_kind"), item("ghost_snapshot"), *MORE], [OPENED + MORE_TOLD]),
    "a message of another agent": ([*OPEN, item("agent_message", author="/root", content=[
        {"type": "input_text", "text": "Hello"}, {"type": "encrypted_content"}]), *MORE],
        [[*OPENED, "user: Hello[encrypted_content]", *MORE_TOLD]]),
    "a search of tools": (
        [*OPEN, item("tool_search_call", call_id="c", arguments='{"query": "x"}'),
         item("tool_search_output", call_id="c", tools=[{"name": "lookup"}]), *MORE],
        [[*OPENED[:3], "assistant: Fixed.[tool_search]", 'tool: [{"name": "lookup"}]', *MORE_TOLD]]),
    "an image that was made": ([*OPEN, item("image_generation_call", result="aGk="), *MORE],
                               [[*OPENED[:3], "assistant: Fixed.[image_generation]", *MORE_TOLD]]),
    "images of the user and of a tool": (
        [*OPEN, item("custom_tool_call", name="exec", call_id="c", input="x"),
         item("custom_tool_call_output", call_id="c", output=[PICTURE]),
         item("message", role="user", content=[PICTURE])],
        [[*OPENED[:3], "assistant: Fixed.[exec]", "tool: [image]", "user: [image]"]]),
    "arguments that the model did not end": (
        [*OPEN, item("function_call", name="f", call_id="c", arguments='{"a": '),
         item("function_call_output", call_id="c", output="No JSON."), *MORE],
        [[*OPENED[:3], "assistant: Fixed.[f]", "tool: No JSON.", *MORE_TOLD]]),
    "items of null": ([*OPEN, {"type": "response_item", "payload": None}, event("thread_rolled_back"), *MORE],
                      [OPENED + MORE_TOLD]),
    "the output of an older codex exec": (
        [{"type": "item.completed", "item": {"item_type": "command_execution", "command": "ls",
                                             "aggregated_output": "a"}},
         {"type": "item.completed", "item": {"item_type": "assistant_message", "text": "Done."}}],
        [["assistant: [shell]", "tool: a", "assistant: Done."]]),
    "the output of codex exec": (
        [{"type": "thread.started"},
         {"type": "item.completed", "item": {"id": "i0", "type": "reasoning", "text": "Hm."}},
         {"type": "item.completed", "item": {"id": "i1", "type": "command_execution", "command": "ls",
                                             "aggregated_output": "a", "exit_code": 0}},
         {"type": "item.completed", "item": {"id": "i2", "type": "agent_message", "text": "Done."}}],
        [["assistant: [shell]", "tool: a", "assistant: Done."]]),
}  # fmt: skip


@pytest.mark.parametrize("name", ROLLOUTS)
def test_a_rollout_is_the_history_that_the_model_read(name, tmp_path):
    lines, wanted = ROLLOUTS[name]
    records, _ = read("codex", lines, tmp_path)
    assert [told(record) for record in records] == wanted


@pytest.mark.parametrize("name", ["codex", "claude_code"])
def test_the_problem_is_what_the_user_asked_first(name, tmp_path):
    """Sessions in one folder begin with the same message about it, but are runs of different tasks."""
    caveat = user("u0", None, "Caveat: The messages below were generated while running local commands.", isMeta=True)
    cleared = user("u1", "u0", "<command-name>/clear</command-name>")
    begin = {"codex": [META, CONTEXT], "claude_code": [caveat, cleared]}[name]
    for asked in ("Fix.", "Add a test."):
        new = {"codex": [said("user", asked), MORE[1]],
               "claude_code": [user("u2", "u1", asked), agent("a1", "u2", "m1", "Done.")]}[name]  # fmt: skip
        (record,), _ = read(name, [*begin, *new], tmp_path)
        assert record["problem"] == asked
    alone = {"codex": MORE[1], "claude_code": agent("a1", "u1", "m1", "Done.")}[name]
    (record,), _ = read(name, [*begin, alone], tmp_path)
    assert record["problem"] == next(m["content"] for m in record["messages"] if m["role"] == "user")


@pytest.mark.parametrize(
    ("name", "before"),
    [("claude_code", "<ide_opened_file>The user opened a.py.</ide_opened_file>"),
     ("claude_code", "<ide_selection>x = 1\n</ide_selection>\n<system-reminder>Note.</system-reminder>\n"),
     ("codex", "# Context from my IDE setup:\n\n## Open tabs:\n- a.py\n\n## My request for Codex:\n")],
)  # fmt: skip
def test_the_problem_lacks_text_that_the_editor_puts_before_it(name, before, tmp_path):
    text = before + "Fix."
    lines = {"codex": [META, said("user", text), MORE[1]],
             "claude_code": [user("u1", None, text), agent("a1", "u1", "m1", "Done.")]}[name]  # fmt: skip
    (record,), _ = read(name, lines, tmp_path)
    assert record["problem"] == "Fix." and f"user: {text}" in told(record)


def test_threads_of_codex_exec_are_separate(tmp_path):
    done = {"type": "item.completed", "item": {"id": "i", "type": "agent_message", "text": "Done."}}
    started = [{"type": "thread.started", "thread_id": thread} for thread in ("t1", "t1", "t2")]
    lines = [line for thread in started for line in (thread, {"type": "turn.started"}, done)]
    records, _ = read("codex", lines, tmp_path)
    assert [(record["session"], told(record)) for record in records] == [
        ("t1", ["assistant: Done."] * 2), ("t2", ["assistant: Done."])]  # fmt: skip


def test_a_forked_rollout_keeps_its_own_session(tmp_path):
    lines = [META, {**META, "payload": {**META["payload"], "id": "parent"}}, *OPEN[1:]]
    (record,), _ = read("codex", lines, tmp_path)
    assert record["session"] == "s" and told(record) == OPENED


def test_skipped_lines_of_a_rollout_are_counted(tmp_path):
    _, left = read("codex", ROLLOUTS["lines and items that are not the model's"][0], tmp_path)
    names = ("world_state", "inter_agent_communication_metadata")
    assert left == {f"line of type '{name}'": 1 for name in names} | {
        "line without a type": 1, "item of type 'new_kind'": 1}  # fmt: skip


def test_arguments_that_are_no_json_are_kept_as_text(tmp_path):
    (record,), left = read("codex", ROLLOUTS["arguments that the model did not end"][0], tmp_path)
    (call,) = [call for message in record["messages"] for call in message.get("tool_calls") or ()]
    assert call["function"]["arguments"] == {"input": '{"a": '}
    assert left == {"arguments that are not a JSON object, read as text": 1}


def test_an_encrypted_thought_leaves_its_summary(tmp_path):
    sealed = [{"type": "encrypted_content", "encrypted_content": "gAAA"}]
    told = {"type": "summary_text", "text": "Short."}
    for summary, thought in (([], None), ([told], "Short.")):
        lines = [META, said("user", "Fix."), item("reasoning", summary=summary, content=sealed), *MORE[1:]]
        (record,), _ = read("codex", lines, tmp_path)
        assert record["messages"][-1].get("reasoning_content") == thought


@pytest.mark.parametrize(
    ("name", "image"),
    [("openai", {"type": "image_url", "image_url": {"url": "u"}}), ("anthropic", IMAGE)],
)
def test_images_of_logs_are_refused_or_counted(name, image, tmp_path):
    content = [{"type": "text", "text": "See "}, image]
    log = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "A cat."}], "outcome": 1}
    with pytest.raises(RecordError, match="'image"):
        read(name, [log], tmp_path)
    (record,), left = read(name, [log], tmp_path, images="drop")
    (text,) = [m["content"] for m in record["messages"] if m["role"] == "user"]
    assert left == {"image in a message": 1}
    assert text in ("See [image]", [content[0], {"type": "text", "text": "[image]"}])


@pytest.mark.parametrize(
    ("name", "log"),
    [("atif", {"schema_version": "ATIF-v1.7", "agent": {"name": "n", "version": "1"}, "steps": [
        {"step_id": 1, "source": "user", "message": [{"type": "text", "text": "See "}, IMAGE]},
        {"step_id": 2, "source": "agent", "message": "A cat."}]}),
     ("swe_agent", {"history": [{"role": "user", "content": [{"type": "text", "text": "See "}, IMAGE]},
                                {"role": "assistant", "content": "A cat."}]}),
     ("mini_swe_agent", {"messages": [{"role": "user", "content": [{"type": "text", "text": "See "}, IMAGE]},
                                      {"role": "assistant", "content": "A cat."}], "outcome": 1})],
)  # fmt: skip
def test_images_of_documents_get_a_placeholder(name, log, tmp_path):
    (record,), left = read(name, [log], tmp_path)
    text = record["messages"][0]["content"]
    text = text if isinstance(text, str) else "".join(part["text"] for part in text)
    assert (text, left) == ("See [image]", {"image in a message": 1})
    with pytest.raises(RecordError, match="'image'"):
        read(name, [log], tmp_path, images="error")
