"""Functions of the logits over a vocabulary, a block of slots at a time.

8,192 slots of 152,064 float32 logits take 4.6 GiB a row. A block's logits are computed, used and dropped, and computed
again for the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jprm.model.config import ModelConfig
from jprm.model.heads import token_log_probability
from jprm.model.mesh import at_tokens, gathered_weight, reshape
from jprm.model.transformer import head_logits, hidden
from jprm.rows import Rows

BLOCK = 128
"""Slots of a row whose logits are in memory at once: 74 MiB an array for a vocabulary of 152,064."""


def in_blocks(function: Callable[..., Any], *arrays_BS: Float[Array, "B S *X"]) -> Any:
    """Returns `function(*arrays)`, arrays (B, S), computed for `BLOCK` slots at a time and again for the gradient."""
    B, S = arrays_BS[0].shape[:2]
    block = min(BLOCK, S)
    count = -(-S // block)

    def cut(x_BSX):
        rest = x_BSX.shape[2:]
        padded = jnp.pad(x_BSX, [(0, 0), (0, count * block - S), *[(0, 0)] * len(rest)])
        return jnp.moveaxis(reshape(padded, (B, count, block, *rest), "batch"), 1, 0)

    def joined(x_NBb):
        return reshape(jnp.moveaxis(x_NBb, 0, 1), (B, count * block), "batch")[:, :S]

    if count == 1:
        return jax.checkpoint(function)(*arrays_BS)
    # A scan needs no guard against CSE.
    once = jax.checkpoint(lambda arrays: function(*arrays), prevent_cse=False)
    return jax.tree.map(joined, jax.lax.map(once, jax.tree.map(cut, arrays_BS)))


def gathered_head(params: Mapping, config: ModelConfig) -> dict:
    """Returns parameters for `head_logits` whose table is gathered once, and its gradient summed once, for all blocks.

    Those of a language head. On a mesh that splits tokens the gradient is summed for every block: all devices of a row
    compute its slots, so theirs are no terms of a sum.
    """
    params = dict(params)
    part, name, axis = ("decoder", "embed", 1) if config.tied_embeddings else ("head", "kernel", 0)
    table = params[part][name]
    if isinstance(table, Array) and jax.typeof(table).sharding.mesh.shape.get("context", 1) == 1:
        params[part] = {**params[part], name: gathered_weight(table, axis)}
    return params


def slot_states(params: Mapping, config: ModelConfig, rows: Rows) -> Float[Array, "B S D"]:
    """Returns the hidden states at which slots are read."""
    return at_tokens(hidden(params, config, rows), rows.step_end)


def log_probabilities(
    params: Mapping, config: ModelConfig, rows: Rows, temperature: float = 1.0
) -> Float[Array, "B S"]:
    """Returns log p(token of the slot | the tokens before it) under softmax(logits / temperature), in float32.

    Rows are a policy's, with a slot for every token and its id as label. The gradient takes no more memory.
    """
    head = gathered_head(params, config)

    def of_block(x_BSD, token_BS):
        return token_log_probability(head_logits(head, config, x_BSD) / temperature, token_BS)

    return in_blocks(of_block, slot_states(params, config, rows), rows.label)
