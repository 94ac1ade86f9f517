"""Events of OpenHands: each event is the text that the model read."""

import json

import pytest

from jprm.methods.data.readers import find


def read(events, tmp_path, **options):
    path, left = tmp_path / "events.json", {}
    path.write_text(json.dumps(events, indent=1))
    records = find("openhands").read(path, on_left_out=lambda part: left.update({part.what: part.count}), **options)
    return [record for _, record in records], left


def text(content):
    return {"type": "text", "text": content}


def system(**more):
    return {"kind": "SystemPromptEvent", "system_prompt": text("Be brief."), "tools": [], **more}


def said(role, content, **more):
    return {"kind": "MessageEvent", "llm_message": {"role": role, "content": [text(content)]}, **more}


def acted(**more):
    call = {"id": "c", "name": "terminal", "arguments": "{}"}
    return {
        "kind": "ActionEvent",
        "thought": [],
        "tool_call_id": "c",
        "tool_call": call,
        "llm_response_id": "r",
        **more,
    }


def observed(kind="ObservationEvent", **more):
    return {"kind": kind, "tool_call_id": "c", **more}


def terminal(content="ls", **more):
    return observed(observation={"kind": "TerminalObservation", "content": [text(content)], **more})


METADATA = {
    "exit_code": 0,
    "working_dir": "/w",
    "py_interpreter_path": "/bin/python",
    "prefix": "[Below]\n",
    "suffix": "!",
}
AFTER = "[Below]\nls!\n[Current working directory: /w]\n"
AFTER += "[Python interpreter: /bin/python]\n[Command finished with exit code 0]"
ERROR = "[An error occurred during execution.]\n"

OBSERVED = {
    "a result": (terminal(), "ls"),
    "an exit code": (terminal(exit_code=2), "ls\n[Command finished with exit code 2]"),
    "a command that has not ended": (terminal(exit_code=-1), "ls"),
    "an error": (terminal(is_error=True), ERROR + "ls"),
    "an error with an exit code": (
        terminal(is_error=True, exit_code=2),
        ERROR + "ls\n[Command finished with exit code 2]",
    ),
    "metadata": (terminal(metadata=METADATA, exit_code=9), AFTER),
    "a rule for a file": ({**terminal(), "extended_content": [text(" Rule.")]}, "ls Rule."),
    "an error of the agent": (observed("AgentErrorEvent", error="Bad args."), "Bad args."),
    "a rejection": (observed("UserRejectObservation", rejection_reason="No."), "Action rejected: No."),
    "a picture": (
        observed(observation={"content": [text("See"), {"type": "image", "image_urls": ["u"]}]}),
        "See[image]",
    ),
    "a screenshot": (observed(observation={"content": [text("See")], "screenshot_data": "aGk="}), "See[image]"),
}


@pytest.mark.parametrize("name", OBSERVED)
def test_an_observation_is_the_text_that_the_model_read(name, tmp_path):
    event, wanted = OBSERVED[name]
    (record,), _ = read([system(), said("user", "Fix."), acted(), event], tmp_path)
    assert record["messages"][-1] == {"role": "tool", "tool_call_id": "c", "content": wanted}


