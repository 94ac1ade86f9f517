"""Argument types shared by several commands, and config dataclasses as option groups."""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import itertools
import os
import re
import shutil
import signal
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from tyro.conf import Positional, arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo
from tyro.extras import SubcommandApp

from jprm.apps import FIRST, Hidden
from jprm.io.outputs import atomic_write, check_input, check_output
from jprm.io.storage import Place, path_of
from jprm.methods.judge import is_judge
from jprm.options import OptionError, assigned, from_json, place_of, values_of

REFUSALS = (ValueError, OSError, NotImplementedError, FloatingPointError)
"""Errors with a message for the user. Any other error is a bug, and shows its traceback."""

OnError = Literal["stop", "skip"]
Settings = Annotated[tuple[str, ...], arg(name="set", metavar="KEY=VALUE ...", help_behavior_hint="")]
Files = Annotated[tuple[Path, ...], arg(metavar="FILE ...")]
Folder = Annotated[Path, arg(metavar="DIR")]
Model = Annotated[str, arg(metavar="DIR|P.json")]
OneModel = Annotated[str | None, arg(metavar="DIR", help_behavior_hint="")]
Judge = Annotated[Path, arg(metavar="P.json")]
EnvironmentOption = Annotated[
    tuple[str, ...], arg(name="environment", metavar="FILE.py:NAME [turns=INT]", help_behavior_hint="")
]
PolicyFile = Annotated[Path, arg(metavar="P")]
Count = Annotated[int | None, arg(metavar="INT", help_behavior_hint="")]
Number = Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")]
Distributed = Annotated[str | None, arg(metavar="WHERE", help_behavior_hint="")]

SYNONYMS = {
    "data": "input", "source": "input", "out": "output", "json": "output", "part": "shard", "k": "n", "shards": "files",
    "problems-at-once": "at-once", "trees-at-once": "at-once", "too-long": "on-error", "calibration": "calibrate",
    "judge": "model",
}  # fmt: skip
"""Former option names and their present names; accepted if the command has no option of the former name."""

_RAY = {
    "shards": "--engine ray shards=N", "workers": "--engine ray shards=N workers=MIN,MAX",
    "gpus": "--engine ray shards=N gpus=NUMBER",
}  # fmt: skip
_TURNS = {"turns": "--environment FILE.py:NAME turns=N"}
_FOLDER = 'a folder with adapter.json {"like": "contrast", "base": DIR, "reference": DIR} as the model'
ENDED = {
    "score": _RAY, "sample": _RAY, "search": _RAY | _TURNS,
    "label": _RAY | _TURNS | {"other-threshold": "--threshold INPUT OTHERS"},
    "eval": {"reference": _FOLDER}, "fuse": {"reference": _FOLDER.replace("the model", "a source, prm=DIR")},
    "serve": {"reference": _FOLDER, "judge": "the judge's file among the models: jprm serve DIR P.json"},
    "table": {name: f"--format {name}" for name in ("csv", "latex", "markdown")},
}  # fmt: skip
"""Options that users try but a command or group lacks, e.g. former ones, and their replacement in the error."""

ADDRESSES = ConstructorRegistry()


