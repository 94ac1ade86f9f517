"""Judges chains by any checker that is a command: a proof assistant, a solver, a type checker.

A JSON file of the user's own describes the checker, e.g. Agda:

    {"command": ["agda", "--safe", "{file}"], "suffix": ".agda", "source": "{theorem}\\n{steps}\\n",
     "error": "proof.agda:(?P<line>\\\\d+)", "unsound": "\\\\bpostulate\\\\b"}

The checker runs in the sandbox, once per chain. It sees the source, filled with the record's keys and the steps. A
chain is proved, wrong, or undecided: if time runs out, the checker is killed, or it fails without an `error`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import re
import shutil
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from jprm.io.jsonl import RecordError, parse
from jprm.io.storage import path_of
from jprm.methods.verify import Verdict
from jprm.methods.verify.sandbox import Limits, Shown, run_command
from jprm.options import OptionError, from_json

_REMEDY = "See docs/checkers.md."
_FIELD = re.compile(r"\{\{|\}\}|\{(\w+)\}")
_HERE = "\0steps\0"

NAME = "proof"
"""Name of the checked file, without its suffix; Agda's and Isabelle's modules have their file's name."""


@dataclasses.dataclass(frozen=True)
class CommandChecker:
    """A checker that is a command.

    Attributes:
      command: program and arguments. `{file}` is the checked file's name, `proof` and the suffix.
      suffix: of the checked file, e.g. `.v`.
      source: text of the file: `{steps}`, and keys of the record, e.g. `{problem}`. Write a literal brace twice.
      step: text of each step in `{steps}`, on lines of its own: `{step}`, and `{number}` from 1.
      proved: exit status of a proved chain, or a regular expression found in its output. Otherwise it is not proved.
      error: regular expression found in the output for a wrong chain. A chain without it that is not proved is
        undecided. Its group `line` (of the file) or `step`, both from 1, locates the wrong step. Empty: every unproved
        chain is wrong.
      unsound: regular expression for steps or output with which a chain is no proof, e.g. `\\bsorry\\b`. Empty: off.
      seconds: time limit per chain; a chain that exceeds it is undecided.
      memory: limit in bytes, including reserved memory.
      folders: further read-only folders in the sandbox, as absolute paths or below `~`.
      processes: the checker may start processes.
    """

    command: tuple[str, ...]
    suffix: str
    source: str
    step: str = "{step}"
    proved: int | str = 0
    error: str = ""
    unsound: str = ""
    seconds: float = 30.0
    memory: int = 4 << 30
    folders: tuple[str, ...] = ()
    processes: bool = False

    def __post_init__(self):
        if not any("{file}" in word or NAME in word for word in self.command[1:]):
            raise OptionError("command", f"{list(self.command)} has no argument with {{file}}, or with {NAME}")
        if not re.fullmatch(r"\.[\w.]*\w", self.suffix):
            raise OptionError("suffix", f"{self.suffix!r} is no suffix such as .v")
        if "steps" not in _fields(self.source):
            raise OptionError("source", "has no {steps}")
        if not {"step"} <= set(_fields(self.step)) <= {"step", "number"}:
            raise OptionError("step", f"{self.step!r} must have {{step}}, and may have {{number}}")
        for field in ("proved", "error", "unsound"):
            try:
                groups = _pattern(str(getattr(self, field))).groupindex
            except re.error as error:
                raise OptionError(field, f"is no pattern: {error}") from None
            if field == "error" and len(set(groups) & {"line", "step"}) > 1:
                raise OptionError(field, "has both groups, line and step: keep one")
        if not 0 < self.seconds < float("inf") or self.memory < 1 << 20:
            raise OptionError("seconds", "must be above 0 and finite, and memory at least 1 MiB")


def program_of(checker: CommandChecker) -> str:
    """Returns the absolute path of the checker's program.

    Raises OSError if it is not installed, or is given by a relative path.
    """
    name = os.path.expanduser(checker.command[0])
    if "/" in name and not os.path.isabs(name):
        raise OSError(f"command: {name}: name a program on the PATH, or its absolute path")
    if not (path := shutil.which(name)):
        raise OSError(f"command: {name} is not installed, or not on the PATH")
    return path


