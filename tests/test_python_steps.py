"""Steps of Python code, checked by tests in the sandbox."""

import dataclasses
import json

import pytest
from hostile import programs as hostile
from refusing import refused

from jprm.io.jsonl import dump
from jprm.methods.verify import sandbox
from jprm.methods.verify.programs import check_python
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
