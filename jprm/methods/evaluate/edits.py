"""Edits of correct chains: some keep the meaning, some make one step wrong, some produce nonsense.

Scores should stay the same after the first kind, fall at the wrong step of the second, and be low for the third.
PRM-BiasBench (Bamba et al. 2025, "Reward Under Attack") edits ProcessBench in the first two ways with a language model;
these edits are rules. If a rule cannot be sure to keep the meaning, it skips the chain: a PRM that reads well must not
get a finding.

An edit returns a new record, or `None` if it skips the chain. If the meaning is kept it has `pairs` of (step before,
step after) that end at the same point of the argument and should score the same. If a step is made wrong, `at` is its
index. `edited` adds `edit` (its name) and `of` (the index of its chain).
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jprm.tree import ReasoningTree

Record = dict[str, Any]
"""A chain: `problem`, a string, and `steps`, a list of strings."""

# ---- The meaning is kept.


def whitespace(chain: Record) -> Record | None:
    """Doubles every space, and ends each step with a newline.

    Returns a new record with `problem`, `steps` and `pairs`: a tuple (i, i) for each step i, from 0.
    """
    return _same_steps(chain, [step.replace(" ", "  ") + "\n" for step in chain["steps"]])


_DOLLARS = re.compile(r"(?<![\\$\d])\$(?![\s$,.;:)])((?:\\.|[^\\$\n])+?)(?<!\s)\$(?![\d$])")
_PARENTHESES = re.compile(r"(?<!\\)\\\(\s*+(?!\\\))(.{1,2000}?)\s*\\\)")
_TEXT = re.compile(r"\\(?:text\w*|mbox|operatorname\*?|begin|end)\s*\{[^{}]*\}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3}|\b(?:an|at|by|if|in|is|of|on|or|to)\b", re.IGNORECASE)


def latex(chain: Record) -> Record | None:
    r"""Rewrites `$x$` as `\(x\)`, or the reverse. Returns as `whitespace`; `None` if no step changes.

    A step stays unchanged if a dollar sign may mean money, e.g. `$5 + $3 = $8`.
    """
    steps = [_in_parentheses(step) for step in chain["steps"]]
    if steps == chain["steps"]:
        steps = [step if "$" in step else _PARENTHESES.sub(r"$\1$", step) for step in chain["steps"]]
    return _same_steps(chain, steps)


def _in_parentheses(step: str) -> str:
    pairs = list(_DOLLARS.finditer(step))
    unpaired = re.search(r"(?<!\\)\$", _DOLLARS.sub("", re.sub(r"(?s)\$\$.+?\$\$", "", step)))
    words = any(_WORD.search(_COMMAND.sub(" ", _TEXT.sub(" ", pair[1]))) for pair in pairs)
    return step if unpaired or words or r"\(" in step else _DOLLARS.sub(r"\\(\1\\)", step)


VARIABLES = "xyznk"
NEW_NAMES = "uvwqrs"

_MATHEMATICS = re.compile(
    rf"\$\$.+?\$\$|{_DOLLARS.pattern}|\$\s[^$]+\s\$|\\\(.{{1,2000}}?\\\)|\\\[.{{1,2000}}?\\\]"
    r"|\\begin\{(\w+\*?)\}.{1,2000}?\\end\{\2\}",
    re.DOTALL,
)
_RUN = re.compile(r"\\\\|\\[A-Za-z]+|[^\W\d_]+")  # a line break, a command, a run of letters
_OPERATOR = r"(?:[=+/^<>|·×÷≤≥≠≈]|(?<!\*)\*(?!\*))"
_FORMULA_BEFORE = re.compile(rf"(?:[\d_$]|\w\(|{_OPERATOR}\s*|\S\s+[-−]\s+)$")
_FORMULA_AFTER = re.compile(rf"[\d_($]|\s*{_OPERATOR}|\s+[-−]\s+\S")
_SHORT_WORDS = {"an", "by", "in", "my", "no", "on", "why", "try"}


def rename(chain: Record) -> Record | None:
    """Renames one of the variables x, y, z, n, k, also in the problem. Returns as `whitespace`.

    Returns `None` if no variable is safe to rename. A letter is skipped if it may be a factor (the x of `2bx`), a times
    sign (`3 x 4`) or part of a name (`x-axis`, `nth`).
    """
    texts = [chain["problem"], *chain["steps"]]
    runs = [run for text in texts for run in _runs(text)]
    single = [run for run, _ in runs if len(run) == 1]
    factors = {letter for run, product in runs if product for letter in run}
    safe = [
        letter for letter in dict.fromkeys(single)
        if letter in VARIABLES and letter not in factors and not any(_otherwise_used(letter, text) for text in texts)
    ]  # fmt: skip
    new = [letter for letter in NEW_NAMES if letter not in factors.union(single)]
    if not safe or not new:
        return None
    problem, *steps = (_RUN.sub(lambda run: new[0] if run[0] == safe[0] else run[0], text) for text in texts)
    return _same_steps(chain, steps, problem)


def _runs(text: str) -> Iterator[tuple[str, bool]]:
    """Yields runs of letters, and whether each may be a product of variables.

    In mathematics, every run of at least two letters may be. Elsewhere it may if it touches an operator or digit, or is
    not a word, e.g. `bx` and `nth`.
    """
    formulas = [match.span() for match in _MATHEMATICS.finditer(text)]
    words = " ".join(match[0] for match in _TEXT.finditer(text))  # of \text{...}, read after the rest
    text = _TEXT.sub(lambda match: " " * len(match[0]), text) + f" {words}"
    for match in _RUN.finditer(text):
        run, start, end = match[0], match.start(), match.end()
        if not run.startswith("\\"):
            word = run.lower() in _SHORT_WORDS or (len(run) > 2 and bool(re.search("[aeiou]", run.lower())))
            in_formula = _within(start, formulas)
            beside = _FORMULA_BEFORE.search(text[max(start - 6, 0) : start]) or _FORMULA_AFTER.match(text, end)
            yield run, len(run) > 1 and bool(in_formula or beside or not word)


def _within(place: int, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether low < place < high for one of the sorted (low, high) spans."""
    before = bisect.bisect_left(spans, (place, 0))
    return before > 0 and place < spans[before - 1][1]


