"""Traces: one call of a model, as each convention writes it."""

import json

import pytest

from jprm.io.jsonl import RecordError
from jprm.methods.data.readers import find


def read(item, **options):
    reader, left = find("otel"), {}
    parsed = list(reader.parse(json.loads(json.dumps(item)), "f:1", reader.options(**options)))
    records = [part for part in parsed if isinstance(part, dict)]
    left = {part.what: part.count for part in parsed if not isinstance(part, dict)}
    return records, left


def plain(record):
    return [{k: v for k, v in m.items() if v is not None} for m in record["messages"]]


CALL = {"id": "c", "type": "function", "function": {"name": "price", "arguments": {"item": "lamp"}}}
WANTED = [
    {"role": "user", "content": "A lamp?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "12"},
    {"role": "assistant", "content": "12."},
]
CHAT = [WANTED[0], {"role": "assistant", "content": "", "tool_calls": [
    {**CALL, "function": {"name": "price", "arguments": '{"item": "lamp"}'}}]}, WANTED[2]]  # fmt: skip
ARGUMENTS = '{"item": "lamp"}'


def flat(prefix, values):
    """Returns numbered attributes of a list of objects with dotted names."""
    return {f"{prefix}.{i}.{key}": value for i, fields in enumerate(values) for key, value in fields.items()}


PARTS = [
    {"role": "user", "parts": [{"type": "text", "content": "A lamp?"}]},
    {"role": "assistant", "parts": [{"type": "tool_call", "id": "c", "name": "price", "arguments": ARGUMENTS}]},
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": "12"}]},
]
INFERENCE = [
    {"message.role": "user", "message.content": "A lamp?"},
    {"message.role": "assistant", "message.tool_calls.0.tool_call.id": "c",
     "message.tool_calls.0.tool_call.function.name": "price",
     "message.tool_calls.0.tool_call.function.arguments": ARGUMENTS},
    {"message.role": "tool", "message.tool_call_id": "c", "message.content": "12"},
]  # fmt: skip
NESTED = [{"message": WANTED[0]}, {"message": {"role": "assistant", "tool_calls": [{"tool_call": CALL}]}},
          {"message": WANTED[2]}]  # fmt: skip
LLMETRY = [
    {"role": "user", "content": '[{"type": "text", "text": "A lamp?"}]'},
    {"role": "assistant", "tool_calls.0.id": "c", "tool_calls.0.name": "price", "tool_calls.0.arguments": ARGUMENTS},
    {"role": "tool", "tool_call_id": "c", "content": "12"},
]
VERCEL = [
    {"role": "user", "content": [{"type": "text", "text": "A lamp?"}]},
    {"role": "assistant", "content": [
        {"type": "tool-call", "toolCallId": "c", "toolName": "price", "input": {"item": "lamp"}}]},
    {"role": "tool", "content": [{"type": "tool-result", "toolCallId": "c", "toolName": "price",
                                  "output": {"type": "text", "value": "12"}}]},
]  # fmt: skip
EVENTS = [
    {"name": "gen_ai.user.message", "attributes": {"content": "A lamp?"}},
    {"name": "gen_ai.assistant.message", "attributes": {"tool_calls": json.dumps([CALL])}},
    {"name": "gen_ai.tool.message", "attributes": {"id": "c", "content": "12"}},
    {"name": "gen_ai.choice", "attributes": {"index": 0, "message": '{"role": "assistant", "content": "12."}'}},
]
NAMED = [{"event.name": event["name"], **event["attributes"]} for event in EVENTS]
ITEMS = [
    {"role": "user", "content": "A lamp?"},
    {"type": "function_call", "call_id": "c", "name": "price", "arguments": ARGUMENTS},
    {"type": "function_call_output", "call_id": "c", "output": "12"},
]
GOOGLE = {"contents": [
    {"role": "user", "parts": [{"text": "A lamp?"}]},
    {"role": "model", "parts": [{"function_call": {"id": "c", "name": "price", "args": {"item": "lamp"}}}]},
    {"role": "user", "parts": [{"function_response": {"id": "c", "name": "price", "response": "12"}}]},
]}  # fmt: skip
ANSWER = {"role": "assistant", "content": "12."}

TRACES = {
    "OpenTelemetry, parts": {"attributes": {"gen_ai.input.messages": json.dumps(PARTS), "gen_ai.output.messages": [
        {"role": "assistant", "parts": [{"type": "text", "content": "12."}]}]}},
    "OpenTelemetry, contents": {"attributes": {"gen_ai.input.messages": json.dumps(CHAT),
                                               "gen_ai.output.messages": json.dumps([ANSWER])}},
    "OpenTelemetry, events of a span": {"attributes": {"gen_ai.system": "x"}, "events": EVENTS},
    "OpenTelemetry, events as logs": {"resourceLogs": [{"scopeLogs": [{"logRecords": [
        {"spanId": "s", "eventName": event["name"], "body": {"kvlistValue": {"values": [
            {"key": key, "value": {"stringValue": str(value)}} for key, value in event["attributes"].items()]}}}
        for event in EVENTS]}]}]},
    "pydantic-ai's events": {"attributes": {"events": json.dumps(NAMED)}},
    "OpenInference, flat": {"attributes": flat("llm.input_messages", INFERENCE) | flat(
        "llm.output_messages", [{"message.role": "assistant", "message.content": "12."}])},
    "OpenInference, contents": {"attributes": flat("llm.input_messages", INFERENCE) | {
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.contents.0.message_content.type": "text",
        "llm.output_messages.0.message.contents.0.message_content.text": "12."}},
    "OpenInference, nested": {"attributes": {"llm": {"input_messages": NESTED,
                                                     "output_messages": [{"message": ANSWER}]}}},
    "OpenInference, columns of a data frame": {
        "name": "ChatCompletion", "span_kind": "LLM", "parent_id": None, "events": [], "context.trace_id": "t",
        "attributes.llm.tools": None,
        "attributes.llm.input_messages": [
            {"message.role": "user", "message.content": "A lamp?", "message.tool_calls": None},
            {"message.role": "assistant", "message.content": None, "message.tool_calls": [
                {"tool_call.id": "c", "tool_call.function.name": "price", "tool_call.function.arguments": ARGUMENTS}]},
            {"message.role": "tool", "message.content": "12", "message.tool_call_id": "c"}],
        "attributes.llm.output_messages": [{"message.role": "assistant", "message.content": "12."}]},
    "OpenLLMetry": {"attributes": flat("gen_ai.prompt", LLMETRY) | flat("gen_ai.completion", [ANSWER])},
    "Vercel AI": {"attributes": {"ai.prompt.messages": json.dumps(VERCEL), "ai.response.text": "12.",
                                 "ai.response.finishReason": "stop"}},
    "Langfuse, a chat": {"trace": {}, "observations": [
        {"type": "SPAN", "input": "x", "output": "y"},
        {"type": "GENERATION", "input": {"messages": CHAT}, "output": {"choices": [{"message": ANSWER}]}}]},
    "Langfuse, an observation a line": {
        "type": "GENERATION", "trace_id": "t", "input": json.dumps(CHAT), "output": "12."},
    "OpenTelemetry, protobuf's names": {"resource_spans": [{"scope_spans": [{"spans": [{"attributes": [
        {"key": "gen_ai.input.messages", "value": {"string_value": json.dumps(PARTS)}},
        {"key": "gen_ai.output.messages", "value": {"array_value": {"values": [{"kvlist_value": {"values": [
            {"key": "role", "value": {"string_value": "assistant"}},
            {"key": "content", "value": {"string_value": "12."}}]}}]}}}]}]}]}]},
    "Langfuse, texts of JSON": {"observations": [{"type": "GENERATION", "input": json.dumps(CHAT), "output": "12."}]},
    "Langfuse, items of the Responses API": {"observations": [
        {"type": "GENERATION", "input": ITEMS, "output": {"output": [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "12."}]}]}}]},
    "Langfuse, Google's API": {"observations": [{"type": "GENERATION", "input": GOOGLE, "output": {
        "content": {"role": "model", "parts": [{"text": "12."}]}}}]},
}  # fmt: skip


