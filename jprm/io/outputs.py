"""Incrementally written outputs, so that the same command continues a stopped one.

Beside OUTPUT are OUTPUT.part, until it is complete, and OUTPUT.info.json, which stays. The latter holds the request:
everything the output depends on, with digests of settings and user code.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import os
import pathlib
import sys
import sysconfig
import threading
import time
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, Self

from rich import get_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jprm.io.storage import REPORT, Growing, Place, path_of, records_file

VERSION = 2
"""Version of outputs and requests. Newer versions are refused. Version 1 had no digests."""


def input_of(path: str | os.PathLike) -> dict[str, Any]:
    """Returns {"input": absolute path or address, "sha256": hex digits}, for a prepared folder of its report.json.

    In a bucket, the store's `bytes` and `modified` replace `sha256`. Raises FileNotFoundError (also for an unprepared
    folder), or ValueError for a pipe, which cannot be read twice.
    """
    path = records_file(path)
    path.check_readable()
    return {"input": path.address, **path.checksum()}


def stamp_of(path: str | os.PathLike) -> dict[str, Any]:
    """Returns `input` as `input_of`, and metadata, e.g. `bytes` and `modified`, which change with the content.

    It does not read the content, and a copy differs. Raises FileNotFoundError.
    """
    path = records_file(path)
    return {"input": path.address, **path.stamp()}


def check_input(path: str | os.PathLike) -> None:
    """Raises ValueError for a pipe or device, which might block forever; FileNotFoundError if absent or unprepared."""
    records_file(path).check_readable()


def check_output(path: str | os.PathLike, *inputs: str | os.PathLike) -> None:
    """Rejects an output, before any work, if it exists and is not a file, or is also an input.

    Raises ValueError for a symbolic link, device, pipe or local folder, or one of `inputs` under any name.
    """
    output = path_of(path)
    if any(output.is_same(path) or output.is_same(os.path.join(path, REPORT)) for path in inputs):
        raise ValueError(f"{output}: is an input too; name another output")
    output.check_replaceable()


def finish(part: Growing, output: str | os.PathLike, request: dict[str, Any]) -> None:
    """Renames a complete `part` of `continued` to `output`, of the same `request`.

    Raises ValueError if the request's input changed (FileNotFoundError: is gone), or another run began the output.
    """
    check_unchanged(request, f"Remove {part.name} and run the command again")
    check_own(output, request)
    part.become(path_of(output))


def check_own(output: str | os.PathLike, request: dict[str, Any]) -> None:
    """Raises ValueError unless OUTPUT.info.json holds `request`: in a bucket, another run may have begun the output."""
    if stored_request(output) != request:
        raise ValueError(f"{os.fspath(output)}: another run has begun to write it. Name another file")


def check_unchanged(request: dict[str, Any], remedy: str) -> None:
    """Raises ValueError, ending in `remedy`, if the request's `input` (if any) changed; FileNotFoundError if absent."""
    now = input_of(request["input"]) if "input" in request else {}
    if now != {key: request.get(key) for key in now}:
        raise ValueError(f"{request['input']}: changed while it was read. {remedy}")


@contextlib.contextmanager
def continued(output: str | os.PathLike, request: dict[str, Any], *more: Place) -> Iterator[Growing | None]:
    """Yields `OUTPUT.part`, open at its end for reading and appending, and locked; `None` if `output` is finished.

    The caller must pass it to `finish` when complete. After an error, the lines written so far stay (in a bucket, if
    flushed); an empty part is removed, with its request. `request` is a JSON object, stored in OUTPUT.info.json, whose
    `input`, if any, names the input. `more` are further files of it, which a call deletes once `output` is finished.

    Raises ValueError, without changing a file, if the existing file is the input, of another request or a newer jprm,
    or is being written by another process.
    """
    output = path_of(output)
    part, info = (output.with_name(output.name + end) for end in (".part", ".info.json"))
    check_output(output, *([request["input"]] if "input" in request else []))
    with part.growing(_hashed(request)) as file:
        try:
            differ = differing(stored_request(output), request)
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
    """Returns the names of entries that differ in two requests, nested as `PART.NAME`; an absent one equals `None`."""
    names = []
    for name in {**now, **before}:
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            names += [f"{name}.{inner}" for inner in differing(old, new)]
        elif old != new:
            names.append(name)
    return names


def cut(file: Growing, chunk: int) -> int:
    """Truncates the file after its last whole chunk of `chunk` lines; returns the number of lines left."""
    file.seek(0)
    whole = end = 0
    for count, line in enumerate(iter(file.readline, b""), start=1):
        if count % chunk == 0 and line.endswith(b"\n"):
            whole, end = count, file.tell()
    file.truncate(end)
    return whole


