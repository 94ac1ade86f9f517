"""Judges programs, and steps that are Python code, by tests.

Each step extends the program of the earlier steps, which then runs with the tests. A record has `"tests": [str]`,
statements such as `assert area(2) == 4`, and optionally a `"prelude"`, code before the first step. After each step, the
sandbox runs the program so far, then every test. The step is

- incorrect (0) if the program does not compile, raises, exits or times out, or a test fails;
- correct (1) if it runs, no test fails and at least one passes;
- unlabelled if no test can run yet, or its block is incomplete (the next step is indented, or an end is missing). A
test that needs an undefined name is skipped, but fails after the last step.

The tests run in a separate process and sandbox (`hidden_tests.py`), which sees the calls of the program's functions;
the program sees neither tests nor report. A test comparing one of the program's objects with a plain value is
undecided, as may be a test needing a builtin hidden by the program. Then the step is incorrect if another test fails,
else unlabelled.

Steps after an incorrect one are unlabelled. If any step of a record has a fenced block, only fences are code, and the
other steps are unlabelled prose; else each step's whole text is code (`fences.py`). Only the standard library is
available.

Starting two sandboxes takes longer than most programs, so one pair serves a batch: each program and its tests are two
forked processes. A program that hangs, crashes or attacks spoils only its own report.
"""

from __future__ import annotations

import base64
import collections
import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jprm.methods.verify import Verdict, tests_of
from jprm.methods.verify.fences import blocks, program_in, programs_of, without_tokens
from jprm.methods.verify.sandbox import Limits, python, rules, run_command, run_servers
from jprm.tree import ReasoningTree

LIMITS = Limits(seconds=10.0, memory=1 << 30)
"""Limits for one program with its tests."""

BATCH = 128
"""Maximum programs per pair of sandboxes."""


# ---- Steps that are code.


def check_python(tree: ReasoningTree, *, sandbox: bool = True, limits: Limits = LIMITS) -> list[Verdict]:
    """Returns one verdict per node, on the program up to it, with `tests` and `prelude` from the tree's `extra`.

    Label 1: it runs, and at least one test passes and no test fails. 0: it does not run in time, or a test fails.
    `None`: a prose step, no test is decided yet, its block goes on, or an earlier step got 0. Each judged step is one
    run of at most `limits.seconds`, one after the other. Without `sandbox`, programs have all permissions of the user.

    Raises:
      RecordError: as `tests_of`.
      OSError: `sandbox` is `True`, but there is no sandbox.
    """
    tests = tests_of(tree.extra)
    prelude = _ended(tree.extra.get("prelude", ""))
    codes = _codes([node.text for node in tree.nodes])
    children: dict[int, list[int]] = collections.defaultdict(list)
    for i, node in enumerate(tree.nodes):
        children[node.parent].append(i)
    for i in children[-1]:
        if not children[i]:  # a whole program, as a sample in one step
            codes[i] = _ended(program_in(tree.nodes[i].text, prelude) or "")
    programs, over = {-1: prelude}, {-1: False}  # over: at or after an incorrect step
    verdicts: list[Verdict] = []
    for i, node in enumerate(tree.nodes):
        programs[i], last = programs[node.parent] + codes[i], not children[i]
        unfinished = any(codes[child].startswith((" ", "\t")) for child in children[i])
        if over[node.parent] or unfinished or not codes[i]:
            verdicts.append(Verdict(None))
        else:
            (report,) = run_programs([Program(programs[i], tuple(tests), last)], limits, sandbox=sandbox)
            verdicts.append(_verdict(report, last, limits))
        over[i] = over[node.parent] or verdicts[i].label == 0
    return verdicts


def program_of(record: Mapping[str, Any], steps: Sequence[str]) -> str | None:
    """Returns the record's `prelude` and the program of the steps, or `None` if the steps contain no code."""
    prelude = _ended(record.get("prelude", ""))
    program = program_in("".join(map(_ended, steps)), prelude)
    return None if program is None else prelude + program


def _codes(texts: Sequence[str]) -> list[str]:
    """Returns the code of each step: its fences if any step has one, else its text."""
    fenced = [blocks(without_tokens(text)) for text in texts]
    if not any(fenced):
        return [_ended(without_tokens(text)) for text in texts]
    chosen = programs_of(block for parts in fenced for block in parts)
    return [_ended("\n".join(code for code in programs_of(parts) if code in chosen)) for parts in fenced]


def _ended(text: str) -> str:
    return text.strip("\n") + "\n" if text.strip() else ""


def _verdict(report: Report, last: bool, limits: Limits) -> Verdict:
    if not report.started:
        return Verdict(None)
    if report.late:
        return Verdict(0, 1, f"ran longer than {limits.seconds:g} seconds")
    if report.error is not None:
        return Verdict(0 if report.error else None, int(bool(report.error)), report.error or None)
    done = [result for result in report.results if result != "undecided" and (result != "later" or last)]
    failed = next((result for result in done if result != "passes"), None)
    if failed == "later":
        failed = "NameError: a test's name is never defined"
    if failed is None and "undecided" in report.results:
        return Verdict(None, len(done))
    return Verdict(int(failed is None) if done else None, len(done), failed)


# ---- Programs with tests, many in one sandbox.


@dataclasses.dataclass(frozen=True)
class Program:
    """Code with its tests. Unless it is the `last` of its chain, its last block may be incomplete."""

    code: str
    tests: tuple[str, ...]
    last: bool = True


