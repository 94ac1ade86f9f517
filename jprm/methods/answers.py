r"""Finds final answers in the text of chains and compares them.

`math-verify` parses and compares, in a worker process that is killed when an answer takes too long. Its own time limit
is a SIGALRM, which raises outside the main thread, cancels the caller's alarm and cannot interrupt one long operation
on integers (9**9**9**9). So it is off, and the worker's time and memory are limited from outside. After a time-out or a
failure to parse, numbers are compared by value and other answers by their text without LaTeX. Words are compared as
text, ignoring case: math-verify takes them for a product of symbols, in which "red and blue" is "blue and red".

Limits of math-verify 0.9: a percentage equals both its fraction and its number (18% = 0.18 and 18% = 18); units are
dropped (10 cm = 10); a list without brackets is a set (1,2 = 2,1); numbers are equal to 6 decimals (0.333333 = 1/3);
`x=5` equals 5; 1<x<2 equals (1,2) only if it is the true answer, so the true answer comes first; a column vector is no
tuple; times (12:30) are text. It takes 1\,000 for a product and "1000 dollars" for letters, so plain numbers with such
separators and units are read here.
"""

from __future__ import annotations

import decimal
import math
import re
import zlib
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from jprm.io.worker import Worker, serve

LIMIT_S = 5.0
"""Seconds that a comparison may take."""

_LONGEST = 2000  # characters of an answer that the parser reads
_EXACT = decimal.Context(prec=2 * _LONGEST, Emin=-(10**6), Emax=10**6)

