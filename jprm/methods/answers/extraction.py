r"""Finds the final answer that a text states.

What counts, in this order:

1. Only text after the thoughts (`</think>` and the like) counts, where there is some, and only text after a heading
   "# Answer", which ends PRM800K's chains.
2. Of the marks in it, the last one with an answer: `\boxed{}` (rule `box`), `<answer></answer>` (`tag`), "the answer
   is", "Answer:", "72 is the answer" (`statement`), and `#### 72` or a heading "Answer" (`heading`). An answer is a
   number, a formula, a letter of a choice, or words behind a colon; words in a sentence ("the answer is Tuesday")
   count where no mark has such an answer, and so do "the result is" and "the solution is". An empty box, "the answer is
   not 5" and "if the answer is 5" state nothing. Of a statement its first number, formula or words are taken, with all
   that changes them: "72 pots in total" is 72, "5 or maybe 7" and "more than 72" stay as they are. Boxes in a row are a
   list.
3. The last number or formula of the text (rule `number`).

A truncated text, which ends in an open box or right behind "the answer is", has no answer.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Literal, NamedTuple, get_args

from jprm.methods.answers.formulas import LONGEST, MATH, first_item, is_money, last_formula, last_number

Rule = Literal["box", "tag", "statement", "heading", "number"]
RULES: tuple[Rule, ...] = get_args(Rule)

_MARKS = 40  # of a kind that are read, from the last


class Extracted(NamedTuple):
    """A final answer and the rule that took it; None for both where a text states none."""

    answer: str | None
    rule: Rule | None


class _Found(NamedTuple):
    """What a mark says: where it is, its answer ("" if it was cut off), and whether it is surely an answer."""

    at: int
    answer: str
    rule: Rule
    sure: bool


_NONE = Extracted(None, None)


def extract(text: str, *, form: Rule | None = None) -> Extracted:
    """Returns the final answer of a text and the rule that took it, see above. `form`: the only rule that counts."""
    if form is not None and form not in RULES:
        raise ValueError(f"form is {form!r}, not one of {', '.join(RULES)}")
    text = _bare(text[end_of_thoughts(text) :])
    headed = _PRM800K.split(text)
    text = headed[-1]
    marks = [*_boxes(text), *_tags(text), *_statements(text), *_headings(text)]
    marks = sorted(mark for mark in marks if form in (None, mark.rule))
    if marks:
        last = ([mark for mark in marks if mark.sure] or marks)[-1]
        return Extracted(last.answer, last.rule) if last.answer else _NONE
    if len(headed) > 1 and form in (None, "heading"):
        line = text.strip().partition("\n")[0]
        return Extracted(first_item(line)[0] or line.strip(), "heading") if line else _NONE
    if form in (None, "number") and (number := last_number(_DENIED.sub("", text))):
        return Extracted(number, "number")
    return _NONE


def extract_answer(text: str) -> str | None:
    """Returns the final answer that a text states, None if it states none."""
    return extract(text).answer


# ---- Text: thoughts, Markdown, tokens.

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
"""A box outside dollars keeps its subscripts: an underscore is emphasis at the edge of a word only."""
_WIDE = re.compile(r"[^\S\n]{3,}|\n{3,}")
_PRM800K = re.compile(r"^# Answer[^\S\n]*$", re.MULTILINE)


def end_of_thoughts(text: str) -> int:
    """Returns where the thoughts of a text end; 0 where it has none, or nothing else."""
    end = max((mark.end() for mark in _THOUGHTS.finditer(text)), default=0)
    return end if text[end:].strip() else 0


def _bare(text: str) -> str:
    """Returns the text without tokens, HTML and Markdown's emphasis, which stays inside formulas."""
    text = _WIDE.sub(lambda gap: gap[0][:2], text)
    # \b and \f of a string that was not escaped
    text = text.replace("\x08oxed", "\\boxed").replace("\x0crac", "\\frac")
    if "<" in text or "[" in text:
        text = _BREAK.sub("\n", _HTML.sub("", _TOKENS.sub(" ", _CALCULATOR.sub("", text))))
    if not any(mark in text for mark in "*_`~"):
        return text
    out, at = [], 0
    for math in MATH.finditer(text):
        if math[0].startswith("$") and not math[0].startswith("$$") and is_money(math[0][1:-1]):
            continue
        out += [_EMPHASIS.sub("", text[at : math.start()]), math[0]]
        at = math.end()
    return "".join([*out, _EMPHASIS.sub("", text[at:])])


# ---- Boxes.

