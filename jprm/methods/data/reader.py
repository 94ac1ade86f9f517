"""The base of all readers: a source file is a list of items, and a reader turns one item into records.

A file is JSON Lines, a JSON list, one JSON object of lists, Parquet or Arrow, as its first bytes show, or CSV by
its name; JSON may be compressed with gzip.

A new source is one small file: a frozen dataclass of options, a pure generator function `parse(item, where, options)`,
and a `Reader` that joins them, listed in `jprm.methods.data.readers`.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import dataclasses
import datetime
import decimal
import functools
import importlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jprm.io import jsonl
from jprm.io.folders import local_copy
from jprm.io.outputs import check_input
from jprm.io.storage import path_of
from jprm.methods.data.cells import OTHER_FILE, TextRow, take
from jprm.options import OptionError, described, from_json
from jprm.tree import ReasoningTree, RecordError, tree_of

__all__ = ["Reader", "Record", "choose", "others", "read_items", "take", "until_error"]

Record = dict[str, Any]


class Dropped(Exception):
    """Raised by `parse` for an item that the options exclude. Its text is the reason, under which it is counted."""


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The options of a reader without any."""


class LeftOut(NamedTuple):
    """Yielded by `parse` beside its records: parts of the item that no record holds, counted by name in the report."""

    what: str  # e.g. "line of type 'summary'"
    count: int


class Event(NamedTuple):
    """An item of a file that tells one story, such as a line of an agent's transcript."""

    where: str  # FILE:LINE
    value: Any


@dataclasses.dataclass(frozen=True)
class Reader:
    """How one source is read.

    Attributes:
      parse: (item, where, options) -> records. Raises `RecordError` for an item of another form, `Dropped` for one
        that the options exclude. May yield `LeftOut` too.
      options: frozen dataclass; a field without a default is required.
      releases: URL of each public file -> its SHA-256, None if unknown.
      drops: what of an item the records leave out, as `jprm prepare` says it; empty where nothing is.
      items: yields (number, JSON) for the items of a file; `read_items` by default.
      whole: whether a file is one item. `parse` then takes the list of its `Event`s, and an error or a drop concerns
        the whole file.
    """

    parse: Callable[[Any, str, Any], Iterator[Record | LeftOut]]
    options: type = NoOptions
    releases: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    drops: str = ""
    items: Callable[[str | os.PathLike], Iterator[tuple[int, bytes]]] | None = None
    whole: bool = False

    def read(
        self,
        path: str | os.PathLike,
        *,
        on_error: str = "stop",
        rejects: jsonl.Rejects | None = None,
        on_drop: Callable[[str], None] = lambda reason: None,
        on_left_out: Callable[[LeftOut], None] = lambda part: None,
        on_bytes: Callable[[int], None] = lambda count: None,
        split: str | None = None,
        **options: Any,
    ) -> Iterator[tuple[str, Record]]:
        """Yields (key, valid record) for every item of a file, in order, with unique keys.

        Args:
          path: the file, as `read_items` takes it.
          on_error: `stop` raises at the first bad item; `skip` gives its bytes, or a table's row as JSON, to `rejects`.
          rejects: required for `skip`.
          on_drop: called with the reason for every item that the options exclude.
          on_left_out: called with every `LeftOut` of an item whose records are yielded.
          on_bytes: called with the size of every item, for progress.
          split: the list to read of a file that holds its splits.
          options: fields of `self.options`.

        Raises:
          RecordError: for `stop`: FILE:LINE, field, reason and remedy.
          ValueError: options that are unknown, missing or not allowed.
        """
        chosen = choose(self.options, options)
        reject = jsonl.reject_with(on_error, rejects)
        items = self.items or functools.partial(read_items, split=split)
        return self._read(items(path), path, chosen, reject, on_drop, on_left_out, on_bytes)

    def _read(self, items, path, options, reject, on_drop, on_left_out, on_bytes) -> Iterator[tuple[str, Record]]:
        readers: dict[tuple[str, ...], list[str]] = {}  # by the keys of refused items
        for number, raw, lines in self._whole(items):
            where, values = f"{os.fspath(path)}:{number}", []
            try:
                places = [f"{os.fspath(path)}:{line}" for line, _ in lines]
                values = [jsonl.parse(line, place) for (_, line), place in zip(lines, places, strict=True)]
                values = list(map(TextRow, values)) if is_csv(path) else values
                item = list(map(Event, places, values)) if self.whole else values[0]
                parsed = list(self.parse(item, where, options))
                records = [record for record in parsed if not isinstance(record, LeftOut)]
                for record in records:
                    check_record(record, where)
            except RecordError as error:
                reject(raw, _with_readers(error, values, readers) if error.remedy == OTHER_FILE else error)
            except Dropped as drop:
                on_drop(str(drop))
            else:
                for left in (part for part in parsed if isinstance(part, LeftOut)):
                    on_left_out(left)
                for part, record in enumerate(records):
                    yield f"{number}.{part}", record
            on_bytes(len(raw))

    def _whole(self, items) -> Iterator[tuple[int, bytes, list[tuple[int, bytes]]]]:
        """Yields an item's number, its bytes, and the lines that they are: one, or all of a file."""
        if not self.whole:
            yield from ((number, raw, [(number, raw)]) for number, raw in items)
        elif lines := list(items):
            yield lines[0][0], b"".join(line.rstrip(b"\n") + b"\n" for _, line in lines), lines


