"""A PRM and a generative verifier at equal cost: which is worth its tokens when choosing among samples?

    python -m experiments.quickstart.critique         # the verifier, after `make quickstart`
    python -m experiments.quickstart.equal_cost

Policy, PRM and verifier have the same decoder, so that a computed token is the unit of all costs. A budget pays for
samples and for their scores: a PRM reads what the samples share once; the verifier reads every distinct step's question
and writes a critique. What one run gave is in experiments/quickstart/judges.md.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import tyro
from jaxtyping import Float
from rich.console import Console

import jprm
from experiments.quickstart import critique
from experiments.studies.cost import Chooser, accuracies_of, at_equal_cost, drawn_probability, token_costs
from jprm.io.outputs import write_json
from jprm.methods.evaluate.best_of_n import pools_of
from jprm.methods.evaluate.blocks import Table, percent, show
from jprm.methods.judge.judge import Judge
from jprm.score.scorer import PRM
from jprm.tokenizer import Layout
from jprm.tree import ReasoningTree, chains_of, read_records, tree_of, with_scores

PROBLEMS, SAMPLES = 100, 16


def report(trees: Sequence[ReasoningTree], prm: PRM, judges: dict[str, Judge], seed: int) -> dict[str, Any]:
    """Returns the choosers' accuracy at equal tokens a problem; a step without a readable critique scores 0.5."""
    models: dict[str, Any] = {"PRM": prm}
    scores = {"PRM": prm.score_trees(trees)}
    n_max = min(len(chains_of(tree)) for tree in trees)
    written, computed_n = token_costs(trees, prm, n_max)
    cost_n, unread = {"PRM": computed_n}, {}
    for name, judge in judges.items():
        results = judge.judgements(trees)
        models[name], scores[name] = judge, [np.nan_to_num(judgement.score_N, nan=0.5) for judgement in results]
        unread[name] = int(sum(np.isnan(judgement.score_N).sum() for judgement in results))
        cost_n[name] = critique_tokens(
            trees, judge, prm.layout, sum(judgement.report["tokens"] for judgement in results), n_max
        )
    pools = {
        name: pools_of(
            [with_scores(tree, x.tolist()) for tree, x in zip(trees, values, strict=True)], models[name].scale
        )
        for name, values in scores.items()
    }
    policy_n = written * np.arange(1, n_max + 1)
    choosers = [
        Chooser(name, accuracy_Pn, policy_n + (cost_n[model] if model else 0.0))
        for name, model, accuracy_Pn in accuracies_of(pools, models, seed)
    ]
    doublings = math.ceil(math.log2(max(chooser.cost_n[-1] for chooser in choosers) / written))
    budgets = [written * 2**k for k in range(doublings + 1)]  # the last pays for all samples of every chooser
    results = at_equal_cost(choosers, budgets, [tree.problem for tree in trees], seed)
    return results | {"sample_tokens": written, "unread": unread, "n_max": n_max}


def critique_tokens(
    trees: Sequence[ReasoningTree], judge: Judge, layout: Layout, generated: int, n_max: int
) -> Float[np.ndarray, " n"]:
    """Returns the expected tokens that a judge reads and writes for n samples of a problem, n = 1 .. n_max.

    A question that several samples lead to is asked once. `generated` tokens, which all critiques had, are shared out
    equally.
    """
    samples_of: list[dict[str, int]] = []
    for tree in trees:
        count: dict[str, int] = {}
        for chain in chains_of(tree):
            steps = [tree.nodes[i].text for i in chain]
            for end in range(1, len(steps) + 1):
                question = judge.prompt.filled(tree.problem, steps[:end])
                count[question] = count.get(question, 0) + 1
        samples_of.append(count)
    per_critique, cost_n = generated / sum(map(len, samples_of)), np.zeros(n_max)
    for tree, count in zip(trees, samples_of, strict=True):
        size = len(chains_of(tree))
        token_Q = [judge.samples * len(layout.problem(question)) + per_critique for question in count]
        cost_n += np.bincount(list(count.values()), token_Q, minlength=size + 1) @ drawn_probability(size, n_max)
    return cost_n / len(trees)


def _worded(right: float, n: int, cost: float, budget: float) -> str:
    return f"{percent(right)} ({n})" if cost <= budget else "-"  # not even one sample with its score


def main(quickstart: pathlib.Path = pathlib.Path("runs/quickstart"), seed: int = 0) -> None:
    """Compare the PRM on formal labels with the verifier that learnt from kept critiques.

    Args:
        quickstart: The folder of a finished quickstart and of its verifier.
        seed: Of the critiques and the intervals.
    """
    out = quickstart / "critique"
    if not (out / "kept/result.json").is_file():
        raise SystemExit(f"error: {out}: no verifier. Run experiments/quickstart/critique.py first")
    records = list(read_records(quickstart / "test_pools.jsonl"))[:PROBLEMS]
    trees = [tree_of({**record, "samples": record["samples"][:SAMPLES]}) for record in records]
    judges = {"judge": critique.judge_of(out / "kept", 1, seed + 1)}
    results = report(trees, jprm.load(quickstart / "formal"), judges, seed)
    write_json(out / "equal_cost.json", results)
    columns = ("right, % (n)", *(f"{budget:.0f} tokens" for budget in results["budgets"]))
    rows = [
        (row["name"], *map(_worded, row["value"], row["n"], row["cost"], results["budgets"]))
        for row in results["choosers"]
    ]
    show([Table("at equal tokens a problem", columns, rows), json.dumps(results["unread"])], Console(width=160))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    tyro.cli(main)
