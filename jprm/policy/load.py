"""Loads a policy by its path: a model, or a JSON file that describes one."""

from __future__ import annotations

import dataclasses
import os
import pathlib

from jprm.jsonl import parse
from jprm.policy.protocol import Policy
from jprm.policy.server import ServerConfig, ServerPolicy
from jprm.tree import RecordError


def load_policy(path: str | os.PathLike) -> Policy:
    """Returns the policy of a path.

    A run's folder, a Hugging Face folder or a GGUF file is sampled in this process with `SamplerConfig`'s defaults. A
    JSON file is a server, {"url": ..., "model": ...} with further fields of `ServerConfig`, or a model, {"model": PATH}
    with further fields of `SamplerConfig`.

    Raises:
      RecordError: a file that is no JSON object, or has a field that is unknown, missing or of the wrong type.
      FileNotFoundError, ValueError, NotImplementedError: a model that is absent, damaged or not supported.
    """
    path = pathlib.Path(path)
    if path.is_dir() or path.suffix == ".gguf":
        from jprm.policy.sampler import load_sampler

        return load_sampler(path)
    where = str(path)
    settings = parse(path.read_bytes(), where)
    remedy = (
        'Write {"url": "http://localhost:8000/v1", "model": NAME} for a server, with other fields of ServerConfig as'
        ' needed, or {"model": FOLDER or GGUF}, with those of SamplerConfig.'
    )
    if not isinstance(settings, dict):
        raise RecordError(where, "policy", "is no JSON object", remedy)
    if "model" not in settings:
        raise RecordError(where, "model", "is absent", remedy)
    if "url" in settings:
        _check(settings, ServerConfig, where, remedy)
        if settings.get("endpoint", "completions") not in ("completions", "chat"):
            raise RecordError(where, "endpoint", f"is {settings['endpoint']!r}", "Use 'completions' or 'chat'.")
        try:
            return ServerPolicy(ServerConfig(**settings))
        except ValueError as error:
            raise RecordError(where, "policy", str(error), remedy) from None

    from jprm.policy.sampler import SamplerConfig, load_sampler

    _check(settings, SamplerConfig, where, remedy, "model")
    model = settings.pop("model")
    try:
        options = SamplerConfig(**settings)
    except ValueError as error:
        raise RecordError(where, "policy", str(error), remedy) from None
    return load_sampler(model, options)


def _check(settings: dict, kind: type, where: str, remedy: str, *more: str) -> None:
    """Raises RecordError for a setting that `kind` has no field for, or of another type than the field's default."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)} | dict.fromkeys(more, "")
    for name, value in settings.items():
        if name not in defaults:
            raise RecordError(where, name, "is no setting of a policy", f"Use {', '.join(defaults)}.")
        default = defaults[name]
        expected = (
            (int, float) if isinstance(default, float) else (type(default),) if type(default) in (int, bool) else ()
        )
        if expected and (not isinstance(value, expected) or isinstance(value, bool) != isinstance(default, bool)):
            raise RecordError(where, name, f"is {value!r}", f"Give a value such as {default!r}.")
        if name in ("url", "model", "prompt", "delimiter") and not isinstance(value, str):
            raise RecordError(where, name, f"is {value!r}, not text", remedy)
