"""One path type for local files and buckets.

A file in a bucket is named `gs://BUCKET/NAME`, `s3://BUCKET/NAME` or by another address that fsspec opens. `path_of`
returns a `Place`: a `Local`, which is a `pathlib.Path`, or a `Remote`. Both have the same methods, so outputs, folders
and readers need not distinguish them.

An object store cannot rename, append or lock. It offers three operations that suffice: an object appears whole when its
upload ends; a write can require that the name is free; and names can be listed. `Remote` provides these, with the
`pathlib.Path` methods that outputs use. `Appended` builds a growing file on them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import os
import pathlib
import posixpath
import shutil
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, Literal, cast

EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3"}
"""Extras of jprm with the packages for an address scheme."""

AT_ONCE = 8
"""Concurrent uploads or downloads."""

HUB = "hf://"
"""Address prefix of a model on the Hugging Face Hub, which `jprm.options.place_of` downloads."""

Given = str | os.PathLike
"""A name that the user gave, on the command line or in Python. It may lead anywhere."""


def path_of(path: Given) -> Place:
    """Returns a `Remote` for an address with ://, else a `Local`; unchecked. Raises ValueError for hf:// or `..`."""
    return Remote(os.fspath(path)) if is_remote(path) else Local(path)


def is_remote(path: str | os.PathLike) -> bool:
    scheme, separator, _ = os.fspath(path).partition("://")
    return bool(separator) and scheme.isalnum()


REPORT = "report.json"
"""Marks a folder as prepared (`jprm prepare`); written last."""

PREPARE = "Make a folder with `jprm prepare NAME --input FILE --output DIR`."


def records_file(path: str | os.PathLike) -> Place:
    """Returns the file that changes whenever the records do: a prepared folder's report, else `path` itself.

    Raises FileNotFoundError for a folder without a report.
    """
    place = path_of(path)
    if not place.is_dir():
        return place
    if not (place / REPORT).is_file():
        raise FileNotFoundError(
            f"{path}: is a folder, but is not a prepared folder: it has no {REPORT}. Name a file. {PREPARE}"
        )
    return place / REPORT


def cache_folder(name: str) -> pathlib.Path:
    """Returns the local folder $XDG_CACHE_HOME/jprm/NAME, by default ~/.cache/jprm/NAME. It may not exist yet."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "jprm" / name


def named_in(file: str | os.PathLike, name: str) -> Place:
    """Returns the place of a path in `file`: an address, absolute, or relative to its folder. ValueError for hf://."""
    return path_of(name) if is_remote(name) or os.path.isabs(name) else path_of(file).parent / name