@ADDRESSES.primitive_rule
def _path(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Lets tyro parse a Path option that holds a bucket address, whose `//` a plain Path would shorten."""
    if kind.type is not Path:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=_place,
        is_instance=lambda value: isinstance(value, os.PathLike),
        str_from_instance=lambda value: [os.fspath(value)],
    )


def _place(words: Sequence[str]) -> Place:
    try:
        return place_of(words[0])
    except ValueError as error:  # tyro would make a box of it
        raise OSError(str(error)) from error


class Commands(SubcommandApp):
    """A group of commands. The group's help shows one sentence per command; `COMMAND --help` shows its whole docstring.

    Paragraphs and descriptions of arguments become single lines, as tyro would keep some of their line breaks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.registered: dict[str, tuple[Any, str]] = {}

    def command(self, func: Any = None, *, name: str | None = None, help: str = "") -> Any:
        if func is None:
            return lambda func: self.command(func, name=name, help=help)
        if inspect.isfunction(func):
            doc = re.sub(r"\n {8,}", " ", inspect.cleandoc(func.__doc__ or ""))
            func.__doc__ = re.sub(r"^(\S.*)\n(?=\S)", r"\1 ", doc, flags=re.MULTILINE)
        self.registered[name or func.__name__] = func, help or func.__doc__ or ""
        return func

    def cli(self, *, args: Sequence[str], **options: Any) -> Any:
        renamed = self.renamed(args)
        self._describe(args)
        return super().cli(args=renamed, registry=ADDRESSES, **options)

    def renamed(self, args: Sequence[str], group: str = "jprm") -> list[str]:
        """Returns `args` with former option names replaced, and checks the command and its options.

        `group` begins errors, e.g. `jprm eval`. Raises ValueError for an unknown command or option (with similar
        names), a value that an option does not take, or a missing required option.
        """
        if not args or args[0].startswith("-"):
            return list(args)
        known = {name.replace("_", "-"): func for name, (func, _) in self.registered.items()}
        word, rest = args[0].replace("_", "-"), args[1:]
        if word not in known:
            near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
            meant = f"; did you mean {' or '.join(near)}?" if near else "."
            raise ValueError(f"{group} has no command {args[0]!r}{meant} It has {', '.join(known)}")
        if isinstance(known[word], Commands):
            return [args[0], *known[word].renamed(rest, f"{group} {word}")]
        by_set = options_of(known[word], hidden=True)
        instead = "--set {}=VALUE" if "set" in options_of(known[word]) else "a script: only Python can set {}"
        ended = {name: instead.format(name.replace("-", "_")) for name in by_set}
        ended |= ENDED.get((group.split()[1:] or [word])[0], {})
        return [args[0], *_checked(f"{group} {word}", options_of(known[word]), rest, ended)]

    def chosen(self, args: Sequence[str]) -> Callable[..., Any] | None:
        """Returns the function of the command that the arguments name.

        `None` if they end at a group, begin with an option or name no command.
        """
        known = {name.replace("_", "-"): func for name, (func, _) in self.registered.items()}
        func = known.get(args[0].replace("_", "-")) if args else None
        return func.chosen(args[1:]) if isinstance(func, Commands) else func

    def _describe(self, args: Sequence[str]) -> None:
        """Registers every command with tyro: the chosen one with its full docstring, the others with one sentence."""
        for name, (func, about) in self.registered.items():
            chosen = [word.replace("_", "-") for word in args[:1]] == [name.replace("_", "-")]
            sentence = " ".join(about.split("\n\n")[0].split())
            if isinstance(func, Commands):
                super().command(func, name=name, help=about if chosen else sentence)
                func._describe(args[1:] if chosen else [])
                continue
            if chosen and {"-h", "--help"} & set(args):
                for hint in typing.get_type_hints(func).values():
                    _join_lines(hint)
            super().command(func, name=name, help=None if chosen else sentence)


class Option(NamedTuple):
    """One option of a command; `choices` and `number` restrict its value. A hidden one is a field of `--set`."""

    name: str
    metavar: str
    required: bool
    choices: tuple[str, ...]
    number: type | None  # int or float
    hidden: bool = False
    first: bool = False

    def check(self, value: str) -> None:
        """Raises ValueError if `value`, as typed, is not one of the choices, or not a number.

        Numbers have no bounds here.
        """
        if self.choices and value not in self.choices:
            *first, last = self.choices
            raise ValueError(f"--{self.name} is {value!r}: {', '.join(first)} or {last}")
        try:
            if self.number:
                self.number(value)
        except ValueError:
            whole = "a whole number" if self.number is int else "a number"
            raise ValueError(f"--{self.name} is {value!r}: it must be {whole}") from None


def options_of(func: Callable[..., Any], hidden: bool = False) -> dict[str, Option]:
    """Returns the options of a command by name, e.g. `on-error`.

    With `hidden`, the settings behind its `--set` (`Hidden`). Fields of an unnamed group (`arg(name="")`) are listed as
    options, of a named one as `group.field`. Positional arguments are left out. `func` needs type hints.
    """
    hints, options = typing.get_type_hints(func, include_extras=True), {}
    for parameter in inspect.signature(func).parameters.values():
        options |= _options(parameter.name, hints.get(parameter.name, Any), parameter.default is parameter.empty)
    return {name: option for name, option in options.items() if option.hidden == hidden}


def _options(name: str, hint: Any, required: bool, within: str = "", first: bool = False) -> dict[str, Option]:
    kind, *marks = (hint.__origin__, *hint.__metadata__) if hasattr(hint, "__metadata__") else (hint,)
    written = [mark for mark in marks if hasattr(mark, "metavar")]  # what `arg` makes
    if dataclasses.is_dataclass(kind):
        within += "" if any(mark.name == "" for mark in written) else f"{name}."
        hints = typing.get_type_hints(kind, include_extras=True)
        absent = {field.name: is_required(field) for field in dataclasses.fields(kind)}
        parts = [_options(part, hints[part], absent[part], within, FIRST in marks) for part in absent]
        return {key: value for options in parts for key, value in options.items()}
    if _marked(marks, Positional[int]):
        return {}
    name = within + next((mark.name for mark in written if mark.name), name).strip("_").replace("_", "-")
    metavar = next((mark.metavar for mark in written if mark.metavar), "")
    kinds = [kind] if typing.get_origin(kind) is tuple else [kind, *typing.get_args(kind)]
    literals = [type_of for type_of in kinds if typing.get_origin(type_of) is Literal]
    number = next((type_of for type_of in kinds if type_of in (int, float)), None)
    choices = tuple(map(str, typing.get_args(literals[0]))) if literals else ()
    return {
        name: Option(name, metavar, required, choices, number, _marked(marks, Hidden[int]), first or FIRST in marks)
    }


def is_required(field: dataclasses.Field) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _marked(marks: Sequence[Any], marked: Any) -> bool:
    return any(mark is marker for mark in marks for marker in marked.__metadata__)


def _checked(
    command: str, options: Mapping[str, Option], args: Sequence[str], ended: Mapping[str, str] = {}
) -> list[str]:
    """Returns a command's arguments with former option names replaced; raises ValueError as `Commands.renamed` does.

    `ended` maps missing options to their replacement, e.g. `{"csv": "--format csv"}`; the error shows it.
    """
    words, passed, last, more = [], set(), None, f"; `{command} --help` explains all"
    for word in args:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name == "help" or name.startswith("tyro-"):
            if last and last.name == "on-error" and word == "error":
                word = "stop"  # as it was called beside `--too-long`
            if last:
                last.check(word)
            words.append(word)
            last = None
            continue
        typed = name.replace("_", "-")
        name = typed if typed in options else SYNONYMS.get(typed, typed)
        last = options.get(name) or options.get(name.removeprefix("no-"))
        if name != typed and name in passed:
            raise ValueError(f"{command}: --{typed} is a former name of --{name}. Give one of them")
        if last is None and typed in ended:
            raise ValueError(f"{command} has no option --{typed}. Write {ended[typed]}")
        if last is None:
            near = difflib.get_close_matches(name, options, n=2, cutoff=0.6)
            meant = f". Did you mean {' or '.join(f'--{option}' for option in near)}?" if near else more
            raise ValueError(f"{command} has no option {word.partition('=')[0]}{meant}")
        passed.add(name)
        words.append(f"--{name}{equals}{value}")
        if equals:
            last.check(value)
            last = None
    if not {"-h", "--help"} & set(args):
        missing = [f"--{x.name} {x.metavar}".strip() for x in options.values() if x.required and x.name not in passed]
        if missing:
            raise ValueError(f"{command}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing{more}")
    return words


SHOWN_FIRST = 8
"""Options above the heading `more options` of a command's help."""


@contextlib.contextmanager
def arranging(chosen: Callable[..., Any] | None) -> Iterator[None]:
    """Collects the output of the block, the help of `chosen`, and prints it `arranged` at its end, also after an error.

    Without `chosen`, options keep their order.
    """
    console = {"encoding": sys.stdout.encoding, "isatty": sys.stdout.isatty}  # tyro asks for them
    text = type("Text", (io.StringIO,), console)()
    try:
        with contextlib.redirect_stdout(text):
            yield
    finally:
        sys.stdout.write(arranged(text.getvalue(), options_of(chosen) if chosen else {}))


def arranged(text: str, options: Mapping[str, Option]) -> str:
    """Returns a help text, filled to the terminal's width, with its options sorted.

    The order is required, marked `FIRST`, others; after SHOWN_FIRST of them comes a heading `more options`. Where UTF-8
    cannot be printed, tyro draws a title above a line in place of a box.
    """
    fill = functools.partial(textwrap.fill, width=max(40, shutil.get_terminal_size().columns))
    lines = re.sub(r"^(?!usage)[\w`({].*", lambda line: fill(line[0]), text, flags=re.MULTILINE).split("\n")
    plain = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines]
    top = next((i for i, line in enumerate(plain) if re.match(r"(╭─)? options ", line)), None)
    if top is None:
        return "\n".join(lines)
    matches = {i: re.match(r"[│ ] (?:-h, )?--([\w.-]+)", plain[i]) for i in range(top, len(plain))}
    begins = {i: match[1] for i, match in matches.items() if match}
    end = next(i for i in range(max(begins), len(plain)) if plain[i].startswith("╰") or not plain[i].strip())
    entries, name = {}, "title"
    for i in range(top, end):
        name = begins.get(i, name)
        entries.setdefault(name, []).append(lines[i])
    known = [name for name in options if name in entries]
    known.sort(key=lambda name: (not options[name].required, not options[name].first))
    heading = entries["title"][0].replace("options", "more options", 1).replace("╭", "├").replace("╮", "┤")
    entries["more"] = [re.sub("─{5}(?=─*┤)", "", heading, count=1), *entries["title"][1:]]
    more = ["more", *known[SHOWN_FIRST:]] if len(known) > SHOWN_FIRST else []
    shown = [line for name in ("title", "help", *known[:SHOWN_FIRST], *more) for line in entries[name]]
    return "\n".join([*lines[:top], *shown, *lines[end:]])


