"""What people meet: the command line, servers, annotation, reports, plans. Here are options that several have."""

from typing import Annotated, Any, get_args

from tyro.conf import arg

from jprm.model import Dtype


def one_of(choices: Any) -> Any:
    """Returns the annotation of an option that takes one of a Literal's values or is left out."""
    return arg(metavar="{" + ",".join(get_args(choices)) + "}", help_behavior_hint="")


Name = Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")]
StoredAs = Annotated[Dtype | None, one_of(Dtype)]
