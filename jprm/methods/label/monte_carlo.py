"""Monte Carlo values: the fraction of k completions of a prefix that a verifier accepts.

Math-Shepherd (arXiv:2312.08935) calls the fraction the soft estimate and "any of them does" the hard one. The adaptive
mode samples further rollouts while the confidence interval holds the threshold between correct and incorrect. There the
soft estimate and the interval are those of `jprm.methods.label.sequential`, and the hard estimate is of the first k
rollouts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Bool, Float, Int

from jprm.methods.label.config import MonteCarloConfig
from jprm.methods.label.rollouts import Rollouts
from jprm.methods.label.sequential import confidence_sequence, unbiased, undecided
from jprm.methods.policy.protocol import Prefix
from jprm.methods.verify import verifiers
from jprm.tree import ReasoningTree, with_labels

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


def allocate(
    open_S: Bool[np.ndarray, " S"], asked_S: Int[np.ndarray, " S"], *, k: int, most: int, budget: int, seed: int
) -> Int[np.ndarray, " S"]:
    """Returns how many rollouts each of S prefixes gets in the next round.

    An open prefix gets at most k, at most `most` in all its rounds, and all together at most the budget. The seed
    decides which come first. Their outcomes must not, or estimates would be biased.
    """
    wanted_S = np.where(open_S, np.clip(most - asked_S, 0, k), 0)
    order_S = np.random.default_rng(seed).permutation(len(wanted_S))
    before_S = np.cumsum(wanted_S[order_S]) - wanted_S[order_S]
    given_S = np.zeros_like(wanted_S)
    given_S[order_S] = np.clip(budget - before_S, 0, wanted_S[order_S])
    return given_S


def label_trees(
    trees: Iterable[ReasoningTree], rollouts: Rollouts, config: MonteCarloConfig
) -> Iterator[ReasoningTree]:
    """Yields the trees with a value on every node, in order.

    A node's `extra` has the number of `rollouts` and of `right` ones, and the interval from `low` to `high`. Adaptive
    labels are no function of the two: those of the first k rollouts are `first_rollouts` and `first_right`. A leaf of
    known outcome has it as its value and needs no rollout. A node whose rollouts all failed is unlabelled.

    Raises:
      RecordError: a tree that the verifier cannot judge.
      PolicyError: a policy that gives nothing.
    """
    trees, verifier = iter(trees), verifiers.find(config.verifier)
    while chunk := list(itertools.islice(trees, config.trees_at_once)):
        records = [verifiers.record_of_problem(tree) for tree in chunk]
        for record in records:
            verifier.check(record, f"problem {record['problem'][:80]!r}")
        yield from _label_chunk(chunk, records, rollouts, config, verifier)


def prefixes_of(tree: ReasoningTree) -> list[Prefix]:
    """Returns the prefix that ends with each node."""
    prefixes: list[Prefix] = []
    for node in tree.nodes:
        before = prefixes[node.parent].steps if node.parent >= 0 else ()
        prefixes.append(Prefix(tree.plain_problem, (*before, node.text)))
    return prefixes


@dataclasses.dataclass
class _Counts:
    """Rollouts of a tree's N nodes. `asked` includes failed ones; `rounds` has (right, total) after every round."""

    known_N: Bool[np.ndarray, " N"]
    asked_N: Int[np.ndarray, " N"]
    right_N: Int[np.ndarray, " N"]
    total_N: Int[np.ndarray, " N"]
    rounds: list[tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]] = dataclasses.field(default_factory=list)


def _counts(tree: ReasoningTree) -> _Counts:
    inner = {node.parent for node in tree.nodes}
    known = [node.correct is not None and i not in inner for i, node in enumerate(tree.nodes)]
    none_N = np.zeros(len(known), int)
    return _Counts(np.array(known), none_N, none_N.copy(), none_N.copy())


def _label_chunk(chunk, records, rollouts, config, verifier):
    prefixes = [prefixes_of(tree) for tree in chunk]
    counts = [_counts(tree) for tree in chunk]
    more = [np.where(each.known_N, 0, config.k) for each in counts]
    while any(n.any() for n in more):
        places = [(t, i) for t, n in enumerate(more) for i in np.flatnonzero(n)]
        requests = [(prefixes[t][i], config.seed + int(counts[t].asked_N[i]), int(more[t][i])) for t, i in places]
        drawn = rollouts.draw(requests)
        accepted = verifier.accepts([(records[t], prefixes[t][i], s) for (t, i), s in zip(places, drawn, strict=True)])
        for (t, i), right in zip(places, accepted, strict=True):
            counts[t].asked_N[i] += more[t][i]
            counts[t].total_N[i] += len(right)
            counts[t].right_N[i] += sum(right)
        for each in counts:
            each.rounds.append((each.right_N.copy(), each.total_N.copy()))
        more = [_more(config, each) for each in counts]
    return [_labelled(tree, each, config) for tree, each in zip(chunk, counts, strict=True)]


def _more(config: MonteCarloConfig, counts: _Counts) -> Int[np.ndarray, " N"]:
    if config.adaptive is None:
        return np.zeros_like(counts.total_N)
    adaptive, sampled_N = config.adaptive, ~counts.known_N
    return allocate(
        sampled_N & undecided(counts.right_N, counts.total_N, adaptive.threshold, config.z),
        counts.asked_N,
        k=config.k,
        most=adaptive.most,
        budget=int(adaptive.mean * sampled_N.sum()) - int(counts.asked_N.sum()),
        seed=config.seed,
    )


def _estimates(counts: _Counts, config: MonteCarloConfig) -> Float[np.ndarray, " N"]:
    right_N, total_N = counts.rounds[0] if counts.rounds else (counts.right_N, counts.total_N)
    if config.estimate == "hard":
        return hard(right_N, total_N)
    value_N = soft(counts.right_N, counts.total_N)
    if config.adaptive is None:
        return value_N
    for i in np.flatnonzero(counts.total_N > total_N):
        totals = tuple(sorted({int(total[i]) for _, total in counts.rounds} - {0}))
        value_N[i] = unbiased(int(counts.right_N[i]), totals, config.adaptive.threshold, config.z)
    return value_N


def _labelled(tree: ReasoningTree, counts: _Counts, config: MonteCarloConfig) -> ReasoningTree:
    value_N = _estimates(counts, config)
    interval = wilson if config.adaptive is None else confidence_sequence
    low_N, high_N = interval(counts.right_N, counts.total_N, config.z)
    labels, notes = [], []
    for i, node in enumerate(tree.nodes):
        note = {"rollouts": int(counts.total_N[i]), "right": int(counts.right_N[i])}
        if counts.known_N[i]:
            label = float(bool(node.correct))
        else:
            label = None if np.isnan(value_N[i]) else float(value_N[i])
            note |= {"low": round(float(low_N[i]), 6), "high": round(float(high_N[i]), 6)}
            if config.adaptive is not None:
                right_N, total_N = counts.rounds[0]
                note |= {"first_rollouts": int(total_N[i]), "first_right": int(right_N[i])}
        labels.append(label)
        notes.append(note)
    return with_labels(tree, labels, "value", ORIGIN, notes)
