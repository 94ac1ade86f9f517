"""Display blocks of a benchmark: tables for terminal and page; figures, headings and notes for the page.

A figure of a report is `{"value", "low", "high"}`. This file also formats figures as words, and tables for the
terminal, Markdown and LaTeX.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jprm.io.jsonl import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

Results = Mapping[str, Any]
"""A suite's `results.json`: one key per benchmark, and `model`, `seed`, `neutral`, `sections`, `data`, `absent`."""


Cell = str | int | float | Mapping[str, Any] | None
"""Text, a count, a fraction, a figure (with `better` if it is a difference), or an empty cell."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table for the terminal, the page, Markdown or LaTeX, all of which show its `lines`.

    The first column names the rows; a row of `None` draws a line. `strong` and `text` only matter on the page.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell] | None]
    caption: str = ""
    strong: Collection[int] = ()  # rows that stand out
    text: int | None = None  # the column that holds sentences

    def __post_init__(self):
        for field in ("title", "caption"):  # names of models and files may come from anyone
            object.__setattr__(self, field, printable(getattr(self, field)))
        object.__setattr__(self, "columns", tuple(map(printable, self.columns)))

    @property
    def lines(self) -> list[list[str] | None]:
        """The rows as text, without the head: int unchanged, float and figures in per cent, differences in points."""
        return [None if row is None else [_text(cell) for cell in row] for row in self.rows]


def _text(cell: Cell) -> str:
    if isinstance(cell, Mapping):
        return points(cell) if "better" in cell and cell["low"] is not None else interval(cell)
    return percent(cell) if cell is None or isinstance(cell, float) else printable(str(cell))


@dataclasses.dataclass(frozen=True)
class Figure:
    """A plot on the page, and a file of `jprm report --figures`.

    `draw` takes an empty `matplotlib.figure.Figure`. `title` and `description` are for screen readers; `note` explains
    how to read the plot.
    """

    name: str
    title: str
    description: str
    caption: str
    note: str
    draw: Callable[[Any], None]
    size: tuple[float, float] = (5.6, 3.6)  # inches


class Heading(NamedTuple):
    text: str


class Note(NamedTuple):
    """How to read the preceding tables; folded on the page."""

    text: str


Block = Table | Figure | Heading | Note


class PageModel(NamedTuple):
    """A model on the page: display name and suite results."""

    name: str
    results: Results


# ---- Figures in words: percentages, intervals and differences.

ABSENT = "–"


def words(key: str) -> str:
    """Replaces underscores in a report key by spaces."""
    return key.replace("_", " ")


def left_out_words(report: Mapping[str, Any]) -> str:
    """Returns e.g. `; 2 left out (too long)` from the report's count `too_long`, or "" if it is 0 or absent."""
    count = report.get("too_long", 0)
    return f"; {count} left out (too long)" if count else ""


def best_first(baselines: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, Mapping[str, Any]]:
    """Returns {`baseline: NAME`: baseline}, by each one's `key` (figure or number), highest first, absent last."""

    def value(name: str) -> float:
        figure = baselines[name].get(key)
        value = figure.get("value") if isinstance(figure, Mapping) else figure
        return value if isinstance(value, int | float) else -math.inf

    return {f"baseline: {words(name)}": baselines[name] for name in sorted(baselines, key=value, reverse=True)}


def shown_n(n_max: int) -> list[int]:
    """Returns the n at which curves are compared: powers of two up to `n_max`, and `n_max`."""
    return sorted({2**k for k in range(n_max.bit_length())} | {n_max})


def percent(value: float | None) -> str:
    """Formats a fraction in per cent with one decimal, e.g. `52.1`; `–` if it is absent."""
    return ABSENT if value is None else f"{100 * value:.1f}"


def interval(figure: Mapping[str, Any] | None) -> str:
    """Formats e.g. `52.1 [48.0, 56.2]`, in per cent; without brackets if there is no interval, `–` for `None`."""
    value, low, high = ((figure or {}).get(key) for key in ("value", "low", "high"))
    return percent(value) + ("" if low is None or high is None else f" [{percent(low)}, {percent(high)}]")


def points(difference: Mapping[str, Any]) -> str:
    """Formats a difference of fractions, e.g. `+3.1 points [-0.2, +6.4]`; `value`, `low` and `high` must be numbers."""
    value, low, high = (f"{100 * difference[key]:+.1f}" for key in ("value", "low", "high"))
    return f"{value} points [{low}, {high}]"


def decided(difference: Mapping[str, Any]) -> str:
    """Returns `better`, `worse` or `undecided` (also without an interval), from a paired difference."""
    if difference["low"] is None or difference["low"] <= 0 <= difference["high"]:
        return "undecided"
    return "better" if difference["low"] > 0 else "worse"


SAID = {"better": ("good", "better than"), "worse": ("bad", "worse than"), "undecided": ("open", "not told apart from")}
"""For each result of `decided`: the kind of verdict, and words."""


