"""`Benchmark`: the complete description of one evaluation.

To add a benchmark, write one file that builds a `Benchmark`, and add a line to `BENCHMARKS` in `benchmarks.py`. The
command line, suites, terminal tables, the page of `jprm report`, model comparisons and model cards iterate that
registry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from jprm.methods.evaluate.blocks import Block, PageModel, Results, Table, plain
from jprm.methods.evaluate.findings import Finding
from jprm.score.scale import PROBABILITY, Scale
from jprm.tree import ReasoningTree

File = Annotated[Path, arg(metavar="FILE")]
Files = Annotated[tuple[Path, ...], arg(metavar="FILE ...")]
Data = Annotated[tuple[Path, ...], arg(name="input", metavar="FILE ...")]
"""The files to evaluate: `--input` of a command."""
Adapter = Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")]
Neutral = Literal["positive", "negative", "drop"]
TooLong = Literal["error", "skip"]
Report = dict[str, Any]
Scores = Mapping[str, Sequence[ReasoningTree]]
"""Scored trees by file name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Options of every evaluation."""

    to: Annotated[Path | None, arg(name="output", metavar="OUT.json", help_behavior_hint="")] = None
    """Report file; scores are kept beside it. If omitted, the tables are printed and no file is kept."""
    limit: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Only the first N records of each file, to try a command. With --output, OUT.firstN/ gets a copy of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoringOptions(CommandOptions):
    """Options of an evaluation that may score files first."""

    on_error: Literal["stop", "skip"] = "stop"
    """If a chain is longer than the model reads: stop, or skip the record and count it."""
    by: Annotated[str | None, arg(metavar="OUTPUT", help_behavior_hint="")] = None
    """Use another named output of the model as the score, e.g. `low` or a class, as in `jprm score`."""

    @property
    def too_long(self) -> TooLong:
        """`on_error` in the terms of suites: "error" or "skip"."""
        return "skip" if self.on_error == "skip" else "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(ScoringOptions):
    """Options of an evaluation that scores files with one model."""

    model: Annotated[str, arg(metavar="DIR")]
    """The folder of a trained model, also in a bucket."""
    adapter: Adapter = None
    """Adapter of a published model that cannot be detected: a name, a JSON file, module:NAME or FILE.py:NAME."""


@dataclasses.dataclass(frozen=True)
class Request:
    """The input of `Benchmark.figures`: scored trees by file, and settings.

    `too_long` counts, per file, the records left out because a chain is longer than the model reads.
    """

    data: Scores
    calibrate: Scores = dataclasses.field(default_factory=dict)
    neutral: str | None = "drop"  # the class of neutral ratings
    seed: int = 0
    scale: Scale = PROBABILITY
    too_long: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def trees(self) -> list[ReasoningTree]:
        """All records of `data`."""
        return [tree for trees in self.data.values() for tree in trees]

    @property
    def left_out(self) -> int:
        """The number of records in `data` left out because a chain is too long."""
        return sum(self.too_long.get(name, 0) for name in self.data)


def scale_of(results: Results) -> Scale:
    """Returns the score scale in `results["model"]`, which must exist; probabilities if it has no `scale`."""
    return Scale(**(results["model"].get("scale") or {}))


Scorer = Callable[[Sequence[Mapping[str, Any]], str], Sequence[ReasoningTree]]
"""(records, name) -> scored trees. The scores are stored in a file of that name beside the others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One evaluation. Optional parts that do not apply are left at their defaults.

    Attributes:
      name: key in suites and results; `jprm eval` writes `-` for `_`.
      title: heading on the page.
      options: frozen dataclass of the command's options; its docstring is the command's help. jprm's own are in
        `options.py`, so that `--help` imports no array library.
      tables: a report's tables, or lines, for the terminal. By default every figure with an interval.
      run: computes the command's report from the options. By default scores the files of `data` and `calibrate` with
        the model, then calls `figures`.
      figures: computes the entry in `results.json`. Benchmarks with `figures` can be a section of a suite.
      derive: computes the entry in `results.json` from the requests and results of other sections, for a benchmark
        without its own files. There is no scorer if no model is loaded.
      needs: the inputs that a suite must give: `data`, `calibrate`, `neutral`.
      context: whether figures read the messages between the turns of trajectories; otherwise they see only steps.
      one_calibration_file: whether `calibrate` must be exactly one file.
      reader: reader of its files: a name in `jprm.methods.data.readers`, or a `Reader`, with the options `reading`.
        By default the format of each file is detected.
      standard: file names, as its authors publish them, in the folder of the suite `standard`; () if not in that suite.
      foreseen: (records by file, names of `calibrate` files) -> sentences on figures that these records do not allow. A
        suite prints them before scoring.
      reports: splits an entry of `results.json` into the command's reports.
      section: the page's section for one or several models of one suite. By default every figure with an interval.
      findings: findings of one model's results, the most important first: the tiles, lead and verdict of the page.
      glance: sentences and one table of all models for the top of the page.
      problem_draws: (results, scores) -> (figure name, `jprm.statistics.Draws` over problems), each a fraction in [0,
        1], with the seed `results["seed"]`, so that models of one suite share resamples. Used to compare models.
      left_out: (description, count) of records that its figures leave out.
    """

    name: str
    title: str
    tables: Callable[[Report], Iterable[Table | str]] = lambda report: plain({"[95 %]": report})
    options: type = CommandOptions
    run: Callable[[Any], Report] | None = None
    figures: Callable[[Request], Report] | None = None
    derive: Callable[[Mapping[str, Request], Results, Scorer | None], Report] | None = None
    needs: Collection[str] = ("data",)
    context: bool = False
    one_calibration_file: bool = False
    reader: Any = None
    reading: Mapping[str, str] = dataclasses.field(default_factory=dict)
    standard: Sequence[str] = ()
    foreseen: Callable[[Mapping[str, Sequence[Mapping[str, Any]]], Collection[str]], Iterator[str]] = (
        lambda records, calibrate: iter(())
    )
    reports: Callable[[Report], Iterable[Report]] = lambda entry: [entry]
    section: Callable[[Sequence[PageModel]], Iterator[Block]] | None = None
    findings: Callable[[Results], Iterable[Finding]] = lambda results: ()
    glance: Callable[[Sequence[PageModel]], Iterator[str | Table]] = lambda models: iter(())
    problem_draws: Callable[[Results, Scores], Iterator[tuple[str, Any]]] = lambda results, scores: iter(())
    left_out: Callable[[Report], Iterator[tuple[str, int]]] = lambda entry: iter(())
