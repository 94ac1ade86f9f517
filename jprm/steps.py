"""Splits free text into steps by a named rule, losslessly: `"".join(split(text)) == text`.

Every rule proposes places at which a step may begin. Places inside code fences, LaTeX environments and displayed
formulas are dropped. A step includes the white space that follows it, and is never blank.
"""

from __future__ import annotations

import bisect
import collections
import re
from collections.abc import Callable, Iterator

_OPENING = re.compile(r"^[ ]{0,3}(```+|~~~+)|(\\begin)\{([^{}\n]{1,40})\}|\$\$|\\\[", re.MULTILINE)
_OPENING_INLINE = re.compile(r"\\\(|(?<![\\$])\$(?![\s$]|\d[\d,.]*\s)")  # "$5 " is an amount
_END = re.compile(r"\\end\{([^{}\n]{1,40})\}")
_CLOSING = {"$$": "$$", "\\[": "\\]", "\\(": "\\)"}
_CLOSING_DOLLAR = re.compile(r"(?<![\\\s])\$(?!\d)")  # "$5 and $7" holds no formula

_MARKER = re.compile(r"^[ \t#>*_-]{0,20}step[ \t]{0,5}(\d{1,4})\b", re.IGNORECASE | re.MULTILINE)
_NUMBER = re.compile(r"^[ \t]*(?:\*\*|\()?(\d{1,4})(?:[.)]|\.\))(?=[ \t*])", re.MULTILINE)
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n\s*")
_LINE = re.compile(r"\n\s*")
_SENTENCE = re.compile(r"(?<=[.!?])[\"')\]*]{0,3}\s+(?=[\"'(\[*]{0,3}[A-Z0-9\\$])|(?<=[。！？])\s*")
_ABBREVIATION = re.compile(
    r"(?:\b(?:e\.g|i\.e|etc|cf|vs|resp|approx|Mr|Mrs|Ms|Dr|Prof|St|Fig|Eq|Eqs|No|Nos|Thm|Sec|Ch|vol|pp?|al|ca|w\.r\.t)"
    r"|(?:^|[\s(.])[A-Za-z]|^[ \t]*\d{1,4})\.$",  # an initial, or the number of an item
    re.MULTILINE,
)
_THOUGHTS = re.compile(r"</think(?:ing)?>\s*", re.IGNORECASE)


def split(text: str, rule: str = "auto") -> list[str]:
    r"""Splits a text into steps, each with more than white space; joined they are the text.

    A text without a place to cut is one step, even if blank; "" has none. Raises ValueError for an unknown rule.

    Args:
      rule: a name in `RULES`, or `auto` for the result of `rule_of`.

    >>> split("We add: 3.5 + 4 = 7.5. So it is 7.5.\\n")
    ['We add: 3.5 + 4 = 7.5. ', 'So it is 7.5.\\n']
    """
    if rule != "auto" and rule not in RULES:
        raise ValueError(f"unknown rule {rule!r} for splitting text: use auto, {', '.join(RULES)}")
    if not text:
        return []
    inside = _spans(_OPENING, text)
    places = RULES[rule_of(text) if rule == "auto" else rule](text)
    kept = sorted({at for at in places if 0 < at < len(text) and not _covered(inside, at)})
    steps: list[str] = []
    for begin, end in zip([0, *kept], [*kept, len(text)], strict=True):
        piece = text[begin:end]
        if steps and (not piece.strip() or not steps[-1].strip()):
            steps[-1] += piece
        else:
            steps.append(piece)
    return steps


def rule_of(text: str) -> str:
    """Returns the rule's name that `auto` uses: the first of `RULES` that fits the text, else `sentences`.

    A rule fits if it finds two steps. `paragraphs` also needs a sixth as many breaks as `lines`: one blank line in a
    text of many lines does not make two paragraphs its steps.
    """
    inside = _spans(_OPENING, text)
    count = {name: _count(places(text), text, inside) for name, places in RULES.items()}
    if 6 * count["paragraphs"] < count["lines"]:
        count["paragraphs"] = 0
    return next((name for name in RULES if count[name]), "sentences")