def _otherwise_used(letter: str, text: str) -> bool:
    """Whether a lone letter may be a times sign, a unit (`5k`) or part of a name."""
    alone = rf"(?<![^\W\d_])(?<!\\){letter}(?![^\W\d_])"
    times = rf"[\d)%]\s*{alone}\s*[\d$]|[\w)%]\s+{alone}\s+(?:\$?\d|\(|[^\W\d_](?![^\W\d_]))"
    name = rf"{alone}(?:['’]|(?:\$|\\\))?-[A-Za-z]{{2}})|[A-Za-z]{{2}}-{alone}"
    unit = rf"\d{alone}(?!\s*[-+*/=^)<>])"
    return bool(
        re.search(name, text)
        or re.search(unit, _MATHEMATICS.sub(" ", text))
        or (letter == "x" and re.search(times, text))
    )


def merge(chain: Record) -> Record | None:
    """Joins the first two steps by a newline, then the next two, etc.; `None` if there is only one step.

    Returns a copy with other `steps`, and `pairs`: tuples (last step before, step after), from 0, of all pairs and
    of a last step that is left alone. Other keys, e.g. `labels`, stay as they were.
    """
    steps = chain["steps"]
    if len(steps) < 2:
        return None
    merged = ["\n".join(steps[i : i + 2]) for i in range(0, len(steps), 2)]
    pairs = [(min(2 * j + 1, len(steps) - 1), j) for j in range(len(merged))]
    return chain | {"steps": merged, "pairs": pairs}


_SENTENCE = re.compile(
    r"(?:(?<=[.;?])|(?<=[a-z]{2}!))(?<!\b[A-Z][a-z]\.)(?<!\bMrs\.)\s+(?=[A-Z$]|\\[(\[])"  # "5! + 2" and "Mr. A" are one
)


