"""The normal form of chat messages; clients, servers and frameworks write them in several forms.

| in a log | after `normal_message` |
|---|---|
| thoughts in a field of `THOUGHTS`, in a gateway's wrapper, or in content parts | `reasoning_content` |
| `refusal`, or a part of type refusal | the content |
| arguments as JSON text; absent, null or empty arguments | an object |
| a call's name and arguments without `function` | in `function` |
| ids that are null or "" | absent |

Every reader of messages calls it, so a conversation gives the same text whichever client logged it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jprm.io.jsonl import RecordError, dump, list_of, object_of, parse, text_of, type_name

THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thinking_blocks", "reasoning_details")
"""Fields that hold a model's thoughts before its answer, as text or as a list of blocks."""

WRAPPERS = ("provider_specific_fields", "extra_content")
"""Gateway fields that wrap a provider's fields, including thoughts."""

PARTS_OF_THOUGHT = ("thinking", "reasoning", "redacted_thinking")
_REDACTED = ("redacted_thinking", "reasoning.encrypted")
_SUMMARIES = ("reasoning.summary", "summary_text")
"""Types of blocks that only retell a thought. They are read if no other block or field has its text."""

_TEXTS_OF_THOUGHT = ("thinking", "text", "reasoning", "content", "summary")
"""Keys that may hold the text of a thought block; the first with text is read.

A summary repeats the thought, so it comes last. If a thought is encrypted or `redacted`, only its summary is text.
"""


_SENDERS = {"human": "user", "gpt": "assistant"}


def role_content(message: Any) -> Any:
    """Converts a message in ShareGPT's form to `role` and `content`, like LLaMA-Factory; returns others unchanged.

    E.g. `{"from": "human", "value": "2 + 2?"}` becomes `{"role": "user", "content": "2 + 2?"}`. An unknown sender is
    kept as the role.
    """
    if not isinstance(message, Mapping) or "role" in message or not isinstance(message.get("from"), str):
        return message
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": _SENDERS.get(message["from"], message["from"]), "content": message.get("value"), **rest}


def normal_message(message: Mapping[str, Any], where: str, field: str) -> dict[str, Any]:
    """Returns a message in the normal form (table above), a new dict. Other keys are kept; roles are not checked.

    Raises RecordError, with the field, if arguments are not an object or its JSON text, if a role other than the
    assistant has thoughts or a refusal, or if two such fields differ.
    """
    thoughts, normal = split_thoughts(message, where, field + ".")
    content, refusal = message.get("content"), normal.pop("refusal", None)
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, Mapping) else None for part in content]
        if parts := [part for part, kind in zip(content, kinds, strict=True) if kind in PARTS_OF_THOUGHT]:
            inside = thoughts_of_blocks(parts, where, f"{field}.content")
            if not (thoughts and _retell(parts)):
                thoughts = _one_of({"reasoning_content": thoughts, "content": inside}, where, field + ".")
        normal["content"] = content = [
            {"type": "text", "text": part.get("refusal")} if kind == "refusal" else part
            for part, kind in zip(content, kinds, strict=True) if kind not in PARTS_OF_THOUGHT
        ]  # fmt: skip
    if refusal not in (None, ""):
        if text_of(refusal, where, field + ".refusal") != content and content:
            raise RecordError(where, field + ".refusal", "stands beside another content", "Keep one of the two.")
        normal["content"] = refusal
    for key, value in (("refusal", refusal), ("reasoning_content", thoughts)):
        if value and message.get("role") != "assistant":
            sent_as = next((name for name in THOUGHTS if message.get(name)), key) if key == "reasoning_content" else key
            raise RecordError(where, f"{field}.{sent_as}", f"is of the {message.get('role')}",
                              "Only the assistant's is read.")  # fmt: skip
    if thoughts or message.get("reasoning_content") is not None:
        normal["reasoning_content"] = thoughts
    for key in ("tool_calls", "function_call", "tool_call_id", "name", "audio"):
        if key in normal and normal[key] in (None, "", [], {}):
            del normal[key]
    if isinstance(calls := normal.get("tool_calls"), list):
        normal["tool_calls"] = [_normal_call(call, where, f"{field}.tool_calls[{j}]") for j, call in enumerate(calls)]
    return normal


def decoded(value: Any, where: str, field: str) -> Any:
    """Parses JSON text, a blank one as null; returns other values unchanged.

    Raises RecordError if the text is not JSON, or holds half a surrogate pair, NaN, or a repeated key.
    """
    if not isinstance(value, str):
        return value
    text_of(value, where, field, blank=True)
    try:
        return parse(value.encode(), where) if value.strip() else None
    except RecordError as error:
        raise RecordError(where, field, f"is text that {error.reason}", "Write whole JSON, or its object.") from None


def split_thoughts(fields: Mapping[str, Any], where: str, prefix: str) -> tuple[str, dict[str, Any]]:
    """Returns (thoughts, other fields) of a message or record; thoughts are "" if absent.

    Gateways may write the same thoughts in several fields, or a summary beside them, which is then left out. Raises
    RecordError if they differ; `prefix` leads their names there, e.g. `messages[2].`.
    """
    flags = {key for key in THOUGHTS[2:] if not isinstance(fields.get(key), str | list)}  # such as "thinking": true
    sources = {key: fields.get(key) for key in THOUGHTS if key not in flags}
    others = {key: value for key, value in fields.items() if key not in sources}
    for wrapper in WRAPPERS:
        inner = fields.get(wrapper)
        if not isinstance(inner, Mapping):
            continue
        names = [key for key in (*THOUGHTS, "thought") if isinstance(inner.get(key), str | list)]
        sources |= {f"{wrapper}.{key}": inner[key] for key in names}
        if names:
            others[wrapper] = {key: value for key, value in inner.items() if key not in names}
    thoughts = {key: thoughts_of_blocks(value, where, prefix + key) for key, value in sources.items()}
    whole = {key: text for key, text in thoughts.items() if text.strip() and not _retell(sources[key])}
    return _one_of(whole or thoughts, where, prefix), others


