"""Scores sent as spans of OpenTelemetry and scores of Langfuse: what servers receive, and what waits for them."""

import base64
import contextlib
import http.server
import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.request

import pytest
from refusing import refused

from jprm.io.jsonl import RecordError, write_records
from jprm.methods.agents.sending import send, traces_of
from jprm.methods.data.readers import find
from jprm.tree import read_records

CALL = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": {"q": "where"}}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALL], "score": 0.9},
    {"role": "tool", "tool_call_id": "c1", "content": "Here."},
    {"role": "assistant", "content": "There.", "score": 0.25},
]
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
RECORDS = [
    {"messages": MESSAGES, "outcome": 0},
    {"messages": MESSAGES, "outcome": 1, "trace_id": TRACE, "span_id": SPAN},
    {"problem": "1 + 1 + 1?", "steps": ["1 + 1 = 2.", "2 + 1 = 4."], "scores": [0.8, 0.1]},
]


@contextlib.contextmanager
def server(answer):
    """Yields the address of a server and the bodies that it took; `answer(number of the request)` is (status, body)."""
    taken, asked = [], []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, said = answer(len(asked))
            asked.append(self.path)
            if status < 300:
                taken.append(body)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{served.server_port}", taken
        finally:
            served.shutdown()


def otlp_json(body):
    """Returns an export as OTLP's JSON has it."""
    proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="needs `otlp`")
    from google.protobuf.json_format import MessageToDict

    item = MessageToDict(proto.ExportTraceServiceRequest.FromString(body))
    for span in spans(item):
        for key in ("traceId", "spanId", "parentSpanId"):
            if key in span:  # protobuf's JSON has base64, OTLP's hexadecimal digits
                span[key] = base64.b64decode(span[key]).hex()
    return item


def spans(item):
    return [span for a in item["resourceSpans"] for b in a["scopeSpans"] for span in b["spans"]]


def attributes(span):
    return {attribute["key"]: next(iter(attribute["value"].values())) for attribute in span["attributes"]}


@pytest.fixture
def scored(tmp_path):
    write_records(tmp_path / "scored.jsonl", RECORDS)
    return tmp_path / "scored.jsonl"


def test_a_server_receives_every_turn_with_its_score(scored, tmp_path):
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra `otlp`")
    with server(lambda n: (200, b"")) as (url, taken):
        send("otlp", scored, tmp_path / "sent.jsonl", url + "/v1/traces")
    whole, known, chain = map(otlp_json, taken)

    names = [span["name"] for span in spans(whole)]
    assert names == ["trajectory", "turn 1", "turn 2"]
    root = spans(whole)[0]["spanId"]
    assert [span.get("parentSpanId") for span in spans(whole)] == [None, root, root]
    values = [
        [(attributes(e)["gen_ai.evaluation.name"], attributes(e)["gen_ai.evaluation.score.value"]) for e in s["events"]]
        for s in spans(whole)
    ]
    lowest = ("process_reward.lowest", 0.25)
    assert values == [[lowest], [("process_reward", 0.9)], [("process_reward", 0.25)]]

    first, second = map(attributes, spans(whole)[1:])  # what jprm itself reads of such spans
    before = [json.loads(first[f"gen_ai.{key}.messages"]) for key in ("input", "output")]
    before = [*before[0], *before[1], *json.loads(second["gen_ai.input.messages"])]
    item = {"attributes": {**second, "gen_ai.input.messages": before}}
    reader = find("otel")
    (record,) = reader.parse(item, "f", reader.options())
    bare = [{key: value for key, value in message.items() if key != "score"} for message in MESSAGES]
    assert record["messages"] == bare

    assert {span["traceId"] for span in spans(known)} == {TRACE}
    assert [span["parentSpanId"] for span in spans(known)] == [SPAN] * 3

    steps = spans(chain)[1]["events"]
    assert [attributes(e)["gen_ai.evaluation.score.value"] for e in steps] == [0.8, 0.1]

    sent = list(read_records(tmp_path / "sent.jsonl"))
    assert [score["trace_id"] for score in sent] == [spans(item)[0]["traceId"] for item in (whole, known, chain)]
    assert [m["span_id"] for m in sent[0]["messages"] if "score" in m] == [s["spanId"] for s in spans(whole)[1:]]


def test_what_a_server_refused_is_sent_by_the_next_call(scored, tmp_path):
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra `otlp`")
    output = tmp_path / "sent.jsonl"
    with server(lambda n: (200, b"") if n != 1 else (400, b"full")) as (url, taken):
        refused(OSError, "1 of 3 trajectories are sent", send, "otlp", scored, output, url)
        assert not output.exists() and len(taken) == 1
        send("otlp", scored, output, url)
        assert len(taken) == 3
        send("otlp", scored, output, url)
        assert len(taken) == 3
        send("otlp", scored, tmp_path / "twice.jsonl", url)
    ids = [[(span["traceId"], span["spanId"], span["startTimeUnixNano"]) for span in spans(otlp_json(request))]
           for request in taken]  # fmt: skip
    assert ids[:3] == ids[3:]