def last(curve: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the last point of a curve of lists: `value`, and `low`, `high` and `better` if it has them."""
    return {key: curve[key][-1] for key in ("value", "low", "high", "better") if key in curve}


def figures_in(report: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yields e.g. ("raw / ece", "0.052 [0.041, 0.066]") for every figure with an interval in nested mappings.

    `path` holds the keys above `report`. Lists are skipped.
    """
    if not isinstance(report, Mapping):
        return
    value, low, high = (report.get(key) for key in ("value", "low", "high"))
    # Integers above a float's range cannot be formatted.
    if all(isinstance(x, int | float) and not abs(x) > 1e300 for x in (value, low, high)):
        yield " / ".join(path), f"{value:.4g} [{low:.4g}, {high:.4g}]"
    for key, inner in report.items():
        yield from figures_in(inner, (*path, key))


def plain(reports: Mapping[str, Any]) -> Iterator[Table]:
    """Yields one table of every figure with an interval (`figures_in`), if any; `reports` are by column head."""
    columns = {name: dict(figures_in(report)) for name, report in reports.items()}
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = [[words(name), *(column.get(name) for column in columns.values())] for name in names]
    if rows:
        yield Table("Figures with their 95 % intervals", ("", *columns), rows)


# ---- Tables on the terminal, in Markdown and in LaTeX.

FILE, WIDEST = 120, 10**6
"""Text columns: of a table in a file, and more than any table needs."""


def show(blocks: Iterable[Table | str], console: Console | None = None) -> None:
    """Prints tables and lines, by default to stdout.

    Names and figures are never cut: a table wider than the console is folded, and may still run over the edge.
    """
    from rich.console import Console
    from rich.measure import Measurement

    if console is None:
        console = Console()
        console = console if console.is_terminal else Console(width=max(console.width, FILE))
    for block in blocks:
        if isinstance(block, str):
            console.print(printable(block), markup=False)
            continue
        columns = [(block.columns[0], {}), *((column, _RIGHT) for column in block.columns[1:])]
        table, width = _rich(block, columns, block.lines), console.width
        if Measurement.get(console, console.options.update(width=WIDEST), table).maximum > width:
            table = _folded(block)
            console.width = max(width, Measurement.get(console, console.options.update(width=WIDEST), table).minimum)
        console.print(table)
        console.width = width


_RIGHT = {"justify": "right", "no_wrap": True}


def _folded(table: Table) -> RichTable:
    """Folds a table: intervals below values, one word per line in headings."""
    widest = max((len(word) for row in table.lines if row for word in row[0].split()), default=1)
    columns: list[tuple[str, dict[str, Any]]] = [(table.columns[0], {"min_width": widest, "overflow": "fold"})]
    rows = [row and [row[0], *(re.sub(r" (?=[\[(])", "\n", cell) for cell in row[1:])] for row in table.lines]
    for i, column in enumerate(table.columns[1:], start=1):
        head = re.sub(r" (?![^\[]*\])", "\n", column)
        widest = max(len(line) for text in (head, *(row[i] for row in rows if row)) for line in text.split("\n"))
        columns.append((head, _RIGHT | {"min_width": widest}))
    return _rich(table, columns, rows)


def _rich(
    table: Table, columns: Iterable[tuple[str, dict[str, Any]]], rows: Iterable[Sequence[str] | None]
) -> RichTable:
    from rich.markup import escape
    from rich.table import Table as RichTable

    title, caption = escape(table.title), escape(table.caption) or None  # brackets in a name are no markup
    shown = RichTable(title=title, title_justify="left", show_edge=False, caption=caption)
    for head, how in columns:
        shown.add_column(escape(head), **how)
    for row in rows:
        if row is None:
            shown.add_section()
        else:
            shown.add_row(*map(escape, row))
    return shown


def as_markdown(blocks: Sequence[Table]) -> str:
    parts = []
    for block in blocks:
        lines = [block.columns, ["---"] + ["--:"] * (len(block.columns) - 1), *filter(None, block.lines)]
        text = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
        parts.append("\n\n".join(filter(None, (f"**{block.title}**", text, block.caption))))
    return "\n\n".join(parts) + "\n"


_LATEX = {char: f"\\{char}" for char in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "<": "$<$", ">": "$>$",
}  # fmt: skip


def as_latex(blocks: Sequence[Table]) -> str:
    """Returns the tables as LaTeX; requires the package booktabs."""
    parts = []
    for block in blocks:
        lines = [" & ".join(map(_escaped, row)) + r" \\" for row in (block.columns, *filter(None, block.lines))]
        body = [r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
        inside = [rf"\begin{{tabular}}{{l{'r' * (len(block.columns) - 1)}}}", *body, r"\end{tabular}"]
        caption = rf"\caption{{{_escaped(' '.join(filter(None, (block.title + '.', block.caption))))}}}"
        parts.append("\n".join([r"\begin{table}", r"\centering", *inside, caption, r"\end{table}"]))
    return "\n\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    text = "".join(_LATEX.get(char, char) for char in text)
    return f"${text}$" if text[:1] in "+-" and text[1:2].isdigit() else text
