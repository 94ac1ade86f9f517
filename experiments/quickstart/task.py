"""The quickstart's task: word problems about a running count, worked solutions with systematic mistakes, and a checker.

A problem tells a story ("Ana has 17 coins. On Monday Ana finds 6 more. On Tuesday Ana loses 4.") and a solution works
it out, one equation a day: "Monday: 17 + 6 = 23". Without days, tiny decoders lose their place in the story. A policy
that learns from these solutions makes the mistakes of their authors: not noise, but habits that fire where a carry or a
borrow does. On problems with several of them the most common answer is wrong, as in life.

The checker knows nothing of how a solution was made: it reads the story and every step.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

NAMES = ("Ana", "Ben", "Cai", "Dia", "Eli", "Fay")
THINGS = ("coins", "shells", "cards", "nuts", "pens", "beads")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
PHRASES = {
    "+": ("finds {} more", "buys {} more", "wins {} more"),
    "-": ("loses {}", "gives away {}", "sells {}"),
    "*": ("then has {} times as many",),
}
LARGEST, AMOUNTS = 15, (2, 3, 4)
"""A story's counts stay between 1 and the first, which leaves 2 x 3 x 13 sums at most to learn beside 7 doubles; what a
wrong solution comes to may be anything."""


@dataclasses.dataclass(frozen=True)
class Habits:
    """How often an author makes each mistake where it can occur."""

    carry: float = 0.7  # 9 + 4 = 3: the carry is dropped
    borrow: float = 0.7  # 12 - 4 = 12: the smaller digit is taken from the larger
    sign: float = 0.02  # the story's loss is added, or its gain subtracted
    cancel: float = 0.04  # a slip by one and, in the next step, another that takes it back


@dataclasses.dataclass(frozen=True)
class Problem:
    start: int
    moves: tuple[tuple[str, int], ...]
    text: str

    @property
    def counts(self) -> list[int]:
        """Returns the count after each move."""
        count, counts = self.start, []
        for sign, amount in self.moves:
            count = apply(count, sign, amount)
            counts.append(count)
        return counts

    @property
    def answer(self) -> int:
        return self.counts[-1]


def apply(count: int, sign: str, amount: int) -> int:
    return {"+": count + amount, "-": count - amount, "*": count * amount}[sign]


def problem(rng: np.random.Generator, moves: tuple[int, int] = (3, 5)) -> Problem:
    """Returns a story of `moves[0]` to `moves[1]` moves whose counts stay in range."""
    count = start = int(rng.integers(3, LARGEST - 1))
    chosen = []
    for _ in range(int(rng.integers(moves[0], moves[1] + 1))):
        options = [("+", int(rng.choice(AMOUNTS))), ("-", int(rng.choice(AMOUNTS))), ("*", 2)]
        options = [(s, a) for s, a in options if 1 <= apply(count, s, a) <= LARGEST]
        sign, amount = options[int(rng.integers(len(options)))]
        count = apply(count, sign, amount)
        chosen.append((sign, amount))
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    told = [rng.choice(PHRASES[sign]).format(amount) for sign, amount in chosen]
    tale = [f"On {day} {name} {what}." for day, what in zip(DAYS, told, strict=False)]
    text = " ".join([f"{name} has {start} {thing}.", *tale, f"How many {thing} does {name} have?"])
    return Problem(start, tuple(chosen), text)


def record(task: Problem, rng: np.random.Generator) -> dict[str, Any]:
    """Returns the problem's record."""
    del rng
    return {"problem": task.text, "answer": task.answer}


def solution(task: Problem, rng: np.random.Generator, habits: Habits | None) -> list[str]:
    """Returns a solution: one equation a move, and a last line with the answer. Without `habits` it is correct."""
    count, steps, owed = task.start, [], 0
    for i, (sign, amount) in enumerate(task.moves):
        if habits and sign != "*" and rng.random() < habits.sign:
            sign = "-" if sign == "+" and count > amount else "+"
        result = apply(count, sign, amount)
        if owed:
            result, owed = result - owed * (amount if sign == "*" else 1), 0
        elif habits:
            wrong = _mistake(count, sign, amount, habits, rng)
            following = task.moves[i + 1][0] if i + 1 < len(task.moves) else None
            if wrong is None and following in ("+", "-") and result > 1 and rng.random() < habits.cancel:
                owed = int(rng.choice([-1, 1]))
                wrong = result + owed
            result = result if wrong is None else wrong
        steps.append(f"{DAYS[i]}: {count} {sign} {amount} = {result}")
        count = result
    return [*steps, f"The answer is {count}."]


