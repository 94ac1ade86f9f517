"""Files in buckets, as `gs://BUCKET/NAME`, `s3://BUCKET/NAME` or any other address that fsspec opens.

An object store has no renaming, no appending and no locks. It has three things that suffice: an object appears whole,
when its upload ends; a write may demand that there is no object of the name yet; and names can be listed. `Remote` is
those three, with the methods of `pathlib.Path` that outputs use. `Appended` makes a file that grows of them.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import posixpath
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3"}
"""The extras of jprm that bring the packages for addresses of a scheme."""

AT_ONCE = 8
"""Files that are uploaded or downloaded at a time."""


def path_of(path: str | os.PathLike) -> Place:
    """Returns the object of an address, or the path of a file on this machine."""
    return Remote(os.fspath(path)) if is_remote(path) else pathlib.Path(path)


def is_remote(path: str | os.PathLike) -> bool:
    """Returns whether a path is an address."""
    scheme, separator, _ = os.fspath(path).partition("://")
    return bool(separator) and scheme.isalnum()


def cache_folder(name: str) -> pathlib.Path:
    """Returns the folder of this machine for what can be made again: ~/.cache/jprm/NAME."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "jprm" / name


def named_in(file: str | os.PathLike, name: str) -> Place:
    """Returns the path that a file names: an address or an absolute path, or one relative to the file's folder."""
    folder = path_of(file).parent
    if is_remote(name) or os.path.isabs(name) or not isinstance(folder, Remote):
        return path_of(name) if is_remote(name) else pathlib.Path(folder, name)
    scheme, _, place = folder.url.partition("://")
    return Remote(f"{scheme}://{posixpath.normpath(f'{place}/{name}')}")


class Remote(os.PathLike):
    """An object of a bucket, or the common beginning of objects' names, as a folder.

    Raises OSError, with the address, where the store cannot be reached or refuses.
    """

    def __init__(self, url: str):
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
        return Remote(f"{self.url}/{name}")

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
        """Does nothing: a folder of a bucket is there with its first object."""

    def is_file(self) -> bool:
        return self._kind() == "file"

    def is_dir(self) -> bool:
        return self._kind() == "directory"

    def exists(self) -> bool:
        """Returns whether there is an object of this name, or any in this folder."""
        return bool(self._kind())

    def _kind(self) -> str:
        with _store(self) as (store, place), contextlib.suppress(FileNotFoundError):
            return store.info(place)["type"]
        return ""

    def files(self) -> list[Remote]:
        """Returns all objects of this folder and of those in it, in order of their names, or this object."""
        with _store(self) as (store, place), contextlib.suppress(FileNotFoundError):
            # s3fs gives the folder itself where its first object comes while it looks
            names = [found[len(place) + 1 :] for found in sorted(store.find(place)) if found[-1] != "/"]
            if any(names):
                return [self / name for name in names if name]
        return [self] if self.is_file() else []

    def names(self) -> list[str]:
        """Returns the names of the objects in this folder, in order."""
        with _store(self) as (store, place), contextlib.suppress(FileNotFoundError):
            return sorted(found.rpartition("/")[2] for found in store.find(place, maxdepth=1) if found != place)
        return []

    def stamp(self) -> dict[str, Any]:
        """Returns the object's size and what changes with its content. Raises FileNotFoundError."""
        with _store(self) as (store, place):
            found = store.info(place)
        changes = (found.get(key) for key in ("generation", "ETag", "etag", "LastModified", "mtime", "created"))
        return {"bytes": found["size"], "modified": str(next((c for c in changes if c is not None), ""))}

    def modified(self) -> float:
        """Returns when the object was written, in seconds since 1970. Raises FileNotFoundError."""
        with _store(self) as (store, place):
            return store.modified(place).timestamp()

    def read_bytes(self) -> bytes:
        with _store(self) as (store, place):
            return store.cat_file(place)

    def read_text(self) -> str:
        return self.read_bytes().decode()

    @contextlib.contextmanager
    def reading(self) -> Iterator[IO[bytes]]:
        """Opens the object to read, a block at a time."""
        with _store(self) as (store, place):
            opened = store.open(place, "rb")
        with opened as file:
            yield file

    def write_bytes(self, content: bytes, *, new: bool = False) -> None:
        """Writes the object whole or not at all. With `new`, raises FileExistsError where there is one of the name."""
        with _store(self) as (store, place):
            store.pipe_file(place, content, mode="create" if new else "overwrite")

    def upload(self, file: str | os.PathLike) -> None:
        """Writes the content of a file of this machine, whole or not at all."""
        with _store(self) as (store, place):
            store.put_file(os.fspath(file), place)

    def upload_folder(self, folder: str | os.PathLike, last: str = "") -> None:
        """Writes all files of a folder of this machine, several at once, and the one named `last` after all others."""
        paths = (path for path in pathlib.Path(folder).rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in paths]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            first = [name for name in names if name != last]
            list(pool.map(lambda name: (self / name).upload(pathlib.Path(folder) / name), first))
        if last in names:
            (self / last).upload(pathlib.Path(folder) / last)

    def download_folder(self, folder: str | os.PathLike) -> None:
        """Writes all objects of this folder into one of this machine, several at once."""

        def fetch(file: Remote) -> None:
            target = pathlib.Path(folder) / file.url.removeprefix(f"{self.url}/")
            target.parent.mkdir(parents=True, exist_ok=True)
            file.download(target)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(fetch, self.files()))

    def remove_folder(self, first: str = "") -> None:
        """Deletes all objects of this folder, the one named `first` before all others."""
        (self / first).unlink(missing_ok=True)
        with _store(self) as (store, place), contextlib.suppress(FileNotFoundError):
            store.rm(place, recursive=True)

    def download(self, file: str | os.PathLike) -> None:
        """Writes the object into a file of this machine."""
        with _store(self) as (store, place):
            store.get_file(place, os.fspath(file))

    def unlink(self, missing_ok: bool = False) -> None:
        with _store(self) as (store, place), contextlib.suppress(*[FileNotFoundError] if missing_ok else []):
            store.rm_file(place)


