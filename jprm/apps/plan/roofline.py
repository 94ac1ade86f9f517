"""The model's FLOPs, and lower bounds on a step's time on given chips.

FLOPs count matrix products and attention's visible pairs (Chowdhery et al. 2022, appendix B): 2 per parameter and token
in the forward pass; 2 more for the gradient of its input, where anything below is trained; 2 more for its own gradient,
where it is trained. Rematerialisation does not count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from jprm.apps.plan.counts import Program
from jprm.apps.plan.topologies import Chip
from jprm.model.config import ModelConfig
from jprm.model.heads import find
from jprm.model.transformer import UNBOUNDED, windows


def matrices(model: ModelConfig) -> dict[str, int]:
    """Returns the number of parameters of each matrix of a layer, by name."""
    D, K, H, F = model.width, model.kv_heads, model.head_dim, model.mlp_width
    heads = {"query": D * model.heads * H, "key": D * K * H, "value": D * K * H, "out": D * model.heads * H}
    return heads | {"gate": D * F, "up": D * F, "down": D * F}


def visible_pairs(tokens: int, window: int = UNBOUNDED) -> int:
    """Returns the pairs of query and key in a row that one chain fills: the most of any row."""
    seen = min(window, tokens)
    return seen * tokens - seen * (seen - 1) // 2


def model_flops(model: ModelConfig, trained: Collection[str], rows: int, tokens: int, slots: int) -> float:
    """Returns the FLOPs of one update on `rows` rows, or of scoring them if `trained` (parameter paths) is empty.

    The adapters' own products are not counted: they are thousands of times smaller than their matrices'.
    """
    groups = range(len(model.layer_groups))
    in_group = [[path for path in trained if path.startswith(f"decoder/layers_{i}/")] for i in groups]
    first = next((i for i in groups if in_group[i]), len(model.layer_groups))
    if "decoder/embed" in trained:
        first = -1
    window_L, size, total, layer = windows(model), matrices(model), 0.0, 0
    for i, layers in enumerate(model.layer_groups):
        backward = i >= first
        for name, parameters in size.items():
            own = f"decoder/layers_{i}/{name}" in trained
            total += (2 + 2 * backward + 2 * own) * parameters * layers * tokens
        for _ in range(layers):
            pairs = visible_pairs(tokens, UNBOUNDED if window_L is None else int(window_L[layer]))
            # Logits and their use, 2 H each a pair and head; twice as much for the four gradients.
            total += (3 if backward else 1) * 4 * model.heads * model.head_dim * pairs
            layer += 1
    head = model.width * find(model.head).size(model.vocab_size)
    head += model.width**2 * model.head_hidden
    return rows * (total + (6 if trained else 2) * head * slots)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Lower bounds on a step's time, in seconds. No program with these counts is faster than the largest."""

    compute: float
    hbm: float
    interconnect: float  # between the chips of a slice
    network: float = 0.0  # between slices; 0 for one slice, and without a published rate

    @property
    def step(self) -> float:
        return getattr(self, self.by)

    @property
    def by(self) -> str:
        """The name of the largest bound."""
        return max((field.name for field in dataclasses.fields(self)), key=lambda name: getattr(self, name))


def bounds(program: Program, chip: Chip) -> Bounds:
    """Returns the bounds of one device's program: its counts over the chip's published rates."""
    share = 1 / chip.devices
    return Bounds(
        compute=program.flops / (chip.flops * share),
        hbm=program.bytes / (chip.hbm_bandwidth * share),
        interconnect=program.received(network=False) / (chip.interconnect * share),
        network=program.received(network=True) / (chip.network * share),
    )
