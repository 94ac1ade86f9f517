"""What people meet: the command line, servers, annotation, reports, plans. Here are options that several have."""

from typing import Annotated, Any, TypeVar, get_args

from tyro.conf import Suppress, arg

from jprm.model import Dtype


def one_of(choices: Any) -> Any:
    """Returns the annotation of an option that takes one of a Literal's values or is left out."""
    return arg(metavar="{" + ",".join(get_args(choices)) + "}", help_behavior_hint="")


Name = Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")]
Setting = TypeVar("Setting")
Hidden = Suppress[Setting]
"""A config field that is no option of its own: `--set NAME=VALUE` changes it, if the command has `--set`."""

FIRST = "first"
"""Marks an option, or a group's options, that `--help` shows among the first; so it does required ones."""

StoredAs = Annotated[Dtype | None, one_of(Dtype)]