def mark_own(file: Given) -> None:
    """Records in ~/.cache/jprm/own, if writable, that this user wrote the file with its present content.

    Its names count as `Given` on this machine. Raises FileNotFoundError.
    """
    mark = _mark(path_of(file))
    with contextlib.suppress(OSError):  # a home that cannot be written
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _mark(file: Place) -> pathlib.Path:
    return cache_folder("own") / hashlib.sha256(file.read_bytes()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Found:
    """A name in a file that may be a stranger's, e.g. `base` in experiment.json. It is neither text nor path, so it
    cannot be opened directly; its methods return permitted places or raise ValueError.
    """

    file: Place
    field: str
    text: str

    @property
    def written_here(self) -> bool:
        """Whether this user marked the file's content on this machine (`mark_own`). Raises FileNotFoundError."""
        return _mark(self.file).exists()

    def trusted(self, done: str) -> str:
        """Returns the name if the file is the user's own; else raises ValueError, naming the act `done` ("read")."""
        if not self.written_here:
            raise ValueError(
                f"{self.file}: {self.field} is {self.text!r}, and nothing is {done} because a file says so that your"
                f" jprm did not write here. If you trust it: jprm.io.storage.mark_own({str(self.file)!r}) in Python"
            )
        return self.text

    def data(self) -> Place:
        """Returns a place to read weights or records from; a relative path starts at the current folder.

        Raises ValueError if a stranger's file leads elsewhere than to this machine or its own bucket: such a read would
        identify the user to its author, with the user's credentials.
        """
        bucket, of_file = (os.fspath(path).split("/")[:3] for path in (self.text, self.file))
        elsewhere = is_remote(self.text) and bucket != of_file
        return path_of(self.trusted("downloaded") if elsewhere else self.text)


class Local(pathlib.PosixPath):
    """A local file or folder: a `pathlib.Path` with the additional methods of `Remote`.

    Methods that read it raise FileNotFoundError if it is absent; those that list return [].
    """

    here: Literal[True] = True  # local: read in place, renamed when complete, lockable

    @property
    def address(self) -> str:
        """The absolute path."""
        return os.path.abspath(self)

    def files(self) -> list[Local]:
        """Returns this file, or all files below this folder, sorted; [] if it is absent."""
        return [self] if self.is_file() else sorted(file for file in self.rglob("*") if file.is_file())

    def folders_with(self, name: str) -> list[Local]:
        """Returns the outermost folders below this one (not itself) that contain a file `name`, sorted."""
        folders = []
        for folder, within, files in os.walk(self):
            within.sort()
            if name in files and folder != os.fspath(self):
                folders.append(Local(folder))
                within.clear()
        return sorted(folders)

    def stamp(self) -> dict[str, Any]:
        """Returns `bytes`, `modified`, `changed` (ns) and `file` (inode): they change with content. A copy differs."""
        about = os.stat(self)
        times = {"modified": about.st_mtime_ns, "changed": about.st_ctime_ns}  # a program can set the first of them
        return {"bytes": about.st_size, **times, "file": about.st_ino}

    def checksum(self) -> dict[str, Any]:
        """Returns {"sha256": 64 hex digits}."""
        return {"sha256": sha256_of(self)}

    def contents(self) -> list[Any]:
        """Returns [relative path, SHA-256] of files below the folder, sorted; of a file itself, [[".", SHA-256]]."""
        return [[str(file.relative_to(self)), sha256_of(file)] for file in self.files()]

    def modified(self) -> float:
        """Returns the modification time in seconds since 1970."""
        return self.stat().st_mtime

    def holds_bytes(self) -> bool:
        """Returns whether the file exists and is not empty."""
        return self.exists() and self.stat().st_size > 0

    def check_readable(self) -> None:
        """Raises FileNotFoundError if it is absent, ValueError for a pipe or device (reading could block)."""
        if not stat.S_ISREG(mode := os.stat(self).st_mode) and not stat.S_ISDIR(mode):
            raise ValueError(f"{self}: is not a file on disk, and it is read twice. Write it to a file first")

    def check_replaceable(self) -> None:
        """Raises ValueError for a symbolic link, a device, a pipe or a folder; an absent file passes."""
        if os.path.lexists(self) and not stat.S_ISREG(mode := os.lstat(self).st_mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
            kind = "a symbolic link" if stat.S_ISLNK(mode) else kind
            raise ValueError(f"{self}: is {kind}, and only a file is replaced; name a file")

    def is_same(self, other: str | os.PathLike) -> bool:
        """Returns whether `other` is the same file, under any name."""
        same = os.path.realpath(other) == os.path.realpath(self)
        return same or (os.path.exists(self) and os.path.exists(other) and os.path.samefile(other, self))

    @contextlib.contextmanager
    def reading(self) -> Iterator[IO[bytes]]:
        """Opens the file for binary reading. Raises ValueError for a pipe, or if it changed before the block ended."""
        self.check_readable()
        with self.open("rb") as file:
            about = os.fstat(file.fileno())
            yield file
            before, after = ((x.st_size, x.st_mtime_ns) for x in (about, os.fstat(file.fileno())))
        _check_unchanged(self, before, after)

    @contextlib.contextmanager
    def replacing(self) -> Iterator[IO[bytes]]:
        """Opens `PATH.partial` (and makes its folder) for binary writing; renamed to this file if the block succeeds.

        After an error it is removed. Raises ValueError if either is a link, device or folder.
        """
        partial = Local(partial_of(self))
        partial.parent.mkdir(parents=True, exist_ok=True)
        self.check_replaceable()
        partial.check_replaceable()
        try:
            with named(partial), open(partial, "wb") as file:
                yield file
            os.replace(partial, self)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def growing(self, request: str = "") -> Iterator[Growing]:
        """Opens the file at its end, made with its folder if absent, for binary reading and appending, locked.

        Raises ValueError if another process holds the lock, or it is no file. `request` is ignored here.
        """
        del request
        self.check_replaceable()
        self.parent.mkdir(parents=True, exist_ok=True)
        with named(self), open(self, "a+b") as file:
            _lock(file, self)
            yield Growing(file, self)

    def append(self, line: bytes) -> bool:
        """Appends immediately to the file, made if absent; returns `True`, as local files can grow."""
        with self.open("ab") as file:
            file.write(line)
        return True

    @contextlib.contextmanager
    def filling(self) -> Iterator[str]:
        """Yields this folder's path, to be filled in place by the block; the block must create it."""
        yield str(self)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Locks the name against other processes that write it whole; raises ValueError as `only_run`."""
        return only_run(self)

    def discard(self) -> None:
        self.unlink(missing_ok=True)


class Remote(os.PathLike):
    """An object in a bucket, or a common prefix of objects as a folder. Methods wait for the store.

    Raises ValueError for hf://, `.` or `..` in the address. Methods raise FileNotFoundError if an object to read is
    absent, OSError if the store is unreachable, refuses access or needs a package that is not installed.
    """

    here: Literal[False] = False

    def __init__(self, url: str):
        if url.startswith(HUB):
            raise ValueError(f"{url}: is no file. Such an address names a model or a tokenizer")
        if {".", ".."} & set(url.split("/")):  # its copy would leave the cache folder
            raise ValueError(f"{url}: has . or .. between slashes. Write it without . and ..")
        self.url = url.rstrip("/")

    def __fspath__(self) -> str:
        return self.url

    __str__ = __fspath__

    def __repr__(self) -> str:
        return f"Remote({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __truediv__(self, name: str) -> Remote:
        if not {".", ".."} & set(name.split("/")):
            return Remote(f"{self.url}/{name}")
        scheme, _, place = self.url.partition("://")
        return Remote(f"{scheme}://{posixpath.normpath(f'{place}/{name}')}")

    @property
    def address(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        return pathlib.PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        return pathlib.PurePosixPath(self.name).suffix

    @property
    def parent(self) -> Remote:
        return Remote(self.url.rpartition("/")[0])

    def with_name(self, name: str) -> Remote:
        return self.parent / name

    def resolve(self) -> Remote:
        return self

    absolute = resolve

    def mkdir(self, **_: bool) -> None:
        """No-op: a folder in a bucket exists once it has an object."""

    def is_file(self) -> bool:
        return self._kind() == "file"

    def is_dir(self) -> bool:
        return self._kind() == "directory"

    def exists(self) -> bool:
        """Returns whether an object of this name, or below it, exists."""
        return bool(self._kind())

    def _kind(self) -> str:
        with _store(self) as (store, place), contextlib.suppress(FileNotFoundError):
            return store.info(place)["type"]
        return ""

    def files(self) -> list[Remote]:
        """Returns this object, or all objects below this folder, sorted; [] if it is absent."""
        with _store(self) as (store, place), contextlib.suppress(FileNotFoundError):
            # s3fs gives the folder itself where its first object comes while it looks
            names = [name[len(place) + 1 :] for name in sorted(store.find(place)) if name[-1] != "/"]
            if any(names):
                return [self / name for name in names if name]
        return [self] if self.is_file() else []

    def names(self) -> list[str]:
        """Returns the names of the folder's direct objects, sorted; [] if it is absent."""
        with _store(self) as (store, place), contextlib.suppress(FileNotFoundError):
            return sorted(name.rpartition("/")[2] for name in store.find(place, maxdepth=1) if name != place)
        return []

    def folders_with(self, name: str) -> list[Remote]:
        """Returns the outermost folders below this one (not itself) that contain an object `name`, sorted."""
        folders: list[Remote] = []
        for folder in sorted({file.parent.url for file in self.files() if file.name == name and file.parent != self}):
            if not any(folder.startswith(f"{outer.url}/") for outer in folders):
                folders.append(Remote(folder))
        return folders

    def stamp(self) -> dict[str, Any]:
        """Returns {"bytes": size, "modified": text, e.g. the store's generation, ETag or time; "" if it has none}."""
        with _store(self) as (store, place):
            about = store.info(place)
        changes = (about.get(key) for key in ("generation", "ETag", "etag", "LastModified", "mtime", "created"))
        return {"bytes": about["size"], "modified": str(next((c for c in changes if c is not None), ""))}

    checksum = stamp

    def contents(self) -> list[Any]:
        """Returns [`stamp`] of the object, or of all objects below the folder, sorted by name."""
        return [file.stamp() for file in self.files()]

    def check_readable(self) -> None:
        """Raises FileNotFoundError if it is absent."""
        self.stamp()

    def check_replaceable(self) -> None:
        """No-op: every object can be replaced."""

    def is_same(self, other: str | os.PathLike) -> bool:
        return path_of(other) == self

    def holds_bytes(self) -> bool:
        """Returns whether the object, or a piece of a growing one, exists; a piece is never empty."""
        return self.exists()

    def modified(self) -> float:
        """Returns the modification time in seconds since 1970."""
        with _store(self) as (store, place):
            return store.modified(place).timestamp()

    def read_bytes(self) -> bytes:
        with _store(self) as (store, place):
            return store.cat_file(place)

    def read_text(self) -> str:
        return self.read_bytes().decode()

    @contextlib.contextmanager
    def reading(self) -> Iterator[IO[bytes]]:
        """Opens the object for binary reading, by blocks. Raises ValueError if it changed before the block ended."""
        before = self.stamp()
        with _store(self) as (store, place):
            opened = store.open(place, "rb")
        with opened as file:
            yield file
        _check_unchanged(self, before, self.stamp())

    @contextlib.contextmanager
    def replacing(self) -> Iterator[IO[bytes]]:
        """Opens a temporary file for binary writing, which is uploaded if the block succeeds."""
        with tempfile.NamedTemporaryFile() as file:
            yield cast(IO[bytes], file)
            file.flush()
            self.upload(file.name)

    @contextlib.contextmanager
    def growing(self, request: str = "") -> Iterator[Growing]:
        """Opens the pieces of a growing file (`Appended`), at its end. `request`, e.g. a digest, separates runs."""
        with Appended(self / request if request else self) as file:
            yield file

    def append(self, line: bytes) -> bool:
        """Returns `False` without writing: an object cannot grow."""
        return False

    @contextlib.contextmanager
    def filling(self) -> Iterator[str]:
        """Yields a temporary folder, whose files are uploaded if the block succeeds."""
        with tempfile.TemporaryDirectory() as folder:
            yield folder
            self.upload_folder(folder)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """No-op: an object appears whole, whoever writes it."""
        return contextlib.nullcontext()

    def discard(self) -> None:
        """Removes the pieces of a growing file, if any, of every request."""
        self.remove_folder()

    def write_bytes(self, content: bytes, *, new: bool = False) -> None:
        """Writes the object atomically. With `new`, raises FileExistsError if the name is taken."""
        with _store(self) as (store, place):
            store.pipe_file(place, content, mode="create" if new else "overwrite")

    def upload(self, file: str | os.PathLike) -> None:
        """Uploads a local file atomically."""
        with _store(self) as (store, place):
            store.put_file(os.fspath(file), place)

    def upload_folder(self, folder: str | os.PathLike, last: str = "") -> None:
        """Uploads all files below a local folder, several at once, and the file `last`, if there, after all others."""
        paths = (path for path in pathlib.Path(folder).rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in paths]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            first = [name for name in names if name != last]
            list(pool.map(lambda name: (self / name).upload(pathlib.Path(folder) / name), first))
        if last in names:
            (self / last).upload(pathlib.Path(folder) / last)

    def download_folder(self, folder: str | os.PathLike) -> None:
        """Downloads all objects below this folder, if any, into a local one, made if absent; several at once."""

        def fetch(file: Remote) -> None:
            target = pathlib.Path(folder) / file.url.removeprefix(f"{self.url}/")
            target.parent.mkdir(parents=True, exist_ok=True)
            file.download(target)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(fetch, self.files()))

    def remove_folder(self, first: str = "") -> None:
        """Deletes all objects below this folder, or of its name, if any; the one named `first` before all others."""
        (self / first).unlink(missing_ok=True)
        with _store(self) as (store, place), contextlib.suppress(FileNotFoundError):
            store.rm(place, recursive=True)

    def download(self, file: str | os.PathLike) -> None:
        """Downloads the object to a local file, whose folder must exist. Raises OSError if it is incomplete."""
        with _store(self) as (store, place):
            store.get_file(place, os.fspath(file))
            whole = store.size(place)
        if whole is not None and (size := os.path.getsize(file)) != whole:
            raise OSError(f"{self}: {size:,} of {whole:,} bytes came. Run again")

    def unlink(self, missing_ok: bool = False) -> None:
        with _store(self) as (store, place), contextlib.suppress(*[FileNotFoundError] if missing_ok else []):
            store.rm_file(place)


Place = Local | Remote
"""A file or folder, on this machine or in a bucket."""


def _check_unchanged(path: Place, before: Any, after: Any) -> None:
    if before != after:
        raise ValueError(f"{path}: changed while it was read. Run again when nothing writes it")


@contextlib.contextmanager
def _store(remote: Remote) -> Iterator[tuple[Any, str]]:
    """Yields the fsspec file system of an address and the path in it. Converts errors to OSError with the address."""
    import fsspec

    scheme = remote.url.partition("://")[0]
    try:
        yield fsspec.core.url_to_fs(remote.url, use_listings_cache=False)
    except FileNotFoundError:
        raise FileNotFoundError(f"{remote}: no such object") from None
    except FileExistsError:
        raise
    except ImportError as error:
        extra = f": pip install 'jax-prm[{EXTRAS[scheme]}]'" if scheme in EXTRAS else ""
        raise OSError(f"{remote}: {error}{extra}") from None
    except Exception as error:  # each store's client has errors of its own
        raise OSError(f"{remote}: {type(error).__name__}: {str(error)[:300]}") from error


class Growing:
    """A growing file: readable anywhere, writable at its end. A local one is locked by this process."""

    def __init__(self, file: IO[bytes], path: str | os.PathLike):
        self._file, self.name = file, os.fspath(path)

    def __getattr__(self, name: str) -> Any:
        """Delegates to the file. After `flush`, written data survive the process."""
        return getattr(self._file, name)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._file)

    def become(self, output: Place) -> None:
        """Renames the complete file to `output`, on the same disk, replacing an existing file."""
        self._file.flush()
        os.replace(self.name, output)

    def unlink(self) -> None:
        pathlib.Path(self.name).unlink(missing_ok=True)

    def clear(self) -> bool:
        """Removes the file if it is empty; returns whether it is certain that no file is left."""
        path = Local(self.name)
        if not path.holds_bytes():
            path.unlink(missing_ok=True)
        return not path.exists()


