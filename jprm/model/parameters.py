"""Parameters as flat dicts {path: array}, split into trained and frozen ones, or stored in a smaller type to score."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import get_args

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float
from jaxtyping import Int8 as Int8Values

from jprm.model import Dtype, layers


def split(params: dict, freeze: str, only: str = "") -> tuple[dict, dict]:
    """Returns the trained and the frozen parameters as flat dicts {path: array}.

    `freeze` and `only` are patterns; parameters that `only` does not match are frozen too.
    """
    flat = flatten_dict(params, sep="/")
    matched = {path for path in flat if freeze and re.search(freeze, path)}
    frozen = {path: value for path, value in flat.items() if path in matched or not re.search(only, path)}
    if freeze and not matched:
        raise ValueError(f"freeze={freeze!r} matches no parameter; paths are {', '.join(sorted(flat))}")
    if len(frozen) == len(flat):
        raise ValueError(f"freeze={freeze!r} matches every parameter: nothing is left to train")
    return {path: value for path, value in flat.items() if path not in frozen}, frozen


def new_parameters(path: object, lacking: Iterable[str], pattern: str) -> set[str]:
    """Returns the parameters without weights, which start at random: `lacking`, as far as the pattern matches them.

    Raises ValueError, naming `path`, for parameters that it does not match, and where it matches none.
    """
    new = {name for name in lacking if pattern and re.search(pattern, name)}
    if rest := sorted(set(lacking) - new):
        raise ValueError(
            f"{path}: has no weights for {', '.join(rest)}. Load another model, or set new_parameters to a pattern that"
            " matches them, to train them from random ones"
        )
    if pattern and not new:
        raise ValueError(f"new_parameters={pattern!r}: {path} lacks no parameter that it matches; leave it empty")
    return new


def join(*flat: dict) -> dict:
    """Returns the nested dict of flat dicts."""
    return unflatten_dict({path: value for part in flat for path, value in part.items()}, sep="/")


# ---------------------------------------------------------------------------------------------------- bfloat16 and int8
#
# A matrix in int8 has one scale per channel and takes a quarter of its float32 memory. Each layer's weights are
# dequantised when the layer is computed; products and sums stay in the computation's dtype.

SUMMED: dict[str, tuple[int, ...]] = {
    "embed": (-1,),
    **{role: layers.summed(weight) for role, weight in layers.builtin().items() if weight.inputs},
}
"""Matrices, and the axes that their products sum over, counted from the last. Other axes are channels. As int8 are
stored those that are not WIDE."""

WIDE = {"final_norm"} | {role for role, weight in layers.builtin().items() if weight.wide}
"""Roles that are float32 whatever the others are."""


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
    """Returns a decoder parameter as it is stored. Norms are float32, other vectors float32 unless dtype is bfloat16.

    Raises ValueError for another type, and in int8 for a role whose summed axes are not known.
    """
    if dtype not in get_args(Dtype):
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(get_args(Dtype))}")
    if dtype == "int8" and role in SUMMED and role not in WIDE:
        return quantized(x, SUMMED[role])
    known = role in WIDE or role.endswith(("norm", "bias")) or role in layers.builtin()
    if dtype == "int8" and not known:
        raise ValueError(
            f"dtype='int8': the axes that products with {role!r} sum over are not known. Add them to"
            " jprm.model.parameters.SUMMED, or use bfloat16"
        )
    return x.astype("bfloat16" if dtype == "bfloat16" and not (role in WIDE or role.endswith("norm")) else "float32")


@functools.partial(jax.jit, static_argnums=1)
def held_decoder(decoder: dict, dtype: Dtype) -> dict:
    """Returns all parameters of a decoder as they are stored, each in its place on the mesh."""
    return jax.tree_util.tree_map_with_path(lambda path, x: held(path[-1].key, x, dtype), decoder)
