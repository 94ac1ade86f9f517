"""Programs as steps: the first that is wrong, behaviour, and programs that are hostile."""

import dataclasses
import json
import math
import os

import pytest
from families import breadth
from hostile import programs as hostile
from refusing import refused

from jprm.io.jsonl import dump
from jprm.methods.verify import programs, sandbox
from jprm.methods.verify.programs import Program, check_python, run_programs
from jprm.methods.verify.sandbox import Limits
from jprm.methods.verify.verifiers import labelled
from jprm.tree import RecordError, record_of, tree_of

pytestmark = pytest.mark.skipif(sandbox.refusal() is not None, reason=f"needs a sandbox: {sandbox.refusal()}")

TESTS = ["assert area(2) == 4", "assert total([1, 2]) == 5"]


def labels(steps, tests=TESTS, seconds=60.0):
    verdicts = check_python(tree_of({"problem": "p", "steps": steps, "tests": tests}), limits=Limits(seconds=seconds))
    return [verdict.label for verdict in verdicts], [verdict.false for verdict in verdicts]


def test_steps_are_right_as_soon_as_a_test_can_tell():
    steps = ["import math", "def area(side):", "    return side ** 2"]  # no test applies, not complete, and whole
    verdicts, false = labels([*steps, "def total(sides):\n    return sum(area(side) for side in sides)"])
    assert verdicts == [None, None, 1, 1] and not any(false)


def test_the_first_wrong_step_is_found_and_what_follows_is_open():
    steps = ["def area(side):\n    return side ** 2", "def total(sides):\n    return sum(sides)", "print(total([1]))"]
    verdicts, false = labels(steps)
    assert verdicts == [1, 0, None] and false[1] == "AssertionError: "


def test_branches_of_a_tree_are_programs_of_their_own():
    texts = [(-1, "def area(s): return s * s"), (0, "def total(x): return 5"), (0, "def total(x): return 6")]
    nodes = [{"parent": parent, "text": text} for parent, text in texts]
    verdicts = check_python(tree_of({"problem": "p", "nodes": nodes, "tests": TESTS}))
    assert [verdict.label for verdict in verdicts] == [1, 1, 0]


@pytest.mark.parametrize(
    ("step", "false"),
    [
        ("def area(s): return s +", "SyntaxError"),
        ("x = 1 / 0", "ZeroDivisionError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; os._exit(0)", "before the tests"),
        ("import os, time; os.closerange(3, 64); time.sleep(99)", "before the tests"),  # nor does its end take long
        ("def volume(s): return s", "never defined"),
        ("import os; os.fork()", "PermissionError"),
        ("x = bytearray(2 ** 40)", "MemoryError"),
    ],
)
def test_what_makes_a_program_wrong(step, false):
    verdicts, reasons = labels([step], ["assert area(2) == 4"])
    assert verdicts == [0] and false in reasons[0]


def test_a_loop_is_wrong_and_ends():
    assert labels(["while True: pass"], seconds=1.0) == ([0], ["ran longer than 1 seconds"])


def test_fences_hold_the_code():
    verdicts, _ = labels(["First, the area.", "```python\ndef area(s):\n    return s * s\n```\nDone."], TESTS[:1])
    assert verdicts == [None, 1]


@pytest.mark.parametrize("tests", [None, [], "assert 1", [1]])
def test_records_without_tests_are_refused(tests):
    refused(RecordError, "tests", labels, ["x = 1"], tests)


@pytest.mark.parametrize("program", hostile.ODD.values(), ids=hostile.ODD)
def test_an_odd_program_costs_its_own_label_alone(program):
    records = [{"problem": "p", "steps": [step], "tests": TESTS[:1]} for step in (program, "def area(s): return s * s")]
    write = [labelled(tree, check_python(tree)) for tree in map(tree_of, records)]
    assert [tree.nodes[0].label for tree in write] in ([0, 1], [None, 1])
    for tree in write:
        node = dataclasses.replace(tree.nodes[0], text="")
        assert json.loads(dump(record_of(dataclasses.replace(tree, nodes=(node,)))).encode())


@pytest.mark.parametrize("report", hostile.REPORTS, ids=range(len(hostile.REPORTS)))
def test_a_forged_report_of_another_shape_is_incorrect(report):
    write = f"import os\nfor fd in range(3, 40):\n    try: os.write(fd, {report!r}.encode() + b'\\n')\n"
    verdicts, false = labels([write + "    except OSError: pass\nos._exit(0)"], TESTS[:1])
    assert verdicts == [0] and false[0].encode()


