"""Programs that find the first mistake in chains on four tasks of BIG-Bench-Mistake, without a model.

`first_mistake(task, problem, steps)` follows what the steps say, beside what is true: brackets and their stack, an
expression and its value, who holds what after each swap, words and their order. It knows the forms in which the
benchmark's chains are written. What it cannot read it takes as right. The answers are PaLM 2's, so that a chain may
hold its own words; people found the mistakes that the benchmark counts.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence

Checker = Callable[[str, Sequence[str]], int]
"""(problem, steps) -> the index of the first wrong step, -1 for none."""


def first_mistake(task: str, problem: str, steps: Sequence[str]) -> int | None:
    """Returns the index of the first wrong step, -1 for none; None for a task that no program decides."""
    return CHECKERS[task](problem, steps) if task in CHECKERS else None


# ------------------------------------------------------------------------------------------------------- brackets

PAIRS = dict(zip("([{<", ")]}>", strict=True))


def brackets(problem: str, steps: Sequence[str]) -> int:
    """Steps are `X ; stack: S` for each bracket, then the final stack, what to pop, and the closing brackets."""
    symbols, stack, at = problem.split(), [], 0
    for i, step in enumerate(steps):
        if read := re.fullmatch(r"\s*(\S)\s*;\s*stack:(.*)", step):
            if at >= len(symbols) or read[1] != symbols[at]:
                return i
            if symbols[at] in PAIRS:
                stack.append(symbols[at])
            elif stack:
                stack.pop()
            at += 1
            if _symbols(read[2]) != stack:
                return i
        elif stack_match := re.search(r'final stack is "(.*)"', step):
            if at < len(symbols) or _symbols(stack_match[1]) != stack:
                return i
        elif "pop out" in step:
            if re.findall(r'"(.)"', step) != stack[::-1]:
                return i
        elif "the answer is" in step:
            closing = [PAIRS[symbol] for symbol in stack[::-1]]
            before, _, answer = step.partition("the answer is")
            if answer.split() != closing or re.findall(r'"(.)"', before) not in ([], closing):
                return i
    return -1


def _symbols(text: str) -> list[str]:
    return [] if text.strip() in ("empty", "") else text.split()


# ----------------------------------------------------------------------------------------------------- arithmetic

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.USub: operator.neg,
              ast.UAdd: operator.pos}  # fmt: skip


def value_of(text: str, names: Mapping[str, int]) -> int | None:
    """Returns the value of sums, differences and products of whole numbers and names; None for anything else."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, names)
    except (SyntaxError, ValueError, KeyError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, names: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand, names))
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, names), _value(node.right, names))
    raise KeyError(type(node))


def arithmetic(problem: str, steps: Sequence[str]) -> int:
    """The first step writes the expression in names, the others calculate these one by one, and the last one all."""
    whole, names = value_of(problem.rstrip(" ="), {}), {}
    for i, step in enumerate(steps):
        text, _, answer = step.partition("So the answer is")
        if i == 0 and (match := re.search(r'written as "([^"]*)"', text)):
            for name, expression in re.findall(r"\b([A-Z]) = ([^=A-Z]+?)(?:,| and|\.$|$)", text):
                if (value := value_of(expression, {})) is not None:
                    names[name] = value
            written = value_of(match[1], names)
            if written is not None and written != whole:
                return i
            continue
        values = [value_of(part.rstrip(" .") if part else "", names) for part in _equated(text)]
        known = [value for value in values if value is not None]
        if len(set(known)) > 1 or (answer and known and known[0] != whole):
            return i
        stated = value_of(answer.strip(" ."), {}) if answer else None
        if stated is not None and stated != whole:
            return i
    return -1


def _equated(text: str) -> list[str]:
    """Returns the expressions between equals signs, without the words before the first."""
    first, *others = text.split("=")
    return [re.sub(r".*(?:calculate|equation is)", "", first), *others]


# ---------------------------------------------------------------------------------------------------------- swaps


