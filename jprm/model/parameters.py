"""Parameters as flat dicts {path: array}: trained or frozen, quantised, adapted by LoRA. And FLOPs."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float
from jaxtyping import Int8 as Int8Values

from jprm.model import Dtype, layers
from jprm.model.config import ModelConfig
from jprm.model.heads import find as find_head
from jprm.model.mesh import sharding
from jprm.options import find_part


def split(params: dict, freeze: str, only: str = "") -> tuple[dict, dict]:
    """Splits nested parameters into (trained, frozen) flat dicts {path: array}, e.g. at "decoder/layers_0/query".

    `freeze` ("": none) and `only` ("": all) are regular expressions, searched in paths. A parameter is frozen if
    `freeze` matches or `only` does not. Raises ValueError if `freeze` matches no parameter, or all are frozen.
    """
    flat = flatten_dict(params, sep="/")
    matched = {path for path in flat if freeze and re.search(freeze, path)}
    frozen = {path: value for path, value in flat.items() if path in matched or not re.search(only, path)}
    check_matches("freeze", freeze, flat)
    if len(frozen) == len(flat):
        raise ValueError(f"freeze={freeze!r} matches every parameter: nothing is left to train")
    return {path: value for path, value in flat.items() if path not in frozen}, frozen


def check_matches(field: str, pattern: str, paths: Iterable[str]) -> None:
    """Raises ValueError, naming the option `field` and listing the paths, if the regular expression is in none."""
    if not any(re.search(pattern, path) for path in paths):
        raise ValueError(f"{field}={pattern!r} matches no parameter; paths are {', '.join(sorted(paths))}")


def new_parameters(path: object, lacking: Collection[str], pattern: str) -> set[str]:
    """Returns the `lacking` parameters, to start at random; the regular expression `pattern` must be in all.

    "" if there are none. Raises ValueError, naming the model `path`, if it misses one or matches none of them.
    """
    new = {name for name in lacking if pattern and re.search(pattern, name)}
    if rest := sorted(set(lacking) - new):
        raise ValueError(
            f"{path}: has no weights for {', '.join(rest)}. Load another model, or set new_parameters to a pattern that"
            " matches them, to train them from random ones"
        )
    if pattern and not new:
        raise ValueError(f"new_parameters={pattern!r}: matches no missing parameter of {path}. Leave it empty")
    return new


def join(*flat: dict) -> dict:
    """Merges flat dicts {path: array} into one dict, nested at each "/"; of a path in several, the last counts."""
    return unflatten_dict({path: value for part in flat for path, value in part.items()}, sep="/")


# ---------------------------------------------------------------------------------------------------- smaller types
#
# A matrix in int8 has one scale per channel and takes a quarter of its float32 memory; in blocks of 4 bits an eighth
# (`jprm.methods.formats.blocks`). Each layer's weights are dequantised when the layer is computed; products and sums
# stay in the computation's dtype.


@functools.cache
def summed_axes() -> dict[str, tuple[int, ...]]:
    """Returns {matrix role: axes its product sums over}, e.g. `query`: (-4,). Other axes are channels. Cached."""
    return {"embed": (-1,)} | {r: layers.summed(weight) for r, weight in layers.builtin().items() if weight.inputs}


@functools.cache
def wide() -> set[str]:
    """Returns jprm's own roles that stay float32 in every dtype. Cached."""
    return {"final_norm"} | {role for role, weight in layers.builtin().items() if weight.wide}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8:
    """values x scale; the scale has size 1 along the summed axes."""

    values: Int8Values[Array, "*S"]
    scale: Float[Array, "*S1"]

    def astype(self, dtype) -> Array:
        return (self.values.astype(jnp.float32) * self.scale).astype(dtype)


