"""Splits the text of a step, plain or LaTeX, into tokens of mathematics and prose, without computing anything."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Token(NamedTuple):
    kind: str  # N number, S symbol, W word, O operator, R relation, F function, B break, P unreadable, and signs
    text: str
    spaced: bool = True  # a space stands before it
    glued: bool = False  # a letter, a digit or } stands before it


def tokens_of(text: str) -> list[Token]:
    """Returns the tokens of a text."""
    return _soft(_tokens(text))


_SHORT = set(
    "of is in at to by on or an as if so we he it my up us no do am pm be me mm cm km ft yd mi in mg kg lb oz ml kl cc "
    "gb mb kb tb kw hr st nd rd th hz mp".split()
)
"""Words of two letters. Any other pair of letters is a product of symbols."""

FUNCTIONS = set(
    "sqrt root log lg exp sin cos tan cot csc sinh cosh tanh arcsin arccos arctan asin acos atan abs floor ceil "
    "ceiling factorial choose squared cubed percent".split()
)
"""Words that change the value of the number beside them, so a term with one cannot be read."""

_MARKS = {"½": " 1/2", "¼": " 1/4", "¾": " 3/4", "²": "^2", "³": "^3", "√": "\\sqrt ", "“": '"', "−": "-", "–": "-"}
_REWRITE = [(re.compile(pattern), new) for pattern, new in (
    (r"\{,\}|,\\!(?=\d)", ","),
    (r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle|limits)(?![a-zA-Z])|\\[,;!: ]|~", " "),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname|boxed|fbox)\s*(?=\{)", " "),
    (r"\\(?:begin|end)\{(?:align|aligned|equation|gather|gathered|split)\*?\}|\\\\", "\n"),
    (r"\\([$%])", r"\1"),
    (r"\*\*(?=\s*[\d(])(?<=[\d)]\*\*)", "^"),
    (r"\*\*", r"\\("),
)]  # fmt: skip
_LEXEMES = re.compile(
    r"(?P<space>[ \t]+)|(?P<line>\n+)|(?P<number>\d+(?:,\d+)*(?:\.\d+)?|\.\d+)|(?P<delimiter>\\[()\[\]]|\$\$)"
    r"|(?P<command>\\[a-zA-Z]+)|(?P<word>[^\W\d_][^\W_]*(?:['’-][^\W\d_]+)*(?:_\{[^{}]*\}|_\w+)?'*)"
    r"|(?P<arrow>=>|<=>|->|→|⇒|⟹)|(?P<relation><=|>=|!=|==|=|≈|≤|≥|≠|<|>)|(?P<other>.)"
)
_ORDINAL = re.compile(r"(st|nd|rd|th)\b")
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")
_OPERATORS = {"+": "+", "-": "-", "*": "*", "×": "*", "·": "*", "⋅": "*", "∙": "*", "✕": "*", "/": "/", "÷": "/",
              "⁄": "/", "^": "^", "times": "*", "cdot": "*", "ast": "*", "div": "/"}  # fmt: skip
_RELATIONS = {"≈": "≈", "approx": "≈", "sim": "≈", "simeq": "≈", "≤": "<=", "le": "<=", "leq": "<=", "leqslant": "<=",
              "≥": ">=", "ge": ">=", "geq": ">=", "geqslant": ">=", "≠": "!=", "ne": "!=", "neq": "!=", "==": "=",
              "lt": "<", "gt": ">"}  # fmt: skip
_GREEK = set("alpha beta gamma delta epsilon varepsilon theta lambda mu nu rho sigma tau phi varphi omega".split())
_STOPS = set("implies Rightarrow Longrightarrow rightarrow to quad qquad therefore because iff".split())
_SPOKEN = {"times": "*", "plus": "+", "minus": "-", "divided": "/", "multiplied": "*"}


def _tokens(text: str) -> list[Token]:
    for mark, plain in _MARKS.items():
        text = text.replace(mark, plain)
    for pattern, new in _REWRITE:
        text = pattern.sub(new, text)
    tokens, spaced = [], True
    for match in _LEXEMES.finditer(text):
        kind, lexeme = str(match.lastgroup), match.group()
        if kind == "space":
            spaced = True
            continue
        rest = text[match.end() : match.end() + 3]
        token = _token(kind, lexeme, rest)
        if kind == "number" and _ORDINAL.match(rest) and text[match.start() - 1 : match.start()] != "/":
            token = "P", lexeme
        if token:
            last = text[match.start() - 1 : match.start()]
            tokens.append(Token(*token, spaced, last.isalnum() or last == "}"))
        spaced = kind == "line"
    return list(_spoken(tokens))


def _token(kind: str, text: str, rest: str) -> tuple[str, str] | None:
    if kind == "line":
        return "L", text
    if kind == "number":
        odd = "," in text and not _THOUSANDS.fullmatch(text) or re.match(r"0\d", text) or len(text) > 40
        odd = odd or re.match(r"[eE][+-]?\d|_|:\d|\.[.\\]", rest)
        return ("P" if odd else "N"), text
    if kind == "delimiter":
        return "D", text
    if kind == "arrow":
        return "B", text
    if kind == "relation" or text[1:] in _RELATIONS and kind == "command":
        return "R", _RELATIONS.get(text.removeprefix("\\"), text)
    if text == "sqrt" and rest[:1] in ("(", "{"):
        return "F", text
    if kind == "word":
        if len(text.rstrip("'")) == 1 or text[1] == "_":
            return "S", text
        # ab next to a number is a product, not its unit
        return ("W" if len(text) > 2 and text not in ("abc", "xyz") or text.lower() in _SHORT else "P"), text
    if kind == "command":
        name = text[1:]
        if name in _OPERATORS:
            return "O", _OPERATORS[name]
        if name in ("frac", "sqrt", "binom"):
            return "F", name
        if name == "pi":
            return "pi", name
        if name in _GREEK:
            return "S", name
        if name == "circ":
            return "°", name
        return ("B" if name in _STOPS else "P"), text
    if text in _OPERATORS:
        return "O", _OPERATORS[text]
    if text in "()[]{}%!°":
        return text, text
    if text in "$€£₹¥":
        return "$", text
    if text in "&'":
        return None
    if text == "π":
        return "pi", text
    return ("P" if text in "|_…\\@" else "B"), text


def _spoken(tokens: Sequence[Token]) -> Iterator[Token]:
    """Resolves words and the letter x that are operators between numbers (`5 times 3`, `20% of 60`), and articles."""
    skip = False
    for i, token in enumerate(tokens):
        if skip:
            skip = False
            continue
        before = tokens[i - 1].kind if i else "B"
        after = tokens[i + 1] if i + 1 < len(tokens) else Token("B", "")
        text = token.text.lower()
        operand = before in ("N", ")", "}", "%", "W")
        if token.kind == "S" and text == "x" and operand and (
            after.kind in ("N", "$", "F") or (after.kind == "(" and token.spaced)
        ):  # fmt: skip
            yield Token("O", "*", token.spaced)
        elif token.kind == "S" and text in ("a", "i") and token.spaced and after.kind == "W":
            yield token._replace(kind="W")
        elif token.kind == "W" and before in ("N", ")", "}", "%") and text in _SPOKEN:
            by = after.text.lower() == "by"
            following = tokens[i + 2].kind if by and i + 2 < len(tokens) else after.kind
            if following in ("N", "$", "("):
                skip = by
                yield Token("O", _SPOKEN[text])
            else:
                yield token
        elif text == "of" and after.kind in ("N", "$", "(") and _is_share(tokens[:i]):
            yield Token("O", "*")
        else:
            yield token


def _is_share(tokens: Sequence[Token]) -> bool:
    """Returns whether the tokens end in a fraction such as 20%, 1/2 or 0.2."""
    last = tokens[-1] if tokens else Token("B", "")
    return (
        last.kind == "%"
        or last.kind == "N"
        and (last.text.startswith("0.") or bool(tokens[-2:-1]) and tokens[-2].text == "/")
    )


def _soft(tokens: Sequence[Token]) -> list[Token]:
    """Drops currency signs, formula delimiters and line ends inside an equation, and makes them breaks elsewhere."""
    kept: list[Token] = []
    money = False
    for i, token in enumerate(tokens):
        before = kept[-1].kind if kept else "B"
        after = next((t.kind for t in tokens[i + 1 :] if t.kind not in ("D", "$", "L")), "B")
        if token.kind == "$":
            money = after == "N"
            inside = before in ("O", "R", "(", "{", "[", "B", "W") or after in ("O", "R", ")")
        elif token.kind == "D":
            inside = before in ("O", "R", "B", "W") or after in ("O", "R", ")", "W")
        elif token.kind == "L":
            inside = before in ("O", "R", "B") or after == "R"
        else:
            kept.append(token._replace(text="$" + token.text) if money and token.kind == "N" else token)
            money = False
            continue
        if not inside:
            kept.append(Token("B", token.text))
    return kept
