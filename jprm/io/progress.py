"""The progress bar of long commands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar(Progress):
    """Shows `what` is in progress, how much of `total` (None: unknown) is done, and a note. A context manager."""

    def __init__(self, what: str, total: int | None, done: int = 0, note: str = "", shown: bool = True):
        columns = (
            TextColumn("{task.fields[what]}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        super().__init__(*columns, TextColumn("{task.description}"), disable=not shown)
        self._task = self.add_task(note, total=total, completed=done, what=what)

    def add(self, count: int = 1, note: str | None = None) -> None:
        self.update(self._task, advance=count, description=note)

    def follow(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yields the items and counts each once the next one is requested."""
        for item in items:
            yield item
            self.add()
