"""Losses on step logits: pure functions of (head, logits, target, weight) that return the weighted sum, in float32.

Divide by the sum of the weights, after all micro-batches and devices are summed, for the mean.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

from jprm.model import heads
from jprm.model.heads import HEADS, Head, Target

Loss = Callable[[Head, Float[Array, "B S C"], Float[Array, "B S"], Float[Array, "B S"]], Scalar]


def likelihood(head: Head, logit_BSC: Array, target_BS: Array, weight_BS: Array) -> Scalar:
    """-log p(target) by the head's own likelihood: cross-entropies, hard or soft, and a policy's next token."""
    return -jnp.sum(weight_BS * head.log_likelihood(logit_BSC, target_BS))


def squared_error(head: Head, logit_BSC: Array, target_BS: Array, weight_BS: Array) -> Scalar:
    """(p - t)^2, with p the head's score."""
    return jnp.sum(weight_BS * jnp.square(head.readout.score(logit_BSC) - target_BS))


LOSSES: dict[str, tuple[Loss, Target | None]] = {
    "cross_entropy": (likelihood, heads.PROBABILITY),
    "ternary_cross_entropy": (likelihood, heads.CLASS),
    "squared_error": (squared_error, heads.PROBABILITY),
    "next_token": (likelihood, heads.TOKEN),
    "likelihood": (likelihood, None),
}
"""Name to the loss and the targets of the heads that it fits; None: any head with a likelihood."""


def fitting(loss: str, head: str) -> Loss:
    """Returns the loss of the name. Raises ValueError where there is none, or where it does not fit the head."""
    if loss not in LOSSES:
        raise ValueError(f"loss={loss!r} is not one of {', '.join(LOSSES)}")
    function, target = LOSSES[loss]
    if target is not None and heads.find(head).target != target:
        takes = " or ".join(name for name, other in HEADS.items() if other.target == target)
        raise ValueError(f"loss {loss!r} does not fit head {head!r}; it takes {takes}")
    if function is likelihood and heads.find(head).log_likelihood is None:
        raise ValueError(f"loss {loss!r} does not fit head {head!r}, which has no likelihood")
    return function
