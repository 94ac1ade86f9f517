"""Typed options: reads JSON values and command-line texts into dataclasses, and finds models and parts by name.

Experiments, readers, objectives, policies, judges and adapters are all read by `from_json`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import itertools
import json
import os
import pathlib
import reprlib
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from jprm.io.storage import HUB, Found, Given, Place, path_of

_REPR = reprlib.Repr()  # a request's value may have millions of numbers
_REPR.maxlist = _REPR.maxdict = 20
_REPR.maxstring = _REPR.maxother = 300


class OptionError(ValueError):
    """An unknown, missing or mistyped field: `FIELD: reason`, with the known fields if that helps."""

    def __init__(self, field: str, reason: str, known: str = ""):
        super().__init__(f"{field}: {reason}" + (f"; the fields are {known}" if known else ""))
        self.field, self.reason, self.known = field, reason, known


def from_json(kind: Any, value: Any, where: str = "", like: Any = None) -> Any:
    """Converts a JSON value to a type: bool, int, float, str, Literal, containers, unions, dataclasses of these.

    Lists become tuples if the type is one, objects become FrozenDict for a Mapping, and ints become floats. A union
    takes the first type that fits, a Sequence also a text. Omitted fields are those of `like` (a `kind`), or defaults.

    Raises OptionError, naming the field within `where` (e.g. `data.rows`), if it is unknown, missing or of the wrong
    type. ValueErrors of a dataclass's own checks pass.
    """
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise OptionError(where or kind.__name__, f"{_REPR.repr(value)} is not an object of {described(kind)}")
        values = values_of(typing.get_type_hints(kind), value, where)
        if like is not None:
            return dataclasses.replace(like, **values)
        absent = [field for field in dataclasses.fields(kind) if field.init and field.name not in values]
        if missing := [f.name for f in absent if f.default is f.default_factory is dataclasses.MISSING]:
            raise OptionError(where or kind.__name__, f"missing {', '.join(missing)}", described(kind))
        return kind(**values)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for choice in args:
            with contextlib.suppress(ValueError):
                return from_json(choice, value, where)
    if origin is Sequence and isinstance(value, list | str):
        return value if isinstance(value, str) else [from_json(args[0], v, where) for v in value]
    if origin is tuple and isinstance(value, list | tuple):
        if args[-1] is Ellipsis:
            return tuple(from_json(args[0], v, where) for v in value)
        if len(args) == len(value):
            return tuple(from_json(a, v, where) for a, v in zip(args, value, strict=True))
    if kind is Any or origin is Literal and value in args:
        return value
    if origin is Mapping and isinstance(value, Mapping):
        if args[1] is not Any:
            value = {name: from_json(args[1], v, f"{where}.{name}") for name, v in value.items()}
        return frozen(value, where)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # of an integer beyond the largest float
            return float(value)
    if isinstance(kind, type) and not isinstance(kind, types.GenericAlias) and type(value) is kind:
        return value
    if not isinstance(value, list | dict) and any(typing.get_origin(part) is tuple for part in (kind, *args)):
        raise OptionError(where, f"{value!r} is no list: write {where}='{json.dumps([value])}'")
    article = "an" if _name(kind)[0] in "aio" else "a"
    wanted = f"one of {', '.join(map(str, args))}" if origin is Literal else f"{article} {_name(kind)}"
    raise OptionError(where, f"{_REPR.repr(value)} is not {wanted}")


def values_of(kinds: Mapping[str, Any], values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Returns `values` converted by `from_json` to the types `kinds` of their fields; absent fields stay absent.

    Raises OptionError for unknown or mistyped fields, with `where`, the name of the enclosing field.
    """
    within = {name: f"{where}.{name}".lstrip(".") for name in values}
    if unknown := [name for name in values if name not in kinds]:
        raise OptionError(within[unknown[0]], "is no known field", described(kinds))
    return {name: from_json(kinds[name], value, within[name]) for name, value in values.items()}


