"""What every route of scores shares: the models, the bounds of a request, its tokens, and its answer in time."""

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
    """What routes work with: the models by name, the first being the default; what is accepted; a policy; and the
    tokenizers of callers."""

    engines: Mapping[str, Engine]
    config: ServeConfig
    writer: Writer | None = None
    tokenizers: Mapping[str, Tokenizer] = dataclasses.field(default_factory=dict)
    calibration: Sequence[Mapping[str, Any]] | None = None  # results of a search whose answers are known

    def engine(self, name: str | None) -> Engine:
        """Returns the engine of the model with this name; for None, the first model's."""
        if name is None:
            return next(iter(self.engines.values()))
        if name not in self.engines:
            raise Refusal(404, f"there is no model {name!r}: use {', '.join(self.engines)}", "model")
        return self.engines[name]

    @property
    def policy(self) -> Writer:
        """The policy that writes steps. Raises Refusal (400) where there is none."""
        if self.writer is None:
            raise Refusal(400, "this server has no policy: start it with --policy", "model")
        return self.writer


def server_of(request: Request) -> Server:
    """Returns what is served. Raises Refusal (503) while the models are loading."""
    if request.app.state.server is None:
        raise Refusal(503, "the models are loading: come back later", headers={"Retry-After": "2"})
    return request.app.state.server


class Call:
    """A request to a model, on its way from what was sent to scores.

    Attributes:
      engine: of the model that the request names; the first one's for None.
      rule: what makes a chain's score of its steps': the request's, else the model's.

    Raises Refusal: 503 while the models are loading, 404 for an unknown model.
    """

    def __init__(self, request: Request, model: str | None, rule: Rule | None = None):
        self.request, self.server = request, server_of(request)
        self.engine, self.config = self.server.engine(model), self.server.config
        self.rule = rule or self.engine.prm.rule

    def admit(self, tokens: int = 0) -> None:
        """Raises Refusal (503, with the time to come back) where work of so many tokens would wait for too long."""
        wait = self.engine.wait_seconds(tokens)
        if wait > self.config.queue_seconds:
            seconds = math.ceil(wait - self.config.queue_seconds)
            raise Refusal(
                503, f"{wait:.0f} seconds of work wait: come back later", headers={"Retry-After": str(seconds)}
            )

    def check_items(self, records: Sequence[Any], param: str | None = None, place: str = "") -> None:
        """Refuses what holds too much, before anything is made of it.

        Args:
          records: as they were sent: objects, or texts.
          param: the field that they are in.
          place: of a record, such as `documents[{}]` with its index.

        Raises Refusal: 413 for more steps, nodes, samples, turns and records together than the server takes, 400 for a
        text that no chain has room for.
        """
        left, most = itertools.count(), CHARACTERS * self.config.longest
        for i, record in enumerate(records):
            for item in _items(record):
                if next(left) >= self.config.items:
                    what = f"more than {self.config.items:,} steps, samples and texts"
                    raise Refusal(413, f"{what}, which is what the server takes (--items): send them in parts", param)
                if isinstance(item, str) and len(item) > most:
                    where = f"{place.format(i)} has" if place else "it has"
                    raise Refusal(
                        400, f"{where} a text of {len(item):,} characters: no chain has more than {most:,}", param
                    )

    def check_trees(self, trees: Sequence[ReasoningTree]) -> None:
        """Raises Refusal (413) for chains whose lengths together are too much to list, and too many critiques."""
        config = self.config
        total = sum(_lengths(tree) for tree in trees)
        if total > LENGTHS * config.items:
            most = f"{LENGTHS * config.items:,}"
            raise Refusal(413, f"the chains have {total:,} steps together, and {most} at most: send them in parts")
        if (critiques := self.engine.critiques_of(trees)) > config.critiques:
            most = f"{config.critiques:,}"
            raise Refusal(413, f"{critiques:,} critiques, and a request may ask for {most}: send it in parts")

    def tokens_of(self, trees: Sequence[ReasoningTree], alone: bool = False) -> int:
        """Returns the tokens of the trees, as `Engine.tokens_of`.

        Raises Refusal (400) for a chain longer than the server or model takes, and as `check_trees` and `check_size`.
        """
        self.check_trees(trees)
        try:
            tokens = self.engine.tokens_of(trees, alone)
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        self.check_size(tokens)
        return tokens

    def check_size(self, tokens: int) -> None:
        """Raises Refusal for work that by the measured rate takes longer than an answer may (413), and as `admit`."""
        most, rate = self.config.answer_seconds, self.engine.rate
        if rate and tokens > most * rate:
            seconds = tokens / rate
            raise Refusal(
                413, f"{tokens:,} tokens take about {seconds:,.0f} seconds, and {most:g} at most: send it in parts"
            )
        self.admit(tokens)

    @contextlib.contextmanager
    def naming(self, what: str, trees: Callable[[], Sequence[ReasoningTree | None]]) -> Iterator[None]:
        """Names the place of the first tree that `tokens_of` refuses (400) by itself, such as `samples[3]`."""
        try:
            yield
        except Refusal as refusal:
            for i, tree in enumerate(trees() if refusal.status == 400 else ()):
                if tree is not None:
                    with placed(f"{what}[{i}]", what):
                        self.tokens_of([tree])
            raise

    async def worked(self, work: Callable[[], T], items: int = 1) -> T:
        """Returns what `work` does: in a thread where it may take long, as `jprm.apps.web.http.worked`."""
        return await worked(self.request, work, items)

    async def answer(self, future: concurrent.futures.Future, deadline: float | None = None) -> Any:
        """Returns the future's result. Cancels it where the client goes away or the time is up.

        `deadline`, by `time.monotonic`, is that of an answer that begins now where it is None.

        Raises Refusal: 504 when late, 499 when the client has gone, 400 for a request that the model refuses, 500
        for anything else that fails.
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
        """Returns the results of the pieces of one request, which others' requests may come between.

        One is begun while the one before it runs. All have the time of one answer. Raises Refusal as `answer`.
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
        """Returns a tree's named outputs, and for a caller how many tokens an earlier tree had."""
        if not caller:
            return (await self.answer(self.engine.score([tree], tokens)))[0], None
        return await self.answer(self.engine.score_cached(tree, tokens, caller))

    async def single_chains(
        self, name: str, places: Sequence[int], chain: Callable[[int], ReasoningTree | None]
    ) -> tuple[list[tuple[float, np.ndarray] | None], int]:
        """Scores chains of one sample each, of which refusals call the one at a place i of the request NAME[i].

        Returns of each its score by the rule and those of its steps, (N,), or None for a blank one, for which `chain`
        gives None; and the tokens of all. Raises Refusal (502) where a judge gave no score.
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
        """Returns for every chain its nodes, its score by the rule, and the node of its lowest score."""
        paths = chains_of(tree)
        value_B, _ = chain_scores([score_N[path].tolist() for path in paths], self.rule, self.engine.prm.scale)
        known = [[node for node in path if np.isfinite(score_N[node])] for path in paths]
        return [
            {"nodes": path, "score": finite(value) if len(scored) == len(path) else None,
             "weakest": min(scored, key=lambda node: score_N[node], default=None)}
            for path, value, scored in zip(paths, value_B, known, strict=True)
        ]  # fmt: skip


CHARACTERS = 64
"""A text of more characters for every token of the longest chain is not tokenised: no tokenizer makes so few of it."""

LENGTHS = 64
"""The lengths of a request's chains together, in steps, at most so many times its items: an answer lists each chain."""


