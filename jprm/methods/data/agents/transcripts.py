"""Transcripts of command-line agents, one event a line: Claude Code's sessions and streams, and Codex's rollouts.

A file is one session. Where the agent's context was compacted it read another text from there on, so that each part is
a trajectory of its own. Its problem is the session's first message of the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jprm.io.jsonl import RecordError, list_of, object_of
from jprm.methods.data.agents.conversation import Conversation
from jprm.methods.data.agents.logs import messages_of_blocks, trajectory_of
from jprm.methods.data.reader import Event, NoOptions, Reader, Record, take


def parse_claude_code(events: Sequence[Event], where: str, options: NoOptions) -> Iterator[Record]:
    """Yields the trajectory of a session of Claude Code, or of `claude -p --output-format stream-json`.

    Lines that hold parts of one response, by its `message.id`, are one turn. A prompt that takes the place of an
    earlier one (both have one `parentUuid`) takes away what followed that one. The file of a subagent is a trajectory
    too.
    """
    parts, prompts, session = [Conversation()], {}, None
    lines = [(place, object_of(value, place, "line", "Is this file of Claude Code?")) for place, value in events]
    messages = [(place, line) for place, line in lines if isinstance(line.get("message"), Mapping)]
    alone = all(_is_subagent(line) for _, line in messages)
    for place, line in messages:
        kind, message = line.get("type"), line["message"]
        session = line.get("sessionId") or line.get("session_id") or session
        compacted = bool(line.get("isCompactSummary"))
        if _is_subagent(line) and not alone or (line.get("isVisibleInTranscriptOnly") and not compacted):
            continue
        if kind not in ("user", "assistant"):
            raise RecordError(place, "type", f"is {kind!r}, of a line with a message", "Use user or assistant.")
        if kind == "assistant" and (line.get("isApiErrorMessage") or message.get("model") == "<synthetic>"):
            continue  # the program's own words
        if compacted:
            parts.append(Conversation())
            prompts = {}
        conversation, content = parts[-1], message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        read = messages_of_blocks(kind, list_of(blocks, place, "message.content"), place, "message.content")
        parent = line.get("parentUuid")
        if kind == "user" and read and read[0]["role"] == "user" and not line.get("isMeta") and isinstance(parent, str):
            conversation.cut(prompts.setdefault(parent, len(conversation.messages)))
        for event in read:
            if event["role"] == "tool":
                conversation.answer(event.get("tool_call_id"), event["content"])
            elif event["role"] == "user":
                conversation.say("user", event["content"])
            else:
                key = message.get("id") or line.get("uuid") or place
                conversation.write(key, event["content"], event.get("reasoning_content", ""))
                for call in event.get("tool_calls") or ():
                    conversation.write(key, call=call)
    yield from _parts(parts, {"session": session} if session else {}, where)


def _is_subagent(line: Mapping[str, Any]) -> bool:
    return bool(line.get("isSidechain") or line.get("parent_tool_use_id"))


def parse_codex(events: Sequence[Event], where: str, options: NoOptions) -> Iterator[Record]:
    """Yields the trajectory of a rollout of Codex (`~/.codex/sessions/.../rollout-*.jsonl`).

    What the model wrote between two inputs is one turn. The developer and the session's instructions are the system.
    """
    parts, session = [Conversation()], None
    for place, line in events:
        line = object_of(line, place, "line", "Is this file of Codex?")
        kind, payload = line.get("type"), line.get("payload")
        item = object_of(payload if "payload" in line else line, place, "payload", "Is this file of Codex?")
        if kind in ("event_msg", "turn_context", "ghost_snapshot"):
            continue
        if kind == "session_meta" or (kind is None and "instructions" in line):
            session = item.get("id") or session
            base = item.get("base_instructions")
            instructions = (base.get("text") if isinstance(base, Mapping) else base) or item.get("instructions")
            if isinstance(instructions, str) and instructions and not parts[-1].messages:
                parts[-1].say("system", instructions)
        elif kind == "compacted":
            parts.append(Conversation())
            field, history = "payload.replacement_history", item.get("replacement_history") or []
            for event in list_of(history, place, field):
                parts[-1].add_item(event, place, field)
            if not history:
                parts[-1].say("user", take(item, "message", str, place, "payload."))
        elif kind is None and "record_type" in line:
            continue  # of the oldest rollouts: a state
        else:
            parts[-1].add_item(item, place, "payload")
    yield from _parts(parts, {"session": session} if session else {}, where)


def _parts(parts: Sequence[Conversation], about: Record, where: str) -> Iterator[Record]:
    """Yields a trajectory for each part with a turn. Raises RecordError where none has one."""
    first = next((m["content"] for part in parts for m in part.messages if m["role"] == "user" and m["content"]), None)
    written = [part for part in parts if part.has_turn]
    if not written:
        raise RecordError(where, "line", "no line holds a turn of the agent", "Is this file of the named program?")
    for i, part in enumerate(written):
        number = {"part": i} if len(written) > 1 else {}
        problem = {"problem": first} if first and first.strip() else {}
        yield trajectory_of({**problem, **about, **number, "messages": part.messages}, where)


CLAUDE_CODE = Reader(
    parse_claude_code,
    drops="lines without a message (titles, snapshots, attachments), subagents' turns inside a session, the program's"
    " own error messages, costs and times; the prompt of the system and the tools' schemas are not in the file",
    whole=True,
)
CODEX = Reader(
    parse_codex,
    drops="event_msg and turn_context lines, encrypted thoughts and times; the tools' schemas are not in the file",
    whole=True,
)
