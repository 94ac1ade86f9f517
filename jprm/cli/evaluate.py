"""`jprm eval`: says how good a model is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg
from tyro.extras import SubcommandApp

from jprm.cli.arguments import Adapter, Files, Folder, Json, opened

evaluation = SubcommandApp()


@evaluation.command
def processbench(
    model: Folder,
    data: Files,
    calibrate: Annotated[Path, arg(metavar="FILE")],
    to: Json,
    adapter: Adapter = None,
) -> None:
    """ProcessBench: find the first wrong step, or say that there is none. F1 as published.

    For example:
      jprm eval processbench --model DIR --data gsm8k.json math.json --calibrate gsm8k.json --json processbench.json

    Args:
        model: The folder of a trained model.
        data: ProcessBench files; each is a key of the report.
        calibrate: The file on which the tuned threshold is chosen; the report gives F1 at 0.5 beside it.
        to: Where to write the report.
        adapter: How to read a published model, where its files do not show it: a name, or a JSON file.
    """
    from jprm.evaluate.run import processbench

    _report(processbench(opened(model, adapter), data, calibrate, to), to, "processbench")


@evaluation.command
def prmbench(model: Folder, data: Files, to: Json, adapter: Adapter = None) -> None:
    """PRMBench: PRMScore of its nine classes of error and their three groups, as published.

    For example:
      jprm eval prmbench --model DIR --data prmbench/*.jsonl --json prmbench.json

    Args:
        model: The folder of a trained model.
        data: PRMBench files, as many of its classes as are wanted.
        to: Where to write the report.
        adapter: How to read a published model, where its files do not show it: a name, or a JSON file.
    """
    from jprm.evaluate.run import prmbench

    _report(prmbench(opened(model, adapter), data, to), to, "prmbench")


@evaluation.command
def steps(
    model: Folder,
    data: Files,
    neutral: Literal["positive", "negative", "drop"],
    to: Json,
    adapter: Adapter = None,
) -> None:
    """Steps with human labels: AUROC, average precision and first-error accuracy.

    For example:
      jprm eval steps --model DIR --data phase1_test.jsonl --neutral positive --json steps.json

    Args:
        model: The folder of a trained model.
        data: Files of rated steps, in the PRM800K format or jprm's own.
        neutral: What a neutral rating counts as. There is no default: results under different policies do not compare.
        to: Where to write the report.
        adapter: How to read a published model, where its files do not show it: a name, or a JSON file.
    """
    from jprm.evaluate.run import steps

    _report(steps(opened(model, adapter), data, neutral, to), to, "steps")


@evaluation.command
def calibration(
    model: Folder,
    data: Files,
    calibrate: Files,
    neutral: Literal["positive", "negative", "drop"],
    to: Json,
    adapter: Adapter = None,
) -> None:
    """Calibration: how far scores are probabilities, overall and by group, and maps and thresholds that mend it.

    For example:
      jprm eval calibration --model DIR --data math.json --calibrate gsm8k.json --neutral drop --json calibration.json

    Args:
        model: The folder of a trained model.
        data: Files with step labels: PRM800K, ProcessBench, PRMBench or jprm's own.
        calibrate: The files that maps and thresholds are fitted on; their problems are left out of the figures.
        neutral: What a neutral rating counts as.
        to: Where to write the report.
        adapter: How to read a published model, where its files do not show it: a name, or a JSON file.
    """
    from jprm.evaluate.run import calibration

    _report(calibration(opened(model, adapter), data, calibrate, neutral, to), to, "calibration")


@evaluation.command(name="best-of-n")
def best_of_n(
    input: Annotated[Path, arg(metavar="F.jsonl")],
    to: Json,
    model: Annotated[Path | None, arg(metavar="DIR")] = None,
    adapter: Adapter = None,
) -> None:
    """Best of N: the exact expected accuracy for every n and every aggregation rule, beside majority vote and pass@n.

    For example:
      jprm eval best-of-n --input scored.jsonl --json best_of_n.json
      jprm eval best-of-n --model DIR --input pool.jsonl --json best_of_n.json

    Args:
        input: Pools of chains with known correctness, scored by `jprm score`.
        to: Where to write the report.
        model: The folder of a trained model that scores the pools first, where they are not scored yet.
        adapter: How to read a published model, where its files do not show it: a name, or a JSON file.
    """
    from jprm.evaluate.run import best_of_n

    _report(best_of_n(input, model and opened(model, adapter), to), to, "best_of_n")


def _report(report: Mapping[str, Any], path: Path, kind: str) -> None:
    """Writes the report as JSON and prints its tables."""
    from jprm.evaluate import report as reports

    path.parent.mkdir(parents=True, exist_ok=True)
    reports.write_json(path, report)
    getattr(reports, f"print_{kind}")(report)
    print(f"{path}: written")
