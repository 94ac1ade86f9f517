"""Scores of pools by a PRM, as the verdict reads them: from what `jprm score` wrote of every pool.

    for pool in own_train own_test chatgpt; do jprm score --model runs/real/prm800k \\
      --input experiments/real/pools/$pool.jsonl.gz --output scored/$pool.jsonl; done
    python -m experiments.real.prm_scores --name "ratings PRM" --scored scored/*.jsonl --output scores_ratings.jsonl

How a sample's step scores become one number is chosen on the fitting problems of bucket 7 of `own_train`.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy as np
import tyro

from experiments.real import token_states as states
from jprm.io.jsonl import write_records
from jprm.methods.evidence.fit import bucket
from jprm.statistics import auroc
from jprm.tree import ReasoningTree, chains_of

RULES: dict[str, Callable[[np.ndarray], float]] = {
    "last": lambda score_K: score_K[-1], "least": np.min, "mean": np.mean,
    "product": lambda score_K: np.log(score_K).sum(),
}  # fmt: skip


def main(name: str, scored: tuple[pathlib.Path, ...], output: pathlib.Path) -> None:
    """Write a PRM's scores of pools.

    Args:
        name: Of the arm.
        scored: What `jprm score` wrote, one file a pool, named as the pool.
        output: The file of scores.
    """
    trees = {path.name.split(".")[0]: [tree for tree in states.answered(path) if tree.nodes] for path in scored}
    held_out = [tree for tree in trees["own_train"] if bucket(tree.problem, 10) == 7]
    areas = {rule: area_in_problems(held_out, rule) for rule in RULES}
    chosen = max(areas, key=areas.__getitem__)
    print(f"{name}: {chosen}, of AUROC in problems", {rule: round(100 * area, 1) for rule, area in areas.items()})
    write_records(output, [
        {"pool": pool, "problem": states.name_of(tree), "scores": {name: [float(f"{x:.5g}") for x in by(tree, chosen)]}}
        for pool, of_pool in trees.items() for tree in of_pool
    ])  # fmt: skip


def by(tree: ReasoningTree, rule: str) -> list[float]:
    """Returns one number of each sample."""
    steps = [np.array([tree.nodes[i].score for i in chain], float) for chain in chains_of(tree)]
    return [float(RULES[rule](np.clip(score_K, 1e-6, 1))) for score_K in steps]


def area_in_problems(trees: list[ReasoningTree], rule: str) -> float:
    """Returns the mean AUROC over problems with right and wrong samples."""
    areas = []
    for tree in trees:
        right_M = np.array([tree.nodes[chain[-1]].correct is True for chain in chains_of(tree)])
        if right_M.any() and not right_M.all():
            areas.append(float(auroc(np.array(by(tree, rule)), right_M)))
    return float(np.mean(areas))


if __name__ == "__main__":
    tyro.cli(main)
