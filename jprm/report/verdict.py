"""The verdict in words: what the figures allow to be said, and what they do not decide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SCORERS = ("mean", "last", "mean log")
"""Rules under which a slope against length is the scorer's; a product, a sum or an extreme has one by construction."""


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def interval(figure: Mapping[str, Any] | None) -> str:
    """`52.1 [48.0, 56.2]`, in per cent; without brackets where there is no interval."""
    if figure is None or figure.get("value") is None:
        return "–"
    if figure.get("low") is None:
        return percent(figure["value"])
    return f"{percent(figure['value'])} [{percent(figure['low'])}, {percent(figure['high'])}]"


def points(figure: Mapping[str, Any]) -> str:
    """A difference in points, with its sign."""
    value, low, high = (f"{100 * figure[key]:+.1f}" for key in ("value", "low", "high"))
    return f"{value} points [{low}, {high}]"


def decided(figure: Mapping[str, Any]) -> str:
    """`better`, `worse` or `undecided`, of a paired difference."""
    if figure["low"] is None or figure["low"] <= 0 <= figure["high"]:
        return "undecided"
    return "better" if figure["low"] > 0 else "worse"


def sentences(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(`good`, `bad` or `open`, sentence) for each section of one model's results."""
    if "processbench" in results:
        yield from _processbench(results["processbench"])
    for name, report in results.get("best_of_n", {}).items():
        yield from _best_of_n(name, report, results["model"]["rule"])
    if "steps" in results:
        steps = results["steps"]
        best, base = max(
            ((name, row["auroc"]) for name, row in steps["baselines"].items()), key=lambda pair: pair[1]["value"] or 0
        )
        clear = steps["auroc"]["low"] is not None and steps["auroc"]["low"] > (base["high"] or base["value"])
        yield (
            "good" if clear else "open",
            f"Right steps score above wrong ones in {interval(steps['auroc'])} % of pairs (AUROC); the best trivial"
            f" baseline, {_words(best)}, has {interval(base)}. The intervals are {'apart' if clear else 'not apart'}.",
        )
    if "prmbench" in results:
        found = results["prmbench"]["prm_score"]
        base = max(row["prm_score"] or 0.0 for row in results["prmbench"]["baselines"].values())
        kind, where = _against(found, base)
        yield (
            kind,
            f"PRMScore on PRMBench is {interval(found)}; the best verdict that looks at nothing has {percent(base)},"
            f" which is {where} the interval.",
        )
    if "calibration" in results:
        yield _calibration(results["calibration"])
    yield _diagnostics(results["diagnostics"])


def _against(figure: Mapping[str, Any], base: float) -> tuple[str, str]:
    """(`good`, `bad` or `open`, where a baseline lies): below, above or inside the interval of a figure."""
    if figure["low"] is None or figure["low"] <= base <= figure["high"]:
        return "open", "inside"
    return ("good", "below") if figure["low"] > base else ("bad", "above")


def _processbench(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, file in report["files"].items():
        rows = {"always no error": file["baselines"]["always_correct"]} | {
            _words(key): value for key, value in file["baselines"].items() if key != "always_correct"
        }
        best, base = max(rows.items(), key=lambda pair: pair[1]["f1"] or 0)
        use, how = file["tuned"], f"with the threshold tuned on {file['tuned']['calibrated_on']}"
        if use["in_sample"]:
            if file["cross_fit"] is None:
                yield "open", f"ProcessBench {name}: too few problems to tune a threshold off the chains it judges."
                continue
            use, how = file["cross_fit"], "with a cross-fitted threshold"
        figure = {"value": use["f1"], "low": use["f1_low"], "high": use["f1_high"]}
        kind, where = _against(figure, base["f1"] or 0.0)
        yield (
            kind,
            f"ProcessBench {name}: F1 {interval(figure)} {how}; {percent(file['f1'])} at 0.5. The best trivial baseline"
            f" ({best}) has {percent(base['f1'])}, which is {where} the interval.",
        )


def _best_of_n(name: str, report: Mapping[str, Any], rule: str) -> Iterator[tuple[str, str]]:
    n, curves = report["n_max"], report["rules"][rule]
    rows = {(row["a"], row["b"]): row for row in report["paired"]}
    best = {key: curves["best_of_n"][key][-1] for key in ("value", "low", "high")}
    said = f"{name}: choosing among {n} by {_words(rule)} is right in {interval(best)} % of problems"
    row = rows.get((rule, "majority"))
    if row is None:
        base = report["baselines"]["random"]["value"][-1]
        clear = best["low"] is not None and best["low"] > base
        yield "good" if clear else "open", f"{said}; choosing blindly in {percent(base)} %."
        return
    last = {key: row[key][-1] for key in ("value", "low", "high", "better")}
    verdict = decided(last)
    words = {"better": "better than", "worse": "worse than", "undecided": "not told apart from"}[verdict]
    yield (
        {"better": "good", "worse": "bad", "undecided": "open"}[verdict],
        f"{said}. That is {words} majority vote ({percent(report['majority']['value'][-1])} %): {points(last)}, ahead"
        f" in {percent(last['better'])} % of draws. The oracle has {percent(report['pass_at_n']['value'][-1])} %.",
    )


def _calibration(report: Mapping[str, Any]) -> tuple[str, str]:
    raw = report["raw"]
    kind, best = min(report["recalibrated"].items(), key=lambda pair: pair[1]["ece"]["value"])
    said = (
        f"A step's score is off its share of right steps by {interval(raw['ece'])} points on average (ECE); a"
        f" calibrated scorer would show up to {percent(raw['ece_if_calibrated']['high'])} by noise."
    )
    if raw["miscalibrated"] is None:
        return "open", said + " There are too few problems to say more."
    if raw["miscalibrated"]:
        return "bad", said + f" The {kind} map brings it to {percent(best['ece']['value'])} on other problems."
    return "good", said


def _diagnostics(report: Mapping[str, Any]) -> tuple[str, str]:
    found = [name for name, row in rows_of(report) if row.get("finding")]
    of_rule = [name for name in found if name.startswith("length slopes") and name.rsplit(", ", 1)[1] not in SCORERS]
    found = [name for name in found if name not in of_rule]
    missing = [name for name, row in rows_of(report) if "not_computed" in row]
    said = f"Diagnostics: {len(found)} finding{'' if len(found) == 1 else 's'}"
    said += f" ({'; '.join(found)})." if found else "."
    if of_rule:
        rules = ", ".join(name.rsplit(", ", 1)[1] for name in of_rule)
        said += f" Chains score by their length under {rules}, which such rules do whatever the scorer."
    if missing:
        said += f" Not computed: {'; '.join(missing)}."
    return "bad" if found else "open" if missing or not report else "good", said


def rows_of(report: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, diagnostic) of all that is nested in the diagnostics of `results.json`."""
    for key, value in report.items():
        name = f"{path}, {_words(key)}" if path else _words(key)
        if isinstance(value, Mapping):
            if "finding" in value or "not_computed" in value:
                yield name, value
            else:
                yield from rows_of(value, name)


def _words(key: str) -> str:
    return key.replace("_", " ")
