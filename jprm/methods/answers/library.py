"""Compares answers with math-verify in a worker process, and double-checks its verdict on numbers.

The worker is killed if a comparison takes too long. math-verify's own time limit is a SIGALRM, which raises outside the
main thread, cancels the caller's alarm and cannot interrupt one long integer operation (9**9**9**9). So it is off, and
the worker's time and memory are limited from outside.

math-verify calls two numbers equal if their difference rounds to 0 at 6 decimals, and treats factors below 1e-15 as 0.
So numbers it calls equal are compared again here, relative to their size.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

from jprm.methods.worker import Worker, serve

ROUNDED = 2e-6
"""Relative tolerance if one of two numbers may be rounded, e.g. 0.333333 and 1/3."""

_DIGITS = 120  # to which exact numbers are compared

_worker = Worker("jprm.methods.answers.library")


def compare(truth: str, answer: str, limit_s: float) -> bool | None:
    """Returns whether two LaTeX answers are equal; `None` if either does not parse or `limit_s` seconds ran out.

    They must have no delimiters, e.g. `\\frac{1}{2}`; unreadable parts are skipped silently. Blocks while the worker
    process, which the first call starts, answers another thread. Raises OSError if it does not start.
    """
    return _worker.ask([truth, answer], limit_s)


def _prepare() -> Callable[[Any], Any]:
    from math_verify import parse, verify

    @functools.lru_cache(1 << 12)
    def parsed(text: str) -> list[Any]:
        return parse(f"\\boxed{{{text}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]  # no limit

    @functools.lru_cache(1 << 12)
    def coarse(text: str) -> list[complex] | None:
        return None if "%" in text or "percent" in text else _numbers(parsed(text)[0])

    def reply(pair: list[str]) -> bool | None:
        truth, answer = map(parsed, pair)
        if len(truth) < 2 or len(answer) < 2:  # only the text, or nothing: our own comparison is as good
            return None
        left, right = map(coarse, pair)
        if left is not None and right is not None and _apart(left, right, 1e-4, 1e-6):  # much faster than `verify`
            return False
        if verify(truth, answer, timeout_seconds=None):
            return not _differ(truth[0], answer[0])
        left, right = (_with_imaginary(side[0]) for side in (truth, answer))
        return (left is not truth[0] or right is not answer[0]) and verify(left, right, timeout_seconds=None)

    return reply


def _with_imaginary(parsed: Any) -> Any:
    """Replaces the symbol i by the imaginary unit in a parsed expression."""
    import sympy

    if not isinstance(parsed, sympy.Expr) or not (at := [(s, sympy.I) for s in parsed.free_symbols if str(s) == "i"]):
        return parsed
    return parsed.subs(at).doit()


def _members(parsed: Any) -> list[Any] | None:
    """Returns the members of a tuple, set or interval, or [the expression]; `None` for other objects."""
    import sympy

    members: list[Any] = [parsed]
    if isinstance(parsed, sympy.FiniteSet | sympy.Tuple):
        members = list(parsed.args)
    elif isinstance(parsed, sympy.Interval):
        members = [parsed.start, parsed.end]
    return members if all(isinstance(member, sympy.Expr) for member in members) else None


def _numbers(parsed: Any) -> list[complex] | None:
    """Evaluates an answer with a fixed value per symbol; `None` if a member is not a finite number."""
    import sympy

    members = _members(parsed)
    if members is None:
        return None
    numbers = []
    for member in members:
        at: dict[Any, Any] = {s: 1 + zlib.crc32(s.name.encode()) / 2**32 for s in member.free_symbols}  # pyright: ignore
        numbers.append(complex(member.evalf(15, subs={s: sympy.I if s.name == "i" else x for s, x in at.items()})))
    return numbers if all(math.isfinite(x.real) and math.isfinite(x.imag) for x in numbers) else None


def _apart(left: list[Any], right: list[Any], absolute: Any, relative: Any) -> bool:
    """Returns whether some number of either answer has no close number in the other."""
    return any(
        all(abs(x - y) > absolute + relative * max(abs(x), abs(y)) for y in others)
        for numbers, others in ((left, right), (right, left))
        for x in numbers
    )


def _differ(truth: Any, answer: Any) -> bool:
    """Returns whether answers equal to math-verify differ numerically, relative to their size."""
    import sympy

    left, right = _members(truth), _members(answer)
    if left is None or right is None or any(side.free_symbols or not side.is_number for side in left + right):
        return False
    if any(side.has(sympy.Float) for side in left + right):
        of_one, of_two = _numbers(sympy.Tuple(*left)), _numbers(sympy.Tuple(*right))
        return of_one is not None and of_two is not None and _apart(of_one, of_two, 1e-300, ROUNDED)
    left, right = ([side.doit() for side in sides] for sides in (left, right))
    if all(side.is_Rational for side in left + right):
        return set(left) != set(right)
    left, right = ([side.evalf(_DIGITS) for side in sides] for sides in (left, right))
    if not all(side.is_number and side.is_finite for side in left + right):
        return False
    return _apart(left, right, 0, sympy.Float(10) ** -(_DIGITS - 20))


if __name__ == "__main__":
    serve(_prepare)
