"""The gated MLP a piece of its width at a time, for full rematerialisation: the way that holds the least.

The backward pass of the whole MLP holds four arrays of all tokens and the whole MLP width, three gathered matrices and
three gradients of such: on long rows and large meshes most of what a layer takes. Here it holds a piece of each. Every
piece's weights are gathered when it is computed, and its gradients scattered; nothing is computed more often than under
full rematerialisation of the whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jprm.model.collectives import pieces, whole
from jprm.model.config import ModelConfig
from jprm.model.mesh import stream

PIECES = 8
"""Of Qwen2.5-Math-7B's MLP a piece is 2,368 wide. Of a row of 8,192 tokens an array of it is 37 MiB in bfloat16: less
than one of the hidden states, 56 MiB, of which attention holds several meanwhile."""


def count(width: int) -> int:
    """Pieces of the MLP width that a device has: PIECES, or the most that divide it."""
    return math.gcd(PIECES, width)


def pieced(w: Mapping[str, Array]) -> dict[str, Any]:
    """A layer's weights, those of the MLP in pieces: gate and up (P, D, N, F), down (P, N, F, D).

    N are the parts that the mesh splits the MLP width into, F what a device has of a piece.
    """
    axis = {"gate": 1, "up": 1, "down": 0}
    rest = {name: x for name, x in w.items() if name not in axis}
    return {**rest, "pieces": {name: pieces(w[name], axis[name], count) for name in axis}}


def activated(gate: Float[Array, "*B F"], config: ModelConfig) -> Float[Array, "*B F"]:
    return jax.nn.gelu(gate, approximate=True) if config.design == "gemma" else jax.nn.silu(gate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def in_pieces(x_BTD: Float[Array, "B T D"], w: Mapping[str, Array], config: ModelConfig) -> Float[Array, "B T D"]:
    """The gated MLP with weights of `pieced`; its pieces, and those of its input's gradient, are added in float32."""
    return _forward(x_BTD, w, config)[0]


def _piece(x_BTD, w, config: ModelConfig, dtype=None):
    gate_BTNF, up_BTNF = (jnp.einsum("BTD,DNF->BTNF", x_BTD, whole(w[name], 0)) for name in ("gate", "up"))
    h_BTNF, place = activated(gate_BTNF, config) * up_BTNF, stream(x_BTD)
    return jnp.einsum("BTNF,NFD->BTD", h_BTNF, whole(w["down"], 2), out_sharding=place, preferred_element_type=dtype)


def _forward(x_BTD, w, config: ModelConfig):
    zero_BTD = jnp.zeros_like(x_BTD, jnp.float32)

    def add(y_BTD, w):
        return y_BTD + _piece(x_BTD, w, config, jnp.float32), None

    return jax.lax.scan(add, zero_BTD, w)[0].astype(x_BTD.dtype), (x_BTD, w)


def _backward(config: ModelConfig, saved, dy_BTD):
    x_BTD, w = saved

    def add(dx_BTD, w):
        more_BTD, dw = jax.vjp(lambda x_BTD, w: _piece(x_BTD, w, config), x_BTD, w)[1](dy_BTD)
        return dx_BTD + more_BTD.astype(jnp.float32), dw

    dx_BTD, dw = jax.lax.scan(add, jnp.zeros_like(x_BTD, jnp.float32), w)
    return dx_BTD.astype(x_BTD.dtype), dw


in_pieces.defvjp(_forward, _backward)
