"""Readers of MR-Ben, BIG-Bench-Mistake and Hard2Verify, which give the first mistake of each chain.

Records look like ProcessBench's: label 1 before the first wrong step, 0 at it and null after it, and `first_error` (-1
if every step is right). `task` is the subject or task, for separate figures. Hard2Verify labels every step.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

from jprm.methods.data.reader import NoOptions, Reader, Record, take, until_error
from jprm.tree import RecordError

# ---- MR-Ben (Zeng et al. 2024, arXiv 2406.13975; dvlab-research/Mr-Ben).

_NUMBER = re.compile(r"\s*Step\s*(\d+)")


def parse_mr_ben(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields one solution; its steps are the non-blank list entries, or the non-blank lines of a program.

    The first error is the step with the given number, or the first program line equal to the given text (ambiguous in 9
    of 164 programs). If no line matches, `first_error` is null and no step is labelled: the program is wrong at an
    unknown place. Keys: `problem` (with its options), `steps`, `labels` (1, 0 at the first error, then null),
    `correct`, `first_error` (index, -1 without error), `task`, and `question_id` and `generator` if given. Raises
    RecordError, at `where`, if a field is missing or malformed.
    """
    verdict = take(item, "Model_Solution_Correctness", str, where)
    if verdict not in ("correct", "incorrect"):
        raise RecordError(where, "Model_Solution_Correctness", f"is {verdict!r}", "Is this file of MR-Ben?")
    steps = item.get("Model_Solution_Steps")
    code = isinstance(steps, str)
    steps = steps.split("\n") if code else take(item, "Model_Solution_Steps", list, where)
    steps = [step for step in steps if isinstance(step, str) and step.strip()]
    if not steps:
        raise RecordError(where, "Model_Solution_Steps", "has no step", "Is the file whole?")
    first: int | None = -1
    if verdict == "incorrect":
        first = _first(steps, take(item, "Model_Solution_First_Error_Step", str, where), code, where)
    question, choices = take(item, "Question", str, where), item.get("Options")
    names = {"question_id": "Question_UUID", "generator": "Sampled_Model"}  # a question has several solutions
    yield {
        "problem": f"{question}\n{choices}" if choices else question,
        "steps": steps,
        "labels": [None] * len(steps) if first is None else until_error(first, len(steps), verdict == "correct"),
        "correct": verdict == "correct",
        "first_error": first,
        "task": take(item, "Subject", str, where),
        **{key: item[name] for key, name in names.items() if name in item},
    }


def _first(steps: list[str], named: str, code: bool, where: str) -> int | None:
    """Returns the index of the named step, unless it is a line that a program lacks."""
    if code:
        return next((i for i, line in enumerate(steps) if line.strip() == named.strip()), None)
    numbers = [match and match[1] for match in map(_NUMBER.match, steps)]
    if named.strip() not in numbers:
        field = "Model_Solution_First_Error_Step"
        raise RecordError(where, field, f"is {named!r}, and no step has that number", "Is the file whole?")
    return numbers.index(named.strip())


# ---- BIG-Bench-Mistake (Tyen et al. 2024, arXiv 2311.08516; WHGTyen/BIG-Bench-Mistake).

TASKS = (
    ("dyck_languages", re.compile(r"[\s()\[\]{}<>]+")),
    ("multistep_arithmetic", re.compile(r"[\s()\d*+-]+=\s*")),
    ("tracking_shuffled_objects", re.compile(r".*\bAt the end of .*\bOptions:.*", re.DOTALL)),
    ("logical_deduction", re.compile(r".*\bOptions:.*", re.DOTALL)),
    ("word_sorting", re.compile(r"[^\n]+")),
)
"""(task, pattern of its whole input); the first match counts."""


