"""Attention kernels for TPUs and GPUs: a file each, with its tables of blocks; and what those for GPUs share.

Weights are powers of two, which GPUs take faster than powers of e: logits are times log2(e).
"""

import math

import jax.numpy as jnp

from jprm.model.attention import HIDDEN, capped
from jprm.model.config import ModelConfig

LOG2_E = math.log2(math.e)


def logits(logit, config: ModelConfig):
    """Returns the logits times log2(e), and the derivative of the soft cap, None without one (tanh' = 1 - tanh^2).

    logit: the product of queries and keys, of any shape.
    """
    cap = config.attention_softcap
    if not cap:
        return logit * (config.query_scale * LOG2_E), None
    logit = capped(logit * config.query_scale, cap)
    return logit * LOG2_E, 1 - jnp.square(logit / cap)


def weights(logit, slope, dweight, seen, log, inner):
    """Returns weights, recomputed from the log-sum-exp, and the unscaled gradient of the logits before their cap.

    All have the shape of a pair of blocks; `log` and `inner` are those of its queries.
    """
    weight = jnp.exp2((logit if seen is None else jnp.where(seen, logit, HIDDEN)) - log)
    dlogit = weight * (dweight - inner)
    return weight, dlogit if slope is None else dlogit * slope
