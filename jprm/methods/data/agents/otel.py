"""Generative AI traces: OpenTelemetry spans and events, in the conventions of common instrumentations.

`CONVENTIONS` lists the attribute names. A value may be an object, JSON text, or numbered attributes such as
`llm.input_messages.0.message.content`. Messages have parts, contents, or chat fields.
"""

from __future__ import annotations

import collections
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jprm.io.jsonl import RecordError, list_of, object_of, type_name
from jprm.methods.data.agents.conversation import Conversation
from jprm.methods.data.agents.logs import json_in, kept, messages_of_blocks, tools_of, trajectory_of
from jprm.methods.data.agents.parts import Leftovers, LogOptions, is_content
from jprm.methods.data.reader import LeftOut, Reader, Record, object_in
from jprm.methods.messages.messages import THOUGHTS, call_of, decoded, thoughts_of_blocks


class Convention(NamedTuple):
    """Attribute names of one convention."""

    name: str
    asked: str  # the messages that the model read
    answered: str  # its answers


CONVENTIONS = (
    Convention("OpenTelemetry", "gen_ai.input.messages", "gen_ai.output.messages"),
    Convention("OpenInference", "llm.input_messages", "llm.output_messages"),
    Convention("OpenLLMetry", "gen_ai.prompt", "gen_ai.completion"),
    Convention("Vercel AI", "ai.prompt.messages", "ai.response"),
    Convention("Langfuse", "langfuse.observation.input", "langfuse.observation.output"),
    Convention("Google ADK", "gcp.vertex.agent.llm_request", "gcp.vertex.agent.llm_response"),
)
_SYSTEM = "gen_ai.system_instructions"
_TOOLS = (
    "gen_ai.tool.definitions",
    "llm.tools",
    "llm.request.functions",
    "ai.prompt.tools",
    "model_request_parameters",
)
"""Attributes with tool schemas in any convention: Langfuse keeps them, and renames only the messages."""

_UNREAD = {
    "input.value": "OpenInference, of a span that is no model's call", "llm.prompts": "OpenInference's completions",
    "pydantic_ai.all_messages": "pydantic-ai's spans of agents", "all_messages_events": "pydantic-ai's spans of agents",
    "traceloop.entity.input": "Traceloop's workflows",
    "mlflow.spanInputs": "MLflow", "lk.chat_ctx": "LiveKit", "weave": "Weave", "inputs": "LangSmith",
}  # fmt: skip
"""Attributes that may hold a conversation but are not supported, and their source as shown in the report."""


def parse_otel(item: Any, where: str, options: LogOptions) -> Iterator[Record | LeftOut]:
    """Yields a trajectory for each answer in a trace; the last one usually holds the whole conversation.

    `CONVENTIONS` names the attributes that are read. An item is one span or event, an OTLP export ({"resourceSpans":
    ...} or {"resourceLogs": ...}), {"spans": ...}, or Langfuse's {"trace", "observations"}. Spans without an answer are
    left out and counted, last. any-agent's spans hold only new messages, so its trace is one trajectory. A record has
    `messages`, `tools`, the ids of trace and span (`trace_id`, `span_id`, or `traceId`, `spanId`, as in the item), and
    (`kept`) `id`, `problem`, `answer`, `semantics` and the outcome.

    Raises RecordError if the item is no object, or messages, calls or tools of a span are damaged. An item without any
    answer yields no trajectory.
    """
    item = object_of(item, where, "record", "Is this file of OpenTelemetry?")
    left = Leftovers(options)
    try:
        spans = [(span, _flat(attributes)) for span, attributes in _spans(item, where)]
    except RecursionError:
        raise RecordError(where, "record", "is nested too deep", "Is this file of OpenTelemetry?") from None
    if any("any_agent.version" in attributes for _, attributes in spans):
        yield _of_any_agent(item, where, left)
        yield from left
        return
    read: set[int] = set()  # places of spans
    unread: collections.Counter[str] = collections.Counter()  # their descriptions are too long for `left`
    for place, span, attributes in itertools.chain(
        ((i, *pair) for i, pair in enumerate(spans)), _calls_of_events(spans, read, where)
    ):
        for convention in CONVENTIONS:
            answered = _value(attributes, convention.answered, where)
            answers = _answers(answered, convention.answered, where, left)
            if not answers:
                continue
            asked, schemas = _without_tools(_value(attributes, convention.asked, where))
            asked = _in_turns(_messages(asked, "user", where, convention.asked, left), left)
            first = next((message for message in asked if message["role"] != "system"), {})
            if first.get("role") == "tool" or first.get("tool_calls"):
                left.skip("call that shows a tool's answer without the conversation before it")
            elif asked or convention is CONVENTIONS[0] and place >= 0:
                read.add(place)
                yield from _of_call(span, attributes, asked, schemas, answers, where, left)
            else:
                left.skip(f"answer of {convention.name} without its input")  # e.g. a chunk of a stream
            break
        else:
            unread[_unread(span, attributes)] += 1
    yield from left
    yield from (LeftOut(what, count) for what, count in unread.items() if what)


