"""Types of arguments that several commands take, and configs as groups of options."""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from tyro.conf import Suppress, arg


def one_of(choices: Any) -> Any:
    """Returns the annotation of an option that takes one of a Literal's values or is left out."""
    return arg(metavar="{" + ",".join(get_args(choices)) + "}", help_behavior_hint="")


OnError = Literal["stop", "skip"]
Settings = Annotated[tuple[str, ...], arg(name="set", metavar="KEY=VALUE ...", help_behavior_hint="")]
Files = Annotated[tuple[Path, ...], arg(metavar="FILE ...")]
Folder = Annotated[Path, arg(metavar="DIR")]
PolicyFile = Annotated[Path, arg(metavar="P")]
Adapter = Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")]
Distributed = Annotated[str | None, arg(metavar="WHERE", help_behavior_hint="")]
Json = Annotated[Path, arg(name="json", metavar="OUT")]


def flat(options: type) -> Any:
    """Returns the type of a parameter whose fields are options of the command itself."""
    return Annotated[options, arg(name="")]


def options_of(config: type, hidden: Collection[str] = ()) -> type:
    """Returns a twin of a config that tyro can fill: without checks, whose errors it would rewrite.

    `hidden` fields are no options and keep their defaults.
    """
    fields = [(f.name, Suppress[Any], f.default) for f in dataclasses.fields(config) if f.name in hidden]
    twin = {"__doc__": "", "__post_init__": lambda self: None}
    return dataclasses.make_dataclass(config.__name__, fields, bases=(config,), frozen=True, namespace=twin)


def built(config: type, options: Any, **more: Any) -> Any:
    """Returns the config itself from options that tyro filled, with `more` fields replaced."""
    return config(**{f.name: getattr(options, f.name) for f in dataclasses.fields(config)} | more)


def print_counts(counts: Mapping[str, Any], path: Path) -> None:
    """Reports a written file and what was counted."""
    print(f"{path}: written. " + ", ".join(f"{name}: {count}" for name, count in counts.items()))


def opened(model: Path, adapter: str | None) -> Any:
    """Returns what evaluations take for a model: its folder, or the loaded model if an adapter is named."""
    if adapter is None:
        return model
    from jprm.loading import load

    return load(model, adapter=adapter)
