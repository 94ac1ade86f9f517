"""Scores of trees that grow while a search goes on: every token is computed once.

The keys, values and hidden states of all live tokens are in slots on the device, a step's wherever there was room. A
new step is computed against the slots of its path, gathered by index, and stored in free slots. Slots of steps that a
search has released are used again.

    trees = LiveTrees(jprm.load("runs/prm800k_smollm2"))
    roots = trees.open(["What is 2 + 2 * 3?"])
    handles, scores = trees.extend([roots[0], roots[0]], ["2 * 3 = 6.", "2 + 2 = 4."])
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from jprm.model import decode
from jprm.model.config import ModelConfig
from jprm.model.heads import Output, find
from jprm.model.mesh import put_rows, sharding, spec
from jprm.model.transformer import logits_at_steps
from jprm.rows import at_slots
from jprm.score.scorer import PRM

SLOTS = 4096
"""Slots at first, one a token; doubled whenever they are full."""

TOKENS, CALL = 1024, 32
"""New tokens computed at once, padding included, unless one step is longer; and how many padded tokens one call less is
worth. (With SmolLM2-135M a call reads 540 MB of weights, in 30 to 50 ms on 2 cores; a token takes 1.5 ms.)"""

SHORTEST_STEP, SHORTEST_PATH, SHORTEST_CHAIN = 16, 128, 16
"""Least tokens that steps and paths are padded to, and least steps that chains are, where the model has a step layer.
All are powers of two, so that few shapes are compiled."""


@dataclasses.dataclass
class _Node:
    parent: int  # -1: a problem
    depth: int  # steps on its path, its own included
    slots: np.ndarray  # of its own tokens, in order
    children: int = 0
    live: bool = True  # not released


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pool:
    """What is kept of the tokens in N slots, on every device: keys and values, and states after the final norm."""

    cache: decode.Cache
    x_ND: Float[Array, "N D"]


def check(prm: PRM) -> None:
    """Raises NotImplementedError for a model whose keys and values cannot be kept."""
    if find(prm.config.head).readout is None:
        raise NotImplementedError(f"head={prm.config.head!r}: live trees are scored by models with a step head")
    if prm.ratio is not None:
        raise NotImplementedError(f"{prm.name}: an implicit PRM is two models, and live trees are kept for one")
    if prm.config.steps and prm.layout.last("step", 0) is not None:
        raise NotImplementedError(f"{prm.name}: model.steps needs the end of every step, and its layout ends chains")


class LiveTrees:
    """A scorer of live trees with a PRM's scores: those of `prm.score_many`, to rounding. See `jprm.methods.search`.

    Attributes:
      tokens: computed so far, padding left out: those of each problem and of each step once.

    Raises NotImplementedError for a model that cannot be decoded with a cache.
    """

    def __init__(self, prm: PRM):
        check(prm)
        self._prm, self.scale, self.semantics = prm, prm.scale, prm.semantics
        self.tokens = 0
        self._nodes: dict[int, _Node] = {}
        self._next = 0
        self._free = np.arange(SLOTS)
        self._size = SLOTS
        with jax.set_mesh(prm.mesh):
            self._pool = empty_pool(prm.config, SLOTS)

    def open(self, problems: Sequence[str]) -> list[int]:
        """Computes the problems' tokens; returns a handle for each root."""
        return self._append([-1] * len(problems), [self._prm.layout.problem(problem) for problem in problems])[0]

    def extend(self, parents: Sequence[int], steps: Sequence[str]) -> tuple[list[int], Float[np.ndarray, " P"]]:
        """Appends steps[i] below parents[i]; returns the new handles and (P,) float32 scores.

        Raises:
          ValueError: a parent that does not exist or was released, a step without tokens, a chain longer than the
            model's context.
          FloatingPointError: a score that is not finite.
        """
        for parent in parents:
            if parent not in self._nodes or not self._nodes[parent].live:
                raise ValueError(f"handle {parent} is not there, or was released: extend only what is live")
        layout, depths = self._prm.layout, [self._nodes[parent].depth for parent in parents]
        places = list(zip(steps, depths, strict=True))
        ids = [layout.step(*place) for place in places]
        if [] in ids:
            raise ValueError(f"step {steps[ids.index([])]!r}: the layout gives it no tokens. Drop empty steps")
        lasts = [last for place in places if (last := layout.last(*place)) is not None]
        handles, score_P = self._append([*parents, *parents[: len(lasts)]], ids + lasts)
        if lasts:  # each step is read where its chain would end with it, and continued without that end
            self.release(handles[len(ids) :])
            handles, score_P = handles[: len(ids)], score_P[len(ids) :]
        if not np.isfinite(score_P).all():
            step = steps[int(np.argmin(np.isfinite(score_P)))]
            self.release(handles)
            raise FloatingPointError(
                f"step {step[:60]!r}: the model's score is not finite; its checkpoint (or a bfloat16 overflow) is at"
                " fault: use an earlier checkpoint or float32"
            )
        return handles, score_P

    def release(self, handles: Sequence[int]) -> None:
        """Frees the slots of these handles that no live descendant needs; they cannot be extended again."""
        for handle in handles:
            if handle in self._nodes:
                self._nodes[handle].live = False
                self._drop(handle)

    def _drop(self, handle: int) -> None:
        """Frees a node that is neither live nor an ancestor, then its parent likewise."""
        freed = []
        while handle >= 0 and not (node := self._nodes[handle]).live and not node.children:
            freed.append(node.slots)
            del self._nodes[handle]
            handle = node.parent
            if handle >= 0:
                self._nodes[handle].children -= 1
        self._free = np.concatenate([self._free, *freed])

    def _append(self, parents: Sequence[int], ids: Sequence[Sequence[int]]) -> tuple[list[int], np.ndarray]:
        lengths = [len(x) for x in ids]
        needed = sum(lengths)
        paths, ends = [self._path(parent) for parent in parents], [self._ends(parent) for parent in parents]
        for path, length in zip(paths, lengths, strict=True):
            self._prm.check_length(len(path) + length, "a live tree")
        with jax.set_mesh(self._prm.mesh):
            while needed > len(self._free):
                self._pool = _doubled(self._pool)
                self._free = np.concatenate([self._free, np.arange(self._size, 2 * self._size)])
                self._size *= 2
            taken, self._free = np.split(self._free, [needed])
            slots = np.split(taken, np.cumsum(lengths)[:-1]) if ids else []
            score_P = np.zeros(len(ids), np.float32)
            for some in self._batches(lengths, [len(path) for path in paths]):
                score_P[some] = self._compute(*([x[i] for i in some] for x in (ids, slots, paths, ends)))
        self.tokens += needed
        handles = list(range(self._next, self._next + len(ids)))
        self._next += len(ids)
        for handle, parent, own in zip(handles, parents, slots, strict=True):
            depth = 0
            if parent >= 0:
                self._nodes[parent].children += 1
                depth = self._nodes[parent].depth + 1
            self._nodes[handle] = _Node(parent, depth, own)
        return handles, score_P

    def _path(self, handle: int) -> np.ndarray:
        """Returns the slots of all tokens from the problem's first to the node's last."""
        parts = [np.zeros(0, np.int64)]
        while handle >= 0:
            parts.append(self._nodes[handle].slots)
            handle = self._nodes[handle].parent
        return np.concatenate(parts[::-1])

    def _ends(self, handle: int) -> list[int]:
        """Returns the slots of the last tokens of all steps on the path; [] for a model that reads each step alone."""
        ends: list[int] = []
        while self._prm.config.steps and handle >= 0 and (node := self._nodes[handle]).depth:
            ends.append(int(node.slots[-1]))
            handle = node.parent
        return ends[::-1]

    def _batches(self, lengths: Sequence[int], depths: Sequence[int]) -> Iterator[list[int]]:
        """Yields indices of steps of similar length to compute together, in the fewest tokens and calls."""
        order = sorted(range(len(lengths)), key=lambda i: (lengths[i], depths[i]))
        best, start = [0], [0]  # cost of the first n steps of the order, and where the last of their batches starts
        for n, i in enumerate(order, 1):
            T, costs = _power(lengths[i], SHORTEST_STEP), {}
            for first in reversed(range(n)):
                cells = self._rows(n - first) * T
                if costs and cells > TOKENS:
                    break
                costs[first] = best[first] + cells + CALL
            start.append(min(costs, key=lambda first: costs[first]))
            best.append(costs[start[-1]])
        n = len(order)
        while n:
            yield order[start[n] : n]
            n = start[n]

    def _rows(self, count: int) -> int:
        """Returns the rows of a batch: a power of two for each device."""
        devices = self._prm.mesh.shape["data"] * self._prm.mesh.shape["fsdp"]
        return devices * _power(-(-count // devices), 1)

    def _compute(self, ids, slots, paths, ends) -> np.ndarray:
        P, T = self._rows(len(ids)), _power(max(map(len, ids)), SHORTEST_STEP)
        S = _power(max(map(len, paths)), SHORTEST_PATH)
        tokens_PT, place_PT = np.zeros((P, T), np.int32), np.full((P, T), self._size, np.int32)  # padding: nowhere
        E = _power(max(map(len, ends)) + 1, SHORTEST_CHAIN) if self._prm.config.steps else 1
        path_PS, above_P = np.zeros((P, S), np.int32), np.zeros(P, np.int32)
        end_PE, depth_P = np.zeros((P, E), np.int32), np.zeros(P, np.int32)
        for p, (own, slot, path, before) in enumerate(zip(ids, slots, paths, ends, strict=True)):
            tokens_PT[p, : len(own)], place_PT[p, : len(own)] = own, slot
            path_PS[p, : len(path)], above_P[p] = path, len(path)
            end_PE[p, : len(before) + 1], depth_P[p] = [*before, *slot[-1:]], len(before)
        rows = put_rows((tokens_PT, path_PS, above_P, end_PE, depth_P), self._prm.mesh)
        place_PT = jax.device_put(place_PT, NamedSharding(self._prm.mesh, spec()))
        self._pool, score_P = _extend(
            self._prm.params, self._prm.config, self._prm.readout.score, self._pool, *rows, place_PT
        )
        return np.asarray(score_P)[: len(ids)]


@functools.partial(jax.jit, static_argnums=(1, 2), donate_argnums=3)
def _extend(
    params, config: ModelConfig, score: Output, pool: Pool, tokens_PT, path_PS, above_P, end_PE, depth_P, place_PT
):
    """Returns the pool with the new tokens in their slots, and the scores of the new steps.

    Args:
      end_PE: the slots of the ends of each chain's steps; the new step is at `depth_P`, and padding follows it.
    """
    pool = extended(params, config, pool, tokens_PT, path_PS, above_P, place_PT)
    step_E = jnp.arange(end_PE.shape[1])
    logit_PEC = logits_of(params, config, pool, end_PE, jnp.where(step_E <= depth_P[:, None], step_E - 1, -1))
    return pool, score(at_slots(logit_PEC, depth_P[:, None]))[:, 0]


def extended(params, config: ModelConfig, pool: Pool, tokens_PT, path_PS, above_P, place_PT) -> Pool:
    """Returns the pool with the new tokens' keys, values and states in their slots.

    Args:
      path_PS: the slots of the tokens before each row's first new one; the first `above_P` of them count.
      place_PT: the slots of the new tokens; padding has one beyond the pool.
    """
    past = decode.Past(pool.cache, jnp.arange(path_PS.shape[1]) < above_P[:, None], path_PS)
    x_PTD, new = decode.forward(params, config, tokens_PT, above_P[:, None] + jnp.arange(tokens_PT.shape[1]), past)

    def put(slots_NKH, x_PKTH):
        """Writes the keys or values of a layer, or of a group of layers, into their slots."""
        place = spec(*[None] * (x_PKTH.ndim - 2), "kv_heads", None)
        x_PTKH = jax.sharding.reshard(x_PKTH.swapaxes(-3, -2), place)  # every device keeps all slots
        return slots_NKH.at[..., place_PT, :, :].set(x_PTKH, mode="drop")

    x_ND = pool.x_ND.at[place_PT].set(jax.sharding.reshard(x_PTD, spec(None, None, None)), mode="drop")
    return Pool(jax.tree.map(put, pool.cache, new), x_ND)


def logits_of(
    params, config: ModelConfig, pool: Pool, end_PE: Int[Array, "P E"], parent_PE: Int[Array, "P E"]
) -> Float[Array, "P E C"]:
    """Returns the logits of steps that end in these slots, each after the step in place `parent_PE` of its row."""
    x_PED = pool.x_ND.at[end_PE].get(out_sharding=sharding("batch", None, None))
    return logits_at_steps(params, config, x_PED, parent_PE)


@functools.partial(jax.jit, static_argnums=(0, 1))
def empty_pool(config: ModelConfig, slots: int) -> Pool:
    """Returns a pool of zeros."""
    x_ND = jnp.zeros((slots, config.width), config.dtype, out_sharding=sharding(None, None))
    return Pool(decode.empty_slots(config, slots), x_ND)


@jax.jit
def _doubled(pool: Pool) -> Pool:
    def double(x, slots: int):
        return jnp.pad(x, [(0, x.shape[axis] if axis == slots % x.ndim else 0) for axis in range(x.ndim)])

    return Pool(jax.tree.map(lambda x: double(x, -3), pool.cache), double(pool.x_ND, 0))


def _power(n: int, least: int) -> int:
    """Returns the least power of two that is at least n and `least`."""
    return 1 << (max(n, least) - 1).bit_length()
