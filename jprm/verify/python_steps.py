"""Checks steps that are Python code: each step extends the program of the earlier steps, which then runs with tests.

A record has `"tests": [str]`, each a statement such as `assert area(2) == 4`. After a step, the program so far runs in
the sandbox, then every test. The step is

- incorrect (0) if the program does not compile, raises, exits or takes too long, or a test fails;
- correct (1) if it runs, no test fails and at least one passes;
- unlabelled if no test can run yet or its block is incomplete: the next step begins indented, or an end is missing. A
  test that needs an undefined name is skipped, but fails after the last step.

Steps after an incorrect one are unlabelled. If any step of a record has a fenced block, the code is in the fences and
the other steps are prose and unlabelled; else a step's whole text is code. Only the standard library is available.
"""

from __future__ import annotations

import codeop
import json
import re
import secrets
import warnings
from collections.abc import Sequence

from jprm.tree import ReasoningTree, RecordError
from jprm.verify.sandbox import Limits, Outcome, python, run
from jprm.verify.verdict import Verdict

LIMITS = Limits(seconds=10.0, memory=1 << 30)
"""Limits of one step's program with its tests."""

_FENCE = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)

_HARNESS = """
import json, os, sys
def report(**what):
    os.write(out, ("\\n" + nonce + json.dumps(what)).encode())
    os._exit(0)
def main():
    question = json.load(sys.stdin)
    return question["nonce"], os.dup(1), question["code"], question["tests"]
nonce, out, code, tests = main()
os.dup2(os.open(os.devnull, os.O_RDWR), 1)
os.dup2(1, 2)
names = {"__name__": "program"}
try:
    exec(compile(code, "program", "exec"), names)
except BaseException as error:
    report(error=f"{type(error).__name__}: {error}"[:200])
results = []
for test in tests:
    try:
        exec(compile(test, "test", "exec"), dict(names))
        results.append("passes")
    except NameError as error:
        results.append("later" if error.name not in names else f"NameError: {error}"[:200])
    except BaseException as error:
        results.append(f"{type(error).__name__}: {error}"[:200])
report(tests=results)
"""


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
        unfinished = any(code[:1] in (" ", "\t") for code in follow) or (children[i] and _incomplete(programs[i]))
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


def _incomplete(code: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return codeop.compile_command(code, symbol="exec") is None
        except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
            return False


def _run(code: str, tests: Sequence[str], last: bool, sandbox: bool, limits: Limits) -> Verdict:
    nonce = secrets.token_hex(16)  # so that a program cannot print its own report
    question = json.dumps({"nonce": nonce, "code": code, "tests": list(tests)})
    outcome = run([python(), "-I", "-S", "-c", _HARNESS], question, limits, sandbox=sandbox)
    reported = outcome.output.rpartition("\n" + nonce)[2] if nonce in outcome.output else None
    if reported is None and outcome.output.startswith(("bwrap: ", "prlimit: ")):
        return Verdict(None)  # it was never started
    if reported is None:
        return Verdict(0, 1, _ended(outcome, limits))
    error, results = _read(reported, len(tests))
    if error is not None:
        return Verdict(0, 1, error)
    done = [result for result in results if result != "later" or last]
    failed = next((result for result in done if result != "passes"), None)
    if failed == "later":
        failed = "NameError: a test's name is never defined"
    return Verdict(int(failed is None) if done else None, len(done), failed)


def _read(report: str, tests: int) -> tuple[str | None, list[str]]:
    """Returns the program's error and the tests' results. A report of another shape is an error of the program."""
    try:
        found = json.loads(report)
        error, results = found.get("error"), found.get("tests", [])
        if isinstance(error, str):
            return error, []
        if error is None and len(results) == tests and all(isinstance(result, str) for result in results):
            return None, results
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    return "reported something other than test results", []


def _ended(outcome: Outcome, limits: Limits) -> str:
    if outcome.status is None:
        return f"ran longer than {limits.seconds:g} seconds"
    return f"ended with status {outcome.status} before the tests"
