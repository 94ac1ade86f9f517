"""Trajectories of coding agents: SWE-agent, mini-swe-agent, and OpenHands' events of both of its versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jprm.io.jsonl import RecordError, list_of, object_of
from jprm.methods.data.agents.conversation import Conversation
from jprm.methods.data.agents.logs import kept, trajectory_of
from jprm.methods.data.reader import Event, NoOptions, Reader, Record, take
from jprm.methods.messages.messages import call_of, text_of_parts


def parse_swe_agent(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields a trajectory of SWE-agent (`.traj`), from its `history`.

    A demonstration in the history is the user's. `environment`, and `exit_status` and `submission` of `info`, stay.
    """
    messages = []
    for i, message in enumerate(take(item, "history", list, where)):
        field = f"history[{i}]"
        message = object_of(message, where, field, "Write a message's object.")
        role, content = take(message, "role", str, where, field + "."), message.get("content")
        text = None if content is None else text_of_parts(content, where, field + ".content")
        if message.get("is_demo"):
            messages.append({"role": "user", "content": text or ""})
            continue
        record: Record = {"role": role, "content": text}
        record |= {key: message[key] for key in ("tool_calls", "thinking_blocks") if message.get(key)}
        if role == "tool":
            ids = list_of(message.get("tool_call_ids") or [], where, field + ".tool_call_ids")
            record["tool_call_id"] = ids[0] if ids else None
        messages.append(record)
    info = item.get("info") if isinstance(item.get("info"), Mapping) else {}
    about = {key: info[key] for key in ("exit_status", "submission") if key in info}
    about |= {"environment": item["environment"]} if "environment" in item else {}
    yield trajectory_of({**kept(item, where), **about, "messages": messages}, where)


