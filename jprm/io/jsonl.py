"""JSON Lines files and prepared folders: reading with errors that name the place, and atomic writing."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, Self, cast

from jprm.io.folders import local_copy
from jprm.io.outputs import check_input
from jprm.io.storage import Growing, partial_of, path_of, records_file

_TABLES = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")
"""First bytes of Parquet files, Arrow files, and Arrow streams (as Hugging Face `datasets` stores them)."""

_GZIP = b"\x1f\x8b"
_REFUSED = (
    (_TABLES, "is a Parquet or Arrow file, where JSON Lines are read. Read it with `jprm prepare jsonl --input FILE"
     " --output DIR` (or `columns`; the extra `parquet`), and give DIR where a command takes prepared folders"),
    (b"version https://git-lfs.github.com/spec/", "is a git-LFS pointer, which stands for a file that was not"
     " downloaded. Run `git lfs pull` in its repository, or download the file itself"),
    ((b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00", b"BZh", b"PK\x03\x04"), "is compressed (zstd, xz, bzip2 or ZIP): unpack it"
     " first. Of compressed files, gzip's are read"),
)  # fmt: skip
"""First bytes of other file formats, with the error message."""


class RecordError(ValueError):
    """An invalid record: `FILE:LINE: FIELD: reason. remedy`."""

    def __init__(self, where: str, field: str, reason: str, remedy: str):
        reason = shortened(reason, 500)  # it may quote the record
        super().__init__(f"{where}: {field}: {reason}. {remedy}")
        self.where, self.field, self.reason, self.remedy = where, field, reason, remedy


DAMAGED = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""Errors from reading a damaged JSON file, e.g. with missing fields, wrong types, huge numbers or deep nesting."""


def printable(text: str) -> str:
    """Escapes invisible characters except newlines as Python does, e.g. ESC, which could move a terminal's cursor."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, limit: int) -> str:
    """Cuts out the middle of a text above `limit` characters: `START ... 99 more ... END`, each `limit // 2` long."""
    left = limit // 2
    return text if len(text) <= limit else f"{text[:left]} ... {len(text) - 2 * left:,} more ... {text[-left:]}"


def write_records(path: str | os.PathLike, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes one record per line to `PATH.partial`, renamed to `path` when complete; makes its folder.

    Raises ValueError if `path` is a link or folder, or being written by another process, or for a record as `dump`.
    """
    path = path_of(path)
    with path.alone(), path.replacing() as file:
        for record in records:
            file.write(dump(record).encode() + b"\n")


def read_lines(path: str | os.PathLike) -> Iterator[tuple[int, bytes]]:
    """Yields (line number from 1, bytes with line end) for each non-blank line of a plain or gzip file.

    The numbers count blank lines too. A prepared folder yields one line per record.

    Raises FileNotFoundError if the file is absent, or the folder not prepared; ValueError for a pipe, other formats
    (e.g. Parquet, zstd), a line above 256 MiB, or a truncated or concurrently changed file.
    """
    if path_of(path).is_dir():
        yield from enumerate((dump(record).encode() + b"\n" for record in PreparedRecords(path)), start=1)
        return
    with path_of(path).reading() as file, unzipped(file, path) as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1 and (kinds := [kind for heads, kind in _REFUSED if line.startswith(heads)]):
                raise ValueError(f"{os.fspath(path)}: {kinds[0]}")
            if line.strip():
                yield number, line


class PreparedRecords(Sequence):
    """Records of a folder from `jprm prepare`, read on access; picklable.

    A folder in a bucket is first copied to this machine. Raises FileNotFoundError if it is not fully prepared.
    """

    def __init__(self, folder: str | os.PathLike):
        import tensorflow_datasets as tfds  # a machine that only scores JSON Lines need not have it

        records_file(folder)
        folder = local_copy(folder)
        for file in (folder / "features.json", folder / "dataset_info.json"):
            if file.is_file() and _NAMES.search(_OWN.sub("", file.read_text("utf-8"))):
                raise ValueError(f"{file}: names code or files that `jprm prepare` does not. Prepare the data again")
        builder = tfds.builder_from_directory(folder)
        self._source: Any = builder.as_data_source(split="train")  # pyright: ignore[reportCallIssue]  # it is decorated

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return json.loads(self._source[range(len(self))[index]]["record"])


