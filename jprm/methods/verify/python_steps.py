"""Checks steps that are Python code: each step extends the program of the earlier steps, which then runs with tests.

A record has `"tests": [str]`, each a statement such as `assert area(2) == 4`, and may have a `"prelude"`, code before
the first step. After a step, the program so far runs in the sandbox, then every test. The step is

- incorrect (0) if the program does not compile, raises, exits or takes too long, or a test fails;
- correct (1) if it runs, no test fails and at least one passes;
- unlabelled if no test can run yet or its block is incomplete: the next step begins indented, or an end is missing. A
  test that needs an undefined name is skipped, but fails after the last step.

The tests run in another process and sandbox than the program (`remote.py`), which sees the calls of its functions but
neither the tests nor their report. A test that compares a program's object with a plain value is undecided; then the
step is incorrect if another test fails, and unlabelled otherwise. A test that needs a name of the program has Python's
own builtins, whatever the program defines: where it hides one of them, the test passes or is undecided. Tests that need
builtins alone, such as `assert sum(10, 15) == 6`, test the program's function of that name, which all of them call.

Steps after an incorrect one are unlabelled. If any step of a record has a fenced block, the code is in the fences and
the other steps are prose and unlabelled; else a step's whole text is code. Only the standard library is available.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jprm.fields import tests_of
from jprm.methods.verify.programs import LIMITS, Program, Report, run_programs
from jprm.methods.verify.sandbox import Limits
from jprm.methods.verify.verdict import Verdict
from jprm.tree import ReasoningTree

_FENCE = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


def check_python(tree: ReasoningTree, *, sandbox: bool = True, limits: Limits = LIMITS) -> list[Verdict]:
    """Returns a verdict per node.

    Raises:
      RecordError: as `tests_of`.
      OSError: `sandbox` is True and there is none.
    """
    tests = tests_of(tree.extra)
    fenced = any(_FENCE.search(node.text) for node in tree.nodes)
    children: list[list[int]] = [[] for _ in tree.nodes]
    programs: list[str] = []
    verdicts: list[Verdict] = []
    for i, node in enumerate(tree.nodes):
        if node.parent >= 0:
            children[node.parent].append(i)
        before = programs[node.parent] if node.parent >= 0 else program_of(tree.extra, ())
        programs.append(before + _code(node.text, fenced))
    over = [False] * len(tree.nodes)  # at or after an incorrect step
    for i, node in enumerate(tree.nodes):
        if node.parent >= 0 and over[node.parent]:
            over[i] = True
            verdicts.append(Verdict(None))
            continue
        new = _code(node.text, fenced)
        follow = [_code(tree.nodes[child].text, fenced) for child in children[i]]
        unfinished = any(code[:1] in (" ", "\t") for code in follow)
        if not new.strip() or unfinished:
            verdicts.append(Verdict(None))
        else:
            last = not children[i]
            (report,) = run_programs([Program(programs[i], tuple(tests), last)], limits, sandbox=sandbox)
            verdicts.append(_verdict(report, last, limits))
            over[i] = verdicts[-1].label == 0
    return verdicts


def program_of(record: Mapping[str, Any], steps: Sequence[str]) -> str:
    """Returns the program that the steps write after the record's prelude."""
    fenced = any(map(_FENCE.search, steps))
    return _code(record.get("prelude", ""), False) + "".join(_code(step, fenced) for step in steps)


def _code(text: str, fenced: bool) -> str:
    code = "\n".join(_FENCE.findall(text)) if fenced else text
    return code.strip("\n") + "\n" if code.strip() else ""


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
