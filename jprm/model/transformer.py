"""The decoder: Linen modules own names and initialisers, free functions hold the mathematics as einsums.

Parameters are a plain dict, `{"embed", "layers_0": {...}, ..., "final_norm", "head": {...}}`, with the layers of a
group stacked on a leading axis and scanned. Letters: B rows, T tokens, S step slots, D width, K key-value heads,
G query heads a key-value head, H head size, F MLP width, V vocabulary, L layers, C classes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jprm.model import attention
from jprm.model.attention import PROJECTED, SAVED, capped
from jprm.model.config import ModelConfig, RopeScaling, frequencies, step_layer
from jprm.model.heads import find
from jprm.model.mesh import at_tokens, embedding_lookup, gathered_weight, reshape, sharding, split_in_chunks, stream
from jprm.model.parameters import Int8
from jprm.rows import Rows

AXES: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", "embed"),
    "final_norm": (None,),
    "kernel": ("embed", None),
    "bias": (None,),
    "hidden_kernel": ("embed", None),
    "hidden_bias": (None,),
    # of a group of layers: the first axis is the layer
    "attention_norm": (None, None),
    "query": (None, "embed", "kv_heads", None, None),
    "key": (None, "embed", "kv_heads", None),
    "value": (None, "embed", "kv_heads", None),
    "query_bias": (None, "kv_heads", None, None),
    "key_bias": (None, "kv_heads", None),
    "value_bias": (None, "kv_heads", None),
    "query_norm": (None, None),
    "key_norm": (None, None),
    "out": (None, "kv_heads", None, None, "embed"),
    "attention_post_norm": (None, None),
    "mlp_norm": (None, None),
    "mlp_post_norm": (None, None),
    "gate": (None, "embed", "mlp"),
    "up": (None, "embed", "mlp"),
    "down": (None, "mlp", "embed"),
}
"""Logical axes of every parameter, by name; `jprm.model.mesh` maps them to mesh axes."""

UNBOUNDED = 2**30
"""The window of a layer without one among layers with windows: longer than any path."""


def _param(module: nn.Module, name: str, shape: tuple[int, ...], scale: float | None = None, value: Any = 0.0):
    """Returns a parameter, created sharded: normal with standard deviation `scale`, or `value` if that is None."""
    place = sharding(*AXES[name])
    if scale is None:
        return module.param(name, lambda key: jnp.full(shape, jnp.asarray(value), jnp.float32, out_sharding=place))
    return module.param(name, lambda key: scale * jax.random.normal(key, shape, jnp.float32, out_sharding=place))


def rms_norm(x: Float[Array, "*B D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "*B D"]:
    """Returns x / sqrt(mean(x^2) + eps) * scale, in float32 (Zhang and Sennrich 2019)."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype)


def norm_scale(w: Float[Array, "*L D"], config: ModelConfig) -> Float[Array, "*L D"]:
    """Returns the factor of a norm with parameter `w`."""
    return w + 1 if config.design == "gemma" else w


def embed(tokens_BT: Int[Array, "B T"], embed_VD: Float[Array, "V D"], config: ModelConfig):
    """Returns the embeddings (B, T, D), which enter the first layer, in the computation's dtype."""
    x_BTD = jax.tree.map(lambda table: embedding_lookup(table, tokens_BT), embed_VD).astype(config.dtype)
    return x_BTD * jnp.asarray(config.width**0.5, config.dtype) if config.design == "gemma" else x_BTD


def rotary(position_BT: Int[Array, "B T"], config: ModelConfig, local: bool = False) -> tuple[Array, Array]:
    """Returns cos and sin of position x frequency, each (B, T, head_dim / 2), in float32 (Su et al. 2021).

    `local`: for layers with a window, which may have a theta of their own.
    """
    theta, scaling = config.rope_theta, config.rope_scaling
    if local and config.rope_theta_local:
        theta, scaling = config.rope_theta_local, RopeScaling()
    angle_BTH = position_BT[..., None].astype(jnp.float32) * frequencies(config.head_dim, theta, scaling)
    return jnp.cos(angle_BTH) * scaling.attention_factor, jnp.sin(angle_BTH) * scaling.attention_factor


def windows(config: ModelConfig) -> np.ndarray | None:
    """Returns (L,) int32, the window of every layer as scanned data; None if no layer has one."""
    if not config.windows:
        return None
    return np.array([config.windows[i % len(config.windows)] or UNBOUNDED for i in range(config.layers)], np.int32)


