"""Arithmetic and algebra in a step: every equation and inequality that can be read is checked exactly.

A step is right (1) if at least one of its equations can be checked and all that can be hold, wrong (0) if an equation
of plain numbers is false under every way to read it, and unlabelled otherwise: where nothing can be checked, or where
what is false may be meant otherwise. Right says that the working holds, not that it is the working that the problem
asks for.

Rational numbers are compared as fractions, roots and pi by SymPy to 30 digits, expressions with symbols by SymPy as
rational functions (an identity holds; an equation that is none may be a condition and decides nothing), and an equation
in one unknown by its roots beside those of the equation from which the step derives it.

What is read with care: a printed decimal stands for what rounds or truncates to it (10/3 = 3.33), and one that may
itself be rounded for its interval (3.33 * 3 = 10 decides nothing); a percentage is a fraction or a unit (2/50 * 100 =
4%); currency signs, thousands separators and units are dropped, but where minutes meet hours a false equation decides
nothing; GSM8K's `<<48/2=24>>` is an equation of its own.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from jprm.label.expressions import Equation, Token, equations
from jprm.label.verdict import Verdict
from jprm.worker import Worker, serve

LIMIT_S = 5.0
"""Seconds that a step may take."""

_BITS = 4096  # of the numerator and denominator of any number on the way
_NODES = 150  # of an expression that SymPy is given
_DEGREE = 12  # of a power of a sum


def check_arithmetic(text: str, *, limit_s: float = LIMIT_S) -> Verdict:
    """The verdict on one step. May be called from any thread; what takes too long is not checkable."""
    if not any(c.isdigit() for c in text) or not re.search(r"[=<>≈≤≥≠]|\\[a-z]+", text):
        return Verdict(None)
    reply = _worker.ask(text, limit_s)
    return Verdict(*reply) if reply else Verdict(None)


_worker = Worker("jprm.label.arithmetic")

_MARK = re.compile(r"<<([^<>]*)>>")
_HEDGES = re.compile(
    r"round|\babout\b|approx|roughly|nearest|whole|floor|ceil|remainder|integer|\bmod\b|pmod|equiv|\bbase\b|estimat"
    r"|cannot|can't|\bnot\b|n't\b|contradict|incorrect|mistake|\bfalse\b|impossible|instead|\bsuppose|\bguess|\btry\b|"
    r"\?|\bwrong|\binvalid",
    re.IGNORECASE,
)
"""Words beside which a false equation is not the step's claim, or one about whole numbers."""
_FAMILIES = [set(family.split()) for family in (
    "s sec secs second seconds min mins minute minutes h hr hrs hour hours day days week weeks month months year years "
    "decade decades century a.m p.m am pm o'clock",
    "mm cm m km inch inches foot feet ft yard yards mile miles meter meters metre metres kilometers kilometres",
    "mg g kg gram grams kilogram kilograms lb lbs pound pounds ounce ounces oz ton tons",
    "ml l liter liters litre litres cup cups pint pints quart quarts gallon gallons tbsp tsp teaspoon teaspoons "
    "tablespoon tablespoons",
    "$ dollar dollars cent cents penny pennies dime dimes nickel nickels quarter quarters ¢",
    "kb mb gb",
)]  # fmt: skip
_SINGULAR = {"feet": "foot", "inches": "inch"}
_SCALES = set("dozen dozens pair pairs hundred hundreds thousand thousands million millions billion score half".split())


class _Unread(Exception):
    """Beyond the limits, or not of plain numbers."""


def _verdict(text: str) -> tuple[int | None, int, str | None]:
    results: list[tuple[bool | None, str]] = []
    for part in (*_MARK.findall(text), _MARK.sub(" ", text)):
        found, tokens = equations(part)
        results += [(_holds(equation, text), equation.text) for equation in found]
        results += _derivations(found, tokens)
    false = next((shown for holds, shown in results if holds is False), None)
    checked = sum(holds is not None for holds, _ in results)
    return (None if not checked else int(false is None)), checked, false


