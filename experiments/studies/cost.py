"""Reward models against majority vote and each other at equal cost: samples and scores are both paid for.

"Best of 64 beats a majority of 64" compares 64 samples and their scores with 64 samples alone. Here every chooser has
the same budget and takes as many samples as it can pay for. A token costs 2 FLOPs a parameter (Kaplan et al. 2020,
arXiv 2001.08361, section 2.1; without attention's own products), or measured seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
from jaxtyping import Float
from tyro.conf import arg

from jprm.methods.evaluate.benchmark import Benchmark, Report, ScoringOptions
from jprm.methods.evaluate.best_of_n import Pools, chosen_curves, pools_of
from jprm.methods.evaluate.blocks import Table, interval, last, left_out_words, percent, shown_n
from jprm.methods.evaluate.votes import vote_accuracy
from jprm.score.scorer import PRM
from jprm.statistics import bootstrap, jsonable, mean_differences, weighted_mean
from jprm.token_tree import TokenTree, geometry, token_tree
from jprm.tree import ReasoningTree, chains_of

TIMED = 20
"""Pools whose scoring is timed, after one run of the same pools that compiles."""


@dataclasses.dataclass(frozen=True)
class Chooser:
    """A way to choose: each problem's expected accuracy at n = 1 .. n_max, and the expected cost of n samples."""

    name: str
    accuracy_Pn: Float[np.ndarray, "P n"]
    cost_n: Float[np.ndarray, " n"]  # with scoring


def at_equal_cost(choosers: Sequence[Chooser], budgets: Sequence[float], problems: Sequence[str], seed: int) -> dict:
    """Returns each chooser's accuracy at each budget, and its difference from the first chooser, which scores nothing.

    A chooser takes the largest n whose cost is within the budget, at least one sample. `cost` is what it then spends.
    Intervals are 95 % over problems; `less` is paired, a chooser's accuracy less the first's. Raises ValueError for a
    budget below one sample.
    """
    if cheap := [b for b in budgets if b < choosers[0].cost_n[0]]:
        raise ValueError(f"a budget of {cheap[0]:g} does not pay for one sample")
    rows, taken = [], {}
    for chooser in choosers:
        affordable_Kn = chooser.cost_n <= np.array(budgets)[:, None] * (1 + 1e-9)
        n_K = np.maximum((affordable_Kn * np.arange(1, len(chooser.cost_n) + 1)).max(1), 1)
        taken[chooser.name] = chooser.accuracy_Pn[:, n_K - 1]
        accuracy = bootstrap(lambda w, x=taken[chooser.name]: weighted_mean(x, w), problems, seed=seed).json()
        cost = jsonable(chooser.cost_n[n_K - 1])
        rows.append({"name": chooser.name, "cost": cost, "n": n_K.tolist()} | accuracy)
    for chooser, row in zip(choosers[1:], rows[1:], strict=True):
        difference_PK = taken[chooser.name] - taken[choosers[0].name]
        row["less"] = mean_differences(difference_PK, problems, seed).json()
    return {"budgets": list(map(float, budgets)), "against": choosers[0].name, "choosers": rows}


