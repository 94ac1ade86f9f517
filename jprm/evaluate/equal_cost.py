"""Reward models against majority vote and each other at equal cost: samples and scores are both paid for.

"Best of 64 beats a majority of 64" compares 64 samples and their scores with 64 samples alone. Here every chooser has
the same budget and takes as many samples as it can pay for. A token costs 2 FLOPs a parameter (Kaplan et al. 2020,
arXiv 2001.08361, section 2.1; without attention's own products), or measured seconds.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from jprm.evaluate.best_of_n import Pools, chosen_curves, pools_of
from jprm.evaluate.paired import mean_differences, shown_n
from jprm.evaluate.votes import vote_accuracy
from jprm.score.scorer import PRM
from jprm.statistics import bootstrap, weighted_mean
from jprm.token_tree import geometry, token_tree
from jprm.tree import ReasoningTree, chains_of

TIMED = 20
"""Pools whose scoring is timed, after one run of the same pools that compiles."""


@dataclasses.dataclass(frozen=True)
class Chooser:
    """A way to choose: each problem's expected accuracy at n = 1 .. n_max, and the cost of a sample."""

    name: str
    accuracy_Pn: Float[np.ndarray, "P n"]
    cost: float  # of a sample, with its scoring


def at_equal_cost(choosers: Sequence[Chooser], budgets: Sequence[float], problems: Sequence[str], seed: int) -> dict:
    """Returns each chooser's accuracy at each budget, and its difference from the first chooser, which scores nothing.

    With a budget b a chooser takes floor(b / cost) samples, at least one and at most n_max. Intervals are 95 % over
    problems; `less` is paired, a chooser's accuracy less the first's. Raises ValueError for a budget below one sample.
    """
    if cheap := [b for b in budgets if b < choosers[0].cost]:
        raise ValueError(f"a budget of {cheap[0]:g} does not pay for one sample")
    rows, taken = [], {}
    for chooser in choosers:
        n_max = chooser.accuracy_Pn.shape[1]
        n_K = np.clip(np.floor(np.array(budgets) / chooser.cost + 1e-9), 1, n_max).astype(int)
        taken[chooser.name] = chooser.accuracy_Pn[:, n_K - 1]
        found = bootstrap(lambda w, x=taken[chooser.name]: weighted_mean(x, w), problems, seed=seed).json()
        rows.append({"name": chooser.name, "cost": chooser.cost, "n": n_K.tolist()} | found)
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
    `tokens`, else as the model's tokenizer counts), without reading the problem. It costs the scorer the tokens that it
    adds to its row: what samples share is scored once. Budgets are those of a majority of 1, 2, 4, .. samples. Seconds
    of scoring are measured here, on the first `TIMED` pools.
    """
    for what, count in (("parameters", policy_parameters), ("tokens_per_second", policy_tokens_per_second)):
        if count is not None and not 0 < count < math.inf:
            raise ValueError(f"policy_{what} is {count}: it must be a finite number above 0")
    pools = {name: pools_of(trees) for name, trees in scored.items()}
    first = next(iter(pools.values()))
    accuracies = _accuracies(pools, models, seed)
    tokens = {name: _tokens(trees, models[name]) for name, trees in scored.items()}
    written = float(np.mean([policy for policy, _ in tokens.values()]))

    def at(policy_cost: float, scorer_cost: Mapping[str, float]) -> dict[str, Any]:
        choosers = [
            Chooser(name, accuracy_Pn, policy_cost + (scorer_cost[model] if model else 0.0))
            for name, model, accuracy_Pn in accuracies
        ]
        return at_equal_cost(choosers, [n * policy_cost for n in shown_n(n_max)], first.problem, seed)

    n_max, flops = int(first.size_P.min()), 2 * policy_parameters * written
    report = {
        "n_problems": len(first.problem),
        "n_max": n_max,
        "policy_parameters": policy_parameters,
        "policy_tokens": written,
        "scorers": {
            name: {"parameters": parameters(prm), "tokens": tokens[name][1], "rule": prm.rule}
            for name, prm in models.items()
        },
        "flops": at(flops, {name: 2 * parameters(prm) * tokens[name][1] for name, prm in models.items()}),
    }
    if policy_tokens_per_second:
        seconds = {name: _seconds_a_sample(models[name], scored[name]) for name in models}
        report["seconds"] = at(written / policy_tokens_per_second, seconds)
    return report


def _accuracies(
    pools: Mapping[str, Pools], models: Mapping[str, PRM], seed: int
) -> list[tuple[str, str | None, Float[np.ndarray, "P n"]]]:
    """(name, the model that scores, accuracy) of every chooser; the majority vote is first."""
    first = next(iter(pools.values()))
    if first.class_PN is None:
        raise ValueError("the samples have no `answer`, and a majority needs one: add it to the pools")
    weight_PNK = [np.ones(first.correct_PN.shape), *(pools[name].weight[models[name].rule] for name in pools)]
    votes = vote_accuracy(
        first.class_PN, first.correct_PN, np.stack(weight_PNK, -1), first.size_P, int(first.size_P.min()),
        trials=128, seed=seed,
    ).value_PnK  # fmt: skip
    found: list[tuple[str, str | None, np.ndarray]] = [("majority vote", None, votes[:, :, 0])]
    for k, name in enumerate(pools, start=1):
        found.append((f"best of n by {name}", name, chosen_curves(pools[name])[models[name].rule]))
        found.append((f"weighted vote by {name}", name, votes[:, :, k]))
    return found


def parameters(prm: PRM) -> int:
    """Returns the number of parameters that a token is multiplied with: all but the embedding table."""
    decoder = {name: part for name, part in prm.params["decoder"].items() if name != "embed"}
    return sum(x.size for x in jax.tree.leaves([decoder, prm.params.get("head", {})]))


def _tokens(trees: Sequence[ReasoningTree], prm: PRM) -> tuple[float, float]:
    """Returns the mean tokens of a sample that the policy writes, and that the scorer computes with the problem."""
    written, computed, samples = 0.0, 0, 0
    for tree in trees:
        tokens, chains = token_tree(tree, prm.layout), chains_of(tree)
        computed += len(tokens.tokens_N)
        samples += len(chains)
        leaves = [tree.nodes[chain[-1]].extra for chain in chains]
        if all("tokens" in leaf for leaf in leaves):
            written += sum(leaf["tokens"] for leaf in leaves)
        else:
            depth_M = geometry(tokens.length_R, tokens.parent_R).depth_R[tokens.run_M] - tokens.length_R[0]
            depth = dict(zip(tokens.node_M.tolist(), depth_M.tolist(), strict=True))
            written += sum(depth[chain[-1]] for chain in chains)
    return written / samples, computed / samples


def _seconds_a_sample(prm: PRM, trees: Sequence[ReasoningTree]) -> float:
    some = [
        {
            "problem": tree.problem,
            "samples": [{"steps": [tree.nodes[i].text for i in chain]} for chain in chains_of(tree)],
        }
        for tree in trees[:TIMED]
    ]
    seconds = []
    for _ in range(2):  # the first compiles
        began = time.perf_counter()
        list(prm.score_many(some))
        seconds.append(time.perf_counter() - began)
    return seconds[-1] / sum(len(record["samples"]) for record in some)
