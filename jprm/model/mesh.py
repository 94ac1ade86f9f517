"""The device mesh, and the one table from logical array axes to mesh axes.

Mesh axes: `data` (replicas of the weights), `fsdp` (splits rows and weights), `tensor` (splits heads and the MLP),
`context` (splits weights and a row's tokens, for rows too long for one device), `expert` (splits rows and
experts). Shardings are explicit: they are part of an array's type, and a contraction that JAX cannot place is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jprm import multihost
from jprm.model.config import ModelConfig
from jprm.rows import PER_TOKEN, Rows, at_slots, empty_rows

MESH_AXES = ("data", "fsdp", "tensor", "context", "expert")

RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp", "expert"),
    "replicas": "data",  # of the weights
    "tokens": "context",
    "embed": ("fsdp", "context"),  # the width of weights; the width of activations is not split
    "vocab": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices per axis. One axis may be -1, to take the remaining devices."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1
    context: int = 1
    expert: int = 1


def make_mesh(config: MeshConfig = MeshConfig(), devices: Sequence[Any] | None = None) -> Mesh:
    """Returns the mesh over `devices`, by default the process group's. Raises ValueError if the sizes do not fit."""
    devices = multihost.devices() if devices is None else devices
    sizes = [getattr(config, axis) for axis in MESH_AXES]
    free = [i for i, size in enumerate(sizes) if size == -1]
    fixed = math.prod(size for size in sizes if size != -1)
    if len(free) == 1 and fixed and len(devices) % fixed == 0:
        sizes[free[0]] = len(devices) // fixed
    if math.prod(sizes) != len(devices) or min(sizes) < 1:
        asked = " ".join(f"{axis}={getattr(config, axis)}" for axis in MESH_AXES)
        raise ValueError(
            f"mesh {asked} does not cover {len(devices)} devices;"
            f" choose sizes whose product is {len(devices)}, one of them -1 to take the rest"
        )
    return Mesh(_arranged(sizes, devices), MESH_AXES, axis_types=(AxisType.Explicit,) * len(MESH_AXES))


