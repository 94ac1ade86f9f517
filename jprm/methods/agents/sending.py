"""Scores sent to where traces are kept: OpenTelemetry's spans with evaluation events, and Langfuse's scores.

    send("otlp", "scored.jsonl", "sent.jsonl", "http://127.0.0.1:6006/v1/traces")
    send("langfuse", "sent.jsonl", "kept.jsonl", "https://cloud.langfuse.com")

One trajectory is one request. Once the server has taken it, it is written to the output with the ids of its trace and
of its turns' spans. So the output holds what was sent: a server that is down loses nothing, and the same command sends
the rest. Ids are digests of the trajectory, and times are those of the input file: what is sent twice has the same ids.

A score is the event `gen_ai.evaluation.result` of OpenTelemetry's semantic conventions for generative AI. Where the
record names its trace (`trace_id` and `span_id`, as logs read by `otel` do, and each message's own `span_id`), a turn's
event is on a span `evaluate` below the span that is judged. Other trajectories become a trace: a span for the whole
of it, and below it one for each turn with what was said since the turn before.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any, NamedTuple

import jprm
from jprm.io.jsonl import RecordError, dump, shortened
from jprm.io.outputs import Bar, continued, cut, finish, input_of, stored_request
from jprm.io.storage import path_of
from jprm.methods.messages.records import as_messages, content_of, trajectories_of
from jprm.tree import read_records, tree_of

SCORE = "process_reward"
"""The name of a step's score."""

LOWEST = "process_reward.lowest"
"""The name of a trajectory's lowest score."""

EVENT = "gen_ai.evaluation.result"

MILLISECOND = 1_000_000
"""In nanoseconds, and how long a span is said to last: records have no times, and servers order spans by them."""


class Turn(NamedTuple):
    """A turn of the agent: what it read since the turn before, what it said, and its scores, one a step."""

    index: int  # of its message
    read: Sequence[Mapping[str, Any]]
    said: Mapping[str, Any]
    scores: Sequence[float]
    span: str  # hexadecimal id of the span that it is at the server, "" where that is not known


class Trace(NamedTuple):
    """A scored trajectory with the ids that it has at the server."""

    record: Mapping[str, Any]
    turns: Sequence[Turn]
    id: str
    known: bool  # whether the server has it: the record names it
    model: str  # that gave the scores, "" where that is not known
    time: int  # nanoseconds since 1970

    @property
    def lowest(self) -> tuple[float, int]:
        """The lowest score, and the index of its message."""
        return min((min(turn.scores), turn.index) for turn in self.turns)

    def span(self, name: str) -> str:
        """Returns the id of a span that is sent for this trace."""
        return _digest(self.id, self.model, dump(self.record), name)[:16]

    def sent(self) -> dict[str, Any]:
        """Returns the record with the ids of its trace and of its turns' spans."""
        messages = [dict(message) for message in self.record["messages"]]
        for turn in self.turns:
            messages[turn.index] |= {"span_id": turn.span} if turn.span else {}
        ids = {} if self.known else {"trace_id": self.id, "span_id": self.span("whole")}
        return {**self.record, **ids, "messages": messages}


Sender = Callable[[Trace], None]
"""Sends one trajectory. Raises OSError with the server's reason where it was not taken."""


def send(kind: str, input: str | os.PathLike, output: str | os.PathLike, to: str) -> str:
    """Sends the scores of a file; returns a sentence that reports how many trajectories were sent.

    Args:
      kind: `otlp` or `langfuse`.
      input: what `jprm score` wrote. Of pools and trees each path is a trajectory.
      output: the trajectories that the server has, with their ids. Continued where an earlier call was stopped.
      to: the address: of OTLP's traces, or of Langfuse.

    Raises:
      RecordError: a trajectory without scores, or for Langfuse without a trace; nothing is sent.
      OSError: the server did not take a trajectory. All that it took is kept.
    """
    if not re.match(r"https?://[^/]", to):
        raise ValueError(f"{to}: is no address: write http://HOST:PORT/PATH or https://HOST/PATH")
    sender = SENDERS[kind](to)
    total = sum(1 for _ in traces_of(input, known=kind == "langfuse"))
    request = {"send": kind, "to": to, **input_of(input)}
    with continued(output, request) as part:
        if part is None:
            return f"{output}: all {total} trajectories were sent before"
        done = sent_before = cut(part, 1)
        with Bar(f"sending to {to}", total, sent_before) as bar:
            for trace in islice(traces_of(input), sent_before, None):
                try:
                    sender(trace)
                except OSError as error:
                    reason = shortened(" ".join(str(error).split()), 300)
                    sent = f"{done} of {total} trajectories are sent; the same command sends the rest"
                    raise OSError(f"{to}: did not take trajectory {done}: {reason}. {sent}") from None
                part.write(dump(trace.sent()).encode() + b"\n")
                part.flush()
                done += 1
                bar.add()
        finish(part, path_of(output), request)
    return f"{output}: {done - sent_before} trajectories sent" + (
        f" ({sent_before} were sent before)" if sent_before else ""
    )


