"""Decides whether two answers are equal.

Everyday numbers, words and choices are compared here; math-verify compares the rest.

Numbers are compared by value: exactly if both are exact, within 1e-9 relative (1e-6 absolute at most) if both are
decimals. A decimal also equals a fraction or root that rounds to it at 6 decimals (0.333333 = 1/3). Words are compared
as text, ignoring case, because math-verify reads them as a product of symbols ("red and blue" would equal "blue and
red").

math-verify silently skips characters it cannot read, so it only gets answers it reads whole. An answer is compared
as text if it has other visible characters, words beside a formula, a leading relation sign, primes or unbalanced
brackets, or if it does not parse.

Limits: a percentage equals both its fraction and its number (18% = 0.18 and 18% = 18); a unit may be absent (10 cm =
10), but two known units must measure the same quantity (1 m = 100 cm); a list without brackets is a set (1,2 = 2,1);
`x=5` equals 5; a column vector is not a tuple; 12:30 is text. A true 1<x<2 equals a given (1,2), and a true 1.5 a
given 1,5, but not the reverse, so the true answer must come first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from fractions import Fraction

from jprm.methods.answers import forms, library

LIMIT_S = 5.0
"""Default time limit of one comparison, in seconds."""

_WORDS = re.compile(
    r"(?:the\s+|an?\s+)?(?:[^\W\d_]{3,}|no|on|in|up|ok|at|it|we|he)(?:[\s,.'’/-]+[^\W\d_]+)*[.!]?", re.IGNORECASE
)
_FUNCTIONS = (
    r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|min|max|gcd|lcm|mod|deg|det|dim|pi|infty|sqrt"
    r"|frac|and|or|in|is"
)
_WORD = re.compile(rf"(?<![A-Za-z\\}}_^{{])(?!(?:{_FUNCTIONS})(?![A-Za-z]))[A-Za-z]*[a-z][A-Za-z]{{2,}}")
_RELATION = re.compile(r"(\\leq|\\geq|\\neq|<|>|\\subset|\\in)(?![a-zA-Z])\s*(.+)\Z", re.DOTALL)
_BASE = re.compile(r"\(?\s*([0-9][0-9A-F\s]*)\)?\s*(?:_\s*\{?\s*(\w+)\s*\}?|\(?\s*(?:in\s+)?base[\s-]*(\w+)\s*\)?)\Z")
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
          "ten": "10", "twelve": "12", "sixteen": "16"}  # fmt: skip
_SKIPPED = re.compile(
    r"\\(?:to|Rightarrow|Longrightarrow|Leftrightarrow|implies|iff|mid|l?or|l?and|land|vee|wedge|equiv|sim|cong|ldots"
    r"|dots|cdots|angle|triangle|parallel|perp|mapsto|because|therefore|prime|pmod|bmod|mod|uparrow|downarrow|langle"
    r"|rangle|not|leftarrow|ll|gg|propto|approx|overrightarrow|vec|forall|exists|neg|text\w*|underbrace|cancel|bullet"
    r"|star|circ|checkmark|square|Box|ref|label|tag|quad)(?![a-zA-Z])|[@#;?\"`'\u0080-\uffff]|\.\.\."
)
"""LaTeX and characters skipped or misread by math-verify."""
_ENVIRONMENT = re.compile(r"\\begin\s*\{(\w+)\*?\}.*?\\end\s*\{\1\*?\}", re.DOTALL)
_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)s?\s*)?(?:\(\s*([A-Za-z])\s*\)|([A-J])\s*[).:](?!\w)|([A-J])(?=\s*(?:,|-"
    r"|–|\Z)))\s*[:,.)-]?\s*(.*)\Z",
    re.IGNORECASE | re.DOTALL,
)
_NAMED = re.compile(
    r"(?:m?\s*\\angle\s*|\\triangle\s*)?(?:[A-Za-z]{1,3}|\\[a-zA-Z]+(?:\{[a-zA-Z]{1,3}\})?"
    r"|[A-Za-z]+(?:\s[A-Za-z]+){0,4})(?:_\{?\w+\}?)?'{0,2}(?:\([^()=]*\))?\s*(?:=|\\approx(?![a-zA-Z]))\s*([^=].*)\Z",
    re.DOTALL,
)
_TURNED_NAME = re.compile(r"([^=]*\d[^=]*?)\s*=\s*[a-zA-Z]")
_ASIDE = re.compile(r"([^\s(].*?)\s*\(\s*(?:or|i\.e\.,?|=|that is,?)?\s*([^()]*)\s*\)", re.DOTALL)
_JOIN = re.compile(r"\s*(?:,\s*)?(?<![a-zA-Z\\])(or|and)(?![a-zA-Z])\s*", re.IGNORECASE)
_NAME_OF_EACH = re.compile(r"(?:\A|(?<=, ))[a-zA-Z]\s*=\s*(?=[^,]*(?:,|\Z))")
_TIME = re.compile(r"(\d{1,2})(?::(\d{2}))?\s*([ap])\.?\s*m\.?\Z", re.IGNORECASE)
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})")
_NOON = {"noon": "12:00 pm", "12 noon": "12:00 pm", "midnight": "12:00 am", "12 midnight": "12:00 am"}
_LETTERS = re.compile(r"\(?[A-J]\)?(?:\s*(?:,\s*and|and|[,;&])?\s*\(?[A-J]\)?)+")
_INEQUALITY = re.compile(r"[<>]|\\[lgn]eq(?![a-zA-Z])")
_INTERVALS = re.compile(r"[(\[].*,.*[)\]]|\\mathbb\{R\}", re.DOTALL)
_POINT = re.compile(r"\((?:(?!\\infty|\\cup).)*\)", re.DOTALL)
_SYMBOL = re.compile(r"[a-zA-Z](?:_\{?\w\}?)?|\\(?:alpha|beta|theta|phi|lambda|mu)")
_EXCEPT = re.compile(rf"({_SYMBOL.pattern})\s*\\neq\s*([^<>=\\]+)")
_MEMBER = re.compile(rf"({_SYMBOL.pattern})\s*\\in\s*([(\[].*,.*[)\]])", re.DOTALL)
_TURNED = {"<": ">", ">": "<", "\\leq": "\\geq", "\\geq": "\\leq"}
_BUILT = re.compile(
    r"(?:\\?\{)?\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid|\||:)\s*(.*?)\s*(?:\\?\})?", re.DOTALL
)
_LONGEST_RANGE = 200  # characters
_COMMA = re.compile(r"[+-]?\d{1,3}(?:[. ]?\d{3})*,\d+")  # before the decimals, as in much of Europe
_CENTS = re.compile(r"[+-]?\d+,\d\d")  # 12,50: two digits are no thousands
_LETTERED = re.compile(r"[A-Z]'?\s*(?=\([^()]*,[^()]*\)\Z)")
_VALUE_OF = re.compile(r"([a-zA-Z](?:_\{?\w+\}?)?)\s*=\s*([^=]+)")
_TRIG = re.compile(r"(\\?(?:sin|cos|tan|cot|sec|csc)(?![a-z])\s*[({]?\s*)(\d+(?:\.\d+)?)\s*\^\\circ")
_IN_RADIANS = r"\1\\frac{\2\\pi}{180}"
_PROSE = re.compile(r"[^\W\d_]{2,}")
_RELATED = re.compile(r"[=<>]|\\[lgn]eq")
_UNITED = re.compile(r"\s*(?:,\s*)?(?:(?<![a-zA-Z\\])or(?![a-zA-Z])|\\l?or(?![a-zA-Z])|\\cup(?![a-zA-Z]))\s*")
_BOTH = re.compile(r"\s*(?:,|(?<![a-zA-Z\\])and(?![a-zA-Z])|\\land(?![a-zA-Z]))\s*")
_LISTED = re.compile(r"\s*(?:[,;]|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))+\s*")

Same = Callable[[str, str], bool]


def equivalent(truth: str | float | None, answer: str | float | None, *, limit_s: float = LIMIT_S) -> bool:
    """Returns whether `answer` equals `truth`; `False` if either is absent. Thread-safe.

    Both are as written, e.g. with units or LaTeX; 18% equals 18 and 0.18, and 10 cm equals 10. The true answer must
    come first: a true 1.5 equals a given 1,5, but not the reverse. Above 2,000 characters, texts are compared. A
    symbolic comparison, in a worker process that the first one starts, takes at most `limit_s` seconds, after which it
    counts as unequal. Raises ValueError if either is neither a text nor a number, OSError if the worker does not start.
    """
    left, right = forms.canonical_answer(truth), forms.canonical_answer(answer)
    if left is None or right is None:
        return False
    if left == right and not (isinstance(truth, str) and isinstance(answer, str)):
        return True
    left = truth.strip() if isinstance(truth, str) else left
    right = answer.strip() if isinstance(answer, str) else right
    return left == right or _same(left, right, limit_s)


@functools.lru_cache(1 << 16)
def _same(truth: str | float, answer: str | float, limit_s: float, depth: int = 0) -> bool:
    def same(left: str | float, right: str | float) -> bool:
        return _same(left, right, limit_s, depth + 1)

    left, right = forms.number_of(truth), forms.number_of(answer)
    if left and right:
        return _same_number(left, right)
    if left and isinstance(answer, str) and _COMMA.fullmatch(answer):
        return same(truth, answer.replace(".", "").replace(",", "."))
    if right and isinstance(truth, str) and _CENTS.fullmatch(truth) and "." in str(answer):
        return same(truth.replace(",", "."), answer)
    text, other = str(truth), str(answer)
    if max(len(text), len(other)) > forms.LONGEST:
        return forms.canonical_answer(truth) == forms.canonical_answer(answer)
    text, other = forms.normal(text), forms.normal(other)
    if forms.squeezed(text) == forms.squeezed(other):
        return bool(text)
    if forms.NUMBER.fullmatch(text) and forms.NUMBER.fullmatch(other) or depth > 3:
        return False
    for rule in (*_OF_WORDS, *_OF_FORMULAS):
        if (verdict := rule(text, other, same)) is not None:
            return verdict
    text, other = _TRIG.sub(_IN_RADIANS, text), _TRIG.sub(_IN_RADIANS, other)
    (text, unit), (other, unit2) = forms.without_unit(text), forms.without_unit(other)
    if forms.clash(unit, unit2):
        return False
    text, other = _readable(text), _readable(other)
    if forms.squeezed(text) == forms.squeezed(other):
        return True
    braced = [side.startswith("\\{") and side.endswith("\\}") for side in (text, other)]
    if text[:1] + other[:1] in ("(\\", "\\(") and any(braced):  # a tuple or an interval, and a set
        return False
    if _unreadable(text) or _unreadable(other):
        return False
    return bool(library.compare(text, other, limit_s))


def _same_number(left: forms.Number, right: forms.Number) -> bool:
    if forms.clash(left.unit, right.unit):
        (base, size), (base2, size2) = forms.size_of(left.unit), forms.size_of(right.unit)
        if base != base2:
            return False
        left, right = left._replace(value=left.value * size), right._replace(value=right.value * size2)
    rounded = left.rounded or right.rounded
    if left.percent == right.percent:
        return _near(left.value, right.value, rounded)
    percentage, other = (left.value, right.value) if left.percent else (right.value, left.value)
    return _near(percentage, other, rounded) or _near(percentage / 100, other, rounded)


def _near(a: Fraction, b: Fraction, rounded: bool) -> bool:
    if a == b or not rounded:
        return a == b
    # A fraction is a finite decimal where its denominator divides a power of ten.
    decimals = all(pow(10, f.denominator.bit_length(), f.denominator) == 0 for f in (a, b))
    relative = Fraction(1, 10**9) if decimals else Fraction(library.ROUNDED)
    return abs(a - b) <= min(max(abs(a), abs(b)) * relative, Fraction(1, 10**6))


# ---- Rules, in order. Each takes normal forms, and `same`, which compares parts of them; it returns whether they are
# equal, None if it does not apply.


def _times(text: str, other: str, same: Same) -> bool | None:
    """Compares clock times, e.g. 7:30 pm and 19:30; at least one must say am or pm."""
    text, other = _NOON.get(text.lower(), text), _NOON.get(other.lower(), other)
    left, right = _TIME.fullmatch(text), _TIME.fullmatch(other)
    if left and right:
        return _minutes(left) == _minutes(right)
    half = left or right
    if half is None:
        return None
    if clock := _CLOCK.fullmatch(other if left else text):
        minutes = 60 * int(clock[1]) + int(clock[2])
        if int(clock[1]) in (0, *range(13, 24)):
            return _minutes(half) == minutes
        if right:  # a true 7:05 may be in either half, and a true 7 pm is no 7:00
            return (_minutes(half) - minutes) % (12 * 60) == 0
    return None if half[2] else False


def _minutes(time: re.Match[str]) -> int:
    return 60 * (int(time[1]) % 12 + 12 * (time[3].lower() == "p")) + int(time[2] or 0)


def _letters(text: str, other: str, same: Same) -> bool | None:
    """Compares sets of choice letters in any order, e.g. "A, C", "C and A" and AC."""
    if _LETTERS.fullmatch(text) and _LETTERS.fullmatch(other) and re.search(r"[^A-J]", text + other):
        return set(re.findall("[A-J]", text)) == set(re.findall("[A-J]", other))
    return None


def _choices(text: str, other: str, same: Same) -> bool | None:
    """Compares choice letters, with or without the text of the choice, e.g. C and "(C) 15"."""
    truth, answer = _choice(text), _choice(other)
    if truth is None:
        return _text_of_choice(text, other, same)
    letter, rest = _letter(truth), truth[4].strip()
    if answer is None:
        return same(rest, other) if rest and len(other) > 1 else None
    behind = answer[4].strip()
    if re.match(r"(?:or|and|\(?[A-J]\)?(?![a-zA-Z])|[-+*/=^<>_])", behind) and text != letter + rest:
        return None if rest else False
    if not rest and re.match(r"(?:or|and|nor|not)\b|\(?[A-J]\)?(?![a-zA-Z])|[-+*/=^<>_]", behind):
        return False
    if rest and behind and answer[3]:
        return None  # lists: A, B
    return letter == _letter(answer)


def _choice(text: str) -> re.Match[str] | None:
    choice = _CHOICE.match(text)
    return None if choice is None or (choice[2] or choice[3] or "A").islower() else choice


def _letter(choice: re.Match[str]) -> str:
    return (choice[1] or choice[2] or choice[3]).upper()


def _text_of_choice(text: str, other: str, same: Same) -> bool | None:
    """Compares the text of the true choice with a letter and text, e.g. 15 and "(C) 15"."""
    choice = _CHOICE.match(other)
    if choice and not choice[3] and _letter(choice) <= "J" and choice[4].strip() and re.match(r"\(?[A-J]", other):
        return same(text, choice[4].strip())
    return None


def _words(text: str, other: str, same: Same) -> bool | None:
    if text.lower() in ("yes", "no", "true", "false") and (m := re.match(r"(\w+)\s*(?:[,.;:]|--?\s)\s*\w", other)):
        return text.lower() == m[1].lower()
    if _WORDS.fullmatch(text) or _WORDS.fullmatch(other):
        return _bare_words(text) == _bare_words(other)
    return None


def _bare_words(text: str) -> list[str]:
    text = text.casefold().replace("-", " ").replace("does not exist", "dne").replace("not possible", "impossible")
    words = re.sub(r"[.!,'’\"]", "", text).split()
    words = words[1:] if len(words) > 1 and words[0] in ("the", "a", "an") else words
    words = words[2:] if words[:2] in (["there", "is"], ["there", "are"]) else words
    return ["no", "solution"] if " ".join(words) in _NO_SOLUTION else words


_NO_SOLUTION = {
    "\\emptyset",
    *(f"no {kind}{what}{s}" for kind in ("", "real ") for what in ("solution", "root") for s in ("", "s")),
}


def _bases(text: str, other: str, same: Same) -> bool | None:
    """Compares numerals with a base, e.g. 101_2. If only one side has a base, they differ."""
    left, right = _BASE.fullmatch(text), _BASE.fullmatch(other)
    if left and right:
        return _numeral(left) == _numeral(right)
    return False if left or right else None


def _numeral(m: re.Match[str]) -> tuple[str, str]:
    base = (m[2] or m[3]).lower()
    return re.sub(r"\s", "", m[1]).lstrip("0"), _BASES.get(base, base)


def _relations(text: str, other: str, same: Same) -> bool | None:
    """Compares relations without a left side, e.g. `> 5`. If only one side is a relation, they differ."""
    left, right = _RELATION.match(text), _RELATION.match(other)
    if left and right:
        return left[1] == right[1] and same(left[2], right[2])
    return False if left or right else None


def _ranges(text: str, other: str, same: Same) -> bool | None:
    """Compares inequalities in one symbol with each other and with intervals. A true (1,2) may be a point, so it does
    not match an inequality.
    """
    (left, symbol), (right, symbol2) = _intervals(text), _intervals(other)
    if left and right:
        return same(left, right) if symbol == symbol2 else None
    if left and _INTERVALS.fullmatch(other) or right and _INTERVALS.fullmatch(text) and not _POINT.fullmatch(text):
        return same(left or text, right or other)
    return None


def _intervals(text: str) -> tuple[str, str]:
    """Returns (intervals, symbol) for inequalities in one symbol, or ("", "") for other text."""
    if m := _MEMBER.fullmatch(text):
        return m[2], m[1]
    if not _INEQUALITY.search(text) or len(text) > _LONGEST_RANGE:
        return "", ""
    if m := _BUILT.fullmatch(text):
        text = m[1]
    if m := _EXCEPT.fullmatch(text):
        return rf"\mathbb{{R}} \setminus \{{{_JOIN.sub(', ', m[2])}\}}", m[1]
    ranges, symbols = [], set()
    for alternative in _UNITED.split(text):
        low, high = ("(", "-\\infty"), ("\\infty", ")")
        for part in _BOTH.split(alternative):
            sides = re.split(r"\s*(<|>|\\[lg]eq(?![a-zA-Z]))\s*", part)
            at = [i for i, side in enumerate(sides) if _SYMBOL.fullmatch(side)]
            if len(sides) not in (3, 5) or len(at) != 1 or len(sides) == 5 and at != [2]:
                return "", ""
            symbols.add(sides[at[0]])
            for i in range(1, len(sides), 2):
                bound, sign = (sides[i + 1], sides[i]) if i > at[0] else (sides[i - 1], _TURNED[sides[i]])
                if sign in (">", "\\geq") and low[1] == "-\\infty":
                    low = "(" if sign == ">" else "[", bound
                elif sign in ("<", "\\leq") and high[0] == "\\infty":
                    high = bound, ")" if sign == "<" else "]"
                else:
                    return "", ""
        ranges.append(f"{low[0]}{low[1]},{high[0]}{high[1]}")
    return (" \\cup ".join(ranges), symbols.pop()) if len(symbols) == 1 else ("", "")


def _assignments(text: str, other: str, same: Same) -> bool | None:
    """Compares `x = 2, y = 5` with (2,5) and with `y = 5, x = 2`, and `x = 1, x = 2` with 1, 2."""
    left, right = _values_of(text), _values_of(other)
    if not left and not right or not (left and right) and "=" in (other if left else text):
        return None
    if left and right:
        if dict(left).keys() != dict(right).keys():
            return None
        if len(dict(left)) == len(left) == len(right):
            return all(same(a[1], b[1]) for a, b in zip(sorted(left), sorted(right), strict=True))
    as_tuple = "(" in (text[:1], other[:1]) and len(left or right) == len(dict(left or right))
    return same(_bare(left, as_tuple) or text, _bare(right, as_tuple) or other)


def _values_of(text: str) -> list[tuple[str, str]]:
    """Parses a list of assignments into (name, value) pairs; [] for other text or a single assignment."""
    parts = [_VALUE_OF.fullmatch(part) for part in _LISTED.split(text)]
    return [(m[1], m[2]) for m in parts if m] if len(parts) > 1 and all(parts) else []


def _bare(values: list[tuple[str, str]], as_tuple: bool) -> str:
    if values and as_tuple:
        return f"({','.join(value for _, value in sorted(values))})"
    return ", ".join(value for _, value in values)


def _alternatives(text: str, other: str, same: Same) -> bool | None:
    """Compares lists joined by "or" or "and": "5 or 7" is the list 5, 7, and "1/2 or 0.5" also equals 0.5."""
    if not _JOIN.search(text) and not _JOIN.search(other):
        return None
    parts = [part for part in _JOIN.split(other)[::2] if part]
    left, right = (
        _NAME_OF_EACH.sub("", _JOIN.sub(", ", re.sub(r"\A(?:either|both)\s+", "", side))) for side in (text, other)
    )
    if _PROSE.search(_unworded(right)) and not all(map(forms.number_of, parts)):
        return False
    if "," in left or "\\pm" in text:
        return same(left, right)
    return len(parts) > 1 and all(same(text, part) for part in parts)


def _unworded(text: str) -> str:
    return re.sub(rf"\\[a-zA-Z]+|(?<![A-Za-z])(?:{_FUNCTIONS})(?![A-Za-z])", "", text)


def _chains(text: str, other: str, same: Same) -> bool | None:
    """Compares an equation of numbers, e.g. 72 = 8 * 9: every side must equal the truth."""
    if "=" not in other or "=" in text or re.search(r"[<>]|\\[lgn]eq|\\begin", other):
        return None
    if m := _TURNED_NAME.fullmatch(other):
        return same(text, m[1])
    sides = [side.strip() for side in other.split("=")]
    if re.search(r"[a-zA-Z]", _unworded(sides[0])) or sides[0].startswith("\\angle"):
        return None if len(sides) == 2 or not all(sides) else all(same(text, side) for side in sides[1:])
    return all(side and same(text, side) for side in sides)


def _rounded(text: str, other: str, same: Same) -> bool | None:
    r"""Compares an answer followed by its rounding, e.g. \sqrt{2} \approx 1.41: the exact value counts."""
    exact, sign, approximate = other.partition("\\approx")
    if not sign or "\\approx" in text or not exact.strip() or _NAMED.match(other):
        return None
    if same(text, exact.strip()):
        return True
    return forms.number_of(exact) is None and forms.number_of(text) is not None and same(text, approximate)


def _names(text: str, other: str, same: Same) -> bool | None:
    """Compares `x = 5` with 5: either side may name the quantity."""
    if text[:1] + other[:1] != "((" and "(" in (text[:1], other[:1]):  # the point A(1,2)
        text, other = _LETTERED.sub("", text), _LETTERED.sub("", other)
        if text[:1] + other[:1] == "((":
            return same(text, other)
    left, right = _NAMED.match(text), _NAMED.match(other)
    if left and right and forms.squeezed(text[: left.start(1)]) == forms.squeezed(other[: right.start(1)]):
        return same(left[1], right[1])
    if left and not _RELATED.search(other):
        return same(left[1], other)
    if right and not _RELATED.search(text):
        return same(text, right[1])
    return None


def _asides(text: str, other: str, same: Same) -> bool | None:
    """Compares an answer with its value given twice, e.g. "42 (forty-two)": both must equal the truth."""
    m = _ASIDE.fullmatch(other)
    if m is None or forms.number_of(m[1]) is None or not m[2] or re.search(r"[,;]", m[2]):
        return None
    return all(same(text, value) for value in m.groups()) or None


def _both_signs(text: str, other: str, same: Same) -> bool | None:
    r"""Compares 1 \pm \sqrt{5}, also inside a fraction, with the list of its two values."""
    sides = [
        ", ".join(side.replace("\\pm", sign) for sign in "+-") if side.count("\\pm") == 1 and "," not in side else side
        for side in (text, other)
    ]
    return None if sides == [text, other] or "\\mp" in text + other else same(*sides)


_OF_WORDS = (_times, _letters, _choices, _words, _bases)
_OF_FORMULAS = (_relations, _ranges, _asides, _both_signs, _assignments, _alternatives, _rounded, _chains, _names)

# ---- Before the library.


def _readable(text: str) -> str:
    """Rewrites a normal form for math-verify, e.g. without degree signs and currency."""
    text = re.sub(r"\A(?:\\approx|\\sim)\s*", "", text).replace("^\\circ", "").strip()
    for pattern, new in _NUMERALS:
        text = pattern.sub(new, text)
    return _SCALED.sub(_scaled, text)


def _scaled(m: re.Match[str]) -> str:
    """Multiplies a matrix by its scalar factor cell by cell, because math-verify cannot read the product."""
    factor = "-1" if m[1] == "-" else m[1]
    rows = [row.split("&") for row in m[2].split("\\\\") if row.strip()]
    cells = [" & ".join(f"{factor} \\cdot ({cell.strip()})" for cell in row) for row in rows]
    return r"\begin{pmatrix}" + r" \\ ".join(cells) + r"\end{pmatrix}"


_SCALED = re.compile(
    r"\A(-|-?\s*(?:\d+(?:\.\d+)?|\\frac\s*\{[^{}]*\}\s*\{[^{}]*\}|\\sqrt\s*\{[^{}]*\}))\s*(?:\\cdot\s*|\*\s*)?"
    r"\\begin\{pmatrix\}((?:(?!\\begin).)*)\\end\{pmatrix\}\Z",
    re.DOTALL,
)
_NUMERALS = (
    (re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)"), r"\\times "),
    (re.compile(r"(?<=\d)(?:\{,\}|,\\!\s?)(?=\d{3})"), ""),
    (re.compile(r"\\\$(?=\s*\d)"), ""),
    (re.compile(r"(?<![\w.})\]])(\d+)\s*/\s*(\d+)\s+(?=[a-zA-Z])"), r"\\frac{\1}{\2}"),  # 2/3 x
)


def _unreadable(text: str) -> bool:
    """Returns whether math-verify would skip a visible part of the answer."""
    outside = _ENVIRONMENT.sub(" ", text)
    if _SKIPPED.search(outside) or re.search(r"\\\\|&|\d\s*_|(?<![_\d.])\d+\s+\d", outside):
        return True
    if outside.count("|") % 2 or _WORD.search(re.sub(r"\\[a-zA-Z]+", " ", outside)) and re.search(r"\W", outside):
        return True
    bare = re.sub(r"\\[{}|]", "", outside)
    return bare.count("{") != bare.count("}") or sum(map(outside.count, "([")) != sum(map(outside.count, ")]"))
