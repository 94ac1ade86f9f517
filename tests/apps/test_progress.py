"""The progress bar: a bar on a terminal, a short line a minute in a log."""

import re
import threading
import time
import types

import pytest

from jprm.io import outputs
from jprm.io.outputs import Bar


def wait_for(capsys, wanted, seconds=300):
    said, until = "", time.monotonic() + seconds
    while wanted not in said and time.monotonic() < until:
        time.sleep(0.01)
        said += capsys.readouterr().out
    return said


def test_a_log_gets_a_line_a_minute_while_nothing_is_done(monkeypatch, capsys):
    monkeypatch.setattr(Bar, "EVERY_S", 0.02)
    line, before = "mine: 0 of 40, compiling\n", set(threading.enumerate())
    with Bar("mine", 40, note="compiling"):
        assert wait_for(capsys, line).startswith(line)  # before the first step
        assert line in wait_for(capsys, line)  # again, after a minute
        (thread,) = set(threading.enumerate()) - before
    thread.join(300)  # else the next test could get one more line


def test_a_short_command_prints_its_last_line_alone(capsys):
    with Bar("scoring g.jsonl", 3) as bar:
        list(bar.follow(range(3)))
    assert capsys.readouterr().out == "scoring g.jsonl: 3 of 3\n"


def test_a_command_without_progress_prints_its_line_once(capsys):
    with Bar("mine", 40, 40, note="finished"):
        pass
    assert capsys.readouterr().out == "mine: 40 of 40, finished\n"


def test_a_hidden_bar_prints_nothing(capsys):
    with Bar("mine", 2, note="compiling", shown=False) as bar:
        bar.add(2)
    assert capsys.readouterr().out == ""


@pytest.fixture
def clock(monkeypatch):
    """A stopped clock for the bar, as a list with its seconds."""
    now = [1000.0]
    monkeypatch.setattr(outputs, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.parametrize(
    ("total", "done", "seconds", "line"),
    [
        (40, 10, 20, "x: 10 of 40, 60 s left, loss 0.7"),
        (40, 10, 120, "x: 10 of 40, 6 min left, loss 0.7"),
        (40, 1, 800, "x: 1 of 40, 9 h left, loss 0.7"),
        (4000, 1, 600, "x: 1 of 4,000, 28 days left, loss 0.7"),
        (40, 0, 600, "x: 0 of 40, loss 0.7"),
        (40, 40, 600, "x: 40 of 40, loss 0.7"),
        (None, 1234, 5, "x: 1,234, loss 0.7"),
    ],
)
def test_a_line_says_how_far_and_how_long(clock, total, done, seconds, line):
    bar = Bar("x", total, shown=False)
    clock[0] += seconds
    bar.add(done, "loss 0.7")
    assert bar.line() == line


def test_the_time_left_counts_only_this_call(clock):
    bar = Bar("x", 100, 90, shown=False)  # 90 were there
    clock[0] += 10
    bar.add(5)
    assert bar.line() == "x: 95 of 100, 10 s left"


def test_lines_are_short_and_without_long_numbers(tiny_run, tmp_path, capsys):
    """What `jprm train` prints off a terminal, of the whole run."""
    import dataclasses

    import tiny_run as tiny

    experiment = dataclasses.replace(tiny_run.experiment, steps=2)
    with tiny.one_device():
        tiny.training.train(experiment, tmp_path / "run")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tiny:")]
    assert lines[0] == "tiny: 0 of 2, compiling" and lines[-1].startswith("tiny: 2 of 2, ")
    assert all(len(line) < 120 and not re.search(r"\d\.\d{6}", line) for line in lines)


def test_prepare_says_how_far_it_is_in_a_long_file(tmp_path, monkeypatch, capsys):
    from jprm.methods.data import prepare

    (tmp_path / "a.jsonl").write_text(
        "".join(f'{{"problem": "{i}{"x" * 2000}", "steps": ["a"]}}\n' for i in range(800))
    )
    for least, lines in ((10, 0), (1, 1)):
        monkeypatch.setattr(prepare, "SHOWN_MB", least)
        prepare.prepare("jsonl", [tmp_path / "a.jsonl"], tmp_path / f"out{least}")
        assert capsys.readouterr().out.count("MB read: 1 of 1, a.jsonl") == lines
