"""Programs as sources: published layouts, steps that join to the same program, and errors that name the place."""

import ast
import json

import pytest

from jprm.apps import cli
from jprm.methods.data.readers import find
from jprm.methods.verify import sandbox
from jprm.methods.verify.programs import program_of
from jprm.methods.verify.verifiers import VERIFIERS
from jprm.tree import tree_of

CODE = """def total(xs):

    # the sum
    t = 0
    for x in (
        xs
    ):
        t += x
    return t
"""
TEXT = 'def f():\n    """One.\n\n    Two."""\n    return 1\n'
OWN = {"problem": "Sum a list.", "tests": ["assert total([1, 2]) == 3"], "solution": CODE, "id": 7}
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'import math\n\n\ndef area(r):\n    """ The area of a circle.\n    """\n',
    "entry_point": "area",
    "canonical_solution": "    square = r * r\n\n    return math.pi * square\n",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert abs(candidate(1) - 3.14159) < 1e-4\n",
}
MBPP = {
    "task_id": 2,
    "text": "Write a function to add.",
    "code": "def add(a, b):\r\n    return a + b",
    "test_list": ["assert add(1, ONE) == 2", "assert math.isclose(add(0.1, 0.2), 0.3)"],
    "test_setup_code": "ONE = 1",
    "challenge_test_list": [],
}
SANITIZED = {key: MBPP[key] for key in ("task_id", "code")} | {
    "prompt": "Write a function to add.", "test_imports": ["import math"], "test_list": MBPP["test_list"][1:]
}  # fmt: skip


def read(tmp_path, *items, steps="lines"):
    (tmp_path / "f.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return [record for _, record in find("programs").read(tmp_path / "f.jsonl", steps=steps)]


LINES = [
    "def total(xs):", "    # the sum", "    t = 0", "    for x in (", "        xs", "    ):", "        t += x",
    "    return t",
]  # fmt: skip
STATEMENTS = [LINES[0], "\n".join(LINES[1:3]), "\n".join(LINES[3:6]), *LINES[6:]]


@pytest.mark.parametrize(("steps", "expected"), [("lines", LINES), ("statements", STATEMENTS)])
def test_steps_are_lines_or_statements(tmp_path, steps, expected):
    (record,) = read(tmp_path, OWN, steps=steps)
    assert record == {"problem": OWN["problem"], "tests": OWN["tests"], "id": 7, "steps": expected, "correct": True}
    assert ast.dump(ast.parse(program_of(record, record["steps"]))) == ast.dump(ast.parse(CODE))


@pytest.mark.skipif(sandbox.refusal() is not None, reason=f"needs a sandbox: {sandbox.refusal()}")
def test_published_layouts_pass_their_tests(tmp_path):
    records = read(tmp_path, HUMAN_EVAL, MBPP | {"test_list": MBPP["test_list"][:1]}, SANITIZED, OWN)
    first, second, third, _ = records
    assert first["steps"] == ["    square = r * r", "    return math.pi * square"] and first["task_id"] == "HumanEval/0"
    assert second["tests"] == ["ONE = 1\nassert add(1, ONE) == 2"] and second["challenge_test_list"] == []
    assert third["tests"] == ["import math\n" + MBPP["test_list"][1]] and third["problem"] == MBPP["text"]
    wrong = [
        (record, [step.replace("square", "7").replace("+", "-") for step in record["steps"]]) for record in records
    ]
    assert VERIFIERS["tests"].rewards([(record, record["steps"]) for record in records]) == [1.0] * 4
    assert VERIFIERS["tests"].rewards(wrong)[:3] == [0.0] * 3


def test_pools_of_programs_stay(tmp_path):
    pool = {"problem": "p", "tests": ["f()"], "samples": [{"steps": ["def f():", "    return 1"]}]}
    assert read(tmp_path, pool) == [pool] and tree_of(pool).kind == "pool"


def test_statements_keep_texts_whole(tmp_path):
    (record,) = read(tmp_path, OWN | {"solution": TEXT}, steps="statements")
    assert record["steps"] == ["def f():", '    """One.\n\n    Two."""', "    return 1"]


def test_prepare_asks_what_a_step_is(tmp_path, capsys):
    (tmp_path / "f.jsonl").write_text(json.dumps(OWN) + "\n")
    command = ["prepare", "programs", "--input", str(tmp_path / "f.jsonl"), "--output", str(tmp_path / "out")]
    assert cli.main(command) == 2
    assert "'statements'" in capsys.readouterr().err
