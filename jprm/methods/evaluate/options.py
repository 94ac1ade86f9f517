"""Options of each benchmark's command, with their help texts. Must not import an array library."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from jprm.methods.evaluate.benchmark import (
    Adapter,
    Data,
    File,
    Files,
    ModelOptions,
    Neutral,
    ScoringOptions,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessBench(ModelOptions):
    """ProcessBench: find the first wrong step, or report that there is none. F1 as published.

    For example:
      jprm eval processbench --model DIR --input gsm8k.json math.json --calibrate gsm8k.json --output processbench.json
    """

    data: Data
    """ProcessBench files; each is a key of the report."""
    calibrate: File
    """The file for tuning the threshold; the report also gives F1 at the model's own threshold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedOptions(ModelOptions):
    data: Data
    """Some or all of the benchmark's files, as published."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PRMBench(PublishedOptions):
    """PRMBench: PRMScore of its nine error classes and their three groups, as published.

    For example:
      jprm eval prmbench --model DIR --input prmbench/*.jsonl --output prmbench.json
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class SocraticPRMBench(PublishedOptions):
    """Socratic-PRMBench: PRMScore of its twenty error classes and six reasoning patterns.

    For example:
      jprm eval socratic-prmbench --model DIR --input socratic_prmbench/*.jsonl --output socratic.json
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class MRBen(PublishedOptions):
    """MR-Ben: whether a solution is right (MCC), and its first wrong step. Reasons are not evaluated.

    For example:
      jprm eval mr-ben --model DIR --input mrben/*.json --output mr_ben.json
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class BigBenchMistake(PublishedOptions):
    """BIG-Bench-Mistake: the first mistake, if any. Compares with programs that solve four of its five tasks.

    For example:
      jprm eval big-bench-mistake --model DIR --input big_bench_mistake/*.jsonl --output mistakes.json
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hard2Verify(PublishedOptions):
    """Hard2Verify, encrypted or plain: balanced accuracy and F1 of steps, solutions and first errors.

    For example:
      jprm eval hard2verify --model DIR --input hard2verify/test.jsonl --output hard2verify.json
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepsOptions(ModelOptions):
    """Steps with human labels: AUROC, average precision and first-error accuracy.

    For example:
      jprm eval steps --model DIR --input phase1_test.jsonl --neutral positive --output steps.json
    """

    data: Data
    """Files of rated steps (PRM800K's format or jprm's own), or prepared folders."""
    neutral: Neutral | None = None
    """The class of a neutral rating; required if a file has ratings of 0. Results with different choices differ."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agents(ModelOptions):
    """Agent turns: step accuracy and F1 by class, first bad turn, outcome, and calibration by turn, with baselines.

    If trials have outcomes: pass^k, and the success rate of the trial chosen by score. If turns are labelled bad: the
    turn and the agent that the scores blame.

    For example:
      jprm eval agents --model DIR --input hotpotqa.jsonl --calibrate bfcl.jsonl --output agents.json
      jprm eval agents --input tau_bench_gpt4o_airline.jsonl --output pass_k.json
    """

    model: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """The folder of a trained model that scores the files. If omitted, uses the scores already in the files (e.g. from
    `jprm score`); if there are none, reports only figures that need no model.
    """
    data: Data
    """Trajectories with labels or outcomes: AgentProcessBench, tau-bench or Who&When files, or jprm's own."""
    calibrate: Files = ()
    """Trajectories for fitting the two thresholds. If omitted, both are the model's own threshold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestOfNOptions(ScoringOptions):
    """Best of n: the exact expected accuracy for every n and every aggregation rule, beside majority vote and pass@n.

    For example:
      jprm eval best-of-n --input scored.jsonl --output best_of_n.json
      jprm eval best-of-n --model DIR --input pool.jsonl --output best_of_n.json
    """

    input: Annotated[Path, arg(metavar="F.jsonl")]
    """Pools of samples with known correctness, scored by `jprm score`."""
    model: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """The folder of a trained model that scores the pools first, if they have no scores yet."""
    adapter: Adapter = None
    """Adapter of a published model that cannot be detected: a name or a JSON file. Without --model, it gives the scale
    of the stored scores; by default the scale is read from the file that `jprm score` left beside them, or from the
    records' `semantics`.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration(ModelOptions):
    r"""Calibration: how far scores are probabilities, overall and by group, and maps and thresholds that fix it.

    For example:
      jprm eval calibration --model DIR --input math.json --calibrate gsm8k.json --neutral drop --output c.json
      jprm eval calibration --model DIR --input math.json --calibrate gsm8k.json --neutral drop --output c.json \
        --store platt
      jprm eval calibration --input scored.jsonl --calibrate other.jsonl --neutral drop --output calibration.json
    """

    model: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """The folder of a trained model that scores the files. If omitted, uses the scores already in the files (e.g.
    from `jprm score`)."""
    data: Data
    """Files with step labels: PRM800K, ProcessBench, PRMBench or jprm's own, or prepared folders."""
    calibrate: Files
    """Files for fitting maps and thresholds; their problems are left out of the figures."""
    neutral: Neutral | None = None
    """The class of a neutral rating; required if a file has ratings of 0."""
    store: Annotated[
        Literal["temperature", "platt", "isotonic", "quantile"] | None,
        arg(metavar="{temperature,platt,isotonic,quantile}", help_behavior_hint=""),
    ] = None
    """Stores this map in the model's folder, for `jprm score --calibrated`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnostics(ModelOptions):
    """Diagnostics: known failures of a PRM that its accuracy does not show.

    On ProcessBench chains: lowest scores at the end, right answers by wrong steps, edits that keep the meaning, and
    fluent nonsense. On pools: scores that depend on length, and accuracy lost by choosing among more samples.

    For example:
      jprm eval diagnostics --model DIR --chains gsm8k.json math.json --pools pool.jsonl --output diagnostics.json
    """

    chains: Files = ()
    """ProcessBench files."""
    pools: Files = ()
    """Pools of samples with known correctness."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassesOptions(ModelOptions):
    """Steps with class labels: AUROC, average precision, F1, calibration and best threshold of every class.

    A record must have `classes` beside its steps: for each step the name of a class, a list of names, or null, e.g.
    `[null, "arithmetic"]`. Turns of a trajectory may each have their own. The names must be outputs of the model.

    For example:
      jprm eval classes --model DIR --input types.jsonl --calibrate types_dev.jsonl --output classes.json
    """

    data: Data
    """Files of chains with classes."""
    calibrate: Files = ()
    """Files for tuning the F1 thresholds; F1 at 0.5 is always reported."""


OPTIONS: dict[str, type] = {
    "processbench": ProcessBench,
    "prmbench": PRMBench,
    "socratic_prmbench": SocraticPRMBench,
    "mr_ben": MRBen,
    "big_bench_mistake": BigBenchMistake,
    "hard2verify": Hard2Verify,
    "steps": StepsOptions,
    "classes": ClassesOptions,
    "agents": Agents,
    "best_of_n": BestOfNOptions,
    "calibration": Calibration,
    "diagnostics": Diagnostics,
}
"""The options of each registered benchmark, unless it brings its own."""
