"""Math-Shepherd (Wang et al., arXiv 2312.08935): steps with automatic labels from Monte Carlo completions.

`input` is the problem and its steps, each step followed by the tag `ки`; `label` is the same text with every tag
replaced by `+` (a completion from here reached the answer) or `-`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jprm.data.reader import NoOptions, Reader, Record, take
from jprm.tree import RecordError

_TAG = "ки"
_FIRST = re.compile(r"Step 1\s*:")


def parse(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
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


READER = Reader(
    parse,
    releases={"https://huggingface.co/datasets/peiyi9979/Math-Shepherd/resolve/main/math-shepherd.jsonl": None},
)
