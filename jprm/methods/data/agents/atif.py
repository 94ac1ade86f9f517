"""ATIF, Harbor's Agent Trajectory Interchange Format: reads trajectories, and writes scores back into documents.

A document has `steps` by the system, the user and the agent. An agent's step is a turn; the results of its calls follow
it. `scored` writes each turn's score to `extra.jprm` of its step, and a description of the scorer to the document's own
`extra.jprm`. All other bytes stay as they are.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jprm.io import jsonl
from jprm.io.jsonl import RecordError, list_of, number_of, object_of, text_of
from jprm.io.storage import path_of
from jprm.methods.data.agents.logs import kept, tools_of, trajectory_of
from jprm.methods.data.agents.parts import Leftovers, SessionOptions
from jprm.methods.data.reader import LeftOut, Reader, Record, object_in, take
from jprm.methods.messages.messages import call_of, text_of_parts

VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(9))
"""Supported versions; each only adds fields to the one before."""

KEY = "jprm"
"""jprm's key in `extra` of steps and documents."""

_AGENTS_ONLY = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")


def parse_atif(item: Any, where: str, options: SessionOptions) -> Iterator[Record | LeftOut]:
    """Yields a document's trajectory, then its subagents' trajectories.

    The message of a step is its text; a system or user step without one has its results alone. Call results become tool
    messages; results without a call, and results in system or user steps, become user messages. A result that only
    refers to a subagent's trajectory is skipped. The outcome is in the document's `extra`, under the first key of
    OUTCOMES (`kept`), or else `total_reward` or `reward`; `extra` may also have `problem` and `answer`. A turn keeps
    the `mc_return` and `reward` of its step, plus the rewards of the environment steps after it (as google/tunix writes
    them). `session_id`, `trajectory_id` and `agent` (`name`, `version`, `model_name`) are kept, and the document's
    `tools`. Last come counts of skipped parts.

    Raises RecordError if a document is not of ATIF-v1.0 to v1.8, or a step, call or result is invalid, e.g.
    misnumbered.
    """
    left = Leftovers(options)
    for document, field in _documents(item, where, ""):
        yield _trajectory(document, where, field, left)
    yield from left


