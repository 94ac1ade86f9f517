"""Reward models against majority vote and against each other at equal cost: samples and scores are both paid for.

"Best of 64 beats a majority of 64" compares 64 samples and their scores with 64 samples alone. Here every chooser has
the same budget and takes as many samples as it can pay for. A token costs 2 FLOPs a parameter (Kaplan et al. 2020,
arXiv 2001.08361, section 2.1; attention's own products are left out), or the seconds that were measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from jprm.evaluate.best_of_n import chosen_curves, pools_of
from jprm.evaluate.paired import mean_differences, shown_n
from jprm.evaluate.votes import vote_accuracy
from jprm.score.scorer import PRM
from jprm.statistics import bootstrap, weighted_mean
from jprm.token_tree import geometry, token_tree
from jprm.tree import chains_of, tree_of

TIMED = 20
"""Pools whose scoring is timed, after one run of the same pools that compiles."""


@dataclasses.dataclass(frozen=True)
class Chooser:
    """One way of choosing: each problem's expected accuracy at n = 1 .. n_max, and what one more sample costs."""

    name: str
    accuracy_Pn: Float[np.ndarray, "P n"]
    cost: float  # of a sample, with its scoring


def at_equal_cost(choosers: Sequence[Chooser], budgets: Sequence[float], problems: Sequence[str], seed: int) -> dict:
    """Accuracy of each chooser at each budget, and how the others differ from the first, which scores nothing.

    With a budget b a chooser takes floor(b / cost) samples, at most n_max; where that is none it takes one sample as it
    comes. A budget below one sample is an error. Intervals are 95 % over problems, `less` is paired: a chooser's
    accuracy less the first's.
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
    scored: Mapping[str, Sequence[Mapping[str, Any]]],
    models: Mapping[str, PRM],
    policy_parameters: float,
    policy_tokens_per_second: float | None,
    seed: int,
) -> dict[str, Any]:
    """Majority vote, and best-of-n and weighted vote by each model, at equal FLOPs and, if asked, at equal seconds.

    `scored` holds the same pools, scored by each of `models`. A sample costs the policy its tokens (its own key
    `tokens`, else as the model's tokenizer counts) and the scorer the tokens that its row gains by it: what samples
    share is scored once, while the policy's own reading of the problem is left out. Budgets are those of a majority of
    1, 2, 4, .. samples. Seconds of scoring are measured here, of the first `TIMED` pools.
    """
    for what, count in (("parameters", policy_parameters), ("tokens_per_second", policy_tokens_per_second)):
        if count is not None and not 0 < count < math.inf:
            raise ValueError(f"policy_{what} is {count}: it must be a finite number above 0")
    pools = {name: pools_of(records) for name, records in scored.items()}
    first = next(iter(pools.values()))
    if first.class_PN is None:
        raise ValueError("the samples have no `answer`, and a majority needs one: add it to the pools")
    n_max = int(first.size_P.min())
    policy_tokens, scored_tokens = {}, {}
    for name, records in scored.items():
        policy_tokens[name], scored_tokens[name] = _tokens(records, models[name])
    written = float(np.mean(list(policy_tokens.values())))
    weights = [(name, pools[name].weight[models[name].rule]) for name in pools]
    ones_PN = np.ones(first.correct_PN.shape)
    votes = vote_accuracy(
        first.class_PN, first.correct_PN, np.stack([ones_PN, *(w for _, w in weights)], -1), first.size_P, n_max,
        trials=128, seed=seed,
    ).value_PnK  # fmt: skip

    def choosers(policy_cost: float, scorer_cost: Mapping[str, float]) -> list[Chooser]:
        found = [Chooser("majority vote", votes[:, :, 0], policy_cost)]
        for k, name in enumerate(pools, start=1):
            cost = policy_cost + scorer_cost[name]
            best_Pn = chosen_curves(pools[name])[models[name].rule]
            found.append(Chooser(f"best of n by {name}", best_Pn, cost))
            found.append(Chooser(f"weighted vote by {name}", votes[:, :, k], cost))
        return found

    counts = shown_n(n_max)
    flops = 2 * policy_parameters * written
    scoring = {name: 2 * parameters(models[name]) * scored_tokens[name] for name in models}
    report = {
        "n_problems": len(first.problem),
        "n_max": n_max,
        "policy_parameters": policy_parameters,
        "policy_tokens": written,
        "scorers": {
            name: {"parameters": parameters(prm), "tokens": scored_tokens[name], "rule": prm.rule}
            for name, prm in models.items()
        },
        "flops": at_equal_cost(choosers(flops, scoring), [n * flops for n in counts], first.problem, seed),
    }
    if policy_tokens_per_second:
        seconds = {name: _seconds_a_sample(models[name], scored[name]) for name in models}
        policy_seconds = written / policy_tokens_per_second
        budgets = [n * policy_seconds for n in counts]
        report["seconds"] = at_equal_cost(choosers(policy_seconds, seconds), budgets, first.problem, seed)
    return report


def parameters(prm: PRM) -> int:
    """Those that a token is multiplied with: all but the embedding table, which is looked up."""
    decoder = {name: part for name, part in prm.params["decoder"].items() if name != "embed"}
    return sum(x.size for x in jax.tree.leaves([decoder, prm.params.get("head", {})]))


def _tokens(records: Sequence[Mapping[str, Any]], prm: PRM) -> tuple[float, float]:
    """Mean tokens of a sample that the policy writes, and that the scorer computes for it, the problem included."""
    written, computed, samples = 0.0, 0, 0
    for record in records:
        tree = tree_of(dict(record))
        tokens = token_tree(tree, prm.layout)
        computed += len(tokens.tokens_N)
        samples += len(record["samples"])
        if all("tokens" in sample for sample in record["samples"]):
            written += sum(sample["tokens"] for sample in record["samples"])
        else:
            depth_M = geometry(tokens.length_R, tokens.parent_R).depth_R[tokens.run_M] - tokens.length_R[0]
            depth = dict(zip(tokens.node_M.tolist(), depth_M.tolist(), strict=True))
            written += sum(depth[chain[-1]] for chain in chains_of(tree) if chain)
    return written / samples, computed / samples


def _seconds_a_sample(prm: PRM, records: Sequence[Mapping[str, Any]]) -> float:
    some = [
        {"problem": record["problem"], "samples": [{"steps": sample["steps"]} for sample in record["samples"]]}
        for record in itertools.islice(records, TIMED)
    ]
    seconds = []
    for _ in range(2):  # the first compiles
        began = time.perf_counter()
        list(prm.score_many(some))
        seconds.append(time.perf_counter() - began)
    return seconds[-1] / sum(len(record["samples"]) for record in some)
