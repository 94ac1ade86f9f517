"""Implicit process rewards (Yuan et al. 2024): beta log(p / p_reference), summed along a chain."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jprm.model.config import ModelConfig
from jprm.model.heads import token_log_probability
from jprm.model.mesh import parts
from jprm.model.transformer import head_logits, hidden
from jprm.rows import Rows

BETA = 0.05
"""The default of beta in training, as Yuan et al. have it."""
BLOCK = 128
"""Tokens whose logits over the vocabulary are in memory at once."""


@dataclasses.dataclass(frozen=True)
class LogRatio:
    """The reference model, which is the denominator, and beta."""

    params: dict
    config: ModelConfig
    scale: float

    def __call__(self, params: dict, config: ModelConfig, rows: Rows, start_BS: Array) -> Float[Array, "B S"]:
        """Returns the scores of steps. `start_BS`: tokens at the start of each step's chain that are not scored."""
        above, below = log_probs(params, config, rows), log_probs(self.params, self.config, rows)
        return path_sum(self.scale * (above - below), rows, start_BS)


@functools.partial(jax.jit, static_argnums=1)
def log_probs(params: dict, config: ModelConfig, rows: Rows) -> Float[Array, "B T"]:
    """Returns log p(token | the tokens before it on its path) in float32; 0 for the first token of a tree.

    Raises ValueError where the mesh splits rows along their tokens.
    """
    if parts(rows.tokens) > 1:
        raise ValueError("implicit process rewards take unsplit rows: load the model on a mesh with context=1")
    B, T = rows.tokens.shape
    parent_BT = parents(rows.position)
    x_BTD = hidden(params, config, rows)
    x_BTD = jnp.take_along_axis(x_BTD, jnp.maximum(parent_BT, 0)[..., None], axis=1)
    block = BLOCK if T % BLOCK == 0 else T

    @jax.checkpoint  # training keeps no block's logits either
    def of_block(start):
        x_BtD, token_Bt = (jax.lax.dynamic_slice_in_dim(x, start, block, axis=1) for x in (x_BTD, rows.tokens))
        return token_log_probability(head_logits(params, config, x_BtD), token_Bt)

    log_nBt = jax.lax.map(of_block, jnp.arange(0, T, block))
    return jnp.where(parent_BT >= 0, jnp.moveaxis(log_nBt, 0, 1).reshape(B, T), 0.0)


def parents(position_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the index of each token's parent, the last token before it on its path; -1 for a root and for padding.

    Tokens are in depth-first order and positions are depths: the parent is the last token before with the position one
    less. Memory is O(T).
    """

    def of_row(position_T):
        def visit(last_T, token):
            index, position = token  # last_T: the last token at each position so far
            parent = jnp.where(position > 0, last_T[position - 1], -1)
            return last_T.at[position].set(index), parent

        return jax.lax.scan(visit, 0 * position_T - 1, (jnp.arange(len(position_T)), position_T))[1]

    return jax.vmap(of_row)(position_BT)


@jax.jit
def path_sum(x_BT: Float[Array, "B T"], rows: Rows, start_BS: Int[Array, "B S"]) -> Float[Array, "B S"]:
    """Sums x over the tokens that a step's last token sees: those of its chain from depth `start_BS` on."""
    index_T = jnp.arange(x_BT.shape[1])
    end_BS1 = rows.step_end[..., None]
    seen_BST = (index_T <= end_BS1) & (end_BS1 < rows.until[:, None, :])
    seen_BST &= rows.position[:, None, :] >= start_BS[..., None]
    return jnp.sum(jnp.where(seen_BST, x_BT[:, None, :], 0.0), axis=-1)
