"""Reports on disk and on the screen."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

FILE, NAME = 120, 14
"""Columns of text: of a table in a file, and of the names of rows at least."""


def write_json(path: str | os.PathLike[str], obj: Any) -> None:
    """Write JSON whole or not at all. Raises ValueError for NaN and infinities, which JSON has not."""
    path = Path(path)
    text = json.dumps(obj, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def print_suite(results: Mapping[str, Any], console: Console | None = None) -> None:
    """The tables of every section, and the diagnostics in a line each."""
    if "processbench" in results:
        print_processbench(results["processbench"]["files"], console)
    for key, show in (("prmbench", print_prmbench), ("steps", print_steps), ("calibration", print_calibration)):
        if key in results:
            show(results[key], console)
    for report in results.get("best_of_n", {}).values():
        print_best_of_n(report, console)
    print_diagnostics(results["diagnostics"], console)
    for path in results["absent"]:
        (console or _console()).print(f"absent: {path}")


def print_diagnostics(report: Mapping[str, Any], console: Console | None = None) -> None:
    found = list(_findings(report))
    for name in found or ["none"]:
        (console or _console()).print(f"finding: {name}")


def print_drift(report: Mapping[str, Any], console: Console | None = None) -> None:
    numbers = f"largest distance {report['ks']:.3f}, p = {report['p']:.3f}"
    means = f"mean score {report['mean_before']:.3f} before, {report['mean_after']:.3f} after"
    (console or _console()).print(f"verdict: {report['verdict']} ({numbers}; {means})")


def print_contamination(report: Mapping[str, Any], console: Console | None = None) -> None:
    table = _table("Contamination", "problems", "in the data")
    for name, row in report["benchmarks"].items():
        table.add_row(name, str(row["n"]), str(row["shared"]))
    _show(table, console)


def _findings(report: Mapping[str, Any], path: str = ""):
    for key, value in report.items():
        if isinstance(value, Mapping):
            name = f"{path}, {_words(key)}" if path else _words(key)
            yield from [name] * bool(value.get("finding"))
            yield from _findings(value, name)


def print_processbench(report: Mapping[str, Any], console: Console | None = None) -> None:
    table = _table("ProcessBench", "F1 [95 %]", "error acc.", "correct acc.", "threshold")
    for name, file in report.items():
        tuned = file["tuned"]
        note = " (in sample)" if tuned["in_sample"] else ""
        rows = {
            f"{name}, n = {file['n']}": file,
            f"  tuned on {tuned['calibrated_on']}{note}": tuned,
            "  cross-fitted": file["cross_fit"],
            "  oracle (best threshold in sample)": file["upper_bound"],
            **{f"  {_words(key)}": value for key, value in file["baselines"].items()},
        }
        for label, row in rows.items():
            if row is None:  # too few problems to cross-fit
                continue
            f1 = _interval(*(row.get(key) for key in ("f1", "f1_low", "f1_high")))
            accuracies = (_percent(row.get(key)) for key in ("error_accuracy", "correct_accuracy"))
            threshold = row.get("threshold")
            table.add_row(label, f1, *accuracies, "" if threshold is None else f"{threshold:.4g}")
        table.add_section()
    _show(table, console)


def print_prmbench(report: Mapping[str, Any], console: Console | None = None) -> None:
    columns = ("PRMScore [95 %]", "F1", "negative F1", "right steps", "wrong steps", "first errors")
    table = _table(f"PRMBench: {report['n']} chains, {report['n_steps']} steps, {report['n_wrong']} wrong", *columns)
    keys = ("f1", "negative_f1", "right_accuracy", "wrong_accuracy", "first_error_accuracy")
    for label, row in {"all": report, **{f"  {_words(k)}": row for k, row in report["classes"].items()}}.items():
        table.add_row(label, _interval(**row["prm_score"]), *(_percent(row[key]) for key in keys))
    table.add_section()
    for label, figure in report["groups"].items():
        table.add_row(label, _interval(**figure))
    table.add_section()
    best = f"best threshold of these chains, {report['upper_bound']['threshold']:.4g}"
    for label, row in {best: report["upper_bound"], **report["baselines"]}.items():
        table.add_row(_words(label), _percent(row["prm_score"]))
    _show(table, console)


def print_calibration(report: Mapping[str, Any], console: Console | None = None) -> None:
    title = f"Calibration: {report['n_steps']} steps of {report['n_problems']} problems; neutral: {report['neutral']}"
    table = _table(title, "steps", "mean score", "right", "ECE [95 %]", "ECE of noise", "Brier [95 %]", "AUROC")
    rows = {
        "as scored": report["raw"],
        **{f"  {name} {row['group']}": row for name, rows in report["by"].items() for row in rows},
        **{f"by {kind}": row for kind, row in report["recalibrated"].items()},
    }
    for label, row in rows.items():
        cells = (str(row["n"]), _percent(row["mean_score"]), _percent(row["share_right"]))
        noise = f"{_percent(row['ece_if_calibrated']['high'])} {'<' if row['miscalibrated'] else ' '}"
        table.add_row(label, *cells, _interval(**row["ece"]), noise, _interval(**_span(row["brier"])),
                      _percent(row["auroc"]))  # fmt: skip
    _show(table, console)
    table = _table("Conformal thresholds", "promised", "confidence", "threshold", "calibration chains", "held out")
    for row in report["conformal"]:
        threshold = "none" if row["threshold"] is None else f"{row['threshold']:.4g}"
        sure = "average" if row["confidence"] is None else _percent(row["confidence"])
        promised, held_out = f"<= {_percent(row['alpha'])}", row["held_out"]
        found = f"{_percent(held_out['rate'])} of {held_out['n']}"
        table.add_row(_words(row["kind"]), promised, sure, threshold, str(row["n"]), found)
    _show(table, console)


def print_steps(report: Mapping[str, Any], console: Console | None = None) -> None:
    title = f"Steps: {report['n_right']} right, {report['n_wrong']} wrong, {report['n_problems']} problems"
    table = _table(f"{title}; neutral: {report['neutral']}", "scores", *map(_words, report["baselines"]))
    columns = [report, *report["baselines"].values()]
    for key in ("auroc", "average_precision_of_errors", "average_precision_of_correct", "accuracy", "alternatives"):
        table.add_row(_words(key), *(_interval(**_span(column.get(key))) for column in columns))
    for key in ("accuracy", "f1"):
        cells = (_interval(**_span(column.get("first_error", {}).get(key))) for column in columns)
        table.add_row(f"first error, {key}", *cells)
    _show(table, console)


def print_best_of_n(report: Mapping[str, Any], console: Console | None = None) -> None:
    n_max = report["n_max"]
    shown = sorted({2**k for k in range(n_max.bit_length() - 1)} | {n_max})
    title = f"Best of n: {report['n_problems']} problems, mean accuracy {_percent(report['mean_accuracy'])} %"
    table = _table(title, *(f"n = {n}" for n in shown[:-1]), f"n = {n_max} [95 %]")
    rows = {
        "oracle (pass@n)": report["pass_at_n"],
        "majority vote": report["majority"],
        **{f"best by {_words(rule)}": curves["best_of_n"] for rule, curves in report["rules"].items()},
        **{f"vote by {_words(rule)}": curves["weighted_vote"] for rule, curves in report["rules"].items()},
        **{_words(name): curve for name, curve in report["baselines"].items()},
    }
    for label, curve in rows.items():
        if curve is not None:
            cells = [_percent(curve["value"][n - 1]) for n in shown[:-1]]
            table.add_row(label, *cells, _interval(*(curve[key][-1] for key in ("value", "low", "high"))))
    _show(table, console)


def print_equal_cost(report: Mapping[str, Any], console: Console | None = None) -> None:
    for unit in ("flops", "seconds"):
        if unit not in report:
            continue
        found, n_max = report[unit], report["n_max"]
        counts = found["choosers"][0]["n"]
        title = f"Accuracy at equal {unit.upper() if unit == 'flops' else unit}: what a majority of n samples costs"
        table = _table(title, *(f"n = {n}" for n in counts), f"less majority of {n_max} [95 %]")
        for row in found["choosers"]:
            cells = [f"{_percent(value)} ({n})" for value, n in zip(row["value"], row["n"], strict=True)]
            less = row.get("less")
            table.add_row(
                row["name"], *cells, _interval(*(less[k][-1] for k in ("value", "low", "high"))) if less else ""
            )
        table.caption = "in brackets, the samples that the budget buys"
        _show(table, console)


def _console() -> Console:
    """The terminal, or a file."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, FILE))


