"""What an attention implementation is, and what several of them share.

Query i sees key j if and only if j <= i < until[j]. In a layer with a sliding window the key must also be less than
`window` positions before the query. Positions are depths in the tree, so a window follows the query's own path.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

if TYPE_CHECKING:
    from jprm.model.config import ModelConfig

HIDDEN = -1e30
"""The logit of a hidden key. It is finite, so that a row of hidden logits has no NaN; exp(-1e30 - max) is exactly 0 in
float32."""

SAVED = "attention"
"""The name of what `remat="dots"` keeps, beside products."""

PROJECTED = "projected"
"""The name of what `remat="attention"` keeps beside SAVED: queries, keys, values, and the residual stream after."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute attention. To add one, write a file with such a record and register it in `registry`.

    plan: (until (B, T), position (B, T), config) to what attention needs to know of the rows. It is computed once for
        all layers, and raises ValueError for rows of a length that is not supported.
    attend: (q (B, T, K, G, H), k (B, S, K, H), v (B, S, K, H), plan, config, window) to (B, T, K, G, H): grouped-query
        attention with a softmax in float32. `window` is the layer's, in positions; None is none.
    refuses: (config, backend, context) to why the model, the backend (None: any) or rows in `context` parts are not
        supported; None where they are.
    backend: where it is fast; "" for everywhere. Elsewhere `suited` replaces it.
    chain_rows: whether a row must hold one chain. The packer then packs no others.
    flat: whether projections take rows and tokens as one axis, and queries, keys and values in one product. CPUs are
        faster so: XLA copies a weight's gradient that sums over two axes.
    flops: (config, rows, tokens, tensor, context) to FLOPs of every kernel's call on one device, for `jprm plan`.
    """

    plan: Callable[[Array, Array, ModelConfig], Any]
    attend: Callable[..., Array]
    refuses: Callable[[ModelConfig, str | None, int], str | None] = lambda config, backend, context: None
    backend: str = ""
    chain_rows: bool = False
    flat: bool = False
    flops: Callable[[ModelConfig, int, int, int, int], dict[str, float]] = lambda *_: {}


def with_backward(forward: Callable, backward: Callable) -> Callable[..., Array]:
    """Returns `attend` of a forward pass, (q, k, v, plan, config) to (output, saved), and its gradient's function."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
    def attention(q_BTKGH, k_BTKH, v_BTKH, plan, config):
        return forward(q_BTKGH, k_BTKH, v_BTKH, plan, config)[0]

    attention.defvjp(forward, backward)
    return lambda q, k, v, plan, config, window=None: attention(
        q, k, v, dataclasses.replace(plan, window=window), config
    )


def capped(logit, softcap: float):
    """Returns softcap x tanh(logit / softcap), or the logit where softcap is 0 (Gemma 2; Bello et al. 2016)."""
    return softcap * jnp.tanh(logit / softcap) if softcap else logit


def unsplit_only(name: str, context: int) -> str | None:
    """Returns why an implementation refuses rows in `context` parts, None for one part."""
    if context == 1:
        return None
    return (
        f"attention={name!r} does not split rows over the mesh's context={context}; choose attention='kernel' for TPUs,"
        " 'blocked' elsewhere, or mesh.context=1"
    )
