"""Reads a decoder from GGUF or Hugging Face files onto the mesh.

Both formats store matrices as (out, in), one layer at a time. jprm stores (in, out), with heads as an axis and a
group's layers stacked. Tensor names and field meanings are defined in each format's module.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Array

from jprm.model import layers
from jprm.model.config import ModelConfig
from jprm.model.mesh import put, spec
from jprm.model.parameters import Dtype, held, join, new_parameters, summed_axes, wide
from jprm.model.transformer import axes_of, init

FIELDS = ("vocab_size", "width", "heads", "kv_heads", "head_dim", "mlp_width", "rope_theta", "rope_scaling",
          "norm_eps", "mixers", "mlps", "qkv_bias", "out_bias", "qk_norm", "qk_width_norm", "attention_gate", "design",
          "windows", "rope_layers", "rotary_dim", "query_growth", "rope_theta_local", "query_pre_attn_scalar",
          "attention_softcap", "logit_softcap")  # fmt: skip
"""Fields that must be equal in file and config. A config may have fewer layers."""

Slot = tuple[str, int | None]
"""(role, layer): the role as in `transformer.axes_of`; e.g. the embedding has no layer."""


def file_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns each role's tensor shape in a file, e.g. of "embed"; for a layer's role, one layer's shape.

    A matrix is (out, in), after an axis of experts. Other tensors have one axis, plus a second for convolution taps.
    """
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, config.width), "final_norm": (config.width,)}
    for role, (weight, size, _) in layers.stacks(config, 0, config.layers).items():
        first, last = ("E", "") if weight.axes[0] == "E" else ("", "W" if weight.axes[-1] == "W" else "")
        inner = "".join(axis for axis in weight.axes if axis not in first + last + weight.inputs)
        sides = (inner, weight.inputs) if weight.inputs else (inner,)
        matrix = [math.prod(size[axis] for axis in axes) for axes in sides]
        shapes[role] = (*(size[axis] for axis in first), *matrix, *(size[axis] for axis in last))
    return shapes


def slots(config: ModelConfig) -> Iterator[Slot]:
    """Yields (role, layer from 0) for every decoder tensor, grouped by role; `None` for embedding and final norm."""
    yield from (("embed", None), ("final_norm", None))
    for role, (_, _, at) in layers.stacks(config, 0, config.layers).items():
        for layer in at:
            yield role, layer


