"""examples/send_scores.py: a record counts as sent only if the server took every span of it."""

import http.server
import json
import subprocess
import sys
import threading

import pytest
from families import breadth

service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="needs `parity`")

MESSAGES = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "I look.", "score": 0.9},
    {"role": "tool", "content": "Here."},
    {"role": "assistant", "content": "There.", "score": 0.25},
]
KNOWN = {"trace_id": "0af7651916cd43dd8448eb211c80319c", "span_id": "b7ad6b7169203331"}
TAKEN = (200, {"Content-Type": "application/x-protobuf"}, b"")
REJECTED = service.ExportTraceServiceResponse()
REJECTED.partial_success.rejected_spans = 2


@pytest.fixture
def server():
    """A server that answers `server.answers` in turn; `server.bodies` holds the requests."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.server.bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            status, headers, body = self.server.answers.pop(0)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": len(body)}.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        served.answers, served.bodies = [], []
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield served
        served.shutdown()


def send(server, path, records, *options):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    command = [sys.executable, "examples/send_scores.py", str(path), url, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_send_scores_gives_each_turn_a_span_below_its_trace(server, tmp_path):
    server.answers = [TAKEN, TAKEN]
    run = send(server, tmp_path / "f.jsonl", [{"messages": MESSAGES, **KNOWN}, {"messages": MESSAGES}])
    assert run.returncode == 0, run.stderr
    known, new = (service.ExportTraceServiceRequest.FromString(body) for _, body in server.bodies)
    spans = known.resource_spans[0].scope_spans[0].spans
    assert [span.trace_id.hex() for span in spans] == [KNOWN["trace_id"]] * 2
    assert [span.parent_span_id.hex() for span in spans] == [KNOWN["span_id"]] * 2
    assert [span.events[0].attributes[1].value.double_value for span in spans] == [0.9, 0.25]
    (trace,) = {span.trace_id for span in new.resource_spans[0].scope_spans[0].spans}
    assert len(trace) == 16


@pytest.mark.parametrize("answer", [
    (301, {"Location": "/elsewhere"}, b""),
    *breadth([((status, {"Location": "/elsewhere"}, b""),) for status in (302, 307)]),
    (200, {"Content-Type": "application/x-protobuf"}, REJECTED.SerializeToString()),
    *breadth([
        ((200, {"Content-Type": "text/html"}, b"<html>login</html>"),),
        ((200, {"Content-Type": "application/x-protobuf"}, b"\xff\xff"),),
        ((202, {"Content-Type": "application/x-protobuf"}, b""),),
        ((503, {}, b""),),
    ]),
])  # fmt: skip
def test_send_scores_stops_at_a_record_that_the_server_did_not_take(server, tmp_path, answer):
    server.answers = [TAKEN, answer, TAKEN]
    records = [{"messages": MESSAGES, "n": n} for n in range(2)]
    run = send(server, tmp_path / "f.jsonl", records)
    assert run.returncode == 1 and "f.jsonl:2:" in run.stderr and "--start 2" in run.stderr
    assert {path for path, _ in server.bodies} == {"/v1/traces"}  # no redirect was followed
    assert send(server, tmp_path / "f.jsonl", records, "--start", "2").returncode == 0


def test_send_scores_refuses_a_record_without_scores(server, tmp_path):
    run = send(server, tmp_path / "f.jsonl", [{"messages": MESSAGES[:1]}])
    assert run.returncode == 1 and "jprm score" in run.stderr and not server.bodies
