"""Searches against best of n and majority vote at the searches' own tokens, paired over problems.

A search spends another number of tokens on every problem. Best of n gets the same on the same problem: n = tokens of
the search / mean tokens of a sample, as a mixture of the whole numbers beside it, whose expected cost is that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float
from tyro.conf import arg

from jprm.methods.evaluate.benchmark import Benchmark, CommandOptions, Files, Report
from jprm.methods.evaluate.best_of_n import Pools, chosen_curves, pools_of
from jprm.methods.evaluate.blocks import Table, interval
from jprm.methods.evaluate.scored import ScoreError
from jprm.methods.evaluate.votes import vote_accuracy
from jprm.score.scale import PROBABILITY, RULES, Scale
from jprm.statistics import bootstrap, mean_differences, weighted_mean
from jprm.tree import ReasoningTree, chains_of


def searches_report(
    searches: Mapping[str, Sequence[ReasoningTree]],
    pools: Sequence[ReasoningTree],
    seed: int,
    scale: Scale = PROBABILITY,
) -> dict[str, dict[str, Any]]:
    """Returns `at_own_tokens` for every file of search results, with best of n by the rule of the search.

    `pools` are scored samples of the same policy for at least the searched problems. The tokens of a search include
    those beyond its budget. Raises ScoreError naming file and record where something of this is missing.
    """
    pool_of = {tree.problem: tree for tree in pools}
    report = {}
    for name, trees in searches.items():
        results = [_found(tree, f"{name}: record {i}") for i, tree in enumerate(trees, start=1)]
        if len({tree.problem for tree in trees}) < len(trees):
            raise ScoreError(f"{name}: a problem occurs twice: give one result per problem")
        if absent := [tree.problem for tree in trees if tree.problem not in pool_of]:
            raise ScoreError(f"{name}: problem {absent[0][:60]!r} has no pool: sample the problems that were searched")
        searched = [pool_of[tree.problem] for tree in trees]
        rules = {search["rule"] for search in results}
        if len(rules) != 1 or not rules <= set(RULES):
            raise ScoreError(f"{name}: search.rule: is {sorted(map(str, rules))}: give results of one rule")
        right_P = np.array([search["correct"] for search in results], float)
        spent_P = np.array([search["policy_tokens"] + search["over_budget_tokens"] for search in results], float)
        report[name] = at_own_tokens(
            right_P, spent_P, pools_of(searched, scale), mean_tokens(searched), rules.pop(), seed
        )
    return report


def at_own_tokens(
    right_P: Float[np.ndarray, " P"],
    spent_P: Float[np.ndarray, " P"],
    pools: Pools,
    tokens_P: Float[np.ndarray, " P"],
    rule: str,
    seed: int,
) -> dict[str, Any]:
    """Returns the accuracy of a search beside best of n and majority vote, which spend its tokens on every problem.

    `right_P` is whether the search was correct, `spent_P` its tokens, `tokens_P` the mean tokens of a sample. The
    report has `accuracy`, `best_of_n`, `majority` (None without answers) with 95 % intervals over problems,
    `less_best_of_n` and `less_majority` paired (`jprm.statistics.Difference`), mean `tokens` and `n`, and the problems
    where the tokens buy less than one sample (it gets one, `below_one`) or more than the smallest pool has
    (`beyond_pool`).
    """
    n_max = int(pools.size_P.min())
    wanted_P = spent_P / tokens_P
    n_P = np.clip(wanted_P, 1, n_max)
    curves = {"best_of_n": chosen_curves(pools)[rule]}
    if pools.class_PN is not None:
        equal_PN1 = np.zeros((*pools.correct_PN.shape, 1))
        votes = vote_accuracy(pools.class_PN, pools.correct_PN, equal_PN1, pools.size_P, n_max, trials=128, seed=seed)
        curves["majority"] = votes.value_PnK[:, :, 0]
    n_n = np.arange(1, n_max + 1)
    rivals = {
        name: np.array([np.interp(n, n_n, curve_n) for n, curve_n in zip(n_P, curve_Pn, strict=True)])
        for name, curve_Pn in curves.items()
    }
    report: dict[str, Any] = {"rule": rule, "n_problems": len(right_P), "tokens": float(spent_P.mean()),
              "n": float(n_P.mean()), "below_one": int((wanted_P < 1).sum()),
              "beyond_pool": int((wanted_P > n_max).sum()), "majority": None, "less_majority": None}  # fmt: skip
    for name, value_P in {"accuracy": right_P, **rivals}.items():
        report[name] = bootstrap(lambda w, x=value_P: weighted_mean(x, w), pools.problem, seed=seed).json()
        if name != "accuracy":
            less = mean_differences((right_P - value_P)[:, None], pools.problem, seed).json()
            report[f"less_{name}"] = {key: value[0] for key, value in less.items()}
    return report


def mean_tokens(pools: Sequence[ReasoningTree]) -> Float[np.ndarray, " P"]:
    """Returns the mean `tokens` of each pool's samples; one without steps has none."""
    tokens = []
    for tree in pools:
        leaves = [tree.nodes[chain[-1]].extra for chain in chains_of(tree)]
        if not leaves or not all(isinstance(leaf.get("tokens"), (int, float)) for leaf in leaves):
            raise ScoreError(f"pool {tree.problem[:60]!r}: give each sample its `tokens`, as `jprm search` does")
        tokens.append(sum(leaf["tokens"] for leaf in leaves) / (len(leaves) + tree.extra.get("empty_samples", 0)))
    return np.array(tokens)


