"""Trees of messages as token ids: renders a chat template as the agent saw it, and finds the end of each step.

The ids of a turn equal the result of transformers' `apply_chat_template` on the messages up to it. With most templates,
the text up to a turn is a prefix of the whole text, so all turns of a path share one sequence. Some templates rewrite
earlier text (Qwen3 drops earlier thoughts, Mistral moves the system message to the last user message). Then a turn gets
its own sequence, as the agent saw it. Common prefixes of sequences are computed once, like those of branches.

A step's score is read at the last token of its text; for a whole turn, at the token that ends the assistant's message.

A run longer than the model's context is read in overlapping windows (`windows_of`), each turn scored in one of them.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jprm.io.jsonl import shortened
from jprm.methods.formats.chat_template import OWN_TEMPLATE, ChatTemplate, Rendered, render_turns
from jprm.methods.messages.records import messages_of, nodes_of_messages
from jprm.token_tree import Written
from jprm.tokenizer import JsonTokenizer, Layout, Tokenizer
from jprm.tree import ReasoningTree, above_of, chains_of, path_to


def written_messages(tree: ReasoningTree, layout: Layout, context: int | None = None) -> Written:
    """Prepares the steps in a tree of messages for `jprm.token_tree.token_tree`.

    The chunk of a step begins with the context since the previous step. If its ids do not continue those of the
    previous step, because the template rewrote earlier text or a window begins, the step starts a separate chain from
    the root. A trajectory beyond `context` tokens, if given, is read in windows.

    Steps are ordered like `tree.steps`; spans are those of `Turns.written`. Waits for the template's process.

    Raises ValueError if the layout is for chains, the tokenizer is not a tokenizer.json, or the chat template fails or
    leaves out a message's text.
    """
    if not layout.turns:
        reason = "is a trajectory, and the model reads chains in a layout of its own"
        raise ValueError(f"{_name(tree)}: {reason}. Use a model that was trained on trajectories")
    turns, above, steps = _turns_within(tree, layout.tokenizer, context), above_of(tree), tree.steps
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


def turns_of(tree: ReasoningTree, tokenizer: Tokenizer | JsonTokenizer) -> Turns:
    """Tokenises a tree of messages by the tokenizer's chat template, or jprm's own; waits for the template's process.

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


# ---- Runs beyond the context: windows that begin with the run's head.

_MARKS = 8
"""Estimated tokens that a template writes around a message. Estimates only choose a window; its text is counted."""

_SHORTEST_RESULT = 200
"""Characters below which a tool result is not cut."""


@dataclasses.dataclass(frozen=True)
class RunWindow:
    """A part of a trajectory that is read at once: the head, repeated turns, and the turns scored here."""

    tree: ReasoningTree  # a trajectory by itself
    turns: Turns
    repeated: int  # of its first steps, which an earlier window scores


def windows_of(tree: ReasoningTree, tokenizer: JsonTokenizer, context: int) -> Iterator[RunWindow]:
    """Yields the windows of a trajectory that is longer than `context` tokens; each step is scored in exactly one.

    A window has the head (tools, and all messages before the first turn), then the last turns of the window before it
    that fill at most half of the rest, at least one, then as many new turns as fit. If a new turn does not even fit
    behind one turn, the tool results in its window are cut in the middle, to a limit in characters that is halved from
    the longest result until the turn fits or the limit is below `_SHORTEST_RESULT`.

    Repeated turns are text alone: a layer over steps (`model.steps`) does not see their ends.

    Lazy. Raises ValueError like `turns_of`. A turn that does not fit is yielded too long, so its ids exceed `context`.
    """
    everything = range(len(tree.nodes))
    groups = nodes_of_messages(tree, everything)
    turns = [k for k, group in enumerate(groups) if tree.nodes[group[0]].is_step]
    sizes = [_MARKS + _estimate(tokenizer, message) for message in messages_of(tree, everything)]
    begins = [0, *itertools.accumulate(sizes)]  # of each message, in tokens of the run
    room = context - begins[turns[0]] - _estimate(tokenizer, {"tools": list(tree.tools)})
    first = 0
    while first < len(turns):
        for start, stop, limit in _attempts(tree, groups, turns, begins, room, first):
            shown = [*range(turns[0]), *range(turns[start], turns[stop - 1] + 1)]
            part = _part(tree, [node for k in shown for node in groups[k]], limit)
            read = turns_of(part, tokenizer)
            ends = [*itertools.accumulate(len(groups[k]) for k in turns[start:stop])]  # of each turn, in steps
            fits = [len(read.ids[end - 1]) <= context for end in ends[first - start :]]
            if fits[0]:
                break
        new = len([*itertools.takewhile(bool, [True, *fits[1:]])])
        steps = ends[first - start + new - 1]
        part = _part(part, range(part.steps[steps - 1] + 1))
        yield RunWindow(part, Turns(read.problem, read.ids[:steps], read.written[:steps]), ([0] + ends)[first - start])
        first += new


