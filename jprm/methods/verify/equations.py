"""Reads equations and inequalities from the text of a step (plain or LaTeX) without computing them.

Neither Python nor SymPy ever evaluates the text. It is split into tokens of mathematics and prose; each side of a
relation sign is the longest adjacent token run accepted by the grammar as an expression. Unreadable text is ignored.

An expression is a nested tuple: ("num", Fraction, decimals, suspect), ("sym", name), ("pi",), (op, left, right) for `+
    - * / ^`, ("neg" | "sqrt" | "percent" | "factorial", inner), and three ambiguous ones: ("note", left, right), `5 (3
    + 4)`, a product or a remark in brackets; ("mixed", left, right), `2\\frac12`; and ("either", left, right), `- 5 +
    3` with a minus sign or a bullet.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

LONGEST = 6000  # characters of a step that are read
_FURTHEST = 120  # tokens of one side
_CLOSES = {")": "(", "]": "[", "}": "{"}
_OPENS = {"(": ")", "[": "]", "{": "}"}


class Equation(NamedTuple):
    """`left relation right`, with `=`, `≈`, `!=`, `<`, `>`, `<=` or `>=`; sides as by `parse_expression`.

    Attributes:
      text: its tokens, joined by spaces.
      units: words and currency signs in it, in lower case.
      doubtful: nearby words may change its meaning, so it never counts as false.
      shared: the left side is the right side of the equation before, in a chain of equalities.
      start, end: half-open range of its tokens.
    """

    left: tuple
    relation: str
    right: tuple
    text: str
    units: frozenset[str]
    doubtful: bool
    shared: bool
    start: int
    end: int


def equations(text: str) -> tuple[list[Equation], list[Token]]:
    """Returns all equations and inequalities with two readable sides, in order, and the text's tokens.

    Only the first LONGEST characters are read. Unreadable parts are left out; ([], tokens) if there is no relation.
    """
    tokens = _brackets(tokens_of(text[:LONGEST]))
    results: list[Equation] = []
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
            numbers = shared and left[0][0] == right[0][0] == "num"
            renamed = numbers and _renamed(tokens[left[1] : at], tokens[at + 1 : right[2] + 1])
            doubtful = alone or left[3] or (right[3] and whole is None) or renamed
            sides = left[0], tokens[at].text, right[0]
            results.append(Equation(*sides, words, units, doubtful, shared, left[1], right[2]))
    return results, tokens


def _renamed(left: Sequence[Token], right: Sequence[Token]) -> bool:
    """Returns whether both sides have units, all different, e.g. 60 minutes = 1 hour."""
    units, others = (
        {t.text.lower().rstrip("s") for t in side if t.kind == "W" or t.text[0] == "$"} for side in (left, right)
    )
    return bool(units and others and not units & others)


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
            inner = out[start + 1 :]
            kinds = {t.kind for t in inner}
            if "R" in kinds:
                out[start] = Token("B", out[start].text)
                out.append(Token("B", token.text))
            elif token.kind == "}" and _is_unit(inner):
                out[start:] = inner  # \text{ miles}, \text{ km/h}
            elif "B" in kinds and "W" not in kinds:
                out[start:] = [Token("P", "(list)", out[start].spaced)]
            elif out[start].kind != "{" and "W" in kinds and parse_expression(inner) is None:
                out[start:] = [Token("A" if out[start].spaced else "P", "(remark)", out[start].spaced)]
            else:
                out.append(token)
    unclosed = set(opened)
    return [Token("B", t.text) if i in unclosed else t for i, t in enumerate(out)]


def _is_unit(tokens: Sequence[Token]) -> bool:
    """Returns whether the tokens are words, optionally `per` another word: miles, dollars/box, km/h."""
    pairs = zip([Token("B", ""), *tokens], tokens, strict=False)
    of_words = (b.kind in "WBA%" or b.text == "/" or (b.kind == "S" and a.text == "/") for a, b in pairs)
    return all(of_words) and {token.kind for token in tokens} != {"O"}


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
        inner = parse_expression(tokens[i:end])
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
            item = parse_expression(tokens[i + 1 : end])
            inner = ("either", inner, item) if item else inner
        return inner, i, end, odd or open_
    return None


def _prefix(tokens: Sequence[Token], start: int, end: int) -> tuple[tuple, int, int, bool] | None:
    """Returns the longest expression that begins at `start`, in the same form."""
    last = min((i for i in range(start, end) if tokens[i].kind in "BP"), default=end)
    unreadable = last < end and tokens[last].kind == "P"
    for i in range(min(last, start + _FURTHEST), start, -1):
        after = tokens[i] if i < end else Token("B", "")
        if after.kind not in ("B", "W", "A", "R") or (unreadable and i == last):
            continue
        inner = parse_expression(tokens[start:i])
        if inner is not None:
            following = list(itertools.takewhile(lambda token: token.kind == "W", tokens[i : i + 4]))
            bracket = tokens[i + len(following)] if following and i + len(following) < end else None
            applied = bracket and bracket.kind in "([{" and bracket.glued
            if applied or any(token.text.lower().partition("_")[0] in FUNCTIONS for token in following):
                return None  # 8 = 2 sqrt(16)
            words = [t.text.lower() for t in tokens[max(start, i - 3) : i + 3] if t.kind in "WS"]
            return inner, start, i, any(word in _GIVES for word in words)
    return None


# ---- Expressions: tokens to nested tuples.

_DEEPEST = 40  # nested brackets


class _Unreadable(Exception):
    """The tokens are not an expression."""


def parse_expression(tokens: Sequence[Token]) -> tuple | None:
    """Parses all the tokens as one expression, nested tuples (kind, *children); `None` if they are not one.

    E.g. `2 * (x + 1)` gives `("*", ("num", 2, 0, False), ("+", ("sym", "x"), ("num", 1, 0, False)))`, with Fractions.
    This module's docstring lists the kinds.
    """
    try:
        parser = _Parser(tokens)
        node = parser.sum(0)
        return node if parser.at == len(tokens) else None
    except _Unreadable:
        return None


class _Parser:
    def __init__(self, tokens: Sequence[Token]):
        self.tokens, self.at = tokens, 0

    def peek(self, ahead: int = 0) -> Token:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else Token("end", "")

    def sum(self, depth: int) -> tuple:
        if depth > _DEEPEST:
            raise _Unreadable
        node = self.product(depth)
        while self.peek().kind == "O" and self.peek().text in "+-":
            sign = self.peek().text
            self.at += 1
            node = (sign, node, self.product(depth))
        return node

    def product(self, depth: int) -> tuple:
        node = self.signed(depth)
        while True:
            token, last = self.peek(), self.tokens[self.at - 1]
            if token.kind == "O" and token.text in "*/":
                self.at += 1
                node = (token.text, node, self.signed(depth))
            elif token.kind in ("(", "[") and (_is_function(last, token) or self.peek(2).kind in (")", "]") and (
                last.kind == "S" or node[0] == "^" and node[1][0] == "sym"
            )):  # fmt: skip
                raise _Unreadable  # f(2), f^{-1}(13)
            elif token.kind in ("S", "F", "pi", "(", "["):
                loose = token.kind == "(" and token.spaced and last.kind not in (")", "]")
                mixed = token.text == "frac" and node[0] == "num" and node[2] == 0 and last.kind == "N"
                node = ("note" if loose else "mixed" if mixed else "*", node, self.power(depth))
            else:
                return node

    def signed(self, depth: int) -> tuple:
        if self.peek().kind == "O" and self.peek().text in "+-":
            sign = self.peek().text
            self.at += 1
            return ("neg", self.power(depth)) if sign == "-" else self.power(depth)
        return self.power(depth)

    def power(self, depth: int) -> tuple:
        node = self.primary(depth)
        if self.peek().text == "^" and self.peek(1).kind == "°":
            self.at += 2
        elif self.peek().text == "^":
            self.at += 1
            if depth >= _DEEPEST:
                raise _Unreadable
            node = ("^", node, self.signed(depth + 1))
        while self.peek().kind in ("%", "!", "°"):
            kind = {"%": "percent", "!": "factorial", "°": None}[self.peek().kind]
            self.at += 1
            node = (kind, node) if kind else node
        self.units()
        return node

    def units(self) -> None:
        """Skips words after a number (its unit) if an operator, a relation or the end follows."""
        ahead = 0
        if self.peek().text == "/" and not self.peek().spaced and self.peek(1).kind == "W":
            ahead = 1  # $135/person
        while self.peek(ahead).kind in ("W", "A") and ahead < 6:
            if self.peek(ahead).text.lower() in FUNCTIONS:
                raise _Unreadable  # 5 squared
            ahead += 1
            if self.peek(ahead).text == "/" and not self.peek(ahead).spaced and self.peek(ahead + 1).kind in "WS":
                ahead += 2
            elif self.peek(ahead).text == "^" and self.peek(ahead + 1).kind in "N{":
                ahead += 2 if self.peek(ahead + 1).kind == "N" else 4
        if ahead and self.peek(ahead).kind in ("O", "R", "end", ")", "]", "}"):
            self.at += ahead

    def primary(self, depth: int) -> tuple:
        token = self.peek()
        self.at += 1
        if token.kind == "N":
            over, below = self.peek(1), self.peek(2)
            if self.peek().kind == "N" and over.text == "/" and below.kind == "N" and not over.spaced:
                whole, part = _number(token), ("/", _number(self.peek()), _number(below))
                self.at += 3
                if whole[2] or part[1][1] >= part[2][1]:
                    raise _Unreadable
                return ("+", whole, part)  # 2 1/2
            return _number(token)
        if token.kind == "S":
            return ("sym", token.text)
        if token.kind == "pi":
            return ("pi",)
        if token.kind in _OPENS:
            return self.close(depth, _OPENS[token.kind])
        if token.kind == "F" and token.text == "frac":
            return ("/", self.group(depth), self.group(depth))
        if token.kind == "F" and token.text == "sqrt":
            return ("sqrt", self.group(depth) if self.peek().kind == "{" else self.primary(depth))
        raise _Unreadable

    def group(self, depth: int) -> tuple:
        if self.peek().kind != "{":
            raise _Unreadable
        self.at += 1
        return self.close(depth, "}")

    def close(self, depth: int, kind: str) -> tuple:
        node = self.sum(depth + 1)
        if self.peek().kind != kind:
            raise _Unreadable
        self.at += 1
        return node


def _is_function(name: Token, bracket: Token) -> bool:
    return name.kind == "S" and name.text[0] in "fghFGPQ" and not bracket.spaced


def _number(token: Token) -> tuple:
    """Returns ("num", value, decimals, suspect). A decimal not ending in 0 or 5 may be rounded, unless it is money."""
    text = token.text.removeprefix("$").replace(",", "")
    decimals = len(text.partition(".")[2])
    digits = len(text.replace(".", "").lstrip("0"))
    long = decimals > 0 and max(decimals, digits - 1) >= 2
    suspect = long and text[-1] not in "05" and not token.text.startswith("$")
    return ("num", Fraction(text), decimals, suspect)


# ---- Tokens.


class Token(NamedTuple):
    """One token in a text.

    Attributes:
      kind: N number, S symbol, W word, O operator, R relation, F function, A remark in brackets, B break, P unreadable;
        `pi`, brackets, `%`, `!` and `°` are their own kinds.
      spaced: a space stands before it.
      glued: a letter, a digit or } stands before it.
    """

    kind: str
    text: str
    spaced: bool = True
    glued: bool = False


def tokens_of(text: str) -> list[Token]:
    """Splits a text into the tokens of formulas, with words and breaks between them; it raises no error."""
    return _soft(_tokens(text))


_SHORT = set(
    "of is in at to by on or an as if so we he it my up us no do am pm be me mm cm km ft yd mi in mg kg lb oz ml kl cc "
    "gb mb kb tb kw hr st nd rd th hz mp".split()
)
"""Two-letter words. Any other pair of letters is a product of symbols."""

FUNCTIONS = set(
    "sqrt root log lg exp sin cos tan cot csc sinh cosh tanh arcsin arccos arctan asin acos atan abs floor ceil "
    "ceiling factorial choose squared cubed percent".split()
)
"""Words changing a neighbouring number's value, which makes the term unreadable."""

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
_GREEK = "alpha beta gamma delta epsilon varepsilon theta lambda mu nu rho sigma tau phi varphi omega".split()
_COMMANDS = dict.fromkeys(_GREEK, "S") | {"frac": "F", "sqrt": "F", "binom": "F", "pi": "pi", "circ": "°"}
_SIGNS = {c: c for c in "()[]{}%!°"} | dict.fromkeys("$€£₹¥", "$") | dict.fromkeys("|_…\\@", "P") | {"π": "pi"}
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
    if kind in ("line", "delimiter", "arrow"):
        return {"line": "L", "delimiter": "D", "arrow": "B"}[kind], text
    if kind == "number":
        odd = "," in text and not _THOUSANDS.fullmatch(text) or re.match(r"0\d", text) or len(text) > 40
        return ("P" if odd or re.match(r"[eE][+-]?\d|_|:\d|\.[.\\]", rest) else "N"), text
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
        if name in _COMMANDS:
            return _COMMANDS[name], name
        return ("B" if name in _STOPS else "P"), text
    if text in _OPERATORS:
        return "O", _OPERATORS[text]
    return None if text in "&'" else (_SIGNS.get(text, "B"), text)


