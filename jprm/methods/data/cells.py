"""Types of cells and columns: turns source values into numbers, lists and texts.

CSV has only text. `TextRow` keeps the text, and the field that a reader requests decides the type: `"18"` is text for a
problem and a number for a step index.
"""

from __future__ import annotations

import ast
import contextlib
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from jprm.io import jsonl
from jprm.io.jsonl import RecordError

OTHER_FILE = "Is this another kind of file?"
"""The remedy if a value is missing. `jprm prepare` replaces it with the reader that accepts the record."""

NULLS = frozenset(("", "n/a", "na", "nan", "nat", "none", "null", "<na>"))
"""Lower-case texts that mean "no value"."""


def take(item: Any, path: str, kinds: type | tuple[type, ...], where: str, within: str = "") -> Any:
    """Returns the value at a dotted path, checked for its type, e.g. `take(item, "doc.answer", str, where)`.

    `kinds` are the allowed types; with `type(None)` an absent or null value gives `None`.

    A path through a list of objects returns the list of their values, `None` for an object without it. A boolean does
    not pass as an integer. A float without a fraction does, since pandas stores integers as floats if a column has
    gaps. A CSV cell becomes a list or object if it has brackets, else text if `str` is allowed, else a boolean or
    number. If `str` comes before `list` in `kinds`, only a list of objects is parsed.

    within: the path of `item` itself, for error messages, e.g. `steps[3].`.

    Raises:
      RecordError: the value has another type, or is absent or null and `kinds` lacks `type(None)`.
    """
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    value, whole = item, True
    if isinstance(item, TextRow) and path in item.cells:
        value = _cell_as(item.cells[path], kinds, where, within + path)
    else:
        for key in path.split("."):
            whole = whole and (value is None or _has_fields(value))
            value = _field(value, key)
    if isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds:
        value = int(value)
    if not whole or not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        shown = "absent or null" if value is None else type(value).__name__
        raise RecordError(where, within + path, f"is {shown}, not {wanted}", OTHER_FILE)
    return value


def _has_fields(value: Any) -> bool:
    """Whether the value is an object, or a (nested) list of objects."""
    return isinstance(value, Mapping) or (isinstance(value, list) and all(isinstance(v, Mapping | list) for v in value))


def _field(value: Any, key: str) -> Any:
    """Returns the field in an object, or in each object of a list, if present."""
    if isinstance(value, list) and value and _has_fields(value):
        return [_field(item, key) for item in value]
    return value.get(key) if isinstance(value, Mapping) else None


def holds(value: Any, path: str) -> bool:
    """Whether an object, or any object in a list, has a dotted path, e.g. `doc.question`; null values count."""
    if isinstance(value, list):
        return any(holds(item, path) for item in value)
    if not isinstance(value, Mapping):
        return False
    key, _, rest = path.partition(".")
    return path in value or (key in value and (not rest or value[key] is None or holds(value[key], rest)))


# ---- Cells of CSV.

_TEXTS = frozenset(("problem", "question", "prompt", "response", "solution", "answer", "system", "semantics", "text"))
"""Columns that stay text if a reader takes a whole row: answers such as 18 or [0, 1] are compared as written."""

_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,17})")
_FLOAT = re.compile(r"-?(?:0|[1-9]\d{0,17})\.\d{1,18}(?:e[+-]?\d{1,3})?", re.IGNORECASE)
_BOOLEANS = {"true": True, "false": False}


class TextRow(dict):
    """A CSV row: typed guesses as the dict values, and the original texts in `cells`."""

    def __init__(self, cells: Mapping[str, str]):
        super().__init__({name: text if name in _TEXTS else _guessed(text) for name, text in cells.items()})
        self.cells = cells


def _guessed(text: str) -> Any:
    """Guesses the type of a cell: number, boolean, list, object or text.

    Unusual numbers, e.g. 007, stay text.
    """
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    value = literal(text)
    return _BOOLEANS.get(text.lower(), text) if value is None else value


