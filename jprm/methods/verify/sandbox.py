"""Runs untrusted programs under bubblewrap (`bwrap`), resource limits and a system call filter.

A program sees /usr and an empty /tmp of a few megabytes, but no home, environment, network or other processes. It may
start threads but no processes, and ends when it exceeds its time, memory or file size. The filter forbids processes,
because RLIMIT_NPROC does not bind root, and changes to modes, owners, times and attributes of files. A user's own
checker may see more (`Shown`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes.util
import dataclasses
import errno
import functools
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds of time; bytes in memory, in each file (and the output), and in all files together."""

    seconds: float = 10.0
    memory: int = 1 << 30
    file: int = 4 << 20
    files: int = 16 << 20


@dataclasses.dataclass(frozen=True)
class Shown:
    """More that a command may see and do. Only a user's own settings may name folders and allow processes.

    Attributes:
      files: contents of read-only files in the command's folder, by name.
      folders: read-only folders, as absolute paths.
      processes: it may start processes. They end with the command.
    """

    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    folders: tuple[str, ...] = ()
    processes: bool = False


@dataclasses.dataclass(frozen=True)
class CommandResult:
    """`status`: exit status, negative for a signal (SIGXFSZ if the output is cut), `None` if time ran out.
    `output`: the printed text, with stderr.
    """

    status: int | None
    output: str


@functools.cache
def refusal() -> str | None:
    """Returns the reason if this machine has no sandbox, else None. The first call tries one; the result is cached."""
    if sys.platform != "linux":
        return "the sandbox is for Linux"
    if not ctypes.util.find_library("seccomp"):
        return "libseccomp is not installed (Debian's package libseccomp2)"
    for tool, package in (("bwrap", "bubblewrap"), ("prlimit", "util-linux")):
        if not shutil.which(tool):
            return f"{tool} is not installed (Debian's package {package})"
    tried = _run_command(["/usr/bin/env", "true"], "", Limits(seconds=60.0), sandbox=True)  # on a busy machine
    if tried.status != 0:
        return f"bwrap does not work here: {tried.output.strip()[:300] or f'exit status {tried.status}'}"
    return None


def require() -> None:
    """Raises OSError, with the reason and a remedy, if there is no sandbox. The first call tries one (`refusal`)."""
    if reason := refusal():
        remedy = "Install it; or, if the code may do whatever you may, pass --unsafe-no-sandbox"
        raise OSError(f"untrusted code needs a sandbox, and {reason}. {remedy}")


def run_command(
    command: Sequence[str], text: str, limits: Limits, *, sandbox: bool = True, shown: Shown = Shown()
) -> CommandResult:
    """Runs a command with `text` as its input; returns its output and exit status. Blocks at most `limits.seconds`.

    Failures of the command, and of starting it in the sandbox (output `bwrap: ...`), are in the result. Without
    `sandbox`, only time, memory and file size are limited, and it runs in an empty temporary folder; the program has
    all permissions of the user.

    Raises OSError if there is no sandbox, or the program is installed in a folder that holds the user's home.
    """
    if sandbox:
        require()
    return _run_command(command, text, limits, sandbox=sandbox, shown=shown)


def run_servers(
    commands: tuple[Sequence[str], Sequence[str]],
    texts: tuple[str, str],
    limits: Limits,
    seconds: float,
    *,
    sandbox: bool = True,
) -> tuple[CommandResult, CommandResult]:
    """Runs two trusted commands in separate sandboxes, joined by a socket.

    The number of each one's end is added as its last argument. Unlike programs, they may fork. A child must apply
    `rules()` before it runs untrusted code. `texts` are their inputs. `limits` apply to each process, `seconds` to both
    commands. The first is killed when the second ends. Blocks until then, and returns both results, the first command's
    first.

    Raises OSError if there is no sandbox. Without `sandbox`, they run with the user's permissions.
    """
    if sandbox:
        require()
    ends, ended = socket.socketpair(), threading.Event()

    def run(which: int, stop: threading.Event | None) -> CommandResult:
        command, descriptors = [*commands[which], str(ends[which].fileno())], (ends[which].detach(),)
        return _run_command(
            command, texts[which], limits, sandbox=sandbox, descriptors=descriptors, stop=stop, server_seconds=seconds
        )

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, 0, ended)
        try:
            outcome = run(1, None)
        finally:
            ended.set()
        return first.result(), outcome