def _join_lines(kind: Any) -> None:
    """Joins each field description in a dataclass docstring to one line, as tyro would keep its line breaks."""
    for base in inspect.getmro(kind) if isinstance(kind, type) and dataclasses.is_dataclass(kind) else ():
        about, mark, rest = (base.__doc__ or "").partition("Attributes:")
        if mark:
            base.__doc__ = about + mark + re.sub(r"\n {8,}", " ", rest)


def command(
    run: Callable[[Any, Any, Any], None], config: type, options: type, how: Any, undivided: Any, **types: Any
) -> Callable[..., None]:
    """Makes a command that calls `run(options, chosen, how)`.

    `chosen` has the fields of `config`, but is not checked (`built`). The command has the docstring of `config`. Its
    options are the fields of `options`, `config` and finally `how`, an annotated type for the division of work over
    machines, with `undivided` as its default. `types` overrides the types of config fields, e.g. `k=Rollouts` names it
    `--n`. First, the command raises ValueError like `check_outputs`.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    fields = [(name, type_, defaults[name]) for name, type_ in types.items()]
    # Without checks: tyro would rewrite their errors. `built` makes them.
    unchecked = {"__doc__": "", "__post_init__": lambda self: None}
    kind = dataclasses.make_dataclass(config.__name__, fields, bases=(config,), frozen=True, namespace=unchecked)

    def call(options: Any, chosen: Any, how: Any = undivided) -> None:
        check_outputs(options)
        run(options, chosen, how)

    call.__annotations__ = {"options": Annotated[options, arg(name="")], "chosen": Annotated[kind, arg(name=""), FIRST]}
    call.__annotations__["how"] = how
    call.__doc__ = config.__doc__
    return call


def built(config: type, options: Any, **more: Any) -> Any:
    """Builds a `config` from the parsed options of a command, with the fields `more` replaced.

    `options` must have an attribute for every field, also for the replaced ones.

    Raises ValueError as `config` does for a value out of range.
    """
    return config(**{f.name: getattr(options, f.name) for f in dataclasses.fields(config)} | more)


def check_outputs(options: Any) -> None:
    """Raises ValueError if an output option is not a file path, or equals another option's path (`check_output`).

    `options` is a dataclass with parsed options; outputs are `output`, `to`, `rollouts` and `critiques`. Only
    `os.PathLike` values are compared with them.
    """
    paths = {name: value if isinstance(value, tuple) else (value,) for name, value in vars(options).items()}
    for name in {"output", "to", "rollouts", "critiques"} & paths.keys():
        if paths[name] == (None,):
            continue
        others = [path for other, values in paths.items() if other != name for path in values]
        check_output(paths[name][0], *(path for path in others if isinstance(path, os.PathLike)))


COPIED: dict[str, dict[str, str]] = {}
"""Inputs of copies that `first_records` wrote in this process: {"": the file, ":1": place of the copy's first line}."""


def of_inputs(message: str) -> str:
    """Returns a message with inputs in place of their copies (`COPIED`).

    E.g. `a.jsonl:3` for `out.jsonl.first9/a.jsonl:2`.
    """
    for copy, places in COPIED.items():
        end = r"(:\d+\b|(?![\w.]*\w))"  # not out.jsonl.first9/a.jsonl.info.json
        message = re.sub(re.escape(copy) + end, lambda match, at=places: at.get(match[1], match[0]), message)
    return message


def first_records(path: Any, limit: int, folder: str) -> Place:
    """Copies the first `limit` records of a file, table or prepared folder to `FOLDER/STEM.jsonl`; returns that file.

    Creates `folder`; replaces an earlier copy atomically, and copies `FILE.info.json` too. Fewer records are no error.
    The copy is noted in `COPIED`. Raises ValueError if `limit` is below 1 or the file is unreadable, FileNotFoundError
    if it is missing.
    """
    from jprm.methods.data.reader import read_items

    if limit < 1:
        raise ValueError(f"--limit {limit}: must be 1 or more")
    check_input(path)
    copy, items = path_of(folder) / f"{path_of(path).stem}.jsonl", []
    COPIED[os.fspath(copy)] = places = {"": os.fspath(path)}
    for line, (number, item) in enumerate(itertools.islice(read_items(path), limit), start=1):
        items.append(item)
        places[f":{line}"] = f"{os.fspath(path)}:{number}"
    path = path_of(path)
    copy.parent.mkdir(parents=True, exist_ok=True)
    # A line end within an item is white space between its values: JSON escapes those of texts.
    atomic_write(copy, b"".join(item.strip().replace(b"\n", b" ") + b"\n" for item in items))
    info = path_of(f"{os.fspath(path)}.info.json")
    if info.is_file():
        atomic_write(f"{os.fspath(copy)}.info.json", info.read_bytes())
    return copy


def print_counts(counts: Mapping[str, Any], path: Path) -> None:
    print(f"{path}: written. " + ", ".join(f"{name}: {count}" for name, count in counts.items()))


@contextlib.contextmanager
def run_of(distributed: str | None) -> Iterator[None]:
    """Joins the processes of a distributed run (if `distributed`, as `jprm train` takes it), then runs the block.

    Waits for the other processes. If SIGTERM stops the run in the block, prints this and exits with status 143
    (SystemExit). Raises ValueError for another form of `distributed`.
    """
    from jprm import multihost
    from jprm.train import Stopped

    if distributed:
        multihost.start(distributed)
    try:
        yield
    except Stopped as stopped:
        print(f"stopped: {stopped}", file=sys.stderr)
        raise SystemExit(128 + signal.SIGTERM) from None


def check_judge(model: str, options: Mapping[str, Any]) -> None:
    """Raises ValueError if `model` is a judge's JSON file and an option has a value: only models have them.

    `options` are values by option name.
    """
    if is_judge(model) and (taken := [name for name, value in options.items() if value]):
        raise ValueError(f"--{taken[0]} is for a model's folder, and {model} is a judge's file. Leave it out")


def scorer_of(model: str, **options: Any) -> Any:
    """Loads a judge's JSON file as a judge, or a model's folder as a `PRM` with `options` of `jprm.load`.

    Raises ValueError if a judge has an option (one with a true value), and FileNotFoundError or ValueError if the model
    is missing or damaged.
    """
    check_judge(model, options)
    if is_judge(model):
        from jprm.methods.judge.load import load_judge

        return load_judge(model)
    import jprm

    return jprm.load(model, **options)


@dataclasses.dataclass(frozen=True)
class Acting:
    """Settings of `--environment`. turns: the most per episode."""

    turns: int = 16


def policy_of(policy: str | os.PathLike, environment: Sequence[str]) -> Any:
    """Loads a policy. It acts in the environment if one is given: its name, then settings, e.g. `turns=8`.

    Raises ValueError for unknown settings, and as `load_policy` or `load_acting`.
    """
    from jprm.methods.policy.load import load_policy

    if not environment:
        return load_policy(policy)
    from jprm.methods.worlds.acting import load_acting

    return load_acting(policy, environment[0], settings(Acting, environment[1:], "environment").turns)


Fields = TypeVar("Fields")


def settings(kind: type[Fields], words: Sequence[str], option: str) -> Fields:
    """Builds the dataclass `kind` from an option's words KEY=VALUE, e.g. `shards=64 workers=1,8`.

    Raises ValueError, naming the option, if a word has another form or a key is unknown, missing or mistyped.
    """
    if odd := [word for word in words if not re.match(r"\w+=", word)]:
        raise ValueError(f"--{option} {odd[0]!r}: not of the form KEY=VALUE")
    try:
        return from_json(kind, dict(map(assigned, words)))
    except OptionError as error:
        raise ValueError(f"--{option}: {error}") from None


def with_settings(words: Sequence[str], *configs: Any) -> list[Any]:
    """Returns a list of the configs, in order, with their `Hidden` fields changed by the words KEY=VALUE of `--set`.

    A key in several configs changes each. Raises ValueError if a word has another form, a key is no hidden field of any
    config, or its value has another type or is out of range.
    """
    hints = [item for config in configs for item in typing.get_type_hints(type(config), include_extras=True).items()]
    kinds = {name: hint.__origin__ for name, hint in hints if _marked(getattr(hint, "__metadata__", ()), Hidden[int])}
    try:
        values = values_of(kinds, dict(map(assigned, words)))
    except OptionError as error:
        raise ValueError(f"--set {error}") from None
    names = [[field.name for field in dataclasses.fields(config)] for config in configs]
    return [
        dataclasses.replace(config, **{name: values[name] for name in values if name in fields})
        for config, fields in zip(configs, names, strict=True)
    ]