def _cell_as(text: str, kinds: tuple[type, ...], where: str, field: str) -> Any:
    """Converts a cell to one of `kinds`, or returns its text if no type fits.

    If `str` comes before `list` in `kinds`, only a list of objects (messages) is parsed as a list.

    Raises RecordError if a list or object is expected and the text has brackets but cannot be parsed, e.g. because
    DuckDB writes lists without quotes.
    """
    bare = text.strip()
    if list in kinds and str in kinds and kinds.index(str) < kinds.index(list):  # text first, but for messages
        value = literal(bare)
        return value if isinstance(value, list) and value and all(isinstance(v, dict) for v in value) else text
    if (list in kinds and bare[:1] == "[" and bare[-1:] == "]") or (dict in kinds and bare[:1] == "{"):
        value = literal(bare)
        if isinstance(value, kinds):
            return value
        reason = "is a list or object that cannot be told from text: its items are not in quotes, or it was cut"
        raise RecordError(where, field, reason, "Write the column as JSON, or the table as Parquet.")
    if type(None) in kinds and bare.lower() in NULLS:
        return None
    if str in kinds:
        return text
    if bool in kinds and bare.lower() in _BOOLEANS:
        return _BOOLEANS[bare.lower()]
    number = number_in(bare)
    if number is not None and int in kinds and number.is_integer():
        return int(number)
    return number if number is not None and float in kinds else text


def number_in(text: str) -> float | None:
    """Parses a text as a finite number, e.g. "1e-3"; `None` for other texts, such as "nan", "1,000" or "0x1f"."""
    try:
        number = float(text) if re.fullmatch(r"\s*[+-]?[\d.][\d.eE+-]{0,30}\s*", text) else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


# ---- Lists and objects in a text: as JSON, as Python and pandas write them, and as numpy does (`['a' 'b']`).

_PART = re.compile(
    r"""\s*(?:(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<call>[A-Za-z_][\w.]*\()|(?P<mark>[\[\]{}(),:])"""
    r"""|(?P<word>[^\s\[\]{}(),:'"]+))""",
    re.DOTALL,
)
_WORDS = {"none": None, "null": None, "nan": None, "nat": None, "true": True, "false": False}
_DEEPEST = 40