def test_a_call_whose_arguments_are_no_json_is_kept_with_its_error(tmp_path):
    """OpenHands writes such a call with `action` null, and then the error."""
    call = {"id": "c", "name": "terminal", "arguments": '{"command": "ls'}
    error = observed("AgentErrorEvent", error="Bad arguments.")
    (record,), left = read([said("user", "Fix."), acted(tool_call=call, action=None), error], tmp_path)
    assert record["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"input": '{"command": "ls'}
    assert record["messages"][2]["content"] == "Bad arguments."
    assert left == {"arguments that are not a JSON object, read as text": 1}


def test_context_of_a_prompt_and_of_a_message_is_read(tmp_path):
    events = [system(dynamic_context=text(" In acme.")), said("user", "Fix.", extended_content=[text(" Use make.")]),
              said("assistant", "Fixed.")]  # fmt: skip
    (record,), _ = read(events, tmp_path)
    assert [m["content"] for m in record["messages"]] == ["Be brief. In acme.", "Fix. Use make.", "Fixed."]


@pytest.mark.parametrize("kind", ["InterruptEvent", "PauseEvent", "ACPToolCallEvent", "HookExecutionEvent", "NewEvent"])
def test_events_that_the_model_does_not_read_end_nothing(kind, tmp_path):
    (record,), left = read([said("user", "Fix."), acted(), {"kind": kind}, terminal()], tmp_path)
    assert [m["role"] for m in record["messages"]] == ["user", "assistant", "tool"]
    assert left == {f"event {kind!r}": 1}


@pytest.mark.parametrize(
    ("fields", "thoughts"),
    [({"reasoning_content": "Hm."}, "Hm."), ({"thinking_blocks": [{"type": "thinking", "thinking": "Hm."}]}, "Hm."),
     ({"thinking_blocks": [{"type": "redacted_thinking", "data": "E"}]}, None),
     ({"responses_reasoning_item": {"summary": ["Short."], "content": ["Hm."], "encrypted_content": "E"}}, "Hm."),
     ({"responses_reasoning_item": {"summary": ["Short."], "content": None}}, "Short.")],
)  # fmt: skip
def test_thoughts_have_three_places(fields, thoughts, tmp_path):
    (record,), _ = read([said("user", "Fix."), acted(**fields), terminal()], tmp_path)
    assert record["messages"][1].get("reasoning_content") == thoughts


def named(event, number):
    """Returns an event with this id, and with the number in the ids of its call and response."""
    ids = {key: f"{event[key]}{number}" for key in ("tool_call_id", "llm_response_id") if key in event}
    call = {"tool_call": {**event["tool_call"], "id": f"c{number}"}} if "tool_call" in event else {}
    return {**event, "id": f"e{number}", **ids, **call}


def told(record):
    return [(m["role"], m["content"]) for m in record["messages"]]


def condensed(*ids, **more):
    return {"kind": "Condensation", "forgotten_event_ids": [f"e{i}" for i in ids], "summary_offset": 2, **more}


CONTEXT = [("system", "Be brief."), ("user", "Fix.")]


def step(number):
    """Returns the events of a call and its result, which share an id here."""
    return [named(acted(thought=[text(f"I run {number}.")]), number), named(terminal(f"ls {number}"), number)]


def step_told(number):
    return [("assistant", f"I run {number}."), ("tool", f"ls {number}")]


@pytest.mark.parametrize(
    ("events", "wanted"),
    [
        ([*step(1), *step(2), condensed(1, summary="So far."), *step(3)],
         [[*step_told(1), *step_told(2)], [("user", "So far."), *step_told(2), *step_told(3)]]),
        ([*step(1), condensed(1, summary="So far."), *step(2), condensed(2, summary="So far, 2."), *step(3)],
         [step_told(1), [("user", "So far."), *step_told(2)], [("user", "So far, 2."), *step_told(3)]]),
        ([*step(1), *step(2), condensed(1, summary="So far."), condensed(2, summary="So far, 2."), *step(3)],
         [[*step_told(1), *step_told(2)], [("user", "So far, 2."), *step_told(3)]]),
        ([*step(1), *step(2), condensed(1), *step(3)],
         [[*step_told(1), *step_told(2)], [*step_told(2), *step_told(3)]]),
        ([*step(1), condensed(1, summary="So far.")], [step_told(1)]),
        ([*step(1), named(acted(thought=[text("I run 2.")]), 2), {**terminal("ls 2"), "id": "o2", "tool_call_id": "c2"},
          condensed(1, 2, summary="So far."), *step(3)],
         [[*step_told(1), *step_told(2)], [("user", "So far."), *step_told(3)]]),
    ],
    ids=["a part", "two", "one after another", "no summary", "no turn after it", "a call leaves with its result"],
)  # fmt: skip
def test_a_condensation_begins_a_part_that_holds_the_summary(events, wanted, tmp_path):
    records, _ = read([system(), said("user", "Fix."), *events], tmp_path)
    assert [told(record) for record in records] == [[*CONTEXT, *part] for part in wanted]
    assert {record["problem"] for record in records} == {"Fix."}


def test_events_of_a_port_that_repeat_one_another_are_read_once(tmp_path):
    """OpenHands-Tab writes each call and result as a message too, and its tools' own fields in an observation."""
    call = {"id": "c", "type": "function", "function": {"name": "terminal", "arguments": "{}"}}
    repeated = {"kind": "MessageEvent", "llm_message": {"role": "assistant", "content": [], "tool_calls": [call]}}
    result = observed(observation={"stdout": "a.py", "exit_code": 0})
    (record,), left = read(
        [said("user", "Fix."), repeated, acted(tool_call=call), result, said("tool", "{}")], tmp_path
    )
    assert told(record) == [("user", "Fix."), ("assistant", ""), ("tool", '{"stdout": "a.py", "exit_code": 0}')]
    assert record["messages"][1]["tool_calls"][0]["function"]["name"] == "terminal"
    assert left == {"message that repeats an action or its observation": 2,
                    "observation without a text, read as JSON": 1}  # fmt: skip


def test_a_message_that_came_while_the_tool_ran_follows_the_result(tmp_path):
    (record,), _ = read([said("user", "Fix."), acted(), said("user", "And b."), terminal()], tmp_path)
    assert told(record) == [("user", "Fix."), ("assistant", ""), ("tool", "ls"), ("user", "And b.")]


# ---- Version 0.

RESPONSE = {"id": "r", "choices": [{"message": {"content": "I look.", "tool_calls": [
    {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}]}}]}  # fmt: skip
META = {"tool_call_id": "c", "model_response": RESPONSE}
ASKED = {"source": "user", "action": "message", "args": {"content": "Fix."}}
RUN = {"source": "agent", "action": "run", "args": {"command": "ls"}, "tool_call_metadata": META}


def observed_0(kind, content, **extras):
    return {"source": "agent", "observation": kind, "content": content, "extras": extras}


def test_a_command_of_version_0_has_its_exit_code(tmp_path):
    after = {"exit_code": 127, "suffix": "\n[The command completed with exit code 127.]", "working_dir": None}
    (record,), _ = read([ASKED, RUN, observed_0("run", "", metadata=after) | {"tool_call_metadata": META}], tmp_path)
    wanted = "\n[The command completed with exit code 127.]\n[Command finished with exit code 127]"
    assert record["messages"][-1] == {"role": "tool", "tool_call_id": "c", "content": wanted}


def test_an_error_that_answers_no_call_is_the_users(tmp_path):
    answer = observed_0("run", "a.py") | {"tool_call_metadata": META}
    (record,), _ = read([ASKED, RUN, answer, observed_0("error", "Bad parameter.")], tmp_path)
    told = "Bad parameter.\n[Error occurred in processing last action]"
    assert record["messages"][-2:] == [
        {"role": "tool", "tool_call_id": "c", "content": "a.py"}, {"role": "user", "content": told}]  # fmt: skip


def test_events_before_0_9_have_their_arguments_at_the_event(tmp_path):
    events = [
        {"action": "message", "content": "Fix.", "images_urls": None, "wait_for_response": False, "action_risk": None},
        {"action": "run", "command": "ls", "thought": "I look.", "keep_prompt": True, "is_confirmed": "confirmed"},
        {"observation": "run", "content": "a.py", "command_id": -1, "command": "ls", "exit_code": 2},
        {"action": "message", "content": "Which one?", "wait_for_response": True},
        {"action": "finish", "outputs": {}, "thought": "Done."},
    ]
    (record,), _ = read(events, tmp_path)
    assert [(m["role"], m["content"]) for m in record["messages"]] == [
        ("user", "Fix."), ("assistant", "I look."), ("tool", "a.py\n[Command finished with exit code 2]"),
        ("assistant", "Which one?"), ("assistant", "Done.")]  # fmt: skip
    assert record["messages"][1]["tool_calls"][0]["function"] == {"name": "run", "arguments": {"command": "ls"}}


def test_a_rejection_and_a_command_of_the_user_are_told_as_the_model_read_them(tmp_path):
    rejected = observed_0("user_rejected", "No.") | {"tool_call_metadata": META}
    run = [{"source": "user", "action": "run", "args": {"command": "pwd"}}, observed_0("run", "/w")]
    (record,), _ = read([ASKED, RUN, rejected, *run], tmp_path)
    assert [m["content"] for m in record["messages"][2:]] == [
        "OBSERVATION:\nNo.\n[Last action has been rejected by the user]", "User executed the command:\npwd",
        "\nObserved result of command executed by user:\n/w"]  # fmt: skip


def test_a_condensation_of_version_0_forgets_a_range(tmp_path):
    answer = observed_0("run", "a.py") | {"tool_call_metadata": META}
    condensation = {"source": "agent", "action": "condensation", "id": 3, "args": {
        "forgotten_event_ids": None, "forgotten_events_start_id": 1, "forgotten_events_end_id": 2,
        "summary": "So far.", "summary_offset": 1}}  # fmt: skip
    done = {"source": "agent", "action": "message", "args": {"content": "Done."}}
    events = [{**event, "id": i} for i, event in enumerate([ASKED, RUN, answer, condensation, done])]
    first, second = read(events, tmp_path)[0]
    assert told(first) == [("user", "Fix."), ("assistant", "I look."), ("tool", "a.py")]
    assert told(second) == [("user", "Fix."), ("user", "So far."), ("assistant", "Done.")]
