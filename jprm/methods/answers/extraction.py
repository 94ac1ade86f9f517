r"""Finds the final answer of a text.

The rules, in order:

1. If the text has thoughts (`</think>` and similar marks), only the text after them counts. If it has a heading "#
   Answer", as in PRM800K, only the text after the heading counts.
2. The last mark with an answer wins: `\boxed{}` (rule `box`), `<answer></answer>` (`tag`), "the answer is", "Answer:",
   "72 is the answer" or a chosen letter, e.g. "Option D is correct" (`statement`), and `#### 72` or a heading "Answer"
   (`heading`). An answer is a number, a formula, a choice letter, or words after a colon. Words in a sentence ("the
   answer is Tuesday"), "the result is" and "the solution is" count only if there is no such mark. An empty box, "the
   answer is not 5" and "if the answer is 5" state no answer. Words that change a number belong to it: "72 pots in
   total" is 72, but "5 or maybe 7" and "more than 72" stay whole. Boxes in a row form a list.
3. Otherwise the last sentence with a number or formula (rule `number`), and the number that it states (see
   `sentences`), e.g. 5 in "she needs to babysit 5 times to make 15 flans". Words count if a sentence concludes with
   them ("Therefore, after spinning 90 degrees, she is facing **east**", rule `statement`).

A truncated text ending in an open box or right after "the answer is" has no answer.
"""

from __future__ import annotations

import re
from typing import NamedTuple, get_args

from jprm.methods.answers.choices import choices
from jprm.methods.answers.formulas import LONGEST, MATH, first_item
from jprm.methods.answers.prose import Mark, Prose, Rule, end_of_thoughts, prose_of
from jprm.methods.answers.sentences import conclusion
from jprm.methods.answers.statements import DENIED, headings, statements

RULES: tuple[Rule, ...] = get_args(Rule)

_MARKS = 40  # of a kind that are read, from the last
_PRM800K = re.compile(r"^# Answer[^\S\n]*$", re.MULTILINE)


class Extracted(NamedTuple):
    """A final answer and its rule; both are `None` if the text states no answer."""

    answer: str | None
    rule: Rule | None


_NONE = Extracted(None, None)


def extract(text: str, *, form: Rule | None = None) -> Extracted:
    """Returns the final answer, as written, and its rule, the last one in the text (rules: this module's docstring).

    If `form` is given, one of `RULES` (`box`, `tag`, `statement`, `heading`, `number`), only that rule counts, and
    concluding words without a mark do not. Both are `None` if the text states no answer (by `form`), or its last mark
    is cut off. Raises ValueError for an unknown form.
    """
    if form is not None and form not in RULES:
        raise ValueError(f"form is {form!r}, not one of {', '.join(RULES)}")
    prose = prose_of(text[end_of_thoughts(text) :])
    ends = [mark.end() for mark in _PRM800K.finditer(prose.text)]
    prose = prose.since(ends[-1]) if ends else prose
    text = prose.text
    marks = [*_boxes(text), *_tags(text), *statements(prose), *choices(prose), *headings(prose)]
    marks = sorted(mark for mark in marks if form in (None, mark.rule))
    if marks:
        last = ([mark for mark in marks if mark.sure] or marks)[-1]
        return Extracted(last.answer, last.rule) if last.answer else _NONE
    if ends and form in (None, "heading"):
        line = text.strip().partition("\n")[0]
        return Extracted(first_item(line)[0] or line.strip(), "heading") if line else _NONE
    concluded = conclusion(_without(prose, DENIED)) if form in (None, "number") else None
    return Extracted(concluded.answer, concluded.rule) if concluded and form in (None, concluded.rule) else _NONE


def extract_answer(text: str) -> str | None:
    """Returns the final answer of a text, as written, by any rule of `extract`; `None` if it states no answer."""
    return extract(text).answer


def _without(prose: Prose, pattern: re.Pattern[str]) -> Prose:
    return prose._replace(text=pattern.sub(lambda m: " " * len(m[0]), prose.text))


# ---- Boxes.

