"""Checks steps that are Python code: each step extends the program of the earlier steps, which then runs with tests.

A record has `"tests": [str]`, each a statement such as `assert area(2) == 4`. After a step, the program so far runs in
the sandbox, then every test. The step is

- incorrect (0) if the program does not compile, raises, exits or takes too long, or a test fails;
- correct (1) if it runs, no test fails and at least one passes;
- unlabelled if no test can run yet or its block is incomplete: the next step begins indented, or an end is missing. A
  test that needs an undefined name is skipped, but fails after the last step.

The tests run in another process and sandbox than the program (`remote.py`), which sees the calls of its functions but
neither the tests nor their report. A test that compares a program's object with a plain value, or uses a name that
hides a builtin, is undecided; then the step is incorrect if another test fails, and unlabelled otherwise.

Steps after an incorrect one are unlabelled. If any step of a record has a fenced block, the code is in the fences and
the other steps are prose and unlabelled; else a step's whole text is code. Only the standard library is available.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Sequence

from jprm.tree import ReasoningTree, RecordError
from jprm.verify.sandbox import Limits, python, run_pair
from jprm.verify.verdict import Verdict

LIMITS = Limits(seconds=10.0, memory=1 << 30)
"""Limits of one step's program with its tests."""

_FENCE = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)

_ENDED = "ended before the tests"
_REMOTE = pathlib.Path(__file__).with_name("remote.py")


def check_python(tree: ReasoningTree, *, sandbox: bool = True, limits: Limits = LIMITS) -> list[Verdict]:
    """Returns a verdict per node.

    Raises:
      RecordError: as `tests_of`.
      OSError: `sandbox` is True and there is none.
    """
    tests = tests_of(tree)
    fenced = any(_FENCE.search(node.text) for node in tree.nodes)
    children: list[list[int]] = [[] for _ in tree.nodes]
    programs: list[str] = []
    verdicts: list[Verdict] = []
    for i, node in enumerate(tree.nodes):
        if node.parent >= 0:
            children[node.parent].append(i)
        before = programs[node.parent] if node.parent >= 0 else ""
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
            verdicts.append(_run(programs[i], tests, not children[i], sandbox, limits))
            over[i] = verdicts[-1].label == 0
    return verdicts


def tests_of(tree: ReasoningTree, where: str = "record") -> list[str]:
    """Returns the record's tests.

    Raises:
      RecordError: there are none.
    """
    tests = tree.extra.get("tests")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise RecordError(where, "tests", "is no list of statements", 'Write "tests": ["assert area(2) == 4"].')
    return tests


def _code(text: str, fenced: bool) -> str:
    code = "\n".join(_FENCE.findall(text)) if fenced else text
    return code.strip("\n") + "\n" if code.strip() else ""


def _run(code: str, tests: Sequence[str], last: bool, sandbox: bool, limits: Limits) -> Verdict:
    """Runs the program in one sandbox and the tests in another, so that the program sees neither tests nor report."""
    command = [python(), "-I", "-S", "-c", _REMOTE.read_text()]
    questions = json.dumps({"code": code, "more": not last}), json.dumps({"tests": list(tests), "more": not last})
    program, tested = run_pair(([*command, "program"], [*command, "tests"]), questions, limits, sandbox=sandbox)
    if any(outcome.output.startswith(("bwrap: ", "prlimit: ")) for outcome in (program, tested)):
        return Verdict(None)  # it was never started
    error, results = _read(tested.output, len(tests))
    if tested.status is None or (program.status is None and error == _ENDED):
        return Verdict(0, 1, f"ran longer than {limits.seconds:g} seconds")
    if error is not None:
        return Verdict(0 if error else None, int(bool(error)), error or None)
    done = [result for result in results if result != "undecided" and (result != "later" or last)]
    failed = next((result for result in done if result != "passes"), None)
    if failed == "later":
        failed = "NameError: a test's name is never defined"
    if failed is None and "undecided" in results:
        return Verdict(None, len(done))
    return Verdict(int(failed is None) if done else None, len(done), failed)


def _read(report: str, tests: int) -> tuple[str | None, list[str]]:
    """Returns the program's error, empty if its code goes on, and the tests' results."""
    try:
        found = json.loads(report)
        if found.get("incomplete") is True:
            return "", []
        if found.get("ended") is True:
            return _ENDED, []
        error, results = found.get("error"), found.get("tests", [])
        if isinstance(error, str):
            return error, []
        if error is None and len(results) == tests and all(isinstance(result, str) for result in results):
            return None, results
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    return "reported something other than test results", []