def choose(kind: type, options: Mapping[str, Any]) -> Any:
    """Returns the options as an instance of the dataclass `kind`.

    Raises:
      ValueError: an option is unknown, missing or has a value that is not allowed; the message lists what is.
    """
    try:
        return from_json(kind, dict(options))
    except OptionError as error:
        reason = f"{error.field}: {error.reason}. This reader has: {described(kind)}"
        raise ValueError(f"reader options (--set KEY=VALUE): {reason}") from error


def others(item: Mapping[str, Any], *known: str) -> Record:
    """Returns the keys of an item that its reader does not know."""
    return {key: value for key, value in item.items() if key not in known}


def check_record(record: Any, where: str) -> ReasoningTree | None:
    """Returns a record's tree, None for a problem without a solution. Raises RecordError."""
    if isinstance(record, Mapping) and not _SOLUTIONS.intersection(record) and "problem" in record:
        jsonl.text_of(record["problem"], where, "problem")
        jsonl.answer_of(record.get("answer"), where, "answer")
        return None
    return tree_of(record, where)


_SOLUTIONS = frozenset(("steps", "samples", "nodes", "messages", "response", "completions"))


def _with_readers(error: RecordError, values: list, known: dict[tuple[str, ...], list[str]]) -> RecordError:
    """Returns the error with the names of the readers that take the item, which are found once for its keys."""
    if not values or not isinstance(values[0], dict):
        return error
    keys = tuple(values[0])
    if keys not in known:
        known[keys] = importlib.import_module("jprm.methods.data.readers").readers_of(values[0])
    if _is_message(values[0]):
        remedy = 'This is one message: write a conversation as one record, {"messages": [...]}, or as a list.'
    elif names := known[keys]:
        remedy = f"This is a record of {' or '.join(names[:3])}: jprm prepare {names[0]}."
    else:
        remedy = "No reader takes it as it is: name its columns, jprm prepare columns --set problem=NAME steps=NAME."
    return RecordError(error.where, error.field, error.reason, remedy)


def is_csv(path: str | os.PathLike) -> bool:
    return os.fspath(path).lower().endswith((".csv", ".tsv"))


