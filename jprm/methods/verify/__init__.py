"""Formal labels: steps and whole chains judged by computation, without a human or a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jprm.io.jsonl import RecordError


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
      label: 1 correct, 0 incorrect, None not checkable.
      checked: how many equations, tests or tactics were decided.
      false: what does not hold in an incorrect step.
    """

    label: int | None
    checked: int = 0
    false: str | None = None

    def __post_init__(self):
        if self.false is not None:  # written by the program under test: any length, any code points
            object.__setattr__(self, "false", self.false[:200].encode(errors="backslashreplace").decode())


def tests_of(record: Mapping[str, Any], where: str = "record") -> list[str]:
    """Returns a program's tests: its `tests`, statements that raise where it is wrong.

    Raises RecordError where there are none, or the `prelude`, the code before the program's first step, is no text.
    """
    tests = record.get("tests")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) and test.strip() for test in tests):
        raise RecordError(where, "tests", "is no list of statements", 'Write "tests": ["assert area(2) == 4"].')
    if not isinstance(record.get("prelude", ""), str):
        raise RecordError(where, "prelude", "is no text", "Write the code that stands before the first step.")
    return tests