def _attempts(
    tree: ReasoningTree, groups: Sequence[Sequence[int]], turns: Sequence[int], begins: Sequence[int], room: int,
    first: int,
) -> Iterator[tuple[int, int, int]]:  # fmt: skip
    """Yields (first turn shown, one past the last, limit of tool results or 0) until a window fits.

    The first is by estimates. If it does not fit, `first` alone is tried behind fewer turns, then with cut results.
    """
    start = max(first - 1, 0)
    while start and begins[turns[first - 1] + 1] - begins[turns[start - 1]] <= room / 2:
        start -= 1
    stop = first + 1
    while stop < len(turns) and begins[turns[stop] + 1] - begins[turns[start]] <= room:
        stop += 1
    yield start, stop, 0
    for later in range(start, max(first, 1)):
        yield later, first + 1, 0
    shown = [tree.nodes[i] for group in groups[turns[max(first - 1, 0)] : turns[first]] for i in group]
    limit = max((len(node.text) for node in shown if node.role == "tool"), default=0) // 2
    while limit >= _SHORTEST_RESULT:
        yield max(first - 1, 0), first + 1, limit
        limit //= 2


def _part(tree: ReasoningTree, nodes: Sequence[int], limit: int = 0) -> ReasoningTree:
    """Returns the trajectory of some nodes; a positive `limit` cuts tool results in the middle, in characters."""
    kept = [dataclasses.replace(tree.nodes[node], parent=i - 1) for i, node in enumerate(nodes)]
    if limit:
        kept = [dataclasses.replace(node, text=shortened(node.text, limit)) if node.role == "tool" else node
                for node in kept]  # fmt: skip
    return dataclasses.replace(tree, nodes=tuple(kept))


def _estimate(tokenizer: JsonTokenizer, message: Mapping[str, Any]) -> int:
    """Returns about as many tokens as a template writes of a message, or of {"tools": [...]}."""
    data = [message[key] for key in ("tool_calls", "tools") if message.get(key)]
    texts = [message.get(key) or "" for key in ("reasoning_content", "content")]
    return sum(len(tokenizer.encode_offsets(text)[0]) for text in (*texts, *map(json.dumps, data)))


def _turns_within(tree: ReasoningTree, tokenizer: Tokenizer, context: int | None) -> Turns:
    """Returns the turns' ids, each within the context if windows can bring it about."""
    if context is None or tree.kind != "trajectory" or not isinstance(tokenizer, JsonTokenizer):
        return turns_of(tree, tokenizer)
    long = sum(len(node.text) for node in tree.nodes) > context  # in characters: all texts are rendered only if few
    if not (long and least_tokens(tree, tokenizer) > context):
        turns = turns_of(tree, tokenizer)
        if max(map(len, turns.ids)) <= context:
            return turns
    windows = list(windows_of(tree, tokenizer, context))
    ids = [ids for window in windows for ids in window.turns.ids[window.repeated :]]
    written = [span for window in windows for span in window.turns.written[window.repeated :]]
    return Turns(list(os.path.commonprefix([window.turns.problem for window in windows])), ids, written)


def least_tokens(tree: ReasoningTree, tokenizer: JsonTokenizer) -> int:
    """Returns the token count of the path with the most messages, rendered once up to its last turn.

    It is a lower bound on the longest chain, so that over-long records are refused before all turns are rendered.
    Raises ValueError if the chat template fails or refuses the messages.
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

    Offsets must be in [0, len(text)], counted with the guards. Special tokens are parsed unless `guard`, a character
    that is removed, splits their name; "" for no guard.
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
