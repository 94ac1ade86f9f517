"""Starts, signals and waits for several processes on this machine, as a scheduler does with hosts."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent

FOLDERS = sorted({str(file.parent) for file in (REPOSITORY / "tests").rglob("*.py")})
"""`tests/` and the folders in it, which mirror `jprm/`. Tests import helpers and each other by name."""

QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
"""Variables of processes that start often: most of a start is compiling."""


RESERVED = []
"""Sockets that hold the ports of `free_port` until this process ends."""


def free_port() -> int:
    """Returns a port for a server, which can take it again after a kill.

    On Linux the port stays bound, so the kernel gives it to no program that asks for any free port. A server that names
    it (with SO_REUSEADDR, as servers do) may listen; until then clients are refused.
    """
    free = socket.socket()
    free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
    if sys.platform == "linux":
        RESERVED.append(free)
    else:
        free.close()
    return port


def environment(devices: int = 1) -> dict[str, str]:
    """Returns the variables of a process that has this tree's jprm and tests, and the suite's compiled programs."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONUNBUFFERED": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *FOLDERS])
    env.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".cache" / "jax"))
    return env


class Processes:
    """Processes by name, each with a log. A context manager: none outlives its block."""

    def __init__(self, folder: pathlib.Path, env: dict[str, str] | None = None):
        self.folder, self.env = folder, env or environment()
        self.children: dict[str, subprocess.Popen] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, *command: str) -> subprocess.Popen:
        """Starts `python COMMAND`, with a log of its own."""
        with (self.folder / f"log.{name}").open("w") as log:
            command = (sys.executable, *command)
            self.children[name] = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return self.children[name]

    def log(self, name: str | int = 0) -> str:
        return (self.folder / f"log.{name}").read_text(errors="replace")

    def ended(self, names: Iterable[str] = ()) -> bool:
        """Whether one of the processes, or of these, has ended."""
        return any(self.children[name].poll() is not None for name in names or self.children)

    def until(self, seen: Callable[[], bool], seconds: float = 3600, names: Iterable[str] = ()) -> bool:
        """Waits for what is to be seen; False where a process, or one of these, ended before it was."""
        end = time.monotonic() + seconds
        while not seen():
            if self.ended(names):
                return False
            if time.monotonic() > end:
                raise TimeoutError(f"not seen in {seconds} s; a log: {self.log(next(iter(self.children)))[-3000:]}")
            time.sleep(0.002)
        return True

    def signal(self, number: int, *names: str) -> None:
        """To all processes, or to these."""
        for name in names or self.children:
            if self.children[name].poll() is None:
                self.children[name].send_signal(number)

    def kill(self, *names: str) -> None:
        self.signal(signal.SIGKILL, *names)
        for name in names or self.children:
            self.children[name].wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


class Pod(Processes):
    """`count` processes with `devices` simulated CPU devices each, named by their index."""

    def __init__(self, folder: pathlib.Path, count: int, devices: int):
        super().__init__(folder, environment(devices))
        self.count = count

    def start(self, command: Sequence[str]) -> None:
        """Every process runs `python COMMAND --distributed INDEX/COUNT@HOST:PORT`; a single one, `python COMMAND`."""
        port = free_port()
        for index in range(self.count):
            where = ["--distributed", f"{index}/{self.count}@localhost:{port}"] if self.count > 1 else []
            self.run(str(index), *command, *where)

    def complete(self, command: Sequence[str], seconds: float = 900) -> list[str]:
        """Starts, waits until all have ended well, and returns their logs."""
        self.start(command)
        statuses = self.wait(seconds=seconds)
        logs = [self.log(index) for index in range(self.count)]
        assert set(statuses) == {0}, "".join(log[-3000:] for log in logs)
        return logs

    def wait(self, grace: float = 60, seconds: float = 900) -> list[int]:
        """The exit statuses, when all have ended; once one has failed, those that go on for `grace` s are killed."""
        children = self.children.values()
        end, failed = time.monotonic() + seconds, None
        while any(child.poll() is None for child in children):
            if failed is None and any(child.poll() for child in children):
                failed = time.monotonic()
            if time.monotonic() > end or (failed is not None and time.monotonic() > failed + grace):
                self.signal(signal.SIGKILL)
            time.sleep(0.02)
        return [child.wait() for child in children]


class Servers(Processes):
    """Servers, `python COMMAND --port PORT`, that come back on the ports they had."""

    def __init__(self, folder: pathlib.Path, count: int, *command: str, env: dict[str, str] | None = None):
        super().__init__(folder, env)
        self.command, self.ports = command, {f"server{i}": free_port() for i in range(count)}

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(f"http://localhost:{port}" for port in self.ports.values())

    def begin(self) -> None:
        """Starts those that are not there."""
        for name, port in self.ports.items():
            if name not in self.children or self.ended([name]):
                self.run(name, *self.command, "--port", str(port))

    def answer(self, enough: Callable[[Iterable[bool]], bool] = all, seconds: float = 600) -> None:
        """Starts those that are not there until all are reached, or as many as are enough."""
        end = time.monotonic() + seconds
        while not enough([reached(port) for port in self.ports.values()]):
            assert time.monotonic() < end, [self.log(name)[-2000:] for name in self.ports]
            self.begin()
            time.sleep(0.2)


def reached(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("localhost", port)) == 0
