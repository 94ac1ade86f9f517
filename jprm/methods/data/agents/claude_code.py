"""Sessions of Claude Code, and its `stream-json` output. A session is a tree, stored in an append-only file.

A line names its parent (`parentUuid`, or `logicalParentUuid` after a compaction). The live chain leads from the newest
message back to the root; branches that the user has undone are off the chain. After a compaction the model reads a
summary instead of the earlier lines, so each part is a separate trajectory.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jprm.io.jsonl import list_of, type_name
from jprm.methods.data.agents.conversation import Conversation
from jprm.methods.data.agents.logs import messages_of_blocks, trajectories
from jprm.methods.data.agents.parts import Leftovers, SessionOptions
from jprm.methods.data.reader import Event, LeftOut, Reader, Record

Line = Mapping[str, Any]


def parse_claude_code(events: Sequence[Event], where: str, options: SessionOptions) -> Iterator[Record | LeftOut]:
    """Yields the trajectories in a session file, or in the output of `claude -p --output-format stream-json`.

    Such output may hold several sessions. Lines with the same `message.id` are one turn. A command queued while the
    agent works becomes a user message. A subagent's own file is also read as a trajectory. A record has `messages`,
    `problem`, `session` and (of several parts) `part`, from 0. Last come counts of skipped parts.

    Raises `Dropped` if the agent has no turn, and RecordError if the user has none either or a message has another
    form.
    """
    left = Leftovers(options)
    sessions = []
    for lines in _sessions(_session_lines(events, left)):
        names = (line.get(key) for _, line in reversed(lines) for key in ("sessionId", "session_id"))
        about = {"session": name} if (name := next(filter(None, names), None)) else {}
        sessions.append(([_conversation(part, left) for part in _Tree(lines).parts(left)], about))
    yield from trajectories(sessions, where, left, _CONTEXT)
    yield from left


def _sessions(lines: Sequence[tuple[str, Line]]) -> list[list[tuple[str, Line]]]:
    """Groups lines by `session_id`, which only `stream-json` writes. Other files hold one session."""
    key = next(filter(None, (line.get("session_id") for _, line in lines)), None)
    sessions: dict[Any, list[tuple[str, Line]]] = {key: []}
    for place, line in lines:
        key = line.get("session_id") or key
        sessions.setdefault(key, []).append((place, line))
    return list(sessions.values())


_CONTEXT = re.compile(
    r"(\s*<(system-reminder|ide_\w+)>.*?</\2>)*\s*"
    r"((Caveat: The messages below|\[Request interrupted|<local-command-|<command-name>|<bash-).*)?",
    re.DOTALL,
)
"""Text that Claude Code adds in the user's name: notes before a prompt, e.g. the file open in the editor, or a whole
message, e.g. for /clear or a shell command."""


def _session_lines(events: Sequence[Event], left: Leftovers) -> list[tuple[str, Line]]:
    """Returns the lines that are nodes of the session tree; counts lines without a message.

    A session of Claude Code on the web is one object with its lines in `loglines`.
    """
    lines: list[tuple[str, Any]] = []
    for place, value in events:
        inner = value.get("loglines") if isinstance(value, Mapping) else None
        lines += [(place, line) for line in inner] if isinstance(inner, list) else [(place, value)]
    for line in (line for _, line in lines if not isinstance(line, Mapping)):
        left.skip(f"line that is {type_name(line)}")
    lines = [(place, line) for place, line in lines if isinstance(line, Mapping)]
    alone = all(_is_subagent(line) for _, line in lines if isinstance(line.get("message"), Mapping))
    nodes = []
    for place, line in lines:
        if _is_subagent(line) and not alone:
            left.skip("line of a subagent")
            continue
        if not (_is_message(line) or _queued(line) or _is_boundary(line)):
            attachment = line.get("attachment")
            about = line.get("subtype") or (attachment.get("type") if isinstance(attachment, Mapping) else None)
            left.skip(f"line of type {line.get('type')!r}" + (f", {about}" if about else ""))
        if "uuid" in line or _is_message(line) or _queued(line):
            nodes.append((place, line))
    return nodes


def _is_subagent(line: Line) -> bool:
    return bool(line.get("isSidechain") or line.get("parent_tool_use_id"))


def _is_message(line: Line) -> bool:
    return isinstance(line.get("message"), Mapping) and line.get("type") in ("user", "assistant")


def _is_boundary(line: Line) -> bool:
    return line.get("type") == "system" and line.get("subtype") == "compact_boundary"


def _is_prompt(line: Line) -> bool:
    """Whether a line is a user message that answers no call."""
    return _is_message(line) and line["type"] == "user" and not _results(line)


def _is_injected(line: Line) -> bool:
    """Whether the program wrote this user message, e.g. to report the end of a background task."""
    origin = line.get("origin")
    kind = origin.get("kind") if isinstance(origin, Mapping) else None
    return bool(line.get("isMeta") or line.get("promptSource") == "system" or kind not in (None, "human"))


def _queued(line: Line) -> Any:
    """Returns the prompt, if the line is a queued-command attachment."""
    attachment = line.get("attachment")
    if line.get("type") != "attachment" or not isinstance(attachment, Mapping):
        return None
    return attachment.get("prompt") if attachment.get("type") == "queued_command" else None


def _response(line: Line) -> str | None:
    """Returns the `message.id`, if the line is an assistant's."""
    key = line["message"].get("id") if _is_message(line) and line["type"] == "assistant" else None
    return key if isinstance(key, str) else None


