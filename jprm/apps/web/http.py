"""What every server's routes share: who may call, bodies within limits, errors in OpenAI's form, and pages.

Pages are sent with a policy that forbids the browser any other site and any text as code. A connection whose request
does not arrive in time is closed, so that silent clients hold none.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hmac
import json
import keyword
import mimetypes
import operator
import os
import re
import socket
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from jprm.apps.web import Listen, bytes_of_file, names_in
from jprm.io.jsonl import parse
from jprm.options import OptionError, values_of
from jprm.tree import RecordError

T = TypeVar("T")
A = TypeVar("A", bound="RequestFields")

KEY = "JPRM_API_KEY"
"""The environment variable that holds the key, which a command line would show to all users of the machine."""

DEEPEST, MOST = 100, 300_000
"""Objects and lists within each other, and all of them, in a request."""


LARGE, _OPENING = 1 << 18, re.compile(rb'\[|\{\s*["}]')
"""Bytes of a body whose objects and lists are counted before it is read, and where each begins."""


class Refusal(Exception):
    """An answer that is an error: a status, a message, and the field of the request that it is about."""

    def __init__(self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers

    @property
    def content(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message[:1000], "type": kind, "param": self.param, "code": self.status}}

    def response(self) -> Response:
        return JSONResponse(self.content, self.status, self.headers)


def event(content: Mapping[str, Any]) -> bytes:
    """Returns a JSON object as a server-sent event."""
    return f"data: {json.dumps(content)}\n\n".encode()


LAST_EVENT = b"data: [DONE]\n\n"
"""What ends a stream of events in OpenAI's API."""


HANDLERS: dict[Any, Any] = {
    Refusal: lambda request, error: error.response(),
    RecordError: lambda request, error: Refusal(400, str(error), error.field).response(),
    404: lambda request, error: Refusal(404, f"there is no route {request.url.path}").response(),
    405: lambda request, error: Refusal(405, f"{request.url.path} takes no {request.method}").response(),
    Exception: lambda request, error: Refusal(500, f"{type(error).__name__}; the server's log has more").response(),
}
"""What an application answers to errors."""


def key_of(config: Listen) -> str | None:
    """Returns the key that clients need, None for none. Raises ValueError where others reach a server without one."""
    key = os.environ.get(KEY) or None
    if key is None and not config.loopback:
        raise ValueError(f"host {config.host}: others can reach it. Set {KEY}, or use 127.0.0.1")
    return key


def under(config: Listen) -> list[Middleware]:
    """Returns the middleware, the first of an application, that takes `root_path` away from the paths of requests."""
    return [Middleware(_Under, root=config.root_path)] if config.root_path else []


class _Under:
    """Serves an application under a path. `scope["path"]` is without it afterwards, as guards and counts compare it."""

    def __init__(self, app: ASGIApp, root: str):
        self.app, self.root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not path.startswith(self.root + "/") and path != self.root:
            await self.app(scope, receive, send)
        elif path == self.root:  # links on a page are relative to its folder
            await RedirectResponse(self.root + "/")(scope, receive, send)
        else:
            await self.app({**scope, "path": path.removeprefix(self.root)}, receive, send)


def guards(config: Listen, expected: Callable[[str], str | None]) -> list[Middleware]:
    """Returns the middleware that checks host, origin and key. `expected` returns the key of a path, None for none."""
    names = [config.host, "localhost", "127.0.0.1", "[::1]", *config.hosts]

    def of_host(scope: Scope, headers: Mapping[bytes, bytes]) -> Refusal | None:
        """Refuses a name that is not the server's own: a page of another site may send such requests."""
        name = re.sub(r":\d*$", "", headers.get(b"host", b"").decode("latin-1"))
        if any(name == known or known[:1] == "*" and name.endswith(known[1:]) for known in names):
            return None
        return Refusal(400, f"this server is not called {name!r}: start it with --hosts {name}")

    def of_key(scope: Scope, headers: Mapping[bytes, bytes]) -> Refusal | None:
        """Refuses a request without the key, comparing in constant time."""
        key = expected(scope["path"])
        if key is None or hmac.compare_digest(headers.get(b"authorization", b""), f"Bearer {key}".encode()):
            return None
        return Refusal(401, "no valid key: send it as Authorization: Bearer KEY")

    return [
        *([Middleware(_Checked, check=of_host)] if config.loopback or config.hosts else []),
        Middleware(CORSMiddleware, allow_origins=list(config.origins), allow_methods=["GET", "POST"],
                   allow_headers=["Authorization", "Content-Type"]),
        Middleware(_Checked, check=of_key),
    ]  # fmt: skip


