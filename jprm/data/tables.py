"""Parquet and Arrow files as items: a row becomes the JSON object that a reader expects. Needs the extra `parquet`."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import json
import os
from collections.abc import Iterator
from typing import Any

from jprm.tree import RecordError

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


def _plain(value: Any) -> str:
    if isinstance(value, datetime.date | datetime.time | decimal.Decimal):
        return str(value)
    raise TypeError(f"holds {type(value).__name__}, which JSON does not have")
