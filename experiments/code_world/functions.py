"""The code world's task: short functions of a list, told sentence by sentence, with systematic bugs, and a checker.

A problem says what `f(xs)` does ("Keep at least 3. Sort downwards. Return the list."), and a solution does one sentence
a line. A policy that learns from these solutions has their authors' habits: the bounds of a comparison, the order of a
sort, the empty list. So on problems with several occasions for them the most common program is wrong.

The checker knows nothing of how a solution was made: it reads the problem and every line. It never runs code.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

PRELUDE = "def f(xs):"

OPERATIONS = {
    "Keep at least {}.": ("xs = [x for x in xs if x >= {}]", "xs = [x for x in xs if x > {}]"),
    "Keep up to {}.": ("xs = [x for x in xs if x <= {}]", "xs = [x for x in xs if x < {}]"),
    "Keep above {}.": ("xs = [x for x in xs if x > {}]", None),
    "Keep below {}.": ("xs = [x for x in xs if x < {}]", None),
    "Add {}.": ("xs = [x + {} for x in xs]", None),
    "Multiply by {}.": ("xs = [x * {} for x in xs]", None),
    "Take the first {}.": ("xs = xs[:{}]", None),
    "Take the last {}.": ("xs = xs[-{}:]", "xs = xs[{}:]"),
    "Drop the first {}.": ("xs = xs[{}:]", None),
    "Sort upwards.": ("xs = sorted(xs)", None),
    "Sort downwards.": ("xs = sorted(xs)[::-1]", "xs = sorted(xs)"),
}
"""What a sentence says: the line that does it, and the line that those with a bad habit write."""

RETURNS = {
    "Return the list.": ("return xs", None),
    "Return the sum.": ("return sum(xs)", None),
    "Return the largest or 0.": ("return max(xs, default=0)", "return max(xs)"),
}

AMOUNTS = (2, 3, 4, 5, 6)
LARGEST, INPUTS = 9, 8
"""The numbers of an input are 0 to 9. A problem has so many tests, each with one input; one of them is empty."""


def _inputs(rng: np.random.Generator, count: int) -> list[list[int]]:
    return [[], *(rng.integers(0, LARGEST + 1, rng.integers(4, 9)).tolist() for _ in range(count - 1))]


PROBES = _inputs(np.random.default_rng(0), 4 * INPUTS)
"""On these every line of a problem matters."""


@dataclasses.dataclass(frozen=True)
class Habits:
    """How often an author makes each mistake where it can occur."""

    trap: float = 0.6  # the second line of `OPERATIONS`
    slip: float = 0.02  # an amount is off by one


@dataclasses.dataclass(frozen=True)
class Problem:
    sentences: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        return " ".join(sentence.format(amount) for sentence, amount in self.sentences)


def problem(rng: np.random.Generator, operations: tuple[int, int] = (3, 5)) -> Problem:
    """Returns a function of `operations[0]` to `operations[1]` operations and a return, without two equal in a row.

    Every operation matters: no change of one line goes unseen on `PROBES`. Else most bugs would pass all tests.
    """
    while True:
        chosen: list[tuple[str, int]] = []
        for _ in range(int(rng.integers(operations[0], operations[1] + 1))):
            names = [name for name in OPERATIONS if not chosen or name != chosen[-1][0]]
            name, amount = str(rng.choice(names)), int(rng.choice(AMOUNTS))
            chosen.append((name, amount if "{}" in name else 0))
        candidate = Problem((*chosen, (str(rng.choice(list(RETURNS))), 0)))
        if exposed(candidate, PROBES):
            return candidate


def exposed(task: Problem, inputs: Sequence[list[int]]) -> bool:
    """Returns whether the inputs show every change of one line: left out, of a bad habit, or with an amount off by
    one."""
    right = solution(task, np.random.default_rng(0), None)
    expected = [_result(right, xs) for xs in inputs]
    return not any(
        all(_result([*right[:i], *line, *right[i + 1 :]], xs) == y for xs, y in zip(inputs, expected, strict=True))
        for i, (sentence, amount) in enumerate(task.sentences)
        for line in _changes(sentence, amount)
    )


def _changes(sentence: str, amount: int) -> list[list[str]]:
    """Returns what may stand in place of a sentence's line."""
    right, wrong = (OPERATIONS | RETURNS)[sentence]
    changes = [[right.format(amount + by)] for by in (-1, 1) if "{}" in right]
    changes += [[wrong.format(amount)]] if wrong else []
    return changes + ([[]] if sentence in OPERATIONS else [])


