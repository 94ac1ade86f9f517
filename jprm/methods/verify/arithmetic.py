"""Checks the arithmetic and algebra of a step exactly: every readable equation and inequality.

A step is correct (1) if at least one of its equations can be checked and all checkable ones hold. It is incorrect (0)
if an equation of plain numbers is false in every reading. Otherwise it is unlabelled: no equation is checkable, or a
false one may mean something else. Correct means the calculation holds, not that it solves the problem.

Rational numbers are compared as fractions; roots and pi by SymPy to 30 digits. Expressions with symbols are compared by
SymPy as rational functions; a non-identity may be a condition, so it is undecided. An equation in one unknown is
compared by its roots with the equation from which it derives.

A printed decimal may be rounded or truncated (10/3 = 3.33). A decimal that may itself be rounded stands for its
interval (3.33 * 3 = 10 is undecided). A percentage is a fraction or a unit (2/50 * 100 = 4%). If a word may be a
function, its term is not read (log(100) + 1 = 3). Currency signs, thousands separators and units are dropped, but a
false equation between minutes and hours is undecided. GSM8K's `<<48/2=24>>` is a separate equation.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from operator import ge, gt, le, lt, ne
from typing import Any

from jprm.methods.verify import Verdict
from jprm.methods.verify.equations import Equation, Token, equations
from jprm.methods.worker import Worker, serve

LIMIT_S = 5.0
"""Time limit per step, in seconds."""

_NODES = 150  # of an expression for SymPy


def check_arithmetic(text: str, *, limit_s: float = LIMIT_S) -> Verdict:
    """Checks one step: label 0 if an equation is false, 1 if at least one holds and no other is false.

    The label is `None` if no equation is decided, or after `limit_s` seconds. `checked` counts decided equations;
    `false` is the first false one. Thread-safe: blocks while another thread's step is checked, in a worker process that
    the first call starts. Raises OSError if it does not start.
    """
    if not any(c.isdigit() for c in text) or not re.search(r"[=<>≈≤≥≠]|\\[a-z]+", text):
        return Verdict(None)
    reply = _worker.ask(text, limit_s)
    return Verdict(*reply) if reply else Verdict(None)


@functools.lru_cache(maxsize=1 << 18)
def label_of(step: str) -> int | None:
    """Returns `check_arithmetic`'s label: 1 correct, 0 incorrect, `None` if undecided. Cached.

    A step that was late stays undecided for later calls. Raises OSError if the worker process does not start.
    """
    return check_arithmetic(step).label


_worker = Worker("jprm.methods.verify.arithmetic")

_MARK = re.compile(r"<<([^<>]*)>>")
_HEDGES = re.compile(
    r"round|\babout\b|approx|roughly|nearest|whole|floor|ceil|remainder|integer|\bmod\b|pmod|equiv|\bbase\b|estimat"
    r"|cannot|can't|\bnot\b|n't\b|contradict|incorrect|mistake|\bfalse\b|impossible|instead|\bsuppose|\bguess|\btry\b|"
    r"\?|\bwrong|\binvalid",
    re.IGNORECASE,
)
"""Words suggesting that a false equation is not the step's claim, or is about whole numbers."""
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


def _verdict(text: str) -> tuple[int | None, int, str | None]:
    results: list[tuple[bool | None, str]] = []
    for part in (*_MARK.findall(text), _MARK.sub(" ", text)):
        claims, tokens = equations(part)
        results += [(_holds(equation, text), equation.text) for equation in claims]
        results += _derivations(claims, tokens)
    false = next((shown for holds, shown in results if holds is False), None)
    checked = sum(holds is not None for holds, _ in results)
    return int(false is None) if checked else None, checked, false


