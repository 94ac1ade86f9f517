"""Finds formulas and numbers in prose, with adjacent words if they change the value."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from jprm.methods.answers.forms import CHANGES

LONGEST = 2000
"""Maximum characters read from one statement."""

MATH = re.compile(
    r"\$\$.{1,1500}?\$\$|(?<!\\)\$(?:[^$\n\\]|\\.){1,600}\$|\\\(.{1,600}?\\\)|\\\[.{1,1500}?\\\]", re.DOTALL
)
_END = re.compile(r"\.(?=\s|\Z)|\n|\Z")
_ABBREVIATED = re.compile(r"\b(?:Dr|Mr|Mrs|Ms|St|Prof|approx|vs|etc|No|U\.S|i\.e|e\.g|cf|ca|[A-Z])\Z")


def is_money(inside: str) -> bool:
    """Returns whether two dollar signs mean money, given the text between them.

    If so, it begins with a digit, and ends with white space or has a word outside LaTeX commands, e.g. "5 and " in
    "$5 and $7".
    """
    if not inside[:1].isdigit():
        return False
    bare = re.sub(r"\\(?:text\w*|mbox|mathrm|operatorname|begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+", "", inside)
    return inside[-1:].isspace() or bool(re.search(r"[a-z]{3,}", bare))


_FILLER = re.compile(
    r"(?:\\therefore(?![a-zA-Z])|[\s:：,*>=}\"'“‘«「『`~]+|\.{2,}|(?:(?:that|therefore|thus|hence|then|so|simply|just|exactly|precisely"
    r"|indeed|now|clearly|also|namely|approximately|about|around|roughly|nearly|approx\.?"
    r"|ca\.|circa|equal|given|found|a\s+total|in\s+total|total|simplified|to|be|as|by|of"
    r"|(?:the\s+)?(?:number|value|expression|point|interval|pair|fraction|vector|matrix|function|equation"
    r"|polynomial|set|letter|option|choice)s?(?:\s+of)?|following|choice|option|letter"
    r"|there\s+(?:are|is)|obviously|definitely|actually|probably|in\s+fact|of\s+course|as\s+follows"
    r"|finally|is|are|est|es|ist)(?![a-zA-Z])"
    r"|(?:la|el|o|die|der|a)(?=\s+(?:(?:opci[óo]n|opç[ãa]o|option|letra|lettre)\s+)?(?-i:[B-J])(?![\w'’]))|(?:opci[óo]n|opç[ãa]o|letra|lettre)(?=\s+(?-i:[A-J])(?![\w'’]))"
    r"|(?:the|a|an)(?=\s+(?:number|value|expression|point|interval|pair|fraction|vector|matrix|function"
    r"|equation|polynomial|set|letter|option|choice|total|following))))+",
    re.IGNORECASE,
)
_CHANGED = re.compile(
    r"\b(?:not|no|twice|thrice|half|double|triple|more|less|fewer|greater|larger|smaller|higher|lower"
    r"|least|most|between|either|neither|over|under|above|below|up|than|never|square|cube|root|multiple"
    r"|power|factor|factorial|reciprocal|inverse|opposite|maybe|perhaps|possibly|somewhere|anything"
    r"|everything|any|all|negative|minus|third|quarter|except|within|close|almost|beyond|before|after"
    r"|without|divisible)\b",
    re.IGNORECASE,
)
_LITERAL = re.compile(
    r"(?:no|none|yes|true|false|undefined|impossible|infinit\w+|does\s+not\s+exist|dne|even|odd|zero|never"
    r"|always|cannot)\b(?!\s+(?:more|less|fewer|greater|of\s+(?:the|them)\s+\d))",
    re.IGNORECASE,
)
_STOP = re.compile(
    r"[;!?()\n\"“”«»「」『』✓✅∎□■🎉]|[,，。、](?!\d)|\s[-–—]+\s|—|:\s|\.(?=\s|\Z)|\s(?:because|since"
    r"|as\s+(?:required|desired|needed|claimed|expected|we|shown|was|asked)|which|where|who|so\s+that"
    r"|hence|therefore|if|when|while|but|by|for\s+the|in\s+(?:total|all|the)|at\s+the|after|whose)\b",
    re.IGNORECASE,
)
_UNITY = re.compile(
    r"(?:\\?%|\s*(?:\\%|%|percent\b|per\s?cent\b)|\s*(?:\^\{?\\circ\}?|°)\s*[CF]?(?![a-zA-Z]))", re.IGNORECASE
)
_HEDGE = re.compile(
    r"[\s$]*[,(]?\s*(?:or|and/or|maybe|perhaps|possibly)\b(?!\s+(?:about|approximately|approx|roughly|around|nearly)\b)"
    r"(?:[^.;\n]|\.(?=\d)){0,60}?(?=\.(?!\d)|[;\n]|\Z)",
    re.IGNORECASE,
)
_GOES_ON = re.compile(
    r"\s+(?:and|or|i|is|are|was|were|be|if|but|to|from|for|with|where|only|not|unless|except|true|correct|can|than|x"
    r"|more|less|fewer)\b(?!\s+(?:a|one)\s+(?:half|third|quarter))",
    re.IGNORECASE,
)
_AND = re.compile(r"\s*(?:,\s*)?(?:and|or)\s+(?=[$\\\d(\[+\-−√π½]|[a-zA-Z]\s*=|[a-zA-Z](?![a-zA-Z' ]))")


def first_item(text: str) -> tuple[str, Literal["value", "words", ""], int]:
    """Returns the first number, formula, choice or words as (item, kind, end).

    `kind` is "value" for a number, formula or choice, "words", or "" if there is no item (then the item is ""). `end`
    is the index in `text` after the item, or the end of the clause without one. Fillers such
    as "is" are skipped, and words before a number that do not change it ("the total of 7 cats" gives "7"). Math
    delimiters are removed ("$x^2$" gives "x^2"); a choice may include its text, e.g. "(B) Paris is nice".
    """
    at = m.end() if (m := _FILLER.match(text)) else 0
    choice = re.match(
        r"\(?([A-J])\s*[).:]+\s+(?=\S)|\(([A-Ja-j])\)(?=\W|\Z)|([A-J])(?=[\s]*(?:[.,;!:]\s|[.,;!]?\Z|\n|-\s|–|\s\(\d+\)))",
        text[at:],
    )
    if choice and not re.match(r"[A-J],\s*(?:[A-Za-z](?![a-z])|\d)", text[at:]):
        letter = choice[1] or choice[2] or choice[3]
        if not choice[3]:
            if _EXPLAINED.match(text, at + choice.end()):
                return letter, "value", at + choice.end()
            end = _stop(text, min(at + 3, len(text)), _END)  # of the sentence
            whole = text[at:end].strip().rstrip(".")
            return whole if len(whole) < 200 else letter, "value", end
        end = at + choice.end()
        if hedge := _HEDGE.match(text, end):
            return text[at : hedge.end()].strip(), "value", hedge.end()
        return letter, "value", end
    start, end = at, _end_of_formula(text, at)
    if end == start:
        close = _stop(text, at, _STOP)
        clause = text[at:close]
        number = _first_value(text, at, close)
        if number is None or _LITERAL.match(clause):
            words = clause.strip(" \t\n.,:;*'\"`|")
            return words, "words" if words else "", close
        start, end = number, _end_of_formula(text, number)
        if _CHANGED.search(text[at:number]):
            if re.match(r"(?:minus|negative)\s+\Z", text[at:number], re.IGNORECASE):
                return "-" + _tidy(text[start:end]), "value", end
            return clause.strip(), "value", close
    answer = _tidy(text[start:end])
    if (hedge := _HEDGE.match(text, end)) and re.search(
        r"\d|\\|\$|\b[A-Z]\b|or (?:more|less|fewer|greater|higher|above)\b", hedge[0]
    ):
        return answer + " " + _strip_math(hedge[0]).strip(" ,("), "value", hedge.end()
    if unit := _UNITY.match(text, end):
        return answer + unit[0].strip(), "value", unit.end()
    follow = re.match(r"\s+(?:and\s+(?:a|one)\s+)?([^\W\d_]+)", text[end:])
    if follow and CHANGES.match(follow[1]) and not _GOES_ON.match(text[end:]):
        stop = _STOP.search(text, end)
        close = stop.start() if stop else len(text)
        return answer + text[end:close].rstrip(), "value", close
    if m := re.match(r"\s*(?:to|plus|minus|times|divided\s+by|more\s+than|less\s+than)\s+(?=[\d$\\])", text[end:]):
        stop = _end_of_formula(text, end + m.end())
        return answer + m[0] + _tidy(text[end + m.end() : stop]), "value", stop
    return answer, "value", end


_EXPLAINED = re.compile(
    r"\(?[A-J]\)?(?:,|\s+(?:and|is|are|was|were|has|have|does|do|can|cannot|could|would|gives?|seems?|fails?|says?|states?|just))\b"
    r"|(?:option|choice|answer|statement)s?\s+\(?[A-J]\b|(?:because|since|as|for|the\s+(?:other|rest|remaining)|all\s+other|this|that"
    r"|these|it|we|i|here|note|other|explanation|reason\w*|in\s+this|my|therefore|so|if|when|to)\b",
    re.IGNORECASE,
)
"""The start of an explanation after a choice letter, as opposed to the text of the choice."""


def _stop(text: str, at: int, pattern: re.Pattern[str]) -> int:
    """Returns the first match of `pattern` that is not an abbreviation's full stop, else the length of the text."""
    stop = pattern.search(text, at)
    while stop and stop[0].startswith(".") and _ABBREVIATED.search(text, max(0, stop.start() - 8), stop.start()):
        stop = pattern.search(text, stop.end())
    return stop.start() if stop else len(text)


