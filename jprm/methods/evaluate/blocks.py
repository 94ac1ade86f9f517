"""What a benchmark shows: tables on the terminal and the page; figures, headings and notes on the page.

The figures of a report are `{"value", "low", "high"}`. This file also puts them into words, and tables onto the
terminal, into Markdown and into LaTeX.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

Results = Mapping[str, Any]
"""A suite's `results.json`: a key a benchmark, and `model`, `seed`, `neutral`, `sections`, `data`, `absent`."""


Cell = str | int | float | Mapping[str, Any] | None
"""Text, a count, a fraction, a figure (`value`, `low`, `high`, and `better` where it is a difference), or nothing."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of the terminal, the page, Markdown or LaTeX, which all show its `lines`.

    The first column names the rows; a row that is None draws a line.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell] | None]
    caption: str = ""
    strong: Collection[int] = ()  # rows that stand out
    text: int | None = None  # the column that holds sentences

    @property
    def lines(self) -> list[list[str] | None]:
        """The rows as text: counts as they are, fractions and figures in per cent, differences in points."""
        return [None if row is None else [_text(cell) for cell in row] for row in self.rows]


def _text(cell: Cell) -> str:
    if isinstance(cell, Mapping):
        return points(cell) if "better" in cell and cell["low"] is not None else interval(cell)
    return percent(cell) if cell is None or isinstance(cell, float) else str(cell)


@dataclasses.dataclass(frozen=True)
class Figure:
    """A plot of the page, and a file of `jprm report --figures`.

    `draw` takes an empty `matplotlib.figure.Figure`. `title` and `description` are read to those who do not see the
    plot. `note` tells how to read it.
    """

    name: str
    title: str
    description: str
    caption: str
    note: str
    draw: Callable[[Any], None]
    size: tuple[float, float] = (5.6, 3.6)  # inches


class Heading(NamedTuple):
    """A heading within a section of the page."""

    text: str


class Note(NamedTuple):
    """How to read the tables before it; folded on the page."""

    text: str


Block = Table | Figure | Heading | Note


class PageModel(NamedTuple):
    """A model on the page: its name there, and the results of its suite."""

    name: str
    results: Results


# ---- Figures in words: percentages, intervals and differences.

ABSENT = "–"


def words(key: str) -> str:
    """Returns a key of a report as text."""
    return key.replace("_", " ")


def left_out_words(report: Mapping[str, Any]) -> str:
    """`; 2 left out (too long)`, or nothing."""
    count = report.get("too_long", 0)
    return f"; {count} left out (too long)" if count else ""


def best_first(baselines: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, Mapping[str, Any]]:
    """Returns a table's columns of baselines, the best by this figure first: the one that a model is measured by."""

    def value(name: str) -> float:
        value = (baselines[name].get(key) or {}).get("value")
        return value if isinstance(value, int | float) else -math.inf

    return {f"baseline: {words(name)}": baselines[name] for name in sorted(baselines, key=value, reverse=True)}


def shown_n(n_max: int) -> list[int]:
    """Returns the n at which curves are compared: the powers of two up to `n_max`, and `n_max`."""
    return sorted({2**k for k in range(n_max.bit_length())} | {n_max})


def percent(value: float | None) -> str:
    """Returns a fraction in per cent, with one decimal."""
    return ABSENT if value is None else f"{100 * value:.1f}"


def interval(figure: Mapping[str, Any] | None) -> str:
    """Returns `52.1 [48.0, 56.2]`, in per cent; without brackets where there is no interval."""
    value, low, high = ((figure or {}).get(key) for key in ("value", "low", "high"))
    return percent(value) + ("" if low is None or high is None else f" [{percent(low)}, {percent(high)}]")


def points(difference: Mapping[str, Any]) -> str:
    """Returns `+3.1 points [-0.2, +6.4]`, a difference of two percentages."""
    value, low, high = (f"{100 * difference[key]:+.1f}" for key in ("value", "low", "high"))
    return f"{value} points [{low}, {high}]"


def decided(difference: Mapping[str, Any]) -> str:
    """Returns `better`, `worse` or `undecided`, by the interval of a paired difference."""
    if difference["low"] is None or difference["low"] <= 0 <= difference["high"]:
        return "undecided"
    return "better" if difference["low"] > 0 else "worse"


SAID = {"better": ("good", "better than"), "worse": ("bad", "worse than"), "undecided": ("open", "not told apart from")}
"""What is `decided`, as a verdict's kind and in words."""


def last(curve: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the last point of a curve, which a report stores as lists by `value`, `low`, `high`, `better`."""
    return {key: curve[key][-1] for key in ("value", "low", "high", "better") if key in curve}


def figures_in(report: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yields every figure of a report that has an interval, by its place in the report, as a plain number."""
    if not isinstance(report, Mapping):
        return
    value, low, high = (report.get(key) for key in ("value", "low", "high"))
    if all(isinstance(x, int | float) for x in (value, low, high)):
        yield " / ".join(path), f"{value:.4g} [{low:.4g}, {high:.4g}]"
    for key, inner in report.items():
        yield from figures_in(inner, (*path, key))


def plain(reports: Mapping[str, Any]) -> Iterator[Table]:
    """Yields a table of every figure that has an interval, a column a report: what is shown where nothing else is."""
    columns = {name: dict(figures_in(report)) for name, report in reports.items()}
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = [[words(name), *(column.get(name) for column in columns.values())] for name in names]
    if rows:
        yield Table("Figures with their 95 % intervals", ("", *columns), rows)


# ---- Tables on the terminal, in Markdown and in LaTeX.

FILE, WIDEST = 120, 10**6
"""Columns of text: of a table in a file, where it fits, and more than any table has."""


def show(blocks: Iterable[Table | str], console: Console | None = None) -> None:
    """Prints tables and lines. Names and figures are never cut: a table wider than the console is folded, and a line of
    it that is still wider goes on beyond the edge."""
    from rich.console import Console
    from rich.measure import Measurement

    if console is None:
        console = Console()
        console = console if console.is_terminal else Console(width=max(console.width, FILE))
    for block in blocks:
        if isinstance(block, str):
            console.print(block)
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
    """Returns the table with every interval below its value, and the words of a head below each other."""
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
    from rich.table import Table as RichTable

    shown = RichTable(title=table.title, title_justify="left", show_edge=False, caption=table.caption or None)
    for head, how in columns:
        shown.add_column(head, **how)
    for row in rows:
        if row is None:
            shown.add_section()
        else:
            shown.add_row(*row)
    return shown


def as_markdown(blocks: Sequence[Table]) -> str:
    """Returns the tables in GitHub's Markdown."""
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
    """Returns the tables as LaTeX, for the package booktabs."""
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
