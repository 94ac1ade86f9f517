"""Trees' keys and values, kept on the device, so that no token is computed twice.

A token's keys, values and hidden states are in a slot, wherever there was room (`Slots`). New tokens attend to the
slots on their path, gathered by index. Three classes manage slots: `LiveTrees` for searches, which name steps by
handles and release them; `PrefixCache` for a server's callers, who return with trees that begin like earlier ones; and
`jprm.methods.worlds.turns` for conversations that a policy samples.

    trees = LiveTrees(jprm.load("runs/prm800k_smollm2"))
    roots = trees.open(["What is 2 + 2 * 3?"])
    handles, scores = trees.extend([roots[0], roots[0]], ["2 * 3 = 6.", "2 + 2 = 4."])

    cache = PrefixCache(prm, slots=4096)
    outputs, cached = cache.outputs_of(tree_of({"problem": "What is 2 + 2?", "steps": ["2 + 2 = 4."]}), "me")
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from jprm.methods.decoding import decode
from jprm.model.config import ModelConfig
from jprm.model.heads import Readout, find
from jprm.model.mesh import put_rows, row_parts, sharding, spec
from jprm.model.transformer import logits_at_steps
from jprm.rows import padded_size, padded_sizes
from jprm.score.scorer import PRM, check_finite
from jprm.token_tree import TokenTree, geometry, token_tree, tokens_above
from jprm.tree import ReasoningTree, path_to


def check(prm: PRM) -> None:
    """Raises NotImplementedError if trees cannot be scored from cached keys and values.

    Such a PRM has no step head, or is implicit (two models), or its step layer needs a layout that ends no chain.
    """
    if find(prm.config.head).readout is None:
        raise NotImplementedError(f"head={prm.config.head!r}: live trees are scored by models with a step head")
    if prm.ratio is not None:
        raise NotImplementedError(f"{prm.name}: an implicit PRM is two models, and live trees are kept for one")
    if prm.config.steps and prm.layout.last("step", 0) is not None:
        raise NotImplementedError(f"{prm.name}: model.steps needs the end of every step, and its layout ends chains")


class CachedModel(Protocol):
    """A model with cached keys and values: a `PRM` that `check` accepts, or a policy."""

    @property
    def params(self) -> Any: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def mesh(self) -> Mesh: ...


class Slots:
    """Keys, values and hidden states for `size` tokens on a model's devices, one slot per token, numbered from 0.

    For a recurrent model there are also `nodes` places for the states after a tree's nodes. Methods that compute or
    store change the pool in place, and compile each new shape.

    Raises NotImplementedError if a layer cannot decode with a cache, or a recurrent model has `nodes` 0.
    """

    def __init__(self, model: CachedModel, size: int, nodes: int = 0):
        decode.check(model.config)
        self.model, self.size = model, size
        self.nodes = nodes if decode.recurrent(model.config) else 0
        if decode.recurrent(model.config) and not nodes:
            raise NotImplementedError("a recurrent model keeps states after steps, and this cache keeps only tokens")
        self.clear()

    def clear(self) -> None:
        """Frees all slots and places and empties the pool, of unchanged size, e.g. after a failure that lost it."""
        self.free, self.free_states = np.arange(self.size), list(range(self.nodes))
        with jax.set_mesh(self.model.mesh):
            self._pool = empty_pool(self.model.config, self.size, self.nodes)

    def take_state(self) -> int:
        """Takes and returns a free place for a node's state, doubling the places if full; -1 without recurrent states.

        A place is given back by appending it to `free_states`.
        """
        if not self.nodes:
            return -1
        if not self.free_states:
            with jax.set_mesh(self.model.mesh):
                self._pool = _more_states(self.model.config, self._pool)
            self.free_states += range(self.nodes, 2 * self.nodes)
            self.nodes *= 2
        return self.free_states.pop(0)

    def take(self, count: int) -> np.ndarray:
        """Takes and returns `count` free slots, (count,) indices, doubling the pool if too few are free."""
        while count > len(self.free):
            with jax.set_mesh(self.model.mesh):
                self._pool = _doubled(self._pool)
            self.put_back(np.arange(self.size, 2 * self.size))
            self.size *= 2
        taken, self.free = np.split(self.free, [count])
        return taken

    def put_back(self, *slots: np.ndarray) -> None:
        """Frees arrays of slots, which must be taken."""
        self.free = np.concatenate([self.free, *slots])

    def rows(self, count: int) -> int:
        """Returns the padded row count for `count` rows: a power of two per device."""
        devices = row_parts(self.model.mesh)
        return devices * padded_size(-(-count // devices))

    def extend(
        self,
        ids: Sequence[Sequence[int] | np.ndarray],
        slots: Sequence[np.ndarray],
        paths: Sequence[np.ndarray],
        T: int,
        S: int,
        states: Sequence[tuple[int, int]] = (),
        *,
        run: bool = True,
    ) -> None:
        """Computes the tokens ids[p], each row after the tokens in slots paths[p], and stores them in slots[p].

        A path has all earlier tokens, from the first on: a token's position is its place in path and row together.
        Rows are padded to T new tokens and S earlier tokens, and must be no longer. states[p] are the places for the
        row's initial state (-1: none) and final state. Without `run` the program is only compiled.
        """
        P = self.rows(len(ids))
        tokens_PT, place_PT = np.zeros((P, T), np.int32), np.full((P, T), self.size, np.int32)  # padding: nowhere
        path_PS, above_P = np.zeros((P, S), np.int32), np.zeros(P, np.int32)
        for p, (new, slot, path) in enumerate(zip(ids, slots, paths, strict=True)):
            tokens_PT[p, : len(new)], place_PT[p, : len(new)] = new, slot
            path_PS[p, : len(path)], above_P[p] = path, len(path)
        length_P, from_P, to_P = np.zeros(P, np.int32), np.full(P, -1, np.int32), np.full(P, self.nodes, np.int32)
        length_P[: len(ids)] = [len(new) for new in ids]
        for p, (start, after) in enumerate(states):
            from_P[p], to_P[p] = start, after
        mesh = self.model.mesh
        with jax.set_mesh(mesh):
            rows = put_rows((tokens_PT, path_PS, above_P, length_P, from_P), mesh)
            place_PT, to_P = jax.device_put((place_PT, to_P), NamedSharding(mesh, spec()))
            arguments = (self.model.params, self.model.config, self._pool, *rows, place_PT, to_P)
            if run:
                self._pool = _extend(*arguments)
            else:
                _extend.lower(*arguments).compile()

    def past(self, paths: Sequence[np.ndarray], S: int) -> decode.Past:
        """Copies keys and values, a row per slot path, for a loop that reads them often.

        Paths begin at the first token, and are padded to S tokens; there are `rows(len(paths))` rows.
        """
        R = self.rows(len(paths))
        path_RS, above_R = np.zeros((R, S), np.int32), np.zeros(R, np.int32)
        for r, path in enumerate(paths):
            path_RS[r, : len(path)], above_R[r] = path, len(path)
        with jax.set_mesh(self.model.mesh):
            return _past(self._pool.cache, *put_rows((path_RS, above_R), self.model.mesh))

    def keep(self, cache: decode.Cache, slots: Sequence[np.ndarray]) -> None:
        """Stores each cache row's first len(slots[row]) keys and values in slots[row], but no hidden states.

        So nothing can be read at these slots; other tokens can be computed after them.
        """
        place_BN = np.full((len(slots), jax.tree.leaves(cache)[0].shape[-2]), self.size, np.int32)  # others: nowhere
        for b, slot in enumerate(slots):
            place_BN[b, : len(slot)] = slot
        with jax.set_mesh(self.model.mesh):
            place_BN = jax.device_put(place_BN, NamedSharding(self.model.mesh, spec()))
            self._pool = _keep(self._pool, cache, place_BN)

    def read(
        self,
        prm: PRM,
        ends: Sequence[Sequence[int] | np.ndarray],
        parents: Sequence[Sequence[int] | np.ndarray],
        E: int,
        *,
        run: bool = True,
    ) -> dict[str, Float[np.ndarray, "P E"]]:
        """Returns {output name: (P, E)}, e.g. `score`, for the steps ending in slots ends[p]; P is len(ends).

        A row's values beyond its own steps are padding. parents[p] are the previous steps' places in the row, or -1.
        Without `run` the program is only compiled, and the result is {}.
        """
        P, mesh = self.rows(len(ends)), prm.mesh
        end_PE, parent_PE = np.zeros((P, E), np.int32), np.full((P, E), -1, np.int32)
        for p, (end, parent) in enumerate(zip(ends, parents, strict=True)):
            end_PE[p, : len(end)], parent_PE[p, : len(end)] = end, parent
        with jax.set_mesh(mesh):
            rows = put_rows((end_PE, parent_PE), mesh)
            arguments = (prm.params, prm.config, prm.readout, self._pool, *rows)
            if not run:
                _outputs.lower(*arguments).compile()
                return {}
            outputs = _outputs(*arguments)
        return {name: np.asarray(value_PE)[: len(ends)] for name, value_PE in outputs.items()}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pool:
    """Keys, values and states after the final norm, for the tokens in N slots, on every device."""

    cache: decode.Cache
    x_ND: Float[Array, "N D"]


@functools.partial(jax.jit, static_argnums=1, donate_argnums=2)
def _extend(
    params, config: ModelConfig, pool: Pool, tokens_PT, path_PS, above_P, length_P, from_P, place_PT, to_P
) -> Pool:
    """Writes the new tokens' keys, values and states to their slots.

    path_PS: slots before each row's first new token; the first `above_P` count.
    length_P: real tokens per row.
    from_P, to_P: each row's places for its initial state (-1: none) and final state.
    place_PT: the new tokens' slots; padding must point beyond the pool.
    """
    past = decode.Past(pool.cache, jnp.arange(path_PS.shape[1]) < above_P[:, None], path_PS, from_P)
    position_PT = above_P[:, None] + jnp.arange(tokens_PT.shape[1])
    x_PTD, new = decode.forward(params, config, tokens_PT, position_PT, past, length_B=length_P)

    x_ND = pool.x_ND.at[place_PT].set(jax.sharding.reshard(x_PTD, spec(None, None, None)), mode="drop")
    return Pool(_written(config, pool.cache, new, place_PT, to_P), x_ND)


@functools.partial(jax.jit, donate_argnums=0)
def _keep(pool: Pool, new: decode.Cache, place_BN) -> Pool:
    return Pool(_written(None, pool.cache, new, place_BN), pool.x_ND)


def _written(config: ModelConfig | None, slots: decode.Cache, new: decode.Cache, place_PT, to_P=None) -> decode.Cache:
    """Writes the rows' keys, values and states to their places; places beyond the pool are dropped."""

    def put(slots_NKH, x_PKTH):
        """Writes keys or values, for one layer or a stacked group, to their slots."""
        place = spec(*[None] * (x_PKTH.ndim - 2), "kv_heads", None)
        x_PTKH = jax.sharding.reshard(x_PKTH.swapaxes(-3, -2), place)  # every device keeps all slots
        return slots_NKH.at[..., place_PT, :, :].set(x_PTKH, mode="drop")

    def put_states(axis: int, nodes, rows):
        """Writes the rows' states to node places (M, K, ...)."""
        rows = jax.sharding.reshard(rows, spec(*[None] * axis, None, "kv_heads"))
        return nodes.at[(*(slice(None),) * axis, to_P)].set(rows, mode="drop")

    return decode.mapped(put, put_states, slots, new, config=config)


