"""What benchmarks find, and the one place that words it: a page's tiles, lead and verdict, and a suite's last lines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jprm.methods.evaluate.blocks import SAID, PageModel, decided, interval, percent, points


class Finding(NamedTuple):
    """A figure of one model's results, beside the best trivial baseline.

    Attributes:
      what: what is measured, such as `gsm8k, best of 8`; the same for all models.
      figure: `value`, `low` and `high`, each a fraction; None where the finding is its note.
      baseline: the name of the best trivial baseline.
      difference: the figure less that of the baseline; None where there is no baseline.
      note: sentences that follow.
      kind: `good`, `bad`, `open` or `fact`, where the difference does not decide it.
    """

    what: str
    figure: Mapping[str, Any] | None
    baseline: str = ""
    difference: Mapping[str, Any] | None = None
    note: str = ""
    kind: str = ""


Benchmarks = Mapping[str, Any]
"""`Benchmark` records by name."""

Tiles = list[tuple[str, list[tuple[str, str, str, str]]]]
"""Figures of the first screen: what each is, and its (model, value, interval, remark)."""


def findings_of(results: Mapping[str, Any], benchmarks: Benchmarks) -> list[list[Finding]]:
    """Returns the findings of every benchmark that the results hold."""
    return [list(benchmark.findings(results)) for name, benchmark in benchmarks.items() if name in results]


def compared(difference: Mapping[str, Any], baseline: str) -> str:
    """Returns `better than a coin: +3.1 points [0.2, 6.4]`; the interval says whether the two are told apart."""
    return f"{SAID[decided(difference)][1]} {baseline}: {points(difference)}"


def verdict(findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """Yields the kind of each finding, and a sentence with its figure, its baseline and its note."""
    for what, figure, baseline, less, note, kind in findings:
        sentence = f"{what}: {note}" if figure is None else f"{what}: {interval(figure)} %."
        if figure is not None and less is not None and less["low"] is not None:
            rival = f"the best trivial baseline, {baseline} ({percent(figure['value'] - less['value'])} %)"
            sentence += f" That is {compared(less, rival)}."
        sentence += f" {note}" if note and figure is not None else ""
        yield kind or ("fact" if less is None else SAID[decided(less)][0]), sentence


def lead(findings: Sequence[Finding]) -> list[str]:
    """Returns where the model is better than the best trivial baselines, worse, and not told apart from them.

    Without a baseline it is the first fault, or else the first finding.
    """
    by_verdict: dict[str, list[str]] = {"better": [], "worse": [], "undecided": []}
    for what, _, baseline, less, *_ in findings:
        if less is not None and less["low"] is not None:
            by_verdict[decided(less)].append(f"{what}, {points(less)} ({baseline})")
    sentences = [
        f"{SAID[kind][1].capitalize()} the best trivial baseline: {'; '.join(parts)}."
        for kind, parts in by_verdict.items()
        if parts
    ]
    return sentences or [first_fault(list(verdict(findings)))] if findings else []


def first_fault(sentences: Sequence[tuple[str, str]]) -> str:
    """Returns the first bad sentence of a verdict, else the first of all."""
    return next((sentence for kind, sentence in sentences if kind == "bad"), sentences[0][1])


def tiles(models: Sequence[PageModel], benchmarks: Benchmarks) -> Tiles:
    """Returns the first screen's four figures: the first of each benchmark, then the second of each, and so on."""
    figures: dict[str, list[tuple[str, str, str, str]]] = {}
    for model in models:
        for finding in filter(None, itertools.chain(*itertools.zip_longest(*findings_of(model.results, benchmarks)))):
            if finding.figure is None:
                continue
            value, _, inside = interval(finding.figure).partition(" ")
            less = finding.difference
            beside = "" if less is None or less["low"] is None else f"{SAID[decided(less)][1]} {finding.baseline}"
            figures.setdefault(f"{finding.what}, %", []).append((model.name, value, inside, beside))
    return list(figures.items())[:4]