def _holds(equation: Equation, step: str) -> bool | None:
    if not equation.shared and all(_printed(side) is not None for side in (equation.left, equation.right)):
        return None  # 1 foot = 12 inches
    try:
        if symbols_of(equation.left) | symbols_of(equation.right):
            return equation.relation == "=" and _identical(equation.left, equation.right) or None
        verdicts = [_compare(equation, reading) for reading in _readings(equation)]
    except (Unread, ZeroDivisionError, OverflowError):
        return None
    if True in verdicts:
        return True
    if None in verdicts or equation.doubtful or _mixed_units(equation.units) or _HEDGES.search(step):
        return None
    return None if equation.relation == "=" and _run_on(equation) else False


def _readings(equation: Equation) -> list[dict[str, bool]]:
    kinds = {node[0] for side in (equation.left, equation.right) for node in nodes_of(side)}
    flags = [flag for flag in ("percent", "note", "mixed", "factorial", "either") if flag in kinds]
    return [dict(zip(flags, values, strict=True)) for values in itertools.product((True, False), repeat=len(flags))]


def _compare(equation: Equation, reading: Mapping[str, Any]) -> bool | None:
    relation, sides = equation.relation, (equation.left, equation.right)
    if any(_relative_percent(side) for side in sides):
        return None  # 200 - 10 % = 180
    try:
        left, right = (exact(side, reading) for side in sides)
    except Irrational:
        return _compare_roots(equation, reading)
    if relation in _ORDER:
        return _ORDER[relation](left, right)
    if left == right:
        return True
    if (unit := _unit(equation)) and _rounds(left, right, unit):
        return True
    if relation == "≈":
        gap = abs(left - right) / max(abs(left), abs(right))
        return True if gap <= Fraction(1, 100) else None if gap <= Fraction(1, 10) else False
    (low, high), (low_2, high_2) = (bounds(side, reading) for side in sides)
    return None if low <= high_2 and low_2 <= high else False


_ORDER: dict[str, Callable[[Any, Any], Any]] = {"<": lt, ">": gt, "<=": le, ">=": ge, "!=": ne}


def _rounds(left: Fraction, right: Fraction, unit: Fraction) -> bool:
    """Returns whether one number is the other rounded or truncated to `unit`."""
    gap = abs(left - right)
    return gap <= unit / 2 or gap < unit and min(abs(left), abs(right)) % unit == 0


def _printed(side: tuple) -> Fraction | None:
    """Returns the last decimal place of a plain number, 0 for an integer; other expressions have no such place."""
    if side[0] == "neg":
        return _printed(side[1])
    if side[0] == "percent" and side[1][0] == "num":
        return Fraction(1, 10 ** (side[1][2] + 2))
    if side[0] == "num":
        return Fraction(1, 10 ** side[2]) if side[2] else Fraction(0)
    return None


def _unit(equation: Equation) -> Fraction:
    """Returns the larger last decimal place of the plain-number sides; 0 without decimals."""
    return max(_printed(equation.left) or Fraction(0), _printed(equation.right) or Fraction(0))


def _relative_percent(node: tuple) -> bool:
    return any(
        n[0] in ("+", "-") and n[2][0] == "percent" and not any(m[0] == "percent" for m in nodes_of(n[1]))
        for n in nodes_of(node)
    )


def _mixed_units(units: frozenset[str]) -> bool:
    if units & _SCALES:
        return True
    return any(len({_SINGULAR.get(u, u.rstrip("s")) for u in units & family}) > 1 for family in _FAMILIES)


def _run_on(equation: Equation) -> bool:
    """Returns whether the right side continues the calculation, as in 5 + 3 = 8 + 2 = 10."""
    node = equation.right
    while node[0] in ("+", "-", "*", "/"):
        node = node[1]
    try:
        return node is not equation.right and node[0] == "num" and exact(equation.left, {}) == node[1]
    except (Unread, Irrational, ZeroDivisionError):
        return False


