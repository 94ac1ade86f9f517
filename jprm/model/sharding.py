"""One mesh, and one table from what an array axis is to the mesh axis it lies on.

Axes of the mesh: `data` (replicas of the weights), `fsdp` (rows and weights both split), `tensor` (heads and MLP
split). Shardings are explicit: they are part of an array's type, and a contraction that JAX cannot place is an error.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor")

RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",  # the width of weights; activations keep theirs whole
    "vocab": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices an axis; -1 (one axis at most) takes what the others leave."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1


def make_mesh(config: MeshConfig = MeshConfig(), devices=None) -> Mesh:
    """The mesh over all devices, or over those given. Raises ValueError where the sizes do not multiply to them."""
    devices = jax.devices() if devices is None else devices
    sizes = [config.data, config.fsdp, config.tensor]
    free = [i for i, size in enumerate(sizes) if size == -1]
    fixed = math.prod(size for size in sizes if size != -1)
    if len(free) == 1 and fixed and len(devices) % fixed == 0:
        sizes[free[0]] = len(devices) // fixed
    if math.prod(sizes) != len(devices) or min(sizes) < 1:
        raise ValueError(
            f"mesh data={config.data} fsdp={config.fsdp} tensor={config.tensor} does not cover {len(devices)} devices;"
            f" choose sizes whose product is {len(devices)}, one of them -1 to take the rest"
        )
    return Mesh(np.array(devices).reshape(sizes), AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def spec(*axes: str | None) -> P:
    """PartitionSpec of an array whose axes are so named; None, or a name that the table lacks, is not split.

    Raises ValueError where two axes of the array would lie on one mesh axis.
    """
    places = [RULES.get(axis) if axis else None for axis in axes]
    used = [name for place in places if place for name in ((place,) if isinstance(place, str) else place)]
    if len(used) != len(set(used)):
        raise ValueError(f"axes {axes} put two axes of one array on one mesh axis: {places}")
    return P(*places)


def sharding(*axes: str | None) -> P | None:
    """`spec`, or None where no mesh is set, so that the same model code runs without one."""
    return None if jax.sharding.get_abstract_mesh().empty else spec(*axes)


def reshape(x: jax.Array, shape: tuple[int, ...], *axes: str | None) -> jax.Array:
    """`x` in another shape whose axes are so named. Said, not inferred: JAX forgets how an axis of size 1 is split."""
    return jnp.reshape(x, shape, out_sharding=sharding(*axes, *(None,) * (len(shape) - len(axes))))


def put_rows(rows, mesh: Mesh, lead: int = 0):
    """Host arrays onto the mesh, split over rows; `lead` axes before the row axis are not split."""
    return put(rows, NamedSharding(mesh, spec(*(None,) * lead, "batch")))


def put(arrays, place: NamedSharding):
    """Host arrays, the same in every process, onto the mesh: a process sends its devices their pieces, and no others.

    (`jax.device_put` would have the processes compare their whole arrays first.)
    """
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, place, lambda piece: x[piece]), arrays)


def gathered(arrays):
    """Arrays of the mesh as numpy arrays, whole in every process."""
    return multihost_utils.process_allgather(arrays, tiled=True)


def check(config, mesh: Mesh, rows: int) -> None:
    """Raises ValueError, naming what to change, where the mesh does not divide the rows or the model."""
    tensor, fsdp, rows_split = mesh.shape["tensor"], mesh.shape["fsdp"], mesh.shape["data"] * mesh.shape["fsdp"]
    for what, size, by, axis in [
        ("rows a micro-batch", rows, rows_split, "data x fsdp"),
        ("kv_heads", config.kv_heads, tensor, "tensor"),
        ("mlp_width", config.mlp_width, tensor, "tensor"),
        ("vocab_size", config.vocab_size, tensor, "tensor"),
        ("width", config.width, fsdp, "fsdp"),
    ]:
        if size % by:
            raise ValueError(f"{what} = {size} is not a multiple of the mesh's {axis} = {by}; change one of them")
