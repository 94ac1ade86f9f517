"""The blocks of a page of documentation, run as a reader runs them: each command in a new process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
COMMANDS = f"""
jprm() {{ PYTHONPATH="{REPOSITORY}:${{PYTHONPATH:-}}" "{sys.executable}" -P -m jax_prm "$@"; }}
python() {{ PYTHONPATH="{REPOSITORY}:${{PYTHONPATH:-}}" "{sys.executable}" "$@"; }}
"""
"""`jprm` and `python` of this tree. As where jprm is installed, the folder of a command is not on Python's path."""


def text(page: str) -> str:
    return (REPOSITORY / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[tuple[str, str, str]]:
    """A page's fenced blocks: the name of the file that a block is, or nothing; its language; its text."""
    return re.findall(r"(?:^`([\w.]+)`:\n\n)?^```(\w+)\n(.*?)^```$", text(page), re.DOTALL | re.MULTILINE)


class Shell:
    """A reader's shell in a folder. What a block exports holds for the later ones; the first failure is an error."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.exported: list[str] = []

    def run(self, block: str) -> str:
        """Runs a block, and returns what it printed."""
        script = "\n".join(["set -eu", COMMANDS, *self.exported, block])
        self.exported += re.findall(r"^export .+$", block, re.MULTILINE)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def python(self, block: str) -> str:
        """Runs a block of Python by itself."""
        (self.folder / "block.py").write_text(block, encoding="utf-8")
        return self.run("python block.py")
