"""A process that answers questions and is killed if an answer takes too long.

Signals cannot interrupt one long integer operation (9**9**9**9), so a time limit needs another process.
"""

from __future__ import annotations

import atexit
import json
import os
import pathlib
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_MEMORY = 4 << 30  # bytes of address space
_START_S = 120.0  # importing SymPy takes seconds on a busy machine


class Worker:
    """Runs an installed module that ends in `serve(prepare)`, e.g. "mypackage.answers". Thread-safe.

    Each process answers one question at a time, and starts when all others are busy. If `most` are, the next question
    waits. Processes end with the program.
    """

    def __init__(self, module: str, most: int = 1):
        self.module = module
        self._free = threading.BoundedSemaphore(most)
        self._idle: list[_Process] = []

    def ask(self, question: Any, limit_s: float) -> Any:
        """Returns the reply to a JSON value, as JSON; `None` if time ran out or the process died or raised.

        `limit_s` counts neither the wait for a free process nor its start, at most 120 s. A process that ran out of
        time is killed, and a later question starts a new one. Raises OSError if the process does not start, TypeError
        if the question is not JSON.
        """
        with self._free:
            try:
                process = self._idle.pop()
            except IndexError:
                process = None
            if process is None or process.owner != os.getpid():  # a fork's copy: its pipes are the parent's
                process = _Process(self.module)
                atexit.register(process.stop)
            try:
                reply = process.ask(question, limit_s)
            except BaseException as error:  # of Ctrl-C as well: the reply to come must not answer the next question
                atexit.unregister(process.stop)
                process.stop()
                if isinstance(error, TimeoutError | BrokenPipeError):
                    return None
                raise
            self._idle.append(process)
            return reply


class _Process:
    """Answers one JSON line with one JSON line."""

    def __init__(self, module: str):
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=pathlib.Path(__file__).resolve().parents[3],  # `-m` imports from there: no file of a stranger's folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        assert self.process.stdin is not None and self.process.stdout is not None  # they are pipes
        self._questions, self._replies = self.process.stdin, self.process.stdout
        try:
            self.read(_START_S)
        except OSError:
            self.stop()
            raise OSError(f"the process of {module} did not start: is everything that it imports installed?") from None

    def ask(self, question: Any, limit_s: float) -> Any:
        self._questions.write(json.dumps(question).encode() + b"\n")
        return self.read(limit_s)

    def read(self, limit_s: float) -> Any:
        line, deadline = b"", time.monotonic() + limit_s
        while not line.endswith(b"\n"):
            wait = deadline - time.monotonic()
            if wait <= 0 or not select.select([self._replies], [], [], wait)[0]:
                raise TimeoutError
            chunk = os.read(self._replies.fileno(), 65536)
            if not chunk:
                raise BrokenPipeError("the worker ended")
            line += chunk
        return json.loads(line)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._questions.close()
        self._replies.close()


def serve(prepare: Callable[[], Callable[[Any], Any]]) -> None:
    """Answers questions in the worker until its input ends. `prepare` does the slow imports and returns the reply
    function. If that raises, the answer is `None`. Memory is limited to 4 GiB, and printing goes to stderr.
    """
    import logging
    import resource

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that no library prints into the replies
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    logging.disable(logging.CRITICAL)
    reply = prepare()
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        try:
            answer = reply(json.loads(line))
        except Exception:  # SymPy raises anything, MemoryError among it
            answer = None
        print(json.dumps(answer), file=replies, flush=True)
