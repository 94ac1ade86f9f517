"""The engine's threads: one packs waiting work (merging equal problems), one runs the device, one compiles ahead.

The server answers while it compiles. At first, rows are limited to the compiled lengths, so that chains that fit are
scored at once; a longer chain has its row length compiled next.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jprm.apps.serve.pieces import Abandoned, Work
from jprm.apps.web.http import Refusal
from jprm.methods.decoding.cache import PrefixCache
from jprm.methods.messages.tokens import least_tokens
from jprm.rows import padded_size
from jprm.score.scorer import FILLED, PRM, SHORTEST, Batch, Prepared, row_lengths
from jprm.token_tree import chain_lengths, geometry, token_tree
from jprm.tokenizer import JsonTokenizer
from jprm.tree import Node, ReasoningTree, chain_tree

BATCH_TOKENS = 8192
"""Tokens of a full batch, equal problems counted once: several rows, but still answered in reasonable time."""

PAUSE, PAUSE_SHARE = 0.01, 0.05
"""How long an idle device waits for one more job, in seconds and as a fraction of the last batch's time.

Without it, callers that ask again after an answer would form two groups with alternating batches of half the size.
"""

SHORT = BATCH_TOKENS // 4
"""The most tokens of work that may run between the rows of longer work."""

Outputs = dict[str, np.ndarray]


class Closed(Refusal):
    """The engine is shutting down and takes no more work."""

    def __init__(self):
        super().__init__(503, "the server is shutting down", headers={"Retry-After": "5"})


Problem = tuple[str, str]
"""A problem and its system message; trees with the same pair are merged."""


@dataclasses.dataclass(eq=False)
class _Job:
    """Trees to score, or a function for the device thread."""

    trees: Sequence[ReasoningTree]
    tokens: int
    future: Work
    run: Callable[[], Any] | None = None
    alone: bool = False  # shares no batch with others
    kept: int = 0  # tokens of a cached prefix, which were not computed

    @functools.cached_property
    def problems(self) -> dict[Problem, int]:
        """The tokens of every problem, which a batch has once, at four characters per token."""
        return {problem_of(tree): sum(map(len, problem_of(tree))) // 4 for tree in self.trees if not self.alone}


def _merged(jobs: Sequence[_Job]) -> Iterator[int]:
    """Yields the batch size in tokens after each job, with equal problems counted once."""
    size, problems = 0, set()
    for job in jobs:
        shared = sum(tokens for problem, tokens in job.problems.items() if problem in problems)
        size += max(0, job.tokens - shared)
        problems |= job.problems.keys()
        yield size


def _tokens(jobs: Iterable[_Job]) -> int:
    return sum(job.tokens for job in jobs)


class Programs:
    """The row lengths for which a model is compiled. Each is compiled once, by the first thread that needs it.

    Attributes:
      lengths: the lengths for `compile_all`, the shortest first.
      seconds: compile time by length, for compiled lengths.
      failed: error by length.
      prefixes: whether the programs of the prefix cache are compiled.
    """

    def __init__(self, prm: PRM, lengths: Sequence[int] = ()):
        self.prm, self.lengths = prm, list(lengths)
        self.seconds: dict[int, float] = {}
        self.failed: dict[int, str] = {}
        self.prefixes, self.ended = not lengths, False
        self._one = threading.Lock()  # a compiler takes all cores

    @property
    def left(self) -> list[int]:
        """Lengths, in tokens, that are still to be compiled, the shortest first; failed ones are left out."""
        return [tokens for tokens in self.lengths if tokens not in self.seconds and tokens not in self.failed]

    @property
    def row(self) -> int | None:
        """The longest length, in tokens, up to which all are compiled.

        If the first one is not compiled yet, it is returned nevertheless. `None` without `lengths`, i.e. any row may be
        compiled.
        """
        row = self.lengths[0] if self.lengths else None
        for tokens in self.lengths:
            if tokens not in self.seconds:
                break
            row = tokens
        return row

    def compile_all(self, cache: PrefixCache | None, say: Callable[[str], None]) -> None:
        for tokens in self.lengths:
            if self.ended:
                return
            self.compile(tokens)
        if cache is not None and not self.ended:
            with self._one:
                cache.warm_up()
        self.prefixes = True
        lengths = ", ".join(f"{tokens:,}" for tokens in self.lengths if tokens in self.seconds)
        say(f"compiled for rows of {lengths} tokens in {sum(self.seconds.values()):.1f} s")

    def compile(self, tokens: int) -> None:
        """Compiles rows of `tokens` tokens, unless that is done or has failed.

        Blocks, also for another thread's compilation.

        Raises no error of the compiler: it is logged and put into `failed`.
        """
        if tokens in self.seconds or tokens in self.failed:
            return
        with self._one:
            if tokens in self.seconds or tokens in self.failed:
                return
            began = time.monotonic()
            try:
                self.prm.compile(tokens)
            except Exception as error:  # scoring such a row says it to the caller
                self.failed[tokens] = f"{type(error).__name__}: {error}"[:200]
                logging.getLogger(__name__).error("rows of %d tokens: %s", tokens, self.failed[tokens])
            else:
                self.seconds[tokens] = time.monotonic() - began


class Engine:
    """Scores trees for many callers; its methods may be called from any thread.

    Whenever the device is idle, all waiting work becomes a batch, up to BATCH_TOKENS; the next requests of the last
    batch's callers may still join it. While a batch runs, the next one is packed if no later job could join it, i.e. if
    it is full or its job runs alone. Trees of different callers share rows, and trees with equal problems are merged,
    so that common prefixes are computed once. Work of up to SHORT tokens does not wait for longer work to end: it runs
    between two of its row batches. If a batch fails, its jobs are retried one by one, so that only the caller at fault
    sees the error, as its future's. After a failure that is not the caller's, a test chain is scored to check the
    device.

    `score`, `score_cached` and `run` return at once, and raise Closed after `close`.

    Args:
      longest: the most tokens of a chain.
      cache: lets a caller's next tree reuse the tokens of its previous one.

    Attributes:
      counts: totals so far: tokens, cached_tokens, trees, batches, device_seconds, failures.
      failure: why the device cannot score; "" if it works.
      rate: measured tokens per second; 0 before the first batch.
    """

    failure = ""

    def __init__(self, prm: PRM, longest: int, name: str, cache: PrefixCache | None = None):
        self.prm, self.longest, self.name, self.cache = prm, longest, name, cache
        self.programs = Programs(prm)
        self.counts: dict[str, float] = collections.defaultdict(float)
        self.busy_tokens = 0
        self.rate = 0.0  # tokens a second, measured
        self._pause = self._longest_pause = 0.0  # times until which the free device waits
        self._jobs: collections.deque[_Job] = collections.deque()
        self._packed: tuple[list[_Job], Callable[[], Any]] | None = None  # the next batch
        self._changed = threading.Condition()
        self._running = self._closed = self._all_packed = self._trying = self._letting_in = False
        self._elsewhere = 0.0  # seconds that the device thread spent compiling or on let-in work
        self._packing = 0  # tokens of the batch that is being packed
        self._current: list[_Job] = []  # the running batch, without let-in work
        work = {"packing": self._pack, "device": self._work}
        self._threads = [threading.Thread(target=do, name=f"jprm {name}", daemon=True) for name, do in work.items()]
        for thread in self._threads:
            thread.start()

    def warm_up(self, say: Callable[[str], None] = print) -> None:
        """Starts a thread that compiles the programs for chains of up to `longest` tokens, and returns.

        `say` gets one line at the end, from that thread. A length that fails is in `programs.failed`.
        """
        programs = self.programs = Programs(self.prm, row_lengths(self.longest))
        work = functools.partial(programs.compile_all, self.cache, lambda text: say(f"{self.name}: {text}"))
        threading.Thread(target=work, name=f"jprm {self.name} compiling", daemon=True).start()

    def unready(self) -> str:
        """Returns why the engine cannot score, or "" if it can. Does not wait.

        If the device has failed, starts a new test, whose result a later call returns.
        """
        if self.programs.lengths and not self.programs.seconds:
            return next(iter(self.programs.failed.values()), "nothing is compiled yet")
        if not self._closed and not all(thread.is_alive() for thread in self._threads):
            return "a thread of the engine has ended: start the server anew"
        if self.failure and not self._trying:
            self._trying = True
            self.run(self._try)
        return self.failure

    def critiques_of(self, trees: Sequence[ReasoningTree]) -> int:
        """Returns the number of critiques needed to score the trees; 0 unless a judge scores."""
        return 0

    def tokens_of(self, trees: Sequence[ReasoningTree], alone: bool = False) -> int:
        """Returns the tokens of the trees, at least two per step, because rows have one step slot per two tokens.

        Common prefixes of steps count once, unless the trees are scored `alone`. Tokenises the trees, but runs no
        model.

        Raises ValueError if a chain is too long for the server or model.
        """
        total, most = 0, min(self.longest, self.prm.context or self.longest)
        for tree in trees:
            layout = self.prm.layout
            if tree.of_messages and layout.turns and isinstance(layout.tokenizer, JsonTokenizer):
                if (least := least_tokens(tree, layout.tokenizer)) > most:
                    raise ValueError(self._too_long(least, f"{most:,}"))
            packed = token_tree(tree if alone or tree.of_messages else one_tree([tree])[0], self.prm.layout)
            longest = int(geometry(packed.length_R, packed.parent_R).depth_R.max(initial=0))
            if longest > most or 2 * int(chain_lengths(packed).max(initial=0)) > self.longest:
                limit = f"{most:,} tokens and {self.longest // 2:,} steps"
                raise ValueError(self._too_long(longest, limit))
            total += max(len(packed.tokens_N), 2 * len(packed.node_M))
        return total

    def _too_long(self, tokens: int, limit: str) -> str:
        context = self.prm.context
        if context and context <= self.longest:
            fix = f"The model reads no more than {context:,}: shorten the chain"
        else:
            fix = f"Shorten the chain, or start the server with a larger --longest (it is {self.longest:,})"
        return f"a chain has {tokens:,} tokens, and this server takes at most {limit}. {fix}"

    def score(
        self, trees: Sequence[ReasoningTree], tokens: int, alone: bool = False
    ) -> concurrent.futures.Future[list[Outputs]]:
        """Returns a future of a dict per tree, output's name to (N,) float32 for its N nodes, e.g. {"score": ...}.

        The names are the model's `output_names`; `score` is on `prm.scale`. `tokens` is the work's size, from
        `tokens_of`. `alone` packs the trees like `jprm score`, without merging or other trees, so the results are
        bit-identical to it; trees of messages always are packed so. If the model refuses a tree, the future's error
        is ValueError.
        """
        return self._add(_Job(trees, tokens, Work(), alone=alone or any(tree.of_messages for tree in trees)))

    def run(self, function: Callable[[], Any], tokens: int = 0) -> concurrent.futures.Future:
        """Runs a function on the device thread, apart from other work; returns the future of its result.

        `tokens` is the work's size for `wait_seconds`; 0 leaves the measured rate unchanged.
        """
        return self._add(_Job((), tokens, Work(), function, alone=True))

    def score_cached(
        self, tree: ReasoningTree, tokens: int, caller: str
    ) -> concurrent.futures.Future[tuple[Outputs, int]]:
        """Returns a future of (named outputs as in `score`, tokens reused from the caller's earlier trees).

        `caller` names the client, e.g. its `prompt_cache_key`. A tree of messages, or one larger than the cache, is
        computed whole, and 0 tokens are reused; so is every tree if there is no cache.
        """
        if tree.of_messages:  # the chat template reads a whole path: no prefix is cached
            return self.run(lambda: (self._outputs(self.prm.prepare([tree], self.programs.row))[0], 0), tokens)
        cache = self.cache
        merged, node_N = one_tree([tree])
        job = _Job((), tokens, Work(), alone=True)

        def run() -> tuple[Outputs, int]:
            if cache is None or tokens > cache.slots or not self.programs.prefixes:
                outputs, cached = self._outputs(self.prm.prepare([merged], self._row([merged])))[0], 0
            else:
                outputs, cached = cache.outputs_of(merged, caller)
            job.kept = cached
            self.counts["cached_tokens"] += cached
            return _taken(outputs, node_N), cached

        job.run = run
        return self._add(job)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the work that waits and is not yet packed."""
        with self._changed:
            return _tokens(self._jobs)

    def wait_seconds(self, tokens: int = 0) -> float:
        """Estimates how many seconds new work of `tokens` tokens would wait; 0 if no rate has been measured yet.

        Short work waits only for other short work, and for at most one batch of longer work.
        """
        with self._changed:
            before = self.waiting_tokens + self.busy_tokens
            if tokens <= SHORT:
                before = _tokens(job for job in self._jobs if job.tokens <= SHORT) + min(self.busy_tokens, BATCH_TOKENS)
            return before / self.rate if self.rate else 0.0

    def close(self) -> None:
        """Finishes the waiting work, then ends the threads; blocks until then. A second call returns at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.programs.ended = True
        for thread in self._threads:
            thread.join()

    def _add(self, job: _Job) -> concurrent.futures.Future:
        with self._changed:
            if self._closed:
                raise Closed
            self._jobs.append(job)
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
                self._packed, self._packing = (batch, run), 0
                self._changed.notify_all()
        with self._changed:
            self._all_packed = True
            self._changed.notify_all()

    def _takes(self) -> bool:
        """Whether the next batch should be packed now; a later one could merge more jobs."""
        if self._packed is not None or not self._jobs:
            return self._closed and not self._jobs
        if self._jobs[0].alone or any(size >= BATCH_TOKENS for size in _merged(self._jobs)):
            return True
        return not self._running and time.monotonic() >= self._pause

    def _take(self) -> list[_Job]:
        """Returns the next jobs that are not cancelled; [] if the engine is closed."""
        with self._changed:
            batch: list[_Job] = []
            while not batch:
                while not self._takes():
                    left = self._pause - time.monotonic()
                    self._changed.wait(left if left > 0 and not self._running else None)
                if not self._jobs:
                    return []
                waiting = list(self._jobs)
                for job, size in zip(waiting, _merged(waiting), strict=True):
                    if batch and (job.alone or batch[0].alone or size > BATCH_TOKENS):
                        break
                    self._jobs.popleft()
                    if job.future.set_running_or_notify_cancel():
                        batch.append(job)
            self._packing = _tokens(batch)
            self.busy_tokens += self._packing
            return batch

    def _prepared(self, batch: list[_Job]) -> Callable[[], Any]:
        """Packs a batch; returns the function for the device thread: a job's own, or one that scores all its trees."""
        if batch[0].run is not None:
            return batch[0].run
        trees = [tree for job in batch for tree in job.trees]
        if batch[0].alone:  # the same rows as `jprm score`, so bit-identical
            return functools.partial(self._outputs, self.prm.prepare(trees))
        members: dict[Problem, list[int]] = {}
        for index, tree in enumerate(trees):
            members.setdefault(problem_of(tree), []).append(index)
        merged = [one_tree([trees[i] for i in in_tree]) for in_tree in members.values()]
        together = [tree for tree, _ in merged]
        prepared = self.prm.prepare(together, self._row(together))
        places = [node_N for _, node_N in merged]
        return lambda: _apart(trees, list(members.values()), places, self._outputs(prepared))

    def _row(self, trees: Sequence[ReasoningTree]) -> int | None:
        """Returns the most tokens per row: `Programs.row`, but less on a CPU, as long as a row holds a chain several
        times.

        On a CPU, attention takes quadratic time in the row length, and short work waits for a row. Counts four
        characters per token.
        """
        row = self.programs.row
        if row is None or jax.default_backend() != "cpu":
            return row
        characters = 0
        for tree in trees:
            ends = []
            for node in tree.nodes:
                before = ends[node.parent] if node.parent >= 0 else len(tree.problem) + len(tree.system or "")
                ends.append(before + max(len(node.text), 8))  # a step has two tokens at least
            characters = max(characters, *ends, 0)
        return min(row, max(FILLED, padded_size(2 * characters, SHORTEST)))

    def _outputs(self, prepared: Prepared) -> list[Outputs]:
        began = time.monotonic()
        for batch in prepared.batches:
            self.programs.compile(batch.rows.tokens.shape[1])
        self._elsewhere += time.monotonic() - began
        return self.prm.outputs_of(dataclasses.replace(prepared, batches=self._between(prepared.batches)))

    def _between(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields row batches and lets short work run after each. For the device thread only."""
        for place, batch in enumerate(batches):
            if place and not self._letting_in:
                if self._current and all(job.future.stopped for job in self._current):
                    raise Abandoned
                self._let_in()
            yield batch

    def _let_in(self) -> None:
        """Runs waiting short work: jobs of up to SHORT tokens, and at most one batch in total."""
        taken, size, packed = [], 0, None
        with self._changed:
            if self._packed and _tokens(self._packed[0]) <= BATCH_TOKENS:
                packed, self._packed = self._packed, None
                self._changed.notify_all()
            for job in [job for job in self._jobs if job.tokens <= SHORT]:
                if size + job.tokens > BATCH_TOKENS:
                    break
                self._jobs.remove(job)
                if job.future.set_running_or_notify_cancel():
                    taken.append(job)
                    size += job.tokens
            self.busy_tokens += size
        if not taken and packed is None:
            return
        began, elsewhere, self._letting_in = time.monotonic(), self._elsewhere, True
        if packed is not None:
            self._ran(*packed)
        for batch in ([job for job in taken if not job.alone], *([job] for job in taken if job.alone)):
            if batch:
                self._ran(batch, lambda batch=batch: self._prepared(batch)())
        self._elsewhere, self._letting_in = elsewhere + time.monotonic() - began, False

    def _work(self) -> None:
        while taken := self._next():
            self._current = taken[0]
            self._ran(*taken)
            with self._changed:
                self._running, self._current = False, []
                self._changed.notify_all()

    def _ran(self, batch: list[_Job], run: Callable[[], Any]) -> None:
        """Runs a batch, and updates the counters and the measured rate."""
        began, elsewhere = time.monotonic(), self._elsewhere
        self._settle(batch, run)
        with self._changed:
            now, tokens, kept = time.monotonic(), _tokens(batch), sum(job.kept for job in batch)
            seconds = now - began - (self._elsewhere - elsewhere)
            self.counts["batches"] += 1
            self.counts["device_seconds"] += seconds
            self.counts["tokens"] += tokens - kept
            self.counts["trees"] += sum(len(job.trees) for job in batch)
            self._longest_pause = now + PAUSE_SHARE * seconds
            self._pause = min(now + PAUSE, self._longest_pause) if self._jobs else now
            self.busy_tokens -= tokens
            # With a cached prefix a few tokens take as long as many, and so does let-in work in its own row
            if tokens and not kept and not self._letting_in:
                rate = max(tokens, SHORTEST) / max(seconds, 1e-6)  # the shortest row has its tokens in any case
                self.rate = rate if not self.rate else 0.8 * self.rate + 0.2 * rate
            self._changed.notify_all()

    def _next(self) -> tuple[list[_Job], Callable[[], Any]] | None:
        """Returns the next packed batch, unless the engine is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._packed is not None or self._all_packed or self._may_let_in())
                if self._packed is not None or self._all_packed:
                    taken, self._packed = self._packed, None
                    self._running = taken is not None
                    self._changed.notify_all()
                    return taken
            self._let_in()

    def _may_let_in(self) -> bool:
        """Whether short work is waiting while longer work is being packed."""
        return self._packing > BATCH_TOKENS and any(job.tokens <= SHORT for job in self._jobs)

    def _settle(self, batch: list[_Job], run: Callable[[], Any]) -> None:
        try:
            results = run()
        except Exception as error:  # goes to the caller at fault; the device thread serves the others
            if len(batch) == 1:
                batch[0].future.set_exception(error)
                if isinstance(error, Abandoned):  # cancelled, not failed
                    return
                self.counts["failures"] += len(batch[0].trees)
                if not isinstance(error, ValueError) and batch[0].run != self._try:
                    self._try()
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

    def _try(self) -> None:
        """Scores a test chain and records whether the device works; a failing device must not look ready."""
        try:
            self._outputs(self.prm.prepare([chain_tree("1 + 1", ["2"])], self.programs.row))
            self.failure = ""
        except Exception as error:
            self.failure = f"the device fails: {type(error).__name__}"
        self._trying = False


class TextEngine(Engine):
    """Scores trees with a model that reads text, e.g. a fused verifier.

    Each request is scored separately, because the other samples of a pool are evidence. Counts four characters per
    token.
    """

    def tokens_of(self, trees: Sequence[ReasoningTree], alone: bool = False) -> int:
        texts = [text for tree in trees for text in (tree.problem, *(node.text for node in tree.nodes))]
        return sum(len(text) // 4 + 1 for text in texts)

    def score(
        self, trees: Sequence[ReasoningTree], tokens: int, alone: bool = False
    ) -> concurrent.futures.Future[list[Outputs]]:
        return self.run(lambda: self.prm.outputs_of(trees), tokens)

    def warm_up(self, say: Callable[[str], None] = print) -> None:
        """No-op, since text models are not compiled."""

    def _try(self) -> None:
        """No-op: there is no device, and failures are caused by the text."""

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
    """Splits the outputs of merged trees into the outputs of each tree, (N,) float32.

    Args:
      members: for each merged tree, the indices of its members in `trees`.
      places: for each merged tree, the merged node of every member's nodes, concatenated (from `one_tree`).
      merged: the outputs of each merged tree.
    """
    outputs_of: list[Outputs] = [{} for _ in trees]
    for in_tree, node_N, outputs in zip(members, places, merged, strict=True):
        at = 0
        for index in in_tree:
            size = len(trees[index].nodes)
            outputs_of[index] = _taken(outputs, node_N[at : at + size])
            at += size
    return outputs_of


def _taken(outputs: Outputs, node_N: np.ndarray) -> Outputs:
    return {name: value_M[node_N] for name, value_M in outputs.items()}


def one_tree(trees: Sequence[ReasoningTree]) -> tuple[ReasoningTree, np.ndarray]:
    """Merges trees with the same problem into one tree; returns it and each step's node in it.

    The nodes are an int64 array for the nodes of all trees, one tree after the other. Equal steps after equal steps are
    one node, the first. There must be at least one tree; the first one's problem and system message are taken
    unchecked.
    """
    nodes: list[Node] = []
    at: dict[tuple[int, str], int] = {}
    places: list[int] = []
    for tree in trees:
        start = len(places)
        for node in tree.nodes:
            parent = places[start + node.parent] if node.parent >= 0 else -1
            if (parent, node.text) not in at:
                at[parent, node.text] = len(nodes)
                nodes.append(node if node.parent == parent else dataclasses.replace(node, parent=parent))
            places.append(at[parent, node.text])
    return ReasoningTree(trees[0].problem, tuple(nodes), extra={"system": trees[0].system}), np.array(places, np.int64)