@jax.jit
def _past(slots: decode.Cache, path_RS, above_R) -> decode.Past:
    def take(slots_NKH):
        place = sharding(*[None] * (slots_NKH.ndim - 3), "batch", None, "kv_heads", None)
        return slots_NKH.at[..., path_RS, :, :].get(out_sharding=place).swapaxes(-3, -2)

    return decode.Past(jax.tree.map(take, slots), jnp.arange(path_RS.shape[1]) < above_R[:, None])


@functools.partial(jax.jit, static_argnums=(1, 2))
def _outputs(
    params, config: ModelConfig, readout: Readout, pool: Pool, end_PE: Int[Array, "P E"], parent_PE: Int[Array, "P E"]
):
    """Returns named outputs (P, E) for the steps ending in these slots; parents are places in the same row."""
    x_PED = pool.x_ND.at[end_PE].get(out_sharding=sharding("batch", None, None))
    return readout(logits_at_steps(params, config, x_PED, parent_PE))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def empty_pool(config: ModelConfig, slots: int, nodes: int = 0) -> Pool:
    """Returns the empty keys and values of `slots` tokens, and recurrent states of `nodes` nodes."""
    x_ND = jnp.zeros((slots, config.width), config.dtype, out_sharding=sharding(None, None))
    return Pool(decode.empty_slots(config, slots, nodes), x_ND)