@pytest.mark.parametrize("name", TRACES)
def test_every_convention_tells_the_same_conversation(name):
    (record,), _ = read(TRACES[name])
    for message in (messages := plain(record)):
        message.setdefault("content", "")
    assert messages == WANTED


@pytest.mark.parametrize("place", ["context.trace_id", "context", "trace_id"])
def test_a_record_names_its_trace(place):
    (record,), _ = read({**TRACES["Vercel AI"], place: {"trace_id": "t"} if place == "context" else "t"})
    assert record["trace_id"] == "t"


def test_calls_of_an_answer_are_read():
    bare = {"toolCallId": "c", "toolName": "price", "input": ARGUMENTS}
    for name, output in {
        "ai.response.toolCalls": json.dumps([bare]),
        "llm.output_messages": [{"message": {"role": "assistant", "tool_calls": [{"tool_call": CALL}]}}],
    }.items():
        asked = {"ai.prompt.messages": [WANTED[0]], "llm.input_messages": [{"message": WANTED[0]}]}
        (record,), _ = read({"attributes": {**asked, name: output}})
        assert plain(record)[-1]["tool_calls"] == [CALL]


def test_tools_of_every_convention_are_schemas():
    schema = {"type": "object", "properties": {}}
    function = {"name": "price", "description": "A price.", "parameters": schema}
    asked = {"llm.input_messages": [{"message": WANTED[0]}], "llm.output_messages": [{"message": ANSWER}]}
    (record,), _ = read({"attributes": asked | {"llm.tools.0.tool.json_schema": json.dumps(
        {"type": "function", "function": function})}})  # fmt: skip
    assert record["tools"] == [{"type": "function", "function": function}]
    row = [{"tool.json_schema": json.dumps({"type": "function", "function": function})}]
    (record,), _ = read({"attributes": asked | {"llm.tools": row}})
    assert record["tools"] == [{"type": "function", "function": function}]
    vercel = {"ai.prompt.messages": [WANTED[0]], "ai.response.text": "12.", "ai.prompt.tools": [json.dumps(
        {"type": "function", "name": "price", "description": "A price.", "inputSchema": schema})]}  # fmt: skip
    (record,), _ = read({"attributes": vercel})
    assert record["tools"] == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("part", "thought"),
    [({"type": "reasoning", "content": "Hm."}, "Hm."), ({"type": "thinking", "content": "Hm."}, "Hm."),
     ({"type": "reasoning", "content": "Hm.", "summary": "H."}, "Hm."),
     ({"type": "reasoning", "content": "", "summary": "H."}, "H."),
     ({"type": "reasoning", "content": "EqQB", "redacted": True}, None),
     ({"type": "reasoning", "content": "EqQB", "redacted": True, "summary": [{"text": "H."}]}, "H."),
     ({"type": "redacted_thinking", "content": "EqQB", "data": "EqQB"}, None),
     ({"type": "Microsoft.Extensions.AI.TextReasoningContent", "content": {"protectedData": "E"}}, None)],
)  # fmt: skip
def test_thoughts_are_parts_of_several_types(part, thought):
    parts = [part, {"type": "text", "content": "12."}]
    (record,), _ = read({"attributes": {"gen_ai.output.messages": [{"role": "assistant", "parts": parts}]}})
    assert record["messages"][-1].get("reasoning_content") == thought


