"""The gated MLP (Shazeer 2020): down(activation(gate x) * (up x))."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jprm.model.attention import find as find_attention
from jprm.model.config import ModelConfig
from jprm.model.layers import Kind, Weight, activated, gathered_weights, product
from jprm.model.mesh import gathered_weight, reshape, split_in_chunks, stream

WEIGHTS = {"gate": Weight("DF", "D"), "up": Weight("DF", "D"), "down": Weight("FD", "F")}


def apply(x_BTD: Float[Array, "B T D"], w: Mapping[str, Array], plan, here, config: ModelConfig):
    """Returns the MLP's output. Without a split of tokens CPUs take B and T as one axis: see `Implementation.flat`."""
    w = {role: w[role] for role in WEIGHTS}
    if find_attention(config.attention).flat:
        y_XD = gated(reshape(x_BTD, (-1, x_BTD.shape[-1]), "batch"), w, config)
        return reshape(y_XD, x_BTD.shape, "batch"), {}
    if config.remat in ("full", "attention") and x_BTD.ndim == 3:
        return cast(Array, chunked_mlp(x_BTD, with_chunks(w), config)), {}
    return gated(x_BTD, gathered_weights(w, WEIGHTS, config), config), {}


def gated(x_BTD: Float[Array, "*B D"], w: Mapping[str, Array], config: ModelConfig) -> Float[Array, "*B D"]:
    """Returns the gated MLP by whole matrices."""
    gate_BTF, up_BTF = (product(x_BTD, w[name], config) for name in ("gate", "up"))
    return product(activated(gate_BTF, config) * up_BTF, w["down"], config, 1, stream(x_BTD))


DENSE = Kind(WEIGHTS, lambda config: {"D": config.width, "F": config.mlp_width}, apply)

# ---------------------------------------------------------------------------------------------------- chunks of the MLP
#
# For full rematerialisation: the least memory of all. The backward pass of the unchunked MLP keeps four arrays of all
# tokens and the full MLP width, three gathered matrices and their three gradients: on long rows and large meshes most
# of a layer's memory. Here it keeps one chunk of each. A chunk's weights are gathered when it is computed, and its
# gradients scattered. Nothing is computed more often than under full rematerialisation without chunks.

CHUNKS = 8
"""A chunk of Qwen2.5-Math-7B's MLP is 2,368 wide. For a row of 8,192 tokens its activations take 37 MiB in bfloat16:
less than the 56 MiB of hidden states, several copies of which attention keeps meanwhile."""


def chunk_count(width: int) -> int:
    """Returns the number of chunks of a device's MLP width: the largest divisor of both it and CHUNKS."""
    return math.gcd(CHUNKS, width)


def with_chunks(w: Mapping[str, Array]) -> dict[str, Array]:
    """Returns a layer's matrices in chunks: gate and up (P, D, N, F), down (P, N, F, D).

    P are the chunks, N the parts into which the mesh splits the MLP width, F the width of a device's part of a chunk.
    """
    axis = {"gate": 1, "up": 1, "down": 0}
    return {name: split_in_chunks(w[name], axis[name], chunk_count) for name in axis}


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def chunked_mlp(x_BTD: Float[Array, "B T D"], w: Mapping[str, Array], config: ModelConfig) -> Float[Array, "B T D"]:
    """Returns the gated MLP by chunks of weights (`with_chunks`), whose outputs and input gradients sum in float32."""
    return _chunks_forward(x_BTD, w, config)[0]


def _chunk(x_BTD, w, config: ModelConfig, dtype=None):
    gate_BTNF, up_BTNF = (jnp.einsum("BTD,DNF->BTNF", x_BTD, gathered_weight(w[name], 0)) for name in ("gate", "up"))
    h_BTNF, place = activated(gate_BTNF, config) * up_BTNF, stream(x_BTD)
    return jnp.einsum(
        "BTNF,NFD->BTD", h_BTNF, gathered_weight(w["down"], 2), out_sharding=place, preferred_element_type=dtype
    )


def _chunks_forward(x_BTD, w, config: ModelConfig):
    zero_BTD = jnp.zeros_like(x_BTD, jnp.float32)

    def add(y_BTD, w):
        return y_BTD + _chunk(x_BTD, w, config, jnp.float32), None

    return jax.lax.scan(add, zero_BTD, w)[0].astype(x_BTD.dtype), (x_BTD, w)


def _chunks_backward(config: ModelConfig, saved, dy_BTD):
    x_BTD, w = saved

    def add(dx_BTD, w):
        more_BTD, dw = jax.vjp(lambda x_BTD, w: _chunk(x_BTD, w, config), x_BTD, w)[1](dy_BTD)
        return dx_BTD + more_BTD.astype(jnp.float32), dw

    dx_BTD, dw = jax.lax.scan(add, jnp.zeros_like(x_BTD, jnp.float32), w)
    return dx_BTD.astype(x_BTD.dtype), dw


chunked_mlp.defvjp(_chunks_forward, _chunks_backward)