def _unread(span: Mapping[str, Any], attributes: Record) -> str:
    """Describes a span without an answer for the report; "" if its events or inner spans are counted instead."""
    if _event_of(span, attributes) or attributes.get("events") or any(span.get(key) for key in _WITHIN):
        return ""
    names = {name.asked: f"{name.name}, without an answer" for name in CONVENTIONS} | _UNREAD
    held = [
        f"{name} ({about})"
        for name, about in names.items()
        if any(f"{key}.".startswith(f"{name}.") for key in attributes)
    ]
    if isinstance(body := span.get("body"), Mapping) and "output" in body:
        held.append("body.output (AWS's events)")
    if held:
        return f"span with {', '.join(held)}, which is not read"
    if kind := span.get("observation"):
        return f"observation of type {kind}"
    return "span without messages, whose contents instrumentations leave out by default"


def _without_tools(value: Any) -> tuple[Any, Any]:
    """Returns (input without schemas among its messages, tool schemas) of a call; a request may hold them too."""
    if isinstance(value, Mapping):
        return value, value.get("tools") or object_in(value, "config").get("tools")  # the latter is Google's
    if not isinstance(value, list):
        return value, []
    contents = [message.get("content") if isinstance(message, Mapping) else None for message in value]
    are_schemas = [  # LangChain's, in Langfuse's export
        isinstance(content, Mapping) and isinstance(content.get("function"), Mapping) for content in contents
    ]
    return [m for m, is_schema in zip(value, are_schemas, strict=True) if not is_schema], [
        content for content, is_schema in zip(contents, are_schemas, strict=True) if is_schema
    ]


def _of_call(
    span: Mapping[str, Any], attributes: Record, asked: Sequence[Record], schemas: Any,
    answers: Sequence[list[Record]], where: str, left: Leftovers,
) -> Iterator[Record]:  # fmt: skip
    messages: list[Record] = []
    if (instructions := attributes.get(_SYSTEM)) and not any(message["role"] == "system" for message in asked):
        parts = list_of(decoded(instructions, where, _SYSTEM), where, _SYSTEM)
        messages += _of_parts("system", parts, where, _SYSTEM, left)
    values = (_value(attributes, name, where) for name in _TOOLS)
    tools = next(filter(None, (tools_of(value, where, left) for value in (*values, schemas))), {})
    about = kept(span, where, ("trace_id", "span_id", "traceId", "spanId"))
    for answer in answers:
        yield trajectory_of({**about, "messages": [*messages, *asked, *answer], **tools}, where)


# ----------------------------------------------------------------------------------------------- spans and their values

_WITHIN = ("resourceSpans", "resource_spans", "batches", "scopeSpans", "scope_spans", "instrumentationLibrarySpans",
           "spans", "resourceLogs", "resource_logs", "scopeLogs", "scope_logs", "logRecords", "log_records", "events",
           "span_events")  # fmt: skip
"""Nested lists in OTLP, outermost first, by their names in JSON, in protobuf and in Tempo."""


