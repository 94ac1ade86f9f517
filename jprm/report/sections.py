"""The page's tables and figures, one function a section. All text that comes from data goes through `escape`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from jprm.evaluate.compare import KINDS
from jprm.report import svg
from jprm.report.published import PROCESSBENCH, SPLITS
from jprm.report.verdict import decided, interval, percent, points, rows_of

SHOWN_RULES = ("prod", "min", "last", "mean")


def figures(page: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    """(name, (how to read it, SVG)) of every figure."""
    several = len(page["models"]) > 1
    for name in page["models"][0]["results"].get("best_of_n", {}):
        for model in page["models"]:
            yield f"best_of_n-{_slug(name)}-{_slug(model['name'])}", _best_of_n_figure(name, model)
        if several:
            yield f"best_of_n-{_slug(name)}-models", _models_figure(name, page["models"])
    for i, model in enumerate(page["models"]):
        calibration = model["results"].get("calibration")
        if calibration:
            curves = {"as scored": calibration["raw"]["curve"]}
            curves |= {kind: row["curve"] for kind, row in calibration["recalibrated"].items() if kind == "platt"}
            told = f"Reliability of {model['name']}: share of right steps by score."
            yield (
                f"reliability-{_slug(model['name'])}",
                (
                    "Each point is a bin of equally many steps: across its mean score, up the share that is right,"
                    " with a 95 % interval. On the diagonal a score is a probability; below it the model is too sure.",
                    svg.reliability("Reliability diagram", told, curves),
                ),
            )
        heat = page["heat"][i]
        if any(map(any, heat["right steps"])) or any(map(any, heat["wrong steps"])):
            yield (
                f"heat-{_slug(model['name'])}",
                (
                    "A column is the first, second, .. step of a chain; its cells share out that column's steps by"
                    " score, dark for many. A good scorer is dark at the top for right steps and at the bottom for"
                    " wrong ones, in every column alike.",
                    svg.heat_map("Scores by step", f"Scores of {model['name']} by step, right and wrong steps.", heat),
                ),
            )


def comparison(page) -> str:
    parts = []
    for pair in page["comparisons"]:
        rows = [
            [row["what"], points(row) if row["low"] is not None else percent(row["value"]), percent(row["better"]),
             decided(row)]
            for row in pair["rows"]
        ]  # fmt: skip
        columns = ("", "difference", "ahead in % of draws", f"{pair['a']} is")
        parts.append(table(f"{pair['a']} less {pair['b']}, on the same problems", columns, rows))
    read = (
        "Both models met the same problems, so these are drawn together and the difference is taken within each draw:"
        " it can be sure where the two intervals overlap. “Undecided” is not “equal”."
    )
    return "".join(parts) + (_read(read) if parts else "")


def best_of_n(page, drawn) -> str:
    parts = []
    for name, first in page["models"][0]["results"].get("best_of_n", {}).items():
        parts.append(f"<h3>{escape(name)}: {first['n_problems']} problems</h3>")
        if len(page["models"]) > 1:
            parts.append(_figure(drawn[f"best_of_n-{_slug(name)}-models"], "All models"))
        for model in page["models"]:
            report = model["results"]["best_of_n"][name]
            parts.append(_figure(drawn[f"best_of_n-{_slug(name)}-{_slug(model['name'])}"], model["name"]))
            last, pairs = report["n_max"], {(r["a"], r["b"]): r for r in report["paired"]}
            rows = []
            for rule, curves in report["rules"].items():
                row = pairs.get((rule, "majority"))
                against = {key: row[key][-1] for key in ("value", "low", "high", "better")} if row else None
                rows.append(
                    [rule.replace("_", " "), interval(_last(curves["best_of_n"])),
                     points(against) if against else "", percent(against["better"]) if against else "",
                     interval(_last(curves["weighted_vote"]))]
                )  # fmt: skip
            for label, curve in _rivals(report).items():
                rows.append([label, interval(_last(curve)), "", "", ""])
            columns = (f"{model['name']}, n = {last}", "best of n, %", "less majority vote", "ahead in % of draws",
                       "weighted vote, %")  # fmt: skip
            parts.append(table("How often the chosen chain is right", columns, rows))
    return "".join(parts)


def processbench(page) -> str:
    if "processbench" not in page["models"][0]["results"]:
        return ""
    found = page["models"][0]["results"]["processbench"]["files"]
    # Published values say nothing of chains that are not ProcessBench's own.
    published = PROCESSBENCH if set(found) & set(SPLITS) else ()
    splits = list(dict.fromkeys([*(SPLITS if published else ()), *found]))
    rows, own = [], []
    for model in page["models"]:
        report = model["results"]["processbench"]
        kinds = {
            "half": lambda f: f,
            "tuned": lambda f: f["tuned"],
            "cross_fit": lambda f: f["cross_fit"],
            "oracle": lambda f: f["upper_bound"],
        }
        words = KINDS | {"tuned": f"threshold tuned on {report['calibrate']}", "oracle": "oracle, in sample"}
        for kind, of in kinds.items():
            cells = [_f1(of(report["files"][s])) if s in report["files"] else "–" for s in splits]
            average = report["average"].get(kind) if set(report["files"]) == set(SPLITS) else None
            own.append(len(rows))
            rows.append([f"{model['name']}, {words[kind]}", *cells, interval(average), "this page"])
    base = page["models"][0]["results"]["processbench"]["files"]
    for key in next(iter(base.values()))["baselines"]:
        cells = [_f1(base[s]["baselines"][key]) if s in base else "–" for s in splits]
        rows.append([f"baseline: {key.replace('_', ' ')}", *cells, "–", "this page"])
    for name, kind, f1, average, source in published:
        cells = [f"{f1[SPLITS.index(s)]:.1f}" if s in SPLITS else "–" for s in splits]
        rows.append([f"{name} ({kind})", *cells, f"{average:.1f}", source])
    read = (
        "F1 is the harmonic mean of two shares: chains with an error whose first wrong step is named exactly, and"
        " chains without one that are passed. Thresholds: 0.5 needs no tuning; a tuned one comes from the named file"
        " and flatters that file; the cross-fitted one is tuned on other problems than it judges; the oracle is the"
        " best threshold of the very chains it is judged on, an upper bound. The average is that of all four splits,"
        " given where these and no others are there. Published rows are as their authors report them, each at its own"
        " threshold."
    )
    return table("F1, %", ("", *splits, "average", "source"), rows, own) + _read(read)


def steps(page) -> str:
    if "steps" not in page["models"][0]["results"]:
        return ""
    keys = ("auroc", "average_precision_of_errors", "alternatives", "accuracy")
    rows = []
    reports = {model["name"]: model["results"]["steps"] for model in page["models"]}
    first = next(iter(reports.values()))
    reports |= {f"baseline: {name.replace('_', ' ')}": row for name, row in first["baselines"].items()}
    for name, report in reports.items():
        found = report.get("first_error", {}).get("accuracy")
        rows.append([name, *(interval(report.get(key)) for key in keys), interval(found)])
    columns = ("", "AUROC", "av. precision of errors", "alternatives", "accuracy at 0.5", "first error found")
    title = f"{first['n_right']} right and {first['n_wrong']} wrong steps; neutral: {first['neutral']}"
    read = (
        "AUROC: how often a right step scores above a wrong one; 50 is chance. Average precision of errors: of the"
        " steps that score lowest, the share that is wrong, over all cut-offs; chance is the share of wrong steps."
        " Alternatives: the same within one step of one problem, where nothing but content differs."
    )
    return table(title, columns, rows) + _read(read)


def prmbench(page) -> str:
    if "prmbench" not in page["models"][0]["results"]:
        return ""
    reports = {model["name"]: model["results"]["prmbench"] for model in page["models"]}
    first = next(iter(reports.values()))
    rows = [["all", *(interval(report["prm_score"]) for report in reports.values())]]
    for part in ("groups", "classes"):
        for key in first[part]:
            figures = (report[part][key] for report in reports.values())
            cells = [interval(figure if part == "groups" else figure["prm_score"]) for figure in figures]
            rows.append([key.replace("_", " "), *cells])
    for key, row in first["baselines"].items():
        rows.append([f"baseline: {key.replace('_', ' ')}", *[percent(row["prm_score"])] * len(reports)])
    read = "PRMScore is the mean of F1 over right steps and F1 over wrong steps, at threshold 0.5, as published."
    return table("PRMScore, %", ("", *reports), rows) + _read(read)


def calibration(page, drawn) -> str:
    parts = []
    for model in page["models"]:
        report = model["results"].get("calibration")
        if not report:
            continue
        parts.append(_figure(drawn[f"reliability-{_slug(model['name'])}"], model["name"]))
        rows = [_calibration_row("as scored", report["raw"])]
        rows += [_calibration_row(f"by {kind}", row) for kind, row in report["recalibrated"].items()]
        rows += [_calibration_row(f"{by} {r['group']}", r) for by, group in report["by"].items() for r in group]
        columns = (model["name"], "steps", "mean score, %", "right, %", "ECE", "ECE of noise", "Brier")
        parts.append(table(f"{report['left_out']} steps of the problems fitted on are left out", columns, rows))
    read = (
        "ECE is the mean distance between score and share right; no finite sample has 0, so what noise alone would show"
        " stands beside it, and only more than that is a finding. The maps are fitted on other problems."
    )
    return "".join(parts) + (_read(read) if parts else "")


def heat(page, drawn) -> str:
    named = {model["name"]: drawn.get(f"heat-{_slug(model['name'])}") for model in page["models"]}
    return "".join(_figure(figure, name) for name, figure in named.items() if figure)


def diagnostics(page) -> str:
    rows = []
    for model in page["models"]:
        for name, row in rows_of(model["results"]["diagnostics"]):
            label = f"{model['name']}: {name}" if len(page["models"]) > 1 else name
            if "not_computed" in row:
                rows.append([label, "not computed", row["not_computed"]])
                continue
            key, figure = next((k, v) for k, v in row.items() if isinstance(v, Mapping) and "value" in v and k in MAIN)
            said = f"{MAIN[key]}: {interval(figure)}; a finding beyond {percent(row['margin'])}"
            rows.append([label, "finding" if row["finding"] else "none", said])
    if not rows:
        return ""
    read = (
        "A finding needs a margin beyond which a flaw matters and an interval that is clear of it. Lowest at end: right"
        " chains whose lowest score is the last, beyond chance: the scorer judges answers. Wrong process: chains with a"
        " right answer and a wrong step. Length slopes: scores that follow length among right chains of one problem"
        " (a product must; a mean must not). Over-optimisation: accuracy lost by choosing among more. Meaning kept:"
        " edits after which scores should stay. Nonsense: texts that should score below the right chain."
    )
    return table("", ("", "", "figure, %"), rows, text=2) + _read(read)


MAIN = {
    "excess": "excess over chance",
    "gap": "less AUROC than where the answer is wrong too",
    "correlation": "correlation with length",
    "drop": "lost from the peak to the largest n",
    "change": "mean distance of scores before and after the edit",
    "preferred": "how often it scores above the right chain",
}
"""The figure of each diagnostic that decides, in words."""


def left_out(page) -> str:
    rows = []
    for model in page["models"][:1]:
        results = model["results"]
        rows += [[f"file {path}", "is not there"] for path in results["absent"]]
        for name, report in results.get("best_of_n", {}).items():
            counts = {
                "samples without an answer (cannot be chosen)": report["without_answer"],
                "samples without a step (cannot be chosen)": report["without_steps"],
                "problems without a right sample": report["none_right"],
                "problems with right samples only": report["all_right"],
                "repeated problems (drawn together)": report["repeated_problems"],
                "samples beyond the largest n": report["largest_pool"] - report["n_max"],
            }
            rows += [[f"{name}: {what}", str(n)] for what, n in counts.items() if n]
        if results.get("prmbench", {}).get("repeated"):
            rows.append(["PRMBench: repeated records", str(results["prmbench"]["repeated"])])
        if results.get("calibration", {}).get("left_out"):
            rows.append(["calibration: steps of problems fitted on", str(results["calibration"]["left_out"])])
    return table("", ("", "count"), rows) if rows else ""


def _best_of_n_figure(name: str, model: Mapping[str, Any]) -> tuple[str, str]:
    report = model["results"]["best_of_n"][name]
    first = model["results"]["model"]["rule"]
    rules = list(dict.fromkeys([first, *SHOWN_RULES]))[:3]
    series = [_series(f"by {r.replace('_', ' ')}", report, report["rules"][r]["best_of_n"], r == first) for r in rules]
    for i, (label, curve) in enumerate(_rivals(report).items()):
        series.append(_series(label, report, curve, False, dashed=i < 4))
    told = f"Accuracy of best-of-n on {name} for n = 1 to {report['n_max']}, by rule, with rivals; values in the table."
    return (
        "Across the number of chains chosen among, up the share of problems whose chosen chain is right, exact, not"
        " simulated. The band is the 95 % interval over problems. The oracle is the most any chooser can reach.",
        svg.curves(f"Best of n, {name}, {model['name']}", told, series, "n", "right, %"),
    )


def _models_figure(name: str, models: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    series = []
    for model in models:
        report, rule = model["results"]["best_of_n"][name], model["results"]["model"]["rule"]
        label = f"{model['name']}, {rule.replace('_', ' ')}"
        series.append(_series(label, report, report["rules"][rule]["best_of_n"], True))
    report = models[0]["results"]["best_of_n"][name]
    series += [_series(k, report, curve, False, dashed=True) for k, curve in _rivals(report).items() if k != "oracle"]
    told = f"Accuracy of best-of-n on {name} by model; values in the tables."
    return (
        "The models on the same problems, each by the rule that fits its labels. Bands that overlap do not mean a tie:"
        " see the paired comparison.",
        svg.curves(f"Best of n, {name}", told, series, "n", "right, %"),
    )


def _series(label, report, curve, band, dashed=False) -> svg.Series:
    ends = (curve["low"], curve["high"]) if band else (None, None)
    return svg.Series(label, report["n"], curve["value"], *ends, dashed)


def _rivals(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found = {"oracle": report["pass_at_n"], "majority": report["majority"], "random": report["baselines"]["random"]}
    found["shortest"] = report["baselines"]["shortest"]
    return {label: curve for label, curve in found.items() if curve is not None}


def _last(curve: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if curve is None else {key: curve[key][-1] for key in ("value", "low", "high")}


def _f1(row: Mapping[str, Any] | None) -> str:
    row = row or {}
    return interval({"value": row.get("f1"), "low": row.get("f1_low"), "high": row.get("f1_high")})


def _calibration_row(label: str, row: Mapping[str, Any]) -> list[str]:
    noise = row["ece_if_calibrated"]["high"]
    return [
        label, str(row["n"]), percent(row["mean_score"]), percent(row["share_right"]), interval(row["ece"]),
        percent(noise) + (" (finding)" if row["miscalibrated"] else ""), interval(row["brier"]),
    ]  # fmt: skip


def _figure(figure: tuple[str, str], caption: str) -> str:
    read, drawn = figure
    return f"<figure>{drawn}<figcaption>{escape(caption)}</figcaption></figure>{_read(read)}"


def _read(text: str) -> str:
    return f"<details><summary>How to read this</summary><p>{escape(text)}</p></details>"


def table(
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    own: Sequence[int] = (),
    text: int | None = None,
) -> str:
    head = "".join(
        f'<th scope="col"{" class=text" if text == j else ""}>{escape(column)}</th>' for j, column in enumerate(columns)
    )
    body = []
    for i, row in enumerate(rows):
        cells = [f'<th scope="row">{escape(row[0])}</th>']
        cells += [f"<td{' class=text' if text == j else ''}>{escape(x)}</td>" for j, x in enumerate(row[1:], start=1)]
        body.append(f"<tr{' class=own' if i in own else ''}>{''.join(cells)}</tr>")
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption or columns[0] or "table")}">'
        f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