def _blocks(line: Line) -> Any:
    content = line["message"].get("content") if _is_message(line) else None
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def _results(line: Line) -> set[str]:
    """Returns the ids of the calls that a line answers."""
    blocks = _blocks(line) if line.get("type") == "user" else []
    blocks = [block for block in blocks if isinstance(block, Mapping)] if isinstance(blocks, list) else []
    kinds = [block for block in blocks if block.get("type") == "tool_result"]
    return {str(block.get("tool_use_id")) for block in kinds}


# ------------------------------------------------------------------------------------------------------- the live chain


class _Tree:
    """The lines of a session, their places in the file, and the links between them."""

    def __init__(self, lines: Sequence[tuple[str, Line]]) -> None:
        self.lines = [line for _, line in lines]
        self.places = [place for place, _ in lines]
        self.copies: dict[Any, list[int]] = collections.defaultdict(list)
        for i in range(len(lines)):
            self.copies[self._uuid(i)].append(i)
        self.linked = any(line.get("parentUuid") for line in self.lines)
        self.boundaries = [i for i, line in enumerate(self.lines) if _is_boundary(line)]
        self.messages = [i for i, line in enumerate(self.lines) if _is_message(line)]
        self.walls = [i for i, line in enumerate(self.lines) if line.get("isCompactSummary") and "uuid" not in line]

    def _uuid(self, i: int) -> Any:
        uuid = self.lines[i].get("uuid")
        return uuid if isinstance(uuid, str) else i

    def parts(self, left: Leftovers) -> Iterator[list[tuple[str, Line]]]:
        """Yields the live lines of each context, in order. If a uuid is repeated, its last copy is used."""
        live = self._with_siblings(self._chain())
        uuids = set(map(self._uuid, live))
        for i, line in enumerate(self.lines):
            if (_is_message(line) or _queued(line)) and self._uuid(i) not in uuids:
                left.skip("message off the live chain, e.g. undone by the user")
        part: dict[Any, int] = {}
        kept: list[int] = []
        for i in live:
            boundary = _is_boundary(self.lines[i])
            if boundary or (self.lines[i].get("isCompactSummary") and part):
                yield self._last_copies(part)
                part, kept = {}, self._preserved(i) if boundary else []
            if not boundary:
                part.setdefault(self._uuid(i), i)
            if self.lines[i].get("isCompactSummary"):
                part |= {self._uuid(j): j for j in kept}
        yield self._last_copies(part)

    def _last_copies(self, uuids: Mapping[Any, int]) -> list[tuple[str, Line]]:
        last = [self.copies[uuid][-1] for uuid in uuids]
        return [(self.places[i], self.lines[i]) for i in last]

    def _chain(self) -> list[int]:
        """Returns the indices of the lines from the root to the newest message.

        A copy of an old line at the end of the file is not new: the first copies decide.
        """
        messages = [i for i in self.messages if self.lines[i]["type"] == "assistant" or not _is_injected(self.lines[i])]
        at = max(messages, key=lambda i: (self.copies[self._uuid(i)][0], i), default=-1)
        chain, seen, visited = [], set(), set()
        while at >= 0 and at not in visited:
            visited.add(at)
            if self._uuid(at) not in seen:
                chain.append(at)
            seen.add(self._uuid(at))
            if _is_boundary(self.lines[at]):
                seen = set()  # the part before may hold the same lines as the one after it
                last = self.lines[at].get("logicalParentUuid")
                if self._before(last, at) < 0 <= (moved := self._copy(last, at)):  # written anew after the summary
                    chain.append(moved)
                    seen.add(last)
            at = self._under(at, self._parent(at))
        if self.linked and not any(self.lines[i].get("type") == "assistant" for i in chain):
            self.linked = False  # a root without a turn after it: the file has no links, or they are broken
            return self._chain()
        return chain[::-1]

    def _under(self, i: int, parent: int) -> int:
        """Returns the line before line i in its chain: its parent, or for a note the newest message before i.

        A note, e.g. a hook's progress or a retried request, may name an early line of its turn as its parent. If the
        message after that line is a prompt, the user undid the turn, and the note follows its parent.
        """
        newest = self.messages[bisect.bisect_left(self.messages, i) - 1] if self.messages else -1
        if self.lines[i].get("type") not in ("progress", "system") or not 0 <= parent < newest < i:
            return parent
        at = below = newest
        while at > parent:
            below = at if _is_message(self.lines[at]) else below
            at = above if (above := self._parent(at)) < at else -1
        return newest if at == parent and not _is_prompt(self.lines[below]) else parent

    def _before(self, uuid: Any, i: int) -> int:
        """Returns the index of the last line with this uuid before line i, or -1."""
        copies = self.copies.get(uuid, []) if isinstance(uuid, str) else []
        return copies[at - 1] if (at := bisect.bisect_left(copies, i)) else -1

    def _copy(self, uuid: Any, i: int) -> int:
        """Like `_before`, but falls back to the first copy after line i."""
        earlier = self._before(uuid, i)
        return earlier if earlier >= 0 or not isinstance(uuid, str) else self.copies.get(uuid, [-1])[0]

    def _parent(self, i: int) -> int:
        """Returns the index of a line's parent; -1 at a root.

        It is the last copy before the line, else the first after it. If the link is broken, it is the previous line.
        """
        line = self.lines[i]
        uuid = line.get("parentUuid") or line.get("logicalParentUuid")
        root = self.linked and "parentUuid" in line and _is_prompt(line) and not line.get("isCompactSummary")
        if uuid is None and root:
            return -1
        named = self._before(uuid, i) if _is_boundary(line) else self._copy(uuid, i)
        at = named if named not in (-1, i) else i - 1
        wall, boundary = (places[bisect.bisect_left(places, i) - 1] if places else -1
                          for places in (self.walls, self.boundaries))  # fmt: skip
        if at < wall < i:
            return wall
        if at < boundary < i and self._uuid(at) in map(self._uuid, self._preserved(boundary)):
            return next((j for j in range(boundary, i) if self.lines[j].get("isCompactSummary")), boundary)
        return at

    def _preserved(self, boundary: int) -> list[int]:
        """Returns the indices of messages that a compaction kept in the context."""
        about = self.lines[boundary].get("compactMetadata")
        about = about if isinstance(about, Mapping) else {}
        named, segment = about.get("preservedMessages"), about.get("preservedSegment")
        if isinstance(named, Mapping) and isinstance(named.get("uuids"), list):
            return [at for uuid in named["uuids"] if (at := self._copy(uuid, boundary)) >= 0]
        if not isinstance(segment, Mapping):
            return []
        head, at = (self._before(segment.get(key), boundary) for key in ("headUuid", "tailUuid"))
        places = []
        while at >= head >= 0:
            places.append(at)
            at = parent if (parent := self._parent(at)) < at else -1
        return places[::-1]

    def _with_siblings(self, chain: Sequence[int]) -> list[int]:
        """Adds lines beside the chain that the model read: parallel calls, their results, and queued commands."""
        on_chain = set(map(self._uuid, chain))
        answered = set().union(*(_results(self.lines[i]) for i in chain))
        children, responses = collections.defaultdict(list), collections.defaultdict(list)
        for i, line in enumerate(self.lines):
            if self._uuid(i) not in on_chain and i == self.copies[self._uuid(i)][-1]:
                children[str(line.get("parentUuid"))].append(i)
                responses[_response(line)].append(i)
        members = collections.defaultdict(list)
        for i in chain:
            members[_response(self.lines[i])].append(i)
        live: list[int] = []
        for i, after in itertools.zip_longest(chain, chain[1:]):
            live.append(i)
            key = _response(self.lines[i])
            undone = after is not None and _is_prompt(self.lines[after])  # a prompt stands where results would
            if key is not None and members[key][-1] == i and not undone:
                siblings = responses[key]
                below = [j for k in (*members[key], *siblings) for j in children[str(self._uuid(k))]]
                results = [j for j in below if (calls := _results(self.lines[j])) and not calls & answered]
                live += sorted({*siblings, *results})
            queued = [j for j in children[str(self._uuid(i))] if _queued(self.lines[j])]
            live += [j for j in queued if not children[str(self._uuid(j))] and (after is None or j < after)]
        return live


