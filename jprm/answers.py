"""Final answers: found in the text of a chain, and compared.

`math-verify` parses and compares; it runs in one worker process that is killed when an answer takes too long. Its own
time limit is a SIGALRM: it raises outside the main thread, cancels an alarm that the caller has set, and cannot
interrupt one long operation on integers (9**9**9**9), which holds the interpreter. So it is switched off and the limit
is held from outside; the worker's memory is limited too. After a time-out or a failure to parse, numbers are compared
by value and other answers by their text without LaTeX's ornaments. Words are compared as text, without case:
math-verify takes them for a product of symbols, in which "red and blue" is "blue and red".

Limits of math-verify 0.9: a percentage equals both its fraction and its number (18% = 0.18 and 18% = 18); units are
dropped (10 cm = 10); a list without brackets is a set (1,2 = 2,1); numbers are equal to 6 decimals (0.333333 = 1/3);
`x=5` equals 5, and 1<x<2 equals (1,2) where it is the truth but not the other way round, so the truth comes first; a
column vector is no tuple; times (12:30) are text.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Hashable
from typing import Any

LIMIT_S = 5.0
"""Seconds that a comparison may take."""

_LONGEST = 2000  # characters of an answer that the parser is asked to read
_MEMORY = 4 << 30  # bytes of address space of the worker
_START_S = 120.0  # importing SymPy takes seconds on a busy machine

_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)?(\.\d*)?([eE][+-]?\d{1,3})?")
_PHRASE = re.compile(r"(?:answer\s+is|answer\s*[:=])\s*:?\s*(.+?)\s*(?:\.(?=\s|$)|$)", re.IGNORECASE | re.MULTILINE)
_HASHES = re.compile(r"####\s*(.+?)\s*$", re.MULTILINE)
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]{3,}([\s,.'’-]+[^\W\d_]+)*\.?")
_ORNAMENTS = re.compile(r"\\(?:left|right|displaystyle|[!,;: ])|\\(?:text|mathrm|mbox)\s*(?=\{)|[\s$]|\.$")


def canonical_answer(answer: Any) -> Hashable | None:
    """The form under which answers are counted as the same; None where there is no answer.

    Numbers, and strings that are plainly numbers ("1,000", " 18.0 "), are equal by value; other strings by their text
    without outer space. None, a blank string and NaN are no answer.
    """
    if answer is None or (isinstance(answer, float) and math.isnan(answer)):
        return None
    if isinstance(answer, bool):
        return str(answer)
    if isinstance(answer, int | float):
        return answer  # 18 == 18.0, with one hash
    if not isinstance(answer, str):
        raise ValueError(f"an answer is a number, a string or null, not {answer!r}")
    text = answer.strip()
    if any(c.isdigit() for c in text) and _NUMBER.fullmatch(text):
        plain = text.replace(",", "")
        return int(plain) if plain.lstrip("+-").isdecimal() and len(plain) < 1000 else float(plain)
    return text or None


def extract_answer(text: str, *, limit_s: float = LIMIT_S) -> str | None:
    r"""The final answer that a text states, None where it states none.

    In this order: the last whole `\boxed{}`; what follows the last `####`; what follows the last "answer is" or
    "answer:"; and what math-verify reads as the last number or formula. An unclosed box, as a truncated chain leaves
    it, is no answer, and nothing before it is taken for one.
    """
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start >= 0:
        return _braced(text, text.index("{", start))
    for marker in (_HASHES, _PHRASE):
        if found := marker.findall(text):
            return found[-1].strip().removeprefix("$").removesuffix("$").strip() or None
    if not any(c.isdigit() for c in text):
        return None
    return _ask({"extract": text[-_LONGEST:]}, limit_s)


def equivalent(truth: str | float | None, given: str | float | None, *, limit_s: float = LIMIT_S) -> bool:
    """Whether a given answer is the true one. False where either is absent. May be called from any thread.

    Plain numbers are equal within 1e-9 of their size, without asking math-verify.
    """
    one, two = canonical_answer(truth), canonical_answer(given)
    if one is None or two is None:
        return False
    if one == two:
        return True
    if not isinstance(one, str) and not isinstance(two, str):
        return _close(one, two)
    one, two = str(one), str(two)
    words = [_TEXT.sub(r"\1", x).strip(" $.") for x in (one, two)]
    if any(map(_WORDS.fullmatch, words)):
        return words[0].casefold().split() == words[1].casefold().split()
    verdict = None
    if max(len(one), len(two)) <= _LONGEST:
        verdict = _ask({"truth": one, "given": two}, limit_s)
    if verdict is None:  # no parse, or no time
        plain_one, plain_two = (canonical_answer(_ORNAMENTS.sub("", x).strip("{}")) for x in (one, two))
        if plain_one is None or isinstance(plain_one, str) or isinstance(plain_two, str):
            return plain_one is not None and plain_one == plain_two
        return plain_two is not None and _close(plain_one, plain_two)
    return verdict


def _close(one: float, two: float) -> bool:
    try:
        return math.isclose(one, two, rel_tol=1e-9)
    except OverflowError:  # an integer beyond the largest float
        return one == two


def _braced(text: str, start: int) -> str | None:
    depth = 0
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[start + 1 : end].strip() or None
    return None


class _Worker:
    """A process that answers one JSON line with one JSON line."""

    def __init__(self):
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jprm.answers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        try:
            self.read(_START_S)
        except OSError:
            self.stop()
            raise OSError("the process that compares answers did not start: is math-verify installed?") from None

    def ask(self, question: dict[str, str], limit_s: float) -> Any:
        self.process.stdin.write(json.dumps(question).encode() + b"\n")
        return self.read(limit_s)

    def read(self, limit_s: float) -> Any:
        line, deadline = b"", time.monotonic() + limit_s
        while not line.endswith(b"\n"):
            wait = deadline - time.monotonic()
            if wait <= 0 or not select.select([self.process.stdout], [], [], wait)[0]:
                raise TimeoutError
            chunk = os.read(self.process.stdout.fileno(), 65536)
            if not chunk:
                raise BrokenPipeError("the worker ended")
            line += chunk
        return json.loads(line)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


_lock = threading.Lock()
_worker: _Worker | None = None


def _ask(question: dict[str, str], limit_s: float) -> Any:
    """The worker's reply; None when time ran out: it is killed and the next question starts another."""
    global _worker
    with _lock:
        if _worker is not None and _worker.owner != os.getpid():
            _worker = None  # a fork's copy: its pipes are the parent's
        if _worker is None:
            _worker = _Worker()
            atexit.register(_worker.stop)
        try:
            return _worker.ask(question, limit_s)
        except (TimeoutError, BrokenPipeError):
            _end_worker()
            return None
        except BaseException:  # Ctrl-C: its reply, still to come, must not be taken for the next question's
            _end_worker()
            raise


def _end_worker() -> None:
    global _worker
    atexit.unregister(_worker.stop)
    _worker.stop()
    _worker = None


def _serve() -> None:
    """The worker: reads questions until its input ends."""
    import logging
    import resource

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not be read as a reply
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    def reply(question: dict[str, str]) -> Any:
        if "extract" in question:
            found = parse(question["extract"], parsing_timeout=None)
            return found[-1] if found and isinstance(found[-1], str) else None
        pair = [parse(f"\\boxed{{{question[key].strip('$ ')}}}", parsing_timeout=None) for key in ("truth", "given")]
        if not all(len(parsed) > 1 for parsed in pair):  # only the text, or nothing: our own comparison is as good
            return None
        return verify(*pair, timeout_seconds=None)

    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        try:
            answer = reply(json.loads(line))
        except Exception:  # SymPy raises anything, MemoryError among it
            answer = None
        print(json.dumps(answer), file=replies, flush=True)


if __name__ == "__main__":
    _serve()