def equal_cost_report(
    scored: Mapping[str, Sequence[ReasoningTree]],
    models: Mapping[str, PRM],
    policy_parameters: float,
    policy_tokens_per_second: float | None,
    seed: int,
) -> dict[str, Any]:
    """Returns majority vote, and best-of-n and weighted vote by each model, at equal FLOPs and, if requested, seconds.

    `scored` holds the same pools, scored by each of `models`. A sample costs the policy its tokens (its own key
    `tokens`, else as the model's tokenizer counts), without reading the problem. n samples cost the scorer the expected
    tokens of a tree of n random samples and their problem: what they share is scored once. Budgets are those of a
    majority of 1, 2, 4, .. samples. Seconds of scoring are measured here, for n random samples of the first `TIMED`
    pools, n = 1, 2, 4, .., and interpolated. `scorers.tokens` lists the tokens for n = 1, 2, ...
    """
    for what, count in (("parameters", policy_parameters), ("tokens_per_second", policy_tokens_per_second)):
        if count is not None and not 0 < count < math.inf:
            raise ValueError(f"policy_{what} is {count}: it must be a finite number above 0")
    pools = {name: pools_of(trees, models[name].scale) for name, trees in scored.items()}
    first = next(iter(pools.values()))
    accuracies = accuracies_of(pools, models, seed)
    n_max = int(first.size_P.min())
    tokens = {name: token_costs(trees, models[name], n_max) for name, trees in scored.items()}
    written = float(np.mean([policy for policy, _ in tokens.values()]))

    def at(policy_cost: float, scorer_cost_n: Mapping[str, Float[np.ndarray, " n"]]) -> dict[str, Any]:
        policy_n = policy_cost * np.arange(1, n_max + 1)
        choosers = [
            Chooser(name, accuracy_Pn, policy_n + (scorer_cost_n[model] if model else 0.0))
            for name, model, accuracy_Pn in accuracies
        ]
        return at_equal_cost(choosers, [n * policy_cost for n in shown_n(n_max)], first.problem, seed)

    flops = 2 * policy_parameters * written
    report = {
        "n_problems": len(first.problem),
        "n_max": n_max,
        "policy_parameters": policy_parameters,
        "policy_tokens": written,
        "scorers": {
            name: {"parameters": parameters(prm), "tokens": jsonable(tokens[name][1]), "rule": prm.rule}
            for name, prm in models.items()
        },
        "flops": at(flops, {name: 2 * parameters(prm) * tokens[name][1] for name, prm in models.items()}),
    }
    if policy_tokens_per_second:
        seconds = {name: _seconds(models[name], scored[name], n_max, seed) for name in models}
        report["seconds"] = at(written / policy_tokens_per_second, seconds)
    return report


def accuracies_of(
    pools: Mapping[str, Pools], models: Mapping[str, PRM], seed: int
) -> list[tuple[str, str | None, Float[np.ndarray, "P n"]]]:
    """(name, the model that scores, accuracy) of every chooser; the majority vote is first."""
    first = next(iter(pools.values()))
    if depends := [name for name, source in pools.items() if source.of_pool]:
        raise ValueError(f"{depends[0]}: its scores depend on the whole pool, and budgets take a part of it")
    if first.class_PN is None:
        raise ValueError("the samples have no `answer`, and a majority needs one: add it to the pools")
    log_weights = [np.zeros(first.correct_PN.shape), *(pools[name].log_weight[models[name].rule] for name in pools)]
    votes = vote_accuracy(
        first.class_PN, first.correct_PN, np.stack(log_weights, -1), first.size_P, int(first.size_P.min()),
        trials=128, seed=seed,
    ).value_PnK  # fmt: skip
    choosers: list[tuple[str, str | None, np.ndarray]] = [("majority vote", None, votes[:, :, 0])]
    for k, name in enumerate(pools, start=1):
        choosers.append((f"best of n by {name}", name, chosen_curves(pools[name])[models[name].rule]))
        choosers.append((f"weighted vote by {name}", name, votes[:, :, k]))
    return choosers


def parameters(prm: PRM) -> int:
    """Returns the number of parameters that a token is multiplied with, those of an implicit PRM's reference included.

    The embedding table counts only where it is the language head too.
    """
    models = [prm.params] if prm.ratio is None else [prm.params, prm.ratio.params]
    used = [
        [{k: v for k, v in params["decoder"].items() if k != "embed" or not params.get("head")}, params.get("head", {})]
        for params in models
    ]
    return sum(x.size for x in jax.tree.leaves(used))


@functools.lru_cache(maxsize=4)
def drawn_probability(size: int, n_max: int) -> Float[np.ndarray, "C n"]:
    """Returns the probability that n of `size` samples contain one of C given ones, C = 0 .. size, n = 1 .. n_max.

    1 - C(N - C, n) / C(N, n), as a product of factors at most 1.
    """
    count_C1, drawn_n = np.arange(size + 1)[:, None], np.arange(n_max)
    return 1 - np.cumprod(np.maximum(size - count_C1 - drawn_n, 0) / (size - drawn_n), axis=1)


def expected_tokens(tree: TokenTree, leaves: Sequence[int], size: int, n_max: int) -> Float[np.ndarray, " n"]:
    """Returns the expected tokens of the tree of n of a pool's `size` samples, n = 1 .. n_max, with the problem's.

    `leaves` are the last nodes of the samples that have steps. A run's tokens are in the tree if a sample through it is
    among the n.
    """
    run_of = dict(zip(tree.node_M.tolist(), tree.run_M.tolist(), strict=True))
    through_R = np.bincount([run_of[leaf] for leaf in leaves], minlength=len(tree.length_R))
    for run in range(len(through_R) - 1, 0, -1):  # parents come before children
        through_R[tree.parent_R[run]] += through_R[run]
    return np.bincount(through_R, tree.length_R, minlength=size + 1) @ drawn_probability(size, n_max)


