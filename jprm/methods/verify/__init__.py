"""Formal labels: steps and whole chains judged by computation, without a human or a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jprm.io.jsonl import RecordError


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of a check.

    Attributes:
      label: 1 correct, 0 incorrect, `None` if not checkable.
      checked: number of decided equations, tests or tactics.
      false: if incorrect, the failing statement or the error, cut to 200 characters.
    """

    label: int | None
    checked: int = 0
    false: str | None = None

    def __post_init__(self):
        if self.false is not None:  # written by the program under test: any length, any code points
            object.__setattr__(self, "false", self.false[:200].encode(errors="backslashreplace").decode())


def tests_of(record: Mapping[str, Any], where: str = "record") -> list[str]:
    """Returns the `tests` of a program's record: statements that raise if the program is wrong.

    `where` begins errors, e.g. `samples.jsonl:12`. Raises RecordError if the tests are missing, empty or no list of
    texts, or if the `prelude` (code before the first step) is not text.
    """
    tests = record.get("tests")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) and test.strip() for test in tests):
        raise RecordError(where, "tests", "is no list of statements", 'Write "tests": ["assert area(2) == 4"].')
    if not isinstance(record.get("prelude", ""), str):
        raise RecordError(where, "prelude", "is no text", "Write the code that stands before the first step.")
    return tests
