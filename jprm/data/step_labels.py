"""Published chains with a label for every step: Math-Shepherd, ProcessBench and PRMBench."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Literal

from jprm.data.reader import NoOptions, Reader, Record, take
from jprm.tree import RecordError

# ---- Math-Shepherd (Wang et al., arXiv 2312.08935): steps with automatic labels from Monte Carlo completions.
# `input` is the problem and its steps, each step followed by the tag `ки`; `label` is the same text with every tag
# replaced by `+` (a completion from here reached the answer) or `-`.

_TAG = "ки"
_FIRST = re.compile(r"Step 1\s*:")


def parse_math_shepherd(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields one chain with labels 1 and 0 of semantics `value`.

    A step is the text between two tags, with its number ("Step 2: ") but without surrounding white space. If the last
    step states the answer, its label is the chain's `correct`, since no completion follows it. Other keys are kept.
    """
    text, labelled = take(item, "input", str, where), take(item, "label", str, where)
    segments = text.split(_TAG)
    labels, at = [], 0
    for segment in segments[:-1]:
        sign = labelled[at + len(segment) : at + len(segment) + 1]
        if not labelled.startswith(segment, at) or sign not in ("+", "-"):
            reason = f"does not repeat `input` with + or - for tag {len(labels) + 1}"
            raise RecordError(where, "label", reason, "The two texts differ in nothing but the tags.")
        labels.append(1.0 if sign == "+" else 0.0)
        at += len(segment) + 1
    if labelled[at:].strip() or segments[-1].strip():
        raise RecordError(where, "label", "has text after the last tag", "Every step ends in a tag.")
    starts = [match.start() for match in _FIRST.finditer(segments[0])]
    if not labels or not starts:
        raise RecordError(where, "input", f"has no tag {_TAG!r} or no 'Step 1:'", "Is this file Math-Shepherd's?")
    problem, first = segments[0][: starts[-1]], segments[0][starts[-1] :]
    chain: Record = {"problem": problem.strip(), "steps": [step.strip() for step in [first, *segments[1:-1]]]}
    chain |= {"labels": labels, "semantics": "value"}
    if "The answer is" in chain["steps"][-1]:
        chain["correct"] = labels[-1] == 1.0
    yield chain | {key: value for key, value in item.items() if key not in ("input", "label")}


MATH_SHEPHERD = Reader(
    parse_math_shepherd,
    releases={"https://huggingface.co/datasets/peiyi9979/Math-Shepherd/resolve/main/math-shepherd.jsonl": None},
)

# ---- ProcessBench (Zheng et al., arXiv 2412.06559): chains with the index of the first wrong step.

_PROCESSBENCH = "https://huggingface.co/datasets/Qwen/ProcessBench/resolve/main/"


def parse_processbench(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields one chain, labelled 1 before the first wrong step, 0 at it and null after it.

    `first_error` is the index of that step, -1 if there is none. `correct` tells whether the final answer is correct,
    which may be so with a wrong step.
    """
    first, steps = take(item, "label", int, where), take(item, "steps", list, where)
    if not -1 <= first < len(steps):
        remedy = "It is the index of the first wrong step, -1 if there is none."
        raise RecordError(where, "label", f"is {first}, for {len(steps)} steps", remedy)
    right = len(steps) if first == -1 else first
    labels = ([1] * right + [0] + [None] * len(steps))[: len(steps)]
    chain = {key: value for key, value in item.items() if key != "label"}
    chain |= {"labels": labels, "correct": take(item, "final_answer_correct", bool, where), "first_error": first}
    yield chain


PROCESSBENCH = Reader(
    parse_processbench,
    releases={_PROCESSBENCH + f"{split}.json": None for split in ("gsm8k", "math", "olympiadbench", "omnimath")},
)

# ---- PRMBench (Song et al., arXiv 2501.03124): chains of PRM800K with one class of error written into them.

_PREFIX = re.compile(r"^(Step\s*\d+\.\s*|\d+\.\s*)", re.IGNORECASE)
"""`remove_step_prefix` of ssmisya/PRMBench, mr_eval/utils/model_utils.py."""


@dataclasses.dataclass(frozen=True)
class PrmbenchOptions:
    """Attributes:
    process: the `modified` chain, which the benchmark scores, or the `original` one, whose steps are all right.
    outside: a few records of the release name error steps beyond the chain's end: `error`, or `ignore` those numbers.
    prefix: whether a step's number ("Step 3.", "3.") and the white space around it stay or are stripped.
    empty: one record of the release has a step without text, which no model can score: `error`, or `drop` that step.
    """

    process: Literal["modified", "original"] = "modified"
    outside: Literal["error", "ignore"] = "error"
    empty: Literal["error", "drop"] = "error"
    prefix: Literal["keep", "strip"] = "keep"


def parse_prmbench(item: Any, where: str, options: PrmbenchOptions) -> Iterator[Record]:
    """Yields one chain, labelled 0 at the error steps (1-based in the file) and 1 elsewhere, with all other keys."""
    steps = take(item, f"{options.process}_process", list, where)
    problem = take(item, f"{options.process}_question", str, where)
    wrong = take(item, "error_steps", list, where) if options.process == "modified" else []
    for number in wrong:
        inside = isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= len(steps)
        if not inside and options.outside == "error":
            remedy = "Correct it, or ignore such numbers with the option outside=ignore."
            raise RecordError(where, "error_steps", f"names step {number!r} of {len(steps)}", remedy)
    labels = [0 if number in wrong else 1 for number in range(1, len(steps) + 1)]
    if options.prefix == "strip":
        steps = [_PREFIX.sub("", step.strip()) if isinstance(step, str) else step for step in steps]
    if options.empty == "drop":
        kept = [i for i, step in enumerate(steps) if not isinstance(step, str) or step.strip()]
        steps, labels = [steps[i] for i in kept], [labels[i] for i in kept]
    yield {"problem": problem, "steps": steps, "labels": labels} | {
        key: value for key, value in item.items() if key not in ("problem", "steps", "labels")
    }


PRMBENCH = Reader(parse_prmbench, PrmbenchOptions)
