"""Attention as a kind of layer: projections, norms, rotary positions, and an implementation of `jprm.model.attention`.

A window is data of a layer, and so is whether it rotates: layers that differ in these alone are scanned together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jprm.model import attention
from jprm.model.attention import PROJECTED
from jprm.model.config import ModelConfig, RopeScaling, frequencies
from jprm.model.layers import Kind, Weight, gathered_weights, product, rms_norm
from jprm.model.mesh import reshape, stream

WEIGHTS = {
    "query": Weight("DKGH", "D"),
    "key": Weight("DKH", "D"),
    "value": Weight("DKH", "D"),
    "out": Weight("KGHD", "KGH"),
    "query_bias": Weight("KGH", when=lambda c: c.qkv_bias),
    "key_bias": Weight("KH", when=lambda c: c.qkv_bias),
    "value_bias": Weight("KH", when=lambda c: c.qkv_bias),
    "query_norm": Weight("H", value=None, when=lambda c: c.qk_norm),
    "key_norm": Weight("H", value=None, when=lambda c: c.qk_norm),
    "query_width_norm": Weight("KGH", value=None, when=lambda c: c.qk_width_norm),
    "key_width_norm": Weight("KH", value=None, when=lambda c: c.qk_width_norm),
    "query_gate": Weight("DKGH", "D", when=lambda c: c.attention_gate),
}
"""Letters: D width, K key-value heads, G query heads a key-value head, H head size."""

UNBOUNDED = 2**30
"""The window of a layer without one among layers with windows: longer than any path."""

Rotation = tuple[Array, Array]
"""cos and sin, as `rotary` returns them."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """What attention needs of the rows: rotations for layers without and with a window, and the implementation's."""

    rotations: tuple[Rotation, Rotation]
    growth: Array | None  # (B, T), a factor of queries; None: 1
    rows: Any


def plan(position_BT: Int[Array, "B T"], until_BT: Int[Array, "B T"], config: ModelConfig) -> Plan:
    return Plan(*positions(position_BT, config), attention.plan(until_BT, position_BT, config))


def positions(position_BT: Int[Array, "B T"], config: ModelConfig) -> tuple[tuple[Rotation, Rotation], Array | None]:
    """Returns the rotations and the growth of a `Plan`."""
    growth_BT = None
    if config.query_growth:  # Ministral 3, after Llama 4: 1 + beta log(1 + floor(position / positions of training))
        beta, trained = config.query_growth
        growth_BT = 1 + beta * jnp.log(1 + jnp.floor(position_BT / trained))
    return (rotary(position_BT, config), rotary(position_BT, config, local=True)), growth_BT


def rotary(position_BT: Int[Array, "B T"], config: ModelConfig, local: bool = False) -> Rotation:
    """Returns cos and sin of position x frequency, each (B, T, rotary_dim / 2), in float32 (Su et al. 2021).

    `local`: for layers with a window, which may have a theta of their own.
    """
    theta, scaling = config.rope_theta, config.rope_scaling
    if local and config.rope_theta_local:
        theta, scaling = config.rope_theta_local, RopeScaling()
    size = config.rotary_dim or config.head_dim
    angle_BTH = position_BT[..., None].astype(jnp.float32) * frequencies(size, theta, scaling)
    return jnp.cos(angle_BTH) * scaling.attention_factor, jnp.sin(angle_BTH) * scaling.attention_factor


def windows(config: ModelConfig) -> np.ndarray | None:
    """Returns (L,) int32, the window of every layer as scanned data; None if no layer has one."""
    if not config.windows:
        return None
    return np.array([config.windows[i % len(config.windows)] or UNBOUNDED for i in range(config.layers)], np.int32)


def settings(config: ModelConfig) -> dict[str, np.ndarray | None]:
    """Returns the window of every layer, and whether it rotates; None where all are alike."""
    rope = config.rope_layers
    turns_L = np.array([bool(rope[i % len(rope)]) for i in range(config.layers)]) if rope else None
    return {"window": windows(config), "turns": turns_L}


def rotation_of(here: Mapping[str, Any], rotations: tuple[Rotation, Rotation], config: ModelConfig) -> Rotation:
    """Returns a layer's rotation, of those for layers without and with a window, or none."""
    cos_BTH, sin_BTH = rotations[0]
    if config.rope_theta_local:
        local = here["window"] < UNBOUNDED
        cos_BTH, sin_BTH = (jnp.where(local, b, a) for a, b in zip(*rotations, strict=True))
    if here["turns"] is not None:
        cos_BTH, sin_BTH = jnp.where(here["turns"], cos_BTH, 1), jnp.where(here["turns"], sin_BTH, 0)
    return cos_BTH, sin_BTH


def rotate(x: Float[Array, "*T N H"], cos_BTH: Array, sin_BTH: Array) -> Float[Array, "*T N H"]:
    """Rotates the pairs (i, i + R/2) of the first R, the order of Hugging Face's checkpoints, in float32."""
    between = range(cos_BTH.ndim - 1, x.ndim - 1)
    cos, sin = jnp.expand_dims(cos_BTH, between), jnp.expand_dims(sin_BTH, between)
    size = 2 * cos_BTH.shape[-1]
    rest = [x[..., size:]] if size < x.shape[-1] else []
    low, high = jnp.split(x[..., :size].astype(jnp.float32), 2, axis=-1)
    turned = [low * cos - high * sin, high * cos + low * sin]
    return jnp.concatenate([part.astype(x.dtype) for part in turned] + rest, axis=-1)