class Appended(Growing):
    """A growing file in a bucket: each flush writes one whole object, `NAME/OFFSET`.

    It is read and written in a local temporary file; `flush` uploads the new part. Opening restores what a killed
    process had uploaded. If two processes append, the second to upload a piece is refused.
    """

    def __init__(self, remote: Remote):
        super().__init__(tempfile.TemporaryFile(), remote)
        self.remote = remote
        for name in remote.names():
            if name.isdecimal() and int(name) == self._file.tell():
                self._file.write((remote / name).read_bytes())
        self._uploaded = self._file.tell()

    def __enter__(self) -> Appended:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, content: bytes) -> int:
        self._file.seek(0, os.SEEK_END)
        return self._file.write(content)

    def flush(self) -> None:
        """Uploads data written since the last flush. Raises ValueError if another process has appended."""
        self._file.seek(self._uploaded)
        if content := self._file.read():
            try:
                (self.remote / f"{self._uploaded:015d}").write_bytes(content, new=True)
            except FileExistsError:
                raise ValueError(f"{self.name}: another run is writing it. Wait for it, or name another file") from None
            self._uploaded += len(content)

    def truncate(self, size: int) -> int:
        """Truncates to `size` bytes and returns it; pieces go from the end, so that a kill leaves a valid beginning."""
        for name in reversed(self.remote.names()):
            start = int(name) if name.isdecimal() else -1
            if start >= size:
                (self.remote / name).unlink()
            elif 0 <= start and start + (self.remote / name).stamp()["bytes"] > size:
                self._file.seek(start)
                (self.remote / name).write_bytes(self._file.read(size - start))
        self._uploaded = min(self._uploaded, size)
        return self._file.truncate(size)

    def become(self, output: Place) -> None:
        """Writes the whole file as one object, replacing an existing one, then removes the pieces."""
        with output.replacing() as whole:
            self._file.seek(0)
            shutil.copyfileobj(self._file, whole, 1 << 20)
        self.unlink()

    def unlink(self) -> None:
        """Removes the pieces."""
        for name in reversed(self.remote.names()):
            (self.remote / name).unlink(missing_ok=True)

    def clear(self) -> bool:
        """Returns `False`: a piece is never empty, and another run may have started this output."""
        return False