# --------------------------------------------------------------------------------------------- lines as a conversation


def _conversation(lines: Sequence[tuple[str, Line]], left: Leftovers) -> Conversation:
    conversation, read = Conversation(left=left), []
    for place, line in lines:
        if prompt := _queued(line):
            read.append((place, {"type": "user", "message": {"content": prompt}}))
        elif line.get("isVisibleInTranscriptOnly") and not line.get("isCompactSummary"):
            left.skip("message that only the person sees")
        elif _is_message(line) and (line.get("isApiErrorMessage") or line["message"].get("model") == "<synthetic>"):
            left.skip("error message of the program")
        elif _is_message(line):
            read.append((place, line))
    for i, ((place, line), blocks) in enumerate(zip(read, _merged(read), strict=True)):
        key: Any = _response(line) or i
        for event in messages_of_blocks(line["type"], blocks, place, "message.content", left):
            if event["role"] == "tool":
                conversation.answer(event.get("tool_call_id"), event["content"])
                key = (key, len(conversation)) if line["type"] == "assistant" else key
            elif event["role"] == "user":
                conversation.say("user", event["content"])
            else:
                conversation.write(key, event["content"], event.get("reasoning_content", ""))
                for call in event.get("tool_calls") or ():
                    conversation.write(key, call=call)
    return conversation


