"""Numbers in text: what a step computes, what a problem states."""

from __future__ import annotations

import functools
import re

_NUMBER = re.compile(r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?=\D|$)")
_RESULT = re.compile(r"=\s*[-$€£~\s]*((?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?)(?![\d.]*\s*[-+*/x×÷=]\s*[$\d(])")
_LABEL = re.compile(r"^\s*(?:step\s*)?[A-Za-z]?\d+\s*[:.)]\s", re.IGNORECASE)
_MARK = re.compile(r"<<[^<>]*>>")
_WORDS = dict(
    zip("zero one two three four five six seven eight nine ten eleven twelve".split(), range(13), strict=True)
)
_WORDS |= {"half": 2, "twice": 2, "double": 2, "thrice": 3, "triple": 3, "quarter": 4, "dozen": 12, "third": 3}
_WORD = re.compile(rf"\b({'|'.join(_WORDS)})s?\b", re.IGNORECASE)


def value_of(text: str) -> float:
    """Returns the value of a number as text, with thousands separators."""
    return round(float(text.replace(",", "")), 6)


@functools.lru_cache(maxsize=1 << 16)
def numbers(text: str) -> tuple[float, ...]:
    """Returns the numbers of a text in order. A step's label (`A1:`, `Step 2.`) and calculator marks are left out."""
    plain = _MARK.sub("", _LABEL.sub("", text))
    return tuple(value_of(match) for match in _NUMBER.findall(plain) if match)


@functools.lru_cache(maxsize=1 << 16)
def results(text: str) -> tuple[float, ...]:
    """Returns what a step computes: the numbers after its equality signs that no further operation follows."""
    plain = _MARK.sub("", _LABEL.sub("", text))
    return tuple(value_of(match) for match in _RESULT.findall(plain) if match)


def value_of_step(text: str) -> float | None:
    """Returns a step's value: its last result, else its last number; None without a number."""
    values = results(text) or numbers(text)
    return values[-1] if values else None


@functools.lru_cache(maxsize=1 << 12)
def of_problem(text: str) -> frozenset[float]:
    """Returns the numbers that a problem states, in digits or words."""
    return frozenset(numbers(text)) | {float(_WORDS[word.lower()]) for word in _WORD.findall(text)}
