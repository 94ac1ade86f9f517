"""Files of pages: read once, sent with a policy that forbids the browser any other site and any text as code."""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jprm.apps.web.files import bytes_of_file, names_in

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


MATH = {
    "/math.js": "jprm.apps.web:math.js",
    "/katex/katex.min.js": "jprm.apps.web:katex/katex.min.js",
    "/katex/katex.min.css": "jprm.apps.web:katex/katex.min.css",
} | {f"/katex/fonts/{name}": f"jprm.apps.web:katex/fonts/{name}" for name in names_in("jprm.apps.web:katex/fonts")}
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