def _compare_roots(equation: Equation, reading: Mapping[str, Any]) -> bool | None:
    _check_size(equation.left, equation.right)
    left, right = (sympy_of(side, reading).evalf(40) for side in (equation.left, equation.right))
    if not (left.is_real and right.is_real):
        return None
    gap, size = abs(left - right), max(abs(left), abs(right))
    if equation.relation in _ORDER:
        return None if gap < size * 1e-30 else bool(_ORDER[equation.relation](left, right))
    if gap < size * 1e-30 or gap < float(_unit(equation)):
        return True
    if equation.relation == "≈" and gap < size * 0.01:
        return True
    return None if gap < size * (0.1 if equation.relation == "≈" else 0.005) else False


def _identical(left: tuple, right: tuple) -> bool:
    """Returns whether two expressions are equal as rational functions."""
    import sympy

    _check_size(left, right)
    unsure = {"sqrt", "percent", "note", "mixed", "factorial", "either"}
    if left == right or unsure & {node[0] for side in (left, right) for node in nodes_of(side)}:
        return False
    names = sorted(symbols_of(left) | symbols_of(right))
    for start in (3, 11):  # most differ at the first point, and SymPy takes milliseconds
        point = {name: Fraction(start + 2 * i, 7) for i, name in enumerate(names)}
        with contextlib.suppress(Irrational, ZeroDivisionError):
            if exact(left, point) != exact(right, point):
                return False
    first, second = sympy_of(left, {}), sympy_of(right, {})
    return bool(first.free_symbols | second.free_symbols) and sympy.cancel(sympy.together(first - second)) == 0


_FRESH = re.compile(
    r"\b(case|or|if|when|other|another|similarly|second|also|and|let|where|either|suppose|next)\b|\bfor\W*$"
)


def _derivations(claims: Sequence[Equation], tokens: Sequence[Token]) -> list[tuple[bool | None, str]]:
    """Checks an equation in one unknown against the step's previous one, e.g. 4x = 100, then x = 25.

    It holds if its roots are among those of the previous equation; it is false if both are linear with different roots.
    """
    results = []
    for a, b in itertools.pairwise(claims):
        unknown = symbols_of(a.left) | symbols_of(a.right)
        if len(unknown) != 1 or unknown != symbols_of(b.left) | symbols_of(b.right):
            continue
        if b.shared or a.left == b.left or {a.relation, b.relation} != {"="} or a.doubtful or b.doubtful:
            continue
        between = " ".join(token.text.lower() for token in tokens[a.end : b.start])
        if a.left[0] == "sym" and _printed(a.right) is not None or _FRESH.search(between):
            continue
        try:
            results.append((_follows(a, b, unknown.pop()), f"{a.text} ; {b.text}"))
        except (Unread, ZeroDivisionError, OverflowError):
            continue
    return results


def _follows(earlier: Equation, later: Equation, unknown: str) -> bool | None:
    import sympy

    _check_size(earlier.left, earlier.right, later.left, later.right)
    x = sympy.Symbol(unknown)
    numerators = []
    for equation in (earlier, later):
        difference = sympy_of(equation.left, {}) - sympy_of(equation.right, {})
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
        unit = sympy.Rational(str(_printed(later.right) or 0))
        return None if abs(root - printed) <= max(abs(root) / 100, unit) else False
    return None


# ---- Values of expressions: as fractions, as intervals and as SymPy expressions.

_BITS = 4096  # of the numerator and denominator of any number on the way
_DEGREE = 12  # of a power of a sum


class Unread(Exception):
    """The expression exceeds the limits, or has symbols without values."""


class Irrational(Exception):
    """The expression contains a root or pi, which SymPy must evaluate."""


