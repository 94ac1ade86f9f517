"""Verifiers: what judges a chain's answer and its steps, by names in an experiment.

A verifier takes a problem's record and the steps' texts, and returns a reward in [0, 1]. A check of the working returns
True, False or None (not checkable) for each step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jprm import registry
from jprm.answers import equivalent, extract_answer
from jprm.verify.arithmetic import check_arithmetic

Record = Mapping[str, Any]
Verifier = Callable[[Record, Sequence[str]], float]
Working = Callable[[Record, Sequence[str]], Sequence[bool | None]]


def answer(record: Record, steps: Sequence[str]) -> float:
    """Returns 1 where the chain's final answer equals the record's, else 0."""
    return float(_equivalent(record["answer"], "\n".join(steps)))


def arithmetic(record: Record, steps: Sequence[str]) -> list[bool | None]:
    """Returns whether the equations of each step hold; None for a step without any."""
    del record
    return [None if (label := _arithmetic(step)) is None else bool(label) for step in steps]


VERIFIERS: dict[str, Verifier] = {"answer": answer}
WORKING: dict[str, Working] = {"arithmetic": arithmetic}


def find(name: str, known: Mapping[str, Any], what: str) -> Any:
    """Returns the function of a registered name, `module:FUNCTION` or `FILE.py:FUNCTION`; errors as `registry.find`."""
    return registry.find(name, known, what, Callable, files=True)


def right_working(verdicts: Sequence[bool | None]) -> bool:
    """Returns whether no step is found false and at least one is found true."""
    return any(verdicts) and False not in verdicts


@functools.lru_cache(maxsize=1 << 16)
def _equivalent(truth: str | float, text: str) -> bool:
    return equivalent(truth, extract_answer(text))


@functools.lru_cache(maxsize=1 << 16)
def _arithmetic(step: str) -> int | None:
    return check_arithmetic(step).label
