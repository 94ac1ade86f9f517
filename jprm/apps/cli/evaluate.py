"""`jprm eval`: tells how good a model is. The options of jprm's own benchmarks, which their help needs, are here.

The benchmarks themselves are imported when they run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from jprm.apps.cli.arguments import Commands, Folder, check_outputs
from jprm.io.storage import path_of
from jprm.methods.evaluate.benchmark import Adapter, CommandOptions, File, Files, ModelOptions, Neutral, TooLong
from jprm.methods.evaluate.benchmarks import BENCHMARKS, find


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
    from jprm.io.outputs import check_output
    from jprm.methods.evaluate.blocks import show
    from jprm.methods.evaluate.suite import read_suite, run_suite, tables

    wanted = read_suite(suite)
    names = [path_of(folder).resolve().name for folder in model]
    if len(set(names)) < len(names):
        raise ValueError(f"{', '.join(map(str, model))}: two models of one name, and so are their results: rename one")
    for folder, name in zip(model, names, strict=True):
        target = out / name if len(model) > 1 else out
        check_output(target / "results.json", suite)
        show(tables(run_suite(folder, wanted, target, print), wanted.benchmarks))
        print(f"{target / 'results.json'}: written")


def _command(name: str) -> Callable[[Any], None]:
    """Returns the command of a benchmark, which writes its report as JSON and prints its tables."""

    def command(options) -> None:
        from jprm.io.outputs import write_json
        from jprm.methods.evaluate.blocks import show
        from jprm.methods.evaluate.run import run

        check_outputs(options)
        benchmark = find(name)
        report = run(benchmark, options)
        write_json(options.to, report)
        show(benchmark.tables(report))
        print(f"{options.to}: written")

    options = OPTIONS.get(name) or find(name).options
    command.__annotations__["options"] = Annotated[options, arg(name="")]
    command.__doc__ = options.__doc__
    return command


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessBench(ModelOptions):
    """ProcessBench: find the first wrong step, or report that there is none. F1 as published.

    For example:
      jprm eval processbench --model DIR --data gsm8k.json math.json --calibrate gsm8k.json --json processbench.json
    """

    data: Files
    """ProcessBench files; each is a key of the report."""
    calibrate: File
    """The file on which the tuned threshold is chosen; the report gives F1 at the model's own threshold beside it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PRMBench(ModelOptions):
    """PRMBench: PRMScore of its nine classes of error and their three groups, as published.

    For example:
      jprm eval prmbench --model DIR --data prmbench/*.jsonl --json prmbench.json
    """

    data: Files
    """PRMBench files, of any of its classes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps(ModelOptions):
    """Steps with human labels: AUROC, average precision and first-error accuracy.

    For example:
      jprm eval steps --model DIR --data phase1_test.jsonl --neutral positive --json steps.json
    """

    data: Files
    """Files of rated steps, in the PRM800K format or jprm's own, and prepared folders."""
    neutral: Neutral
    """What a neutral rating counts as. There is no default: results under different policies do not compare."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agents(ModelOptions):
    """Agents' turns: step accuracy and F1 by class, first bad turn, outcome and calibration by turn, beside baselines.

    Trials with outcomes: pass^k, and the trial that scores choose. Bad turns: the turn and the agent that scores blame.

    For example:
      jprm eval agents --model DIR --data hotpotqa.jsonl --calibrate bfcl.jsonl --json agents.json
      jprm eval agents --data tau_bench_gpt4o_airline.jsonl --json pass_k.json
    """

    model: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """The folder of a trained model that scores the files. Without it the scores are those that they hold, such as of
    `jprm score`; without scores the report has what needs none."""
    data: Files
    """Trajectories with labels or outcomes: files of AgentProcessBench, tau-bench or Who&When, or jprm's own."""
    calibrate: Files = ()
    """Trajectories on which the two thresholds are fitted; without them both are the model's own threshold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestOfN(CommandOptions):
    """Best of n: the exact expected accuracy for every n and every aggregation rule, beside majority vote and pass@n.

    For example:
      jprm eval best-of-n --input scored.jsonl --json best_of_n.json
      jprm eval best-of-n --model DIR --input pool.jsonl --json best_of_n.json
    """

    input: Annotated[Path, arg(metavar="F.jsonl")]
    """Pools of samples with known correctness, scored by `jprm score`."""
    model: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """The folder of a trained model that scores the pools first, where they are not scored yet."""
    adapter: Adapter = None
    """How to read a published model whose files do not show it: a name, or a JSON file. Without a model it says what
    stored scores mean; by default `jprm score` left that beside them."""
    too_long: TooLong = "error"
    """Stop at a pool with a chain beyond the model's context, or leave such pools out and count them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration(ModelOptions):
    r"""Calibration: how far scores are probabilities, overall and by group, and maps and thresholds that fix it.

    For example:
      jprm eval calibration --model DIR --data math.json --calibrate gsm8k.json --neutral drop --json calibration.json
      jprm eval calibration --model DIR --data math.json --calibrate gsm8k.json --neutral drop --json c.json \
        --store platt
      jprm eval calibration --data scored_tables --calibrate other_tables --neutral drop --json calibration.json
    """

    model: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """The folder of a trained model that scores the files. Without it they are folders of `jprm tabulate` with scores
    and labels, of which a million pools are read in bounded memory."""
    data: Files
    """Files with step labels: PRM800K, ProcessBench, PRMBench or jprm's own, and prepared folders."""
    calibrate: Files
    """The files that maps and thresholds are fitted on; their problems are left out of the figures."""
    neutral: Neutral
    """What a neutral rating counts as."""
    store: Annotated[
        Literal["temperature", "platt", "isotonic", "quantile"] | None,
        arg(metavar="{temperature,platt,isotonic,quantile}", help_behavior_hint=""),
    ] = None
    """Store this map in the model's folder, for `jprm score --calibrated`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnostics(ModelOptions):
    """Diagnostics: known failures of a PRM that its accuracy does not show.

    On ProcessBench chains: lowest scores at the end, right answers by wrong steps, edits that keep the meaning, and
    fluent nonsense. On pools: scores that follow length, and accuracy lost by choosing among more.

    For example:
      jprm eval diagnostics --model DIR --chains gsm8k.json math.json --pools pool.jsonl --json diagnostics.json
    """

    chains: Files = ()
    """ProcessBench files."""
    pools: Files = ()
    """Pools of samples with known correctness."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contamination(CommandOptions):
    """Contamination: which problems of benchmarks occur in training data, by normalised text.

    For example:
      jprm eval contamination --data phase1_train.jsonl --benchmark math.json gsm8k.json --json contamination.json
    """

    data: Files
    """Source files that a model was or will be trained on."""
    benchmark: Files
    """Benchmark files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classes(ModelOptions):
    """Steps with labels of classes: every class's AUROC, average precision, F1, calibration and best threshold.

    A record has beside its steps `classes`: for each step the name of a class, a list of names, or null. Names are
    those of the model's outputs.

    For example:
      jprm eval classes --model DIR --data types.jsonl --calibrate types_dev.jsonl --json classes.json
    """

    data: Files
    """Files of chains with classes."""
    calibrate: Files = ()
    """Files from which the thresholds are taken that the figures of F1 use beside 0.5."""


OPTIONS: dict[str, type] = {
    "processbench": ProcessBench,
    "prmbench": PRMBench,
    "steps": Steps,
    "classes": Classes,
    "agents": Agents,
    "best_of_n": BestOfN,
    "calibration": Calibration,
    "diagnostics": Diagnostics,
    "contamination": Contamination,
}
"""The options of each registered benchmark that does not bring its own."""
