"""Finds texts that are there already: problems that two files share, and records that repeat each other.

Texts are compared without variations of LaTeX and typing, and, where it is asked for, by how much they share.
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from jprm.io import jsonl
from jprm.methods.data.cells import TextRow
from jprm.methods.data.reader import is_csv, read_items
from jprm.tree import RecordError

_NOTHING = re.compile(r"\\?\$|\\!|\\(?:left|right)(?![a-z])")
_SPACE = re.compile(r"\\[,;: ]|\\q?quad(?![a-z])|~")
_SHEPHERD = re.compile(r"\s*Step 1\s*:")


def normalise(text: str) -> str:
    """Returns the text in lower case, with single spaces, without dollar signs, `\\left` and `\\right`."""
    return " ".join(_SPACE.sub(" ", _NOTHING.sub("", text.lower())).split())


class Texts:
    """Texts that are known, each as `normalise` gives it, and whether another equals or resembles one of them.

    With `near`, texts resemble each other whose sets of five consecutive words have at least that Jaccard similarity,
    as MinHash estimates it (Broder 1997; rensa, of the extra `near`), with 256 permutations in 64 bands. Near 0.8, a
    hundred pairs of similarity 0.86 were all taken, 54 of 0.80, and none of 0.74.
    """

    def __init__(self, texts: Iterable[str] = (), near: float | None = None):
        if near is not None and not 0 < near <= 1:
            raise ValueError(f"near is {near}: a Jaccard similarity is above 0 and at most 1")
        self._equal: set[str] = set()
        self._rensa: Any = None if near is None else importlib.import_module("rensa")
        if self._rensa is not None:
            self._near = self._rensa.RMinHashDeduplicator(near, 256, True, num_bands=64)
        for text in texts:
            self.add(text)

    def holds(self, text: str) -> bool:
        """Returns whether a text is known."""
        return text in self._equal or (self._rensa is not None and self._near.is_duplicate("", self._sketch(text)))

    def add(self, text: str) -> bool:
        """Makes a text known; returns whether it was."""
        if text in self._equal:
            return True
        self._equal.add(text)
        return self._rensa is not None and not self._near.add(str(len(self._equal)), self._sketch(text))

    def _sketch(self, text: str) -> Any:
        words = text.split()
        sketch = self._rensa.RMinHash(256, 42)
        sketch.update([" ".join(words[i : i + 5]) for i in range(max(1, len(words) - 4))])
        return sketch


def problems_of(item: Any) -> Iterator[str]:
    """Yields the problem texts of one item of any source in `jprm.methods.data.readers`."""
    if not isinstance(item, dict):
        return
    question = item.get("question")
    if isinstance(question, dict):
        yield from problems_of(question)
    for key in ("problem", "question", "prompt", "original_question", "modified_question"):
        if isinstance(item.get(key), str):
            yield item[key]
    if "problem" not in item and "question" not in item:
        yield from filter(None, itertools.islice(_asked(item.get("messages", item.get("nodes"))), 1))
    yield from _asked(item.get("prompt"))
    if isinstance(item.get("input"), str):
        yield _SHEPHERD.split(item["input"])[0]


def _asked(messages: Any) -> Iterator[str]:
    """Yields what the user said in a list of messages, or of nodes that are messages."""
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "user" and isinstance(message.get("content"), str):
            yield message["content"]


def problems_in(path: str | os.PathLike) -> set[str]:
    """Returns the normalised problems of a file of records, of any source.

    Raises:
      RecordError: an item that is not JSON or has no problem, since a half-read benchmark excludes only half.
    """
    texts: set[str] = set()
    for number, raw in read_items(path):
        where = f"{os.fspath(path)}:{number}"
        item = jsonl.parse(raw, where)
        problems = list(problems_of(TextRow(item) if is_csv(path) else item))
        if not problems:
            raise RecordError(where, "problem", "is absent", "Give a file that a reader of jprm can read.")
        texts.update(map(normalise, problems))
    return texts
