"""Files inside packages: pages, styles and scripts."""

from __future__ import annotations

from importlib import resources


def bytes_of_file(file: str) -> bytes:
    """Returns the bytes of `package:name`."""
    package, name = file.split(":")
    return resources.files(package).joinpath(name).read_bytes()


def text_of_file(file: str) -> str:
    """Returns the text of `package:name`."""
    return bytes_of_file(file).decode()


def names_in(folder: str) -> list[str]:
    """Returns the names of the files in `package:folder`."""
    package, name = folder.split(":")
    return sorted(file.name for file in resources.files(package).joinpath(name).iterdir())
