"""Converts TRL's stepwise records, free text and single chat exchanges to chain records."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jprm import steps
from jprm.io.jsonl import RecordError, list_of, object_of, text_of
from jprm.methods.messages.messages import (
    THOUGHTS,
    WRAPPERS,
    normal_message,
    role_content,
    split_thoughts,
    text_of_parts,
)


def chain_of(record: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Returns a chain record for a stepwise record, a chat or free text; `None` for other records.

    Free text is {"problem", "response"}, a chat {"messages"}. The text is split by the rule in `segmentation`
    (`jprm.steps.RULES`, default `auto`), and the chain names the rule used. If `auto` finds step tags, it splits at the
    tags (`tagged_steps`) and removes them from `response`. Steps are stripped; `response` and `messages` are kept.
    Thoughts in a separate field are put before the text in <think> tags. A system message becomes the chain's `system`.
    A stepwise record is {"prompt", "completions", "labels"?}, which become `problem`, `steps` and `labels` (floats);
    other keys stay. The input is not changed.

    Raises RecordError, naming `where` (e.g. FILE:LINE), the field, the reason and the fix.
    """
    if "completions" in record:
        return _of_stepwise(record, where)
    if "messages" in record:
        texts = exchange(record, where)
        chain = _with_system({"problem": texts["user"], **record}, texts, where)
        return chain | _steps(texts["assistant"], record, where)
    if "response" in record:
        text = text_of(record["response"], where, "response")
        return {**record, **_steps(_with_thoughts(text, record, where, ""), record, where)}
    return None


_TAG = re.compile(r"(?<![А-Яа-яЁё])ки(?![А-Яа-яЁё])|<extra_0>")  # not the end of a Russian word


def tagged_steps(text: str) -> list[str]:
    """Splits a text at step tags, Math-Shepherd's `ки` or Qwen's `<extra_0>`; returns [] if there is no tag.

    Steps are stripped and without the tags; an empty last one is left out.

    >>> tagged_steps("2 + 2 = 4. ки\\nSo it is 4. ки"), tagged_steps("Раскроем скобки.")
    (['2 + 2 = 4.', 'So it is 4.'], [])
    """
    pieces = [piece.strip() for piece in _TAG.split(text)]
    pieces = pieces if pieces[-1] else pieces[:-1]
    return pieces if _TAG.search(text) else []


_STATED = re.compile(r"\\boxed\s*\{|\banswer\s*(?:is\b|:)|^#### *\S|^ANSWER:", re.IGNORECASE | re.MULTILINE)
_BEGUN = re.compile(r"\W{0,5}step\s+1\b", re.IGNORECASE)
_LAST = re.compile(r"\W{0,5}(?:the )?(?:final )?answer\b", re.IGNORECASE)
_PARAGRAPHS = re.compile(r"\S[ \t\r]*\n[ \t\r]*\n\s*\S")


def are_solutions(texts: Sequence[Any]) -> bool:
    """Whether texts are whole solutions (samples), not the steps of one solution; False for a single text.

    True if the first text and most others state an answer, begin at step 1, or have paragraphs. Measured: true for all
    of 600 pools, and for 5 of 7,182 published chains.

    >>> are_solutions(["2 + 2 = 4. The answer is 4.", "So the answer is 5."]), are_solutions(["2 + 2 = 4.", "So 4."])
    (True, False)
    """
    if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
        return False
    concluded = _LAST.match(texts[-1]) and not _LAST.match(texts[0])  # a step of its own states the answer again
    signs = [[bool(_BEGUN.match(text)) for text in texts], [bool(_PARAGRAPHS.search(text)) for text in texts]]
    signs += [] if concluded else [[bool(_STATED.search(text)) for text in texts]]
    return any(marks[0] and sum(marks) > len(texts) / 2 for marks in signs)


def sample_of(sample: Any, where: str, field: str) -> dict[str, Any]:
    """Returns a pool sample, a new dict: splits text, its `response` or its `text` into `steps`, [] if blank.

    The text stays as `response`; `segmentation` names the rule used, unless step tags split it. A sample with `steps`,
    or without text, is only copied. Raises RecordError if it is neither text nor an object, its text is not a string,
    or its `segmentation` is unknown.
    """
    sample = {"response": sample} if isinstance(sample, str) else sample
    sample = dict(object_of(sample, where, field, 'Write {"steps": [...]}, {"response": TEXT}, or the text.'))
    key = next((key for key in ("response", "text") if key in sample), "")
    if "steps" in sample or not key:
        return sample
    text = text_of(sample.pop(key), where, f"{field}.{key}", blank=True)
    chain = _steps(text, sample, where) if text.strip() else {"steps": []}
    return {"response": text, **sample, **chain}


def prompt_of(messages: Any, where: str, field: str) -> dict[str, Any]:
    """Returns `{"problem": text}` of a prompt given as messages, and `system` if there is such a message.

    Raises RecordError, naming `field`, unless there is one user message, after at most one system message, all text.
    """
    texts = _texts(messages, where, field, _PROMPT, ("system", "user"))
    if "user" not in texts:
        raise RecordError(where, field, "holds no message of the user", _PROMPT)
    return _with_system({"problem": texts["user"]}, texts, where)


