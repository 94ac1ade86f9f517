"""From a step's logits to its score."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Reading:
    """The sum of factor x activation over the head's channels, in float32.

    (0, 1) after a softmax is the probability of the second of two classes, (0, 1, 1) that of not being the first of
    three, (-1, 1) the difference of two; (1,) after a sigmoid is the probability of one log-odds.
    """

    activation: Literal["softmax", "sigmoid", "none"]
    factors: tuple[float, ...]  # of the channels, in order

    def __call__(self, logit_BPC: Float[Array, "*B C"]) -> Float[Array, "*B"]:
        logit_BPC = logit_BPC.astype(jnp.float32)
        if self.activation == "softmax":
            logit_BPC = jax.nn.softmax(logit_BPC, axis=-1)
        elif self.activation == "sigmoid":
            logit_BPC = jax.nn.sigmoid(logit_BPC)
        score_BP = jnp.sum(logit_BPC * jnp.array(self.factors, jnp.float32), axis=-1)
        if self.activation == "softmax":  # a mean of the factors, which rounding may put beyond the largest
            score_BP = jnp.clip(score_BP, min(self.factors), max(self.factors))
        return score_BP
