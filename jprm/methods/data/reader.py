"""The base class of readers: a source file is a list of items, and a reader turns each item into records.

A file is JSON Lines, a JSON list, a JSON object of lists, Parquet or Arrow, detected by its first bytes, or CSV,
detected by its name. JSON may be compressed with gzip.

To add a source, write one small file with a frozen dataclass of options, a pure generator `parse(item, where,
options)`, and a `Reader` that joins them; list it in `jprm.methods.data.readers`.
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
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jprm.io import jsonl
from jprm.io.folders import local_copy
from jprm.io.outputs import check_input
from jprm.io.storage import path_of
from jprm.methods.data.cells import OTHER_FILE, TextRow, holds, take
from jprm.options import OptionError, described, from_json
from jprm.tree import ReasoningTree, RecordError, check_id, tree_of

__all__ = ["Reader", "Record", "choose", "others", "read_items", "take", "until_error"]

Record = dict[str, Any]


class Dropped(Exception):
    """Raised by `parse` if the options exclude an item, or its agent has no turn. The report counts the messages."""


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """For readers without options."""


class LeftOut(NamedTuple):
    """Yielded by `parse` beside its records: item parts that are not stored, counted by name in the report."""

    what: str  # e.g. "line of type 'summary'"
    count: int


class Event(NamedTuple):
    """One line in a file that is read as a whole, e.g. an agent transcript."""

    where: str  # FILE:LINE
    value: Any


@dataclasses.dataclass(frozen=True)
class Reader:
    """Describes how one source is read.

    Attributes:
      parse: (item, where, options) -> records. Must raise `RecordError` if the item has another form, and `Dropped` if
        the options exclude it or its agent has no turn. May also yield `LeftOut`. It is given the item's parsed JSON (a
        `TextRow` for CSV), FILE:LINE for errors, and the options. `read` validates its records.
      options: frozen dataclass; a field without a default is required.
      releases: URL of each public file -> its SHA-256, if known.
      drops: the item parts that records never hold, as printed by `jprm prepare`, e.g. "images"; empty if records hold
        everything.
      items: yields (number, JSON) for each item of a file; `read_items` by default.
      whole: the whole file is one item. `parse` then takes the list of its `Event`s, and an error or drop rejects the
        file.
      columns: options -> dotted paths, e.g. `doc.labels`. At least one item of a file must have each; without this
        check a misspelt optional column would be null everywhere.
      unique_ids: the items are jprm's own records, whose ids must differ, as in every file that `jprm score` reads.
    """

    parse: Callable[[Any, str, Any], Iterator[Record | LeftOut]]
    options: type = NoOptions
    releases: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    drops: str = ""
    items: Callable[[str | os.PathLike], Iterator[tuple[int, bytes]]] | None = None
    whole: bool = False
    columns: Callable[[Any], Iterable[str]] = lambda options: ()
    unique_ids: bool = False

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
        first_of: dict[str, str] | None = None,
        **options: Any,
    ) -> Iterator[tuple[str, Record]]:
        """Yields (key, valid record) in order; the key, e.g. `12.0`, joins the item's number and the record's from 0.

        Reads lazily; options are checked at once.

        Args:
          path: any file that `read_items` accepts.
          on_error: `stop` raises at the first bad item; `skip` passes its bytes (a table row as JSON) to `rejects`.
          rejects: required for `skip`.
          on_drop: called with the reason for each dropped item.
          on_left_out: called with each `LeftOut` of an accepted item.
          on_bytes: called with each item's size in bytes, uncompressed, also if it is rejected.
          split: the list to read if the file holds several splits; a reader's own `items` ignores it.
          first_of: with `unique_ids`, ids in earlier files and their places, to which this file's are added.
          options: fields of `self.options`.

        Raises:
          RecordError: an item is bad and `on_error` is `stop`; names FILE:LINE, field, reason and remedy. Also, at the
            end of the file, if an optional column is in no record.
          ValueError: an option is unknown, missing or has a wrong value, `skip` has no `rejects`, or the file is a
            pipe, damaged gzip, or has other splits.
          FileNotFoundError: the file is missing.
          ImportError: the file is a table, and the extra `parquet` is missing.
        """
        chosen = choose(self.options, options)
        reject = jsonl.reject_with(on_error, rejects)
        items = self.items or functools.partial(read_items, split=split)
        ids = {} if first_of is None else first_of
        return self._read(items(path), path, chosen, reject, ids, on_drop, on_left_out, on_bytes)

    def _read(self, items, path, options, reject, ids, on_drop, on_left_out, on_bytes) -> Iterator[tuple[str, Record]]:
        readers: dict[tuple[str, ...], list[str]] = {}  # by the keys of refused items
        absent, where = set(self.columns(options)), ""
        for number, raw, lines in self._whole(items):
            where, values = f"{os.fspath(path)}:{number}", []
            try:
                events, unread = self._events(lines, path)
                values = [event.value for event in events]
                values = list(map(TextRow, values)) if is_csv(path) else values
                absent = {column for column in absent if not holds(values[0], column)}
                item = events if self.whole else values[0]
                parsed = [*self.parse(item, where, options), *unread]
                records = [record for record in parsed if not isinstance(record, LeftOut)]
                for record in records:
                    check_record(record, where)
                    if self.unique_ids:
                        check_id(record, where, where, ids)
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
        if absent and where:
            remedy = "Name a column that the file has, or leave the option out."
            raise RecordError(os.fspath(path), ", ".join(sorted(absent)), "is in no record", remedy)

    def _events(self, lines: Sequence[tuple[int, bytes]], path: Any) -> tuple[list[Event], list[LeftOut]]:
        """Parses an item's lines. If `whole`, lines that are not JSON (e.g. a last one cut off) are left out."""
        events, errors = [], []
        for number, line in lines:
            place = f"{os.fspath(path)}:{number}"
            try:
                events.append(Event(place, jsonl.parse(line, place)))
            except RecordError as error:
                errors.append(error)
        if errors and not (self.whole and events):
            raise errors[0]
        return events, [LeftOut("line that is not JSON", len(errors))] if errors else []

    def _whole(self, items) -> Iterator[tuple[int, bytes, list[tuple[int, bytes]]]]:
        """Yields (number, bytes, lines) for each item: one line each, or all lines of the file if `whole`."""
        if not self.whole:
            yield from ((number, raw, [(number, raw)]) for number, raw in items)
        elif lines := list(items):
            yield lines[0][0], b"".join(line.rstrip(b"\n") + b"\n" for _, line in lines), lines


