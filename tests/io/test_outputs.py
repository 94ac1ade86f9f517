"""Outputs are whole whatever happens, and take the place of nothing but files, and folders that jprm made."""

import errno
import os
import pathlib
import resource
import shutil
import subprocess
import sys

import pytest
from refusing import refused
from tiny_run import processbench_file

import jprm.loading
import jprm.methods.evaluate.run
import jprm.methods.evaluate.suite
from jprm.apps import cli
from jprm.io.folders import whole_folder
from jprm.io.jsonl import Rejects, write_records
from jprm.io.outputs import atomic_file, atomic_write, check_output, continued, cut
from jprm.io.storage import only_run, path_of
from jprm.methods.data.prepare import prepare

STUDIES = pathlib.Path(__file__).resolve().parents[2] / "experiments/studies"
COMMANDS = {
    "score": "score --model {model} --input {input} --output {out}",
    "label mc": "label mc --estimate soft --policy {model} --input {input} --rollouts r.jsonl --output {out}",
    "rollouts": "label mc --estimate soft --policy {model} --input {input} --rollouts {out} --output mc.jsonl",
    "label omega": "label omega --policy {model} --input {input} --rollouts r.jsonl --output {out}",
    "verify": "label verify --kind arithmetic --input {input} --output {out}",
    "teacher": "label teacher --model {model} --input {input} --output {out}",
    "consensus": "label consensus --input other.jsonl --other {input} --output {out}",
    "search": "search best-of-n --policy {model} --model {model} --input {input} --budget 9 --output {out}",
    "filter": "search filter --input {input} --calibrate other.jsonl --error-rate 0.1 --output {out}",
    "steps": "eval steps --model {model} --neutral positive --input {input} --output {out}",
    "calibration": "eval calibration --neutral drop --model {model} --input {input} --calibrate {input} --output {out}",
    "drift": f"eval {STUDIES}/drift.py:DRIFT {{input}} other.jsonl --json {{out}}",
    "report": "report {model} --output {out}",
    "plan": "plan {input} --topology v5e-16 --output {out}",
}
RECORD = '{"problem": "p", "steps": ["1 + 1 = 2"], "labels": [1], "answer": "2", "search": {"chosen": 0}}\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("input.jsonl", "other.jsonl", "precious.txt"):
        pathlib.Path(name).write_text(RECORD)
    pathlib.Path("model").mkdir()
    pathlib.Path("model/results.json").write_text("{}")
    pathlib.Path("link").symlink_to("precious.txt")
    pathlib.Path("dangling").symlink_to("nothing")
    pathlib.Path("same.jsonl").hardlink_to("input.jsonl")
    os.mkfifo("pipe")
    return tmp_path


@pytest.fixture
def no_model(monkeypatch):
    """Loading a model or a policy is the work that a refusal spares."""

    def load(*args, **kwargs):
        raise AssertionError("the output was not looked at first")

    monkeypatch.setattr(jprm, "load", load, raising=False)
    for door in ("loading.load", "methods.evaluate.run.load", "methods.evaluate.suite.open_scorer"):
        monkeypatch.setattr(f"jprm.{door}", load)
    monkeypatch.setattr("jprm.methods.policy.load.load_policy", load)


@pytest.mark.parametrize("out", ["input.jsonl", "same.jsonl", "link", "dangling", "pipe", "model"])
@pytest.mark.parametrize("command", [name for name, line in COMMANDS.items() if line.split()[0] in cli.app.registered])
def test_no_command_replaces_its_input_or_what_is_no_file(folder, no_model, capsys, command, out):
    if command == "report" and "." in out:
        shutil.copy("input.jsonl", "model/scores.jsonl")
        os.remove(out)
        pathlib.Path(out).hardlink_to("model/scores.jsonl")
    before = listed(folder)
    line = COMMANDS[command].format(model="model", input="input.jsonl", out=out)
    assert cli.main(line.split()) == 2
    assert out in capsys.readouterr().err
    assert listed(folder) == before