def _holds(equation: Equation, step: str) -> bool | None:
    bare = all(_printed(side) is not None for side in (equation.left, equation.right))
    if bare:
        return None  # 1 foot = 12 inches
    try:
        if _symbols(equation.left) | _symbols(equation.right):
            same = equation.relation == "=" and not bare and _identical(equation.left, equation.right)
            return True if same else None
        verdicts = [_compare(equation, reading) for reading in _readings(equation)]
    except (_Unread, ZeroDivisionError, OverflowError):
        return None
    if True in verdicts:
        return True
    if None in verdicts or equation.doubtful or _mixed_units(equation.units) or _HEDGES.search(step):
        return None
    return None if equation.relation == "=" and _run_on(equation) else False


def _readings(equation: Equation) -> list[dict[str, bool]]:
    kinds = {node[0] for side in (equation.left, equation.right) for node in _nodes(side)}
    flags = [flag for flag in ("percent", "note", "mixed", "factorial") if flag in kinds]
    return [dict(zip(flags, values, strict=True)) for values in itertools.product((True, False), repeat=len(flags))]


def _compare(equation: Equation, reading: Mapping[str, Any]) -> bool | None:
    relation, sides = equation.relation, (equation.left, equation.right)
    if any(_relative_percent(side) for side in sides):
        return None  # 200 - 10 % = 180
    try:
        left, right = (exact(side, reading) for side in sides)
    except _Irrational:
        return _compare_roots(equation, reading)
    if relation in _ORDER:
        return _ORDER[relation](left, right)
    if left == right:
        return True
    unit = max((p for side in sides if (p := _printed(side))), default=None)
    if unit and _rounds(left, right, unit):
        return True
    if relation == "≈":
        gap = abs(left - right) / max(abs(left), abs(right))
        return True if gap <= Fraction(1, 100) else None if gap <= Fraction(1, 10) else False
    (low, high), (low_2, high_2) = (bounds(side, reading) for side in sides)
    return None if low <= high_2 and low_2 <= high else False


_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "!=": lambda a, b: a != b,
}


def _rounds(left: Fraction, right: Fraction, unit: Fraction) -> bool:
    """Whether one is the other rounded or truncated to `unit`."""
    gap = abs(left - right)
    return gap <= unit / 2 or gap < unit and min(abs(left), abs(right)) % unit == 0


def _printed(side: tuple) -> Fraction | None:
    """The last decimal place of a number that stands alone, 0 for an integer, None for anything else."""
    if side[0] == "neg":
        return _printed(side[1])
    if side[0] == "percent" and side[1][0] == "num":
        return Fraction(1, 10 ** (side[1][2] + 2))
    if side[0] == "num":
        return Fraction(1, 10 ** side[2]) if side[2] else Fraction(0)
    return None


def _relative_percent(node: tuple) -> bool:
    return any(
        n[0] in ("+", "-") and n[2][0] == "percent" and not any(m[0] == "percent" for m in _nodes(n[1]))
        for n in _nodes(node)
    )


def _mixed_units(units: frozenset[str]) -> bool:
    if units & _SCALES:
        return True
    return any(len({_SINGULAR.get(u, u.rstrip("s")) for u in units & family}) > 1 for family in _FAMILIES)


def _run_on(equation: Equation) -> bool:
    """5 + 3 = 8 + 2 = 10: the right side goes on from the result."""
    node = equation.right
    while node[0] in ("+", "-", "*", "/"):
        node = node[1]
    try:
        return node is not equation.right and node[0] == "num" and exact(equation.left, {}) == node[1]
    except (_Unread, _Irrational, ZeroDivisionError):
        return False


class _Irrational(Exception):
    """A root or pi: SymPy's."""


