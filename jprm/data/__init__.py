"""Sources of step labels, prepared folders of records, and the pipeline that feeds training."""

import os
from collections.abc import Sequence
from typing import Any

from jprm.io.folders import local_copy
from jprm.tree import read_records

REPORT = "report.json"
"""The file that marks a folder as prepared. It is written last."""


def load(path: str | os.PathLike) -> Sequence[dict[str, Any]]:
    """Returns the records of a prepared folder, read when accessed, or of a JSON Lines file, all in memory.

    Data in a bucket are copied to this machine first (`jprm.io.folders`).

    Raises:
      FileNotFoundError: the path does not exist, or is a folder that is not fully prepared.
      RecordError: a line of the file that is no record.
    """
    path = local_copy(path)
    if path.is_file():
        return list(read_records(path))
    if not (path / REPORT).is_file():
        what = f"is not a prepared folder: it has no {REPORT}" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{path}: {what}. Make one with `jprm prepare NAME --source FILE --out {path}`.")
    from jprm.data.store import PreparedRecords  # a machine that only scores JSON Lines need not have TFDS

    return PreparedRecords(path)
