"""The device thread: it takes what waits whenever the device is free, and packs equal problems into one tree."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jprm.score.prefix_cache import PrefixCache
from jprm.score.scorer import PRM
from jprm.token_tree import chain_lengths, geometry, token_tree
from jprm.tree import ReasoningTree

BATCH_TOKENS = 8192
"""Tokens that one turn takes from the queue: several rows, and still an answer in reasonable time."""

Outputs = dict[str, np.ndarray]


class Closed(Exception):
    """The engine ends and takes no more work."""


@dataclasses.dataclass(eq=False)
class _Job:
    """Trees to score with each other, or a function for the device thread."""

    trees: Sequence[ReasoningTree]
    tokens: int
    run: Callable[[], Any] | None  # of a job that is done by itself
    future: concurrent.futures.Future


class Engine:
    """Scores trees of many callers on one thread.

    Trees of different callers share rows, and those with equal problems one tree, so that their common prefixes are
    computed once. A job that fails is tried again by itself, and only the caller at fault sees the error.

    Args:
      cache: from which a caller's next tree is scored without the tokens of the one before.
    """

    def __init__(self, prm: PRM, longest: int, name: str, cache: PrefixCache | None = None):
        self.prm, self.longest, self.name, self.cache = prm, longest, name, cache
        self.waiting_tokens = self.busy_tokens = self.cached_tokens = 0
        self.rate = 0.0  # tokens a second, measured
        self._jobs: collections.deque[_Job] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="jprm device", daemon=True)
        self._thread.start()

    def tokens_of(self, trees: Sequence[ReasoningTree]) -> int:
        """Returns the tokens of the trees. Raises ValueError for a chain longer than the server or model takes."""
        total = 0
        for tree in trees:
            made = token_tree(tree, self.prm.layout)
            longest = int(geometry(made.length_R, made.parent_R).depth_R.max(initial=0))
            self.prm.check_length(longest, "the request")
            if max(longest, 2 * int(chain_lengths(made).max(initial=0))) > self.longest:
                limit = f"{self.longest:,} tokens and {self.longest // 2:,} steps"
                raise ValueError(f"a chain has {longest:,} tokens, and this server takes at most {limit}")
            total += len(made.tokens_N)
        return total

    def score(self, trees: Sequence[ReasoningTree], tokens: int) -> concurrent.futures.Future[list[Outputs]]:
        """Returns the future of each tree's named outputs, as `PRM.outputs_of` gives them."""
        return self._add(_Job(trees, tokens, None, concurrent.futures.Future()))

    def run(self, function: Callable[[], Any], tokens: int = 0) -> concurrent.futures.Future:
        """Returns the future of what a function returns on the device thread, with nothing else packed beside it."""
        return self._add(_Job((), tokens, function, concurrent.futures.Future()))

    def score_cached(
        self, tree: ReasoningTree, tokens: int, caller: str
    ) -> concurrent.futures.Future[tuple[Outputs, int]]:
        """Returns the future of a tree's named outputs, and of how many of its tokens earlier trees of the caller had.

        Without a cache, or for a tree larger than it, everything is computed.
        """
        cache = self.cache
        if cache is None or tokens > cache.slots:
            return self.run(lambda: (self.prm.outputs_of([tree])[0], 0), tokens)

        def run() -> tuple[Outputs, int]:
            outputs, cached = cache.outputs_of(tree, caller)
            self.cached_tokens += cached
            return outputs, cached

        return self.run(run, tokens)

    def wait_seconds(self) -> float:
        """Returns how long new work would wait, by the measured rate; 0 before anything was measured."""
        with self._changed:
            return (self.waiting_tokens + self.busy_tokens) / self.rate if self.rate else 0.0

    def close(self) -> None:
        """Finishes what waits, then ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _add(self, job: _Job) -> concurrent.futures.Future:
        with self._changed:
            if self._closed:
                raise Closed("the server is shutting down")
            self._jobs.append(job)
            self.waiting_tokens += job.tokens
            self._changed.notify_all()
        return job.future

    def _work(self) -> None:
        while batch := self._take():
            began, cached = time.monotonic(), self.cached_tokens
            if batch[0].run is not None:
                _settle(batch[0], batch[0].run)
            else:
                self._score(batch)
            with self._changed:
                tokens, self.busy_tokens = self.busy_tokens - (self.cached_tokens - cached), 0
                if tokens > 0:
                    rate = tokens / max(time.monotonic() - began, 1e-6)
                    self.rate = rate if not self.rate else 0.8 * self.rate + 0.2 * rate

    def _take(self) -> list[_Job]:
        """Returns the next jobs that nobody has cancelled; none when the engine has closed."""
        with self._changed:
            batch: list[_Job] = []
            while not batch:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return []
                tokens = 0
                while self._jobs:
                    job = self._jobs[0]
                    if batch and (job.run or batch[0].run or tokens + job.tokens > BATCH_TOKENS):
                        break
                    self._jobs.popleft()
                    self.waiting_tokens -= job.tokens
                    if job.future.set_running_or_notify_cancel():
                        batch.append(job)
                        tokens += job.tokens
            self.busy_tokens = tokens
            return batch

    def _score(self, batch: list[_Job]) -> None:
        if len(batch) == 1:
            _settle(batch[0], lambda: scored_together(self.prm, batch[0].trees))
            return
        try:
            found = scored_together(self.prm, [tree for job in batch for tree in job.trees])
        except Exception:  # whatever it is, it is one caller's: each job is tried alone, and keeps its own error
            for job in batch:
                _settle(job, lambda job=job: scored_together(self.prm, job.trees))
            return
        at = 0
        for job in batch:
            job.future.set_result(found[at : at + len(job.trees)])
            at += len(job.trees)


def scored_together(prm: PRM, trees: Sequence[ReasoningTree]) -> list[Outputs]:
    """Returns the named outputs of each tree, (N,) float32; trees with equal problems are scored as one tree."""
    members: dict[str, list[int]] = {}
    for index, tree in enumerate(trees):
        members.setdefault(tree.problem, []).append(index)
    merged = [_merged([trees[i] for i in some]) for some in members.values()]
    found: list[Outputs] = [{} for _ in trees]
    for some, outputs in zip(members.values(), prm.outputs_of(merged), strict=True):
        at = 0
        for index in some:
            size = len(trees[index].nodes)
            found[index] = {name: value_N[at : at + size] for name, value_N in outputs.items()}
            at += size
    return found


def _merged(trees: Sequence[ReasoningTree]) -> ReasoningTree:
    if len(trees) == 1:
        return trees[0]
    nodes, start = [], 0
    for tree in trees:
        nodes += [
            dataclasses.replace(node, parent=node.parent + start if node.parent >= 0 else -1) for node in tree.nodes
        ]
        start += len(tree.nodes)
    return ReasoningTree(trees[0].problem, tuple(nodes))


def _settle(job: _Job, function: Callable[[], Any]) -> None:
    try:
        job.future.set_result(function())
    except Exception as error:  # goes to the caller; the device thread serves the others
        job.future.set_exception(error)