def _merged(lines: Sequence[tuple[str, Line]]) -> list[list[Any]]:
    """Returns the blocks per line; a block that several lines of a response repeat appears once.

    If one text begins with another, only the longer one stays: the shorter was a snapshot while the model wrote.
    """
    owners: dict[Any, tuple[int, Any]] = {}
    merged: list[list[Any]] = [[] for _ in lines]
    for i, (place, line) in enumerate(lines):
        for block in list_of(_blocks(line), place, "message.content"):
            response = _response(line)
            if response is None or not isinstance(block, Mapping):
                owners[i, len(owners)] = i, block
                continue
            kind = str(block.get("type"))
            named = block.get("id") if kind == "tool_use" else block.get(kind)  # a call, a text, a thought
            name = named if isinstance(named, str) and named else json.dumps(block, sort_keys=True)
            owners[response, kind, name] = owners.get((response, kind, name), (i, None))[0], block
    texts = sorted(key for key in owners if key[1] in ("text", "thinking"))
    for key, after in zip(texts, texts[1:], strict=False):
        if key[:2] == after[:2] and after[2].startswith(key[2]):
            del owners[key]
    for i, block in owners.values():
        merged[i].append(block)
    return merged


CLAUDE_CODE = Reader(
    parse_claude_code,
    SessionOptions,
    drops="lines that hold no message (titles, snapshots, files attached by the program), branches that the user has"
    " undone, subagents' turns inside a session, the program's own error messages, costs and times; the prompt of the"
    " system and the tools' schemas are not in the file",
    whole=True,
)