_BOX = re.compile(r"\\{1,2}(?:boxed|fbox|framebox|Boxed)(?:\s*\[[^\[\]\n]{0,20}\])?\s*(\{|\d+|\\?[a-zA-Z]\b)")
_BETWEEN = re.compile(
    r"[\s$,;.()\[\]\\]*(?:and|or|,|;|\\text\{ ?(?:and|or) ?\}|\\quad)[\s$,;()\[\]\\]*|[\s$\\()\[\]]*[,;]?[\s$\\()\[\]]+"
)


def _boxes(text: str) -> list[_Found]:
    """Returns what boxes hold, from the last; those in a row as one."""
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
    out: list[_Found] = []
    before, empty = 0, True
    for start, end, inside in spans[-_MARKS:]:
        if start < before and not empty:  # in another box
            continue
        near = out and inside and not empty and start - before < 40
        joint = _BETWEEN.fullmatch(text, before, start) if near else None
        answer = _inner(inside)
        if joint and (word := re.search("and|or|[,;]", joint[0])):
            answer = out.pop().answer + (" or " if word[0] == "or" else ", ") + answer
        out.append(_Found(start, answer, "box", True))
        before, empty = end, not inside
    return out


_PLACEHOLDER = re.compile(
    r"(?:\\(?:text|mathrm)\{|\}|\$|\\(?:ldots|dots|cdots|cdot|square|quad|phantom)(?![a-z])|\.{2,}|…|_+|\s|\?+"
    r"|(?:your |the )?(?:final )?answer(?: here)?)+",
    re.IGNORECASE,
)


def _inner(inside: str) -> str:
    """Returns what is in a box without boxes in it."""
    while m := re.match(r"\s*\\(?:boxed|fbox)\s*\{(.*)\}\s*\Z", inside, re.DOTALL):
        inside = m[1]
    return inside.strip().strip("$").strip()


def _ends_of_braces(text: str) -> dict[int, int]:
    """Returns where each brace closes, in one pass. Escaped braces, of sets, do not count."""
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


def _tags(text: str) -> list[_Found]:
    out = []
    for mark in list(_TAG.finditer(text))[-_MARKS:]:
        name, last = mark[1] or mark[2], mark.end() + LONGEST
        of_end = rf"<\s*/\s*{re.escape(name)}\s*>|\[\s*/\s*{re.escape(name)}\s*\]"
        end = re.compile(of_end, re.IGNORECASE).search(text, mark.end(), last)
        inside = text[mark.end() : end.start()] if end else text[mark.end() : last].partition("\n\n")[0]
        if not end and name.lower() in ("solution", "result", "final"):
            continue
        if re.search(r"\w|\\", _TAG.sub("", inside)):
            sure = [mark for mark in sorted([*_boxes(inside), *_statements(inside)]) if mark.sure]
            answer = sure[-1].answer if sure else _whole_or_item(inside)
            if answer and name.lower() != "solution" or sure:
                out.append(_Found(mark.start(), answer, "tag", True))
    return out


def _whole_or_item(text: str) -> str:
    text = text.strip()
    if not MATH.fullmatch(text) and "\n" in text and "\\begin" not in text:
        text = [line for line in text.split("\n") if line.strip()][-1]
    return first_item(text)[0] or text


# ---- Statements.

