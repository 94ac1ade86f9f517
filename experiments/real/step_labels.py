"""A PRM's step AUROC on PRM800K phase 1 beside position and length fitted to all training ratings, paired.

    jprm score --model runs/real/prm800k --input data/phase1_test_trees.jsonl --output scored.jsonl
    python -m experiments.real.step_labels --shared ../shared/data --scored scored.jsonl

The default is the kept scores of Qwen2.5-Coder-0.5B trained by `prm.py` on an H200. Neutral ratings are positive.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
import tyro
from scipy.optimize import minimize
from scipy.special import expit

from jprm.io.jsonl import read_lines
from jprm.methods.data.overlap import normalise
from jprm.methods.evaluate.run import source
from jprm.methods.evaluate.steps import UNLABELLED, alternatives, auroc_draws, label_class, labelled
from jprm.methods.evidence.baselines import rows_of_place
from jprm.methods.evidence.ranker import Ranker
from jprm.statistics import Draws, difference, draws, interval, weighted_mean
from jprm.tree import ReasoningTree, tree_of

HERE = pathlib.Path(__file__).parent
KEPT = HERE / "pools/prm800k_test_scores.jsonl.gz"


def main(shared: pathlib.Path, scored: pathlib.Path = KEPT) -> None:
    """Print step AUROC and alternatives ranked right of a PRM, of position and length, and the paired differences.

    Args:
        shared: The folder with `prm800k/phase1_train.jsonl` and `phase1_test.jsonl`.
        scored: Scores of the test file's steps, a list for each record.
    """
    train, test = (read(shared / f"prm800k/phase1_{split}.jsonl") for split in ("train", "test"))
    tested = {normalise(tree.problem) for tree in test}
    train = [tree for tree in train if normalise(tree.problem) not in tested]
    scores = [np.array(json.loads(line)["scores"], float) for _, line in read_lines(scored)]
    place = place_scores(train, test)
    arms = {"PRM": scores, "position and length": place}
    areas, won = {}, {}
    for name, of_trees in arms.items():
        trees = with_scores(test, of_trees)
        areas[name], won[name] = auroc_draws(trees, "positive", seed=0), alternatives_of(trees)
    for what, by_arm in (("step AUROC", areas), ("alternatives", won)):
        less = difference(by_arm["PRM"], by_arm["position and length"])
        shown = {name: interval(values) for name, values in by_arm.items()} | {"PRM less position and length": less}
        for name, figure in shown.items():
            print(f"{what}: {name} {100 * figure.value:.1f} [{100 * figure.low:.1f}, {100 * figure.high:.1f}]")


def read(path: pathlib.Path) -> list[ReasoningTree]:
    trees = [tree_of(record) for record in source("prm800k").records(path)]
    return [tree for tree in trees if tree.nodes]


def place_scores(train: list[ReasoningTree], test: list[ReasoningTree]) -> list[np.ndarray]:
    """Returns the test steps' scores by a logistic regression on position and length, fitted to all training ratings.

    Six parameters of 48,672 ratings need no regularisation.
    """
    class_M = np.concatenate([[label_class(n.label, t.semantics, "positive") for n in t.nodes] for t in train])
    ranker = Ranker.standardising(np.concatenate([rows_of_place(tree) for tree in train]))

    def rows(x_NF: np.ndarray) -> np.ndarray:
        return np.column_stack([ranker.standard(x_NF), np.ones(len(x_NF))])

    x_MF = rows(np.concatenate([rows_of_place(tree) for tree in train]))[class_M != UNLABELLED]
    right_M = class_M[class_M != UNLABELLED].astype(float)

    def loss(w_F: np.ndarray) -> tuple[float, np.ndarray]:
        odds_M = x_MF @ w_F
        return float(np.mean(np.logaddexp(0, odds_M) - right_M * odds_M)), x_MF.T @ (expit(odds_M) - right_M) / len(
            odds_M
        )

    w_F = minimize(loss, np.zeros(x_MF.shape[1]), method="L-BFGS-B", jac=True).x
    return [rows(rows_of_place(tree)) @ w_F for tree in test]


def with_scores(trees: list[ReasoningTree], scores: list[np.ndarray]) -> list[ReasoningTree]:
    scored = []
    for tree, of_tree in zip(trees, scores, strict=True):
        nodes = [dataclasses.replace(n, score=float(x)) for n, x in zip(tree.nodes, of_tree, strict=True)]
        scored.append(dataclasses.replace(tree, nodes=tuple(nodes)))
    return scored


def alternatives_of(trees: list[ReasoningTree]) -> Draws:
    won, problem_Q = [], []
    for tree in labelled(trees, "positive"):
        for right, wrong in alternatives(tree.parent_N, tree.class_N):
            won.append(float(np.heaviside(tree.score_N[right] - tree.score_N[wrong], 0.5)))
            problem_Q.append(tree.problem)
    won_Q = np.array(won)
    return draws(lambda weight_RQ: weighted_mean(won_Q, weight_RQ), problem_Q, seed=0)


if __name__ == "__main__":
    tyro.cli(main)
