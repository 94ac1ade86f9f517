"""Squared error (p - t)^2 of the head's score p, the Brier score."""

import jax.numpy as jnp
from jaxtyping import Array, Scalar

from jprm.model.heads import PROBABILITY, Head
from jprm.objectives.pointwise import Pointwise


def _loss(head: Head, logit_BSC: Array, target_BS: Array, weight_BS: Array) -> Scalar:
    assert head.readout is not None  # only heads of tokens have none
    return jnp.sum(weight_BS * jnp.square(head.readout.score(logit_BSC) - target_BS))


squared_error = Pointwise(_loss, PROBABILITY)
