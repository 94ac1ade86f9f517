"""Finds the number stated by a sentence, among the numbers it only mentions.

"So she needs to babysit 5 times to have enough eggs to make 15 flans" states 5. The rules, in order:

1. If some values are bold, only these count. Values that the sentence sets aside do not: in brackets, after "compared
   to", in a condition ("when $x = 3$"), or a bare name (`n`, `ABC`) beside a number.
2. If the result of the text's last equation is among them, it is the stated value: the working leads there.
3. Otherwise skip the introduction ("After 15 days, Ryan has 25 flowers") and take the value after a verb of being ("the
   total cost of 10 gallons is $28"), or else the first value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from jprm.methods.answers.forms import normal, number_of, squeezed
from jprm.methods.answers.formulas import LABEL, LONGEST, MATH, Value, formula_at, values
from jprm.methods.answers.prose import Mark, Prose, Span, any_of

_EQUATIONS = 60  # that are read, from the last

_FULL_STOP = re.compile(r"(?<=[^\s.!?])[.!?]+[\"”)]*[^\S\n]+(?=[\"“(\\$]*[A-Z\d\\$])|[。！？]")
_ABBREVIATED = re.compile(r"\b(?:Dr|Mr|Mrs|Ms|St|Prof|approx|vs|etc|No|U\.S|i\.e|e\.g|cf|ca|a\.m|p\.m|[B-Z])\Z")


def sentences(text: str, start: int, end: int) -> list[Span]:
    """Returns the half-open (start, end) of each sentence in text[start:end].

    An abbreviation, e.g. "Dr.", is not an end. The last one is the rest without a full stop, which may be empty.
    """
    out = []
    for stop in _FULL_STOP.finditer(text, start, end):
        if not _ABBREVIATED.search(text, max(start, stop.start() - 8), stop.start()):
            out.append((start, stop.end()))
            start = stop.end()
    return [*out, (start, end)]


def conclusion(prose: Prose) -> Mark | None:
    """Returns the answer of a text without marks: from its last sentence with a number or formula, or in words.

    Words count only if the last sentence concludes with them ("Therefore, after 90 degrees she is facing **east**."),
    with the rule `statement`; else the rule is `number`. `None` if there is no such sentence. `at` counts from the last
    4 * LONGEST characters, which alone are read.
    """
    prose = prose.since(max(0, len(prose.text) - 4 * LONGEST))
    prose = prose._replace(text=MATH.sub(lambda m: m[0].replace("\n", " "), prose.text))
    end, last = len(prose.text), True
    while end >= 0:
        start = prose.text.rfind("\n", 0, end) + 1
        begin = max(start, end - LONGEST // 2)
        if label := LABEL.match(prose.text, begin, end):
            begin = label.end()
        for sentence in reversed(sentences(prose.text, begin, end)):
            if last and (answer := _words(prose, sentence)):
                return Mark(sentence[0], answer, "statement", True)
            if answer := stated_value(prose, sentence):
                return Mark(sentence[0], answer, "number", True)
            last = last and not re.search(r"\w", prose.text[slice(*sentence)])
        end = start - 1
    return None


def stated_value(prose: Prose, sentence: Span) -> str | None:
    """Returns the stated value of a sentence, (start, end) in the text; `None` if it has no values that count.

    Values in bold come first, then the result of the text's last equation, then a value after a verb of being, else the
    first one after the introduction. It is as written, without dollars and the like; of an equation it is the last
    side. It is not normalised.
    """
    start, end = sentence
    text = prose.text[:end]
    items = [Value(v.start + start, v.end + start, v.text) for v in values(text[start:])]
    bold = [v for v in items if any(a < v.end and v.start < b for a, b in prose.bold)]
    left = _not_aside(text, start, bold or items)
    if len({squeezed(normal(v.text)) for v in left}) > 1:
        main = max([_main_clause(text, start), *(m.end() for m in _SO.finditer(text, start))])
        left = [v for v in left if v.start >= main] or left
        if again := [v for v in left if _AGAIN.search(text, max(start, v.start - 60), v.start)]:
            left = [v for v in left if v.start >= again[-1].start]
        counted = [v for v in left if _THERE_ARE.search(text, start, v.start)]
        for at, result in _results(text):
            if at < start and (counted or again):
                break
            if same := [v for v in left if _equal(v.text, result)]:
                return same[-1].text
        left = counted or left
        left = [v for v in left if _IS.search(text, start, v.start)] or left
        left = [v for v in left if not _GIVEN.search(text, start, v.start)] or left
    return left[0].text if left else None


# ---- What a sentence sets aside.

_CONDITION = re.compile(
    r"\b(?:when|if|for|where|at|since|given|let|as|because|assuming|with|and)\s+(?:that\s+)?[\\($]*\Z", re.IGNORECASE
)
_COMPARED = re.compile(
    r"\b(?:compared\s+(?:to|with)|rather\s+than|instead\s+of|as\s+opposed\s+to|versus|than|not)\s+(?:\w+\s+){0,3}[\\($]*\Z",
    re.IGNORECASE,
)
_REASON = re.compile(r"\b(?:because|since)\b[^,;]*\Z", re.IGNORECASE)
_NAME = re.compile(
    r"(?:\\(?:triangle|angle|overline|mathbf|mathrm|vec|text|operatorname)\s*)?\{?\s*[A-Za-z]{1,5}'*\s*\}?"
    r"(?:_\{?\w+\}?)?(?:\([a-z](?:,\s*[a-z])*\))?"
)


def _not_aside(text: str, start: int, items: Sequence[Value]) -> list[Value]:
    """Drops the values set aside by a sentence; returns all of them if every one is set aside."""
    tests = (
        lambda v: not _NAME.fullmatch(v.text),
        lambda v: not text.count("(", start, v.start) - text.count(")", start, v.start) > 0 or text[v.start] == "(",
        lambda v: "=" in text[v.start : v.end] or not _COMPARED.search(text, max(start, v.start - 200), v.start),
        lambda v: not _REASON.search(text, start, v.start),
        lambda v: not ("=" in v.text and _CONDITION.search(text, max(start, v.start - 40), v.start)),
    )
    left = list(items)
    for test in tests:
        left = [v for v in left if test(v)] or left
    return left


_SAME = any_of("also, the same as, equal to, equivalent to, about, approximately, up, down, to, or, just")
_NEAREST = r"(?:\s+(?:up|down|off))?(?:\s+to)?(?:\s+the\s+nearest\s+\w+(?:\s+\w+)?)?(?:\s+(?:is|gives|to))?"
_AGAIN = re.compile(
    rf"(?:\bwhich\s+{any_of('is, equals, gives, means, makes, rounds')}(?:\s+{_SAME})*|\brounded{_NEAREST}"
    r"|\d[\d.,%]*(?:\s+\w+)?,?\s+or(?:\s+(?:about|just))?)\s+[\\($]*\Z",
    re.IGNORECASE,
)
"""Words before a restated value: "0.25 dollars, which is 25 cents"."""


# ---- Words.

_BECOMES = re.compile(
    r"\b(?:is|are|was|were|be|becomes|equals|faces)\s+(?:(?:facing|heading|called|named|the)\s+)*"
    r"((?:[A-Z][a-z]+ ){0,2}[A-Z][a-z]+|[a-z]{2,})[.!]?\s*\Z"
)
_NO_ANSWER = re.compile(
    r".*(?:ed|ing|ly|[ai]ble|ful|less)\Z|(?:not|no|the|as|an?|so|it|this|that|also|now|only|very|all|both|more|quite|indeed|still)\b"
    r"|(?:\w*correct|right|wrong|\w*valid|\w*complete|\w*consistent|unique|clear|true|false|enough|done|here|there|above|below"
    r"|follows|needed|whole|integers?|same|equal|old|left|long|tall|away|\w*accurate|met|free|ready|safe|negative|positive)\Z",
    re.IGNORECASE,
)


def _words(prose: Prose, sentence: Span) -> str | None:
    """Returns the final or bold words of a conclusion whose main clause has no numbers."""
    start, end = sentence
    text = prose.text[:end]
    if not _THEREFORE.match(text, start):
        return None
    main = _main_clause(text, start)
    bold = [text[a:b] for a, b in prose.bold if main <= a and b <= end]
    if re.search(r"\d|[$\\]", text[main:]) and not (len(bold) == 1 and f" is {bold[0]}" in text[main:]):
        return None
    ending = _BECOMES.search(text, main)
    words = bold[0] if len(bold) == 1 else ending[1] if ending else ""
    words = words.strip(" .,:!")
    words = words.lower() if number_of(words.lower()) else words  # three Treeks
    return words if re.match(r"[^\W\d]+(?: \S+){0,2}\Z", words) and not _NO_ANSWER.match(words) else None


# ---- Results of equations.

_EQUALS = re.compile(r"(?<![<>=!≠:\\])=(?![=>])|≈|\\approx(?![a-zA-Z])|\\Rightarrow|⇒")


_UNSOLVED = re.compile(
    r"(?:(?<![a-zA-Z\d])[a-zA-Z]|(?<=\d)[a-fi-kn-rt-z])(?:_\{?\w+\}?)?\s*[-+*/^]|[-+*/^]\s*[a-zA-Z](?![a-zA-Z])"
)
"""The left side of an equation without a result, e.g. x + y = 5."""


def _results(text: str) -> Iterator[tuple[int, str]]:
    """Yields (position, formula after it) of equals and implication signs, last first.

    Skips a sign if another follows within its formula, or if its left side has an unknown, e.g. `x + y = 5`.
    """
    for sign in reversed([*_EQUALS.finditer(text)][-_EQUATIONS:]):
        formula = formula_at(text, sign.end())
        before = re.split(r"[=≈\n$(\[,:]|\\approx", text[max(0, sign.start() - 80) : sign.start()])[-1]
        if formula and not _EQUALS.search(formula) and not _UNSOLVED.search(re.sub(r"\\[a-zA-Z]+", "", before)):
            yield sign.start(), formula


def _equal(text: str, result: str) -> bool:
    """Returns whether `text` equals the result of an equation, by value or as text."""
    value, other = number_of(text), number_of(_GLUED.sub(r"\1", result))
    if value and other:
        return value.value == other.value
    sides = {squeezed(normal(text)), squeezed(normal(text.rpartition("=")[2]))}
    return squeezed(normal(result)) in sides


_GLUED = re.compile(r"\A(\d[\d.,]*)[a-zA-Z]{1,3}\Z")  # a unit: 48g


# ---- The grammar of a sentence without equations before it.

_CONCLUDING = any_of(
    "therefore, so, thus, hence, then, consequently, finally, overall, accordingly, now, also,"
    "in conclusion, in total, in summary, to conclude, as a result, this means, that means, we conclude, it follows"
)
_THEREFORE = re.compile(rf"[\s\-*•>]*(?:(?:and\s+)?{_CONCLUDING}(?:\s+that)?[,:]?\s+)+", re.IGNORECASE)
_INTRODUCING = any_of(
    "after, before, in, at, on, by, for, from, over, during, within, with, without, given, when, if, since, because,"
    "as, out of, of, once, while, every, each, per, among, between, under, assuming, considering, starting, until, to,"
    "having, throughout, based, although, though, even, following, using, taking"
)
_INTRODUCTION = re.compile(rf"{_INTRODUCING}\b", re.IGNORECASE)
_PRONOUN = any_of("he, she, it, they, we, you, i, there, this, that, these, those")
_DETERMINER = any_of("the, a, an, his, her, their, its, our, your, each, all, both, only")
_SUBJECT = re.compile(rf",\s+(?=(?:(?i:{_PRONOUN}|{_DETERMINER})|[A-Z][\w'’]*)\b)")
_COMMA = re.compile(r",\s+")
_OTHERWISE = re.compile(rf"\s+(?={any_of('he, she, it, they, we, you, i, there')}\s)", re.IGNORECASE)
_SO = re.compile(
    rf"[,;]\s+(?:and\s+)?(?:so(?!\s+that\b)|{any_of('therefore, thus, hence, which means, meaning')})\s+", re.I
)
_AT_VALUE = r"[:$\\(]*\Z"
_TO_BE = any_of(
    "is, are, was, were, be, equal, equals, cost, costs, total, totals, become, becomes, comes to, amounts to,"
    "we get, we obtain, gives"
)
_ABOUT = any_of(
    "only, just, now, still, exactly, about, approximately, around, roughly, indeed, also, already, therefore, thus,"
    "equal to, equivalent to, a total of, then"
)
_IS = re.compile(
    rf"(?:(?<!that )(?<!which )(?<!who )\b{_TO_BE}|total\s+of)\s+(?:{_ABOUT}\s+)*{_AT_VALUE}", re.IGNORECASE
)
_THERE_ARE = re.compile(
    rf"(?:\bthere\s+{any_of('is, are, were, was, will be, would be')}|\ba\s+total\s+of)\s+(?:{_ABOUT}\s+)*{_AT_VALUE}",
    re.IGNORECASE,
)
_GIVEN = re.compile(
    rf"\b{any_of('the, these, those, all, both, each, every, per')}\s+(?:(?:first|last|other)\s+)?{_AT_VALUE}",
    re.IGNORECASE,
)
"""Words before a known number, e.g. "the 5 people"."""


def _main_clause(text: str, start: int) -> int:
    """Returns the start of the main clause, after e.g. "Therefore, after 3 days,"."""
    while start < len(text) and text[start].isspace():
        start += 1
    if lead := _THEREFORE.match(text, start):
        start = lead.end()
    if not _INTRODUCTION.match(text, start):
        return start
    main = _SUBJECT.search(text, start) or _COMMA.search(text, start) or _OTHERWISE.search(text, start)
    return main.end() if main else start


# ---- A sentence behind a mark.

_NO_VERB = any_of("the, a, an, of, with, and, or, in")
_CLAUSE = re.compile(
    r"[\s:*\"']*(?:that\s+)?(?:"
    + "|".join(
        (
            r"\\?[($]{0,2}[A-Za-z]\\?[)$]?\s+(?:is|equals)\s",  # $x$ equals 5
            rf"{_PRONOUN}\s+\w",
            rf"{_DETERMINER}\s+(?!following|total\s+of)\S+\s+\S+\s",
            rf"{_INTRODUCING}\s+[^,\n]*,\s",
            r"(?:after|since|out\s+of|in)\s+[\w$]",
            rf"(?-i:[A-Z])[a-z]+(?:['’]s)?\s+(?!{_NO_VERB}\b)(?:\w+\s+){{0,3}}[\w$]",  # Jerry has 4
        )
    )
    + ")",
    re.IGNORECASE,
)
_CHANGED = re.compile(
    r"\b(?:not|no|twice|half|double|triple|more|less|fewer|greater|larger|at\s+least|at\s+most|between|either|neither|over|under"
    r"|above|below|minus|negative|maybe|perhaps|possibly)\b",
    re.IGNORECASE,
)


def is_clause(text: str) -> bool:
    """Returns whether a text begins with a sentence that states a value, and not with the value itself.

    E.g. `True` for "the total is 28", `False` for "28 dollars", "x = 5" and "Tuesday". Only the first line is read.
    """
    line = text[:LONGEST].partition("\n")[0]
    if not _CLAUSE.match(line):
        return False
    items = _not_aside(line, 0, values(line))
    return (
        bool(items)
        and items[0].start > 0
        and (not _CHANGED.search(line, 0, items[0].start) or any(_IS.search(line, 0, v.start) for v in items))
    )


def last_statement(text: str, at: int) -> Span:
    """Returns (start, end) of the last sentence with "therefore" and a value in the line from `at` on.

    Without one, it is the first sentence.
    """
    end = text.find("\n", at)
    spans = sentences(text, at, min(len(text) if end < 0 else end, at + LONGEST))
    return next(
        (span for span in reversed(spans) if _THEREFORE.match(text, *span) and values(text[slice(*span)])), spans[0]
    )
