"""Studies of made-up chains, annotators that post to a server, and a server as a process of its own."""

import asyncio
import http.client
import json
import pathlib
import subprocess
import sys
import time
import urllib.error
import urllib.request

import httpx2 as httpx
from pod import REPOSITORY, free_port

from jprm.apps.annotate import StudyConfig, study
from jprm.apps.annotate.app import make_app
from jprm.apps.web import Listen
from jprm.io.jsonl import write_records

SECRET = 0.8675309  # a score that no page may show


def chain(i, steps=4, error=None, **more):
    """A chain whose step `error` is labelled wrong. The page must never see its scores and labels."""
    return {
        "problem": f"Problem {i}?",
        "steps": [f"Step {k} of chain {i}." for k in range(steps)],
        "scores": [SECRET] * steps,
        "labels": [-1 if k == error else 1 for k in range(steps)],
        "semantics": "rating",
        "selection": {"stratum": "convincing", "why": "secret stratum"},
        **more,
    }


def truth(text):
    """The rating of a chain's step by its number: every third chain has an error in its second step."""
    words = text.rstrip(".").split()
    return -1 if int(words[-1]) % 3 == 0 and int(words[1]) == 1 else 1


def make(folder, count=6, names=("ana", "ben"), work=None, gold=0, screening=0, **mix):
    """Writes a study beside the files that it is made of."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    work = [chain(i) for i in range(count)] if work is None else work
    known = {"gold": range(1000, 1000 + gold), "screening": range(2000, 2000 + screening)}
    write_records(folder / "work.jsonl", work)
    files = {}
    for pool, numbers in known.items():
        if numbers:
            files[pool] = folder / f"{pool}.jsonl"
            write_records(files[pool], [chain(i, error=1 if i % 3 == 0 else None) for i in numbers])
    study.create(folder / "study", folder / "work.jsonl", StudyConfig(names, **mix), **files)
    return folder / "study"


def log_of(folder):
    """The events of a study's log."""
    return [json.loads(line) for line in (folder / study.EVENTS).read_bytes().splitlines()]


class Desk:
    """The server's application in this process, and annotators in front of it."""

    def __init__(self, folder, key=None, clock=time.time, headers=None):
        self.opened = study.open_log(study.read(folder).events)
        self.log = self.opened.__enter__()
        self.app = make_app(study.read(folder), self.log, Listen(), key, clock)
        # Every event has an id of its own, after a restart too.
        self.tasks, self.headers, self.count = self.app.state.tasks, headers, 1000 * len(self.log.events)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.opened.__exit__(*error)

    def request(self, method, path, **more):
        async def send():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost", headers=self.headers
            ) as client:
                return await client.request(method, path, **more)

        return asyncio.run(send())

    def next(self, name):
        return self.request("POST", f"/v1/annotators/{name}/next", json={})

    def post(self, name, task, kind, **fields):
        self.count += 1
        body = {"uuid": f"event-{self.count:06}", "task": task, "kind": kind} | fields
        return self.request("POST", f"/v1/annotators/{name}/events", json=body)

    def rate(self, name, task, step, rating):
        return self.post(name, task, "rate", step=step, rating=rating, seconds=1.0)

    def label(self, name, shown, rating=truth, reason=None):
        """Rates a chain to its end or first error."""
        ratings = [rating(text) for text in shown["steps"]]
        ratings = ratings[: ratings.index(-1) + 1] if -1 in ratings else ratings
        for step, value in enumerate(ratings):
            assert self.rate(name, shown["task"], step, value).status_code == 200
        reason = reason or ("found_error" if -1 in ratings else "solution")
        assert self.post(name, shown["task"], "finish", reason=reason, seconds=1.0).status_code == 200

    def walk(self, name, shown, rating, go_on=min):
        """Rates every alternative, by the index of its step, and goes on with one that `go_on` chooses of several.

        A path of a trajectory goes on from a wrong turn too. Returns the ratings and the path.
        """
        task, here, ratings, path = shown["task"], shown["after"][0], {}, []
        recovers = "around" in shown
        while here:
            for step in here:
                ratings[step] = rating(step)
                assert self.rate(name, task, step, ratings[step]).status_code == 200
            fine = [step for step in here if recovers or ratings[step] != -1]
            if not fine:
                break
            path.append(go_on(fine) if len(here) > 1 else fine[0])
            if len(here) > 1:
                assert self.post(name, task, "choose", step=path[-1], seconds=2.0).status_code == 200
            here = shown["after"][path[-1] + 1]
        reasons = ("solution", "found_error") if here else ("found_error", "solution")
        done = [self.post(name, task, "finish", reason=reason, seconds=1.0).status_code for reason in reasons]
        assert done == [409, 200]
        return ratings, path


class Process:
    """A server as a process, on a port of its own, to be killed and started again. It loads no model."""

    CODE = (
        "import sys, resource; from jprm.apps.annotate.app import serve; from jprm.apps.web import Listen;"
        "limit = int(sys.argv[3]); limit and resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit));"
        "serve(sys.argv[1], Listen(port=int(sys.argv[2])))"
    )

    def __init__(self, folder, limit=0):
        self.port = free_port()
        self.command = [sys.executable, "-c", self.CODE, str(folder), str(self.port), str(limit)]
        self.start()

    def start(self):
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(self.command, cwd=REPOSITORY, **silent)
        end = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=60).close()
                return
            except OSError:
                assert time.monotonic() < end and self.process.poll() is None, "the server did not start"
                time.sleep(0.01)

    def post(self, path, body, name="ana"):
        """Returns (status, answer); (None, None) where the server is gone."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/annotators/{name}/{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except (OSError, ValueError, http.client.HTTPException):
            return None, None

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        self.process.terminate()
        assert self.process.wait(300) in (0, -15)
