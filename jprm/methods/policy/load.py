"""Loads a policy by its path: a model, or a JSON file with its description."""

from __future__ import annotations

import contextlib
import os
import typing
from collections.abc import Iterator
from typing import Any

from jprm.io.jsonl import parse
from jprm.io.outputs import stamp_of
from jprm.io.storage import path_of
from jprm.methods.policy.openai_client import ServerConfig, ServerPolicy
from jprm.methods.policy.protocol import Policy
from jprm.options import OptionError, place_of, values_of
from jprm.tree import RecordError

_BYTES = 1_000_000
"""Largest policy file in bytes, so weights named by mistake are not read."""

_REMEDY = (
    'Write {"url": "http://localhost:8000/v1", "model": NAME} for a server, with other fields of ServerConfig as'
    ' needed, or {"model": FOLDER or GGUF}, with those of SamplerConfig.'
)


def load_policy(path: str | os.PathLike, **changes: Any) -> Policy:
    """Loads the policy at a path; `changes` override fields of its file, or defaults.

    A run's folder, a Hugging Face folder or a GGUF file is sampled in this process with the defaults of
    `SamplerConfig`. A JSON file describes a server, {"url": ..., "model": ...} with further fields of `ServerConfig`,
    or a model, {"model": PATH} with further fields of `SamplerConfig`. PATH is relative to the working directory.

    A model is loaded at once; a server is not contacted before the first sample.

    Raises:
      RecordError: the file is not a JSON object, or a field is unknown, missing, out of range or of the wrong type.
      FileNotFoundError: the model, or a server's `template`, is absent.
      ValueError: the model is damaged or not supported.
      OSError: the Hub lacks the model (`hf://...`), or is unreachable.
    """
    path = place_of(path)
    if not (path.is_dir() or path.is_file()):  # a pipe would be waited for
        raise FileNotFoundError(f"{path}: no such file or folder. Give a model's (or hf://...), or a policy's JSON")
    if path.is_dir() or path.suffix == ".gguf":
        return policy_of({"model": str(path), **changes}, str(path))
    return policy_of(policy_settings(path) | changes, str(path))


def policy_settings(path: str | os.PathLike) -> dict[str, Any]:
    """Returns the object in a policy's JSON file, unchecked, e.g. {"url": ..., "model": ...}.

    Raises RecordError for other content or more than 1 MB, FileNotFoundError unless `path` is a file.
    """
    path = path_of(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file. Give a policy's JSON file")
    where = str(path)
    if stamp_of(path)["bytes"] > _BYTES:
        raise RecordError(where, "policy", f"has more than {_BYTES:,} bytes", _REMEDY)
    settings = parse(path.read_bytes(), where)
    if not isinstance(settings, dict):
        raise RecordError(where, "policy", "is no JSON object", _REMEDY)
    return settings


def policy_of(settings: dict[str, Any], where: str) -> Policy:
    """Builds the policy described by the fields of a JSON file, e.g. {"url": ..., "model": ...}.

    With `url` it is a `ServerPolicy`, else a `Sampler` whose weights are loaded here. Raises as `load_policy`; `where`
    names the file in errors.
    """
    if "model" not in settings:
        raise RecordError(where, "model", "is absent", _REMEDY)
    if "url" in settings:
        with refusing(where, "policy", _REMEDY):
            return ServerPolicy(_checked(ServerConfig, settings))

    from jprm.methods.policy.sampler import SamplerConfig, load_sampler

    settings = dict(settings)
    model = settings.pop("model")
    if not isinstance(model, str) or not model:
        raise RecordError(where, "model", f"is {model!r}, not the path of a folder or a GGUF file", _REMEDY)
    with refusing(where, "policy", _REMEDY):
        options = _checked(SamplerConfig, settings)
    return load_sampler(model, options)


def _checked(kind: type, settings: dict[str, Any]) -> Any:
    """Builds the config with the settings as written, since a policy's name depends on them; raises OptionError."""
    values_of(typing.get_type_hints(kind), settings)
    return kind(**settings)


@contextlib.contextmanager
def refusing(where: str, field: str, remedy: str) -> Iterator[None]:
    """Converts the block's ValueErrors to RecordErrors at `where`, in `field`, with `remedy`.

    An OptionError gives its own `field`, and its `known` values as the remedy. Other errors, e.g. FileNotFoundError,
    pass.
    """
    try:
        yield
    except OptionError as error:
        raise RecordError(where, error.field, error.reason, f"Use {error.known}." if error.known else remedy) from None
    except ValueError as error:
        raise RecordError(where, field, str(error), remedy) from None
