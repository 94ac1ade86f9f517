"""The quickstart's task: word problems about a running count, worked solutions with systematic mistakes, and a checker.

A problem tells a story ("Ana has 7 coins. On Monday Ana finds 2 pairs more. On Tuesday Ben loses 3.") and a solution
works it out, one equation a day: "Monday: 7 + 4 = 11", "Tuesday: 11 + 0 = 11". Without days, tiny decoders lose their
place in the story. A policy that learns from these solutions makes the mistakes of their authors: not noise, but habits
that fire on certain days. On problems with several such days the most common answer is wrong, as in life.

Most mistakes are true equations, e.g. "Tuesday: 11 - 3 = 8" above: only a reader of the problem can see them.

The checker knows nothing of how a solution was made: it reads the story and every step.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

OWNERS, OTHERS = ("Ana", "Cai", "Eli"), ("Ben", "Dia", "Fay")
"""Who owns the things that are counted, and who else does something: a name tells, so that small models see it."""

THINGS = ("coins", "shells", "cards", "nuts", "pens", "beads")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")


class Deed(NamedTuple):
    """What happens on a day, e.g. `{other} gives {owner} {n}`, and how the owner's count changes by it."""

    text: str
    sign: str
    times: int = 1  # things for each that the text counts: 2 for pairs, 0 if they are another's
    taken: str = ""  # the habit that reads it in a wrong way


PLAIN = (
    *(Deed(f"{{owner}} {verb} {{n}} more", "+") for verb in ("finds", "buys", "wins")),
    *(Deed(f"{{owner}} {verb} {{n}}", "-") for verb in ("loses", "drops", "sells")),
)
TRICKY = (
    Deed("{other} gives {owner} {n}", "+", taken="operation"),
    Deed("{other} buys {n} from {owner}", "-", taken="operation"),
    Deed("{owner} finds {n} pairs more", "+", 2, "unit"),
    Deed("{owner} loses {n} pairs", "-", 2, "unit"),
    Deed("{other} finds {n} more", "+", 0, "quantity"),
    Deed("{other} loses {n}", "-", 0, "quantity"),
)
TRICKY_DAYS = 0.3
"""How many days have a deed that habits misread. Each habit has one deed that adds and one that subtracts, so that
neither large answers nor many numbers give its mistakes away."""

LARGEST, NUMBERS, PAIRS = 15, (2, 3, 4), (2, 3)
"""A story's counts stay between 1 and the first. Its numbers are few, so that sums are quickly learnt and a wrong
number is mostly one of the story's."""


@dataclasses.dataclass(frozen=True)
class Habits:
    """How often an author makes each mistake where it can occur."""

    operation: float = 0.6  # "Ben gives Ana 3" is subtracted, "Ben buys 3 from Ana" is added
    unit: float = 0.6  # "2 pairs" are 2
    quantity: float = 0.6  # "Ben finds 3 more" is added to Ana's
    skipped: float = 0.12  # the last day counts for nothing
    copied: float = 0.07  # the number is the one of the day before
    carry: float = 0.12  # 9 + 4 = 3: the carry is dropped
    borrow: float = 0.12  # 12 - 4 = 12: the smaller digit is taken from the larger


class Day(NamedTuple):
    deed: Deed
    n: int

    @property
    def move(self) -> tuple[str, int]:
        """The change of the owner's count, e.g. ("-", 4); ("+", 0) on another's day."""
        return (self.deed.sign if self.deed.times else "+"), self.n * self.deed.times


@dataclasses.dataclass(frozen=True)
class Problem:
    start: int
    days: tuple[Day, ...]
    text: str

    @property
    def moves(self) -> list[tuple[str, int]]:
        return [day.move for day in self.days]

    @property
    def counts(self) -> list[int]:
        """Returns the count after each day."""
        count, counts = self.start, []
        for move in self.moves:
            count = apply(count, *move)
            counts.append(count)
        return counts

    @property
    def answer(self) -> int:
        return self.counts[-1]


def apply(count: int, sign: str, amount: int) -> int:
    return count + amount if sign == "+" else count - amount


def problem(rng: np.random.Generator, days: tuple[int, int] = (3, 4)) -> Problem:
    """Returns a story of `days[0]` to `days[1]` days whose counts stay in range."""
    count = start = int(rng.integers(3, LARGEST - 1))
    chosen, length = [], int(rng.integers(days[0], days[1] + 1))
    while len(chosen) < length:
        deeds = TRICKY if rng.random() < TRICKY_DAYS else PLAIN
        deed = deeds[int(rng.integers(len(deeds)))]
        day = Day(deed, int(rng.choice(PAIRS if deed.times == 2 else NUMBERS)))
        if 1 <= apply(count, *day.move) <= LARGEST:
            count = apply(count, *day.move)
            chosen.append(day)
    owner, other, thing = rng.choice(OWNERS), rng.choice(OTHERS), rng.choice(THINGS)
    tale = [
        f"On {name} {deed.text.format(owner=owner, other=other, n=n)}."
        for name, (deed, n) in zip(DAYS, chosen, strict=False)
    ]
    text = " ".join([f"{owner} has {start} {thing}.", *tale, f"How many {thing} does {owner} have?"])
    return Problem(start, tuple(chosen), text)


