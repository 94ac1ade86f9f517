"""Outputs that are written a piece at a time, so that the same command continues one that was stopped.

Beside OUTPUT are, until it is whole, OUTPUT.part and, for good, OUTPUT.info.json, which holds the request.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import IO, Any

from jprm.io.storage import Growing, Place, path_of

VERSION = 2
"""Of the format of outputs and their requests. A request of a newer version is refused. Version 1 had no digests."""


def input_of(path: str | os.PathLike) -> dict[str, Any]:
    """Returns what a request holds of its input: the path and a checksum, in a bucket what the store says of it.

    Raises ValueError for a pipe, which cannot be read twice.
    """
    path = path_of(path)
    path.check_readable()
    return {"input": path.address, **path.checksum()}


def stamp_of(path: str | os.PathLike) -> dict[str, Any]:
    """Returns what changes with a file's content, without reading it; a copy has another stamp."""
    path = path_of(path)
    return {"input": path.address, **path.stamp()}


def check_input(path: str | os.PathLike) -> None:
    """Refuses a pipe or device before it is opened: one without a writer would be waited for.

    Raises FileNotFoundError or ValueError.
    """
    path_of(path).check_readable()


def check_output(path: str | os.PathLike, *inputs: str | os.PathLike) -> None:
    """Refuses, before any work, a file to be written that is there as something else than a file, or is an input.

    Raises:
      ValueError: a symbolic link, a device, a pipe, a folder, or one of `inputs` under this or another name.
    """
    output = path_of(path)
    if any(map(output.is_same, inputs)):
        raise ValueError(f"{output}: is an input too; name another output")
    output.check_replaceable()


def finish(part: Growing, output: str | os.PathLike, request: dict[str, Any]) -> None:
    """Gives a part that is whole its name. Raises ValueError where the request's input has changed meanwhile."""
    check_unchanged(request, f"Remove {part.name} and run the command again")
    check_own(output, request)
    part.become(path_of(output))


def check_own(output: str | os.PathLike, request: dict[str, Any]) -> None:
    """Raises ValueError where another run has begun an output in a bucket: no lock holds it until its first piece."""
    if stored_request(output) != request:
        raise ValueError(f"{os.fspath(output)}: another run has begun to write it. Name another file")


def check_unchanged(request: dict[str, Any], remedy: str) -> None:
    """Raises ValueError where the request's input is no longer the file that it was when the request was made."""
    now = input_of(request["input"]) if "input" in request else {}
    if now != {key: request[key] for key in now}:
        raise ValueError(f"{request['input']}: changed while it was read. {remedy}")


@contextlib.contextmanager
def continued(output: str | os.PathLike, request: dict[str, Any], *more: Place) -> Iterator[Growing | None]:
    """Opens `OUTPUT.part` to read and to append, and yields it; yields None where `output` is finished.

    The caller passes it to `finish` when it is whole; an empty one is removed, and with it the request of an output
    that was refused before its first line. `more` are files of the same request, which go when it is finished.

    Raises:
      ValueError: what is there is the input, of another request or a newer jprm, or being written by another process;
        nothing is touched.
    """
    output = path_of(output)
    part, info = (output.with_name(output.name + end) for end in (".part", ".info.json"))
    check_output(output, *([request["input"]] if "input" in request else []))
    with part.growing(_digest(request)) as file:
        try:
            differ = differing(_request_in(info), request)
            for path in (output, part, *more):
                if differ and (path.exists() if path == output else path.holds_bytes()):
                    raise ValueError(
                        f"{path}: is there, but of another model, input or request ({', '.join(differ)}). Remove it or"
                        " name another file"
                    )
            if output.exists():
                file.unlink()  # a kill came before its end
                for path in more:
                    path.discard()
                yield None
                return
            if differ:
                atomic_write(info, json.dumps({"version": VERSION, **request}, indent=2) + "\n")
            yield file
            file.flush()
        finally:
            if file.clear() and not any(path.exists() for path in (output, *more)):
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


def _digest(request: dict[str, Any]) -> str:
    """Returns what names the pieces of a request, which another request then never takes for its own."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:16]


def cut(file: Growing, chunk: int) -> int:
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


def check_version(version: Any, known: int, path: str | os.PathLike) -> None:
    """Raises ValueError for a file of a newer version than this jprm knows, or with no number as its version."""
    if type(version) is not int or not 0 < version <= known:
        raise ValueError(
            f"{os.fspath(path)}: is of version {version!r}, and this jprm reads up to {known}: upgrade jprm"
        )


def atomic_file(path: str | os.PathLike) -> contextlib.AbstractContextManager[IO[bytes]]:
    """Opens a binary file to write. It takes the name `path` when the block ends well; otherwise it is removed.

    It takes no lock: a run's own small files are written on network file systems, where the lock of a host that died
    may stay.
    """
    return path_of(path).replacing()


def atomic_write(path: str | os.PathLike, content: str | bytes) -> None:
    """Writes a file of this content, text as UTF-8, whole or not at all."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: str | os.PathLike, obj: Any) -> None:
    """Writes indented JSON whole or not at all. Raises ValueError for NaN and infinities, which JSON does not have."""
    text = json.dumps(obj, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    with atomic_file(path) as file:
        file.write(text.encode())