def rotate(x: Float[Array, "*T N H"], cos_BTH: Array, sin_BTH: Array) -> Float[Array, "*T N H"]:
    """Rotates the pairs (i, i + H/2), the order of Hugging Face's checkpoints, in float32."""
    between = range(cos_BTH.ndim - 1, x.ndim - 1)
    cos, sin = jnp.expand_dims(cos_BTH, between), jnp.expand_dims(sin_BTH, between)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def cast_weights(layer: Mapping[str, Array | Int8], config: ModelConfig) -> dict[str, Array]:
    """Returns a layer's parameters in the computation's dtype, norms as factors in float32."""
    return {
        name: norm_scale(cast(Array, w), config) if name.endswith("norm") else w.astype(config.dtype)
        for name, w in layer.items()
    }


def gathered_weights(w: Mapping[str, Array], config: ModelConfig) -> dict[str, Array]:
    """Gathers a layer's weights on every device, except for chunks, which are gathered one by one.

    Without rematerialisation nothing is gathered here: all layers' gathered weights would wait for the backward pass.
    """
    if config.remat == "nothing":
        return dict(w)
    axes = {name: AXES[name].index("embed") - 1 for name in w if "embed" in AXES.get(name, ())}
    return {name: gathered_weight(x, axes[name]) if name in axes else x for name, x in w.items()}


def fused_qkv(w: Mapping[str, Array]) -> dict[str, Array]:
    """Adds `qkv`, the weights of queries, keys and values side by side: CPUs are faster at one larger product.

    (Gate and up are not: the MLP of SmolLM2-135M on 8,192 tokens, forward and backward, takes 1.60 s of processor time
    apart and 1.65 s as one product.)
    """
    return {**w, "qkv": jnp.concatenate([w["query"], w["key"][:, :, None], w["value"][:, :, None]], axis=2)}


def product(x, w, config: ModelConfig, axes: int = 1, place: PartitionSpec | None = None) -> Array:
    """Contracts the last axes of `x` with the first of `w`, in the computation's dtype.

    Where attention is made for CPUs the product is float32 and then rounded: XLA multiplies bfloat16 twice as fast to
    float32 as to bfloat16 there. An einsum would contract in the order of its letters, and copy transposed weights.
    """
    wide = jnp.float32 if attention.find(config.attention).flat else None
    return jnp.tensordot(x, w, axes, preferred_element_type=wide, out_sharding=place).astype(x.dtype)


def project_heads(x_BTD, w: Mapping[str, Array], cos_BTH, sin_BTH, config: ModelConfig):
    """Returns rotated queries (B, T, K, G, H) and keys, and values (B, T, K, H). B and T may be one axis."""
    y_BTD = rms_norm(x_BTD, w["attention_norm"], config.norm_eps)
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
    qkv = rotate(q_BTKGH, cos_BTH, sin_BTH), rotate(k_BTKH, cos_BTH, sin_BTH), v_BTKH
    return tuple(checkpoint_name(x, PROJECTED) for x in qkv)


def add_attention_and_mlp(x_BTD, y_BTKGH, w: Mapping[str, Array], config: ModelConfig):
    """Adds the attention's output, then the gated MLP's, to the residual stream. B and T may be one axis."""
    place, gemma = stream(x_BTD), config.design == "gemma"
    y_BTD = product(y_BTKGH, w["out"], config, 3, place)
    x_BTD = x_BTD + (rms_norm(y_BTD, w["attention_post_norm"], config.norm_eps) if gemma else y_BTD)
    x_BTD = checkpoint_name(x_BTD, PROJECTED)
    y_BTD = rms_norm(x_BTD, w["mlp_norm"], config.norm_eps)
    if "chunks" in w:
        y_BTD = cast(Array, chunked_mlp(y_BTD, w["chunks"], config))
    else:
        gate_BTF, up_BTF = (product(y_BTD, w[name], config) for name in ("gate", "up"))
        y_BTD = product(activated(gate_BTF, config) * up_BTF, w["down"], config, 1, place)
    return x_BTD + (rms_norm(y_BTD, w["mlp_post_norm"], config.norm_eps) if gemma else y_BTD)


def activated(gate: Float[Array, "*B F"], config: ModelConfig) -> Float[Array, "*B F"]:
    """Returns the gate's activation: GELU (by tanh) for Gemma, SiLU for the others."""
    return jax.nn.gelu(gate, approximate=True) if config.design == "gemma" else jax.nn.silu(gate)


