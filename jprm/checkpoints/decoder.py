"""Reads a decoder from GGUF or Hugging Face files onto the mesh.

Both formats keep matrices as (out, in), a layer at a time. jprm keeps them as (in, out), with the heads as an axis and
a group's layers stacked. Names of tensors and meanings of fields are in the format's own module.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Array

from jprm.model.config import ModelConfig
from jprm.model.mesh import put, spec
from jprm.model.parameters import SUMMED, Dtype, Int8, held, join, new_parameters, quantized
from jprm.model.transformer import AXES, init

FIELDS = ("vocab_size", "width", "heads", "kv_heads", "head_dim", "mlp_width", "rope_theta", "rope_scaling",
          "norm_eps", "qkv_bias", "qk_norm", "design", "windows", "rope_theta_local", "query_pre_attn_scalar",
          "attention_softcap", "logit_softcap")  # fmt: skip
"""Fields in which a file and a config must agree; a config may have fewer layers."""

Slot = tuple[str, int | None]
"""A role, a key of `transformer.AXES`, and its layer: None for what is not in a layer."""


def file_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each role's tensor in a file, of one layer where the role is in layers."""
    D, F, H = config.width, config.mlp_width, config.head_dim
    Q, K = config.heads * H, config.kv_heads * H
    shapes = {
        "embed": (config.vocab_size, D), "final_norm": (D,), "attention_norm": (D,), "query": (Q, D), "key": (K, D),
        "value": (K, D), "out": (D, Q), "mlp_norm": (D,), "gate": (F, D), "up": (F, D), "down": (D, F),
    }  # fmt: skip
    if config.qkv_bias:
        shapes |= {"query_bias": (Q,), "key_bias": (K,), "value_bias": (K,)}
    if config.design == "gemma":
        shapes |= {"attention_post_norm": (D,), "mlp_post_norm": (D,)}
    if config.qk_norm:
        shapes |= {"query_norm": (H,), "key_norm": (H,)}
    return shapes


def slots(config: ModelConfig) -> Iterator[Slot]:
    """Yields every tensor of the decoder, all layers of a role together."""
    for role in file_shapes(config):
        for layer in (None,) if role in ("embed", "final_norm") else range(config.layers):
            yield role, layer


def to_file(role: str, array: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Returns one layer's parameter as files have it, (out, in)."""
    shape = file_shapes(config)[role]
    return np.ascontiguousarray(array if role == "embed" else array.reshape(shape[::-1]).T)


def from_file(role: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a file's tensor as one layer's parameter of the shape, a view: the inverse of `to_file`."""
    return array if role == "embed" else array.T.reshape(shape)


def check(path: str | os.PathLike, known: ModelConfig, config: ModelConfig) -> None:
    """Raises ValueError naming the field in which the file (`known`) differs from the requested config."""
    for field in FIELDS:
        if getattr(known, field) != getattr(config, field):
            raise ValueError(f"{path}: {field} is {getattr(known, field)}, the config says {getattr(config, field)}")


def check_layers(path: str | os.PathLike, there: int, changes: Mapping) -> None:
    """Raises ValueError where `changes` requests more layers than the file has."""
    if changes.get("layers", there) > there:
        raise ValueError(f"{path}: has {there} layers, not {changes['layers']}")


def load(
    path: str | os.PathLike,
    config: ModelConfig,
    name_of: Callable[[str, int | None], str],
    shape_of: Callable[[str], tuple[int, ...]],
    read: Callable[[str, str], np.ndarray],
    dtype: Dtype = "float32",
    new: str = "",
) -> dict:
    """Returns the decoder's parameters, stored as `dtype`, each in its place on the mesh that is set.

    A parameter is allocated on the devices and filled there a layer at a time. Tensors are transposed and cast on the
    devices too, so the host holds one tensor of the file, in the file's type.

    Args:
      name_of: role and layer to the tensor's name.
      shape_of: its name to its shape, (out, in); all are checked before the first is read.
      read: role and name to the tensor, in any float type, rotary pairs at (i, i + H/2).
      new: a pattern of parameters that files of this format do not have, which are left out.
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

    first_of = dict(zip(range(len(config.layer_groups)), np.cumsum((0, *config.layer_groups)).tolist(), strict=False))
    params: dict = {}
    for part, shape in wanted.items():
        if not isinstance(shape, Mapping):
            params[part] = _held(part, _place(part, get(part, None, shape.shape)), dtype)
            continue
        first = first_of[int(part.removeprefix("layers_"))]
        params[part] = {}
        for role, stack in shape.items():
            array = jax.tree.map(_zeros, jax.eval_shape(functools.partial(_held, role, dtype=dtype), stack))
            for i in range(stack.shape[0]):
                layer = _place(role, get(role, first + i, stack.shape[1:]), AXES[role][1:])
                array = _fill(array, layer, i, SUMMED.get(role, ()))
            params[part][role] = array
    return params


def _place(role: str, array: np.ndarray, axes: tuple[str | None, ...] | None = None) -> Array:
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jnp.asarray(array)
    return put(array, jax.sharding.NamedSharding(mesh, spec(*(axes or AXES[role]))))


_held = jax.jit(held, static_argnames=("role", "dtype"))


def _zeros(shape: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(shape.shape, shape.dtype, out_sharding=None if shape.sharding is None else shape.sharding.spec)


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _fill(stack: Array | Int8, layer: Array, i: Array, summed: tuple[int, ...]) -> Array | Int8:
    """Replaces the i-th layer of `stack` in place."""
    stored = quantized(layer, summed) if isinstance(stack, Int8) else layer.astype(stack.dtype)
    return jax.tree.map(lambda old, new: jax.lax.dynamic_update_index_in_dim(old, new, i, 0), stack, stored)
