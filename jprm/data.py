"""Records to train on or score, from a JSON Lines file or a folder of `jprm prepare`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from jprm.io.folders import local_copy
from jprm.io.jsonl import PreparedRecords
from jprm.io.storage import PREPARE, REPORT, path_of
from jprm.tree import read_records

SHARDS = "tokens.json"
"""File that marks a folder of `jprm tokenise` as complete; written last."""

REQUEST = "request.json"
"""File with everything that a folder's shards depend on; written first."""


def load(path: str | os.PathLike) -> Sequence[dict[str, Any]]:
    """Returns the records of a prepared folder, read when accessed, or of a JSON Lines file, all in memory.

    Data in a bucket are copied to this machine first (`jprm.io.folders`).

    Raises:
      FileNotFoundError: the path does not exist, or is a folder that is not fully prepared.
      ValueError: a line is not a record (RecordError), the file is truncated, or a folder names foreign code.
      OSError: a bucket cannot be read.
    """
    path = local_copy(path)
    if path.is_dir():
        return PreparedRecords(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: does not exist. {PREPARE}")
    return list(read_records(path))


def is_shards(path: str | os.PathLike) -> bool:
    """Returns whether a path is a folder of token shards (`False` if absent). Raises ValueError if some are missing."""
    place = path_of(path)
    if (place / SHARDS).is_file():
        return True
    if (place / REQUEST).is_file() and not (place / REPORT).is_file():
        raise ValueError(f"{path}: its shards of tokens are not all written. Run its `jprm tokenise` again")
    return False