def _arranged(sizes: list[int], devices) -> np.ndarray:
    """Reshapes the devices. On TPUs neighbours are linked, and only `data` crosses slices."""
    if devices[0].platform != "tpu":
        return np.array(devices).reshape(sizes)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    if sizes[0] % slices:
        raise ValueError(
            f"mesh data={sizes[0]} is not a multiple of the {slices} slices: only `data` goes over the network between"
            f" them; set mesh.data={slices}"
        )
    within, between = [sizes[0] // slices, *sizes[1:]], [slices] + [1] * (len(sizes) - 1)
    return mesh_utils.create_hybrid_device_mesh(within, between, devices, allow_split_physical_axes=True)


def spec(*axes: str | None, mesh: Mesh | AbstractMesh | None = None) -> P:
    """Returns the PartitionSpec for an array with these logical axes. `None` and unknown names are not split.

    Names (`RULES`): batch, replicas, tokens, embed, vocab, kv_heads, mlp, experts. `context` and `expert` are omitted
    if the mesh (by default the current one) has size 1 along them. Raises ValueError if a mesh axis splits two axes.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    left_out = [axis for axis in ("context", "expert") if dict(mesh.shape).get(axis, 1) == 1]
    places = [without(RULES.get(axis) if axis else None, left_out) for axis in axes]
    used = [name for place in places for name in _names(place)]
    if len(used) != len(set(used)):
        raise ValueError(f"axes {axes} put two axes of one array on one mesh axis: {places}")
    return P(*places)


def _names(place: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes in one entry of a PartitionSpec."""
    return (place,) if isinstance(place, str) else place or ()


def without(place: str | tuple[str, ...] | None, left_out: Collection[str]) -> str | tuple[str, ...] | None:
    """Returns entry `place` of a PartitionSpec without `left_out`; one axis is a str, and None if all are left out."""
    names = tuple(name for name in _names(place) if name not in left_out)
    return names if len(names) > 1 else next(iter(names), None)


def sharding(*axes: str | None) -> P | None:
    """Returns `spec` (which lists the names), or `None` without an explicit mesh, e.g. in a shard_map."""
    return spec(*axes) if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types else None


def parts(x_BT: jax.Array) -> int:
    """Returns into how many parts `context` splits the tokens (axis 1), by the array's type; 1 if it does not."""
    place = jax.typeof(x_BT).sharding
    return place.mesh.shape["context"] if tuple(place.spec)[1:2] == ("context",) else 1


def row_parts(mesh: Mesh | AbstractMesh) -> int:
    """Returns into how many parts the mesh splits rows."""
    return math.prod(mesh.shape[axis] for axis in ("data", "fsdp", "expert"))


def stream(x_BT: jax.Array) -> P | None:
    """Returns the spec for states (B, T, D) or (B x T, D), split like the tokens in `x_BT`; `None` as `sharding`."""
    return sharding("batch", *(["tokens"] if parts(x_BT) > 1 else []))


def reshape(x: jax.Array, shape: tuple[int, ...], *axes: str | None) -> jax.Array:
    """Reshapes `x` to a shape with these logical axes. (Without them JAX forgets how a size-1 axis is split.)"""
    return jnp.reshape(x, shape, out_sharding=sharding(*axes, *(None,) * (len(shape) - len(axes))))


def row_places(mesh: Mesh | AbstractMesh, lead: int) -> Rows:
    """Returns a `NamedSharding` in each `Rows` field, one for all extras. `lead` unsplit axes precede the rows."""
    before = (None,) * lead
    tokens, slots = (NamedSharding(mesh, spec(*before, "batch", axis, mesh=mesh)) for axis in ("tokens", None))
    places: dict[str, Any] = {f.name: tokens if f.name in PER_TOKEN else slots for f in dataclasses.fields(Rows)}
    return Rows(**places)


def abstract_rows(mesh: Mesh | AbstractMesh, *lead: int, tokens: int, slots: int, extras: tuple[str, ...] = ()) -> Rows:
    """Returns `Rows` of `ShapeDtypeStruct`s (*lead, tokens or slots), as `row_places`. `lead` ends with the rows."""

    def abstract(place: Any, arrays: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, x.shape[1]), x.dtype, sharding=place), arrays)

    return jax.tree.map(abstract, row_places(mesh, len(lead) - 1), empty_rows(1, tokens, slots, extras))


def put_rows(rows, mesh: Mesh, lead: int = 0) -> Any:
    """Puts whole host arrays, equal in all processes, on the mesh: `lead` axes, then rows; `Rows` by `row_places`."""
    if isinstance(rows, Rows):
        return jax.tree.map(lambda place, arrays: put(arrays, place), row_places(mesh, lead), rows)
    return put(rows, NamedSharding(mesh, spec(*(None,) * lead, "batch")))


def put(arrays, place: NamedSharding) -> Any:
    """Puts whole host arrays, equal in all processes, on the mesh by `place`. (`jax.device_put` compares first.)"""
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, place, lambda piece: x[piece]), arrays)


def gathered(arrays: Any) -> Any:
    """Returns arrays on the mesh as whole numpy arrays in every process; all processes must call it."""
    return jax.tree.map(
        lambda x: np.asarray(x) if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True), arrays
    )