def exact(node: tuple, reading: Mapping[str, Any]) -> Fraction:
    """Returns the exact value of an expression, e.g. of `("+", ("num", Fraction(1), 0, False), ("sym", "x"))`.

    `reading` maps symbols to values (Fraction), and ambiguous kinds to `True` (if absent too) or `False`: `percent` is
    a hundredth or a unit, `note` and `mixed` a product or a remark and a sum, `factorial` is one or an exclamation
    mark, and `either` has a minus sign or a bullet. {} takes the first of each.

    Raises:
      Irrational, Unread, ZeroDivisionError: it has a root or pi, is too large or has unknown symbols, or divides by 0.
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
    return _number(kind, values, reading)


def _number(kind: str, values: Sequence[Fraction], reading: Mapping[str, Any]) -> Fraction:
    """Returns `_combined` of fractions, also for powers and factorials within the limits."""
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
    else:
        result = _combined(kind, values, reading)
        if kind in ("percent", "either"):
            return result
    if max(result.numerator.bit_length(), result.denominator.bit_length()) > _BITS:
        raise Unread
    return result


def _combined(kind: str, values: Sequence[Any], reading: Mapping[str, Any]) -> Any:
    """Applies an operation in a reading, to fractions or SymPy expressions."""
    a, b = values[0], values[-1]
    first = reading.get(kind, True)  # of the two readings of an operation that has two
    if kind == "percent":
        return a / 100 if first else a
    if kind == "note":
        return a * b if first else a
    if kind == "mixed":
        return a * b if first else a + b
    if kind == "either":
        return a if first else b
    if kind == "/" and b == 0:
        raise ZeroDivisionError
    return {"neg": lambda: -a, "+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b}[kind]()


def bounds(node: tuple, reading: Mapping[str, Any]) -> tuple[Fraction, Fraction]:
    """Returns (least, greatest) value, if each suspect decimal may be any number that rounds to it.

    `reading` as in `exact`.

    Raises Unread for roots, pi and symbols or too large numbers, and ZeroDivisionError if a divisor may be 0.
    """
    if node[0] == "num":
        half = Fraction(1, 2 * 10 ** node[2]) if node[3] else Fraction(0)
        return node[1] - half, node[1] + half
    if node[0] in ("sqrt", "pi", "sym"):
        raise Unread
    ends = [bounds(child, reading) for child in node[1:]]
    if node[0] == "/" and ends[1][0] <= 0 <= ends[1][1]:
        raise ZeroDivisionError
    corners = [_number(node[0], values, reading) for values in itertools.product(*ends)]
    return min(corners), max(corners)


def nodes_of(node: tuple) -> Iterable[tuple]:
    """Yields a node, a tuple (kind, *children), and all nodes below it, parents first; other children are left out."""
    yield node
    for child in node[1:]:
        if isinstance(child, tuple):
            yield from nodes_of(child)


def _check_size(*sides: tuple) -> None:
    if sum(1 for side in sides for _ in nodes_of(side)) > _NODES:
        raise Unread


def symbols_of(node: tuple) -> set[str]:
    """Returns the names of the symbols in an expression; empty if there are only numbers."""
    return {n[1] for n in nodes_of(node) if n[0] == "sym"}


def sympy_of(node: tuple, reading: Mapping[str, Any]) -> Any:
    """Returns the expression as a `sympy.Expr`. `reading` decides ambiguous operators, as in `exact`.

    Symbols stay symbols, whatever `reading` has. Raises Unread if it is too large, and ZeroDivisionError.
    """
    import sympy

    kind = node[0]
    if kind == "num":
        return sympy.Rational(node[1].numerator, node[1].denominator)
    if kind == "sym":
        return sympy.Symbol(node[1])
    if kind == "pi":
        return sympy.pi
    if not symbols_of(node):
        with contextlib.suppress(Irrational):
            value = exact(node, reading)
            return sympy.Rational(value.numerator, value.denominator)
    values = [sympy_of(child, reading) for child in node[1:]]
    a, b = values[0], values[-1]
    if kind == "^":
        if not b.is_Rational or abs(b.p) > (_DEGREE if a.free_symbols else 100) or b.q > 10:
            raise Unread
        return a**b
    if kind == "factorial":
        raise Unread
    return sympy.sqrt(a) if kind == "sqrt" else _combined(kind, values, reading)


def _prepare() -> Callable[[Any], Any]:
    import sympy  # noqa: F401  (a second on a quiet machine, before the first question's time runs)

    return _verdict


if __name__ == "__main__":
    serve(_prepare)
