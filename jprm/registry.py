"""Names in an experiment: entries of a registry, or objects of the user's own module, written `module:NAME`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


def find(name: str, registry: Mapping[str, Any], what: str, kind: type = object) -> Any:
    """Returns the entry `name` of `registry`, or the object NAME of the module for `module:NAME`.

    Raises ValueError, naming `what` and the known names, where there is no such entry, module or object, or where the
    object is of another type than `kind`.
    """
    if name in registry:
        return registry[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"{what}={name!r} is not one of {', '.join(registry)}, nor of the form module:NAME")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{what}={name!r}: {error}. Put the module on PYTHONPATH and name an object in it") from error
    if not isinstance(found, kind):
        raise ValueError(f"{what}={name!r} is a {type(found).__name__}, not a {kind.__module__}.{kind.__name__}")
    return found
