"""One training in a folder: processes that hold it, die, hang and come from other machines."""

import signal
import subprocess
import sys
import time
import types

import pytest
import tiny_run as tiny
from refusing import refused

from jprm.io import folders
from jprm.io.folders import FILE, DiskLock
from jprm.train import Trainer

HOLD = """
import errno, pathlib, sys, time
from jprm.io import folders
folders.BEAT, folders.MISSED = 0.1, 8
boot, locks = sys.argv[2:]
if boot:
    folders._boot = lambda: boot
if locks == "none":
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")
    folders.fcntl.flock = flock
lock = folders.DiskLock(pathlib.Path(sys.argv[1]))
try:
    while not lock.attempt():
        pass
except ValueError as error:
    sys.exit(str(error))
print("holding", flush=True)
if sys.stdin.readline():
    lock.release()
"""


@pytest.fixture
def start(tmp_path):
    """Starts a process that takes the folder as on a machine of this name ('' is this one), with or without locks."""
    started = []

    def start(boot="", locks="flock"):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-c", HOLD, str(tmp_path), boot, locks]
        started.append(subprocess.Popen(command, text=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said(process):
    return process.stdout.readline()


def test_a_live_run_is_refused_and_a_killed_one_is_followed_at_once(start, tmp_path):
    first = start()
    assert said(first) == "holding\n"
    _, refusal = start().communicate(timeout=60)
    assert f"process {first.pid} on" in refusal and "use another --workdir" in refusal
    first.kill(), first.wait()
    began = time.monotonic()
    DiskLock(tmp_path).attempt()  # in this process, without a beat's wait
    assert time.monotonic() - began < 1


def test_a_run_that_ends_leaves_nothing(start, tmp_path):
    first = start()
    assert said(first) == "holding\n"
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    first.communicate("end\n", timeout=60)
    assert first.returncode == 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("locks", ["flock", "none"])
def test_a_run_of_another_machine_is_refused_while_it_beats(start, locks):
    first = start("another machine", locks)
    assert said(first) == "holding\n"
    _, refusal = start("", locks).communicate(timeout=60)
    assert f"process {first.pid} on" in refusal


def test_the_lock_that_a_vanished_host_left_is_taken_over(start, tmp_path):
    """A stopped process keeps its lock and beats no more, like a host that is cut off. When it is back, it ends."""
    first = start("another machine")
    assert said(first) == "holding\n"
    first.send_signal(signal.SIGSTOP)
    second = start()
    assert "gave no sign of life for 0.8 s: taking over" in said(second) and said(second) == "holding\n"
    first.send_signal(signal.SIGCONT)
    assert first.wait(timeout=60) == 1
    error = first.stderr.read()
    assert "folder" in error
    _, refusal = start().communicate(timeout=60)
    assert f"process {second.pid} on" in refusal
    assert second.poll() is None


@pytest.mark.parametrize("locks", ["flock", "none"])
def test_a_killed_run_of_another_machine_is_followed_after_the_missing_beats(start, locks):
    first = start("another machine", locks)
    assert said(first) == "holding\n"
    first.kill(), first.wait()
    assert "taking over" in said(second := start("", locks)) and said(second) == "holding\n"


def test_a_killed_run_of_this_machine_needs_no_locks_to_be_followed_at_once(start):
    first = start("", "none")
    assert said(first) == "holding\n"
    first.kill(), first.wait()
    assert said(start("", "none")) == "holding\n"


def test_a_child_that_outlives_its_run_holds_nothing(start, tmp_path):
    first = start()
    assert said(first) == "holding\n"
    text = (tmp_path / FILE).read_bytes()
    first.kill(), first.wait()
    (tmp_path / FILE).write_bytes(text)
    with open(tmp_path / FILE, "rb") as inherited:
        assert folders._locked(inherited)
        assert said(start()) == "holding\n"


def test_a_damaged_file_is_no_holder(tmp_path):
    (tmp_path / FILE).write_text("[" * 100_000)
    lock = DiskLock(tmp_path)
    assert lock.attempt()
    lock.release()
    assert not list(tmp_path.iterdir())


def test_a_trainer_refuses_a_folder_in_which_another_trains(start, tmp_path, one_device):
    assert said(first := start()) == "holding\n"
    data = tiny.make_data(tmp_path / "data")
    before = sorted(path.name for path in tmp_path.iterdir())
    refused(ValueError, f"{first.pid}", Trainer, tiny.experiment(data), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_trainer_gives_its_folder_free(tmp_path, one_device, monkeypatch):
    data = tiny.make_data(tmp_path / "data")
    monkeypatch.setattr(Trainer, "_start", lambda self: types.SimpleNamespace(step=0))
    for _ in range(2):
        with Trainer(tiny.experiment(data), tmp_path / "run"):
            assert (tmp_path / "run" / FILE).exists()
        assert not (tmp_path / "run" / FILE).exists()