def _run_command(
    command: Sequence[str], text: str, limits: Limits, *, sandbox: bool, descriptors: Sequence[int] = (), stop=None,
    server_seconds: float | None = None, shown: Shown = Shown(),
) -> CommandResult:  # fmt: skip
    """Runs a command, which takes over the `descriptors` and is killed when the event `stop` is set.

    If `server_seconds` is set, this is its time limit, and it may fork.
    """
    cpu = int(limits.seconds) + 1
    caps = [f"--as={limits.memory}", f"--fsize={limits.file}", f"--cpu={cpu}:{cpu + 1}"]
    server = server_seconds is not None
    inner = _bwrap(command, limits, server, shown) if sandbox else command
    full = ["prlimit", *caps, "--nofile=64", "--core=0", "--", *inner]
    environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LANG": "C.UTF-8"}
    if sandbox and (scope := _scope()):
        full = [*scope, "-p", f"MemoryMax={limits.memory + limits.files}", "-p", "MemorySwapMax=0", "--", *full]
        buses = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")  # bwrap clears them
        environment |= {name: os.environ[name] for name in buses if name in os.environ}
    with contextlib.ExitStack() as stack:

        def temporary(content: bytes = b"") -> IO[bytes]:
            file = stack.enter_context(tempfile.TemporaryFile())
            file.write(content)
            file.seek(0)
            return file

        asked, printed = temporary(text.encode(errors="backslashreplace")), temporary()
        folder, passed = None if sandbox else tempfile.mkdtemp(), list(descriptors)
        contents = {name: content.encode(errors="backslashreplace") for name, content in shown.files.items()}
        if folder is None:
            contents["FILTER"] = rules(server or shown.processes)
        for name, content in contents.items():
            if folder is None:
                passed.append(temporary(content).fileno())
                full[full.index(name)] = str(passed[-1])
            else:
                pathlib.Path(folder, name).write_bytes(content)
        process = subprocess.Popen(
            full, stdin=asked, stdout=printed, stderr=printed, env=environment, cwd=folder, start_new_session=True,
            pass_fds=passed,
        )  # fmt: skip
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            status = _wait(process, server_seconds or limits.seconds, stop)
        finally:
            _end(process)
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
        printed.seek(0)
        output = printed.read()
        if status in (-signal.SIGXCPU, 128 + signal.SIGXCPU):  # by several threads, or before `_wait` saw it
            status = None
        if status is not None and len(output) >= limits.file:  # cut, also if the command ignores the signal
            status = -signal.SIGXFSZ
        return CommandResult(status, output.decode(errors="replace"))


def _wait(process: subprocess.Popen, seconds: float, stop: threading.Event | None = None) -> int | None:
    """Returns the exit status (of the kill, if `stop` is set); `None` if time ran out."""
    end, nap = time.monotonic() + seconds, 0.001
    while (status := process.poll()) is None and time.monotonic() < end:
        if stop and stop.is_set():
            _end(process)
            return process.returncode
        time.sleep(nap)
        nap = min(2 * nap, 0.02)
    return status


def _end(process: subprocess.Popen) -> None:
    """Kills the whole session. With bwrap, this ends its process namespace and everything in it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def python() -> str:
    """Returns the interpreter's path outside its virtual environment, so programs see only the standard library."""
    return os.path.realpath(sys.executable)


def _bwrap(command: Sequence[str], limits: Limits, server: bool = False, shown: Shown = Shown()) -> list[str]:
    """Returns the command line, with a placeholder for the descriptor of each file (its name) and of the FILTER."""
    arguments = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    arguments += ["--as-pid-1"] if server else []  # no child can kill process 1
    arguments += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
    for name, value in (("PATH", "/usr/bin:/bin"), ("HOME", "/tmp"), ("LANG", "C.UTF-8")):
        arguments += ["--setenv", name, value]
    arguments += ["--ro-bind", "/usr", "/usr"]
    for path in ("/bin", "/lib", "/lib64"):
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, path]
    home, program = os.path.realpath(os.path.expanduser("~")), os.path.realpath(command[0])
    for prefix in {os.path.realpath(sys.base_prefix), os.path.dirname(os.path.dirname(program))}:
        if prefix == "/" or prefix.startswith("/usr"):
            continue
        if os.path.commonpath([prefix, home]) == prefix:
            remedy = "Install it in a folder of its own, or below /usr"
            raise OSError(f"{program}: the sandbox would show programs all of {prefix}, with your home. {remedy}")
        arguments += ["--ro-bind", prefix, prefix]
    arguments += ["--ro-bind-try", "/etc/ocamlfind.conf", "/etc/ocamlfind.conf"]  # where Debian's Coq finds its files
    arguments += ["--dev", "/dev", "--remount-ro", "/dev", "--size", str(limits.files), "--tmpfs", "/tmp"]
    for folder in shown.folders:
        arguments += ["--ro-bind", folder, folder]
    for name in shown.files:
        arguments += ["--ro-bind-data", name, f"/tmp/{name}"]
    arguments += ["--remount-ro", "/", "--chdir", "/tmp", "--seccomp", "FILTER", "--", *command]
    return arguments


