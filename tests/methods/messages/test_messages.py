"""Messages as clients, servers and frameworks write them: one conversation is one record, however it is logged."""

import copy
import json

import pytest

from jprm.io.jsonl import RecordError
from jprm.methods.data.reader import LeftOut
from jprm.methods.data.readers import find
from jprm.tree import record_of, tree_of

ASK = {"role": "user", "content": "What does a lamp cost?"}
TOLD = {"role": "tool", "tool_call_id": "c1", "content": "12"}
LAST = {"role": "assistant", "content": "It costs 12."}
THOUGHT = "This is wrong, I guess."
TEXT = {"type": "text", "text": "It costs 12."}


def call(arguments, **fields):
    return {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": arguments}} | fields


def turn(arguments=None, **fields):
    return {"role": "assistant", "content": None, "tool_calls": [call({} if arguments is None else arguments)]} | fields


def talk(*messages, **fields):
    return copy.deepcopy({"messages": list(messages), **fields})


def read(name, item):
    reader = find(name)
    return list(reader.parse(json.loads(json.dumps(item)), "f:1", reader.options()))


def said(record):
    """Returns what a template sees of a record's messages."""
    return [{k: v for k, v in message.items() if v is not None} for message in record_of(tree_of(record))["messages"]]


ARGUMENTS = {
    '{"item": "lamp"}': {"item": "lamp"},
    '{"item":"lamp"}': {"item": "lamp"},
    '{"item":"l\\u00e4mp"}': {"item": "lämp"},
    '{"item": "\\ud83d\\ude00"}': {"item": "😀"},
    "": {},
    " \n": {},
    "null": {},
    "{}": {},
    None: {},
}


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_are_an_object_at_every_door(arguments):
    wanted = tree_of(talk(ASK, turn(ARGUMENTS[arguments]), TOLD, LAST))
    record = talk(ASK, turn(), TOLD, LAST)
    record["messages"][1]["tool_calls"][0]["function"]["arguments"] = arguments
    assert tree_of(record) == wanted
    (logged,) = read("openai", record)
    assert said(logged) == said(record)
    nodes = [message | {"parent": i - 1} for i, message in enumerate(record["messages"])]
    assert [node.extra for node in tree_of({"nodes": nodes}).nodes] == [node.extra for node in wanted.nodes]
    bare = talk(ASK, turn(), TOLD, LAST)
    bare["messages"][1]["tool_calls"] = [{"id": "c1", "name": "lookup", "arguments": arguments}]
    assert tree_of(bare) == wanted
    del record["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert tree_of(record) == tree_of(talk(ASK, turn({}), TOLD, LAST))


BROKEN = ['{"c": "\\ud83d"}', '{"x": NaN}', '{"x": 1e999}', '{"item":"lamp","item":"desk"}', '{"x": 1', "lamp",
          '"lamp"', "[1]", "3", '"{}"']  # fmt: skip


@pytest.mark.parametrize("text", BROKEN)
def test_arguments_that_are_no_object_are_refused_with_their_place(text):
    record = talk(ASK, turn(text), TOLD, LAST)
    for reader in (lambda: tree_of(record, "f:1"), lambda: read("openai", record)):
        with pytest.raises(RecordError) as caught:
            reader()
        place = ("f:1", "messages[1].tool_calls[0].function.arguments")
        assert (caught.value.where, caught.value.field) == place
    for value in ({"x": float("nan")}, {"x": "\ud83d"}):
        with pytest.raises(RecordError, match="arguments"):
            tree_of(talk(ASK, turn(value), TOLD, LAST))


THOUGHTS = [
    {"reasoning_content": THOUGHT},
    {"reasoning": THOUGHT},
    {"thinking": THOUGHT},
    {"thinking_blocks": [{"type": "thinking", "thinking": THOUGHT, "signature": "x"}]},
    {"thinking_blocks": [{"type": "redacted_thinking", "data": "x"}, {"type": "thinking", "thinking": THOUGHT}]},
    {"reasoning_details": [{"type": "reasoning.text", "text": THOUGHT}, {"type": "reasoning.encrypted", "data": "x"}]},
    {"reasoning_details": [{"type": "reasoning.summary", "summary": THOUGHT}], "reasoning": THOUGHT},
    {"extra_content": {"thought": THOUGHT}},
    {"provider_specific_fields": {"reasoning_content": THOUGHT, "thinking_blocks": [{"thinking": THOUGHT}]}},
]


@pytest.mark.parametrize("fields", [*THOUGHTS, {"content": [{"type": "thinking", "thinking": THOUGHT}]}])
def test_thoughts_have_one_name(fields):
    wanted = said(talk(ASK, turn(reasoning_content=THOUGHT), TOLD, LAST))
    record = talk(ASK, turn() | fields, TOLD, LAST)
    messages = said(record)
    for message in messages:
        assert message.pop("provider_specific_fields", {}) == message.pop("extra_content", {}) == {}
    if "content" in fields:
        messages[1] = {key: value for key, value in messages[1].items() if key != "content"}
    assert messages == wanted
    if "content" not in fields:
        plain, thought = talk(ASK, LAST | fields), talk(ASK, LAST | {"reasoning_content": THOUGHT})
        assert tree_of(plain).nodes == tree_of(thought).nodes


SEALED = {"type": "reasoning", "reasoning": "EqQBCkgIBxAB", "redacted": True}


@pytest.mark.parametrize(
    ("part", "thought"),
    [(SEALED, None), (SEALED | {"summary": "Short."}, "Short."), (SEALED | {"redacted": False}, "EqQBCkgIBxAB"),
     ({"type": "reasoning", "reasoning": "The whole.", "summary": "Short."}, "The whole."),
     ({"type": "reasoning", "reasoning": "", "summary": "Short."}, "Short."),
     ({"type": "redacted_thinking", "thinking": "EqQB", "data": "EqQB"}, None)],
)  # fmt: skip
def test_an_encrypted_thought_is_no_text_and_a_summary_no_thought(part, thought):
    answer = {"role": "assistant", "content": [part, {"type": "text", "text": "12"}]}
    (record,) = read("openai", talk(ASK, answer))
    assert record["messages"][-1].get("reasoning_content") == thought
    (record,) = read("openai", talk(ASK, {"role": "assistant", "content": "12", "thinking_blocks": [part]}))
    assert record["messages"][-1].get("reasoning_content") == thought


TOLD_AGAIN = [
    {"reasoning": THOUGHT, "reasoning_details": [{"type": "reasoning.summary", "summary": "Short."}]},
    {"reasoning_details": [{"type": "reasoning.summary", "summary": "Short."}, {"text": THOUGHT}]},
    {"reasoning_content": THOUGHT, "thinking_blocks": [{"type": "reasoning", "redacted": True, "summary": "Short."}]},
    {"reasoning_content": THOUGHT, "content": [{"type": "reasoning", "redacted": True, "summary": "Short."}, TEXT]},
]


@pytest.mark.parametrize("fields", TOLD_AGAIN)
def test_a_summary_beside_a_whole_thought_is_left_out(fields):
    (record,) = read("openai", talk(ASK, LAST | fields))
    assert record["messages"][1]["reasoning_content"] == THOUGHT


def test_a_call_may_name_its_function_by_text():
    """As inspect-ai writes calls."""
    named = {"id": "c1", "function": "lookup", "arguments": {"item": "lamp"}, "type": "function"}
    assert said(talk(ASK, turn() | {"tool_calls": [named]}, TOLD)) == said(talk(ASK, turn({"item": "lamp"}), TOLD))


def test_a_refusal_is_the_text_of_its_turn():
    wanted = said(talk(ASK, turn(), TOLD, LAST | {"content": "I cannot tell prices."}))
    for last in (
        {"role": "assistant", "content": None, "refusal": "I cannot tell prices."},
        {"role": "assistant", "content": "I cannot tell prices.", "refusal": "I cannot tell prices."},
    ):
        assert said(talk(ASK, turn(), TOLD, last)) == wanted
        assert [node.text for node in tree_of(talk(ASK, last)).nodes] == ["I cannot tell prices."]
    part = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot tell prices."}]}
    assert tree_of(talk(ASK, turn(), TOLD, part)).nodes[-1].text == "I cannot tell prices."


@pytest.mark.parametrize("key", ["system", "instructions", "documents", "functions"])
def test_a_prompt_beside_the_messages_is_refused(key):
    for record in (talk(ASK, turn(), TOLD, LAST), {"nodes": [ASK | {"parent": -1}, LAST | {"parent": 0}]}):
        assert tree_of(record | {key: None})
        with pytest.raises(RecordError) as caught:
            tree_of(record | {key: ["Be short."]})
        assert caught.value.field == key


def test_ids_that_say_nothing_are_none():
    for no_id in ("", None):
        calls = [call({"item": item}, id=no_id) for item in ("lamp", "desk")]
        record = talk(ASK, turn(tool_calls=calls), TOLD | {"tool_call_id": no_id}, TOLD | {"tool_call_id": no_id}, LAST)
        messages = said(record)
        assert all("id" not in tool_call for tool_call in messages[1]["tool_calls"])
        assert not any("tool_call_id" in message for message in messages)


# ---- Logs.

ITEMS = [
    {"type": "function_call", "call_id": "c1", "name": "lookup", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "12"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It costs 12."}]},
]


def summary(text):
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def test_all_thoughts_of_a_response_are_kept():
    raw = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}]}
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    for items, wanted in (
        ([summary("First."), summary("Second.")], "First.\nSecond."),
        ([raw], "I look."),
        ([hidden, raw | {"summary": [{"type": "summary_text", "text": "Looks."}]}], "I look."),
        ([hidden], None),
    ):
        (record,) = read("openai", {"input": "q", "output": [*items, *ITEMS]})
        assert record["messages"][1].get("reasoning_content") == wanted
    (record,) = read("openai", {"input": "q", "output": [summary("First."), ITEMS[0], summary("Second."), *ITEMS[1:]]})
    assert record["messages"][1]["reasoning_content"] == "First.\nSecond."
    (record,) = read("openai", {"input": "q", "output": [ITEMS[2], ITEMS[2]]})
    assert record["messages"][1]["content"] == "It costs 12.\nIt costs 12."
    custom = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "x"}
    told = {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"}
    (record,) = read("openai", {"input": "q", "output": [custom, told, ITEMS[2]]})
    assert record["messages"][1]["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "x"}}
    assert record["messages"][2]["content"] == "ok"
    refused = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}
    told = [{"role": "developer", "content": "Hm."}]
    (record,) = read("openai", {"input": "q", "output": [refused], "instructions": told})
    assert [(m["role"], m["content"]) for m in record["messages"]] == [
        ("system", "Hm."), ("user", "q"), ("assistant", "I cannot.")]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [({"reward": 0.0}, 0), ({"success": True}, 1), ({"resolved": False}, 0), ({"score": 0.25}, 0.25),
     ({"outcome": 1, "reward": 0.5}, 1), ({"reward": None, "resolved": True}, 1), ({}, None)],
)  # fmt: skip
def test_outcomes_are_read_under_the_names_in_use(fields, outcome):
    (record,) = read("openai", talk(ASK, LAST) | fields)
    assert record.get("outcome") == outcome
    (record,) = read("anthropic", talk(ASK, LAST) | fields)
    assert record.get("outcome") == outcome
    (record,) = read("otel", {"attributes": {"gen_ai.output.messages": [PART_OF_ANSWER]}} | fields)
    assert record.get("outcome") == outcome


