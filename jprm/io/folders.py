"""Folders that appear whole: outputs, what is made once and kept, and copies of what is in a bucket; and their lock.

A folder of this machine takes its name at the end; in a bucket, a file is there last.
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


# ----------------------------------------------------------------------------------- one training in a folder at a time
#
# On all machines that share it: on a disk or in a bucket. `training.lock` in the folder tells who holds it, and the
# holder writes it anew at every beat. A holder of this machine is gone when its process is. One of another machine
# counts as gone once `MISSED` beats in a row are missing.
#
# On a disk the holder also locks the file, which ends with the process. But on a network file system the lock of a
# vanished host may stay, and other file systems have none across hosts: there the beats decide.
#
# In a bucket nothing is locked, but a new object is written only if none has its name. The run with the highest number
# under `training.lock/` holds the folder. One that is gone is followed by the next number: of several runs that try,
# one creates that object.

FILE = "training.lock"
BEAT, MISSED = 5.0, 6
"""Seconds between beats, and missing beats after which a run of another machine is taken for gone."""


class FolderLock:
    """The right to train in a folder: `attempt` until it is True, then `release`. `folder_lock` makes one."""

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
        """Returns whether the folder is this run's; after a beat, where another machine's run may hold it.

        Raises:
          ValueError: another run is training in it.
          OSError: the folder cannot be read or written.
        """
        if not self._take():
            return False
        self._beating = threading.Thread(target=self._beats, daemon=True)
        self._beating.start()
        return True

    def release(self) -> None:
        """Gives the folder up."""
        self._ended.set()
        if self._beating is not None:
            self._beating.join()
            with contextlib.suppress(OSError):
                if self._mine():
                    self._remove()
            self._beating = None

    def _take(self) -> bool:
        """Takes the folder where nobody holds it; returns whether it did. Errors as of `attempt`."""
        raise NotImplementedError

    def _mine(self) -> bool:
        """Returns whether this run still holds the folder that it took."""
        raise NotImplementedError

    def _write(self, beat: int) -> None:
        """Writes who holds the folder, anew at every beat."""
        raise NotImplementedError

    def _remove(self) -> None:
        """Removes what says that this run holds the folder."""
        raise NotImplementedError

    def _free(self, holder: dict[str, Any], locked: bool | None) -> bool:
        """Returns whether the holder has gone; False after a beat's wait, where only the next beats can tell.

        `locked` is as `_locked` returns it. Raises ValueError where the holder is training.
        """
        gone = self._gone(holder, locked)
        if gone is False:
            raise self._refusal(holder)
        if gone is None:
            if self._watched(holder):
                time.sleep(BEAT)
                return False
            print(f"{self.path}: {holder.get('host')} gave no sign of life for {MISSED * BEAT:g} s: taking over")
        return True

    def _gone(self, holder: dict[str, Any], locked: bool | None) -> bool | None:
        """Returns whether the run that the file names has ended; None where only its beats can tell."""
        if not holder:
            return True if locked else None  # without a lock: one that just begins
        if holder.get("boot") != self._me["boot"]:
            return None
        if holder.get("space") == self._me["space"] and not _alive(holder.get("pid")):
            return True  # although a child of it may hold the lock
        return locked

    def _watched(self, holder: dict[str, Any]) -> bool:
        """Counts a missing beat; returns whether to look again. Raises ValueError at a beat."""
        if self._missed >= 0 and holder != self._seen:
            raise self._refusal(holder)
        self._seen, self._missed = holder, self._missed + 1
        return self._missed < MISSED

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
    """The file `training.lock`, locked while it is held."""

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
        """Replaces the content by one of the same length in one write, so that nobody reads half of it."""
        assert self._file is not None
        os.ftruncate(self._file.fileno(), 512)
        os.pwrite(self._file.fileno(), json.dumps(self._me | {"beat": beat}).encode().ljust(512), 0)

    def _remove(self) -> None:
        self.path.unlink()


class BucketLock(FolderLock):
    """The object of the highest number under `training.lock/`."""

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
        return sorted(int(name) for name in self.path.names() if name.isdigit())


def folder_lock(workdir: Place) -> FolderLock:
    """Returns the lock of a run's folder."""
    return DiskLock(workdir) if workdir.here is True else BucketLock(workdir)


def _open(path: pathlib.Path, more: int = 0) -> IO[bytes]:
    """Opens the file to read and to write in place, made if it is absent."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | more, 0o666), "r+b", 0)


def _locked(file: IO[bytes]) -> bool | None:
    """Locks the file until it is closed; False where another process has locked it, None where there are no locks."""
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
    """Who holds the folder; empty where nobody does, or it cannot be read."""
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
    """What differs between machines, and after a restart of one."""
    path = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else platform.node()