_NOUN = r"(?:answers?|ans|(?:correct|right|best)\s+(?:choice|option)(?:\s+(?:here|among\s+them))?)"
_OF = (
    r"(?:\s+(?:to|of|for|in|here|that|we|i|you|which|when|as|rounded|then|therefore|thus|hence|so|now"
    r"|choice|option|part|key|letter|value|number)\b[^.\n:=?!]{0,100}?)?"
)
_IS = (
    r"(?:\s+(?:(?:is|are|was|equals?|becomes|remains|(?:should|must|would|will|can|could)\s+(?:then\s+"
    r"|therefore\s+|only\s+)?be|comes\s+(?:out\s+)?to(?:\s+be)?|turns\s+out\s+to\s+be"
    r"|works\s+out\s+to(?:\s+be)?|amounts\s+to|has\s+to\s+be)\b)(?:\s+(?:equal\s+to|given\s+by))?\s*[:：]?"
    r"|[\s\"'”*_)\]]*(?:[:：=⇒→➜]|=>|->|\\to\b|\\implies\b|\\Rightarrow\b)|\s*[-–—](?=\s))"
)
_PHRASE = re.compile(rf"(?<![a-zA-Z\\])(?:{_NOUN}\b(?:\s*\([^()\n]{{0,60}}\))?{_OF}{_IS})", re.IGNORECASE)
_ABROAD = re.compile(
    r"(?:(?:最终|最后|正确)?答案\s*(?:应该|应)?\s*(?:是|为|為|選|选|[:：=])|故选|因此选|答え?\s*(?:は|[:：])|結果は|정답\s*은|답\s*은"
    r"|정답\s*[:：]|답\s*[:：]|ответ\w*\s*(?:[:：—-]|равен|будет)"
    r"|respuesta\w*(?:\s+\w+){0,2}?\s*(?:es|[:：])|r[ée]ponse\w*(?:\s+\w+){0,2}?\s*(?:est|[:：])|(?:antwort"
    r"|ergebnis|lösung)(?:\s+\w+){0,2}?\s*(?:ist|lautet|[:：])"
    r"|respost\w+(?:\s+\w+){0,2}?\s*(?:é|[:：])|rispost\w+(?:\s+\w+){0,2}?\s*(?:è|[:：])"
    r"|odpowied\w+(?:\s+\w+)?\s*(?:to|[:：])|جواب\w*\s*[:：]|उत्तर\s*[:：]?)\s*[:：]?",
    re.IGNORECASE,
)
_RESULT = re.compile(
    rf"(?<![a-zA-Z\\])(?:(?:final|required|desired)\s+(?:result|solution|value|total)|results?|solutions?){_OF}{_IS}",
    re.IGNORECASE,
)
_REVERSE = re.compile(
    r"\s(?:is|are|as|being)\s+(?:therefore\s+|thus\s+|then\s+)?(?:the|our|my"
    r"|your)\s+(?:\w+\s+){0,2}?answer\b(?!\s*(?:is|[:=：]))",
    re.IGNORECASE,
)
_HYPOTHETICAL = re.compile(
    r"\b(?:if|whether|suppose|supposing|assume|assuming|unless|imagine|why|had|believed|thought|guessed|claims|claimed"
    r"|how)(?:\s+that)?\s+(?:the|my|our|this|your|an?|its)?\s*(?:\w+\s+)?\Z",
    re.IGNORECASE,
)
_WRONG = re.compile(
    r"[\s,.;:!?$)]*(?:(?:which|that|this|it|and|but|\()\s+)*(?:is|was|are|seems?|looks?|would\s+be"
    r"|can(?:not|'t)\s+be)\s+(?:\w+ly\s+)?(?:wrong|incorrect|false|not\b|too\b|impossible)"
    r"|[\s$]*\?\s*(?:no\b|nope|not\b|wait|that\s+(?:is|can)\s*n[o']t)",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"answers?\s+(?:(?:(?:isn|can)['’]t|cannot|is\s+(?:\w+ly\s+)?(?:not|never))\b[^.\n]*"
    r"|[^.?\n]{1,60}(?:\?\s*(?:no|nope|not|wait)\b|\s(?:is|was)\s+(?:wrong|incorrect|false)\b))",
    re.IGNORECASE,
)
"""A statement of what is not the answer."""
_ADJECTIVES = re.compile(
    r"(?:correct|positive|negative|unique|clear|obvious|reasonable|simpl\w+|express\w+|given|an?|in|as"
    r"|right|wrong|unclear|not|ambiguous|consistent|rounded|already|found|the|just|that|this|required"
    r"|below|above|here|boxed|written|obtained|also|now|easy|trivial|to|it|verified|confirmed|final"
    r"|complete|unknown|exact|approximate|independent|possible|invalid|valid|rational|real|integer"
    r"|interesting|surprising|what|one|between|determined|calculated|is|we|i|you)\b",
    re.IGNORECASE,
)


def _statements(text: str) -> list[_Found]:
    out = []
    for kind, pattern in (("result", _RESULT), ("phrase", _PHRASE), ("abroad", _ABROAD)):
        for mark in list(pattern.finditer(text))[-_MARKS:]:
            before = text[max(0, mark.start() - 60) : mark.start()].rsplit("\n", 1)[-1]
            if _HYPOTHETICAL.search(before):
                continue
            rest = text[mark.end() : mark.end() + LONGEST]
            if kind == "result" and "\n" in rest.strip():  # of an intermediate step
                continue
            if not rest.strip(" \t\"'*_.:"):
                if kind == "phrase" and (rest or mark[0][-1:] not in ":：=") and mark[0][-1:] != "-":
                    out.append(_Found(mark.start(), "", "statement", True))
                continue
            colon = bool(re.search(r"[:：=]\s*\Z", mark[0])) or kind == "abroad"
            if stated := _stated(rest, mark[0], colon):
                out.append(_Found(mark.start(), stated[0], "statement", stated[1] and kind != "result"))
    for mark in list(_REVERSE.finditer(text))[-_MARKS:]:
        line = text[max(0, mark.start() - 300) : mark.start()].rsplit("\n", 1)[-1]
        line = re.split(r"(?<=[a-z)\]}$])[.!?]\s", line)[-1]
        if (last := last_formula(line)) and not re.search(r"\bnot\s*\Z|\\f?boxe?d?", line):
            out.append(_Found(mark.start(), last, "statement", True))
    return out