def frozen(value: Any, where: str) -> Any:
    """Returns a JSON value made hashable: FrozenDict, tuple. Raises OptionError, naming `where`, for other types."""
    from flax.core import FrozenDict  # readers of text need no jax

    if isinstance(value, Mapping):
        return FrozenDict({name: frozen(v, f"{where}.{name}") for name, v in value.items()})
    if isinstance(value, list | tuple):
        return tuple(frozen(v, where) for v in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise OptionError(where, f"{value!r} is a {type(value).__name__}, which JSON does not have")


def assigned(assignment: str) -> tuple[str, Any]:
    """Returns (name, value) of `name=value`: as JSON, else a Python list or tuple (returned as list), else text.

    Raises ValueError if the name or the equals sign is missing.
    """
    name, equals, text = assignment.partition("=")
    if not name.strip() or not equals:
        raise ValueError(f"--set {assignment!r}: not of the form KEY=VALUE")
    try:
        return name.strip(), json.loads(text)
    except ValueError:
        pass
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        if isinstance(value := ast.literal_eval(text.strip()), tuple | list):
            return name.strip(), list(value)
    return name.strip(), text


def described(kinds: Any) -> str:
    """Lists fields, e.g. `margin (float), power (1 or 2)`, else "none". `kinds`: dataclass or types by name."""
    kinds = kinds if isinstance(kinds, Mapping) else typing.get_type_hints(kinds)
    return ", ".join(f"{name} ({_name(kind)})" for name, kind in kinds.items()) or "none"


def _name(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    if isinstance(kind, type) and not typing.get_args(kind):
        return kind.__name__
    return str(kind).replace("typing.", "").replace("collections.abc.", "")


# ------------------------------------------------------------------------------------------------------- names of parts
#
# A registry entry, or a user's object, written `module:NAME` or `FILE.py:NAME`.


def place_of(name: Given | Found, names: Sequence[str] = ()) -> Place:
    """Returns a model's path, unchecked; a Hub address is downloaded, and its folder in the Hub's cache returned.

    The address is `hf://OWNER/NAME[@REVISION]`; `names` are the files to download, by default all that jprm reads. A
    `Found` name from a file jprm did not write downloads nothing: it may only lead to this machine or the file's own
    bucket. Raises ValueError for other forms or places, OSError if the Hub lacks the model or is unreachable.
    """
    text = name.text if isinstance(name, Found) else os.fspath(name)
    if text.startswith(HUB):
        folder = find_part("jprm.methods.formats.hub:folder", {}, "hub")
        return folder(text, tuple(names), name if isinstance(name, Found) and not name.written_here else None)
    return name.data() if isinstance(name, Found) else path_of(name)


class ForeignCode(ValueError):
    """A name that came with a folder would import the folder's code."""


class MissingPart(ValueError):
    """The module, file or object of a part does not exist."""


def find_part(name: str, registry: Mapping[str, Any], what: str, kind: Any = object, *, files: bool = False) -> Any:
    """Returns the registry entry `name`, or imports the object `module:NAME`.

    A registry entry may itself be the text `module:NAME`, which is imported on demand. With `files`, `name` may also be
    `FILE.py:NAME`, executed once per content. Pass it only for names that the user typed: a name that came with a model
    must not execute a file beside it.

    Raises MissingPart, naming `what`, if the module, file or object does not exist. Raises ValueError if the entry is
    unknown (with the known names), or the object is not an instance of `kind`. Errors of the executed code pass.
    """
    entry = registry.get(name)
    if entry is not None and not isinstance(entry, str):
        return entry
    place, colon, attribute = (entry or name).rpartition(":")
    if not colon:
        forms = "module:NAME or FILE.py:NAME" if files else "module:NAME"
        near = difflib.get_close_matches(name, registry, n=2)
        meant = f". Did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"{what}={name!r} is not one of {', '.join(registry)}, nor of the form {forms}{meant}")
    if files and place.endswith(".py"):
        if not (path := pathlib.Path(place)).is_file():
            raise MissingPart(f"{what}={name!r}: there is no file {path}")
        if attribute not in (names := defined(str(path), path.read_text("utf-8"))):
            raise MissingPart(f"{what}={name!r}: {path} defines no {attribute}")
        part = names[attribute]
    else:
        try:
            part = getattr(importlib.import_module(place), attribute)
        except (ImportError, AttributeError) as error:
            remedy = "Put the module on PYTHONPATH and name an object in it"
            if place.endswith(".py"):
                remedy = f"This option takes a module: write {pathlib.Path(place).stem}:{attribute}. {remedy}"
            raise MissingPart(f"{what}={name!r}: {error}. {remedy}") from error
    if not isinstance(part, kind):
        raise ValueError(f"{what}={name!r} is a {type(part).__name__}, not a {kind.__module__}.{kind.__name__}")
    return part


def check_foreign(name: str, folder: str | os.PathLike, what: str) -> None:
    """Raises ForeignCode if a `module:NAME` from a folder would import code from it or from the current folder.

    A downloaded folder must not execute its own files. Python itself looks in the current folder, in notebooks and with
    `python -m`, and the downloaded folder may be below it. A module that is already imported executes nothing new, and
    a name without colon is no module. `what` names the option in the error.
    """
    place, colon, _ = name.rpartition(":")
    if not colon or place in sys.modules or place.partition(".")[0] == __package__:  # jprm itself is running
        return
    if place.partition(".")[0] in {"", *sys.stdlib_module_names}:  # some do things when they are imported
        raise ForeignCode(f"{what}={name!r}: is not a module with parts")
    for i, spec in enumerate(_specs(place)):
        origin = [spec.origin] if spec.has_location and spec.origin else []
        files = [*(spec.submodule_search_locations or ()), *origin]
        if any(_within(file, folder) for file in files):
            raise ForeignCode(f"{what}={name!r}: its module is in the folder {folder}, whose code is never run")
        if i == 0 and files and os.path.realpath(os.path.dirname(files[0])) == _unasked():
            raise ForeignCode(
                f"{what}={name!r}: its module is in the current folder, where names that come with a model are not"
                " looked for. If the module is yours, name its folder in PYTHONPATH"
            )


def _specs(place: str) -> Iterator[importlib.machinery.ModuleSpec]:
    """Yields import specs of a module's parents and itself, outermost first, without importing any."""
    path = None
    for name in itertools.accumulate(place.split("."), "{}.{}".format):
        spec = next((spec for finder in sys.meta_path if (spec := finder.find_spec(name, path))), None)
        if spec is None:
            return
        yield spec
        path = spec.submodule_search_locations
        if path is None:
            return


def _within(file: str, folder: str | os.PathLike) -> bool:
    inside = [(resolve(file), resolve(folder)) for resolve in (os.path.abspath, os.path.realpath)]
    return any(os.path.commonpath(pair) == pair[1] for pair in inside)


def _unasked() -> str | None:
    """Returns the current folder if Python searches it by default, not by the user's PYTHONPATH or sys.path.

    An empty entry in PYTHONPATH (e.g. from `PYTHONPATH=$PYTHONPATH:/x`) or a relative one in sys.path is no choice.
    """
    here, variable = os.getcwd(), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    empty = len(variable) > 1 and "" in variable
    added = [path for path in sys.path[1:] if os.path.isabs(path)]
    places = [os.path.realpath(path) for path in [*filter(None, variable), *([] if empty else added)]]
    looks = os.path.realpath(sys.path[0]) == here or any(
        not os.path.isabs(path) and os.path.realpath(path) == here for path in sys.path
    )
    silent = looks or (empty and here in map(os.path.realpath, sys.path))
    return here if silent and here not in places else None


def run(path: str, text: str) -> dict[str, Any]:
    """Executes a file's text as a new module in `sys.modules`, at every call (`defined`: once); returns its globals.

    `sys.path` stays as it is; `path` becomes `__file__`. SyntaxError and all errors of the code pass.
    """
    digest = hashlib.sha256(f"{path}\n{text}".encode()).hexdigest()[:16]  # two files may share a stem
    spec = importlib.machinery.ModuleSpec(f"jprm_own_{pathlib.Path(path).stem}_{digest}", loader=None)
    module = importlib.util.module_from_spec(spec)
    module.__file__, sys.modules[spec.name] = path, module  # a dataclass of the file looks there for names
    module.__dict__["__text__"] = text
    exec(compile(text, path, "exec"), module.__dict__)
    return module.__dict__


defined = functools.cache(run)
"""Cached `run`: a file is executed once, so that all callers share its objects."""
