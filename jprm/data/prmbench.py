"""PRMBench (Song et al., arXiv 2501.03124): chains of PRM800K with one class of error written into them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Literal

from jprm.data.reader import Reader, Record, take
from jprm.tree import RecordError

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


def parse(item: Any, where: str, options: PrmbenchOptions) -> Iterator[Record]:
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


READER = Reader(parse, PrmbenchOptions)
