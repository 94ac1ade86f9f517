"""`jprm eval`: one command per benchmark, and `suite`. Benchmarks are imported only when they run."""

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
    """Builds the command group `jprm eval`: `suite`, and one command per registered benchmark, e.g. `best-of-n`."""
    app = Commands()
    app.command(suite)
    for name in BENCHMARKS:
        app.command(name=name.replace("_", "-"))(_command(name))
    return app


def add(app: Commands, name: str) -> None:
    """Adds to `app` the command for a benchmark from the user's code, `module:NAME` or `FILE.py:NAME`.

    Imports it now. Raises ValueError if it does not exist.
    """
    app.command(name=name)(_command(name))


def suite(
    model: Annotated[tuple[str, ...], arg(metavar="DIR ...")],
    suite: Annotated[Path, arg(metavar="SUITE.json")],
    output: Folder,
    input: Folder = Path("data"),
    limit: Count = None,
) -> None:
    """Run all benchmarks of a suite file: score once, compute all figures, for `jprm report`.

    Prints tables, and writes results.json. Scores are stored: a stopped command continues, and a second one only
    computes. The suite file is a JSON object:
    {"neutral": "positive", "processbench": {"data": ["gsm8k.json", "math.json"], "calibrate": "gsm8k.json"},
    "prmbench": {"data": [..]}, "steps": {"data": [..]}, "best_of_n": {"data": [..]}, "calibration": {"data": [..],
    "calibrate": [..]}}; every section is optional. "neutral" is "positive",
    "negative" or "drop". Further keys: "seed", and "too_long": "error" (default) or "skip" for records beyond the
    model's context. Missing files of "data" are skipped and listed as absent; a section without any file, or a missing
    file of "calibrate", is an error. For your own benchmark add a section with the key "FILE.py:NAME",
    relative to the suite file.

    For example:
      jprm eval suite --model runs/mine --suite suite.json --output results/mine
      jprm eval suite --model runs/prm runs/orm --suite suite.json --output results
      jprm eval suite --model runs/mine --suite standard --input benchmarks --output results/mine

    Args:
        model: Folder of a trained model, or JSON file of a judge (as for `jprm score`). With several models,
            each gets a folder of its name in the output.
        suite: Suite file, with paths relative to itself; or `standard`: ProcessBench, PRMBench, Socratic-PRMBench,
            MR-Ben, BIG-Bench-Mistake and Hard2Verify. `standard` runs the benchmarks it finds and names the missing
            ones.
        output: Folder for results.json and the scores.
        input: Folder for `standard`, with the published files in processbench/, prmbench/, socratic_prmbench/, mrben/,
            big_bench_mistake/ and hard2verify/.
        limit: Use only the first N records of each file, to try a suite. They are copied to DIR.firstN/.
    """
    from jprm.io.outputs import check_output
    from jprm.methods.evaluate.blocks import show
    from jprm.methods.evaluate.suite import read_suite, run_suite, standard_suite, tables

    wanted = standard_suite(input) if os.fspath(suite) == "standard" else read_suite(suite)
    if limit is not None:
        copies = _Copies(limit, f"{os.fspath(output)}.first{limit}")
        files = {
            key: {name: copies.copy_of(source) for name, source in getattr(wanted, key).items()} for key in FILES[:2]
        }
        wanted = dataclasses.replace(wanted, **files)
    names = [place_of(folder).resolve().name for folder in model]
    if len(set(names)) < len(names):
        raise ValueError(
            f"{', '.join(map(str, model))}: two models share a name, and so would their results. Rename one"
        )
    for folder, name in zip(model, names, strict=True):
        target = output / name if len(model) > 1 else output
        check_output(target / "results.json", suite)
        show(tables(run_suite(folder, wanted, target, print), wanted.benchmarks))
        print(f"{target / 'results.json'}: written")


FILES = ("data", "calibrate", "chains", "pools", "input")
"""Benchmark options that hold record files."""


class _Copies:
    """Copies the first `limit` records of each file. Each copy has its own folder, as two files may share a name."""

    def __init__(self, limit: int, folder: str):
        self.limit, self.folder = limit, folder
        self.copies: dict[str, Any] = {}

    def copy_of(self, files: Any) -> Any:
        if isinstance(files, tuple):
            return tuple(map(self.copy_of, files))
        place = path_of(files).address
        if place not in self.copies:
            self.copies[place] = first_records(files, self.limit, f"{self.folder}/{len(self.copies)}")
        return self.copies[place]


def _command(name: str) -> Callable[[Any], None]:
    """Makes the command of a benchmark: prints its tables and, with --output, writes the report as JSON."""

    def command(options) -> None:
        from jprm.io.outputs import write_json
        from jprm.methods.evaluate.blocks import show
        from jprm.methods.evaluate.run import run, trained_on_words, unread_words

        check_outputs(options)
        benchmark = find(name)
        with tempfile.TemporaryDirectory(prefix="jprm-eval-") as unkept:  # for scores, if no report is written
            to = options.to or Path(unkept) / "report.json"
            chosen = dataclasses.replace(options, to=to)
            if options.limit is not None:
                copies = _Copies(options.limit, f"{to}.first{options.limit}")
                files = {name: copies.copy_of(getattr(options, name)) for name in FILES if getattr(options, name, None)}
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
