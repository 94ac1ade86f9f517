"""The decoder: Linen modules own names and initialisers, free functions hold the mathematics as einsums.

Parameters are a plain dict, `{"embed", "layers_0": {...}, ..., "final_norm", "head": {...}}`. A group's layers are
stacked on a leading axis and scanned. Letters: B rows, T tokens, S step slots, D width, K key-value heads, G query
heads per key-value head, H head size, F MLP width, V vocabulary, L layers, C classes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jprm.model import attention, layers
from jprm.model.attention import PROJECTED, SAVED, capped
from jprm.model.config import ModelConfig, RopeScaling, frequencies, step_layer
from jprm.model.heads import find
from jprm.model.layers import Kind, Weight, activated, gathered_weights, product, rms_norm
from jprm.model.mesh import (
    at_tokens,
    embedding_lookup,
    gathered_weight,
    reshape,
    row_parts,
    sharding,
    split_in_chunks,
    stream,
)  # fmt: skip
from jprm.rows import Rows

AXES: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", "embed"),
    "final_norm": (None,),
    "kernel": ("embed", None),
    "bias": (None,),
    "hidden_kernel": ("embed", None),
    "hidden_bias": (None,),
}


def axes_of(role: str) -> tuple[str | None, ...]:
    """Returns a parameter's logical axes, the layer axis first; () for a role unknown to jprm."""
    with contextlib.suppress(KeyError):
        return AXES.get(role) or layers.weight_of(role).places
    return ()


def _param(
    module: nn.Module, name: str, shape: tuple[int, ...], scale: float | None = None, value: Any = 0.0,
    places: tuple[str | None, ...] = (),
) -> Any:  # fmt: skip
    """Returns a parameter, created sharded: normal with standard deviation `scale`, or `value` if `scale` is `None`."""
    if module.has_variable("params", name) and not isinstance(w := module.get_variable("params", name), Array):
        return w  # stored in another shape, which Flax would refuse
    place = sharding(*(places or axes_of(name)))

    def start(key: Array) -> Any:
        if callable(value):
            return jax.sharding.reshard(value(key, shape), place) if place else value(key, shape)
        if scale is None:
            return jnp.full(shape, jnp.asarray(value), jnp.float32, out_sharding=place)
        return scale * jax.random.normal(key, shape, jnp.float32, out_sharding=place)

    return module.param(name, start)


def norm_scale(w: Float[Array, "*L D"], config: ModelConfig) -> Float[Array, "*L D"]:
    return w + 1 if config.centred_norms else w


def embed(tokens_BT: Int[Array, "B T"], embed_VD: Float[Array, "V D"], config: ModelConfig) -> Array:
    """Returns the embeddings (B, T, D) in the computation dtype, x sqrt(width) for Gemma."""
    x_BTD = jax.tree.map(lambda table: embedding_lookup(table, tokens_BT), embed_VD).astype(config.dtype)
    return x_BTD * jnp.asarray(config.width**0.5, config.dtype) if config.design == "gemma" else x_BTD


def cast_weights(layer: Mapping[str, Any], config: ModelConfig, index: int) -> dict[str, Array]:
    """Returns layer `index`'s (unstacked) parameters by role in the computation dtype, norms as float32 factors."""

    def of_role(role: str, weight: Weight) -> Array:
        if weight.value is None:
            return norm_scale(layer[role], config)
        return layer[role] if weight.wide else layer[role].astype(config.dtype)

    return {role: of_role(role, weight) for role, (weight, _) in layers.roles(config, index).items()}


