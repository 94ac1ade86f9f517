"""Programs with tests, many in one sandbox: reports equal brute force, and no program changes another's."""

import math
import os
import time

import pytest

from jprm.methods.verify import programs, sandbox
from jprm.methods.verify.programs import Program, run_programs
from jprm.methods.verify.sandbox import Limits

pytestmark = pytest.mark.skipif(sandbox.refusal() is not None, reason=f"needs a sandbox: {sandbox.refusal()}")

TESTS = ("assert area(2) == 4", "assert area(3) == 9", "assert area(0) == 0")
BODIES = ["side * side", "side + side", "side ** 2", "side * 2", "sum(side for _ in range(side))", "4", "1 / side", "?"]


def brute_force(code):
    """Runs code and tests in this process."""
    names, results = {}, []
    try:
        exec(code, names)
    except SyntaxError:
        return None
    for test in TESTS:
        try:
            exec(test, names)
            results.append(True)
        except Exception:
            results.append(False)
    return results


@pytest.fixture
def starts(monkeypatch):
    """The number of programs of every pair of sandboxes; one thread starts them all."""
    counts, real = [], programs._serve
    monkeypatch.setattr(programs.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(programs, "_serve", lambda batch, *rest: counts.append(len(batch)) or real(batch, *rest))
    return counts


def test_a_batch_equals_brute_force(starts):
    codes = [f"def area(side):\n    return {body}\n" for body in BODIES * 2]
    reports = run_programs([Program(code, TESTS) for code in codes])
    assert starts == [len(BODIES)]  # equal programs run once
    for code, report in zip(codes, reports, strict=True):
        expected = brute_force(code)
        found = [result == "passes" for result in report.results] if report.error is None else None
        assert found == expected and report.passed == (expected == [True] * 3)


def test_equal_behaviour_is_equal_output_on_the_calls_of_the_tests():
    square, twice, other, double, slow, constant, divides, broken = run_programs(
        [Program(f"def area(side):\n    return {body}\n", TESTS) for body in BODIES]
    )
    assert square.behaviour == other.behaviour == slow.behaviour
    assert twice.behaviour == double.behaviour
    assert len({one.behaviour for one in (square, twice, constant, divides)}) == 4 and broken.behaviour is None


@pytest.mark.parametrize(("one", "two", "equal"), [
    ("{3, 'a', 'b'}", "{'b', 'a', 3}", True), ("{1: 2, 3: 4}", "{3: 4, 1: 2}", True), ("[1, 2]", "[2, 1]", False),
    ("object()", "object()", True), ("1", "1.0", False), ("1 / 0", "[][0]", False),
])  # fmt: skip
def test_behaviour_is_of_values(one, two, equal):
    reports = run_programs([Program(f"def f():\n    return {value}\n", ("f()",)) for value in (one, two)])
    assert (reports[0].behaviour == reports[1].behaviour) == equal


HOSTILE = {
    "loop": "while True: pass",
    "sleep": "import time\ntime.sleep(99)",
    "kills everybody": "import os\nos.kill(-1, 9)\nos._exit(0)",
    "kills its parent": "import os, signal\nfor s in range(1, 64):\n  try: os.kill(1, s)\n  except OSError: pass",
    "starves its parent": "import os, resource\nfor pid in (1, os.getppid()):\n  for limit in range(10):\n"
    "    try: resource.prlimit(pid, limit, (0, 0))\n    except (OSError, ValueError): pass",
    "slows its parent": "import os\nfor pid in (1, os.getppid()):\n  try: os.setpriority(os.PRIO_PROCESS, pid, 19)\n"
    "  except OSError: pass",
    "files": "for i in range(9): open(f'/tmp/{i}', 'w').write('x')",
    "folder": "import os\nos.chmod('/tmp', 0o500)",
    "descriptors": 'import os\nfor fd in range(3, 64):\n  try: os.write(fd, b\'1\\n{"tests": ["passes"]}\\n\' * 99)\n'
    "  except OSError: pass",
    "closes": "import os\nos.closerange(0, 64)",
    "memory": "x = []\nwhile True: x.append(bytearray(2 ** 20))",
    "builtins": "import builtins, json, os\nbuiltins.exec = json.loads = os.fork = None\nbuiltins.len = lambda x: 0",
    "forks": "import os\nos.fork()",
}
HONEST = (
    "import os\nopen('/tmp/own', 'w').write('x')\nfree = os.listdir('/tmp')\n"
    "def area(side): return side * len([1] * side)"
)


@pytest.mark.parametrize("program", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_program_has_its_own_report_alone(starts, program):
    """The honest ones hold the same file each, so they see whether any other was there before."""
    tests = (*TESTS, "assert free == ['own']")
    honest = [Program(HONEST + f"\n# {i}", tests) for i in range(2)]
    batch = [honest[0], Program(program + "\ndef area(side): return 7", tests), honest[1]]
    began = time.monotonic()
    one, hostile, two = run_programs(batch, Limits(seconds=1.0))
    assert one.passed and two.passed and one.behaviour == two.behaviour
    assert not hostile.passed and hostile.started
    assert time.monotonic() - began < 60  # 1 second for those that hang, on a busy machine
    assert starts[0] == 3


TRACES = {  # with the programs that every pair of sandboxes is started for
    "time": ("import os\nos.utime('/tmp', (1, 1))", [2]),
    "attribute": ("import os\nos.setxattr('/tmp', 'user.x', b'1')", [2]),
    "priority of the group": ("import os\nos.setpriority(os.PRIO_PGRP, 0, 7)", [2]),
    "priority of the user": ("import os\nos.setpriority(os.PRIO_USER, 0, 7)", [2]),
    "a file that is gone": ("import os\nopen('/tmp/x', 'w').close()\nos.unlink('/tmp/x')", [2, 1]),
}
LOOKING = """
import os, time
age = time.time() - os.stat("/tmp").st_mtime
marks, nice = os.listxattr("/tmp"), os.getpriority(os.PRIO_PROCESS, 0)
"""


@pytest.mark.parametrize(("program", "expected"), TRACES.values(), ids=TRACES)
def test_no_program_leaves_a_trace_for_the_next(starts, program, expected):
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    looking = Program(LOOKING, (f"assert marks == [] and nice == {nice} and age < 600",))
    _, report = run_programs([Program(program, ("assert True",)), looking])
    assert report.passed and starts == expected


def test_a_batch_of_harmless_programs_is_one_start(starts):
    reports = run_programs([Program(f"def area(side): return side ** 2 + 0 * {i}", TESTS) for i in range(130)])
    assert all(report.passed for report in reports) and starts == [128, 2]


def test_a_child_that_cannot_lock_itself_runs_nothing(monkeypatch):
    """With a filter that the kernel refuses, no report is made up."""
    monkeypatch.setattr(programs, "rules", lambda: b"\xff" * 16)
    (report,) = run_programs([Program("def area(side): return side ** 2", TESTS)])
    assert not report.started and not report.passed


def test_no_program_is_no_start(starts):
    assert run_programs([]) == [] and starts == [] and math.isfinite(programs.LIMITS.seconds)
