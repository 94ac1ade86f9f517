"""`Conversation`: what readers of events, and of items of OpenAI's Responses API, make messages of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jprm.io.jsonl import RecordError, object_of, type_name
from jprm.methods.messages.messages import call_of, text_of_parts, thoughts_of_blocks


class Conversation:
    """Messages that grow event by event: the events of one response are one turn."""

    def __init__(self, between: str = "") -> None:
        self.between = between  # two texts of one turn
        self.inputs = 0  # messages that are not the agent's: what it writes between two of them has one key
        self._messages: list[dict[str, Any]] = []
        self._turns: list[dict[str, Any]] = []  # the agent's among them
        self._turn: dict[str, Any] | None = None
        self._texts: list[str] = []  # of this turn, and its thoughts
        self._thoughts: list[str] = []
        self._key: Any = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        self._join()
        return self._messages

    def _join(self) -> None:
        """Writes the texts of the last turn into its message: once, not with each of them."""
        if self._turn is not None:
            self._texts = [self.between.join(self._texts)]
            self._turn["content"] = self._texts[0]
            if self._thoughts:
                self._thoughts = ["\n".join(self._thoughts)]
                self._turn["reasoning_content"] = self._thoughts[0]

    def say(self, role: str, text: str) -> None:
        """Adds a message of the system or the user, which ends a turn."""
        self._join()
        self._turn = None
        self._messages.append({"role": role, "content": text})
        self.inputs += 1

    def holds(self, key: Any) -> bool:
        """Whether the last turn is of the response with this key. None is of no other response."""
        return self._turn is not None and key is not None and key == self._key

    def write(self, key: Any, text: str = "", thoughts: str = "", call: Mapping[str, Any] | None = None) -> None:
        """Adds text, thoughts and a call to the last turn where it is of this response, else to a new one."""
        if not self.holds(key) or self._turn is None:
            self._join()
            self._turn, self._texts, self._thoughts, self._key = {"role": "assistant", "content": ""}, [], [], key
            self._messages.append(self._turn)
            self._turns.append(self._turn)
        self._texts += filter(None, (text,))
        self._thoughts += filter(None, (thoughts,))
        if call is not None:
            self._turn.setdefault("tool_calls", []).append(call)

    def answer(self, call_id: Any, text: str) -> None:
        """Adds what a tool answered. What was not called is told to the agent by the user's side."""
        if not self._turns or not self._turns[-1].get("tool_calls"):
            self.say("user", text)
            return
        self._messages.append({"role": "tool", "content": text, **({"tool_call_id": call_id} if call_id else {})})
        self.inputs += 1

    def cut(self, count: int) -> None:
        """Keeps the first `count` messages."""
        self._join()
        self._turn = None
        turns = sum(message["role"] == "assistant" for message in self._messages[count:])
        self.inputs -= len(self._messages[count:]) - turns
        del self._messages[count:], self._turns[len(self._turns) - turns :]

    @property
    def has_turn(self) -> bool:
        return bool(self._turns)

    def add_item(self, item: Any, where: str, field: str) -> None:
        """Adds an item of OpenAI's Responses API. What the model wrote between two inputs is one turn.

        Raises RecordError for an item of another kind.
        """
        item = object_of(item, where, field, "Write an item of the Responses API.")
        kind = item.get("type", "message")
        if not isinstance(kind, str):
            raise RecordError(where, field + ".type", f"is {type_name(kind)}, not text", "Is the file whole?")
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