def exact(node: tuple, reading: Mapping[str, Any]) -> Fraction:
    """The value of an expression, in one reading, which also holds the values of its symbols.

    Raises:
      _Irrational, _Unread, ZeroDivisionError: not rational, too large, no value.
    """
    kind = node[0]
    if kind == "num":
        return node[1]
    if kind in ("sqrt", "pi"):
        raise _Irrational
    if kind == "sym":
        if node[1] not in reading:
            raise _Unread
        return reading[node[1]]
    values = [exact(child, reading) for child in node[1:]]
    if kind == "^" and values[1].denominator != 1:
        raise _Irrational
    return _apply(kind, values, reading)


def _apply(kind: str, values: Sequence[Fraction], reading: Mapping[str, Any]) -> Fraction:
    a, b = values[0], values[-1]
    if kind == "^":
        size = max(a.numerator.bit_length(), a.denominator.bit_length())
        if abs(b) > _BITS or size * abs(b) > _BITS:
            raise _Unread
        result = a ** int(b)
    elif kind == "factorial":
        if not reading.get("factorial", True):
            return a
        if a.denominator != 1 or not 0 <= a <= 200:
            raise _Unread
        result = Fraction(math.factorial(int(a)))
    elif kind == "percent":
        return a / 100 if reading.get("percent", True) else a
    elif kind == "note":
        result = a * b if reading.get("note", True) else a
    elif kind == "mixed":
        result = a * b if reading.get("mixed", True) else a + b
    else:
        result = {"neg": lambda: -a, "+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b}[
            kind
        ]()
    if max(result.numerator.bit_length(), result.denominator.bit_length()) > _BITS:
        raise _Unread
    return result


def bounds(node: tuple, reading: Mapping[str, Any]) -> tuple[Fraction, Fraction]:
    """The least and greatest value where every suspect decimal may be anything that rounds to it."""
    if node[0] == "num":
        half = Fraction(1, 2 * 10 ** node[2]) if node[3] else Fraction(0)
        return node[1] - half, node[1] + half
    if node[0] in ("sqrt", "pi", "sym"):
        raise _Unread
    ends = [bounds(child, reading) for child in node[1:]]
    if node[0] == "/" and ends[1][0] <= 0 <= ends[1][1]:
        raise ZeroDivisionError
    corners = [_apply(node[0], values, reading) for values in itertools.product(*ends)]
    return min(corners), max(corners)


def _nodes(node: tuple) -> Iterable[tuple]:
    yield node
    for child in node[1:]:
        if isinstance(child, tuple):
            yield from _nodes(child)


def _symbols(node: tuple) -> set[str]:
    return {n[1] for n in _nodes(node) if n[0] == "sym"}


def _sympy(node: tuple, reading: Mapping[str, Any]) -> Any:
    import sympy

    kind = node[0]
    if kind == "num":
        return sympy.Rational(node[1].numerator, node[1].denominator)
    if kind == "sym":
        return sympy.Symbol(node[1])
    if kind == "pi":
        return sympy.pi
    if not _symbols(node):
        try:
            value = exact(node, reading)
            return sympy.Rational(value.numerator, value.denominator)
        except _Irrational:
            pass
    values = [_sympy(child, reading) for child in node[1:]]
    a, b = values[0], values[-1]
    if kind == "^":
        if not b.is_Rational or abs(b.p) > (_DEGREE if a.free_symbols else 100) or b.q > 10:
            raise _Unread
        return a**b
    if kind == "percent":
        return a / 100 if reading.get("percent", True) else a
    if kind == "note":
        return a * b if reading.get("note", True) else a
    if kind == "mixed":
        return a * b if reading.get("mixed", True) else a + b
    if kind == "factorial":
        raise _Unread
    if kind == "/" and b == 0:
        raise ZeroDivisionError
    return {"neg": -a, "+": a + b, "-": a - b, "*": a * b, "sqrt": sympy.sqrt(a), "/": a / b if b != 0 else None}[kind]