_BOX = re.compile(r"\\{1,2}(?:boxed|fbox|framebox|Boxed)(?:\s*\[[^\[\]\n]{0,20}\])?\s*(\{|\d+|\\?[a-zA-Z]\b)")
_BETWEEN = re.compile(
    r"[\s$,;.()\[\]\\]*(?:and|or|,|;|\\text\{ ?(?:and|or) ?\}|\\quad)[\s$,;()\[\]\\]*|[\s$\\()\[\]]*[,;]?[\s$\\()\[\]]+"
)


def _boxes(text: str) -> list[Mark]:
    """Returns the contents of boxes; boxes in a row count as one list."""
    spans: list[tuple[int, int, str]] = []
    marks = list(_BOX.finditer(text))
    ends = _ends_of_braces(text) if marks else {}
    for mark in marks:
        if mark[1] != "{":
            spans.append((mark.start(), mark.end(), mark[1]))
        elif (end := ends.get(mark.end() - 1)) is None:
            spans.append((mark.start(), len(text), ""))
        elif (inside := text[mark.end() : end].strip()) and not _PLACEHOLDER.fullmatch(inside):
            spans.append((mark.start(), end + 1, inside))
    out: list[Mark] = []
    before, empty = 0, True
    for start, end, inside in spans[-_MARKS:]:
        if start < before and not empty:  # in another box
            continue
        near = out and inside and not empty and start - before < 40
        joint = _BETWEEN.fullmatch(text, before, start) if near else None
        answer = _inner(inside)
        if joint and (word := re.search("and|or|[,;]", joint[0])):
            answer = out.pop().answer + (" or " if word[0] == "or" else ", ") + answer
        out.append(Mark(start, answer, "box", True))
        before, empty = end, not inside
    return out


_PLACEHOLDER = re.compile(
    r"(?:\\(?:text|mathrm)\{|\}|\$|\\(?:ldots|dots|cdots|cdot|square|quad|phantom)(?![a-z])|\.{2,}|…|_+|\s|\?+"
    r"|(?:your |the )?(?:final )?answer(?: here)?)+",
    re.IGNORECASE,
)


def _inner(inside: str) -> str:
    """Removes boxes nested in a box."""
    while m := re.match(r"\s*\\(?:boxed|fbox)\s*\{(.*)\}\s*\Z", inside, re.DOTALL):
        inside = m[1]
    return re.sub(r"\A\\(?=\d)", "", inside.strip().strip("$").strip())


def _ends_of_braces(text: str) -> dict[int, int]:
    """Returns {open brace: close brace} positions in one pass; escaped braces (sets) do not count."""
    ends, stack = {}, []
    for m in re.finditer(r"(?<!\\)[{}]", text):
        if m[0] == "{":
            stack.append(m.start())
        elif stack:
            ends[stack.pop()] = m.start()
    return ends


# ---- Tags.

_TAG = re.compile(
    r"<\s*((?:final[\s_-]?)?(?:answer|ans|solution|result)|final)\s*>|\[\s*((?:final[\s_]?)?answer)\s*\](?!\s*\()",
    re.IGNORECASE,
)


def _tags(text: str) -> list[Mark]:
    out = []
    for mark in list(_TAG.finditer(text))[-_MARKS:]:
        name, last = mark[1] or mark[2], mark.end() + LONGEST
        of_end = rf"<\s*/\s*{re.escape(name)}\s*>|\[\s*/\s*{re.escape(name)}\s*\]"
        end = re.compile(of_end, re.IGNORECASE).search(text, mark.end(), last)
        inside = text[mark.end() : end.start()] if end else text[mark.end() : last].partition("\n\n")[0]
        if not end and name.lower() in ("solution", "result", "final"):
            continue
        if re.search(r"\w|\\", _TAG.sub("", inside)):
            sure = [mark for mark in sorted([*_boxes(inside), *statements(Prose(inside))]) if mark.sure]
            answer = sure[-1].answer if sure else _whole_or_item(inside)
            if answer and name.lower() != "solution" or sure:
                out.append(Mark(mark.start(), answer, "tag", True))
    return out


def _whole_or_item(text: str) -> str:
    text = text.strip()
    if not MATH.fullmatch(text) and "\n" in text and "\\begin" not in text:
        text = [line for line in text.split("\n") if line.strip()][-1]
    return first_item(text)[0] or text
