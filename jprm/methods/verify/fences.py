"""Extracts programs from model output: from fences as in CommonMark, from between markers, or the whole text.

`program_in` reads a whole text. A text without a program has no result, since it cannot be judged.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable
from typing import NamedTuple

from jprm.methods.answers import end_of_thoughts

PYTHON, PLAIN, OTHER = range(3)
"""Language in the first line of a fence: Python, unspecified, or other."""


class Block(NamedTuple):
    """Content of a fence, without its indentation; `kind` is PYTHON, PLAIN (no language) or OTHER."""

    kind: int
    code: str


_FENCE = re.compile(r"^((?:[ \t]*>)*)([ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*)(`{3,}|~{3,})[ \t]*(.*)$")
"""Quote marks, indentation or list marker, fence, and info string."""
_PYTHON = re.compile(r"[{\s.]*(?:i?python|py)[\d.]*(?=$|[\s,:;={}()\[\]])", re.IGNORECASE)
_MARKDOWN = re.compile(r"[{\s.]*(?:markdown|md)\b", re.IGNORECASE)
_SESSION = re.compile(r"\s*>>> ")


class _Open(NamedTuple):
    fence: str
    indent: int
    info: str
    lines: list[str]

    def closed_by(self, fence: str, indent: int) -> bool:
        """Whether a fence line closes this one: same character, at least as long, not indented as code."""
        return fence[0] == self.fence[0] and len(fence) >= len(self.fence) and indent <= self.indent + 3

    def blocks(self, inside: bool) -> list[Block]:
        """Returns the block; for a Markdown document (unless nested, `inside`), the blocks in it.

        The program's own indentation is preserved.
        """
        spaces = [len(line) - len(line.lstrip()) for line in self.lines if line.strip()]
        text = "\n".join(line[min([self.indent, *spaces]) :] for line in self.lines)
        if _MARKDOWN.match(self.info) and not inside:
            return blocks(text, inside=True)
        first, _, rest = text.partition("\n")
        if not self.info and _PYTHON.fullmatch(first.strip() or "-"):  # the language is on a line of its own
            return [Block(PYTHON, rest)]
        return [Block(PYTHON if _PYTHON.match(self.info) else OTHER if self.info else PLAIN, text)]


def blocks(text: str, inside: bool = False) -> list[Block]:
    """Returns the fenced blocks in order; for a Markdown block the blocks in it, unless already `inside` one.

    An unclosed fence ends before the next one, or at the end of the text. `kind` is PYTHON (0), PLAIN (1, no language)
    or OTHER (2); no block is left out. [] without fences.

    >>> blocks("1. First:\\n   ~~~python\\n   x = 1\\n   ~~~\\nDone.")
    [Block(kind=0, code='x = 1')]
    """
    fenced: list[Block] = []
    current: _Open | None = None
    for line in text.split("\n"):
        match = _FENCE.match(line) if "```" in line or "~~~" in line else None
        if match:
            quote, lead, fence, info = match.groups()
            if current and not info.strip() and current.closed_by(fence, len(lead)):
                fenced += current.blocks(inside)
                current = None
                continue
            opens = info.strip() and current and current.closed_by(fence, len(lead))
            if (opens or not current) and not ("`" in fence and "`" in info):
                fenced += current.blocks(inside) if current else []
                current = _Open(fence, len(lead), info.strip(), [])
                continue
        elif "```" in line:
            before, fence, info = _late(line)
            if current and fence and not info and current.closed_by(fence, 0):  # the last line of code, and the fence
                current.lines.append(before)
                fenced += current.blocks(inside)
                current = None
                continue
            if not current and fence and "`" not in before:
                current = _Open(fence, 0, info, [])
                continue
        if current:
            current.lines.append(re.sub(r"^[ \t]*>[ ]?", "", line) if line.lstrip().startswith("> ") else line)
    return fenced + (current.blocks(inside) if current else [])


def _late(line: str) -> tuple[str, str, str]:
    """Splits a line into text, a fence at its end, and the language, e.g. "The code: ```python".

    CommonMark does not allow a fence after text, but models write it. Without a fence at its end, the fence is empty.
    """
    line = line.rstrip()
    info = next((word for word in ("python3", "python", "py") if line.lower().endswith(word)), "")
    line = line[: len(line) - len(info)].rstrip()
    before = line.rstrip("`")
    fence = line[len(before) :]
    return before, fence if len(fence) >= 3 else "", info


# ---- Text around a program: tokens, thoughts, markers.

_TOKEN = re.compile(r"<[|｜][^|｜<>\n]{1,40}[|｜]>[ \t]*(?=\n|\Z|<)")
_LAST_TOKEN = re.compile(r"(?:</s>|<eos>|<end_of_turn>|<\|[\w ]{1,40}\|>|\[EOS\])\Z")
_FIRST_TOKEN = re.compile(r"\A(?:\s*(?:<s>|<bos>|<\|[\w ]{1,40}\|>))+")
_MARK = r"\[{0}PYTHON\]|\[{0}CODE\]|<{0}code>|<{0}python>"
_BEGIN = re.compile(rf"^[ \t]*(?:{_MARK.format('')}|\[BEGIN\])", re.MULTILINE | re.IGNORECASE)
_END = re.compile(rf"(?:{_MARK.format('/')}|\[DONE\]|\[END\])[ \t]*$", re.MULTILINE | re.IGNORECASE)


def without_tokens(text: str) -> str:
    """Removes leading tokens, e.g. `<s>`, and the text from a token at a line's end on, e.g. `<|im_end|>`.

    A token before other text stays. Trailing white space is removed too.
    """
    text = _FIRST_TOKEN.sub("", text)
    end = _TOKEN.search(text)
    text = (text[: end.start()] if end else text).rstrip()
    while token := _LAST_TOKEN.search(text, max(0, len(text) - 50)):
        text = text[: token.start()].rstrip()
    return text


def _between_marks(text: str) -> str:
    """Returns the text between MBPP's or Llama's markers. The first marker may be in the prompt instead."""
    begin, end = _BEGIN.search(text), _END.search(text)
    if end and (begin is None or end.start() < begin.start()):
        return text[: end.start()]
    if begin is None:
        return text
    end = _END.search(text, begin.end())
    return text[begin.end() : end.start() if end else len(text)]


# ---- The program.


def program_in(text: str, prelude: str = "") -> str | None:
    """Returns the program in a text, which need not be valid Python, or None if the text holds no code.

    Python fences are preferred to fences without a language, and those to other languages. Interactive sessions (`>>>`)
    are ignored, as are invalid fences beside a valid one. Without fences, the text itself is the program, apart from
    surrounding prose. Thoughts and special tokens are removed. `prelude`, the code before it, is not part of the
    result; it only helps to tell code from prose, e.g. for an indented body of its last function.
    """
    text = without_tokens(text)
    text = _between_marks(text[end_of_thoughts(text) :]).replace("\r\n", "\n")
    fenced = blocks(text)
    if not fenced:
        return _bare(text, prelude)
    first = re.search(r"^[ \t]*(?:```+|~~~+)[ \t]*$", text, re.MULTILINE)
    before = text[: first.start()] if first else ""
    if "```" not in before and "~~~" not in before and _is_program(before, prelude):  # the prompt opened the fence
        return before
    return _joined(programs_of(fenced), prelude)


def programs_of(fenced: Iterable[Block]) -> list[str]:
    """Returns the code in the fences that most likely form the program, in order, each ending in a newline.

    These are the Python fences, or if there are no such fences, the ones without a language, else the others; [] if all
    are empty or interactive sessions.
    """
    codes = [block for block in fenced if block.code.strip() and not _SESSION.match(block.code)]
    kind = min((block.kind for block in codes), default=PYTHON)
    return [block.code.rstrip() + "\n" for block in codes if block.kind == kind]


def _joined(codes: list[str], prelude: str) -> str | None:
    """Joins fences to one program, leaving out remarks, and versions that a later fence replaces."""
    if _parsed(prelude + "\n".join(codes)) is None:
        parts = [(code, _parsed(prelude + code) is not None) for code in codes]
        last = max((i for i, (code, whole) in enumerate(parts) if whole or _DEFINITION.search(code)), default=-1)
        codes = [code for i, (code, whole) in enumerate(parts) if whole or i == last]
    program = "\n".join(codes)
    return program if _is_program(program, prelude) or _CODE.search(program) else None


_DEFINITION = re.compile(r"^[ \t]*(?:(?:async )?def |class |import |from \w[\w.]* import |@\w)", re.MULTILINE)
_CODE = re.compile(
    _DEFINITION.pattern
    + r"|^[ \t]*(?:return\b(?! to)|(?:for|while|if|elif|else|try|with|except)\b[^\n]*:[ \t]*(?:#.*)?$|raise \w+\("
    r"|[A-Za-z_][\w.]*(?:\[[^\]\n]*\])?[ \t]*[-+*/]?=(?!=)[ \t]*\S|print\()",
    re.MULTILINE,
)
"""A line that does not occur in prose. If a text has one but is not valid Python, it is a wrong program."""


def _bare(text: str, prelude: str) -> str | None:
    """Returns the program in a text without fences, without prose before and after it."""
    if _is_program(text, prelude):
        return text
    start = _DEFINITION.search(text)
    for begin in (0, start.start()) if start and start.start() else (0,):
        if (program := _without_tail(text[begin:], prelude)) is not None:
            return program
    return text if _CODE.search(text) else None


def _without_tail(text: str, prelude: str) -> str | None:
    """Returns the program before the prose at which parsing fails, if any."""
    lines, error = text.split("\n"), _error_line(prelude + text) - prelude.count("\n")
    starts = [i for i, line in enumerate(lines[:error]) if line.strip() and not line.startswith((" ", "\t"))]
    paragraphs = [i + 1 for i, line in enumerate(lines[:error]) if not line.strip()]
    for end in (len(lines), *starts[-1:], *paragraphs[-1:]):
        program, tail = "\n".join(lines[:end]), "\n".join(lines[end:])
        if not _CODE.search(tail) and _is_program(program, prelude):
            return program
    return None


def _is_program(text: str, prelude: str) -> bool:
    """Whether `prelude + text` is valid Python in which the text does something.

    Prose can be valid Python too: a text is no program if one of its statements is a lone name, e.g. `Explanation`, or
    all are expressions without an outer call, e.g. `2 + 3`. An indented text continues the prelude's last function.
    """
    tree = _parsed(prelude + text) if text.strip() else None
    if tree is None:
        return False
    if prelude.strip() and text.lstrip("\n").startswith((" ", "\t")):  # the body of the prelude's last function
        return True
    alone = _parsed(text)
    statements = alone.body if alone else []
    if any(isinstance(node, ast.Expr) and isinstance(node.value, ast.Name) for node in statements):  # "Explanation"
        return False
    return any(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call | ast.Await) for node in statements)


def _parsed(code: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _error_line(code: str) -> int:
    """Returns the line, from 1, of the first syntax error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(code)
    except SyntaxError as error:
        return error.lineno or 1
    except (ValueError, RecursionError, MemoryError):
        return 1
    return code.count("\n") + 1
