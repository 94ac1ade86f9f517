"""Scores of trees whose beginnings were scored before: only the tokens after them are computed.

Keys, values and hidden states of a fixed number of tokens stay on the device, each token in a slot.
A caller's tokens form a trie: a slot is found by the slot of the token before it and the token's id. When slots run
out, those that were used least recently are taken, a branch's end before its beginning. Callers share nothing, so that
none learns from the time of an answer what another has scored.

    cache = PrefixCache(prm, slots=4096)
    outputs, cached = cache.outputs_of(tree_of({"problem": "What is 2 + 2?", "steps": ["2 + 2 = 4."]}), "me")
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Float, Int

from jprm.model.config import ModelConfig
from jprm.model.heads import Readout
from jprm.model.mesh import put_rows, spec
from jprm.score.live import Pool, check, empty_pool, extended, logits_of
from jprm.score.scorer import PRM, check_finite
from jprm.token_tree import TokenTree, geometry, token_tree, tokens_above
from jprm.tree import ReasoningTree

TOKENS = 64
"""New tokens of one call, padding included: an edit is rarely longer."""

SHORTEST_PATH = 256
"""Least tokens that paths are padded to; longer ones to four times as many, sixteen times, ..., to compile little."""


class PrefixCache:
    """A pool of `slots` tokens, from which trees are scored with a PRM's scores, to rounding.

    Raises NotImplementedError for a model that cannot be decoded with a cache.
    """

    def __init__(self, prm: PRM, slots: int):
        check(prm)
        self._prm, self.slots = prm, slots
        self._clear()

    def _clear(self) -> None:
        with jax.set_mesh(self._prm.mesh):
            self._pool = empty_pool(self._prm.config, self.slots)
        self._slot: dict[tuple[Hashable, int], int] = {}  # (slot before, or the caller; token id) -> slot
        self._key: dict[int, tuple[Hashable, int]] = {}  # the other way
        self._free = list(range(self.slots))
        self._used_S, self._depth_S = np.zeros(self.slots, np.int64), np.zeros(self.slots, np.int64)
        self._now = 0  # counts calls: when a slot was used

    def outputs_of(self, tree: ReasoningTree, caller: str) -> tuple[dict[str, Float[np.ndarray, " N"]], int]:
        """Returns a tree's named outputs, as `PRM.outputs_of`, and how many of its tokens were not computed again.

        Raises ValueError for a tree of more tokens than the pool has slots, else as `PRM.outputs_of`.
        """
        tokens = token_tree(tree, self._prm.layout)
        shape = geometry(tokens.length_R, tokens.parent_R)
        if (total := len(tokens.tokens_N)) > self.slots:
            raise ValueError(f"problem {tokens.name!r}: {total:,} tokens, and the cache of prefixes has {self.slots:,}")
        self._prm.check_length(int(shape.depth_R.max(initial=0)), f"problem {tokens.name!r}")
        slot_N, above_N = self._found(tokens, caller)
        new = np.flatnonzero(slot_N < 0).tolist()
        slot_N[new] = self._taken(len(new))
        try:
            for some in _segments(new, above_N):
                self._compute(tokens.tokens_N, slot_N, above_N, some)
            outputs_M = self._read(slot_N[shape.stop_R[tokens.run_M] - 1], tokens.above_M)
        except Exception:  # the pool was given to the device, and may be lost
            self._clear()
            raise
        for n in new:
            key = (int(slot_N[above_N[n]]) if above_N[n] >= 0 else caller, int(tokens.tokens_N[n]))
            self._slot[key], self._key[int(slot_N[n])] = int(slot_N[n]), key
        self._used_S[slot_N], self._depth_S[slot_N] = self._now, shape.position_N
        at_N = np.argsort(tokens.node_M)  # every node is one of the steps
        outputs = {name: value_M[at_N] for name, value_M in outputs_M.items()}
        for name, value_N in outputs.items():
            check_finite(tree, name, value_N)
        return outputs, total - len(new)

    def warm_up(self) -> None:
        """Compiles everything that `outputs_of` needs."""
        for S in _path_sizes(self.slots):
            path_N = np.zeros(min(S, self.slots), np.int64)
            self._run(np.zeros(0, np.int32), np.zeros(0, np.int64), path_N)
            self._read(path_N, path_N - 1)

    def _found(self, tokens: TokenTree, caller: str) -> tuple[Int[np.ndarray, " N"], list[int]]:
        """Returns the slot of every token, -1 for a new one, and the index of the token before each."""
        self._now += 1
        above_N, slots = tokens_above(tokens).tolist(), []
        for above, token in zip(above_N, tokens.tokens_N.tolist(), strict=True):
            slots.append(self._slot.get((slots[above] if above >= 0 else caller, token), -1))
        slot_N = np.array(slots, np.int64)
        self._used_S[slot_N[slot_N >= 0]] = self._now
        return slot_N, above_N

    def _taken(self, count: int) -> list[int]:
        """Returns slots for so many new tokens: free ones, then those used least recently.

        A token is used whenever one after it is, so by use, then by depth, no token goes before one that follows it.
        """
        if (missing := count - len(self._free)) > 0:
            kept = np.array([slot for slot in self._key if self._used_S[slot] < self._now], np.int64)
            for slot in kept[np.lexsort((-self._depth_S[kept], self._used_S[kept]))][:missing].tolist():
                del self._slot[self._key.pop(slot)]
                self._free.append(slot)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _compute(self, tokens_N: np.ndarray, slot_N: np.ndarray, above_N: Sequence[int], some: list[int]) -> None:
        """Computes consecutive tokens of one chain after all that stand before them."""
        path, n = [], some[0]
        while (n := above_N[n]) >= 0:
            path.append(n)
        self._run(tokens_N[some], slot_N[some], slot_N[path[::-1]])

    def _run(self, tokens_N: np.ndarray, slot_N: np.ndarray, path_N: np.ndarray) -> None:
        """Computes TOKENS tokens, of which the first are these; keys, values and states go to the slots."""
        mesh, S = self._prm.mesh, _path_sizes(len(path_N))[-1]
        P = mesh.shape["data"] * mesh.shape["fsdp"]  # every device has a row, and the first row is not padding
        tokens_PT, place_PT = np.zeros((P, TOKENS), np.int32), np.full((P, TOKENS), self.slots, np.int32)
        path_PS, above_P = np.zeros((P, S), np.int32), np.zeros(P, np.int32)
        tokens_PT[0, : len(tokens_N)], place_PT[0, : len(slot_N)] = tokens_N, slot_N
        path_PS[0, : len(path_N)], above_P[0] = path_N, len(path_N)
        with jax.set_mesh(mesh):
            rows = put_rows((tokens_PT, path_PS, above_P), mesh)
            place_PT = jax.device_put(place_PT, NamedSharding(mesh, spec()))
            self._pool = _extend(self._prm.params, self._prm.config, self._pool, *rows, place_PT)

    def _read(self, end_M: np.ndarray, parent_M: np.ndarray) -> dict[str, Float[np.ndarray, " M"]]:
        """Returns the named outputs of steps that end in these slots; `parent_M` is the index of the step before."""
        mesh, S = self._prm.mesh, _path_sizes(len(end_M))[-1]
        P = mesh.shape["data"] * mesh.shape["fsdp"]  # as in `_run`
        end_PS, parent_PS = np.zeros((P, S), np.int32), np.full((P, S), -1, np.int32)
        end_PS[0, : len(end_M)], parent_PS[0, : len(end_M)] = end_M, parent_M
        with jax.set_mesh(mesh):
            rows = put_rows((end_PS, parent_PS), mesh)
            outputs = _outputs(self._prm.params, self._prm.config, self._prm.readout, self._pool, *rows)
        return {name: np.asarray(value_PS)[0, : len(end_M)] for name, value_PS in outputs.items()}


def _path_sizes(tokens: int) -> list[int]:
    """Returns the sizes that paths of up to so many tokens are padded to."""
    sizes = [SHORTEST_PATH]
    while sizes[-1] < tokens:
        sizes.append(4 * sizes[-1])
    return sizes


def _segments(new: Sequence[int], above_N: Sequence[int]) -> Iterator[list[int]]:
    """Yields the new tokens in pieces of up to TOKENS; each token of a piece follows the one before it."""
    some: list[int] = []
    for n in new:
        if some and (above_N[n] != some[-1] or len(some) == TOKENS):
            yield some
            some = []
        some.append(n)
    if some:
        yield some


_extend = jax.jit(extended, static_argnums=1, donate_argnums=2)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _outputs(params, config: ModelConfig, readout: Readout, pool: Pool, end_PS, parent_PS):
    """Returns the outputs (P, S) by name of steps that end in these slots."""
    return readout(logits_of(params, config, pool, end_PS, parent_PS))
