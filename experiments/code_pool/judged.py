"""Judges a published pool of programs: CodeGen-16B's 100 programs for each of HumanEval's 164 problems.

    python experiments/code_pool/judged.py --shared ../shared/data --out runs/code_pool/pools.jsonl

Every program runs in the sandbox with the benchmark's tests, which say whether it is correct, and with the tests that
the same model wrote. The output has a pool a problem, as `jprm eval best-of-n` and `jprm train` read it: `steps` are
the program's lines, `passes` the places in `tests` of the model's tests that it passes, `behaviour` is equal for
programs that answered the calls of all those tests alike. The same command continues a stopped one.

The model's tests are read as CodeT's script does (Chen et al. 2022, arXiv 2207.10397, `src/postprocess.py`): the first
five assertions of each of 100 texts that name the function and compile. `weights` says how often each was written.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jprm.io.jsonl import dump, parse, read_lines
from jprm.io.outputs import Bar, continued, cut, finish, input_of
from jprm.methods.verify.programs import Program, Report, run_programs
from jprm.methods.verify.sandbox import Limits

LIMITS = Limits(seconds=3.0)
"""Of a program with the benchmark's tests, and with all of the model's tests."""

ALONE = Limits(seconds=0.2)
"""Of a program with one of the model's tests, where all of them together took too long."""

A_TEXT = 5
"""Assertions that are taken of one text."""

NOTHING = "    pass"
"""The step of a body without a line: a function of its docstring only."""

ENDS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""What ends a function's body, or an assertion, in a text that goes on."""


@dataclasses.dataclass(frozen=True)
class HumanEvalProblem:
    prompt: str
    name: str  # of the function
    hidden: str  # the benchmark's tests
    programs: Sequence[str]  # bodies of the function
    tests: dict[str, int]  # the model's, with how often each was written


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shared", required=True, type=pathlib.Path, help="the folder that has code/")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    options = parser.parse_args()
    problems = read(options.shared / "code")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    files = ("humaneval.jsonl", "humaneval_codegen16b_n100.jsonl", "humaneval_codegen16b_tests.jsonl")
    request = {
        "files": [input_of(options.shared / "code" / file) for file in files],
        "limits": dataclasses.asdict(LIMITS),
    }
    with continued(options.out, request) as part:
        if part is None:
            sys.exit(f"{options.out}: is whole")
        done = cut(part, 1)
        with Bar("problems", len(problems), done) as bar:
            for problem in problems[done:]:
                part.write(dump(judged(problem)).encode() + b"\n")
                part.flush()
                bar.add()
        finish(part, options.out, request)


def read(folder: pathlib.Path) -> list[HumanEvalProblem]:
    """Returns the problems with programs and tests, which belong together by their prompts."""

    def records(name: str) -> Iterator[dict[str, Any]]:
        path = folder / name
        return (parse(line, f"{path}:{number}") for number, line in read_lines(path))

    programs = {record["prompt"].strip(): record["samples"] for record in records("humaneval_codegen16b_n100.jsonl")}
    end = "    pass\n\n# check the correctness of"
    texts = {
        record["prompt"].split(end)[0].strip(): record["samples"]
        for record in records("humaneval_codegen16b_tests.jsonl")
    }
    return [
        HumanEvalProblem(
            record["prompt"], record["entry_point"], record["test"] + f"\ncheck({record['entry_point']})\n",
            [cut_off(body) for body in programs[record["prompt"].strip()]],
            tests_of(texts[record["prompt"].strip()], record["entry_point"]),
        )
        for record in records("humaneval.jsonl")
    ]  # fmt: skip


def cut_off(text: str) -> str:
    """Returns a text up to where its function or assertion ends."""
    return text[: min([place for end in ENDS if (place := text.find(end)) >= 0], default=len(text))]


def tests_of(texts: Sequence[str], name: str) -> dict[str, int]:
    """Returns the assertions of texts that go on after `assert `, each with how often it was written."""
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        assertions = filter(None, (_assertion(part) for part in text.split("assert ") if name in part))
        counts.update(itertools.islice(assertions, A_TEXT))
    return dict(counts)


def _assertion(part: str) -> str | None:
    """Returns an assertion in Python's own spelling and without its message; None where it is none."""
    try:
        (statement,) = ast.parse("assert " + cut_off(part).strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return ast.unparse(ast.Assert(statement.test)) if isinstance(statement, ast.Assert) else None


def judged(problem: HumanEvalProblem) -> dict[str, Any]:
    """Returns the pool of a problem."""
    bodies = list(dict.fromkeys(problem.programs))
    tests = tuple(problem.tests)
    hidden = run_programs([Program(problem.prompt + body, (problem.hidden,)) for body in bodies], LIMITS)
    asked = run_programs([Program(problem.prompt + body, tests) for body in bodies], LIMITS)
    passes = {body: passed(problem.prompt + body, tests, report) for body, report in zip(bodies, asked, strict=True)}
    of_body = dict(zip(bodies, zip(hidden, asked, strict=True), strict=True))
    samples = []
    for body in problem.programs:
        verdict, program = of_body[body]
        samples.append({
            "steps": [line for line in body.splitlines() if line.strip()] or [NOTHING], "correct": verdict.passed,
            "undecided": "undecided" in verdict.results, "passes": passes[body], "behaviour": program.behaviour,
        })  # fmt: skip
    return {
        "problem": problem.prompt,
        "samples": samples,
        "tests": list(tests),
        "weights": list(problem.tests.values()),
    }


def passed(code: str, tests: Sequence[str], report: Report) -> list[int]:
    """Returns the places of the tests that a program passes; where it did not end, it runs with each of them alone."""
    results = report.results
    if report.late:
        alone = run_programs([Program(code, (test,)) for test in tests], ALONE)
        results = [verdict.results[0] if verdict.results else "late" for verdict in alone]
    return [i for i, result in enumerate(results) if result == "passes"]


if __name__ == "__main__":
    main()
