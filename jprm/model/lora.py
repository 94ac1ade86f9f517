"""LoRA: a low-rank change A B of each chosen matrix (Hu et al. 2022), as parameters of their own.

The adapter of `decoder/layers_0/query` is `decoder/layers_0/query_lora_a`, (L, in, r), and `..._lora_b`, (L, r, out),
stacked by layer and sharded like the matrix. `merge` replaces the matrix by W + scale A B before the forward pass, so
the model knows nothing of adapters.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jprm.model import layers, transformer
from jprm.model.config import ModelConfig
from jprm.model.mesh import sharding

A, B = "_lora_a", "_lora_b"
TRAINED = rf"({A}|{B})$|^(head|steps)/"
"""Matches what is trained with adapters: the adapters, and the head and the step layer, which are new."""

PRODUCTS = {role: layers.product_of(weight) for role, weight in layers.builtin().items() if weight.inputs}
"""A B by the matrix's name; letters as in `jprm.model.layers`, L, the layer, and R, the rank."""

KEPT = rf"^decoder/(embed|final_norm|layers_\d+/({'|'.join(layers.builtin().keys() - PRODUCTS.keys())}))$"
"""Matches the decoder's parameters that never get an adapter and stay as they are."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """rank 0: no adapters, every parameter is trained.

    alpha: A B is scaled by alpha / rank, or alpha / sqrt(rank) with `rslora` (Kalajdzievski 2023).
    targets: pattern, matched (re.search) against paths such as `decoder/layers_0/query`. Matrices
        that `optimizer.freeze` matches get no adapter. There is no dropout.
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


def shapes(role: str, size: Mapping[str, int], count: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of A and B for a stack of `count` matrices whose axes have these sizes."""
    size = {**size, "L": count, "R": rank}
    a, b = PRODUCTS[role].split("->")[0].split(",")
    return tuple(size[letter] for letter in a), tuple(size[letter] for letter in b)


def axes(role: str) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
    """Returns the logical axes of A and B: the matrix's own, and the rank, which is not split."""
    operands, product = PRODUCTS[role].split("->")
    of = dict(zip(product, transformer.AXES[role], strict=True))
    a, b = operands.split(",")
    return tuple(of.get(letter) for letter in a), tuple(of.get(letter) for letter in b)


def init(config: LoraConfig, model: ModelConfig, freeze: str, key: Array) -> dict[str, Array]:
    """Returns adapters as a flat, sharded dict {path: array}: A uniform in +-1/sqrt(in), B zero, as in PEFT.

    Raises ValueError where `targets` matches no matrix, or `freeze` matches them all.
    """
    if not config.rank:
        return {}
    paths = [
        (f"decoder/layers_{i}/{role}", role, size, len(at))
        for i, span in enumerate(layers.spans(model))
        for role, (_, size, at) in _in_order(layers.stacks(model, *span)).items()
    ]
    chosen = [
        (path, role, size, count)
        for path, role, size, count in paths
        if re.search(config.targets, path) and not (freeze and re.search(freeze, path))
    ]
    if not chosen:
        known = ", ".join(path for path, *_ in paths)
        raise ValueError(f"lora.targets={config.targets!r} names no matrix that is not frozen; matrices are {known}")
    adapters = {}
    for i, (path, role, size, count) in enumerate(chosen):
        (a, b), (a_axes, b_axes) = shapes(role, size, count, config.rank), axes(role)
        bound = math.prod(size[letter] for letter in layers.builtin()[role].inputs) ** -0.5
        adapters[path + A] = jax.random.uniform(
            jax.random.fold_in(key, i), a, jnp.float32, -bound, bound, out_sharding=sharding(*a_axes)
        )
        adapters[path + B] = jnp.zeros(b, jnp.float32, out_sharding=sharding(*b_axes))
    return adapters


def _in_order(stacks: Mapping) -> dict:
    """Returns the matrices of a group in the order of PRODUCTS, by which they are numbered for random keys."""
    return {role: stacks[role] for role in PRODUCTS if role in stacks}


def check(paths: Iterable[str], freeze: str) -> None:
    """Raises ValueError naming parameters that are neither trained with adapters nor known to stay as they are.

    A new layer's parameters would be frozen in silence. What `freeze` matches is meant to be frozen.
    """
    unknown = [
        path for path in paths
        if not (re.search(TRAINED, path) or re.search(KEPT, path) or path.rpartition("/")[2] in PRODUCTS)
        and not (freeze and re.search(freeze, path))
    ]  # fmt: skip
    if unknown:
        raise ValueError(
            f"lora: {', '.join(sorted(unknown))}: adapters do not know these parameters and would freeze them. Match"
            " them with optimizer.freeze, add their products to jprm.model.lora.PRODUCTS, or set lora.rank=0"
        )


def merge(params: Mapping, config: LoraConfig) -> dict:
    """Returns the plain model's parameters: each matrix W with an adapter becomes W + scale A B, in float32."""
    if not config.rank:
        return dict(params)

    def merged(stack: Mapping[str, Array], plain: Mapping[str, Array]) -> dict[str, Array]:
        return {role: add(role, w, stack, config.scale) if role + A in stack else w for role, w in plain.items()}

    decoder = {
        name: merged(params["decoder"][name], part) if isinstance(part, Mapping) else part
        for name, part in without_adapters(params["decoder"]).items()
    }
    return {**params, "decoder": decoder}


def without_adapters(decoder: Mapping) -> dict:
    """Returns the decoder's parameters as they are without A and B."""
    return {
        name: {role: w for role, w in part.items() if not role.endswith((A, B))} if isinstance(part, Mapping) else part
        for name, part in decoder.items()
    }


def add(role: str, w: Array, stack: Mapping[str, Array], scale: float) -> Array:
    """Returns W + scale A B in full float32 precision, which is not the default of a TPU's matrix products."""
    ab = jnp.einsum(
        PRODUCTS[role], stack[role + A], stack[role + B], precision="highest",
        out_sharding=sharding(*transformer.AXES[role]),
    )  # fmt: skip
    return w + scale * ab