_NAMES = re.compile(r"class_?name|\"type\"|path_?template|\\u", re.IGNORECASE)
_OWN = re.compile(r'"pythonClassName": "tensorflow_datasets\.core\.features\.\w+\.\w+"|"filepathTemplate": "{[^"/\\]*"')
"""Names by which TFDS imports classes or reads arbitrary files; and the harmless ones that `jprm prepare` writes."""

LINE_BYTES, WHOLE_BYTES = 2**28, 2**30
"""Longest line, and largest file read at once: three megabytes of gzip can expand to gigabytes."""


class _Bounded(io.BufferedIOBase):
    """Wraps a file and bounds each read's size. Raises ValueError, naming the file."""

    def __init__(self, file: IO[bytes], path: str | os.PathLike):
        self._file, self._path, self.seek = file, path, file.seek

    def read(self, size: int | None = -1) -> bytes:
        return self._at_most(WHOLE_BYTES, self._file.read, size)

    def readline(self, size: int | None = -1) -> bytes:
        return self._at_most(LINE_BYTES, self._file.readline, size)

    def _at_most(self, most: int, call: Callable[[int], bytes], size: int | None) -> bytes:
        content = call(size if size is not None and 0 <= size <= most else most + 1)
        if len(content) > most:
            raise ValueError(f"{os.fspath(self._path)}: has more than {most:,} bytes in one line or list. Split it")
        return content