def split(chain: Record) -> Record | None:
    """Splits every step with several sentences in two, about the middle; `None` if there is none.

    Returns a copy with other `steps`, and `pairs`: tuples (step before, its last part after), from 0, of all steps.
    """
    steps, pairs = [], []
    for i, step in enumerate(chain["steps"]):
        formulas = [match.span() for match in _MATHEMATICS.finditer(step)]
        ends = [end for end in _SENTENCE.finditer(step) if not _within(end.end(), formulas)]
        middle = ends[(len(ends) - 1) // 2] if ends else None
        steps += [step[: middle.start()], step[middle.end() :]] if middle else [step]
        pairs.append((i, len(steps) - 1))
    return chain | {"steps": steps, "pairs": pairs} if len(steps) > len(chain["steps"]) else None


def wordy(chain: Record) -> Record | None:
    """Puts an empty phrase before each step. Returns as `whitespace`."""
    return _same_steps(chain, [f"Let us now look at this carefully. {step}" for step in chain["steps"]])


def _same_steps(chain: Record, steps: list[str], problem: str | None = None) -> Record | None:
    """Returns the chain with new texts for the same steps, if a text changes."""
    if steps == chain["steps"]:
        return None
    pairs = [(i, i) for i in range(len(steps))]
    return {"problem": chain["problem"] if problem is None else problem, "steps": steps, "pairs": pairs}


Edit = Callable[[Record], Record | None]
"""Takes `problem` and `steps`. Returns a new record of these with `pairs` (index before, index after) if the meaning is
kept, or `at`, the index of the wrong step; `None` if the chain is skipped."""
MEANING_KEPT: dict[str, Edit] = {edit.__name__: edit for edit in (whitespace, latex, rename, merge, split, wordy)}

# ---- One step becomes wrong.

_NUMBER = re.compile(r"(?<![\w.])(\d{1,9})(?![\w]|\.\d)")
_IS = re.compile(r"(?<=[A-Za-z0-9$)] )(is|are|equals)(?= )")


def number(chain: Record) -> Record | None:
    """Adds one to the last whole number of the first step, from the middle on, that has one; else `None`.

    Returns a new record with `problem`, `steps` and `at`, the index of the changed step.
    """
    return _made_wrong(chain, _NUMBER, lambda number: str(int(number) + 1), last=True)


def negated(chain: Record) -> Record | None:
    """Negates the first "is", "are" or "equals" in the first step, from the middle on, that has one; else `None`.

    Returns a new record with `problem`, `steps` and `at`, the index of the changed step.
    """
    denials = {"is": "is not", "are": "are not", "equals": "does not equal"}
    return _made_wrong(chain, _IS, denials.__getitem__, last=False)


def unfounded(chain: Record) -> Record | None:
    """Inserts a false step in the middle of the chain, at index `at`; `None` if the chain has fewer than two steps.

    Returns a new record with `problem`, `steps` and `at`.
    """
    steps, middle = chain["steps"], len(chain["steps"]) // 2
    if not middle:
        return None
    false = "By a well-known theorem, all of the quantities above are equal to each other."
    return {"problem": chain["problem"], "steps": [*steps[:middle], false, *steps[middle:]], "at": middle}


MEANING_LOST: dict[str, Edit] = {edit.__name__: edit for edit in (number, negated, unfounded)}


def _made_wrong(chain: Record, what: re.Pattern, change: Callable[[str], str], *, last: bool) -> Record | None:
    """Changes one match in the first matching step from the middle on, if there is one."""
    steps = list(chain["steps"])
    for at in range(len(steps) // 2, len(steps)):
        places = list(what.finditer(steps[at]))
        if places:
            place = places[-1 if last else 0]
            steps[at] = steps[at][: place.start()] + change(place[1]) + steps[at][place.end() :]
            return {"problem": chain["problem"], "steps": steps, "at": at}
    return None


# ---- Nonsense.


def nonsense(chains: Sequence[Record], seed: int) -> list[Record]:
    """Returns variants of every chain: `shuffled`, `other_problem`, `repeated` and `bare_answer`.

    They are its steps in random order, the steps of another chain, one step repeated, and the last step alone. Variants
    equal to the chain are left out, and `other_problem` if all chains have one problem. Keys: `problem` (always the
    chain's own), `steps`, `edit` (the variant) and `of` (the chain's index).
    """
    rng, records = np.random.default_rng(seed), []
    for i, chain in enumerate(chains):
        steps = chain["steps"]
        other = next((c for c in [*chains[i + 1 :], *chains[:i]] if c["problem"] != chain["problem"]), chain)
        variants = {
            "shuffled": [steps[k] for k in rng.permutation(len(steps))],
            "other_problem": other["steps"],
            "repeated": [steps[len(steps) // 2]] * len(steps),
            "bare_answer": steps[-1:],
        }
        records += [
            {"problem": chain["problem"], "steps": list(variant), "edit": name, "of": i}
            for name, variant in variants.items()
            if list(variant) != list(steps)
        ]
    return records


def edited(chains: Sequence[ReasoningTree], seed: int) -> list[Record]:
    """Returns the records of every edit of each chain (a tree without branches); skipped ones are left out.

    Each has `problem`, `steps`, `edit` (e.g. `whitespace`) and `of`, the chain's index. Records that keep the meaning
    also have `pairs`, and records with a step made wrong `at`; those of `nonsense` come last.
    """
    plain = [{"problem": chain.problem, "steps": [node.text for node in chain.nodes]} for chain in chains]
    kept = [
        record | {"edit": name, "of": i}
        for i, chain in enumerate(plain)
        for name, edit in (MEANING_KEPT | MEANING_LOST).items()
        if (record := edit(chain)) is not None
    ]
    return kept + nonsense(plain, seed)