def test_messages_may_be_json_text_and_rollouts_texts():
    (wanted,) = read("openai", talk(ASK, LAST))
    assert read("openai", {"messages": json.dumps([ASK, LAST])}) == [wanted]
    assert read("openai", {"prompt": ASK["content"], "completion": LAST["content"]}) == [wanted]
    assert read("verifiers", {"prompt": ASK["content"], "completion": [LAST], "reward": 1}) == [wanted | {"outcome": 1}]
    batch = {"request": {"body": {"messages": [ASK]}}, "response": {"body": {"choices": [{"message": LAST}]}}}
    assert read("openai", batch) == [wanted]


@pytest.mark.parametrize("form", ["item", "response", "batch"])
def test_an_answer_alone_is_refused(form):
    answer = {"instructions": "Be brief.", "output": [{"type": "message", "role": "assistant", "content": "12."}]}
    item = {"item": answer, "response": {"response": answer}, "batch": {"custom_id": "1", "response": {"body": answer}}}
    with pytest.raises(RecordError, match="input: is missing"):
        read("openai", item[form])


def test_tools_of_the_responses_api_are_schemas_and_the_servers_are_counted():
    schema = {"name": "price", "description": "A price.", "parameters": {"type": "object"}}
    item = {"input": "A lamp?", "output": [{"type": "message", "role": "assistant", "content": "12."}],
            "tools": [{"type": "function", **schema}, {"type": "web_search"}]}  # fmt: skip
    record, left = read("openai", item)
    assert record["tools"] == [{"type": "function", "function": schema}]
    assert left == ("tool of type 'web_search', which the server runs", 1)
    (record,) = read("verifiers", {"prompt": [ASK], "completion": [LAST], "reward": 1, "tool_defs": [schema]})
    assert record["tools"] == [{"type": "function", "function": schema}]