def _first_value(text: str, start: int, end: int) -> int | None:
    """Returns the start of the first number, or formula with a digit, command or dollar sign."""
    for m in re.finditer(r"[$\\]|(?<![\w.])[-+−]?(?:[.]?\d|\\(?=[a-z]))|[√π∞½¼¾]", text[start:end]):
        at = start + m.start()
        if _end_of_formula(text, at) > at:
            return at
    return None


_TOKEN = re.compile(
    r"(?P<math>\$\$.{1,1500}?\$\$|\\\(.{1,600}?\\\)|\\\[.{1,1500}?\\\])"
    r"|(?P<dollar>\$(?:[^$\n\\]|\\[^\n]){1,600}\$)"
    r"|(?P<environment>\\begin\s*\{(\w+)\*?\}.{0,1500}?\\end\s*\{\4\*?\})"
    r"|(?P<words>\\(?:text\w*|mbox|mathrm|mathbf|boldsymbol|operatorname|emph)\s*\{[^{}]*\})"
    r"|(?P<command>\\(?:[a-zA-Z]+|[{}$%,!;:| ]|\\))"
    r"|(?P<number>\d+(?:[.,]\d+)*(?:\.(?=\s*\\?[a-z]*$))?|\.\d+)"
    r"|(?P<word>[^\W\d_]+)"
    r"|(?P<gap>[^\S\n]+)"
    r"|(?P<close>[)\]}])"
    r"|(?P<open>[(\[{])"
    r"|(?P<comma>[,，、;:'!])"
    r"|(?P<sign>[-+*/=<>^_|%−–±×÷·⋅√∞≤≥≠∪∩∈∅→½⅓⅔¼¾⁄∕°²³⁰¹⁴⁵⁶⁷⁸⁹⁺⁻ⁿ₀₁₂₃₄₅₆₇₈₉$€£¥₹~&≈′])",
    re.DOTALL,
)
_NAMES = re.compile(
    r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?\Z|(?:log|ln|sqrt|pi|exp|max|min|mod|gcd|lcm|infinity|det)\Z"
)
_COMPOUND = re.compile(r"-[A-Za-z]{2,}|(?<!\d{3}) [a-z]{3,}")
_SIGNS = re.compile(r"[^\w\s]")
_OF_THINGS = re.compile(r"&[A-Za-z]|[-‑][A-Za-z]{2,}|(?<=[A-Z]) [a-z]{3,}")
_PRIME = re.compile(r"(?<=[A-Za-z'])'(?!s\b|\s|\Z)")
_BREAKS = set(r"\boxed \fbox \implies \therefore \because \blacksquare \square \Box \qed \checkmark".split())
_OPERATORS = set(r"\cdot \times \le \ge \leq \geq \to \quad \qquad \right \in \cup \cap \pm".split())
"""Commands not allowed at a formula's end."""


