"""GSM8K (Cobbe et al., arXiv 2110.14168): worked solutions, one step per line, and model solutions as pools."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Literal

from jprm.data.reader import Reader, Record, take
from jprm.tree import RecordError

_URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/"
_MARK = re.compile(r"<<[^<>]*>>")


@dataclasses.dataclass(frozen=True)
class Gsm8kOptions:
    """Attributes:
    calculator_marks: `keep` or `strip` the authors' calculator marks, such as `<<48/2=24>>`.
    """

    calculator_marks: Literal["keep", "strip"]


def parse(item: Any, where: str, options: Gsm8kOptions) -> Iterator[Record]:
    """Yields one chain of {"question", "answer"}: its solution's lines, without blank ones, and its answer."""
    solution, mark, answer = take(item, "answer", str, where).rpartition("####")
    if not mark or not answer.strip():
        raise RecordError(where, "answer", "has no '#### ANSWER'", "Is this file GSM8K's train or test?")
    chain = {"problem": take(item, "question", str, where), "steps": _steps(solution, options)}
    chain |= {"answer": answer.strip(), "correct": True}
    yield chain | {key: value for key, value in item.items() if key not in ("question", "answer")}


def parse_solutions(item: Any, where: str, options: Gsm8kOptions) -> Iterator[Record]:
    """Yields one pool of `example_model_solutions.jsonl`: one sample per model, without its answer line."""
    truth = take(item, "ground_truth", str, where).rpartition("A:")[2].strip()
    samples = []
    for model, value in item.items():
        if not isinstance(value, dict):
            continue
        solution, mark, answer = take(item, f"{model}.solution", str, where).rpartition("A:")
        steps = _steps(solution if mark else answer, options)
        sample = {"steps": steps, "answer": answer.strip() if mark else None, "generator": model}
        samples.append(sample | {"correct": take(item, f"{model}.is_correct", bool, where)})
    yield {"problem": take(item, "question", str, where), "answer": truth, "samples": samples}


def _steps(solution: str, options: Gsm8kOptions) -> list[str]:
    if options.calculator_marks == "strip":
        solution = _MARK.sub("", solution)
    return [line.strip() for line in solution.split("\n") if line.strip()]


READER = Reader(
    parse,
    Gsm8kOptions,
    {
        _URL + "train.jsonl": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
        _URL + "test.jsonl": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
    },
)
SOLUTIONS = Reader(
    parse_solutions,
    Gsm8kOptions,
    {
        _URL + "example_model_solutions.jsonl": "4bc62db838f8418365d51c627bd66294cbdca9fb7f01519cb13f0dce8c51580b",
    },
)