def to_file(role: str, array: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Converts one layer's parameter `role`, (in, ...), to the file layout of Hugging Face: (out, in), contiguous."""
    shape = file_shapes(config)[role]
    if role not in summed_axes() or role == "embed":
        return np.ascontiguousarray(array.reshape(shape))
    return np.ascontiguousarray(array.reshape(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2))


def from_file(role: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Converts a file's tensor (out, in) to one layer's parameter `role` of the given shape, as a view."""
    if role not in summed_axes() or role == "embed":
        return array.reshape(shape)
    return array.swapaxes(-1, -2).reshape(shape)


def check(path: str | os.PathLike, known: ModelConfig, config: ModelConfig) -> None:
    """Raises ValueError with the first field, layers aside, in which the file (`known`) and `config` differ."""
    for field in FIELDS:
        if getattr(known, field) != getattr(config, field):
            raise ValueError(f"{path}: {field} is {getattr(known, field)}, but {getattr(config, field)} in the config")


def check_layers(path: str | os.PathLike, count: int, changes: Mapping) -> None:
    """Raises ValueError if `changes` asks for more layers than the `count` in the file at `path`."""
    if changes.get("layers", count) > count:
        raise ValueError(f"{path}: has {count} layers, not {changes['layers']}")


def load(
    path: str | os.PathLike,
    config: ModelConfig,
    name_of: Callable[[str, int | None], str],
    shape_of: Callable[[str], tuple[int, ...]],
    read: Callable[[str, str], np.ndarray],
    dtype: Dtype = "float32",
    new: str = "",
    stored: Callable[[str, list[str], tuple[int, ...]], Any] | None = None,
) -> dict:
    """Loads {"embed", "final_norm", "layers_0": {role: stack}, ...}, stored as `dtype`, onto the mesh that is set.

    Parameters are allocated on the devices and filled layer by layer. Transposing and casting run there too, so the
    host holds a single tensor at a time, in the file's type.

    Args:
      path: name of the file, for errors.
      name_of: maps role and layer to the tensor's name.
      shape_of: maps that name to its shape, (out, in). A wrong one raises ValueError before any tensor is read.
      read: maps role and name to the tensor, in any float type, with rotary pairs at (i, i + H/2).
      new: regular expression, searched in paths, for exactly the parameters without a name in the format (else
        ValueError); these are omitted.
      stored: maps a matrix's role, its tensor names (one per layer) and the shape of one layer to the stack in the
        file's own quantisation, a tree of arrays that every device gets whole. Without it all are converted.
    """
    shapes = file_shapes(config)
    model = flatten_dict(jax.eval_shape(functools.partial(init, config), jax.random.key(0)), sep="/")
    flat = {name: x for name, x in model.items() if name.startswith("decoder/")}
    left_out = new_parameters(path, [name for name in flat if name.rpartition("/")[2] not in shapes], new)
    wanted = join({name: x for name, x in flat.items() if name not in left_out})["decoder"]
    for role, layer in slots(config):
        name = name_of(role, layer)
        if (actual := tuple(shape_of(name))) != shapes[role]:
            raise ValueError(f"{path}: tensor {name} is of shape {actual}, the model's is {shapes[role]}")

    def get(role: str, layer: int | None, shape: tuple[int, ...]) -> np.ndarray:
        return from_file(role, read(role, name_of(role, layer)), shape)

    def outer(role: str, x: jax.ShapeDtypeStruct) -> Any:
        if stored and role == "embed":
            return _everywhere(stored(role, [name_of(role, None)], x.shape[1:]))
        return _held(role, placed(role, get(role, None, x.shape)), dtype)

    def stack(role: str, x: jax.ShapeDtypeStruct, at: tuple[int, ...]) -> Any:
        if stored and role in summed_axes() and role not in wide():
            return _everywhere(stored(role, [name_of(role, layer) for layer in at], x.shape[1:]))
        array = jax.tree.map(_zeros, jax.eval_shape(functools.partial(_held, role, dtype=dtype), x))
        for i, layer in enumerate(at):
            array = _fill(array, placed(role, get(role, layer, x.shape[1:]), axes_of(role)[1:]), i, role, dtype)
        return array

    params = {part: outer(part, x) for part, x in wanted.items() if not isinstance(x, Mapping)}
    for i, span in enumerate(layers.spans(config)):
        of_role = layers.stacks(config, *span)
        params[f"layers_{i}"] = {role: stack(role, x, of_role[role][2]) for role, x in wanted[f"layers_{i}"].items()}
    return params


def placed(role: str, array: np.ndarray, axes: tuple[str | None, ...] | None = None) -> Array:
    """Returns parameter `role` sharded by `axes` (default: its own) on the mesh that is set, else on one device."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jnp.asarray(array)
    return put(array, jax.sharding.NamedSharding(mesh, spec(*(axes or axes_of(role)))))


_held = jax.jit(held, static_argnames=("role", "dtype"))


def _zeros(shape: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(shape.shape, shape.dtype, out_sharding=None if shape.sharding is None else shape.sharding.spec)


def _everywhere(tree: Any) -> Any:
    mesh = jax.sharding.get_mesh()
    return jax.tree.map(jnp.asarray, tree) if mesh.empty else put(tree, jax.NamedSharding(mesh, spec()))


@functools.partial(jax.jit, static_argnums=(3, 4), donate_argnums=0)
def _fill(stack: Any, layer: Array, i: Array, role: str, dtype: Dtype) -> Any:
    """Replaces layer i of `stack` in place."""
    stored = held(role, layer, dtype)
    return jax.tree.map(lambda old, new: jax.lax.dynamic_update_index_in_dim(old, new, i, 0), stack, stored)
