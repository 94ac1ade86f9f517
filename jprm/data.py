"""Records to train on or score: those of a JSON Lines file, or of a folder that `jprm prepare` wrote."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from jprm.io import jsonl
from jprm.io.folders import local_copy
from jprm.io.storage import Place, path_of
from jprm.tree import read_records

REPORT = "report.json"
"""The file that marks a folder as prepared. It is written last."""

SHARDS = "tokens.json"
"""The file that marks a folder as whole shards of tokens. It is written last."""

REQUEST = "request.json"
"""What the shards of a folder that is being written depend on."""


def load(path: str | os.PathLike) -> Sequence[dict[str, Any]]:
    """Returns the records of a prepared folder, read when accessed, or of a JSON Lines file, all in memory.

    Data in a bucket are copied to this machine first (`jprm.io.folders`).

    Raises:
      FileNotFoundError: the path does not exist, or is a folder that is not fully prepared.
      RecordError: a line of the file that is no record.
    """
    path = local_copy(path)
    if path.exists():
        path_of(path).check_readable()
    if path.is_file():
        return list(read_records(path))
    _check_prepared(path)
    return PreparedRecords(path)


def _check_prepared(path: pathlib.Path | Place) -> None:
    if not (path / REPORT).is_file():
        what = f"is not a prepared folder: it has no {REPORT}" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{path}: {what}. Make one with `jprm prepare NAME --input FILE --output {path}`.")


def lines(path: str | os.PathLike) -> Iterator[tuple[int, bytes]]:
    """Yields (number from 1, JSON) for every line of a file, as `jsonl.read_lines`, or record of a prepared folder."""
    if not path_of(path).is_dir():
        yield from jsonl.read_lines(path)
        return
    for number, record in enumerate(load(path), start=1):
        yield number, jsonl.dump(record).encode() + b"\n"


def count(path: str | os.PathLike) -> int:
    """Returns how many records there are, as `jsonl.count` and with its error."""
    return len(load(path)) if path_of(path).is_dir() else jsonl.count(path)


def marker(path: str | os.PathLike) -> Place:
    """Returns the file whose content tells whether the records are still the same: a prepared folder's report.

    Raises FileNotFoundError for a folder without one.
    """
    place = path_of(path)
    if not place.is_dir():
        return place
    _check_prepared(place)
    return place / REPORT


def is_shards(path: str | os.PathLike) -> bool:
    """Returns whether a path is a folder of shards of tokens. Raises ValueError where it is not all written."""
    place = path_of(path)
    if (place / SHARDS).is_file():
        return True
    if (place / REQUEST).is_file() and not (place / REPORT).is_file():
        raise ValueError(f"{path}: its shards of tokens are not all written. Run its `jprm tokenise` again")
    return False


class PreparedRecords(Sequence):
    """The records of a prepared folder, each read when accessed; picklable."""

    def __init__(self, folder: str | os.PathLike):
        import tensorflow_datasets as tfds  # a machine that only scores JSON Lines need not have it

        builder = tfds.builder_from_directory(folder)
        self._source: Any = builder.as_data_source(split="train")  # pyright: ignore[reportCallIssue]  # it is decorated

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return json.loads(self._source[range(len(self))[index]]["record"])
