"""Rotary frequencies, and how checkpoints stretch them to longer contexts."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How the frequencies differ from theta^(-2i / head_dim). Fields that a kind does not use keep their defaults.

    linear: divides all by `factor` (Chen et al. 2023).
    llama3: divides long wavelengths by `factor`, keeps short ones, blends between (Llama 3.1's `apply_scaling`).
    yarn: the same by a ramp over the pairs, and multiplies cos and sin by `attention_factor` (Peng et al. 2023).
    """

    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    positions: int = 0  # of the context before it was stretched; llama3 and yarn
    low: float = 1.0  # llama3: low_freq_factor; yarn: beta_slow
    high: float = 1.0  # llama3: high_freq_factor; yarn: beta_fast
    attention_factor: float = 1.0
    truncate: bool = True  # yarn: the ends of the ramp are whole pairs

    def __post_init__(self):
        if self.kind not in ("none", "linear", "llama3", "yarn"):
            raise ValueError(f"rope_scaling.kind={self.kind!r} is not one of none, linear, llama3, yarn")
        if not self.factor > 0 or not self.attention_factor > 0:
            raise ValueError(f"rope_scaling: factor={self.factor} and attention_factor must be positive")
        if self.kind in ("llama3", "yarn") and (self.positions < 1 or not 0 < self.low < self.high):
            raise ValueError(
                f"rope_scaling: {self.kind} needs positions={self.positions} of at least 1 and"
                f" 0 < low={self.low} < high={self.high}"
            )


def frequencies(head_dim: int, theta: float, scaling: RopeScaling = RopeScaling()) -> np.ndarray:
    """Returns (head_dim / 2,) float32, radians a position, computed in float32 as in the models' own training code."""
    H = head_dim
    power_H = np.float32(theta) ** (np.arange(0, H, 2, dtype=np.float32) / np.float32(H))
    plain_H = np.float32(1) / power_H
    slow_H = plain_H / np.float32(scaling.factor)
    if scaling.kind == "none":
        return plain_H
    if scaling.kind == "linear":
        return slow_H
    if scaling.kind == "llama3":
        turns_H = scaling.positions * plain_H / np.float32(2 * math.pi)  # over the old context
        fast_H = (turns_H - scaling.low) / (scaling.high - scaling.low)
    else:

        def pair(turns: float) -> float:
            """Returns the pair, as a real number, that turns so often over the old context."""
            return H * math.log(scaling.positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = pair(scaling.high), pair(scaling.low)
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, H - 1)
        width = last - first if last != first else 0.001
        fast_H = 1 - (np.arange(H // 2, dtype=np.float32) - first) / width
    fast_H = np.clip(fast_H, 0, 1).astype(np.float32)
    return slow_H * (1 - fast_H) + plain_H * fast_H
