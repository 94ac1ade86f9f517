"""examples/tutor.md: its program compiles, imports names that exist, and its attempts are as the page says."""

import ast
import importlib
import json

from pages import blocks

from jprm.methods.verify.arithmetic import label_of

BLOCKS = {name: content for name, _, content in blocks("examples/tutor.md") if name}


def test_the_program_imports_names_that_exist():
    for node in ast.walk(ast.parse(BLOCKS["tutor.py"])):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)


def test_only_the_last_attempt_is_clean():
    attempts = [json.loads(line) for line in BLOCKS["attempts.jsonl"].splitlines()]
    answer = json.loads(BLOCKS["problem.jsonl"])["answer"]
    labels = [[label_of(step) for step in attempt["steps"]] for attempt in attempts]
    assert [row.index(0) if 0 in row else None for row in labels] == [3, 1, None]
    assert [attempt["steps"][-1] == f"The answer is {answer}." for attempt in attempts] == [False, True, True]
