"""Findings of benchmarks and their wording: the tiles, lead and verdict of a page, and the last lines of a suite."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jprm.methods.evaluate.blocks import SAID, PageModel, decided, interval, percent, points


class Finding(NamedTuple):
    """A figure of one model's results, compared with the best trivial baseline.

    Attributes:
      what: the measured quantity, e.g. `gsm8k, best of 8`; the same for all models.
      figure: `value`, `low` and `high`, each a fraction; missing if the finding is only its note.
      baseline: the name of the best trivial baseline.
      difference: the figure minus the baseline's, if there is a baseline.
      note: further sentences.
      kind: `good`, `bad`, `open` or `fact`; overrides the verdict of the difference.
    """

    what: str
    figure: Mapping[str, Any] | None
    baseline: str = ""
    difference: Mapping[str, Any] | None = None
    note: str = ""
    kind: str = ""


Benchmarks = Mapping[str, Any]
"""`Benchmark`s by name."""

Tiles = list[tuple[str, list[tuple[str, str, str, str]]]]
"""Figures at the top of the page: (quantity, [(model, value, interval, remark)])."""


def findings_of(results: Mapping[str, Any], benchmarks: Benchmarks) -> list[list[Finding]]:
    """Returns one list of findings for each benchmark that has results, in the order of `benchmarks`."""
    return [list(benchmark.findings(results)) for name, benchmark in benchmarks.items() if name in results]


def compared(difference: Mapping[str, Any], baseline: str) -> str:
    """Returns e.g. `better than a coin: +3.1 points [0.2, 6.4]`; the interval decides the wording.

    `difference` has `value`, `low` and `high` as fractions, none of them null.
    """
    return f"{SAID[decided(difference)][1]} {baseline}: {points(difference)}"


def verdict(findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """Yields each finding as (kind, sentence with figure, baseline and note); kinds: `good`, `bad`, `open` and `fact`.

    Without a set `Finding.kind` it is `fact` if there is no difference, else from its interval.
    """
    for what, figure, baseline, less, note, kind in findings:
        sentence = f"{what}: {note}" if figure is None else f"{what}: {interval(figure)} %."
        if figure is not None and less is not None and less["low"] is not None:
            rival = f"the best trivial baseline, {baseline} ({percent(figure['value'] - less['value'])} %)"
            sentence += f" That is {compared(less, rival)}."
        sentence += f" {note}" if note and figure is not None else ""
        yield kind or ("fact" if less is None else SAID[decided(less)][0]), sentence


def lead(findings: Sequence[Finding]) -> list[str]:
    """Returns sentences: where the model is better than the best trivial baselines, worse, or undecided.

    If no finding has a baseline, returns the first bad finding, or else the first finding; [] without findings.
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
    """Returns the first sentence of kind `bad`, else the first, of (kind, sentence) pairs; there must be one."""
    return next((sentence for kind, sentence in sentences if kind == "bad"), sentences[0][1])


def tiles(models: Sequence[PageModel], benchmarks: Benchmarks) -> Tiles:
    """Returns at most four figures for the page top: the first per benchmark, then the second, etc.

    Findings without a figure are skipped. A figure is (quantity, [(model, value, interval, remark)]), all text.
    """
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