def fused_qkv(w: Mapping[str, Array]) -> dict[str, Array]:
    """Adds `qkv`, the weights of queries, keys and values side by side: CPUs are faster at one larger product.

    (Gate and up are not: the MLP of SmolLM2-135M on 8,192 tokens, forward and backward, takes 1.60 s of processor time
    apart and 1.65 s as one product.)
    """
    return {**w, "qkv": jnp.concatenate([w["query"], w["key"][:, :, None], w["value"][:, :, None]], axis=2)}


def project_heads(y_BTD, w: Mapping[str, Array], rotation: Rotation, growth_BT, config: ModelConfig):
    """Returns rotated queries (B, T, K, G, H) and keys, and values (B, T, K, H). B and T may be one axis."""
    if "qkv" in w:
        qkv_BTKXH = product(y_BTD, w["qkv"], config)
        q_BTKGH, k_BTKXH, v_BTKXH = jax.lax.split(qkv_BTKXH, (config.group, 1, 1), axis=qkv_BTKXH.ndim - 2)
        k_BTKH, v_BTKH = k_BTKXH[..., 0, :], v_BTKXH[..., 0, :]
    else:
        q_BTKGH, k_BTKH, v_BTKH = (product(y_BTD, w[name], config) for name in ("query", "key", "value"))
    if config.qkv_bias:
        q_BTKGH, k_BTKH, v_BTKH = q_BTKGH + w["query_bias"], k_BTKH + w["key_bias"], v_BTKH + w["value_bias"]
    if config.qk_norm:
        q_BTKGH = rms_norm(q_BTKGH, w["query_norm"], config.norm_eps)
        k_BTKH = rms_norm(k_BTKH, w["key_norm"], config.norm_eps)
    if config.qk_width_norm:
        q_BTKGH = width_norm(q_BTKGH, w["query_width_norm"], config.norm_eps)
        k_BTKH = width_norm(k_BTKH, w["key_width_norm"], config.norm_eps)
    q_BTKGH, k_BTKH = rotate(q_BTKGH, *rotation), rotate(k_BTKH, *rotation)
    if growth_BT is not None:
        q_BTKGH = q_BTKGH * growth_BT[..., None, None, None].astype(q_BTKGH.dtype)
    return tuple(checkpoint_name(x, PROJECTED) for x in (q_BTKGH, k_BTKH, v_BTKH))


def width_norm(x: Array, scale: Array, eps: float) -> Array:
    """Returns `rms_norm` over all heads together (OLMo 2 and 3); `scale` has the heads' axes."""
    axes = tuple(range(x.ndim - scale.ndim, x.ndim))
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=axes, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype)


def project_out(y_BTKGH, y_BTD, w: Mapping[str, Array], config: ModelConfig) -> Array:
    """Returns the output of heads, gated by what they were projected from (Qwen3.5)."""
    if config.attention_gate:
        y_BTKGH = y_BTKGH * jax.nn.sigmoid(product(y_BTD, w["query_gate"], config))
    return product(y_BTKGH, w["out"], config, 3, stream(y_BTD))


def apply(x_BTD: Float[Array, "B T D"], w: Mapping[str, Array], plan: Plan, here, config: ModelConfig):
    """Returns the output of attention. CPUs take B and T as one axis, queries, keys and values as one product."""
    own, (B, T) = attention.find(config.attention), x_BTD.shape[:2]
    w = {role: w[role] for role in WEIGHTS if role in w}
    w = fused_qkv(w) if own.flat else gathered_weights(w, WEIGHTS, config)

    def flat(x_BTX, *axes):
        return reshape(x_BTX, (B * T, *x_BTX.shape[2:]), "batch", *axes) if own.flat else x_BTX

    def rows(x_NX, *axes):
        return reshape(x_NX, (B, T, *x_NX.shape[1:]), "batch", *axes) if own.flat else x_NX

    # Scan's partial evaluation moves what depends on the plan alone out of the loop over layers. That is right for
    # rotations, but would keep the masks of every block: the barrier ties them to the layer.
    x_BTD, of_rows = jax.lax.optimization_barrier((x_BTD, plan.rows))
    x_BTD, (cos_BTH, sin_BTH) = flat(x_BTD), map(flat, rotation_of(here, plan.rotations, config))
    growth_BT = None if plan.growth is None else flat(plan.growth)
    qkv = project_heads(x_BTD, w, (cos_BTH, sin_BTH), growth_BT, config)
    y_BTKGH = own.attend(*(rows(x, None, "kv_heads") for x in qkv), of_rows, config, here["window"])
    return rows(project_out(flat(y_BTKGH, "kv_heads"), x_BTD, w, config)), {}


def sizes(config: ModelConfig) -> dict[str, int]:
    return {"D": config.width, "K": config.kv_heads, "G": config.group, "H": config.head_dim}


def visible_pairs(tokens: int, window: int = UNBOUNDED) -> int:
    """Returns the pairs of query and key in a row that one chain fills: the most of any row."""
    seen = min(window, tokens)
    return seen * tokens - seen * (seen - 1) // 2


def flops(config: ModelConfig, tokens: int, layer: int) -> float:
    """Returns the FLOPs of logits and of their use, 2 H each a pair and head."""
    window_L = windows(config)
    pairs = visible_pairs(tokens, UNBOUNDED if window_L is None else int(window_L[layer]))
    return 4.0 * config.heads * config.head_dim * pairs


def kernels(config: ModelConfig, rows: int, tokens: int, split: Mapping[str, int]) -> dict[str, float]:
    return attention.find(config.attention).flops(config, rows, tokens, split["tensor"], split["context"])


def refuses(config: ModelConfig, context: int) -> str | None:
    return attention.find(config.attention).refuses(config, None, context)


ATTENTION = Kind(WEIGHTS, sizes, apply, plan, settings, refuses, flops, kernels)