def stored_request(output: str | os.PathLike) -> dict[str, Any]:
    """Returns the request in OUTPUT.info.json; {} if absent or truncated. Raises ValueError for a newer version."""
    info = path_of(f"{os.fspath(output)}.info.json")
    try:
        kept = json.loads(info.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        kept = None
    kept = kept if isinstance(kept, dict) else {}
    check_version(kept.pop("version", 1), VERSION, info)
    return kept


def check_version(version: Any, known: int, path: str | os.PathLike) -> None:
    """Raises ValueError if a file's version is newer than `known`, or is no integer from 1."""
    if type(version) is not int or not 0 < version <= known:
        raise ValueError(f"{os.fspath(path)}: has version {version!r}, but this jprm reads up to {known}: upgrade jprm")


def atomic_file(path: str | os.PathLike) -> contextlib.AbstractContextManager[IO[bytes]]:
    """Opens `PATH.partial` for binary writing, in a `with`; renamed to `path` if the block succeeds, else removed.

    Makes the folder. Raises ValueError if `path` is a link or folder. Takes no lock, because small run files are
    written on network file systems, where the lock of a dead host may stay.
    """
    return path_of(path).replacing()


def atomic_write(path: str | os.PathLike, content: str | bytes) -> None:
    """Writes a file by `atomic_file`, text as UTF-8."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: str | os.PathLike, obj: Any) -> None:
    """Writes `obj` as indented JSON by `atomic_file`. Raises ValueError for NaN and infinity, TypeError if no JSON."""
    atomic_write(path, json.dumps(obj, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


# -------------------------------------------------------------------------------------------- what a request depends on
#
# A run's folder and a policy's name hold digests too: a changed part is reported by name, and results of different
# parts are never confused.

PACKAGE = pathlib.Path(__file__).resolve().parent.parent  # jprm

STANDARD = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
LIBRARIES = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib"))


def digest(value: Any) -> str:
    """Returns 16 hex digits, different for values with different results.

    A value is any part of a model or command: settings, containers, dataclasses, functions or classes. A user's
    function is represented by the text of its file and the user's files imported there. jprm's own functions count only
    by name, so that results outlive a release.

    Tokenizers count by type: `jprm.methods.jobs.score` adds their files.
    """
    return _hashed(_Walk().as_json(value))


def code_of(value: Any) -> dict[str, str]:
    """Returns {absolute path: 16 hex digits} of the .py files of a value's parts: a user's or library's, not jprm's."""
    walk = _Walk()
    walk.as_json(value)
    return dict(sorted(walk.files.items()))


def text_of_module(module: types.ModuleType) -> str | None:
    """Returns a module's source text, as executed if by `jprm.options.run`; `None` without a .py file."""
    text = vars(module).get("__text__")  # of `jprm.options.run`: what ran, not what is there now
    if text is not None:
        return text
    file = vars(module).get("__file__")
    return pathlib.Path(file).read_text("utf-8") if file and file.endswith(".py") and os.path.isfile(file) else None


class _Walk:
    """One value traversal. `files` collects the user's files on the way."""

    def __init__(self):
        self.files: dict[str, str] = {}
        self._within: set[int] = set()  # objects being traversed

    def as_json(self, value: Any) -> Any:
        """Returns the value as JSON."""
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return repr(value)
        if isinstance(value, bytes):
            return hashlib.sha256(value).hexdigest()
        if id(value) in self._within:
            return "within itself"
        self._within.add(id(value))
        try:
            return self._parts(value)
        finally:
            self._within.discard(id(value))

    def _parts(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return ["mapping", sorted(([self.as_json(k), self.as_json(v)] for k, v in value.items()), key=json.dumps)]
        if isinstance(value, set | frozenset):
            return ["set", sorted(map(self.as_json, value), key=json.dumps)]
        if isinstance(value, list | tuple):
            return [self.as_json(item) for item in value]
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, enum.Enum):
            return [self._named(type(value)), value.name]
        if hasattr(value, "tobytes") and hasattr(value, "dtype"):
            return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
        if isinstance(value, functools.partial):
            return [self.as_json(value.func), self.as_json(value.args), self.as_json(value.keywords)]
        if isinstance(value, types.MethodType):
            return [self.as_json(value.__func__), self.as_json(value.__self__)]
        if hasattr(value, "__wrapped__"):  # jitted or cached
            return self.as_json(inspect.unwrap(value))
        if isinstance(value, types.FunctionType):
            around = [*map(_contents, value.__closure__ or ()), value.__defaults__, value.__kwdefaults__]
            return [self._named(value), self.as_json(around)]
        if isinstance(value, types.ModuleType):
            return [value.__name__, self._module(value)]
        if isinstance(value, type) or callable(value) and hasattr(value, "__qualname__"):
            return self._named(value)
        if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return [self._named(type(value)), self.as_json(fields)]
        if hasattr(value, "encode") and hasattr(value, "token_id"):
            return self._named(type(value))
        cached, attributes = functools.cached_property, getattr(value, "__dict__", {})
        kept = {k: v for k, v in attributes.items() if not isinstance(getattr(type(value), k, 0), cached)}
        return [self._named(type(value)), self.as_json(kept)]

    def _named(self, part: Any) -> Any:
        """Returns a function's or class's name, with the code of the defining file if it is the user's."""
        name = getattr(part, "__module__", None) or ""
        scope = getattr(part, "__globals__", None)
        module = sys.modules.get(name)
        if scope is not None and (module is None or vars(module) is not scope):  # two files of one name
            module = types.ModuleType(name)
            vars(module).update(scope)
        code = self._module(module) if module is not None and module is not builtins else None
        if code is None and isinstance(part, types.FunctionType) and name == "__main__":  # of a notebook
            code = _compiled(part.__code__)
        elif code is None and isinstance(part, type) and name == "__main__":
            code = [_compiled(item.__code__) for item in vars(part).values() if isinstance(item, types.FunctionType)]
        if code is not None:
            name = ""  # a file may be copied with its run
        elif name.partition(".")[0] == PACKAGE.name:
            name = PACKAGE.name  # its files move between releases
        return [name, getattr(part, "__qualname__", ""), code]

    def _module(self, module: types.ModuleType) -> str | None:
        """Digests a module's text and the user's modules used there, unless it is jprm's or Python's own."""
        file = _file(module)
        shipped = file.startswith(f"{PACKAGE}{os.sep}") or file.startswith(STANDARD) and not file.startswith(LIBRARIES)
        text = None if shipped else text_of_module(module)
        if text is None:
            return None
        code = hashlib.sha256(text.encode()).hexdigest()[:16]
        if file in self.files or file.startswith(LIBRARIES):  # what a library uses is of its release
            self.files[file] = code
            return code
        self.files[file] = code
        parts = [value for value in vars(module).values() if isinstance(value, type | types.FunctionType)]
        used = {value for value in vars(module).values() if isinstance(value, types.ModuleType)}
        used |= {sys.modules[part.__module__] for part in parts if part.__module__ in sys.modules}  # that define them
        modules = [other for other in used if not _file(other).startswith(LIBRARIES)]
        return _hashed([code, [self._module(other) for other in sorted(modules, key=lambda other: other.__name__)]])


def _hashed(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _file(module: types.ModuleType) -> str:
    return os.path.realpath(vars(module).get("__file__") or "")


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _compiled(code: types.CodeType) -> str:
    """Digests a function without a file, e.g. in a notebook."""
    inner = [_compiled(item) if isinstance(item, types.CodeType) else repr(item) for item in code.co_consts]
    return _hashed([code.co_code.hex(), code.co_names, inner])


# ----------------------------------------------------------------------------------- the progress bar of long commands


class Bar(Progress):
    """Context manager that shows progress: `what`, how much of `total` (if known) is done, and a note.

    Without a terminal, e.g. in a Slurm log, it prints one line per minute and one at the end; if not `shown`, no line.
    """

    EVERY_S = 60.0

    def __init__(self, what: str, total: int | None, done: int = 0, note: str = "", shown: bool = True):
        columns = (TextColumn("{task.fields[what]}", markup=False), BarColumn(), MofNCompleteColumn())
        self._logs, self._ended = shown and not get_console().is_terminal, threading.Event()
        columns += (TimeRemainingColumn(), TextColumn("{task.description}"))
        super().__init__(*columns, disable=self._logs or not shown)
        self._task = self.add_task(note, total=total, completed=done, what=what)
        self._begun, self._before = time.monotonic(), done

    def __enter__(self) -> Self:
        if self._logs:
            if self.tasks[0].description:
                print(self.line(), flush=True)
            threading.Thread(target=self._log, daemon=True).start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._ended.set()
        super().__exit__(*error)
        if self._logs and (self.tasks[0].completed > self._before or not self.tasks[0].description):  # else it is shown
            print(self.line(), flush=True)

    def add(self, count: float = 1, note: str | None = None) -> None:
        """Counts `count` more and redraws, with the `note` unless it is `None`."""
        self.update(self._task, advance=count, description=note)

    def follow(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yields the items, and counts each when the next one is requested."""
        for item in items:
            yield item
            self.add()

    def line(self) -> str:
        """Returns e.g. `sampling pools.jsonl: 16 of 24, 9 min left, 31.2 tokens a second`, without unknown parts."""
        task = self.tasks[0]
        done, total, now = int(task.completed), task.total, int(task.completed) - self._before
        said = f"{task.fields['what']}: {done:,}" + ("" if total is None else f" of {int(total):,}")
        if total is not None and now and done < total:
            left = (time.monotonic() - self._begun) / now * (total - done)
            said += f", {in_words(left)} left"
        return said + (f", {task.description}" if task.description else "")

    def _log(self) -> None:
        while not self._ended.wait(self.EVERY_S):
            print(self.line(), flush=True)


def in_words(seconds: float) -> str:
    """Writes seconds in the first unit (s, min, h, days) with a value below 99, rounded, e.g. 540 as `9 min`."""
    times = ((1, "s"), (60, "min"), (3600, "h"), (86400, "days"))
    size, unit = next((row for row in times if seconds < 99 * row[0]), times[-1])
    return f"{seconds / size:.0f} {unit}"
