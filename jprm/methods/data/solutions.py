"""Readers of worked solutions without step labels: GSM8K, MATH and programs."""

from __future__ import annotations

import ast
import dataclasses
import io
import re
import tokenize
from collections.abc import Iterator
from typing import Any, Literal

from jprm import steps
from jprm.methods.data.reader import Reader, Record, others, take
from jprm.methods.verify import tests_of
from jprm.tree import RecordError

# ---- GSM8K (Cobbe et al., arXiv 2110.14168): one step per line, and model solutions as pools.

_GSM8K = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/"
_MARK = re.compile(r"<<[^<>]*>>")


@dataclasses.dataclass(frozen=True)
class Gsm8kOptions:
    """Attributes:
    calculator_marks: `keep` or `strip` calculator marks such as `<<48/2=24>>`.
    """

    calculator_marks: Literal["keep", "strip"]


def parse_gsm8k(item: Any, where: str, options: Gsm8kOptions) -> Iterator[Record]:
    """Yields one correct chain from {"question", "answer"}; each non-blank line before `#### ANSWER` is a step.

    The chain has `problem`, `steps`, `answer` and `correct` (true); other keys are kept. Raises RecordError if a key or
    the answer is missing.
    """
    solution, mark, answer = take(item, "answer", str, where).rpartition("####")
    if not mark or not answer.strip():
        raise RecordError(where, "answer", "has no '#### ANSWER'", "Is this file GSM8K's train or test?")
    chain = {"problem": take(item, "question", str, where), "steps": _lines(solution, options)}
    chain |= {"answer": answer.strip(), "correct": True}
    yield chain | others(item, "question", "answer")


def parse_solutions(item: Any, where: str, options: Gsm8kOptions) -> Iterator[Record]:
    """Yields one pool from `example_model_solutions.jsonl`: {"problem", "answer", "samples"}, a sample per model.

    An item is {"question", "ground_truth", MODEL: {"solution", "is_correct"}, ...}; answers follow "A:". A sample has
    `steps` (lines without the answer's), `answer` (null if none is stated), `generator` (the model) and `correct`.
    Other keys are left out. Raises RecordError if a key is missing.
    """
    truth = take(item, "ground_truth", str, where).rpartition("A:")[2].strip()
    samples = []
    for model, value in item.items():
        if not isinstance(value, dict):
            continue
        solution, mark, answer = take(item, f"{model}.solution", str, where).rpartition("A:")
        steps = _lines(solution if mark else answer, options)
        sample = {"steps": steps, "answer": answer.strip() if mark else None, "generator": model}
        samples.append(sample | {"correct": take(item, f"{model}.is_correct", bool, where)})
    yield {"problem": take(item, "question", str, where), "answer": truth, "samples": samples}


def _lines(solution: str, options: Gsm8kOptions) -> list[str]:
    if options.calculator_marks == "strip":
        solution = _MARK.sub("", solution)
    return [line.strip() for line in solution.split("\n") if line.strip()]


GSM8K = Reader(
    parse_gsm8k,
    Gsm8kOptions,
    {
        _GSM8K + "train.jsonl": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
        _GSM8K + "test.jsonl": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
    },
)
GSM8K_SOLUTIONS = Reader(
    parse_solutions,
    Gsm8kOptions,
    {_GSM8K + "example_model_solutions.jsonl": "4bc62db838f8418365d51c627bd66294cbdca9fb7f01519cb13f0dce8c51580b"},
)

# ---- MATH (Hendrycks et al., arXiv 2103.03874) and MATH-500: problems with a worked solution and its answer.

_MATH = "https://github.com/openai/prm800k/raw/main/prm800k/math_splits/"


@dataclasses.dataclass(frozen=True)
class MathOptions:
    """Attributes:
    steps: `none` keeps the solution as one step; otherwise it is split by a rule of `jprm.steps`, e.g. `sentences`. The
        joined steps equal the solution.
    """

    steps: Literal["none", "paragraphs", "sentences"]


def parse_math(item: Any, where: str, options: MathOptions) -> Iterator[Record]:
    """Yields one correct chain from {"problem", "solution", "answer"?}, without step labels; keeps other keys.

    The solution becomes `steps`, and `correct` is true. Raises RecordError if a key is missing.
    """
    solution = take(item, "solution", str, where)
    pieces = [solution] if options.steps == "none" else steps.split(solution, options.steps)
    chain = {"problem": take(item, "problem", str, where), "steps": pieces, "correct": True}
    yield chain | others(item, "problem", "solution")


MATH = Reader(
    parse_math,
    MathOptions,
    {  # from the Git LFS pointers of the repository; `test` is MATH-500
        _MATH + "train.jsonl": "90d96daeac3fe343ebb1e22ce93dd99690f75983e957f88de42f87cffe1e8076",
        _MATH + "test.jsonl": "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
    },
)