@jax.jit
def _doubled(pool: Pool) -> Pool:
    cache = decode.mapped(lambda x: decode.padded(x, x.ndim - 3, 2 * x.shape[-3]), None, pool.cache)
    return Pool(cache, decode.padded(pool.x_ND, 0, 2 * len(pool.x_ND)))


@functools.partial(jax.jit, static_argnums=0)
def _more_states(config: ModelConfig, pool: Pool) -> Pool:
    doubled = decode.mapped(
        lambda x: x, lambda axis, x: decode.padded(x, axis, 2 * x.shape[axis]), pool.cache, config=config
    )
    return Pool(doubled, pool.x_ND)


# ---------------------------------------------------------------------------------------------------- trees of a search

SLOTS, NODES = 4096, 64
"""Initial slots, one per token, and places for recurrent states, one per step. Each is doubled when full."""

TOKENS, CALL = 1024, 32
"""New tokens per call, padding included, unless one step is longer; and the padded tokens that one saved call is
worth. (With SmolLM2-135M a call reads 540 MB of weights, in 30 to 50 ms on 2 cores; a token takes 1.5 ms.)"""

SHORTEST_STEP, SHORTEST_PATH, SHORTEST_CHAIN = 16, 128, 16
"""Least padded tokens per step and path, and least padded steps per chain (for a step layer). All are powers of
two, so that few shapes are compiled."""