def _result(lines: Sequence[str], xs: list[int]) -> Any:
    """Returns what a program gives; the error's name where it raises."""
    try:
        for line in lines:
            xs = _compiled(line.strip())(xs)
    except ValueError:
        return "ValueError"
    return xs


@functools.cache
def _compiled(line: str) -> Callable[[list[int]], Any]:
    return eval("lambda xs: " + line.removeprefix("return ").removeprefix("xs = "))  # our own code


def solution(task: Problem, rng: np.random.Generator, habits: Habits | None) -> list[str]:
    """Returns a solution, one line a sentence. Without `habits` it is correct."""
    steps = []
    for sentence, amount in task.sentences:
        right, wrong = (OPERATIONS | RETURNS)[sentence]
        if habits and "{}" in right and rng.random() < habits.slip:
            amount += int(rng.choice([-1, 1]))
        line = wrong if habits and wrong and rng.random() < habits.trap else right
        steps.append("    " + line.format(amount))
    return steps


def record(task: Problem, rng: np.random.Generator) -> dict[str, Any]:
    """Returns the problem's record, whose tests are calls with what a correct solution gives."""
    right, inputs = solution(task, rng, None), [[]]
    while not exposed(task, inputs):
        inputs = _inputs(rng, INPUTS)
    tests = [f"assert f({xs}) == {_result(right, xs)}" for xs in inputs]
    return {"problem": task.text, "prelude": PRELUDE, "tests": tests}


def parse(text: str) -> Problem:
    """Returns the problem of a text. Raises ValueError for any other text."""
    sentences = []
    for part in re.findall(r"[^.]+\.", text):
        sentence, amounts = re.sub(r"\d+(?=\.)", "{}", part.strip()), re.findall(r"\d+(?=\.)", part)
        sentence = part.strip() if part.strip() in RETURNS else sentence
        if sentence not in OPERATIONS | RETURNS:
            raise ValueError(f"not a problem of the code world: {text[:80]!r}")
        sentences.append((sentence, int(amounts[0]) if "{}" in sentence else 0))
    return Problem(tuple(sentences))


def check(task: Problem, steps: Sequence[str]) -> list[bool]:
    """Returns whether each line does what its sentence says.

    A line is judged by itself: one that does its own sentence after a bug is right.
    """
    right = []
    for i, step in enumerate(steps):
        inside = i < len(task.sentences)
        sentence, amount = task.sentences[i] if inside else ("", 0)
        right.append(inside and _meaning(step) == _meaning("    " + (OPERATIONS | RETURNS)[sentence][0].format(amount)))
    return right


def _meaning(line: str) -> str:
    """Returns the line with comparisons of whole numbers in one form: x >= 3 is x > 2."""
    line = re.sub(r">= (\d+)", lambda match: f"> {int(match[1]) - 1}", line)
    return re.sub(r"<= (\d+)", lambda match: f"< {int(match[1]) + 1}", line)


def labels(task: Problem, steps: Sequence[str]) -> list[float]:
    """Returns the checker's labels, each line by itself."""
    return [float(right) for right in check(task, steps)]


FRAGMENTS = (
    *("    xs = [x", " for x in xs", " if x", "]", "    xs = xs[", "    xs = sorted(xs)", "[::-1]", "    return xs"),
    *("    return sum(xs)", "    return max(xs", ", default=0)", ")"),
    *(" >= ", " <= ", " > ", " < ", " + ", " * ", ":", "-"),
    *("Keep", " at least ", " up to ", " above ", " below ", "Add ", "Multiply by ", "Take the", "Drop the", " first "),
    *(" last ", "Sort", " upwards", " downwards", "Return the", " list", " sum", " largest or 0"),
    *(".", " ", "\n", *(str(number) for number in range(10))),
)
"""Tokens: pieces of lines and sentences. A solution has about 25 of them, its problem about 20."""


def tokenizer() -> tokenizers.Tokenizer:
    """Returns a tokenizer of `FRAGMENTS`, the longest that fits first."""
    vocabulary = ["<eos>", "<unk>", *FRAGMENTS]
    inner = tokenizers.Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(vocabulary)}, unk_token="<unk>"))
    longest_first = sorted(FRAGMENTS, key=len, reverse=True)
    pattern = "|".join(piece.replace("\n", "\\n") if piece == "\n" else re.escape(piece) for piece in longest_first)
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<eos>"])
    return inner