Rotation = tuple[Array, Array]
"""cos and sin, as `rotary` returns them."""


def rotation_of(window, rotations: tuple[Rotation, Rotation], config: ModelConfig) -> Rotation:
    """Returns a layer's rotation, of those for layers without and with a window."""
    if not config.rope_theta_local:
        return rotations[0]
    cos_BTH, sin_BTH = (jnp.where(window < UNBOUNDED, b, a) for a, b in zip(*rotations, strict=True))
    return cos_BTH, sin_BTH


def block(x_BTD, layer: Mapping[str, Array], window, rotations: tuple[Rotation, Rotation], plan, config: ModelConfig):
    """Applies one layer: attention and gated MLP, each after an RMSNorm and added to the residual stream.

    window: the layer's entry of `windows`; rotations: for layers without and with a window.
    """
    w = cast_weights(layer, config)
    cos_BTH, sin_BTH = rotation_of(window, rotations, config)
    own, (B, T) = attention.find(config.attention), x_BTD.shape[:2]
    if own.flat:
        w = fused_qkv(w)
    else:
        w = gathered_weights(with_chunks(w) if config.remat in ("full", "attention") else w, config)

    def flat(x_BTX, *axes):
        return reshape(x_BTX, (B * T, *x_BTX.shape[2:]), "batch", *axes) if own.flat else x_BTX

    def rows(x_NX, *axes):
        return reshape(x_NX, (B, T, *x_NX.shape[1:]), "batch", *axes) if own.flat else x_NX

    x_BTD, cos_BTH, sin_BTH = map(flat, (x_BTD, cos_BTH, sin_BTH))
    qkv = (rows(x, None, "kv_heads") for x in project_heads(x_BTD, w, cos_BTH, sin_BTH, config))
    y_BTKGH = own.attend(*qkv, plan, config, window)
    return rows(add_attention_and_mlp(x_BTD, flat(y_BTKGH, "kv_heads"), w, config))


REMAT = {
    "nothing": None,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(SAVED),
    ),
    "attention": jax.checkpoint_policies.save_only_these_names(SAVED, PROJECTED),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Layers(nn.Module):
    """A group of layers with parameters stacked on a leading axis, scanned and rematerialised."""

    config: ModelConfig
    layers: int

    @nn.compact
    def __call__(self, x_BTD, window_L, rotations: tuple[Rotation, Rotation], plan):
        c, L = self.config, self.layers
        one = 0.0 if c.design == "gemma" else 1.0  # the parameter of a norm with factor 1
        D, K, G, H, F = c.width, c.kv_heads, c.group, c.head_dim, c.mlp_width
        stack = {
            "attention_norm": _param(self, "attention_norm", (L, D), value=one),
            "query": _param(self, "query", (L, D, K, G, H), scale=D**-0.5),
            "key": _param(self, "key", (L, D, K, H), scale=D**-0.5),
            "value": _param(self, "value", (L, D, K, H), scale=D**-0.5),
            "out": _param(self, "out", (L, K, G, H, D), scale=(K * G * H) ** -0.5),
            "mlp_norm": _param(self, "mlp_norm", (L, D), value=one),
            "gate": _param(self, "gate", (L, D, F), scale=D**-0.5),
            "up": _param(self, "up", (L, D, F), scale=D**-0.5),
            "down": _param(self, "down", (L, F, D), scale=F**-0.5),
        }
        if c.qkv_bias:
            stack["query_bias"] = _param(self, "query_bias", (L, K, G, H))
            stack["key_bias"] = _param(self, "key_bias", (L, K, H))
            stack["value_bias"] = _param(self, "value_bias", (L, K, H))
        if c.qk_norm:
            stack["query_norm"] = _param(self, "query_norm", (L, H), value=one)
            stack["key_norm"] = _param(self, "key_norm", (L, H), value=one)
        if c.design == "gemma":
            stack["attention_post_norm"] = _param(self, "attention_post_norm", (L, D), value=one)
            stack["mlp_post_norm"] = _param(self, "mlp_post_norm", (L, D), value=one)

        # Cast outside the loop, so that the gradients of all layers wait for the update in this dtype too.
        stack = {
            name: w if name.endswith("norm") or isinstance(w, Int8) else w.astype(c.dtype) for name, w in stack.items()
        }

        for part, own in _rematerialised(c, L):
            layers = (stack, window_L) if part is None else jax.tree.map(lambda x, i=part: x[i], (stack, window_L))
            x_BTD = _scanned(x_BTD, layers, rotations, plan, own)
        return x_BTD