def read_items(path: str | os.PathLike, split: str | None = None) -> Iterator[tuple[int, bytes]]:
    """Yields (number from 1, JSON) for every line of a JSON Lines file, element of a list, row or prepared record.

    A first byte `[` makes a file a list, whose elements are numbered by their line; a list of messages is one item. A
    file that is a single object of several lists is their elements, in order (Mr-Ben has a list for each subject), and
    so is one with a single list under a name of `_LISTS`; another object is one item. If the lists are splits, `split`
    names the one to read. Tables are Parquet and Arrow files (`read_rows`), and CSV by its name (`read_csv`). The
    unreadable rest of a broken list is one last item, which `jprm.io.jsonl.parse` refuses. A file in a bucket is
    copied to this machine first. A folder is one that `jprm prepare` wrote.

    Raises ValueError for a file that holds splits, if none is named, and for a split that the file does not have.
    """
    if path_of(path).is_dir():
        yield from jsonl.read_lines(path)
        return
    path = local_copy(path)
    check_input(path)
    with open(path, "rb") as zipped, jsonl.unzipped(zipped, path) as file:
        if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            file.seek(0)
        head = file.read(1 << 20).lstrip()[:1]
    alone = _single_object(path, split) if head == b"{" and not is_csv(path) else None
    if split is not None and alone is None:
        raise ValueError(f"{os.fspath(path)}: holds no splits, so there is none named {split!r}: leave `split` out")
    if is_csv(path):
        yield from read_csv(path)
        return
    if jsonl.is_table(path):
        yield from read_rows(path)
        return
    if head != b"[":
        yield from jsonl.read_lines(path) if alone is None else alone
        return
    with (
        open(path, "rb") as zipped,
        jsonl.unzipped(zipped, path) as file,
    ):  # surrogateescape keeps other bytes as they are
        text = file.read().decode("utf-8", "surrogateescape")
    if conversation := _conversation(text):
        yield 1, conversation
        return
    decoder, number, seen, at = json.JSONDecoder(), 1, 0, _skip(text, text.index("[") + 1, "")
    broken = False
    while at < len(text) and text[at] != "]":
        number, seen = number + text.count("\n", seen, at), at
        try:
            end = decoder.raw_decode(text, at)[1]
        except (ValueError, RecursionError):
            end, broken = len(text), True
        yield number, text[at:end].encode("utf-8", "surrogateescape")
        at = _skip(text, end, ",")
    number += text.count("\n", seen, at)
    if at == len(text) and not broken:  # whole elements, but no `]`: the file was cut off after one
        yield number, b""
    elif text[at + 1 :].strip():  # two lists in one file
        yield number, text[at:].encode("utf-8", "surrogateescape")


_LISTS = frozenset("data dataset entries examples instances items problems questions records results rows".split())
"""Names under which a file's one object holds the list of its items, beside e.g. a version."""

_SPLIT = re.compile(r"(?:train|test|valid|validation|val|dev|eval|held_?out|holdout)\d*(?:[_-]\w+)?", re.IGNORECASE)

_RECORD = _SOLUTIONS | {"problem", "question", "prompt", "history", "trajectory", "traj"}
"""Keys that make an object an item, whatever lists it has."""


def _conversation(text: str) -> bytes | None:
    """Returns a list of messages as one item, `{"messages": [...]}`; None for another list."""
    try:
        first, _ = json.JSONDecoder().raw_decode(text, _skip(text, text.index("[") + 1, ""))
        messages = json.loads(text) if _is_message(first) else []
    except (ValueError, RecursionError):
        return None
    if not messages or not all(map(_is_message, messages)):
        return None
    return json.dumps({"messages": messages}, ensure_ascii=False).encode("utf-8", "surrogateescape")


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and not _RECORD.intersection(item)


def _single_object(path: str | os.PathLike, split: str | None) -> list[tuple[int, bytes]] | None:
    """Returns the items of a file that is one JSON object; None for another file, such as JSON Lines."""
    with open(path, "rb") as zipped, jsonl.unzipped(zipped, path) as file:
        lines = (line for line in file if line.strip())
        first, second = next(lines), next(lines, b"")
        try:
            json.loads(first)
            whole, content = not second, first
        except (ValueError, RecursionError):
            whole, content = bool(second), b"".join([first, second, *lines])
    try:
        value = json.loads(content) if whole else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    lists = {name: part for name, part in value.items() if _is_items(part)}
    splits = [name for name in lists if _SPLIT.fullmatch(name)]
    if split is not None:
        if split not in lists:
            raise ValueError(f"{os.fspath(path)}: holds no split {split!r}; it has {', '.join(lists) or 'none'}")
        lists = {split: lists[split]}
    elif len(splits) > 1:
        raise ValueError(f"{os.fspath(path)}: holds the splits {', '.join(splits)}. Name one with --set split=NAME")
    elif _RECORD.intersection(value):
        return [(1, content)]
    elif len(named := [name for name in lists if name in _LISTS or name in splits]) == 1:
        lists = {named[0]: lists[named[0]]} if len(lists) < len(value) else lists
    elif len(lists) < max(len(value), 2):
        return [(1, content)]
    items = [item for part in lists.values() for item in part]
    return [(number, json.dumps(item, ensure_ascii=False).encode()) for number, item in enumerate(items, start=1)]