def test_langfuse_receives_scores_of_traces_that_it_has(scored, tmp_path, monkeypatch):
    pytest.importorskip("langfuse", reason="needs the extra `langfuse`")
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", "pk")
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk")
    write_records(tmp_path / "known.jsonl", [RECORDS[1], RECORDS[1] | {"trace_id": "1" * 32}])
    partly = json.dumps({"accepted": 2, "rejected": 1, "errors": [{"message": "no such trace"}]}).encode()
    answers = [(202, b'{"message": "Accepted"}'), (207, partly), (202, b'{"message": "Accepted"}')]
    with server(lambda n: answers[n]) as (url, taken):
        with pytest.raises(OSError, match="no such trace. 1 of 2"):
            send("langfuse", tmp_path / "known.jsonl", tmp_path / "sent.jsonl", url)
        send("langfuse", tmp_path / "known.jsonl", tmp_path / "sent.jsonl", url)
    first, rejected, again = map(json.loads, taken)
    assert rejected == again
    wanted = [("process_reward", 0.9, None), ("process_reward", 0.25, SPAN), ("process_reward.lowest", 0.25, None)]
    assert [(score["name"], score["value"], score.get("observationId")) for score in first] == wanted
    assert {score["traceId"] for score in first} == {TRACE} and len({score["id"] for score in first}) == 3


@pytest.mark.parametrize(
    "record, known, field",
    [
        ({"messages": [MESSAGES[1], {"role": "assistant", "content": "Hm."}], "outcome": 1}, False, "score"),
        ({"messages": MESSAGES, "trace_id": "12"}, False, "trace_id"),
        ({"messages": MESSAGES, "trace_id": "0" * 32}, False, "trace_id"),
        ({"messages": MESSAGES, "trace_id": TRACE, "span_id": "xy"}, False, "span_id"),
        ({"messages": MESSAGES}, True, "trace_id"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_anything_is(tmp_path, record, known, field):
    write_records(tmp_path / "f.jsonl", [RECORDS[1], record])
    with pytest.raises(RecordError, match="record 2") as error:
        list(traces_of(tmp_path / "f.jsonl", known))
    assert field in error.value.field


@pytest.mark.slow
def test_phoenix_shows_the_trace_and_the_scores(scored, tmp_path):
    """A real Phoenix on loopback: `phoenix` on the path, or as JPRM_PHOENIX says."""
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra `otlp`")
    phoenix = os.environ.get("JPRM_PHOENIX") or shutil.which("phoenix")
    if not phoenix:
        pytest.skip("the package arize-phoenix is not installed, and JPRM_PHOENIX names no `phoenix`")
    with socket.socket() as first, socket.socket() as second:
        ports = [bound.getsockname()[1] for bound in (first, second) if bound.bind(("127.0.0.1", 0)) is None]
    of_server = {"WORKING_DIR": tmp_path / "phoenix", "HOST": "127.0.0.1", "PORT": ports[0], "GRPC_PORT": ports[1],
                 "TELEMETRY_ENABLED": "false"}  # fmt: skip
    environment = os.environ | {f"PHOENIX_{name}": str(value) for name, value in of_server.items()}
    url = f"http://127.0.0.1:{ports[0]}"
    with (
        open(tmp_path / "log", "wb") as log,
        subprocess.Popen([phoenix, "serve"], env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            _wait(lambda: urllib.request.urlopen(url + "/healthz", timeout=5).status == 200)
            send("otlp", scored, tmp_path / "sent.jsonl", url + "/v1/traces")
            send("otlp", scored, tmp_path / "again.jsonl", url + "/v1/traces")
            _wait(lambda: len(_spans(url)) >= 8)
            held = _spans(url)
            assert len(held) == 8  # 3 of the first, 3 below a span that it does not have, 2 of the chain
            events = [event["attributes"] for span in held for event in span["events"]]
            scores = [e["gen_ai.evaluation.score.value"] for e in events]
            assert sorted(scores) == [0.1, 0.1, 0.25, 0.25, 0.25, 0.25, 0.8, 0.9, 0.9]
            turn = next(span for span in held if span["name"] == "turn 2")
            assert turn["span_kind"] == "LLM"
            assert turn["attributes"]["llm.output_messages.0.message.content"] == "There."
            if chromium := shutil.which("chromium"):
                trace = next(read_records(tmp_path / "sent.jsonl"))["trace_id"]
                with urllib.request.urlopen(url + "/v1/projects") as response:
                    project = json.load(response)["data"][0]["id"]
                page = f"{url}/projects/{project}/traces/{trace}"
                options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
                command = [chromium, *options, "--dump-dom", page]
                shown = subprocess.run(command, capture_output=True, timeout=120).stdout
                assert b"turn 1" in shown and b"turn 2" in shown
        finally:
            process.terminate()


def _spans(url):
    with urllib.request.urlopen(url + "/v1/projects/default/spans?limit=100") as response:
        return json.load(response)["data"]


def _wait(ready, seconds=90):
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if ready():
                return
        assert time.monotonic() < until, "Phoenix did not answer"
        time.sleep(0.5)
