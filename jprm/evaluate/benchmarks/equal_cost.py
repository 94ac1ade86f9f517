"""Reward models against majority vote at equal cost. The figures are computed in `jprm.evaluate.equal_cost`."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Annotated

from tyro.conf import arg

from jprm.evaluate.benchmark import Benchmark, CommandOptions, Report, TooLong
from jprm.evaluate.blocks import Table
from jprm.evaluate.wording import interval, last, left_out_words, percent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Equal cost: reward models against majority vote, where samples and their scores are both paid for.

    Best of n by a model, and a vote weighted by it, take as many samples as a majority's budget buys with scoring. A
    token costs 2 FLOPs a parameter, or the seconds that are measured.

    For example:
      jprm eval equal-cost --model runs/prm runs/orm --input pool.jsonl --policy-parameters 8e9 --json equal.json
    """

    model: Annotated[tuple[str, ...], arg(metavar="DIR ...")]
    """The folders of trained models."""
    input: Annotated[pathlib.Path, arg(metavar="POOL.jsonl")]
    """Pools of samples with answers and known correctness."""
    too_long: TooLong = "error"
    """Stop at a pool with a chain beyond a model's context, or leave such pools out for all models and count them."""
    policy_parameters: float
    """Parameters of the model that wrote the samples, without its embedding table."""
    policy_tokens_per_second: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """How fast the policy samples on this machine. The report then also compares at equal seconds, and times the
    scoring here."""


def run(options: Options) -> Report:
    from jprm.evaluate.equal_cost import equal_cost_report
    from jprm.evaluate.run import scored_trees, source
    from jprm.io.storage import path_of
    from jprm.loading import load

    loaded = {path_of(prm.name).name: prm for prm in map(load, options.model)}
    if len(loaded) < len(options.model):
        raise ValueError(f"{', '.join(map(str, options.model))}: two models of one name: rename one")
    scores = {
        name: scored_trees(prm, options.input, source("pools"), f"{options.to}.scores/{name}", options.too_long,
                           [other for other in loaded.values() if other is not prm])
        for name, prm in loaded.items()
    }  # fmt: skip
    report = equal_cost_report(scores, loaded, options.policy_parameters, options.policy_tokens_per_second, 0)
    return report | {"too_long": len(source("pools").records(options.input)) - report["n_problems"]}


def tables(report: Report) -> Iterator[Table]:
    for unit in ("flops", "seconds"):
        if unit not in report:
            continue
        found = report[unit]
        counts = found["choosers"][0]["n"]
        rows = []
        for row in found["choosers"]:
            cells = [f"{percent(value)} ({n})" for value, n in zip(row["value"], row["n"], strict=True)]
            rows.append([row["name"], *cells, interval(last(row["less"])) if "less" in row else ""])
        title = f"Accuracy at equal {unit.upper() if unit == 'flops' else unit}: what a majority of n samples costs"
        title += left_out_words(report)
        columns = ("", *(f"n = {n}" for n in counts), f"less majority of {report['n_max']} [95 %]")
        yield Table(title, columns, rows, caption="in brackets, the samples that the budget buys")


BENCHMARK = Benchmark(name="equal_cost", title="Equal cost", options=Options, tables=tables, run=run)
