"""Outputs that are written a piece at a time, so that the same command continues one that was stopped.

Beside OUTPUT are, until it is whole, OUTPUT.part and, for good, OUTPUT.info.json, which holds the request.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import stat
import tempfile
from collections.abc import Iterator, Mapping
from typing import IO, Any, cast

from jprm.io.digests import sha256_of
from jprm.io.storage import Appended, Place, Remote, path_of

VERSION = 2
"""Of the format of outputs and their requests. A request of a newer version is refused. Version 1 had no digests."""


def input_of(path: str | os.PathLike) -> dict[str, Any]:
    """Returns what a request holds of its input: the path and a checksum, in a bucket what the store says of it.

    Raises ValueError for a pipe, which cannot be read twice.
    """
    if isinstance(remote := path_of(path), Remote):
        return {"input": remote.url, **remote.stamp()}
    check_input(path)
    return {"input": os.path.abspath(path), "sha256": sha256_of(path)}


def stamp_of(path: str | os.PathLike) -> dict[str, Any]:
    """Returns what changes with a file's content, without reading it; a copy has another stamp."""
    if isinstance(remote := path_of(path), Remote):
        return {"input": remote.url, **remote.stamp()}
    found = os.stat(path)
    times = {"modified": found.st_mtime_ns, "changed": found.st_ctime_ns}  # a program can set the first of them alone
    return {"input": os.path.abspath(path), "bytes": found.st_size, **times, "file": found.st_ino}


def check_input(path: str | os.PathLike) -> None:
    """Refuses a pipe or device before it is opened: one without a writer would be waited for.

    Raises FileNotFoundError or ValueError.
    """
    if isinstance(remote := path_of(path), Remote):
        remote.stamp()
    elif not stat.S_ISREG(mode := os.stat(path).st_mode) and not stat.S_ISDIR(mode):
        raise ValueError(f"{os.fspath(path)}: is not a file on disk, and it is read twice. Write it to a file first")


