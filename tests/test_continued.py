"""Resumable outputs against other writers, full disks and damaged notes."""

import errno
import resource
import subprocess
import sys

import pytest
from refusing import refused

from jprm.io.jsonl import Rejects, write_records
from jprm.io.outputs import atomic_file, continued, cut
from jprm.io.storage import only_run, path_of
from jprm.methods.data.prepare import prepare

REQUEST = {"model": "m"}

HOLD = """
import sys
from jprm.io.outputs import continued
from jprm.io.jsonl import write_records

def wait():
    print("writing", flush=True)
    sys.stdin.readline()

def theirs():
    yield {"of": "them"}
    wait()

if sys.argv[1] == "at once":
    write_records(sys.argv[2], theirs())
else:
    with continued(sys.argv[2], {"model": "m"}) as part:
        part.write(b"theirs\\n")
        part.flush()
        wait()
"""


@pytest.fixture
def writer():
    """Starts another process that writes a file until it is told to end."""
    started = []

    def start(kind, path):
        command = [sys.executable, "-c", HOLD, kind, str(path)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "writing\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def write(output, lines, request=REQUEST):
    with continued(output, request) as part:
        if part is not None:
            part.write(lines)
            part.become(path_of(output))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("kind", "killed"), [("continued", False), ("continued", True), ("at once", False)])
def test_a_second_writer_is_refused_and_the_first_is_whole(tmp_path, writer, kind, killed):
    output = tmp_path / "out.jsonl"
    other = writer(kind, output)
    with pytest.raises(ValueError, match="writing"):
        write(output, b"ours\n") if kind == "continued" else write_records(output, [{"of": "us"}])
    if killed:
        other.kill()
    other.communicate("\n")
    if kind == "at once":
        assert output.read_bytes() == b'{"of": "them"}\n' and names(tmp_path) == ["out.jsonl"]
    else:  # it ended without a name for its file, which another call continues
        assert (tmp_path / "out.jsonl.part").read_bytes() == b"theirs\n"
        with continued(output, REQUEST) as file:
            assert cut(file, 1) == 1


def test_folders_are_made(tmp_path):
    with Rejects(tmp_path / "no/such/r"):
        write(tmp_path / "nor/such/out.jsonl", b"ours\n")
    assert (tmp_path / "nor/such/out.jsonl").read_bytes() == b"ours\n"


@pytest.mark.parametrize("note", [b"", b'{"mod', b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_damaged_note_never_lets_an_output_go(tmp_path, note):
    output = tmp_path / "out.jsonl"
    write(output, b"ours\n")
    (tmp_path / "out.jsonl.info.json").write_bytes(note)
    refused(ValueError, "out.jsonl", write, output, b"new\n")
    assert output.read_bytes() == b"ours\n" and names(tmp_path) == ["out.jsonl", "out.jsonl.info.json"]
    output.unlink()
    write(output, b"new\n")
    assert output.read_bytes() == b"new\n"


def test_a_full_disk_is_named(tmp_path):
    """The system's own error, of a file that may not grow beyond 100 bytes, says no name."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError) as error:
            write(tmp_path / "out.jsonl", b"x" * 1000)
        assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(tmp_path / "out.jsonl.part"))
        with pytest.raises(OSError) as error, atomic_file(tmp_path / "whole") as file:
            file.write(b"x" * 1000)
        assert error.value.filename == str(tmp_path / "whole.partial")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "whole" not in names(tmp_path) and "whole.partial" not in names(tmp_path)
    with continued(tmp_path / "out.jsonl", REQUEST) as file:
        assert cut(file, 1) == 0


def test_two_runs_that_write_one_folder_do_not_clear_each_other_away(tmp_path):
    (tmp_path / "s.jsonl").write_text('{"problem": "p", "steps": ["a"]}\n')
    with only_run(tmp_path / "data.partial"):
        refused(ValueError, "data.partial.lock", prepare, "jsonl", [tmp_path / "s.jsonl"], tmp_path / "data")
    assert names(tmp_path) == ["s.jsonl"]


def test_an_output_refused_before_its_first_line_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="bad record"), continued(tmp_path / "out.jsonl", REQUEST):
        raise ValueError("bad record")
    assert names(tmp_path) == []
    with pytest.raises(ValueError, match="bad record"), continued(tmp_path / "out.jsonl", REQUEST) as file:
        file.write(b"ours\n")
        file.flush()
        raise ValueError("bad record")
    assert names(tmp_path) == ["out.jsonl.info.json", "out.jsonl.part"], "what was paid for stays"
