"""The file of events: appended, on the disk before it is acknowledged, and whole after any kill."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from jprm.io.jsonl import dump, parse
from jprm.io.outputs import only_writer


class LogFailed(OSError):
    """The disk took an event neither back nor for certain: only a restart, which reads the file anew, can tell."""


class Log:
    """A JSON Lines file that one process appends to.

    A line is written, flushed to the disk and only then acknowledged. A line without its end was never acknowledged: it
    is cut off when the file is opened.
    """

    def __init__(self, file: Any):
        self._file, self._lock, self._failed = file, threading.Lock(), False
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        text = _all(file.fileno())
        self._end = text.rfind(b"\n") + 1
        os.ftruncate(file.fileno(), self._end)
        os.fsync(file.fileno())
        self.events: list[dict[str, Any]] = [
            parse(line, f"{file.name}:{number}")
            for number, line in enumerate(text[: self._end].split(b"\n")[:-1], start=1)
        ]

    def append(self, event: Mapping[str, Any]) -> None:
        """Appends an event, which is on the disk when this returns.

        Raises:
          OSError: the disk is full or takes no more. Nothing of the event is left in the file.
          LogFailed: what the file holds is not known. Every further call raises it.
        """
        with self._lock:
            if self._failed:
                raise LogFailed("an earlier event failed on the disk: start the server again")
            descriptor, line = self._file.fileno(), dump(event).encode() + b"\n"
            try:
                left = memoryview(line)
                while left:
                    left = left[os.write(descriptor, left) :]
            except OSError:
                self._failed = True
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, self._end)
                    self._failed = False
                raise
            try:
                os.fsync(descriptor)
            except OSError as error:  # the kernel may have dropped the page, and a second fsync would not say so
                self._failed = True
                raise LogFailed(f"{self._file.name}: {error.strerror}") from error
            self._end += len(line)


@contextlib.contextmanager
def opened(path: str | os.PathLike) -> Iterator[Log]:
    """Opens the file, made if it is not there, against other processes.

    Raises RecordError for a line that is not JSON, ValueError where another process has the file open.
    """
    with only_writer(path) as file:
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
        try:
            os.fsync(folder)  # the file's name
        finally:
            os.close(folder)
        yield Log(file)


def _all(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, 2**20):
        parts.append(part)
    return b"".join(parts)
