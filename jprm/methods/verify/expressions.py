"""Parses tokens into expressions, without computing anything.

An expression is nested tuples: ("num", Fraction, decimals, suspect), ("sym", name), ("pi",), (op, left, right) for
`+ - * / ^`, ("neg" | "sqrt" | "percent" | "factorial", inner), and three that have several readings:
("note", left, right), `5 (3 + 4)`, a product or a remark in brackets; ("mixed", left, right), `2\\frac12`; and
("either", left, right), `- 5 + 3` with a minus sign or a bullet.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from jprm.methods.verify.lexer import FUNCTIONS, Token

_DEEPEST = 40  # nested brackets


class _No(Exception):
    """Raised if the tokens are no expression."""


def parse(tokens: Sequence[Token]) -> tuple | None:
    try:
        parser = _Parser(tokens)
        node = parser.sum(0)
        return node if parser.at == len(tokens) else None
    except _No:
        return None


class _Parser:
    def __init__(self, tokens: Sequence[Token]):
        self.tokens, self.at = tokens, 0

    def peek(self, ahead: int = 0) -> Token:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else Token("end", "")

    def sum(self, depth: int) -> tuple:
        if depth > _DEEPEST:
            raise _No
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
                raise _No  # f(2), f^{-1}(13)
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
            inner = self.power(depth)
            return ("neg", inner) if sign == "-" else inner
        return self.power(depth)

    def power(self, depth: int) -> tuple:
        node = self.primary(depth)
        if self.peek().text == "^" and self.peek(1).kind == "°":
            self.at += 2
        elif self.peek().text == "^":
            self.at += 1
            if depth >= _DEEPEST:
                raise _No
            node = ("^", node, self.signed(depth + 1))
        while self.peek().kind in ("%", "!", "°"):
            kind = self.peek().kind
            self.at += 1
            node = {"%": ("percent", node), "!": ("factorial", node), "°": node}[kind]
        self.units()
        return node

    def units(self) -> None:
        """Skips words after a number: its unit, if an operator, a relation or the end follows."""
        ahead = 0
        if self.peek().text == "/" and not self.peek().spaced and self.peek(1).kind == "W":
            ahead = 1  # $135/person
        while self.peek(ahead).kind in ("W", "A") and ahead < 6:
            if self.peek(ahead).text.lower() in FUNCTIONS:
                raise _No  # 5 squared
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
                    raise _No
                return ("+", whole, part)  # 2 1/2
            return _number(token)
        if token.kind == "S":
            return ("sym", token.text)
        if token.kind == "pi":
            return ("pi",)
        if token.kind in ("(", "["):
            return self.close(depth, {"(": ")", "[": "]"}[token.kind])
        if token.kind == "{":
            return self.close(depth, "}")
        if token.kind == "F" and token.text == "frac":
            return ("/", self.group(depth), self.group(depth))
        if token.kind == "F" and token.text == "sqrt":
            return ("sqrt", self.group(depth) if self.peek().kind == "{" else self.primary(depth))
        raise _No

    def group(self, depth: int) -> tuple:
        if self.peek().kind != "{":
            raise _No
        self.at += 1
        return self.close(depth, "}")

    def close(self, depth: int, kind: str) -> tuple:
        node = self.sum(depth + 1)
        if self.peek().kind != kind:
            raise _No
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
