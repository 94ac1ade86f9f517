"""Trivial baselines: what a model has to beat. They read only text and the other samples, and load no model.

Best of n and ProcessBench show them beside every model, and lead with the difference from the best one. Those that
check arithmetic or weigh evidence are of `jprm.methods.evidence.baselines`, which is imported when they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jprm.options import find_part
from jprm.tree import ReasoningTree, chains_of

MOST_SAMPLES = 100_000
"""Best of n reads the text of no more samples for baselines; larger files have only those that need no checker."""

DOUBTED = 0.1
"""The weight in a vote of a chain that a baseline doubts; others weigh 1."""


class Chosen(NamedTuple):
    """What a baseline says of a pool's K chains.

    Attributes:
      key_K: what orders them; higher is better.
      weight_K: what each weighs in a vote, in [0, 1]; it may depend on the pool's other chains.
      of_pool: whether `key_K` depends on them too.
    """

    key_K: Float[np.ndarray, " K"]
    weight_K: Float[np.ndarray, " K"]
    of_pool: bool = False


OfPools = Callable[[Sequence[ReasoningTree]], Sequence[Chosen] | None]
"""Pools to what a baseline says of each one's chains; None where the pools are too few for it."""

OfSteps = Callable[[Sequence[ReasoningTree]], Sequence[Float[np.ndarray, " N"]] | None]
"""Chains to a score of every step, lower where an error is likelier; None where the chains are too few."""


OfLabelled = Callable[
    [Sequence[ReasoningTree], Sequence[Int[np.ndarray, " N"]]], Sequence[Float[np.ndarray, " N"]] | None
]
"""Trees and the classes of their steps (1, 0, or -1 without a label) to scores; None where the steps are too few."""


def doubting(key: Callable[[ReasoningTree, list[int]], float]) -> OfPools:
    """Returns the baseline of one number of a chain. Chains below their pool's mean are doubted."""

    def of_pools(trees: Sequence[ReasoningTree]) -> list[Chosen]:
        return [doubted(np.array([key(tree, chain) for chain in chains_of(tree)], float)) for tree in trees]

    return of_pools


def doubted(key_K: Float[np.ndarray, " K"], pool_K: Int[np.ndarray, " K"] | None = None) -> Chosen:
    """Returns chains by a number of each; those below the mean of their pool are doubted. By default they are one."""
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
"""Of best of n, beside a blind choice and the majority vote."""

STEPS: dict[str, OfSteps | str] = {
    "position": lambda trees: [-np.arange(len(tree.nodes), dtype=float) for tree in trees],
    "step_length": lambda trees: [-np.array([len(node.text) for node in tree.nodes], float) for tree in trees],
    "no_false_equation": "jprm.methods.evidence.baselines:steps_without_false_equation",
    "text_features": "jprm.methods.evidence.baselines:steps_by_text",
}
"""Of first errors. The first two: the later, or longer in characters, the likelier wrong."""

LABELLED: dict[str, OfLabelled | str] = {
    "position_and_length": "jprm.methods.evidence.baselines:labelled_by_place",
    "text_features": "jprm.methods.evidence.baselines:labelled_by_text",
}
"""Of labelled steps, fitted to the labels of other problems."""


def of_pools(trees: Sequence[ReasoningTree]) -> dict[str, Sequence[Chosen]]:
    """Returns what each baseline says of pools; without those for which they are too few, or too many."""
    few = sum(len(chains_of(tree)) for tree in trees) <= MOST_SAMPLES
    return _computed(POOLS if few else {name: x for name, x in POOLS.items() if not isinstance(x, str)}, trees)


def of_steps(trees: Sequence[ReasoningTree]) -> dict[str, Sequence[Float[np.ndarray, " N"]]]:
    """Returns every baseline's scores of steps; without those for which the chains are too few."""
    return _computed(STEPS, trees)


def of_labelled(
    trees: Sequence[ReasoningTree], classes: Sequence[Int[np.ndarray, " N"]]
) -> dict[str, Sequence[Float[np.ndarray, " N"]]]:
    """Returns the scores of labelled steps by each baseline; without those for which they are too few, or too many."""
    few = sum(len(tree.nodes) for tree in trees) <= MOST_SAMPLES
    return _computed(LABELLED, trees, classes) if few else {}


def fitted(
    rows: Sequence[Float[np.ndarray, "N F"]], classes: Sequence[Int[np.ndarray, " N"]], problems: Sequence[str]
) -> Sequence[Float[np.ndarray, " N"]] | None:
    """Returns scores of steps by numbers of each, fitted to the classes of other problems; None where there are few."""
    return find_part("jprm.methods.evidence.baselines:cross_fitted", {}, "baseline")(rows, classes, problems)


def _computed(baselines: dict[str, Any], *data: Sequence[Any]) -> dict[str, Any]:
    computed = {name: find_part(name, baselines, "baseline")(*data) for name in baselines}
    return {name: chosen for name, chosen in computed.items() if chosen is not None}
