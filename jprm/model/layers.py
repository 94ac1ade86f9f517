"""Layers: the `Kind` record, the registered kinds, and their shared code.

A layer is a mixer of tokens, then an MLP. Each takes the residual stream after an RMSNorm and returns its addition to
the stream. A model is a pattern of kinds (`ModelConfig.mixers`, `ModelConfig.mlps`), repeated over its layers. A
kind's parameters are stacked over a group's layers that have it.

| name | kind |
|---|---|
| `attention` | grouped-query attention: full, or in a sliding window; with rotary positions or without |
| `sinks` | the same with a learned sink per head (gpt-oss) |
| `deltanet` | gated DeltaNet: a recurrent state along each token's own path in its tree |
| `dense` | the gated MLP |
| `experts` | a mixture of gated MLPs; a router chooses some for each token |

To add a kind, write a file with a `Kind` and name it in the pattern, e.g. `mymodule:NAME`, or in
`jprm.model.config.KINDS`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jprm.model.attention import find as find_attention
from jprm.model.config import KINDS, NORMS, ModelConfig
from jprm.model.mesh import gathered_weight, sharding, spec
from jprm.options import find_part

SPLIT = {"D": "embed", "K": "kv_heads", "F": "mlp", "S": "mlp", "E": "experts"}
"""Axis letters split by `jprm.model.mesh`, to logical axes. A vector's width is not split."""

