"""Parameters stored in a smaller type for scoring: bfloat16, or int8 with one scale per channel.

A matrix in int8 takes a quarter of its float32 memory. Each layer's weights are dequantised when the layer is computed;
products and sums stay in the computation's dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from jaxtyping import Int8 as Int8Values

from jprm.model import Dtype

SUMMED: dict[str, tuple[int, ...]] = {
    "embed": (-1,), "query": (-4,), "key": (-3,), "value": (-3,), "out": (-4, -3, -2), "gate": (-2,), "up": (-2,),
    "down": (-2,),
}  # fmt: skip
"""Roles stored as int8, and the axes that their products sum over, counted from the last. Other axes are channels."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8:
    """values x scale; the scale has size 1 along the summed axes."""

    values: Int8Values[Array, "*S"]
    scale: Float[Array, "*S1"]

    def astype(self, dtype) -> Array:
        return (self.values.astype(jnp.float32) * self.scale).astype(dtype)


def quantized(x: Float[Array, "*S"], axes: tuple[int, ...]) -> Int8:
    """Rounds to multiples of 1/127 of the largest magnitude along `axes`, with an error of at most half of one."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=axes, keepdims=True) / 127
    values = jnp.round(x / jnp.where(scale > 0, scale, 1)).astype(jnp.int8)
    return Int8(values, scale)


def held(role: str, x: Float[Array, "*S"], dtype: Dtype) -> Array | Int8:
    """Returns a decoder parameter as it is stored. Norms are float32, biases float32 unless dtype is bfloat16.

    Raises ValueError for another type, and in int8 for a role whose summed axes are not known.
    """
    if dtype not in get_args(Dtype):
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(get_args(Dtype))}")
    if dtype == "int8" and role in SUMMED:
        return quantized(x, SUMMED[role])
    if dtype == "int8" and not role.endswith(("norm", "bias")):
        raise ValueError(
            f"dtype='int8': the axes that products with {role!r} sum over are not known. Add them to"
            " jprm.model.int8.SUMMED, or use bfloat16"
        )
    return x.astype("bfloat16" if dtype == "bfloat16" and not role.endswith("norm") else "float32")


@functools.partial(jax.jit, static_argnums=1)
def held_decoder(decoder: dict, dtype: Dtype) -> dict:
    """Returns all parameters of a decoder as they are stored, each in its place on the mesh."""
    return jax.tree_util.tree_map_with_path(lambda path, x: held(path[-1].key, x, dtype), decoder)
