"""Values of expressions: as fractions, as intervals and as SymPy expressions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

_BITS = 4096  # of the numerator and denominator of any number on the way
_DEGREE = 12  # of a power of a sum


class Unread(Exception):
    """Raised for an expression beyond the limits or not of plain numbers."""


class Irrational(Exception):
    """Raised for a root or pi, which SymPy evaluates."""


def exact(node: tuple, reading: Mapping[str, Any]) -> Fraction:
    """Returns the value of an expression in one reading, which also has the values of its symbols.

    Raises:
      Irrational, Unread, ZeroDivisionError: not rational, too large, no value.
    """
    kind = node[0]
    if kind == "num":
        return node[1]
    if kind in ("sqrt", "pi"):
        raise Irrational
    if kind == "sym":
        if node[1] not in reading:
            raise Unread
        return reading[node[1]]
    values = [exact(child, reading) for child in node[1:]]
    if kind == "^" and values[1].denominator != 1:
        raise Irrational
    return _apply(kind, values, reading)


def _apply(kind: str, values: Sequence[Fraction], reading: Mapping[str, Any]) -> Fraction:
    a, b = values[0], values[-1]
    if kind == "^":
        size = max(a.numerator.bit_length(), a.denominator.bit_length())
        if abs(b) > _BITS or size * abs(b) > _BITS:
            raise Unread
        result = a ** int(b)
    elif kind == "factorial":
        if not reading.get("factorial", True):
            return a
        if a.denominator != 1 or not 0 <= a <= 200:
            raise Unread
        result = Fraction(math.factorial(int(a)))
    elif kind == "percent":
        return a / 100 if reading.get("percent", True) else a
    elif kind == "note":
        result = a * b if reading.get("note", True) else a
    elif kind == "either":
        return a if reading.get("either", True) else b
    elif kind == "mixed":
        result = a * b if reading.get("mixed", True) else a + b
    else:
        result = {"neg": lambda: -a, "+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b}[
            kind
        ]()
    if max(result.numerator.bit_length(), result.denominator.bit_length()) > _BITS:
        raise Unread
    return result


def bounds(node: tuple, reading: Mapping[str, Any]) -> tuple[Fraction, Fraction]:
    """Returns the least and greatest value if every suspect decimal may be anything that rounds to it."""
    if node[0] == "num":
        half = Fraction(1, 2 * 10 ** node[2]) if node[3] else Fraction(0)
        return node[1] - half, node[1] + half
    if node[0] in ("sqrt", "pi", "sym"):
        raise Unread
    ends = [bounds(child, reading) for child in node[1:]]
    if node[0] == "/" and ends[1][0] <= 0 <= ends[1][1]:
        raise ZeroDivisionError
    corners = [_apply(node[0], values, reading) for values in itertools.product(*ends)]
    return min(corners), max(corners)


def nodes_of(node: tuple) -> Iterable[tuple]:
    yield node
    for child in node[1:]:
        if isinstance(child, tuple):
            yield from nodes_of(child)


def symbols_of(node: tuple) -> set[str]:
    return {n[1] for n in nodes_of(node) if n[0] == "sym"}


def sympy_of(node: tuple, reading: Mapping[str, Any]) -> Any:
    import sympy

    kind = node[0]
    if kind == "num":
        return sympy.Rational(node[1].numerator, node[1].denominator)
    if kind == "sym":
        return sympy.Symbol(node[1])
    if kind == "pi":
        return sympy.pi
    if not symbols_of(node):
        try:
            value = exact(node, reading)
            return sympy.Rational(value.numerator, value.denominator)
        except Irrational:
            pass
    values = [sympy_of(child, reading) for child in node[1:]]
    a, b = values[0], values[-1]
    if kind == "^":
        if not b.is_Rational or abs(b.p) > (_DEGREE if a.free_symbols else 100) or b.q > 10:
            raise Unread
        return a**b
    if kind == "percent":
        return a / 100 if reading.get("percent", True) else a
    if kind == "note":
        return a * b if reading.get("note", True) else a
    if kind == "mixed":
        return a * b if reading.get("mixed", True) else a + b
    if kind == "either":
        return a if reading.get("either", True) else b
    if kind == "factorial":
        raise Unread
    if kind == "/" and b == 0:
        raise ZeroDivisionError
    return {"neg": -a, "+": a + b, "-": a - b, "*": a * b, "sqrt": sympy.sqrt(a), "/": a / b if b != 0 else None}[kind]
