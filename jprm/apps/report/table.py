"""Tables for a paper: runs grouped by settings, with mean and spread over seeds, and tests between groups.

A suite's figure is known for every problem, so intervals resample seeds and problems (`jprm.statistics.mean_of_runs`).
A training metric is one number per run, so its interval covers seeds only.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jprm.apps.report.collect import drawn_figures, read_suites
from jprm.apps.report.runs import METRICS, differing, flat, followed, last_metrics, names_of, setting
from jprm.experiment import RUN, read, run_id, to_json
from jprm.io.storage import Found, Place, path_of
from jprm.methods.evaluate.blocks import ABSENT, Table
from jprm.statistics import Draws, Estimate, difference_of_runs, mean_of_runs

RESULTS = "results.json"
UNTOLD = ("name", "trackers")
"""Fields that may differ within a group, because they do not affect the computation."""


class Run(NamedTuple):
    """One trained model: its figures, and its settings by path (if its folder is there)."""

    name: str
    settings: Mapping[str, Any] | None
    figures: Mapping[str, Draws]


class SeedGroup(NamedTuple):
    """Runs that differ only in their seeds. `label` has the settings that distinguish the group."""

    label: Mapping[str, str]
    seeds: tuple[str, ...]  # of each run, as text
    runs: tuple[Run, ...]


class Row(NamedTuple):
    """One figure of one group, and its difference from the first group. `over` names the resampled units."""

    group: Mapping[str, str]
    figure: str
    runs: int
    problems: int  # 0 for a metric of training
    mean: Estimate
    spread: float  # standard deviation over runs; NaN for one
    over: str
    less_first: Estimate | None
    less_over: str


def table_of(folders: Sequence[str | os.PathLike], over: Sequence[str] = ("seed",)) -> list[Row]:
    """Returns table rows, by figure and group; groups are compared with the first run's group.

    Args:
      folders: folders of `jprm eval suite` or `jprm train`, or folders that contain these.
      over: experiment fields in which the runs of a group may differ.

    Raises:
      FileNotFoundError: a folder is neither of these, or unfinished.
      ValueError: suites differ, a field is unknown, two runs share a seed, or a run lacks a figure of its group.
    """
    groups = _groups(_runs(folders), over)
    figures = dict.fromkeys(name for group in groups for run in group.runs for name in run.figures)
    return [row for figure in figures for row in _rows(groups, figure)]


def _rows(groups: Sequence[SeedGroup], figure: str) -> Iterator[Row]:
    first: tuple[SeedGroup, list[Draws]] | None = None
    for group in groups:
        runs = [run.figures[figure] for run in group.runs if figure in run.figures]
        if not runs:
            continue
        if len(runs) < len(group.runs):
            absent = next(run.name for run in group.runs if figure not in run.figures)
            raise ValueError(f"{absent}: has no {figure!r}, and other runs of its group have. Evaluate it too")
        less, less_over = None, ""
        if first is None:
            first = group, runs
        else:
            same = sorted(first[0].seeds) == sorted(group.seeds)
            sides = (first[1], first[0].seeds), (runs, group.seeds)
            first_runs, group_runs = (
                [x for _, x in sorted(zip(s, r, strict=True), key=lambda p: p[0])] for r, s in sides
            )
            less = difference_of_runs(group_runs, first_runs, same_seeds=same)
            less_over = _over(min(len(first_runs), len(group_runs)), runs[0].groups)
        values = [run.value for run in runs]
        spread = float(np.std(values, ddof=1)) if len(runs) > 1 else math.nan
        over = _over(len(runs), runs[0].groups)
        problems = runs[0].groups
        mean = mean_of_runs(runs, fraction=problems > 0)
        yield Row(group.label, figure, len(runs), problems, mean, spread, over, less, less_over)


def _over(runs: int, problems: int) -> str:
    """Names the units that an interval resamples."""
    return " and ".join(["seeds"] * (runs > 1) + ["problems"] * (problems > 1)) or "nothing"


def _runs(folders: Sequence[str | os.PathLike]) -> list[Run]:
    """Returns the runs in folder order; a suite's figures are merged with the metrics of the run that it evaluated."""
    runs: dict[str, Run] = {}
    suites = [place for folder in folders for place in _places(path_of(folder), RESULTS)]
    trained = [place for folder in folders for place in _places(path_of(folder), RUN)]
    for folder in map(path_of, folders):
        if not _places(folder, RESULTS) and not _places(folder, RUN):
            raise FileNotFoundError(f"{folder}: has no {RESULTS} of `jprm eval suite` and no {RUN} of `jprm train`")
    results, scores = read_suites(list(dict.fromkeys(suites))) if suites else ([], [])
    for result, of_model in zip(results, scores, strict=True):
        named: Found = result["model"]["folder"]
        if (folder := named.text) in runs:
            raise ValueError(f"{folder}: two of the folders evaluate this model. Name one of them")
        run = followed(named)
        theirs, now = result["model"].get("run"), run_id(run) if run is not None else ""
        if theirs and now and theirs != now:
            raise ValueError(f"{named.file}: is of the run {theirs}, and {folder} is the run {now}. Evaluate it again")
        settings = flat(to_json(read(run / RUN))) if run is not None and (run / RUN).is_file() else None
        runs[folder] = Run(folder, settings, drawn_figures(result, of_model))
    for place in dict.fromkeys(trained):
        metrics = last_metrics(place / METRICS)
        numbers = {
            name.replace("_", " "): Draws(float(value), np.zeros(0), 0)
            for name, value in metrics.items()
            if name.startswith("valid_") and name != "valid_labels" and isinstance(value, int | float)
        }
        folder = str(place.resolve())
        known = runs[folder].figures if folder in runs else {}
        runs[folder] = Run(folder, flat(to_json(read(place / RUN))), {**known, **numbers})
    return list(runs.values())