def quantized(x: Float[Array, "*S"], axes: tuple[int, ...]) -> Int8:
    """Returns `x` in int8, rounded to multiples of its largest magnitude along `axes` / 127; the scales are float32."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=axes, keepdims=True) / 127
    values = jnp.round(x / jnp.where(scale > 0, scale, 1)).astype(jnp.int8)
    return Int8(values, scale)


def held(role: str, x: Float[Array, "*S"], dtype: Dtype) -> Any:
    """Returns a decoder parameter as it is stored: an array, or a quantised matrix with `astype`, e.g. `Int8`.

    Norms are float32; other vectors are too, unless dtype is bfloat16. In an nf4 model the embedding is bfloat16, as in
    bitsandbytes.

    Raises ValueError for an unknown dtype, for gguf, and if int8 or nf4 meets a role without known summed axes.
    """
    if dtype not in get_args(Dtype):
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(get_args(Dtype))}")
    if dtype == "float32":
        return x.astype(dtype)
    matrix = role in summed_axes() and role not in wide()
    if dtype == "int8" and matrix:
        return quantized(x, summed_axes()[role])
    if dtype == "nf4" and matrix and role != "embed":
        return find_part("jprm.methods.formats.blocks:nf4", {}, "nf4")(role, x)
    if dtype == "gguf" and matrix:
        raise ValueError(
            "dtype='gguf' keeps the blocks of a GGUF file, but these weights are not from one; use nf4 or int8"
        )
    known = role in wide() or role.endswith(("norm", "bias")) or role in layers.builtin() or role == "embed"
    if dtype in ("int8", "nf4") and not known:
        raise ValueError(
            f"dtype={dtype!r}: the axes that products with {role!r} sum over are not known. Add them to"
            " jprm.model.parameters.summed_axes, or use bfloat16"
        )
    small = dtype == "nf4" and role == "embed" or dtype == "bfloat16" and not (role in wide() or role.endswith("norm"))
    return x.astype("bfloat16" if small else "float32")


def widened(decoder: dict) -> dict:
    """Returns the decoder with all parameters as float32 arrays."""
    return jax.tree.map(lambda w: w.astype(jnp.float32), decoder, is_leaf=lambda w: hasattr(w, "astype"))


@functools.partial(jax.jit, static_argnums=1)
def held_decoder(decoder: dict, dtype: Dtype) -> dict:
    """Returns all decoder parameters as they are stored (`held`), each in its place on the mesh. Raises as `held`."""
    return jax.tree_util.tree_map_with_path(lambda path, x: held(path[-1].key, x, dtype), decoder)


# ------------------------------------------------------------------------------------------------------------ adapters
#
# LoRA: a low-rank change A B of each chosen matrix (Hu et al. 2022), as parameters of their own. The adapter of
# `decoder/layers_0/query` is `decoder/layers_0/query_lora_a`, (L, in, r), and `..._lora_b`, (L, r, out), stacked by
# layer and sharded like the matrix. `merge` replaces the matrix by W + scale A B before the forward pass, so the model
# knows nothing of adapters.

A, B = "_lora_a", "_lora_b"
TRAINED = rf"({A}|{B})$|^(head|steps)/"
"""Matches the parameters trained with adapters: the adapters themselves, the new head and the step layer."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Rank 0 means no adapters: every parameter is trained.

    alpha: A B is scaled by alpha / rank, or alpha / sqrt(rank) with `rslora` (Kalajdzievski 2023).
    targets: regular expression, searched in paths, e.g. `decoder/layers_0/query`. Matrices that `optimizer.freeze`
        matches get no adapter. There is no dropout.
    """

    rank: int = 0
    alpha: float = 16.0
    targets: str = r"/(query|key|value|out|gate|up|down)$"
    rslora: bool = False

    def __post_init__(self):
        if self.rank < 0 or not 0 < self.alpha < math.inf:
            raise ValueError(f"lora.rank={self.rank} must not be negative, and lora.alpha={self.alpha} be positive")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@functools.cache
def products() -> dict[str, str]:
    """Returns {role: `layers.product_of`}, the einsums for A B, e.g. `query`: LDR,LRKGH->LDKGH. Cached."""
    return {role: layers.product_of(weight) for role, weight in layers.builtin().items() if weight.inputs}


def init_adapters(config: LoraConfig, model: ModelConfig, freeze: str, key: Array) -> dict[str, Array]:
    """Returns sharded float32 arrays by path, e.g. `decoder/layers_0/query_lora_a`, uniform in +-1/sqrt(in).

    `..._lora_b` is 0, as in PEFT. Raises ValueError if `targets` matches no matrix, or `freeze` matches all.
    """
    stacks = [layers.stacks(model, *span) for span in layers.spans(model)]
    matrices = {  # a group's in the order of `products`: they are numbered for random keys
        f"decoder/layers_{i}/{role}": (role, stack[role])
        for i, stack in enumerate(stacks) for role in products() if role in stack
    }  # fmt: skip
    chosen = [x for x in matrices if re.search(config.targets, x) and not (freeze and re.search(freeze, x))]
    if not chosen:
        known = ", ".join(matrices)
        raise ValueError(f"lora.targets={config.targets!r} names no matrix that is not frozen; matrices are {known}")
    adapters = {}
    for i, path in enumerate(chosen):
        role, (weight, size, at) = matrices[path]
        size = {**size, "L": len(at), "R": config.rank}
        operands, product = products()[role].split("->")
        split = dict(zip(product, weight.places, strict=True))  # the rank is not split
        (a, a_place), (b, b_place) = (
            (tuple(size[x] for x in letters), sharding(*(split.get(x) for x in letters)))
            for letters in operands.split(",")
        )
        bound = math.prod(size[letter] for letter in weight.inputs) ** -0.5
        key_of = jax.random.fold_in(key, i)
        adapters[path + A] = jax.random.uniform(key_of, a, jnp.float32, -bound, bound, out_sharding=a_place)
        adapters[path + B] = jnp.zeros(b, jnp.float32, out_sharding=b_place)
    return adapters


def check_adapted(paths: Iterable[str], freeze: str) -> None:
    """Raises ValueError if LoRA training would freeze a parameter of `paths` that nothing declares as unchanged.

    Otherwise a new layer's parameters would be frozen silently. Parameters that `freeze` matches are fine.
    """
    plain = "|".join(layers.builtin().keys() - products().keys())
    kept = rf"^decoder/(embed|final_norm|layers_\d+/({plain}))$"  # never gets an adapter and stays as it is
    unknown = [
        path for path in paths
        if not (re.search(TRAINED, path) or re.search(kept, path) or path.rpartition("/")[2] in products())
        and not (freeze and re.search(freeze, path))
    ]  # fmt: skip
    if unknown:
        raise ValueError(
            f"lora: {', '.join(sorted(unknown))}: adapters do not know these parameters and would freeze them. Match"
            " them with optimizer.freeze, add their products to jprm.model.parameters.products, or set lora.rank=0"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """W + scale A B for a quantised matrix, summed in float32 when its layer is computed."""

    role: str = dataclasses.field(metadata=dict(static=True))
    w: Any
    a: Array
    b: Array
    scale: float = dataclasses.field(metadata=dict(static=True))

    def astype(self, dtype) -> Array:
        return _sum(self.role, self.w.astype(jnp.float32), self.a, self.b, self.scale).astype(dtype)


def merge(params: Mapping, config: LoraConfig) -> dict:
    """Returns nested parameters without adapters: W becomes W + scale A B, or `Adapted` if it is not float32."""
    if not config.rank:
        return dict(params)

    decoder = without_adapters(params["decoder"])
    for name, stack in params["decoder"].items():
        for role in [role for role in decoder[name] if role + A in stack] if isinstance(stack, Mapping) else ():
            decoder[name][role] = with_adapter(role, decoder[name][role], stack, config.scale)
    return {**params, "decoder": decoder}


def without_adapters(decoder: Mapping) -> dict:
    return {
        name: {role: w for role, w in part.items() if not role.endswith((A, B))} if isinstance(part, Mapping) else part
        for name, part in decoder.items()
    }


def with_adapter(role: str, w: Any, stack: Mapping[str, Array], scale: float) -> Array | Adapted:
    whole = getattr(w, "dtype", None) == jnp.float32
    return (_sum if whole else Adapted)(role, w, stack[role + A], stack[role + B], scale)


def _sum(role: str, w: Array, a: Array, b: Array, scale: float) -> Array:
    """Returns W + scale A B for a layer or a stack, in full float32 precision, which TPUs do not use by default."""
    product, places = products()[role], layers.weight_of(role).places
    if w.ndim < len(places):
        product, places = product.replace("L", ""), places[1:]
    return w + scale * jnp.einsum(product, a, b, precision="highest", out_sharding=sharding(*places))


# --------------------------------------------------------------------------------------------------------------- FLOPs
#
# FLOPs count matrix products and attention's visible pairs (Chowdhery et al. 2022, appendix B): 2 per parameter and
# token in the forward pass; 2 more for the gradient of its input, where anything below is trained; 2 more for its own
# gradient, where it is trained. Rematerialisation does not count.

PEAK = {
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v6 lite": 918e12,
    "TPU v6e": 918e12, "TPU7x": 2307e12 / 2, "NVIDIA A100": 312e12, "NVIDIA H100": 989.5e12, "NVIDIA H200": 989.5e12,
    "NVIDIA B200": 2250e12, "NVIDIA L4": 121e12, "NVIDIA A10": 125e12, "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4090": 165.2e12, "NVIDIA GeForce RTX 5090": 209.5e12,
}  # fmt: skip
"""Dense bfloat16 FLOPs per second and device, by the first words of jax's device kind (a GeForce's: all). Sources:
`jprm.apps.plan.topologies`. A TPU7x chip is two devices."""


def peak(device_kind: str) -> float | None:
    """Returns a jax device kind's dense bfloat16 FLOPs per second (e.g. `TPU v4`: 275e12), or None, e.g. for a CPU."""
    words = device_kind.replace("-", " ")
    kinds = [x for x in PEAK if device_kind == x or (words.startswith(f"{x} ") and "RTX" not in x)]  # not a 3090 Ti
    return PEAK[max(kinds, key=len)] if kinds else None


