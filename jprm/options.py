"""Typed options: JSON values, and texts of a command line, as the fields of dataclasses.

Experiments, readers, objectives, policies, judges and adapters are all read by `from_json`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal


class OptionError(ValueError):
    """A field that is unknown, missing or of another type: `FIELD: reason`, with the known fields where that helps."""

    def __init__(self, field: str, reason: str, known: str = ""):
        super().__init__(f"{field}: {reason}" + (f"; the fields are {known}" if known else ""))
        self.field, self.reason, self.known = field, reason, known


def from_json(kind: Any, value: Any, where: str = "", like: Any = None) -> Any:
    """Returns a JSON value as an instance of a type: plain types, Literal, containers, unions and dataclasses of them.

    Args:
      where: the field that holds the value, for errors.
      like: an instance of the dataclass `kind`, from which fields that the value does not name are taken.

    Raises:
      OptionError: a field that is unknown, missing or of another type.
    """
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise OptionError(where or kind.__name__, f"{value!r} is not an object of {described(kind)}")
        values = values_of(typing.get_type_hints(kind), value, where)
        if like is not None:
            return dataclasses.replace(like, **values)
        if missing := [
            field.name for field in dataclasses.fields(kind) if _required(field) and field.name not in values
        ]:
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
    if origin is Literal and value in args:
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
    wanted = f"one of {', '.join(map(str, args))}" if origin is Literal else f"a {_name(kind)}"
    raise OptionError(where, f"{value!r} is not {wanted}")


def values_of(kinds: Mapping[str, Any], values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Returns JSON values by field, each as its field's type. Raises OptionError for an unknown field or another type.

    Args:
      kinds: the type of every field.
      where: what holds the fields, for errors.
    """
    within = {name: f"{where}.{name}".lstrip(".") for name in values}
    if unknown := [name for name in values if name not in kinds]:
        raise OptionError(within[unknown[0]], "is no known field", described(kinds))
    return {name: from_json(kinds[name], value, within[name]) for name, value in values.items()}


def frozen(value: Any, where: str) -> Any:
    """Returns a JSON value as one that hashes. Raises OptionError, naming the field, where it is no JSON value."""
    from flax.core import FrozenDict  # readers of text need no jax

    if isinstance(value, Mapping):
        return FrozenDict({name: frozen(v, f"{where}.{name}") for name, v in value.items()})
    if isinstance(value, list | tuple):
        return tuple(frozen(v, where) for v in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise OptionError(where, f"{value!r} is a {type(value).__name__}, which JSON does not have")


def assigned(assignment: str) -> tuple[str, Any]:
    """Returns name and value of `name=value`: the value as JSON, or as text where it is no JSON.

    Raises ValueError where there is no name or no equals sign.
    """
    name, equals, text = assignment.partition("=")
    if not name.strip() or not equals:
        raise ValueError(f"--set {assignment!r}: not of the form KEY=VALUE")
    try:
        return name.strip(), json.loads(text)
    except ValueError:
        return name.strip(), text


def described(kinds: Any) -> str:
    """Returns the fields of a dataclass, or of types by name, with their types: `margin (float), power (1 or 2)`."""
    kinds = kinds if isinstance(kinds, Mapping) else typing.get_type_hints(kinds)
    return ", ".join(f"{name} ({_name(kind)})" for name, kind in kinds.items()) or "none"


def _name(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else _short(kind)


def _short(kind: Any) -> str:
    return str(kind).replace("typing.", "").replace("collections.abc.", "")


def _required(field: dataclasses.Field) -> bool:
    missing = dataclasses.MISSING
    return field.init and field.default is missing and field.default_factory is missing