_GROUP = r"(?:,|\{,\}|\\[,!;: ]|[ ~\u00a0\u2009\u202f])"  # between thousands
_NUMBER = re.compile(rf"([+-]?)(?=\.?\d)(\d{{1,3}}(?:{_GROUP}\d{{3}})+|\d*)((?:\.\d*)?(?:[eE][+-]?\d{{1,3}})?)")
_COUNTS = (
    r"(?:hundred|thousand|\w*illion|dozen|pair|score|half|halve|third|quarter|(?!month)\w+th|time|plu|minu|percent\w*"
    r"|and|or)s?\b"
)
"""Words after a number that change it, or are no unit."""
_UNITS = re.compile(
    rf"(?:\s+(?!{_COUNTS})[^\W\d_]{{2,}})*\s+(?!{_COUNTS})(?:[^\W\d_]{{3,}}s|dollar|euro|cent)\.?", re.IGNORECASE
)
_PHRASE = re.compile(r"answer(?:\s+is|\s*[:=])\s*:?\s*", re.IGNORECASE)
_STOP = re.compile(r"\.(?=\s|\Z)|\n|\Z")
_HEADING = re.compile(r"^# Answer[^\S\n]*$", re.MULTILINE)  # of PRM800K's chains
_HASHES = re.compile(r"####\s*")
_LINE = re.compile(r"\n|\Z")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]{3,}([\s,.'’-]+[^\W\d_]+)*\.?")
_ORNAMENTS = re.compile(r"\\(?:left|right|displaystyle|[!,;: ])|\\(?:text|mathrm|mbox)\s*(?=\{)|[\s$]|\.$")


def canonical_answer(answer: Any) -> str | float | None:
    r"""Returns a form that is equal for equal answers; None if there is no answer.

    Numbers, and strings that are plainly numbers ("1,000", "1\,000", "$18.0", "18 dollars"), are equal by value; other
    strings by their text without outer space. None, a blank string and NaN are no answer.
    """
    if answer is None or isinstance(answer, float) and math.isnan(answer):
        return None
    if isinstance(answer, bool) or isinstance(answer, float) and math.isinf(answer):
        return str(answer)
    if isinstance(answer, int | float):
        return answer  # 18 == 18.0, with one hash
    if not isinstance(answer, str):
        raise ValueError(f"an answer is a number, a string or null, not {answer!r}")
    text = answer.strip()
    bare = _TEXT.sub(r" \1", text.replace("\\$", "").replace("$", "")).strip()
    if bare.lower() == "nan":
        return None
    number = _NUMBER.match(bare)
    if not number or not (number.end() == len(bare) or _UNITS.fullmatch(bare, number.end())):
        return text or None
    sign, whole, rest = number.groups()
    plain = sign + re.sub(r"\D", "", whole) + rest
    if len(plain) > _LONGEST:
        return plain
    value = decimal.Decimal(plain)  # exact
    if value == value.to_integral_value():
        return int(value)
    lost = not float(value) or math.isinf(float(value))
    return str(value.normalize(_EXACT)) if lost else float(value)  # 1e-999 is no float


def extract_answer(text: str, *, limit_s: float = LIMIT_S) -> str | None:
    r"""Returns the final answer that a text states, None if it states none.

    The first of these counts: the last whole `\boxed{}`; the text after the last `####`; the text after the last
    "answer is" or "answer:"; the last number or formula that math-verify finds. After a heading "# Answer", which ends
    PRM800K's chains, only the text after it counts, with its first line in place of math-verify's finding. A truncated
    chain, with an unclosed box or nothing after the heading, has no answer.
    """
    heading = _HEADING.split(text)
    text = heading[-1]
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start >= 0:
        return _braced(text, text.index("{", start))
    for marker, stop in ((_HASHES, _LINE), (_PHRASE, _STOP)):
        if (last := _last_after(text, marker, stop)) is not None:
            return _plain(last)
    if len(heading) > 1:
        return _plain(text.strip().partition("\n")[0])
    if not any(c.isdigit() for c in text):
        return None
    return _worker.ask({"extract": text[-_LONGEST:]}, limit_s)


def _last_after(text: str, marker: re.Pattern, stop: re.Pattern) -> str | None:
    """Returns what the last marker introduces, up to `stop`, in time linear in the text."""
    answer, at = None, 0
    while mark := marker.search(text, at):
        at = mark.end()
        if at < len(text) and (end := stop.search(text, at + 1)):
            answer, at = text[mark.end() : end.start()], end.start()
        elif mark.group().endswith((" ", "\t")):
            answer = ""  # truncated
    return answer


def _plain(text: str) -> str | None:
    return text.strip().removeprefix("$").removesuffix("$").strip() or None


def equivalent(truth: str | float | None, answer: str | float | None, *, limit_s: float = LIMIT_S) -> bool:
    """Returns whether an answer equals the true one; False if either is absent. Thread-safe.

    Plain numbers are compared without math-verify: whole ones exactly, others within 1e-9 of their size, 1e-6 at most.
    """
    one, two = canonical_answer(truth), canonical_answer(answer)
    if one is None or two is None:
        return False
    if one == two:
        return True
    if not isinstance(one, str) and not isinstance(two, str):
        return _close(one, two)
    one, two = str(one), str(two)
    if _NUMBER.fullmatch(one) and _NUMBER.fullmatch(two):
        return False  # beyond the floats, or of too many digits
    words = [_TEXT.sub(r"\1", x).strip(" $.") for x in (one, two)]
    if any(map(_WORDS.fullmatch, words)):
        return words[0].casefold().split() == words[1].casefold().split()
    verdict = None
    if max(len(one), len(two)) <= _LONGEST:
        verdict = _worker.ask({"truth": one, "given": two}, limit_s)
    if verdict is None:  # no parse, or no time
        plain = [canonical_answer(_ORNAMENTS.sub("", x).strip("{}")) for x in (one, two)]
        if any(x is None or isinstance(x, str) for x in plain):
            return plain[0] is not None and plain[0] == plain[1]
        return _close(*plain)  # pyright: ignore[reportArgumentType]  # numbers
    return verdict


def values(answer: str | float, *, limit_s: float = LIMIT_S) -> list[list[float]] | None:
    """Returns the distinct numbers in an answer as [real, imaginary] pairs; None for words, relations and percentages.

    A symbol is replaced by a fixed number that depends on its name. Answers whose numbers differ are not equal, so this
    replaces most comparisons among many answers: it parses each answer once, and a comparison may take 0.1 s.
    """
    plain = canonical_answer(answer)
    if isinstance(plain, str):
        if (
            "%" in plain
            or "percent" in plain
            or len(plain) > _LONGEST
            or _NUMBER.fullmatch(plain)  # beyond the floats; the parser takes 1e999 for a product
            or _WORDS.fullmatch(_TEXT.sub(r"\1", plain).strip(" $."))
        ):
            return None
        return _worker.ask({"values": plain}, limit_s)
    return None if plain is None or abs(plain) > 1e300 else [[float(plain), 0.0]]


def _close(one: float, two: float) -> bool:
    a, b = Fraction(one), Fraction(two)
    if a.denominator == b.denominator == 1:
        return a == b
    return abs(a - b) <= min(max(abs(a), abs(b)) / 10**9, Fraction(1, 10**6))


def _braced(text: str, start: int) -> str | None:
    depth = 0
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[start + 1 : end].strip() or None
    return None


_worker = Worker("jprm.methods.answers")


def _prepare() -> Callable[[Any], Any]:
    from math_verify import parse, verify

    def reply(question: dict[str, str]) -> Any:
        if "extract" in question:
            answers = parse(question["extract"], parsing_timeout=None)  # pyright: ignore[reportArgumentType]  # no limit
            return answers[-1] if answers and isinstance(answers[-1], str) else None
        keys = ("values",) if "values" in question else ("truth", "given")
        pair = [
            parse(f"\\boxed{{{question[key].strip('$ ')}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]  # no limit
            for key in keys
        ]
        if not all(len(parsed) > 1 for parsed in pair):  # only the text, or nothing: our own comparison is as good
            return None
        if "values" in question:
            return _numbers(pair[0][0])
        truth, answer = pair
        return verify(truth, answer, timeout_seconds=None)

    return reply


def _numbers(parsed: Any) -> list[list[float]] | None:
    """Returns the numbers of an expression, or of the members of a tuple, set or interval; None for others."""
    import sympy

    members: list[Any] = [parsed]
    if isinstance(parsed, sympy.FiniteSet | sympy.Tuple):
        members = list(parsed.args)
    elif isinstance(parsed, sympy.Interval):
        members = [parsed.start, parsed.end]
    if not all(isinstance(member, sympy.Expr) for member in members):
        return None
    numbers = set()
    for member in members:
        at = {symbol: 1 + zlib.crc32(symbol.name.encode()) / 2**32 for symbol in member.free_symbols}
        number = complex(member.evalf(15, subs=at))
        numbers.add((number.real, number.imag))
    finite = all(map(math.isfinite, (part for number in numbers for part in number)))
    return sorted(map(list, numbers)) if finite else None


if __name__ == "__main__":
    serve(_prepare)
