"""Shared by all servers: access checks, request limits, errors in OpenAI's form, and pages.

Pages are sent with a content security policy that forbids other sites and inline code. A connection is closed if its
request does not arrive in time, so that silent clients cannot hold connections.
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
"""The environment variable with the key. On a command line, all users of the machine could see it."""

DEEPEST, MOST = 100, 300_000
"""The deepest nesting of objects and lists in a request, and their largest number."""


LARGE, _OPENING = 1 << 18, re.compile(rb'\[|\{\s*["}]')
"""From this body size in bytes, objects and lists are counted before parsing; and the pattern of their starts."""


class Refusal(Exception):
    """An error answer: HTTP status, message, the request field at fault (if any), and further headers."""

    def __init__(self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers

    @property
    def content(self) -> dict[str, Any]:
        """The error in OpenAI's form: {"error": {"message", "type", "param", "code"}}.

        `code` is the status, `type` `invalid_request_error` below 500, else `server_error`; messages end at 1,000
        characters.
        """
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message[:1000], "type": kind, "param": self.param, "code": self.status}}

    def response(self) -> Response:
        return JSONResponse(self.content, self.status, self.headers)


def event(content: Mapping[str, Any]) -> bytes:
    """Returns a JSON object as a server-sent event: `data: {...}` and a blank line."""
    return f"data: {json.dumps(content)}\n\n".encode()


LAST_EVENT = b"data: [DONE]\n\n"
"""The end of an event stream in OpenAI's API."""


HANDLERS: dict[Any, Any] = {
    Refusal: lambda request, error: error.response(),
    RecordError: lambda request, error: Refusal(400, str(error), error.field).response(),
    404: lambda request, error: Refusal(404, f"there is no route {request.url.path}").response(),
    405: lambda request, error: Refusal(405, f"{request.url.path} takes no {request.method}").response(),
    Exception: lambda request, error: Refusal(500, f"{type(error).__name__}; the server's log has more").response(),
}
"""Exception handlers of an application."""


def key_of(config: Listen) -> str | None:
    """Returns the key that clients need, from the environment's JPRM_API_KEY, or `None` if it is unset or empty.

    Raises ValueError if others can reach the server (not `loopback`) and there is no key.
    """
    key = os.environ.get(KEY) or None
    if key is None and not config.loopback:
        raise ValueError(f"host {config.host}: others can reach it. Set {KEY}, or use 127.0.0.1")
    return key


def under(config: Listen) -> list[Middleware]:
    """Returns the middleware to strip `root_path` from request paths, [] without one. It must come first.

    The path itself, without the slash, is redirected to `root_path/`.
    """
    return [Middleware(_Under, root=config.root_path)] if config.root_path else []


class _Under:
    """Serves an application under a path prefix; strips it from `scope["path"]`, which guards and metrics compare."""

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
    """Returns the middleware to check host (400 if unknown), origin (CORS), and key (401), in this order.

    `expected` maps a path (without `root_path`) to the key that it needs, or `None`. The host is only checked on a
    loopback address or if `hosts` are named; one that begins with `*` stands for its subdomains.
    """
    names = [config.host, "localhost", "127.0.0.1", "[::1]", *config.hosts]

    def of_host(scope: Scope, headers: Mapping[bytes, bytes]) -> Refusal | None:
        """Refuses unknown host names: a page on another site could send such requests."""
        name = re.sub(r":\d*$", "", headers.get(b"host", b"").decode("latin-1"))
        if any(name == known or known[:1] == "*" and name.endswith(known[1:]) for known in names):
            return None
        return Refusal(400, f"this server is not called {name!r}: start it with --set hosts='[\"{name}\"]'")

    def of_key(scope: Scope, headers: Mapping[bytes, bytes]) -> Refusal | None:
        """Refuses a request without the key; compares in constant time."""
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
    """Answers with the Refusal that `check` returns, if any."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope, Mapping[bytes, bytes]], Refusal | None]):
        self.app, self.check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self.check(scope, dict(scope["headers"])) if scope["type"] == "http" else None
        await (refusal.response() if refusal else self.app)(scope, receive, send)


SMALL, FEW = 1 << 14, 16
"""Body size in bytes, and number of items, up to which work runs in the event loop.

A thread switch would take as long, and a core.
"""


async def worked(request: Request, work: Callable[[], T], items: int = 1) -> T:
    """Runs `work` once for a request, and returns its result; its errors pass through.

    The body must have been read (`body_of`). A body above `SMALL` bytes, or more than `FEW` `items`, runs in a thread,
    else in the event loop, which it blocks.

    Raises Refusal (499) if the client disconnected before the work begins.
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
"""Event-loop rounds needed to notice a client that sent a request and closed the connection."""


