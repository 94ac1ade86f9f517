"""`jprm eval`: tells how good a model is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from jprm.apps.cli.arguments import Commands, Folder, check_outputs
from jprm.evaluate.benchmark import Benchmark
from jprm.evaluate.benchmarks import BENCHMARKS, find
from jprm.io.storage import path_of


def evaluation() -> Commands:
    """Returns the commands of `jprm eval`: `suite`, and one for every registered benchmark."""
    app = Commands()
    app.command(suite)
    for benchmark in BENCHMARKS.values():
        app.command(name=benchmark.command)(_command(benchmark))
    return app


def add(app: Commands, name: str) -> None:
    """Adds the command of the user's own benchmark, `module:NAME` or `FILE.py:NAME`."""
    app.command(name=name)(_command(find(name)))


def suite(
    model: Annotated[tuple[str, ...], arg(metavar="DIR ...")],
    suite: Annotated[Path, arg(metavar="SUITE.json")],
    out: Folder,
) -> None:
    """All benchmarks that a file names: scored once, computed in one go, ready for `jprm report`.

    Scores are stored, so that a stopped command continues and a second one only computes. The file holds an object:
    {"neutral": "positive", "processbench": {"data": ["gsm8k.json", "math.json"], "calibrate": "gsm8k.json"},
    "prmbench": {"data": [..]}, "steps": {"data": [..]}, "best_of_n": {"data": [..]},
    "calibration": {"data": [..], "calibrate": [..]}}; any section may be left out. A benchmark of your own is a
    section with the key "FILE.py:NAME", relative to the suite's file.

    For example:
      jprm eval suite --model runs/mine --suite suite.json --out results/mine
      jprm eval suite --model runs/prm runs/orm --suite suite.json --out results

    Args:
        model: The folder of a trained model, or the JSON file of a judge, as for `jprm score --judge`. Of several, each
            gets a folder of its name in the output.
        suite: What to evaluate on. Its paths are relative to itself.
        out: The folder for results.json and the scores.
    """
    from jprm.evaluate.suite import read_suite, run_suite, tables
    from jprm.evaluate.terminal import show
    from jprm.io.outputs import check_output

    wanted = read_suite(suite)
    names = [path_of(folder).resolve().name for folder in model]
    if len(set(names)) < len(names):
        raise ValueError(f"{', '.join(map(str, model))}: two models of one name, and so are their results: rename one")
    for folder, name in zip(model, names, strict=True):
        target = out / name if len(model) > 1 else out
        check_output(target / "results.json", suite)
        show(tables(run_suite(folder, wanted, target, print), wanted.benchmarks))
        print(f"{target / 'results.json'}: written")


def _command(benchmark: Benchmark):
    """Returns the command of a benchmark, which writes its report as JSON and prints its tables."""

    def command(options) -> None:
        from jprm.evaluate.run import run
        from jprm.evaluate.terminal import show
        from jprm.io.outputs import write_json

        check_outputs(options)
        report = run(benchmark, options)
        write_json(options.to, report)
        show(benchmark.tables(report))
        print(f"{options.to}: written")

    command.__annotations__["options"] = Annotated[benchmark.options, arg(name="")]
    command.__doc__ = benchmark.options.__doc__
    return command