def _rematerialised(config: ModelConfig, layers: int) -> list[tuple[slice | None, ModelConfig]]:
    """Returns the parts of a group of layers (None: all of it), each with the config whose `remat` it has."""
    kept = min(config.product_layers, layers)
    plain = dataclasses.replace(config, product_layers=0)
    dots = dataclasses.replace(plain, remat="dots")
    if kept in (0, layers):
        return [(None, dots if kept else plain)]
    return [(slice(layers - kept), plain), (slice(layers - kept, layers), dots)]


def _scanned(x_BTD, layers: tuple, rotations: tuple[Rotation, Rotation], plan, c: ModelConfig):
    """Applies layers in turn. layers: their parameters and windows, stacked."""

    def body(x_BTD, layer):
        # Scan's partial evaluation would move what depends on the plan alone out of the loop, and keep the masks of
        # every block. The barrier ties them to the layer.
        x_BTD, here = jax.lax.optimization_barrier((x_BTD, plan))
        w, window = layer
        return block(x_BTD, w, window, rotations, here, c), None

    if c.remat != "nothing":
        body = jax.checkpoint(body, policy=REMAT[c.remat], prevent_cse=False)  # a scan needs no guard against CSE
    return jax.lax.scan(body, x_BTD, layers)[0]


class Decoder(nn.Module):
    """Tokens to hidden states after the final norm, in the computation's dtype."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens_BT, position_BT, until_BT) -> tuple[Float[Array, "B T D"], Float[Array, "V D"]]:
        """Returns hidden states, and the embedding table for a head that is tied to it."""
        c = self.config
        embed_VD = _param(self, "embed", (c.vocab_size, c.width), scale=0.02)
        x_BTD = embed(tokens_BT, embed_VD, c)
        rotations, window_L = (rotary(position_BT, c), rotary(position_BT, c, local=True)), windows(c)
        plan, first = attention.plan(until_BT, position_BT, c), 0
        for i, layers in enumerate(c.layer_groups):
            part_L = None if window_L is None else jnp.asarray(window_L[first : first + layers])
            x_BTD = Layers(c, layers, name=f"layers_{i}")(x_BTD, part_L, rotations, plan)
            first += layers
        scale_D = _param(self, "final_norm", (c.width,), value=0.0 if c.design == "gemma" else 1.0)
        return rms_norm(x_BTD, norm_scale(scale_D, c), c.norm_eps), embed_VD


class HeadLayer(nn.Module):
    """Hidden states to the logits of `config.head`, in float32: the one projection of every head.

    A step head is linear, with `head_hidden` applied to relu(x W + b) (Qwen2.5-Math-PRM). Its kernel starts at zero, or
    as `Head.spread` says. A head over the vocabulary multiplies by the embedding table where the two are tied.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BSD: Float[Array, "*B D"], embed_VD: Float[Array, "V D"]) -> Float[Array, "*B C"]:
        c, head = self.config, find(self.config.head)
        x_BSD = x_BSD.astype(jnp.float32)
        place = sharding("batch", *[None] * (x_BSD.ndim - 1))
        if not head.channels:
            if c.tied_embeddings:
                logit_BSV = jnp.einsum("...D,VD->...V", x_BSD, embed_VD.astype(jnp.float32), out_sharding=place)
            else:
                kernel_DV = _param(self, "kernel", (c.width, c.vocab_size))
                logit_BSV = jnp.einsum("...D,DV->...V", x_BSD, kernel_DV, out_sharding=place)
            return capped(logit_BSV, c.logit_softcap)
        if c.head_hidden:
            kernel_DD = _param(self, "hidden_kernel", (c.width, c.width), scale=c.width**-0.5)
            bias_D = _param(self, "hidden_bias", (c.width,))
            x_BSD = jax.nn.relu(jnp.einsum("...D,DE->...E", x_BSD, kernel_DD) + bias_D)
        scale = head.spread * c.width**-0.5 if head.spread else None
        kernel_DC = _param(self, "kernel", (c.width, len(head.channels)), scale=scale)
        bias_C = _param(self, "bias", (len(head.channels),), value=head.bias or 0.0)
        return jnp.einsum("...D,DC->...C", x_BSD, kernel_DC) + bias_C


