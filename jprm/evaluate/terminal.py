"""Tables of reports on the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable

from jprm.evaluate.blocks import Table

FILE, WIDEST = 120, 10**6
"""Columns of text: of a table in a file, where it fits, and more than any table has."""


def show(blocks: Iterable[Table | str], console: Console | None = None) -> None:
    """Prints tables and lines. Names and figures are never cut: a table wider than the console is folded, and a line of
    it that is still wider goes on beyond the edge."""
    if console is None:
        console = Console()
        console = console if console.is_terminal else Console(width=max(console.width, FILE))
    for block in blocks:
        if isinstance(block, str):
            console.print(block)
            continue
        table, width = _rich(block), console.width
        if Measurement.get(console, console.options.update(width=WIDEST), table).maximum > width:
            table = _folded(block)
            console.width = max(width, Measurement.get(console, console.options.update(width=WIDEST), table).minimum)
        console.print(table)
        console.width = width


def _rich(table: Table) -> RichTable:
    found = RichTable(title=table.title, title_justify="left", show_edge=False, caption=table.caption or None)
    found.add_column(table.columns[0])
    for column in table.columns[1:]:
        found.add_column(column, justify="right", no_wrap=True)
    return _with_rows(found, table.rows)


def _folded(table: Table) -> RichTable:
    """Returns the table with every interval below its value, and the words of a head below each other."""
    found = RichTable(title=table.title, title_justify="left", show_edge=False, caption=table.caption or None)
    widest = max((len(word) for row in table.rows if row for word in row[0].split()), default=1)
    found.add_column(table.columns[0], min_width=min(widest, WIDEST), overflow="fold")
    rows = [row and [row[0], *(re.sub(r" (?=[\[(])", "\n", cell) for cell in row[1:])] for row in table.rows]
    for i, column in enumerate(table.columns[1:], start=1):
        head = re.sub(r" (?![^\[]*\])", "\n", column)
        widest = max(len(line) for text in (head, *(row[i] for row in rows if row)) for line in text.split("\n"))
        found.add_column(head, justify="right", min_width=widest, no_wrap=True)
    return _with_rows(found, rows)


def _with_rows(found: RichTable, rows) -> RichTable:
    for row in rows:
        if row is None:
            found.add_section()
        else:
            found.add_row(*row)
    return found
