"""Digests of what results depend on: settings, and the code of the user's own parts.

The request of an output (`jprm.io.outputs`), a run's folder and a policy's name hold them, so that a part that changed
is named and nothing that another part has made is taken for the same.
"""

from __future__ import annotations

import builtins
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
import types
from collections.abc import Mapping
from typing import Any

_CACHED = functools.cached_property

PACKAGE = pathlib.Path(__file__).resolve().parent.parent  # jprm

STANDARD = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
LIBRARIES = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib"))


def digest(value: Any) -> str:
    """Returns 16 hexadecimal digits that differ between values that give different results.

    A value is any part of a model or command: settings, containers of them, dataclasses, and functions and classes. The
    code of a user's function is the text of its file and of the user's files whose parts that file imports. jprm's own
    functions count by their names alone, so that results outlive a release.

    Tokenizers count by their type: `jprm.score.files` adds their files.
    """
    return _hashed(_Walk().told(value))


def code_of(value: Any) -> dict[str, str]:
    """Returns the files of the user's own code in a value, as a digest for each name; empty for jprm's own parts."""
    walk = _Walk()
    walk.told(value)
    return dict(sorted(walk.files.items()))


def sha256_of(path: str | os.PathLike) -> str:
    """Returns the checksum of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_of(module: types.ModuleType) -> str | None:
    """Returns the text that a module was made from; None where there is no file of it."""
    text = vars(module).get("__text__")  # of `jprm.registry.defined`: what ran, not what is there now
    if text is not None:
        return text
    file = vars(module).get("__file__")
    return pathlib.Path(file).read_text() if file and file.endswith(".py") and os.path.isfile(file) else None


class _Walk:
    """One walk through a value. `files` are the user's files that it met."""

    def __init__(self):
        self.files: dict[str, str] = {}
        self._within: set[int] = set()  # objects whose parts are being told

    def told(self, value: Any) -> Any:
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
            return ["mapping", sorted(([self.told(k), self.told(v)] for k, v in value.items()), key=json.dumps)]
        if isinstance(value, set | frozenset):
            return ["set", sorted(map(self.told, value), key=json.dumps)]
        if isinstance(value, list | tuple):
            return [self.told(each) for each in value]
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, enum.Enum):
            return [self._named(type(value)), value.name]
        if hasattr(value, "tobytes") and hasattr(value, "dtype"):
            return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
        if isinstance(value, functools.partial):
            return [self.told(value.func), self.told(value.args), self.told(value.keywords)]
        if isinstance(value, types.MethodType):
            return [self.told(value.__func__), self.told(value.__self__)]
        if hasattr(value, "__wrapped__"):  # jitted or cached
            return self.told(inspect.unwrap(value))
        if isinstance(value, types.FunctionType):
            around = [*map(_contents, value.__closure__ or ()), value.__defaults__, value.__kwdefaults__]
            return [self._named(value), self.told(around)]
        if isinstance(value, types.ModuleType):
            return [value.__name__, self._module(value)]
        if isinstance(value, type) or callable(value) and hasattr(value, "__qualname__"):
            return self._named(value)
        if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return [self._named(type(value)), self.told(fields)]
        if hasattr(value, "encode") and hasattr(value, "token_id"):
            return self._named(type(value))
        cached = functools.cached_property
        kept = {
            k: v
            for k, v in getattr(value, "__dict__", {}).items()
            if not isinstance(getattr(type(value), k, 0), cached)
        }
        return [self._named(type(value)), self.told(kept)]

    def _named(self, part: Any) -> Any:
        """Returns the name of a function or class, with the code of the user's file that defines it."""
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
            code = [_compiled(each.__code__) for each in vars(part).values() if isinstance(each, types.FunctionType)]
        if code is not None:
            name = ""  # a file may be copied with its run
        elif name.partition(".")[0] == PACKAGE.name:
            name = PACKAGE.name  # its files move between releases
        return [name, getattr(part, "__qualname__", ""), code]

    def _module(self, module: types.ModuleType) -> str | None:
        """Returns a digest of a module's text and of the user's modules that it uses; None for jprm's and Python's."""
        file = _file(module)
        text = None if file.startswith(f"{PACKAGE}{os.sep}") or _standard(file) else text_of(module)
        if text is None:
            return None
        code = hashlib.sha256(text.encode()).hexdigest()[:16]
        if file in self.files or file.startswith(LIBRARIES):  # what a library uses is of its release
            self.files[file] = code
            return code
        self.files[file] = code
        used = {value if isinstance(value, types.ModuleType) else _home(value) for value in vars(module).values()}
        own = [each for each in used if each is not None and not _file(each).startswith(LIBRARIES)]
        return _hashed([code, [self._module(each) for each in sorted(own, key=lambda each: each.__name__)]])


def _hashed(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _home(value: Any) -> types.ModuleType | None:
    """Returns the module that defines a function or class."""
    return sys.modules.get(value.__module__ or "") if isinstance(value, type | types.FunctionType) else None


def _file(module: types.ModuleType) -> str:
    return os.path.realpath(vars(module).get("__file__") or "")


def _standard(file: str) -> bool:
    """Returns whether a file is of Python's own library, in whose folder the libraries' may be."""
    return file.startswith(STANDARD) and not file.startswith(LIBRARIES)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _compiled(code: types.CodeType) -> str:
    """Returns a digest of a function that no file holds."""
    inner = [_compiled(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
    return _hashed([code.co_code.hex(), code.co_names, inner])
