"""What a decoder is: one frozen record, enough for Llama, Mistral, Qwen2, Qwen3 and SmolLM2 by its values alone."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

from jprm.model.rope import RopeScaling

HEAD_CLASSES = {"binary": 2, "ternary": 3, "scalar": 1}
"""Logits a step by head. binary: (wrong, right); ternary: (negative, neutral, positive); scalar: one log-odds."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float
    norm_eps: float
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3: RMSNorm of every query and key head
    rope_scaling: RopeScaling = RopeScaling()  # Llama 3.1, and contexts that were stretched after training
    tied_embeddings: bool = True  # matters to the language head only
    head: Literal["binary", "ternary", "scalar", "language"] = "binary"
    layer_groups: tuple[int, ...] = ()
    """Layers are stacked and scanned in these groups, `layers_0`, `layers_1`, ...; () is one group of them all. A group
    is what a freezing rule can name: groups that are frozen below the first trained one cost no backward pass."""
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the computation; parameters are float32
    remat: Literal["nothing", "dots", "full"] = "full"  # what the backward pass computes again
    attention: Literal["reference", "blocked", "paths"] = "blocked"
    attention_block: int = 256  # queries a block of `blocked` and `paths`

    def __post_init__(self):
        if not self.layer_groups:
            object.__setattr__(self, "layer_groups", (self.layers,))
        object.__setattr__(self, "layer_groups", tuple(self.layer_groups))
        if sum(self.layer_groups) != self.layers or min(self.layer_groups) < 1:
            raise ValueError(f"layer_groups {self.layer_groups} must be positive and add up to layers={self.layers}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings rotate pairs")
        for field, values in _CHOICES.items():
            if getattr(self, field) not in values:
                raise ValueError(f"{field}={getattr(self, field)!r} is not one of {', '.join(values)}")

    @property
    def group(self) -> int:
        """Query heads a key-value head."""
        return self.heads // self.kv_heads


_CHOICES = {
    "head": (*HEAD_CLASSES, "language"),
    "dtype": ("float32", "bfloat16"),
    "remat": ("nothing", "dots", "full"),
    "attention": ("reference", "blocked", "paths"),
}