async def gone(request: Request) -> None:
    """Returns when the client has disconnected. The body must have been read: further parts are discarded."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def body_of(request: Request) -> bytes:
    """Reads the whole body, and stores its size in `request.state.bytes`.

    The limits are those of the server's `Listen`.

    Raises Refusal if it is too large (413), too slow (408) or compressed (415).
    """
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
    """Returns the content type in lower case, without parameters, e.g. `application/json`; "" if there is none."""
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


async def json_of(request: Request) -> dict[str, Any]:
    """Reads the JSON object of a request.

    Raises Refusal like `body_of`, like `json_in` and `worked`, if the content type is not JSON (415; a page on another
    site can send other types without permission), and if the body is not an object (400). Raises RecordError if it is
    not valid JSON.
    """
    if (kind := kind_of_body(request)) != "application/json":
        raise Refusal(415, f"the body is of type {kind or 'unknown'}: send Content-Type: application/json")
    body = await body_of(request)
    value = await worked(request, lambda: json_in(body, "body"))
    if not isinstance(value, dict):
        raise Refusal(400, "the body is no JSON object")
    return value


def json_in(text: bytes, where: str) -> Any:
    """Parses JSON with size limits; returns any JSON value. `where` begins the errors, e.g. `body`.

    Raises RecordError if it is invalid, e.g. has NaN or a duplicate key, and Refusal if it has more than DEEPEST levels
    (400) or MOST objects and lists (413).
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
    """The fields of a request, as a frozen dataclass; parsed by `read_request`, and described in `/openapi.json`.

    A field's annotation has a one-sentence description, and bounds as in JSON Schema, e.g. `Annotated[int,
    "Alternatives.", {"minimum": 1}]`.

    Attributes:
      closed: refuse unknown fields instead of ignoring them.
      example: a valid request body.
      gives: fields of the answer, name to (type, description).
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
    """Returns {field's name: (types, annotation, default)} of a request type, in order. Cached.

    NoneType is left out of the types, since null means absent. The annotation has `description` and bounds, e.g.
    {"minimum": 1}. A required field has `dataclasses.MISSING` as its default. If a name is a Python keyword, the
    dataclass appends `_` to it, the key does not.
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
    """Returns `sent` as a `kind`, checked against its annotations. A null field counts as absent.

    List items are not checked; the route counts them first. Unknown fields are ignored, unless `kind` is closed. If
    `sent` is one field's object of a larger request, `within` is that field's name for errors, e.g. `search`.

    Raises Refusal (400), naming the field, if one is missing, out of bounds or has another type.
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
    """Returns {URL path: `package:name`} for files of a package, e.g. {"/base.css": "jprm.apps.web:base.css"}.

    Reads no file. `at` begins the paths.
    """
    return {f"{at}{name}": f"{package}:{name}" for name in names}


MATH = files_of(
    "jprm.apps.web", "math.js", "katex/katex.min.js", "katex/katex.min.css",
    *(f"katex/fonts/{name}" for name in names_in("jprm.apps.web:katex/fonts")),
)  # fmt: skip
"""The files for pages with mathematics."""


def page_route(path: str, text: str | bytes, name: str) -> Route:
    """Returns a GET route that serves `text` with `HEADERS`; the type follows from the name's extension.

    An unknown extension is sent as text/plain.
    """
    kind = "font/woff2" if name.endswith(".woff2") else mimetypes.guess_type(name)[0] or "text/plain"
    body = text.encode() if isinstance(text, str) else text

    async def send(request: Request) -> Response:
        return Response(body, media_type=kind, headers=HEADERS)

    return Route(path, send)


def file_routes(files: Mapping[str, str]) -> list[Route]:
    """Returns a route per URL path (`page_route`); reads each file, `package:name`, now.

    Raises FileNotFoundError if the package lacks one.
    """
    return [page_route(path, bytes_of_file(file), file) for path, file in files.items()]


def opened(config: Listen) -> socket.socket:
    """Returns a listening TCP socket, for the caller to close, on the config's host and port (0: a free one).

    Raises a one-line OSError if the port is unavailable, without an errno.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        place, why = f"port {config.port} of {config.host}", error.strerror or error
        raise OSError(f"{place}: {why}. Name another --port; 0 takes a free one") from None


def listening(config: Listen, **more: Any) -> dict[str, Any]:
    """Returns keyword arguments of `uvicorn.Config`: `host`, `port`, `http` (`timed`), `access_log`, `server_header`.

    `more` adds to or overrides them. The access log is off: it would hold addresses and query strings.
    """
    options = dict(host=config.host, port=config.port, http=timed(config.body_seconds), access_log=False)
    return options | {"server_header": False} | more


HEADER_BYTES = 1 << 16
"""The most bytes of request headers."""


def timed(seconds: float) -> type[asyncio.Protocol]:
    """Returns a uvicorn HTTP protocol class with a time limit, in seconds, for the headers of each request.

    It closes the connection after that, or above `HEADER_BYTES` bytes of headers. uvicorn itself waits without limit
    for the first byte and for the rest of the headers.
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
