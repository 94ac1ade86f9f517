"""The decoder: Linen modules own names and initialisers, free functions hold the mathematics as einsums.

Parameters are a plain dict, `{"embed", "layers_0": {...}, ..., "final_norm", "head": {...}}`, with the layers of a
group stacked on a leading axis and scanned. Letters: B rows, T tokens, S step slots, D width, K key-value heads,
G query heads a key-value head, H head size, F MLP width, V vocabulary, L layers, C classes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jprm.model import layers
from jprm.model.attention import PROJECTED, SAVED, capped
from jprm.model.attention import find as find_attention
from jprm.model.config import ModelConfig, step_layer
from jprm.model.heads import find
from jprm.model.layers import Weight, rms_norm
from jprm.model.mesh import at_tokens, embedding_lookup, reshape, row_parts, sharding
from jprm.model.parameters import Int8
from jprm.rows import Rows

AXES: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", "embed"),
    "final_norm": (None,),
    "kernel": ("embed", None),
    "bias": (None,),
    "hidden_kernel": ("embed", None),
    "hidden_bias": (None,),
    **{role: weight.places for role, weight in layers.builtin().items()},
}
"""Logical axes of every parameter, by name; `jprm.model.mesh` maps them to mesh axes. Those of a layer's parameters
begin with the layer."""


def _added(a: Any, b: Any) -> Any:
    return a + b


def _param(
    module: nn.Module, name: str, shape: tuple[int, ...], scale: float | None = None, value: Any = 0.0,
    places: tuple[str | None, ...] = (),
) -> Any:  # fmt: skip
    """Returns a parameter, created sharded: normal with standard deviation `scale`, or `value` if that is None."""
    place = sharding(*(places or AXES[name]))
    if callable(value):
        return module.param(
            name, lambda key: jax.sharding.reshard(value(key, shape), place) if place else value(key, shape)
        )
    if scale is None:
        return module.param(name, lambda key: jnp.full(shape, jnp.asarray(value), jnp.float32, out_sharding=place))
    return module.param(name, lambda key: scale * jax.random.normal(key, shape, jnp.float32, out_sharding=place))


def norm_scale(w: Float[Array, "*L D"], config: ModelConfig) -> Float[Array, "*L D"]:
    """Returns the factor of a norm with parameter `w`."""
    return w + 1 if config.centred_norms else w


def embed(tokens_BT: Int[Array, "B T"], embed_VD: Float[Array, "V D"], config: ModelConfig):
    """Returns the embeddings (B, T, D), which enter the first layer, in the computation's dtype."""
    x_BTD = jax.tree.map(lambda table: embedding_lookup(table, tokens_BT), embed_VD).astype(config.dtype)
    return x_BTD * jnp.asarray(config.width**0.5, config.dtype) if config.design == "gemma" else x_BTD


def cast_weights(layer: Mapping[str, Array | Int8], config: ModelConfig, index: int) -> dict[str, Array]:
    """Returns the parameters of layer `index` in the computation's dtype, norms as factors in float32."""
    weights = {role: weight for role, (weight, _) in layers.roles(config, index).items()}

    def of_role(role: str, w: Array | Int8) -> Array:
        if weights[role].value is None:
            return norm_scale(cast(Array, w), config)
        return cast(Array, w) if weights[role].wide else w.astype(config.dtype)

    return {role: of_role(role, w) for role, w in layer.items()}


REMAT = {
    "nothing": None,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(SAVED),
    ),
    "attention": jax.checkpoint_policies.save_only_these_names(SAVED, PROJECTED),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def block(x_BTD, layer: Mapping[str, Array | Int8], plans: Mapping[str, Any], here, config: ModelConfig, index: int):
    """Applies a layer: its mixer, then its MLP, each after a norm, before one, or both, and added to the stream.

    plans: by kind, `Kind.plan`; here: by kind, the layer's entry of `Kind.settings`; index: which layer of the pattern.
    Returns the stream and the kinds' sums.
    """
    w, sums, flat = cast_weights(layer, config, index), {}, find_attention(config.attention).flat
    B, T, D = x_BTD.shape

    def rows(x):
        return reshape(x, (B, T, D), "batch") if flat else x

    def stream(x_BTD):
        return reshape(x_BTD, (B * T, D), "batch") if flat else x_BTD

    x = stream(x_BTD)  # where attention is made for CPUs B and T are one axis
    for part, name in zip(("attention", "mlp"), layers.kinds_of(config, index), strict=True):
        y_BTD = rows(normed(x, w, f"{part}_norm", config))
        y_BTD, more = layers.find(name).apply(y_BTD, w, plans[name], here[name], config)
        x, sums = x + normed(stream(y_BTD), w, f"{part}_post_norm", config), sums | more
        if part == "attention":
            x = checkpoint_name(x, PROJECTED)
    return rows(x), sums


