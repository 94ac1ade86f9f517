"""Downloads public releases, each with a checksum."""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection

from jprm.io.digests import sha256_of
from jprm.io.outputs import atomic_file
from jprm.io.storage import only_run

_CHUNK = 1 << 20
_HUB = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?/(.+)")


def is_url(source: str | os.PathLike) -> bool:
    return urllib.parse.urlsplit(os.fspath(source)).scheme in ("http", "https", "file", "hf")


def resolved(url: str) -> str:
    """Returns the address of a file: `hf://datasets/OWNER/NAME[@REVISION]/FILE` is on the Hugging Face Hub.

    The environment variable HF_ENDPOINT names a mirror of the Hub, as for Hugging Face's own libraries.

    Raises:
      ValueError: an `hf://` address of another form.
    """
    if not url.startswith("hf:"):
        return url
    found = _HUB.fullmatch(url)
    if found is None:
        raise ValueError(f"{url}: is not of the form hf://datasets/OWNER/NAME[@REVISION]/FILE")
    name, revision, file = found[1], urllib.parse.quote(found[2] or "main", safe=""), urllib.parse.quote(found[3])
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    return f"{endpoint}/datasets/{name}/resolve/{revision}/{file}"


def fetch(
    url: str,
    folder: str | os.PathLike,
    allowed: Collection[str],
    on_bytes: Callable[[int, int | None], None] = lambda done, total: None,
) -> pathlib.Path:
    """Returns the file of a URL in `folder`, downloaded unless it is there with an allowed SHA-256.

    Raises:
      ValueError: no checksum is known, or the download has another, or `url` is malformed (`resolved`); the folder is
        left as it was.
      OSError: the download failed.
    """
    if not allowed:
        raise ValueError(f"{url}: no SHA-256 is known for it: pass the one you trust with --sha256, or a local file")
    address = resolved(url)
    path = pathlib.Path(folder) / pathlib.PurePosixPath(urllib.parse.urlsplit(address).path).name
    if path.is_file() and sha256_of(path) in allowed:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, done = hashlib.sha256(), 0
    with only_run(path), atomic_file(path) as file, urllib.request.urlopen(address, timeout=60) as response:
        total = response.headers.get("Content-Length")
        while chunk := response.read(_CHUNK):
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            on_bytes(done, int(total) if total else None)
        if digest.hexdigest() not in allowed:
            reason = f"its SHA-256 is {digest.hexdigest()}, not {' or '.join(sorted(allowed))}"
            raise ValueError(f"{url}: {reason}. Check it; if you trust it, pass its checksum with --sha256")
    return path