def _found(tree: ReasoningTree, where: str) -> Mapping[str, Any]:
    search = tree.extra.get("search")
    if not isinstance(search, Mapping) or not {"rule", "policy_tokens", "over_budget_tokens"} <= set(search):
        raise ScoreError(f"{where}: search: is absent; the file must be of `jprm search`")
    if search.get("chosen") is None:
        return {**search, "correct": False}
    if search.get("correct") is None:
        raise ScoreError(f"{where}: search.correct: is not known. Give the problem its `answer` and search again")
    return search


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchesOptions(CommandOptions):
    """Searches: each beside best of n and majority vote that spend the same tokens on the same problems, paired.

    For example:
      jprm eval experiments/studies/searches.py:SEARCHES --searches beam.jsonl mcts.jsonl --pool best.jsonl \
        --json searches.json
    """

    searches: Files
    """Results of `jprm search`, for problems with known answers."""
    pool: Annotated[Path, arg(metavar="POOL.jsonl")]
    """Scored samples of the same policy for these problems, such as a file of `jprm search best-of-n`."""


def run(options: SearchesOptions) -> Report:
    from jprm.methods.evaluate.run import by_name
    from jprm.methods.jobs.score import stored_scale
    from jprm.tree import read_trees

    files = {name: list(read_trees(path)) for name, path in by_name(options.searches).items()}
    return searches_report(files, list(read_trees(options.pool)), 0, stored_scale(options.pool))


def tables(report: Report) -> Iterator[Table]:
    keys = ("accuracy", "best_of_n", "majority", "less_best_of_n", "less_majority")
    rows = [
        [name, *(interval(row[key]) for key in keys), f"{row['tokens']:.0f}", f"{row['n']:.1f}"]
        for name, row in report.items()
    ]
    columns = ("", "search [95 %]", "best of n", "majority", "less best of n", "less majority", "tokens", "mean n")
    beyond = sum(row["beyond_pool"] for row in report.values())
    caption = f"{beyond} times a search spent more than the whole pool has, which is then all used" if beyond else ""
    yield Table("Searches at their own tokens", columns, rows, caption=caption)


SEARCHES = Benchmark(name="searches", title="Searches", options=SearchesOptions, tables=tables, run=run)
