"""Runs of `jprm train` side by side: the settings that differ, their final metrics, and their curves."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flax.traverse_util import flatten_dict

from jprm.experiment import RUN, read, to_json
from jprm.io.jsonl import DAMAGED
from jprm.io.storage import Found, Given, Place, is_remote, path_of
from jprm.methods.evaluate.blocks import ABSENT, Block, Figure, Table
from jprm.methods.evaluate.plots import COLOURS

METRICS = "metrics.jsonl"
PLACES = ("name", "data.train", "data.valid", "base", "tokenizer", "trackers")
"""Fields that do not affect the computation; shown in the table only if no other field differs."""

SHOWN = ("loss", "auroc", "tokens_per_second", "goodput")
"""Training metrics in the table, after the validation metrics."""


def find_runs(folders: Sequence[str | os.PathLike]) -> list[Place]:
    """Returns the runs: each folder that is one, and the runs below any other folder, by name, without duplicates.

    Raises FileNotFoundError if a folder neither is nor contains a run.
    """
    runs = []
    for folder in map(path_of, folders):
        inside = [folder] if (folder / RUN).is_file() else folder.folders_with(RUN)
        if not inside:
            raise FileNotFoundError(f"{folder}: is no run and holds none: no {RUN} in it or below it")
        runs += inside
    return list(dict.fromkeys(runs))


def left_out(folders: Sequence[str | os.PathLike], runs: Sequence[Place]) -> list[tuple[str, str]]:
    """Returns (folder, reason) for each run, or folder with metrics, below `folders` that is not among `runs`.

    [] if there is no such folder. Runs inside a run belong to it, e.g. refreshed PRMs of a policy's run; they are shown
    only if named. A folder with only metrics may be an incomplete copy.
    """
    seen = {os.fspath(run) for run in runs}
    reasons = []
    for run in runs:
        inside = [os.fspath(inner) for inner in run.folders_with(RUN) if os.fspath(inner) not in seen]
        reasons += [(inner, f"is within the run {os.fspath(run)}: name it to see it") for inner in inside]
        seen |= set(inside)
    for folder in map(path_of, folders):
        bare = (os.fspath(other) for other in folder.folders_with(METRICS))
        reasons += [(other, f"has {METRICS} and no {RUN}: it is no whole run") for other in bare if other not in seen]
    return reasons


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the fields in which flat configurations differ, in order; an absent field counts as null."""
    fields = dict.fromkeys(field for config in configs for field in config)
    return [field for field in fields if len({json.dumps(config.get(field)) for config in configs}) > 1]


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens a configuration, nested dicts, to dotted paths, e.g. {"data.rows": 8}. Lists stay values."""
    return flatten_dict(dict(config), sep=".")


def compare(folders: Sequence[str | os.PathLike]) -> dict[str, Any]:
    """Returns {"differ": fields, "runs": [...], "left_out": [...]} for the runs in these folders (`find_runs`).

    A run has `folder`, `step` (0 before the first metrics), `steps` (of its settings), `settings`, its values of the
    differing fields (null if absent), and `metrics`, the last value of every metric. `left_out` lists {"folder",
    "reason"} of folders that are not shown.

    Raises FileNotFoundError or ValueError, with the file, if a folder has no run or a damaged one.
    """
    runs = find_runs(folders)
    configs = [flat(to_json(read(folder / RUN))) for folder in runs]
    differ = differing(configs)
    entries = []
    for folder, config in zip(runs, configs, strict=True):
        metrics = last_metrics(folder / METRICS)
        entry = {"folder": os.fspath(folder), "step": metrics.pop("step", 0), "steps": config["steps"]}
        entries.append(entry | {"settings": {field: config.get(field) for field in differ}, "metrics": metrics})
    hidden = [{"folder": folder, "reason": reason} for folder, reason in left_out(folders, runs)]
    return {"differ": differ, "runs": entries, "left_out": hidden}


def last_metrics(path: Place) -> dict[str, Any]:
    """Returns the last value of every metric in a metrics.jsonl, `step` included; {} if the file is missing or empty.

    Raises ValueError if it is damaged.
    """
    last: dict[str, Any] = {}
    for line in lines_of(path):
        last |= line
    return last


def lines_of(path: Place) -> list[dict[str, Any]]:
    """Returns the complete lines of a metrics.jsonl, [] if it is missing. Raises ValueError if it is damaged."""
    parsed = []
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        if line.endswith(b"\n"):  # a kill may leave half a line
            try:
                parsed.append(dict(json.loads(line)))
            except DAMAGED as error:
                raise ValueError(f"{path}:{number}: is no line of metrics: {error}") from None
    return parsed


def heads_of(differ: Sequence[str]) -> dict[str, str]:
    """Returns the fields of the runs table with their headings: the path, or its last part if that is unique.

    Fields in `PLACES` are left out, unless no other field differs.
    """
    fields = [field for field in differ if field not in PLACES] or differ
    leaves = [field.rpartition(".")[2] for field in fields]
    return {field: leaf if leaves.count(leaf) == 1 else field for field, leaf in zip(fields, leaves, strict=True)}


LEFT_OUT = 10
"""The most folders listed as not shown."""


def tables(comparison: Mapping[str, Any]) -> Iterator[Table | str]:
    """Yields the table of runs of `compare`, then up to `LEFT_OUT` lines on folders that are not shown.

    Of the metrics it has `valid_...` (except `valid_labels`) and `SHOWN`.
    """
    runs, fields = comparison["runs"], heads_of(comparison["differ"])
    metrics = dict.fromkeys(name for run in runs for name in run["metrics"])
    shown = [name for name in metrics if name.startswith("valid_") and name != "valid_labels"]
    shown += [name for name in SHOWN if name in metrics]
    names = names_of([run["folder"] for run in runs])
    rows = [
        [name, *(setting(run["settings"][field]) for field in fields), f"{run['step']}/{run['steps']}",
         *(_cell(run["metrics"].get(metric)) for metric in shown)]
        for name, run in zip(names, runs, strict=True)
    ]  # fmt: skip
    yield Table("Runs", ("", *fields.values(), "step", *(name.replace("_", " ") for name in shown)), rows)
    hidden = comparison["left_out"]
    yield from (f"not shown: {run['folder']} {run['reason']}" for run in hidden[:LEFT_OUT])
    if len(hidden) > LEFT_OUT:
        yield f"not shown: {len(hidden) - LEFT_OUT} more, in the file of --output"


def names_of(folders: Sequence[str]) -> list[str]:
    """Returns the folders without their common path, at least their last part. Local ones are made absolute first."""
    parts = [(folder if is_remote(folder) else os.path.abspath(folder)).rstrip("/").split("/") for folder in folders]
    shared = len(os.path.commonprefix([path[:-1] for path in parts]))
    return ["/".join(path[shared:]) for path in parts]


def setting(value: Any) -> str:
    """Returns a setting as text with all digits, since runs may differ in the last one.

    Returns `ABSENT` if it is `None`.
    """
    if value is None:
        return ABSENT
    return value if isinstance(value, str) else json.dumps(value)


def _cell(value: Any) -> str:
    """Formats a metric with four digits, and with all digits before the point."""
    if not isinstance(value, float):
        return setting(value)
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


# --------------------------------------------------- curves of metrics, as far as the runs are still there

PLOTS = (
    ("loss", "Training loss", ("loss", "valid_loss")),
    ("auroc", "AUROC in training", ("auroc", "valid_auroc")),
    ("goodput", "Fraction of the time spent training (goodput)", ("goodput",)),
    ("mfu", "Use of the devices (MFU)", ("mfu",)),
)
"""For each figure: name, title, and metrics; the second metric is dashed."""

NOTE = (
    "A point is the mean over the steps since the one before. Dashed curves are of the validation data. Goodput is the"
    " fraction of the time since the start in which the model trained, MFU the fraction of the devices' published rate."
)


def training(runs: Sequence[tuple[str, Given | Found]]) -> Iterator[Block]:
    """Yields the training figures of runs, given as (name, folder). Folders without readable metrics are left out.

    So is a `Found` at an address that this user's jprm did not write. Raises ValueError for damaged metrics.
    """
    lines = {name: _there(folder) for name, folder in runs}
    for name, title, metrics in PLOTS:
        drawn = []
        for (run, logged), colour in zip(lines.items(), itertools.cycle(COLOURS)):
            for metric, style in zip(metrics, ("-", "--"), strict=False):
                points = [(line["step"], line[metric]) for line in logged if metric in line and "step" in line]
                if points:
                    label = run if metric == metrics[0] else None
                    drawn.append(Line(label, *zip(*points, strict=True), colour=colour, style=style))
        if drawn:
            shown = [
                run for run, logged in lines.items() if any(metric in line for line in logged for metric in metrics)
            ]
            sentence = f"{title} of {', '.join(shown)} by step."
            yield line_plot(f"training-{name}", title, drawn, description=sentence, note=NOTE)


def _there(folder: Given | Found) -> list[dict[str, Any]]:
    """Returns a run's metrics; [] if its folder is missing, inaccessible, or at an untrusted address."""
    place = followed(folder) if isinstance(folder, Found) else path_of(folder)
    try:
        return lines_of(place / METRICS) if place is not None else []
    except OSError:
        return []


