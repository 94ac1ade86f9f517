"""`Trajectory`: what an agent wrote and what the world answered, as chat messages.

The record is {"messages": [...], "tools": [...]?, "outcome": number?, "segment": str?}. A message of the assistant is a
turn. A turn is one step, or the steps that a rule of `jprm.steps` finds in its content (`segment`). Messages of the
system, the user and tools are context: they are read and neither scored nor trained.

`jprm.methods.trajectories.trees` makes a tree of a trajectory, in which every node has a role.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jprm import steps
from jprm.io.jsonl import RecordError, label_of, list_of, number_of, object_of, text_of, type_name
from jprm.tree import SEMANTICS, semantics_of

ROLES = ("system", "user", "assistant", "tool")

SEGMENTS = ("turn", "parts", "auto", *steps.RULES)
"""What a step is: a turn, one of the text parts that its content is given in, or what a rule of `jprm.steps` finds."""

OWN_KEYS = ("label", "labels", "score", "scores", "outputs", "origin", "correct", "outcome", "parent")
"""Keys of a message that are jprm's: no chat template sees them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trajectory:
    """Messages in order. `read_trajectory` checks them; `record` is its exact inverse.

    Messages keep the keys of their record, `label` and `score` (or `labels` and `scores`, one a step) included.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas of functions, as chat templates take them
    outcome: float | None = None  # 1 for a task that was solved, 0 for one that was not, or another reward
    segment: str = "turn"
    semantics: str = SEMANTICS[0]
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # keys unknown to jprm, untouched

    @property
    def turns(self) -> list[int]:
        """Indices of the assistant's messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    @property
    def problem(self) -> str:
        """The text that groups trajectories of one task: the record's `problem`, else its first user message."""
        return problem_of(self.messages, self.extra)

    def record(self) -> dict[str, Any]:
        known: dict[str, Any] = {"messages": [dict(message) for message in self.messages]}
        known |= {"tools": list(self.tools)} if self.tools else {}
        known |= {"outcome": self.outcome} if self.outcome is not None else {}
        known |= {"segment": self.segment} if self.segment != "turn" else {}
        known |= {"semantics": self.semantics} if self.semantics != SEMANTICS[0] else {}
        return known | {key: value for key, value in self.extra.items() if key not in known}