class _Checked:
    """Answers requests that `check` refuses, by their scope and headers."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope, Mapping[bytes, bytes]], Refusal | None]):
        self.app, self.check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self.check(scope, dict(scope["headers"])) if scope["type"] == "http" else None
        await (refusal.response() if refusal else self.app)(scope, receive, send)


SMALL, FEW = 1 << 14, 16
"""Bytes of a body, and items in it, whose work is done at once: to hand it to a thread and back takes as long, and a
core."""


async def worked(request: Request, work: Callable[[], T], items: int = 1) -> T:
    """Returns the result of `work` for a request whose body is read, from a thread if it may take long.

    Raises Refusal (499) if the client has gone before the work begins: nobody waits for it.
    """
    leaving = asyncio.ensure_future(gone(request))

    def begun() -> T:
        if leaving.done():
            raise Refusal(499, "the client has gone")
        return work()

    try:
        for _ in range(ROUNDS):
            await asyncio.sleep(0)
        return begun() if request.state.bytes <= SMALL and items <= FEW else await asyncio.to_thread(begun)
    finally:
        leaving.cancel()


ROUNDS = 3
"""Rounds of the event loop in which it sees that a client has gone who sent a request and closed the connection."""


async def gone(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def body_of(request: Request) -> bytes:
    """Returns the request's body. Raises Refusal where it is too large (413), too slow (408) or compressed (415)."""
    config, parts, size = request.app.state.listen, [], 0
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise Refusal(415, f"the body is encoded as {encoding}: send it as it is, without Content-Encoding")
    try:
        async with asyncio.timeout(config.body_seconds):
            async for part in request.stream():
                size += len(part)
                if size > config.body_bytes:
                    raise Refusal(413, f"the body is larger than {config.body_bytes:,} bytes: send it in parts")
                parts.append(part)
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {config.body_seconds:g} seconds") from None
    request.state.bytes = size
    return b"".join(parts)


def kind_of_body(request: Request) -> str:
    """Returns the type of the body's content, in lower case and without parameters."""
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


async def json_of(request: Request) -> dict[str, Any]:
    """Returns the request's JSON object.

    Raises Refusal as `body_of`, for another type of content (415), which a page of another site may send unasked, and
    for anything else (400).
    """
    if (kind := kind_of_body(request)) != "application/json":
        raise Refusal(415, f"the body is of type {kind or 'unknown'}: send Content-Type: application/json")
    body = await body_of(request)
    value = await worked(request, lambda: json_in(body, "body"))
    if not isinstance(value, dict):
        raise Refusal(400, "the body is no JSON object")
    return value


def json_in(text: bytes, where: str) -> Any:
    """Returns the JSON value of a text.

    Raises RecordError for anything else, Refusal for more than DEEPEST levels (400) or MOST objects and lists (413).
    """
    if len(text) > LARGE and sum(1 for _ in _OPENING.finditer(text)) > 2 * MOST:  # it is not even read
        raise Refusal(413, f"{where}: holds more than {MOST:,} objects and lists: send it in parts")
    value = parse(text, where)
    inner, count = [value], 0
    for _ in range(DEEPEST):
        parents = [value for value in inner if isinstance(value, dict | list)]
        if (count := count + len(parents)) > MOST:
            raise Refusal(413, f"{where}: holds more than {MOST:,} objects and lists: send it in parts")
        inner = [child for parent in parents for child in (parent.values() if isinstance(parent, dict) else parent)]
    if any(isinstance(value, dict | list) for value in inner):
        raise Refusal(400, f"{where}: objects and lists are nested more than {DEEPEST} deep")
    return value


class RequestFields:
    """What a request sends, as a frozen dataclass: `read_request` makes it, and `/openapi.json` describes it.

    A field's annotation has a sentence about the field, and its bounds in the words of JSON Schema.

    Attributes:
      closed: whether a field that the class lacks is refused, and not left unread.
      example: a body that the server answers.
      gives: fields of the answer, name to (type, what it is).
    """

    closed = False
    example: Mapping[str, Any] = {}
    gives: Mapping[str, tuple[Any, str]] = {}


_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("at least", operator.ge),
    "maximum": ("at most", operator.le),
    "exclusiveMinimum": ("above", operator.gt),
    "exclusiveMaximum": ("below", operator.lt),
    "maxLength": ("of a length of at most", lambda text, most: len(text) <= most),
}