Place = pathlib.Path | Remote
"""A file or folder, on this machine or in a bucket."""


@contextlib.contextmanager
def _store(remote: Remote) -> Iterator[tuple[Any, str]]:
    """Yields the fsspec file system of an address and the name in it. Its errors become OSErrors with the address."""
    import fsspec

    scheme = remote.url.partition("://")[0]
    try:
        yield fsspec.core.url_to_fs(remote.url, use_listings_cache=False)
    except FileNotFoundError:
        raise FileNotFoundError(f"{remote}: no such object") from None
    except FileExistsError:
        raise
    except ImportError as error:
        extra = f": pip install 'jprm[{EXTRAS[scheme]}]'" if scheme in EXTRAS else ""
        raise OSError(f"{remote}: {error}{extra}") from None
    except Exception as error:  # each store's client has errors of its own
        raise OSError(f"{remote}: {type(error).__name__}: {str(error)[:300]}") from error


class Appended:
    """A file that grows in a bucket: an object for each flush, `NAME/OFFSET`, of which every one is whole.

    It is read and written here, in a temporary file; `flush` uploads what is new. What a killed process had uploaded is
    there again when the file is opened. Of two processes that append, the second to upload a piece is refused.
    """

    def __init__(self, remote: Remote):
        self.remote, self.name = remote, remote.url
        self._file = tempfile.TemporaryFile()
        for name in remote.names():
            if name.isdigit() and int(name) == self._file.tell():
                self._file.write((remote / name).read_bytes())
        self._uploaded = self._file.tell()

    def __enter__(self) -> Appended:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def seek(self, *place: int) -> int:
        return self._file.seek(*place)

    def tell(self) -> int:
        return self._file.tell()

    def fileno(self) -> int:
        return self._file.fileno()

    def read(self, *size: int) -> bytes:
        return self._file.read(*size)

    def readline(self) -> bytes:
        return self._file.readline()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._file)

    def write(self, content: bytes) -> int:
        self._file.seek(0, os.SEEK_END)
        return self._file.write(content)

    def flush(self) -> None:
        """Uploads what was written since the last flush. Raises ValueError where another process has appended."""
        self._file.seek(self._uploaded)
        if content := self._file.read():
            try:
                (self.remote / f"{self._uploaded:015d}").write_bytes(content, new=True)
            except FileExistsError:
                raise ValueError(f"{self.name}: another run is writing it. Wait for it, or name another file") from None
            self._uploaded += len(content)

    def truncate(self, size: int) -> int:
        """Cuts the file, and what is in the bucket, from the end on so that a kill leaves a beginning."""
        for name in reversed(self.remote.names()):
            start = int(name) if name.isdigit() else -1
            if start >= size:
                (self.remote / name).unlink()
            elif 0 <= start and start + (self.remote / name).stamp()["bytes"] > size:
                self._file.seek(start)
                (self.remote / name).write_bytes(self._file.read(size - start))
        self._uploaded = min(self._uploaded, size)
        return self._file.truncate(size)

    def become(self, output: Remote) -> None:
        """Writes the whole file as one object, and removes the pieces."""
        with tempfile.NamedTemporaryFile() as whole:
            self._file.seek(0)
            while block := self._file.read(1 << 20):
                whole.write(block)
            whole.flush()
            output.upload(whole.name)
        self.unlink()

    def unlink(self, missing_ok: bool = True) -> None:
        """Removes the pieces."""
        del missing_ok  # as of a path: there may be none
        for name in reversed(self.remote.names()):
            (self.remote / name).unlink(missing_ok=True)
