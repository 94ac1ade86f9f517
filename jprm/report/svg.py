"""Figures as SVG text, drawn here: colours are CSS classes, so that one drawing serves light, dark and paper.

Every figure has a title and a description for those who do not see it. `standalone` adds the style for a file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

WIDTH, HEIGHT = 316, 252  # of the area that curves are drawn in
LEFT, TOP, BOTTOM = 40, 28, 40
LONGEST = 24  # characters of a name; of longer ones the beginning and the end are shown
SERIES = 8
_COUNT = itertools.count()

STYLE = """
.plot{font:13px system-ui,sans-serif;--fg:#1c1e21;--grid:#d5d9de;--paper:#fff}
.plot text{fill:var(--fg)}.plot .grid{stroke:var(--grid);stroke-width:1}.plot .axis{stroke:var(--fg);stroke-width:1}
.plot .line{fill:none;stroke-width:2.2}.plot .band{stroke:none;opacity:.16}.plot .dash{stroke-dasharray:5 4}
.plot .s0{--c:#0b62a8}.plot .s1{--c:#b8500a}.plot .s2{--c:#0a7a57}.plot .s3{--c:#8a3f9c}
.plot .s4{--c:#6b6f76}.plot .s5{--c:#8a6d00}.plot .s6{--c:#b0304f}.plot .s7{--c:#14808c}
.plot .line,.plot .bar{stroke:var(--c)}.plot .band,.plot .dot{fill:var(--c)}.plot .right{fill:#0b62a8}
.plot .wrong{fill:#b8500a}
"""


class Series(NamedTuple):
    label: str
    x: Sequence[float]
    value: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    dashed: bool = False


def curves(title: str, description: str, series: Sequence[Series], x_label: str, y_label: str) -> str:
    """Lines over a logarithmic x, y in per cent, bands between `low` and `high`, names at the ends of the lines."""
    series = [_thinned(s) for s in series]
    xs = [x for s in series for x in s.x]
    ys = [v for s in series for part in (s.value, s.low or [], s.high or []) for v in part if v is not None]
    x_low, x_high = math.log2(min(xs)), math.log2(max(xs))
    y_low, y_high, y_ticks = _ticks(min(ys), max(ys))
    right, bottom = LEFT + WIDTH, TOP + HEIGHT

    def at(x, y):
        width = (math.log2(x) - x_low) / ((x_high - x_low) or 1)
        height = (y - y_low) / (y_high - y_low)
        return LEFT + width * WIDTH, bottom - height * HEIGHT

    body = []
    for tick in y_ticks:
        y = at(min(xs), tick)[1]
        body.append(_line(LEFT, y, right, y, "grid") + _text(LEFT - 6, y + 4, f"{100 * tick:g}", "end"))
    powers = [2**k for k in range(math.ceil(x_low), math.floor(x_high) + 1)]
    ticks = powers if math.log2(max(xs)) - math.log2(powers[-1]) < 0.4 else [*powers, max(xs)]
    for tick in ticks:
        x = at(tick, y_low)[0]
        body.append(_text(x, bottom + 16, f"{tick:g}", "middle"))
    body.append(_line(LEFT, bottom, right, bottom, "axis"))
    body.append(_text(LEFT + WIDTH / 2, bottom + 34, x_label, "middle"))
    body.append(_text(4, 12, y_label, "start"))
    ends = []
    for i, s in enumerate(series):
        colour = f"s{i % SERIES}"
        points = [(x, v) for x, v in zip(s.x, s.value, strict=True) if v is not None]
        if s.low is not None and s.high is not None:
            edge = [(x, v) for x, v in zip(s.x, s.high, strict=True) if v is not None]
            edge += [(x, v) for x, v in zip(s.x, s.low, strict=True) if v is not None][::-1]
            body.append(f'<polygon class="band {colour}" points="{_points(at, edge)}"/>')
        dash = " dash" if s.dashed else ""
        body.append(f'<polyline class="line {colour}{dash}" points="{_points(at, points)}"/>')
        ends.append([at(*points[-1])[1], i, _short(s.label)])
    for y, wanted, (_, i, label) in _apart(sorted(ends)):
        body.append(
            f'<line class="line s{i % SERIES}" x1="{right + 2}" y1="{wanted:.1f}" x2="{right + 12}" y2="{y:.1f}"/>'
        )
        body.append(_text(right + 16, y + 4, label, "start"))
    return _svg(title, description, right + 16 + _room(label for *_, label in ends), bottom + BOTTOM, body)


def reliability(title: str, description: str, named: Mapping[str, Mapping[str, Any]]) -> str:
    """The share of right steps over the mean score of each bin, with intervals; the diagonal is perfect calibration."""
    side, left, top = 300, LEFT, TOP
    width, height = left + side + 30 + _room(map(_short, named)), top + side + BOTTOM

    def at(x, y):
        return left + x * side, top + (1 - y) * side

    body = []
    for tick in (0, 0.25, 0.5, 0.75, 1):
        x, y = at(tick, tick)
        body.append(_line(left, y, left + side, y, "grid") + _line(x, top, x, top + side, "grid"))
        body.append(_text(left - 6, y + 4, f"{100 * tick:g}", "end"))
        body.append(_text(x, top + side + 16, f"{100 * tick:g}", "middle"))
    body.append(_line(*at(0, 0), *at(1, 1), "axis dash"))
    for i, (label, curve) in enumerate(named.items()):
        rows = zip(*(curve[key] for key in ("score", "value", "low", "high", "n")), strict=True)
        rows = [row for row in rows if row[1] is not None]
        colour = f"s{i % SERIES}"
        body.append(f'<polyline class="line {colour}" points="{_points(at, [row[:2] for row in rows])}"/>')
        for score, value, low, high, n in rows:
            (x, y), note = at(score, value), f"{n} steps of mean score {score:.3f}: {100 * value:.1f} % right"
            if low is not None and high is not None:
                body.append(_line(x, at(0, low)[1], x, at(0, high)[1], f"bar {colour}"))
            body.append(
                f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{note}</title></circle>'
            )
        body.append(_line(left + side + 10, top + 12 + 18 * i, left + side + 24, top + 12 + 18 * i, f"line {colour}"))
        body.append(_text(left + side + 30, top + 16 + 18 * i, _short(label), "start"))
    body.append(_text(left + side / 2, height - 6, "mean score, %", "middle") + _text(4, 12, "right, %", "start"))
    return _svg(title, description, width, height, body)


def heat_map(title: str, description: str, panels: Mapping[str, Sequence[Sequence[int]]]) -> str:
    """For each panel the counts [bin of score][step]: a column is a step, its cells share out the column's steps."""
    cell, gap, left, top = 22, 34, LEFT, 42
    columns = max(len(rows[0]) for rows in panels.values())
    bins = len(next(iter(panels.values())))
    width = left + len(panels) * (columns * cell + gap)
    body = []
    for k in range(0, bins + 1, bins // 5):
        body.append(_text(left - 6, top + (bins - k) * cell + 4, f"{k / bins:g}", "end"))
    for panel, (name, rows) in enumerate(panels.items()):
        start = left + panel * (columns * cell + gap)
        total = [sum(column) for column in zip(*rows, strict=True)]
        shares = [[count / n if n else 0.0 for count, n in zip(row, total, strict=True)] for row in rows]
        darkest = max(map(max, shares)) or 1.0
        body.append(_text(start, top - 10, f"{name} ({sum(total)})", "start"))
        kind = "right" if panel == 0 else "wrong"
        for b, row in enumerate(rows):
            for j, count in enumerate(row):
                x, y = start + j * cell, top + (bins - 1 - b) * cell
                note = f"step {j + 1}, score {b / bins:g} to {(b + 1) / bins:g}: {count} of {total[j]}"
                dark = 0.04 + 0.96 * shares[b][j] / darkest if total[j] else 0
                body.append(
                    f'<rect class="{kind}" x="{x}" y="{y}" width="{cell - 1}" height="{cell - 1}"'
                    f' fill-opacity="{dark:.3f}"><title>{note}</title></rect>'
                )
        for j in range(columns):
            label = f"{j + 1}+" if j == columns - 1 else str(j + 1) if j < columns - 2 else ""
            body.append(_text(start + j * cell + cell / 2, top + bins * cell + 16, label, "middle"))
    body.append(_text(4, 12, "score", "start") + _text(width / 2, top + bins * cell + 34, "step", "middle"))
    return _svg(title, description, width, top + bins * cell + 40, body)


def standalone(figure: str) -> str:
    """The figure as a file of its own, with its colours."""
    head, _, rest = figure.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{rest}\n'


def _short(label: str) -> str:
    """Names of models differ at their ends as often as where they begin."""
    return label if len(label) <= LONGEST else f"{label[: LONGEST // 2]}…{label[1 - LONGEST // 2 :]}"


def _room(labels: Iterable[str]) -> int:
    """Units that the longest of the labels takes, at most: letters are about 7 wide, and m is 12."""
    return max(90, 10 + 8 * max(map(len, labels)))


def _svg(title, description, width, height, body) -> str:
    number = next(_COUNT)
    names = f"figure-{number}-title", f"figure-{number}-text"
    size = f"max-width:{1.3 * width:.0f}px;min-width:{0 if width <= 500 else 520}px"  # a phone scrolls what is wide
    return (
        f'<svg class="plot" style="{size}" viewBox="0 0 {width:g} {height:g}" role="img"'
        f' aria-labelledby="{names[0]} {names[1]}"><title id="{names[0]}">{escape(title)}</title>'
        f'<desc id="{names[1]}">{escape(description)}</desc>{"".join(body)}</svg>'
    )


def _thinned(s: Series, most: int = 120) -> Series:
    """As many points as the eye can tell apart, evenly on the logarithmic axis, with both ends."""
    if len(s.x) <= most:
        return s
    last = math.log(len(s.x))
    kept = sorted({round(math.exp(last * k / (most - 1))) - 1 for k in range(most)})
    return Series(s.label, *(None if part is None else [part[k] for k in kept] for part in s[1:5]), s.dashed)


def _ticks(low: float, high: float) -> tuple[float, float, list[float]]:
    """Round ends and ticks for a range of shares."""
    step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2) if (high - low) / step <= 7 or step == 0.2)
    first, last = math.floor(low / step + 1e-9), max(math.ceil(high / step - 1e-9), math.floor(low / step) + 1)
    return first * step, last * step, [k * step for k in range(first, last + 1)]


def _apart(ends, gap: float = 15):
    """(y of the label, y of the line's end, end): labels in order of their lines, `gap` apart, inside the figure."""
    places = []
    for y, *_ in ends:
        places.append(max(y, places[-1] + gap) if places else y)
    over = places[-1] - (TOP + HEIGHT) if places else 0
    if over > 0:
        places[-1] -= over
        for k in range(len(places) - 2, -1, -1):
            places[k] = min(places[k], places[k + 1] - gap)
    return [(place, end[0], end) for place, end in zip(places, ends, strict=True)]


def _points(at, points) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))


def _line(x1, y1, x2, y2, kind) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x, y, text, anchor) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
