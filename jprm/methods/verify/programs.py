"""Runs programs with tests, many in one sandbox.

The tests run in another process and sandbox than the program (`remote.py`), which sees the calls of its functions but
neither the tests nor their report. Starting two sandboxes takes longer than most programs, so a pair of them serves a
batch: each program and its tests are two processes of their own, forked there (`fork_server.py`). A program that hangs,
crashes or attacks has its own report alone.
"""

from __future__ import annotations

import base64
import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Sequence

from jprm.methods.verify.sandbox import Limits, python, rules, run_servers

LIMITS = Limits(seconds=10.0, memory=1 << 30)
"""Limits of one program with its tests."""

BATCH = 128
"""Programs that one pair of sandboxes serves, at most."""


@dataclasses.dataclass(frozen=True)
class Program:
    """Code with its tests. Where it is not the `last` of its chain, its last block may be incomplete."""

    code: str
    tests: tuple[str, ...]
    last: bool = True


@dataclasses.dataclass(frozen=True)
class Report:
    """What the tests found.

    Attributes:
      results: for each test `passes`, `undecided`, `later` where a name is not defined, or why it fails. Empty with an
        error.
      error: why the code did not run to its end; empty where its last block is incomplete.
      late: time ran out.
      behaviour: equal for programs that answered the tests' calls the same way; None where they did not run.
      started: False where the sandbox did not start.
    """

    results: tuple[str, ...] = ()
    error: str | None = None
    late: bool = False
    behaviour: str | None = None
    started: bool = True

    @property
    def passed(self) -> bool:
        """Whether there are tests and all pass. One that cannot be decided does not."""
        return set(self.results) == {"passes"}


NOT_STARTED = Report(started=False)


def run_programs(programs: Sequence[Program], limits: Limits = LIMITS, *, sandbox: bool = True) -> list[Report]:
    """Returns the programs' reports, in order. Equal programs run once. `limits` are of each.

    Without `sandbox` a program may do whatever its user may.

    Raises:
      OSError: `sandbox` is True and there is none.
    """
    distinct = list(dict.fromkeys(programs))
    workers = os.cpu_count() or 1
    size = max(1, min(BATCH, -(-len(distinct) // workers)))
    batches = [distinct[start : start + size] for start in range(0, len(distinct), size)]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        found = pool.map(functools.partial(_run_batch, limits=limits, sandbox=sandbox), batches)
        reports = dict(zip(distinct, (report for batch in found for report in batch), strict=True))
    return [reports[program] for program in programs]


def _run_batch(programs: Sequence[Program], limits: Limits, sandbox: bool) -> list[Report]:
    """Starts sandboxes until every program has its report: a program that leaves files behind ends its own."""
    reports: list[Report] = []
    while len(reports) < len(programs):
        reports += _serve(programs[len(reports) :], limits, sandbox) or [NOT_STARTED]
    return reports


def _serve(programs: Sequence[Program], limits: Limits, sandbox: bool) -> list[Report]:
    """Returns the reports of the first programs, of as many as one pair of sandboxes served."""
    command = [python(), "-I", "-S", "-c", _script()]
    shared = {"rules": base64.b64encode(rules()).decode() if sandbox else ""}
    questions = [{"code": one.code, "tests": one.tests, "more": not one.last} for one in programs]
    texts = json.dumps(shared), json.dumps(shared | {"questions": questions, "seconds": limits.seconds})
    seconds = 30 + len(programs) * (limits.seconds + 10)
    _, tested = run_servers(([*command, "program"], [*command, "tests"]), texts, limits, seconds, sandbox=sandbox)
    *lines, _ = tested.output.split("\n")
    if tested.output.startswith(("bwrap: ", "prlimit: ")):
        return []
    return [_report(line, len(one.tests)) for line, one in zip(lines, programs, strict=False)]


@functools.cache
def _script() -> str:
    parts = [pathlib.Path(__file__).with_name(name).read_text() for name in ("remote.py", "fork_server.py")]
    return "\n".join([*parts, "main(sys.argv[1], int(sys.argv[2]), sys.stdin.read(), serve, answer)"])


def _report(line: str, tests: int) -> Report:
    try:
        found = json.loads(line)
        if found.get("incomplete") is True:
            return Report(error="")
        if found.get("late") is True:
            return Report(late=True)
        if found.get("ended") is True:
            return Report(error="ended before the tests")
        error, results, behaviour = found.get("error"), found.get("tests", []), found.get("behaviour")
        if isinstance(error, str):
            return Report(error=error)
        if error is None and len(results) == tests and all(isinstance(result, str) for result in results):
            return Report(tuple(results), behaviour=behaviour)
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    return Report(error="reported something other than test results")
