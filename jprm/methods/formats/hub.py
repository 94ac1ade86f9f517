"""Models on the Hugging Face Hub, by address: `hf://OWNER/NAME@REVISION`, as a base, tokenizer, LoRA or PRM.

`huggingface_hub` downloads into its own cache, which other programs share; HF_HOME, HF_ENDPOINT, HF_TOKEN and
HF_HUB_OFFLINE have their usual effect. Only safetensors weights, tokenizer and configuration are downloaded: never
pickles or code. A revision is resolved to a commit once; a cached commit needs no network.

The server is not trusted: a mirror or proxy may answer instead of the Hub. `Door` checks its responses before
    `huggingface_hub` reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import pathlib
import re
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import httpx2
from huggingface_hub import (
    HfApi,
    RepoFile,
    close_session,
    constants,
    errors,
    get_cached_repo_tree,
    get_token,
    set_client_factory,
)
from huggingface_hub.utils import _http, disable_progress_bars, enable_progress_bars

from jprm.io.folders import local_copy
from jprm.io.outputs import atomic_write
from jprm.io.storage import HUB, Found, Local, Place, cache_folder, sha256_of

T = TypeVar("T")

ADDRESS = re.compile(HUB + r"(?!(?:datasets|spaces|buckets)/)([\w.-]+/[\w.-]+)(?:@(?!/|.*\.\.)([\w./-]+))?")
NAME = re.compile(r"[\w.-]+/[\w.-]+")
COMMIT, DIGEST = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

FETCHED = re.compile(r"(?!consolidated)[^/]+\.safetensors|(?!.*\.bin\.index)[^/]+\.json|[^/]+\.jinja|tokenizer\.model"
                     r"|SHA256SUMS|README\.md")  # fmt: skip
"""Downloaded top-level files. `consolidated` is a second copy in Mistral's format."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")
"""Suffixes of weights that execute code when read, or are unreadable by jprm."""


@functools.cache
def folder(address: str, names: Sequence[str] = (), reference: Found | None = None) -> Local:
    """Returns the local folder of a model on the Hub, downloading it if needed; waits until it is whole.

    Every file is checked once against its digest in the Hub's listing; a damaged file is removed. The result is cached
    for the process, so a second call asks no server, even if a branch has moved. Prints the commit of a branch or tag
    to stderr.

    Args:
      address: `hf://OWNER/NAME@REVISION`; the revision is a branch, tag or commit, by default the default branch.
      names: a tuple of the exact names of files to download, if they exist; () for all that jprm reads.
      reference: the field that holds the address, in a file that may be a stranger's. Only the cache is searched,
        without any download. `None` for an address that the user typed.

    Raises:
      ValueError: a malformed address, or (for all files) no weights as safetensors.
      OSError: the model or revision does not exist or is not accessible, the Hub cannot be reached, a file arrived
        damaged, or (with `reference`) the model is not in the cache.
    """
    if reference is not None:
        return _cached(address, names, reference)
    repository, commit = _resolved(address)
    with _asking(address):
        listing = _listing(repository, commit)
        if listing is None:  # a cache that an older release filled, and no network
            return Local(HfApi().snapshot_download(repository, revision=commit, local_files_only=True))
    if not names:
        _check_weights(address, listing)
    wanted = _wanted(listing, names)
    with _asking(address, max((listing[name].size for name in wanted), default=0)):
        snapshot = HfApi().snapshot_download(repository, revision=commit, allow_patterns=wanted or ["-"])
    _check_digests(address, pathlib.Path(snapshot), commit, {name: listing[name] for name in wanted})
    return Local(snapshot)


def _wanted(listing: Collection[str], names: Sequence[str]) -> list[str]:
    return sorted(file for file in listing if (file in names if names else FETCHED.fullmatch(file)))


