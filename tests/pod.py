"""Starts, signals and waits for several `jprm` processes on this machine, as a scheduler does with hosts."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def environment(devices: int = 1) -> dict[str, str]:
    """Returns the variables of a process that has this tree's jprm and tests, and the suite's compiled programs."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONUNBUFFERED": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    env.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".cache" / "jax"))
    return env


class Pod:
    """`count` processes with `devices` simulated CPU devices each. A context manager: none outlives its block."""

    def __init__(self, folder: pathlib.Path, count: int, devices: int):
        self.folder, self.count, self.devices = folder, count, devices
        self.children: list[subprocess.Popen] = []
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, command: Sequence[str]) -> None:
        """Every process runs `python COMMAND --distributed INDEX/COUNT@HOST:PORT`; one alone, `python COMMAND`."""
        port, env = free_port(), environment(self.devices)
        for index in range(self.count):
            where = ["--distributed", f"{index}/{self.count}@localhost:{port}"] if self.count > 1 else []
            with (self.folder / f"log.{index}").open("w") as log:
                self.children.append(
                    subprocess.Popen([sys.executable, *command, *where], env=env, stdout=log, stderr=log)
                )

    def log(self, index: int = 0) -> str:
        return (self.folder / f"log.{index}").read_text(errors="replace")

    def until(self, seen: Callable[[], bool], seconds: float = 900) -> bool:
        """Waits for what is to be seen; False where a process ended before it was."""
        end = time.monotonic() + seconds
        while not seen():
            if any(child.poll() is not None for child in self.children):
                return False
            if time.monotonic() > end:
                raise TimeoutError(f"not seen in {seconds} s; log of process 0: {self.log()[-3000:]}")
            time.sleep(0.005)
        return True

    def wait(self, grace: float = 60, seconds: float = 900) -> list[int]:
        """The exit statuses, when all have ended; once one has failed, those that go on for `grace` s are killed."""
        end, failed = time.monotonic() + seconds, None
        while any(child.poll() is None for child in self.children):
            if failed is None and any(child.poll() for child in self.children):
                failed = time.monotonic()
            if time.monotonic() > end or (failed is not None and time.monotonic() > failed + grace):
                self.signal(signal.SIGKILL)
            time.sleep(0.02)
        statuses = [child.wait() for child in self.children]
        self.children = []
        return statuses

    def signal(self, number: int, index: int | None = None) -> None:
        """To one process or to all."""
        for child in self.children if index is None else [self.children[index]]:
            if child.poll() is None:
                child.send_signal(number)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.signal(signal.SIGKILL)
        for child in self.children:
            child.wait()
