"""Calibration of step scores. The figures are computed in `jprm.evaluate.calibration`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from tyro.conf import arg

from jprm.evaluate.benchmark import Benchmark, Files, ModelOptions, Neutral, Report, Request
from jprm.evaluate.blocks import Block, Figure, Model, Note, Table
from jprm.evaluate.plots import reliability, slug
from jprm.evaluate.wording import interval, left_out_words, percent, words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    r"""Calibration: how far scores are probabilities, overall and by group, and maps and thresholds that fix it.

    For example:
      jprm eval calibration --model DIR --data math.json --calibrate gsm8k.json --neutral drop --json calibration.json
      jprm eval calibration --model DIR --data math.json --calibrate gsm8k.json --neutral drop --json c.json \
        --store platt
    """

    data: Files
    """Files with step labels: PRM800K, ProcessBench, PRMBench or jprm's own."""
    calibrate: Files
    """The files that maps and thresholds are fitted on; their problems are left out of the figures."""
    neutral: Neutral
    """What a neutral rating counts as."""
    store: Annotated[
        Literal["temperature", "platt", "isotonic", "quantile"] | None,
        arg(metavar="{temperature,platt,isotonic,quantile}", help_behavior_hint=""),
    ] = None
    """Store this map in the model's folder, for `jprm score --calibrated`."""


def run(options: Options) -> Report:
    import os

    from jprm.evaluate.run import load_and_score
    from jprm.score.calibration_map import NAME, store_calibration

    prm, request = load_and_score(BENCHMARK, options)
    report = figures(request)
    if options.store is not None:
        fitted = report["recalibrated"][options.store]["map"]
        store_calibration(prm, fitted, list(map(os.fspath, options.calibrate)), options.neutral)
        print(f"{options.model}/{NAME}: the map {options.store}, which `jprm score --calibrated` applies")
    return report


def figures(request: Request) -> Report:
    from jprm.evaluate.calibration import calibration_report

    fitted = [tree for trees in request.calibrate.values() for tree in trees]
    report = calibration_report(request.data, fitted, request.neutral, request.seed)
    return report | {"too_long": request.left_out}


COLUMNS = ("steps", "mean score, %", "right, %", "ECE [95 %]", "plain / noise", "Brier [95 %]", "AUROC")


def tables(report: Report) -> Iterator[Table]:
    title = f"Calibration: {report['n_steps']} steps of {report['n_problems']} problems; neutral: {report['neutral']}"
    title += left_out_words(report)
    yield Table(title, ("", *COLUMNS), list(_rows(report)))
    rows = []
    for row in report["conformal"]:
        threshold = "none" if row["threshold"] is None else f"{row['threshold']:.4g}"
        sure = "average" if row["confidence"] is None else percent(row["confidence"])
        found = f"{percent(row['held_out']['rate'])} of {row['held_out']['n']}"
        rows.append([words(row["kind"]), f"<= {percent(row['alpha'])}", sure, threshold, str(row["n"]), found])
    columns = ("", "promised", "confidence", "threshold", "calibration chains", "held out")
    yield Table("Conformal thresholds", columns, rows)


def _rows(report: Report) -> Iterator[list[str]]:
    named = {
        "as scored": report["raw"],
        **{f"by {kind}": row for kind, row in report["recalibrated"].items()},
        **{f"  {name} {row['group']}": row for name, rows in report["by"].items() for row in rows},
    }
    for label, row in named.items():
        noise = f"{percent(row['ece'].get('plain'))} / {percent(row['ece_if_calibrated']['high'])}" + (
            " <" if row["miscalibrated"] else ""
        )
        cells = (str(row["n"]), percent(row["mean_score"]), percent(row["share_right"]), interval(row["ece"]))
        yield [label, *cells, noise, interval(row["brier"]), percent(row["auroc"])]


def section(models: Sequence[Model]) -> Iterator[Block]:
    for model in models:
        report = model.results["calibration"]
        curves = {"as scored": report["raw"]["curve"], "by platt": report["recalibrated"]["platt"]["curve"]}
        yield Figure(
            name=f"reliability-{slug(model.name)}",
            title="Reliability diagram",
            description=f"Reliability of {model.name}: fraction of right steps by score.",
            caption=model.name,
            note="Each point is a bin of equally many steps. Across: their mean score. Up: the fraction that is right,"
            " with a 95 % interval. On the diagonal a score is a probability; below it the model is too sure.",
            draw=functools.partial(reliability, curves=curves),
            size=(5.6, 3.9),
        )
        title = f"{report['left_out']} steps of the problems fitted on are left out"
        yield Table(title, (model.name, *COLUMNS), list(_rows(report)))
    yield Note(
        "ECE is the mean distance between score and fraction right, debiased; the plain one of a finite sample is never"
        " 0, so what noise alone would show stands beside it; “<” marks a finding, a plain ECE above that. The maps are"
        " fitted on other problems."
    )


def verdict(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    report = results["calibration"]
    raw = report["raw"]
    kind = report.get("chosen", "temperature")
    best = report["recalibrated"][kind]
    found = (
        f"A step's score is off its fraction of right steps by {interval(raw['ece'])} points on average (ECE),"
        f" {percent(raw['ece'].get('plain'))} before the bias of noise is taken off; a calibrated scorer"
        f" would show up to {percent(raw['ece_if_calibrated']['high'])} by noise."
    )
    if results.get("model", {}).get("semantics") == "value":
        found += (
            " The model scores values, how likely the chain is to end correct: a right step may well have a low one."
        )
        yield "open", found
    elif raw["miscalibrated"] is None:
        yield "open", f"{found} There are too few problems to say more."
    elif raw["miscalibrated"]:
        yield "bad", f"{found} The {kind} map brings it to {percent(best['ece']['value'])} on other problems."
    else:
        yield "good", found


def headline(results: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "calibration error (ECE), points", results["calibration"]["raw"]["ece"]


def left_out(report: Report) -> Iterator[tuple[str, int]]:
    yield "calibration: steps of problems fitted on", report["left_out"]


BENCHMARK = Benchmark(
    name="calibration",
    title="Calibration",
    options=Options,
    tables=tables,
    run=run,
    figures=figures,
    needs=("data", "calibrate", "neutral"),
    section=section,
    verdict=verdict,
    headline=headline,
    left_out=left_out,
)
