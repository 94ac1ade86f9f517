"""Cancellable work in threads: it checks between pieces whether its future was cancelled."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jprm.methods.policy.protocol import Policy, Prefix, Sample

PIECE = 32
"""Samples that a policy draws between two checks; as many as a server processes at once."""


class Work(concurrent.futures.Future):
    """The future of work in a thread. A thread cannot be interrupted, so `cancel` also asks running work to stop."""

    stopped = False

    def cancel(self) -> bool:
        self.stopped = True
        return super().cancel()


class Abandoned(Exception):
    """The work was cancelled."""


def started(pool: concurrent.futures.ThreadPoolExecutor, function: Callable[[Work], Any]) -> Work:
    """Runs a function in a thread of the pool; it receives its own future, which is returned at once.

    The future has the function's result or error. Cancelled before its start, the function does not run.
    """
    work = Work()

    def run() -> None:
        if not work.set_running_or_notify_cancel():
            return
        try:
            work.set_result(function(work))
        except BaseException as error:
            work.set_exception(error)

    pool.submit(run)
    return work


@dataclasses.dataclass
class InPieces:
    """A policy that samples in pieces; raises `Abandoned` if the work was cancelled.

    Samples are numbered, so they equal those of a single call. After each piece, `tell` receives the counts so far.
    """

    policy: Policy
    work: Work
    tell: Callable[[dict[str, int]], Any] = lambda counts: None

    def __post_init__(self):
        self.name, self.samples, self.tokens = self.policy.name, 0, 0

    def sample(self, prefixes: Sequence[Prefix], n: int, *, until: Any, seed: int) -> list[list[Sample]]:
        samples: list[list[Sample]] = [[] for _ in prefixes]
        for first in range(0, n, PIECE):
            m = min(PIECE, n - first)
            for i in range(0, len(prefixes), step := PIECE // m):
                if self.work.stopped:
                    raise Abandoned
                piece = self.policy.sample(prefixes[i : i + step], m, until=until, seed=seed + first)
                for place, drawn in enumerate(piece, start=i):
                    samples[place] += drawn
                    self.samples += len(drawn)
                    self.tokens += sum(sample.tokens for sample in drawn)
                self.tell({"samples": self.samples, "completion_tokens": self.tokens})
        return samples