@dataclasses.dataclass
class _Node:
    parent: int  # -1: a problem
    depth: int  # steps on its path, its own included
    slots: np.ndarray  # of its own tokens, in order
    state: int  # the place of the recurrent state after it; -1 for a model without
    children: int = 0
    live: bool = True  # not released


class LiveTrees:
    """A scorer for trees that grow during a search; equal to `prm.score_many` up to rounding.

    Handles are ints, never reused. Released slots are reused, and doubled when full. After an error the trees are as
    before the call.

    Attributes:
      tokens: real tokens computed so far, each problem and step once.
      scale, semantics: the PRM's, for the scores.

    Raises NotImplementedError as `check`, or if a layer cannot decode with a cache.
    """

    def __init__(self, prm: PRM):
        check(prm)
        self._slots = Slots(prm, SLOTS, NODES)
        self._prm, self.scale, self.semantics = prm, prm.scale, prm.semantics
        self.tokens = 0
        self._nodes: dict[int, _Node] = {}
        self._handles = itertools.count()

    def open(self, problems: Sequence[str]) -> list[int]:
        """Computes the problems' tokens; returns a handle for each root, in order. Equal problems are separate roots.

        Raises ValueError for a problem longer than the model's context.
        """
        return self._append([-1] * len(problems), [self._prm.layout.problem(problem) for problem in problems])[0]

    def extend(self, parents: Sequence[int], steps: Sequence[str]) -> tuple[list[int], Float[np.ndarray, " P"]]:
        """Appends steps[i] below parents[i]; returns the new handles and (P,) float32 scores, in order.

        Raises:
          ValueError: an unknown or released parent, unequal lengths, a step without tokens, or too long a chain.
          FloatingPointError: a non-finite score.
        """
        for parent in parents:
            if parent not in self._nodes or not self._nodes[parent].live:
                raise ValueError(f"handle {parent} is unknown or released. Extend only live handles")
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
        """Frees these handles' slots once no live descendant needs them; unknown and released handles are ignored."""
        for handle in handles:
            if handle not in self._nodes:
                continue
            self._nodes[handle].live, freed = False, []
            while handle >= 0 and not (node := self._nodes[handle]).live and not node.children:  # nor an ancestor
                freed.append(node.slots)
                if node.state >= 0:
                    self._slots.free_states.append(node.state)
                del self._nodes[handle]
                handle = node.parent
                if handle >= 0:
                    self._nodes[handle].children -= 1
            self._slots.put_back(*freed)

    def _append(self, parents: Sequence[int], ids: Sequence[Sequence[int]]) -> tuple[list[int], np.ndarray]:
        lengths = [len(x) for x in ids]
        needed = sum(lengths)
        above = [self._above(parent) for parent in parents]
        paths = [np.concatenate([np.zeros(0, np.int64), *(node.slots for node in nodes)]) for nodes in above]
        # The slots of the last tokens of all steps before; none for a model that reads each step alone.
        ends = [[int(x.slots[-1]) for x in nodes if x.depth] if self._prm.config.steps else [] for nodes in above]
        for path, length in zip(paths, lengths, strict=True):
            self._prm.check_length(len(path) + length, "a live tree")
        slots = np.split(self._slots.take(needed), np.cumsum(lengths)[:-1]) if ids else []
        score_P = np.zeros(len(ids), np.float32)
        starts = [self._nodes[parent].state if parent >= 0 else -1 for parent in parents]
        states = [(start, self._slots.take_state()) for start in starts]
        for batch in self._batches(lengths, [len(path) for path in paths]):
            score_P[batch] = self._compute(*([x[i] for i in batch] for x in (ids, slots, paths, ends, states)))
        self.tokens += needed
        handles = list(itertools.islice(self._handles, len(ids)))
        for handle, parent, slot, (_, state) in zip(handles, parents, slots, states, strict=True):
            depth = 0
            if parent >= 0:
                self._nodes[parent].children += 1
                depth = self._nodes[parent].depth + 1
            self._nodes[handle] = _Node(parent, depth, slot, state)
        return handles, score_P

    def _above(self, handle: int) -> list[_Node]:
        """Returns the nodes from the problem to this one."""
        nodes: list[_Node] = []
        while handle >= 0:
            nodes.append(self._nodes[handle])
            handle = nodes[-1].parent
        return nodes[::-1]

    def _batches(self, lengths: Sequence[int], depths: Sequence[int]) -> Iterator[list[int]]:
        """Yields step indices to compute together, similar in length, with the fewest tokens and calls."""
        order = sorted(range(len(lengths)), key=lambda i: (lengths[i], depths[i]))
        best, start = [0], [0]  # cost of the first n steps of the order, and where the last of their batches starts
        for n, i in enumerate(order, 1):
            T, costs = padded_size(lengths[i], SHORTEST_STEP), {}
            for first in reversed(range(n)):
                cells = self._slots.rows(n - first) * T
                if costs and cells > TOKENS:
                    break
                costs[first] = best[first] + cells + CALL
            start.append(min(costs, key=lambda first: costs[first]))
            best.append(costs[start[-1]])
        while n := len(order):
            yield order[start[n] :]
            del order[start[n] :]

    def _compute(self, ids, slots, paths, ends, states) -> np.ndarray:
        T, S = padded_size(max(map(len, ids)), SHORTEST_STEP), padded_size(max(map(len, paths)), SHORTEST_PATH)
        self._slots.extend(ids, slots, paths, T, S, states)
        E = padded_size(max(map(len, ends)) + 1, SHORTEST_CHAIN) if self._prm.config.steps else 1
        chains = [[*before, slot[-1]] for before, slot in zip(ends, slots, strict=True)]
        score_PE = self._slots.read(self._prm, chains, [range(-1, len(chain) - 1) for chain in chains], E)["score"]
        return score_PE[np.arange(len(chains)), [len(chain) - 1 for chain in chains]]


