"""Finds known texts: problems that two files share, and records that repeat each other.

Texts are compared after normalising LaTeX and white space; optionally also by MinHash similarity.
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
    """Returns the text in lower case, without `$`, `\\left`, `\\right` and `\\!`, and with single spaces.

    LaTeX's spaces, e.g. `~`, `\\,` and `\\quad`, count as spaces.
    """
    return " ".join(_SPACE.sub(" ", _NOTHING.sub("", text.lower())).split())


class Texts:
    """A set of texts that finds equal and, with `near`, similar texts; the caller must normalise all of them.

    `near` is the smallest Jaccard similarity (0 to 1) between the sets of five consecutive words, estimated by MinHash
    (Broder 1997; rensa, extra `near`) with 256 permutations in 64 bands. Raises ValueError if it is outside (0, 1], and
    ImportError without the extra. Measured at `near=0.8`: of a hundred pairs, all were found at similarity 0.86, 54 at
    0.80, and 0 at 0.74.
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
        """Returns whether an equal (or, with `near`, similar) text was added."""
        return text in self._equal or (self._rensa is not None and self._near.is_duplicate("", self._sketch(text)))

    def add(self, text: str) -> bool:
        """Adds a text; returns whether an equal (or, with `near`, similar) text was already there.

        A text that is only similar is kept too, so that an equal one is found later.
        """
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
    """Yields the problem texts of one item from any supported source, not normalised; a text may come twice.

    Reads `problem`, `question` (also as an object), `prompt`, `original_question`, `modified_question`, `input` (up to
    "Step 1:") and, without `problem` and `question`, the first user message. Other items yield no text.
    """
    if not isinstance(item, dict):
        return
    question = item.get("question")
    if isinstance(question, dict):
        yield from problems_of({key: value for key, value in question.items() if key != "question"})
    for key in ("problem", "question", "prompt", "original_question", "modified_question"):
        if isinstance(item.get(key), str):
            yield item[key]
    if "problem" not in item and "question" not in item:
        yield from filter(None, itertools.islice(_asked(item.get("messages", item.get("nodes"))), 1))
    yield from _asked(item.get("prompt"))
    if isinstance(item.get("input"), str):
        yield _SHEPHERD.split(item["input"])[0]


def _asked(messages: Any) -> Iterator[str]:
    """Yields the texts of user messages; `messages` may also be nodes."""
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "user" and isinstance(message.get("content"), str):
            yield message["content"]


def problems_in(path: str | os.PathLike) -> set[str]:
    """Returns the normalised problems of a file from any supported source.

    Raises RecordError if an item is not JSON or has no problem (half a benchmark would exclude only some problems), and
    as `read_items`, e.g. FileNotFoundError.
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
