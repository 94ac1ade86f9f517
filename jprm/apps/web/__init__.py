"""Shared by servers and pages, without a web framework: listen options, and packaged files."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import re
from importlib import resources
from typing import Annotated, Any

from jprm.apps import FIRST, Hidden
from jprm.tree import ReasoningTree


@dataclasses.dataclass(frozen=True)
class Listen:
    """Address and request limits of a server.

    Attributes:
      host: The address to listen on. A key is required unless it is a loopback address.
      port: The port to listen on; 0 takes a free one.
      hosts: Further names under which clients may address the server, besides the host and localhost. A browser on
        another site cannot fake them.
      root_path: The path under which a proxy exposes the server, e.g. /prm, whether or not the proxy strips it.
      origins: Sites whose pages may call the server from a browser, e.g. https://example.org. Default: none.
      body_bytes: The largest request body in bytes.
      body_seconds: The time limit for a request's headers, and then for its body.
    """

    host: Annotated[str, FIRST] = "127.0.0.1"
    port: Annotated[int, FIRST] = 8000
    hosts: Hidden[tuple[str, ...]] = ()
    root_path: Hidden[str] = ""
    origins: Hidden[tuple[str, ...]] = ()
    body_bytes: Hidden[int] = 8 * 2**20
    body_seconds: Hidden[float] = 30.0

    def __post_init__(self):
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port is {self.port}: it must be from 0 to 65535")
        for field in ("body_bytes", "body_seconds"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} is {getattr(self, field)}: it must be above 0")
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            raise ValueError(f"root_path is {self.root_path!r}: it must begin with / and not end with it, such as /prm")
        if "*" in self.origins:
            raise ValueError("origins has '*': name the sites whose pages may call the server")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server: the host is `localhost` or a loopback address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def bytes_of_file(file: str) -> bytes:
    """Reads a packaged file, e.g. `jprm.apps.web:base.css`. Raises FileNotFoundError if the package lacks it."""
    package, name = file.split(":")
    return resources.files(package).joinpath(name).read_bytes()


def text_of_file(file: str) -> str:
    """Reads the UTF-8 text of a packaged file, e.g. `jprm.apps.web:chain.js`, like `bytes_of_file`."""
    return bytes_of_file(file).decode()


def names_in(folder: str) -> list[str]:
    """Returns the sorted names in a packaged folder, e.g. `jprm.apps.web:katex/fonts`.

    Raises FileNotFoundError if the package lacks it.
    """
    package, name = folder.split(":")
    return sorted(file.name for file in resources.files(package).joinpath(name).iterdir())


def around(tree: ReasoningTree) -> list[dict[str, Any]]:
    """Returns the context shown on a page around each step of a message tree, one dict per step in `tree.steps`.

    `before`: [role, text] of the messages since the previous turn, without the problem, which pages show above.
    `thoughts`: reasoning of the turn, at its first step, else "". `calls`: [name, arguments as text] of its tool calls,
    at its last step, else []. See `around` in chain.js.
    """
    nodes, shown = tree.nodes, []
    goes_on = {node.parent for node in nodes if node.continues}
    first: dict[int, int] = {}  # the node with which each step's message begins
    for i in tree.steps:
        first[i] = first[nodes[i].parent] if nodes[i].continues else i
        message, before, at = nodes[first[i]].extra, [], nodes[i].parent
        while at >= 0 and not nodes[at].is_step:
            if nodes[at].text != tree.problem:
                before.insert(0, [nodes[at].role, nodes[at].text])
            at = nodes[at].parent
        thoughts = message.get("reasoning_content") or message.get("reasoning") or ""
        calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
        shown.append({
            "before": before,
            "thoughts": "" if nodes[i].continues else thoughts,
            "calls": [] if i in goes_on else [[call["name"], _text(call.get("arguments"))] for call in calls],
        })  # fmt: skip
    return shown


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