def mesh_by_heads(config: ModelConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns a mesh over `devices` (by default this process's) in which sampling sends no weights.

    `tensor` is the largest device count that divides heads, MLP and vocabulary; `data` is the rest. If there are fewer
    key-value heads, each is repeated (`jprm.methods.policy.sampler.repeats`), so every device has its queries' keys.
    """
    devices = jax.local_devices() if devices is None else devices
    tensor = max(n for n in range(1, len(devices) + 1) if len(devices) % n == 0 and _divides(config, n))
    return make_mesh(MeshConfig(data=-1, fsdp=1, tensor=tensor), devices)


def _divides(config: ModelConfig, tensor: int) -> bool:
    repeated = math.lcm(config.kv_heads, tensor)
    if set(config.mixers) - {"attention"} and repeated > config.kv_heads:
        return False
    split = config.mlp_width, config.vocab_size, config.deltanet.key_heads, config.experts.width
    return not (config.heads % repeated or config.experts.shared_width % tensor or any(size % tensor for size in split))


def own_mesh(mesh: Mesh) -> Mesh:
    """Returns a mesh with only this process's devices, all on `fsdp`; `mesh` itself if there is one process."""
    return mesh if multihost.count() == 1 else make_mesh(devices=jax.local_devices())


def check_mesh(config: ModelConfig, mesh: Mesh, rows: int, tokens: int = 0) -> None:
    """Raises ValueError if the mesh does not divide all `rows` of a micro-batch, `tokens` (0: any) or the model."""
    _, fsdp, tensor, context, expert = (mesh.shape[axis] for axis in MESH_AXES)
    if expert > 1 and not config.experts.count:
        raise ValueError(f"mesh.expert={expert} splits experts, but the model is dense; set mesh.expert=1")
    for what, size, by, axis in [
        ("rows a micro-batch", rows, row_parts(mesh), "data x fsdp" + " x expert" * (expert > 1)),
        ("tokens a row", tokens, context, "context"),
        ("kv_heads", config.kv_heads, tensor, "tensor"),
        ("mlp_width", config.mlp_width, tensor, "tensor"),
        ("vocab_size", config.vocab_size, tensor, "tensor"),
        ("width", config.width, fsdp * context, "fsdp x context" if context > 1 else "fsdp"),
        ("deltanet.key_heads", config.deltanet.key_heads, tensor, "tensor"),
        ("experts.count", config.experts.count, expert, "expert"),
        ("experts.width", config.experts.width, tensor, "tensor"),
        ("experts.shared_width", config.experts.shared_width, tensor, "tensor"),
    ]:
        if size % by:
            raise ValueError(f"{what} = {size} is not a multiple of the mesh's {axis} = {by}; change one of them")


# ---------------------------------- collectives written by hand, where XLA by itself sends or keeps more than necessary


def embedding_lookup(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Returns the embeddings (B, T, D) of ids below V (unchecked). Every device looks up all in its part of the table.

    The result is then resharded from columns to rows over one mesh axis and, if tokens are split, to tokens over the
    other; doing both at once would make XLA copy everything to all devices. With several `data` parts, XLA alone might
    give every device the full table's gradient.
    """
    place, table = stream(tokens_BT), jax.typeof(table_VD).sharding
    mesh, whole = table.mesh, not any(table.spec)
    if place is None or whole or table_VD.shape[1] == 1 or mesh.size == mesh.shape["data"]:
        return table_VD.at[tokens_BT].get(out_sharding=place)

    def on_device(table_VD, tokens_BT):
        V = table_VD.shape[0]
        index_BT = tokens_BT - jax.lax.axis_index("tensor") * V
        mine_BT1 = ((index_BT >= 0) & (index_BT < V))[..., None]
        return jax.lax.psum(jnp.where(mine_BT1, table_VD[jnp.clip(index_BT, 0, V - 1)], 0), "tensor")

    places = spec("vocab", "embed"), spec("replicas")
    x_BTD = jax.shard_map(on_device, in_specs=places, out_specs=spec("replicas", None, "embed"))(
        table_VD, jax.sharding.reshard(tokens_BT, places[1])
    )
    for turn in [P(("data", "fsdp"), None, "context"), place] if parts(tokens_BT) > 1 else [place]:
        x_BTD = jax.sharding.reshard(x_BTD, turn)
    return x_BTD


def at_tokens(x_BTX: jax.Array, index_BS: jax.Array) -> jax.Array:
    """Returns `x_BTX` at each row's tokens `index_BS`, (B, S, ...), replicated on all the row's devices.

    If tokens are split, each device contributes its own tokens and zeros elsewhere, and the sum is taken: no other
    hidden state leaves its device.
    """
    rest = range(2, x_BTX.ndim)
    if parts(x_BTX) == 1:
        return at_slots(x_BTX, index_BS)

    def on_device(x_BTX, index_BS):
        T = x_BTX.shape[1]
        index_BS -= jax.lax.axis_index("context") * T
        mine_BSX = jnp.expand_dims((index_BS >= 0) & (index_BS < T), rest)
        x_BSX = jnp.take_along_axis(x_BTX, jnp.expand_dims(jnp.clip(index_BS, 0, T - 1), rest), axis=1)
        return jax.lax.psum(jnp.where(mine_BSX, x_BSX, 0), "context")

    places = spec("batch", "tokens"), spec("batch")
    return jax.shard_map(on_device, in_specs=places, out_specs=spec("batch"))(
        x_BTX, jax.sharding.reshard(index_BS, places[1])
    )


def gathered_weight(w: jax.Array, axis: int) -> jax.Array:
    """Returns a weight gathered along `axis`, itself if unsplit. The gradient, summed over tokens, is scattered back.

    The sum is scattered along a new first axis, the parts. Along the weight's own axis XLA's TPU compiler would make
    every device compute the full sum and slice it, if the devices form more than one ring.
    """
    place = jax.typeof(w).sharding
    if all(place.mesh.shape[name] == 1 for name in _names(tuple(place.spec)[axis])):
        return w  # XLA would keep the sums over a single device
    return _gathered(w, axis, place.spec)


def _over() -> tuple[str, ...]:
    """Returns the mesh axes that split rows and tokens; weight gradients are summed over them."""
    return tuple(name for place in spec("batch", "tokens") for name in _names(place))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(w, axis: int, place: P):
    # `reduced` types the gradient: each device has its own term of the sum.
    return jax.sharding.reshard(w, P(*place[:axis], None, *place[axis + 1 :], reduced=frozenset(_over())))


def _gather_backward(axis: int, place: P, _, dw):
    split = _names(place[axis])
    others = tuple(name for name in _over() if name not in split)

    def scatter(dw):
        count = math.prod(jax.lax.axis_size(name) for name in split)
        first = jnp.moveaxis(dw, axis, 0)
        parts = first.reshape(count, first.shape[0] // count, -1)
        part = jax.lax.psum(jax.lax.psum_scatter(parts, split, scatter_dimension=0), others)
        return jnp.moveaxis(part.reshape(-1, *first.shape[1:]), 0, axis)

    terms = P(*place[:axis], None, *place[axis + 1 :], unreduced=frozenset(_over()))
    return (jax.shard_map(scatter, in_specs=terms, out_specs=place, check_vma=False)(dw),)


_gathered.defvjp(lambda w, axis, place: (_gathered(w, axis, place), None), _gather_backward)


def split_in_chunks(w: jax.Array, axis: int, count: Callable[[int], int]) -> jax.Array:
    """Splits `w` into equal chunks along `axis`, each sharded like `w`. The chunks become the first axis.

    `axis` becomes two axes: the mesh parts, and one device's share in a chunk. `count` maps the size per device to a
    chunk count.
    """
    place = jax.typeof(w).sharding
    before, (name, *after) = tuple(place.spec)[:axis], tuple(place.spec)[axis:]
    parts = place.mesh.shape[name] if name else 1
    width = w.shape[axis] // parts
    shape = *w.shape[:axis], parts, count(width), width // count(width), *w.shape[axis + 1 :]
    explicit = AxisType.Explicit in place.mesh.axis_types
    w = jnp.reshape(w, shape, out_sharding=P(*before, name, None, None, *after) if explicit else None)
    return jnp.moveaxis(w, axis + 1, 0)
