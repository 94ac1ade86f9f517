"""Collectives written by hand, where XLA by itself sends or keeps more than necessary."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jprm.model.mesh import parts, spec, stream
from jprm.rows import at_slots


def embedding_lookup(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Returns the table's rows of the tokens, (B, T, D). Every device looks all tokens up in its own part of the table.

    The result is resharded from columns to rows over one mesh axis and, where tokens are split, to tokens over the
    other. XLA would copy everything to all devices if it did both at once. With several parts of `data`, XLA by itself
    could give every device the gradient of the full table.
    """
    place, mesh = stream(tokens_BT), jax.typeof(table_VD).sharding.mesh
    if place is None or table_VD.shape[1] == 1 or mesh.size == mesh.shape["data"]:
        return table_VD.at[tokens_BT].get(out_sharding=place)

    def own(table_VD, tokens_BT):
        V = table_VD.shape[0]
        index_BT = tokens_BT - jax.lax.axis_index("tensor") * V
        mine_BT1 = ((index_BT >= 0) & (index_BT < V))[..., None]
        return jax.lax.psum(jnp.where(mine_BT1, table_VD[jnp.clip(index_BT, 0, V - 1)], 0), "tensor")

    places = spec("vocab", "embed"), spec("replicas")
    x_BTD = jax.shard_map(own, in_specs=places, out_specs=spec("replicas", None, "embed"))(
        table_VD, jax.sharding.reshard(tokens_BT, places[1])
    )
    for turn in [P(("data", "fsdp"), None, "context"), place] if parts(tokens_BT) > 1 else [place]:
        x_BTD = jax.sharding.reshard(x_BTD, turn)
    return x_BTD


def at_tokens(x_BTX: jax.Array, index_BS: jax.Array) -> jax.Array:
    """Returns `x_BTX` at the tokens `index_BS` of each row, (B, S, ...), replicated on all devices of a row.

    Where tokens are split, each device contributes its own tokens and zeros for the others, and the sum is taken: no
    other hidden state leaves its device.
    """
    rest = range(2, x_BTX.ndim)
    if parts(x_BTX) == 1:
        return at_slots(x_BTX, index_BS)

    def own(x_BTX, index_BS):
        T = x_BTX.shape[1]
        index_BS -= jax.lax.axis_index("context") * T
        mine_BSX = jnp.expand_dims((index_BS >= 0) & (index_BS < T), rest)
        x_BSX = jnp.take_along_axis(x_BTX, jnp.expand_dims(jnp.clip(index_BS, 0, T - 1), rest), axis=1)
        return jax.lax.psum(jnp.where(mine_BSX, x_BSX, 0), "context")

    places = spec("batch", "tokens"), spec("batch")
    return jax.shard_map(own, in_specs=places, out_specs=spec("batch"))(
        x_BTX, jax.sharding.reshard(index_BS, places[1])
    )


def gathered_weight(w: jax.Array, axis: int) -> jax.Array:
    """Gathers a weight along `axis`, which the mesh may split. The gradient, summed over tokens, is scattered there.

    The sum is scattered along a new first axis, the parts. Along the weight's own axis XLA's compiler for TPUs would
    have every device compute the full sum and slice it, where the devices make more than one ring.
    """
    place = jax.typeof(w).sharding
    if all(place.mesh.shape[name] == 1 for name in _names(tuple(place.spec)[axis])):
        return w  # XLA would keep the sums over a single device
    return _gathered(w, axis, place.spec)


def _names(place: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes that split one axis of an array, from its entry in a PartitionSpec."""
    return (place,) if isinstance(place, str) else place or ()


def _over() -> tuple[str, ...]:
    """Returns the mesh axes that split rows and tokens, over which a weight's gradient is summed."""
    return tuple(name for place in spec("batch", "tokens") for name in _names(place))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(w, axis: int, place: P):
    # `reduced` types the gradient: each device has its own term of the sum.
    return jax.sharding.reshard(w, P(*place[:axis], None, *place[axis + 1 :], reduced=frozenset(_over())))


def _gather_forward(w, axis: int, place: P):
    return _gathered(w, axis, place), None


def _gather_backward(axis: int, place: P, _, dw):
    split = _names(place[axis])
    others = tuple(name for name in _over() if name not in split)

    def scatter(dw):
        count = math.prod(jax.lax.axis_size(name) for name in split)
        first = jnp.moveaxis(dw, axis, 0)
        parts = first.reshape(count, first.shape[0] // count, -1)
        own = jax.lax.psum(jax.lax.psum_scatter(parts, split, scatter_dimension=0), others)
        return jnp.moveaxis(own.reshape(-1, *first.shape[1:]), 0, axis)

    terms = P(*place[:axis], None, *place[axis + 1 :], unreduced=frozenset(_over()))
    return (jax.shard_map(scatter, in_specs=terms, out_specs=place, check_vma=False)(dw),)


_gathered.defvjp(_gather_forward, _gather_backward)


def split_in_chunks(w: jax.Array, axis: int, count: Callable[[int], int]) -> jax.Array:
    """Splits `w` into equal chunks along `axis`, each sharded as `w` is. The chunks become the first axis.

    `axis` becomes two: the mesh's parts, and one device's part of a chunk. `count` returns the number of chunks for the
    size that a device has.
    """
    place = jax.typeof(w).sharding
    before, (name, *after) = tuple(place.spec)[:axis], tuple(place.spec)[axis:]
    parts = place.mesh.shape[name] if name else 1
    own = w.shape[axis] // parts
    shape = *w.shape[:axis], parts, count(own), own // count(own), *w.shape[axis + 1 :]
    explicit = AxisType.Explicit in place.mesh.axis_types
    w = jnp.reshape(w, shape, out_sharding=P(*before, name, None, None, *after) if explicit else None)
    return jnp.moveaxis(w, axis + 1, 0)