def _cached(address: str, names: Sequence[str], reference: Found) -> Local:
    """Returns the folder in the cache. Raises OSError if it is incomplete; never contacts a server."""
    repository, revision = _parts(address)
    try:
        listing = {file.path: file for file in get_cached_repo_tree(repository, revision=revision)}
        wanted = _wanted(listing, names)
        snapshot = pathlib.Path(
            HfApi().snapshot_download(repository, revision=revision, local_files_only=True, allow_patterns=wanted)
        )
    except (OSError, ValueError, errors.CachedRepoTreeNotFoundError):
        fetch = f"hf download {repository}" + (f" --revision {revision}" if revision else "")
        raise OSError(
            f"{reference.file}: {reference.field} is {address}, which is not in this machine's cache of the Hub, and"
            f" nothing is downloaded because a file says so. If you trust it, run `{fetch}`"
        ) from None
    _check_digests(address, snapshot, snapshot.name, {name: listing[name] for name in wanted})
    return Local(snapshot)


def name_of(place: Place) -> str:
    """Returns the last part of a folder's path; in the Hub's cache, the model's name there, without its owner."""
    if place.parent.name == "snapshots":
        return place.parent.parent.name.rpartition("--")[2]
    return place.name


def check_push(repository: str, dry_run: bool) -> None:
    """Raises ValueError unless `repository` is OWNER/NAME and (unless `dry_run`) a token is stored on this machine.

    Call it before writing. It asks no server, so the token may still lack the right to write.
    """
    if not NAME.fullmatch(repository):
        raise ValueError(f"--push {repository}: is not of the form OWNER/NAME")
    if not dry_run and not get_token():
        raise ValueError(f"--push {repository}: no token. Run `hf auth login`, or set HF_TOKEN to one that may write")


def push(place: Place, repository: str) -> str:
    """Uploads the files of an exported folder, including its card; returns `hf://OWNER/NAME@COMMIT`.

    A missing repository is created as private. Files that it already has are not sent again, and its other files stay.
    Waits until all is uploaded. A folder in a bucket is copied to this machine first.

    Raises OSError if the Hub refuses or cannot be reached, or the folder cannot be read.
    """
    here = local_copy(place)
    with _asking(HUB + repository):
        HfApi().create_repo(repository, private=True, exist_ok=True)
        message = "Upload a process reward model by jprm"
        done = HfApi().upload_folder(repo_id=repository, folder_path=here, commit_message=message)
        return f"{HUB}{repository}@{_commit(done.oid)}"


def pinned(experiment: T) -> T:
    """Returns a copy of an experiment with `@COMMIT` at each Hub address, so that the run is reproducible.

    Only the experiment's own text fields that begin with `hf://` are changed, e.g. `base`; if there are none, returns
    the experiment itself. Asks the Hub unless the address has a commit that is cached; offline, a branch is its last
    known commit.

    Raises OSError if the Hub lacks the model or is unreachable, and ValueError if an address is malformed.
    """
    fields = {field.name: getattr(experiment, field.name) for field in dataclasses.fields(cast(Any, experiment))}
    commits = {
        name: f"{HUB}{'@'.join(_resolved(text))}"
        for name, text in fields.items()
        if isinstance(text, str) and text.startswith(HUB)
    }
    return dataclasses.replace(cast(Any, experiment), **commits) if commits else experiment


def _parts(address: str) -> tuple[str, str | None]:
    if not (match := ADDRESS.fullmatch(address)):
        raise ValueError(f"{address}: is not of the form {HUB}OWNER/NAME@REVISION, a model of the Hugging Face Hub")
    return match[1], match[2]


@functools.cache
def _resolved(address: str) -> tuple[str, str]:
    """Returns OWNER/NAME and the commit. Offline, a branch resolves to its last known commit."""
    repository, revision = _parts(address)
    with _asking(address):
        commit = _commit(HfApi().resolve_revision(repository, revision=revision).resolved)
    if commit != revision:
        print(f"{address}: is now {HUB}{repository}@{commit}", file=sys.stderr)
    return repository, commit


def _listing(repository: str, commit: str) -> dict[str, Any] | None:
    """Returns the Hub's metadata of each file by path, if the Hub is reachable or a listing is cached."""
    try:
        files: Iterable[Any] = get_cached_repo_tree(repository, revision=commit)
    except errors.CachedRepoTreeNotFoundError:
        try:
            files = list(HfApi().list_repo_tree(repository, recursive=True, revision=commit))
        except (httpx2.TransportError, errors.OfflineModeIsEnabled):
            return None
    return {file.path: file for file in files if isinstance(file, RepoFile) and _is_name(file.path)}


