"""A pairwise ranking objective in one file: Bradley-Terry on alternatives of one step (Bradley and Terry 1952).

Where step i is labelled better than its alternative j, the loss is -log sigmoid(s_i - s_j), with s the log-odds of the
head. The count is the number of such pairs. An experiment names it `FILE.py:bradley_terry`. With `pairs = True`
training logs the pairs that rows separate.
"""

import jax
import jax.numpy as jnp

from jprm.model.heads import find
from jprm.model.transformer import step_logits
from jprm.objectives import Judged, targets
from jprm.rows import siblings


def bradley_terry(params, rows, config):
    """Returns the summed loss of all pairs, their number, and as metrics the correct pairs and the judged scores."""
    logit_BSC = step_logits(params["model"], config.model, rows)
    target_BS, weight_BS = targets(rows, config.target)
    s_BS = logit_BSC[..., -1] - logit_BSC[..., 0]
    better_BSS = siblings(rows) & (target_BS[:, :, None] > target_BS[:, None, :])
    pair_BSS = better_BSS * weight_BS[:, :, None] * weight_BS[:, None, :]
    margin_BSS = s_BS[:, :, None] - s_BS[:, None, :]
    loss = -jnp.sum(pair_BSS * jax.nn.log_sigmoid(margin_BSS))
    judged = Judged(*find(config.model.head).judge(logit_BSC, target_BS), weight_BS)
    return loss, jnp.sum(pair_BSS), {"pair_accuracy": jnp.sum(pair_BSS * (margin_BSS > 0)), "scores": judged}


bradley_terry.pairs = True