# ---- Programs: HumanEval (Chen et al., arXiv 2107.03374), MBPP (Austin et al., arXiv 2108.07732), and jprm's own
# records. A solution becomes a chain of lines or statements, which `jprm label` judges by running the record's tests.

_HUMAN_EVAL = ("prompt", "test", "entry_point", "canonical_solution")


@dataclasses.dataclass(frozen=True)
class ProgramOptions:
    """Attributes:
    steps: each step is one line, or one statement (which may span several lines, e.g. inside brackets).
    """

    steps: Literal["lines", "statements"]


def parse_program(item: Any, where: str, options: ProgramOptions) -> Iterator[Record]:
    """Yields the record with its `tests`; splits a whole solution, if there is one, into `steps`.

    They have no blank lines, and spaces for tabs; `correct` is then true unless the item has it.

    The keys decide the layout:

    - {"problem", "tests", "prelude"?} with a whole "solution", or with "steps", "samples" or "nodes", which are kept.
    - HumanEval: {"prompt", "test", "entry_point", "canonical_solution"}. The prompt is also the `prelude` (the code
      before the first step); "test" and a call of its `check` form one test.
    - MBPP: {"text" or "prompt", "code", "test_list"}. "test_imports" and "test_setup_code" run before each test.

    Other keys are kept. Raises RecordError if a key is missing or has another type, or the code cannot be parsed.
    """
    if not isinstance(item, dict):
        raise RecordError(where, "record", "is no object", 'Write {"problem": ..., "tests": [...], "solution": ...}.')
    if "entry_point" in item:
        record, solution = _human_eval(item, where)
    elif "test_list" in item:
        record, solution = _mbpp(item, where)
    else:
        take(item, "problem", str, where)
        record = others(item, "solution")
        solution = ("solution", take(item, "solution", str, where)) if "solution" in item else None
    tests_of(record, where)
    if solution:
        field, code = solution
        record["steps"] = _pieces(code, record.get("prelude", ""), options, where, field)
        record.setdefault("correct", True)
    yield record


def _human_eval(item: dict, where: str) -> tuple[Record, tuple[str, str]]:
    prompt, test, name, solution = (take(item, key, str, where) for key in _HUMAN_EVAL)
    record = {"problem": prompt, "prelude": prompt, "tests": [f"{test}\ncheck({name})"]}
    return record | others(item, *_HUMAN_EVAL), ("canonical_solution", solution)


def _mbpp(item: dict, where: str) -> tuple[Record, tuple[str, str]]:
    text = "text" if "text" in item else "prompt"
    tests = take(item, "test_list", list, where)
    if not all(isinstance(test, str) for test in tests):
        raise RecordError(where, "test_list", "is no list of statements", "Is this file MBPP's?")
    setup = [*take({"test_imports": [], **item}, "test_imports", list, where)]
    setup.append(take({"test_setup_code": "", **item}, "test_setup_code", str, where))
    before = "".join(f"{part}\n" for part in setup if str(part).strip())
    record = {"problem": take(item, text, str, where), "tests": [before + test for test in tests]}
    record |= others(item, text, "code", "test_list", "test_imports", "test_setup_code")
    return record, ("code", take(item, "code", str, where))


def _pieces(code: str, prelude: str, options: ProgramOptions, where: str, field: str) -> list[str]:
    """Splits code into lines or statements without blank lines. The parsed program must stay the same."""
    code = code.replace("\r\n", "\n").expandtabs()
    try:
        meant = ast.dump(ast.parse(prelude + code))
        pieces = code.split("\n") if options.steps == "lines" else list(_statements(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError) as error:
        raise RecordError(where, field, f"is no Python: {error}", "Remove the record, or mend its code.") from None
    steps = [piece.rstrip() for piece in pieces if piece.strip()]
    try:
        same = ast.dump(ast.parse(prelude + "\n".join(steps))) == meant
    except SyntaxError:
        same = False
    if not same:
        remedy = "Give --set steps=statements, which keeps texts whole."
        raise RecordError(where, field, "changes without its blank lines: a text in it has some", remedy)
    return steps


def _statements(code: str) -> Iterator[str]:
    """Yields logical lines, each with the comments before it."""
    lines, start = code.split("\n"), 0
    for token in tokenize.generate_tokens(io.StringIO(code + "\n").readline):
        if token.type == tokenize.NEWLINE:
            yield "\n".join(lines[start : token.end[0]]).strip("\n")
            start = token.end[0]


PROGRAMS = Reader(parse_program, ProgramOptions)