def choose(kind: type, options: Mapping[str, Any]) -> Any:
    """Returns an instance of the options dataclass `kind`, built from values by field name.

    Raises ValueError, which lists the options, if one is unknown, missing or has a wrong value.
    """
    try:
        return from_json(kind, dict(options))
    except OptionError as error:
        reason = f"{error.field}: {error.reason}. This reader has: {described(kind)}"
        raise ValueError(f"reader options (--set KEY=VALUE): {reason}") from error


def others(item: Mapping[str, Any], *known: str) -> Record:
    """Returns a copy of the item without the `known` keys, which it may lack."""
    return {key: value for key, value in item.items() if key not in known}


def object_in(item: Mapping[str, Any], key: str, absent: Mapping[str, Any] = {}) -> Mapping[str, Any]:
    """Returns the object under a key, or `absent` (by default {}) if the key is missing or has another value."""
    return held if isinstance(held := item.get(key), Mapping) else absent


def check_record(record: Any, where: str) -> ReasoningTree | None:
    """Validates a record; returns its tree, or `None` for a problem without a solution.

    Raises RecordError, beginning with `where`, if the record is invalid.
    """
    if isinstance(record, Mapping) and not _SOLUTIONS.intersection(record) and "problem" in record:
        jsonl.text_of(record["problem"], where, "problem")
        jsonl.answer_of(record.get("answer"), where, "answer")
        return None
    return tree_of(record, where)


_SOLUTIONS = frozenset(("steps", "samples", "nodes", "messages", "response", "completions"))


def _with_readers(error: RecordError, values: list, known: dict[tuple[str, ...], list[str]]) -> RecordError:
    """Adds the names of readers that accept the item to the error's remedy; cached by the item's keys."""
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
        remedy = (
            "No reader takes this record. Name its columns: jprm prepare columns --set problem=NAME steps=NAME, or"
            " samples=NAME for whole solutions. If the file is an agent's session, use its reader, e.g. claude_code."
        )
    return RecordError(error.where, error.field, error.reason, remedy)


def is_csv(path: str | os.PathLike) -> bool:
    return os.fspath(path).lower().endswith((".csv", ".tsv"))


def read_items(path: str | os.PathLike, split: str | None = None) -> Iterator[tuple[int, bytes]]:
    """Yields (number from 1, JSON) for every item of a file.

    - A JSON list (first byte `[`) yields its elements, numbered by line. A list of messages is one item.
    - A single JSON object yields the elements of all its lists if it has only lists (e.g. one per subject in Mr-Ben),
      or of the one under `data`, `dataset`, `entries`, `examples`, `instances`, `items`, `problems`, `questions`,
      `records`, `results` or `rows`; its other keys are then ignored. Otherwise, or with a record's key such as
      `problem` or `steps`, it is one item. If the lists are splits, e.g. `train` and `test`, `split` must name one.
    - Tables are Parquet and Arrow (`read_rows`) and CSV (`read_csv`).
    - A folder must be written by `jprm prepare`. A file in a bucket is copied to this machine first.
    - If a list is broken, its rest is the last item, which `jprm.io.jsonl.parse` rejects.

    Raises ValueError if the file holds splits and `split` is missing, if it lacks that split, or if it is a pipe or
    damaged gzip; FileNotFoundError if it is missing; RecordError if a table is broken, and ImportError if reading it
    needs the extra `parquet`.
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
"""Keys under which a single JSON object may hold its items, e.g. beside a version."""

_SPLIT = re.compile(r"(?:train|test|valid|validation|val|dev|eval|held_?out|holdout)\d*(?:[_-]\w+)?", re.IGNORECASE)

_RECORD = _SOLUTIONS | {"problem", "question", "prompt", "history", "trajectory", "traj", "simulations"}
"""Keys that make an object one item, whatever lists it holds."""


def _conversation(text: str) -> bytes | None:
    """Wraps a list as one item, `{"messages": [...]}`, if it is a list of messages."""
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
    """Returns the items of a file, if it is one JSON object and not e.g. JSON Lines."""
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
    """Yields (line number, JSON object) for every row of a .csv or .tsv file; the first row must name the columns.

    Cells stay text until a reader asks for a type (`cells.py`). Empty rows and cells, and columns without a name (such
    as the index that pandas writes), are left out.

    Raises RecordError if a row has a different length from the first, or the file is not UTF-8.
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
"""The most characters in a CSV cell."""


