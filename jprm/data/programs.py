"""HumanEval (Chen et al., arXiv 2107.03374), MBPP (Austin et al., arXiv 2108.07732), and our own records of programs.

A solution becomes a chain of lines or statements, which `jprm label` judges by running it with the record's tests.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import tokenize
from collections.abc import Iterator
from typing import Any, Literal

from jprm.data.reader import Reader, Record, take
from jprm.fields import tests_of
from jprm.tree import RecordError

_HUMAN_EVAL = ("prompt", "test", "entry_point", "canonical_solution")


@dataclasses.dataclass(frozen=True)
class ProgramOptions:
    """Attributes:
    steps: what one step is: a line, or a statement (a logical line: a bracket or a string may go over several).
    """

    steps: Literal["lines", "statements"]


def parse(item: Any, where: str, options: ProgramOptions) -> Iterator[Record]:
    """Yields the record with its `tests`; its solution, if it is whole, as `steps`.

    Layouts, told apart by their keys:

    - {"problem", "tests", "prelude"?} with a whole "solution", or with "steps", "samples" or "nodes", which stay.
    - HumanEval's {"prompt", "test", "entry_point", "canonical_solution"}: the prompt is also the `prelude`, the code
      before the first step, and "test" with a call of its `check` is one test.
    - MBPP's {"text" or "prompt", "code", "test_list"}: every test runs after "test_imports" and "test_setup_code".

    Other keys are kept.
    """
    if not isinstance(item, dict):
        raise RecordError(where, "record", "is no object", 'Write {"problem": ..., "tests": [...], "solution": ...}.')
    if "entry_point" in item:
        record, solution = _human_eval(item, where)
    elif "test_list" in item:
        record, solution = _mbpp(item, where)
    else:
        take(item, "problem", str, where)
        record = {key: value for key, value in item.items() if key != "solution"}
        solution = ("solution", take(item, "solution", str, where)) if "solution" in item else None
    tests_of(record, where)
    if solution:
        field, code = solution
        record["steps"] = _steps(code, record.get("prelude", ""), options, where, field)
        record.setdefault("correct", True)
    yield record


def _human_eval(item: dict, where: str) -> tuple[Record, tuple[str, str]]:
    prompt, test, name, solution = (take(item, key, str, where) for key in _HUMAN_EVAL)
    record = {"problem": prompt, "prelude": prompt, "tests": [f"{test}\ncheck({name})"]}
    return record | _others(item, _HUMAN_EVAL), ("canonical_solution", solution)


def _mbpp(item: dict, where: str) -> tuple[Record, tuple[str, str]]:
    text = "text" if "text" in item else "prompt"
    tests = take(item, "test_list", list, where)
    if not all(isinstance(test, str) for test in tests):
        raise RecordError(where, "test_list", "is no list of statements", "Is this file MBPP's?")
    setup = [*take({"test_imports": [], **item}, "test_imports", list, where)]
    setup.append(take({"test_setup_code": "", **item}, "test_setup_code", str, where))
    before = "".join(f"{part}\n" for part in setup if str(part).strip())
    record = {"problem": take(item, text, str, where), "tests": [before + test for test in tests]}
    others = _others(item, (text, "code", "test_list", "test_imports", "test_setup_code"))
    return record | others, ("code", take(item, "code", str, where))


def _others(item: dict, known: tuple[str, ...]) -> Record:
    return {key: value for key, value in item.items() if key not in known}


def _steps(code: str, prelude: str, options: ProgramOptions, where: str, field: str) -> list[str]:
    """Returns the code's lines or statements, without blank lines between them."""
    code = code.replace("\r\n", "\n").expandtabs()
    try:
        meant = ast.dump(ast.parse(prelude + code))
        pieces = code.split("\n") if options.steps == "lines" else list(_statements(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError) as error:
        raise RecordError(where, field, f"is no Python: {error}", "Remove the record, or mend its code.") from None
    steps = [piece.rstrip() for piece in pieces if piece.strip()]
    try:
        same = ast.dump(ast.parse(prelude + "\n".join(steps))) == meant
    except SyntaxError:
        same = False
    if not same:
        remedy = "Give --set steps=statements, which keeps texts whole."
        raise RecordError(where, field, "changes without its blank lines: a text in it has some", remedy)
    return steps


def _statements(code: str) -> Iterator[str]:
    """Yields the logical lines, each with the comments before it."""
    lines, start = code.split("\n"), 0
    for token in tokenize.generate_tokens(io.StringIO(code + "\n").readline):
        if token.type == tokenize.NEWLINE:
            yield "\n".join(lines[start : token.end[0]]).strip("\n")
            start = token.end[0]


READER = Reader(parse, ProgramOptions)