REMAT = {
    "nothing": None,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(SAVED),
    ),
    "attention": jax.checkpoint_policies.save_only_these_names(SAVED, PROJECTED),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def block(x_BTD, layer: Mapping[str, Any], apply: Callable[..., tuple], config: ModelConfig, index: int):
    """Applies one layer to (B, T, D): the mixer, then the MLP. Each has a norm before, after, or both, and a skip.

    `apply` maps (kind name, normed x (B, T, D), w) to (addition to the stream, sums by name). `index` is the layer's
    number in the model. Returns the stream and the sums of both kinds.
    """
    implementation, (B, T, D) = attention.find(config.attention), x_BTD.shape
    w, sums = cast_weights(layer, config, index), {}

    def flat(x_BTD):
        return reshape(x_BTD, (B * T, D), "batch") if implementation.flat else x_BTD

    def rows(x_XD):
        return reshape(x_XD, (B, T, D), "batch") if implementation.flat else x_XD

    x_XD = flat(x_BTD)  # on CPUs B and T are one axis, in `attend` and `mlp` too: see `Implementation.flat`
    for part, name in zip(("attention", "mlp"), layers.kinds_of(config, index), strict=True):
        y_BTD, more = apply(name, rows(normed(x_XD, w, f"{part}_norm", config)), w)
        x_XD, sums = x_XD + normed(flat(y_BTD), w, f"{part}_post_norm", config), sums | more
        if part == "attention":
            x_XD = checkpoint_name(x_XD, PROJECTED)
    return rows(x_XD), sums


def normed(x_XD, w: Mapping[str, Array], role: str, config: ModelConfig) -> Array:
    """Applies the RMS norm whose scale is `w[role]`, e.g. `attention_norm`; returns x if the model has no such norm."""
    return rms_norm(x_XD, w[role], config.norm_eps) if role in w else x_XD


def plans_of(position_BT, until_BT, config: ModelConfig) -> dict[str, Any]:
    """Returns {kind name: `Kind.plan`} for these rows. Raises ValueError if a kind refuses them."""
    return {name: layers.find(name).plan(position_BT, until_BT, config) for name in layers.names(config)}


def settings_of(config: ModelConfig, first: int, stop: int) -> dict[str, Any]:
    """Returns {kind name: `Kind.settings`} of the kind's own layers in first..stop-1 (first axis); `None` stays."""
    return {
        name: jax.tree.map(lambda x_L, at=at: jnp.asarray(x_L[np.array(at)]), layers.find(name).settings(config))
        for name, at in layers.places(config, first, stop).items()
        if name in layers.names(config)
    }


Part = tuple[int, int, Callable]
"""`(start, stop, apply)`: `apply(x, layer parameters, index)` returns x and named sums, for layers start..stop-1."""


class Layers(nn.Module):
    """Layers first..stop-1, scanned and rematerialised. Each parameter is stacked over the layers that have it."""

    config: ModelConfig
    first: int
    stop: int

    @nn.compact
    def __call__(self, x_BTD, plans: Mapping[str, Any]):
        """Returns the residual stream, and the kinds' named sums over layers."""
        c, stacks = self.config, layers.stacks(self.config, self.first, self.stop)
        stack: dict[str, Any] = {}
        for role, (weight, size, at) in stacks.items():
            shape = (len(at), *(size[axis] for axis in weight.axes))
            scale = math.prod(size[axis] for axis in weight.inputs) ** -0.5 if weight.inputs else None
            neutral = 0.0 if c.centred_norms else 1.0  # the parameter of a norm with factor 1
            value = neutral if weight.value is None else weight.value
            stack[role] = _param(self, role, shape, scale, value, weight.places)
        # Cast outside the loop, so that the gradients of all layers wait for the update in this dtype too.
        narrow = [role for role, w in stack.items() if isinstance(w, Array) and not stacks[role][0].wide]
        stack |= {role: stack[role].astype(c.dtype) for role in narrow}
        stack |= settings_of(c, self.first, self.stop)
        middle = self.stop - min(c.product_layers, self.stop - self.first)
        plain = dataclasses.replace(c, product_layers=0)
        parts = [(self.first, middle, plain), (middle, self.stop, dataclasses.replace(plain, remat="dots"))]
        return walk(x_BTD, stack, c, [(a, b, _applied(plans, part)) for a, b, part in parts if a < b])