@functools.cache
def fields_of(kind: type[RequestFields]) -> dict[str, tuple[tuple[Any, ...], Mapping[str, Any], Any]]:
    """Returns for every field of a request the types that it may have, what its annotation says, and its default.

    None is not among the types: a null is as an absent field. A name that Python has taken ends with _ in the class.
    """
    hints, fields = typing.get_type_hints(kind, include_extras=True), {}
    for field in dataclasses.fields(typing.cast(Any, kind)):
        hint, about = hints[field.name], {}
        if typing.get_origin(hint) is typing.Annotated:
            hint, *notes = typing.get_args(hint)
            for note in notes:
                about |= {"description": note} if isinstance(note, str) else note
        choices = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        choices = tuple(choice for choice in choices if choice is not type(None))
        fields[field.name.rstrip("_")] = choices, about, field.default
    return fields


def read_request(kind: type[A], sent: Mapping[str, Any], within: str = "") -> A:
    """Returns what a request, or its field `within`, sends. The items of lists are left to the route, which counts them
    first.

    Raises Refusal (400), naming the field, for one that is absent, of another type, out of bounds or unknown.
    """
    fields, kinds = fields_of(kind), {}
    present = {name: value for name, value in sent.items() if value is not None and (kind.closed or name in fields)}
    for name, (choices, _, default) in fields.items():
        kinds[name] = functools.reduce(operator.or_, (list if typing.get_origin(x) is Sequence else x for x in choices))
        if default is dataclasses.MISSING and name not in present:
            raise Refusal(400, f"{name} is absent", within or name)
    try:
        values = values_of(kinds, present, within)
    except OptionError as error:
        raise Refusal(400, str(error), within or error.field) from None
    for name, value in values.items():
        for word, bound in fields[name][1].items():
            if word in _BOUNDS and not _BOUNDS[word][1](value, bound):
                reason = f"is {value!r}: it must be {_BOUNDS[word][0]} {bound:,}"
                raise Refusal(400, f"{within}.{name} {reason}".lstrip("."), within or name)
    return kind(**{name + "_" * keyword.iskeyword(name): value for name, value in values.items()})


POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; font-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def files_of(package: str, *names: str, at: str = "/") -> dict[str, str]:
    """Returns a package's files, `package:name`, by the path that they are served under."""
    return {f"{at}{name}": f"{package}:{name}" for name in names}


MATH = files_of(
    "jprm.apps.web", "math.js", "katex/katex.min.js", "katex/katex.min.css",
    *(f"katex/fonts/{name}" for name in names_in("jprm.apps.web:katex/fonts")),
)  # fmt: skip
"""The files of pages that draw mathematics."""


def page_route(path: str, text: str | bytes, name: str) -> Route:
    """Returns the route of a file's text or bytes, whose type the ending of its name says."""
    kind = "font/woff2" if name.endswith(".woff2") else mimetypes.guess_type(name)[0] or "text/plain"
    body = text.encode() if isinstance(text, str) else text

    async def send(request: Request) -> Response:
        return Response(body, media_type=kind, headers=HEADERS)

    return Route(path, send)


def file_routes(files: Mapping[str, str]) -> list[Route]:
    """Returns the routes of files by path; a file is `package:name`."""
    return [page_route(path, bytes_of_file(file), file) for path, file in files.items()]


def opened(config: Listen) -> socket.socket:
    """Returns a socket that listens. Raises OSError, in one line, where the port cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        place, why = f"port {config.port} of {config.host}", error.strerror or error
        raise OSError(f"{place}: {why}. Name another --port; 0 takes a free one") from None


def listening(config: Listen, **more: Any) -> dict[str, Any]:
    """Returns uvicorn's arguments. Its access log would hold addresses and query strings; /metrics has the counts."""
    options = dict(host=config.host, port=config.port, http=timed(config.body_seconds), access_log=False)
    return options | {"server_header": False} | more


HEADER_BYTES = 1 << 16
"""The most bytes of a request's headers."""


def timed(seconds: float) -> type[asyncio.Protocol]:
    """Returns uvicorn's protocol of HTTP for connections that have so long for the headers of each request.

    uvicorn itself waits for a first byte, and for the rest of the headers, without end.
    """

    class Timed(AutoHTTPProtocol):  # pyright: ignore[reportGeneralTypeIssues]  # one of two classes
        loop: Any
        transport: Any
        cycle: Any
        timer: asyncio.TimerHandle | None = None
        pending = 0  # bytes of headers so far

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.timer = self.loop.call_later(seconds, self.transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle and not self.cycle.response_complete:
                self.stop()
                return
            self.pending += len(data)
            if self.pending > HEADER_BYTES:
                self.transport.close()
            self.timer = self.timer or self.loop.call_later(seconds, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            self.stop()
            super().connection_lost(exc)

        def stop(self) -> None:
            if self.timer:
                self.timer.cancel()
            self.timer, self.pending = None, 0

    return Timed
