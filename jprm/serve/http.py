"""What every route shares: reading a body within limits, waiting for the device, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jprm.jsonl import parse
from jprm.serve.config import ServeConfig
from jprm.serve.engine import Closed, Engine
from jprm.tree import RecordError


class Refusal(Exception):
    """An answer that is an error: a status, a message, and the field of the request that it is about."""

    def __init__(self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers

    def response(self) -> Response:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message[:1000], "type": kind, "param": self.param, "code": self.status}
        return JSONResponse({"error": error}, self.status, self.headers)


@dataclasses.dataclass(frozen=True)
class Server:
    """What routes work with: the models by name, of which the first is the default, and what is accepted."""

    engines: Mapping[str, Engine]
    config: ServeConfig

    def engine(self, name: Any) -> Engine:
        """Returns the engine of a model's name, that of the first model for None."""
        if name is None:
            return next(iter(self.engines.values()))
        if name not in self.engines:
            raise Refusal(404, f"there is no model {name!r}: use {', '.join(self.engines)}", "model")
        return self.engines[name]


def server_of(request: Request) -> Server:
    return request.app.state.server


async def body_of(request: Request) -> bytes:
    """Returns the request's body. Raises Refusal where it is too large (413) or too slow (408)."""
    config, parts, size = server_of(request).config, [], 0
    try:
        async with asyncio.timeout(config.body_seconds):
            async for part in request.stream():
                size += len(part)
                if size > config.body_bytes:
                    raise Refusal(413, f"the body is larger than {config.body_bytes:,} bytes: send it in parts")
                parts.append(part)
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {config.body_seconds:g} seconds") from None
    return b"".join(parts)


async def json_of(request: Request) -> dict[str, Any]:
    """Returns the request's JSON object. Raises Refusal as `body_of`, and for anything else (400)."""
    try:
        value = parse(await body_of(request), "body")
    except RecordError as error:
        raise of_record(error) from None
    if not isinstance(value, dict):
        raise Refusal(400, "the body is no JSON object")
    return value


def of_record(error: RecordError) -> Refusal:
    return Refusal(400, str(error), error.field)


def field(body: Mapping[str, Any], name: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
    """Returns a field of the body. Raises Refusal where it has another type, or lacks and has no default."""
    value = body.get(name)
    if value is None:
        if default is None:
            raise Refusal(400, f"{name} is absent", name)
        return default
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is int):
        wanted = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        raise Refusal(400, f"{name} is a {type(value).__name__}, not a {wanted}", name)
    return value


def admit(request: Request, engine: Engine) -> None:
    """Raises Refusal (503, with the time to come back) where more work waits than the server takes."""
    config, wait = server_of(request).config, engine.wait_seconds()
    if wait > config.queue_seconds:
        seconds = math.ceil(wait - config.queue_seconds)
        raise Refusal(503, f"{wait:.0f} seconds of work wait: come back later", headers={"Retry-After": str(seconds)})


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