KEYS = "keys"
"""`Kind.cached` of attention: keys and values are cached, and decoding computes the softmax over them."""


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """`Kind.cached` of a recurrent mixer: a state per row, zero before the first token.

    empty: (config, rows) to the shape and dtype of each array. The first axes must be rows and heads, which a mesh
        splits.
    decode: (normed x (B, T, D), w, state, length (B,), config) to the addition to the residual stream, and the state
        after each row's first `length` new tokens. Rows must be chains: token t follows t - 1, padding comes last.
    """

    empty: Callable[[ModelConfig, int], tuple[tuple[tuple[int, ...], Any], ...]]
    decode: Callable[..., tuple[Array, tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class Weight:
    """One layer's parameter.

    axes: one letter per axis, e.g. "DKGH", with `Kind.sizes`; D, K, F, S and E may be split over the mesh (`SPLIT`).
    inputs: the axes summed over in its product. A matrix starts normal with variance 1 / (their size), and takes
        adapters and int8. A vector or elementwise table has no inputs and starts at `value`.
    value: a number, a function of (key, shape with the layer axis first), or None for a norm that starts with factor 1.
    wide: stays float32 in every dtype, as norms do.
    when: whether a model has it.
    """

    axes: str
    inputs: str = ""
    value: float | Callable[[Array, tuple[int, ...]], Array] | None = 0.0
    wide: bool = False
    when: Callable[[ModelConfig], bool] = lambda config: True

    def __post_init__(self):
        object.__setattr__(self, "wide", self.wide or self.value is None)

    @property
    def places(self) -> tuple[str | None, ...]:
        """Logical axes, the layer axis first, e.g. `(None, "embed", "mlp")` for "DF"; `None` is not split."""
        return (None, *(SPLIT.get(axis) if len(self.axes) > 1 or axis != "D" else None for axis in self.axes))


NORM = Weight("D", value=None)


@dataclasses.dataclass(frozen=True)
class Attending:
    """`Kind.cached` of attention with another rule than the softmax (`jprm.methods.layers.attending`).

    attend: (q (B, T, K, G, H), k and v (B, S, K, H), seen (B, T, S), behind (B, T, S), w, config) to (B, T, K, G, H).
        q is rotated but unscaled (`attending.logits` scales and caps). `seen` marks the visible keys, `behind` counts
        positions from key to query, `w` has `weights` by role. Each device calls it with its own rows and heads.
    """

    attend: Callable[..., Array]
    weights: Mapping[str, Weight]

    def __call__(self, q_BTKGH, k_BSKH, v_BSKH, seen_BTS, behind_BTS, w: Mapping[str, Array], config: ModelConfig):
        queries, keys, rows = ("batch", None, "kv_heads", None, None), ("batch", None, "kv_heads", None), ("batch",)
        places = {role: weight.places[1:] for role, weight in self.weights.items()}
        axes = [queries, keys, keys, rows, rows, places]
        attend = local(functools.partial(self.attend, config=config), axes, queries)
        y_BTKGH = attend(q_BTKGH, k_BSKH, v_BSKH, seen_BTS, behind_BTS, {role: w[role] for role in self.weights})
        return y_BTKGH.astype(v_BSKH.dtype)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A mixer or MLP kind.

    weights: parameters by role. Roles must be unique among a model's kinds; a norm's role must end with "norm".
    sizes: (config) to the letters' sizes in `weights`.
    apply: (normed x (B, T, D), w, plan, settings, config) to the addition to the residual stream, and named numbers to
        sum over layers and tokens ({} for most). `w`: the layer's parameters in the computation dtype; `settings`: the
        layer's entry in `settings`.
    plan: (position (B, T), until (B, T), config) to anything that `apply` needs to know about the rows, computed once
        for all layers. If `apply` derives large arrays from the plan alone, such as masks, it must tie them to the
        layer by `jax.lax.optimization_barrier`, as attention does: otherwise the loop over layers keeps them.
    settings: (config) to arrays (L, ...) for all the model's layers, with numbers that differ between them, or `None`.
    refuses: (config, context) to the reason why the model, or rows in `context` parts, are not supported, or `None`. By
        default rows in parts are not: shardings are explicit, so `apply` must say how tokens are split.
    flops: (config, tokens, layer) to a row's forward FLOPs beyond its matrix products.
    kernels: (config, a device's rows, tokens per row, mesh sizes) to FLOPs per kernel call there, for `jprm plan`.
    used: (config, role) to the fraction of a matrix used in a token's forward pass.
    cached: the decoding state: `KEYS`, an `Attending` or a `Recurrent`; `None` if the kind cannot decode.
    """

    weights: Mapping[str, Weight]
    sizes: Callable[[ModelConfig], dict[str, int]]
    apply: Callable[..., tuple[Array, dict[str, Array]]]
    plan: Callable[[Array, Array, ModelConfig], Any] = lambda position_BT, until_BT, config: None
    settings: Callable[[ModelConfig], Any] = lambda config: None
    refuses: Callable[[ModelConfig, int], str | None] = lambda config, context: (
        None if context == 1 else f"a layer kind without `refuses` has rows whole: set mesh.context=1, not {context}"
    )
    flops: Callable[[ModelConfig, int, int], float] = lambda config, tokens, layer: 0.0
    kernels: Callable[[ModelConfig, int, int, Mapping[str, int]], dict[str, float]] = lambda *_: {}
    used: Callable[[ModelConfig, str], float] = lambda config, role: 1.0
    cached: Literal["keys"] | Attending | Recurrent | None = None


def find(name: str) -> Kind:
    return find_part(name, KINDS, "model.mixers or model.mlps", Kind)


def kinds_of(config: ModelConfig, layer: int) -> tuple[str, str]:
    """Returns the names of a layer's mixer and MLP. Layers count from 0."""
    mixers, mlps = config.mixers or ("attention",), config.mlps or ("dense",)
    return mixers[layer % len(mixers)], mlps[layer % len(mlps)]


def names(config: ModelConfig) -> tuple[str, ...]:
    """Returns the names of a model's kinds, each once, by first use."""
    return tuple(dict.fromkeys(name for layer in range(config.layers) for name in kinds_of(config, layer)))


def roles(config: ModelConfig, layer: int) -> dict[str, tuple[Weight, dict[str, int]]]:
    """Returns a layer's parameters by role, each with its letters' sizes.

    Flax initialises them in this order: a norm and its kind's matrices, for mixer and MLP, then the other parameters.
    """
    matrices, rest, width = {}, {}, {"D": config.width}
    for norm, name in zip(NORMS[:2], kinds_of(config, layer), strict=True):
        kind = find(name)
        matrices |= {norm: (NORM, width)} if norm in config.norms else {}
        for role, weight in kind.weights.items():
            if weight.when(config):
                (matrices if weight.inputs else rest)[role] = weight, kind.sizes(config)
    return matrices | rest | {role: (NORM, width) for role in NORMS[2:] if role in config.norms}


def spans(config: ModelConfig) -> Iterator[tuple[int, int]]:
    """Yields each group's layers (first, stop), without `stop`."""
    first = 0
    for layers in config.layer_groups:
        yield first, first + layers
        first += layers


def places(config: ModelConfig, first: int, stop: int) -> dict[str, tuple[int, ...]]:
    """Returns {role or kind's name: layers that have it}, in the model's numbering, for layers first..stop-1."""
    having: dict[str, tuple[int, ...]] = {}
    for layer in range(first, stop):
        for name in (*roles(config, layer), *kinds_of(config, layer)):
            having[name] = (*having.get(name, ()), layer)
    return having


def stacks(config: ModelConfig, first: int, stop: int) -> dict[str, tuple[Weight, dict[str, int], tuple[int, ...]]]:
    """Returns {role: (weight, sizes, layers that have it, as in `places`)} for layers first..stop-1."""
    at = places(config, first, stop)
    return {role: (*kept, at[role]) for layer in range(first, stop) for role, kept in roles(config, layer).items()}


def kernels(config: ModelConfig, rows: int, tokens: int, split: Mapping[str, int]) -> dict[str, float]:
    """Returns {kernel: FLOPs per call} for a device's `rows` rows of `tokens` each; `split`: {each mesh axis: size}."""
    by_kind = (find(name).kernels(config, rows, tokens, split) for name in names(config))
    return {name: flops for of_kind in by_kind for name, flops in of_kind.items()}


def weight_of(role: str) -> Weight:
    """Returns jprm's own layer parameter with this role. Raises KeyError if there is none."""
    if role in NORMS:
        return NORM
    for name in ("attention", "dense", *KINDS):  # the others are imported for a role that these two have not
        if role in (weights := find(name).weights):
            return weights[role]
    raise KeyError(role)


def builtin() -> dict[str, Weight]:
    """Returns the parameters in all `KINDS`, by role; a user's own are not included."""
    return dict.fromkeys(NORMS, NORM) | {role: x for name in KINDS for role, x in find(name).weights.items()}


def product_of(weight: Weight) -> str:
    """Returns the einsum for a low-rank matrix A B, e.g. LDR,LRKGH->LDKGH. L: layer, R: rank, E: experts, in both."""
    batch = "E" if weight.axes[0] == "E" and "E" not in weight.inputs else ""
    outputs = "".join(axis for axis in weight.axes if axis not in weight.inputs + batch)
    return f"L{batch}{weight.inputs}R,L{batch}R{outputs}->L{weight.axes}"


def summed(weight: Weight) -> tuple[int, ...]:
    """Returns the axes summed over in the matrix product, as negative indices, e.g. (-4,) for the query's DKGH."""
    return tuple(i - len(weight.axes) for i, axis in enumerate(weight.axes) if axis in weight.inputs)


def period(config: ModelConfig, first: int, stop: int) -> int:
    """Returns the kind pattern's shortest period over layers first..stop-1, their number if it never repeats."""
    pattern = [kinds_of(config, layer) for layer in range(first, stop)]
    return next(n for n in range(1, len(pattern) + 1) if pattern[n:] == pattern[: len(pattern) - n])


# What several kinds share.


def rms_norm(x: Float[Array, "*B D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "*B D"]:
    """Returns x / sqrt(mean(x^2) + eps) * scale, computed in float32 (Zhang and Sennrich 2019)."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype)


def product(x, w, config: ModelConfig, axes: int = 1, place: PartitionSpec | None = None) -> Array:
    """Contracts the last `axes` axes of `x` with the first of `w`, in the dtype of `x`; `place` shards the result.

    If attention is `flat` (CPUs), the product is float32 and then rounded: there XLA multiplies bfloat16 into float32
    twice as fast as into bfloat16. (An einsum would contract in the order of its letters and copy transposed weights.)
    """
    wide = jnp.float32 if find_attention(config.attention).flat else None
    return jnp.tensordot(x, w, axes, preferred_element_type=wide, out_sharding=place).astype(x.dtype)


def activated(gate: Float[Array, "*B F"], config: ModelConfig) -> Float[Array, "*B F"]:
    """Applies the gate activation: GELU (by tanh) for Gemma, else SiLU."""
    return jax.nn.gelu(gate, approximate=True) if config.design == "gemma" else jax.nn.silu(gate)


def gathered_weights(w: Mapping[str, Array], weights: Mapping[str, Weight], config: ModelConfig) -> dict[str, Array]:
    """Returns a kind's parameters `w`, gathered along `embed` only; `weights` declares them by role.

    Without rematerialisation it gathers nothing: the gathered weights of all layers would wait for the backward pass.
    """
    if config.remat == "nothing":
        return dict(w)
    axes = {role: weight.places.index("embed") - 1 for role, weight in weights.items() if "embed" in weight.places}
    return {name: gathered_weight(x, axes[name]) if name in axes else x for name, x in w.items()}


def local(function: Callable, axes: list, out: Any, check: bool = True) -> Callable:
    """Wraps `function` in a shard_map, so every device computes its own rows and heads; not without an explicit mesh.

    axes, out: trees with the arguments' and results' logical axes, up to the last split one, e.g. `("batch",)`.
    check: whether JAX infers how values vary over the mesh. Must be False for Pallas kernels without that information.
    """
    if sharding() is None:
        return function
    is_axes = lambda x: isinstance(x, tuple) and all(isinstance(name, str | None) for name in x)  # noqa: E731
    places, results = jax.tree.map(lambda names: spec(*names), (tuple(axes), out), is_leaf=is_axes)

    def mapped(*arguments):
        arguments = jax.tree.map(jax.sharding.reshard, arguments, places)
        return jax.shard_map(function, in_specs=places, out_specs=results, check_vma=check)(*arguments)

    return mapped
