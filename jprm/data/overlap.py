"""Which problems two files share: by text, with what LaTeX and typing vary taken out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jprm import jsonl
from jprm.data.reader import read_items
from jprm.tree import RecordError

_NOTHING = re.compile(r"\\?\$|\\!|\\(?:left|right)(?![a-z])")
_SPACE = re.compile(r"\\[,;: ]|\\q?quad(?![a-z])|~")
_SHEPHERD = re.compile(r"\s*Step 1\s*:")


def normalise(text: str) -> str:
    """Lower case, white space collapsed, LaTeX spaces as spaces, without dollar signs and `left` and `right` marks."""
    return " ".join(_SPACE.sub(" ", _NOTHING.sub("", text.lower())).split())


def problems_of(item: Any) -> Iterator[str]:
    """The problem texts of one item of any source that `jprm.data.readers` lists."""
    if not isinstance(item, dict):
        return
    question = item.get("question")
    if isinstance(question, dict):
        yield from problems_of(question)
    for key in ("problem", "question", "prompt", "original_question", "modified_question"):
        if isinstance(item.get(key), str):
            yield item[key]
    if isinstance(item.get("input"), str):
        yield _SHEPHERD.split(item["input"])[0]


def problems_in(path: str | os.PathLike) -> set[str]:
    """The normalised problems of a file.

    Raises:
      RecordError: an item that is not JSON or holds no problem: a benchmark that is read in part excludes in part.
    """
    found: set[str] = set()
    for number, raw in read_items(path):
        where = f"{os.fspath(path)}:{number}"
        problems = list(problems_of(jsonl.parse(raw, where)))
        if not problems:
            raise RecordError(where, "problem", "there is none", "Give a file that a reader of jprm can read.")
        found.update(map(normalise, problems))
    return found


def contamination(data: Sequence[str | os.PathLike], benchmarks: Sequence[str | os.PathLike]) -> dict[str, Any]:
    """Which problems of each benchmark occur in the data: `n` problems, `shared` ones, and the texts of up to 20.

    Only problems that are equal by `normalise` are found: a paraphrase, or the same numbers in another story, is not.
    """
    trained = {normal: os.fspath(path) for path in data for normal in problems_in(path)}
    report: dict[str, Any] = {"data": [os.fspath(path) for path in data], "benchmarks": {}}
    for path in benchmarks:
        problems = problems_in(path)
        shared = sorted(problems & trained.keys())
        report["benchmarks"][os.fspath(path)] = {
            "n": len(problems),
            "shared": len(shared),
            "examples": [{"problem": problem, "in": trained[problem]} for problem in shared[:20]],
        }
    return report