def test_an_image_in_a_tools_answer_has_a_placeholder():
    answer = [{"type": "text", "text": "See "}, {"type": "image", "source": {"data": "aGk="}}]
    parts = [*PARTS[:2], {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": answer}]}]
    item = {"attributes": {"gen_ai.input.messages": parts, "gen_ai.output.messages": [ANSWER]}}
    (record,), left = read(item, images="drop")
    assert (record["messages"][2]["content"], left) == ("See [image]", {"image in a message": 1})
    with pytest.raises(RecordError, match="'image', not text"):
        read(item)


def test_a_trace_of_any_agent_is_one_trajectory():
    version = {"any_agent.version": "1", "gen_ai.operation.name": "invoke_agent"}
    spans = [
        {"gen_ai.operation.name": "call_llm", "gen_ai.input.messages": json.dumps([WANTED[0]]),
         "gen_ai.output": json.dumps([{"tool.name": "price", "tool.args": ARGUMENTS}])},
        {"gen_ai.operation.name": "execute_tool", "gen_ai.output": "12"},
        {"gen_ai.operation.name": "call_llm", "gen_ai.output": "12."}, version,
    ]  # fmt: skip
    (record,), _ = read({"spans": [{"attributes": attributes} for attributes in spans]})
    assert [m["content"] for m in record["messages"]] == ["A lamp?", "", "12", "12."]
    assert record["messages"][1]["tool_calls"][0]["function"] == CALL["function"]


def langfuse(asked, answered):
    observation = {"type": "GENERATION", "traceId": "t", "id": "s", "input": asked, "output": answered}
    return {"trace": {"id": "t"}, "observations": [observation]}


@pytest.mark.parametrize("form", ["text", "decoded"])
@pytest.mark.parametrize("role", ["tool", "assistant"])
def test_calls_in_place_of_a_content_are_the_agents(role, form):
    calls = [CHAT[1]["tool_calls"][0]]
    asked = [WANTED[0], {"role": role, "content": json.dumps(calls) if form == "text" else calls}, WANTED[2]]
    (record,), _ = read(langfuse(asked, {"role": "assistant", "content": "12."}))
    assert [m["role"] for m in record["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert record["messages"][1]["tool_calls"] == [CALL]


@pytest.mark.parametrize(
    "content", ['[{"function": "price"}]', '[{"a": 1}]', "[{", '[{"function": {"name": "f"}}]', "[{" * 9999]
)
def test_a_tools_answer_that_is_a_list_stays_its_answer(content):
    asked = [*WANTED[:2], {**WANTED[2], "content": content}]
    (record,), _ = read(langfuse(asked, {"role": "assistant", "content": "12."}))
    assert record["messages"][2] == {**WANTED[2], "content": content}


@pytest.mark.parametrize("content", [{"price": 12}, [{"price": 12}], [12]])
def test_a_tools_answer_that_was_decoded_is_its_json(content):
    asked = [*WANTED[:2], {**WANTED[2], "content": content}]
    (record,), _ = read(langfuse(asked, {"role": "assistant", "content": "12."}))
    assert record["messages"][2]["content"] == json.dumps(content)


def test_schemas_among_the_messages_are_tools():
    schema = {"type": "function", "function": {"name": "price", "parameters": {"type": "object", "properties": {}}}}
    asked = json.dumps([WANTED[0], {"role": "tool", "content": schema}])
    (record,), _ = read(langfuse(asked, {"role": "assistant", "content": "12."}))
    assert [m["role"] for m in record["messages"]] == ["user", "assistant"]
    assert record["tools"] == [schema]


def test_arguments_of_a_function_are_its_prompt():
    (record,), _ = read(langfuse({"args": ["A lamp?"], "kwargs": {}}, "12."))
    assert [m["content"] for m in record["messages"]] == ["A lamp?", "12."]


def test_a_call_that_begins_with_a_tools_answer_is_counted():
    call = {"attributes": {"gen_ai.input.messages": PARTS[2:], "gen_ai.output.messages": [WANTED[3]]}}
    (record,), left = read({"spans": [TRACES["OpenTelemetry, parts"], call]})
    assert len(record["messages"]) == 4
    assert left == {"call that shows a tool's answer without the conversation before it": 1}
    own = {"attributes": {"gen_ai.input.messages": PARTS[1:], "gen_ai.output.messages": [WANTED[3]]}}
    assert read({"spans": [call, own]}) == ([], {next(iter(left)): 2})


@pytest.mark.parametrize(
    ("attributes", "named"),
    [({"input.value": "x", "openinference.span.kind": "TOOL"}, "input.value"),
     ({"llm.input_messages.0.message.role": "user"}, "OpenInference, without an answer"),
     ({"mlflow.spanInputs": "x"}, "MLflow"), ({"pydantic_ai.all_messages": "[]"}, "pydantic-ai"),
     ({"gen_ai.system": "x"}, "leave out by default")],
)  # fmt: skip
def test_spans_of_a_convention_that_is_not_read_are_counted_by_name(attributes, named):
    span = {"attributes": attributes}
    records, left = read({"spans": [span, TRACES["Vercel AI"], span]})
    assert len(records) == 1 and [(named in name, count) for name, count in left.items()] == [(True, 2)]
    assert read(span)[0] == []  # one span a line


@pytest.mark.parametrize("alone", [True, False])
def test_observations_of_other_types_are_counted_by_type(alone):
    step = {"type": "TOOL", "traceId": "t", "id": "s", "input": "x", "output": "y"}
    assert read(step if alone else {"observations": [step]}) == ([], {"observation of type TOOL": 1})


def test_an_event_with_a_body_is_named():
    body = {"input": {"messages": [WANTED[0]]}, "output": {"messages": [ANSWER]}}
    assert read({"span_events": [{"event_name": "x", "attributes": {}, "body": body}]}) == (
        [], {"span with body.output (AWS's events), which is not read": 1})  # fmt: skip


def test_an_answer_in_a_line_without_its_question_is_counted():
    assert read({"spanId": "s", **EVENTS[-1]}) == ([], {"answer of OpenTelemetry without its input": 1})


TURN = {"role": "assistant", "content": "I look."}


def calling(*ids):
    return {"role": "assistant", "tool_calls": [{**CALL, "id": name} for name in ids]}


def results(*ids):
    return [{"role": "tool", "tool_call_id": name, "content": name} for name in ids]


@pytest.mark.parametrize(
    "asked",
    [[calling("a"), calling("b"), *results("a", "b")], [calling("a", "b"), *results("x", "y")],
     [calling("a"), calling("b"), *results("x", "y")]],
    ids=["a message for each call", "other ids", "both"],
)  # fmt: skip
@pytest.mark.parametrize("before", [[], [TURN]], ids=["calls", "text and calls"])
def test_messages_of_one_turn_are_joined(before, asked):
    item = {"llm.input_messages": [{"message": message} for message in (WANTED[0], *before, *asked)],
            "llm.output_messages": [{"message": ANSWER}]}  # fmt: skip
    (record,), _ = read({"attributes": item})
    turn = record["messages"][1]
    assert [message["role"] for message in record["messages"]] == ["user", "assistant", "tool", "tool", "assistant"]
    assert (turn["content"] or "", [call["id"] for call in turn["tool_calls"]]) == (
        "I look." if before else "", ["a", "b"])  # fmt: skip


THOUGHT = {"role": "assistant", "contents": [{"message_content": {"type": "reasoning", "text": "Hm."}}]}


@pytest.mark.parametrize(
    ("answers", "count"),
    [([THOUGHT, TURN, calling("a")], 1), ([THOUGHT, calling("a", "b")], 1), ([TURN, ANSWER], 2),
     ([calling("a"), calling("b")], 2)],
)  # fmt: skip
def test_parts_of_an_answer_are_one_answer_and_choices_several(answers, count):
    item = {"llm.input_messages": [{"message": WANTED[0]}], "llm.output_messages": [{"message": m} for m in answers]}
    records, _ = read({"attributes": item})
    assert [len(record["messages"]) for record in records] == [2] * count
    if count == 1:
        assert records[0]["messages"][1]["reasoning_content"] == "Hm."


def test_an_agents_answer_is_its_whole_run():
    item = {"gen_ai.input.messages": PARTS[:1], "gen_ai.output.messages": [*PARTS[1:], ANSWER]}
    (record,), _ = read({"attributes": item})
    assert [message["role"] for message in record["messages"]] == ["user", "assistant", "tool", "assistant"]


def test_an_id_that_is_a_list_links_a_result():
    parts = json.loads(json.dumps(PARTS).replace('"id": "c"', '"id": ["run", "c"]'))
    (record,), _ = read({"attributes": {"gen_ai.input.messages": parts, "gen_ai.output.messages": [ANSWER]}})
    assert record["messages"][1]["tool_calls"][0]["id"] == record["messages"][2]["tool_call_id"]


def test_a_repeat_of_the_calls_is_left_out():
    asked = [WANTED[0], TURN, {"role": "tool-call", "content": "Calling tools"},
             {"role": "tool-response", "content": "12"}]  # fmt: skip
    records, left = read({"attributes": {"llm.input_messages": [{"message": message} for message in asked],
                                         "llm.output_messages": [{"message": ANSWER}]}})  # fmt: skip
    assert [message["role"] for message in records[0]["messages"]] == ["user", "assistant", "user", "assistant"]
    assert left == {"repeat of the calls in a turn": 1}


def test_system_and_tools_in_attributes_of_an_observation_are_kept():
    schema = {"type": "object", "properties": {}}
    wanted = [{"type": "function", "function": {"name": "price", "parameters": schema}}]
    system = json.dumps([{"type": "text", "content": "Be kind."}])
    for attributes in (
        {"gen_ai.tool.definitions": json.dumps(wanted)},
        {"model_request_parameters": {"function_tools": [{"name": "price", "parameters_json_schema": schema}]}},
    ):
        item = langfuse([WANTED[0]], ANSWER)
        item["observations"][0]["metadata"] = {"attributes": {**attributes, "gen_ai.system_instructions": system}}
        (record,), _ = read(item)
        assert record["messages"][0] == {"role": "system", "content": "Be kind."} and record["tools"] == wanted


def test_googles_adk_is_read_with_its_schemas():
    schema = {"type": "object", "properties": {}}
    config = {"system_instruction": "Be kind.", "tools": [{"function_declarations": [
        {"name": "price", "description": "A price.", "parameters": schema}]}]}  # fmt: skip
    request = json.dumps({"model": "m", "config": config, **GOOGLE})
    answer = {"content": {"role": "model", "parts": [{"text": "12."}]}}
    spans = [{"gcp.vertex.agent.llm_request": request, "gcp.vertex.agent.llm_response": json.dumps(answer)},
             {"gcp.vertex.agent.llm_request": "{}", "gcp.vertex.agent.llm_response": "{}"}]  # fmt: skip
    (record,), _ = read({"spans": [{"attributes": attributes} for attributes in spans]})
    assert [message["role"] for message in record["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert record["tools"][0]["function"] == {"name": "price", "description": "A price.", "parameters": schema}


def test_parts_that_are_no_text_are_refused_or_counted():
    image = {"type": "blob", "mime_type": "image/png", "content": "aGk="}
    item = {"attributes": {"gen_ai.input.messages": [{"role": "user", "parts": [image]}],
                           "gen_ai.output.messages": [{"role": "assistant", "parts": PARTS[0]["parts"]}]}}  # fmt: skip
    with pytest.raises(RecordError, match="Parts text, reasoning, tool_call and tool_call_response"):
        read(item)
    (record,), left = read(item, images="drop")
    assert record["messages"][0]["content"] == "[file]" and left == {"file in a message": 1}
    stream = {"attributes": {"llm.output_messages": [{"message": {"role": "assistant", "content": " the"}}]}}
    item = {"spans": [stream, TRACES["Vercel AI"]]}
    assert read(item)[1] == {"answer of OpenInference without its input": 1}