def _documents(item: Any, where: str, field: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yields a document and all nested ones, each with its field path."""
    document = object_of(item, where, field or "record", "Write an ATIF document.")
    yield document, field and field + "."
    inside = document.get("subagent_trajectories")
    for i, inner in enumerate(list_of(inside if inside is not None else [], where, field + "subagent_trajectories")):
        place = f"{field and field + '.'}subagent_trajectories[{i}]"
        if not isinstance(object_of(inner, where, place, "Write an ATIF document.").get("trajectory_id"), str):
            raise RecordError(where, place + ".trajectory_id", "is not there", "A document inside another needs one.")
        yield from _documents(inner, where, place)


def _trajectory(document: Mapping[str, Any], where: str, field: str, left: Leftovers) -> Record:
    version = take(document, "schema_version", str, where, field)
    if version not in VERSIONS:
        remedy = f"{VERSIONS[0]} to {VERSIONS[-1]} are read."
        raise RecordError(where, field + "schema_version", f"is {version!r}", remedy)
    about = {key: take(document, f"agent.{key}", str, where, field) for key in ("name", "version")}
    if isinstance(model := document["agent"].get("model_name"), str):
        about["model_name"] = model
    tools = list_of(document["agent"].get("tool_definitions") or [], where, field + "agent.tool_definitions")
    messages: list[Record] = []
    first, turn = 1, None
    for i, step in enumerate(take(document, "steps", list, where, field)):
        place = f"{field}steps[{i}]"
        step = object_of(step, where, place, "Write a step's object.")
        step_id = step.get("step_id")
        first = 0 if i == 0 and step_id == 0 else first  # google/tunix counts from 0
        if step_id != i + first or isinstance(step_id, bool):
            raise RecordError(where, place + ".step_id", f"is {step_id!r}", f"Steps count from {first}: {i + first}.")
        new = _messages(step, where, place, left)
        messages += new
        turn = new[0] if new and new[0]["role"] == "assistant" else turn
        _keep_rewards(step, turn, where, place)
    ids = {key: document[key] for key in ("session_id", "trajectory_id") if isinstance(document.get(key), str)}
    extra = kept(object_in(document, "extra"), where)
    outcome = {key: value for key, value in extra.items() if key in ("outcome", "problem", "answer")}
    reward = next((key for key in ("total_reward", "reward") if document.get(key) is not None), None)
    if reward is not None and "outcome" not in outcome:
        outcome["outcome"] = number_of(document[reward], where, field + reward)
    return trajectory_of({**ids, "agent": about, **outcome, "messages": messages, **tools_of(tools, where)}, where)


def _keep_rewards(step: Mapping[str, Any], turn: Record | None, where: str, place: str) -> None:
    """Adds a step's rewards to its own turn, or else to the last turn before it."""
    rewards = {key: number_of(step[key], where, f"{place}.{key}") for key in ("reward", "mc_return")
               if step.get(key) is not None}  # fmt: skip
    if rewards and turn is None:
        if any(rewards.values()):
            raise RecordError(where, place, f"has {', '.join(rewards)} before any turn", "Rewards follow a turn.")
    elif turn is not None:
        for key, value in rewards.items():
            turn[key] = turn.get(key, 0) + value


def _messages(step: Mapping[str, Any], where: str, place: str, left: Leftovers) -> list[Record]:
    """Returns a step's message, followed by the messages in its observation."""
    source = step.get("source")
    if source not in ("system", "user", "agent"):
        raise RecordError(where, place + ".source", f"is {source!r}", "Use system, user or agent.")
    for key in _AGENTS_ONLY:
        if source != "agent" and step.get(key) is not None:
            raise RecordError(where, f"{place}.{key}", f"is of the {source}", "Only the agent's steps have it.")
    text = text_of_parts(left.plain(step.get("message")), where, place + ".message")
    message: Record = {"role": "assistant" if source == "agent" else source, "content": text}
    if (thoughts := step.get("reasoning_content")) is not None:
        message["reasoning_content"] = text_of(thoughts, where, place + ".reasoning_content", blank=True)
    calls, ids = [], {}
    for j, call in enumerate(list_of(step.get("tool_calls") or [], where, place + ".tool_calls")):
        within = f"{place}.tool_calls[{j}]."
        ids[call_id := take(call, "tool_call_id", str, where, within)] = None
        calls.append(call_of(take(call, "function_name", str, where, within),
                             take(call, "arguments", dict, where, within), call_id))  # fmt: skip
    message |= {"tool_calls": calls} if calls else {}
    results = list(_results(step.get("observation"), ids, where, place + ".observation", left))
    texts = [result["content"] for result in results]
    if source != "agent" and (not text or texts == [text] or texts and text == str(texts)):
        return results  # google/tunix writes the text of an observation as its step's message too
    return [message, *results]


def _results(observation: Any, ids: Mapping[str, None], where: str, place: str, left: Leftovers) -> Iterator[Record]:
    if observation is None:
        return
    for j, result in enumerate(take(observation, "results", list, where, place + ".")):
        within = f"{place}.results[{j}]"
        result = object_of(result, where, within, "Write a result's object.")
        call_id, content = result.get("source_call_id"), result.get("content")
        if call_id is None and content is None and result.get("subagent_trajectory_ref"):
            continue  # a reference to a subagent's trajectory, not a message
        if call_id is not None and ids and not (isinstance(call_id, str) and call_id in ids):
            reason = f"is {call_id!r}, and the step calls {', '.join(map(repr, ids))}"
            raise RecordError(where, within + ".source_call_id", reason, "Name the call that the result answers.")
        text = left.text(content, where, within + ".content")
        if not ids:
            yield {"role": "user", "content": text}
        else:
            yield {"role": "tool", "content": text, **({} if call_id is None else {"tool_call_id": call_id})}


# ------------------------------------------------------------------------------ documents with scores, byte for byte


def is_atif(path: str | os.PathLike) -> bool:
    """Whether a file, plain or gzip, has an ATIF `schema_version` in its first MiB.

    Raises OSError if it cannot be read, and ValueError for damaged gzip.
    """
    with path_of(path).reading() as file, jsonl.unzipped(file, path) as content:
        return _VERSION.search(content.read(1 << 20)) is not None


_VERSION = re.compile(rb'"schema_version"\s*:\s*"ATIF')


def _text_of_file(path: str | os.PathLike) -> str:
    with path_of(path).reading() as file, jsonl.unzipped(file, path) as content:
        raw = content.read()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        where = f"{os.fspath(path)}:{raw.count(chr(10).encode(), 0, error.start) + 1}"
        raise RecordError(where, "line", "is not UTF-8", "Write the file in UTF-8.") from None


def documents(text: str, where: str) -> list[tuple[int, int]]:
    """Returns each document's offsets in a text, [begin, end) in characters: one, several in a row, or a list.

    `where` names the file in errors. Raises RecordError, with the line, if the text is not JSON or has no document.
    """
    at, spans = _skip(text, 0), []
    listed = text.startswith("[", at)
    at = _skip(text, at + listed)
    while at < len(text) and not (listed and text[at] == "]"):
        try:
            end = _DECODER.raw_decode(text, at)[1]
        except (ValueError, RecursionError) as error:
            remedy = "Write whole documents: one, one a line, or a list of them."
            line = text.count("\n", 0, at) + 1
            raise RecordError(f"{where}:{line}", "line", f"is not JSON: {error}", remedy) from None
        spans.append((at, end))
        at = _skip(text, end)
        if listed and text.startswith(",", at):
            at = _skip(text, at + 1)
    if not spans:
        raise RecordError(where, "line", "is no document", "Write one ATIF document, one a line, or a list of them.")
    if listed and (at >= len(text) or _skip(text, at + 1) < len(text)):
        raise RecordError(where, "line", "is no whole list", "Write one list, from [ to ].")
    return spans


def records_of(path: str | os.PathLike) -> list[list[Record]]:
    """Returns the trajectories of each document in a file, plain or gzip: its own, then its subagents'.

    Images become placeholders. Raises RecordError, with the line, if a document is invalid, and OSError if the file
    cannot be read.
    """
    text, records = _text_of_file(path), []
    line, seen = 1, 0
    for begin, end in documents(text, os.fspath(path)):
        line, seen = line + text.count("\n", seen, begin), begin
        where = f"{os.fspath(path)}:{line}"
        parsed = parse_atif(jsonl.parse(text[begin:end].encode(), where), where, SessionOptions())
        records.append([record for record in parsed if isinstance(record, dict)])
    return records


def scored(path: str | os.PathLike, trajectories: Sequence[Sequence[Record]], about: Mapping[str, Any]) -> str:
    """Returns the text of an ATIF file with scores inserted as `extra.jprm`; earlier scores are replaced.

    An agent's step gets the `score` and `outputs` of its turn, if it has them, and each document gets `about`, a JSON
    object that describes the scorer. `trajectories` must be the result of `records_of` with scores added, one list per
    document. The file itself is not changed.

    Raises RecordError if the file is invalid, ValueError if the counts of documents differ or a score is NaN, and
    OSError if it cannot be read.
    """
    text = _text_of_file(path)
    edits: list[tuple[int, int, str]] = []
    for (begin, _), records in zip(documents(text, os.fspath(path)), trajectories, strict=True):
        _score(text, begin, iter(records), about, edits)
    pieces, at = [], 0
    for begin, end, new in sorted(edits):
        pieces += text[at:begin], new
        at = end
    return "".join([*pieces, text[at:]])


def _score(text: str, at: int, records: Iterator[Record], about: Mapping[str, Any], edits: list) -> None:
    """Appends the edits for the document at offset `at`, and for its nested documents."""
    turns = (message for message in next(records)["messages"] if message["role"] == "assistant")
    members = {key: begin for key, begin, _ in _members(text, at)}
    for _, begin, _ in _members(text, members["steps"]):
        source = next(text[a:b] for key, a, b in _members(text, begin) if key == "source")
        if json.loads(source) == "agent":
            turn = next(turns)
            edits.append(_edit(text, begin, {key: turn[key] for key in ("score", "outputs") if key in turn}))
    edits.append(_edit(text, at, about))
    if (inside := members.get("subagent_trajectories")) is not None and text[inside] == "[":
        for _, begin, _ in _members(text, inside):
            _score(text, begin, records, about, edits)


def _edit(text: str, at: int, value: Mapping[str, Any]) -> tuple[int, int, str]:
    """Returns the edit (begin, end, new text) that sets `extra.jprm` of the object at offset `at`."""
    dumped = json.dumps(value, ensure_ascii=False, allow_nan=False)
    members = list(_members(text, at))
    extra = next(((begin, end) for key, begin, end in members if key == "extra"), None)
    if extra is None:
        return _appended(text, at, members, f'"extra": {{"{KEY}": {dumped}}}')
    if text[extra[0]] != "{":  # null
        return (*extra, f'{{"{KEY}": {dumped}}}')
    inner = list(_members(text, extra[0]))
    old = next(((begin, end) for key, begin, end in inner if key == KEY), None)
    return (*old, dumped) if old else _appended(text, extra[0], inner, f'"{KEY}": {dumped}')


def _appended(text: str, at: int, members: Sequence[tuple[str, int, int]], new: str) -> tuple[int, int, str]:
    """Returns the edit that appends a member to an object, spaced like its last one."""
    if not members:
        return at + 1, at + 1, new
    before = members[-2][2] if len(members) > 1 else at
    before = text.index(",", before) + 1 if len(members) > 1 else before + 1
    end = members[-1][2]
    return end, end, "," + text[before : _skip(text, before)] + new


_DECODER = json.JSONDecoder()


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _members(text: str, at: int) -> Iterator[tuple[str, int, int]]:
    """Yields (key, begin, end) for each value of the object or list at offset `at`; list elements have the key ""."""
    keyed, key, at = text[at] == "{", "", _skip(text, at + 1)
    while text[at] not in "}]":
        if keyed:
            key, at = _DECODER.raw_decode(text, at)
            at = _skip(text, _skip(text, at) + 1)  # the colon
        end = _DECODER.raw_decode(text, at)[1]
        yield key, at, end
        at = _skip(text, end)
        at = _skip(text, at + 1) if text[at] == "," else at


ATIF = Reader(
    parse_atif,
    SessionOptions,
    drops="metrics, times, token ids, extra of steps and results, and notes. `jprm score` keeps them in its output",
)
