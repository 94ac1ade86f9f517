"""Transfers parameters from the training mesh to sampling meshes, each on one process's devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jprm import multihost
from jprm.model.mesh import MESH_AXES, MeshConfig, make_mesh, without


def on_own_mesh(arrays: Any, mesh: Mesh) -> Any:
    """Returns a complete copy of a tree of arrays on `mesh`, this process's `own_mesh`; itself if there is no other.

    All processes of the group must call this together. A device receives only its part, directly from other devices.
    """
    if multihost.count() == 1:
        return arrays
    return jax.tree.map(
        lambda x: copied(x, mesh, P(*(without(place, ("context",)) for place in jax.typeof(x).sharding.spec))), arrays
    )


def copied(x: jax.Array, mesh: Mesh, place: P) -> jax.Array:
    """Copies an array from the group's mesh to `mesh`, which has only this process's devices, sharded by `place`.

    All processes of the group must call this together, each with a mesh of the same sizes.
    """
    if multihost.count() == 1:
        return jax.device_put(x, NamedSharding(mesh, place))
    copies = jax.device_put(x, NamedSharding(_every(_sizes(mesh), multihost.members()), place))
    pieces = [piece.data for piece in copies.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(mesh, place), pieces)


def sent(
    x: jax.Array | jax.ShapeDtypeStruct, mesh: Mesh, place: P, from_: Sequence[int], to: Sequence[int]
) -> jax.Array | None:
    """Sends an array from some processes to others, which return it; senders return `None`.

    All processes in the group must call this together, each with an equally sized mesh of its own devices. A
    receiver's device gets only its part, from the same part of one sender. If there are more receivers than senders,
    they take turns.

    Args:
        x: in a sender, the array on `mesh`, sharded by `place`; in a receiver, its shape and type.
        from_: process indices of the senders.
        to: process indices of the receivers.

    Raises ValueError if one of them is not in the group.
    """
    group, here, result = multihost.members(), jax.process_index(), None
    grid = _every(_sizes(mesh), group)
    for turn in range(0, len(to), len(from_)):
        pairs = tuple((group.index(a), group.index(b)) for a, b in zip(from_, to[turn:], strict=False))
        of_each, shape = NamedSharding(grid, P("process", *place)), (len(group), *x.shape)
        if isinstance(x, jax.Array):
            pieces = [piece.data[None] for piece in x.addressable_shards]
        else:
            part = 1, *NamedSharding(mesh, place).shard_shape(x.shape)
            pieces = [jnp.zeros(part, x.dtype, device=device) for device in mesh.devices.flat]
        moved = _sent(pairs, of_each)(jax.make_array_from_single_device_arrays(shape, of_each, pieces))
        if here in to[turn : turn + len(from_)]:
            pieces = [piece.data[0] for piece in moved.addressable_shards]
            result = jax.make_array_from_single_device_arrays(x.shape, NamedSharding(mesh, place), pieces)
    return result


@functools.cache
def _sent(pairs: tuple[tuple[int, int], ...], place: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    move = functools.partial(jax.lax.ppermute, axis_name="process", perm=pairs)
    return jax.jit(jax.shard_map(move, mesh=place.mesh, in_specs=place.spec, out_specs=place.spec))


def _sizes(mesh: Mesh) -> MeshConfig:
    return MeshConfig(*(mesh.shape[axis] for axis in MESH_AXES))


@functools.cache
def _every(sizes: MeshConfig, processes: tuple[int, ...]) -> Mesh:
    """Returns one mesh joining several processes' meshes (of equal sizes)."""
    grids = [make_mesh(sizes, jax.local_devices(i)).devices for i in processes]
    return Mesh(np.stack(grids), ("process", *MESH_AXES))
