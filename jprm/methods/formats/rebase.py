"""Experiments as a command runs them: `--set base=OTHER` takes the other model's shape and tokenizer along, and
addresses on the Hub name commits."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from jprm.checkpoints.base import model_config
from jprm.experiment import Experiment, load, override
from jprm.io.storage import HUB
from jprm.options import assigned

T = TypeVar("T")


def loaded(path: str | os.PathLike, settings: Sequence[str] = ()) -> Experiment:
    """Returns the experiment of a file, changed by `a.b=value` settings.

    With another base, the model's fields are the new base's, but for those that the settings name and those that the
    experiment chose itself, which are not what its own base says. A tokenizer that was the base is the new one.

    Raises ValueError or FileNotFoundError as `jprm.experiment.load`, and where the file's own base cannot be read.
    """
    return rebased(load(path), settings)


def rebased(experiment: Experiment, settings: Sequence[str]) -> Experiment:
    """Returns the experiment with settings, as `loaded` says."""
    changed, named = override(experiment, settings), {assigned(setting)[0] for setting in settings}
    if changed.base == experiment.base or not changed.base or not experiment.base:
        return changed
    try:
        before = model_config(experiment.base)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"--set base={changed.base}: which fields of `model` are those of {experiment.base} cannot be told:"
            f" {error}. Write the experiment for the new base: model=base.model_config(BASE)"
        ) from None
    after, model = model_config(changed.base), {}
    for field in dataclasses.fields(after):
        value = getattr(changed.model, field.name)
        chosen = f"model.{field.name}" in named or value != getattr(before, field.name)
        model[field.name] = value if chosen else getattr(after, field.name)
    keeps = "tokenizer" in named or experiment.tokenizer != experiment.base
    tokenizer = changed.tokenizer if keeps else changed.base
    return dataclasses.replace(changed, model=type(after)(**model), tokenizer=tokenizer)


def pinned(config: T) -> T:
    """Returns an experiment whose addresses on the Hub name commits: what its run records, and will be again."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(cast(Any, config))}
    addresses = {name: text for name, text in fields.items() if isinstance(text, str) and text.startswith(HUB)}
    if not addresses:
        return config
    from jprm.methods.formats.hub import commit_of  # its packages take a while to import

    return dataclasses.replace(cast(Any, config), **{name: commit_of(text) for name, text in addresses.items()})
