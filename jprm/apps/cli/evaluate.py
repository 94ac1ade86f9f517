"""`jprm eval`: tells how good a model is. The benchmarks themselves are imported when they run."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from jprm.apps.cli.arguments import Commands, Count, Folder, check_outputs, first_records, is_required
from jprm.io.storage import path_of
from jprm.methods.evaluate.benchmarks import BENCHMARKS, find
from jprm.methods.evaluate.options import OPTIONS
from jprm.options import place_of


def evaluation() -> Commands:
    """Returns the commands of `jprm eval`: `suite`, and one for every registered benchmark."""
    app = Commands()
    app.command(suite)
    for name in BENCHMARKS:
        app.command(name=name.replace("_", "-"))(_command(name))
    return app


def add(app: Commands, name: str) -> None:
    """Adds the command of the user's own benchmark, `module:NAME` or `FILE.py:NAME`."""
    app.command(name=name)(_command(name))


def suite(
    model: Annotated[tuple[str, ...], arg(metavar="DIR ...")],
    suite: Annotated[Path, arg(metavar="SUITE.json")],
    output: Folder,
    input: Folder = Path("data"),
    limit: Count = None,
) -> None:
    """All benchmarks that a file names: scored once, computed in one go, ready for `jprm report`.

    Scores are stored, so that a stopped command continues and a second one only computes. The file holds an object:
    {"neutral": "positive", "processbench": {"data": ["gsm8k.json", "math.json"], "calibrate": "gsm8k.json"},
    "prmbench": {"data": [..]}, "steps": {"data": [..]}, "best_of_n": {"data": [..]},
    "calibration": {"data": [..], "calibrate": [..]}}; any section may be left out. A benchmark of your own is a
    section with the key "FILE.py:NAME", relative to the suite's file.

    For example:
      jprm eval suite --model runs/mine --suite suite.json --output results/mine
      jprm eval suite --model runs/prm runs/orm --suite suite.json --output results
      jprm eval suite --model runs/mine --suite standard --input benchmarks --output results/mine

    Args:
        model: The folder of a trained model, or the JSON file of a judge, as for `jprm score --judge`. Of several, each
            gets a folder of its name in the output.
        suite: What to evaluate on. Its paths are relative to itself. `standard` is ProcessBench, PRMBench,
            Socratic-PRMBench, MR-Ben, BIG-Bench-Mistake and Hard2Verify, of which the files that are there are used and
            the others named.
        output: The folder for results.json and the scores.
        input: The folder of `standard`, which has processbench/, prmbench/, socratic_prmbench/, mrben/,
            big_bench_mistake/ and hard2verify/ with the files as they are published.
        limit: Only the first N records of each file, to try a suite. DIR.firstN/ gets a copy of them.
    """
    from jprm.io.outputs import check_output
    from jprm.methods.evaluate.blocks import show
    from jprm.methods.evaluate.suite import read_suite, run_suite, standard_suite, tables

    wanted = standard_suite(input) if os.fspath(suite) == "standard" else read_suite(suite)
    if limit is not None:
        copies = _Copies(limit, f"{os.fspath(output)}.first{limit}")
        files = {key: {name: copies.of(of) for name, of in getattr(wanted, key).items()} for key in FILES[:2]}
        wanted = dataclasses.replace(wanted, **files)
    names = [place_of(folder).resolve().name for folder in model]
    if len(set(names)) < len(names):
        raise ValueError(f"{', '.join(map(str, model))}: two models of one name, and so are their results: rename one")
    for folder, name in zip(model, names, strict=True):
        target = output / name if len(model) > 1 else output
        check_output(target / "results.json", suite)
        show(tables(run_suite(folder, wanted, target, print), wanted.benchmarks))
        print(f"{target / 'results.json'}: written")


FILES = ("data", "calibrate", "chains", "pools", "input")
"""Options of benchmarks that name files of records."""


class _Copies:
    """Copies of the first records of files, one of each file, in folders of their own, as two may have one name."""

    def __init__(self, limit: int, folder: str):
        self.limit, self.folder = limit, folder
        self.made: dict[str, Any] = {}

    def of(self, files: Any) -> Any:
        if isinstance(files, tuple):
            return tuple(map(self.of, files))
        place = path_of(files).address
        if place not in self.made:
            self.made[place] = first_records(files, self.limit, f"{self.folder}/{len(self.made)}")
        return self.made[place]


def _command(name: str) -> Callable[[Any], None]:
    """Returns the command of a benchmark, which prints its tables and writes its report as JSON where asked."""

    def command(options) -> None:
        from jprm.io.outputs import write_json
        from jprm.methods.evaluate.blocks import show
        from jprm.methods.evaluate.run import run, trained_on_words, unread_words

        check_outputs(options)
        benchmark = find(name)
        with tempfile.TemporaryDirectory(prefix="jprm-eval-") as unkept:  # of scores, where no report is written
            to = options.to or Path(unkept) / "report.json"
            chosen = dataclasses.replace(options, to=to)
            if options.limit is not None:
                copies = _Copies(options.limit, f"{to}.first{options.limit}")
                files = {name: copies.of(getattr(options, name)) for name in FILES if getattr(options, name, None)}
                chosen = dataclasses.replace(chosen, **files)
            report = run(benchmark, chosen)
        if options.to:
            write_json(options.to, report)
        show([*benchmark.tables(report), *trained_on_words(report), *unread_words(report)])
        if options.to:
            print(f"{options.to}: written")

    options = OPTIONS.get(name) or find(name).options
    # Required ones first: fields of base classes, which all evaluations have, would come before them.
    fields = options.__dataclass_fields__
    options.__dataclass_fields__ = dict(sorted(fields.items(), key=lambda item: not is_required(item[1])))
    command.__annotations__["options"] = Annotated[options, arg(name="")]
    command.__doc__ = options.__doc__
    return command
