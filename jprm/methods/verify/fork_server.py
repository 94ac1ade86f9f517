"""Serves many programs from one pair of processes. Standard library only: both sides run it as a script.

The leader has the questions, the follower runs the programs. For every question the leader sends the follower one end
of a new socket pair; each then forks a child, and the two children talk over that pair alone. A child gives up the
right to fork before anything untrusted runs, and is killed when its question is decided. So a program cannot change
what happens to the next one: it shares with it no memory, no descriptor and no file. A follower whose folder has
changed after a program ends, even if the program removed its files, and the caller starts another for the remaining
questions.
"""

import base64
import contextlib
import ctypes
import functools
import json
import os
import select
import signal
import socket
import time

_MOST = 1 << 20  # bytes of a report


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def _fork(rules, run):
    """Forks a child that runs a function under a BPF program over its system calls; an empty one forbids nothing.

    The child never returns to the parent's code, and exits with 77 where the system refuses the BPF program.
    """
    child = os.fork()
    if child:
        return child
    try:
        program = _Filter(len(rules) // 8, rules)
        refused = rules and ctypes.CDLL(None).prctl(22, 2, ctypes.byref(program), 0, 0)  # PR_SET_SECCOMP, a filter
        if refused:
            os._exit(77)
        run()
    finally:
        os._exit(0)


def follow(control, rules, serve):
    """Forks a child that runs `serve` for every socket that arrives."""
    child, untouched = None, _folder()
    while True:
        message, sockets, *_ = socket.recv_fds(control, 1, 1)
        _end(child)
        if not message or _folder() != untouched:
            return
        child = _fork(rules, functools.partial(_serve, control, serve, sockets[0]))
        os.close(sockets[0])
        control.send(b"1")


def _serve(control, serve, descriptor):
    control.close()
    serve(descriptor)


def _folder():
    """Returns what any change of the folder or of what is in it changes."""
    here = os.stat(".")
    return os.listdir("."), here.st_mode, here.st_mtime_ns, here.st_ctime_ns


def lead(control, rules, answer, questions, seconds, report):
    """Writes a line of JSON to the descriptor `report` for every question, until one cannot be asked.

    `answer(socket, question)` runs in a child. A line is what it returns; `{"late": true}` after so many seconds.
    """
    control.settimeout(seconds + 10)
    for question in questions:
        ours, theirs = socket.socketpair()
        with contextlib.suppress(OSError):
            socket.send_fds(control, [b"1"], [theirs.fileno()])
            theirs.close()
            if control.recv(1):
                asked = functools.partial(answer, ours.fileno(), question)
                os.write(report, _asked(asked, rules, seconds, control, report) + b"\n")
                ours.close()
                continue
        return


def _asked(answer, rules, seconds, control, report):
    """Returns the line of one question."""
    read, write = os.pipe()

    def run():
        for descriptor in (control.fileno(), report, read):
            os.close(descriptor)
        os.write(write, json.dumps(answer()).encode())

    child = _fork(rules, run)
    os.close(write)
    line, deadline = b"", time.monotonic() + seconds
    while len(line) < _MOST:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([read], [], [], left)[0]:
            line = b'{"late": true}'
            break
        if not (more := os.read(read, 1 << 16)):
            break
        line += more
    os.close(read)
    _end(child)
    return line.replace(b"\n", b" ")


def _end(child):
    if child:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def main(role, number, question, serve, answer):
    """Runs one side over the socket `number`; the question, in JSON, has the rules and, for the leader, all else."""
    question = json.loads(question)
    rules = base64.b64decode(question["rules"])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as process 1 it then gets no signal from its children
    report = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    os.dup2(0, 2)
    if os.waitpid(_fork(rules, int), 0)[1]:
        return
    control = socket.socket(fileno=number)
    if role == "program":
        os.close(report)
        follow(control, rules, serve)
    else:
        lead(control, rules, answer, question["questions"], question["seconds"], report)
