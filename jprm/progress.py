"""The progress bar of long commands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar(Progress):
    """Shows `what` is in progress and how much of `total` (None: unknown) is done. A context manager."""

    def __init__(self, what: str, total: int | None, done: int = 0):
        super().__init__(TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._task = self.add_task("", total=total, completed=done)

    def add(self, count: int = 1) -> None:
        self.advance(self._task, count)

    def follow(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yields the items and counts each once the next one is requested."""
        for item in items:
            yield item
            self.add()
