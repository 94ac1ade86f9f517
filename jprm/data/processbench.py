"""ProcessBench (Zheng et al., arXiv 2412.06559): chains with the index of the first wrong step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jprm.data.reader import NoOptions, Reader, Record, take
from jprm.tree import RecordError

_URL = "https://huggingface.co/datasets/Qwen/ProcessBench/resolve/main/"


def parse(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
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


READER = Reader(
    parse, releases={_URL + f"{split}.json": None for split in ("gsm8k", "math", "olympiadbench", "omnimath")}
)
