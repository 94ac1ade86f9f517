"""The blocks of a page of documentation, run as a reader runs them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tiny_run import one_device

from jprm.apps import cli

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


COMMAND = re.compile(r"(?:.*\\\n)*.+\n?")  # with the lines that it goes on in


class Shell:
    """A reader's shell in a folder. What a block exports holds for the later ones; the first failure is an error.

    Importing jax and jprm takes 2 s of CPU time, and a new process compiles again what this one has. So commands of
    jprm run in this process, on one device, and import the folder's modules anew; but not where a block has exported
    more than Python's path, for some variables are read only once.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.exported: list[str] = []

    def run(self, block: str) -> str:
        """Runs a block, and returns what it printed."""
        self.exported += re.findall(r"^export .+$", block, re.MULTILINE)
        if any(not line.startswith("export PYTHONPATH=") for line in self.exported):
            return self.bash(block)
        return "".join(map(self.command, COMMAND.findall(block)))

    def command(self, command: str) -> str:
        program, *words = shlex.split(command.replace("\\\n", ""), comments=True) or [""]
        if program != "jprm":
            return self.bash(command)
        with self.here(), one_device(), contextlib.redirect_stdout(io.StringIO()) as printed:
            assert cli.main(words) == 0, command
        return printed.getvalue()

    @contextlib.contextmanager
    def here(self):
        """What runs in it is in the folder, and what it imports from there is forgotten."""
        before = set(sys.modules)
        with contextlib.chdir(self.folder):
            yield
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(self.folder)):
                del sys.modules[name]

    def bash(self, block: str) -> str:
        script = "\n".join(["set -eu", COMMANDS, *self.exported, block])
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
