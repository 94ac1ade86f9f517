"""Batches of rows on the device while the host packs what follows, and how fast that was.

A thread makes items one ahead. A batch is dispatched before the results of the one before it are fetched, so the device
has work while the host reads results. A second thread waits for results and notes when they were there.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar, cast

import jax
import numpy as np

from jprm.rows import Rows, empty_rows

T = TypeVar("T")
R = TypeVar("R")

BATCHES = 2
"""Batches in flight: one that the device computes and one that waits for it."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows that the devices compute at once, filled up with padding, and what their slots hold."""

    rows: Rows
    problem_BS: np.ndarray  # tokens of each slot's problem
    tree_BS: np.ndarray  # the index of each slot's tree; -1 in unused slots
    node_BS: np.ndarray


def batches(rows: Rows, problem_BS: np.ndarray, tree_BS: np.ndarray, node_BS: np.ndarray, size: int) -> Iterator[Batch]:
    """Yields batches of `size` rows, the last one filled up with padding."""
    missing = -len(rows.tokens) % size
    if missing:
        filler = empty_rows(missing, rows.tokens.shape[1], rows.step_end.shape[1])
        fillers = filler, filler.step_end, filler.tree, filler.tree
        rows, problem_BS, tree_BS, node_BS = jax.tree.map(
            lambda a, b: np.concatenate([a, b]), (rows, problem_BS, tree_BS, node_BS), fillers
        )
    for first in range(0, len(rows.tokens), size):
        some = slice(first, first + size)
        yield Batch(*jax.tree.map(lambda a, i=some: a[i], (rows, problem_BS, tree_BS, node_BS)))


@dataclasses.dataclass
class Speed:
    """What the device did from the first batch's dispatch to the last result, in seconds of `clock`.

    waited: seconds in which no batch was in flight: the host was packing, compiling, or writing results.
    """

    clock: Callable[[], float] = time.monotonic
    tokens: int = 0  # without padding
    cells: int = 0  # with padding
    seconds: float = 0.0
    waited: float = 0.0
    _last: float | None = None

    def add(self, dispatched: float, finished: float) -> None:
        """Counts a batch's times. Batches are added in the order of their dispatch."""
        begun = dispatched if self._last is None else self._last
        self.waited += max(0.0, dispatched - begun)
        self.seconds += finished - begun
        self._last = finished

    def count(self, rows: Rows) -> None:
        """Counts a batch's tokens. A padding token is at position 0 and sees itself alone."""
        self.cells += rows.tokens.size
        self.tokens += int(((rows.position > 0) | (rows.until > np.arange(1, rows.tokens.shape[1] + 1))).sum())

    def __str__(self) -> str:
        return (
            f"{self.tokens / self.seconds:,.0f} tokens/s, {1 - self.tokens / self.cells:.0%} padding, the device waited"
            f" {self.waited / self.seconds:.0%} of {self.seconds:.1f} s for the host"
        )


def ahead(items: Iterable[T]) -> Iterator[T]:
    """Yields the items; a thread makes the next one meanwhile. What making an item raises is raised in its place."""
    end, items = object(), iter(items)
    with concurrent.futures.ThreadPoolExecutor(1, "jprm packing") as thread:
        made = thread.submit(next, items, end)
        while (item := made.result()) is not end:
            made = thread.submit(next, items, end)
            yield cast(T, item)


def in_flight(items: Iterable[T], dispatch: Callable[[T], Callable[[], R]], speed: Speed) -> Iterator[tuple[T, R]]:
    """Yields each item with its results, in order, after the next item is dispatched.

    `dispatch` returns a function that waits for the results; a thread calls it. What making or dispatching an item
    raises is raised after the results of the items before it.
    """
    waiting: collections.deque[tuple[T, float, concurrent.futures.Future]] = collections.deque()
    items, failure, more = iter(items), None, True

    def fetched(fetch: Callable[[], R]) -> tuple[R, float]:
        return fetch(), speed.clock()

    with concurrent.futures.ThreadPoolExecutor(1, "jprm fetching") as thread:
        while True:
            while more and len(waiting) < BATCHES:
                try:
                    item = next(items)
                    fetch = dispatch(item)
                    waiting.append((item, speed.clock(), thread.submit(fetched, fetch)))
                except StopIteration:
                    more = False
                except Exception as error:  # the results before it come first
                    failure, more = error, False
            if not waiting:
                break
            item, dispatched, future = waiting.popleft()
            results, finished = future.result()
            speed.add(dispatched, finished)
            yield item, results
    if failure is not None:
        raise failure
