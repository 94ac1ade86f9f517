"""Implicit process rewards (Yuan et al. 2024): beta log(p / p_reference), summed along a chain."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jprm.model.config import ModelConfig
from jprm.model.mesh import parts, sharding
from jprm.model.transformer import hidden
from jprm.rows import Rows

BLOCK = 128
"""Tokens whose logits over the vocabulary are there at once."""


@dataclasses.dataclass(frozen=True)
class LogRatio:
    """The model in the denominator, and beta."""

    params: dict
    config: ModelConfig
    scale: float

    def __call__(self, params: dict, config: ModelConfig, rows: Rows, start_BS: Array) -> Float[Array, "B S"]:
        """Scores of the steps of a model. `start_BS` is how many tokens of each step's chain are not scored."""
        above, below = log_probs(params, config, rows), log_probs(self.params, self.config, rows)
        return _path_sum(self.scale * (above - below), rows, start_BS)


@functools.partial(jax.jit, static_argnums=1)
def log_probs(params: dict, config: ModelConfig, rows: Rows) -> Float[Array, "B T"]:
    """log p(token | the tokens before it on its path) in float32; 0 for the first of a tree.

    Raises ValueError where the mesh splits rows along their tokens.
    """
    if parts(rows.tokens) > 1:
        raise ValueError("implicit process rewards take whole rows: load the model on a mesh with context=1")
    B, T = rows.tokens.shape
    index_T = jnp.arange(T)
    before_BTS = (index_T[None, :] < index_T[:, None]) & (index_T[:, None] < rows.until[:, None, :])
    parent_BT = jnp.max(jnp.where(before_BTS, index_T, -1), axis=-1)
    x_BTD = hidden(params, config, rows)
    x_BTD = jnp.take_along_axis(x_BTD, jnp.maximum(parent_BT, 0)[..., None], axis=1).astype(jnp.float32)
    block = BLOCK if T % BLOCK == 0 else T

    def of_block(start):
        x_BtD = jax.lax.dynamic_slice_in_dim(x_BTD, start, block, axis=1)
        token_Bt = jax.lax.dynamic_slice_in_dim(rows.tokens, start, block, axis=1)
        place = sharding("batch", None, None)
        if config.tied_embeddings:
            logit_BtV = jnp.einsum(
                "BtD,VD->BtV", x_BtD, params["decoder"]["embed"].astype(jnp.float32), out_sharding=place
            )
        else:
            logit_BtV = jnp.einsum("BtD,DV->BtV", x_BtD, params["head"]["kernel"], out_sharding=place)
        chosen_Bt = jnp.take_along_axis(logit_BtV, token_Bt[..., None], axis=-1)[..., 0]
        return chosen_Bt - jax.nn.logsumexp(logit_BtV, axis=-1)

    log_nBt = jax.lax.map(of_block, jnp.arange(0, T, block))
    return jnp.where(parent_BT >= 0, jnp.moveaxis(log_nBt, 0, 1).reshape(B, T), 0.0)


@jax.jit
def _path_sum(x_BT: Float[Array, "B T"], rows: Rows, start_BS: Int[Array, "B S"]) -> Float[Array, "B S"]:
    """The sum of x over the tokens that a step's last token sees, those of its chain from depth `start_BS` on."""
    index_T = jnp.arange(x_BT.shape[1])
    end_BS1 = rows.step_end[..., None]
    seen_BST = (index_T <= end_BS1) & (end_BS1 < rows.until[:, None, :])
    seen_BST &= rows.position[:, None, :] >= start_BS[..., None]
    return jnp.sum(jnp.where(seen_BST, x_BT[:, None, :], 0.0), axis=-1)
