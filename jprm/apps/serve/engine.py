"""Two threads: one packs what waits, equal problems as one tree, and one runs on the device what is packed."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jprm.methods.cache import PrefixCache
from jprm.score.scorer import PRM, SHORTEST
from jprm.token_tree import chain_lengths, geometry, problem_ids, token_tree
from jprm.tree import Node, ReasoningTree

BATCH_TOKENS = 8192
"""Tokens of a full batch, equal problems once: several rows, and still an answer in reasonable time."""

PAUSE, PAUSE_SHARE = 0.01, 0.05
"""Seconds that a free device waits for one more job, where some wait, and at most what share of the last batch's time.
Callers who ask again when they have an answer would else form two groups, whose batches of half the size alternate."""

Outputs = dict[str, np.ndarray]


class Closed(Exception):
    """The engine ends and takes no more work."""


Problem = tuple[str, str]
"""A problem and its system message: trees with both equal are packed as one."""


@dataclasses.dataclass(eq=False)
class _Job:
    """Trees to score, or a function for the device thread."""

    trees: Sequence[ReasoningTree]
    tokens: int
    future: concurrent.futures.Future
    run: Callable[[], Any] | None = None
    alone: bool = False  # shares no batch with others
    problems: dict[Problem, int] = dataclasses.field(default_factory=dict)  # to their tokens, which a batch has once


@dataclasses.dataclass
class _Gathered:
    """Counts of the jobs that wait, or of a batch."""

    tokens: int = 0
    shared: int = 0  # of these, tokens of problems that an earlier job has too
    jobs: collections.Counter[Problem] = dataclasses.field(default_factory=collections.Counter)  # by problem

    @property
    def merged(self) -> int:
        """Tokens with equal problems once."""
        return self.tokens - self.shared

    def extra(self, job: _Job) -> int:
        """Returns by how many tokens the job would make the batch longer."""
        return job.tokens - sum(tokens for problem, tokens in job.problems.items() if self.jobs[problem])

    def add(self, job: _Job) -> None:
        self.shared += job.tokens - self.extra(job)
        self.tokens += job.tokens
        self.jobs.update(job.problems.keys())

    def remove(self, job: _Job) -> None:
        for problem in job.problems:
            self.jobs[problem] -= 1
            if not self.jobs[problem]:
                del self.jobs[problem]
        self.tokens -= job.tokens
        self.shared -= job.tokens - self.extra(job)


class Engine:
    """Scores trees of many callers.

    Whenever the device is free, all that waits becomes a batch, up to BATCH_TOKENS; what the callers of the last batch
    ask next may still join it. While one runs, a batch that no later job could join is packed: a full one, or a job of
    its own. Trees of different callers share rows, and those with equal problems one tree, so that their common
    prefixes are computed once. A job that fails is tried again by itself, and only the caller at fault sees the error.

    Args:
      cache: from which a caller's next tree is scored without the tokens of the one before.
    """

    def __init__(self, prm: PRM, longest: int, name: str, cache: PrefixCache | None = None):
        self.prm, self.longest, self.name, self.cache = prm, longest, name, cache
        self.busy_tokens = self.cached_tokens = 0
        self._waiting = _Gathered()
        self.rate = 0.0  # tokens a second, measured
        self._pause = self._longest_pause = 0.0  # times until which the free device waits
        self._jobs: collections.deque[_Job] = collections.deque()
        self._packed: tuple[list[_Job], Callable[[], Any]] | None = None  # the next batch
        self._changed = threading.Condition()
        self._running = self._closed = self._all_packed = False
        self._threads = [
            threading.Thread(target=work, name=f"jprm {name}", daemon=True)
            for name, work in (("packing", self._pack), ("device", self._work))
        ]
        for thread in self._threads:
            thread.start()

    def tokens_of(self, trees: Sequence[ReasoningTree], alone: bool = False) -> int:
        """Returns the tokens of the trees, and at least two for each step, since rows have a slot for two tokens.

        Equal steps after equal steps count once, unless the trees are scored `alone`.

        Raises ValueError for a chain longer than the server or model takes.
        """
        total = 0
        for tree in trees:
            packed = token_tree(tree if alone or tree.of_messages else one_tree([tree])[0], self.prm.layout)
            longest = int(geometry(packed.length_R, packed.parent_R).depth_R.max(initial=0))
            self.prm.check_length(longest, "the request")
            if max(longest, 2 * int(chain_lengths(packed).max(initial=0))) > self.longest:
                limit = f"{self.longest:,} tokens and {self.longest // 2:,} steps"
                raise ValueError(f"a chain has {longest:,} tokens, and this server takes at most {limit}")
            total += max(len(packed.tokens_N), 2 * len(packed.node_M))
        return total

    def score(
        self, trees: Sequence[ReasoningTree], tokens: int, alone: bool = False
    ) -> concurrent.futures.Future[list[Outputs]]:
        """Returns the future of each tree's named outputs, as `PRM.outputs_of` gives them.

        `alone` packs the trees as `jprm score` does, with no others and without merging: the results are its bits.
        """
        alone = alone or any(tree.of_messages for tree in trees)
        problems = {} if alone else {problem_of(tree): len(problem_ids(tree, self.prm.layout)) for tree in trees}
        return self._add(_Job(trees, tokens, concurrent.futures.Future(), alone=alone, problems=problems))

    def run(self, function: Callable[[], Any], tokens: int = 0) -> concurrent.futures.Future:
        """Returns the future of what a function returns on the device thread."""
        return self._add(_Job((), tokens, concurrent.futures.Future(), function, alone=True))

    def score_cached(
        self, tree: ReasoningTree, tokens: int, caller: str
    ) -> concurrent.futures.Future[tuple[Outputs, int]]:
        """Returns the future of a tree's named outputs, and of how many of its tokens earlier trees of the caller had.

        Without a cache, or for a tree larger than it, everything is computed.
        """
        if tree.of_messages:  # whose chat template reads a whole path: no prefix is kept
            return self.run(lambda: (self.prm.outputs_of([tree])[0], 0), tokens)
        cache = self.cache
        merged, node_N = one_tree([tree])

        def run() -> tuple[Outputs, int]:
            if cache is None or tokens > cache.slots:
                outputs, cached = self.prm.outputs_of([merged])[0], 0
            else:
                outputs, cached = cache.outputs_of(merged, caller)
            self.cached_tokens += cached
            return _taken(outputs, node_N), cached

        return self.run(run, tokens)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the work that waits."""
        return self._waiting.tokens

    def wait_seconds(self) -> float:
        """Returns how long new work would wait, by the measured rate; 0 before anything was measured."""
        with self._changed:
            return (self.waiting_tokens + self.busy_tokens) / self.rate if self.rate else 0.0

    def close(self) -> None:
        """Finishes what waits, then ends the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _add(self, job: _Job) -> concurrent.futures.Future:
        with self._changed:
            if self._closed:
                raise Closed("the server is shutting down")
            self._jobs.append(job)
            self._waiting.add(job)
            if (now := time.monotonic()) < self._pause:
                self._pause = min(now + PAUSE, self._longest_pause)
            self._changed.notify_all()
        return job.future

    def _pack(self) -> None:
        while batch := self._take():
            try:
                run = self._prepared(batch)
            except Exception as error:  # it is raised where the batch is run
                run = functools.partial(_raise, error)
            with self._changed:
                self._packed = batch, run
                self._changed.notify_all()
        with self._changed:
            self._all_packed = True
            self._changed.notify_all()

    def _takes(self) -> bool:
        """Returns whether the next batch is to be packed now: a later one might have more jobs to merge."""
        if self._packed is not None or not self._jobs:
            return self._closed and not self._jobs
        if self._jobs[0].alone or self._waiting.merged >= BATCH_TOKENS:
            return True
        return not self._running and time.monotonic() >= self._pause

    def _take(self) -> list[_Job]:
        """Returns the next jobs that nobody has cancelled; none when the engine has closed."""
        with self._changed:
            batch: list[_Job] = []
            while not batch:
                while not self._takes():
                    left = self._pause - time.monotonic()
                    self._changed.wait(left if left > 0 and not self._running else None)
                if not self._jobs:
                    return []
                taken = _Gathered()
                while self._jobs:
                    job = self._jobs[0]
                    full = taken.merged + taken.extra(job) > BATCH_TOKENS
                    if batch and (job.alone or batch[0].alone or full):
                        break
                    self._jobs.popleft()
                    self._waiting.remove(job)
                    if job.future.set_running_or_notify_cancel():
                        batch.append(job)
                        taken.add(job)
            self.busy_tokens += taken.tokens
            return batch

    def _prepared(self, batch: list[_Job]) -> Callable[[], Any]:
        """Returns what the device thread is to run for a batch: a job's function, or the outputs of all its trees."""
        if batch[0].run is not None:
            return batch[0].run
        trees = [tree for job in batch for tree in job.trees]
        if batch[0].alone:
            return functools.partial(self.prm.outputs_of, self.prm.prepare(trees))
        members: dict[Problem, list[int]] = {}
        for index, tree in enumerate(trees):
            members.setdefault(problem_of(tree), []).append(index)
        merged = [one_tree([trees[i] for i in some]) for some in members.values()]
        prepared = self.prm.prepare([tree for tree, _ in merged])
        places = [node_N for _, node_N in merged]
        return lambda: _apart(trees, list(members.values()), places, self.prm.outputs_of(prepared))

    def _work(self) -> None:
        while taken := self._next():
            (batch, run), began, cached = taken, time.monotonic(), self.cached_tokens
            self._settle(batch, run)
            with self._changed:
                now = time.monotonic()
                tokens, seconds = sum(job.tokens for job in batch), now - began
                self._longest_pause = now + PAUSE_SHARE * seconds
                self._pause = min(now + PAUSE, self._longest_pause) if self._jobs else now
                self.busy_tokens, self._running = self.busy_tokens - tokens, False
                if tokens and self.cached_tokens == cached:  # with a cached prefix a few tokens take as long as many
                    rate = max(tokens, SHORTEST) / max(seconds, 1e-6)  # the shortest row has its tokens in any case
                    self.rate = rate if not self.rate else 0.8 * self.rate + 0.2 * rate
                self._changed.notify_all()

    def _next(self) -> tuple[list[_Job], Callable[[], Any]] | None:
        """Returns the batch that is packed, None when the engine has closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._packed is not None or self._all_packed)
            taken, self._packed = self._packed, None
            self._running = taken is not None
            self._changed.notify_all()
            return taken

    def _settle(self, batch: list[_Job], run: Callable[[], Any]) -> None:
        try:
            results = run()
        except Exception as error:  # goes to the caller at fault; the device thread serves the others
            if len(batch) == 1:
                batch[0].future.set_exception(error)
                return
            for job in batch:
                self._settle([job], lambda job=job: self._prepared([job])())
            return
        if len(batch) == 1:
            batch[0].future.set_result(results)
            return
        at = 0
        for job in batch:
            job.future.set_result(results[at : at + len(job.trees)])
            at += len(job.trees)


class TextEngine(Engine):
    """Scores trees by what reads text, such as a fused verifier: a caller's by themselves, since the other samples of a
    pool are evidence. There are no tokens: four characters count as one."""

    def tokens_of(self, trees: Sequence[ReasoningTree], alone: bool = False) -> int:
        texts = [text for tree in trees for text in (tree.problem, *(node.text for node in tree.nodes))]
        return sum(len(text) // 4 + 1 for text in texts)

    def score(
        self, trees: Sequence[ReasoningTree], tokens: int, alone: bool = False
    ) -> concurrent.futures.Future[list[Outputs]]:
        return self.run(lambda: self.prm.outputs_of(trees), tokens)

    def score_cached(
        self, tree: ReasoningTree, tokens: int, caller: str
    ) -> concurrent.futures.Future[tuple[Outputs, int]]:
        return self.run(lambda: (self.prm.outputs_of([tree])[0], 0), tokens)


def problem_of(tree: ReasoningTree) -> Problem:
    return tree.problem, tree.system


def _raise(error: Exception) -> None:
    raise error


def _apart(
    trees: Sequence[ReasoningTree],
    members: Sequence[Sequence[int]],
    places: Sequence[np.ndarray],
    merged: Sequence[Outputs],
) -> list[Outputs]:
    """Returns the outputs of each tree, (N,) float32, from those of the merged trees."""
    outputs_of: list[Outputs] = [{} for _ in trees]
    for some, node_N, outputs in zip(members, places, merged, strict=True):
        at = 0
        for index in some:
            size = len(trees[index].nodes)
            outputs_of[index] = _taken(outputs, node_N[at : at + size])
            at += size
    return outputs_of


def _taken(outputs: Outputs, node_N: np.ndarray) -> Outputs:
    return {name: value_M[node_N] for name, value_M in outputs.items()}


def one_tree(trees: Sequence[ReasoningTree]) -> tuple[ReasoningTree, np.ndarray]:
    """Returns one tree for trees of one problem, equal steps after equal steps once, and the node of each of theirs."""
    nodes: list[Node] = []
    at: dict[tuple[int, str], int] = {}
    places: list[int] = []
    for tree in trees:
        start = len(places)
        for node in tree.nodes:
            parent = places[start + node.parent] if node.parent >= 0 else -1
            if (parent, node.text) not in at:
                at[parent, node.text] = len(nodes)
                nodes.append(dataclasses.replace(node, parent=parent))
            places.append(at[parent, node.text])
    return ReasoningTree(trees[0].problem, tuple(nodes), extra={"system": trees[0].system}), np.array(places, np.int64)