def _spans(item: Mapping[str, Any], where: str) -> Iterator[tuple[Mapping[str, Any], Record]]:
    """Yields each span and event of an item with its attributes by name."""
    alone = "output" in item and str(item.get("type")).isupper()  # e.g. GENERATION, a line of Langfuse's export
    if isinstance(observations := [item] if alone else item.get("observations"), list):
        yield from (
            _of_langfuse(observation, where) for observation in observations if isinstance(observation, Mapping)
        )
        return
    inner = [key for key in _WITHIN if isinstance(item.get(key), list)]
    context = object_in(item, "context", _columns(item, "context."))
    ids = {name: held[name] for held in (context, item)
           for name in ("traceId", "spanId", "trace_id", "span_id") if name in held}  # fmt: skip
    columns = _columns(item, "attributes.")
    if "attributes" in item or columns or not inner:
        attributes = columns or item.get("attributes", item)
        if isinstance(attributes, list):  # OTLP's JSON
            attributes = _any_value({"kvlistValue": {"values": attributes}})
        if isinstance(attributes, Mapping):
            yield {**ids, **item}, dict(attributes)
    for key in inner:
        for attribute in item[key]:
            if isinstance(attribute, Mapping):
                yield from _spans({**ids, **attribute}, where)


def _columns(row: Mapping[str, Any], prefix: str) -> Record:
    """Returns columns by their names after a prefix, e.g. "llm.tools" for "attributes.llm.tools"; skips nulls."""
    return {key[len(prefix) :]: value for key, value in row.items() if key.startswith(prefix) and value is not None}


def _of_langfuse(observation: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], Record]:
    """Converts a Langfuse observation to a span; a generation gets its input and output as attributes."""
    metadata = decoded(observation.get("metadata"), where, "metadata")
    attributes = metadata.get("attributes") if isinstance(metadata, Mapping) else None
    attributes = dict(attributes) if isinstance(attributes, Mapping) else {}
    if observation.get("type") == "GENERATION":
        for name in ("input", "output"):
            attributes[f"langfuse.observation.{name}"] = observation.get(name)
    trace = observation.get("traceId", observation.get("trace_id"))
    return {"traceId": trace, "spanId": observation.get("id"), "observation": observation.get("type")}, attributes


def _any_value(value: Any) -> Any:
    """Decodes an OTLP `AnyValue`."""
    if not isinstance(value, Mapping):
        return value
    kind, held = next(iter(value.items()), ("", None))
    kind = kind.replace("_value", "Value")
    values = held.get("values") if isinstance(held, Mapping) else None
    values = values if isinstance(values, list) else []
    if kind == "kvlistValue":
        pairs = [pair for pair in values if isinstance(pair, Mapping)]
        return {str(pair.get("key")): _any_value(pair.get("value")) for pair in pairs}
    if kind == "arrayValue":
        return [_any_value(inner) for inner in values]
    digits = re.fullmatch("-?[0-9]{1,19}", held) if kind == "intValue" and isinstance(held, str) else None
    return int(digits[0]) if digits else held


def _flat(attributes: Mapping[str, Any], prefix: str = "") -> Record:
    """Flattens nested attributes to dotted names, e.g. from a Phoenix export."""
    flat: Record = {}
    for key, value in attributes.items():
        if isinstance(value, Mapping) and (prefix or key in ("llm", "gen_ai", "ai", "openinference")):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _value(attributes: Mapping[str, Any], name: str, where: str) -> Any:
    """Returns an attribute, decoding JSON text or collecting the numbered attributes below its name."""
    if (value := attributes.get(name)) is not None:
        return _nested(json_in(value, where, name))
    tree = _tree(_columns(attributes, f"{name}."))
    value = _lists(tree)
    has_content = isinstance(value, list) or any(key in value for key in ("text", "toolCalls", "reasoning", "object"))
    return value if has_content and tree else None  # Vercel AI's response has an id and a model too


_DOTTED = ("message.", "message_content.", "tool_call.", "tool.")


def _nested(value: Any) -> Any:
    """Nests dotted keys in lists of messages and tools (Phoenix's data frames), e.g. "message.role"."""
    if isinstance(value, list):
        return [_nested(inner) for inner in value]
    if not isinstance(value, Mapping) or not any(key.startswith(_DOTTED) for key in value):
        return value
    return _tree({key: _nested(inner) for key, inner in value.items() if inner is not None})