# ---- Parquet and Arrow files: each row becomes a JSON object. Needs the extra `parquet`.

BATCH = 512
"""Table rows held in memory as Python objects at a time; fewer if their texts may be long."""

PAGE_ROW_BYTES = 2**20
"""The mean size of rows from which a large row group is refused: writers put up to 1,024 rows into a page."""


def read_rows(path: str | os.PathLike) -> Iterator[tuple[int, bytes]]:
    """Yields (row number from 1, JSON object) for every row of a Parquet or Arrow file.

    Null fields are left out, because a table cannot distinguish them from absent ones; nulls inside lists stay. Memory
    holds one Parquet row group or Arrow record batch. Decimals become numbers, and dates ISO text.

    Raises ImportError without the extra `parquet`, and RecordError if the file is missing, broken or cut off, a value
    has no JSON form, e.g. bytes, or a row or page is too large.
    """
    import pyarrow  # the extra `parquet`

    row, name = 0, os.fspath(path)
    try:
        for rows in _batches(name):
            for value in rows:
                row += 1
                raw = json.dumps(_without_nulls(value), ensure_ascii=False, default=_plain).encode()
                if len(raw) > jsonl.LINE_BYTES:
                    reason = f"has {len(raw):,} bytes, more than {jsonl.LINE_BYTES:,}"
                    raise RecordError(f"{name}:{row}", "row", reason, "Split it.")
                yield row, raw
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        remedy = "The file is cut off or damaged: copy or download it again."
        raise RecordError(f"{name}:{row + 1}", "row", f"cannot be read from here on: {error}", remedy) from error
    except TypeError as error:
        raise RecordError(f"{name}:{row}", "row", str(error), "Drop this column, or write it as text.") from error


def _batches(path: str) -> Iterator[list[dict[str, Any]]]:
    """Yields lists of at most `BATCH` rows."""
    import pyarrow
    from pyarrow import ipc, parquet

    with contextlib.ExitStack() as stack:
        file = stack.enter_context(pyarrow.memory_map(path))
        head = file.read(6)
        file.seek(0)
        if head.startswith(b"PAR1"):
            opened = stack.enter_context(parquet.ParquetFile(file))
            batches = itertools.chain.from_iterable(
                opened.iter_batches(_rows_at_once(opened.metadata.row_group(i), f"{path}: row group {i + 1}"), [i])
                for i in range(opened.num_row_groups)
            )
        elif head == b"ARROW1":
            opened = ipc.open_file(file)
            batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
        else:
            batches = ipc.open_stream(file)
        for batch in batches:
            rows = max(1, min(BATCH, jsonl.WHOLE_BYTES // max(batch.nbytes, 1)))  # all may be one text of a dictionary
            yield from (batch.slice(at, rows).to_pylist() for at in range(0, batch.num_rows, rows))


def _rows_at_once(group: Any, where: str) -> int:
    """Returns how many rows of a Parquet row group to decode at a time, so that they take `WHOLE_BYTES` at most.

    A few kilobytes of Parquet can expand to gigabytes: every value of a column may be one long text of its dictionary,
    and a page, which is decompressed as a whole, may hold a row group. Raises RecordError for such pages.
    """
    columns = [group.column(i) for i in range(group.num_columns)]
    size = sum(column.total_uncompressed_size for column in columns)
    if size > jsonl.WHOLE_BYTES and size > PAGE_ROW_BYTES * group.num_rows:
        reason = f"has {size:,} bytes in {group.num_rows:,} rows, more than {jsonl.WHOLE_BYTES:,}"
        raise RecordError(where, "size", reason, "Write smaller row groups, or shorter texts.")
    texts = [column for column in columns if column.has_dictionary_page]
    most = sum(x.total_uncompressed_size * max(1, x.num_values // max(group.num_rows, 1)) for x in texts)
    return max(1, min(BATCH, jsonl.WHOLE_BYTES // max(most, 1)))


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
    """Returns `steps` labels: 1 before the first wrong step (index `first` from 0), 0 at it, `None` after it.

    `first` is -1 if every step is right; all then get 1. But if `correct`, the verdict on the chain's answer, is
    `False`, the wrong step is unknown, so every label is `None`.
    """
    if first == -1 and correct is False:
        return [None] * steps
    right = steps if first == -1 else first
    return ([1] * right + [0] + [None] * steps)[:steps]