def parse_big_bench_mistake(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields one chain by PaLM 2 with its first mistake from human annotators; a wrong answer may lack one.

    Steps without text are left out; no annotator marked a mistake in one. Keys: `problem`, `steps`, `labels` (1, 0 at
    the mistake, then null), `correct` (the answer equals the target; false without an answer), `first_error` (index of
    the steps kept, or -1), `task` (a name in `TASKS`), `target`, and `answer` if given. Raises RecordError, at `where`,
    if a field is missing or malformed, or the input matches no task.
    """
    problem, steps = take(item, "input", str, where), take(item, "steps", list, where)
    first = item.get("mistake_index", "")
    first = -1 if first is None else take(item, "mistake_index", int, where)
    if not -1 <= first < len(steps) or not steps:
        remedy = "It is the index of the first mistake, null if there is none."
        raise RecordError(where, "mistake_index", f"is {first}, for {len(steps)} steps", remedy)
    if first >= 0 and not str(steps[first]).strip():
        raise RecordError(where, "mistake_index", f"is {first}, a step without text", "Is the file whole?")
    task = next((name for name, whole in TASKS if whole.fullmatch(problem.strip())), None)
    if task is None:
        raise RecordError(where, "input", "is of no known task", "Is this file of BIG-Bench-Mistake?")
    first -= sum(not str(step).strip() for step in steps[: max(first, 0)])
    steps = [step for step in steps if not isinstance(step, str) or step.strip()]
    answer = item.get("answer")  # null where the chain has none
    answer = {} if answer is None else {"answer": take(item, "answer", str, where)}
    correct = bool(answer) and answer["answer"].strip() == take(item, "target", str, where).strip()
    yield {
        "problem": problem,
        "steps": steps,
        "labels": until_error(first, len(steps), True),
        "correct": correct,
        "first_error": first,
        "task": task,
        "target": item["target"],
        **answer,
    }


# ---- Hard2Verify (Pandit et al. 2025, arXiv 2510.13744; Salesforce/Hard2Verify).


def parse_hard2verify(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields one proof with a human label for every step, and its first wrong step; decrypts published records.

    Keys: `problem`, `steps`, `labels` (0 or 1), `correct` (no step is wrong), `first_error` (-1 without one), and `id`
    if given. Plain-text records are read as they are. Raises RecordError, at `where`, if a field is missing or
    malformed, or the labels contradict the given first error.
    """
    item = _plain(item)
    steps, labels = (take(item, key, list, where) for key in ("model_response_by_step", "human_labels"))
    if len(labels) != len(steps) or not all(type(label) is int and label in (0, 1) for label in labels):
        raise RecordError(where, "human_labels", f"is {labels}, for {len(steps)} steps", "Give each step a 0 or a 1.")
    first = labels.index(0) if 0 in labels else -1
    place = item.get("human_labels_first_error_idx", first)
    if (-1 if place is None else place) != first:
        reason = f"is {place!r}, and by the labels {first}"
        raise RecordError(where, "human_labels_first_error_idx", reason, "Correct it.")
    yield {
        "problem": take(item, "question", str, where),
        "steps": steps,
        "labels": labels,
        "correct": first == -1,
        "first_error": first,
        **({"id": item["unique_id"]} if "unique_id" in item else {}),
    }


def _plain(item: Any) -> Any:
    """Decrypts a published record; returns plain-text records unchanged.

    Published texts are XORed with the SHA-256 of the record's `canary` and base64-encoded, to keep them out of training
    data.
    """
    if not isinstance(item, dict) or not isinstance(item.get("canary"), str):
        return item
    key, plain = hashlib.sha256(item["canary"].encode()).digest(), {}
    for field in ("question", "model_response_by_step", "human_labels", "human_labels_first_error_idx"):
        try:
            secret = base64.b64decode(item.get(field, ""), validate=True)
            text = bytes(a ^ b for a, b in zip(secret, itertools.cycle(key), strict=False))
            plain[field] = text.decode() if field == "question" else json.loads(text)
        except (TypeError, ValueError, RecursionError):  # is plain already
            continue
    return {key: value for key, value in item.items() if key != "canary"} | plain


HARD2VERIFY = Reader(parse_hard2verify)
MR_BEN = Reader(parse_mr_ben, drops="reasons, corrections and answers")
BIG_BENCH_MISTAKE = Reader(parse_big_bench_mistake)