def _tree(flat: Mapping[str, Any]) -> Record:
    """Returns nested objects for dotted keys, e.g. {"a": {"b": 1}} for {"a.b": 1}."""
    tree: Record = {}
    for path, value in flat.items():
        *above, last = path.split(".")
        inner = tree
        for key in above:
            inner = inner[key] if isinstance(inner.get(key), dict) else inner.setdefault(key, {})
            if not isinstance(inner, dict):
                break  # a name that is both a value and the beginning of others
        else:
            inner[last] = value
    return tree


def _lists(tree: Any) -> Any:
    """Converts objects with numeric keys to lists, recursively."""
    if not isinstance(tree, dict):
        return tree
    inner = {key: _lists(value) for key, value in tree.items()}
    if all(re.fullmatch("[0-9]{1,9}", key) for key in inner):
        return [inner[key] for key in sorted(inner, key=int)]
    return inner


_EVENT = re.compile(r"gen_ai\.(?:(system|user|assistant|tool)\.message|choice)")


def _event_of(span: Mapping[str, Any], attributes: Record) -> str:
    """Returns the name of an event with one message, e.g. "gen_ai.choice"; "" for other spans."""
    name = span.get("name") or span.get("eventName") or attributes.get("event.name")
    return name if isinstance(name, str) and _EVENT.fullmatch(name) else ""


def _calls_of_events(
    spans: Sequence[tuple[Mapping[str, Any], Record]], read: Collection[int], where: str
) -> Iterator[tuple[int, Mapping[str, Any], Record]]:
    """Yields (-1, span, attributes) for calls with messages in events: conventions before 1.37, and pydantic-ai."""
    groups: dict[Any, list[Any]] = collections.defaultdict(list)
    holders: dict[Any, Mapping[str, Any]] = {}
    for place, (span, attributes) in enumerate(spans):
        if name := _event_of(span, attributes):
            ids = str(span.get("traceId") or span.get("trace_id")), str(span.get("spanId") or span.get("span_id"))
            body = _any_value(span.get("body"))
            groups[ids].append({**attributes, **(body if isinstance(body, Mapping) else {}), "event.name": name})
            holders[ids] = {key: value for key, value in span.items() if key != "name"}
        elif isinstance(events := attributes.get("events"), str | list) and place not in read:
            events = json_in(events, where, "events")
            groups[place] += (
                [event for event in events if isinstance(event, Mapping)] if isinstance(events, list) else []
            )
            holders[place] = span
    for key, events in groups.items():
        answers = [event for event in events if event.get("event.name") == "gen_ai.choice"]
        asked = [event for event in events if event.get("event.name") != "gen_ai.choice"]
        yield -1, holders[key], {"gen_ai.input.messages": asked, "gen_ai.output.messages": answers}


# --------------------------------------------------------------------------------------------------- values as messages


def _answers(value: Any, name: str, where: str, left: Leftovers) -> list[list[Record]]:
    """Returns each answer's messages; Responses API items form one answer."""
    if isinstance(value, list) and not _are_items(value):
        answers = [_messages(answer, "assistant", where, f"{name}[{i}]", left) for i, answer in enumerate(value)]
        messages = [message for answer in answers for message in answer]
        if any(message["role"] == "tool" for message in messages):  # an agent's whole run
            return [_in_turns(messages, left)]
        bare = all(isinstance(answer, Mapping) and "toolName" in answer for answer in value)  # Vercel's calls
        merged: list[list[Record]] = []
        for answer in filter(None, answers):
            open_turn = merged and (bare or not merged[-1][-1].get("tool_calls"))
            if not (open_turn and _join(merged[-1][-1], answer[0])):
                merged.append(answer)
        return merged
    if isinstance(value, Mapping) and isinstance(value.get("choices"), list):
        return _answers(value["choices"], name, where, left)
    answer = _messages(value, "assistant", where, name, left)
    return [answer] if answer else []