class Model(nn.Module):
    """Decoder, step layer and head: `Rows` to the logits of its steps, in float32."""

    config: ModelConfig

    def setup(self):
        self.decoder, self.head = Decoder(self.config), HeadLayer(self.config)
        if self.config.steps:
            self.steps = step_layer(self.config.steps)(self.config)

    def __call__(self, rows: Rows) -> Float[Array, "B S C"]:
        """Gathers hidden states at step ends before the head, which so costs S, not T."""
        x_BTD, embed_VD = self.decoder(rows.tokens, rows.position, rows.until)
        return self.logits_at(at_tokens(x_BTD, rows.step_end), rows.parent, embed_VD)

    def logits_at(
        self, x_BSD: Float[Array, "B S D"], parent_BS: Int[Array, "B S"], embed_VD: Float[Array, "V D"]
    ) -> Float[Array, "B S C"]:
        """Returns the logits of steps from the hidden states at their ends: all that scores steps goes through here."""
        return self.head(self.states_at(x_BSD, parent_BS), embed_VD)

    def states_at(self, x_BSD: Float[Array, "B S D"], parent_BS: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """Returns the states that the head reads, from the hidden states at step ends."""
        if not self.config.steps:
            return x_BSD
        y_BSD = self.steps(x_BSD, parent_BS)
        if y_BSD.shape != x_BSD.shape:
            raise ValueError(
                f"model.steps={self.config.steps!r} returns states of shape {y_BSD.shape} for {x_BSD.shape}; they must"
                " be equal"
            )
        return y_BSD


def _apply(module: nn.Module, params: Mapping, *inputs: Any, method: str | None = None) -> Any:
    """Returns the output of the module or of one of its methods."""
    return module.apply({"params": params}, *inputs, method=method)


def head_logits(params: Mapping, config: ModelConfig, x_BSD: Float[Array, "*B D"]) -> Float[Array, "*B C"]:
    """Returns the head's logits at hidden states, in float32. Steps are read by `logits_at_steps`."""
    return _apply(HeadLayer(config), params.get("head", {}), x_BSD, params["decoder"]["embed"])


def hidden(params: Mapping, config: ModelConfig, rows: Rows) -> Float[Array, "B T D"]:
    """Returns the hidden states of every token."""
    return _apply(Decoder(config), params["decoder"], rows.tokens, rows.position, rows.until)[0]


def step_logits(params: Mapping, config: ModelConfig, rows: Rows) -> Float[Array, "B S C"]:
    """Returns the model's logits, as a pure function of its parameters."""
    return _apply(Model(config), params, rows)


def logits_at_steps(
    params: Mapping, config: ModelConfig, x_BSD: Float[Array, "B S D"], parent_BS: Int[Array, "B S"]
) -> Float[Array, "B S C"]:
    """Returns what `step_logits` does, from the hidden states at step ends and the slot of the step before each."""
    return _apply(Model(config), params, x_BSD, parent_BS, params["decoder"]["embed"], method="logits_at")


def states_at_steps(
    params: Mapping, config: ModelConfig, x_BSD: Float[Array, "B S D"], parent_BS: Int[Array, "B S"]
) -> Float[Array, "B S D"]:
    """Returns the states that the head reads, from the hidden states at step ends."""
    return _apply(Model(config), params, x_BSD, parent_BS, method="states_at")


def init(config: ModelConfig, key: Array) -> dict:
    """Returns random parameters, each created in its place on the mesh that is set."""
    mesh = jax.sharding.get_abstract_mesh()
    shape = (1 if mesh.empty else mesh.shape["data"] * mesh.shape["fsdp"], 1)
    one = jnp.zeros(shape, jnp.int32, out_sharding=sharding("batch", None))
    real = one.astype(jnp.float32)
    rows = Rows(one, one, one + 1, one, real, real, one, one, one, one > 0, real, one > 0)
    # Only the reference attention takes rows of one token; parameters do not depend on attention.
    return dict(Model(dataclasses.replace(config, attention="reference")).init(key, rows)["params"])


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


def with_chunks(w: Mapping[str, Array]) -> dict[str, Any]:
    """Returns a layer's weights with the MLP's as `chunks`: gate and up (P, D, N, F), down (P, N, F, D).

    P are the chunks, N the parts into which the mesh splits the MLP width, F the width of a device's part of a chunk.
    """
    axis = {"gate": 1, "up": 1, "down": 0}
    rest = {name: x for name, x in w.items() if name not in axis}
    return {**rest, "chunks": {name: split_in_chunks(w[name], axis[name], chunk_count) for name in axis}}


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
