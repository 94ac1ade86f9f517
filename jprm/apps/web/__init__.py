"""What the servers share. Here is what needs no web framework: where a server listens, and the files of its pages."""

from __future__ import annotations

import dataclasses
import ipaddress
from importlib import resources


@dataclasses.dataclass(frozen=True)
class Listen:
    """Where a server listens and what it accepts.

    Attributes:
      host: The address to listen on. Any but a loopback address needs a key.
      port: The port to listen on; 0 takes a free one.
      hosts: Names that clients may address the server by, besides the host and localhost. A browser on another site
        cannot fake them.
      origins: Sites whose pages may call the server from a browser, such as https://example.org. Default: none.
      body_bytes: Bytes of the largest request.
      body_seconds: Seconds in which a request's headers must arrive, and then its body.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    body_bytes: int = 8 * 2**20
    body_seconds: float = 30.0

    def __post_init__(self):
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port is {self.port}: it must be from 0 to 65535")
        for field in ("body_bytes", "body_seconds"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} is {getattr(self, field)}: it must be above 0")
        if "*" in self.origins:
            raise ValueError("origins has '*': name the sites whose pages may call the server")

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


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