def _are_items(value: Sequence[Any]) -> bool:
    kinds = {item.get("type") for item in value if isinstance(item, Mapping) and isinstance(item.get("type"), str)}
    return bool(kinds & {"function_call", "function_call_output", "reasoning", "custom_tool_call"})


_INNER = ("messages", "contents", "message", "output", "candidates")
"""Fields of requests and responses that may hold the messages."""


def _messages(value: Any, role: str, where: str, name: str, left: Leftovers) -> list[Record]:
    """Converts text, a message, a list of messages, or a request or response object to messages."""
    if value is None or value in ("", {}):
        return []
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list):
        if _are_items(value):
            conversation = Conversation(left=left)
            for i, item in enumerate(value):
                conversation.add_item(item, where, f"{name}[{i}]")
            return conversation.messages
        inner = (_messages(message, role, where, f"{name}[{i}]", left) for i, message in enumerate(value))
        return [message for messages in inner for message in messages]
    value = object_of(value, where, name, "Write messages.")
    if value.keys() <= {"args", "kwargs"} and value.get("args"):  # a function's arguments, e.g. LlamaIndex's `complete`
        return _messages(value["args"], role, where, f"{name}.args", left)
    if "role" not in value and (key := next((key for key in _INNER if value.get(key)), None)) is not None:
        config = object_in(value, "config")
        system = _messages(config.get("system_instruction") or value.get("system"), "system", where, name, left)
        return [*system, *_messages(json_in(value[key], where, f"{name}.{key}"), role, where, f"{name}.{key}", left)]
    if isinstance(content := value.get("content"), Mapping) and "parts" in content:  # Google's
        return _messages(content, role, where, f"{name}.content", left)
    if isinstance(prompt := value.get("prompt"), str) and "content" not in value:
        return [*_messages(value.get("system"), "system", where, name, left), {"role": role, "content": prompt}]
    return _message(value, role, where, name, left)


def _join(before: Record, message: Record) -> bool:
    """Joins two messages of one turn in place, e.g. a text and a call; returns `False` if they are two turns."""
    both = [key for key in THOUGHTS if before.get(key) and message.get(key)]
    if both or message.get("content") and (before.get("content") or before.get("tool_calls")):
        return False
    calls = [*(before.get("tool_calls") or ()), *(message.get("tool_calls") or ())]
    before |= {key: value for key, value in message.items() if value} | ({"tool_calls": calls} if calls else {})
    return True


def _in_turns(messages: Sequence[Record], left: Leftovers) -> list[Record]:
    """Joins the messages of each turn, and drops ids of results that differ from the calls' ids.

    Such results answer the calls in order. smolagents repeats a turn's calls in a `tool-call` message; it is left out.
    """
    turns: list[Record] = []
    for message in messages:
        before = turns[-1] if turns and turns[-1]["role"] == "assistant" else None
        if message["role"] == _REPEATS and before:
            left.skip("repeat of the calls in a turn")
        elif not (before and message["role"] == "assistant" and _join(before, message)):
            turns.append({**message, "role": "assistant"} if message["role"] == _REPEATS else dict(message))
    for i, turn in enumerate(turns):
        results = list(itertools.takewhile(lambda message: message["role"] == "tool", turns[i + 1 :]))
        ids = {call.get("id") for call in turn.get("tool_calls") or ()}
        if len(results) == len(ids) and not ids & {result.get("tool_call_id") for result in results}:
            for result in results:
                result.pop("tool_call_id", None)
    return turns


_REPEATS = "tool-call"
_ROLES = {
    "tool-response": "user",
    "developer": "system",
    "human": "user",
    "ai": "assistant",
    "model": "assistant",
    "function": "tool",
}
_CALLS = ("tool_calls", "toolCalls")


