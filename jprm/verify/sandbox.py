"""Programs that nobody has read, run where they can do no harm: bubblewrap (`bwrap`), resource limits, and a filter
of system calls.

Inside there are /usr, an empty /tmp of a few megabytes and nothing else: no home, no environment, no network, no
process of the machine. A program can start no other (threads it may), and ends with its time, its memory or its files'
size. The filter, not RLIMIT_NPROC, forbids processes, since that limit does not bind root.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds of time, and bytes of memory, of each file, of all files together, and of what is printed."""

    seconds: float = 10.0
    memory: int = 1 << 30
    file: int = 4 << 20
    files: int = 16 << 20


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`status` is the exit status, negative for a signal; None where time ran out. `output` is what was printed."""

    status: int | None
    output: str


@functools.cache
def refusal() -> str | None:
    """Why there is no sandbox here, None where there is one."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return f"the sandbox is for Linux on {' or '.join(_MACHINES)}"
    for tool, package in (("bwrap", "bubblewrap"), ("prlimit", "util-linux")):
        if not shutil.which(tool):
            return f"{tool} is not installed (Debian's package {package})"
    tried = _run(["/usr/bin/env", "true"], "", Limits(), sandbox=True)
    if tried.status != 0:
        return f"bwrap does not work here: {tried.output.strip()[:300] or f'exit status {tried.status}'}"
    return None


def require() -> None:
    """Raises OSError, with the reason, where there is no sandbox."""
    if reason := refusal():
        raise OSError(
            f"code that nobody has read is not run without a sandbox, and {reason}. "
            "Install it; or, if the code may do whatever you may, say --unsafe-no-sandbox"
        )


def run(command: Sequence[str], text: str, limits: Limits, *, sandbox: bool = True) -> Outcome:
    """What a command prints and how it ends, given `text` as its input.

    Without `sandbox` only time, memory and file size are limited, and the program may do what its user may.

    Raises:
      OSError: there is no sandbox.
    """
    if sandbox:
        require()
    return _run(command, text, limits, sandbox=sandbox)


def _run(command: Sequence[str], text: str, limits: Limits, *, sandbox: bool) -> Outcome:
    caps = [f"--as={limits.memory}", f"--fsize={limits.file}", f"--cpu={int(limits.seconds) + 1}"]
    full = ["prlimit", *caps, "--nofile=64", "--core=0", "--", *(_bwrap(command, limits) if sandbox else command)]
    environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LANG": "C.UTF-8"}
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as rules:
        given.write(text.encode())
        given.seek(0)
        folder = None if sandbox else tempfile.mkdtemp()
        if sandbox:
            rules.write(_filter())
            rules.seek(0)
            full[full.index("FILTER")] = str(rules.fileno())
        process = subprocess.Popen(
            full, stdin=given, stdout=printed, stderr=printed, env=environment, cwd=folder, start_new_session=True,
            pass_fds=[rules.fileno()] if sandbox else [],
        )  # fmt: skip
        try:
            status = _wait(process, limits.seconds)
        finally:
            _end(process)
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
        printed.seek(0)
        return Outcome(status, printed.read().decode(errors="replace"))


def _wait(process: subprocess.Popen, seconds: float) -> int | None:
    end, nap = time.monotonic() + seconds, 0.001
    while (status := process.poll()) is None and time.monotonic() < end:
        time.sleep(nap)
        nap = min(2 * nap, 0.02)
    return status


def _end(process: subprocess.Popen) -> None:
    """Ends the whole session: bwrap's end is that of the process namespace, hence of everything in it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def python() -> str:
    """The interpreter without its virtual environment: the standard library alone is seen inside."""
    return os.path.realpath(sys.executable)


def _bwrap(command: Sequence[str], limits: Limits) -> list[str]:
    arguments = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    arguments += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
    for name, value in (("PATH", "/usr/bin:/bin"), ("HOME", "/tmp"), ("LANG", "C.UTF-8")):
        arguments += ["--setenv", name, value]
    arguments += ["--ro-bind", "/usr", "/usr"]
    for path in ("/bin", "/lib", "/lib64"):
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, path]
    for prefix in {os.path.realpath(sys.base_prefix), _prefix(command[0])}:
        if prefix != "/" and not prefix.startswith("/usr"):
            arguments += ["--ro-bind", prefix, prefix]
    arguments += ["--ro-bind-try", "/etc/ocamlfind.conf", "/etc/ocamlfind.conf"]  # Debian's Coq finds its parts there
    arguments += ["--dev", "/dev", "--remount-ro", "/dev", "--size", str(limits.files), "--tmpfs", "/tmp"]
    arguments += ["--remount-ro", "/", "--chdir", "/tmp", "--seccomp", "FILTER", "--", *command]
    return arguments


def _prefix(program: str) -> str:
    """The folder above `bin` of a program that is named by its path."""
    return os.path.dirname(os.path.dirname(os.path.realpath(program)))


_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
# clone is allowed for threads alone, clone3 absent so that the C library falls back to clone; the rest would start
# processes, hold memory that RLIMIT_AS does not count, or make a namespace with rights of its own.
_CALLS = {
    "x86_64": {"clone": 56, "clone3": 435, "fork": 57, "vfork": 58, "shmget": 29, "unshare": 272, "setns": 308,
               "mount": 165, "fsopen": 430, "open_tree": 428, "keyctl": 250, "add_key": 248, "io_uring_setup": 425,
               "bpf": 321, "userfaultfd": 323, "ptrace": 101, "perf_event_open": 298, "memfd_create": 319},
    "aarch64": {"clone": 220, "clone3": 435, "shmget": 194, "unshare": 97, "setns": 268,
                "mount": 40, "fsopen": 430, "open_tree": 428, "keyctl": 219, "add_key": 217, "io_uring_setup": 425,
                "bpf": 280, "userfaultfd": 282, "ptrace": 117, "perf_event_open": 241, "memfd_create": 279},
}  # fmt: skip
_CLONE_THREAD = 0x10000
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def _filter() -> bytes:
    """The filter as a program of classic BPF (seccomp(2)): struct sock_filter {u16 code; u8 jt, jf; u32 k}."""
    machine = platform.machine()
    load, equal, bits, back = 0x20, 0x15, 0x45, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JSET|K, BPF_RET|K
    eperm, enosys = _ERRNO | 1, _ERRNO | 38
    calls = dict(_CALLS[machine])
    clone, clone3 = calls.pop("clone"), calls.pop("clone3")
    program = [(load, 0, 0, 4), (equal, 1, 0, _MACHINES[machine]), (back, 0, 0, _KILL), (load, 0, 0, 0)]
    program += [(0x35, 0, 1, 0x40000000), (back, 0, 0, eperm)]  # BPF_JGE: the x32 calls of an x86_64
    program += [(equal, 0, 1, clone3), (back, 0, 0, enosys)]
    for number in calls.values():
        program += [(equal, 0, 1, number), (back, 0, 0, eperm)]
    program += [(equal, 0, 3, clone), (load, 0, 0, 16), (bits, 1, 0, _CLONE_THREAD), (back, 0, 0, eperm)]
    program += [(back, 0, 0, _ALLOW)]
    return b"".join(struct.pack("<HBBI", *line) for line in program)
