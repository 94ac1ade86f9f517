"""One training in a folder: processes that hold it, die, hang and come from other machines."""

import signal
import subprocess
import sys
import types

import pytest
import tiny_run as tiny
from buckets import objects
from families import breadth
from refusing import refused

from jprm.io import folders
from jprm.io.folders import FILE, BucketLock, DiskLock
from jprm.train import Trainer

HOLD = """
import errno, pathlib, sys, time
from jprm.io import folders
boot, locks, missed = sys.argv[2:]
folders.BEAT, folders.MISSED = 0.1, int(missed)
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
    """Starts a process that takes the folder as if on the machine `boot` ('' is this one), with or without locks.

    By default it takes over a live holder's folder only after 1,000 missed beats, which no busy machine reaches."""
    started = []

    def start(boot="", locks="flock", missed=1000):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-c", HOLD, str(tmp_path), boot, locks, str(missed)]
        started.append(subprocess.Popen(command, text=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def hold(start):
    """Starts a process that holds the folder, after it has said so or that it takes it over."""

    def hold(*machine, takes_over=False):
        process = start(*machine, missed=8 if takes_over else 1000)
        assert not takes_over or "taking over" in process.stdout.readline()
        assert process.stdout.readline() == "holding\n"
        return process

    return hold


def killed(process):
    process.kill()
    process.wait()


def refuses(start, holder, *machine):
    assert f"process {holder.pid} on" in start(*machine).communicate(timeout=300)[1]


def test_a_live_run_is_refused_and_a_killed_one_is_followed_at_once(start, hold, tmp_path, monkeypatch):
    first = hold()
    refuses(start, first)
    killed(first)
    monkeypatch.setattr(folders, "time", None)  # in this process, without a beat's wait
    lock = DiskLock(tmp_path)
    assert lock.attempt()
    lock.release()


def test_a_run_that_ends_leaves_nothing(hold, tmp_path):
    first = hold()
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    first.communicate("end\n", timeout=300)
    assert first.returncode == 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("locks", ["flock", *breadth(["none"])])
def test_a_run_of_another_machine_is_refused_while_it_beats_and_then_followed(start, hold, locks):
    first = hold("another machine", locks)
    refuses(start, first, "", locks)
    killed(first)
    hold("", locks, takes_over=True)


def test_the_lock_that_a_vanished_host_left_is_taken_over(start, hold):
    """A stopped process keeps its lock and beats no more, like a host that is cut off. When it is back, it ends."""
    first = hold("another machine")
    first.send_signal(signal.SIGSTOP)
    second = hold(takes_over=True)
    first.send_signal(signal.SIGCONT)
    assert first.wait(timeout=300) == 1 and "folder" in first.stderr.read()
    refuses(start, second)
    assert second.poll() is None


def test_a_killed_run_of_this_machine_needs_no_locks_to_be_followed_at_once(hold):
    killed(hold("", "none"))
    hold("", "none")


def test_a_child_that_outlives_its_run_holds_nothing(hold, tmp_path):
    first = hold()
    text = (tmp_path / FILE).read_bytes()
    killed(first)
    (tmp_path / FILE).write_bytes(text)
    with open(tmp_path / FILE, "rb") as inherited:
        assert folders._locked(inherited)
        hold()


def test_a_damaged_file_is_no_holder(tmp_path):
    (tmp_path / FILE).write_text("[" * 100_000)
    lock = DiskLock(tmp_path)
    assert lock.attempt()
    lock.release()
    assert not list(tmp_path.iterdir())


def test_a_trainer_refuses_a_folder_in_which_another_trains(hold, tmp_path, one_device):
    first = hold()
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


def lock(folder, boot="", pid=None):
    """A lock as of a machine of this name ('' is this one)."""
    bucket_lock = BucketLock(folder)
    bucket_lock._me |= ({"boot": boot, "host": boot} if boot else {}) | ({"pid": pid} if pid else {})
    return bucket_lock


def test_one_run_at_a_time_holds_a_bucket_s_folder(bucket, monkeypatch):
    monkeypatch.setattr(folders, "BEAT", 0.05)
    monkeypatch.setattr(folders, "MISSED", 1000)  # a busy machine may miss many
    first, other = lock(bucket), lock(bucket, "elsewhere")
    assert first.attempt()
    with pytest.raises(ValueError, match=FILE):
        while not other.attempt():
            pass
    first.release()
    assert not objects(bucket) and other.attempt()
    other._ended.set()  # its machine dies: no beat any more
    other._beating.join()
    monkeypatch.setattr(folders, "MISSED", 3)
    third, late = lock(bucket, "third"), lock(bucket, "late")
    while not third.attempt():
        pass
    with pytest.MonkeyPatch.context() as patch:  # another that found the same run gone, and comes a moment later
        (bucket / FILE / str(other._number)).write_bytes(b"{}")
        patch.setattr(late, "_numbers", lambda: [other._number])
        patch.setattr(late, "_gone", lambda *_: True)
        assert not late.attempt()
    assert third._mine() and not other._mine()  # at its next beat the other would end
    third.release()


def test_a_run_that_was_killed_on_this_machine_is_followed_at_once(bucket):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = lock(bucket, pid=dead.pid)
    left._number = 7
    left._write(3, new=True)
    new = lock(bucket)
    assert new.attempt() and list(objects(bucket)) == [f"/{FILE}/8"]
    new.release()
    assert not objects(bucket)
