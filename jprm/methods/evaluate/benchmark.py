"""`Benchmark`: everything that the library knows of one evaluation.

A benchmark is one file that makes one record, and one line of `BENCHMARKS` in `benchmarks.py`. The command line,
suites, the terminal, the page of `jprm report`, comparisons of models and model cards iterate that registry.
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
"""The files that are evaluated on: `--input` of a command."""
Adapter = Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")]
Reference = Annotated[str | None, arg(metavar="DIR", help_behavior_hint="")]
Neutral = Literal["positive", "negative", "drop"]
TooLong = Literal["error", "skip"]
Report = dict[str, Any]
Scores = Mapping[str, Sequence[ReasoningTree]]
"""Scored trees by the name of their file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Options that every evaluation takes."""

    to: Annotated[Path | None, arg(name="output", metavar="OUT.json", help_behavior_hint="")] = None
    """Where to write the report; scores are kept beside it. Without it the tables are printed, and nothing is kept."""
    limit: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Only the first N records of each file, to try a command. With --output, OUT.firstN/ gets a copy of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoringOptions(CommandOptions):
    """Options of an evaluation that may score files first."""

    on_error: Literal["stop", "skip"] = "stop"
    """Stop at a record with a chain that is longer than the model reads, or leave such records out and count them."""

    @property
    def too_long(self) -> TooLong:
        """What becomes of a record that is longer than the model reads, as suites call it."""
        return "skip" if self.on_error == "skip" else "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(ScoringOptions):
    """Options of an evaluation that scores files with one model."""

    model: Annotated[str, arg(metavar="DIR")]
    """The folder of a trained model, also in a bucket."""
    adapter: Adapter = None
    """How to read a published model whose files do not show it: a name, a JSON file, module:NAME or FILE.py:NAME."""
    reference: Reference = None
    """A smaller language model: scores are log ratios to it, as in `jprm score`."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What figures are computed from: scored trees by file, and the settings that they depend on.

    `too_long` counts the records of each file that were left out because the model takes no chain so long.
    """

    data: Scores
    calibrate: Scores = dataclasses.field(default_factory=dict)
    neutral: str | None = "drop"
    seed: int = 0
    scale: Scale = PROBABILITY
    too_long: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def trees(self) -> list[ReasoningTree]:
        """The records of all files of `data`."""
        return [tree for trees in self.data.values() for tree in trees]

    @property
    def left_out(self) -> int:
        """Records of `data` that are left out because a chain is too long."""
        return sum(self.too_long.get(name, 0) for name in self.data)


def scale_of(results: Results) -> Scale:
    """Returns what the scores of the model in a suite's results mean."""
    return Scale(**(results["model"].get("scale") or {}))


Scorer = Callable[[Sequence[Mapping[str, Any]], str], Sequence[ReasoningTree]]
"""(records, name) -> their trees with a model's scores, which are stored in a file of that name beside the others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One evaluation. What is left out does not apply to it.

    Attributes:
      name: its key in suites and results; `jprm eval` writes `-` for `_`.
      title: its heading on the page.
      options: frozen dataclass of its command's options. The docstring is the command's help. The options of jprm's
        benchmarks are beside them in `options.py`, so that their help imports no array library.
      tables: the terminal's tables, or lines, of a report. By default every figure that has an interval.
      run: computes the command's report from the options. By default the files of `data` and `calibrate` are scored
        with the model, and `figures` computed.
      figures: its entry in `results.json`. Benchmarks that have it can be a section of a suite.
      derive: its entry in `results.json`, from the requests and results of the other sections: for a benchmark without
        files of its own. The scorer is None where no model is loaded.
      needs: what a suite must give for it: `data`, `calibrate`, `neutral`.
      context: whether its figures read what stands between the turns of trajectories; without it they see only steps.
      one_calibration_file: whether `calibrate` is exactly one file.
      reader: the reader of its files: a name in `jprm.methods.data.readers`, or a `Reader` of its own with the options
        `reading`. None recognises each file's format.
      standard: its files as their authors name them, in the folder of the suite `standard`; () where it is not part of
        that suite.
      foreseen: sentences on figures that records do not allow, of the records by file and the names of the files of
        `calibrate`. A suite says them before it scores anything.
      reports: the command's reports that an entry in `results.json` holds.
      section: the page's section for one or several models of one suite. By default every figure that has an interval.
      findings: the findings of one model's results, the one to report first: the page's tiles, lead and verdict.
      glance: what the page's first screen says before all else: sentences and one table of all models.
      problem_draws: (what a figure is, `jprm.statistics.Draws` of it over problems) of one model's results and scores,
        each a fraction in [0, 1], with the seed `results["seed"]`: models of one suite meet the same resamples. Models
        are compared by these.
      left_out: (what, count) of records that its figures leave out.
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
