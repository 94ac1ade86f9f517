"""Scores from several processes: each computes its chunks on its own devices, and every process gets all, in order.

A chunk is what one process would pack together too, so the scores are the same bits. The chunks of a round are
neighbours, so what is written is always a beginning of the whole. A model must fit the devices of one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jprm.score.in_flight import Speed
from jprm.score.records import scored
from jprm.score.scorer import CHUNK, PRM, Scorer
from jprm.tree import ReasoningTree, tree_of


def score_many(
    prm: PRM | Scorer, records: Iterable[dict[str, Any]], speed: Speed | None = None
) -> Iterator[dict[str, Any]]:
    """Yields what `prm.score_many` does. Every process calls it with the same records.

    `speed` counts a PRM's work in one process; several processes wait for each other instead.
    """
    if jax.process_count() == 1:
        yield from prm.score_many(records, speed) if isinstance(prm, PRM) else prm.score_many(records)
        return
    if not isinstance(prm, PRM):
        raise ValueError(f"{prm.name}: scores in one process")
    records = iter(records)
    while some := list(itertools.islice(records, CHUNK * jax.process_count())):
        trees = [tree_of(record) for record in some]
        for record, tree, outputs in zip(some, trees, _outputs(prm, trees), strict=True):
            yield scored(record, tree, outputs)


def _outputs(prm: PRM, trees: Sequence[ReasoningTree]) -> Iterator[dict[str, np.ndarray]]:
    """Yields the named outputs of each tree, (N,) float32, of at most one chunk a process.

    Raises what this process's chunk raises, and ValueError where another process's did, so that none waits for it.
    """
    chunks = [trees[i : i + CHUNK] for i in range(0, len(trees), CHUNK)]
    sizes = [sum(len(tree.nodes) for tree in chunk) for chunk in chunks]
    own, failure, names = jax.process_index(), None, prm.output_names
    own_OX = np.zeros((len(names), 1 + max(sizes)), np.float32)  # the first column: whether this process failed
    try:
        if own < len(chunks):
            found = prm.outputs_of(chunks[own])
            own_OX[:, 1 : 1 + sizes[own]] = [np.concatenate([outputs[name] for outputs in found]) for name in names]
    except Exception as error:
        own_OX[:, 0], failure = 1, error
    all_COX = multihost_utils.process_allgather(own_OX)
    if failure:
        raise failure
    if all_COX[:, 0, 0].any():
        raise ValueError(f"process {int(np.argmax(all_COX[:, 0, 0]))} could not score its records; see its own error")
    all_OM = np.concatenate([all_COX[c, :, 1 : 1 + size] for c, size in enumerate(sizes)], axis=1)
    for part_ON in np.split(all_OM, np.cumsum([len(tree.nodes) for tree in trees])[:-1], axis=1):
        yield dict(zip(names, part_ON, strict=True))
