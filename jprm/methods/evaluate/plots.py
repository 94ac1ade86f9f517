"""Plots of benchmarks, drawn on an empty `matplotlib.figure.Figure` from the caller."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

INK, GRID = "#1c1e21", "#d5d9de"
COLOURS = ("#0b62a8", "#b8500a", "#0a7a57", "#8a3f9c", "#6b6f76", "#8a6d00", "#b0304f", "#14808c")
"""Series colours. On a dark background the page replaces these, `INK` and `GRID` by lighter ones."""

LONGEST = 24
"""The most characters of a name in a plot; longer names lose their middle."""


NOTE = "note: "
"""If the id of an artist begins with this, the rest is a tooltip on the page."""


class Series(NamedTuple):
    """A curve over n = 1, 2, ... with an optional band."""

    label: str
    value: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    dashed: bool = False


def curves(figure: Any, series: Sequence[Series], x_label: str, y_label: str) -> None:
    """Draws fractions in per cent over a logarithmic n, with labels at the right end.

    A series with a missing value is drawn as points; each must have at least one value.
    """
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    top = max(len(s.value) for s in series)
    ends = []
    for s, colour in zip(series, COLOURS * len(series), strict=False):
        at = [i for i in _thinned(len(s.value)) if s.value[i] is not None]
        value = [_percent(s.value[i]) for i in at]
        x = [i + 1 for i in at]
        if s.low is not None and s.high is not None:
            bounds = ([_percent(side[i]) for i in at] for side in (s.low, s.high))
            axes.fill_between(x, *bounds, color=colour, alpha=0.16, linewidth=0)
        style = {"linestyle": "--" if s.dashed else "-"}
        if None in s.value:  # points, not a curve
            style = {"linestyle": "", "marker": "o"}
        axes.plot(x, value, color=colour, **style)
        ends.append((value[-1], colour, short(s.label)))
    ticks = [2**k for k in range(top.bit_length()) if 2**k < top / 1.3] + [top]
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    axes.grid(axis="y")
    axes.set_xlim(1, top if top > 1 else 2)
    axes.set_xlabel(x_label)
    axes.set_title(y_label, loc="left", fontsize="medium")
    low, high = axes.get_ylim()
    places = apart([(value - low) / (high - low) for value, *_ in ends], gap=0.07)
    for (value, colour, label), place in zip(ends, places, strict=True):
        start = (1, (value - low) / (high - low))
        line = {"arrowstyle": "-", "color": colour, "linewidth": 1.5, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)}
        axes.annotate(label, start, (1.05, place), "axes fraction", "axes fraction", arrowprops=line, va="center")


def reliability(figure: Any, curves: Mapping[str, Mapping[str, Any]]) -> None:
    """Draws the fraction right over the mean score per bin, with intervals, for each curve by name.

    A curve has lists `score`, `value`, `low`, `high` (fractions; bins with a null value are skipped) and `n`. Only the
    first 8 curves are drawn (one per colour in `COLOURS`).
    """
    axes = figure.subplots()
    axes.plot([0, 100], [0, 100], color=INK, linestyle="--", linewidth=1)
    for (label, curve), colour in zip(curves.items(), COLOURS, strict=False):
        at = [i for i, value in enumerate(curve["value"]) if value is not None]
        score, value, low, high = ([_percent(curve[key][i]) for i in at] for key in ("score", "value", "low", "high"))
        axes.vlines(score, low, high, color=colour, linewidth=1.5)
        axes.plot(score, value, color=colour, label=short(label))
        for x, y, i in zip(score, value, at, strict=True):
            note = f"{curve['n'][i]} steps of mean score {x / 100:.3f}: {y:.1f} % right"
            axes.plot([x], [y], color=colour, marker="o", markersize=5, gid=NOTE + note)
    axes.set(xlim=(0, 100), ylim=(0, 100), aspect="equal", xlabel="mean score, %")
    axes.set(xticks=range(0, 101, 25), yticks=range(0, 101, 25))
    axes.grid()
    axes.set_title("right, %", loc="left", fontsize="medium")
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False)


def heat_maps(figure: Any, panels: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Draws, for each panel, counts [score bin][step] as fractions of their step.

    There must be two to eight panels of one shape, with bins that divide [0, 1] equally, lowest first. Trailing steps
    without any chain are left out; the last column of a full panel includes all later steps.
    """
    from matplotlib.patches import Patch

    most = len(next(iter(panels.values()))[0])
    used = [j for rows in panels.values() for row in rows for j, count in enumerate(row) if count]
    columns = max(used, default=0) + 1
    panels = {name: [row[:columns] for row in rows] for name, rows in panels.items()}
    every = figure.subplots(1, len(panels), sharey=True)
    fractions = [
        count / total
        for rows in panels.values()
        for row in rows
        for count, total in zip(row, map(sum, zip(*rows, strict=True)), strict=True)
        if total
    ]
    darkest = max(fractions, default=0.0) or 1.0
    for axes, colour, (name, rows) in zip(every, COLOURS, panels.items(), strict=False):
        totals = [sum(column) for column in zip(*rows, strict=True)]
        shares = [[count / n if n else 0.0 for count, n in zip(row, totals, strict=True)] for row in rows]
        for b, row in enumerate(shares):
            for j, share in enumerate(row):
                if totals[j]:
                    alpha, note = 0.04 + 0.96 * share / darkest, f"step {j + 1}, score {b / len(rows):g} to "
                    note += f"{(b + 1) / len(rows):g}: {rows[b][j]} of {totals[j]}"
                    (box,) = axes.bar(j + 1, 0.94, 0.94, b + 0.03, color=colour, alpha=alpha, linewidth=0)
                    box.set_gid(NOTE + note)
        axes.set_title(f"{name} ({sum(totals)})", loc="left", fontsize="medium")
        ticks = list(range(1, columns + 1)) if columns <= 8 else [1, *range(2, columns - 1, 2), columns]
        axes.set_xticks(ticks, [f"{tick}+" if tick == most else str(tick) for tick in ticks])
        axes.set_yticks(range(0, len(rows) + 1, 2), [f"{b / len(rows):g}" for b in range(0, len(rows) + 1, 2)])
        axes.set(xlabel="step", xlim=(0.5, columns + 0.5), ylim=(0, len(rows)))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    every[0].set_ylabel("score")
    keys = [
        Patch(facecolor=INK, alpha=0.04 + 0.96 * share, label=f"{100 * share * darkest:.0f} %") for share in (0, 0.5, 1)
    ]
    every[-1].legend(
        handles=keys, title="of a step's scores", loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False
    )


def short(label: str) -> str:
    """Shortens a name above `LONGEST` to its beginning and end, since model names may differ at either."""
    return label if len(label) <= LONGEST else f"{label[: LONGEST // 2]}…{label[1 - LONGEST // 2 :]}"


def slug(name: str) -> str:
    """Replaces all but letters (of any script), digits, `-` and `_` by `_`; two names may become equal."""
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name)


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Returns places for labels, at most 1 and at least `gap` apart, in the given order; below 0 if too many."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    for before, i in zip(order, order[1:], strict=False):
        moved[i] = max(moved[i], moved[before] + gap)
    limit = 1.0
    for i in reversed(order):
        moved[i] = min(moved[i], limit)
        limit = moved[i] - gap
    return moved


def _percent(value: float | None) -> float:
    return math.nan if value is None else 100 * value


def _thinned(size: int, most: int = 120) -> list[int]:
    """Returns at most `most` indices, evenly spaced on the logarithmic axis, with both ends."""
    if size <= most:
        return list(range(size))
    return sorted({round(math.exp(math.log(size) * k / (most - 1))) - 1 for k in range(most)})
