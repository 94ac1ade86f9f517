"""Files inside packages: pages, styles and scripts."""

from __future__ import annotations

from importlib import resources


def text_of_file(file: str) -> str:
    """Returns the text of `package:name`."""
    package, name = file.split(":")
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
