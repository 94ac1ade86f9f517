"""Monte Carlo values: the fraction of k completions of a prefix that reach the true answer.

Math-Shepherd (arXiv:2312.08935) calls the fraction the soft estimate and "any of them does" the hard one. The adaptive
mode samples further rollouts while the confidence interval holds the threshold between correct and incorrect.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Bool, Float, Int

from jprm.label.config import MonteCarloConfig
from jprm.label.rollouts import Grader, Rollouts, reaches_answer
from jprm.policy.protocol import Prefix
from jprm.tree import ReasoningTree, without_chain

ORIGIN = "monte_carlo"


def soft(right: Int[np.ndarray, "*S"], total: Int[np.ndarray, "*S"]) -> Float[np.ndarray, "*S"]:
    """Returns the soft estimate, the fraction of correct rollouts; NaN if there are none."""
    right, total = np.asarray(right, float), np.asarray(total, float)
    return np.divide(right, total, out=np.full(total.shape, np.nan), where=total > 0)


def hard(right: Int[np.ndarray, "*S"], total: Int[np.ndarray, "*S"]) -> Float[np.ndarray, "*S"]:
    """Returns the hard estimate, 1 if any rollout is correct, else 0; NaN if there are none."""
    return np.where(np.asarray(total) > 0, (np.asarray(right) > 0).astype(float), np.nan)


def wilson(
    right: Int[np.ndarray, "*S"], total: Int[np.ndarray, "*S"], z: float = 1.96
) -> tuple[Float[np.ndarray, "*S"], Float[np.ndarray, "*S"]]:
    """Returns (low, high) of Wilson's score interval of a fraction (E. B. Wilson, JASA 22, 1927); (0, 1) for total 0.

    These are the fractions p at which |right / total - p| = z sqrt(p (1 - p) / total).
    """
    right, total = np.asarray(right, float), np.asarray(total, float)
    scale = total + z * z
    middle = (right + z * z / 2) / scale
    spread = right * (total - right) / np.maximum(total, 1) + z * z / 4
    half = z * np.sqrt(spread) / scale
    # 0 right of n, or n of n: the bound is exact, rounding would leave 1e-17
    low = np.where(right == 0, 0.0, np.maximum(middle - half, 0.0))
    return low, np.where(right == total, 1.0, np.minimum(middle + half, 1.0))


def straddles(
    right: Int[np.ndarray, "*S"], total: Int[np.ndarray, "*S"], threshold: float, z: float = 1.96
) -> Bool[np.ndarray, "*S"]:
    """Returns whether the threshold is inside the confidence interval."""
    low, high = wilson(right, total, z)
    return (low < threshold) & (threshold < high)


def allocate(
    right: Int[np.ndarray, " S"],
    total: Int[np.ndarray, " S"],
    *,
    threshold: float,
    k: int,
    most: int,
    budget: int,
    z: float = 1.96,
) -> Int[np.ndarray, " S"]:
    """Returns how many rollouts each of S prefixes gets in the next round.

    A prefix gets at most k, at most `most` in all its rounds, and all together at most the budget. The least decided
    prefixes come first: those whose interval reaches furthest on the side of the threshold where it reaches least.
    """
    right, total = np.asarray(right), np.asarray(total)
    low, high = wilson(right, total, z)
    wanted = np.where(straddles(right, total, threshold, z), np.clip(most - total, 0, k), 0)
    order = np.argsort(-np.minimum(high - threshold, threshold - low), kind="stable")
    given = np.zeros_like(wanted)
    before = np.cumsum(wanted[order]) - wanted[order]
    given[order] = np.clip(budget - before, 0, wanted[order])
    return given


def label_trees(
    trees: Iterable[ReasoningTree], rollouts: Rollouts, config: MonteCarloConfig, grader: Grader = reaches_answer
) -> Iterator[ReasoningTree]:
    """Yields the trees with a value on every node, in order.

    A node's `extra` has the number of `rollouts` and of `right` ones, and the interval from `low` to `high`. A leaf of
    known outcome has it as its value and needs no rollout. A node whose rollouts all failed is unlabelled.

    Raises:
      ValueError: a tree without an answer.
      PolicyError: a policy that gives nothing.
    """
    trees = iter(trees)
    while chunk := list(itertools.islice(trees, config.trees_at_once)):
        for tree in chunk:
            if tree.answer is None:
                raise ValueError(f"the problem {tree.problem[:80]!r} has no answer, so no rollout can be judged")
        yield from _label_chunk(chunk, rollouts, config, grader)


def prefixes_of(tree: ReasoningTree) -> list[Prefix]:
    """Returns the prefix that ends with each node."""
    prefixes: list[Prefix] = []
    for node in tree.nodes:
        before = prefixes[node.parent].steps if node.parent >= 0 else ()
        prefixes.append(Prefix(tree.problem, (*before, node.text)))
    return prefixes


def _label_chunk(chunk, rollouts, config, grader):
    prefixes = [prefixes_of(tree) for tree in chunk]
    inner = [{node.parent for node in tree.nodes} for tree in chunk]
    known = [
        np.array([node.correct is not None and i not in inner[t] for i, node in enumerate(tree.nodes)])
        for t, tree in enumerate(chunk)
    ]
    right = [np.zeros(len(tree.nodes), int) for tree in chunk]
    total, asked = ([np.zeros(len(tree.nodes), int) for tree in chunk] for _ in range(2))
    more = [np.where(outcome, 0, config.k) for outcome in known]
    while any(n.any() for n in more):
        places = [(t, i) for t, n in enumerate(more) for i in np.flatnonzero(n)]
        requests = [(prefixes[t][i], config.seed + int(asked[t][i]), int(more[t][i])) for t, i in places]
        for (t, i), samples in zip(places, rollouts.draw(requests), strict=True):
            asked[t][i] += more[t][i]
            total[t][i] += len(samples)
            right[t][i] += sum(grader(prefixes[t][i], sample, chunk[t].answer) for sample in samples)
        more = [_more(config, right[t], total[t], asked[t], known[t]) for t in range(len(chunk))]
    return [_labelled(tree, right[t], total[t], known[t], config) for t, tree in enumerate(chunk)]


def _more(config: MonteCarloConfig, right, total, asked, known):
    if config.adaptive is None:
        return np.zeros_like(total)
    adaptive, open_ = config.adaptive, ~known
    more = np.zeros_like(total)
    more[open_] = allocate(
        right[open_],
        total[open_],
        threshold=adaptive.threshold,
        k=config.k,
        most=adaptive.most,
        budget=int(adaptive.mean * open_.sum()) - int(asked.sum()),
        z=config.z,
    )
    return np.minimum(more, np.maximum(adaptive.most - asked, 0))  # failed rollouts count, so that rounds end


def _labelled(tree: ReasoningTree, right, total, known, config: MonteCarloConfig) -> ReasoningTree:
    value = {"soft": soft, "hard": hard}[config.estimate](right, total)
    low, high = wilson(right, total, config.z)
    nodes = []
    for i, node in enumerate(tree.nodes):
        extra = dict(node.extra) | {"rollouts": int(total[i]), "right": int(right[i])}
        if known[i]:
            label = float(bool(node.correct))
        else:
            label = None if np.isnan(value[i]) else float(value[i])
            extra |= {"low": round(float(low[i]), 6), "high": round(float(high[i]), 6)}
        origin = ORIGIN if label is not None else None
        nodes.append(dataclasses.replace(node, label=label, origin=origin, extra=extra))
    return dataclasses.replace(
        tree, nodes=tuple(nodes), semantics="value", kind="tree", extra=without_chain(tree.extra)
    )
