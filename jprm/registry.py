"""Names of parts: entries of a registry, or objects of the user's own, written `module:NAME` or `FILE.py:NAME`."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import pathlib
import sys
from collections.abc import Mapping
from typing import Any


def find(name: str, registry: Mapping[str, Any], what: str, kind: Any = object, *, files: bool = False) -> Any:
    """Returns the entry `name` of `registry`, or the object NAME of the module for `module:NAME`.

    With `files` it may be the object NAME of a Python file as well, `FILE.py:NAME`. That is for names that a person
    gives to a command. A name that comes with a model must not have it run a file that lies beside it.

    Raises ValueError, naming `what` and the known names, where there is no such entry, module, file or object, or where
    the object is of another type than `kind`.
    """
    if name in registry:
        return registry[name]
    place, colon, attribute = name.rpartition(":")
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
            raise ValueError(f"{what}={name!r}: {error}. {remedy}") from error
    if not isinstance(found, kind):
        raise ValueError(f"{what}={name!r} is a {type(found).__name__}, not a {kind.__module__}.{kind.__name__}")
    return found


def _of_file(path: pathlib.Path, attribute: str, where: str) -> Any:
    if not path.is_file():
        raise ValueError(f"{where}: there is no file {path}")
    names = defined(str(path), path.read_text())
    if attribute not in names:
        raise ValueError(f"{where}: {path} defines no {attribute}")
    return names[attribute]


@functools.cache
def defined(path: str, text: str) -> dict[str, Any]:
    """Runs the text of a Python file, once, and returns what it defines."""
    spec = importlib.machinery.ModuleSpec(f"jprm_own_{pathlib.Path(path).stem}", loader=None)
    module = importlib.util.module_from_spec(spec)
    module.__file__, sys.modules[spec.name] = path, module  # a dataclass of the file looks there for names
    exec(compile(text, path, "exec"), module.__dict__)
    return module.__dict__
