"""`Conversation` builds messages from a stream of events, e.g. items of the OpenAI Responses API."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from jprm.io.jsonl import RecordError, object_of, type_name
from jprm.methods.data.agents.parts import Leftovers, SessionOptions
from jprm.methods.messages.messages import call_of, thoughts_of_blocks


class Conversation:
    """Messages that grow event by event; the events of one response form one turn.

    `messages` is a list of {"role", "content"}, also with "reasoning_content", "tool_calls" or "tool_call_id"; the
    methods change it in place. `between` separates the texts of one turn. Skipped parts are counted in `left`; without
    it, images are refused.
    """

    def __init__(self, between: str = "", left: Leftovers | None = None) -> None:
        self.between = between
        self.left = left or Leftovers(SessionOptions("error"))
        self.inputs = 0  # messages not by the agent; its output between two of them shares one key
        self.repeated = 0  # turns copied from the part before a compaction
        self._messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None
        self._texts: list[str] = []  # of the current turn, like `_thoughts`
        self._thoughts: list[str] = []
        self._key: Any = None
        self._ids: set[str] = set()  # ids of the last turn's calls
        self._open: set[str] = set()  # unanswered calls among `_ids`
        self._unnamed = 0  # calls without an id that lack an answer

    @property
    def messages(self) -> list[dict[str, Any]]:
        self._join()
        return self._messages

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def waits(self) -> bool:
        """Whether a call of the last turn is still unanswered."""
        return bool(self._open or self._unnamed)

    @property
    def has_turn(self) -> bool:
        """Whether the agent has a new turn here, i.e. one not copied from the part before."""
        return len(self._messages) > self.inputs + self.repeated

    def _join(self) -> None:
        """Joins the collected texts of the last turn into its message."""
        if self._turn is not None:
            self._texts = [self.between.join(self._texts)]
            self._turn["content"] = self._texts[0]
            if self._thoughts:
                self._thoughts = ["\n".join(self._thoughts)]
                self._turn["reasoning_content"] = self._thoughts[0]

    def say(self, role: str, text: str) -> None:
        """Adds a system or user message, which ends the current turn."""
        self._join()
        self._turn = None
        self._messages.append({"role": role, "content": text})
        self.inputs += 1

    def holds(self, key: Any) -> bool:
        """Whether the last turn belongs to the response `key`; a missing key never matches."""
        return self._turn is not None and key is not None and key == self._key

    def write(self, key: Any, text: str = "", thoughts: str = "", call: Mapping[str, Any] | None = None) -> None:
        """Adds text, thoughts and a call (in the chat form, as by `call_of`) to the turn of response `key`.

        Begins a new turn if the last one belongs to another response, or `key` is `None`.
        """
        if not self.holds(key) or self._turn is None:
            self._join()
            self._turn, self._texts, self._thoughts, self._key = {"role": "assistant", "content": ""}, [], [], key
            self._messages.append(self._turn)
            self._ids, self._open, self._unnamed = set(), set(), 0
        self._texts += filter(None, (text,))
        self._thoughts += filter(None, (thoughts,))
        if call is not None:
            self._turn.setdefault("tool_calls", []).append(self.left.call(call))
            if isinstance(call_id := call.get("id"), str):
                self._ids.add(call_id)
                self._open.add(call_id)
            else:
                self._unnamed += 1

    def answer(self, call_id: Any, text: str) -> None:
        """Adds the result of a call in the last turn, before user messages that came while the tool ran.

        If the result or the calls have no id (`call_id` is "", `None` or no text), it answers any open call. Without a
        matching call it becomes a user message.
        """
        call_id = call_id if isinstance(call_id, str) and call_id else None
        if call_id in self._ids:
            self._open.discard(call_id)
        elif self._unnamed:
            self._unnamed -= 1
        elif call_id is None and self._open:
            self._open.pop()
        else:
            self.say("user", text)
            return
        at = len(self._messages)
        while self._messages[at - 1]["role"] == "user":
            at -= 1
        self._messages.insert(at, {"role": "tool", "content": text, **({"tool_call_id": call_id} if call_id else {})})
        self.inputs += 1

    def cut(self, count: int) -> None:
        """Removes all messages after the first `count`. The next text of the agent begins a new turn."""
        self._join()
        self._turn, self._ids, self._open, self._unnamed = None, set(), set(), 0
        self.inputs -= sum(message["role"] != "assistant" for message in self._messages[count:])
        del self._messages[count:]

    def add_item(self, item: Any, where: str, field: str) -> bool:
        """Adds an item of the OpenAI Responses API; returns `False`, and adds nothing, if its kind is unknown.

        All model output between two inputs is one turn. Raises RecordError, with `where` and `field`, if the item is no
        object, or its text is damaged or has refused images.
        """
        item = object_of(item, where, field, "Write an item of the Responses API.")
        kind = item.get("type", "message")
        if not isinstance(kind, str):
            raise RecordError(where, field + ".type", f"is {type_name(kind)}, not text", "Is the file whole?")
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
        elif kind == "additional_tools":
            self.say("system", json.dumps(item.get("tools") or [], ensure_ascii=False))
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
"""For each call item: returns its name and arguments."""