def check_output(path: str | os.PathLike, *inputs: str | os.PathLike) -> None:
    """Refuses, before any work, a file to be written that is there as something else than a file, or is an input.

    Raises:
      ValueError: a symbolic link, a device, a pipe, a folder, or one of `inputs` under this or another name.
    """
    if isinstance(remote := path_of(path), Remote):
        if remote in map(path_of, inputs):
            raise ValueError(f"{remote}: is an input too; name another output")
        return
    for other in inputs:
        same = os.path.realpath(other) == os.path.realpath(path)
        if same or (os.path.exists(path) and os.path.exists(other) and os.path.samefile(other, path)):
            raise ValueError(f"{os.fspath(path)}: is an input too; name another output")
    if os.path.lexists(path) and not stat.S_ISREG(mode := os.lstat(path).st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise ValueError(f"{os.fspath(path)}: is {kind}, and only a file is replaced; name a file")


def finish(part: pathlib.Path | Appended, output: str | os.PathLike, request: dict[str, Any]) -> None:
    """Gives a part that is whole its name. Raises ValueError where the request's input has changed meanwhile."""
    check_unchanged(request, f"Remove {part} and run the command again")
    check_own(output, request)
    if isinstance(part, Appended):
        part.become(Remote(os.fspath(output)))
    else:
        os.replace(part, output)


def check_own(output: str | os.PathLike, request: dict[str, Any]) -> None:
    """Raises ValueError where another run has begun an output in a bucket: no lock holds it until its first piece."""
    if isinstance(path_of(output), Remote) and stored_request(output) != request:
        raise ValueError(f"{os.fspath(output)}: another run has begun to write it. Name another file")


def check_unchanged(request: dict[str, Any], remedy: str) -> None:
    """Raises ValueError where the request's input is no longer the file that it was when the request was made."""
    now = input_of(request["input"]) if "input" in request else {}
    if now != {key: request[key] for key in now}:
        raise ValueError(f"{request['input']}: changed while it was read. {remedy}")


@contextlib.contextmanager
def continued(
    output: str | os.PathLike, request: dict[str, Any], *more: Place
) -> Iterator[tuple[IO[bytes], pathlib.Path | Appended] | None]:
    """Opens `OUTPUT.part` to read and to append, and yields it with its path; None where `output` is finished.

    The caller passes it to `finish` when it is whole; an empty one is removed, and with it the request of an output
    that was refused before its first line. `more` are files of the same request, which go when it is finished. In a
    bucket, file and path are one `Appended`.

    Raises:
      ValueError: what is there is the input, of another request or a newer jprm, or being written by another process;
        nothing is touched.
    """
    output = path_of(output)
    part, info = (output.with_name(output.name + end) for end in (".part", ".info.json"))
    check_output(output, *([request["input"]] if "input" in request else []))
    if isinstance(output, pathlib.Path):
        output.parent.mkdir(parents=True, exist_ok=True)
    with Appended(part / _digest(request)) if isinstance(part, Remote) else only_writer(part) as file:
        try:
            differ = differing(_request_in(info), request)
            for path in (output, part, *more):
                if differ and path.exists() and (path == output or _size(path)):
                    raise ValueError(
                        f"{path}: is there, but of another model, input or request ({', '.join(differ)}). Remove it or"
                        " name another file"
                    )
            if output.exists():
                for left in (file if isinstance(file, Appended) else part, *more):  # a kill came before their end
                    discard(left)
                yield None
                return
            if differ:
                atomic_write(info, json.dumps({"version": VERSION, **request}, indent=2) + "\n")
            yield cast(IO[bytes], file), file if isinstance(file, Appended) else cast(pathlib.Path, part)
            file.flush()
        finally:
            if isinstance(part, pathlib.Path):
                if part.exists() and not _size(part):
                    part.unlink()
                if not any(path.exists() for path in (output, part, *more)):
                    info.unlink(missing_ok=True)


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns which parts of two requests differ, those of a part as `PART.NAME`: none where they ask for the same."""
    names = []
    for name in {**now, **before}:
        one, other = before.get(name), now.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            names += [f"{name}.{each}" for each in differing(one, other)]
        elif one != other:
            names.append(name)
    return names


def discard(path: Place | Appended) -> None:
    """Removes a file, in a bucket with its pieces, where it is there."""
    if isinstance(path, Remote):
        path.remove_folder()
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def growing(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """Opens a file to read and to append: locked as by `only_writer`, or in a bucket in pieces (`Appended`)."""
    if isinstance(remote := path_of(path), Remote):
        with Appended(remote) as file:
            yield cast(IO[bytes], file)
        return
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    with only_writer(path) as file:
        yield file


def _digest(request: dict[str, Any]) -> str:
    """Returns what names the pieces of a request, which another request then never takes for its own."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:16]


def _size(path: Place) -> int:
    """Returns the size of what is there; pieces of an output in a bucket are never empty."""
    return path.stat().st_size if isinstance(path, pathlib.Path) else 1


def cut(file: IO[bytes], chunk: int) -> int:
    """Cuts the file after its last whole chunk of so many lines; returns how many lines stay."""
    file.seek(0)
    there = end = 0
    for count, line in enumerate(iter(file.readline, b""), start=1):
        if count % chunk == 0 and line.endswith(b"\n"):
            there, end = count, file.tell()
    file.truncate(end)
    return there


def stored_request(output: str | os.PathLike) -> dict[str, Any]:
    """Returns the request that OUTPUT.info.json holds; empty where there is none."""
    return _request_in(path_of(f"{os.fspath(output)}.info.json"))


def _request_in(info: Place) -> dict[str, Any]:
    """Returns the stored request without its version; empty where there is none or a full disk cut it short."""
    try:
        kept = json.loads(info.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        kept = None
    kept = kept if isinstance(kept, dict) else {}
    check_version(kept.pop("version", 1), VERSION, info)
    return kept


def check_version(found: Any, known: int, path: str | os.PathLike) -> None:
    """Raises ValueError for a file of a newer version than this jprm knows, or with no number as its version."""
    if type(found) is not int or not 0 < found <= known:
        raise ValueError(f"{os.fspath(path)}: is of version {found!r}, and this jprm reads up to {known}: upgrade jprm")


def partial_of(path: str | os.PathLike) -> str:
    """Returns the name under which a file is written until it is complete."""
    return f"{os.fspath(path)}.partial"


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """Opens a binary file to write. It takes the name `path` when the block ends well; otherwise it is removed.

    It takes no lock: a run's own small files are written on network file systems, where the lock of a host that died
    may stay.
    """
    if isinstance(remote := path_of(path), Remote):
        with tempfile.NamedTemporaryFile() as file:
            yield cast(IO[bytes], file)
            file.flush()
            remote.upload(file.name)
        return
    partial = partial_of(path)
    pathlib.Path(partial).parent.mkdir(parents=True, exist_ok=True)
    for file in (path, partial):
        check_output(file)
    try:
        with named(partial), open(partial, "wb") as file:
            yield file
        os.replace(partial, path)
    except BaseException:
        pathlib.Path(partial).unlink(missing_ok=True)
        raise


def atomic_write(path: str | os.PathLike, content: str | bytes) -> None:
    """Writes a file of this content, text as UTF-8, whole or not at all."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def only_writer(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """Opens the file to read and to append, locked against other processes.

    Raises:
      ValueError: another process has it open, or it is no file.
      OSError: as the system's, with the file's name.
    """
    check_output(path)
    with named(path), open(path, "a+b") as file:
        _lock(file, path)
        yield file


@contextlib.contextmanager
def only_run(path: str | os.PathLike) -> Iterator[None]:
    """Locks a file or folder, which need not exist, against other processes within the block, by `PATH.lock`.

    Raises:
      ValueError: another process has locked it.
    """
    lock = pathlib.Path(f"{os.fspath(path)}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with only_writer(lock):
        try:
            yield
        finally:
            if not lock.stat().st_size:  # else it is a user's file of this name
                lock.unlink()


@contextlib.contextmanager
def named(path: str | os.PathLike) -> Iterator[None]:
    """Adds the file's name to the error of a full disk, which the system leaves out."""
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
    """Locks the file until it is closed. One that was renamed meanwhile is another process's, and whole."""
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


def write_json(path: str | os.PathLike, obj: Any) -> None:
    """Writes indented JSON whole or not at all. Raises ValueError for NaN and infinities, which JSON does not have."""
    text = json.dumps(obj, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    with atomic_file(path) as file:
        file.write(text.encode())
