"""A policy from its description in a file."""

from __future__ import annotations

import dataclasses
import os
import pathlib

from jprm.jsonl import parse
from jprm.policy.protocol import Policy
from jprm.policy.server import ServerConfig, ServerPolicy
from jprm.tree import RecordError


def load_policy(path: str | os.PathLike) -> Policy:
    """The policy that a JSON file describes: {"url": ..., "model": ...} and any other field of `ServerConfig`.

    Raises:
      RecordError: a file that is no JSON object, or has a field that is unknown, missing or of the wrong type.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        raise NotImplementedError(f"{path}: is a folder. A policy is described by a JSON file with `url` and `model`")
    where = str(path)
    settings = parse(path.read_bytes(), where)
    remedy = 'Write {"url": "http://localhost:8000/v1", "model": NAME}, with other fields of ServerConfig as needed.'
    if not isinstance(settings, dict):
        raise RecordError(where, "policy", "is no JSON object", remedy)
    fields = {field.name: field for field in dataclasses.fields(ServerConfig)}
    for name, value in settings.items():
        if name not in fields:
            raise RecordError(where, name, "is no setting of a policy", f"Use {', '.join(fields)}.")
        default = fields[name].default
        expected = (
            (int, float) if isinstance(default, float) else (type(default),) if type(default) in (int, bool) else ()
        )
        if expected and (not isinstance(value, expected) or isinstance(value, bool) != isinstance(default, bool)):
            raise RecordError(where, name, f"is {value!r}", f"Give a value such as {default!r}.")
        if name in ("url", "model", "prompt", "delimiter") and not isinstance(value, str):
            raise RecordError(where, name, f"is {value!r}, not text", remedy)
    for name in ("url", "model"):
        if name not in settings:
            raise RecordError(where, name, "is absent", remedy)
    if settings.get("endpoint", "completions") not in ("completions", "chat"):
        raise RecordError(where, "endpoint", f"is {settings['endpoint']!r}", "Use 'completions' or 'chat'.")
    try:
        return ServerPolicy(ServerConfig(**settings))
    except ValueError as error:
        raise RecordError(where, "policy", str(error), remedy) from None
