"""PRMBench: nine classes of error. The figures are computed in `jprm.evaluate.prmbench`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jprm.evaluate.benchmark import Benchmark, Files, ModelOptions, Report, Request
from jprm.evaluate.blocks import Block, Model, Note, Table
from jprm.evaluate.wording import against, interval, left_out_words, percent, words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """PRMBench: PRMScore of its nine classes of error and their three groups, as published.

    For example:
      jprm eval prmbench --model DIR --data prmbench/*.jsonl --json prmbench.json
    """

    data: Files
    """PRMBench files, of any of its classes."""


def figures(request: Request) -> Report:
    from jprm.evaluate.prmbench import prmbench_report

    trees = [tree for trees in request.data.values() for tree in trees]
    return prmbench_report(trees, request.seed, request.scale) | {"too_long": request.left_out}


def tables(report: Report) -> Iterator[Table]:
    columns = ("", "PRMScore [95 %]", "F1", "negative F1", "right steps", "wrong steps", "first errors")
    keys = ("f1", "negative_f1", "right_accuracy", "wrong_accuracy", "first_error_accuracy")
    chains = {"all": report, **{f"  {words(key)}": row for key, row in report["classes"].items()}}
    rows: list[list[str] | None] = [
        [label, interval(row["prm_score"]), *(percent(row[key]) for key in keys)] for label, row in chains.items()
    ]
    rows.append(None)
    rows += [[label, interval(figure), *[""] * 5] for label, figure in report["groups"].items()]
    rows.append(None)
    best = f"best threshold of these chains, {report['upper_bound']['threshold']:.4g}"
    for label, row in {best: report["upper_bound"], **report["baselines"]}.items():
        rows.append([words(label), percent(row["prm_score"]), *[""] * 5])
    title = f"PRMBench: {report['n']} chains, {report['n_steps']} steps, {report['n_wrong']} wrong"
    yield Table(title + left_out_words(report), columns, rows)


def section(models: Sequence[Model]) -> Iterator[Block]:
    reports = {model.name: model.results["prmbench"] for model in models}
    first = next(iter(reports.values()))
    rows = [["all", *(interval(report["prm_score"]) for report in reports.values())]]
    rows += [[words(key), *(interval(r["groups"][key]) for r in reports.values())] for key in first["groups"]]
    rows += [
        [words(key), *(interval(r["classes"][key]["prm_score"]) for r in reports.values())] for key in first["classes"]
    ]
    for key, row in first["baselines"].items():
        rows.append([f"baseline: {words(key)}", *[percent(row["prm_score"])] * len(reports)])
    yield Table("PRMScore, %", ("", *reports), rows)
    yield Note("PRMScore is the mean of F1 over right steps and F1 over wrong steps, as published.")


def verdict(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    found = results["prmbench"]["prm_score"]
    base = max(row["prm_score"] or 0.0 for row in results["prmbench"]["baselines"].values())
    kind, place = against(found, base)
    yield (
        kind,
        f"PRMScore on PRMBench is {interval(found)}; the best verdict that looks at nothing has {percent(base)},"
        f" which is {place} the interval.",
    )


def headline(results: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "PRMBench, PRMScore, %", results["prmbench"]["prm_score"]


def left_out(report: Report) -> Iterator[tuple[str, int]]:
    yield "PRMBench: repeated records", report["repeated"]


BENCHMARK = Benchmark(
    name="prmbench",
    title="PRMBench",
    options=Options,
    tables=tables,
    figures=figures,
    reader="prmbench",
    section=section,
    verdict=verdict,
    headline=headline,
    left_out=left_out,
)