def test_neighbours_of_the_assistant_are_one_turn_for_anthropic():
    use, result = ({"type": "tool_use", "name": "f", "input": {}}, {"type": "tool_result", "content": "12"})
    said = [{"type": "text", "text": "I look."}, {**use, "id": "a"}], [{**use, "id": "b"}]
    log = {"messages": [ASK, *({"role": "assistant", "content": content} for content in said),
                        {"role": "user", "content": [{**result, "tool_use_id": "a"}, {**result, "tool_use_id": "b"}]},
                        {"role": "assistant", "content": "It costs "}],
           "response": {"content": [{"type": "text", "text": "12."}]}}  # fmt: skip
    (record,) = read("anthropic", log)
    assert [message["role"] for message in record["messages"]] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [call["id"] for call in record["messages"][1]["tool_calls"]] == ["a", "b"]
    assert record["messages"][-1]["content"] == "It costs 12."


def test_tools_that_a_conversation_adds_are_named():
    reference = {"type": "tool_reference", "tool_name": "price"}
    call = {"type": "tool_use", "id": "a", "name": "search", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [reference]}
    added = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "price"}}
    log = {"messages": [ASK, {"role": "assistant", "content": [call]},
                        {"role": "user", "content": [result]},
                        {"role": "system", "content": [added]}, LAST]}  # fmt: skip
    (record,) = read("anthropic", log)
    assert [message["content"] for message in record["messages"][2:4]] == ["[tool: price]"] * 2
    tools = [{"type": "function", "name": "price"}]
    items = [{"role": "user", "content": "A lamp?"}, {"type": "additional_tools", "role": "developer", "tools": tools}]
    answer = {"instructions": "", "output": [{"type": "message", "role": "assistant", "content": "12."}]}
    (record,) = read("openai", {"input": items, **answer})
    assert [message["role"] for message in record["messages"]] == ["user", "system", "assistant"]
    assert json.loads(record["messages"][1]["content"]) == tools


