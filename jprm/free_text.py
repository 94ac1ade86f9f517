"""Turns records of other forms into chain records: TRL's stepwise records, free text, and chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jprm import steps
from jprm.fields import RecordError, list_of, text_of, type_name


def chain_of(record: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Returns the chain record of another form of record, None where its form is not known.

    Free text is {"problem", "response"}, a chat {"messages"}. Their text is split by the rule that the record names as
    `segmentation` (`jprm.steps.RULES`, or auto), and the chain names the rule that was used. White space around a step
    is dropped; `response` and `messages` stay as they are.

    Raises:
      RecordError: as in `jprm.tree.tree_of`.
    """
    if "completions" in record:
        return _of_stepwise(record, where)
    if "messages" in record:
        problem, response = _exchange(record, where)
        return {"problem": problem, **record, **_steps(response, record, where, "messages[-1].content")}
    if "response" in record:
        return {**record, **_steps(record["response"], record, where, "response")}
    return None


def _of_stepwise(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    chain = dict(record)
    for old, new in (("prompt", "problem"), ("completions", "steps")):
        if new in record or old not in record:
            reason = f"has {new!r} beside {old!r}" if new in record else f"has no {old!r}"
            raise RecordError(where, old, f"a stepwise record {reason}", "Write `prompt`, `completions`, `labels`.")
        chain[new] = chain.pop(old)
    if isinstance(chain["problem"], list):  # messages, which stay as `prompt`
        chain["prompt"] = chain["problem"]
        chain["problem"] = _texts(chain["prompt"], where, "prompt", _PROMPT, ("system", "user")).get("user")
    if isinstance(chain.get("labels"), list):
        chain["labels"] = [float(label) if isinstance(label, bool) else label for label in chain["labels"]]
    return chain


def _steps(response: Any, record: Mapping[str, Any], where: str, field: str) -> dict[str, Any]:
    text = text_of(response, where, field)
    rule = record.get("segmentation", "auto")
    if rule not in ("auto", *steps.RULES):
        remedy = f"Use auto, {', '.join(steps.RULES)}, or give the record `steps`."
        raise RecordError(where, "segmentation", f"is {rule!r}, no rule to split text", remedy)
    used = steps.rule_of(text) if rule == "auto" else rule
    return {"steps": [step.strip() for step in steps.split(text, used)], "segmentation": used}


_EXCHANGE = "Write one message of the user and one of the assistant; longer talks go into `problem` and `response`."
_PROMPT = "Write one message of the user, after at most one of the system, or the prompt as text."


def _exchange(record: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Returns the text of the user and of the assistant: one of each, after any system message."""
    texts = _texts(record["messages"], where, "messages", _EXCHANGE, ("system", "user", "assistant"))
    if "problem" in record or not {"user", "assistant"} <= texts.keys():
        reason = "has `problem` beside it" if "problem" in record else "lacks the user's or the assistant's message"
        raise RecordError(where, "messages", reason, _EXCHANGE)
    return texts["user"], texts["assistant"]


def _texts(messages: Any, where: str, name: str, remedy: str, roles: tuple[str, ...]) -> dict[str, str]:
    """Returns the text of each role's one message; the last of `roles` ends the messages."""
    texts = {}
    for i, message in enumerate(list_of(messages, where, name)):
        field = f"{name}[{i}]"
        if not isinstance(message, Mapping):
            raise RecordError(where, field, f"is {type_name(message)}, not an object", remedy)
        role = message.get("role")
        if role not in roles or role in texts or roles[-1] in texts:
            raise RecordError(where, f"{field}.role", f"is {role!r} here", remedy)
        parts = message.get("content")
        if isinstance(parts, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
            parts = "".join(text_of(part.get("text"), where, f"{field}.content") for part in parts)
        texts[role] = text_of(parts, where, f"{field}.content")
    return texts
