"""Rollouts of Codex (`~/.codex/sessions/.../rollout-*.jsonl`): items of the Responses API, and events.

A rollout is append-only. An event may roll turns back, and a compaction replaces the earlier items by a summary. Each
part between compactions is a separate trajectory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jprm.io.jsonl import list_of, object_of
from jprm.methods.data.agents.conversation import Conversation
from jprm.methods.data.agents.logs import trajectories, user_text
from jprm.methods.data.agents.parts import Leftovers, SessionOptions
from jprm.methods.data.reader import Event, LeftOut, Reader, Record
from jprm.methods.messages.messages import call_of


def parse_codex(events: Sequence[Event], where: str, options: SessionOptions) -> Iterator[Record | LeftOut]:
    """Yields the trajectories in a Codex rollout, or in the output of `codex exec --json` (which lacks the prompt).

    Such output may hold several sessions, one after another. All model output between two inputs is one turn.
    Developer messages and session instructions become system messages, and messages from other agents user messages.
    A record has `messages`, `problem`, `session` and (of several parts) `part`, from 0. Last come counts of skipped
    parts.

    Raises `Dropped` if the agent has no turn, and RecordError if the user has none either or a line has another form.
    """
    left = Leftovers(options)
    rollouts = [_Rollout(left)]
    for place, value in events:
        line, rollout = object_of(value, place, "line", "Is this file of Codex?"), rollouts[-1]
        kind, payload = line.get("type"), line.get("payload", line)
        payload = payload if isinstance(payload, Mapping) else {}
        if kind == "session_meta" or (kind is None and "instructions" in line):
            rollout.begin(payload)
        elif kind == "thread.started" and (thread := line.get("thread_id")):
            if thread != rollout.about.setdefault("session", thread):
                rollouts.append(_Rollout(left, session=thread))
        elif kind == "turn.started":
            rollout.prompts += 1
        elif kind == "compacted":
            rollout.compact(payload, place)
        elif kind == "event_msg" and payload.get("type") == "thread_rolled_back":
            rollout.roll_back(payload.get("num_turns"))
        elif kind == "item.completed":
            rollout.executed(line.get("item"), place)
        elif kind == "response_item" or ("payload" not in line and kind is not None):
            rollout.add(payload, place, "payload")
        else:
            inner = payload.get("type") if kind == "event_msg" else None
            left.skip(f"line of type {kind!r}" + (f", {inner}" if inner else "") if kind else "line without a type")
    yield from trajectories([(rollout.parts, rollout.about) for rollout in rollouts], where, left, _CONTEXT)
    yield from left


_COMPACTIONS = ("compaction", "compaction_summary", "context_compaction")
_UNREADABLE = "[The conversation before this point was compacted. Its summary is not in the log.]"

_CONTEXT = re.compile(
    r"\s*(# Context from my IDE setup:.*?## My request for Codex:|(# AGENTS\.md instructions|<(environment_context|"
    r"user_instructions|turn_aborted|skill|user_shell_command|subagent_notification|permissions instructions|"
    r"collaboration_mode)>).*)?",
    re.DOTALL,
)
"""Text that Codex adds in the user's name, before a prompt or as its own message. Alone it begins no user turn."""