@pytest.mark.parametrize("program", hostile.FORGED.values(), ids=range(len(hostile.FORGED)))
def test_no_program_forges_its_tests(program):
    tests = ["assert area(2) == 4", "assert abs(area(3) - 9) < 1"]
    assert labels([program], tests)[0] != [1]


@pytest.mark.parametrize(("program", "test"), hostile.OVERWRITING.values(), ids=hostile.OVERWRITING)
def test_no_program_overwrites_what_a_test_stores(program, test):
    assert labels([program], [test])[0] != [1]


@pytest.mark.parametrize("case", hostile.HIDING.values(), ids=hostile.HIDING)
def test_a_program_may_define_what_python_has(case):
    program, *tests = case
    assert labels(["import math", program], tests) == ([None, 1], [None, None])


def test_a_wrong_function_of_a_builtins_name_is_incorrect():
    assert labels(["import math", "def sum(a, b): return a"], ["assert sum(10, 15) == 6"])[0] == [None, 0]
    assert labels(["import math", "x = 1"], ["assert sum(10, 15) == 6"])[0] == [None, 0]  # never defined


@pytest.mark.parametrize(("program", "test"), hostile.HONEST.values(), ids=hostile.HONEST)
def test_an_honest_program_passes_from_another_process(program, test):
    assert labels([program], [test]) == ([1], [None])


# ---- Programs with tests, many in one sandbox: reports equal brute force, and no program changes another's.


AREAS = ("assert area(2) == 4", "assert area(3) == 9", "assert area(0) == 0")
BODIES = ["side * side", "side + side", "side ** 2", "side * 2", "sum(side for _ in range(side))", "4", "1 / side", "?"]


def brute_force(code):
    """Runs code and tests in this process."""
    names, results = {}, []
    try:
        exec(code, names)
    except SyntaxError:
        return None
    for test in AREAS:
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
    reports = run_programs([Program(code, AREAS) for code in codes])
    assert starts == [len(BODIES)]  # equal programs run once
    for code, report in zip(codes, reports, strict=True):
        expected = brute_force(code)
        actual = [result == "passes" for result in report.results] if report.error is None else None
        assert actual == expected and report.passed == (expected == [True] * 3)


def test_equal_behaviour_is_equal_output_on_the_calls_of_the_tests():
    square, twice, other, double, slow, constant, divides, broken = run_programs(
        [Program(f"def area(side):\n    return {body}\n", AREAS) for body in BODIES]
    )
    assert square.behaviour == other.behaviour == slow.behaviour
    assert twice.behaviour == double.behaviour
    assert len({report.behaviour for report in (square, twice, constant, divides)}) == 4 and broken.behaviour is None


@pytest.mark.parametrize(("first", "second", "equal"), [
    ("{3, 'a', 'b'}", "{'b', 'a', 3}", True), ("{1: 2, 3: 4}", "{3: 4, 1: 2}", True), ("[1, 2]", "[2, 1]", False),
    ("object()", "object()", True), ("1", "1.0", False), ("1 / 0", "[][0]", False),
])  # fmt: skip
def test_behaviour_is_of_values(first, second, equal):
    reports = run_programs([Program(f"def f():\n    return {value}\n", ("f()",)) for value in (first, second)])
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


@pytest.mark.parametrize("name", breadth(HOSTILE, but=["loop", "files", "descriptors"]))
def test_a_hostile_program_has_its_own_report_alone(starts, name):
    """The honest ones hold the same file each, so they see whether any other was there before."""
    tests = (*AREAS, "assert free == ['own']")
    honest = [Program(HONEST + f"\n# {i}", tests) for i in range(2)]
    batch = [honest[0], Program(HOSTILE[name] + "\ndef area(side): return 7", tests), honest[1]]
    for seconds in (1.0, 8.0, 64.0):
        first, hostile, second = run_programs(batch, Limits(seconds=seconds))
        if all(report.started and not report.late for report in (first, second)):
            break  # else a busy machine was too slow for them
    assert first.passed and second.passed and first.behaviour == second.behaviour
    assert not hostile.passed and hostile.started
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
    reports = run_programs([Program(f"def area(side): return side ** 2 + 0 * {i}", AREAS) for i in range(130)])
    assert all(report.passed for report in reports) and starts == [128, 2]


def test_a_child_that_cannot_lock_itself_runs_nothing(monkeypatch):
    """With a filter that the kernel refuses, no report is made up."""
    monkeypatch.setattr(programs, "rules", lambda: b"\xff" * 16)
    (report,) = run_programs([Program("def area(side): return side ** 2", AREAS)])
    assert not report.started and not report.passed


def test_no_program_is_no_start(starts):
    assert run_programs([]) == [] and starts == [] and math.isfinite(programs.LIMITS.seconds)