def _items(record: Any) -> Iterator[Any]:
    """Yields the texts, steps, nodes, samples and turns that a record as it was sent holds."""
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
"""Fields of records that hold items, and those whose texts become chains."""


def _lengths(tree: ReasoningTree) -> int:
    """Returns the sum of the chains' lengths, in nodes, without making the chains."""
    depth, inner = [], set()
    for node in tree.nodes:
        depth.append(1 + (depth[node.parent] if node.parent >= 0 else 0))
        inner.add(node.parent)
    return sum(length for i, length in enumerate(depth) if i not in inner)


@contextlib.contextmanager
def placed(where: str, param: str | None = None) -> Iterator[None]:
    """Names the place, such as `samples[3]`, in a Refusal that does not name it."""
    try:
        yield
    except Refusal as refusal:
        message = refusal.message if refusal.message.startswith(where) else f"{where}: {refusal.message}"
        raise Refusal(refusal.status, message, refusal.param or param, refusal.headers) from None


def finite(score: float) -> float | None:
    """Returns a score as JSON has it: null where a judge gave none."""
    return float(score) if math.isfinite(score) else None


def usage(tokens: int, cached: int | None = None) -> dict[str, Any]:
    """Returns the tokens of a request in OpenAI's form. A prefix that its chains share counts once."""
    counts: dict[str, Any] = {"prompt_tokens": tokens, "total_tokens": tokens}
    return counts if cached is None else counts | {"prompt_tokens_details": {"cached_tokens": cached}}


WAITING = 8
"""Requests that may wait for the policy."""


class Writer:
    """A policy and its thread: it samples for one request at a time, for as long as its client waits."""

    def __init__(self, policy: Policy):
        self.policy, self._room = policy, threading.Semaphore(WAITING)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jprm policy")

    def run(
        self, function: Callable[[InPieces], Any], tell: Callable[[dict[str, int]], Any] = lambda state: None
    ) -> Work:
        """Returns the future of what a function of the policy returns in its thread. Raises Refusal (503)
        where enough requests wait."""
        if not self._room.acquire(blocking=False):
            raise Refusal(503, f"{WAITING} requests wait for the policy: come back later", headers={"Retry-After": "5"})
        future = started(self._thread, lambda work: function(InPieces(self.policy, work, tell)))
        future.add_done_callback(lambda future: self._room.release())
        return future

    def close(self) -> None:
        self._thread.shutdown()