def traces_of(path: str | os.PathLike, known: bool = False) -> Iterator[Trace]:
    """Yields the scored trajectories of a file.

    Raises RecordError for one without scores, and with `known` for one that names no trace.
    """
    model = stored_request(path).get("model")
    model, time = model if isinstance(model, str) else "", int(path_of(path).modified() * 1e9)
    for number, record in enumerate(read_records(path), start=1):
        where = f"{os.fspath(path)}: record {number}"
        for i, whole in enumerate(trajectories_of(as_messages(tree_of(record, where)))):
            trace = _hex(whole.get("trace_id") or whole.get("traceId"), 32, where, "trace_id")
            if known and not trace:
                remedy = "Langfuse keeps a score with a trace: send the trajectories first, `jprm send otlp`, and give"
                raise RecordError(where, "trace_id", "is not there", remedy + " its output here.")
            identity = trace or _digest(dump(whole), model, str(number), str(i))[:32]
            yield Trace(whole, _turns(whole, identity, bool(trace), where), identity, bool(trace), model, time)


def _turns(record: Mapping[str, Any], trace: str, known: bool, where: str) -> list[Turn]:
    turns, since = [], 0
    messages = record["messages"]
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        scores = message.get("scores") or [message.get("score")]
        if any(score is None for score in scores):
            raise RecordError(where, f"messages[{i}].score", "is not there", "Send a file that `jprm score` wrote.")
        span = message.get("span_id")
        if known and span is None and i == last:  # the span of a call holds the conversation up to its answer
            span = record.get("span_id") or record.get("spanId")
        span = _hex(span, 16, where, f"messages[{i}].span_id")
        span = span if known else _digest(trace, "turn", str(i))[:16]
        turns.append(Turn(i, messages[since:i], message, scores, span))
        since = i + 1
    return turns


def _hex(value: Any, digits: int, where: str, field: str) -> str:
    """Returns an id in lower case, "" for none."""
    if value is None:
        return ""
    if not isinstance(value, str) or not re.fullmatch(rf"[0-9a-fA-F]{{{digits}}}", value) or not int(value, 16):
        raise RecordError(where, field, f"is {value!r}", f"OpenTelemetry's ids are {digits} hexadecimal digits.")
    return value.lower()


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------ OpenTelemetry


def otlp(to: str) -> Sender:
    """Returns what sends trajectories by OTLP over HTTP, with the headers and the resource of OpenTelemetry's own
    environment variables (`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_RESOURCE_ATTRIBUTES`)."""
    http: Any = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    exporter = http.OTLPSpanExporter(endpoint=to)

    def sender(trace: Trace) -> None:
        with _Heard("opentelemetry") as heard:
            result = exporter.export(spans_of(trace))
        if result.name != "SUCCESS":
            raise OSError(heard.first or "no reason was given")

    return sender


class _Heard(logging.Handler):
    """Keeps the first warning of a library that logs why it failed, and shows none."""

    def __init__(self, name: str):
        super().__init__(logging.WARNING)
        self.logger, self.first = logging.getLogger(name), ""

    def emit(self, record: logging.LogRecord) -> None:
        self.first = self.first or record.getMessage().rstrip(".")

    def __enter__(self) -> _Heard:
        self.propagated, self.logger.propagate = self.logger.propagate, False
        self.logger.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.logger.removeHandler(self)
        self.logger.propagate = self.propagated


def spans_of(trace: Trace) -> list[Any]:
    """Returns the spans (`opentelemetry.sdk.trace.ReadableSpan`) that tell a trajectory's scores."""
    names = ("sdk.resources", "sdk.trace", "sdk.util.instrumentation", "trace")
    resources, sdk, instrumentation, api = (importlib.import_module(f"opentelemetry.{name}") for name in names)

    def context(span: str) -> Any:
        return api.SpanContext(int(trace.id, 16), int(span, 16), is_remote=False, trace_flags=api.TraceFlags(1))

    def span(name: str, id: str, above: str, start: int, length: int, about: dict, events: Sequence[dict]) -> Any:
        begin = trace.time + start * MILLISECOND
        end = begin + length * MILLISECOND
        return sdk.ReadableSpan(
            name, context(id), context(above) if above else None, resource, about,
            [sdk.Event(EVENT, event, end) for event in events],
            start_time=begin, end_time=end, instrumentation_scope=scope,
        )  # fmt: skip

    resource = resources.Resource.create({} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "jprm"})
    scope = instrumentation.InstrumentationScope("jprm", jprm.__version__)
    lowest, at = trace.lowest
    whole = _event(LOWEST, lowest, trace.model, at)
    n = len(trace.turns)
    if trace.known:
        above = trace.record.get("span_id") or trace.record.get("spanId") or ""
        spans = [
            span("evaluate", trace.span(str(turn.index)), turn.span or above, i, 1, {}, _events(turn, trace.model))
            for i, turn in enumerate(trace.turns)
        ]
        return [*spans, span("evaluate", trace.span("lowest"), above, n, 1, {}, [whole])]
    about: dict[str, Any] = {"gen_ai.operation.name": "invoke_agent"}
    if isinstance(outcome := trace.record.get("outcome"), int | float):
        about["jprm.outcome"] = outcome
    root = trace.span("whole")
    spans = [span("trajectory", root, "", 0, n, about, [whole])]
    for i, turn in enumerate(trace.turns):
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.input.messages": json.dumps([_parts(message) for message in turn.read], ensure_ascii=False),
            "gen_ai.output.messages": json.dumps([_parts(turn.said)], ensure_ascii=False),
        }
        spans.append(span(f"turn {i + 1}", turn.span, root, i, 1, attributes, _events(turn, trace.model)))
    return spans


