"""Scores from several processes: each computes its chunks on its own devices, and every one gets all, in order.

A chunk is what one process would pack together too, so that the scores are the same bits; and since the chunks of a
round are neighbours, what is written is always the beginning of the whole. A model must fit the devices of one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jprm.score.scorer import CHUNK, PRM, scored
from jprm.tree import ReasoningTree, tree_of


def score_many(prm: PRM, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """`prm.score_many`, which every process calls with the same records."""
    if jax.process_count() == 1:
        yield from prm.score_many(records)
        return
    records = iter(records)
    while some := list(itertools.islice(records, CHUNK * jax.process_count())):
        trees = [tree_of(record) for record in some]
        for record, tree, score_N in zip(some, trees, _scores(prm, trees), strict=True):
            yield scored(record, tree, score_N)


def _scores(prm: PRM, trees: Sequence[ReasoningTree]) -> list[np.ndarray]:
    """(N,) float32 for each tree of N nodes, of at most one chunk a process.

    Raises what this process's chunk raises, and ValueError where that of another did: none waits for it.
    """
    chunks = [trees[i : i + CHUNK] for i in range(0, len(trees), CHUNK)]
    sizes = [sum(len(tree.nodes) for tree in chunk) for chunk in chunks]
    own, failure = jax.process_index(), None
    flat = np.zeros(1 + max(sizes), np.float32)  # the first number says whether the others can be used
    try:
        if own < len(chunks):
            flat[1 : 1 + sizes[own]] = np.concatenate(prm.score_trees(chunks[own]))
    except Exception as error:
        flat[0], failure = 1, error
    all_CX = multihost_utils.process_allgather(flat)
    if failure:
        raise failure
    if all_CX[:, 0].any():
        raise ValueError(f"process {int(np.argmax(all_CX[:, 0]))} could not score its records; it says why itself")
    scores = np.concatenate([all_CX[c, 1 : 1 + size] for c, size in enumerate(sizes)])
    return np.split(scores, np.cumsum([len(tree.nodes) for tree in trees])[:-1])
