"""Types of arguments that several commands take."""

from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

OnError = Literal["stop", "skip"]
Settings = Annotated[tuple[str, ...], arg(name="set", metavar="KEY=VALUE ...")]
Files = Annotated[tuple[Path, ...], arg(metavar="FILE ...")]
Folder = Annotated[Path, arg(metavar="DIR")]
Adapter = Annotated[str | None, arg(metavar="NAME")]
Distributed = Annotated[str | None, arg(metavar="WHERE")]
Json = Annotated[Path, arg(name="json", metavar="OUT")]


def opened(model: Path, adapter: str | None) -> Any:
    """What the library takes for a model: its folder, or the model itself where an adapter is named for it."""
    if adapter is None:
        return model
    from jprm.loading import load

    return load(model, adapter=adapter)