def _is_items(part: Any) -> bool:
    return isinstance(part, list) and bool(part) and all(isinstance(item, dict) for item in part)


def _skip(text: str, at: int, separator: str) -> int:
    while at < len(text) and (text[at].isspace() or text[at] == separator):
        at += 1
    return at


def read_csv(path: pathlib.Path) -> Iterator[tuple[int, bytes]]:
    """Yields (line number, JSON object) for every row of a .csv or .tsv file, whose first row names the columns.

    Every cell is text, and a reader's field decides its type (`cells.py`). An empty cell is left out, and so is a
    column without a name, as pandas writes its index.

    Raises RecordError for a row of another length than the first, and for bytes that are no UTF-8.
    """
    csv.field_size_limit(LONGEST_CELL)
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            names = next(rows, [])
            for row in rows:
                if len(row) not in (0, len(names)):
                    reason = f"has {len(row)} cells, and the first row {len(names)}"
                    raise RecordError(f"{path}:{rows.line_num}", "row", reason, "Put text with commas in quotes.")
                cells = {name: text for name, text in zip(names, row, strict=False) if text and name}
                if cells:
                    yield rows.line_num, json.dumps(cells, ensure_ascii=False).encode()
        except (csv.Error, UnicodeDecodeError) as error:
            reason = f"cannot be read from here on: {error}"
            raise RecordError(f"{path}:{rows.line_num + 1}", "row", reason, "Write CSV in UTF-8.") from error


LONGEST_CELL = 2**24
"""Characters of a cell of CSV."""


# ---- Parquet and Arrow files, whose rows become JSON objects. Needs the extra `parquet`.

BATCH = 512
"""Rows that are in memory as Python objects at a time."""


def read_rows(path: str | os.PathLike) -> Iterator[tuple[int, bytes]]:
    """Yields (row number from 1, JSON object) for every row of a Parquet file, an Arrow file or an Arrow stream.

    A null field is left out, because a table cannot tell it from an absent one; a null in a list stays. Memory holds
    a row group of Parquet, or a record batch of Arrow, at a time.

    Raises:
      RecordError: a file that is broken or cut off, or a value that JSON does not have, such as bytes.
    """
    import pyarrow  # the extra `parquet`

    row, name = 0, os.fspath(path)
    try:
        for rows in _batches(name):
            for value in rows:
                row += 1
                yield row, json.dumps(_without_nulls(value), ensure_ascii=False, default=_plain).encode()
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        remedy = "The file is cut off or damaged: copy or download it again."
        raise RecordError(f"{name}:{row + 1}", "row", f"cannot be read from here on: {error}", remedy) from error
    except TypeError as error:
        raise RecordError(f"{name}:{row}", "row", str(error), "Drop this column, or write it as text.") from error


def _batches(path: str) -> Iterator[list[dict[str, Any]]]:
    """Yields rows in lists of at most `BATCH`."""
    import pyarrow
    from pyarrow import ipc, parquet

    with contextlib.ExitStack() as stack:
        file = stack.enter_context(pyarrow.memory_map(path))
        head = file.read(6)
        file.seek(0)
        if head.startswith(b"PAR1"):
            batches = stack.enter_context(parquet.ParquetFile(file)).iter_batches(BATCH)
        elif head == b"ARROW1":
            opened = ipc.open_file(file)
            batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
        else:
            batches = ipc.open_stream(file)
        for batch in batches:
            yield from (batch.slice(at, BATCH).to_pylist() for at in range(0, batch.num_rows, BATCH))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _plain(value: Any) -> str | int | float:
    if isinstance(value, decimal.Decimal):  # numbers of many databases are of this type
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime.date | datetime.time):
        return str(value)
    raise TypeError(f"holds {type(value).__name__}, which JSON does not have")


def until_error(first: int, steps: int, correct: bool | None) -> list[int | None]:
    """Returns labels of so many steps: 1 before the first wrong one, 0 at it and null after it; -1 stands for none.

    A solution whose answer is wrong (`correct` is false) has a wrong step. Where none is named, no step has a label.
    """
    if first == -1 and correct is False:
        return [None] * steps
    right = steps if first == -1 else first
    return ([1] * right + [0] + [None] * steps)[:steps]
