"""`Conversation`: what readers of events, and of items of OpenAI's Responses API, make messages of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jprm.io.jsonl import RecordError, object_of
from jprm.methods.messages.messages import call_of, text_of_parts, thoughts_of_blocks


class Conversation:
    """Messages that grow event by event: the events of one response are one turn."""

    def __init__(self, between: str = "") -> None:
        self.messages: list[dict[str, Any]] = []
        self.between = between  # two texts of one turn
        self._turn: dict[str, Any] | None = None
        self._key: Any = None

    def say(self, role: str, text: str) -> None:
        """Adds a message of the system or the user, which ends a turn."""
        self.messages.append({"role": role, "content": text})
        self._turn = None

    def holds(self, key: Any) -> bool:
        """Whether the last turn is of the response with this key. None is of no other response."""
        return self._turn is not None and key is not None and key == self._key

    def write(self, key: Any, text: str = "", thoughts: str = "", call: Mapping[str, Any] | None = None) -> None:
        """Adds text, thoughts and a call to the last turn where it is of this response, else to a new one."""
        if not self.holds(key) or self._turn is None:
            self._turn, self._key = {"role": "assistant", "content": ""}, key
            self.messages.append(self._turn)
        turn = self._turn
        turn["content"] = self.between.join(filter(None, (turn["content"], text)))
        if thoughts:
            turn["reasoning_content"] = "\n".join(filter(None, (turn.get("reasoning_content"), thoughts)))
        if call is not None:
            turn.setdefault("tool_calls", []).append(call)

    def answer(self, call_id: Any, text: str) -> None:
        """Adds what a tool answered. What was not called is told to the agent by the user's side."""
        last = next((message for message in reversed(self.messages) if message["role"] == "assistant"), {})
        if not last.get("tool_calls"):
            self.say("user", text)
            return
        self.messages.append({"role": "tool", "content": text, **({"tool_call_id": call_id} if call_id else {})})

    def cut(self, count: int) -> None:
        """Keeps the first `count` messages."""
        del self.messages[count:]
        self._turn = None

    @property
    def inputs(self) -> int:
        """How many messages are not the agent's: what it writes between two of them has one key."""
        return sum(message["role"] != "assistant" for message in self.messages)

    @property
    def has_turn(self) -> bool:
        return any(message["role"] == "assistant" for message in self.messages)

    def add_item(self, item: Any, where: str, field: str) -> None:
        """Adds an item of OpenAI's Responses API. What the model wrote between two inputs is one turn.

        Raises RecordError for an item of another kind.
        """
        item = object_of(item, where, field, "Write an item of the Responses API.")
        kind = item.get("type", "message")
        if kind == "message":
            text, role = text_of_parts(item.get("content"), where, field + ".content"), item.get("role")
            if role == "assistant":
                self.write(self.inputs, text)
            else:
                self.say("system" if role == "developer" else str(role), text)
        elif kind == "reasoning":
            # The summary retells the content, which only open models give. Encrypted thoughts have neither
            key = "content" if item.get("content") else "summary"
            if thoughts := thoughts_of_blocks(item.get(key), where, f"{field}.{key}"):
                self.write(self.inputs, thoughts=thoughts)
        elif kind in _CALLS:
            self.write(self.inputs, call=call_of(*_CALLS[kind](item), item.get("call_id")))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = item.get("output")
            if isinstance(output, Mapping):
                output = output.get("content", output.get("output"))
            self.answer(item.get("call_id"), "" if output is None else text_of_parts(output, where, field + ".output"))
        elif kind != "ghost_snapshot":
            raise RecordError(where, field + ".type", f"is {kind!r}", "Remove the item if the model did not read it.")


_CALLS: dict[str, Callable[[Mapping[str, Any]], tuple[Any, Any]]] = {
    "function_call": lambda item: (item.get("name"), item.get("arguments")),
    "custom_tool_call": lambda item: (item.get("name"), {"input": item.get("input")}),
    "local_shell_call": lambda item: ("local_shell", item.get("action") or {}),
    "web_search_call": lambda item: ("web_search", item.get("action") or {}),
}
"""The name and the arguments of an item that is a call."""