def _of_stepwise(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    samples = "If they are samples, read them with `jprm prepare pools`, or write them as `samples`."
    if are_solutions(list_of(record["completions"], where, "completions")):
        raise RecordError(where, "completions", "hold whole solutions, not the steps of one", samples)
    if "prompt" not in record:
        raise RecordError(where, "prompt", "is absent beside `completions`", f"A stepwise record has one. {samples}")
    chain = dict(record)
    for old, new in (("prompt", "problem"), ("completions", "steps")):
        if new in record:
            remedy = "Write `prompt`, `completions`, `labels`."
            raise RecordError(where, old, f"a stepwise record has {new!r} beside {old!r}", remedy)
        chain[new] = chain.pop(old)
    if isinstance(chain["problem"], list):  # messages, which stay as `prompt`
        chain["prompt"] = chain["problem"]
        texts = _texts(chain["prompt"], where, "prompt", _PROMPT, ("system", "user"))
        chain = _with_system(chain | {"problem": texts.get("user")}, texts, where)
    if isinstance(chain.get("label"), list) and "labels" not in chain:  # as TRL's records had it at first
        chain["labels"] = chain.pop("label")
    if isinstance(chain.get("labels"), list):
        chain["labels"] = [float(label) if isinstance(label, bool) else label for label in chain["labels"]]
    return chain


def _with_system(chain: dict[str, Any], texts: Mapping[str, str], where: str) -> dict[str, Any]:
    """Adds the system message, if any, as `system`."""
    if "system" not in texts:
        return chain
    if chain.get("system") not in (None, texts["system"]):
        raise RecordError(where, "system", "stands beside another system message", "Keep one of the two.")
    return chain | {"system": texts["system"]}


def _steps(text: str, record: Mapping[str, Any], where: str) -> dict[str, Any]:
    rule = record.get("segmentation", "auto")
    if rule not in ("auto", *steps.RULES):
        remedy = f"Use auto, {', '.join(steps.RULES)}, or give the record `steps`."
        raise RecordError(where, "segmentation", f"is {rule!r}, no rule to split text", remedy)
    if rule == "auto" and (tagged := tagged_steps(text)):
        return {"steps": tagged, "response": "\n".join(tagged)}
    used = steps.rule_of(text) if rule == "auto" else rule
    return {"steps": [step.strip() for step in steps.split(text, used)], "segmentation": used}


_EXCHANGE = "Write one message of the user and one of the assistant; longer talks go into `problem` and `response`."
_PROMPT = "Write one message of the user, after at most one of the system, or the prompt as text."

_ABOUT = frozenset(
    "role name id index model object type created created_at timestamp date finish_reason stop_reason status usage"
    " logprobs metadata weight".split()
)
"""Message fields that are not part of its content. Any other field must be readable, or the record is refused."""


def exchange(record: Mapping[str, Any], where: str) -> dict[str, str]:
    """Returns the texts of one user, one assistant and an optional system message, by role, e.g. `{"user": ...}`.

    The assistant's message must come last; its thoughts are put before its text in <think> tags.

    Raises RecordError for other messages, a part that is not text, or if the record also has `problem`, `tools`,
    `functions` or `documents`; KeyError if it has no `messages`.
    """
    for key in ("tools", "functions", "documents"):
        if record.get(key):
            reason = "is part of the prompt, and a layout has no place for it"
            raise RecordError(where, key, reason, "Write its text into the user's message, or remove it.")
    texts = _texts(record["messages"], where, "messages", _EXCHANGE, ("system", "user", "assistant"))
    if "problem" in record or not {"user", "assistant"} <= texts.keys():
        reason = "has `problem` beside it" if "problem" in record else "lacks the user's or the assistant's message"
        raise RecordError(where, "messages", reason, _EXCHANGE)
    return texts


def _texts(messages: Any, where: str, name: str, remedy: str, roles: tuple[str, ...]) -> dict[str, str]:
    """Returns each role's single message text; the last role in `roles` must come last."""
    texts = {}
    for i, message in enumerate(list_of(messages, where, name)):
        field = f"{name}[{i}]"
        message = role_content(object_of(message, where, field, remedy))
        role = message.get("role")
        if role not in roles or role in texts or roles[-1] in texts:
            raise RecordError(where, f"{field}.role", f"is {role!r} here", remedy)
        message = normal_message(message, where, field)
        readable = {"content", *(("reasoning_content",) if role == "assistant" else ())} | _ABOUT
        for key in (key for key, value in message.items() if key not in readable and value not in (None, "", [], {})):
            reason = f"cannot be read in a message of the {role}, and a model would be scored on another text"
            raise RecordError(where, f"{field}.{key}", reason, "Write its text into `content`, or remove the field.")
        text = text_of_parts(message.get("content"), where, f"{field}.content")
        text_of(text, where, f"{field}.content")
        texts[role] = _with_thoughts(text, message, where, f"{field}.") if role == "assistant" else text
    return texts


def _with_thoughts(text: str, fields: Mapping[str, Any], where: str, prefix: str) -> str:
    """Puts the thoughts of the fields before the text, in <think> tags."""
    thoughts, _ = split_thoughts(fields, where, prefix)
    if not thoughts:
        return text
    if "</think" in text.lower():
        key = next((key for key in THOUGHTS if fields.get(key)), WRAPPERS[0])
        raise RecordError(where, prefix + key, "stands beside a text with <think> tags", "Keep one of the two.")
    return f"<think>\n{thoughts.strip()}\n</think>\n\n{text}"