def _is_name(path: str) -> bool:
    """Returns whether a path is printable, contains no pattern, and is short enough for a file."""
    return path.isprintable() and len(path) < 200 and not set(path) & set("\\*?[]")


def _check_weights(address: str, names: Collection[str]) -> None:
    """Raises ValueError if a repository has weights only in unsupported formats."""
    if any(FETCHED.fullmatch(name) and name.endswith(".safetensors") for name in names):
        return
    if others := sorted(name for name in names if name.endswith(PICKLES)):
        raise ValueError(
            f"{address}: has its weights only as {others[0]}, which runs code when it is read: it is not fetched. Name"
            " a revision with safetensors (refs/pr/N, of its page's pull requests), or convert it where you trust it"
        )
    if others := sorted(name for name in names if name.endswith(".gguf")):
        raise ValueError(
            f"{address}: has its weights as GGUF. Fetch one file, `hf download {address[len(HUB) :].partition('@')[0]}"
            f" {others[0]} --local-dir .`, and name it"
        )
    raise ValueError(f"{address}: has no weights as safetensors in its first folder")


def _check_digests(address: str, snapshot: pathlib.Path, commit: str, listing: dict[str, Any]) -> None:
    """Compares files with the Hub's digests, unless they were compared before and have not changed since.

    Raises OSError for a file that differs, and removes it from the cache.
    """
    mark = Local(cache_folder("hub") / f"{commit}.json")
    checked = json.loads(mark.read_bytes()) if mark.is_file() else {}
    inside = [pathlib.Path(constants.HF_HUB_CACHE).expanduser().resolve(), snapshot.parent.parent.resolve()]
    for name, about in listing.items():
        blob = Local((snapshot / name).resolve())
        if not any(map(blob.is_relative_to, inside)):
            raise OSError(f"{address}: {snapshot / name} leads out of the cache, to {blob}. Remove it")
        if checked.get(name) == (stamp := blob.stamp()):
            continue
        if about.lfs or len(blob.name) == 64:  # a listing out of the cache has no SHA-256, but the blob's name is it
            same = sha256_of(blob) == (about.lfs.sha256 if about.lfs else blob.name)
        else:  # of a small file the Hub has git's digest
            content = blob.read_bytes()
            same = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == about.blob_id
        if not same:
            (snapshot / name).unlink()
            blob.unlink(missing_ok=True)
            raise OSError(f"{address}: {name} arrived damaged, and was removed. Run the same command again")
        checked[name] = stamp
    mark.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(mark, json.dumps(checked))


# --------------------------------------------------------------------------------------------- checks of the responses

ANSWER_BYTES, PAGES, LISTING_S = 2**25, 200, 300.0
"""Longest response other than a file, maximum pages of a listing, and seconds for the whole listing."""

PATIENCE_S, RATE = 20.0, 1_000
"""After so many seconds, a response must have averaged so many bytes per second."""

BEGIN_S = 30.0
"""Seconds until a response's headers must be complete."""


class Nonsense(OSError):
    """A response that no Hub would send."""


def _commit(value: Any) -> str:
    if not isinstance(value, str) or not COMMIT.fullmatch(value):
        raise Nonsense(f"names {value!r:.80} as a commit, which has 40 hexadecimal digits")
    return value


