"""Steps with human labels. The figures are computed in `jprm.evaluate.steps`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jprm.evaluate.benchmark import Benchmark, Files, ModelOptions, Neutral, Report, Request
from jprm.evaluate.blocks import Block, Model, Note, Table
from jprm.evaluate.wording import interval, left_out_words, words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Steps with human labels: AUROC, average precision and first-error accuracy.

    For example:
      jprm eval steps --model DIR --data phase1_test.jsonl --neutral positive --json steps.json
    """

    data: Files
    """Files of rated steps, in the PRM800K format or jprm's own."""
    neutral: Neutral
    """What a neutral rating counts as. There is no default: results under different policies do not compare."""


def figures(request: Request) -> Report:
    from jprm.evaluate.steps import steps_report

    records = [tree for trees in request.data.values() for tree in trees]
    report = steps_report(records, request.neutral, request.seed, request.scale.threshold)
    return report | {"too_long": request.left_out}


KEYS = ("auroc", "average_precision_of_errors", "average_precision_of_correct", "accuracy", "alternatives")


def tables(report: Report) -> Iterator[Table]:
    yield _table({"scores": report}, report)


def section(models: Sequence[Model]) -> Iterator[Block]:
    reports = {model.name: model.results["steps"] for model in models}
    yield _table(reports, next(iter(reports.values())))
    yield Note(
        "AUROC: how often a right step scores above a wrong one; 50 is chance. Average precision of errors: the"
        " fraction of wrong steps among those that score lowest, over all cut-offs; chance is the fraction of wrong"
        " steps. Alternatives: as AUROC, within one step of one problem, where nothing but content differs. Accuracy"
        " and first errors are at 0.5, or the threshold that the model's adapter states."
    )


def _table(reports: Mapping[str, Report], first: Report) -> Table:
    """The figures of each report, and of the baselines of the first."""
    columns = {**reports, **{f"baseline: {words(name)}": row for name, row in first["baselines"].items()}}
    rows = [[words(key), *(interval(column.get(key)) for column in columns.values())] for key in KEYS]
    for key in ("accuracy", "f1"):
        cells = (interval(column.get("first_error", {}).get(key)) for column in columns.values())
        rows.append([f"first error, {key}", *cells])
    title = f"Steps: {first['n_right']} right, {first['n_wrong']} wrong, {first['n_problems']} problems;"
    thresholds = dict.fromkeys(f"{report.get('threshold', 0.5):g}" for report in reports.values())
    title += f" threshold {', '.join(thresholds)}; neutral: {first['neutral']}{left_out_words(first)}"
    return Table(title, ("", *columns), rows)


def verdict(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    steps = results["steps"]
    baselines = {name: row["auroc"] for name, row in steps["baselines"].items()}
    best, base = max(baselines.items(), key=lambda pair: pair[1]["value"] or 0)
    clear = steps["auroc"]["low"] is not None and steps["auroc"]["low"] > (base["high"] or base["value"])
    yield (
        "good" if clear else "open",
        f"Right steps score above wrong ones in {interval(steps['auroc'])} % of pairs (AUROC); the best trivial"
        f" baseline, {words(best)}, has {interval(base)}. The intervals are {'apart' if clear else 'not apart'}.",
    )


def headline(results: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "right steps above wrong ones (AUROC), %", results["steps"]["auroc"]


def problem_draws(results: Mapping[str, Any], scores: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    from jprm.evaluate.steps import auroc_draws

    trees = [tree for name in results["sections"]["steps"] for tree in scores[name]]
    yield "steps, AUROC", auroc_draws(trees, results["neutral"], results["seed"])


BENCHMARK = Benchmark(
    name="steps",
    title="Step labels",
    options=Options,
    tables=tables,
    figures=figures,
    needs=("data", "neutral"),
    section=section,
    verdict=verdict,
    headline=headline,
    problem_draws=problem_draws,
)
