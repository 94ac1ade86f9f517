"""`jprm eval`: says how good a model is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg
from tyro.extras import SubcommandApp

from jprm.cli.arguments import Adapter, Files, Folder, Json, opened

evaluation = SubcommandApp()


@evaluation.command
def suite(
    model: Annotated[tuple[Path, ...], arg(metavar="DIR ...")],
    suite: Annotated[Path, arg(metavar="SUITE.json")],
    out: Folder,
) -> None:
    """All benchmarks that a file names: scored once, computed in one go, ready for `jprm report`.

    Scores are kept, so that a stopped command continues and a second one only computes. The file holds an object:
    {"neutral": "positive", "processbench": {"data": ["gsm8k.json", "math.json"], "calibrate": "gsm8k.json"},
    "prmbench": {"data": [..]}, "steps": {"data": [..]}, "best_of_n": {"data": [..]},
    "calibration": {"data": [..], "calibrate": [..]}}; any section may be left out.

    For example:
      jprm eval suite --model runs/mine --suite suite.json --out results/mine
      jprm eval suite --model runs/prm runs/orm --suite suite.json --out results

    Args:
        model: The folder of a trained model. Of several, each gets a folder of its name in the output.
        suite: What to evaluate on. Its paths are relative to itself.
        out: The folder for results.json and the scores.
    """
    from jprm.evaluate import report as reports
    from jprm.evaluate.suite import read_suite, run_suite

    wanted = read_suite(suite)
    names = [folder.resolve().name for folder in model]
    if len(set(names)) < len(names):
        raise ValueError(f"{', '.join(map(str, model))}: two models of one name, and so are their results: rename one")
    for folder, name in zip(model, names, strict=True):
        target = out / name if len(model) > 1 else out
        reports.print_suite(run_suite(folder, wanted, target, print))
        print(f"{target / 'results.json'}: written")


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
    store: Literal["temperature", "platt", "isotonic", "quantile"] | None = None,
) -> None:
    """Calibration: how far scores are probabilities, overall and by group, and maps and thresholds that mend it.

    For example:
      jprm eval calibration --model DIR --data math.json --calibrate gsm8k.json --neutral drop --json calibration.json
      jprm eval calibration --model DIR --data math.json --calibrate gsm8k.json --neutral drop --json c.json \\
        --store platt

    Args:
        model: The folder of a trained model.
        data: Files with step labels: PRM800K, ProcessBench, PRMBench or jprm's own.
        calibrate: The files that maps and thresholds are fitted on; their problems are left out of the figures.
        neutral: What a neutral rating counts as.
        to: Where to write the report.
        adapter: How to read a published model, where its files do not show it: a name, or a JSON file.
        store: Keep this map in the model's folder, for `jprm score --calibrated`.
    """
    from jprm.evaluate.run import calibration
    from jprm.score.calibration_map import NAME

    report = calibration(opened(model, adapter), data, calibrate, neutral, to, store=store)
    _report(report, to, "calibration")
    if store:
        print(f"{model / NAME}: the map {store}, which `jprm score --calibrated` applies")


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


@evaluation.command(name="equal-cost")
def equal_cost(
    model: Annotated[tuple[Path, ...], arg(metavar="DIR ...")],
    input: Annotated[Path, arg(metavar="POOL.jsonl")],
    policy_parameters: float,
    to: Json,
    policy_tokens_per_second: float | None = None,
) -> None:
    """Equal cost: reward models against majority vote, where samples and their scores are both paid for.

    Best of n by a model, and a vote weighted by it, take as many samples as a majority's budget buys with scoring. A
    token costs 2 FLOPs a parameter, or the seconds that are measured.

    For example:
      jprm eval equal-cost --model runs/prm runs/orm --input pool.jsonl --policy-parameters 8e9 --json equal.json

    Args:
        model: The folders of trained models.
        input: Pools of chains with answers and known correctness.
        policy_parameters: Of the model that wrote the samples, all but its embedding table.
        to: Where to write the report.
        policy_tokens_per_second: How fast the policy samples on this machine; the report then compares at equal seconds
            as well, and times the scoring here.
    """
    from jprm.evaluate.run import equal_cost

    _report(equal_cost(model, input, policy_parameters, policy_tokens_per_second, to), to, "equal_cost")


@evaluation.command
def diagnostics(
    model: Folder,
    to: Json,
    chains: Files = (),
    pools: Files = (),
) -> None:
    """Diagnostics: the known ways in which a PRM fails without its accuracy showing it.

    On ProcessBench chains: lowest scores at the end, right answers by wrong steps, edits that keep the meaning, and
    fluent nonsense. On pools: scores that follow length, and accuracy lost by choosing among more.

    For example:
      jprm eval diagnostics --model DIR --chains gsm8k.json math.json --pools pool.jsonl --json diagnostics.json

    Args:
        model: The folder of a trained model.
        to: Where to write the report.
        chains: ProcessBench files.
        pools: Pools of chains with known correctness.
    """
    from jprm.evaluate.run import diagnostics

    _report(diagnostics(model, chains, pools, to), to, "diagnostics")


@evaluation.command
def drift(
    before: Annotated[Positional[Path], arg(metavar="BEFORE.jsonl")],
    after: Annotated[Positional[Path], arg(metavar="AFTER.jsonl")],
    to: Json,
) -> None:
    """Drift: whether two scored files have scores of one distribution, and whether to recalibrate or to retrain.

    For example:
      jprm eval drift scored_may.jsonl scored_june.jsonl --json drift.json

    Args:
        before: Chains or pools that `jprm score` wrote.
        after: The same later: of another policy, other problems or another model.
        to: Where to write the report.
    """
    from jprm.evaluate.run import drift

    _report(drift(before, after), to, "drift")


@evaluation.command
def contamination(data: Files, benchmark: Files, to: Json) -> None:
    """Contamination: which problems of benchmarks occur in training data, by normalised text.

    For example:
      jprm eval contamination --data phase1_train.jsonl --benchmark math.json gsm8k.json --json contamination.json

    Args:
        data: Source files that a model was or will be trained on.
        benchmark: Benchmark files.
        to: Where to write the report.
    """
    from jprm.data.overlap import contamination

    _report(contamination(data, benchmark), to, "contamination")


def _report(report: Mapping[str, Any], path: Path, kind: str) -> None:
    """Writes the report as JSON and prints its tables."""
    from jprm.evaluate import report as reports

    path.parent.mkdir(parents=True, exist_ok=True)
    reports.write_json(path, report)
    getattr(reports, f"print_{kind}")(report)
    print(f"{path}: written")
