"""Trivial baselines that a model must beat. They read only text and the other samples, and load no model.

Best of n and ProcessBench show them beside every model, and report the difference from the best one first. Baselines
that check arithmetic or weigh evidence are in `jprm.methods.evidence.baselines`, imported when needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jprm.options import find_part
from jprm.tree import ReasoningTree, chains_of

MOST_SAMPLES = 100_000
"""The most samples for text baselines in best of n; larger files only get baselines without a checker."""

DOUBTED = 0.1
"""The vote weight of a chain that a baseline doubts; others weigh 1."""


class Chosen(NamedTuple):
    """A baseline's output for the K chains of a pool.

    Attributes:
      key_K: ranks the chains; higher is better.
      weight_K: vote weights in [0, 1]; may depend on the other chains.
      of_pool: whether `key_K` depends on the other chains too.
    """

    key_K: Float[np.ndarray, " K"]
    weight_K: Float[np.ndarray, " K"]
    of_pool: bool = False


OfPools = Callable[[Sequence[ReasoningTree]], Sequence[Chosen] | None]
"""Maps pools to one `Chosen` each, if there are enough pools."""

OfSteps = Callable[[Sequence[ReasoningTree]], Sequence[Float[np.ndarray, " N"]] | None]
"""Maps chains, if there are enough, to a score per step, lower if an error is likelier."""


OfLabelled = Callable[
    [Sequence[ReasoningTree], Sequence[Int[np.ndarray, " N"]]], Sequence[Float[np.ndarray, " N"]] | None
]
"""Maps trees and step classes (1, 0, or -1 without a label), if there are enough steps, to scores."""


def doubting(key: Callable[[ReasoningTree, list[int]], float]) -> OfPools:
    """Builds a baseline, (pools) -> one `Chosen` for each, that doubts chains as `doubted` does.

    `key(tree, node indices)` is a chain's number, higher is better.
    """

    def of_pools(trees: Sequence[ReasoningTree]) -> list[Chosen]:
        return [doubted(np.array([key(tree, chain) for chain in chains_of(tree)], float)) for tree in trees]

    return of_pools


def doubted(key_K: Float[np.ndarray, " K"], pool_K: Int[np.ndarray, " K"] | None = None) -> Chosen:
    """Ranks chains by `key_K` (higher is better); chains below their pool's mean weigh `DOUBTED`, others 1.

    `pool_K` numbers each chain's pool from 0; by default all are of a single one.
    """
    pool_K = np.zeros(len(key_K), int) if pool_K is None else pool_K
    mean_P = np.bincount(pool_K, key_K) / np.maximum(np.bincount(pool_K), 1)
    return Chosen(key_K, np.where(key_K < mean_P[pool_K] - 1e-9, DOUBTED, 1.0))


def _characters(tree: ReasoningTree, chain: list[int]) -> float:
    return float(sum(len(tree.nodes[i].text) for i in chain))


POOLS: dict[str, OfPools | str] = {
    "fewest_steps": doubting(lambda tree, chain: -float(len(chain))),
    "shortest": doubting(lambda tree, chain: -_characters(tree, chain)),
    "no_false_equation": "jprm.methods.evidence.baselines:no_false_equation",
    "most_numbers_used": "jprm.methods.evidence.baselines:most_numbers_used",
    "text_features": "jprm.methods.evidence.baselines:ranked_by_text",
}
"""Baselines of best of n, besides a random choice and the majority vote."""

STEPS: dict[str, OfSteps | str] = {
    "position": lambda trees: [-np.arange(len(tree.nodes), dtype=float) for tree in trees],
    "step_length": lambda trees: [-np.array([len(node.text) for node in tree.nodes], float) for tree in trees],
    "no_false_equation": "jprm.methods.evidence.baselines:steps_without_false_equation",
    "text_features": "jprm.methods.evidence.baselines:steps_by_text",
}
"""Baselines for first errors. `position` and `step_length`: later or longer steps are likelier wrong."""

LABELLED: dict[str, OfLabelled | str] = {
    "position_and_length": "jprm.methods.evidence.baselines:labelled_by_place",
    "text_features": "jprm.methods.evidence.baselines:labelled_by_text",
}
"""Baselines for labelled steps, fitted to the labels of other problems."""


def of_pools(trees: Sequence[ReasoningTree]) -> dict[str, Sequence[Chosen]]:
    """Returns one `Chosen` per pool, by baseline of `POOLS`.

    Leaves out `text_features` if it needs more pools. Above `MOST_SAMPLES` samples only `fewest_steps` and `shortest`
    remain.
    """
    few = sum(len(chains_of(tree)) for tree in trees) <= MOST_SAMPLES
    return _computed(POOLS if few else {name: x for name, x in POOLS.items() if not isinstance(x, str)}, trees)


def of_steps(trees: Sequence[ReasoningTree]) -> dict[str, Sequence[Float[np.ndarray, " N"]]]:
    """Returns step scores per chain (a tree without branches), lower if an error is likelier, by baseline of `STEPS`.

    Leaves out `text_features` if too few chains have a known `first_error` (`jprm.methods.evidence.baselines`).
    """
    return _computed(STEPS, trees)


def of_labelled(
    trees: Sequence[ReasoningTree], classes: Sequence[Int[np.ndarray, " N"]]
) -> dict[str, Sequence[Float[np.ndarray, " N"]]]:
    """Returns scores per tree and node, by baseline of `LABELLED`, fitted to `classes` (1, 0, -1, by `label_class`).

    Scores are higher if a step is likelier right. Leaves out baselines if `fitted` has too few labels, `text_features`
    if a tree is of messages, and all above `MOST_SAMPLES` nodes.
    """
    few = sum(len(tree.nodes) for tree in trees) <= MOST_SAMPLES
    return _computed(LABELLED, trees, classes) if few else {}


def fitted(
    rows: Sequence[Float[np.ndarray, "N F"]], classes: Sequence[Int[np.ndarray, " N"]], problems: Sequence[str]
) -> Sequence[Float[np.ndarray, " N"]] | None:
    """Returns out-of-fold probabilities of a right step, by a logistic regression on features.

    Each entry of `rows` (features), `classes` (1, 0, or -1 without a label) and `problems` is a tree; a step's score
    comes from a fit to other problems. `None` if either class has fewer than 50 steps, or a fold lacks one.
    """
    return find_part("jprm.methods.evidence.baselines:cross_fitted", {}, "baseline")(rows, classes, problems)


def _computed(baselines: dict[str, Any], *data: Sequence[Any]) -> dict[str, Any]:
    computed = {name: find_part(name, baselines, "baseline")(*data) for name in baselines}
    return {name: chosen for name, chosen in computed.items() if chosen is not None}