def _retell(blocks: Any) -> bool:
    """Whether all blocks are summaries of thoughts that are encrypted or in another field."""
    blocks = blocks if isinstance(blocks, list) else [None]
    return all(isinstance(block, Mapping) and (block.get("redacted") or block.get("type") in (*_REDACTED, *_SUMMARIES))
               for block in blocks)  # fmt: skip


def _one_of(thoughts: Mapping[str, str], where: str, prefix: str) -> str:
    """Returns the first text. All texts must be equal except for white space."""
    stated = {key: text for key, text in thoughts.items() if text.strip()}
    first = next(iter(stated), "")
    for key, text in stated.items():
        if text.split() != stated[first].split():
            raise RecordError(where, prefix + key, f"differs from `{prefix}{first}` beside it", "Keep one of the two.")
    return stated[first] if stated else ""


def thoughts_of_blocks(value: Any, where: str, field: str) -> str:
    """Returns the text of thoughts, with blocks joined by newlines; "" if they are encrypted.

    Summaries are read only if no block has a whole thought.

    "" for null. Raises RecordError unless the value is null, text or a list of block objects with text.
    """
    if not isinstance(value, list):
        return "" if value is None else text_of(value, where, field, blank=True)
    texts, summaries = [], []
    for j, block in enumerate(value):
        place = f"{field}[{j}]"
        block = object_of(block, where, place, 'Write {"type": "thinking", "thinking": "..."}.')
        redacted = block.get("redacted") or block.get("type") in _REDACTED
        keys = _TEXTS_OF_THOUGHT[-1:] if redacted else _TEXTS_OF_THOUGHT
        key = next((key for key in keys if block.get(key)), "")
        thought = block.get(key)
        parts = thought if isinstance(thought, list) else [{"text": thought or ""}]  # Mistral's have parts of text
        inner = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
        text = "".join(text_of(text, where, f"{place}.{key}", blank=True) for text in inner)
        (summaries if block.get("type") in _SUMMARIES else texts).append(text)
    return "\n".join(filter(None, texts)) or "\n".join(filter(None, summaries))


TEXTS = ("text", "input_text", "output_text", "refusal")
"""Types of content parts that hold text."""


def text_of_parts(value: Any, where: str, field: str) -> str:
    """Returns text unchanged, or the joined text of a list of parts, "" if empty.

    Raises RecordError if the value is neither (also null), or a part is not text, e.g. an image.
    """
    if not isinstance(value, list):
        return text_of(value, where, field, blank=True)
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else type_name(part)
        if kind not in TEXTS:
            remedy = "jprm's models read no images or files: write what they show as text."
            raise RecordError(where, f"{field}[{i}]", f"is {kind!r}, not text", remedy)
        key = "refusal" if kind == "refusal" else "text"
        texts.append(text_of(part.get(key), where, f"{field}[{i}].{key}", blank=True))
    return "".join(texts)


def call_of(name: Any, arguments: Any, call_id: Any = None) -> dict[str, Any]:
    """Returns `{"id", "type": "function", "function": {"name", "arguments"}}`; no `id` if `call_id` is empty.

    The values are not checked or copied.
    """
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if not call_id else {"id": call_id, **call}


def _normal_call(call: Any, where: str, field: str) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(name := call.get("function"), str) and "name" not in call:  # of inspect-ai
        call = {**{key: value for key, value in call.items() if key != "function"}, "name": name}
    if "function" not in call and "name" in call:
        rest = {key: value for key, value in call.items() if key not in ("name", "arguments")}
        call = rest | call_of(call["name"], call.get("arguments"))
    call = {key: value for key, value in call.items() if key != "id" or value not in (None, "")}
    if not isinstance(function := call.get("function"), Mapping):
        return call
    place = field + ".function.arguments"
    sent = function.get("arguments")
    arguments = decoded(sent, where, place)
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        reason = f"is JSON text of {type_name(arguments)}" if isinstance(sent, str) else f"is {type_name(arguments)}"
        raise RecordError(where, place, f"{reason}, not an object", "Write an object of the tool's parameters.")
    try:
        dump(arguments).encode()
    except (UnicodeEncodeError, ValueError, TypeError, RecursionError) as error:
        remedy = "Write whole characters and finite numbers."
        raise RecordError(where, place, f"is not JSON ({error})", remedy) from None
    return {**call, "function": {**function, "arguments": arguments}}


def check_calls(calls: Any, role: str, where: str, field: str) -> None:
    """Validates a message's `tool_calls` in the normal form; `field` is their name in errors.

    Raises RecordError unless they are a list of objects, or if a role other than the assistant calls, a call has no
    name, or two calls share an id.
    """
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
        if (call_id := call.get("id")) is not None:
            if text_of(call_id, where, place + ".id", blank=True) in seen:
                reason = f"{call_id!r} is of another call too"
                raise RecordError(where, place + ".id", reason, "Give each call its own, or none of them one.")
            seen.add(call_id)