def _places(folder: Place, name: str) -> list[Place]:
    """Returns the folder if it contains the file, or else its direct subfolders that do."""
    return [folder] if (folder / name).is_file() else [*folder.folders_with(name)]


def _groups(runs: Sequence[Run], over: Sequence[str]) -> list[SeedGroup]:
    """Groups the runs by settings; a run with unknown settings is its own group, labelled by name."""
    known = [run.settings for run in runs if run.settings is not None]
    fields = dict.fromkeys(field for settings in known for field in settings)
    if known and (unknown := [field for field in over if field not in fields]):
        near = ", ".join(field for field in fields if "seed" in field)
        raise ValueError(f"--over {unknown[0]}: is no field of these experiments; those of seeds are {near}")
    differ = [field for field in differing(known) if field not in (*over, *UNTOLD)]
    members: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        key = (run.name,) if run.settings is None else tuple(json.dumps(run.settings.get(field)) for field in differ)
        members.setdefault(key, []).append(run)
    short = dict(zip((run.name for run in runs), names_of([run.name for run in runs]), strict=True))
    groups = []
    for rows_of in members.values():
        settings = rows_of[0].settings
        label = {"run": short[rows_of[0].name]} if settings is None else {f: setting(settings.get(f)) for f in differ}
        seeds = tuple(json.dumps([run.settings.get(f) for f in over]) if run.settings else run.name for run in rows_of)
        if len(set(seeds)) < len(seeds):
            twice = [run.name for run, seed in zip(rows_of, seeds, strict=True) if seeds.count(seed) > 1]
            raise ValueError(f"{twice[0]} and {twice[1]}: equal settings and one {', '.join(over)}. Name one of them")
        groups.append(SeedGroup(label, seeds, tuple(rows_of)))
    return groups


CAPTION = (
    "Mean over runs and its 95 % interval; the spread is the standard deviation over runs. Differences are to the first"
    " group: problems are paired, and seeds too where both groups have the same. One over only problems, as of"
    " one run and several, is between these runs: its interval and p leave out what another seed would change. p is"
    " two-sided and not corrected for the number of comparisons."
)


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """Yields one table per figure, with one row per group; the last one has the caption. Yields no table without rows.

    Figures over problems are in per cent.
    """
    for figure in dict.fromkeys(row.figure for row in rows):
        of_figure = [row for row in rows if row.figure == figure]
        scale = 100.0 if of_figure[0].problems else 1.0
        heads = dict.fromkeys(name for row in of_figure for name in row.group)
        cells = [
            [*(row.group.get(head, ABSENT) for head in heads), str(row.runs), _number(scale * row.mean.value, scale),
             _number(scale * row.spread, scale), _interval(row.mean, scale), row.over,
             *_difference(row, scale)]
            for row in of_figure
        ]  # fmt: skip
        counts = f", {of_figure[0].problems} problems" if of_figure[0].problems else ""
        unit = ", %" if of_figure[0].problems else ""
        names = ("runs", "mean", "spread", "95 %", "interval over", "difference", "95 %", "p", "p over")
        columns = (*(heads or [""]), *names)
        cells = cells if heads else [["", *row] for row in cells]
        yield Table(f"{figure}{unit}{counts}", columns, cells, caption=CAPTION if figure == rows[-1].figure else "")


def _difference(row: Row, scale: float) -> list[str]:
    if row.less_first is None:
        return [ABSENT] * 4
    p = row.less_first.p
    return [f"{_number(scale * row.less_first.value, scale, '+')}", _interval(row.less_first, scale, "+"),
            ABSENT if math.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}", row.less_over]  # fmt: skip


def _interval(mean: Estimate, scale: float, sign: str = "") -> str:
    bounds = mean.interval()
    if math.isnan(bounds.low):
        return ABSENT
    return f"[{_number(scale * bounds.low, scale, sign)}, {_number(scale * bounds.high, scale, sign)}]"


def _number(value: float, scale: float, sign: str = "") -> str:
    """Formats a percentage with one decimal, or another number with four digits."""
    return ABSENT if math.isnan(value) else format(value, f"{sign}.1f" if scale == 100 else f"{sign}.4g")


def as_csv(rows: Sequence[Row]) -> str:
    """Returns CSV text: a heading, and one line per figure and group, with all digits; fractions, not percentages.

    Columns: the groups' settings, figure, runs, problems, mean, spread, low, high, interval_over, difference,
    difference_low, difference_high, difference_over and p. An undefined number is empty.
    """
    heads = list(dict.fromkeys(name for row in rows for name in row.group))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([
        *heads, "figure", "runs", "problems", "mean", "spread", "low", "high", "interval_over", "difference",
        "difference_low", "difference_high", "difference_over", "p",
    ])  # fmt: skip
    for row in rows:
        less = row.less_first
        figures = [row.mean.value, row.spread, *row.mean.interval()[1:], row.over]
        figures += [*less.interval(), row.less_over, less.p] if less else [None] * 5
        cells = [*(row.group.get(head) for head in heads), row.figure, row.runs, row.problems, *figures]
        writer.writerow(["" if x is None or (isinstance(x, float) and math.isnan(x)) else x for x in cells])
    return out.getvalue()