_NEGATED = re.compile(r"\s*(?:definitely |certainly |clearly )?(?:not|never|wrong|incorrect)\b", re.IGNORECASE)
_OWN_MARK = re.compile(
    rf"\W*(?:the|our|my)?\s*(?:final|correct)?\s*{_PHRASE.pattern}|[\s$\\(\[]*\\(?-i:boxed|fbox)"
    r"|\s*<\s*(?:final_?)?answer\s*>",
    re.IGNORECASE,
)


def _stated(rest: str, mark: str, colon: bool) -> tuple[str, bool] | None:
    """Returns the answer at the start of what follows a mark and whether it is surely one; None if it states none."""
    if m := re.match(r"[\s:*\"']*(?:\n\s*)+", rest):  # on the next line
        if not colon and not re.match(r"\s*\n+\s*(?:\$|\\\[|\\\(|\\begin)", rest):
            return None
        rest = rest[m.end() :]
        if re.match(r"(?:#+\s*)?(?:step|first|let|to|we|given|note)\b", rest, re.IGNORECASE):
            return None
    if _OWN_MARK.match(rest) or _NEGATED.match(rest):
        return None
    answer, kind, end = first_item(rest)
    if not re.search(r"\w|\\|∞|∅", answer) or _WRONG.match(rest, end):
        return None
    if '"' in mark and "\\\\" in answer:  # of JSON
        with contextlib.suppress(ValueError):
            answer = json.loads(f'"{answer}"')
    if kind != "words":
        return answer, True
    adjective = _ADJECTIVES.match(answer)
    if adjective and ("\\boxed" in answer or not re.fullmatch(r"not? \w+|correct|wrong|positive|negative", answer)):
        return None
    return answer, "\\boxed" not in answer and colon and len(answer.split()) <= 5


# ---- Headings.

_HASHES = re.compile(r"^[^\S\n]*#{1,6}(?!#)[^\S\n]*|(?<=\s)####(?!#)[^\S\n]*|(?<!#)####[^\S\n]*", re.MULTILINE)
_TITLE = re.compile(
    r"^[^\S\n]*(?:#{1,6}\s*)?(?:\d+[.)]\s*)?(?:the\s+|my\s+)?(?:(?:final|correct|short)\s+)?(?:answer"
    r"|ans)\s*[:：.]?[^\S\n]*\n+",
    re.IGNORECASE | re.MULTILINE,
)
_TITLES = re.compile(
    r"(?:step|part|case|conclusion|solution|final|answer|verification|check|summary|note|explanation"
    r"|problem|question|approach|calculat\w+|given|finding?|understand\w*|method|result|\d+\.\s+[A-Z])\b",
    re.IGNORECASE,
)


def _headings(text: str) -> list[_Found]:
    out = []
    for mark in list(_HASHES.finditer(text))[-_MARKS:]:
        line, _, after = text[mark.end() : mark.end() + LONGEST].partition("\n")
        four = mark[0].count("#") == 4
        if not four or _TITLES.match(line.strip()) or re.match(r"\d+[.)]\s+[A-Z]", line.strip()):
            continue
        if not line.strip():
            line, _, after = after.lstrip().partition("\n")
            if not line:
                out.append(_Found(mark.start(), "", "heading", True))
                continue
        if _PHRASE.search(line) or _BOX.search(line):
            continue
        answer, kind, _ = first_item(line)
        if re.search(r"\w|\\", answer or line) and (kind != "words" or not after.strip()):
            out.append(_Found(mark.start(), answer or line.strip(), "heading", True))
    for mark in list(_TITLE.finditer(text))[-_MARKS:]:
        rest = text[mark.end() : mark.end() + LONGEST].lstrip()
        stated = _stated(rest, mark[0], colon=True)
        line = rest.partition("\n")[0]
        if stated and not _PHRASE.search(line) and not _BOX.search(line):
            out.append(_Found(mark.start(), stated[0], "heading", stated[1]))
    return out
