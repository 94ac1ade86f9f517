"""Logs of agents as trajectories: AgentProcessBench, the logs of OpenAI's and Anthropic's clients, rollouts of
verifiers, and OpenTelemetry's spans of generative AI."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from jprm.io.jsonl import RecordError, list_of, type_name
from jprm.methods.agents.records import read_trajectory
from jprm.methods.data.reader import NoOptions, Reader, Record, take


@dataclasses.dataclass(frozen=True)
class AgentProcessBenchOptions:
    """Attributes:
    missing: turns without a label: `error`, or `unlabelled`, which leaves them in without one.
    """

    missing: Literal["error", "unlabelled"] = "error"


def parse_agent_process_bench(item: Any, where: str, options: AgentProcessBenchOptions) -> Iterator[Record]:
    """Yields a trajectory of AgentProcessBench (Fan et al. 2026, arXiv 2603.14465), its labels as ratings.

    `step_labels` maps the index of each turn, as text, to -1 (harmful), 0 (neutral) or 1. `final_label` is the outcome,
    1 or -1. The problem is the `question`, by which samples of one task belong together.
    """
    messages = [dict(message) for message in _messages(item, "messages", where)]
    labels = take(item, "step_labels", dict, where)
    final = take(item, "final_label", int, where)
    if final not in (-1, 0, 1):
        raise RecordError(where, "final_label", f"is {final}, not -1, 0 or 1", "Is this file of AgentProcessBench?")
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    for key, label in labels.items():
        if not key.isdecimal() or int(key) not in turns:
            raise RecordError(where, f"step_labels[{key!r}]", "is the index of no turn", "Is the file whole?")
        messages[int(key)]["label"] = label
    lacking = [i for i in turns if str(i) not in labels]
    if lacking and options.missing == "error":
        remedy = "Set missing=unlabelled, or complete the file."
        raise RecordError(where, "step_labels", f"has no label of messages[{lacking[0]}]", remedy)
    about = {key: item[key] for key in ("total_index", "query_index", "sample_index", "data_source") if key in item}
    yield _record(
        {
            "problem": take(item, "question", str, where),
            "messages": [_with_objects(message) for message in messages],
            **_tools(item.get("tools")),
            **({"outcome": max(final, 0)} if final else {}),
            "semantics": "rating",
            "segment": "turn",
            **about,
        },
        where,
    )


def parse_openai(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields a log of OpenAI's clients as a trajectory.

    {"messages", "tools"} is a chat, as its fine-tuning files have it. {"request": {"messages", "tools"}, "response":
    {"choices"}} is a call with its answer, whose first choice is the last turn. {"input", "output"} are items of the
    Responses API. The developer is the system. Arguments that are JSON text become objects.
    """
    request = item.get("request", item) if isinstance(item, Mapping) else {}
    if isinstance(item, Mapping) and ("input" in request or "output" in item):
        messages = _responses(request, item, where)
    else:
        messages = [dict(message) for message in _messages(request, "messages", where)]
        if (response := item.get("response")) is not None:
            choices = take(response, "choices", list, where, "response.")
            if not choices:
                raise RecordError(where, "response.choices", "is empty", "Leave out calls without an answer.")
            messages.append(dict(take(choices[0], "message", dict, where, "response.choices[0].")))
    for message in messages:
        for key in [key for key in ("function_call", "audio", "refusal") if message.get(key) in (None, "", {})]:
            message.pop(key, None)
    yield _record(
        {**_kept(item), "messages": [_with_objects(m) for m in messages], **_tools(request.get("tools"))}, where
    )