def swaps(problem: str, steps: Sequence[str]) -> int:
    """Steps are who holds what: at the start, after each swap (some tell those that changed), and the answer's."""
    people = re.findall(r"[A-Z]\w+", re.split(r" are | friends", problem)[0])
    begun, _, rest = problem.partition("\n")
    holds = {}
    for person in people:
        if got := re.findall(rf"\b{person} (?:gets|has|is holding|is dancing with|is playing|is) (.+?)(?:, and|,|\.)",
                             begun + "."):  # fmt: skip
            holds[person] = _thing(got[-1])
    pairs = re.findall(r"([A-Z]\w+) and ([A-Z]\w+) (?:swap|switch|trade)", rest)
    asked = re.search(r"\bAt the end of .*?([A-Z]\w+) (?:has|is)", rest, re.DOTALL)
    options = {letter: _thing(text) for letter, text in re.findall(r"(\([A-Z]\)) ([^\n]+?)\.?(?:\n|$)", rest)}
    if len(holds) < len(people) or not pairs:
        return -1
    for i, step in enumerate(steps):
        if 0 < i <= len(pairs):
            a, b = pairs[i - 1]
            if a in holds and b in holds:
                holds[a], holds[b] = holds[b], holds[a]
        assignments = re.findall(r"\b([A-Z]\w*): ([^,:]+?)(?=,|\.\s|\.?$| So the)", step)
        for name, thing in assignments:
            person = next((person for person in people if person == name or person[0] == name), None)
            if person and _thing(thing) and not _alike(_thing(thing), holds[person]):
                return i
        if (answer := re.search(r"answer is (\([A-Z]\))", step)) and asked:
            person = asked[1]
            if answer[1] in options and person in holds and not _alike(options[answer[1]], holds[person]):
                return i
    return -1


def _thing(text: str) -> frozenset[str]:
    """Returns the words of a thing that tell it from others."""
    skipped = {"the", "a", "an", "ball", "present", "dancing", "with", "playing"}
    return frozenset(word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in skipped)


def _alike(first: frozenset[str], second: frozenset[str]) -> bool:
    return first <= second or second <= first


# ---------------------------------------------------------------------------------------------------------- words

_LETTERS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()


_PART = r'(?:\(\d+\) )?(?:"[^"]+"|\[[^\]]*\])'


def words(problem: str, steps: Sequence[str]) -> int:
    """Steps read letters (`"word": "l" (12)`) and write orders of words and of parts that are not sorted yet.

    The words are those that the first step reads: the benchmark's people let a word stand that it misspells there.
    """
    expected = sorted(problem.split())
    for i, step in enumerate(steps):
        place = next((k for k, name in enumerate(_LETTERS) if f"{name} letter" in step), None)
        read = re.findall(r'"([^"]+)": "(\w)" \((\d+)\)', step)
        for word, letter, number in read:
            right = word[place : place + 1] if place is not None else letter
            if letter != right or ord(letter) - ord("a") + 1 != int(number):
                return i
        if i == 0 and read:
            if len(read) != len(expected):
                return i
            expected = sorted(word for word, _, _ in read)
        for before, order in re.findall(rf"(.*?)({_PART}(?: < {_PART})+)", step):
            parts = [re.findall(r'"([^"]+)"', part) for part in order.split(" < ")]
            if not all(parts) or any(max(part) > min(after) for part, after in zip(parts, parts[1:], strict=False)):
                return i
            whole = "Hence" in before or "We now have" in before and "subpart" not in step
            if whole and sorted(word for part in parts for word in part) != expected:
                return i
        if (answer := re.search(r"answer is (.+?)\.?$", step)) and answer[1].split() != expected:
            return i
    return -1


CHECKERS: dict[str, Checker] = {
    "dyck_languages": brackets,
    "multistep_arithmetic": arithmetic,
    "tracking_shuffled_objects": swaps,
    "word_sorting": words,
}