def _end_of_formula(text: str, at: int, *, lists: bool = True) -> int:
    """Returns the end of the formula at `at`, or `at` if no formula begins there.

    lists: if `True`, "1, 2 and 3" is one formula. A list followed by a word is not: "1, 2 apples" gives 1.
    """
    end, depth, last, solid, first = at, [], at, False, 0
    while end < len(text) and (token := _TOKEN.match(text, end)):
        kind, piece = token.lastgroup, token[0]
        if kind == "dollar" and is_money(piece[1:-1]) or kind == "sign" and piece == "$":
            if not re.match(r"\$\s?-?[\d.]", text[end:]):
                break
            end += 1
            continue
        things = kind == "number" and solid and _COMPOUND.match(text, token.end())
        if things and not _SIGNS.search(text, last, end):  # 12 7-Ups, 5 8 point bucks
            break
        if kind in ("math", "dollar", "number", "environment", "words"):
            solid, last = True, token.end()
        elif kind == "word":
            if not _is_symbol(text, token, solid, bool(depth)):
                break
            solid, last = True, token.end()
        elif kind == "command":
            if piece in _BREAKS:
                break
            if piece == "\\{":
                depth.append("\\}")
            elif piece == "\\}":
                if not depth:
                    break
                if depth[-1] != "}":
                    depth.pop()
                    last = token.end()
            elif piece in ("\\%", "\\right"):
                last = token.end()
            elif piece[1].isalpha() and piece not in _OPERATORS:
                solid, last = True, token.end()
        elif kind == "open":
            if piece != "{" and not depth and not _is_formula(text, end):
                break
            if len(depth) > 30:
                return at
            depth.append({"(": ")", "[": "]", "{": "}"}[piece])
        elif kind == "close":
            if not depth:
                break
            depth.pop()
            last = token.end()
        elif kind == "comma":
            goes_on = (
                depth
                or (piece == "!" and re.match(r"!\s*[-+*/=^)\]}\d(\\]", text[end:]))
                or (piece == ":" and re.match(r":\s?\d", text[end:]))
                or (lists and piece in ",，、" and _continues(text, token.end(), "=" in text[at:end]))
            )
            if solid and _PRIME.match(text, end):
                last = token.end()
            elif not goes_on:
                break
            elif piece in ",，、" and not depth:
                first = first or last
            elif piece == "!" and solid:
                last = token.end()
        elif kind == "sign":
            if piece in "°%²³⁰¹⁴⁵⁶⁷⁸⁹½⅓⅔¼¾∞∅ⁿ₀₁₂₃₄₅₆₇₈₉′":
                solid, last = True, token.end()
            elif piece in "-–" and not depth and solid and re.match(r"[-–]+\s+[a-zA-Z]{2,}|[-–]{2,}", text[end:]):
                break
            elif piece in "€£¥₹" and solid or piece == "|" and text.count("|", at, end) % 2:
                last = token.end()
        end = token.end()
        if not depth and lists and (m := _AND.match(text, end)) and solid and _is_item_after(text, m.end()):
            end = m.end()
        if end - at > LONGEST:
            break
    if not solid:
        return at
    if first and _THINGS.match(text, last):
        last = first
    return min(max(last, at), len(text)) if last > at else at