def _message(message: Mapping[str, Any], role: str, where: str, name: str, left: Leftovers) -> list[Record]:
    """Converts one chat message, message with parts, or event. Tool results become separate messages."""
    event = _EVENT.fullmatch(str(message.get("event.name")))
    said = message.get("role") or (event and event[1]) or role
    role = _ROLES.get(str(said), str(said))
    more = held if isinstance(held := message.get("additional_kwargs"), Mapping) else None
    if more is not None and role not in ("system", "user", "assistant", "tool"):
        role = "tool"  # LangChain writes the tool's name
    held = next((source[key] for source in (message, more or {}) for key in _CALLS if source.get(key)), [])
    calls = [_call(call, where, name) for call in list_of(json_in(held, where, name), where, f"{name}.tool_calls")]
    if "toolName" in message:
        calls = [_call(message, where, name)]
    content = next((message[key] for key in ("parts", "contents", "content", "text", "object") if key in message), None)
    if isinstance(content, str) and content.startswith('[{"type":'):  # OpenLLMetry
        content = json_in(content, where, name)
    if role in ("assistant", "tool") and (written := _calls_within(content)):  # Koog, with the role of the tool
        role, content, calls = "assistant", None, [_call(call, where, name) for call in written]
    elif role == "tool" and _is_data(content):
        content = json.dumps(content, ensure_ascii=False)
    if content is None and not calls and not any(message.get(key) for key in (*THOUGHTS, "finish_reason")):
        known = ", ".join(map(str, message)) or "no fields"
        remedy = "A message has parts, content or tool_calls."
        raise RecordError(where, name, f"is no message that is read (its fields: {known})", remedy)
    if isinstance(content, list):
        records = _of_parts(role, content, where, name, left)
    else:
        records = [{"role": role, "content": content}]
    first = next((record for record in records if record["role"] == role), None)
    if first is not None:
        first |= {key: message[key] for key in THOUGHTS if message.get(key)} if role == "assistant" else {}
        first |= {"tool_calls": [*(first.get("tool_calls") or ()), *calls]} if calls else {}
        call_id = message.get("tool_call_id") or (message.get("id") if event else None)
        first |= {"tool_call_id": call_id} if role == "tool" and isinstance(call_id, str) else {}
    return records


def _calls_within(content: Any) -> list[Any]:
    """Returns the calls of a content that is only a list of calls, or its JSON text; else []."""
    if isinstance(content, str) and content.startswith("[{"):
        try:
            content = json.loads(content)
        except (ValueError, RecursionError):
            return []
    items = content if isinstance(content, list) else []
    functions = [item.get("function") if isinstance(item, Mapping) else None for item in items]
    return items if all(isinstance(f, Mapping) and {"name", "arguments"} <= f.keys() for f in functions) else []


def _is_data(content: Any) -> bool:
    """Whether a tool's answer is decoded JSON, not text or a list of parts."""
    if not isinstance(content, list):
        return isinstance(content, Mapping)
    parts = [item for item in content if isinstance(item, str) or isinstance(item, Mapping) and _KINDS & item.keys()]
    return bool(content) and not parts


def _call(value: Any, where: str, name: str) -> Record:
    """Converts a call from any convention."""
    call = object_of(value, where, f"{name}.tool_calls", "Write a call's object.")
    call = object_in(call, "tool_call", call)
    function = object_in(call, "function", call)
    named = function.get("name") or call.get("toolName") or call.get("tool.name")
    return call_of(named, _first(function, "arguments", "args", "input", "tool.args"), _id_of(call))