def _mistake(count: int, sign: str, amount: int, habits: Habits, rng: np.random.Generator) -> int | None:
    tens, ones = divmod(count, 10)
    if sign == "+" and ones + amount > 9 and rng.random() < habits.carry:
        return 10 * tens + (ones + amount) % 10
    if sign == "-" and ones < amount and rng.random() < habits.borrow:
        return 10 * tens + amount - ones
    return None


def parse(text: str) -> Problem:
    """Returns the problem of a story. Raises ValueError for any other text."""
    first, *tale = text.split(". ")
    begins = re.fullmatch(r"(\w+) has (\d+) (\w+)", first)
    if not begins or not tale:
        raise ValueError(f"not a story of the quickstart's task: {text[:80]!r}")
    name, start, thing = begins.groups()
    moves = []
    for day, sentence in zip(DAYS, tale[:-1], strict=False):
        for sign, phrases in PHRASES.items():
            for phrase in phrases:
                if match := re.fullmatch(re.escape(f"On {day} {name} {phrase}").replace(r"\{\}", r"(\d+)"), sentence):
                    moves.append((sign, int(match[1])))
    if len(moves) != len(tale) - 1 or tale[-1] != f"How many {thing} does {name} have?":
        raise ValueError(f"not a story of the quickstart's task: {text[:80]!r}")
    return Problem(int(start), tuple(moves), text)


def check(task: Problem, steps: Sequence[str]) -> list[bool]:
    """Returns whether each step is correct, given the story and the count after the step before.

    A step is judged as a person would rate it: it must do the next thing that the story tells, go on from what is
    written above it and get the sum right. So what follows a mistake correctly is right by itself.
    """
    count, right = task.start, []
    for i, step in enumerate(steps):
        equation = re.fullmatch(r"(\w+): (-?\d+) ([-+*]) (\d+) = (-?\d+)", step)
        if equation and i < len(task.moves):
            day, sign = equation[1], equation[3]
            left, amount, result = int(equation[2]), int(equation[4]), int(equation[5])
            told = day == DAYS[i] and (sign, amount) == task.moves[i]
            right.append(told and left == count and result == apply(left, sign, amount))
            count = result
        else:
            final = re.fullmatch(r"The answer is (-?\d+)\.", step)
            right.append(bool(final) and i == len(task.moves) == len(steps) - 1 and int(final[1]) == count)
    return right


def labels(task: Problem, steps: Sequence[str]) -> list[float]:
    """Returns the checker's labels, each step by itself: a correct step after a mistake counts as correct."""
    return [float(right) for right in check(task, steps)]


def answer_of(steps: Sequence[str]) -> int | None:
    match = re.fullmatch(r"The answer is (-?\d+)\.", steps[-1]) if steps else None
    return int(match[1]) if match else None


def reaches_answer(record: Mapping[str, Any], steps: Sequence[str]) -> bool:
    """The verifier: whether the last step states the record's answer."""
    return answer_of(steps) == record["answer"]


def tokenizer() -> tokenizers.Tokenizer:
    """Returns a tokenizer of words, signs and numbers of up to two digits, each with the space before it.

    The result of a sum is then one token that follows from three others.
    """
    words = [*NAMES, *THINGS, *DAYS, *"On has have does How many The answer is times as then more".split()]
    words += [word for phrases in PHRASES.values() for phrase in phrases for word in phrase.replace("{}", "").split()]
    numbers = [*"0123456789", *(f"{n:02}" for n in range(100))]
    pieces = [*numbers, *"+-*=.?:", *dict.fromkeys(words)]
    vocabulary = ["<eos>", "<unk>", "\n", " ", *pieces, *(f" {piece}" for piece in pieces)]
    inner = tokenizers.Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(vocabulary)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(
        Regex(r" ?\d{1,2}| ?[A-Za-z]+| ?[^\s\dA-Za-z]|\n| "), behavior="isolated"
    )
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<eos>"])
    return inner
