"""Shared by all scoring routes: models, request limits, token counts, and answers within the time limit."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request

from jprm.apps.serve import ServeConfig
from jprm.apps.serve.engine import Engine, Outputs
from jprm.apps.serve.pieces import InPieces, Work, started
from jprm.apps.web.http import Refusal, gone, worked
from jprm.methods.policy.protocol import Policy
from jprm.methods.policy.sample_cache import PolicyError
from jprm.score.aggregate import chain_scores
from jprm.score.scale import Rule
from jprm.tokenizer import Tokenizer
from jprm.tree import ReasoningTree, chains_of

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Server:
    """The state that routes use: engines by name (the first is the default), limits, policy, and client tokenizers."""

    engines: Mapping[str, Engine]
    config: ServeConfig
    writer: Writer | None = None
    tokenizers: Mapping[str, Tokenizer] = dataclasses.field(default_factory=dict)
    calibration: Sequence[Mapping[str, Any]] | None = None  # search results with known answers

    def engine(self, name: str | None) -> Engine:
        """Returns the engine with this name, by default the first. Raises Refusal (404) if it is unknown."""
        if name is None:
            return next(iter(self.engines.values()))
        if name not in self.engines:
            raise Refusal(404, f"there is no model {name!r}: use {', '.join(self.engines)}", "model")
        return self.engines[name]

    @property
    def policy(self) -> Writer:
        """The policy that writes steps, as a `Writer`. Raises Refusal (400) if the server has no policy."""
        if self.writer is None:
            raise Refusal(400, "this server has no policy: start it with --policy", "model")
        return self.writer


def server_of(request: Request) -> Server:
    """Returns the server state. Raises Refusal (503) while the models are loading."""
    if request.app.state.server is None:
        raise Refusal(503, "the models are loading: come back later", headers={"Retry-After": "2"})
    return request.app.state.server


class Call:
    """A request to a model.

    Attributes:
      engine: the engine of the named model, by default the first.
      rule: aggregates step scores to a chain score: the request's rule, or else the model's.

    Raises Refusal: 503 while the models are loading, 404 if the model is unknown.
    """

    def __init__(self, request: Request, model: str | None, rule: Rule | None = None):
        self.request, self.server = request, server_of(request)
        self.engine, self.config = self.server.engine(model), self.server.config
        self.rule = rule or self.engine.prm.rule

    def admit(self, tokens: int = 0) -> None:
        """Raises Refusal (503, with Retry-After) if work of `tokens` tokens would wait longer than `queue_seconds`.

        Reserves nothing. Never refuses before a first rate has been measured.
        """
        wait = self.engine.wait_seconds(tokens)
        if wait > self.config.queue_seconds:
            seconds = math.ceil(wait - self.config.queue_seconds)
            raise Refusal(
                503, f"{wait:.0f} seconds of work wait: come back later", headers={"Retry-After": str(seconds)}
            )

    def check_items(self, records: Sequence[Any], param: str | None = None, place: str = "") -> None:
        """Checks the size of a request before it is parsed.

        Args:
          records: objects or texts, as sent.
          param: the field that holds them.
          place: a template for error messages, e.g. `documents[{}]`.

        Raises Refusal: 413 if there are too many steps, nodes, samples, turns and records together, 400 if a text is
        too long for any chain.
        """
        left, most = itertools.count(), CHARACTERS * self.config.longest
        for i, record in enumerate(records):
            for item in _items(record):
                if next(left) >= self.config.items:
                    what = f"more than {self.config.items:,} steps, samples and texts"
                    raise Refusal(
                        413,
                        f"{what}, which is what the server takes (--set items={self.config.items}): send them in parts",
                        param,
                    )
                if isinstance(item, str) and len(item) > most:
                    where = f"{place.format(i)} has" if place else "it has"
                    raise Refusal(
                        400, f"{where} a text of {len(item):,} characters: no chain has more than {most:,}", param
                    )

    def check_trees(self, trees: Sequence[ReasoningTree]) -> None:
        """Raises Refusal (413) if the total chain length, or the number of critiques, is too large.

        The limits are `LENGTHS` times `items` steps, and `critiques`, of the server's config.
        """
        config = self.config
        total = sum(_lengths(tree) for tree in trees)
        if total > LENGTHS * config.items:
            most = f"{LENGTHS * config.items:,}"
            raise Refusal(413, f"the chains have {total:,} steps together, and {most} at most: send them in parts")
        if (critiques := self.engine.critiques_of(trees)) > config.critiques:
            most = f"{config.critiques:,}"
            raise Refusal(413, f"{critiques:,} critiques, and a request may ask for {most}: send it in parts")

    def tokens_of(self, trees: Sequence[ReasoningTree], alone: bool = False) -> int:
        """Returns the tokens of the trees; see `Engine.tokens_of`, also for `alone`. 0 for a judge.

        Raises Refusal (400) if a chain is too long for the server or model, and like `check_trees` and `check_size`.
        """
        self.check_trees(trees)
        try:
            tokens = self.engine.tokens_of(trees, alone)
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        self.check_size(tokens)
        return tokens

    def check_size(self, tokens: int) -> None:
        """Raises Refusal (413) if work of `tokens` tokens would take longer than `answer_seconds`, and like `admit`."""
        most, rate = self.config.answer_seconds, self.engine.rate
        if rate and tokens > most * rate:
            seconds = tokens / rate
            raise Refusal(
                413, f"{tokens:,} tokens take about {seconds:,.0f} seconds, and {most:g} at most: send it in parts"
            )
        self.admit(tokens)

    @contextlib.contextmanager
    def naming(self, what: str, trees: Callable[[], Sequence[ReasoningTree | None]]) -> Iterator[None]:
        """If `tokens_of` refuses trees (400) in the block, raises the first one's Refusal, named e.g. `samples[3]`.

        `what` is the field, e.g. `samples`; `trees` is only called then, and its `None` entries are skipped.
        """
        try:
            yield
        except Refusal as refusal:
            for i, tree in enumerate(trees() if refusal.status == 400 else ()):
                if tree is not None:
                    with placed(f"{what}[{i}]", what):
                        self.tokens_of([tree])
            raise

    async def worked(self, work: Callable[[], T], items: int = 1) -> T:
        """Runs `work`, in a thread if it may take long, and returns its result; see `jprm.apps.web.http.worked`.

        Raises Refusal (499) if the client has disconnected; errors of `work` pass through.
        """
        return await worked(self.request, work, items)

    async def answer(self, future: concurrent.futures.Future, deadline: float | None = None) -> Any:
        """Waits for a future and returns its result; cancels it if the client disconnects or the time is up.

        `deadline` is a `time.monotonic` value; by default, `answer_seconds` from now.

        Raises Refusal: 504 if late, 499 if the client disconnected, 400 if the model refuses the request, 502 if a
        judge's policy fails, 500 for any other failure.
        """
        waiting, leaving = asyncio.wrap_future(future), asyncio.ensure_future(gone(self.request))
        seconds = self.config.answer_seconds
        left = seconds if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            done, _ = await asyncio.wait({waiting, leaving}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if waiting in done:
                return waiting.result()
            raise Refusal(499, "the client has gone") if done else Refusal(504, f"no answer within {seconds:g} seconds")
        except (Refusal, asyncio.CancelledError):
            raise
        except PolicyError as error:  # of a judge
            raise Refusal(502, str(error)) from None
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        except Exception as error:  # its message may quote the request, which no log is to hold
            logging.getLogger(__name__).error("%s while scoring a request", type(error).__name__)
            raise Refusal(500, f"{type(error).__name__} while scoring the request") from None
        finally:
            leaving.cancel()
            waiting.cancel()

    async def in_turn(self, pieces: Sequence[Callable[[], concurrent.futures.Future]]) -> list[Any]:
        """Returns the results of one request's pieces, in order; other requests may run between them.

        [] without pieces. Each piece is a function that starts work and returns its future; it is called while the
        previous one runs. All share one time limit. After an error, the others are cancelled. Raises Refusal like
        `answer`.
        """
        deadline = time.monotonic() + self.config.answer_seconds
        futures: list[concurrent.futures.Future] = []
        results = []
        try:
            for piece in pieces:
                futures.append(piece())
                if len(futures) > 1:
                    results.append(await self.answer(futures[-2], deadline))
            return results + [await self.answer(future, deadline) for future in futures[-1:]]
        finally:
            for future in futures:
                future.cancel()

    async def outputs_of(self, tree: ReasoningTree, tokens: int, caller: str) -> tuple[Outputs, int | None]:
        """Returns a tree's outputs, {name: (N,) float32}, e.g. `score`, and the number of cached tokens.

        The number is `None` without a `caller` (""), the client whose earlier prefixes are reused. `tokens` is from
        `tokens_of`. Raises Refusal like `answer`.
        """
        if not caller:
            return (await self.answer(self.engine.score([tree], tokens)))[0], None
        return await self.answer(self.engine.score_cached(tree, tokens, caller))

    async def single_chains(
        self, name: str, places: Sequence[int], chain: Callable[[int], ReasoningTree | None]
    ) -> tuple[list[tuple[float, np.ndarray] | None], int]:
        """Scores single chains; error messages call the chain at place i `NAME[i]`.

        Returns (chain score, step scores (N,)) for each of `places`, in order, or `None` if `chain(i)` returned `None`
        for a blank text; and the tokens of all chains.

        Raises Refusal (502) if a judge gave no score, and like `tokens_of` and `answer`; RecordError from `chain`.
        """

        def read() -> tuple[list[ReasoningTree | None], int]:
            trees, tokens = [], 0
            for i in places:
                with placed(f"{name}[{i}]", name):
                    trees.append(chain(i))
                    tokens += self.tokens_of(trees[-1:]) if trees[-1] else 0
            self.check_trees([tree for tree in trees if tree])
            self.check_size(tokens)
            return trees, tokens

        def scored() -> list[tuple[float, np.ndarray] | None]:
            results: list[tuple[float, np.ndarray] | None] = []
            for i, tree in zip(places, trees, strict=True):
                if tree is None:
                    results.append(None)
                    continue
                score_N = next(outputs)["score"]
                if (value := self.chains(tree, score_N)[0]["score"]) is None:
                    raise Refusal(502, f"{name}[{i}]: no critique of a step could be read", name)
                results.append((value, score_N))
            return results

        trees, tokens = await self.worked(read, len(places))
        outputs = iter(await self.answer(self.engine.score([tree for tree in trees if tree], tokens)))
        return await self.worked(scored, len(places)), tokens

    def chains(self, tree: ReasoningTree, score_N: np.ndarray) -> list[dict[str, Any]]:
        """Returns {"nodes", "score", "weakest"} for each chain, in the order of their last nodes.

        `nodes` is a list of node indices. `score_N` has the step scores, NaN if a judge gave none: then `score` is
        `None`. `weakest` is the lowest-scoring node, `None` if no node has a score.
        """
        paths = chains_of(tree)
        value_B, _ = chain_scores([score_N[path].tolist() for path in paths], self.rule, self.engine.prm.scale)
        known = [[node for node in path if np.isfinite(score_N[node])] for path in paths]
        return [
            {"nodes": path, "score": finite(value) if len(scored) == len(path) else None,
             "weakest": min(scored, key=lambda node: score_N[node], default=None)}
            for path, value, scored in zip(paths, value_B, known, strict=True)
        ]  # fmt: skip


CHARACTERS = 64
"""The most characters per token of the longest chain; longer texts are refused before tokenising."""

LENGTHS = 64
"""The total chain length of a request, in steps, is at most this many times its item limit."""


def _items(record: Any) -> Iterator[Any]:
    """Yields the texts, steps, nodes, samples and turns in a record, as sent."""
    if not isinstance(record, dict):
        yield record
        return
    yield from (record[key] for key in _TEXTS if isinstance(record.get(key), str))
    for key in _LISTS:
        if isinstance(inner := record.get(key), list):
            for value in inner:
                yield from _items(value)


_LISTS = ("steps", "nodes", "completions", "messages", "samples")
_TEXTS = ("problem", "prompt", "system", "response", "text", "content", "reasoning_content")
"""Fields that hold items, and fields with texts that become chains."""


def _lengths(tree: ReasoningTree) -> int:
    """Returns the total length of all chains, in nodes, without building them."""
    depth, inner = [], set()
    for node in tree.nodes:
        depth.append(1 + (depth[node.parent] if node.parent >= 0 else 0))
        inner.add(node.parent)
    return sum(length for i, length in enumerate(depth) if i not in inner)


@contextlib.contextmanager
def placed(where: str, param: str | None = None) -> Iterator[None]:
    """Puts the place, e.g. `samples[3]`, before the message of a Refusal from the block, unless it begins with it.

    `param` is the field at fault if the Refusal names none. Other errors pass through.
    """
    try:
        yield
    except Refusal as refusal:
        message = refusal.message if refusal.message.startswith(where) else f"{where}: {refusal.message}"
        raise Refusal(refusal.status, message, refusal.param or param, refusal.headers) from None


def finite(score: float) -> float | None:
    """Returns a score for JSON: `None` if it is NaN or infinite, e.g. because a judge gave no score."""
    return float(score) if math.isfinite(score) else None


def usage(tokens: int, cached: int | None = None) -> dict[str, Any]:
    """Returns `prompt_tokens` and `total_tokens` (both `tokens`), in OpenAI's form. A shared prefix counts once.

    Unless `cached` is `None`, adds {"prompt_tokens_details": {"cached_tokens": cached}}.
    """
    counts: dict[str, Any] = {"prompt_tokens": tokens, "total_tokens": tokens}
    return counts if cached is None else counts | {"prompt_tokens_details": {"cached_tokens": cached}}


WAITING = 8
"""The most requests that may wait for the policy."""


class Writer:
    """A policy and its single thread. Samples for one request at a time, as long as its client waits."""

    def __init__(self, policy: Policy):
        self.policy, self._room = policy, threading.Semaphore(WAITING)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jprm policy")

    def run(
        self, function: Callable[[InPieces], Any], tell: Callable[[dict[str, int]], Any] = lambda state: None
    ) -> Work:
        """Runs a function of the policy in its thread; returns the future at once. Cancelling it ends the sampling.

        `function` gets the policy as `InPieces`. `tell` is called in that thread after each piece, with totals
        {"samples", "completion_tokens"}. The future's errors are those of `function`.

        Raises Refusal (503) if `WAITING` requests wait or run.
        """
        if not self._room.acquire(blocking=False):
            raise Refusal(503, f"{WAITING} requests wait for the policy: come back later", headers={"Retry-After": "5"})
        future = started(self._thread, lambda work: function(InPieces(self.policy, work, tell)))
        future.add_done_callback(lambda future: self._room.release())
        return future

    def close(self) -> None:
        self._thread.shutdown()