def matrices(model: ModelConfig, layer: int = 0) -> dict[str, float]:
    """Returns {matrix role: parameters x the fraction used by a token} for one layer (from 0)."""
    kinds = [layers.find(name) for name in layers.kinds_of(model, layer)]
    return {
        name: math.prod(kind.sizes(model)[axis] for axis in weight.axes) * kind.used(model, name)
        for kind in kinds for name, weight in kind.weights.items() if weight.inputs and weight.when(model)
    }  # fmt: skip


def model_flops(model: ModelConfig, trained: Collection[str], rows: int, tokens: int, slots: int) -> float:
    """Returns the FLOPs to update the `trained` paths ([]: to score) on all `rows` rows, each with `tokens` tokens and
    `slots` steps, without adapters' and recomputation."""
    groups = range(len(model.layer_groups))
    in_group = [[path for path in trained if path.startswith(f"decoder/layers_{i}/")] for i in groups]
    first = next((i for i in groups if in_group[i]), len(model.layer_groups))
    if "decoder/embed" in trained:
        first = -1
    total = 0.0
    for i, span in enumerate(layers.spans(model)):
        backward = i >= first
        for layer in range(*span):
            for name, parameters in matrices(model, layer).items():
                learnt = f"decoder/layers_{i}/{name}" in trained
                total += (2 + 2 * backward + 2 * learnt) * parameters * tokens
            # What is no product with a matrix, and twice as much for its gradients.
            of_kinds = (layers.find(name).flops(model, tokens, layer) for name in layers.kinds_of(model, layer))
            total += (3 if backward else 1) * sum(of_kinds)
    head = model.width * find_head(model.head).size(model.vocab_size)
    head += model.width**2 * model.head_hidden
    return rows * (total + (6 if trained else 2) * head * slots)