class Door:
    """Checks requests to a hub and its responses, as hooks of an HTTP client, which then raise Nonsense (an OSError).

    Sends the token only to the hub. Commits and digests, which become parts of paths, must be well-formed. Responses
    must be uncompressed, begin within `BEGIN_S`, and be bounded: a file may have `largest` bytes, all else
    `ANSWER_BYTES`. After `close`, no check closes the session any more.
    """

    def __init__(self, largest: int):
        self.hub, self.largest = httpx2.URL(constants.ENDPOINT), largest
        self.pages, self.end = 0, time.monotonic() + LISTING_S
        self._thread, self._late, self._closed = threading.local(), False, False

    def guarding(self, client: httpx2.Client) -> httpx2.Client:
        """Appends the checks to the client's event hooks, in place, and returns the client."""
        hooks = client.event_hooks
        client.event_hooks = {"request": [*hooks["request"], self.before], "response": [*hooks["response"], self.after]}
        return client

    def close(self) -> None:
        self._closed = True

    def _wait(self, seconds: float) -> None:
        """Starts a timer for the server's response to this thread; 0 cancels it."""
        if waiting := getattr(self._thread, "waiting", None):
            waiting.cancel()
        if seconds:
            self._thread.waiting = waiting = threading.Timer(seconds, self._leave)
            waiting.daemon = True
            waiting.start()

    def _leave(self) -> None:
        if not self._closed:
            self._late = True
            close_session()  # what waits for the server fails at its next byte, and asks no more

    def _traced(self, event: str, info: Any) -> None:
        if self._late and event.endswith("send_request_headers.started"):  # it could not be closed before it was open
            raise Nonsense(f"has not begun to answer in {BEGIN_S:.0f} s")

    def before(self, request: httpx2.Request) -> None:
        if self._late:
            raise Nonsense(f"has not begun to answer in {BEGIN_S:.0f} s")
        self._wait(BEGIN_S if request.method in ("GET", "HEAD") else 0)
        request.extensions["trace"] = self._traced
        request.headers["Accept-Encoding"] = "identity"
        if not self.is_hub(request.url):
            request.headers.pop("Authorization", None)
        timeout: dict[str, Any] = request.extensions.get("timeout") or {}
        if request.method in ("GET", "HEAD") and not timeout.get("read"):
            request.extensions["timeout"] = {
                **timeout,
                **dict.fromkeys(("connect", "read", "write", "pool"), PATIENCE_S),
            }

    def after(self, response: httpx2.Response) -> None:
        self._wait(0)
        request, headers = response.request, response.headers
        asks, target = request.method in ("GET", "HEAD"), request.url
        if response.has_redirect_location:
            target = request.url.join(headers["Location"])
            if not asks and not self.is_hub(target):
                raise Nonsense(f"sends what is uploaded on to {target.host!r}. Nothing was uploaded there")
        if headers.get("Content-Encoding", "identity") != "identity":
            raise Nonsense("answers compressed, although it was asked not to")
        if "X-Repo-Commit" in headers:
            _commit(headers["X-Repo-Commit"])
        if request.method == "HEAD" and (target == request.url or not self.is_hub(target)):
            digest = (headers.get("X-Linked-Etag") or headers.get("ETag") or "").removeprefix("W/").strip('"')
            if response.status_code < 400 and digest and not DIGEST.fullmatch(digest):
                raise Nonsense(f"names {digest!r:.80} as a file's digest, which has 40 or 64 hexadecimal digits")
        routes = [response.links.get(name, {}).get("url") for name in ("next", "xet-auth")]
        for url in filter(None, [*routes, headers.get("X-Xet-Refresh-Route")]):
            if not url.startswith(constants.HUGGINGFACE_CO_URL_HOME) and not self.is_hub(request.url.join(url)):
                raise Nonsense(f"leads on to {httpx2.URL(url).host!r}, which is another host")
        listing = asks and "/api/models/" in request.url.path
        page = listing and "/tree/" in request.url.path
        self.pages += page
        if self.pages > PAGES:
            raise Nonsense(f"has no end: its listing has more than {PAGES} pages")
        most = self.largest if request.method == "GET" and not listing else ANSWER_BYTES
        most = ANSWER_BYTES if response.status_code >= 300 else most
        if int(headers.get("Content-Length", "0") if request.method != "HEAD" else 0) > most:
            raise Nonsense(f"sends {headers['Content-Length']} bytes, more than the {most:,} that it may")
        response.stream = Bounded(cast(Any, response.stream), most, self.end if page else None)
        if listing and request.method == "GET" and response.status_code == 200:
            _check_listing(json.loads(response.read()))

    def is_hub(self, url: httpx2.URL) -> bool:
        """Returns whether a URL has the hub's scheme, host and port, or is its https form without ports."""
        secure = url.scheme == "https" and url.port is None and self.hub.scheme == "http" and self.hub.port is None
        return url.host == self.hub.host and (secure or (url.scheme, url.port) == (self.hub.scheme, self.hub.port))


