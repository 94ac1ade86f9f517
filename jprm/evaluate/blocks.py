"""Blocks that a benchmark shows: tables on the terminal and the page; figures, headings and notes on the page."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

Results = Mapping[str, Any]
"""A suite's `results.json`: a key a benchmark, and `model`, `seed`, `neutral`, `sections`, `data`, `absent`."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of the terminal or the page. The first column names the rows; a row that is None draws a line."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str] | None]
    caption: str = ""
    strong: Collection[int] = ()  # rows that stand out
    text: int | None = None  # the column that holds sentences


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


class Model(NamedTuple):
    """A model on the page: its name there, and the results of its suite."""

    name: str
    results: Results