def _compare_roots(equation: Equation, reading: Mapping[str, Any]) -> bool | None:
    if sum(1 for side in (equation.left, equation.right) for _ in _nodes(side)) > _NODES:
        raise _Unread
    left, right = (_sympy(side, reading).evalf(40) for side in (equation.left, equation.right))
    if not (left.is_real and right.is_real):
        return None
    gap, size = abs(left - right), max(abs(left), abs(right))
    if equation.relation in _ORDER:
        return None if gap < size * 1e-30 else bool(_ORDER[equation.relation](left, right))
    unit = max((p for side in (equation.left, equation.right) if (p := _printed(side))), default=0)
    if gap < size * 1e-30 or gap < float(unit):
        return True
    if gap < size * (0.1 if equation.relation == "≈" else 0.005):
        return True if equation.relation == "≈" and gap < size * 0.01 else None
    return False


def _identical(left: tuple, right: tuple) -> bool:
    """Whether two expressions are the same rational function."""
    import sympy

    if sum(1 for side in (left, right) for _ in _nodes(side)) > _NODES:
        raise _Unread
    if any(node[0] in ("sqrt", "percent", "note", "mixed", "factorial") for s in (left, right) for node in _nodes(s)):
        return False
    if left == right:
        return False
    for start in (3, 11):  # most differ at the first point, and SymPy takes milliseconds
        point = {name: Fraction(start + 2 * i, 7) for i, name in enumerate(sorted(_symbols(left) | _symbols(right)))}
        try:
            if exact(left, point) != exact(right, point):
                return False
        except (_Irrational, ZeroDivisionError):
            pass
    one, two = _sympy(left, {}), _sympy(right, {})
    if not (one.free_symbols | two.free_symbols):
        return False
    return sympy.cancel(sympy.together(one - two)) == 0


_FRESH = re.compile(r"\b(case|or|if|when|other|another|similarly|second|also|and|let|where|either|suppose|next|for)\b")


def _derivations(found: Sequence[Equation], tokens: Sequence[Token]) -> list[tuple[bool | None, str]]:
    """4x = 100, then x = 25: an equation in one unknown beside the one in the same unknown before it in the step.

    It holds if its roots are among the other's, and is false if both are linear and their roots differ.
    """
    results = []
    for one, two in itertools.pairwise(found):
        unknown = _symbols(one.left) | _symbols(one.right)
        if len(unknown) != 1 or unknown != _symbols(two.left) | _symbols(two.right):
            continue
        if two.shared or {one.relation, two.relation} != {"="} or one.doubtful or two.doubtful:
            continue
        between = " ".join(token.text.lower() for token in tokens[one.end : two.start])
        if one.left[0] == "sym" and _printed(one.right) is not None or _FRESH.search(between):
            continue
        try:
            results.append((_follows(one, two, unknown.pop()), f"{one.text} ; {two.text}"))
        except (_Unread, ZeroDivisionError, OverflowError):
            continue
    return results


def _follows(one: Equation, two: Equation, unknown: str) -> bool | None:
    import sympy

    if sum(1 for e in (one, two) for side in (e.left, e.right) for _ in _nodes(side)) > _NODES:
        raise _Unread
    x = sympy.Symbol(unknown)
    numerators = []
    for equation in (one, two):
        difference = _sympy(equation.left, {}) - _sympy(equation.right, {})
        numerator = sympy.fraction(sympy.cancel(sympy.together(difference)))[0]
        if not numerator.is_polynomial(x) or not numerator.has(x):
            return None
        polynomial = sympy.Poly(numerator, x)
        if not polynomial.domain.is_Exact or polynomial.degree() > 6:
            return None
        numerators.append(polynomial)
    first, second = numerators
    if first.rem(second.sqf_part()).is_zero:
        return True
    if first.degree() == second.degree() == 1:
        root, printed = (-p.nth(0) / p.nth(1) for p in (first, second))
        unit = _printed(two.right) or 0
        return None if abs(root - printed) <= max(sympy.Rational(1, 100) * abs(root), sympy.Rational(str(unit))) else False
    return None


def _prepare() -> Callable[[Any], Any]:
    import sympy  # noqa: F401  (a second on a quiet machine, before the first question's time runs)

    return _verdict


if __name__ == "__main__":
    serve(_prepare)
