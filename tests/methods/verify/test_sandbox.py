"""A program in the sandbox cannot affect the machine."""

import errno
import http.server
import os
import threading
import time

import pytest
from refusing import refused

from jprm.methods.verify import sandbox
from jprm.methods.verify.sandbox import Limits, python, run_command

needs_sandbox = pytest.mark.skipif(sandbox.refusal() is not None, reason=f"needs a sandbox: {sandbox.refusal()}")
pytestmark = needs_sandbox

PATIENT = Limits(seconds=60)
"""For programs that end by themselves, on a machine that may stand still."""


def run_python(code, seconds=60.0, **limits):
    return run_command([python(), "-I", "-S", "-c", code], "", Limits(seconds=seconds, **limits))


def own_children():
    """Processes of this machine whose parent is this one."""
    children = set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    children.add(process)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return children


def test_it_sees_no_home_no_environment_and_no_other_process(tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("x")
    monkeypatch.setenv("SOME_KEY", "secret")
    outcome = run_python(
        f"import os; print(os.path.exists({str(secret)!r}), 'SOME_KEY' in os.environ, os.path.exists('/proc/1'),"
        " os.path.exists('/etc/passwd'), os.listdir('/tmp'), os.getuid())"
    )
    assert outcome == sandbox.CommandResult(0, "False False False False [] 65534\n")


def test_a_loop_ends_with_its_time():
    before, start = own_children(), time.monotonic()
    assert run_python("while True: pass", seconds=1).status is None
    assert time.monotonic() - start < 300  # 1, on a machine that may stand still
    assert own_children() <= before


@pytest.mark.parametrize("sandboxed", [True, False])
def test_a_limit_of_cpu_time_that_comes_before_the_clocks_is_one_of_time(sandboxed):
    """E.g. a program with several threads uses its CPU time before the clock's limit."""
    code = "import os, signal; os.kill(os.getpid(), signal.SIGXCPU)"
    assert run_command([python(), "-c", code], "", PATIENT, sandbox=sandboxed).status is None


ATTACKS = """
import ctypes, os, socket, subprocess, sys, threading
def tried(name, attack):
    try:
        print(name, attack())
    except BaseException as error:
        print(name, type(error).__name__)
def write(path, size=1):
    with open(path, "wb") as file:
        file.write(b"x" * size)
    return "written"
def fill():
    for i in range(100):
        write(f"/tmp/{i}", 2 ** 20)
libc = ctypes.CDLL(None, use_errno=True)
tried("fork", os.fork)
tried("spawn", lambda: os.posix_spawn("/usr/bin/env", ["env"], {}))
tried("subprocess", lambda: subprocess.run(["env"]))
tried("namespace", lambda: libc.unshare(0x10000000))
tried("root", lambda: write("/x"))
tried("usr", lambda: write("/usr/x"))
tried("shm", lambda: write("/dev/shm/x"))
tried("python", lambda: write(os.__file__))
tried("tmp", lambda: write("/tmp/x"))
tried("disk", fill)
tried("network", lambda: socket.create_connection(("127.0.0.1", PORT), 5))
tried("memory", lambda: bytearray(2 ** 31))
thread = threading.Thread(target=lambda: print("thread runs"))
thread.start()
thread.join()
"""


def test_sockets_are_of_families_that_end_in_the_sandbox():
    """AF_VSOCK (40) is no part of a network namespace: on machines of a cloud it leads to the host."""
    code = (
        "import socket\n"
        "for family in range(1, 46):\n"
        "    try:\n"
        "        socket.socket(family, socket.SOCK_STREAM).close(); print(family)\n"
        "    except OSError:\n"
        "        pass\n"
        "socket.socketpair(); print('pair')\n"
    )
    done = run_command([python(), "-I", "-S", "-c", code], "", PATIENT)
    assert set(done.output.split()) <= {"1", "2", "10", "pair"} and {"1", "2", "pair"} <= set(done.output.split())


def test_attacks_fail_and_nothing_is_left_behind():
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def handle(self):
            asked.append(self.client_address)

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        files, before = set(os.listdir("/tmp")), own_children()
        command = [python(), "-I", "-c", ATTACKS.replace("PORT", str(server.server_port))]
        outcome = run_command(command, "", PATIENT)
        server.shutdown()
    assert outcome.output.splitlines() == [
        "fork PermissionError",
        "spawn PermissionError",
        "subprocess PermissionError",
        "namespace -1",
        "root OSError",  # read-only
        "usr OSError",
        "shm OSError",
        "python OSError",
        "tmp written",
        "disk OSError",  # full
        "network ConnectionRefusedError",
        "memory MemoryError",
        "thread runs",
    ]
    assert not asked and own_children() <= before
    assert not {name for name in set(os.listdir("/tmp")) - files if name == "x" or name.isdecimal()}


@pytest.mark.parametrize(
    "name", ["add_key", "bpf", "clone3", "io_uring_setup", "keyctl", "memfd_create", "mount", "perf_event_open",
             "ptrace", "setns", "shmget", "unshare", "userfaultfd"],
)  # fmt: skip
def test_calls_that_no_step_needs_do_not_exist(name):
    import pyseccomp  # fails where libseccomp is absent

    number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
    code = "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
    code += f"print(libc.syscall({number}, 0, 0, 0, 0, 0, 0), ctypes.get_errno())"
    assert number > 0 and run_command([python(), "-I", "-c", code], "", PATIENT).output == f"-1 {errno.ENOSYS}\n"


CHANGES = """
import fcntl, os, struct
def tried(name, attack):
    try:
        print(name, attack())
    except OSError as error:
        print(name, "refused")
folder, file = os.open("/tmp", os.O_RDONLY), os.open("/usr/bin/env", os.O_RDONLY)
for path in ("/dev/full", "/dev/null", "/tmp"):
    seen = os.stat(path)
    tried("mode", lambda: os.chmod(path, seen.st_mode & 0o7777))
    tried("mode by descriptor", lambda: os.fchmod(os.open(path, os.O_RDONLY), seen.st_mode & 0o7777))
    tried("owner", lambda: os.chown(path, -1, -1))
    tried("times", lambda: os.utime(path))
    tried("times given", lambda: os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns)))
    tried("attribute", lambda: os.setxattr(path, "user.x", b"1"))
    tried("no attribute", lambda: os.removexattr(path, "user.x"))
tried("flags", lambda: fcntl.ioctl(folder, 0x40086602, struct.pack("q", 0x40)))
tried("lease", lambda: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK))
tried("group", lambda: os.setpriority(os.PRIO_PGRP, 0, 1))
tried("user", lambda: os.setpriority(os.PRIO_USER, 0, 1))
tried("parent", lambda: os.setpriority(os.PRIO_PROCESS, 1, 1))
os.setpriority(os.PRIO_PROCESS, 0, 18)
with open("/tmp/x", "w") as mine:
    fcntl.lockf(mine, fcntl.LOCK_EX)
    print("itself", os.nice(1), os.isatty(0), os.listxattr("/tmp"))
"""


def test_no_file_changes_but_in_its_content_and_no_process_but_its_own():
    """For root the user in the sandbox owns the machine's devices."""

    def kept(path):
        seen = os.stat(path)
        return seen.st_mode, seen.st_uid, seen.st_gid, seen.st_mtime_ns, seen.st_ctime_ns

    before = kept("/dev/full")
    *attacks, itself = run_python(CHANGES).output.splitlines()
    assert len(attacks) == 26 and all(line.endswith(" refused") for line in attacks)
    assert itself == "itself 19 False []" and kept("/dev/full") == before


def test_a_fork_bomb_and_endless_output_are_contained():
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    before = own_children()
    assert run_python(bomb, seconds=1).status is None
    assert own_children() <= before
    outcome = run_python("while True: print('x' * 1000)", file=1 << 20)
    assert outcome.status not in (0, None) and len(outcome.output) <= 1 << 20


@pytest.mark.parametrize("place", [".", "bin", "inner/opt"])
def test_no_home_is_bound(tmp_path, monkeypatch, place):
    monkeypatch.setenv("HOME", str(tmp_path / "home" / place))
    arguments = sandbox._bwrap([str(tmp_path / "home" / "coq" / "bin" / "coqtop")], Limits())
    assert str(tmp_path / "home" / "coq") in arguments  # a folder of its own
    refused(OSError, "home/bin/coqtop", sandbox._bwrap, [str(tmp_path / "home" / "bin" / "coqtop")], Limits())


def test_a_memory_cgroup_holds_the_program_where_there_is_one(tmp_path, monkeypatch):
    """A stand-in for systemd-run, which reports its arguments: this cannot run where systemd does not."""
    (tmp_path / "systemd-run").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "systemd-run").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sandbox._scope.cache_clear()
    monkeypatch.setattr(sandbox, "_bwrap", lambda command, *_: ["bwrap", "FILTER", *command])
    outcome = sandbox._run_command(["program"], "", Limits(memory=1 << 30, files=16 << 20), sandbox=True)
    sandbox._scope.cache_clear()
    assert "--scope" in outcome.output and "-p MemoryMax=1090519040 -p MemorySwapMax=0 -- prlimit" in outcome.output
    assert outcome.output.split()[-1] == "program"


def test_no_sandbox_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "refusal", lambda: "bwrap is not installed (Debian's package bubblewrap)")
    refused(OSError, "--unsafe-no-sandbox", run_python, "print(1)")
    outcome = run_command([python(), "-I", "-c", "print(1)"], "", PATIENT, sandbox=False)
    assert outcome.output == "1\n"