_THINGS = re.compile(r"\s+(?!(?:and|or|in|as|respectively|are|is|for)\b)[a-z]{3,}")


def _is_item_after(text: str, at: int) -> bool:
    """Returns whether a formula follows "and" or "or", and not a count of other things."""
    end = _end_of_formula(text, at, lists=False) if at < len(text) else at
    return end > at and not re.match(
        r"\s+(?!(?:or|and|respectively|as|in|is|are|for)\b)[a-z]{2,}\s+[a-z]{2,}", text[end:]
    )


def _is_symbol(text: str, token: re.Match[str], solid: bool, inside: bool) -> bool:
    """Returns whether a letter token is part of a formula."""
    word, at, end = token[0], token.start(), token.end()
    if not word.isascii():
        return word in "πθαβγδλμφωσρτεΔΩ"
    if _NAMES.match(word):
        return True
    before, after = text[at - 1 : at] if at else "", text[end : end + 1]
    if len(word) == 1:
        article = word in "aAI" and re.match(r"[^\S\n]+(?:[a-zA-Z]{2,}|\$?\d)", text[end:])
        prose = article or re.match(r"['’](?:s|m|ll|d|ve)\b", text[end:])
        if solid and not inside and before == " " and (word == "k" or _OF_THINGS.match(text, end)):
            return False  # 3 T-shirts, 7 C batteries, 20 k
        return not prose and not re.match(r"\.\s?[a-zA-Z]\.", text[end:])
    if before and before in "{^_" or inside and after and after in "}^_":
        return True
    if len(word) <= 3 and (
        before and before in "0123456789)}=+-*/^_$" or after and after in "^_(=/*+" or re.match(r"\s*[=^]", text[end:])
    ):
        return word.lower() not in ("and", "or", "so", "as", "is", "in", "the", "per", "of") or before in "_^{"
    if len(word) <= 4 and word.isupper() and not solid:
        return False
    return len(word) <= 3 and inside and bool(after) and after in ",)]+-*/^"


