"""Finds the choice letter in a text, e.g. "Option D is the correct answer", "I choose D", "Hence D"."""

from __future__ import annotations

import re

from jprm.methods.answers.prose import Mark, Prose, any_of

_MARKS = 40  # of a kind that are read, from the last
_L = (
    r"(?:\(\s*(?-i:[A-Ja-j])\s*\)|\[{1,2}\s*(?-i:[A-J])\s*\]{1,2}"
    r"|(?<![a-zA-Z\d_$\\'’])(?-i:[A-J])(?![a-zA-Z\d_$'’]|\s*[-+=^/*]\s*\w))"
)
_NAMED = rf"(?:{any_of('option, choice, answer choice, answer, alternative, letter')}\s*:?\s*)?({_L})"
_LEAD = rf"(?:{any_of('therefore, thus, hence, so, ergo, then, finally')}[,:]?\s+)"
_SUMMARY = any_of("in conclusion, consequently, clearly, overall, we conclude, this means, it follows, and")
_LEADS = rf"(?:{_LEAD}|{_SUMMARY}(?:\s+that)?[,:]?\s+)"
_START = r"(?:\A|(?<=[.!?\n:;,])|(?<=[。！？，：]))[^\S\n]*"
_END = r"(?=[.!]?\s*(?:\n|\Z))"
_IS = any_of("is, must be, should be, would be, seems, appears to be")
_BEST = any_of(r"correct, right, best, most \w+, final, true")
_WOULD = any_of("would, will, should, must, can, therefore, has to, can only")
_CHOOSE = any_of(
    "choose, choosing, pick, picking, select, selecting, go with, going with, go for, opt for, vote for, answer"
)
_STATED = re.compile(
    "|".join(
        (
            rf"{_START}{_LEADS}{{0,2}}(?:only\s+)?{_NAMED}\s+{_IS}\s+(?:(?:thus|clearly)\s+)?"  # D is correct
            rf"(?:(?:the|our|my)\s+(?:only\s+)?(?:{_BEST}\s+)*{any_of('answer, option, choice, one, alternative')}"
            rf"|(?:the\s+)?{_BEST})\b(?!\s+{any_of('if, only, when, for, about, that')})",
            rf"\b(?:i|we|i['’](?:d|ll)|let['’]?s|let\s+us|to|i\s+am|i['’]m)\s+"
            rf"(?:{_WOULD}\s+){{0,2}}{_CHOOSE}\s+{_NAMED}(?=[.,;!\s)]|\Z)",  # I choose D
            rf"{_START}(?:choose|pick|select)\s+{_NAMED}{_END}",
            rf"{_START}{_NAMED}\s+{any_of('fits, matches, works, is')}\s+best{_END}",
            rf"\b{any_of('it, this, that, which, the correct one')}"
            rf"(?:\s+{_WOULD}(?:\s+\w+ly)?\s+be|\s+is|['’]s)\s+{_NAMED}{_END}",
            rf"{_START}{_LEAD}(?:the\s+)?{_NAMED}{_END}",  # hence D
        )
    ),
    re.IGNORECASE,
)
_ABROAD = re.compile(
    rf"(?:(?:正确|正確|最佳)?(?:选项|選項|答案)\s*(?:应该|应|應)?\s*(?:是|为|為|选|選|[:：])|(?:应|應|故|因此|所以|我)?(?:选择|選擇|选|選)|正解\s*は|答えは)\s*[:：]?\s*({_L})"
    rf"|(?:opci[óo]n|opç[ãa]o|alternativa|option|antwort|réponse|letra|lettre|buchstabe)\s+({_L})\s+(?:es|é|è|est|ist)\s+"
    r"(?:la\s+|a\s+|die\s+)?(?:correct\w|corret\w|richtig\w*|bonne|juste|exacte)",
    re.IGNORECASE,
)
_ALONE = re.compile(
    rf"[\s>*•\"'“]*(?:(?:therefore|thus|hence|so|ans(?:wer)?\.?|option|choice|final|the|correct|right)[,:]?\s+)*({_L})[\s.!\"'”]*",
    re.IGNORECASE,
)
_OPTION = re.compile(
    r"[\s\"']*(?:\(?([A-Ja-j])\)|([A-Ja-j])\s*[.)]|([B-J]):)\s+(?!is\b|are\b|was\b)(\S+(?:\s\S+){0,3})\s*\Z"
)
_SENTENCE = re.compile(r"[\s\"']*\(?([A-J])[.)]\s+[^\d]*\Z")
_SMALL = re.compile(r"\s*\(?([a-j])\)?[.]?\s*\Z")
_LETTER = re.compile(r"[A-J]", re.IGNORECASE)


def choices(prose: Prose) -> list[Mark]:
    """Returns the chosen letters, A to J in upper case, e.g. in "Option D is the correct answer"; [] if there are none.

    They are in the order of the patterns, not of the text (`Mark.at`). A text that is only an option stays whole, e.g.
    "B. 12".
    """
    text = prose.text
    if "\n" not in text.strip():
        if option := _OPTION.match(text):
            letter = next(filter(None, option.groups()))
            return [Mark(0, f"{letter.upper()}. {option[4]}", "statement", True)]
        if small := _SMALL.match(text) or _SENTENCE.match(text):
            return [Mark(0, small[1].upper(), "statement", True)]
    out = []
    for pattern in (_STATED, _ABROAD):
        for m in list(pattern.finditer(text))[-_MARKS:]:
            letter = next(filter(None, m.groups()))
            out.append(Mark(m.start(), _LETTER.search(letter)[0].upper(), "statement", True))  # pyright: ignore
    last = text.rstrip().rpartition("\n")[2]
    if m := _ALONE.fullmatch(last):
        out.append(Mark(text.rfind(last), _LETTER.search(m[1])[0].upper(), "statement", True))  # pyright: ignore
    return out