def normed(x_BTD, w: Mapping[str, Array], role: str, config: ModelConfig):
    """Returns the stream after this norm, where the model has it."""
    return rms_norm(x_BTD, w[role], config.norm_eps) if role in w else x_BTD


def plans_of(position_BT, until_BT, config: ModelConfig) -> dict[str, Any]:
    """Returns what each kind needs to know of the rows, by its name."""
    return {name: layers.find(name).plan(position_BT, until_BT, config) for name in layers.names(config)}


def settings_of(config: ModelConfig) -> dict[str, Any]:
    """Returns the numbers in which layers of a kind differ, by its name: arrays over all layers, or None."""
    return {name: layers.find(name).settings(config) for name in layers.names(config)}


class Layers(nn.Module):
    """The layers from `first` to `stop`, scanned and rematerialised: a parameter is stacked over those that have it."""

    config: ModelConfig
    first: int
    stop: int

    @nn.compact
    def __call__(self, x_BTD, plans: Mapping[str, Any]):
        """Returns the residual stream, and the kinds' numbers summed over layers."""
        c, found = self.config, layers.stacks(self.config, self.first, self.stop)
        stack = {role: _layer_param(self, role, c, *of_role) for role, of_role in found.items()}
        # Cast outside the loop, so that the gradients of all layers wait for the update in this dtype too.
        stack = {
            role: w if found[role][0].wide or isinstance(w, Int8) else w.astype(c.dtype) for role, w in stack.items()
        }
        here = jax.tree.map(lambda x_L: jnp.asarray(x_L[self.first : self.stop]), settings_of(c))
        totals: dict[str, Array] = {}
        for first, stop, own in _rematerialised(c, self.first, self.stop):
            repeats = layers.period(c, first, stop)
            for start, end in ((first, stop - (stop - first) % repeats), (stop - (stop - first) % repeats, stop)):
                if start == end:
                    continue
                part = {role: _cut(w, found[role][2], start, end) for role, w in stack.items()}
                part = {role: w for role, w in part.items() if w is not None}
                inputs = (
                    part,
                    jax.tree.map(lambda x_L, a=start, b=end: _slice(x_L, a - self.first, b - self.first), here),
                )
                x_BTD, sums = _scanned(x_BTD, inputs, plans, own, start, min(repeats, end - start), end - start)
                totals |= {name: totals.get(name, 0) + jnp.sum(x, axis=0) for name, x in sums.items()}
        return x_BTD, totals


def _layer_param(module: nn.Module, role: str, c: ModelConfig, weight: Weight, size: Mapping[str, int], at: tuple):
    """Returns a parameter of the layers `at`, stacked."""
    shape = (len(at), *(size[axis] for axis in weight.axes))
    if weight.inputs:
        scale = math.prod(size[axis] for axis in weight.inputs) ** -0.5
        return _param(module, role, shape, scale=scale, places=weight.places)
    one = 0.0 if c.centred_norms else 1.0  # the parameter of a norm with factor 1
    return _param(module, role, shape, value=one if weight.value is None else weight.value, places=weight.places)


def _slice(x: Array, start: int, stop: int) -> Array:
    return x if (start, stop) == (0, x.shape[0]) else x[start:stop]


def _cut(w, at: tuple[int, ...], start: int, stop: int):
    """Returns the part of a stack over the layers `at` that is from `start` to `stop`, or None."""
    few = [i for i, layer in enumerate(at) if start <= layer < stop]
    return jax.tree.map(lambda x: _slice(x, few[0], few[-1] + 1), w) if few else None