def _applied(plans: Mapping[str, Any], config: ModelConfig) -> Callable:
    """Returns the function that applies one layer to whole rows, for `walk`."""

    def body(x_BTD, layer: Mapping[str, Any], index: int):
        def apply(name: str, y_BTD, w):
            return layers.find(name).apply(y_BTD, w, plans[name], layer[name], config)

        return block(x_BTD, layer, apply, config, index)

    if config.remat == "nothing":
        return body
    return jax.checkpoint(body, policy=REMAT[config.remat], prevent_cse=False, static_argnums=2)  # scans need no guard


def walk(x, stack: Mapping[str, Any], config: ModelConfig, parts: Sequence[Part]):
    """Carries `x` through a group's layers, in scans over the kind pattern. Returns x and {name: sum over the layers}.

    stack: parameters by role and settings by kind name, stacked over the group's layers that have them.
    parts: must follow one another and cover the group.
    """
    places, totals = layers.places(config, parts[0][0], parts[-1][1]), {}
    for first, stop, body in parts:
        period = layers.period(config, first, stop)
        rest = stop - (stop - first) % period
        for start, end, length in ((first, rest, period), (rest, stop, stop - rest)):
            if start == end:
                continue
            having = layers.places(config, start, end)
            inputs = {name: _cut(w, places[name], having[name]) for name, w in stack.items() if name in having}
            if length > 1:
                inputs = jax.tree.map(lambda x, count=(end - start) // length: _periods(x, count), inputs)
            x, sums = jax.lax.scan(functools.partial(_period, body, config, start, length), x, inputs)
            totals |= {name: totals.get(name, 0) + jnp.sum(numbers, axis=0) for name, numbers in sums.items()}
    return x, totals


def _cut(w, places: tuple[int, ...], kept: tuple[int, ...]):
    """Returns the entries for the layers `kept` from a stack over the layers `places`."""
    start = places.index(kept[0])
    return w if kept == places else jax.tree.map(lambda x: x[start : start + len(kept)], w)


def _periods(x: Array, count: int) -> Array:
    """Splits a layer stack into `count` pattern periods."""
    place = None if sharding() is None else PartitionSpec(None, None, *jax.typeof(x).sharding.spec[1:])
    return jnp.reshape(x, (count, x.shape[0] // count, *x.shape[1:]), out_sharding=place)


def _period(body: Callable, config: ModelConfig, first: int, length: int, x, stack: Mapping[str, Any]):
    """Carries `x` through one pattern period."""
    if length == 1:
        return body(x, stack, first)
    places, totals = layers.places(config, first, first + length), {}
    for index in range(first, first + length):
        at = {name: places[name].index(index) for name in stack if index in places[name]}
        x, numbers = body(x, {name: jax.tree.map(lambda x, i=i: x[i], stack[name]) for name, i in at.items()}, index)
        totals |= {name: totals.get(name, 0) + number for name, number in numbers.items()}
    return x, totals


class Decoder(nn.Module):
    """Tokens to hidden states after the final norm, in the computation dtype."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens_BT, position_BT, until_BT) -> tuple[Float[Array, "B T D"], Float[Array, "V D"]]:
        """Returns hidden states, and the embedding table (a tied head needs it)."""
        c = self.config
        embed_VD = _param(self, "embed", (c.vocab_size, c.width), scale=0.02)
        x_BTD, plans = embed(tokens_BT, embed_VD, c), plans_of(position_BT, until_BT, c)
        for i, (first, stop) in enumerate(layers.spans(c)):
            x_BTD, sums = Layers(c, first, stop, name=f"layers_{i}")(x_BTD, plans)
            for name, x in sums.items():
                self.sow("sums", name, x, init_fn=lambda: 0, reduce_fn=operator.add)
        scale_D = _param(self, "final_norm", (c.width,), value=0.0 if c.centred_norms else 1.0)
        return rms_norm(x_BTD, norm_scale(scale_D, c), c.norm_eps), embed_VD


class HeadLayer(nn.Module):
    """Hidden states to `config.head`'s logits, in float32.

    A step head is linear; with `head_hidden` it is applied to relu(x W + b), as in Qwen2.5-Math-PRM. Its kernel starts
    at zero, or normal if `Head.spread` is set. A head over the vocabulary uses the embedding table if the two are tied.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BSD: Float[Array, "*B D"], embed_VD: Float[Array, "V D"]) -> Float[Array, "*B C"]:
        c, head = self.config, find(self.config.head)
        x_BSD = x_BSD.astype(jnp.float32)
        place = sharding("batch", *[None] * (x_BSD.ndim - 1))
        if not head.channels and c.tied_embeddings:
            logit_BSV = jnp.einsum("...D,VD->...V", x_BSD, embed_VD.astype(jnp.float32), out_sharding=place)
            return capped(logit_BSV, c.logit_softcap)
        if not head.channels:
            kernel_DV = _param(self, "kernel", (c.width, c.vocab_size))
            return capped(jnp.einsum("...D,DV->...V", x_BSD, kernel_DV, out_sharding=place), c.logit_softcap)
        if c.head_hidden:
            kernel_DD = _param(self, "hidden_kernel", (c.width, c.width), scale=c.width**-0.5)
            bias_D = _param(self, "hidden_bias", (c.width,))
            x_BSD = jax.nn.relu(jnp.einsum("...D,DE->...E", x_BSD, kernel_DD) + bias_D)
        scale = head.spread * c.width**-0.5 if head.spread else None
        kernel_DC = _param(self, "kernel", (c.width, len(head.channels)), scale=scale)
        bias_C = _param(self, "bias", (len(head.channels),), value=head.bias or 0.0)
        return jnp.einsum("...D,DC->...C", x_BSD, kernel_DC) + bias_C


def check_model(config: ModelConfig, backend: str | None = None, context: int = 1) -> None:
    """Raises ValueError if a part named in the config does not exist, or the parts do not fit together.

    Each layer kind and the attention may refuse the model, the backend (`None`: any), or rows in `context` parts.
    """
    if not find(config.head).channels and config.steps:
        raise ValueError(f"steps={config.steps!r} changes states at step ends, and head {config.head!r} reads tokens")
    if config.steps:
        step_layer(config.steps)
    attention.check(config.attention, config, backend, context)
    for name in layers.names(config):
        if reason := layers.find(name).refuses(config, context):
            raise ValueError(reason)


class Model(nn.Module):
    """Decoder, step layer and head: `Rows` to their steps' logits, in float32."""

    config: ModelConfig

    def setup(self):
        self.decoder, self.head = Decoder(self.config), HeadLayer(self.config)
        if self.config.steps:
            self.steps = step_layer(self.config.steps)(self.config)

    def __call__(self, rows: Rows) -> Float[Array, "B S C"]:
        """Gathers hidden states at step ends before the head, so the head costs S tokens, not T."""
        x_BTD, embed_VD = self.decoder(rows.tokens, rows.position, rows.until)
        return self.logits_at(at_tokens(x_BTD, rows.step_end), rows.parent, embed_VD)

    def logits_at(
        self, x_BSD: Float[Array, "B S D"], parent_BS: Int[Array, "B S"], embed_VD: Float[Array, "V D"]
    ) -> Float[Array, "B S C"]:
        """Returns step logits from normed states at step ends and parent slots (-1: none). All scoring calls this."""
        return self.head(self.states_at(x_BSD, parent_BS), embed_VD)

    def states_at(self, x_BSD: Float[Array, "B S D"], parent_BS: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """Returns states after the step layer, if there is one. Raises ValueError if it changes their shape."""
        if not self.config.steps:
            return x_BSD
        y_BSD = self.steps(x_BSD, parent_BS)
        if y_BSD.shape != x_BSD.shape:
            shapes = f"{y_BSD.shape} for {x_BSD.shape}"
            raise ValueError(f"model.steps={self.config.steps!r} returns states of shape {shapes}; they must be equal")
        return y_BSD


def _apply(module: nn.Module, params: Mapping, *inputs: Any, method: str | None = None) -> Any:
    return module.apply({"params": params}, *inputs, method=method)


def head_logits(params: Mapping, config: ModelConfig, x_BSD: Float[Array, "*B D"]) -> Float[Array, "*B C"]:
    """Returns float32 logits at states from `hidden`, without the step layer (`logits_at_steps` applies it)."""
    return _apply(HeadLayer(config), params.get("head", {}), x_BSD, params["decoder"]["embed"])


def hidden(params: Mapping, config: ModelConfig, rows: Rows) -> Float[Array, "B T D"]:
    """Returns all tokens' states after the final norm, in the computation dtype. Raises as `attention.plan`."""
    return _apply(Decoder(config), params["decoder"], rows.tokens, rows.position, rows.until)[0]


def step_logits(params: Mapping, config: ModelConfig, rows: Rows) -> Float[Array, "B S C"]:
    return _apply(Model(config), params, rows)


def step_logits_and_sums(
    params: Mapping, config: ModelConfig, rows: Rows
) -> tuple[Float[Array, "B S C"], dict[str, Array]]:
    """Returns step logits, and the kinds' named sums over tokens and layers (`Kind.apply`), {} if dense."""
    logit_BSC, state = cast(Any, Model(config).apply({"params": params}, rows, mutable=["sums"]))
    return logit_BSC, dict(state.get("sums", {}).get("decoder", {}))


def logits_at_steps(
    params: Mapping, config: ModelConfig, x_BSD: Float[Array, "B S D"], parent_BS: Int[Array, "B S"]
) -> Float[Array, "B S C"]:
    """Returns step logits from the states of `hidden` at step ends and each step's parent slot (-1: none)."""
    return _apply(Model(config), params, x_BSD, parent_BS, params["decoder"]["embed"], method="logits_at")


def states_at_steps(
    params: Mapping, config: ModelConfig, x_BSD: Float[Array, "B S D"], parent_BS: Int[Array, "B S"]
) -> Float[Array, "B S D"]:
    """Returns the head's input: states at step ends, after the step layer; `parent_BS` as in `logits_at_steps`."""
    return _apply(Model(config), params, x_BSD, parent_BS, method="states_at")


def init(config: ModelConfig, key: Array) -> dict:
    """Returns random float32 {"decoder", "head", "steps"}, as the model has them, placed on the current mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    shape = (1 if mesh.empty else row_parts(mesh), 1)
    zeros = jnp.zeros(shape, jnp.int32, out_sharding=sharding("batch", None))
    real = zeros.astype(jnp.float32)
    rows = Rows(zeros, zeros, zeros + 1, zeros, real, real, zeros, zeros, zeros, zeros > 0, real, zeros > 0)
    # Only the reference attention takes rows of one token; parameters do not depend on attention.
    return dict(Model(dataclasses.replace(config, attention="reference")).init(key, rows)["params"])


# ----------------------------------------------------------------------------------------------------------- attention
#
# Projections, norms, rotary positions, and an implementation of `jprm.model.attention`. A window is data of a layer,
# and so is whether it rotates: layers that differ only in these are scanned together.

ATTENTION_WEIGHTS = {
    "query": Weight("DKGH", "D"),
    "key": Weight("DKH", "D"),
    "value": Weight("DKH", "D"),
    "out": Weight("KGHD", "KGH"),
    "query_bias": Weight("KGH", when=lambda c: c.qkv_bias),
    "key_bias": Weight("KH", when=lambda c: c.qkv_bias),
    "value_bias": Weight("KH", when=lambda c: c.qkv_bias),
    "out_bias": Weight("D", when=lambda c: c.out_bias),
    "query_norm": Weight("H", value=None, when=lambda c: c.qk_norm),
    "key_norm": Weight("H", value=None, when=lambda c: c.qk_norm),
    "query_width_norm": Weight("KGH", value=None, when=lambda c: c.qk_width_norm),
    "key_width_norm": Weight("KH", value=None, when=lambda c: c.qk_width_norm),
    "query_gate": Weight("DKGH", "D", when=lambda c: c.attention_gate),
}

UNBOUNDED = 2**30
"""The window for a layer without one among layers with windows: longer than any path."""

Rotation = tuple[Array, Array]
"""cos and sin, as `rotary` returns them."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Geometry of rows: rotations for layers without and with a window, and the implementation's plan."""

    rotations: tuple[Rotation, Rotation]
    growth: Array | None  # (B, T), a factor of queries; None: 1
    rows: Any


def attention_plan(position_BT: Int[Array, "B T"], until_BT: Int[Array, "B T"], config: ModelConfig) -> Plan:
    """Returns the rotations, query growth and visibility that all layers share. Raises as `attention.plan`."""
    return Plan(*positions(position_BT, config), attention.plan(until_BT, position_BT, config))


def positions(position_BT: Int[Array, "B T"], config: ModelConfig) -> tuple[tuple[Rotation, Rotation], Array | None]:
    """Returns a `Plan`'s rotations (without and with a window) and query growth (`None` without `query_growth`)."""
    growth_BT = None
    if config.query_growth:  # Ministral 3, after Llama 4: 1 + beta log(1 + floor(position / positions of training))
        beta, trained = config.query_growth
        growth_BT = 1 + beta * jnp.log(1 + jnp.floor(position_BT / trained))
    return (rotary(position_BT, config), rotary(position_BT, config, local=True)), growth_BT


def rotary(position_BT: Int[Array, "B T"], config: ModelConfig, local: bool = False) -> Rotation:
    """Returns float32 cos and sin of position x frequency, x `attention_factor`, each (B, T, rotary_dim / 2) (Su et al.
    2021). `local`: for layers with a window, which may have their own theta."""
    theta, scaling = config.rope_theta, config.rope_scaling
    if local and config.rope_theta_local:
        theta, scaling = config.rope_theta_local, RopeScaling()
    size = config.rotary_dim or config.head_dim
    angle_BTH = position_BT[..., None].astype(jnp.float32) * frequencies(size, theta, scaling)
    return jnp.cos(angle_BTH) * scaling.attention_factor, jnp.sin(angle_BTH) * scaling.attention_factor


def windows(config: ModelConfig) -> np.ndarray | None:
    """Returns each layer's window, (L,) int32, `UNBOUNDED` for a layer without; `None` if no layer has one."""
    if not config.windows:
        return None
    return np.array([config.windows[i % len(config.windows)] or UNBOUNDED for i in range(config.layers)], np.int32)


def attention_settings(config: ModelConfig) -> dict[str, np.ndarray | None]:
    """Returns {"window": `windows`, "turns": whether each layer rotates, (L,) bool, or `None` if all do}."""
    rope = config.rope_layers
    turns_L = np.array([bool(rope[i % len(rope)]) for i in range(config.layers)]) if rope else None
    return {"window": windows(config), "turns": turns_L}


def rotation_of(settings: Mapping[str, Any], rotations: tuple[Rotation, Rotation], config: ModelConfig) -> Rotation:
    """Returns a layer's (cos, sin): `rotations[1]` if its window has its own theta; the identity without rotary."""
    cos_BTH, sin_BTH = rotations[0]
    if config.rope_theta_local:
        local = settings["window"] < UNBOUNDED
        cos_BTH, sin_BTH = (jnp.where(local, b, a) for a, b in zip(*rotations, strict=True))
    if settings["turns"] is not None:
        cos_BTH, sin_BTH = jnp.where(settings["turns"], cos_BTH, 1), jnp.where(settings["turns"], sin_BTH, 0)
    return cos_BTH, sin_BTH


def rotate(x: Float[Array, "*T N H"], cos_BTH: Array, sin_BTH: Array) -> Float[Array, "*T N H"]:
    """Rotates pairs (i, i + R/2) in the first R dimensions, as in Hugging Face files; cos and sin have R/2 columns."""
    between = range(cos_BTH.ndim - 1, x.ndim - 1)
    cos, sin = jnp.expand_dims(cos_BTH, between), jnp.expand_dims(sin_BTH, between)
    size = 2 * cos_BTH.shape[-1]
    rest = [x[..., size:]] if size < x.shape[-1] else []
    low, high = jnp.split(x[..., :size].astype(jnp.float32), 2, axis=-1)
    turned = [low * cos - high * sin, high * cos + low * sin]
    return jnp.concatenate([part.astype(x.dtype) for part in turned] + rest, axis=-1)


def fused_qkv(w: Mapping[str, Array]) -> dict[str, Array]:
    """Returns `w` with `qkv`, the query, key and value weights side by side: CPUs are faster with one larger product.

    (Gate and up are not fused: the MLP of SmolLM2-135M on 8,192 tokens, forward and backward, takes 1.60 s of
    processor time apart and 1.65 s as one product.)
    """
    return {**w, "qkv": jnp.concatenate([w["query"], w["key"][:, :, None], w["value"][:, :, None]], axis=2)}


def project_heads(y_BTD, w: Mapping[str, Array], rotation: Rotation, growth_BT, config: ModelConfig):
    """Returns rotated, unscaled queries (B, T, K, G, H) and keys, and values (B, T, K, H). B and T may be one axis.
    `y_BTD` is normed; `rotation` is (cos, sin); `growth_BT` multiplies the queries (`None`: 1)."""
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
    """Returns `rms_norm` over all heads together (OLMo 2 and 3); `scale` has their axes."""
    axes = tuple(range(x.ndim - scale.ndim, x.ndim))
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=axes, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype)


def project_out(y_BTKGH, y_BTD, w: Mapping[str, Array], config: ModelConfig) -> Array:
    """Projects the heads back to the stream, gated by the layer's input if the model has gates (Qwen3.5)."""
    if config.attention_gate:
        y_BTKGH = y_BTKGH * jax.nn.sigmoid(product(y_BTD, w["query_gate"], config))
    x_BTD = product(y_BTKGH, w["out"], config, 3, stream(y_BTD))
    return x_BTD + w["out_bias"] if config.out_bias else x_BTD


def attend(x_BTD: Float[Array, "B T D"], w: Mapping[str, Array], plan: Plan, settings, config: ModelConfig):
    """Returns the attention output, and {} as sums; `settings` has the layer's `window` and `turns`. On CPUs, B and T
    are one axis, and queries, keys and values one product."""
    implementation, (B, T) = attention.find(config.attention), x_BTD.shape[:2]
    w = {role: w[role] for role in ATTENTION_WEIGHTS if role in w}
    w = fused_qkv(w) if implementation.flat else gathered_weights(w, ATTENTION_WEIGHTS, config)

    def flat(x_BTX, *axes):
        return reshape(x_BTX, (B * T, *x_BTX.shape[2:]), "batch", *axes) if implementation.flat else x_BTX

    def rows(x_NX, *axes):
        return reshape(x_NX, (B, T, *x_NX.shape[1:]), "batch", *axes) if implementation.flat else x_NX

    # Scan's partial evaluation moves what depends only on the plan out of the loop over layers. That is right for
    # rotations, but would keep the masks of every block: the barrier ties them to the layer.
    x_BTD, of_rows = jax.lax.optimization_barrier((x_BTD, plan.rows))
    x_BTD, (cos_BTH, sin_BTH) = flat(x_BTD), map(flat, rotation_of(settings, plan.rotations, config))
    growth_BT = None if plan.growth is None else flat(plan.growth)
    qkv = project_heads(x_BTD, w, (cos_BTH, sin_BTH), growth_BT, config)
    y_BTKGH = implementation.attend(*(rows(x, None, "kv_heads") for x in qkv), of_rows, config, settings["window"])
    return rows(project_out(flat(y_BTKGH, "kv_heads"), x_BTD, w, config)), {}


def head_sizes(config: ModelConfig) -> dict[str, int]:
    return {"D": config.width, "K": config.kv_heads, "G": config.group, "H": config.head_dim}


def visible_pairs(tokens: int, window: int = UNBOUNDED) -> int:
    """Returns the (query, key) pairs in a row of `tokens` tokens filled by one chain, the most for any row."""
    seen = min(window, tokens)
    return seen * tokens - seen * (seen - 1) // 2


def attention_flops(config: ModelConfig, tokens: int, layer: int) -> float:
    """Returns a layer's forward FLOPs on a row of `tokens` tokens for logits and values, 2 H each per pair and head."""
    window_L = windows(config)
    pairs = visible_pairs(tokens, UNBOUNDED if window_L is None else int(window_L[layer]))
    return 4.0 * config.heads * config.head_dim * pairs


def attention_kernels(config: ModelConfig, rows: int, tokens: int, split: Mapping[str, int]) -> dict[str, float]:
    return attention.find(config.attention).flops(config, rows, tokens, split["tensor"], split["context"])


ATTENTION = Kind(
    ATTENTION_WEIGHTS, head_sizes, attend, attention_plan, attention_settings,
    lambda config, context: attention.find(config.attention).refuses(config, None, context), attention_flops,
    attention_kernels, cached=layers.KEYS,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- the MLP
#
# down(activation(gate x) * (up x)) (Shazeer 2020).

MLP_WEIGHTS = {"gate": Weight("DF", "D"), "up": Weight("DF", "D"), "down": Weight("FD", "F")}


def mlp(x_BTD: Float[Array, "B T D"], w: Mapping[str, Array], plan, settings, config: ModelConfig):
    """Returns the MLP's output, and {} as sums. If tokens are unsplit, CPUs join B and T: see `Implementation.flat`."""
    w = {role: w[role] for role in MLP_WEIGHTS}
    if attention.find(config.attention).flat:
        y_XD = gated(reshape(x_BTD, (-1, x_BTD.shape[-1]), "batch"), w, config)
        return reshape(y_XD, x_BTD.shape, "batch"), {}
    if config.remat in ("full", "attention") and x_BTD.ndim == 3:
        return cast(Array, chunked_mlp(x_BTD, with_chunks(w), config)), {}
    return gated(x_BTD, gathered_weights(w, MLP_WEIGHTS, config), config), {}


def gated(x_BTD: Float[Array, "*B D"], w: Mapping[str, Array], config: ModelConfig) -> Float[Array, "*B D"]:
    """Returns the gated MLP by whole matrices."""
    gate_BTF, up_BTF = (product(x_BTD, w[name], config) for name in ("gate", "up"))
    return product(activated(gate_BTF, config) * up_BTF, w["down"], config, 1, stream(x_BTD))


DENSE = Kind(
    MLP_WEIGHTS, lambda config: {"D": config.width, "F": config.mlp_width}, mlp, refuses=lambda config, context: None
)

# ---------------------------------------------------------------------------------------------------- chunks of the MLP
#
# For full rematerialisation: the least memory of all. The backward pass of the unchunked MLP keeps four arrays of all
# tokens and the full MLP width, three gathered matrices and their three gradients: on long rows and large meshes most
# of a layer's memory. Here it keeps one chunk of each. A chunk's weights are gathered when it is computed, and its
# gradients scattered. Nothing is computed more often than under full rematerialisation without chunks.

CHUNKS = 8
"""A chunk of Qwen2.5-Math-7B's MLP is 2,368 wide. For a row of 8,192 tokens its activations take 37 MiB in bfloat16:
less than the hidden states' 56 MiB, which attention keeps in several copies meanwhile."""


def chunk_count(width: int) -> int:
    """Returns the chunk count for a device's MLP width: the largest divisor of both it and CHUNKS."""
    return math.gcd(CHUNKS, width)


def with_chunks(w: Mapping[str, Array]) -> dict[str, Array]:
    """Returns a layer's matrices in chunks: gate and up (P, D, N, F), down (P, N, F, D).

    P are the chunks, N the parts into which the mesh splits the MLP width, F the width of a device's share in a chunk.
    """
    axis = {"gate": 1, "up": 1, "down": 0}
    return {name: split_in_chunks(w[name], axis[name], chunk_count) for name in axis}


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def chunked_mlp(x_BTD: Float[Array, "B T D"], w: Mapping[str, Array], config: ModelConfig) -> Float[Array, "B T D"]:
    """Returns the gated MLP by weight chunks (`with_chunks`), whose outputs and input gradients sum in float32."""
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
