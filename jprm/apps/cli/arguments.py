"""Types of arguments that several commands take, and configs as groups of options."""

import contextlib
import dataclasses
import difflib
import inspect
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from tyro.conf import arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo
from tyro.extras import SubcommandApp

from jprm.io.outputs import check_output
from jprm.io.storage import Place, path_of

OnError = Literal["stop", "skip"]
Settings = Annotated[tuple[str, ...], arg(name="set", metavar="KEY=VALUE ...", help_behavior_hint="")]
Files = Annotated[tuple[Path, ...], arg(metavar="FILE ...")]
Folder = Annotated[Path, arg(metavar="DIR")]
OneModel = Annotated[str | None, arg(metavar="DIR", help_behavior_hint="")]
JudgeFile = Annotated[Path | None, arg(metavar="P.json", help_behavior_hint="")]
PolicyFile = Annotated[Path, arg(metavar="P")]
Count = Annotated[int | None, arg(metavar="INT", help_behavior_hint="")]
Number = Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")]
Distributed = Annotated[str | None, arg(metavar="WHERE", help_behavior_hint="")]


ADDRESSES = ConstructorRegistry()


@ADDRESSES.primitive_rule
def _path(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Makes a `jprm.io.storage.Remote` of an address that is given for a Path, which would lose one of its slashes."""
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
        return path_of(words[0])
    except ValueError as error:  # tyro would make a box of it
        raise OSError(str(error)) from error


class Commands(SubcommandApp):
    """A group of commands. The group's help says one sentence of each, a command's own help all of its docstring.

    Arguments' descriptions are paragraphs, where tyro would keep the docstring's lines.
    """

    def __init__(self) -> None:
        super().__init__()
        self.registered: dict[str, tuple[Any, str]] = {}

    def command(self, func: Any = None, *, name: str | None = None, help: str = "") -> Any:
        if func is None:
            return lambda func: self.command(func, name=name, help=help)
        if inspect.isfunction(func):
            func.__doc__ = re.sub(r"\n {8,}", " ", inspect.cleandoc(func.__doc__ or ""))
        self.registered[name or func.__name__] = func, help or " ".join((func.__doc__ or "").split("\n\n")[0].split())
        return func

    def cli(self, *, args: Sequence[str], **options: Any) -> Any:
        self._check(args)
        self._describe(args)
        return super().cli(args=args, registry=ADDRESSES, **options)

    def _check(self, args: Sequence[str], group: str = "jprm") -> None:
        """Raises ValueError for a word that is no command of the group, with those that are spelt like it."""
        if not args or args[0].startswith("-"):
            return
        word, known = args[0].replace("_", "-"), {name.replace("_", "-"): name for name in self.registered}
        if word not in known:
            near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
            meant = f"; did you mean {' or '.join(near)}?" if near else "."
            raise ValueError(f"{group} has no command {args[0]!r}{meant} It has {', '.join(known)}")
        func = self.registered[known[word]][0]
        if isinstance(func, Commands):
            func._check(args[1:], f"{group} {word}")

    def _describe(self, args: Sequence[str]) -> None:
        """Gives tyro the whole docstring of the command that `args` name, and a sentence of every other."""
        for name, (func, sentence) in self.registered.items():
            chosen = [word.replace("_", "-") for word in args[:1]] == [name.replace("_", "-")]
            whole = chosen and not isinstance(func, Commands)
            if whole:
                func.__doc__ = _wrapped(func.__doc__ or "")
            super().command(func, name=name, help=None if whole else sentence)
            if isinstance(func, Commands):
                func._describe(args[1:] if chosen else [])


def _wrapped(doc: str) -> str:
    """Returns a docstring whose paragraphs before its arguments are no wider than the terminal. Examples stay."""
    width = max(40, shutil.get_terminal_size().columns)
    about, arguments, rest = doc.partition("\n\nArgs:")
    paragraphs = about.split("\n\n")
    # tyro joins lines that begin with a letter: a space without width stands before it.
    filled = [textwrap.fill(text, width).replace("\n", "\n\u200b") for text in paragraphs]
    examples = ["\n " in text or text.startswith(" ") for text in paragraphs]
    wrapped = [text if kept else fill for text, fill, kept in zip(paragraphs, filled, examples, strict=True)]
    return "\n\n".join(wrapped) + arguments + rest


def command(run: Callable[[Any, Any], None], config: type, options: type, **types: Any) -> Callable[..., None]:
    """Returns the command `run(options, chosen)`: `chosen` has a config's fields as options, its docstring is the help.

    `types` replaces the types of fields that the command line writes differently.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    fields = [(name, type_, defaults[name]) for name, type_ in types.items()]
    # Without checks: tyro would rewrite their errors. `built` makes them.
    unchecked = {"__doc__": "", "__post_init__": lambda self: None}
    kind = dataclasses.make_dataclass(config.__name__, fields, bases=(config,), frozen=True, namespace=unchecked)

    def call(options: Any, chosen: Any) -> None:
        check_outputs(options)
        run(options, chosen)

    call.__annotations__ = {"options": Annotated[options, arg(name="")], "chosen": Annotated[kind, arg(name="")]}
    call.__doc__ = config.__doc__
    return call


def built(config: type, options: Any, **more: Any) -> Any:
    """Returns the config that a command's own options describe, with `more` fields replaced."""
    return config(**{f.name: getattr(options, f.name) for f in dataclasses.fields(config)} | more)


def check_outputs(options: Any) -> None:
    """Refuses options whose output files are no files, or others of their paths (`check_output`)."""
    paths = {name: value if isinstance(value, tuple) else (value,) for name, value in vars(options).items()}
    for name in {"output", "to", "rollouts", "critiques"} & paths.keys():
        others = [path for other, values in paths.items() if other != name for path in values]
        check_output(paths[name][0], *(path for path in others if isinstance(path, os.PathLike)))


def print_counts(counts: Mapping[str, Any], path: Path) -> None:
    """Reports a written file and what was counted."""
    print(f"{path}: written. " + ", ".join(f"{name}: {count}" for name, count in counts.items()))


@contextlib.contextmanager
def run_of(distributed: str | None) -> Iterator[None]:
    """Joins the processes of a run. One that SIGTERM stops ends as a process that the signal had ended."""
    from jprm import multihost
    from jprm.train import Stopped

    if distributed:
        multihost.start(distributed)
    try:
        yield
    except Stopped as stopped:
        print(f"stopped: {stopped}", file=sys.stderr)
        raise SystemExit(128 + signal.SIGTERM) from None


def one_scorer(command: str, model: str | None, judge: Path | None) -> None:
    """Refuses no scorer or two."""
    if (model is None) == (judge is None):
        raise ValueError(f"{command}: give --model DIR or --judge P.json, one of the two")


def scorer_of(command: str, model: str | None, judge: Path | None, **options: Any) -> Any:
    """Returns the loaded model, with `options` of `jprm.load`, or the judge."""
    one_scorer(command, model, judge)
    if judge is not None:
        from jprm.methods.judge.load import load_judge

        return load_judge(judge)
    import jprm

    return jprm.load(cast(str, model), **options)