# -------------------------------------------------------------------------------------------------- a server's prefixes

EDIT = 64
"""New tokens per call, padding included: an edit is rarely longer."""

SHORTEST_PREFIX = 256
"""Least padded tokens per path; longer paths take 4, 16, ... times as many, so that few shapes are compiled."""


class PrefixCache:
    """Scores trees, computing only the tokens after cached prefixes; equal to the PRM up to rounding.

    A caller's tokens form a trie: a slot is identified by the previous token's slot and the token id. When slots run
    out, the least recently used are taken, from branch ends. Callers share no tokens, so response times do not reveal
    what another caller has scored. Calls must not overlap; a failed computation empties the cache.

    Args:
      slots: number of tokens in the cache, which never grows.

    Raises NotImplementedError as `check`, or if a layer is recurrent or cannot decode with a cache.
    """

    def __init__(self, prm: PRM, slots: int):
        check(prm)
        self._slots, self.slots = Slots(prm, slots), slots
        self._prm = prm
        self._clear()

    def _clear(self) -> None:
        self._slots.clear()
        self._slot: dict[tuple[Hashable, int], int] = {}  # (slot before, or the caller; token id) -> slot
        self._key: dict[int, tuple[Hashable, int]] = {}  # the other way
        self._used_S, self._depth_S = np.zeros(self.slots, np.int64), np.zeros(self.slots, np.int64)
        self._now = 0  # counts calls: when a slot was used

    def outputs_of(self, tree: ReasoningTree, caller: str) -> tuple[dict[str, Float[np.ndarray, " N"]], int]:
        """Returns {output name: (N,)}, e.g. `score`, by node, and how many of the tree's tokens were in the cache.

        Every node must be a step, not a message. Only trees with the same `caller` (a secret text) share cached tokens.

        Raises:
          ValueError: the tree has more tokens than the cache has slots, or a chain is too long for the model.
          FloatingPointError: a non-finite output.
        """
        tokens = token_tree(tree, self._prm.layout)
        shape = geometry(tokens.length_R, tokens.parent_R)
        if (total := len(tokens.tokens_N)) > self.slots:
            raise ValueError(f"problem {tokens.name!r}: {total:,} tokens, and the cache of prefixes has {self.slots:,}")
        self._prm.check_length(int(shape.depth_R.max(initial=0)), f"problem {tokens.name!r}")
        slot_N, above_N = self._known(tokens, caller)
        new = np.flatnonzero(slot_N < 0).tolist()
        slot_N[new] = self._taken(len(new))
        try:
            for segment in _segments(new, above_N):
                path_N = slot_N[path_to(above_N[segment[0]], above_N)]
                S = padded_size(len(path_N), SHORTEST_PREFIX, 4)
                self._slots.extend([tokens.tokens_N[segment]], [slot_N[segment]], [path_N], EDIT, S)
            end_M = slot_N[shape.stop_R[tokens.run_M] - 1]
            E = padded_size(len(end_M), SHORTEST_PREFIX, 4)
            outputs_1E = self._slots.read(self._prm, [end_M], [tokens.above_M], E)
        except Exception:  # the pool was given to the device, and may be lost
            self._clear()
            raise
        for n in new:
            key = (int(slot_N[above_N[n]]) if above_N[n] >= 0 else caller, int(tokens.tokens_N[n]))
            self._slot[key], self._key[int(slot_N[n])] = int(slot_N[n]), key
        self._used_S[slot_N], self._depth_S[slot_N] = self._now, shape.position_N
        at_N = np.argsort(tokens.node_M)  # every node is one of the steps
        outputs = {name: value_1E[0, at_N] for name, value_1E in outputs_1E.items()}
        for name, value_N in outputs.items():
            check_finite(tree, name, value_N)
        return outputs, total - len(new)

    def warm_up(self) -> None:
        """Compiles everything that `outputs_of` needs, without running it; waits until it is done."""
        for S in padded_sizes(self.slots, SHORTEST_PREFIX, 4):
            path_N = np.zeros(min(S, self.slots), np.int64)
            self._slots.extend([[]], [path_N[:0]], [path_N], EDIT, S, run=False)
            self._slots.read(self._prm, [path_N], [path_N - 1], S, run=False)

    def _known(self, tokens: TokenTree, caller: str) -> tuple[Int[np.ndarray, " N"], list[int]]:
        """Returns every token's slot, -1 for a new one, and the index of the token before each."""
        self._now += 1
        above_N, slots = tokens_above(tokens).tolist(), []
        for above, token in zip(above_N, tokens.tokens_N.tolist(), strict=True):
            slots.append(self._slot.get((slots[above] if above >= 0 else caller, token), -1))
        slot_N = np.array(slots, np.int64)
        self._used_S[slot_N[slot_N >= 0]] = self._now
        return slot_N, above_N

    def _taken(self, count: int) -> np.ndarray:
        """Returns slots for `count` new tokens: free ones, then the least recently used.

        Using a token also uses the tokens before it, so, ordered by use, then depth, no token is freed before its
        successors.
        """
        if (missing := count - len(self._slots.free)) > 0:
            kept = np.array([slot for slot in self._key if self._used_S[slot] < self._now], np.int64)
            freed = kept[np.lexsort((-self._depth_S[kept], self._used_S[kept]))][:missing]
            for slot in freed.tolist():
                del self._slot[self._key.pop(slot)]
            self._slots.put_back(freed)
        return self._slots.take(count)


def _segments(new: Sequence[int], above_N: Sequence[int]) -> Iterator[list[int]]:
    """Yields the new tokens in pieces, up to EDIT consecutive tokens on one path."""
    segment: list[int] = []
    for n in new:
        if segment and (above_N[n] != segment[-1] or len(segment) == EDIT):
            yield segment
            segment = []
        segment.append(n)
    if segment:
        yield segment
