"""Trajectories of coding agents: SWE-agent and mini-swe-agent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jprm.io.jsonl import RecordError, list_of, object_of
from jprm.methods.data.agents.logs import kept, run_of
from jprm.methods.data.agents.parts import Leftovers, SessionOptions
from jprm.methods.data.reader import LeftOut, Reader, Record, object_in, take


def parse_swe_agent(item: Any, where: str, options: SessionOptions) -> Iterator[Record | LeftOut]:
    """Yields a SWE-agent trajectory (`.traj`) from its `history`.

    A demonstration becomes a user message. `environment`, and `exit_status` and `submission` of `info`, are kept, and
    `id`, `problem`, `answer`, `semantics` and the outcome (`kept`). Last come counts of skipped parts.

    Raises RecordError if the item has another form, and `Dropped` if the agent has no turn.
    """
    messages, left = [], Leftovers(options)
    for i, message in enumerate(take(item, "history", list, where)):
        field = f"history[{i}]"
        message = object_of(message, where, field, "Write a message's object.")
        role, content = take(message, "role", str, where, field + "."), message.get("content")
        text = None if content is None else left.text(content, where, field + ".content")
        if message.get("is_demo"):
            messages.append({"role": "user", "content": text or ""})
            continue
        record: Record = {"role": role, "content": text}
        record |= {key: message[key] for key in ("tool_calls", "thinking_blocks") if message.get(key)}
        if role == "tool":
            ids = list_of(message.get("tool_call_ids") or [], where, field + ".tool_call_ids")
            record["tool_call_id"] = ids[0] if ids else None
        messages.append(record)
    info = object_in(item, "info")
    about = {key: info[key] for key in ("exit_status", "submission") if key in info}
    about |= {"environment": item["environment"]} if "environment" in item else {}
    yield run_of({**kept(item, where), **about, "messages": messages}, where)
    yield from left


def parse_mini_swe_agent(item: Any, where: str, options: SessionOptions) -> Iterator[Record | LeftOut]:
    """Yields a mini-swe-agent trajectory (`.traj.json`, versions 1 and 2).

    The final message of version 2 has the role exit and is left out, since no model reads it. `instance_id`, and
    `exit_status` and `submission` of `info`, are kept, and `id`, `problem`, `answer`, `semantics` and the outcome
    (`kept`). Last come counts of skipped parts.

    Raises RecordError if the item has another form, and `Dropped` if the agent has no turn.
    """
    messages, left = [], Leftovers(options)
    for i, message in enumerate(take(item, "messages", list, where)):
        field = f"messages[{i}]"
        message = object_of(message, where, field, "Write a message's object.")
        if "role" not in message:
            remedy = 'Items of the Responses API are read by `openai`: give it {"input": [...]}.'
            raise RecordError(where, field + ".role", "is not there", remedy)
        if message["role"] != "exit":
            message = {key: value for key, value in message.items() if key not in ("extra", "timestamp")}
            messages.append({**message, "content": left.plain(message.get("content"))})
    info = object_in(item, "info")
    about = {key: info[key] for key in ("exit_status", "submission") if key in info}
    about |= {"instance_id": item["instance_id"]} if "instance_id" in item else {}
    yield run_of({**kept(item, where), **about, "messages": messages}, where)
    yield from left


SWE_AGENT = Reader(
    parse_swe_agent,
    SessionOptions,
    drops="trajectory (states, times and queries), replay_config and statistics of info; of a message its thought and"
    " action, which its content holds",
)
MINI_SWE_AGENT = Reader(
    parse_mini_swe_agent,
    SessionOptions,
    drops="extra of messages (times, costs, raw responses), config and statistics of info",
)
