"""Logs of inspect-ai: JSON (`.json`), and its own `.eval` format, which requires the package."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

from jprm.io.folders import local_copy
from jprm.io.jsonl import RecordError, list_of, number_of, object_of, without_doubles
from jprm.methods.data.agents.logs import tools_of, trajectory_of
from jprm.methods.data.agents.parts import Leftovers, SessionOptions
from jprm.methods.data.reader import LeftOut, Reader, Record, object_in, read_items
from jprm.methods.messages.messages import call_of


@dataclasses.dataclass(frozen=True)
class InspectOptions(SessionOptions):
    """Attributes:
    images: parts without text, e.g. images: `drop` inserts a placeholder such as "[image]", `error` rejects the item.
    score: the scorer that gives the outcome, e.g. `match`; required if a log has several.
    """

    score: str = ""


def parse_inspect(item: Any, where: str, options: InspectOptions) -> Iterator[Record | LeftOut]:
    """Yields the samples of an inspect-ai log, each with its score as the outcome.

    The scores C, P, I and N become 1, 0.5, 0 and 0. The target becomes the answer, or, if it has several texts, stays
    as `target`. All scores are kept as `rewards`, {scorer: value}; a value with keys becomes {scorer.key: value}. A
    score that is no number gives no outcome. A tool's error replaces its output, as in the messages that inspect-ai
    sends to the model. An item is a log with `samples`, or one sample. Samples without a turn are skipped; their count
    and those of other skipped parts come last.

    Raises RecordError if the log has no samples or another form, or `score` does not choose one of several scores.
    """
    item, left = object_of(item, where, "record", "Is this file of inspect-ai?"), Leftovers(options)
    inside = "messages" not in item
    if inside and not isinstance(item.get("samples"), list):
        raise RecordError(where, "samples", "are absent", "The log has its header alone: log samples too.")
    for i, sample in enumerate(item["samples"] if inside else [item]):
        field = f"samples[{i}]." if inside else ""
        sample = object_of(sample, where, field or "record", "Write a sample.")
        attachments = object_in(sample, "attachments")
        messages = [
            _message(_attached(message, attachments), where, f"{field}messages[{j}]", left)
            for j, message in enumerate(list_of(sample.get("messages"), where, field + "messages"))
        ]
        if not any(message["role"] == "assistant" for message in messages):
            left.skip("sample without a turn of the agent")
            continue
        record = {key: sample[key] for key in ("id", "epoch") if isinstance(sample.get(key), str | int)}
        record |= {"messages": messages, **_tools(sample, where, left), **_outcome(sample, options.score, where, field)}
        if target := sample.get("target"):
            target = target[0] if isinstance(target, list) and len(target) == 1 else target
            record |= {"answer" if isinstance(target, str) else "target": target}
        yield trajectory_of(record, where)
    yield from left


def _message(message: Any, where: str, field: str, left: Leftovers) -> Record:
    message = object_of(message, where, field, "Write a message.")
    content, error = message.get("content"), message.get("error", message.get("tool_error"))  # the older name
    if message.get("role") == "tool" and error:
        content = f"Error: {error.get('message') if isinstance(error, Mapping) else error}"
    record: Record = {"role": message.get("role"), "content": left.plain(content)}
    calls = list_of(message.get("tool_calls") or [], where, field + ".tool_calls")
    calls = (call for call in calls if isinstance(call, Mapping))
    if calls := [call_of(call.get("function"), call.get("arguments"), call.get("id")) for call in calls]:
        record["tool_calls"] = calls
    return record | {key: message[key] for key in ("tool_call_id", "reasoning") if message.get(key)}


def _attached(value: Any, attachments: Mapping[str, Any]) -> Any:
    """Resolves the `attachment://` references in a message."""
    if isinstance(value, Mapping):
        return {key: _attached(held, attachments) for key, held in value.items()}
    if isinstance(value, list):
        return [_attached(held, attachments) for held in value]
    prefix = "attachment://"
    return (
        attachments.get(value[len(prefix) :], value) if isinstance(value, str) and value.startswith(prefix) else value
    )


def _tools(sample: Mapping[str, Any], where: str, left: Leftovers) -> Record:
    """Returns the tools of the first model call that has any."""
    events = sample.get("events")
    for event in events if isinstance(events, list) else ():
        tools = event.get("tools") if isinstance(event, Mapping) and event.get("event") == "model" else None
        if isinstance(tools, list) and tools:
            return tools_of(tools, where, left)
    return {}


_VALUES = {"C": 1, "P": 0.5, "I": 0, "N": 0}


def _outcome(sample: Mapping[str, Any], name: str, where: str, field: str) -> Record:
    """Returns all scores as `rewards`, and the outcome: the named score, or the only one."""
    single = {"score": sample["score"]} if sample.get("score") is not None else {}  # logs of 2024
    scores = object_in(sample, "scores") or single
    rewards: Record = {}
    for scorer, score in scores.items():
        value = score.get("value") if isinstance(score, Mapping) else score
        values = {f"{scorer}.{key}": v for key, v in value.items()} if isinstance(value, Mapping) else {scorer: value}
        rewards |= {key: _VALUES.get(v, v) if isinstance(v, str) else v for key, v in values.items()}
    if name and name not in rewards:
        raise RecordError(where, field + "scores", f"has no {name!r}", f"Set score to one of {', '.join(rewards)}.")
    if not name and len(rewards) > 1:
        raise RecordError(where, field + "scores", f"has {', '.join(rewards)}", "Set score=NAME to choose the outcome.")
    chosen = rewards.get(name or next(iter(rewards), ""))
    if isinstance(chosen, str | list | None):
        return {"rewards": rewards} if rewards else {}
    value = int(chosen) if isinstance(chosen, bool) else number_of(chosen, where, field + "scores")
    return {"rewards": rewards, "outcome": value}


def read_logs(path: str | os.PathLike) -> Iterator[tuple[int, bytes]]:
    """Yields (number from 1, JSON) per log in a JSON file, or per sample in an `.eval` file.

    NaN and infinity become null. A file in a bucket is copied to this machine first. Raises RecordError if an `.eval`
    file cannot be read, e.g. because inspect-ai is not installed, FileNotFoundError if the file is missing, and
    ValueError for damaged gzip.
    """
    local = local_copy(path)
    if not zipfile.is_zipfile(local):
        yield from ((number, _without_nan(log)) for number, log in read_items(path))
        return
    remedy = f"Install inspect-ai, or write JSON with it: inspect log dump {os.fspath(path)} > log.json"
    try:
        log = importlib.import_module("inspect_ai.log")
        samples = log.read_eval_log_samples(os.fspath(local), all_samples_required=False, resolve_attachments=True)
        for number, sample in enumerate(samples, start=1):
            yield number, _without_nan(sample.model_dump_json(exclude_none=True).encode())
    except ImportError:
        raise RecordError(
            os.fspath(path), "file", "is an .eval file, and inspect-ai is not installed", remedy
        ) from None
    except Exception as error:  # of its own classes, of any kind
        raise RecordError(os.fspath(path), "file", f"cannot be read by inspect-ai: {error}", remedy) from error


def _without_nan(log: bytes) -> bytes:
    """Replaces NaN and infinity, inspect-ai's values for missing metrics and scores, by null."""
    if b"NaN" not in log and b"Infinity" not in log:
        return log
    try:
        return json.dumps(json.loads(log, parse_constant=lambda name: None, object_pairs_hook=without_doubles)).encode()
    except (ValueError, RecursionError):
        return log  # `jprm.io.jsonl.parse` will report the error


INSPECT = Reader(parse_inspect, InspectOptions, drops="events, stores, usage, times and the plan", items=read_logs)
