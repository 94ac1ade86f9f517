"""Folders that appear whole (outputs, caches, copies of bucket folders), and the lock on training in a folder.

A local folder is renamed at the end; a folder in a bucket gets its marker file last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import platform
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from jprm.io.outputs import atomic_write, check_output
from jprm.io.storage import (
    AT_ONCE,
    NO_LOCKS,
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
"""File in `FOLDER.partial` that marks it as jprm's and holds the request."""


@contextlib.contextmanager
def whole_folder(
    out: str | os.PathLike, request: str | None = None, *, replace: bool = False, last: str = ""
) -> Iterator[pathlib.Path]:
    """Yields an existing local folder to fill, which is renamed to `out` if the block succeeds.

    The folder is `OUT.partial/new`. After an error or a kill, a call with the same `request` continues with its
    contents; without a request they are deleted.

    If `out` is in a bucket, the folder is made in ~/.cache/jprm/folders and uploaded after the block. Until the upload
    is whole, an object `OUT.partial` exists; two machines are not prevented from writing at once.

    Args:
      replace: replace an existing `out`. It waits as `OUT.partial/old`, and the next call after a kill restores it.
      last: file that is uploaded last; without it, readers do not accept the folder.

    Raises:
      OSError: after the block: `out` exists, unless `replace` or an empty local folder. In a bucket: FileExistsError.
      ValueError: before the block: `OUT.partial` exists without jprm's mark, or is being written by another process, or
        `out` is a symbolic link to replace. No file is changed.
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
    """Yields a local folder, which is uploaded if the block succeeds."""
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
    """Returns whether a folder exists and, in a bucket, its upload was not interrupted."""
    return out.exists() and not path_of(partial_of(out)).is_file()


def tidy(out: str | os.PathLike) -> None:
    """Deletes the local `OUT.partial` of `whole_folder`, even unfinished, unless it is in use or is not jprm's."""
    if is_remote(out):  # nothing is left beside it
        return
    work = pathlib.Path(partial_of(out))
    if (work / MARK).is_file() or os.path.lexists(f"{work}.lock"):
        with contextlib.suppress(ValueError), only_run(work):  # of another process, which removes it itself
            if not work.is_symlink() and ((work / MARK).is_file() or _empty(work)):
                _remove(work)


WAIT_S = 0.5
"""Polling interval while another process makes a folder."""


