"""Finds equations and inequalities in the text of a step.

Neither Python nor SymPy ever evaluates the text. It becomes tokens; every relation sign takes the longest run of tokens
on either side that the grammar reads as an expression. Unreadable text is ignored.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from jprm.methods.verify.expressions import parse
from jprm.methods.verify.lexer import FUNCTIONS, Token, tokens_of

LONGEST = 6000  # characters of a step that are read
_FURTHEST = 120  # tokens of one side
_CLOSES = {")": "(", "]": "[", "}": "{"}


class Equation(NamedTuple):
    """`left relation right`. `doubtful`: words around it may change its meaning, so it never counts as false."""

    left: tuple
    relation: str
    right: tuple
    text: str
    units: frozenset[str]
    doubtful: bool
    shared: bool  # the left side is the right side of the equation before: a chain of equalities
    start: int  # the tokens between equations tell how one follows from the other
    end: int


def equations(text: str) -> tuple[list[Equation], list[Token]]:
    """Returns the equations and inequalities with two readable sides, in order, and the tokens."""
    tokens = _brackets(tokens_of(text[:LONGEST]))
    found: list[Equation] = []
    relations = [i for i, token in enumerate(tokens) if token.kind == "R"]
    whole = None  # the side since the previous relation, if it is one expression
    for n, at in enumerate(relations):
        shared = whole is not None
        left = whole or _suffix(tokens, relations[n - 1] + 1 if n else 0, at)
        end = relations[n + 1] if n + 1 < len(relations) else len(tokens)
        right = _prefix(tokens, at + 1, end)
        whole = right if right and right[2] == end and n + 1 < len(relations) else None
        if left and right:
            words = " ".join(token.text for token in tokens[left[1] : right[2]])
            units = frozenset(t.text.lower() for t in tokens[left[1] : right[2] + 1] if t.kind in ("W", "$"))
            alone = not shared and left[0][0] == "num"  # in 48 hours = 2400 + 600: unread words matter
            doubtful = alone or left[3] or (right[3] and whole is None)
            numbers = shared and left[0][0] == right[0][0] == "num"
            doubtful = doubtful or (numbers and _renamed(tokens[left[1] : at], tokens[at + 1 : right[2] + 1]))
            found.append(
                Equation(left[0], tokens[at].text, right[0], words, units, doubtful, shared, left[1], right[2])
            )
    return found, tokens


def _renamed(left: Sequence[Token], right: Sequence[Token]) -> bool:
    """Returns whether both sides have units, and different ones: 60 minutes = 1 hour."""
    one, two = (
        {t.text.lower().rstrip("s") for t in side if t.kind == "W" or t.text[0] == "$"} for side in (left, right)
    )
    return bool(one and two and not one & two)


def _applied(tokens: Sequence[Token], at: int) -> bool:
    """Returns whether a word may be a function of the term at `at`: sqrt(16), log 100, the root of 9, log_2 8."""
    if tokens[at].kind in "([{" and tokens[at - 1].kind == "A" or tokens[at].glued and tokens[at - 1].kind == "W":
        return True
    i = at - 1
    while i > 0 and tokens[i].text.lower() in ("of", "the", "a"):
        i -= 1
    return tokens[i].kind == "W" and tokens[i].text.lower().partition("_")[0] in FUNCTIONS


def _brackets(tokens: Sequence[Token]) -> list[Token]:
    """Turns brackets around prose into breaks, around a remark into one token A, around a list into one token P."""
    out: list[Token] = []
    opened: list[int] = []
    for token in tokens:
        if token.kind in _CLOSES.values():
            opened.append(len(out))
            out.append(token)
        elif token.kind not in _CLOSES:
            out.append(token)
        elif not opened or out[opened[-1]].kind != _CLOSES[token.kind]:
            opened.clear()
            out.append(Token("B", token.text))
        else:
            start = opened.pop()
            inner, kinds = out[start + 1 :], {t.kind for t in out[start + 1 :]}
            if "R" in kinds:
                out[start] = Token("B", out[start].text)
                out.append(Token("B", token.text))
            elif token.kind == "}" and kinds <= {"W", "B", "A", "%"}:
                out[start:] = inner  # \text{ miles}
            elif "B" in kinds and "W" not in kinds:
                out[start:] = [Token("P", "(list)", out[start].spaced)]
            elif out[start].kind != "{" and "W" in kinds and parse(inner) is None:
                out[start:] = [Token("A" if out[start].spaced else "P", "(remark)", out[start].spaced)]
            else:
                out.append(token)
    unclosed = set(opened)
    return [Token("B", t.text) if i in unclosed else t for i, t in enumerate(out)]


_TAKES = set(
    "of by than times plus minus from to divided multiplied half twice thrice double triple over with sum product "
    "difference between per least about remainder total every each subtract subtracting add adding multiply "
    "multiplying divide dividing negative quotient ratio average".split()
)
_GIVES = set(
    "more less fewer times plus minus remainder r over divided multiplied dozen hundred thousand million billion "
    "trillion with mod modulo percent and or to by of degrees squared cubed k m cents cent".split()
)


def _suffix(tokens: Sequence[Token], start: int, end: int) -> tuple[tuple, int, int, bool] | None:
    """Returns the longest expression that ends at `end`, as (expression, start, end, doubtful)."""
    first = max((i + 1 for i in range(start, end) if tokens[i].kind in "BP"), default=start)
    for i in range(max(first, end - _FURTHEST), end):
        before = tokens[i - 1] if i > start else Token("B", "")
        if before.kind not in ("B", "W", "A") or tokens[i].kind == "W":
            continue
        inner = parse(tokens[i:end])
        if inner is None:
            continue
        if i > start and _applied(tokens, i):
            return None
        signed = tokens[i].kind == "O"
        if signed and before.kind != "B":
            return None
        # the product of 5 and 3 + 2; but also: 3 + 4 = 7 and 7 + 2 = 9
        near = tokens[max(start, i - 6) : i] if before.text.lower() == "and" else [before]
        odd = any(token.text.lower() in _TAKES for token in near)
        odd = odd or (len(near) > 2 and near[-2].kind == "N" and tokens[i + 1].text == "/")  # 1 and 1/4
        open_ = before.text in "([{" and i - 1 > start and tokens[i - 2].kind == "O"  # and never closed
        if signed and tokens[i].text == "-":  # a minus sign or a bullet
            item = parse(tokens[i + 1 : end])
            inner = ("either", inner, item) if item else inner
        return inner, i, end, odd or open_
    return None


def _prefix(tokens: Sequence[Token], start: int, end: int) -> tuple[tuple, int, int, bool] | None:
    """Returns the longest expression that begins at `start`."""
    last = min((i for i in range(start, end) if tokens[i].kind in "BP"), default=end)
    unreadable = last < end and tokens[last].kind == "P"
    for i in range(min(last, start + _FURTHEST), start, -1):
        after = tokens[i] if i < end else Token("B", "")
        if after.kind not in ("B", "W", "A", "R") or (unreadable and i == last):
            continue
        inner = parse(tokens[start:i])
        if inner is not None:
            following = list(itertools.takewhile(lambda token: token.kind == "W", tokens[i : i + 4]))
            glued = following and i + len(following) < end and tokens[i + len(following)].kind in "([{"
            if any(token.text.lower().partition("_")[0] in FUNCTIONS for token in following) or (
                glued and tokens[i + len(following)].glued
            ):
                return None  # 8 = 2 sqrt(16)
            words = [t.text.lower() for t in tokens[max(start, i - 3) : i + 3] if t.kind in "WS"]
            return inner, start, i, any(word in _GIVES for word in words)
    return None