def _events(turn: Turn, model: str) -> list[dict[str, Any]]:
    events = [_event(SCORE, score, model, turn.index) for score in turn.scores]
    return events if len(events) < 2 else [event | {"jprm.step": i} for i, event in enumerate(events)]


def _event(name: str, score: float, model: str, index: int) -> dict[str, Any]:
    about = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": score, "jprm.message": index}
    return about | ({"jprm.scored_by": model} if model else {})


def _parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message in the form of OpenTelemetry's conventions, as the reader `otel` reads it."""
    text = content_of(message)
    if message["role"] == "tool":
        parts = [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": text}]
        return {"role": "tool", "parts": parts}
    parts = []
    if thought := message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": thought})
    if text:
        parts.append({"type": "text", "content": text})
    for call in message.get("tool_calls") or ():
        of_call = {"name": call["function"]["name"], "arguments": call["function"].get("arguments")}
        parts.append({"type": "tool_call", "id": call.get("id"), **of_call})
    end = {"finish_reason": "tool_call" if message.get("tool_calls") else "stop"}
    return {"role": message["role"], "parts": parts, **(end if message["role"] == "assistant" else {})}


# ----------------------------------------------------------------------------------------------------- Langfuse

AT_ONCE = 100
"""Scores in one request."""


def langfuse(to: str) -> Sender:
    """Returns what adds scores to traces that Langfuse has, with the keys of its own environment variables.

    A step's score is on its turn's observation where that is known, and on the trace otherwise.
    """
    keys = [os.environ.get(name) for name in ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY")]
    if not all(keys):
        raise ValueError(f"{to}: set LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY in the environment")
    names = ("langfuse.api.client", "langfuse.api.core", "httpx")
    api, core, httpx = (importlib.import_module(name) for name in names)
    account = {"username": keys[0], "password": keys[1], "x_langfuse_public_key": keys[0]}
    client = api.LangfuseAPI(base_url=to.rstrip("/"), **account)

    def sender(trace: Trace) -> None:
        scores = scores_of(trace)
        for begin in range(0, len(scores), AT_ONCE):
            try:
                answer = client.scores.create(request=scores[begin : begin + AT_ONCE])
            except (core.ApiError, httpx.HTTPError) as error:
                raise OSError(str(error) or type(error).__name__) from None
            if getattr(answer, "rejected", 0):
                raise OSError(f"{answer.rejected} scores rejected, the first because {answer.errors[0].message}")

    return sender


def scores_of(trace: Trace) -> list[Any]:
    """Returns the scores (`langfuse.api.scores.CreateScoreRequest`) of a trajectory's steps, and the lowest of them."""
    types, commons = (importlib.import_module(f"langfuse.api.{name}") for name in ("scores", "commons"))
    time = datetime.fromtimestamp(trace.time / 1e9, UTC)

    def score(name: str, value: float, span: str, key: str, **about: Any) -> Any:
        about |= {"scored_by": trace.model} if trace.model else {}
        return types.CreateScoreRequest(
            id=trace.span(key), trace_id=trace.id, observation_id=span or None, name=name, value=value,
            data_type=commons.ScoreDataType.NUMERIC, metadata=about, timestamp=time,
        )  # fmt: skip

    scores = [
        score(SCORE, value, turn.span, f"{turn.index} {step}", message=turn.index, step=step)
        for turn in trace.turns
        for step, value in enumerate(turn.scores)
    ]
    lowest, at = trace.lowest
    return [*scores, score(LOWEST, lowest, "", "lowest", message=at)]


SENDERS: dict[str, Callable[[str], Sender]] = {"otlp": otlp, "langfuse": langfuse}