def _rematerialised(config: ModelConfig, first: int, stop: int) -> list[tuple[int, int, ModelConfig]]:
    """Returns the parts of a group of layers, each with the config whose `remat` it has."""
    kept = min(config.product_layers, stop - first)
    plain = dataclasses.replace(config, product_layers=0)
    dots = dataclasses.replace(plain, remat="dots")
    parts = [(first, stop - kept, plain), (stop - kept, stop, dots)]
    return [part for part in parts if part[0] < part[1]]


def _scanned(x_BTD, inputs: tuple, plans: Mapping[str, Any], c: ModelConfig, first: int, repeats: int, count: int):
    """Applies `count` layers from `first` on, whose pattern repeats after `repeats`.

    inputs: their parameters, stacked, and by kind the numbers of `settings_of`. Returns sums with an axis of repeats.
    """

    def one(x_BTD, here, w, index: int):
        return block(x_BTD, w, plans, here, c, index)

    if c.remat != "nothing":  # a scan needs no guard against CSE
        one = jax.checkpoint(one, policy=REMAT[c.remat], prevent_cse=False, static_argnums=3)

    def body(x_BTD, inputs):
        w, here = inputs
        if repeats == 1:
            return one(x_BTD, here, w, first)
        total: dict[str, Array] = {}
        place = dict.fromkeys(w, 0)  # of the next layer that has the role, in its part of the stack
        for i in range(repeats):
            own = {}
            for role in layers.roles(c, first + i):
                own[role] = jax.tree.map(lambda x, n=place[role]: x[n], w[role])
                place[role] += 1
            x_BTD, sums = one(x_BTD, jax.tree.map(lambda x, n=i: x[n], here), own, first + i)
            total |= {name: total.get(name, 0) + x for name, x in sums.items()}
        return x_BTD, total

    if repeats > 1:
        inputs = jax.tree.map(lambda x: _periods(x, count // repeats), inputs)
    return jax.lax.scan(body, x_BTD, inputs)


def _periods(x: Array, count: int) -> Array:
    """Splits a stack of layers into periods."""
    place = None if sharding() is None else PartitionSpec(None, None, *jax.typeof(x).sharding.spec[1:])
    return jnp.reshape(x, (count, x.shape[0] // count, *x.shape[1:]), out_sharding=place)


class Decoder(nn.Module):
    """Tokens to hidden states after the final norm, in the computation's dtype."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens_BT, position_BT, until_BT) -> tuple[Float[Array, "B T D"], Float[Array, "V D"]]:
        """Returns hidden states, and the embedding table for a head that is tied to it."""
        c = self.config
        embed_VD = _param(self, "embed", (c.vocab_size, c.width), scale=0.02)
        x_BTD, plans = embed(tokens_BT, embed_VD, c), plans_of(position_BT, until_BT, c)
        for i, (first, stop) in enumerate(layers.spans(c)):
            x_BTD, sums = Layers(c, first, stop, name=f"layers_{i}")(x_BTD, plans)
            for name, x in sums.items():
                self.sow("sums", name, x, init_fn=lambda: 0, reduce_fn=_added)
        scale_D = _param(self, "final_norm", (c.width,), value=0.0 if c.centred_norms else 1.0)
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


def step_logits_and_sums(
    params: Mapping, config: ModelConfig, rows: Rows
) -> tuple[Float[Array, "B S C"], dict[str, Array]]:
    """Returns the model's logits, and what its layers' kinds sum over tokens and layers, by name (`Kind.apply`)."""
    logit_BSC, state = cast(Any, Model(config).apply({"params": params}, rows, mutable=["sums"]))
    return logit_BSC, dict(state.get("sums", {}).get("decoder", {}))


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
    shape = (1 if mesh.empty else row_parts(mesh), 1)
    one = jnp.zeros(shape, jnp.int32, out_sharding=sharding("batch", None))
    real = one.astype(jnp.float32)
    rows = Rows(one, one, one + 1, one, real, real, one, one, one, one > 0, real, one > 0)
    # Only the reference attention takes rows of one token; parameters do not depend on attention.
    return dict(Model(dataclasses.replace(config, attention="reference")).init(key, rows)["params"])
