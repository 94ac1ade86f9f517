"""Batches from several streams of packed rows: each process packs only the rows that its devices compute.

Stream k of n packs every n-th window and fills the k-th of n equal blocks of rows of every micro-batch. A batch is
therefore a function of (seed, step, n), whatever the number of processes. With n = 1 every process packs everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jprm import multihost
from jprm.data.pipeline import COUNTS
from jprm.model.mesh import spec
from jprm.pack import PackReport
from jprm.rows import Rows


class Streams:
    """Iterates over Rows of shape (A, B, ...), A micro-batches of B rows, from the `own` streams of `count`.

    A stream gives A x B / count rows at a time, with the counts of packing them (`jprm.data.pipeline.counted_batches`).
    The rows of other processes' streams are zeros.
    """

    def __init__(self, own: Mapping[int, grain.IterDataset], count: int, micro_rows: int):
        self._count, self._micro_rows = count, micro_rows
        self._own = {k: iter(stream) for k, stream in own.items()}
        self._counts = {k: np.zeros(len(COUNTS), np.int64) for k in own}

    def __iter__(self) -> Streams:
        return self

    def __next__(self) -> Rows:
        block = self._micro_rows // self._count
        parts = {}
        for k, stream in self._own.items():
            parts[k], count_rK = next(stream)
            self._counts[k] = self._counts[k] + count_rK.sum(axis=0)

        def put(*parts_rX: np.ndarray) -> np.ndarray:
            first = np.asarray(parts_rX[0])
            all_ABX = np.zeros((len(first) // block, self._micro_rows, *first.shape[1:]), first.dtype)
            for k, part_rX in zip(parts, parts_rX, strict=True):
                all_ABX[:, k * block : (k + 1) * block] = np.reshape(part_rX, (-1, block, *first.shape[1:]))
            return all_ABX

        return jax.tree.map(put, *parts.values())

    @property
    def report(self) -> PackReport:
        """What all streams have packed since training began. Every process asks for it."""
        counts = self._shared({k: count_K.tolist() for k, count_K in self._counts.items()})
        return sum((PackReport(*count_K) for count_K in counts), start=PackReport())

    def get_state(self) -> dict[str, Any]:
        """Returns the positions of all streams as JSON, for any number of processes. Every process calls this."""
        places = self._shared({k: stream.get_state() for k, stream in self._own.items()})
        return {"streams": places, "counts": self._shared({k: count.tolist() for k, count in self._counts.items()})}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from the positions of all streams. Runs of version 0.1 kept no counts."""
        for k, stream in self._own.items():
            stream.set_state(state["streams"][k])
            if "counts" in state:
                self._counts[k] = np.array(state["counts"][k])

    def _shared(self, own: dict[int, Any]) -> list[Any]:
        """Returns what each stream has, of all processes'; two may own one stream, and have the same."""
        found = {int(k): value for some in multihost.shared(own) for k, value in some.items()}
        return [found[k] for k in range(self._count)]


def own_streams(mesh: Mesh, micro_rows: int, count: int) -> list[int]:
    """Returns the streams of `count` that have rows on this process's devices."""
    place, block = NamedSharding(mesh, spec("batch")), micro_rows // count
    owned: set[int] = set()
    for (rows,) in filter(None, place.addressable_devices_indices_map((micro_rows,)).values()):
        first, stop, _ = rows.indices(micro_rows)
        owned |= set(range(first // block, (stop - 1) // block + 1))
    return sorted(owned)
