"""Finds problems that two files share, by text without variations of LaTeX and typing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from jprm.data.reader import read_items
from jprm.io import jsonl
from jprm.tree import RecordError

_NOTHING = re.compile(r"\\?\$|\\!|\\(?:left|right)(?![a-z])")
_SPACE = re.compile(r"\\[,;: ]|\\q?quad(?![a-z])|~")
_SHEPHERD = re.compile(r"\s*Step 1\s*:")


def normalise(text: str) -> str:
    """Returns the text in lower case, with single spaces, without dollar signs, `\\left` and `\\right`."""
    return " ".join(_SPACE.sub(" ", _NOTHING.sub("", text.lower())).split())


def problems_of(item: Any) -> Iterator[str]:
    """Yields the problem texts of one item of any source in `jprm.data.readers`."""
    if not isinstance(item, dict):
        return
    question = item.get("question")
    if isinstance(question, dict):
        yield from problems_of(question)
    for key in ("problem", "question", "prompt", "original_question", "modified_question"):
        if isinstance(item.get(key), str):
            yield item[key]
    for message in item["prompt"] if isinstance(item.get("prompt"), list) else ():
        if isinstance(message, dict) and message.get("role") == "user" and isinstance(message.get("content"), str):
            yield message["content"]
    if isinstance(item.get("input"), str):
        yield _SHEPHERD.split(item["input"])[0]


def problems_in(path: str | os.PathLike) -> set[str]:
    """Returns the normalised problems of a file.

    Raises:
      RecordError: an item that is not JSON or has no problem, since a half-read benchmark excludes only half.
    """
    found: set[str] = set()
    for number, raw in read_items(path):
        where = f"{os.fspath(path)}:{number}"
        problems = list(problems_of(jsonl.parse(raw, where)))
        if not problems:
            raise RecordError(where, "problem", "is absent", "Give a file that a reader of jprm can read.")
        found.update(map(normalise, problems))
    return found
