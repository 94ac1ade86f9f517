"""Checks of a record's fields: each returns the value, or raises `RecordError` with the place, the reason and a fix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jprm.io.jsonl import RecordError


def type_name(value: Any) -> str:
    names = {type(None): "null or absent", bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def list_of(value: Any, where: str, field: str) -> list:
    if not isinstance(value, list):
        raise RecordError(where, field, f"is {type_name(value)}, not a list", "Write a JSON list.")
    return value


def text_of(value: Any, where: str, field: str) -> str:
    if not isinstance(value, str):
        raise RecordError(where, field, f"is {type_name(value)}, not text", "Write a JSON string.")
    if not value or value.isspace():
        raise RecordError(where, field, "is empty", "Remove it or give it text: nothing can be read from it.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RecordError(where, field, "holds half a surrogate pair", "Write whole characters.") from None
    return value


def number_of(value: Any, where: str, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecordError(where, field, f"is {type_name(value)}, not a number", "Write a finite number.")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        finite = False
    if not finite:
        raise RecordError(where, field, "is not a finite number", "Write a finite number, null where there is none.")
    return value


def label_of(value: Any, semantics: str, where: str, field: str) -> float | None:
    if value is None:
        return None
    number_of(value, where, field)
    if semantics == "rating" and value not in (-1, 0, 1):
        raise RecordError(where, field, f"is {value}, not a rating", "Use -1, 0, 1, or null where there is none.")
    if semantics in ("correctness", "value") and not 0 <= value <= 1:
        remedy = "Use [0, 1], null where there is none, or say `semantics`: rating, advantage or implicit."
        raise RecordError(where, field, f"is {value}, not a {semantics} in [0, 1]", remedy)
    return value


def correct_of(value: Any, where: str, field: str) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise RecordError(where, field, f"is {type_name(value)}, not true or false", "Write true, false or null.")
    return value


def answer_of(value: Any, where: str, field: str) -> str | float | None:
    if isinstance(value, str) or value is None:
        return value
    return number_of(value, where, field)


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