def listed(folder):
    return {path: (path.lstat().st_ino, path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*")}


def test_a_suite_is_not_its_own_result(folder, no_model, capsys):
    pathlib.Path("results.json").write_text('{"neutral": "drop", "steps": {"data": ["input.jsonl"]}}')
    assert cli.main("eval suite --model model --suite results.json --output .".split()) == 2
    assert "results.json" in capsys.readouterr().err
    assert pathlib.Path("results.json").exists()


def test_a_suite_keeps_its_results_until_the_model_is_there(folder, capsys):
    processbench_file(folder / "easy.json", 3, 1)
    pathlib.Path("suite.json").write_text('{"processbench": {"data": "easy.json", "calibrate": "easy.json"}}')
    pathlib.Path("out").mkdir()
    pathlib.Path("out/results.json").write_text("{}")
    assert cli.main("eval suite --model nowhere --suite suite.json --output out".split()) == 2
    assert "nowhere" in capsys.readouterr().err
    assert pathlib.Path("out/results.json").read_text() == "{}"


def test_an_output_through_a_link_to_a_folder_is_a_file(folder):
    pathlib.Path("place").symlink_to("model")
    atomic_write("place/new.json", "1")
    check_output("place/new.json", "input.jsonl")
    refused(ValueError, r"place/new\.json", check_output, "place/new.json", "model/new.json")
    refused(ValueError, "/dev/null", check_output, os.devnull)  # no test may write there: root can
    assert pathlib.Path("model/new.json").read_text() == "1"


FILL = """
import os, sys
from jprm.io import folders
at = 0
def dying(module, name):
    whole = getattr(module, name)
    def call(*args, **kwargs):
        global at
        at -= 1
        if at == 0:
            os.kill(os.getpid(), 9)
        return whole(*args, **kwargs)
    setattr(module, name, call)
for name in ("mkdir", "write_text", "rename", "unlink", "rmdir"):
    dying(folders.pathlib.Path, name)
dying(folders.shutil, "rmtree")
for line in sys.stdin:  # each in a child of its own, so that modules are imported once
    if not (child := os.fork()):
        at = int(line)
        with folders.whole_folder("out", sys.argv[1] or None, replace=True) as new:
            (new / "a").write_text("new")
            (new / "b").write_text("new")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.parametrize("request_", ["", "mine"])
def test_a_folder_killed_at_any_moment_is_the_old_or_the_new_one(tmp_path, request_):
    """Every call that changes the disk is the last one once; the next run then ends as an undisturbed one."""
    out, ended = tmp_path / "out", []
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", FILL, request_], cwd=tmp_path, **pipes) as process:

        def fill(at):
            print(at, file=process.stdin, flush=True)
            return int(process.stdout.readline())

        for at in range(1, 40):
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            (out / "old").write_text("old")
            ended.append(fill(at))
            assert not out.exists() or [path.name for path in sorted(out.iterdir())] in (["old"], ["a", "b"])
            assert fill(0) == 0
            assert [path.name for path in sorted(out.iterdir())] == ["a", "b"]
            assert [path.name for path in tmp_path.iterdir()] == ["out"]
            if ended[-1] == 0:
                break
    assert len(ended) > 8 and set(ended[:-1]) == {-9} and ended[-1] == 0


def test_a_folder_goes_on_for_the_same_request_alone(tmp_path):
    out = tmp_path / "out"
    for request in ("one", "one", "two"):
        with pytest.raises(KeyboardInterrupt), whole_folder(out, request) as new:
            stored = sorted(path.name for path in new.iterdir())
            (new / f"{len(stored)}").touch()
            raise KeyboardInterrupt
        assert stored == (["0"] if request == "one" and len(stored) else [])
    with whole_folder(out, "two") as new:
        assert [path.name for path in new.iterdir()] == ["0"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_user_keeps_under_jprms_names_stays(tmp_path):
    """A folder OUT.partial without jprm's mark, a file in one that has it, a lock file with content, a link as OUT."""
    out, work = tmp_path / "out", tmp_path / "out.partial"
    work.mkdir()
    (work / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"out\.partial"), whole_folder(out):
        pass
    (work / ".jprm").write_text("another request")
    (tmp_path / "out.partial.lock").write_text("mine")
    with only_run(work):
        pass
    with whole_folder(out) as new:
        (new / "a").touch()
    assert [path.name for path in out.iterdir()] == ["a"]
    assert (work / "thesis.tex").read_text() == "years of work"
    assert (tmp_path / "out.partial.lock").read_text() == "mine"
    (tmp_path / "link").symlink_to("out")
    with pytest.raises(ValueError, match="link"), whole_folder(tmp_path / "link", replace=True):
        pass


# ---- Resumable outputs against other writers, full disks and damaged notes.


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