def token_costs(trees: Sequence[ReasoningTree], prm: PRM, n_max: int) -> tuple[float, Float[np.ndarray, " n"]]:
    """Returns the mean tokens of a sample that the policy writes, and those that the scorer computes for n samples."""
    written, computed_n = 0.0, np.zeros(n_max)
    for tree in trees:
        tokens, ends = token_tree(tree, prm.layout), [chain[-1] for chain in chains_of(tree)]
        size = len(ends) + tree.extra.get("empty_samples", 0)
        if ends:
            computed_n += expected_tokens(tokens, ends, size, n_max)
        leaves = [tree.nodes[end].extra for end in ends]
        if all("tokens" in leaf for leaf in leaves):
            written += sum(leaf["tokens"] for leaf in leaves) / size
        else:
            depth_M = geometry(tokens.length_R, tokens.parent_R).depth_R[tokens.run_M] - tokens.length_R[0]
            depth = dict(zip(tokens.node_M.tolist(), depth_M.tolist(), strict=True))
            written += sum(depth[end] for end in ends) / size
    return written / len(trees), computed_n / len(trees)


def _seconds(prm: PRM, trees: Sequence[ReasoningTree], n_max: int, seed: int) -> Float[np.ndarray, " n"]:
    """Returns the measured seconds of scoring n random samples of a pool, interpolated between `shown_n`."""
    rng, measured = np.random.default_rng(seed), []
    for n in shown_n(n_max):
        records = [{"problem": tree.problem, "samples": _drawn_steps(tree, n, rng)} for tree in trees[:TIMED]]
        records = [record for record in records if record["samples"]]
        for _ in range(2):  # the first compiles
            began = time.perf_counter()
            list(prm.score_many(records))
            elapsed = time.perf_counter() - began
        measured.append(elapsed / min(TIMED, len(trees)))
    return np.interp(np.arange(1, n_max + 1), shown_n(n_max), np.maximum.accumulate(measured))


def _drawn_steps(tree: ReasoningTree, n: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Returns those of n random samples of a pool that have steps."""
    chains = chains_of(tree)
    drawn = rng.permutation(len(chains) + tree.extra.get("empty_samples", 0))[:n]
    return [{"steps": [tree.nodes[i].text for i in chains[k]]} for k in sorted(drawn) if k < len(chains)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostOptions(ScoringOptions):
    """Equal cost: reward models against majority vote, where samples and their scores are both paid for.

    Best of n by a model, and a vote weighted by it, take as many samples as a majority's budget buys with scoring. A
    token costs 2 FLOPs a parameter, or the seconds that are measured.

    For example:
      jprm eval experiments/studies/cost.py:EQUAL_COST --model runs/prm runs/orm --input pool.jsonl \
        --policy-parameters 8e9 --json equal.json
    """

    model: Annotated[tuple[str, ...], arg(metavar="DIR ...")]
    """The folders of trained models."""
    input: Annotated[Path, arg(metavar="POOL.jsonl")]
    """Pools of samples with answers and known correctness."""
    policy_parameters: float
    """Parameters of the model that wrote the samples, without its embedding table."""
    policy_tokens_per_second: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """How fast the policy samples on this machine. The report then also compares at equal seconds, and times the
    scoring here."""


def run(options: CostOptions) -> Report:
    from jprm.io.storage import path_of
    from jprm.loading import load
    from jprm.methods.evaluate.run import scored_trees, source

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
        at_cost = report[unit]
        counts = at_cost["choosers"][0]["n"]
        rows = []
        for row in at_cost["choosers"]:
            cells = [f"{percent(value)} ({n})" for value, n in zip(row["value"], row["n"], strict=True)]
            rows.append([row["name"], *cells, interval(last(row["less"])) if "less" in row else ""])
        title = f"Accuracy at equal {unit.upper() if unit == 'flops' else unit}: what a majority of n samples costs"
        title += left_out_words(report)
        columns = ("", *(f"n = {n}" for n in counts), f"less majority of {report['n_max']} [95 %]")
        yield Table(title, columns, rows, caption="in brackets, the samples that the budget buys")


EQUAL_COST = Benchmark(name="equal_cost", title="Equal cost", options=CostOptions, tables=tables, run=run)