@contextlib.contextmanager
def unzipped(file: IO[bytes], path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """Yields the file's content from its start, decompressed if it is gzip; `path` is for errors.

    The block raises ValueError if it reads damaged or truncated gzip, a line above 256 MiB or 1 GiB at once.
    """
    compressed = file.read(len(_GZIP)) == _GZIP
    file.seek(0)
    try:
        yield cast(IO[bytes], _Bounded(cast(IO[bytes], gzip.GzipFile(fileobj=file)) if compressed else file, path))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{os.fspath(path)}: is a gzip file that is cut off or damaged: {error}") from error


def count(path: str | os.PathLike) -> int:
    """Counts non-blank lines. Raises ValueError if all are blank, and as `read_lines`."""
    lines = sum(1 for _ in read_lines(path))
    if not lines:
        raise ValueError(f"{os.fspath(path)}: holds no record: it is empty. Was the command that wrote it stopped?")
    return lines


def is_table(path: str | os.PathLike) -> bool:
    """Returns whether a local file is Parquet or Arrow. Raises FileNotFoundError, or ValueError for a pipe."""
    check_input(path)
    with open(path, "rb") as file:
        return file.read(max(map(len, _TABLES))).startswith(_TABLES)


def parse(line: bytes, where: str) -> Any:
    """Parses a line as JSON of any type. Errors begin with `where`, e.g. `samples.jsonl:12`.

    Raises RecordError if it is blank, no UTF-8 or whole JSON, or has NaN, infinity, a key twice or half a surrogate.
    """
    remedy = "Write whole JSON in UTF-8 (in JSON Lines, one object per line), with null for a missing number."
    if not line.strip():
        raise RecordError(where, "line", "is empty instead of a record: the file was cut off", remedy)
    try:
        value = json.loads(
            line.decode("utf-8-sig"), parse_constant=_refuse, parse_float=_finite, object_pairs_hook=without_doubles
        )
        if b"\\u" in line:  # an escape may stand for half a surrogate pair, which no file can hold
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        raise RecordError(where, "line", "holds half a surrogate pair", "Write whole characters.") from None
    except UnicodeDecodeError as error:
        raise RecordError(where, "line", f"is not UTF-8 at byte {error.start}", remedy) from None
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("; use sys.")[0]  # Python's own remedy for long integers is none here
        if line[:1].isalpha() and b"," in line:
            remedy = "Is it CSV? `jprm prepare columns` reads it. Else write one JSON object a line."
        raise RecordError(where, "line", f"is not JSON: {reason}", remedy) from None


def dump(record: Mapping[str, Any]) -> str:
    """Serialises a record to JSON, without line end. Raises ValueError for NaN or infinity, TypeError for odd types."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


class Rejects:
    """A file of rejected lines, byte for byte; a context manager.

    If the block succeeds, the file is renamed to `path`, or an earlier run's file is deleted if there are no rejects.
    If it fails, `path` is unchanged.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = path_of(path)
        self.errors: list[RecordError] = []
        self._written = contextlib.ExitStack()
        self._file = Growing(io.BytesIO(), self.path)  # before `__enter__`

    @property
    def count(self) -> int:
        return len(self.errors)

    def add(self, line: bytes, error: RecordError) -> None:
        """Stores the line, with a line end if it has none, and appends the error to `errors`."""
        self.errors.append(error)
        self._file.write(line if line.endswith(b"\n") else line + b"\n")

    def __enter__(self) -> Self:
        self._file = self._written.enter_context(path_of(partial_of(self.path)).growing())
        self._file.truncate(0)  # of a run that was killed
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with self._written:
            if kind is None and self.errors:
                self._file.become(self.path)
                return
            self._file.unlink()
            if kind is None:
                self.path.unlink(missing_ok=True)


def reject_with(on_error: str, rejects: Rejects | None) -> Callable[[bytes, RecordError], None]:
    """Returns `handle(line, error)` for bad lines: `stop` raises the error, `skip` adds both to `rejects`.

    Raises ValueError for another `on_error`, or `skip` without `rejects`.
    """
    if on_error == "skip" and rejects is not None:
        return rejects.add
    if on_error != "stop":
        raise ValueError(f"on_error is {on_error!r}: use 'stop', or 'skip' with `rejects` for the bad lines")

    def stop(line: bytes, error: RecordError) -> None:
        raise error

    return stop


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` of `json.loads`: returns the dict, or raises ValueError for duplicate keys."""
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {twice!r} is there twice in an object")
    return value


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large for a float")
    return number


# ------------------------------------------------------------------------------------------ checks of a record's fields
#
# Each returns the value, or raises `RecordError` with the place, the reason and a fix.


def type_name(value: Any) -> str:
    names = {type(None): "null or absent", bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def list_of(value: Any, where: str, field: str) -> list:
    """Returns a list; a tuple or array, as in pandas and `datasets` records, is converted. Else raises RecordError."""
    if isinstance(value, tuple) or type(value).__name__ == "ndarray":
        value = list(value) if isinstance(value, tuple) else value.tolist()
    if not isinstance(value, list):
        raise RecordError(where, field, f"is {type_name(value)}, not a list", "Write a JSON list.")
    return value


def object_of(value: Any, where: str, field: str, remedy: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RecordError(where, field, f"is {type_name(value)}, not an object", remedy)
    return value


def text_of(value: Any, where: str, field: str, *, blank: bool = False) -> str:
    """Returns the text unchanged. Raises RecordError if it is no text, half a surrogate, or blank (unless `blank`)."""
    if not isinstance(value, str):
        raise RecordError(where, field, f"is {type_name(value)}, not text", "Write a JSON string.")
    if not blank and (value.isspace() or not value.strip(" \n\u200b\u200c\u200d\u2060\ufeff")):
        raise RecordError(where, field, "is empty", "Remove it or give it text: nothing can be read from it.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RecordError(where, field, "holds half a surrogate pair", "Write whole characters.") from None
    return value


def number_of(value: Any, where: str, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecordError(where, field, f"is {type_name(value)}, not a number", "Write a finite number.")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        finite = False
    if not finite:
        raise RecordError(where, field, "is not a finite number", "Write a finite number, null where there is none.")
    return value


def label_of(value: Any, semantics: str, where: str, field: str) -> float | None:
    if value is None:
        return None
    number_of(value, where, field)
    if semantics == "rating" and value not in (-1, 0, 1):
        raise RecordError(where, field, f"is {value}, not a rating", "Use -1, 0, 1, or null where there is none.")
    if semantics in ("correctness", "value") and not 0 <= value <= 1:
        remedy = "Use [0, 1], null where there is none, or say `semantics`: rating, advantage or implicit."
        raise RecordError(where, field, f"is {value}, not a {semantics} in [0, 1]", remedy)
    return value


def correct_of(value: Any, where: str, field: str) -> bool | None:
    if not isinstance(value, bool | None):
        raise RecordError(where, field, f"is {type_name(value)}, not true or false", "Write true, false or null.")
    return value


def answer_of(value: Any, where: str, field: str) -> str | float | None:
    if isinstance(value, str) or value is None:
        return value
    return number_of(value, where, field)