@functools.cache
def _scope() -> tuple[str, ...]:
    """Returns a command prefix that gives a command its own memory cgroup, if systemd delegates one.

    Unlike RLIMIT_AS, the cgroup counts a program's files in /tmp and its shared memory.
    """
    command = ("systemd-run", "--scope", "--quiet", "--collect", *(() if os.geteuid() == 0 else ("--user",)))
    try:
        tried = subprocess.run([*command, "-p", "MemoryMax=64M", "true"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return command if tried.returncode == 0 else ()


# Calls on a process's own memory, files, threads, clocks and sockets. Other calls fail with ENOSYS, so the C library
# starts threads with `clone`, whose flags a filter can read, instead of `clone3`.
_ALLOWED = """
access alarm arch_prctl brk capget chdir clock_getres clock_gettime clock_nanosleep close close_range copy_file_range
creat dup dup2 dup3 execve execveat exit exit_group faccessat faccessat2 fadvise64 fallocate fchdir fdatasync
fgetxattr flistxattr flock fstat fstatfs fsync ftruncate futex futex_waitv get_robust_list getcpu getcwd getdents
getdents64 getegid geteuid getgid getgroups getitimer getpgid getpgrp getpid getppid getpriority getrandom getresgid
getresuid getrlimit getrusage getsid gettid gettimeofday getuid getxattr kill lgetxattr link linkat listxattr
llistxattr lseek lstat madvise membarrier mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap mprotect
mremap msync munlock munlockall munmap nanosleep newfstatat open openat openat2 pause pkey_alloc pkey_free
pkey_mprotect prctl pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv rename
renameat renameat2 restart_syscall riscv_flush_icache rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask
rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
sched_yield sendfile set_robust_list set_tid_address setitimer setpgid setrlimit setsid sigaltstack signalfd signalfd4
splice stat statfs statx symlink symlinkat sync sync_file_range syncfs sysinfo tee tgkill time timer_create
timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime times tkill
truncate umask uname unlink unlinkat vmsplice wait4 waitid write writev
accept accept4 bind connect epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2
getpeername getsockname getsockopt inotify_add_watch inotify_init inotify_init1 inotify_rm_watch listen pipe pipe2
poll ppoll pselect6 recvfrom recvmmsg recvmsg select sendmmsg sendmsg sendto setsockopt shutdown
"""
_REFUSED = """
fork vfork
chmod chown fchmod fchmodat fchmodat2 fchown fchownat fremovexattr fsetxattr futimesat lchown lremovexattr lsetxattr
removexattr setxattr utime utimensat utimes
"""
"""Calls failing with EPERM: creating processes, and changing file metadata. Under root the sandbox's user owns the
devices in /dev; and metadata that outlive the files in /tmp would reach the next program."""
_WITH: dict[str, tuple[dict[int, int], ...]] = {
    **{name: ({0: 0},) for name in
       ("prlimit64", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler")},
    "setpriority": ({0: 0, 1: 0},),
    "socket": ({0: 1}, {0: 2}, {0: 10}),
    "socketpair": ({0: 1},),
    "fcntl": tuple({1: command} for command in (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032)),
    "ioctl": tuple({1: command} for command in (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
}  # fmt: skip
"""Calls allowed with these argument values, by position. Limits, scheduling and priority may be changed only
for the caller (0), not its group or user: a program must not slow or starve the process that forks the next one.
`fcntl` duplicates descriptors, sets their flags, locks, and sizes pipes, but takes no lease on the machine's files.
Sockets are of the families AF_UNIX, AF_INET and AF_INET6, which end at the sandbox's network: AF_VSOCK leads out of it.
`ioctl` asks for a terminal (TCGETS, TCGETS2, TIOCGWINSZ) and for waiting bytes, and sets descriptors' flags, but not
those of files (FS_IOC_SETFLAGS)."""

_CLONE_THREAD, _CLONE_NAMESPACES = 0x10000, 0x7E020000


@functools.cache
def rules(forks: bool = False) -> bytes:
    """Returns the system call filter as a BPF program, for `bwrap --seccomp`. Cached.

    With `forks`, processes may fork; without, only start threads. Raises ImportError if `pyseccomp` is not installed.
    """
    import pyseccomp as seccomp

    filter_ = seccomp.SyscallFilter(seccomp.ERRNO(errno.ENOSYS))
    filter_.set_attr(seccomp.Attr.ACT_BADARCH, seccomp.KILL_PROCESS)
    for name in _ALLOWED.split():
        with contextlib.suppress(OSError):  # a call that this machine or libseccomp does not have
            filter_.add_rule(seccomp.ALLOW, name)
    for name, cases in _WITH.items():
        for case in cases:
            arguments = [seccomp.Arg(place, seccomp.MASKED_EQ, 0xFFFFFFFF, value) for place, value in case.items()]
            with contextlib.suppress(OSError):
                filter_.add_rule(seccomp.ALLOW, name, *arguments)
    for name in _REFUSED.split():
        refused = seccomp.ALLOW if forks and name in ("fork", "vfork") else seccomp.ERRNO(errno.EPERM)
        with contextlib.suppress(OSError):
            filter_.add_rule(refused, name)
    if forks:
        filter_.add_rule(seccomp.ALLOW, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_NAMESPACES, 0))
    else:
        for action, bit in ((seccomp.ALLOW, _CLONE_THREAD), (seccomp.ERRNO(errno.EPERM), 0)):
            filter_.add_rule(action, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _CLONE_THREAD, bit))
    with tempfile.TemporaryFile() as file:
        filter_.export_bpf(file)
        file.seek(0)
        return file.read()