def made_once(place: pathlib.Path, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Returns the folder `place`; if absent, calls `make(new)` to fill a new folder, which is then renamed to `place`.

    While another process makes it, waits without limit. Passes on errors of `make`, and of `whole_folder`.
    """
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
    """Returns a local path unchanged; for a bucket path, a local copy of the object or of the folder's direct files.

    Copies are kept in ~/.cache/jprm/buckets under a digest of the objects' sizes and versions, so changed objects are
    copied again. They may be deleted while no command uses them. A local path is not checked.

    `names` are the files of the folder to copy if they exist, e.g. ("config.json",); () for all. Raises
    FileNotFoundError if the bucket path, or every file in `names`, does not exist; OSError if the bucket cannot be
    read, or its objects changed during the copy; ValueError as `path_of`. Waits for another process that copies them.
    """
    return _copy(Remote(os.fspath(path)), names) if is_remote(path) else pathlib.Path(path)


def _copy(remote: Remote, names: Sequence[str]) -> pathlib.Path:
    files = [remote] if remote.is_file() else [remote / name for name in remote.names() if name in names or not names]
    if not files:
        raise FileNotFoundError(f"{remote}: no such file or folder" + (f" with {' or '.join(names)}" if names else ""))
    stamps = {file.url: file.stamp() for file in files}
    digest = hashlib.sha256(json.dumps(stamps, sort_keys=True).encode()).hexdigest()[:16]

    def fetch(new: pathlib.Path, file: Remote) -> None:
        target = _below(new, file)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.download(target)
        if file.stamp() != stamps[file.url] or target.stat().st_size != stamps[file.url]["bytes"]:
            raise OSError(f"{file}: changed while it was copied. Run the command again when it is complete")

    def fetch_all(new: pathlib.Path) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(functools.partial(fetch, new), files))

    return _below(made_once(cache_folder("buckets") / digest, fetch_all), remote)


def _below(folder: pathlib.Path, remote: Remote) -> pathlib.Path:
    """Returns the copy's path, which ends in the address, so that errors show it."""
    return folder / remote.url.replace("://", "/")


def _remove(work: pathlib.Path) -> None:
    """Deletes the working folder of `whole_folder`, its mark last."""
    for name in ("new", "old"):
        shutil.rmtree(work / name, ignore_errors=True)
    with contextlib.suppress(OSError):  # not there, or a user's file is in it
        (work / MARK).unlink(missing_ok=True)
        work.rmdir()


def _empty(folder: pathlib.Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


# ----------------------------------------------------------------------------------- one training in a folder at a time
#
# Across all machines that share it, on a disk or in a bucket. `training.lock` in the folder names the holder, who
# rewrites it at every beat. A holder on this machine is gone if its process is. A holder on another machine counts as
# gone after `MISSED` missing beats in a row.
# On a disk the holder also locks the file; the lock ends with the process. But on a network file system the lock of a
# vanished host may remain, and some file systems have no locks across hosts: there the beats decide.
# A bucket has no locks, but can create an object only if the name is free. The run with the highest number under
# `training.lock/` holds the folder. If it is gone, the next number takes over: only one run can create that object.

FILE = "training.lock"
BEAT, MISSED = 5.0, 6
"""Seconds between beats, and missing beats after which a run on another machine counts as gone."""


class FolderLock:
    """Lock on training in a folder: call `attempt` until it is `True`, later `release`. Made by `folder_lock`."""

    def __init__(self, workdir: Place):
        self.path: Any = workdir / FILE
        self._me = {"host": platform.node(), "boot": _boot(), "space": "", "pid": os.getpid()}
        if os.path.exists(namespace := "/proc/self/ns/pid"):  # in another container the same ids are other processes
            self._me["space"] = os.readlink(namespace)
        self._me["nonce"] = secrets.token_hex(8)
        self._seen: dict[str, Any] | None = None
        self._missed = -1
        self._ended = threading.Event()
        self._beating: threading.Thread | None = None

    def attempt(self) -> bool:
        """Tries to take the folder (made if absent). If `False`, call again: it may have waited one beat, 5 s.

        If `True`, a thread renews `training.lock` at every beat, and ends this process (status 1) if another run took
        the folder over. Raises ValueError if another run is training in it, OSError if it cannot be read or written.
        """
        if not self._take():
            return False
        self._beating = threading.Thread(target=self._beats, daemon=True)
        self._beating.start()
        return True

    def release(self) -> None:
        self._ended.set()
        if self._beating is not None:
            self._beating.join()
            with contextlib.suppress(OSError):
                if self._mine():
                    self._remove()
            self._beating = None

    def _take(self) -> bool:
        """Takes the folder if it is free; returns whether it did. Errors as `attempt`."""
        raise NotImplementedError

    def _mine(self) -> bool:
        """Returns whether this run still holds the folder."""
        raise NotImplementedError

    def _write(self, beat: int) -> None:
        """Writes this run as the holder, at every beat."""
        raise NotImplementedError

    def _remove(self) -> None:
        """Removes this run's entry as the holder."""
        raise NotImplementedError

    def _free(self, holder: dict[str, Any], locked: bool | None) -> bool:
        """Returns whether the holder is gone; `False` after waiting one beat, if only further beats can decide.

        `locked` is the result of `_locked`. Raises ValueError if the holder is training.
        """
        gone = self._gone(holder, locked)
        if gone is False:
            raise self._refusal(holder)
        if gone is None:
            if self._missed >= 0 and holder != self._seen:  # it beats
                raise self._refusal(holder)
            self._seen, self._missed = holder, self._missed + 1
            if self._missed < MISSED:
                time.sleep(BEAT)
                return False
            print(f"{self.path}: {holder.get('host')} gave no sign of life for {MISSED * BEAT:g} s: taking over")
        return True

    def _gone(self, holder: dict[str, Any], locked: bool | None) -> bool | None:
        """Returns whether the holder has ended; `None` if only its beats can decide."""
        if not holder:
            return True if locked else None  # without a lock: one that just begins
        if holder.get("boot") != self._me["boot"]:
            return None
        if holder.get("space") == self._me["space"] and not _alive(holder.get("pid")):
            return True  # although a child of it may hold the lock
        return locked

    def _refusal(self, holder: dict[str, Any]) -> ValueError:
        who = f"process {holder.get('pid')} on {holder.get('host')}" if holder else "one that just begins"
        return ValueError(
            f"{self.path}: a run is training in this folder: {who}. Stop it or wait for it, or use another --workdir"
        )

    def _beats(self) -> None:
        beat = 0
        while not self._ended.wait(BEAT):
            with contextlib.suppress(OSError, ValueError):  # a file system that is away for a while
                if not self._mine():
                    print(f"error: {self.path}: another run took this folder over; this one ends", file=sys.stderr)
                    sys.stderr.flush()
                    os._exit(1)
                beat += 1
                self._write(beat)


class DiskLock(FolderLock):
    """Lock on the file `training.lock`."""

    path: Local

    def __init__(self, workdir: Local):
        super().__init__(workdir)
        self._file: IO[bytes] | None = None
        self._held = contextlib.ExitStack()

    def release(self) -> None:
        super().release()
        self._held.close()
        self._file = None

    def _take(self) -> bool:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        check_output(self.path)
        with contextlib.suppress(FileExistsError, FileNotFoundError), contextlib.ExitStack() as stack:
            new = not self.path.exists()
            file = stack.enter_context(_open(self.path, os.O_EXCL if new else 0))
            locked = _locked(file)
            if locked and not os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                return False
            if not (new and locked is not False) and not self._free(_holder(file), locked):
                return False
            if not locked:  # the file of a lock that stays, or of none: it makes way for a new one
                atomic_write(self.path, json.dumps(self._me))
                file = stack.enter_context(_open(self.path))
                _locked(file)
            self._file, self._held = file, stack.pop_all()
            self._write(0)
            return True
        return False  # another run has made or removed the file just now

    def _mine(self) -> bool:
        with open(self.path, "rb") as file:
            return _holder(file).get("nonce") == self._me["nonce"]

    def _write(self, beat: int) -> None:
        """Overwrites the file with the same length in a single write, so readers never see half a file."""
        assert self._file is not None
        os.ftruncate(self._file.fileno(), 512)
        os.pwrite(self._file.fileno(), json.dumps(self._me | {"beat": beat}).encode().ljust(512), 0)

    def _remove(self) -> None:
        self.path.unlink()


class BucketLock(FolderLock):
    """Lock by the object with the highest number under `training.lock/`."""

    path: Remote
    _number = 0

    def _take(self) -> bool:
        numbers = self._numbers()
        if numbers:
            try:
                holder = json.loads((self.path / str(numbers[-1])).read_bytes())
            except FileNotFoundError:
                return False  # another run has ended just now
            if not self._free(holder, None):
                return False
        self._number = max(numbers, default=0) + 1
        try:
            self._write(0, new=True)
        except FileExistsError:
            return False  # another run was quicker
        for number in numbers:
            (self.path / str(number)).unlink(missing_ok=True)
        return True

    def _mine(self) -> bool:
        return max(self._numbers(), default=self._number) == self._number

    def _write(self, beat: int, new: bool = False) -> None:
        (self.path / str(self._number)).write_bytes(json.dumps(self._me | {"beat": beat}).encode(), new=new)

    def _remove(self) -> None:
        (self.path / str(self._number)).unlink()

    def _numbers(self) -> list[int]:
        return sorted(int(name) for name in self.path.names() if name.isdecimal())


def folder_lock(workdir: Place) -> FolderLock:
    return DiskLock(workdir) if workdir.here is True else BucketLock(workdir)


def _open(path: pathlib.Path, more: int = 0) -> IO[bytes]:
    """Opens the file for reading and writing in place; creates it if absent."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | more, 0o666), "r+b", 0)


def _locked(file: IO[bytes]) -> bool | None:
    """Locks the file until it is closed. False if another process holds it, None if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        raise


def _holder(file: IO[bytes]) -> dict[str, Any]:
    """Returns the holder's record; empty if it is missing or unreadable."""
    try:
        holder = json.loads(file.read(4096))
    except (ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _alive(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (OSError, TypeError, ValueError, OverflowError):
        return False
    return True


def _boot() -> str:
    """Returns an id that differs between machines and changes on restart."""
    path = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else platform.node()
