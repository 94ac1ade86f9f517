"""Chat templates: renders the Jinja that comes with a tokenizer, as untrusted code.

A template is a program by a stranger. It is rendered in a sandbox without access to Python attributes or files (Jinja's
`ImmutableSandboxedEnvironment`), in a separate process with limits on time, memory and size: an endless loop only ends
that process. A policy renders its template once, when it is loaded.

Templates get the same functions as in transformers, except `strftime_now`: a prompt must not depend on the day. It is
defined only if tokenizer_config.json fixes a day under this name, e.g. "2026-01-31".
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jprm.io.folders import local_copy
from jprm.methods.worker import Worker, serve
from jprm.options import place_of
from jprm.tokenizer import CONFIG, DATE, TEMPLATE, TOOLS, ChatTemplate, chat_of

LONGEST_TEXT = 2**20
"""Maximum characters of a rendered text."""
SECONDS = 10.0

OWN_TEMPLATE = """{{ bos_token or '' }}
{%- if tools %}<|tools|>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>
{% endif %}
{%- for message in messages %}<|{{ message.role }}|>
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>
{% endif %}{{ message.content or '' }}{% for call in message.tool_calls or [] %}
<call>{{ (call.function or call) | tojson }}</call>{% endfor %}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""
"""Template for tokenizers without one: all marks are plain text."""

_ASKS_FOR_NONE = re.compile(r"content['\"\])]*\s*(is|is\s+not|==|!=)\s+none\b", re.IGNORECASE)
"""Matches templates that distinguish null content from empty content, e.g. DeepSeek's before V3.1."""
CONTROL = re.compile(
    r"<[|\uff5c][^<>\s]{1,60}>|</?s>|<(?:start|end)_of_turn>|<(?:bos|eos|pad|unk)>|<</?SYS>>|\[/?INST\]"
    r"|\[/?(?:SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]"
)
"""Names of common control tokens. Servers interpret them in any text, as the start or end of a turn."""


def guarded(text: str) -> str:
    """Disarms the tokens of `CONTROL` by a space after the first character, e.g. `<|im_end|>` to `< |im_end|>`."""
    return CONTROL.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)


_worker = Worker("jprm.methods.formats.chat_template", most=4)  # a long conversation keeps no other waiting
_PROBLEM = "jprm-problem-7f3a"
"""Placeholder for the problem. Without white space, which templates trim, or characters that need escapes."""
_REPLY, _SYSTEM = "jprm-reply-7f3a", "jprm-system-7f3a"


def template_of(path: str | os.PathLike) -> tuple[str, dict[str, str]]:
    """Returns the default chat template of a model's folder or GGUF file, and its tokens' texts by name.

    The names are e.g. `bos_token`, as in `ChatTemplate.tokens`. `path` may be in a bucket or on the Hub, from which the
    files are downloaded.

    Raises ValueError if the template is absent (or the folder), damaged or too long, FileNotFoundError if a GGUF file
    is missing or tokenizer_config.json beside the template, and OSError if a download fails.
    """
    names = (TEMPLATE, CONFIG, TOOLS)
    path = local_copy(place_of(path, names), names)
    if path.suffix == ".gguf":
        from jprm.methods.formats import gguf

        chat = gguf.chat_of(path)
    else:
        chat = chat_of(path)
    if chat is None or not chat.text:
        raise ValueError(
            f"{path}: has no default chat template ({TEMPLATE}, or chat_template in {CONFIG}). Write the prompt"
        )
    return chat.text, dict(chat.tokens)