def followed(folder: Found) -> Place | None:
    """Returns the place of a folder named in results, which may not exist.

    Returns `None` if it is an address and the results may be someone else's.
    """
    try:
        return folder.data()
    except ValueError:
        return None


class Line(NamedTuple):
    """A curve; without a label, it shares the colour of a labelled curve."""

    label: str | None
    x: Sequence[float]
    y: Sequence[float]
    colour: str = COLOURS[0]
    style: str = "-"


def line_plot(
    name: str, title: str, lines: Sequence[Line], *, description: str, note: str, x_label: str = "step",
    few: bool = False,
) -> Figure:  # fmt: skip
    """Returns a figure of lines, each with `x` and `y` of one length; it is drawn when the page is.

    If there are `few` points, each is a dot, and the y axis begins at 0.
    """

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for line in lines:
            axes.plot(line.x, line.y, line.style, color=line.colour, label=line.label, marker="o" if few else "",
                      markersize=3)  # fmt: skip
        axes.set_xlabel(x_label)
        if few:
            axes.xaxis.get_major_locator().set_params(integer=x_label == "update")
            axes.set_ylim(bottom=0)
        else:
            axes.set_title(title, loc="left", fontsize="medium")
        axes.grid(axis="y")
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), frameon=False)

    return Figure(name=name, title=title, description=description, caption=title, note=note, draw=draw)