def partial_of(path: str | os.PathLike) -> str:
    """Returns the temporary name of an incomplete file, `PATH.partial`."""
    return f"{os.fspath(path)}.partial"


@contextlib.contextmanager
def only_run(path: str | os.PathLike) -> Iterator[None]:
    """Locks a path, which need not exist, against other processes during the block, by `PATH.lock`, removed at the end.

    Raises ValueError (`Taken`) at once if another process has locked it. Makes the folder.
    """
    lock = Local(f"{os.fspath(path)}.lock")
    with lock.growing():
        try:
            yield
        finally:
            if not lock.stat().st_size:  # else it is a user's file of this name
                lock.unlink()


@contextlib.contextmanager
def named(path: str | os.PathLike) -> Iterator[None]:
    """Adds the file's name to OSErrors of a full or failing disk, which the system omits; all errors pass."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in FULL:
            error.filename = os.fspath(path)
        raise


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # some network file systems have no locks


class Taken(ValueError):
    """Another process is writing the file."""


def _lock(file: IO[bytes], path: str | os.PathLike) -> None:
    """Locks the file until it is closed. If it was renamed meanwhile, another process completed it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            return
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        if error.errno in NO_LOCKS:
            return
        raise
    raise Taken(
        f"{os.fspath(path)}: another run is writing it. Wait for it, or name another file. (Where a host died and its"
        " network file system still holds the file for it, a copy under the same name is free.)"
    )


def sha256_of(path: str | os.PathLike) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
