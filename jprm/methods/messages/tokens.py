"""Trees of messages as token ids: renders a chat template as the agent saw it, and finds the end of each step.

The ids of a turn equal the result of transformers' `apply_chat_template` on the messages up to it. With most templates,
the text up to a turn is a prefix of the whole text, so all turns of a path share one sequence. Some templates rewrite
earlier text (Qwen3 drops earlier thoughts, Mistral moves the system message to the last user message). Then a turn gets
its own sequence, as the agent saw it. Common prefixes of sequences are computed once, like those of branches.

A step's score is read at the last token of its text; for a whole turn, at the token that ends the assistant's message.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jprm.methods.formats.chat_template import OWN_TEMPLATE, ChatTemplate, Rendered, render_turns
from jprm.methods.messages.records import messages_of, nodes_of_messages
from jprm.token_tree import Written
from jprm.tokenizer import JsonTokenizer, Layout, Tokenizer
from jprm.tree import ReasoningTree, above_of, chains_of, path_to


def written_messages(tree: ReasoningTree, layout: Layout) -> Written:
    """Prepares the steps in a tree of messages for `jprm.token_tree.token_tree`.

    The chunk of a step begins with the context since the previous step. If its ids do not continue those of the
    previous step, because the template rewrote earlier text, the step starts a separate chain from the root.
    """
    if not layout.turns:
        reason = "is a trajectory, and the model reads chains in a layout of its own"
        raise ValueError(f"{_name(tree)}: {reason}. Use a model that was trained on trajectories")
    turns, above, steps = turns_of(tree, layout.tokenizer), above_of(tree), tree.steps
    place_of = {node: place for place, node in enumerate(steps)}
    chunks, parents = [], []
    for node, ids in zip(steps, turns.ids, strict=True):
        parent = place_of.get(above[node], -1)
        before = turns.ids[parent] if parent >= 0 else turns.problem
        if parent >= 0 and ids[: len(before)] != before:
            parent, before = -1, turns.problem
        chunks.append(ids[len(before) :])
        parents.append(parent)
    return Written(turns.problem, chunks, parents, steps, spans=turns.written)


@dataclasses.dataclass(frozen=True)
class Turns:
    """Token ids of the M steps in a message tree, ordered like `ReasoningTree.steps`."""

    problem: list[int]  # the common prefix of all sequences, before the first turn
    ids: list[list[int]]  # per step: all tokens from the start to its last
    written: list[tuple[int, int]]  # per step: (begin, end) of the ids that the agent wrote


def turns_of(tree: ReasoningTree, tokenizer: Tokenizer) -> Turns:
    """Tokenises a tree of messages.

    A step on several paths takes its ids from the first; the template must render it the same on all of them.

    Raises ValueError, naming the problem and message, if the template fails, refuses the messages or leaves out their
    text, or the tokenizer is not a tokenizer.json.
    """
    if not isinstance(tokenizer, JsonTokenizer):
        raise ValueError(f"{_name(tree)}: trajectories need a tokenizer.json; convert the tokenizer to one")
    chat = _chat_of(tokenizer)
    place_of = {node: j for j, node in enumerate(tree.steps)}
    ids: list[list[int]] = [[]] * len(place_of)
    written = [(0, 0)] * len(place_of)
    start = None
    specials = tokenizer.specials
    parents = [node.parent for node in tree.nodes]
    for chain in chains_of(tree):
        path = path_to(chain[-1], parents)
        if all(ids[place_of[node]] for node in chain):
            continue
        messages, nodes = messages_of(tree, path), nodes_of_messages(tree, path)
        try:
            tools, guard = list(tree.tools), ""
            if specials is not None and (guard := _guard(messages, tools, specials)):
                messages, tools = (_guarded(values, specials, guard) for values in (messages, tools))
            rendered = render_turns(chat, messages, tools)
            for text in rendered:
                _check_whole(text, messages, tools)
                places = [_places(tree, nodes[k], messages[k], text, begin, end) for k, begin, end in text.turns]
                cuts = [cut for of_message in places for cut in of_message]
                whole, count_K = encode_at(tokenizer, text.text, cuts, guard)
                counts = iter(count_K)
                for k, _, _ in text.turns:
                    at = next(counts)
                    start = at if start is None else min(start, at)
                    for node in nodes[k]:
                        end = next(counts)
                        if not ids[place_of[node]]:
                            ids[place_of[node]], written[place_of[node]] = whole[:end], (at, end)
                        at = end
        except ValueError as error:
            raise ValueError(f"{_name(tree)}: {error}") from None
    return Turns(list(os.path.commonprefix(ids))[: start or 0], ids, written)  # it takes lists of any items


def least_tokens(tree: ReasoningTree, tokenizer: JsonTokenizer) -> int:
    """Returns the token count of the path with the most messages, rendered once. Raises like `turns_of`.

    It is a lower bound on the longest chain, so that over-long records are refused before all turns are rendered.
    """
    parents = [node.parent for node in tree.nodes]
    path = max((path_to(chain[-1], parents) for chain in chains_of(tree)), key=len)
    chat = _chat_of(tokenizer)
    try:
        rendered = render_turns(chat, messages_of(tree, path), list(tree.tools), last=True)
    except ValueError as error:
        raise ValueError(f"{_name(tree)}: {error}") from None
    return sum(len(tokenizer.encode_offsets(text.text)[0]) for text in rendered)


def _chat_of(tokenizer: JsonTokenizer) -> ChatTemplate:
    bos = None if tokenizer.bos is None else tokenizer.inner.id_to_token(tokenizer.bos)
    return tokenizer.chat or ChatTemplate(OWN_TEMPLATE, (("bos_token", bos),) if bos else ())


def encode_at(
    tokenizer: JsonTokenizer, text: str, places: Sequence[int], guard: str = ""
) -> tuple[list[int], list[int]]:
    """Returns the ids of a rendered text, and the token count before each character offset in `places`.

    Special tokens are parsed unless `guard`, a character that is removed, splits their name.
    """
    ids, starts, at = [], [], 0
    for piece in text.split(guard) if guard else [text]:
        piece_ids, offsets = tokenizer.encode_offsets(piece)
        ids += piece_ids
        starts += [at + offset for offset in offsets]
        at += len(piece) + len(guard)
    return ids, [bisect.bisect_left(starts, place) for place in places]


def _name(tree: ReasoningTree) -> str:
    return f"problem {tree.problem[:60]!r}"


def _places(
    tree: ReasoningTree, nodes: Sequence[int], message: Mapping[str, Any], rendered: Rendered, begin: int, end: int
) -> list[int]:
    """Returns the character offsets at which a turn begins and each of its steps ends."""
    if len(nodes) == 1:
        return [begin, end]
    text, content = rendered.text[begin:end], message["content"] or ""
    thoughts = (message.get("reasoning_content") or "").strip()
    after = text.find(thoughts) + len(thoughts) if thoughts else 0
    at = text.find(content.strip(), after)
    if at < 0:
        raise ValueError("the chat template rewrites a turn's content, so that steps inside it are not found in it")
    at -= len(content) - len(content.lstrip())
    places = [begin]
    for node in nodes[:-1]:
        at += len(tree.nodes[node].text)
        places.append(begin + len(text[: max(at, 0)].rstrip()))
    return [*places, end]


def _check_whole(rendered: Rendered, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError if a template leaves out thoughts, content, calls or tools."""
    for tool in tools:
        name = tool.get("function", tool)["name"]
        if name not in rendered.text:
            raise ValueError(f"tools: the chat template leaves out {name!r}. Write the tools into the first message")
    for k, begin, end in rendered.turns:
        text = rendered.text[begin:end]
        for field in ("reasoning_content", "content"):
            value = (messages[k].get(field) or "").strip()
            if value and value not in text and "</think" not in value:  # templates move tags that are in the content
                raise ValueError(f"messages[{k}].{field}: the chat template leaves it out or rewrites it")
        for call in messages[k].get("tool_calls") or ():
            name = call.get("function", call)["name"]
            if name not in text:
                remedy = "Write the calls into `content`"
                raise ValueError(f"messages[{k}].tool_calls: the chat template leaves out {name!r}. {remedy}")


# ------------------------------------------------------ tool results are data: they must not inject control tokens


def _guard(messages: Sequence[Mapping[str, Any]], tools: Sequence, specials: re.Pattern) -> str:
    """Returns a character that does not occur in the messages, to split special-token names; "" if not needed."""
    text = json.dumps([messages, tools], ensure_ascii=False)
    if not specials.search(text):
        return ""
    used = set(text)
    guards = (guard for code in (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE)) if (guard := chr(code)) not in used)
    if not (guard := next(guards, "")):
        raise ValueError("messages: use all private characters of Unicode and a special token. Remove one of them")
    return guard


def _guarded(value: Any, specials: re.Pattern, guard: str) -> Any:
    """Inserts the guard after the first character of every special-token name in a JSON value."""
    if isinstance(value, str):
        return specials.sub(lambda match: match[0][0] + guard + match[0][1:], value)
    if isinstance(value, Mapping):
        return {key: _guarded(inner, specials, guard) for key, inner in value.items()}
    return [_guarded(inner, specials, guard) for inner in value] if isinstance(value, list) else value
