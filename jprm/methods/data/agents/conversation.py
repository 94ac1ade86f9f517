"""`Conversation` makes messages of a stream of events, e.g. of items of OpenAI's Responses API."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from jprm.io.jsonl import object_of
from jprm.methods.data.agents.parts import Leftovers, SessionOptions
from jprm.methods.messages.messages import call_of, thoughts_of_blocks


class Conversation:
    """Messages that grow event by event: the events of one response are one turn."""

    def __init__(self, between: str = "", left: Leftovers | None = None) -> None:
        self.messages: list[dict[str, Any]] = []
        self.between = between  # two texts of one turn
        self.left = left or Leftovers(SessionOptions("error"))
        self.has_turn = False
        self.inputs = 0  # messages that are not the agent's: it writes one turn between two of them
        self._turn: dict[str, Any] | None = None
        self._key: Any = None
        self._calls: list[Any] = []  # ids of the last turn's calls, None for a call without one
        self._open: list[Any] = []  # those of them without an answer

    def say(self, role: str, text: str) -> None:
        """Adds a message of the system or the user, which ends a turn."""
        self._add({"role": role, "content": text})
        self._turn = None

    def holds(self, key: Any) -> bool:
        """Whether the last turn is of the response with this key. None is of no other response."""
        return self._turn is not None and key is not None and key == self._key

    def write(self, key: Any, text: str = "", thoughts: str = "", call: Mapping[str, Any] | None = None) -> None:
        """Adds text, thoughts and a call to the last turn if it is of this response, else to a new one."""
        if not self.holds(key) or self._turn is None:
            self._turn, self._key = {"role": "assistant", "content": ""}, key
            self.messages.append(self._turn)
            self.has_turn, self._calls, self._open = True, [], []
        turn = self._turn
        turn["content"] = self.between.join(filter(None, (turn["content"], text)))
        if thoughts:
            turn["reasoning_content"] = "\n".join(filter(None, (turn.get("reasoning_content"), thoughts)))
        if call is not None:
            turn.setdefault("tool_calls", []).append(call)
            self._calls.append(call.get("id"))
            self._open.append(call.get("id"))

    def answer(self, call_id: Any, text: str) -> None:
        """Adds the text that a tool answered. A text that answers no call of the last turn is the user's.

        An answer without an id, or to calls without ids, is of the first open call.
        """
        call_id = call_id or None
        if call_id is None or (call_id not in self._calls and None in self._open):
            answered = self._open[:1]
        else:
            answered = [call_id] if call_id in self._calls else []
        if not answered:
            self.say("user", text)
            return
        if answered[0] in self._open:
            self._open.remove(answered[0])
        self._add({"role": "tool", "content": text, **({"tool_call_id": call_id} if call_id else {})})

    def _add(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.inputs += 1

    def cut(self, count: int) -> None:
        """Keeps the first `count` messages."""
        del self.messages[count:]
        self._turn, self._calls, self._open = None, [], []
        self.has_turn = any(message["role"] == "assistant" for message in self.messages)
        self.inputs = sum(message["role"] != "assistant" for message in self.messages)

    def add_item(self, item: Any, where: str, field: str) -> bool:
        """Adds an item of OpenAI's Responses API; returns whether its kind is known.

        All that the model wrote between two inputs is one turn.
        """
        item = object_of(item, where, field, "Write an item of the Responses API.")
        kind = item.get("type", "message")
        if kind in ("message", "agent_message"):
            text, role = self.left.text(item.get("content"), where, field + ".content"), item.get("role")
            if role == "assistant":
                self.write(self.inputs, text)
            else:  # another agent's message has no role
                self.say("system" if role == "developer" else str(role or "user"), text)
        elif kind == "reasoning":
            for key in ("content", "summary"):  # the summary retells the content, which only open models give
                if thoughts := thoughts_of_blocks(item.get(key), where, f"{field}.{key}"):
                    self.write(self.inputs, thoughts=thoughts)
                    break
        elif kind in _CALLS:
            self.write(self.inputs, call=call_of(*_CALLS[kind](item), item.get("call_id")))
        elif kind == "tool_search_output":
            self.answer(item.get("call_id"), json.dumps(item.get("tools") or [], ensure_ascii=False))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = item.get("output")
            if isinstance(output, Mapping):
                output = output.get("content", output.get("output"))
            self.answer(item.get("call_id"), self.left.text(output, where, field + ".output"))
        else:
            return kind == "ghost_snapshot"
        return True


_CALLS: dict[str, Callable[[Mapping[str, Any]], tuple[Any, Any]]] = {
    "function_call": lambda item: (item.get("name"), item.get("arguments")),
    "custom_tool_call": lambda item: (item.get("name"), {"input": item.get("input")}),
    "local_shell_call": lambda item: ("local_shell", item.get("action") or {}),
    "web_search_call": lambda item: ("web_search", item.get("action") or {}),
    "tool_search_call": lambda item: ("tool_search", item.get("arguments") or {}),
    "image_generation_call": lambda item: ("image_generation", {"prompt": item.get("revised_prompt") or ""}),
}
"""The name and the arguments of an item that is a call."""