@dataclasses.dataclass(frozen=True)
class Report:
    """Results of the tests.

    Attributes:
      results: per test: `passes`, `undecided`, `later` (an undefined name), or the reason of failure. Empty if there is
        an error.
      error: reason why the code did not finish; "" if its last block is incomplete.
      late: timed out.
      behaviour: equal for programs that answered the tests' calls identically, if they ran.
      started: `False` if the sandbox did not start.
    """

    results: tuple[str, ...] = ()
    error: str | None = None
    late: bool = False
    behaviour: str | None = None
    started: bool = True

    @property
    def passed(self) -> bool:
        """Whether there are tests and all pass. An undecided test does not pass."""
        return set(self.results) == {"passes"}


NOT_STARTED = Report(started=False)


def run_programs(programs: Sequence[Program], limits: Limits = LIMITS, *, sandbox: bool = True) -> list[Report]:
    """Runs programs and returns their reports, in order. Equal programs run once. `limits` apply to each.

    Blocks; as many run at once as there are processors. A program's failure is in its report; if a sandbox does not
    start, `started` is `False`. Without `sandbox`, programs have all permissions of the user; with it, raises OSError
    if there is no sandbox.
    """
    distinct = list(dict.fromkeys(programs))
    workers = os.cpu_count() or 1
    size = max(1, min(BATCH, -(-len(distinct) // workers)))
    batches = [distinct[start : start + size] for start in range(0, len(distinct), size)]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        batch_reports = pool.map(functools.partial(_run_batch, limits=limits, sandbox=sandbox), batches)
        reports = dict(zip(distinct, (report for batch in batch_reports for report in batch), strict=True))
    return [reports[program] for program in programs]


def _run_batch(programs: Sequence[Program], limits: Limits, sandbox: bool) -> list[Report]:
    """Starts sandboxes until every program has a report: a program that leaves files behind ends its sandbox."""
    reports: list[Report] = []
    while len(reports) < len(programs):
        reports += _serve(programs[len(reports) :], limits, sandbox) or [NOT_STARTED]
    return reports


def _serve(programs: Sequence[Program], limits: Limits, sandbox: bool) -> list[Report]:
    """Runs the programs in one sandbox pair, and returns the first programs' reports, until the pair ended."""
    command = [python(), "-I", "-S", "-c", _script()]
    shared = {"rules": base64.b64encode(rules()).decode() if sandbox else ""}
    questions = [{"code": program.code, "tests": program.tests, "more": not program.last} for program in programs]
    texts = json.dumps(shared), json.dumps(shared | {"questions": questions, "seconds": limits.seconds})
    seconds = 30 + len(programs) * (limits.seconds + 10)
    _, tested = run_servers(([*command, "program"], [*command, "tests"]), texts, limits, seconds, sandbox=sandbox)
    *lines, _ = tested.output.split("\n")
    if tested.output.startswith(("bwrap: ", "prlimit: ")):
        return []
    return [_report(line, len(program.tests)) for line, program in zip(lines, programs, strict=False)]


@functools.cache
def _script() -> str:
    return pathlib.Path(__file__).with_name("hidden_tests.py").read_text("utf-8")


def _report(line: str, tests: int) -> Report:
    try:
        reply = json.loads(line)
        if reply.get("incomplete") is True:
            return Report(error="")
        if reply.get("late") is True:
            return Report(late=True)
        if reply.get("ended") is True:
            return Report(error="ended before the tests")
        error, results, behaviour = reply.get("error"), reply.get("tests", []), reply.get("behaviour")
        if isinstance(error, str):
            return Report(error=error)
        if error is None and len(results) == tests and all(isinstance(result, str) for result in results):
            return Report(tuple(results), behaviour=behaviour)
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    return Report(error="reported something other than test results")


# ---- Output of code blocks without tests.

BLOCK_LIMITS = Limits(seconds=5.0, memory=1 << 30)

LONGEST = 2000
"""Maximum characters of output."""

_RUNNER = """
import contextlib, io, json, sys
names = {"__name__": "__main__"}
*earlier, last = json.load(sys.stdin)
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    for block in earlier:
        try:
            exec(block, names)
        except (Exception, SystemExit):  # it was printed when this block was the last
            pass
try:
    exec(last, names)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def printed(blocks: Sequence[str], limits: Limits = BLOCK_LIMITS) -> str:
    """Returns the text that the last block prints (stdout and stderr) after the earlier ones ran.

    It ends with the block's error, e.g. `ZeroDivisionError: division by zero`, or `TimeoutError: ...`; "" if the block
    prints no text. Only the first `LONGEST` characters stay, so a long text loses its error. Output and errors of
    earlier blocks are left out; SystemExit, e.g. of `sys.exit()`, ends a block without an error. At least one block
    must be given; `limits` apply to all together. Only the standard library is available.

    Raises OSError if there is no sandbox.
    """
    outcome = run_command([python(), "-I", "-S", "-c", _RUNNER], json.dumps(list(blocks)), limits)
    output = outcome.output.strip()
    if outcome.status is None:
        output += f"\nTimeoutError: longer than {limits.seconds:g} seconds"
    elif outcome.status < 0:
        output += f"\nended by signal {-outcome.status}"
    return output.strip()[:LONGEST]