def _spoken(tokens: Sequence[Token]) -> Iterator[Token]:
    """Resolves articles, and words or the letter x used as operators between numbers (`5 times 3`, `20% of 60`)."""
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
    """Returns whether the tokens end in a fraction, e.g. 20%, 1/2 or 0.2."""
    if not tokens or tokens[-1].kind != "N":
        return bool(tokens) and tokens[-1].kind == "%"
    return tokens[-1].text.startswith("0.") or len(tokens) > 1 and tokens[-2].text == "/"


def _soft(tokens: Sequence[Token]) -> list[Token]:
    """Drops currency signs, formula delimiters and line ends inside an equation; elsewhere turns them into breaks."""
    kept: list[Token] = []
    money, after = False, ["B"]  # of the tokens from the last on: the next kind that is not of these
    for token in reversed(tokens):
        after.append(after[-1] if token.kind in _INSIDE else token.kind)
    for token in tokens:
        after.pop()
        if token.kind not in _INSIDE:
            kept.append(token._replace(text="$" + token.text) if money and token.kind == "N" else token)
            money = False
            continue
        before = kept[-1].kind if kept else "B"
        money = after[-1] == "N" if token.kind == "$" else money
        behind, ahead = _INSIDE[token.kind]
        if before not in behind and after[-1] not in ahead:
            kept.append(Token("B", token.text))
    return kept


_INSIDE = {"$": ("OR({[BW", "OR)"), "D": ("ORBW", "OR)W"), "L": ("ORB", "R")}
"""Token kinds before and after a currency sign, delimiter or line end that place it inside an equation."""
