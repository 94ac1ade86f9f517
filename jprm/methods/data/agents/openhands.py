"""Events of OpenHands, versions 0 and 1, as the messages that its model read.

Version 0 builds them in `openhands/memory/conversation_memory.py` and `events/observation/commands.py`, version 1 in
the `to_llm_message` of each event (openhands-sdk 1.58).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jprm.io.jsonl import RecordError, list_of, object_of
from jprm.methods.data.agents.conversation import Conversation
from jprm.methods.data.agents.logs import kept, tools_of, trajectories
from jprm.methods.data.agents.parts import Leftovers, SessionOptions
from jprm.methods.data.reader import Event, LeftOut, Reader, Record, object_in, take
from jprm.methods.messages.messages import call_of, thoughts_of_blocks


def parse_openhands(events: Sequence[Event], where: str, options: SessionOptions) -> Iterator[Record | LeftOut]:
    """Yields the trajectories in OpenHands events, or in each line of its evaluations, {"instance_id", "history"}.

    Events with `action` or `observation` are version 0, events with `kind` version 1. All calls of one response are one
    turn. After a condensation a new trajectory begins, since the agent then reads a summary instead of earlier events.
    A record has `messages`, `problem`, `tools` and (of several parts) `part`, from 0; of evaluations also
    `instance_id`, `instruction` and the outcome. Last come counts of skipped parts.

    Raises `Dropped` if the agent has no turn, and RecordError if the user has none either or an event has another form.
    """
    left = Leftovers(options)
    if not any(isinstance(value, Mapping) and "history" in value for _, value in events):
        yield from _trajectories(events, {}, where, left, options)
    else:
        for place, value in events:
            inner = [Event(place, event) for event in take(value, "history", list, place)]
            about = {key: value[key] for key in ("instance_id", "instruction") if key in value}
            yield from _trajectories(inner, {**kept(value, place), **about}, place, left, options)
    yield from left


def _trajectories(
    events: Sequence[Event], about: Record, where: str, left: Leftovers, options: SessionOptions
) -> Iterator[Record]:
    """Yields the trajectory of each part. After a condensation, the events left in the context begin the next part."""
    parts, context, tools = [Conversation(left=left)], [], []
    for i, (place, event) in enumerate(events):
        event = object_of(event, place, f"events[{i}]", "Is this file of OpenHands' events?")
        if _is_condensation(event):
            context = _condensed(context, event, place, f"events[{i}]")
            if not parts[-1].has_turn:
                parts.pop()
            part = Conversation(left=Leftovers(options))  # counted before, so not in `left`
            for old in context:
                _add(*old, part)
            part.left, part.repeated = left, len(part) - part.inputs
            parts.append(part)
            continue
        context.append((event, place, f"events[{i}]"))
        tools = _add(*context[-1], parts[-1]) or tools
    yield from trajectories([(parts, {**about, **tools_of(tools, where)})], where, left)


_Placed = tuple[Mapping[str, Any], str, str]
"""(event, its place in the file, its field), e.g. `(event, "log.json:3", "events[2]")`."""


def _add(event: Mapping[str, Any], place: str, field: str, conversation: Conversation) -> list:
    """Adds an event to the conversation; returns the tool schemas in it."""
    if isinstance(event.get("kind"), str):
        return _event_1(event, conversation, place, field)
    if "action" not in event and "observation" not in event:
        raise RecordError(place, field, "has no `kind`, `action` or `observation`", "Is this file of OpenHands?")
    return _event_0(_with_arguments(event), conversation, place, field)


def _is_condensation(event: Mapping[str, Any]) -> bool:
    return event.get("action") == "condensation" or event.get("kind") == "Condensation"


def _condensed(context: Sequence[_Placed], event: Mapping[str, Any], place: str, field: str) -> list[_Placed]:
    """Returns the context without the forgotten events, and with the summary in the first one's place.

    A call and its result are forgotten together, and so is an earlier summary.
    """
    about = object_in(event, "args", event)
    forgotten = set(list_of(about.get("forgotten_event_ids") or [], place, field + ".forgotten_event_ids"))
    first, last = (about.get(f"forgotten_events_{end}_id") for end in ("start", "end"))
    forgotten |= set(range(first, last + 1)) if isinstance(first, int) and isinstance(last, int) else set()
    leaves = [old.get("kind") == _SUMMARY or old.get("id") in forgotten for old, *_ in context]
    calls: dict[Any, int] = {}
    for i, (old, *_) in enumerate(context):
        if "action" in old or old.get("kind") == "ActionEvent":
            calls[_call_id(old)] = i
        elif (call := calls.get(_call_id(old) or "")) is not None:
            leaves[i] = leaves[call] = leaves[i] or leaves[call]
    stay = [item for leave, item in zip(leaves, context, strict=True) if not leave]
    if isinstance(summary := about.get("summary"), str):
        stay.insert([*leaves, True].index(True), ({"kind": _SUMMARY, "summary": summary}, place, field))
    return stay


_SUMMARY = "CondensationSummaryEvent"


def _call_id(event: Mapping[str, Any]) -> Any:
    """Returns the call id of an action or observation, or `None`."""
    return object_in(event, "tool_call_metadata", event).get("tool_call_id")


def _after_command(text: str, about: Any, exit_code: Any) -> str:
    """Appends the lines that both versions add to a command's output, e.g. its exit code."""
    about = about if isinstance(about, Mapping) else {"exit_code": exit_code}
    text = f"{about.get('prefix') or ''}{text}{about.get('suffix') or ''}"
    if directory := about.get("working_dir"):
        text += f"\n[Current working directory: {directory}]"
    if interpreter := about.get("py_interpreter_path"):
        text += f"\n[Python interpreter: {interpreter}]"
    if (code := about.get("exit_code")) not in (None, -1):
        text += f"\n[Command finished with exit code {code}]"
    return text


