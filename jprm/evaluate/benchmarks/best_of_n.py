"""Best of n over pools of samples. The figures are computed in `jprm.evaluate.best_of_n`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from jprm.evaluate.benchmark import Adapter, Benchmark, CommandOptions, Report, Request, TooLong, scale_of
from jprm.evaluate.blocks import Block, Figure, Heading, Model, Table
from jprm.evaluate.plots import Series, curves, slug
from jprm.evaluate.wording import decided, interval, last, left_out_words, percent, points, words

SHOWN_RULES = ("prod", "min", "last", "mean")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Best of n: the exact expected accuracy for every n and every aggregation rule, beside majority vote and pass@n.

    For example:
      jprm eval best-of-n --input scored.jsonl --json best_of_n.json
      jprm eval best-of-n --model DIR --input pool.jsonl --json best_of_n.json
    """

    input: Annotated[Path, arg(metavar="F.jsonl")]
    """Pools of samples with known correctness, scored by `jprm score`."""
    model: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """The folder of a trained model that scores the pools first, where they are not scored yet."""
    adapter: Adapter = None
    """How to read a published model whose files do not show it: a name, or a JSON file. Without a model it says what
    stored scores mean; by default `jprm score` left that beside them."""
    too_long: TooLong = "error"
    """Stop at a pool with a chain beyond the model's context, or leave such pools out and count them."""


def run(options: Options) -> Report:
    from jprm.adapters.recognise import named
    from jprm.evaluate.run import scored_files, source
    from jprm.loading import load
    from jprm.score.files import stored_scale
    from jprm.tree import read_trees

    if options.model is None:
        scale = named(options.adapter).score_scale if options.adapter else stored_scale(options.input)
        return figures(Request({"pools": list(read_trees(options.input))}, scale=scale))["pools"]
    prm = load(options.model, adapter=options.adapter)
    files = {"pools": (options.input, source("pools"))}
    scored, too_long = scored_files(prm, files, f"{options.to}.scores", options.too_long)
    return figures(Request(scored, scale=prm.scale, too_long=too_long))["pools"]


def figures(request: Request) -> Report:
    """Returns a report for every file."""
    from jprm.evaluate.best_of_n import best_of_n_report

    return {
        name: best_of_n_report(records, request.seed, scale=request.scale) | {"too_long": request.too_long.get(name, 0)}
        for name, records in request.data.items()
    }


def tables(report: Report) -> Iterator[Table]:
    n_max = report["n_max"]
    shown = sorted({2**k for k in range(n_max.bit_length() - 1)} | {n_max})
    named = {
        "oracle (pass@n)": report["pass_at_n"],
        "majority vote": report["majority"],
        **{f"best by {words(rule)}": curves["best_of_n"] for rule, curves in report["rules"].items()},
        **{f"vote by {words(rule)}": curves["weighted_vote"] for rule, curves in report["rules"].items()},
        **{words(name): curve for name, curve in report["baselines"].items()},
    }
    rows = [
        [label, *(percent(curve["value"][n - 1]) for n in shown[:-1]), interval(last(curve))]
        for label, curve in named.items()
        if curve is not None
    ]
    title = f"Best of n: {report['n_problems']} problems, mean accuracy {percent(report['mean_accuracy'])} %"
    title += left_out_words(report)
    yield Table(title, ("", *(f"n = {n}" for n in shown[:-1]), f"n = {n_max} [95 %]"), rows)


def section(models: Sequence[Model]) -> Iterator[Block]:
    for name, first in models[0].results["best_of_n"].items():
        yield Heading(f"{name}: {first['n_problems']} problems")
        if len(models) > 1:
            yield _figure_of_models(name, models)
        for model in models:
            yield _figure(name, model)
            yield _table(model.name, model.results["best_of_n"][name])


def _table(model: str, report: Report) -> Table:
    pairs = {(row["a"], row["b"]): row for row in report["paired"]}
    rows = []
    for rule, found in report["rules"].items():
        row = pairs.get((rule, "majority"))
        against = [points(last(row)), percent(row["better"][-1])] if row else ["", ""]
        vote = found["weighted_vote"]
        rows.append([words(rule), interval(last(found["best_of_n"])), *against, interval(vote and last(vote))])
    rows += [[label, interval(last(curve)), "", "", ""] for label, curve in _rivals(report).items()]
    columns = (f"{model}, n = {report['n_max']}", "best of n, %", "less majority vote", "ahead in % of draws",
               "weighted vote, %")  # fmt: skip
    return Table("How often the chosen chain is right", columns, rows)