def _first(fields: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    return next((fields[key] for key in keys if fields.get(key) is not None), default)


def _id_of(call: Mapping[str, Any]) -> str | None:
    """Returns a call's first id, as JSON if it is no text: Microsoft's agents write [run id, call id]."""
    call_id = next(filter(None, map(call.get, ("id", "toolCallId", "tool_call_id"))), None)
    return call_id if isinstance(call_id, str | None) else json.dumps(call_id)


def _part(part: Mapping[str, Any], kind: str, where: str, place: str) -> Mapping[str, Any] | None:
    """Converts a part to an Anthropic block, if its kind is known."""
    fields = {**part, **object_in(part, kind)}  # Google's parts
    text = _first(part, "content", "text", "thinking", "reasoning", default="")
    if kind in ("text", "input_text", "output_text") or kind.endswith(".TextContent"):
        if not isinstance(text, str):
            raise RecordError(where, f"{place}.content", f"is {type_name(text)}, not text", "Write a string.")
        return {"type": "text", "text": text}
    if kind in ("reasoning", "thinking", "redacted_thinking") or kind.endswith("ReasoningContent"):
        sealed = kind == "redacted_thinking" or part.get("redacted") or not isinstance(text, str)
        kind = "redacted_thinking" if sealed else "thinking"
        thought = thoughts_of_blocks([{"type": kind, "thinking": text, "summary": part.get("summary")}], where, place)
        return {"type": "thinking" if thought else "redacted_thinking", "thinking": thought}
    if kind in ("tool_call", "tool-call", "tool_use", "function_call", "server_tool_call"):
        call = _call(fields, where, place)
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        return {"type": "tool_use", "id": call.get("id"), "name": name, "input": arguments}
    if kind in ("tool_call_response", "tool-result", "tool_result", "function_response", "server_tool_call_response"):
        answer = _first(fields, "response", "result", "output", "content", default="")
        if isinstance(answer, Mapping) and set(answer) == {"type", "value"}:  # Vercel's
            answer = answer["value"]
        content = answer if isinstance(answer, str) or is_content(answer) else json.dumps(answer, ensure_ascii=False)
        return {"type": "tool_result", "tool_use_id": _id_of(fields), "content": content}
    return None


_TYPES = ("text", "function_call", "function_response")
"""Fields that identify the kind of a Google API part, which has no `type`."""

_KINDS = {"type", "message_content", *_TYPES}


def _of_parts(role: str, parts: Sequence[Any], where: str, place: str, left: Leftovers) -> list[Record]:
    """Converts the parts of a message to messages."""
    blocks = []
    for j, part in enumerate(parts):
        if isinstance(part, Mapping) and isinstance(part.get("message_content"), Mapping):
            part = part["message_content"]  # OpenInference's
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = part.get("type") if isinstance(part, Mapping) else type_name(part)
        if kind is None and isinstance(part, Mapping):
            kind = next((key for key in _TYPES if key in part), None)
        block = _part(part, str(kind), where, f"{place}[{j}]") if isinstance(part, Mapping) else None
        if block is None and not left.drop:
            remedy = (
                "Parts text, reasoning, tool_call and tool_call_response are read. Set images=drop for a placeholder."
            )
            raise RecordError(where, f"{place}[{j}]", f"is {kind!r} of the {role}", remedy)
        blocks.append(block or {"type": "text", "text": left.placeholder(part)})
    answers = any(block["type"] == "tool_result" for block in blocks)
    if role == "tool" and not answers:
        return [{"role": "tool", "content": "".join(str(block.get("text", "")) for block in blocks)}]
    return messages_of_blocks("user" if role == "tool" else role, blocks, where, place, left)


def _of_any_agent(item: Mapping[str, Any], where: str, left: Leftovers) -> Record:
    """Returns the trajectory of an any-agent trace; each span holds the messages it adds, in order."""
    conversation = Conversation(left=left)
    ids: Record = {}
    for i, (span, attributes) in enumerate(_spans(item, where)):
        kind, output = attributes.get("gen_ai.operation.name"), attributes.get("gen_ai.output")
        ids = ids or kept(span, where, ("trace_id", "traceId"))
        if kind == "call_llm":
            asked = _value(attributes, "gen_ai.input.messages", where)
            for message in (
                _messages(asked, "user", where, "gen_ai.input.messages", left) if not len(conversation) else ()
            ):
                conversation.say(message["role"], str(message["content"] or ""))
            value = json_in(output, where, "gen_ai.output") if str(output).startswith('[{"tool.name"') else None
            conversation.write(i, "" if isinstance(value, list) else str(output or ""))
            for call in value if isinstance(value, list) else ():
                conversation.write(i, call=_call(call, where, "gen_ai.output"))
        elif kind == "execute_tool":
            conversation.answer(None, str(output or ""))
    return trajectory_of({**ids, "messages": conversation.messages}, where)


OTEL = Reader(
    parse_otel,
    LogOptions,
    drops=f"spans without a model's answer ({', '.join(convention.answered for convention in CONVENTIONS)})",
)