def test_each_choice_of_a_response_is_a_trajectory():
    choices = [{"message": LAST}, {"message": LAST | {"content": "It costs 13."}}]
    records = read("openai", {"request": {"messages": [ASK]}, "response": {"choices": choices}})
    assert [record["messages"][-1]["content"] for record in records] == ["It costs 12.", "It costs 13."]
    answers = [PART_OF_ANSWER, {"role": "assistant", "parts": [{"type": "text", "content": "13"}]}]
    records = read("otel", {"attributes": {"gen_ai.output.messages": answers}})
    assert [record["messages"][-1]["content"] for record in records] == ["12", "13"]


PART_OF_ANSWER = {"role": "assistant", "parts": [{"type": "text", "content": "12"}]}
ONE = {"type": "tool_call", "name": "lookup", "arguments": {}}
SAYS = {"type": "tool_call_response", "response": "12"}


@pytest.mark.parametrize(
    ("calls", "answers"),
    [
        ([ONE], [SAYS]),
        ([ONE | {"id": None}], [SAYS | {"id": None}]),
        ([{"type": "text", "content": "I look."}, ONE], [SAYS]),
        ([ONE, ONE], [SAYS, SAYS]),
        ([ONE | {"id": "c1"}], [SAYS]),
        ([ONE | {"arguments": '{"item": "lamp"}'}], [{"type": "tool_call_response"}]),
    ],
)
def test_calls_without_ids_are_answered_in_order(calls, answers):
    asked = [
        {"role": "user", "parts": [{"type": "text", "content": "q"}]},
        {"role": "assistant", "parts": calls},
        {"role": "tool", "parts": answers},
    ]
    attributes = {"gen_ai.input.messages": json.dumps(asked), "gen_ai.output.messages": json.dumps([PART_OF_ANSWER])}
    (record,) = read("otel", {"attributes": attributes})
    called = [tool_call["function"]["name"] for tool_call in record["messages"][1]["tool_calls"]]
    assert called == ["lookup"] * sum(part["type"] == "tool_call" for part in calls)
    told = [message["content"] for message in record["messages"] if message["role"] == "tool"]
    assert told == [answer.get("response", "") for answer in answers]