def _show(table: Table, console: Console | None) -> None:
    """Prints a table, folded where it is wider than the console; never so narrow that names or figures are left out."""
    console = console or _console()
    width, wide = console.width, console.options.update(width=FILE)
    if Measurement.get(console, wide, table).maximum > width:
        table = _folded(table)
        console.width = max(width, Measurement.get(console, wide, table).minimum)
    console.print(table)
    console.width = width


def _folded(table: Table) -> Table:
    """The same with every interval below its value, and the words of a head below each other."""
    folded = Table(title=table.title, title_justify="left", show_edge=False, caption=table.caption)
    names, *columns = table.columns
    folded.add_column("", min_width=NAME)
    cells = [[re.sub(r" (?=[\[(])", "\n", str(cell)) for cell in column.cells] for column in columns]
    for column, texts in zip(columns, cells, strict=True):
        head = re.sub(r" (?![^\[]*\])", "\n", str(column.header))
        widest = max(len(line) for text in (head, *texts) for line in text.split("\n"))
        folded.add_column(head, justify=column.justify, min_width=widest, no_wrap=True)
    for row, name, *texts in zip(table.rows, names.cells, *cells, strict=True):
        folded.add_row(name, *texts, end_section=row.end_section)
    return folded


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _words(key: str) -> str:
    return key.replace("_", " ")


def _span(figure: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: (figure or {}).get(key) for key in ("value", "low", "high")}


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    span = "" if low is None or high is None else f" [{_percent(low)}, {_percent(high)}]"
    return _percent(value) + span
