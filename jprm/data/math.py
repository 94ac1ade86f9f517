"""MATH (Hendrycks et al., arXiv 2103.03874) and MATH-500: problems with a worked solution and its answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from jprm import steps
from jprm.data.reader import Reader, Record, take

_URL = "https://github.com/openai/prm800k/raw/main/prm800k/math_splits/"


@dataclasses.dataclass(frozen=True)
class MathOptions:
    """Attributes:
    steps: the solution as one step (`none`), or split by a rule of `jprm.steps`. The joined steps are the solution.
    """

    steps: Literal["none", "paragraphs", "sentences"]


def parse(item: Any, where: str, options: MathOptions) -> Iterator[Record]:
    """Yields one correct chain of {"problem", "solution", "answer"?}, without step labels. Other keys are kept."""
    solution = take(item, "solution", str, where)
    pieces = [solution] if options.steps == "none" else steps.split(solution, options.steps)
    chain = {"problem": take(item, "problem", str, where), "steps": pieces, "correct": True}
    yield chain | {key: value for key, value in item.items() if key not in ("problem", "solution")}


READER = Reader(
    parse,
    MathOptions,
    {  # from the Git LFS pointers of the repository; `test` is MATH-500
        _URL + "train.jsonl": "90d96daeac3fe343ebb1e22ce93dd99690f75983e957f88de42f87cffe1e8076",
        _URL + "test.jsonl": "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
    },
)