def _count(places: Iterator[int], text: str, inside: tuple[list[int], list[int]]) -> int:
    first, last = len(text) - len(text.lstrip()), len(text.rstrip())
    return len({at for at in places if first < at < last and not _covered(inside, at)})


def _paragraphs(text: str) -> Iterator[int]:
    return (match.end() for match in _BLANK_LINE.finditer(text))


def _lines(text: str) -> Iterator[int]:
    return (match.end() for match in _LINE.finditer(text))


def _sentences(text: str) -> Iterator[int]:
    """Ends of sentences and lines, except decimals, abbreviations, initials, and places inside inline formulas."""
    inside = _spans(_OPENING_INLINE, text)
    yield from _lines(text)
    for match in _SENTENCE.finditer(text):
        before = text[max(0, match.start() - 12) : match.start()]
        if not _ABBREVIATION.search(before) and not _covered(inside, match.end()):
            yield match.end()


def _thoughts(text: str) -> Iterator[int]:
    """Paragraphs of a reasoning trace, and the place after its closing tag </think>."""
    tags = [match.end() for match in _THOUGHTS.finditer(text)]
    return iter([*tags, *_paragraphs(text)] if tags else ())


RULES: dict[str, Callable[[str], Iterator[int]]] = {
    "thoughts": _thoughts,
    "markers": lambda text: _counted(_MARKER, text),  # "Step n", in Markdown or not; n must count up from 1 or 0
    "numbered": lambda text: _counted(_NUMBER, text),  # "n." or "n)"; the same
    "paragraphs": _paragraphs,
    "lines": _lines,
    "sentences": _sentences,
}
"""The rules by name, in the order in which `auto` tries them."""


def _counted(pattern: re.Pattern[str], text: str) -> Iterator[int]:
    """Yields the beginnings of numbered lines, if there are at least two and they count up from 0 or 1."""
    matches = list(pattern.finditer(text))
    numbers = [int(match[1]) for match in matches]
    if len(matches) > 1 and numbers[0] in (0, 1) and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        yield from (match.start() for match in matches)


def _spans(opening: re.Pattern[str], text: str) -> tuple[list[int], list[int]]:
    """Returns the first and the last place inside each closed span, in order; spans do not overlap.

    As in Markdown, an unclosed fence extends to the end of the text.
    """
    begins, ends, at = [], [], 0
    stops = collections.defaultdict(list)  # where each environment ends, so that none is searched for twice
    for match in _END.finditer(text):
        stops[match[1]].append(match.end())
    last = {mark: text.rfind(mark) for mark in _CLOSING.values()}
    while match := opening.search(text, at):
        at = match.end()
        fence, begin, name = (*match.groups(), None, None, None)[:3]
        if fence:
            closing = re.compile(rf"^[ ]{{0,3}}{re.escape(fence)}[ \t]*(?:\n|\Z)", re.MULTILINE).search(text, at)
            end = closing.end() if closing else len(text)
        elif begin:
            index = bisect.bisect_left(stops[name], at)
            end = stops[name][index] if index < len(stops[name]) else -1
        elif match[0] == "$":
            closing = _CLOSING_DOLLAR.search(text, at, at + 500)
            end = closing.end() if closing and "\n" not in closing.string[at : closing.end()] else -1
        else:
            mark = _CLOSING[match[0]]
            end = text.find(mark, at) + len(mark) if last[mark] >= at else -1
        if end >= 0:
            begins.append(match.start() + 1)
            ends.append(end - 1)
            at = end
    return begins, ends


def _covered(spans: tuple[list[int], list[int]], at: int) -> bool:
    begins, ends = spans
    index = bisect.bisect_right(begins, at) - 1
    return index >= 0 and at <= ends[index]