def problem_of(messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> str:
    """Returns a record's own `problem`, else the first message of the user, else the first message with text."""
    if isinstance(text := extra.get("problem"), str) and text.strip():
        return text
    texts = [(content_of(message), message["role"]) for message in messages]
    texts = [(text, role) for text, role in texts if text.strip()]
    return next((text for text, role in texts if role == "user"), texts[0][0] if texts else "(no text)")


def is_trajectory(record: Mapping[str, Any]) -> bool:
    """Whether a record with `messages` is a trajectory, and not one plain exchange of a user and an assistant.

    One exchange without tools, labels, scores, `outcome` or `segment` is free text, which
    `jprm.methods.trajectories.free_text` splits into the steps of a chain.
    """
    if "messages" not in record:
        return False
    if any(key in record for key in ("tools", "outcome", "segment")):
        return True
    messages = record["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return False
    roles = [message.get("role") for message in messages]
    marked = any(message.get("tool_calls") or any(key in message for key in OWN_KEYS) for message in messages)
    return marked or "tool" in roles or roles.count("assistant") > 1 or roles.count("user") > 1


def read_trajectory(record: Mapping[str, Any], where: str = "record") -> Trajectory:
    """Returns the trajectory of a record.

    An absent `content` becomes null. A null or empty content is allowed: a turn may consist of calls alone, a tool may
    answer nothing.

    Raises:
      RecordError: names `where`, the message and its field, the reason and what to do about it.
    """
    extra = dict(object_of(record, where, "record", "Write one JSON object a line."))
    messages = list_of(extra.pop("messages", None), where, "messages")
    segment, semantics = read_segment(extra, where), semantics_of(extra, where)
    tools = read_tools(extra.get("tools"), where)
    outcome = extra.get("outcome")
    if outcome is not None:
        number_of(outcome, where, "outcome")
    for key, known in (("tools", tools), ("outcome", outcome is not None), ("segment", segment != "turn")):
        if known:
            del extra[key]
    if semantics != SEMANTICS[0]:
        del extra["semantics"]
    records, calls = [], None
    for i, message in enumerate(messages):
        message = read_message(message, segment, semantics, where, f"messages[{i}]")
        calls = check_answer(message, calls, where, f"messages[{i}]")
        records.append(message)
    if not any(message["role"] == "assistant" for message in records):
        raise RecordError(where, "messages", "have no turn of the assistant", "There is nothing to score without one.")
    return Trajectory(tuple(records), tools, outcome, segment, semantics, extra)


def read_message(message: Any, segment: str, semantics: str, where: str, field: str) -> dict[str, Any]:
    """Returns a message with checked fields, and `content` null where it is absent. Raises RecordError."""
    role = object_of(message, where, field, 'Write {"role": "user", "content": ...}.').get("role")
    if role not in ROLES:
        raise RecordError(where, field + ".role", f"is {role!r}", f"Use one of {', '.join(ROLES)}.")
    if message.get("function_call"):
        raise RecordError(where, field + ".function_call", "is the older form of a call", "Write `tool_calls`.")
    checked = {**message, "content": message.get("content")}
    _content(checked["content"], role, where, field)
    if (calls := message.get("tool_calls")) is not None:
        _check_calls(calls, role, where, field + ".tool_calls")
    for key in ("reasoning_content", "reasoning"):
        if (thoughts := message.get(key)) is not None:
            if text_of(thoughts, where, f"{field}.{key}", blank=True) and role != "assistant":
                raise RecordError(where, f"{field}.{key}", f"is of the {role}", "Only the assistant's is read.")
    if message.get("reasoning") and message.get("reasoning_content") not in (None, "", message["reasoning"]):
        remedy = "Keep one of the two."
        raise RecordError(where, f"{field}.reasoning", "differs from `reasoning_content` beside it", remedy)
    for key in ("tool_call_id", "name"):
        if message.get(key) is not None:
            text_of(message[key], where, f"{field}.{key}", blank=True)
    _check_marks(checked, segment, semantics, where, field)
    return checked


def content_of(message: Mapping[str, Any]) -> str:
    """Returns a checked message's text, its parts joined; "" where it has none."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def steps_of(message: Mapping[str, Any], segment: str) -> list[str]:
    """Returns the texts of a turn's steps; joined they are its content. A turn without text is one step."""
    text = content_of(message)
    if segment == "parts":
        parts = message.get("content")
        return [part["text"] for part in parts] or [""] if isinstance(parts, list) else [text]
    return [text] if segment == "turn" or not text.strip() else steps.split(text, segment)


def check_answer(message: Mapping[str, Any], calls: list | None, where: str, field: str) -> list | None:
    """Returns the calls that messages after this one may answer; None before the first turn.

    Raises RecordError for a tool's message before any turn, or one whose `tool_call_id` is of no call of the last turn.
    """
    if message["role"] == "assistant":
        return message.get("tool_calls") or []
    if message["role"] != "tool":
        return calls
    if calls is None:
        raise RecordError(where, field + ".role", "is 'tool' before any turn", "A tool answers a call of a turn.")
    ids = [call["id"] for call in calls if isinstance(call.get("id"), str)]
    call_id = message.get("tool_call_id")
    if ids and len(ids) == len(calls) and call_id is not None and call_id not in ids:
        reason = f"is {call_id!r}, and the turn before calls {', '.join(map(repr, ids))}"
        raise RecordError(where, field + ".tool_call_id", reason, "Name the call that the tool answers.")
    return calls


def read_segment(record: Mapping[str, Any], where: str) -> str:
    segment = "turn" if record.get("segment") is None else record["segment"]
    if segment not in SEGMENTS:
        raise RecordError(where, "segment", f"is {segment!r}", f"Use one of {', '.join(SEGMENTS)}.")
    return segment


def read_tools(tools: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """Returns a record's tools, () where it has none. Raises RecordError for one that is no schema with a name."""
    if tools is None:
        return ()
    for i, tool in enumerate(list_of(tools, where, "tools")):
        schema = object_of(tool, where, f"tools[{i}]", "Write its JSON schema.").get("function", tool)
        if not isinstance(schema, Mapping) or not isinstance(schema.get("name"), str) or not schema["name"]:
            remedy = 'Write {"type": "function", "function": {"name": ..., "parameters": {...}}}.'
            raise RecordError(where, f"tools[{i}]", "has no name", remedy)
    return tuple(tools)


def _content(content: Any, role: str, where: str, field: str) -> None:
    if content is None and role != "assistant":
        raise RecordError(where, field + ".content", "is null or absent", 'Write a string, "" where there is none.')
    if isinstance(content, list):
        for j, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else type_name(part)
            if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
                reason = f"is {kind!r}, and only parts of the type text are read"
                remedy = "jprm's models read no images or files: write what they show as text."
                raise RecordError(where, f"{field}.content[{j}]", reason, remedy)
            text_of(part["text"], where, f"{field}.content[{j}].text", blank=True)
    elif content is not None:
        text_of(content, where, field + ".content", blank=True)


def _check_calls(calls: Any, role: str, where: str, field: str) -> None:
    list_of(calls, where, field)
    if calls and role != "assistant":
        raise RecordError(where, field, f"is of the {role}", "Only the assistant calls tools.")
    seen = set()
    for j, call in enumerate(calls):
        place = f"{field}[{j}]"
        function = object_of(call, where, place, "Write a call's object.").get("function", call)
        if not isinstance(function, Mapping):
            raise RecordError(where, place + ".function", f"is {type_name(function)}", "Write its name and arguments.")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise RecordError(where, place + ".function.name", "is not there or empty", "Name the tool.")
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, str | Mapping):
            reason = f"is {type_name(arguments)}, neither an object nor its JSON text"
            raise RecordError(where, place + ".function.arguments", reason, "Write an object.")
        if (call_id := call.get("id")) is not None:
            if text_of(call_id, where, place + ".id", blank=True) in seen:
                raise RecordError(
                    where, place + ".id", f"{call_id!r} is of another call too", "Give each call its own."
                )
            seen.add(call_id)


def _check_marks(message: Mapping[str, Any], segment: str, semantics: str, where: str, field: str) -> None:
    """Checks labels, scores and outcomes: numbers of a turn, lists of one entry a step where a rule cuts turns."""
    marks = [key for key in ("label", "labels", "score", "scores") if message.get(key) is not None]
    if marks and message["role"] != "assistant":
        reason = f"is of the {message['role']}, whose messages are context"
        raise RecordError(where, f"{field}.{marks[0]}", reason, "Only turns of the assistant have one.")
    one, many = ("label", "score"), ("labels", "scores")
    for key in many if segment == "turn" else one:
        if key in message:
            other = dict(zip(one + many, many + one, strict=True))[key]
            reason = f"is there, and `segment` is {segment!r}"
            raise RecordError(where, f"{field}.{key}", reason, f"Write `{other}`, or another `segment`.")
    if segment == "turn":
        label_of(message.get("label"), semantics, where, f"{field}.label")
        if "score" in message:
            number_of(message["score"], where, f"{field}.score")
    else:
        for key in (key for key in many if message.get(key) is not None):
            count, values = len(steps_of(message, segment)), list_of(message[key], where, f"{field}.{key}")
            if len(values) != count:
                reason = f"has {len(values)} entries for {count} steps"
                raise RecordError(where, f"{field}.{key}", reason, "Give one entry a step.")
            for j, value in enumerate(values):
                place = f"{field}.{key}[{j}]"
                label_of(value, semantics, where, place) if key == "labels" else number_of(value, where, place)
    if message.get("outcome") is not None:
        number_of(message["outcome"], where, f"{field}.outcome")