def any_value(value):
    """Returns a value as OTLP's JSON has it."""
    if isinstance(value, dict):
        return {"kvlistValue": {"values": [{"key": k, "value": any_value(v)} for k, v in value.items()]}}
    if isinstance(value, list):
        return {"arrayValue": {"values": list(map(any_value, value))}}
    return {"stringValue": value}


@pytest.mark.parametrize("write", [any_value, lambda value: {"stringValue": json.dumps(value)}])
def test_exports_of_otlp_are_read_as_exporters_write_them(write):
    asked = [{"role": "user", "parts": [{"type": "text", "content": "q"}]},
             {"role": "assistant", "parts": [ONE | {"arguments": {"item": ["lamp"]}}]},
             {"role": "tool", "parts": [SAYS]}]  # fmt: skip
    said = {"gen_ai.input.messages": asked, "gen_ai.output.messages": [PART_OF_ANSWER]}
    (wanted,) = read("otel", {"traceId": "t", "attributes": said})
    attributes = [{"key": key, "value": write(value)} for key, value in said.items()]
    attributes += [{"key": "gen_ai.usage.input_tokens", "value": {"intValue": "3"}}]
    span, other = {"traceId": "t", "name": "chat", "attributes": attributes}, {"name": "tool", "attributes": []}
    left = LeftOut("span without messages, whose contents instrumentations leave out by default", 1)
    assert read("otel", {"resourceSpans": [{"scopeSpans": [{"spans": [other, span, span]}]}]}) == [wanted, wanted, left]
    logs = {"resource": {"attributes": []}, "scopeLogs": [{"logRecords": [span]}]}
    assert read("otel", {"resourceLogs": [logs]}) == [wanted]
    assert read("otel", {"traceId": "t", "attributes": [], "events": [{"attributes": attributes}]}) == [wanted]
    assert read("otel", {"resourceSpans": [{"scopeSpans": [{"spans": [other]}]}]}) == [left]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({"loop": True, "wrong_tool": 0, "late": 0.7}, ["loop", "late"]), ("loop", ["loop"]),
     (["loop", "late"], ["loop", "late"]), ([], []), (None, None), ({}, [])],
)  # fmt: skip
def test_classes_beside_turns_are_the_records_list(given, wanted):
    record = record_of(tree_of(talk(ASK, turn() | {"classes": given}, TOLD, LAST)))
    assert record["classes"] == [wanted, None] and all("classes" not in message for message in record["messages"])
    assert record_of(tree_of(record)) == record


@pytest.mark.parametrize(
    "record",
    [talk(ASK, LAST | {"classes": {"a": 1}}, ASK, LAST, classes=[["a"], None]), talk(ASK | {"classes": "a"}, LAST),
     talk(ASK, LAST | {"classes": {"a": "yes"}}), talk(ASK, LAST | {"classes": [1]}),
     talk(ASK, LAST | {"classes": 3}), talk(ASK, LAST | {"classes": "a"}, segment="sentences")],
)  # fmt: skip
def test_classes_that_say_nothing_are_refused(record):
    with pytest.raises(RecordError, match="classes"):
        tree_of(record | {"outcome": 1})
