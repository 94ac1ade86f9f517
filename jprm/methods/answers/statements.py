"""Reads stated answers: "the answer is 72", "72 is the answer", and the text under a heading "Answer".

A mark is followed by an item (a number, formula, letter or words) or by a sentence, which `sentences` reads: "The
answer is that the 5 people brought in **14 records**". "Answer" and "results" may also be verbs: "the questions that
Mark can answer in 6 hours", "the division results in a whole number".
"""

from __future__ import annotations

import contextlib
import json
import re

from jprm.methods.answers.forms import number_of
from jprm.methods.answers.formulas import LONGEST, first_item, last_side, values
from jprm.methods.answers.prose import Mark, Prose
from jprm.methods.answers.sentences import is_clause, last_statement, sentences, stated_value

_MARKS = 40  # of a kind that are read, from the last
_BOX = "\\boxed"

_NOUN = (
    r"(?:answers?|ans|(?:correct|right|best|my|our|final)\s+(?:choice|option|selection|pick)"
    r"(?:\s+(?:here|among\s+them))?)"
)
_OF = (
    r"(?:\s+(?:to|of|for|in|here|that|we|i|you|which|when|as|rounded|then|therefore|thus|hence|so|now"
    r"|choice|option|part|key|letter|value|number)\b(?:(?!,\s*(?:we|you|i|let|one|she|he|they)\b)[^.\n:=?!]){0,100}?)?"
)
_IS = (
    r"(?:\s+(?:(?:is|are|was|equals?|becomes|remains|(?:should|must|would|will|can|could)\s+(?:then\s+"
    r"|therefore\s+|only\s+)?be|comes\s+(?:out\s+)?to(?:\s+be)?|turns\s+out\s+to\s+be"
    r"|works\s+out\s+to(?:\s+be)?|amounts\s+to|has\s+to\s+be)\b)(?:\s+(?:equal\s+to|given\s+by))?\s*[:：]?"
    r"|(?<=\bans)\.(?=\s)|[\s\"'”*_)\]]*(?:[:：=⇒→➜]|=>|->|\\to\b|\\implies\b|\\Rightarrow\b)|\s*[-–—](?=\s))"
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
    rf"(?<![a-zA-Z\\])(?:(?:final|required|desired)\s+(?:result|solution|value|total)|results?(?!\s+(?:in|from)\b)|result(?!\s+from\b)|solutions?){_OF}{_IS}",
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
DENIED = re.compile(
    r"answers?\s+(?:(?:(?:isn|can)['’]t|cannot|is\s+(?:\w+ly\s+)?(?:not|never))\b[^.\n]*"
    r"|[^.?\n]{1,60}(?:\?\s*(?:no|nope|not|wait)\b|\s(?:is|was)\s+(?:wrong|incorrect|false)\b))",
    re.IGNORECASE,
)
"""A denied answer."""
_ADJECTIVES = re.compile(
    r"(?:correct|positive|negative|unique|clear|obvious|reasonable|simpl\w+|express\w+|given|an?|in|as"
    r"|right|wrong|unclear|not|ambiguous|consistent|rounded|already|found|the|just|that|this|required"
    r"|below|above|here|boxed|written|obtained|also|now|easy|trivial|to|it|verified|confirmed|final"
    r"|complete|unknown|exact|approximate|independent|possible|invalid|valid|rational|real|integer"
    r"|interesting|surprising|what|one|between|determined|calculated|is|we|i|you)\b",
    re.IGNORECASE,
)


_VERB = re.compile(
    r"\b(?:can|could|will|would|may|might|must|shall|should|to|not|we|they|you|i|he|she|who|did|does|do|also|[a-z]+ly"
    r"|(?!(?:this|its|his|us|thus|yes|class|plus|is|was|as)\b)[a-z]{2,}(?<!')s|(?<=[a-z,] )[A-Z][a-z]+)\s+\Z"
)
"""Words before the verb "answer": "questions Mark can answer", "the tests that students answer"."""


_STEP = re.compile(r"^[A-Z]\d{1,3}:", re.MULTILINE)  # A3: of answers to subquestions; only the last one's counts


def statements(prose: Prose) -> list[Mark]:
    """Returns the answers stated as answer, result or solution, in the order of the patterns; [] if there are none.

    `Mark.at` is the phrase's place. The answer is "" if the text ends at the phrase, cut off.
    """
    text, out = prose.text, []
    steps = [m.start() for m in _STEP.finditer(text)]
    for kind, pattern in (("result", _RESULT), ("phrase", _PHRASE), ("abroad", _ABROAD)):
        for mark in list(pattern.finditer(text))[-_MARKS:]:
            before = text[max(0, mark.start() - 60) : mark.start()].rsplit("\n", 1)[-1]
            if (
                steps
                and mark.start() < steps[-1]
                or _HYPOTHETICAL.search(before)
                or kind == "phrase"
                and _VERB.search(before)
            ):
                continue
            rest = text[mark.end() : mark.end() + LONGEST]
            if kind == "result" and "\n" in rest.strip():  # of an intermediate step
                continue
            if not rest.strip(" \t\"'*_.:"):
                if kind == "phrase" and (rest or mark[0][-1:] not in ":：=") and mark[0][-1:] != "-":
                    out.append(Mark(mark.start(), "", "statement", True))
                continue
            colon = bool(re.search(r"[:：=]\s*\Z|(?i:ans)\.\Z", mark[0])) or kind == "abroad"
            if stated := _said(prose, mark, colon, kind == "result"):
                out.append(Mark(mark.start(), stated[0], "statement", stated[1] and kind != "result"))
    for mark in list(_REVERSE.finditer(text))[-_MARKS:]:
        line = text[max(0, mark.start() - 300) : mark.start()].rsplit("\n", 1)[-1]
        line = line[sentences(line, 0, len(line))[-1][0] :]
        if (items := values(line)) and not re.search(r"\bnot\s*\Z|\\f?boxe?d?", line):
            out.append(Mark(mark.start(), items[-1].text, "statement", True))
    return out


_LATER_IS = re.compile(r"(?:(?<=\s)|(?<=[,)$]\s))(?:is|are|equals|was|will\s+be)\b\s*:?", re.IGNORECASE)


def _said(prose: Prose, mark: re.Match[str], colon: bool, weak: bool) -> tuple[str, bool] | None:
    """Returns (answer, sure) stated after a mark: after its own verb, or after the last verb in the sentence.

    E.g. "The result when 12 is increased by 11 is 23". Words ("the result is positive") count only in the last
    sentence.
    """
    text, at = prose.text, mark.end()
    stated = _stated(prose, at, mark[0], colon)
    if stated and (stated[1] or colon):
        return stated
    line_end = text.find("\n", at)
    line_end = len(text) if line_end < 0 else line_end
    (_, end), *others = sentences(text, at, min(line_end, at + LONGEST))
    for later in reversed(list(_LATER_IS.finditer(text, at, end))[-5:]):
        if "," not in text[at : later.start()] and (answer := _stated(prose, later.end(), "is", False)) and answer[1]:
            return answer
    if stated and (weak or _ADJECTIVES.match(stated[0])) and values(text[end:][: 2 * LONGEST].replace("\n", " ")):
        return None
    return stated


_NEGATED = re.compile(r"\s*(?:definitely |certainly |clearly )?(?:not|never|wrong|incorrect)\b", re.IGNORECASE)
_OWN_MARK = re.compile(
    rf"\W*(?:the|our|my)?\s*(?:final|correct)?\s*{_PHRASE.pattern}|[\s$\\(\[]*\\(?-i:boxed|fbox)"
    r"|\s*<\s*(?:final_?)?answer\s*>",
    re.IGNORECASE,
)


def _stated(prose: Prose, at: int, mark: str, colon: bool) -> tuple[str, bool] | None:
    """Returns (answer, sure) at position `at` after a mark, if an answer is there."""
    rest = prose.text[at : at + LONGEST]
    if m := re.match(r"[\s:*\"']*(?:\n\s*)+", rest):  # on the next line
        if not colon and not re.match(r"\s*\n+\s*(?:\$|\\\[|\\\(|\\begin)", rest):
            return None
        at, rest = at + m.end(), rest[m.end() :]
        if re.match(r"(?:#+\s*)?(?:step|first|let|to|we|given|note)\b", rest, re.IGNORECASE):
            return None
    if _OWN_MARK.match(rest) or _NEGATED.match(rest):
        return None
    if is_clause(rest) and (value := stated_value(prose, last_statement(prose.text, at))):
        return value, True
    if letter := _LEFT.match(rest.partition("\n")[0]):
        return letter[1], True
    answer, kind, end = first_item(rest)
    if _OPERATES.match(rest, end) and (value := stated_value(prose, last_statement(prose.text, at))):
        return value, True
    if not re.search(r"\w|\\|∞|∅", answer) or _WRONG.match(rest, end):
        return None
    if '"' in mark and "\\\\" in answer:  # of JSON
        with contextlib.suppress(ValueError):
            answer = json.loads(f'"{answer}"')
    if kind != "words":
        side = last_side(answer)
        return side if number_of(side) else answer, True
    adjective = _ADJECTIVES.match(answer)
    if adjective and ("\\boxed" in answer or not re.fullmatch(r"not? \w+|correct|wrong|positive|negative", answer)):
        return None
    return answer, "\\boxed" not in answer and colon and len(answer.split()) <= 5


_OPERATES = re.compile(r"\s+[a-zA-Z][a-zA-Z ]*[-+*/×÷]\s*[\d$(][^\n=]*=")
"""Text after the first number of an equation with words, e.g. 6 cards / 12 cards = 0.5."""
_LEFT = re.compile(
    r"[^\d.\n]*?\b(?:is|be|leaving|leaves|choose|pick|select|with|option|choice|think|believe|say)\s+(?:the\s+)?"
    r"(?:option\s+|choice\s+)?(\(?[A-J]\)?)\s*[.!]?\s*\Z"
)
"""A choice letter at the end of a sentence: "I think it is C", "rules out C, leaving D"."""


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


def headings(prose: Prose) -> list[Mark]:
    """Returns the answers after `####` and, after these, under a heading "Answer"; [] if there are none.

    The answer is "" if the text ends at the heading.
    """
    text, out = prose.text, []
    for mark in list(_HASHES.finditer(text))[-_MARKS:]:
        line, _, after = text[mark.end() : mark.end() + LONGEST].partition("\n")
        four = mark[0].count("#") == 4
        if not four or _TITLES.match(line.strip()) or re.match(r"\d+[.)]\s+[A-Z]", line.strip()):
            continue
        if not line.strip():
            line, _, after = after.lstrip().partition("\n")
            if not line:
                out.append(Mark(mark.start(), "", "heading", True))
                continue
        if _PHRASE.search(line) or _BOX in line:
            continue
        answer, kind, _ = first_item(line)
        if re.search(r"\w|\\", answer or line) and (kind != "words" or not after.strip()):
            out.append(Mark(mark.start(), answer or line.strip(), "heading", True))
    for mark in list(_TITLE.finditer(text))[-_MARKS:]:
        rest = text[mark.end() : mark.end() + LONGEST].lstrip()
        stated = _stated(prose, mark.end() + len(text[mark.end() :]) - len(text[mark.end() :].lstrip()), mark[0], True)
        line = rest.partition("\n")[0]
        if stated and not _PHRASE.search(line) and _BOX not in line:
            out.append(Mark(mark.start(), stated[0], "heading", stated[1]))
    return out
