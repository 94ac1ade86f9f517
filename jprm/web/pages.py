"""Files of pages: read once, sent with a policy that forbids the browser any other site and any text as code."""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jprm.web.files import text_of_file

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_route(path: str, text: str, name: str) -> Route:
    """Returns the route of a text, whose type the ending of a file's name says."""
    kind, body = mimetypes.guess_type(name)[0] or "text/plain", text.encode()

    async def send(request: Request) -> Response:
        return Response(body, media_type=kind, headers=HEADERS)

    return Route(path, send)


def file_routes(files: Mapping[str, str]) -> list[Route]:
    """Returns the routes of files by path; a file is `package:name`."""
    return [page_route(path, text_of_file(file), file) for path, file in files.items()]
