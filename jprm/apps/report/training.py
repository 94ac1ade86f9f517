"""How the models on a page were trained: curves of their runs' metrics, as far as the runs are still there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from jprm.apps.report.runs import METRICS, lines_of
from jprm.io.storage import path_of
from jprm.methods.evaluate.blocks import Block, Figure
from jprm.methods.evaluate.plots import COLOURS

PLOTS = (
    ("loss", "Training loss", ("loss", "valid_loss")),
    ("auroc", "AUROC in training", ("auroc", "valid_auroc")),
    ("goodput", "Goodput", ("goodput",)),
    ("mfu", "MFU", ("mfu",)),
)
"""Of every figure: name, title, and the metrics that it draws, the second one dashed."""

NOTE = (
    "A point is the mean over the steps since the one before. Dashed curves are of the validation data. Goodput is the"
    " fraction of the time since the start in which the model trained, MFU the fraction of the devices' published rate."
)


def training(runs: Sequence[tuple[str, str | os.PathLike]]) -> Iterator[Block]:
    """Yields the figures of runs, given by name and folder. A folder without metrics is left out."""
    lines = {name: _lines(folder) for name, folder in runs}
    for name, title, metrics in PLOTS:
        curves = [
            (run, metric, points)
            for run, some in lines.items()
            for metric in metrics
            if (points := [(line["step"], line[metric]) for line in some if metric in line and "step" in line])
        ]
        if curves:
            yield _figure(name, title, metrics, curves)


def _lines(folder: str | os.PathLike) -> list[dict[str, Any]]:
    """Returns a run's metrics, none where its folder is gone or in a bucket that this machine cannot read."""
    try:
        return lines_of(path_of(folder) / METRICS)
    except OSError:
        return []


def _figure(name: str, title: str, metrics: Sequence[str], curves: Sequence[tuple[str, str, list]]) -> Figure:
    names = list(dict.fromkeys(run for run, *_ in curves))

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for run, metric, points in curves:
            first = metric == metrics[0]
            label = None if not first else run
            colour = COLOURS[names.index(run) % len(COLOURS)]
            axes.plot(*zip(*points, strict=True), color=colour, linestyle="-" if first else "--", label=label)
        axes.set_xlabel("step")
        axes.set_title(title, loc="left", fontsize="medium")
        axes.grid(axis="y")
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), frameon=False)

    return Figure(
        name=f"training-{name}",
        title=title,
        description=f"{title} of {', '.join(names)} by step.",
        caption=title,
        note=NOTE,
        draw=draw,
    )
