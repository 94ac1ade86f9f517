"""Sends the scores of trajectories to an OpenTelemetry server (Phoenix, Langfuse, a collector) as evaluation events.

    pip install opentelemetry-proto opentelemetry-sdk    # Ray, if it is there, needs both or neither
    python examples/send_scores.py scored.jsonl http://127.0.0.1:6006/v1/traces
    python examples/send_scores.py scored.jsonl https://cloud.langfuse.com/api/public/otel/v1/traces \
        --header "Authorization=Basic $KEY"

`scored.jsonl` holds trajectories that `jprm score` wrote: every assistant message has a `score`. Each turn becomes a
span with the event `gen_ai.evaluation.result`. A record with `trace_id` and `span_id` (as `jprm prepare otel` keeps
them) gets spans below its own; other records become a new trace. Ids are digests of the record, so a record that is
sent again replaces itself.

One record is one POST. It counts as sent only if the server answers 200 with an ExportTraceServiceResponse that rejects
no span. A redirect, a login page or a partial success is an error, which names the line to continue from.
"""

import argparse
import hashlib
import http.client
import json
import sys
import time
import urllib.parse

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

TYPE = "application/x-protobuf"
LIMIT, SECONDS = 65_536, 20  # bytes of an answer, and seconds for it


def spans_of(record, begin):
    """Returns (trace id, spans) of a scored trajectory; `begin` is its time in nanoseconds."""
    messages = record["messages"]
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    trace, above = record.get("trace_id") or digest[:32], record.get("span_id") or ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("score") is None:
            continue
        span = hashlib.sha256(f"{digest} {i}".encode()).hexdigest()[:16]
        yield trace, span, message.get("span_id") or above, f"turn at message {i}", begin + i, message["score"]


def request_of(record, begin):
    request = service.ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    resource.resource.attributes.add(key="service.name").value.string_value = "jprm"
    scope = resource.scope_spans.add()
    for trace, id, above, name, at, score in spans_of(record, begin):
        span = scope.spans.add(name=name, start_time_unix_nano=at, end_time_unix_nano=at + 1)
        span.trace_id, span.span_id = bytes.fromhex(trace), bytes.fromhex(id)
        span.parent_span_id = bytes.fromhex(above)
        event = span.events.add(name="gen_ai.evaluation.result", time_unix_nano=at)
        event.attributes.add(key="gen_ai.evaluation.name").value.string_value = "process_reward"
        event.attributes.add(key="gen_ai.evaluation.score.value").value.double_value = score
    if not scope.spans:
        raise ValueError("holds no scored turn; give a file that `jprm score` wrote")
    return request.SerializeToString()


def post(url, body, headers):
    """Sends one request. Raises ValueError unless the server took every span."""
    to = urllib.parse.urlsplit(url)
    kind = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}[to.scheme]
    connection = kind(to.netloc, timeout=SECONDS)
    try:
        connection.request("POST", to.path or "/", body, {"Content-Type": TYPE, **headers})
        answer, until, content = connection.getresponse(), time.monotonic() + SECONDS, b""
        while (part := answer.read1(LIMIT)) and len(content) <= LIMIT and time.monotonic() < until:
            content += part
    finally:
        connection.close()
    if answer.status != 200:
        raise ValueError(f"the server answers {answer.status}, not 200")
    if answer.headers.get_content_type() != TYPE or part:
        raise ValueError(f"the answer is {answer.headers.get_content_type()}, not an ExportTraceServiceResponse")
    rejected = service.ExportTraceServiceResponse.FromString(content).partial_success
    if rejected.rejected_spans:
        raise ValueError(f"the server rejected {rejected.rejected_spans} spans: {rejected.error_message!r}")


def main():
    parser = argparse.ArgumentParser(description="Sends the scores of trajectories to an OpenTelemetry server.")
    parser.add_argument("input", help="scored trajectories, JSON Lines")
    parser.add_argument("url", help="address for traces, e.g. http://127.0.0.1:6006/v1/traces")
    parser.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="e.g. an API key")
    parser.add_argument("--start", type=int, default=1, metavar="LINE", help="the first line to send")
    options = parser.parse_args()
    headers, begin, sent = dict(pair.split("=", 1) for pair in options.header), time.time_ns(), 0
    with open(options.input, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if number < options.start or not line.strip():
                continue
            try:
                post(options.url, request_of(json.loads(line), begin), headers)
            except (OSError, ValueError, KeyError, DecodeError, http.client.HTTPException) as error:
                where = f"{options.input}:{number}: {type(error).__name__}: {error}"
                sys.exit(f"{where}\n{sent} records were sent. Continue with --start {number}")
            sent += 1
    print(f"{sent} records sent to {options.url}")


if __name__ == "__main__":
    main()