# ------------------------------------------------------------------------------------------------------------ version 0

_SILENT_0 = ("change_agent_state", "agent_state_changed", "null", "recall", "condensation_request", "loop_recovery")
"""Actions and observations of version 0 that the model neither reads nor writes."""

_ADDED_0 = {
    "error": ("", "\n[Error occurred in processing last action]"),
    "user_rejected": ("OBSERVATION:\n", "\n[Last action has been rejected by the user]"),
}
"""Text before and after the content of an observation."""


_FLAGS_0 = ("action", "action_risk", "is_confirmed", "confirmation_state", "keep_prompt", "kernel_init_code",
            "images_urls", "wait_for_response", "source", "timestamp", "id")  # fmt: skip


def _with_arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds `args`, `extras` and `source`, which events before version 0.9 lack.

    A message is the agent's if it waits for a response, else the user's.
    """
    if "args" in event or "extras" in event or "source" in event:
        return event
    if "observation" in event:
        return {**event, "extras": {"exit_code": event.get("exit_code")}}
    users = event.get("action") == "message" and not event.get("wait_for_response")
    arguments = {key: value for key, value in event.items() if key not in _FLAGS_0}
    return {"action": event.get("action"), "source": "user" if users else "agent", "args": arguments}


def _event_0(event: Mapping[str, Any], conversation: Conversation, where: str, field: str) -> list:
    """Adds an event of version 0; returns its tools."""
    kind = str(event.get("action") or event.get("observation"))
    arguments = object_in(event, "args")
    metadata = object_in(event, "tool_call_metadata")
    if kind in _SILENT_0:
        conversation.left.skip(f"event {kind!r}")
    elif "observation" in event:
        text = _observed_0(event, kind, where, field)
        if kind == "run" and not metadata and not conversation.waits:
            text = "\nObserved result of command executed by user:\n" + text
        conversation.answer(metadata.get("tool_call_id"), text)
    elif kind == "system":
        conversation.say("system", take(arguments, "content", str, where, f"{field}.args."))
        return list_of(arguments.get("tools") or [], where, f"{field}.args.tools")
    elif event.get("source") == "agent":
        _act_0(kind, arguments, metadata, conversation, where, field)
    elif kind == "message":
        conversation.say("user", take(arguments, "content", str, where, f"{field}.args."))
    elif kind == "run":
        command = take(arguments, "command", str, where, f"{field}.args.")
        conversation.say("user", f"User executed the command:\n{command}")
    else:
        conversation.left.skip(f"event {kind!r} of the {event.get('source')}")
    return []


def _observed_0(event: Mapping[str, Any], kind: str, where: str, field: str) -> str:
    """Returns the text of a version 0 observation."""
    text = take(event, "content", str, where, field + ".")
    extras = object_in(event, "extras")
    if kind == "run":
        return _after_command(text, extras.get("metadata"), extras.get("exit_code"))
    if kind == "delegate" and isinstance(outputs := extras.get("outputs"), Mapping):
        text = str(outputs.get("content", text))
    before, after = _ADDED_0.get(kind, ("", ""))
    return before + text + after


def _act_0(
    kind: str, arguments: Mapping[str, Any], metadata: Mapping[str, Any], conversation: Conversation, where: str,
    field: str,
) -> None:  # fmt: skip
    """Adds an action of the agent: a message, or the call in its `model_response` metadata."""
    response = object_in(metadata, "model_response")
    within = field + ".tool_call_metadata.model_response"
    choices = list_of(response.get("choices") or [], where, within + ".choices")
    choices = [choice for choice in choices if isinstance(choice, Mapping)]
    message = choices[0].get("message") if choices else None
    thought = str(arguments.get("thought") or "")
    if isinstance(message, Mapping):
        key, call_id = response.get("id"), metadata.get("tool_call_id")
        calls = list_of(message.get("tool_calls") or [], where, within)
        called = next((call for call in calls if isinstance(call, Mapping) and call.get("id") == call_id), None)
        if called is None:
            raise RecordError(where, within, f"has no call {call_id!r}", "Is the file whole?")
        if conversation.holds(key):
            conversation.write(key, call=called)
        else:
            text = conversation.left.text(message.get("content"), where, within)
            conversation.write(key, text, _thoughts(message, where, within), called)
    elif kind == "message":
        conversation.write(None, take(arguments, "content", str, where, f"{field}.args."), thought)
    else:
        rest = {key: value for key, value in arguments.items() if key not in ("thought", "tool_call_metadata")}
        conversation.write(None, thought, call=call_of(kind, rest))


# ------------------------------------------------------------------------------------------------------------ version 1


def _event_1(event: Mapping[str, Any], conversation: Conversation, where: str, field: str) -> list:
    """Adds an event of version 1; returns its tools. Counts events that the model does not read."""
    kind, within, left = event["kind"], field + ".", conversation.left
    more = list_of(event.get("extended_content") or [], where, within + "extended_content")
    if kind == "SystemPromptEvent":
        prompt, context = take(event, "system_prompt", dict, where, within), event.get("dynamic_context")
        parts = [prompt, *([context] if context else [])]
        conversation.say("system", left.text([{"type": "text", **_part(part)} for part in parts], where, field))
        return list_of(event.get("tools") or [], where, within + "tools")
    if kind == "MessageEvent":
        message = take(event, "llm_message", dict, where, within)
        content, place = message.get("content") or [], within + "llm_message.content"
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list_of(content, where, place)
        text = left.text([*parts, *more], where, place)
        if message.get("role") == "tool" or message.get("tool_calls") and not text:
            left.skip("message that repeats an action or its observation")
        elif message.get("role") == "assistant":
            conversation.write(None, text, _thoughts(message, where, within + "llm_message"))
        else:
            conversation.say(str(message.get("role")), text)
    elif kind == "ActionEvent":
        call = take(event, "tool_call", dict, where, within)
        text = left.text(event.get("thought"), where, within + "thought")
        function = object_in(call, "function", call)
        called = call_of(function.get("name"), function.get("arguments"), call.get("id"))
        conversation.write(
            event.get("llm_response_id") or event.get("id"), text, _thoughts(event, where, field), called
        )
    elif kind in _OBSERVED_1:
        name, before = _OBSERVED_1[kind]
        text = before + take(event, name, str, where, within) if name else _observed_1(event, left, where, within)
        conversation.answer(event.get("tool_call_id"), text + left.text(more, where, within + "extended_content"))
    elif kind == _SUMMARY:
        conversation.say("user", take(event, "summary", str, where, within))
    else:
        left.skip(f"event {kind!r}")
    return []


_OBSERVED_1 = {
    "ObservationEvent": ("", ""),
    "UserRejectObservation": ("rejection_reason", "Action rejected: "),
    "AgentErrorEvent": ("error", ""),
}
"""Events that answer a call: the field of the text, and a prefix."""


def _part(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {"text": value}


def _observed_1(event: Mapping[str, Any], left: Leftovers, where: str, within: str) -> str:
    """Returns the text of an observation, like its `to_llm_content`."""
    observation = take(event, "observation", dict, where, within)
    key = next((key for key in ("content", "output", "result", "text") if observation.get(key) is not None), None)
    if key is None and left.drop and observation:
        left.skip("observation without a text, read as JSON")
        return json.dumps(observation, ensure_ascii=False)
    if key is None:
        reason = f"has no text (its fields: {', '.join(observation)})"
        raise RecordError(where, within + "observation", reason, "Write what the agent read as `content`.")
    content = observation[key]  # its name differs by the version and the tool
    if observation.get("screenshot_data"):
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        content = [*parts, {"type": "image"}]
    text = left.text(content, where, f"{within}observation.{key}")
    text = _after_command(text, observation.get("metadata"), observation.get("exit_code"))
    return "[An error occurred during execution.]\n" + text if observation.get("is_error") else text


def _thoughts(message: Mapping[str, Any], where: str, field: str) -> str:
    """Returns a response's reasoning, from the first source that has any."""
    item = object_in(message, "responses_reasoning_item")
    sources = [(message, "reasoning_content"), (message, "thinking_blocks"), (item, "content"), (item, "summary")]
    for source, key in sources:
        value = source.get(key)
        value = (
            [{"text": part} if isinstance(part, str) else part for part in value] if isinstance(value, list) else value
        )
        if thoughts := thoughts_of_blocks(value, where, f"{field}.{key}"):
            return thoughts
    return ""


OPENHANDS = Reader(
    parse_openhands,
    SessionOptions,
    drops="times, costs, states of the agent and of the conversation, and recalled knowledge of version 0",
    whole=True,
)