_CLOSE = re.compile(r"[)\]]")


def _is_formula(text: str, at: int) -> bool:
    """Returns whether the bracket at `at` opens a formula and not a remark in words."""
    close = _CLOSE.search(text, at + 1, at + 300)
    end = close.start() if close else min(len(text), at + 300)
    inside = re.sub(r"\\(?:text\w*|mbox|mathrm)\s*\{[^{}]*\}|\\[a-zA-Z]+", "", text[at + 1 : end])
    words = [word for word in re.findall(r"[^\W\d_]{2,}", inside) if not _NAMES.match(word)]
    if not inside.strip(" ."):
        return "\\" in text[at:end]
    return not any(len(word) > 2 or word.lower() in _SHORT for word in words)


_SHORT = set("or in is as so we to at by mm cm km kg".split())  # words that no product of symbols is


def _continues(text: str, at: int, equations: bool) -> bool:
    """Returns whether a list of formulas or equations continues after a comma. "Solving for x, x = 2" does not."""
    rest = text[at:].lstrip(" ")
    if not equations and re.match(r"[A-Za-z]\s*=", rest):
        return False
    if re.match(r"(?:and|or)\s+[$\\\d(\[-]", rest):
        return True
    words = re.match(r"(?![A-Za-z]{1,2}\s*=|(?:sin|cos|tan|log|ln|sqrt|pi)\b)[^\W\d_]{2,}", rest)
    if not rest or words or re.match(r"[aAI]\s", rest):
        return False
    if re.match(r"[^\W\d_]", rest):
        return bool(re.match(r"[A-Za-z](?:\s*(?:[-+*/=^_,).;$]|\\|\Z|and\b|or\b))", rest))
    start = len(text) - len(rest)
    return _end_of_formula(text, start, lists=False) > start


def _strip_math(text: str) -> str:
    if "$" in text or "\\(" in text or "\\[" in text:
        return re.sub(r"\\[()\[\]](?!\s*\d+(?:pt|ex|em))", "", text).replace("$", "")
    return text


_IDLE = re.compile(r"(?:[,;:=+*/|~&'\"]|(?<!\.\.)\.|(?<=.)[-–—])\Z", re.DOTALL)


