"""ProcessBench: find the first wrong step. The figures are computed in `jprm.evaluate.processbench`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jprm.evaluate.benchmark import Benchmark, File, Files, ModelOptions, Report, Request, scale_of
from jprm.evaluate.blocks import Block, Model, Note, Table
from jprm.evaluate.published import PROCESSBENCH, SPLITS
from jprm.evaluate.wording import ABSENT, decided, interval, left_out_words, percent, points, words

THRESHOLDS = {"half": "untuned threshold", "tuned": "tuned threshold", "cross_fit": "cross-fitted threshold"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """ProcessBench: find the first wrong step, or report that there is none. F1 as published.

    For example:
      jprm eval processbench --model DIR --data gsm8k.json math.json --calibrate gsm8k.json --json processbench.json
    """

    data: Files
    """ProcessBench files; each is a key of the report."""
    calibrate: File
    """The file on which the tuned threshold is chosen; the report gives F1 at the model's own threshold beside it."""


def figures(request: Request) -> Report:
    """Returns `files`, `average` over the files, and `calibrate`, the name of the file that thresholds are tuned on."""
    from jprm.evaluate.processbench import average_f1, processbench_report

    (tuned_on,) = request.calibrate
    chains = {**request.data, **request.calibrate}
    report = processbench_report(chains, tuned_on, request.seed, request.scale.threshold)
    return {
        "files": {name: report[name] | {"too_long": request.too_long.get(name, 0)} for name in request.data},
        "average": average_f1(chains, tuned_on, request.seed, list(request.data), request.scale.threshold),
        "calibrate": tuned_on,
    }


def tables(report: Report) -> Iterator[Table]:
    rows: list[list[str] | None] = []
    for name, file in report.items():
        tuned = file["tuned"]
        named = {
            f"{name}, n = {file['n']}{left_out_words(file)}": file,
            f"  tuned on {tuned['calibrated_on']}{' (in sample)' if tuned['in_sample'] else ''}": tuned,
            "  cross-fitted": file["cross_fit"],
            "  oracle (best threshold in sample)": file["upper_bound"],
            **{f"  {words(key)}": value for key, value in file["baselines"].items()},
        }
        for label, row in named.items():
            if row is not None:  # None: too few problems to cross-fit
                accuracies = (percent(row.get(key)) for key in ("error_accuracy", "correct_accuracy"))
                threshold = row.get("threshold")
                rows.append([label, _f1(row), *accuracies, ABSENT if threshold is None else f"{threshold:.4g}"])
        rows.append(None)
    yield Table("ProcessBench", ("", "F1 [95 %]", "error acc.", "correct acc.", "threshold"), rows)


def section(models: Sequence[Model]) -> Iterator[Block]:
    first = models[0].results["processbench"]["files"]
    # Published values are of ProcessBench's own chains.
    published = PROCESSBENCH if set(first) & set(SPLITS) else ()
    splits = list(dict.fromkeys([*(SPLITS if published else ()), *first]))
    rows: list[list[str]] = []
    for model in models:
        rows += _own_rows(model, splits)
    own = range(len(rows))
    for key in next(iter(first.values()))["baselines"]:
        cells = [_f1(first[split]["baselines"][key]) if split in first else ABSENT for split in splits]
        rows.append([f"baseline: {words(key)}", *cells, ABSENT, "this page"])
    for name, kind, f1, average, source in published:
        cells = [f"{f1[SPLITS.index(split)]:.1f}" if split in SPLITS else ABSENT for split in splits]
        rows.append([f"{name} ({kind})", *cells, f"{average:.1f}", source])
    yield Table("F1, %", ("", *splits, "average", "source"), rows, strong=own)
    yield Note(
        "F1 is the harmonic mean of two fractions: chains with an error whose first wrong step is named exactly, and"
        " chains without an error that are passed. The untuned threshold is 0.5, or what the model's adapter states. A"
        " tuned one comes from the named file and flatters that file. The cross-fitted one is tuned on other problems"
        " than it judges. The oracle is the best threshold of the very chains it is judged on, an upper bound. The"
        " average is over the four published splits, where these and no others are evaluated. Published rows are as"
        " their authors report them, each at its own threshold."
    )


def _own_rows(model: Model, splits: Sequence[str]) -> Iterator[list[str]]:
    report = model.results["processbench"]
    named = THRESHOLDS | {"tuned": f"threshold tuned on {report['calibrate']}", "oracle": "oracle, in sample"}
    for kind, said in named.items():
        files = {name: _at(file, kind) for name, file in report["files"].items()}
        cells = [_f1(files[split]) if split in files else ABSENT for split in splits]
        average = report["average"].get(kind) if set(files) == set(SPLITS) else None
        yield [f"{model.name}, {said}", *cells, interval(average), "this page"]


def _at(file: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    return file if kind == "half" else file[{"oracle": "upper_bound"}.get(kind, kind)]


def verdict(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, file in results["processbench"]["files"].items():
        rows = {"always no error" if key == "always_correct" else words(key): x for key, x in file["baselines"].items()}
        use, how = file["tuned"], f"with the threshold tuned on {file['tuned']['calibrated_on']}"
        if use["in_sample"]:
            if file["cross_fit"] is None:
                yield "open", f"ProcessBench {name}: too few problems to tune a threshold off the chains it judges."
                continue
            use, how = file["cross_fit"], "with a cross-fitted threshold"
            # tuned as the model is; baselines without a threshold have no `cross_fit`
            rows = {name: row.get("cross_fit") or row for name, row in rows.items()}
        best, base = max(rows.items(), key=lambda pair: pair[1]["f1"] or 0)
        less = use.get("less", {"low": None})  # results of 0.1 have none
        yield (
            {"better": "good", "worse": "bad", "undecided": "open"}[decided(less)],
            f"ProcessBench {name}: F1 {_f1(use)} {how}; {percent(file['f1'])} at {file['threshold']:.4g}. The best"
            f" trivial baseline ({best}), tuned alike, has {percent(base['f1'])}"
            + (f": a difference of {points(less)}." if less["low"] is not None else "."),
        )


def headline(results: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "ProcessBench, F1 without tuning, %", results["processbench"]["average"]["half"]


def problem_draws(results: Mapping[str, Any], scores: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    from jprm.evaluate.processbench import average_draws, f1_draws

    tuned_on, files = results["processbench"]["calibrate"], list(results["processbench"]["files"])
    some = {name: scores[name] for name in dict.fromkeys([*files, tuned_on])}
    drawn = f1_draws(some, tuned_on, results["seed"], scale_of(results).threshold)
    for kind, said in THRESHOLDS.items():
        for name in files:
            if drawn[kind][name] is not None:
                yield f"ProcessBench {name}, F1 {said}", drawn[kind][name]
        average = average_draws(drawn[kind], files)
        if len(files) > 1 and average is not None:
            yield f"ProcessBench, average F1 {said}", average


def _f1(row: Mapping[str, Any] | None) -> str:
    row = row or {}
    return interval({"value": row.get("f1"), "low": row.get("f1_low"), "high": row.get("f1_high")})


BENCHMARK = Benchmark(
    name="processbench",
    title="ProcessBench",
    options=Options,
    tables=tables,
    figures=figures,
    needs=("data", "calibrate"),
    one_calibration_file=True,
    reader="processbench",
    reports=lambda entry: [entry["files"]],
    section=section,
    verdict=verdict,
    headline=headline,
    problem_draws=problem_draws,
)