class Bounded(httpx2.SyncByteStream):
    """A response body that raises Nonsense if it is too long or too slow."""

    def __init__(self, body: httpx2.SyncByteStream, most: int, end: float | None):
        self._body, self._most, self._end, self._begin = body, most, end, time.monotonic()

    def __iter__(self) -> Iterator[bytes]:
        count = 0
        for part in self._body:
            count += len(part)
            now = time.monotonic()
            if count > self._most:
                raise Nonsense(f"sends more than the {self._most:,} bytes that it may")
            slow = now - self._begin > PATIENCE_S and count < RATE * (now - self._begin)
            if slow or (self._end is not None and now > self._end):
                raise Nonsense(f"sent {count:,} bytes in {now - self._begin:.0f} s. Run the same command again")
            yield part

    def close(self) -> None:
        self._body.close()


def _check_listing(answer: Any) -> None:
    """Raises Nonsense if a response has a malformed commit, file size, digest or path."""
    if isinstance(answer, dict):
        if "sha" in answer:
            _commit(answer["sha"])
        return
    for file in answer if isinstance(answer, list) else [None]:
        if not isinstance(file, dict) or not isinstance(file.get("path"), str):
            raise Nonsense("lists something that has no path")
        large = file.get("lfs") or {}
        digests = [file.get("oid"), *([large.get("oid")] if isinstance(large, dict) and large else [])]
        sizes = [file.get("size", 0), large.get("size", 0) if isinstance(large, dict) else None]
        if not all(isinstance(digest, str) and DIGEST.fullmatch(digest) for digest in digests):
            raise Nonsense(f"lists {file['path']!r:.80} without a digest of 40 or 64 hexadecimal digits")
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise Nonsense(f"lists {file['path']!r:.80} with a size that is none")


_ALONE = threading.RLock()


@contextlib.contextmanager
def _asking(address: str, largest: int = ANSWER_BYTES) -> Iterator[None]:
    """Guards the library's requests within the block by a `Door`, and explains its errors."""
    with _ALONE, _explained(address):
        before, door = _http._GLOBAL_CLIENT_FACTORY, Door(largest)  # the user's own, of proxies or certificates
        set_client_factory(lambda: door.guarding(before()))
        try:
            yield
        finally:
            door.close()
            set_client_factory(before)


@contextlib.contextmanager
def _explained(address: str) -> Iterator[None]:
    """Converts errors of `huggingface_hub` to one line with a remedy. A progress bar appears only on a terminal."""
    where = os.environ.get("HF_ENDPOINT") or "the Hugging Face Hub"
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        if not sys.stderr.isatty():
            disable_progress_bars()
        yield
    except errors.GatedRepoError:
        raise OSError(
            f"{address}: its authors ask for an agreement. Agree on its page, then run `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise OSError(
            f"{address}: {where} has no such model, or it is private: run `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise OSError(f"{address}: has no such revision. Name a branch, a tag or a commit of its page") from None
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, errors.RevisionResolutionError) as error:
        offline = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else f"{where} cannot be reached"
        raise OSError(f"{address}: is not whole in the cache of this machine, and {offline}") from error
    except Nonsense as error:
        raise OSError(f"{address}: {where} {error}") from None
    except errors.HfHubHTTPError as error:
        raise OSError(f"{address}: {where} answers {error.response.status_code}. Run the same command again") from error
    except (httpx2.HTTPError, errors.XetDownloadError, OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # a full disk
            raise
        raise OSError(
            f"{address}: the transfer broke off ({type(error).__name__}). Files that are whole are kept: run the same"
            " command again"
        ) from error
    except (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError) as error:
        raise OSError(f"{address}: {where} does not answer as a Hub does ({type(error).__name__})") from error
    finally:
        logger.setLevel(level)
        if not sys.stderr.isatty():
            enable_progress_bars()
