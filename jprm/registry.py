"""Names of parts: entries of a registry, or objects of the user's own, written `module:NAME` or `FILE.py:NAME`."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import itertools
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any


class ForeignCode(ValueError):
    """Raised for a name that came with a folder and stands for code of it."""


class MissingPart(ValueError):
    """A part's module, file or object that is not there."""


def find(name: str, registry: Mapping[str, Any], what: str, kind: Any = object, *, files: bool = False) -> Any:
    """Returns the entry `name` of `registry`, or the object NAME of the module for `module:NAME`.

    An entry may itself be written `module:NAME`: its module is imported when the entry is asked for.

    With `files` it may be the object NAME of a Python file as well, `FILE.py:NAME`. That is for names that a person
    gives to a command. A name that comes with a model must not have it run a file that lies beside it.

    Raises MissingPart, naming `what`, where there is no such module, file or object. Raises ValueError where there is
    no such entry, with the known names, or where the object is of another type than `kind`.
    """
    entry = registry.get(name)
    if entry is not None and not isinstance(entry, str):
        return entry
    place, colon, attribute = (entry or name).rpartition(":")
    if not colon:
        forms = "module:NAME or FILE.py:NAME" if files else "module:NAME"
        raise ValueError(f"{what}={name!r} is not one of {', '.join(registry)}, nor of the form {forms}")
    if files and place.endswith(".py"):
        found = _of_file(pathlib.Path(place), attribute, f"{what}={name!r}")
    else:
        try:
            found = getattr(importlib.import_module(place), attribute)
        except (ImportError, AttributeError) as error:
            remedy = "Put the module on PYTHONPATH and name an object in it"
            raise MissingPart(f"{what}={name!r}: {error}. {remedy}") from error
    if not isinstance(found, kind):
        raise ValueError(f"{what}={name!r} is a {type(found).__name__}, not a {kind.__module__}.{kind.__name__}")
    return found


def check_foreign(name: str, folder: str | os.PathLike, what: str) -> None:
    """Raises ForeignCode where a `module:NAME` that came with a folder would run code of it or of the current folder.

    A stranger's folder must not have its own files imported. Python looks in the current folder without being told to,
    in notebooks and by `python -m`, and the folder may be below it. A module that is imported already runs nothing.
    """
    place, colon, _ = name.rpartition(":")
    if not colon or place in sys.modules or place.partition(".")[0] == __package__:  # jprm itself is running
        return
    for i, spec in enumerate(_specs(place)):
        files = [
            *(spec.submodule_search_locations or ()),
            *([spec.origin] if spec.has_location and spec.origin else ()),
        ]
        if any(_within(file, folder) for file in files):
            raise ForeignCode(f"{what}={name!r}: its module is in the folder {folder}, whose code is never run")
        if i == 0 and files and os.path.realpath(os.path.dirname(files[0])) == _unasked():
            raise ForeignCode(
                f"{what}={name!r}: its module is in the current folder, where names that come with a model are not"
                " looked for. If the module is yours, name its folder in PYTHONPATH"
            )


def _specs(place: str) -> Iterator[importlib.machinery.ModuleSpec]:
    """Yields where a module and its parents would be imported from, outermost first, and imports none of them."""
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
    """Returns the current folder if Python put it into the search path, and neither PYTHONPATH nor the user did."""
    here, named = os.getcwd(), [*sys.path[1:], *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    silent = "" in sys.path or os.path.realpath(sys.path[0]) == here
    return here if silent and here not in map(os.path.realpath, filter(None, named)) else None


def _of_file(path: pathlib.Path, attribute: str, where: str) -> Any:
    if not path.is_file():
        raise MissingPart(f"{where}: there is no file {path}")
    names = defined(str(path), path.read_text())
    if attribute not in names:
        raise MissingPart(f"{where}: {path} defines no {attribute}")
    return names[attribute]


@functools.cache
def defined(path: str, text: str) -> dict[str, Any]:
    """Runs the text of a Python file, once, and returns what it defines."""
    digest = hashlib.sha256(f"{path}\n{text}".encode()).hexdigest()[:16]  # two files may share a stem
    spec = importlib.machinery.ModuleSpec(f"jprm_own_{pathlib.Path(path).stem}_{digest}", loader=None)
    module = importlib.util.module_from_spec(spec)
    module.__file__, sys.modules[spec.name] = path, module  # a dataclass of the file looks there for names
    module.__dict__["__text__"] = text
    exec(compile(text, path, "exec"), module.__dict__)
    return module.__dict__
