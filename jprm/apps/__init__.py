"""What people meet: the command line, servers, annotation, reports, plans. Here are options that several have."""

from typing import Annotated, Any, TypeVar, get_args

from tyro.conf import Suppress, arg

from jprm.model import Dtype


def one_of(choices: Any) -> Any:
    """Returns the tyro annotation for an optional option that takes one of a Literal's strings.

    `choices` is the Literal type, e.g. `Literal["f32", "bf16"]`: `--help` shows `{f32,bf16}` and no default.
    """
    return arg(metavar="{" + ",".join(get_args(choices)) + "}", help_behavior_hint="")


Name = Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")]
Setting = TypeVar("Setting")
Hidden = Suppress[Setting]
"""A config field that is no option of its own: `--set NAME=VALUE` changes it, if the command has `--set`."""

FIRST = "first"
"""Marks an option, or a group's options, that `--help` shows among the first; so it does required ones."""

StoredAs = Annotated[Dtype | None, one_of(Dtype)]
