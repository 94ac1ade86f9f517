"""Strips thoughts, special tokens, HTML and Markdown from a model's text, and remembers the bold spans."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from jprm.methods.answers.formulas import MATH, is_money

Rule = Literal["box", "tag", "statement", "heading", "number"]
Span = tuple[int, int]


def any_of(phrases: str) -> str:
    """Returns a regex for any phrase of a comma-separated list, e.g. "out of, in", with any white space.

    It is one non-capturing group. Phrases may themselves be regexes without commas.
    """
    return "(?:" + "|".join(r"\s+".join(phrase.split()) for phrase in phrases.split(",")) + ")"


class Prose(NamedTuple):
    """A text without Markdown, and its bold spans."""

    text: str
    bold: tuple[Span, ...] = ()

    def since(self, start: int) -> Prose:
        return Prose(self.text[start:], tuple((max(a - start, 0), b - start) for a, b in self.bold if b > start))


class Mark(NamedTuple):
    """A candidate answer and its position; "" if the text was cut off. `sure`: it is certainly meant as the answer."""

    at: int
    answer: str
    rule: Rule
    sure: bool


_THOUGHTS = re.compile(
    r"</(?:think|thinking|thought|thoughts|reasoning|analysis|scratchpad|reflection)>|\[/THINK\]"
    r"|<\|end_of_thought\|>|◁/think▷"
    r"|<\|channel\|>final<\|message\|>|<\|begin_of_solution\|>",
    re.IGNORECASE,
)
_TOKENS = re.compile(
    r"<\|[^<>|\n]{1,40}\|>|<｜[^<>\n]{1,40}｜>|</?s>|<(?:eos|bos|pad|unk|end_of_turn|start_of_turn)>"
    r"|\[/?INST\]|\[EOS\]|<0x0A>"
)
_HTML = re.compile(
    r"</?(?:b|i|u|em|strong|mark|span|code|p|div|font|center|big|small|h\d|tt|ins|math)(?:\s[^<>\n]{0,100})?>",
    re.IGNORECASE,
)
_CALCULATOR = re.compile(r"<<[^<>\n]{0,200}>>")  # of GSM8K's solutions
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_EMPHASIS = re.compile(
    r"(?<![\w)}\]*])\*{1,3}(?=[^\s*])|(?<=[^\s*])\*{1,3}(?![\w({\[*\\])|(?<![\w)}\]\\*])\*\*\s?|\*\*(?=\s"
    r"|\Z)|(?<=\w)\*\*(?=[^\w(\s])"
    r"|(?<![\w)}\]$\\])_{1,3}(?=[^\W_]|[$\\(*`])|(?<=[^\W_]|[$)}.:!*`])_{1,3}(?![\w{\\(])"
    r"|`+|~~[^~\n]{0,100}~~|=="
)
"""An underscore is emphasis only at a word edge, so boxes outside dollars keep their subscripts."""
_WIDE = re.compile(r"[^\S\n]{3,}|\n{3,}")


def end_of_thoughts(text: str) -> int:
    """Returns the index after the last mark that ends thoughts, e.g. `</think>`; 0 if no mark or no text follows it."""
    end = max((mark.end() for mark in _THOUGHTS.finditer(text)), default=0)
    return end if text[end:].strip() else 0


def prose_of(text: str) -> Prose:
    """Removes tokens, HTML and Markdown emphasis, and long gaps; formulas keep their marks.

    Thoughts stay: cut them first by `end_of_thoughts`. Bold spans, half-open (start, end), refer to the new text.
    """
    text = _WIDE.sub(lambda gap: gap[0][:2], text)
    # \b and \f of a string that was not escaped
    text = text.replace("\x08oxed", "\\boxed").replace("\x0crac", "\\frac")
    if "<" in text or "[" in text:
        text = _BREAK.sub("\n", _HTML.sub("", _TOKENS.sub(" ", _CALCULATOR.sub("", text))))
    text = text.replace("\\*", "×") if "\\*" in text else text
    if not any(mark in text for mark in "*_`~"):
        return Prose(text)
    formulas = [m.span() for m in MATH.finditer(text) if not _is_of_money(m[0])]
    out: list[str] = []
    stars: list[int] = []
    at = size = 0
    for start, end in [*formulas, (len(text), len(text))]:
        before = text[at:start]
        kept = 0
        for mark in _EMPHASIS.finditer(before):
            out.append(before[kept : mark.start()])
            size += mark.start() - kept
            kept = mark.end()
            if mark[0].startswith("**"):
                stars.append(size)
        out += [before[kept:], text[start:end]]
        size += len(before) - kept + end - start
        at = end
    bare = "".join(out)
    return Prose(bare, _in_bold(bare, stars))


def _is_of_money(math: str) -> bool:
    return math.startswith("$") and not math.startswith("$$") and is_money(math[1:-1])


def _in_bold(text: str, stars: list[int]) -> tuple[Span, ...]:
    """Pairs the bold marks of each line in order: first with second, third with fourth."""
    spans: list[Span] = []
    opened = None
    for at in stars:
        if opened is not None and "\n" not in text[opened:at]:
            spans.append((opened, at))
            opened = None
        else:
            opened = at
    return tuple(spans)