def render(
    template: str, messages: Sequence[Mapping[str, Any]], tokens: Mapping[str, str], *, reply: bool = True
) -> str:
    """Renders chat messages in a separate process, which has 10 s for it, and waits for the text.

    With `reply`, the text ends where the assistant's reply begins (`add_generation_prompt`). `tokens` are the second
    result of `template_of`.

    Raises ValueError if the template is invalid, rejects the messages, or exceeds the limits on time, memory or
    characters.
    """
    question = {"template": template, "messages": list(messages), "tokens": dict(tokens), "reply": reply}
    answer = _worker.ask(question, SECONDS)
    if answer is None:
        raise ValueError(f"the chat template takes more than {SECONDS:g} s or too much memory. Write the prompt")
    if "error" in answer:
        raise ValueError(f"the chat template fails: {answer['error']}. Write the prompt")
    return answer["text"]


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A rendered conversation up to the end of a turn, and the assistant turns within it.

    turns: (index of the message from 0, where the assistant's text begins in `text`, one past its end), in characters.
    """

    text: str
    turns: list[tuple[int, int, int]]


def render_turns(
    chat: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    last: bool = False,
) -> list[Rendered]:
    """Renders the conversation up to each turn of the assistant, in as few texts as possible, the longest first.

    With `last`, renders only up to the last turn: rendering all turns takes quadratic time. Without a turn the result
    is []. Spans count characters of their text. Each message must have `role` and `content`. Waits for a separate
    process, which has 10 s, and 0.1 s a turn.

    A turn is contained in a later turn's text if that text begins with the rendering up to the turn. With tools, the
    template for tools is used if there is one, as in transformers. A null content beside calls or thoughts becomes "",
    unless the template tests for null: other templates would write "None".

    A turn's span is the one that the template marks by {% generation %}, as transformers'
    `return_assistant_tokens_mask` reads it. Without marks, it starts at the end of the rendering with
    `add_generation_prompt`. Trailing white space is excluded.

    Raises ValueError as `render`, naming the message at which the template fails, and if there is no default template.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"][-1 if last else 0 :]
    template = (chat.tools if tools else "") or chat.text
    if not template:
        raise ValueError("the tokenizer has chat templates only under names, and none is the default. Name one so")
    if not _ASKS_FOR_NONE.search(template):
        messages = [{**message, "content": ""} if message["content"] is None else message for message in messages]
    question = {"template": template, "messages": list(messages), "tokens": dict(chat.tokens), "turns": turns}
    answer = _worker.ask(question | {"tools": list(tools) or None}, SECONDS + 0.1 * len(turns))
    if answer is None:
        raise ValueError(f"the chat template takes more than {SECONDS:g} s or too much memory")
    if "error" in answer:
        raise ValueError(f"messages[{answer['at']}]: the chat template refuses all up to it: {answer['error']}")
    return [Rendered(x["text"], [(k, begin, end) for k, begin, end in x["turns"]]) for x in answer["texts"]]


def prompt_of(path: str | os.PathLike, message: str) -> str:
    """Renders a user message that contains `{problem}`, up to the start of the reply; `{problem}` stays in the result.

    `path` is a folder or GGUF file, also in a bucket or on the Hub. Raises ValueError if the template is absent or
    fails, or unless the rendering contains the problem exactly once, unchanged; OSError if a file is missing or a
    download fails.
    """
    question = [{"role": "user", "content": message.replace("{problem}", _PROBLEM)}]
    before, after = _around(path, question, [_PROBLEM], reply=True)
    return before + "{problem}" + after


def conversation_of(path: str | os.PathLike, *, system: bool = False) -> tuple[str, str]:
    """Returns (text before an assistant's reply, text after it); the first has `{problem}` as the user's message.

    With `system`, a system message `{system}` comes first in it. `path` may be in a bucket or on the Hub.

    Raises ValueError if the template is absent or fails, or unless the rendering contains each message exactly once,
    unchanged; OSError if a file is missing or a download fails.
    """
    conversation = [{"role": "user", "content": _PROBLEM}, {"role": "assistant", "content": _REPLY}]
    conversation = [{"role": "system", "content": _SYSTEM}] * system + conversation
    *parts, before, between, after = _around(
        path, conversation, [message["content"] for message in conversation], reply=False
    )
    return "".join(part + "{system}" for part in parts) + before + "{problem}" + between, after


def trims(path: str | os.PathLike) -> bool:
    """Returns whether the model's template strips white space around the assistant's text.

    `path` is a folder or GGUF file, also in a bucket or on the Hub. Raises ValueError if the template is absent or
    fails, and OSError if a file is missing or a download fails.
    """
    reply_text = f"\t\n{_REPLY}\n\t"
    template, tokens = template_of(path)
    messages = [{"role": "user", "content": _PROBLEM}, {"role": "assistant", "content": reply_text}]
    return reply_text not in render(template, messages, tokens, reply=False)


def _around(
    path: str | os.PathLike, conversation: list[dict[str, str]], messages: list[str], *, reply: bool
) -> list[str]:
    """Returns the rendered texts before, between and after the messages."""
    template, tokens = template_of(path)
    try:
        text = render(template, conversation, tokens, reply=reply)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    parts = []
    for message in messages:
        before, matched, text = text.partition(message)
        if not matched or message in text:
            times = text.count(message) + bool(matched)
            who = {_SYSTEM: "system", _REPLY: "assistant"}.get(message, "user")
            raise ValueError(f"{path}: its chat template holds the {who}'s message {times} times, not once")
        parts.append(before)
    return [*parts, text]


def _prepare():
    """Returns the worker's function that answers a question."""
    import jinja2
    from jinja2 import ext, nodes, sandbox

    size = 0  # characters of the text that is being rendered
    marked: list[tuple[int, int]] = []  # the places of the assistant's texts in it

    class Generation(ext.Extension):
        """`{% generation %}`, which marks an assistant's text for training; its content is rendered unchanged."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller) -> str:
            text = caller()
            marked.append((size, size + len(text)))
            return text

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    compiled = functools.lru_cache(8)(environment.from_string)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    del environment.filters["random"], environment.globals["lipsum"]  # a prompt is a function of the messages

    def text_of(question: dict[str, Any], messages: list, reply: bool) -> str:
        nonlocal size
        variables = question["tokens"] | {"messages": messages, "tools": question.get("tools"), "documents": None}
        variables["add_generation_prompt"] = reply
        if DATE in variables:
            variables[DATE] = datetime.datetime.fromisoformat(variables[DATE]).strftime
        parts: list[str] = []
        marked.clear()
        size = 0
        for part in compiled(question["template"]).generate(**variables):
            parts.append(part)
            if (size := size + len(part)) > LONGEST_TEXT:
                raise ValueError(f"its text has more than {LONGEST_TEXT:,} characters")
        return "".join(parts)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        at = 0
        try:
            if "reply" in question:
                return {"text": text_of(question, question["messages"], question["reply"])}
            texts: list[dict[str, Any]] = []
            for at in reversed(question["turns"]):
                asked = text_of(question, question["messages"][:at], True)
                text = text_of(question, question["messages"][: at + 1], False)
                begin, end = marked[-1] if marked else (_shared(asked, text), len(text))
                end = len(text[:end].rstrip())
                holder = next((shorter for shorter in texts if shorter["text"].startswith(text[:end])), None)
                if holder is None:
                    texts.append(holder := {"text": text[:end], "turns": []})
                holder["turns"].insert(0, (at, min(begin, end), end))
            return {"texts": texts}
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
            if reason == f"'{DATE}' is undefined":
                remedy = f'Put "{DATE}": "2026-01-31" into {CONFIG}'
                reason = f"it writes the day, and scores must not depend on it. {remedy}"
            return {"error": reason, "at": at}

    return answer


def _shared(a: str, b: str) -> int:
    """Returns the length of two texts' common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low


if __name__ == "__main__":
    serve(_prepare)
