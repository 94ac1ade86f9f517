"""Types of arguments that several commands take."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

OnError = Literal["stop", "skip"]
Settings = Annotated[tuple[str, ...], arg(name="set", metavar="KEY=VALUE ...")]
Files = Annotated[tuple[Path, ...], arg(metavar="FILE ...")]
Folder = Annotated[Path, arg(metavar="DIR")]
Json = Annotated[Path, arg(name="json", metavar="OUT")]