def parse_anthropic(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields a log of Anthropic's clients, {"system", "messages", "tools"} with perhaps a "response", as a trajectory.

    `thinking` becomes `reasoning_content`, `tool_use` a call, and each `tool_result` a message of the role tool. Text
    of the user beside results comes after them.
    """
    request = item.get("request", item) if isinstance(item, Mapping) else {}
    conversation = list(_messages(request, "messages", where))
    if isinstance(response := item.get("response"), Mapping):
        conversation.append({"role": "assistant", "content": response.get("content")})
    messages: list[Record] = []
    if request.get("system"):
        messages.append({"role": "system", "content": _text(request["system"], where, "system")})
    for i, message in enumerate(conversation):
        content, place = message.get("content"), f"messages[{i}].content"
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list_of(content, where, place)
        messages += _of_blocks(str(message.get("role")), blocks, where, place)
    tools = [
        {"type": "function", "function": {"name": tool.get("name"), "description": tool.get("description", ""),
                                          "parameters": tool.get("input_schema", {})}}
        for tool in request.get("tools") or [] if isinstance(tool, Mapping)
    ]  # fmt: skip
    yield _record({**_kept(item), "messages": messages, **_tools(tools)}, where)


def parse_verifiers(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields a rollout that verifiers saves (`results.jsonl`), its reward as the outcome.

    `prompt` and `completion` are messages. The `example_id` is kept: rollouts of one example share their problem.
    """
    prompt, completion = (list(_messages(item, key, where)) for key in ("prompt", "completion"))
    reward = take(item, "reward", (int, float), where)
    about = {key: item[key] for key in ("example_id", "answer", "task") if isinstance(item.get(key), str | int | float)}
    tools = item.get("tool_defs") or item.get("oai_tools") or (item.get("info") or {}).get("oai_tools")
    if isinstance(tools, str):
        tools = _json(tools)
    yield _record(
        {
            **about,
            "messages": [_with_objects(message) for message in [*prompt, *completion]],
            **_tools(tools),
            "outcome": reward,
            "segment": "turn",
        },
        where,
    )


def parse_otel(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields an OpenTelemetry span or event of a model's call as a trajectory.

    Its attributes, an object or a list of {"key", "value"} as OTLP has it, are those of the semantic conventions for
    generative AI: gen_ai.system_instructions, gen_ai.input.messages, gen_ai.output.messages, gen_ai.tool.definitions,
    each as JSON or as text that holds it. The last call of a trace holds the whole conversation.
    """
    attributes = _attributes(item.get("attributes", item) if isinstance(item, Mapping) else item, where)
    messages: list[Record] = []
    if instructions := attributes.get("gen_ai.system_instructions"):
        messages += _of_parts("system", list_of(_json(instructions), where, "gen_ai.system_instructions"), where, "")
    for key in ("gen_ai.input.messages", "gen_ai.output.messages"):
        said = list_of(_json(attributes.get(key)), where, key)
        for i, message in enumerate(said if key.startswith("gen_ai.input") else said[:1]):
            place = f"{key}[{i}]"
            parts = take(message, "parts", list, where, place + ".")
            messages += _of_parts(str(message.get("role")), parts, where, place + ".parts")
    tools = _json(attributes.get("gen_ai.tool.definitions")) or []
    tools = [
        {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
        for tool in tools if isinstance(tool, Mapping)
    ]  # fmt: skip
    yield _record({**_kept(item, ("trace_id", "span_id", "traceId", "spanId")), "messages": messages, **_tools(tools)},
                  where)  # fmt: skip


def _record(record: Record, where: str) -> Record:
    """Returns the record with a `segment`, so that one plain exchange is a trajectory too, checked."""
    return read_trajectory({"segment": "turn", **record}, where).record() | {"segment": "turn"}


def _kept(item: Mapping[str, Any], more: Sequence[str] = ()) -> Record:
    """Returns what a log may say about a trajectory beside its messages."""
    return {key: item[key] for key in ("problem", "outcome", "semantics", "id", "answer", *more) if key in item}


def _tools(tools: Any) -> Record:
    return {"tools": tools} if tools else {}


def _messages(item: Any, key: str, where: str) -> Iterator[Mapping[str, Any]]:
    for i, message in enumerate(take(item, key, list, where)):
        if not isinstance(message, Mapping):
            raise RecordError(where, f"{key}[{i}]", f"is {type_name(message)}, not an object", "Is the file whole?")
        yield message


def _with_objects(message: Mapping[str, Any]) -> Record:
    """Returns the message with arguments as objects where they are JSON text: templates write them as JSON again.

    OpenAI's developer is the system.
    """
    record = {key: value for key, value in message.items() if value is not None or key == "content"}
    if record.get("role") == "developer":
        record["role"] = "system"
    if isinstance(calls := record.get("tool_calls"), list):
        record["tool_calls"] = [_call_with_objects(_json(call) if isinstance(call, str) else call) for call in calls]
    return record


def _call_with_objects(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if not isinstance(call.get("function"), Mapping) and "arguments" in call:  # verifiers' own, without `function`
        call = {"type": "function", "function": {k: call[k] for k in ("name", "arguments") if k in call},
                **({"id": call["id"]} if "id" in call else {})}  # fmt: skip
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    arguments = _json(function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, Mapping) else call


def _json(value: Any) -> Any:
    """Returns what a text of JSON holds; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _text(value: Any, where: str, field: str) -> str:
    """Returns a text, or the joined text of blocks of text."""
    if isinstance(value, str):
        return value
    parts = []
    for i, block in enumerate(list_of(value, where, field)):
        kind = block.get("type") if isinstance(block, Mapping) else type_name(block)
        if kind != "text":
            remedy = "jprm's models read no images or files: write what they show as text."
            raise RecordError(where, f"{field}[{i}]", f"is {kind!r}, not text", remedy)
        parts.append(take(block, "text", str, where, f"{field}[{i}]."))
    return "".join(parts)


def _of_blocks(role: str, blocks: Sequence[Any], where: str, place: str) -> list[Record]:
    """Returns the messages of an Anthropic message's blocks."""
    results, texts, thoughts, calls = [], [], [], []
    for j, block in enumerate(blocks):
        field, kind = f"{place}[{j}]", block.get("type") if isinstance(block, Mapping) else type_name(block)
        within = field + "."
        if kind == "text":
            texts.append(take(block, "text", str, where, within))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(take(block, "thinking", str, where, within))
        elif kind == "tool_use" and role == "assistant":
            function = {"name": take(block, "name", str, where, within), "arguments": block.get("input", {})}
            calls.append({"id": take(block, "id", str, where, within), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            content = block.get("content")
            text = "" if content is None else _text(content, where, within + "content")
            text = f"error: {text}" if block.get("is_error") else text
            results.append({"role": "tool", "tool_call_id": take(block, "tool_use_id", str, where, within),
                            "content": text})  # fmt: skip
        else:
            remedy = "Only text, thinking, tool_use and tool_result are read: write the rest as text, or remove it."
            raise RecordError(where, field, f"is {kind!r} of the {role}", remedy)
    record: Record = {"role": role, "content": "".join(texts)}
    record |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    record |= {"tool_calls": calls} if calls else {}
    return [*results, *([record] if role == "assistant" or texts else [])]


def _of_parts(role: str, parts: Sequence[Any], where: str, place: str) -> list[Record]:
    """Returns the messages of an OpenTelemetry message's parts."""
    blocks = []
    for j, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else type_name(part)
        if kind == "text":
            blocks.append({"type": "text", "text": take(part, "content", str, where, f"{place}[{j}].")})
        elif kind == "reasoning":
            blocks.append({"type": "thinking", "thinking": take(part, "content", str, where, f"{place}[{j}].")})
        elif kind == "tool_call":
            arguments = _json(part.get("arguments")) or {}
            blocks.append({"type": "tool_use", "id": part.get("id") or f"call_{j}", "name": part.get("name"),
                           "input": arguments})  # fmt: skip
        elif kind == "tool_call_response":
            answer = part.get("response", part.get("result"))
            text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
            blocks.append({"type": "tool_result", "tool_use_id": part.get("id") or "call", "content": text})
        else:
            blocks.append({"type": kind})
    return _of_blocks("user" if role == "tool" else role, blocks, where, place)


def _attributes(attributes: Any, where: str) -> Record:
    """Returns a span's attributes by name. Raises RecordError where they hold no messages."""
    if isinstance(attributes, list):  # OTLP's JSON
        pairs = [(one.get("key"), one.get("value") or {}) for one in attributes if isinstance(one, Mapping)]
        attributes = {str(key): next(iter(value.values()), None) for key, value in pairs if isinstance(value, Mapping)}
    if not isinstance(attributes, Mapping) or "gen_ai.output.messages" not in attributes:
        remedy = "Record contents of messages, which instrumentations leave out by default."
        raise RecordError(where, "attributes", "have no gen_ai.output.messages", remedy)
    return dict(attributes)


def _responses(request: Mapping[str, Any], item: Mapping[str, Any], where: str) -> list[Record]:
    """Returns the messages of the items of OpenAI's Responses API; neighbouring items of one turn are one message."""
    prompt = request.get("input") or []
    items = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list_of(prompt, where, "input")
    output = item.get("output", (item.get("response") or {}).get("output"))
    items = [*items, *list_of(output if output is not None else [], where, "output")]
    messages: list[Record] = []
    if isinstance(instructions := request.get("instructions"), str) and instructions:
        messages.append({"role": "system", "content": instructions})

    def turn() -> Record:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for i, one in enumerate(items):
        field = f"items[{i}]"
        kind = one.get("type", "message") if isinstance(one, Mapping) else type_name(one)
        if kind == "message":
            content = one.get("content")
            parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
            texts = [
                take(part, "text", str, where, f"{field}.content[{j}].")
                for j, part in enumerate(list_of(parts, where, field + ".content"))
            ]
            if one.get("role") == "assistant":
                turn()["content"] += "".join(texts)
            else:
                messages.append({"role": one.get("role"), "content": "".join(texts)})
        elif kind == "function_call":
            function = {"name": one.get("name"), "arguments": one.get("arguments")}
            turn().setdefault("tool_calls", []).append(
                {"id": one.get("call_id"), "type": "function", "function": function}
            )
        elif kind == "function_call_output":
            output = one.get("output")
            text = output if isinstance(output, str) else _text(output, where, field + ".output")
            messages.append({"role": "tool", "tool_call_id": one.get("call_id"), "content": text})
        elif kind == "reasoning":
            said = [part.get("text", "") for part in one.get("summary") or [] if isinstance(part, Mapping)]
            if said:  # encrypted thoughts hold no text, and are left out
                turn()["reasoning_content"] = "\n".join(said)
        else:
            remedy = "Messages, function calls, their outputs and reasoning are read."
            raise RecordError(where, field, f"is {kind!r}", remedy)
    return messages


AGENT_PROCESS_BENCH = Reader(parse_agent_process_bench, AgentProcessBenchOptions)
OPENAI = Reader(parse_openai)
ANTHROPIC = Reader(parse_anthropic)
VERIFIERS = Reader(parse_verifiers)
OTEL = Reader(parse_otel)