def literal(text: str) -> list | dict | None:
    """Parses a list or object written by JSON, Python, pandas or numpy; returns None for any other text.

    Items may be separated by spaces only, as in numpy arrays; adjacent strings are never joined. `nan` and `None`
    become None.

    >>> literal("['2 + 3 = 5.' 'So 5.']"), literal("[array(['a'], dtype=object) None]")
    (['2 + 3 = 5.', 'So 5.'], [['a'], None])
    """
    text = text.strip()
    if text[:1] + text[-1:] not in ("[]", "{}") or text.startswith("[" * 100):  # Pythons differ in how deep they read
        return None
    with contextlib.suppress(RecordError):
        return jsonl.parse(text.encode(), "")
    with contextlib.suppress(ValueError, SyntaxError, StopIteration, RecursionError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that Python does not know
        parts = _parts(text)
        value = _value(next(parts), parts, 0)
        return value if isinstance(value, list | dict) and next(parts, None) is None else None
    return None


def _parts(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        match = _PART.match(text, at)
        if match is None:
            raise ValueError("a quote is not closed")
        yield match.lastgroup or "", match[match.lastgroup or 0]
        at = match.end()


def _value(part: tuple[str, str], parts: Iterator[tuple[str, str]], depth: int) -> Any:
    """Parses one value: `part`, and as many of the next `parts` as it needs.

    A part is (kind, text), e.g. ("word", "3.5") or ("mark", "["). A call gives its first argument, e.g. numpy's
    `array([1, 2], dtype=object)` gives [1, 2]. Raises ValueError if no value begins there.
    """
    kind, text = part
    if depth > _DEEPEST:
        raise ValueError("too deep")
    if kind == "text":
        return ast.literal_eval(text.replace("\n", "\\n"))
    if kind == "word":
        if text.lower() in _WORDS:
            return _WORDS[text.lower()]
        if _INTEGER.fullmatch(text):
            return int(text)
        if (number := number_in(text)) is None:
            raise ValueError(f"{text} is no value")
        return number
    if kind == "call":  # array([...], dtype=object), np.float64(1.0)
        value, end = _items(")", parts, depth)
        options = [item for item in value[1:] if not (isinstance(item, _Option))]
        if end != ")" or not value or options:
            raise ValueError("a call of something else")
        return value[0]
    if text == "{":
        return _object(parts, depth)
    if text in "[(":
        value, _ = _items("]" if text == "[" else ")", parts, depth)
        if any(isinstance(item, _Option) for item in value):
            raise ValueError("an option in a list")
        return value
    raise ValueError(f"{text} begins no value")


class _Option(str):
    """A keyword argument of a call, e.g. dtype=object."""


def _items(close: str, parts: Iterator[tuple[str, str]], depth: int) -> tuple[list, str]:
    """Parses items up to the closing bracket; they must all have commas between them, or all lack them."""
    items: list = []
    commas = gaps = 0
    after = True  # at the start, or after a comma
    for part in parts:
        if part == ("mark", close):
            if commas and gaps:
                raise ValueError("commas between some of the items")
            return items, close
        if part == ("mark", ","):
            commas, after = commas + 1, True
            continue
        gaps += not after
        after = False
        if close == ")" and part[0] == "word" and "=" in part[1]:
            items.append(_Option(part[1]))
        else:
            items.append(_value(part, parts, depth + 1))
    raise ValueError("a bracket is not closed")


def _object(parts: Iterator[tuple[str, str]], depth: int) -> dict:
    value: dict = {}
    for part in parts:
        if part == ("mark", "}"):
            return value
        if part == ("mark", ","):
            continue
        if part[0] != "text" or next(parts) != ("mark", ":"):
            raise ValueError("no key of an object")
        key = ast.literal_eval(part[1])
        value[key] = _value(next(parts), parts, depth + 1)
    raise ValueError("a bracket is not closed")


# ---- Words of labels and verdicts.

POSITIVE = frozenset(("+", "true", "correct", "right", "yes", "good", "positive", "valid", "pass", "passed", "y"))
INVALID = "[invalid]"
"""The answer or outcome in files of lm-eval and OVM if a sample states no answer."""
NEGATIVE = frozenset(
    ("-", "false", "incorrect", "wrong", "no", "bad", "negative", "invalid", INVALID, "fail", "failed", "n")
)
NEUTRAL = frozenset(("neutral",))
_SAID = (
    "a number, true, false, null, + or -, or one of correct, right, good, yes, positive, valid, pass and the opposites"
)


def label_of(value: Any, semantics: str, where: str, field: str) -> float | None:
    """Converts a label to a number; null and the texts in `NULLS`, e.g. "", "n/a" and "nan", give `None`.

    Booleans and the words in `POSITIVE` and `NEGATIVE`, in any case, become 1 or 0, e.g. "correct" and "no". With
    semantics `rating` they become 1 or -1, and "neutral" 0. A number, also as text, is returned as it is, unchecked.
    `semantics` is one of `jprm.tree.SEMANTICS`.

    Raises RecordError with the name `field` if the value is not a label, e.g. "neutral" with other semantics.
    """
    word = value.strip().lower() if isinstance(value, str) else None
    worst = -1.0 if semantics == "rating" else 0.0
    if value is True or word in POSITIVE:
        return 1.0
    if value is False or word in NEGATIVE:
        return worst
    if value is None or word in NULLS:
        return None
    if word in NEUTRAL and semantics == "rating":
        return 0.0
    if isinstance(value, int | float):
        return value
    if word is not None and (number := number_in(word)) is not None:
        return number
    remedy = f"A label is {_SAID}."
    if word in NEUTRAL:
        remedy = "A neutral label is a rating: give --set semantics=rating."
    raise RecordError(where, field, f"holds {_shown(value)}", remedy)


def verdict_of(value: Any, where: str, field: str) -> bool | None:
    """Reads whether an answer is correct, e.g. from true, 0 or "correct".

    Understands the words of `label_of`. Null and words for it, e.g. "nan", give `None`. Raises RecordError for any
    other value, e.g. 0.5.
    """
    label = label_of(value, "correctness", where, field)
    if label not in (None, 0, 1):
        raise RecordError(where, field, f"is {_shown(value)}", "Write true or false, 1 or 0, or a word for them.")
    return None if label is None else label == 1


def place_of(value: Any, first: int, steps: int, where: str, field: str) -> int:
    """Returns the 0-based index of the first wrong of `steps` steps, or -1 if every step is right.

    `first` is the number that the source gives the first step (0 or 1). A text is read as a number, 3.0 as 3. Null, the
    words in `NULLS` (e.g. "N/A", and "", an empty cell of CSV) and numbers below `first` mean that no step is wrong.
    Raises RecordError for fractions, other texts, booleans and steps that the chain does not have.
    """
    number = value
    if isinstance(value, str):
        number = None if value.strip().lower() in NULLS else number_in(value)
        number = value if number is None and value.strip().lower() not in NULLS else number
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if number is None or (type(number) is int and number < first):
        return -1
    if type(number) is not int or number >= steps + first:
        remedy = f"It is the place of a step, and the first one has place {first}."
        raise RecordError(where, field, f"is {_shown(value)}, for {steps} steps", remedy)
    return number - first


def _shown(value: Any) -> str:
    return f"{value!r:.60}" if isinstance(value, str | int | float) else f"a {type(value).__name__}"
