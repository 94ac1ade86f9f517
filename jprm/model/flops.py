"""A model's FLOPs, and the rate of the chips that compute them.

FLOPs count matrix products and attention's visible pairs (Chowdhery et al. 2022, appendix B): 2 per parameter and token
in the forward pass; 2 more for the gradient of its input, where anything below is trained; 2 more for its own gradient,
where it is trained. Rematerialisation does not count.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from jprm.model import layers
from jprm.model.config import ModelConfig
from jprm.model.heads import find

PEAK = {
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v6 lite": 918e12,
    "TPU v6e": 918e12, "TPU7x": 2307e12 / 2, "NVIDIA A100": 312e12, "NVIDIA H100": 989.5e12, "NVIDIA H200": 989.5e12,
    "NVIDIA B200": 2250e12,
}  # fmt: skip
"""Published FLOPs a second in bfloat16 of a device, by the beginning of jax's name for it, with the sources in
`jprm.apps.plan.topologies`. A TPU7x chip is two devices."""


def peak(device_kind: str) -> float | None:
    """Returns a device's published FLOPs a second, None where they are not known, as a CPU's."""
    found = [name for name in PEAK if device_kind.startswith(name)]
    return PEAK[max(found, key=len)] if found else None


def matrices(model: ModelConfig, layer: int = 0) -> dict[str, float]:
    """Returns the number of parameters of each matrix of a layer, by name, as far as a token meets them."""
    kinds = [layers.find(name) for name in layers.kinds_of(model, layer)]
    return {
        name: math.prod(kind.sizes(model)[axis] for axis in weight.axes) * kind.used(model, name)
        for kind in kinds for name, weight in kind.weights.items() if weight.inputs and weight.when(model)
    }  # fmt: skip


def model_flops(model: ModelConfig, trained: Collection[str], rows: int, tokens: int, slots: int) -> float:
    """Returns the FLOPs of one update on `rows` rows, or of scoring them if `trained` (parameter paths) is empty.

    The adapters' own products are not counted: they are thousands of times smaller than their matrices'.
    """
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
    head = model.width * find(model.head).size(model.vocab_size)
    head += model.width**2 * model.head_hidden
    return rows * (total + (6 if trained else 2) * head * slots)