class _Rollout:
    """Collects each part's conversation and the start of each user turn."""

    def __init__(self, left: Leftovers, **about: Any) -> None:
        self.left = left
        self.about: Record = about
        self.prompts = 0  # in `codex exec --json`, which only counts them
        self.parts = [Conversation(left=left)]
        self.instructions: list[str] = []  # of the session and the developer, which every request repeats
        self.turns: list[tuple[int, int]] = []  # (part, messages before it) of each of the user's turns

    def begin(self, meta: Mapping[str, Any]) -> None:
        """Reads the session id and instructions."""
        if meta.get("id"):
            self.about.setdefault("session", meta["id"])  # the first: a fork's parent comes later
        base = meta.get("base_instructions")
        text = (base.get("text") if isinstance(base, Mapping) else base) or meta.get("instructions")
        if isinstance(text, str) and text and not self.parts[-1].messages:
            self._instruct(text)

    def _instruct(self, text: str) -> None:
        """Adds a system message unless the part already begins with it."""
        conversation = self.parts[-1]
        if not any(message == {"role": "system", "content": text} for message in conversation.messages[:8]):
            conversation.say("system", text)
        if len(self.parts) == 1 and not conversation.has_turn and text not in self.instructions:
            self.instructions.append(text)

    def _begin_part(self) -> None:
        self.parts.append(Conversation(left=self.left))
        for text in self.instructions:
            self._instruct(text)

    def compact(self, payload: Mapping[str, Any], where: str) -> None:
        """Begins a new part with the summary that replaces the earlier items."""
        self._begin_part()
        field, message = "payload.replacement_history", payload.get("message")
        history = list_of(payload.get("replacement_history") or [], where, field)
        for item in history:
            self.add(item, where, field)
        if not history and isinstance(message, str) and message.strip():
            self.parts[-1].say("user", message)
        elif not history:
            self._unreadable()

    def _unreadable(self) -> None:
        self.left.skip("compaction without a readable summary")
        self.parts[-1].say("user", _UNREADABLE)

    def add(self, value: Any, where: str, field: str) -> None:
        """Adds an item of the model's history; counts it as skipped if its kind is unknown."""
        item = object_of(value, where, field, "Is this file of Codex?")
        kind, replaced = item.get("type", "message"), field != "payload"
        conversation = self.parts[-1]
        if kind == "message" and not item.get("role"):
            self.left.skip("item without a type")
            return
        if kind in _COMPACTIONS:
            if conversation.has_turn:
                self._begin_part()
            self._unreadable()
            return
        if kind == "message" and item.get("role") == "developer":
            self._instruct(self.left.text(item.get("content"), where, field + ".content"))
            return
        before = len(conversation)
        if not conversation.add_item(item, where, field):
            self.left.skip(f"item of type {kind!r}")
        elif kind == "message" and not replaced and len(conversation) > before:
            new = conversation.messages[-1]
            if new["role"] == "user" and not _is_context(new):
                self.turns.append((len(self.parts) - 1, before))

    def executed(self, value: Any, where: str) -> None:
        """Adds a finished item of `codex exec --json`; a call item also holds its result."""
        item, conversation = object_of(value, where, "item", "Is this file of Codex?"), self.parts[-1]
        kind, key = str(item.get("type", item.get("item_type"))), (self.prompts, conversation.inputs)
        if kind in ("agent_message", "assistant_message", "reasoning"):
            text = self.left.text(item.get("text"), where, "item.text")
            said, thought = ("", text) if kind == "reasoning" else (text, "")
            conversation.write(key, said, thought)
        elif kind in _EXECUTED:
            name, arguments, output = _EXECUTED[kind](item)
            conversation.write(key, call=call_of(name, arguments, item.get("id")))
            conversation.answer(item.get("id"), output if isinstance(output, str) else json.dumps(output))
        else:
            self.left.skip(f"item of type {kind!r}")

    def roll_back(self, count: Any) -> None:
        """Removes the user's last `count` turns, everything after them, and the context written for them."""
        if not isinstance(count, int) or count < 1 or not self.turns:
            self.left.skip("rollback of no turn")
            return
        part, messages = self.turns[-min(count, len(self.turns))]
        del self.turns[-min(count, len(self.turns)) :], self.parts[part + 1 :]
        conversation = self.parts[part]
        while messages and self.turns and _is_context(conversation.messages[messages - 1]):
            messages -= 1
        conversation.cut(messages)
        self.left.skip("turns of the user that were rolled back")


_EXECUTED: dict[Any, Callable[[Mapping[str, Any]], tuple[Any, Any, Any]]] = {
    "command_execution": lambda item: ("shell", {"command": item.get("command")}, item.get("aggregated_output") or ""),
    "file_change": lambda item: ("apply_patch", {"changes": item.get("changes")}, item.get("status") or ""),
    "mcp_tool_call": lambda item: (item.get("tool"), item.get("arguments"), item.get("result") or item.get("error")),
    "web_search": lambda item: ("web_search", {"query": item.get("query")}, item.get("status") or ""),
}
"""For each call item of `codex exec --json`: returns the name, arguments and result."""


def _is_context(message: Mapping[str, Any]) -> bool:
    text = message["content"]
    return message["role"] == "user" and bool(text.strip()) and not user_text(text, _CONTEXT)


CODEX = Reader(
    parse_codex,
    SessionOptions,
    drops="event_msg and turn_context lines, turns that were rolled back, encrypted thoughts and times; the tools'"
    " schemas and the results of the server's searches are not in the file",
    whole=True,
)
