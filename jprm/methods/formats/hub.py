"""Models of the Hugging Face Hub, by address: `hf://OWNER/NAME@REVISION`, a base, a tokenizer, a LoRA or a PRM.

`huggingface_hub` fetches into its own cache, which other programs share; HF_HOME, HF_ENDPOINT, HF_TOKEN and
HF_HUB_OFFLINE hold as everywhere. Only weights as safetensors, the tokenizer and the configuration are fetched: never a
pickle, never code. A revision is resolved to its commit once, and a commit whose files are here needs no network.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import pathlib
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import httpx2
from huggingface_hub import HfApi, RepoFile, errors, get_cached_repo_tree, get_token
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

from jprm.io.folders import local_copy
from jprm.io.outputs import atomic_write
from jprm.io.storage import HUB, Local, Place, cache_folder, sha256_of

T = TypeVar("T")

ADDRESS = re.compile(HUB + r"(?!(?:datasets|spaces|buckets)/)([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
NAME = re.compile(r"[\w.-]+/[\w.-]+")

FETCHED = re.compile(r"(?!consolidated)[^/]+\.safetensors|(?!.*\.bin\.index)[^/]+\.json|[^/]+\.jinja|tokenizer\.model"
                     r"|SHA256SUMS|README\.md")  # fmt: skip
"""Files of a repository that are fetched: none of its folders. `consolidated` is a second copy in Mistral's format."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")
"""Suffixes of weights that run code when they are read, or that jprm has no reader for."""


@functools.cache
def folder(address: str, names: Sequence[str] = ()) -> Local:
    """Returns the folder of this machine that holds a model of the Hub, fetched where it is not there.

    Every file is compared with the digest that the Hub's listing has of it, once; a damaged one is removed.

    Args:
      address: `hf://OWNER/NAME@REVISION`, a branch, a tag or a commit; without one, the default branch.
      names: of the files to fetch, if not all are needed.

    Raises:
      ValueError: another form of address, or weights that are only there in a format that is not read.
      OSError: no such model or revision, no right to read it, or the Hub cannot be reached.
    """
    repository, commit = _resolved(address)
    with _explained(address):
        if (listing := _listing(repository, commit)) is None:  # a cache that an older release filled, and no network
            return Local(HfApi().snapshot_download(repository, revision=commit, local_files_only=True))
        if not names:
            _check_weights(address, listing)
        wanted = sorted(file for file in listing if (file in names if names else FETCHED.fullmatch(file)))
        snapshot = HfApi().snapshot_download(repository, revision=commit, allow_patterns=wanted or ["-"])
    _check_digests(address, pathlib.Path(snapshot), commit, {name: listing[name] for name in wanted})
    return Local(snapshot)


def name_of(place: Place) -> str:
    """Returns the name of a model's folder; of one that the Hub's cache holds, the model's name there."""
    if place.parent.name == "snapshots":
        return place.parent.parent.name.rpartition("--")[2]
    return place.name


def commit_of(address: str) -> str:
    """Returns the address with the commit that it now stands for."""
    return f"{HUB}{'@'.join(_resolved(address))}"


def check_push(repository: str, dry_run: bool) -> None:
    """Raises ValueError where nothing could be pushed there: before a model is written for it."""
    if not NAME.fullmatch(repository):
        raise ValueError(f"--push {repository}: is not of the form OWNER/NAME")
    if not dry_run and not get_token():
        raise ValueError(f"--push {repository}: no token. Run `hf auth login`, or set HF_TOKEN to one that may write")


def push(place: Place, repository: str) -> str:
    """Uploads the files of an exported folder, its card among them, and returns the commit's address.

    A repository that is not there is made, and private. Files that it has already are not sent again.

    Raises OSError where the Hub refuses or cannot be reached.
    """
    here = local_copy(place)
    with _explained(HUB + repository):
        HfApi().create_repo(repository, private=True, exist_ok=True)
        message = "Upload a process reward model by jprm"
        done = HfApi().upload_folder(repo_id=repository, folder_path=here, commit_message=message)
    return f"{HUB}{repository}@{done.oid}"


@functools.cache
def _resolved(address: str) -> tuple[str, str]:
    """Returns OWNER/NAME and the commit. Offline, a branch is at the commit where it was last seen."""
    if not (match := ADDRESS.fullmatch(address)):
        raise ValueError(f"{address}: is not of the form {HUB}OWNER/NAME@REVISION, a model of the Hugging Face Hub")
    repository, revision = match.groups()
    with _explained(address):
        commit = HfApi().resolve_revision(repository, revision=revision).resolved
    if commit != revision:
        print(f"{address}: is now {HUB}{repository}@{commit}", file=sys.stderr)
    return repository, commit


def _listing(repository: str, commit: str) -> dict[str, Any] | None:
    """Returns what the Hub says of each file by its path; None where it cannot be asked, but files of it are here."""
    try:
        files: Iterable[Any] = get_cached_repo_tree(repository, revision=commit)
    except errors.CachedRepoTreeNotFoundError:
        try:
            files = list(HfApi().list_repo_tree(repository, recursive=True, revision=commit))
        except (httpx2.TransportError, errors.OfflineModeIsEnabled):
            return None
    return {file.path: file for file in files if isinstance(file, RepoFile)}


def _check_weights(address: str, names: Collection[str]) -> None:
    """Raises ValueError for a repository whose weights are all in formats that are not read."""
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
    """Compares files with the Hub's digests, but those that were compared before and are the same files since.

    Raises OSError for one that differs, which is removed from the cache.
    """
    mark = Local(cache_folder("hub") / f"{commit}.json")
    checked = json.loads(mark.read_bytes()) if mark.is_file() else {}
    for name, about in listing.items():
        blob = Local((snapshot / name).resolve())
        if checked.get(name) == (stamp := blob.stamp()):
            continue
        if about.lfs:
            same = sha256_of(blob) == about.lfs.sha256
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


@contextlib.contextmanager
def _explained(address: str) -> Iterator[None]:
    """Makes one line of what `huggingface_hub` raises, with what to do; a terminal also shows a bar."""
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
    except errors.HfHubHTTPError as error:
        raise OSError(f"{address}: {where} answers {error.response.status_code}. Run the same command again") from error
    except (httpx2.HTTPError, errors.XetDownloadError, OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # a full disk
            raise
        raise OSError(
            f"{address}: the transfer broke off ({type(error).__name__}). Files that are whole are kept: run the same"
            " command again"
        ) from error
    finally:
        logger.setLevel(level)
        if not sys.stderr.isatty():
            enable_progress_bars()