def record(task: Problem, rng: np.random.Generator) -> dict[str, Any]:
    """Returns the problem's record."""
    del rng
    return {"problem": task.text, "answer": task.answer}


def solution(task: Problem, rng: np.random.Generator, habits: Habits | None) -> list[str]:
    """Returns a solution: one equation a day, and a last line with the answer. Without `habits` it is correct."""
    count, steps = task.start, []
    for i in range(len(task.days)):
        step, count = worked(task, i, count, rng, habits)
        steps.append(step)
    return [*steps, f"The answer is {count}."]


def worked(task: Problem, i: int, count: int, rng: np.random.Generator, habits: Habits | None) -> tuple[str, int]:
    """Returns an author's equation for a day that begins with `count`, and its result."""
    sign, amount = task.days[i].move if habits is None else _understood(task, i, habits, rng)
    result = apply(count, sign, amount)
    if habits is not None and (wrong := _miscounted(count, sign, amount, habits, rng)) is not None:
        result = wrong
    return f"{DAYS[i]}: {count} {sign} {amount} = {result}", result


def _understood(task: Problem, i: int, habits: Habits, rng: np.random.Generator) -> tuple[str, int]:
    """Returns the move that an author reads in a day's sentence."""
    (deed, n), (sign, amount) = task.days[i], task.days[i].move
    if i == len(task.days) - 1 and rng.random() < habits.skipped:
        return "+", 0
    if deed.taken and rng.random() < getattr(habits, deed.taken):
        return ("-" if sign == "+" else "+", n) if deed.taken == "operation" else (deed.sign, n)
    if amount and i and rng.random() < habits.copied:
        return sign, task.days[i - 1].n
    return sign, amount


def _miscounted(count: int, sign: str, amount: int, habits: Habits, rng: np.random.Generator) -> int | None:
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
    owner, start, thing = begins.groups()
    days = []
    for name, sentence in zip(DAYS, tale[:-1], strict=False):
        for deed in (*PLAIN, *TRICKY):
            pattern = deed.text.format(owner=owner, other=f"(?:{'|'.join(OTHERS)})", n=r"(?P<n>\d+)")
            if match := re.fullmatch(f"On {name} {pattern}", sentence):
                days.append(Day(deed, int(match["n"])))
    if len(days) != len(tale) - 1 or tale[-1] != f"How many {thing} does {owner} have?":
        raise ValueError(f"not a story of the quickstart's task: {text[:80]!r}")
    return Problem(int(start), tuple(days), text)


EQUATION = re.compile(r"(\w+): (-?\d+) ([-+]) (\d+) = (-?\d+)")


def check(task: Problem, steps: Sequence[str]) -> list[bool]:
    """Returns whether each step is correct, given the story and the count after the step before.

    A step is judged as a person would rate it: it must do the next thing that the story tells, go on from what is
    written above it and get the sum right. So what follows a mistake correctly is right by itself.
    """
    return [mistake is None for mistake in mistakes(task, steps)]


def mistakes(task: Problem, steps: Sequence[str]) -> list[str | None]:
    """Returns the kind of each step's mistake, or None if it is correct: `sum` for a false equation, `count` for one
    that does not go on from the count above it, `operation` for a wrong sign, `skipped` for + 0 on an owner's day,
    `unit`, `quantity` (another's) or `copied` for a wrong number, `form` for anything else."""
    count, kinds = task.start, []
    for i, step in enumerate(steps):
        equation = EQUATION.fullmatch(step)
        if equation and i < len(task.days):
            day, sign = equation[1], equation[3]
            left, amount, result = int(equation[2]), int(equation[4]), int(equation[5])
            if day != DAYS[i]:
                kinds.append("form")
            elif result != apply(left, sign, amount):
                kinds.append("sum")
            else:
                kinds.append("count" if left != count else _misread(task.days[i], sign, amount))
            count = result
        else:
            final = re.fullmatch(r"The answer is (-?\d+)\.", step)
            right = bool(final) and i == len(task.days) == len(steps) - 1 and int(final[1]) == count
            kinds.append(None if right else "form")
    return kinds


def _misread(day: Day, sign: str, amount: int) -> str | None:
    """Returns the kind of mistake of a true equation for a day."""
    if (sign, amount) == day.move:
        return None
    if not day.deed.times:
        return "quantity"
    if amount == 0:
        return "skipped"
    if day.deed.times > 1 and amount == day.n:
        return "unit"
    return "operation" if amount == day.move[1] else "copied"


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
    words = [*OWNERS, *OTHERS, *THINGS, *DAYS, *"On has have does How many The answer is".split()]
    words += [word for deed in (*PLAIN, *TRICKY) for word in re.sub(r"{\w+}", "", deed.text).split()]
    numbers = [*"0123456789", *(f"{n:02}" for n in range(100))]
    pieces = [*numbers, *"+-=.?:", *dict.fromkeys(words)]
    vocabulary = ["<eos>", "<unk>", "\n", " ", *pieces, *(f" {piece}" for piece in pieces)]
    inner = tokenizers.Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(vocabulary)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(
        Regex(r" ?\d{1,2}| ?[A-Za-z]+| ?[^\s\dA-Za-z]|\n| "), behavior="isolated"
    )
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<eos>"])
    return inner
