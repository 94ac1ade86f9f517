"""Figures in words, for the terminal and the page: percentages, intervals and differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ABSENT = "–"


def words(key: str) -> str:
    """Returns a key of a report as text."""
    return key.replace("_", " ")


def left_out_words(report: Mapping[str, Any]) -> str:
    """`; 2 left out (too long)`, or nothing."""
    count = report.get("too_long", 0)
    return f"; {count} left out (too long)" if count else ""


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


def last(curve: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the last point of a curve, which a report stores as lists by `value`, `low`, `high`, `better`."""
    return {key: curve[key][-1] for key in ("value", "low", "high", "better") if key in curve}


def against(figure: Mapping[str, Any], baseline: float) -> tuple[str, str]:
    """(`good`, `bad` or `open`, the baseline's place): below, above or inside the interval of a figure."""
    if figure["low"] is None or figure["low"] <= baseline <= figure["high"]:
        return "open", "inside"
    return ("good", "below") if figure["low"] > baseline else ("bad", "above")


def figures_in(report: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yields every figure of a report that has an interval, by its place in the report, as a plain number."""
    if not isinstance(report, Mapping):
        return
    value, low, high = (report.get(key) for key in ("value", "low", "high"))
    if all(isinstance(x, int | float) for x in (value, low, high)):
        yield " / ".join(path), f"{value:.4g} [{low:.4g}, {high:.4g}]"
    for key, inner in report.items():
        yield from figures_in(inner, (*path, key))