def folders_of(checker: CommandChecker) -> tuple[str, ...]:
    """Returns the real paths of the further folders, in order; () if there are no such folders.

    Raises OSError if one is absent, is not an absolute path, or holds the user's home.
    """
    paths, home = [], os.path.realpath(os.path.expanduser("~"))
    for folder in map(os.path.expanduser, checker.folders):
        paths.append(os.path.realpath(folder))
        if not os.path.isabs(folder) or not os.path.isdir(folder):
            raise OSError(f"folders: {folder} is no folder with an absolute path")
        if os.path.commonpath([paths[-1], home]) == paths[-1]:
            raise OSError(f"folders: {folder} would show all of your home. Name a folder below it")
    return tuple(paths)


# ---- The file.


def load_checker(path: str | os.PathLike) -> CommandChecker:
    """Reads a checker's JSON file with the fields of `CommandChecker`; runs nothing.

    Raises:
      FileNotFoundError: there is no such file.
      RecordError: the file describes no checker, or is not JSON.
      OSError: its program or one of its folders is absent.
    """
    place, where = path_of(path), os.fspath(path)
    if not place.is_file():
        raise FileNotFoundError(f"{where}: no such file. Give a checker's JSON file")
    settings = parse(place.read_bytes(), where)
    if not isinstance(settings, dict):
        raise RecordError(where, "checker", "is no JSON object", _REMEDY)
    try:
        checker = from_json(CommandChecker, settings)
    except OptionError as error:
        raise RecordError(where, error.field, error.reason, f"Use {error.known}." if error.known else _REMEDY) from None
    try:
        program_of(checker)
        folders_of(checker)
    except OSError as error:
        raise OSError(f"{where}: {error}") from None
    return checker


def check_record(checker: CommandChecker, record: Mapping[str, Any], where: str) -> None:
    """Raises RecordError if a key of the source is absent from the record, or neither text nor a number.

    `where` begins the error, e.g. `problems.jsonl:3`.
    """
    for name in _fields(checker.source):
        if name != "steps" and not isinstance(record.get(name), str | int | float):
            raise RecordError(where, name, "is absent or no text, and the checker's source has it", "Give it.")


@functools.cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.MULTILINE)


def _fields(template: str) -> list[str]:
    return [match[1] for match in _FIELD.finditer(template) if match[1]]


def _filled(template: str, values: Mapping[str, Any]) -> str:
    """Fills a template in one pass, so braces in values stay as they are."""
    return _FIELD.sub(lambda match: str(values[match[1]]) if match[1] else match[0][0], template)


# ---- Judging.


@dataclasses.dataclass(frozen=True)
class ChainVerdict:
    """Result for one chain.

    Attributes:
      proved: `None` if undecided.
      reason: text of the error, or why the chain is undecided; "" if it is proved.
      step: index from 0 of the wrong step, if known.
    """

    proved: bool | None
    reason: str = ""
    step: int | None = None


def judge_chains(
    checker: CommandChecker, chains: Sequence[tuple[Mapping[str, Any], Sequence[str]]], *, in_sandbox: bool = True
) -> list[ChainVerdict]:
    """Judges (record, steps) chains, as many at once as there are processors; returns verdicts in order. Blocks.

    Records must pass `check_record`, else KeyError. A chain whose steps match `unsound` is not run, and counts as wrong
    there. [] without chains. Without `in_sandbox`, the checker has the user's permissions. Raises OSError if there is
    no sandbox, or the checker is absent or does not start in it.
    """
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda chain: judge_chain(checker, *chain, in_sandbox=in_sandbox), chains))