def _tidy(text: str) -> str:
    """Strips the dollars around formulas, and leading and trailing signs without value."""
    text = re.sub(r"\\[()]", "", re.sub(r"(?<!\\)\$", "", text.strip()))
    if not text.startswith("\\begin"):
        text = re.sub(r"^\\\[|\\\]$", "", text.strip())
    text = re.sub(r"\A\\therefore(?![a-zA-Z])\s*", "", text)
    text = re.sub(r"\\boxed\s*\{(.*)\}", r"\1", text, flags=re.DOTALL).strip()
    while m := _IDLE.search(text):
        text = text[: m.start()].rstrip()
    return text[:-1].rstrip() if text.endswith("\\") else text


# ---- The values of a line.


class Value(NamedTuple):
    """A number or formula in a line, with its position; `text` is the last side of an equation."""

    start: int
    end: int
    text: str


LABEL = re.compile(r"\s*(?:[A-Z]\d{1,3}\s*:|step\s+\d{1,3}\s*[:.]|\d{1,3}[.)])\s+(?=\S)", re.IGNORECASE)
_START = re.compile(r"[$\\\d√π∞½¼¾(\[.+−-]|(?<![a-zA-Z'’&])[a-zA-Z](?![a-zA-Z'’&])")
_DIGITS = re.compile(r"-?\d+(?:[.,]\d+)*")
_SEVERAL = re.compile(r"[,;](?!\d{3})|\b(?:and|or)\b")  # x = 1 and x = 2
_TIMES = re.compile(r"(?:(?<=[\d)])|\A)\s*[xX]\s*(?=[\d($])")
_GLUED = re.compile(r"(-?\d[\d.,]*)([gmLlshWJNVK])\Z")
_NAME_IN_WORDS = re.compile(r"\\(?:text\w*|mbox|mathrm)\s*\{[^{}]*\}|\\[a-zA-Z]+")


def values(line: str) -> list[Value]:
    """Returns the formulas and numbers after a line's label, in order, of equations the last side; else runs of digits.

    Positions are half-open, in `line`. [] if there are no digits or formulas.
    """
    label = LABEL.match(line)
    items: list[Value] = []
    at = first = label.end() if label else 0
    for _ in range(300):
        if not (m := _START.search(line, at)):
            break
        end = _end_of_formula(line, m.start())
        if end <= m.start():
            at = m.end()
            continue
        piece = _tidy(line[m.start() : end])
        formula = line[m.start()] in "$\\" or re.search(r"\d", piece) or re.search(r"[A-Za-z]\s*[-+*/^=]\s*\S", piece)
        if formula and re.search(r"\w|\\", piece):
            unit = _UNITY.match(line, end)
            side = last_side(piece + (unit[0].strip() if unit else ""))
            items.append(Value(m.start(), end, side if line[m.start()] in "$\\" else _GLUED.sub(r"\1 \2", side)))
        at = end
    if not items:
        items = [Value(m.start(), m.end(), m[0]) for m in _DIGITS.finditer(line, first)]
    return items


def formula_at(text: str, at: int) -> str:
    """Returns the number or formula that begins at index `at`, after spaces, or "" if another text does."""
    while at < len(text) and text[at] == " ":
        at += 1
    end = _end_of_formula(text, at)
    return _tidy(text[at:end])


def last_side(formula: str) -> str:
    r"""Returns an equation's last side, e.g. 7 for `\text{Total} = 3 + 4 = 7`; one with unknowns stays whole."""
    first, *_, last = formula.split("=") if "=" in formula else (formula, "")
    names = set(re.findall(r"(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])", _NAME_IN_WORDS.sub("", _TIMES.sub("*", first))))
    chain = formula.count("=") > 1 and not _SEVERAL.search(formula)
    if chain and not re.search("[a-zA-Z]", _NAME_IN_WORDS.sub("", last)):  # 4x - 13 = 160 - 13 = 147
        names = set()
    if (unit := _GLUED.fullmatch(last.strip())) and re.search(rf"\d{unit[2]}", first):  # 2 * 40g = 80g
        names.discard(unit[2])
    return formula if names or not last.strip() else _tidy(last)