def _figure(name: str, model: Model) -> Figure:
    report, first = model.results["best_of_n"][name], model.results["model"]["rule"]
    rules = list(dict.fromkeys([first, *SHOWN_RULES]))[:3]
    series = [_series(f"by {words(rule)}", report["rules"][rule]["best_of_n"], band=rule == first) for rule in rules]
    series += [_series(label, curve, dashed=True) for label, curve in _rivals(report).items()]
    return Figure(
        name=f"best_of_n-{slug(name)}-{slug(model.name)}",
        title=f"Best of n, {name}, {model.name}",
        description=f"Accuracy of best-of-n on {name} for n = 1 to {report['n_max']}, by rule, with rivals; values in"
        " the table.",
        caption=model.name,
        note="Across: the number of samples chosen among. Up: the fraction of problems whose chosen sample is right;"
        " exact, not simulated. The band is the 95 % interval over problems. The oracle is the most that any chooser"
        " can reach.",
        draw=functools.partial(curves, series=series, x_label="n", y_label="right, %"),
    )


def _figure_of_models(name: str, models: Sequence[Model]) -> Figure:
    series = []
    for model in models:
        rule = model.results["model"]["rule"]
        curve = model.results["best_of_n"][name]["rules"][rule]["best_of_n"]
        series.append(_series(f"{model.name}, {words(rule)}", curve, band=True))
    rivals = _rivals(models[0].results["best_of_n"][name])
    series += [_series(label, curve, dashed=True) for label, curve in rivals.items() if label != "oracle"]
    return Figure(
        name=f"best_of_n-{slug(name)}-models",
        title=f"Best of n, {name}",
        description=f"Accuracy of best-of-n on {name} by model; values in the tables.",
        caption="All models",
        note="The models on the same problems, each by the rule that fits its labels. Bands that overlap do not mean a"
        " tie: see the paired comparison.",
        draw=functools.partial(curves, series=series, x_label="n", y_label="right, %"),
    )


def _series(label: str, curve: Mapping[str, Any], *, band: bool = False, dashed: bool = False) -> Series:
    return Series(label, curve["value"], *((curve["low"], curve["high"]) if band else (None, None)), dashed)


def _rivals(report: Report) -> dict[str, Mapping[str, Any]]:
    found = {"oracle": report["pass_at_n"], "majority": report["majority"], "random": report["baselines"]["random"]}
    found["shortest"] = report["baselines"]["shortest"]
    return {label: curve for label, curve in found.items() if curve is not None}


def verdict(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    rule = results["model"]["rule"]
    for name, report in results["best_of_n"].items():
        best = last(report["rules"][rule]["best_of_n"])
        found = f"{name}: choosing among {report['n_max']} by {words(rule)} is right in {interval(best)} % of problems"
        row = next((row for row in report["paired"] if (row["a"], row["b"]) == (rule, "majority")), None)
        if row is None:
            base = report["baselines"]["random"]["value"][-1]
            clear = best["low"] is not None and best["low"] > base
            yield "good" if clear else "open", f"{found}; choosing blindly in {percent(base)} %."
            continue
        kind, said = {
            "better": ("good", "better than"),
            "worse": ("bad", "worse than"),
            "undecided": ("open", "not told apart from"),
        }[decided(last(row))]
        yield (
            kind,
            f"{found}. That is {said} majority vote ({percent(report['majority']['value'][-1])} %):"
            f" {points(last(row))}, ahead in {percent(row['better'][-1])} % of draws. The oracle has"
            f" {percent(report['pass_at_n']['value'][-1])} %.",
        )


def headline(results: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, report in results["best_of_n"].items():
        yield (
            f"{name}: best of {report['n_max']} by the model's rule, %",
            last(report["rules"][results["model"]["rule"]]["best_of_n"]),
        )


def problem_draws(results: Mapping[str, Any], scores: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    from jprm.evaluate.best_of_n import chosen_curves, pools_of
    from jprm.statistics import draws, weighted_mean

    for name in results["best_of_n"]:
        pools = pools_of(scores[name], scale_of(results))
        for rule, curve_Pn in chosen_curves(pools).items():
            drawn = draws(lambda w, x_P=curve_Pn[:, -1]: weighted_mean(x_P, w), pools.problem, seed=results["seed"])
            yield f"{name}, best of {curve_Pn.shape[1]} by {words(rule)}", drawn


def left_out(entry: Report) -> Iterator[tuple[str, int]]:
    for name, report in entry.items():
        yield f"{name}: samples without an answer (cannot be chosen)", report["without_answer"]
        yield f"{name}: samples without a step (cannot be chosen)", report.get("without_steps", 0)
        yield f"{name}: problems without a right sample", report["none_right"]
        yield f"{name}: problems with right samples only", report["all_right"]
        yield f"{name}: repeated problems (drawn together)", report["repeated_problems"]
        yield f"{name}: samples beyond the largest n", report["largest_pool"] - report["n_max"]


BENCHMARK = Benchmark(
    name="best_of_n",
    title="Best of n",
    options=Options,
    tables=tables,
    run=run,
    figures=figures,
    reader="pools",
    reports=lambda entry: entry.values(),
    section=section,
    verdict=verdict,
    headline=headline,
    problem_draws=problem_draws,
    left_out=left_out,
)