def judge_chain(
    checker: CommandChecker, record: Mapping[str, Any], steps: Sequence[str], *, in_sandbox: bool = True
) -> ChainVerdict:
    """Judges one chain, of a record and its steps' texts, like `judge_chains`; waits at most `checker.seconds`.

    The record must pass `check_record`. Raises OSError if there is no sandbox, or the checker is absent or does not
    start in it.
    """
    if (unsound := _unsound(checker, steps)) is not None:
        return unsound
    source, start_P = _source(checker, record, steps)
    file = NAME + checker.suffix
    command = [program_of(checker), *(word.replace("{file}", file) for word in checker.command[1:])]
    shown = Shown({file: source}, folders_of(checker), checker.processes)
    limits = Limits(checker.seconds, checker.memory)
    result = run_command(command, "", limits, sandbox=in_sandbox, shown=shown)
    if result.output.startswith(("bwrap: ", "prlimit: ")):
        hint = "Name the folders that it needs in `folders`"
        raise OSError(f"{checker.command[0]} does not start in the sandbox: {_line(result.output)}. {hint}")
    if result.status is None:
        return ChainVerdict(None, f"ran longer than {checker.seconds:g} seconds")
    if result.status == -signal.SIGXFSZ:
        return ChainVerdict(None, f"printed {limits.file >> 20} MiB or more")
    if result.status < 0 or result.status > 128:
        return ChainVerdict(None, f"ended by signal {abs(result.status) % 128}")
    return _read(checker, result.status, result.output, start_P)


def _unsound(checker: CommandChecker, steps: Sequence[str]) -> ChainVerdict | None:
    """Returns the verdict on a chain whose steps have the unsound pattern, at the step where it ends."""
    text = "\n".join(steps)
    match = _pattern(checker.unsound).search(text) if checker.unsound else None
    if match is None:
        return None
    ends = itertools.accumulate(len(step) + 1 for step in steps)
    step = next(i for i, end in enumerate(ends) if match.end() <= end)
    return ChainVerdict(False, f"unsound: {_line(match[0])}", step)


def _source(checker: CommandChecker, record: Mapping[str, Any], steps: Sequence[str]) -> tuple[str, list[int]]:
    """Returns the file's text, and the line on which each step begins; last, the line behind the steps."""
    texts = [_filled(checker.step, {"step": step, "number": i}) for i, step in enumerate(steps, start=1)]
    source = _filled(checker.source, {**record, "steps": _HERE})
    start_P = [source.partition(_HERE)[0].count("\n") + 1]
    for text in texts:
        start_P.append(start_P[-1] + text.count("\n") + 1)
    return source.replace(_HERE, "\n".join(texts)), start_P


def _read(checker: CommandChecker, status: int, output: str, start_P: Sequence[int]) -> ChainVerdict:
    """Reads the checker's exit status and output."""
    if isinstance(checker.proved, int):
        proved = status == checker.proved
    else:
        proved = _pattern(checker.proved).search(output) is not None
    if proved:
        unsound = _pattern(checker.unsound).search(output) if checker.unsound else None
        return ChainVerdict(False, f"unsound: {_line(unsound[0])}") if unsound else ChainVerdict(True)
    error = _pattern(checker.error).search(output)
    if error is None:
        return ChainVerdict(None, f"gave no verdict: {_line(output) or f'exit status {status}'}")
    reason = _line(output[error.start() :] if checker.error else output) or f"exit status {status}"
    place = {name: int(text) for name, text in error.groupdict().items() if re.fullmatch("[0-9]{1,9}", text or "")}
    steps = len(start_P) - 1
    if "step" in place:
        return ChainVerdict(False, reason, place["step"] - 1 if 0 < place["step"] <= steps else None)
    if "line" not in place or place["line"] >= start_P[-1]:
        return ChainVerdict(False, reason)
    if place["line"] < start_P[0]:
        return ChainVerdict(None, f"rejects the text before the first step: {reason}")
    return ChainVerdict(False, reason, max(i for i in range(steps) if start_P[i] <= place["line"]))


def _line(text: str) -> str:
    """Returns the first 200 characters of the text on one line."""
    return " ".join(text.split())[:200]


def verdicts_of(verdict: ChainVerdict, steps: int) -> list[Verdict]:
    """Returns a verdict per step: all correct if the chain is proved, else correct before a located error.

    The step with the error is incorrect (`false` has the reason); later steps, and all if the chain is undecided or no
    step is located, are not checkable. In an unsound chain the steps before the error are not checkable either, since
    the checker did not run.
    """
    if verdict.proved:
        return [Verdict(1, 1)] * steps
    if verdict.step is None or verdict.proved is None:
        return [Verdict(None)] * steps
    unsound = verdict.reason.startswith("unsound")  # the checker did not run
    before = Verdict(None) if unsound else Verdict(1, 1)
    wrong = Verdict(0, 1, verdict.reason)
    return [before] * verdict.step + [wrong] + [Verdict(None)] * (steps - verdict.step - 1)
