"""Folders that appear whole: outputs, what is made once and kept, and copies of what is in a bucket.

A folder of this machine takes its name at the end; in a bucket, a file is there last.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence

from jprm.io.storage import (
    Local,
    Place,
    Remote,
    Taken,
    cache_folder,
    is_remote,
    named,
    only_run,
    partial_of,
    path_of,
)

MARK = ".jprm"
"""In `FOLDER.partial`: shows that jprm made it, and holds the request."""


@contextlib.contextmanager
def whole_folder(
    out: str | os.PathLike, request: str | None = None, *, replace: bool = False, last: str = ""
) -> Iterator[pathlib.Path]:
    """Yields a folder of this machine to fill, which takes the name `out` when the block ends well.

    It is `OUT.partial/new`. After an error or a kill, a call with the same `request` finds what is in it; without a
    request nothing is kept.

    A folder `out` in a bucket is made in ~/.cache/jprm/folders and then uploaded. Until it is whole there is an object
    `OUT.partial`; nothing keeps two machines from writing it at once.

    Args:
      replace: a folder `out` that is there makes way. It waits as `OUT.partial/old`, from where a kill's next call
        returns it.
      last: the file that is uploaded after all others: without it nobody takes the folder for what it will be.

    Raises:
      FileExistsError: `out` is in a bucket and there, not to be replaced.
      ValueError: `OUT.partial` is there without jprm's mark, or another process is writing it, or `out` to be replaced
        is a symbolic link; nothing is touched.
    """
    if is_remote(out):
        with _uploaded(Remote(os.fspath(out)), request, replace, last) as new:
            yield new
        return
    out, work = Local(out), Local(partial_of(out))
    new, old, mark = work / "new", work / "old", work / MARK
    if replace and out.is_symlink():
        raise ValueError(f"{out}: is a symbolic link, and only a folder is replaced; name the folder")
    with only_run(work), named(work):
        if os.path.lexists(work) and (work.is_symlink() or not mark.is_file()) and not _empty(work):
            raise ValueError(f"{work}: is not of jprm, which needs this name: move it, or name another folder")
        if not out.exists() and old.exists():
            old.rename(out)
        shutil.rmtree(old, ignore_errors=True)
        if request is None or not mark.exists() or mark.read_text() != request:
            _remove(work)
            work.mkdir(parents=True, exist_ok=True)
            mark.write_text(request or "")
        new.mkdir(exist_ok=True)
        try:
            yield new
            if replace and out.exists():
                out.rename(old)
            new.rename(out)
            request = None
        finally:
            if request is None:
                _remove(work)


@contextlib.contextmanager
def _uploaded(out: Remote, request: str | None, replace: bool, last: str) -> Iterator[pathlib.Path]:
    """Yields a folder of this machine, which is uploaded when the block ends well."""
    mark, here = Remote(partial_of(out)), cache_folder("folders") / hashlib.sha256(out.url.encode()).hexdigest()[:16]
    with whole_folder(here, request, replace=True) as new:
        yield new
        if is_whole(out) and not replace:
            raise FileExistsError(errno.EEXIST, "is there already; name another folder", out.url)
        mark.write_bytes(b"jprm is writing the folder of this name without .partial\n")
        out.remove_folder(first=last)
        out.upload_folder(new, last)
        mark.unlink()
    shutil.rmtree(here)


def is_whole(out: Place) -> bool:
    """Returns whether a folder is there, and not what a kill left of one that was being uploaded."""
    return out.exists() and not path_of(partial_of(out)).is_file()


def tidy(out: str | os.PathLike) -> None:
    """Removes what `whole_folder` left beside a folder that is whole, killed after it had renamed it."""
    if is_remote(out):  # nothing is left beside it
        return
    work = pathlib.Path(partial_of(out))
    if (work / MARK).is_file() or os.path.lexists(f"{work}.lock"):
        with contextlib.suppress(ValueError), only_run(work):  # of another process, which removes it itself
            if not work.is_symlink() and ((work / MARK).is_file() or _empty(work)):
                _remove(work)


WAIT_S = 0.5
"""Between looks at whether another process has made a folder."""


def made_once(place: pathlib.Path, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Returns the folder `place`, which `make` fills first where it is absent. Waits for a process that fills it."""
    while not place.is_dir():
        try:
            with whole_folder(place) as new:
                make(new)
        except Taken:  # another process makes the same, and ends or dies
            time.sleep(WAIT_S)
        except OSError:
            if not place.is_dir():  # else it ended just before this one began
                raise
    tidy(place)
    return place


def local_copy(path: str | os.PathLike, names: Sequence[str] = ()) -> pathlib.Path:
    """Returns a path of this machine unchanged; or a copy of the object, or of the files directly in a bucket's folder.

    A copy is made once and kept in ~/.cache/jprm/buckets under a name that holds sizes and versions of the objects, so
    that changed objects make another. It may be removed when no command uses it.

    Args:
      names: of a folder's files, if not all are needed.

    Raises:
      FileNotFoundError: nothing is there.
      OSError: the bucket cannot be read, or its objects change meanwhile.
    """
    if not is_remote(path):
        return pathlib.Path(path)
    remote = Remote(os.fspath(path))
    files = _files(remote, names)
    if not files:
        raise FileNotFoundError(f"{remote}: no such file or folder" + (f" with {' or '.join(names)}" if names else ""))
    stamps = {file.url: file.stamp() for file in files}
    digest = hashlib.sha256(json.dumps(stamps, sort_keys=True).encode()).hexdigest()[:16]

    def fetch(new: pathlib.Path) -> None:
        for file in files:
            target = _below(new, file)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.download(target)
            if file.stamp() != stamps[file.url] or target.stat().st_size != stamps[file.url]["bytes"]:
                raise OSError(f"{file}: changed while it was copied. Run the command again when it is complete")

    return _below(made_once(cache_folder("buckets") / digest, fetch), remote)


def _files(remote: Remote, names: Sequence[str]) -> list[Remote]:
    if remote.is_file():
        return [remote]
    return [remote / name for name in remote.names() if name in names or not names]


def _below(folder: pathlib.Path, remote: Remote) -> pathlib.Path:
    """Returns where the copy is: a path that ends in the address, so that errors show it."""
    return folder / remote.url.replace("://", "/")


def _remove(work: pathlib.Path) -> None:
    """Deletes what `whole_folder` makes, the mark last."""
    for name in ("new", "old"):
        shutil.rmtree(work / name, ignore_errors=True)
    with contextlib.suppress(OSError):  # not there, or a user's file is in it
        (work / MARK).unlink(missing_ok=True)
        work.rmdir()


def _empty(folder: pathlib.Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())
