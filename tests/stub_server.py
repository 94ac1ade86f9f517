"""A real HTTP server that follows a script and records its requests."""

import contextlib
import hashlib
import http.server
import json
import socket
import threading
import time


class Server(http.server.ThreadingHTTPServer):
    """Plays `script`, a function from (number of the request, its body) to what is done about it."""

    daemon_threads = True
    request_queue_size = 128  # a client's connections of one moment; those beyond would be refused

    def __init__(self, script, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.script, self.requests, self.times, self.headers = script, [], [], []
        self.lock, self.active, self.most_active = threading.Lock(), 0, 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request, client_address):  # a client that hung up is part of the test
        pass


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            number = len(server.requests)
            server.requests.append((self.path, body))
            server.times.append(time.monotonic())
            server.headers.append(dict(self.headers))
            server.active += 1
            server.most_active = max(server.most_active, server.active)
        try:
            action = server.script(number, body)
        finally:
            with server.lock:
                server.active -= 1
        if action is None:  # hang up
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        status, headers, content = action
        slow = isinstance(content, tuple)  # pieces, sent one by one
        pieces = content if slow else [content if isinstance(content, bytes) else json.dumps(content).encode()]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(sum(map(len, pieces))))
        self.end_headers()
        for piece in pieces:
            self.wfile.write(piece)
            time.sleep(0.05 * slow)

    def log_message(self, *args):
        pass


def reply(text, finish="stop", tokens=3, **choice):
    return (
        200,
        {},
        {"choices": [{"text": text, "finish_reason": finish, **choice}], "usage": {"completion_tokens": tokens}},
    )


@contextlib.contextmanager
def serving(script):
    """Yields a server that plays the script in a thread."""
    server = Server(script)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def completion(number: int, body: dict) -> tuple:
    """A policy's answer, which is a function of prompt and seed."""
    digit = hashlib.sha256(f"{body['prompt']}|{body['seed']}".encode()).digest()[0] % 4
    return reply(f"So it is {digit}.\n\nThe answer is \\boxed{{{digit}}}.", tokens=12)
