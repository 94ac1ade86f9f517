"""What every route of scores shares: the models, admission, and waiting for the device."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from jprm.apps.serve.config import ServeConfig
from jprm.apps.serve.engine import Closed, Engine
from jprm.apps.web.guards import Refusal
from jprm.methods.policy.protocol import Policy, Prefix, Sample
from jprm.tree import ReasoningTree


@dataclasses.dataclass(frozen=True)
class Server:
    """What routes work with: the models by name, the first being the default; what is accepted; and a policy."""

    engines: Mapping[str, Engine]
    config: ServeConfig
    writer: Writer | None = None

    def engine(self, name: Any) -> Engine:
        """Returns the engine of a model's name, that of the first model for None."""
        if name is None:
            return next(iter(self.engines.values()))
        if not isinstance(name, str):
            raise Refusal(400, f"model is of type {type(name).__name__}, not str", "model")
        if name not in self.engines:
            raise Refusal(404, f"there is no model {name!r}: use {', '.join(self.engines)}", "model")
        return self.engines[name]


def server_of(request: Request) -> Server:
    return request.app.state.server


def admit(request: Request, engine: Engine) -> None:
    """Raises Refusal (503, with the time to come back) where more work waits than the server takes."""
    config, wait = server_of(request).config, engine.wait_seconds()
    if wait > config.queue_seconds:
        seconds = math.ceil(wait - config.queue_seconds)
        raise Refusal(503, f"{wait:.0f} seconds of work wait: come back later", headers={"Retry-After": str(seconds)})


def tokens_of(request: Request, engine: Engine, trees: Sequence[ReasoningTree], alone: bool = False) -> int:
    """Returns the tokens of the trees, as `Engine.tokens_of`.

    Raises Refusal (400) for a chain longer than the server or model takes, and as `check_size`.
    """
    try:
        tokens = engine.tokens_of(trees, alone)
    except ValueError as error:
        raise Refusal(400, str(error)) from None
    check_size(request, engine, tokens)
    return tokens


def check_size(request: Request, engine: Engine, tokens: int) -> None:
    """Raises Refusal (413) for work that by the measured rate takes longer than an answer may."""
    most = server_of(request).config.answer_seconds
    if engine.rate and tokens > most * engine.rate:
        seconds = tokens / engine.rate
        raise Refusal(
            413, f"{tokens:,} tokens take about {seconds:,.0f} seconds, and {most:g} at most: send it in parts"
        )


async def answer(request: Request, future: concurrent.futures.Future) -> Any:
    """Returns the future's result. Cancels it where the client goes away or the time is up.

    Raises Refusal: 504 when late, 499 when the client has gone, 400 for a request that the model refuses, 500
    for anything else that fails.
    """
    waiting, gone = asyncio.wrap_future(future), asyncio.ensure_future(_gone(request))
    seconds = server_of(request).config.answer_seconds
    try:
        done, _ = await asyncio.wait({waiting, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if waiting in done:
            return waiting.result()
        raise Refusal(499, "the client has gone") if done else Refusal(504, f"no answer within {seconds:g} seconds")
    except (Refusal, asyncio.CancelledError):
        raise
    except ValueError as error:
        raise Refusal(400, str(error)) from None
    except Exception as error:  # its message may quote the request, which no log is to hold
        logging.getLogger(__name__).error("%s while scoring a request", type(error).__name__)
        raise Refusal(500, f"{type(error).__name__} while scoring the request") from None
    finally:
        gone.cancel()
        waiting.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def shutting_down(error: Closed) -> Refusal:
    return Refusal(503, str(error), headers={"Retry-After": "5"})


WAITING = 8
"""Requests that may wait for the policy."""


class Writer:
    """A policy and its thread: it samples for one request at a time."""

    def __init__(self, policy: Policy):
        self.policy, self.waiting = policy, 0
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jprm policy")

    async def sample(self, request: Request, prefix: Prefix, n: int, until: Any, seed: int) -> list[Sample]:
        """Returns n samples. Raises Refusal: 503 where enough requests wait, else as `answer`."""
        if self.waiting >= WAITING:
            raise Refusal(503, f"{WAITING} requests wait for the policy: come back later", headers={"Retry-After": "5"})
        self.waiting += 1
        try:
            sample = functools.partial(self.policy.sample, [prefix], n, until=until, seed=seed)
            return (await answer(request, self._thread.submit(sample)))[0]
        finally:
            self.waiting -= 1

    def close(self) -> None:
        self._thread.shutdown()