def parse_mini_swe_agent(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields a trajectory of mini-swe-agent (`.traj.json`, of versions 1 and 2).

    The last message of version 2, of the role exit, tells no model anything. `instance_id`, and `exit_status` and
    `submission` of `info`, stay.
    """
    messages = []
    for i, message in enumerate(take(item, "messages", list, where)):
        field = f"messages[{i}]"
        message = object_of(message, where, field, "Write a message's object.")
        if "role" not in message:
            remedy = 'Items of the Responses API are read by `openai`: give it {"input": [...]}.'
            raise RecordError(where, field + ".role", "is not there", remedy)
        if message["role"] != "exit":
            messages.append({key: value for key, value in message.items() if key not in ("extra", "timestamp")})
    info = item.get("info") if isinstance(item.get("info"), Mapping) else {}
    about = {key: info[key] for key in ("exit_status", "submission") if key in info}
    about |= {"instance_id": item["instance_id"]} if "instance_id" in item else {}
    yield trajectory_of({**kept(item, where), **about, "messages": messages}, where)


def parse_openhands(events: Sequence[Event], where: str, options: NoOptions) -> Iterator[Record]:
    """Yields the trajectory of OpenHands' events, or one for each line of its evaluations, {"instance_id", "history"}.

    Events with `action` or `observation` are of version 0, those with `kind` of version 1. The calls of one response of
    the model are one turn. A condensation is refused: the agent read another text after it.
    """
    if not any(isinstance(value, Mapping) and "history" in value for _, value in events):
        yield from _of_openhands(events, {}, where)
        return
    for place, value in events:
        inner = [Event(place, event) for event in take(value, "history", list, place)]
        about = {key: value[key] for key in ("instance_id", "instruction") if key in value}
        yield from _of_openhands(inner, {**kept(value, place), **about}, place)


def _of_openhands(events: Sequence[Event], about: Record, where: str) -> Iterator[Record]:
    conversation, tools = Conversation(), []
    for i, (place, event) in enumerate(events):
        field = f"events[{i}]"
        event = object_of(event, place, field, "Is this file of OpenHands' events?")
        if "kind" in event:
            tools = _event_1(event, conversation, place, field) or tools
        elif "action" in event or "observation" in event:
            tools = _event_0(event, conversation, place, field) or tools
        else:
            raise RecordError(place, field, "has no `kind`, `action` or `observation`", "Is this file of OpenHands?")
    yield trajectory_of({**about, "messages": conversation.messages, **({"tools": tools} if tools else {})}, where)


_SILENT_0 = ("change_agent_state", "agent_state_changed", "null", "recall", "condensation_request", "loop_recovery")
"""Actions and observations of version 0 that are no part of what the model reads or writes."""


def _event_0(event: Mapping[str, Any], conversation: Conversation, where: str, field: str) -> list:
    """Adds an event of version 0; returns the tools that it names."""
    kind = event.get("action") or event.get("observation")
    arguments = held if isinstance(held := event.get("args"), Mapping) else {}
    metadata = held if isinstance(held := event.get("tool_call_metadata"), Mapping) else {}
    call_id = metadata.get("tool_call_id")
    if kind in _SILENT_0:
        return []
    if kind == "condensation":
        raise RecordError(where, field, "is a condensation, after which the agent read another text", _CONDENSED)
    if "observation" in event:
        conversation.answer(call_id, take(event, "content", str, where, field + "."))
        return []
    if kind in ("message", "system") and event.get("source") != "agent" or kind == "system":
        conversation.say(
            "system" if kind == "system" else "user", take(arguments, "content", str, where, f"{field}.args.")
        )
        return list_of(arguments.get("tools") or [], where, f"{field}.args.tools")
    if event.get("source") != "agent":
        remedy = "Remove the event if the agent did not read it."
        raise RecordError(where, f"{field}.action", f"is {kind!r} of the {event.get('source')}", remedy)
    response = held if isinstance(held := metadata.get("model_response"), Mapping) else {}
    within = field + ".tool_call_metadata.model_response"
    choices = list_of(response.get("choices") or [], where, within + ".choices")
    choices = [choice for choice in choices if isinstance(choice, Mapping)]
    message = choices[0].get("message") if choices else None
    if isinstance(message, Mapping):
        key = response.get("id")
        calls = list_of(message.get("tool_calls") or [], where, within)
        called = next((call for call in calls if isinstance(call, Mapping) and call.get("id") == call_id), None)
        if called is None:
            raise RecordError(where, within, f"has no call {call_id!r}", "Is the file whole?")
        if conversation.holds(key):
            conversation.write(key, call=called)
        else:
            content = message.get("content")
            text = "" if content is None else text_of_parts(content, where, within)
            conversation.write(key, text, str(message.get("reasoning_content") or ""), called)
        return []
    thought = str(arguments.get("thought") or "")
    if kind == "message":
        conversation.write(None, take(arguments, "content", str, where, f"{field}.args."), thought)
        return []
    rest = {key: value for key, value in arguments.items() if key not in ("thought", "tool_call_metadata")}
    conversation.write(None, thought, call=call_of(kind, rest))
    return []


_CONDENSED = "Cut the file there and read the parts as two, or give the model's own calls (`openai`)."

_SILENT_1 = (
    "ConversationStateUpdateEvent", "PauseEvent", "ConversationErrorEvent", "LLMCompletionLogEvent", "TokenEvent",
    "CondensationRequest", "StreamingDeltaEvent", "HookExecutionEvent",
)  # fmt: skip
"""Events of version 1 that are no part of what the model reads or writes."""


def _event_1(event: Mapping[str, Any], conversation: Conversation, where: str, field: str) -> list:
    """Adds an event of version 1; returns the tools that it names."""
    kind, within = event["kind"], field + "."
    if kind in _SILENT_1:
        return []
    if kind == "SystemPromptEvent":
        conversation.say("system", take(event, "system_prompt.text", str, where, within))
        return [_tool_1(tool) for tool in list_of(event.get("tools") or [], where, within + "tools")]
    if kind == "MessageEvent":
        message = take(event, "llm_message", dict, where, within)
        parts = [*list_of(message.get("content") or [], where, within + "llm_message.content"),
                 *list_of(event.get("extended_content") or [], where, within + "extended_content")]  # fmt: skip
        text = text_of_parts(parts, where, within + "llm_message.content")
        if message.get("role") == "assistant":
            conversation.write(None, text, str(message.get("reasoning_content") or ""))
        else:
            conversation.say(str(message.get("role")), text)
    elif kind == "ActionEvent":
        call = take(event, "tool_call", dict, where, within)
        key = event.get("llm_response_id") or event.get("id")
        thought = event.get("thought") or []
        text, reasoning = text_of_parts(thought, where, within + "thought"), str(event.get("reasoning_content") or "")
        conversation.write(key, text, reasoning, call_of(call.get("name"), call.get("arguments"), call.get("id")))
    elif kind in ("ObservationEvent", "UserRejectObservation", "AgentErrorEvent"):
        conversation.answer(event.get("tool_call_id"), _observed_1(event, where, within))
    elif kind in ("Condensation", "CondensationSummaryEvent"):
        raise RecordError(where, field, "is a condensation, after which the agent read another text", _CONDENSED)
    else:
        raise RecordError(where, within + "kind", f"is {kind!r}", "Remove the event if the agent did not read it.")
    return []


def _observed_1(event: Mapping[str, Any], where: str, within: str) -> str:
    if event["kind"] == "AgentErrorEvent":
        return "error: " + take(event, "error", str, where, within)
    if event["kind"] == "UserRejectObservation":
        return "rejected: " + take(event, "rejection_reason", str, where, within)
    observation = take(event, "observation", dict, where, within)
    for key in ("content", "output", "result", "text"):  # by the version and the tool
        if (held := observation.get(key)) is not None:
            return text_of_parts(held, where, f"{within}observation.{key}")
    reason = f"has no text (its fields: {', '.join(observation)})"
    raise RecordError(where, within + "observation", reason, "Write what the agent read as `content`.")


def _tool_1(tool: Any) -> Mapping[str, Any]:
    """Returns a tool's schema, of a chat or of version 1's own form."""
    if not isinstance(tool, Mapping) or "function" in tool:
        return tool
    function = {"name": tool.get("name", tool.get("title")), "description": tool.get("description") or ""}
    schema = tool.get("parameters") or tool.get("input_schema") or tool.get("inputSchema")
    return {"type": "function", "function": function | ({"parameters": schema} if schema else {})}


SWE_AGENT = Reader(
    parse_swe_agent,
    drops="trajectory (states, times and queries), replay_config and statistics of info; of a message its thought and"
    " action, which its content holds",
)
MINI_SWE_AGENT = Reader(
    parse_mini_swe_agent, drops="extra of messages (times, costs, raw responses), config and statistics of info"
)
OPENHANDS = Reader(
    parse_openhands,
    drops="times, costs, states of the agent and of the conversation, recalled knowledge and extras of observations",
    whole=True,
)
