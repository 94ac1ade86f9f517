"""A server on this machine that speaks the Hugging Face Hub's calls, with the faults that a test asks it for."""

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading

from huggingface_hub.utils import build_hf_headers

COMMIT = "c" * 40


class LocalHub:
    """Repositories as {OWNER/NAME: {FILE: bytes}}, each with the branch `main` at `COMMIT`.

    `cut` names a file of which every answer stops half way, `damaged` one whose bytes differ from its digest. `asked`
    holds the requests, `tokens` what came as their Authorization, and `pushed` what was uploaded; `token` is what
    uploads were allowed by.

    `lies` replaces what is true: `sha` the commit of a branch, `headers` those of a file, `listing` a function of the
    list of files, `link` where its next page is, `pages` makes it endless, `body` the parts of a file's content or of
    any answer (`answer`), `slowly` apart (or `headers slowly`), `redirect` where every POST is sent to.
    """

    def __init__(self):
        self.repositories, self.asked, self.pushed, self.token = {}, [], {}, None
        self.cut = self.damaged = ""
        self.lies, self.tokens = {}, []

    def gets(self, path):
        """The files that were asked for in whole or part."""
        return [line for line in self.asked if line.startswith("GET") and line.endswith(path)]


def asked_what_asks(hub):
    """Has the library ask now what it asks once in a process, about programs that use it, and forgets that it did."""
    build_hf_headers()
    hub.asked.clear()
    hub.tokens.clear()


@contextlib.contextmanager
def serving(hub):
    """Yields the server's address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def answer(self, status, content=b"", **headers):
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            if "headers slowly" in hub.lies:
                self.drip(b"HTTP/1.1 200 OK\r\nX-Filler: " + b"x" * 60_000)
            if status == 200:
                content = hub.lies.get("answer", content)
            sent = {"Content-Length": str(len(content)), "Content-Type": "application/json"} | headers
            for name, value in sent.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.drip(content)

        def drip(self, content):
            if not (pause := hub.lies.get("slowly")):
                self.wfile.write(content)
                return
            with contextlib.suppress(OSError):  # who asked has gone
                for i in range(len(content)):
                    self.wfile.write(content[i : i + 1])
                    self.wfile.flush()
                    pause()

        def do_GET(self):
            hub.asked.append(f"{self.command} {self.path}")
            hub.tokens.append(self.headers.get("Authorization"))
            path = self.path.partition("?")[0]
            name = re.match(r"/(?:api/models/|api/resolve-cache/models/)?([^/]+/[^/]+)", path)[1]
            if name not in hub.repositories:
                return self.answer(404, X_Error_Code="RepoNotFound")
            files, revision = hub.repositories[name], re.search(r"/(?:revision|tree|resolve)/([^/]+)", path)
            if revision and revision[1] not in ("main", COMMIT):
                return self.answer(404, X_Error_Code="RevisionNotFound")
            if "/tree/" in path:
                listing = [listed(file, content) for file, content in files.items()]
                if "pages" in hub.lies:
                    hub.lies["link"] = f"http://{self.headers['Host']}{path}?cursor={len(hub.asked)}"
                link = {"Link": f'<{hub.lies["link"]}>; rel="next"'} if "link" in hub.lies else {}
                return self.answer(200, hub.lies.get("listing", lambda listing: listing)(listing), **link)
            if "/resolve/" in path:  # small files are elsewhere at the real Hub too
                there = f"/api/resolve-cache/models{path}".replace("/resolve/", "/")
                return self.answer(307, Location=there)
            if "/resolve-cache/" in path:
                return self.file(files, path.rpartition("/")[2])
            siblings = [{"rfilename": file} for file in files]
            sha = hub.lies.get("sha", COMMIT)
            return self.answer(200, {"id": name, "modelId": name, "sha": sha, "siblings": siblings})

        do_HEAD = do_GET

        def file(self, files, file):
            content = files[file]
            start = int(re.search(r"\d+", self.headers.get("Range", "bytes=0-"))[0])
            headers = {"ETag": f'"{listed(file, content)["etag"]}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if file == hub.damaged:
                content = content[:-1] + bytes([content[-1] ^ 1])
            headers |= {name: text.format(file=file) for name, text in hub.lies.get("headers", {}).items()}
            content = hub.lies.get("body", content)
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.send_response(206 if start else 200)
            for name, value in ({"Content-Length": str(len(content) - start)} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                end = (start + len(content)) // 2 if file == hub.cut else len(content)
                self.drip(content[start:end])
                self.close_connection = end < len(content)

        def do_POST(self):
            hub.asked.append(f"{self.command} {self.path}")
            hub.tokens.append(self.headers.get("Authorization"))
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if "redirect" in hub.lies:
                return self.answer(hub.lies.get("status", 307), Location=hub.lies["redirect"] + self.path)
            if self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self.answer(401, {"error": "Invalid username or password."})
            if self.path == "/api/repos/create":
                return self.answer(200, {"url": f"http://{self.headers['Host']}/ana/mine", "private": True})
            if "/preupload/" in self.path:
                files = json.loads(body)["files"]
                kinds = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
                return self.answer(200, {"files": kinds})
            for line in map(json.loads, body.splitlines()):
                if line.get("key") == "file":
                    hub.pushed[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"http://{self.headers['Host']}/ana/mine/commit/{COMMIT}"
            oid = hub.lies.get("sha", COMMIT)
            return self.answer(200, {"success": True, "commitUrl": url, "commitOid": oid, "hookOutput": ""})

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # of a client that has gone
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def listed(file, content):
    """A file in the Hub's listing: weights by their SHA-256, the rest by git's digest."""
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    about = {"type": "file", "path": file, "size": len(content), "oid": git, "etag": git}
    if file.endswith(".safetensors"):
        large = hashlib.sha256(content).hexdigest()
        about |= {"lfs": {"oid": large, "size": len(content), "pointerSize": 130}, "etag": large}
    return about
