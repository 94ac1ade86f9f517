"""Implicit process rewards (Yuan et al. 2024, arXiv 2412.01981): a language model whose log ratio is the reward.

With pi the model, ref the frozen reference and y the tokens of a chain, r(y) = beta sum_i log pi(y_i) / ref(y_i), and

    cross_entropy   -l log sigmoid(r(y)) - (1 - l) log(1 - sigmoid(r(y))), l being the outcome
    dpo             -log sigmoid(r(y) - r(z)) over the correct chains y and incorrect z of one problem (Rafailov et al.
                    2023, arXiv 2305.18290); pairs that are in different rows are left out

Summed up to a step's end instead, r is the step's score: `LogRatio` computes it.

Of a trajectory y are the tokens that the agent wrote: what tools and users say is read, and not scored. The log ratio
of one turn is its progress advantage (arXiv 2606.26080). Training on trajectories needs data.extras=("begin",).

The reference is frozen, so that its log-probabilities need computing once: `jprm label reference` puts them into the
data. With data.extras=("reference",) they are read there, and the second model is neither loaded nor computed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax.core import FrozenDict
from jaxtyping import Array, Bool, Float, Int, Scalar

from jprm.experiment import ObjectiveConfig
from jprm.model.attention import chain_rows
from jprm.model.config import ModelConfig
from jprm.model.heads import find, token_log_probability
from jprm.model.mesh import parts
from jprm.model.transformer import head_logits, hidden
from jprm.objectives import Judged, pair_loss, targets
from jprm.rows import Rows
from jprm.token_tree import BEGIN, REFERENCE

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

    def compile(self, params: dict, config: ModelConfig, rows: Rows) -> None:
        """Compiles what a call needs, and runs nothing."""
        log_probs.lower(params, config, rows).compile()
        log_probs.lower(self.params, self.config, rows).compile()


@dataclasses.dataclass(frozen=True)
class LogProbability:
    """In place of `LogRatio`, of only a language model: the log-probability of the steps up to each."""

    config: ModelConfig
    params: Mapping = FrozenDict()

    def __call__(self, params: dict, config: ModelConfig, rows: Rows, start_BS: Array) -> Float[Array, "B S"]:
        return path_sum(log_probs(params, config, rows), rows, start_BS)

    def compile(self, params: dict, config: ModelConfig, rows: Rows) -> None:
        log_probs.lower(params, config, rows).compile()


@functools.partial(jax.jit, static_argnums=1)
def log_probs(
    params: dict, config: ModelConfig, rows: Rows, some_BT: Bool[Array, "B T"] | None = None
) -> Float[Array, "B T"]:
    """Returns log p(token | the tokens before it on its path) in float32; 0 for the first token of a tree.

    With `some_BT` also 0 for the other tokens. Their logits over the vocabulary are not computed: marked tokens are
    put side by side, and blocks without any are left out.

    Raises ValueError where the mesh splits rows along their tokens.
    """
    if parts(rows.tokens) > 1:
        raise ValueError("implicit process rewards take unsplit rows: load the model on a mesh with context=1")
    return log_probs_of(hidden(params, config, rows), params, config, rows, some_BT)


def log_probs_of(
    x_BTD: Float[Array, "B T D"], params: dict, config: ModelConfig, rows: Rows,
    some_BT: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:  # fmt: skip
    """Returns what `log_probs` does, from the hidden states of every token after the final norm."""
    B, T = rows.tokens.shape
    parent_BT = parents(rows.position)
    some_BT = parent_BT >= 0 if some_BT is None else some_BT & (parent_BT >= 0)
    order_BT = jnp.argsort(~some_BT, axis=1, stable=True)
    from_BT = jnp.maximum(jnp.take_along_axis(parent_BT, order_BT, axis=1), 0)
    x_BTD = jnp.take_along_axis(x_BTD, from_BT[..., None], axis=1)
    token_BT = jnp.take_along_axis(rows.tokens, order_BT, axis=1)
    most, block = jnp.max(jnp.sum(some_BT, axis=1)), BLOCK if T % BLOCK == 0 else T

    @jax.checkpoint  # training keeps no block's logits either
    def of_block(start):
        def computed(x_BTD):
            x_BtD, token_Bt = (jax.lax.dynamic_slice_in_dim(x, start, block, axis=1) for x in (x_BTD, token_BT))
            return token_log_probability(head_logits(params, config, x_BtD), token_Bt)

        return jax.lax.cond(start < most, computed, lambda x_BTD: 0.0 * x_BTD[:, :block, 0].astype(jnp.float32), x_BTD)

    log_nBt = jax.lax.map(of_block, jnp.arange(0, T, block))
    log_BT = jnp.take_along_axis(jnp.moveaxis(log_nBt, 0, 1).reshape(B, T), jnp.argsort(order_BT, axis=1), axis=1)
    return jnp.where(some_BT, log_BT, 0.0)


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
    return jnp.sum(jnp.where(on_paths(rows, start_BS), x_BT[:, None, :], 0.0), axis=-1)


def on_paths(rows: Rows, start_BS: Int[Array, "B S"]) -> Bool[Array, "B S T"]:
    """Marks the tokens of each step's chain from depth `start_BS` on."""
    index_T = jnp.arange(rows.tokens.shape[1])
    end_BS1 = rows.step_end[..., None]
    seen_BST = (index_T <= end_BS1) & (end_BS1 < rows.until[:, None, :])
    return seen_BST & (rows.position[:, None, :] >= start_BS[..., None])


# ------------------------------------------------------------------------------------------------------ the objective


@dataclasses.dataclass(frozen=True)
class Implicit:
    """The count is the number of chains, or of pairs."""

    beta: float = BETA
    loss: Literal["cross_entropy", "dpo"] = "cross_entropy"

    @property
    def log_ratio(self) -> float:
        """The factor of the score, a log ratio to the reference."""
        return self.beta

    def __call__(self, params: dict[str, Any], rows: Rows, config: ObjectiveConfig) -> tuple[Scalar, Scalar, dict]:
        some_BT = scored_tokens(rows, config)
        log_BS = path_sum(log_probs(params["model"], config.model, rows, some_BT), rows, rows.problem)
        if REFERENCE in rows.extras:
            reference_BS = rows.extras[REFERENCE]
        else:
            reference_BT = log_probs(params["reference"], config.model, rows, some_BT)
            reference_BS = jax.lax.stop_gradient(path_sum(reference_BT, rows, rows.problem))
        return self.of_log_probs(log_BS, reference_BS, rows, config)

    def of_log_probs(
        self, log_BS: Float[Array, "B S"], reference_BS: Float[Array, "B S"], rows: Rows, config: ObjectiveConfig
    ) -> tuple[Scalar, Scalar, dict]:
        """Returns the loss from both models' log-probabilities of the chains up to every step."""
        target_BS, weight_BS = targets(rows, config.target)
        # A step that no labelled chain goes through is not computed.
        r_BS = jnp.where(weight_BS > 0, self.beta * (log_BS - reference_BS), 0.0)
        metrics: dict[str, Any] = {"scores": Judged(jax.nn.sigmoid(r_BS), target_BS >= 0.5, weight_BS)}
        if self.loss == "dpo":
            better_BSS = rows.tree[:, :, None] == rows.tree[:, None, :]
            better_BSS &= target_BS[:, :, None] > target_BS[:, None, :]
            pair_BSS = better_BSS * weight_BS[:, :, None] * weight_BS[:, None, :]
            loss, count, correct = pair_loss(r_BS, pair_BSS)
            return loss, count, metrics | {"pair_accuracy": correct}
        likelihood_BS = target_BS * jax.nn.log_sigmoid(r_BS) + (1 - target_BS) * jax.nn.log_sigmoid(-r_BS)
        return -jnp.sum(weight_BS * likelihood_BS), jnp.sum(weight_BS), metrics

    def check(self, config: ObjectiveConfig) -> None:
        """Raises ValueError without a language head, a reference or outcomes."""
        if find(config.model.head).channels:
            raise ValueError(f"the objective implicit does not fit head {config.model.head!r}; it takes language")
        if not config.reference and REFERENCE not in config.extras:
            raise ValueError("the objective implicit needs `reference`, the frozen model of its log ratio")
        if config.supervise != "outcome":
            raise ValueError(f"the objective implicit needs data.supervise='outcome', not {config.supervise!r}")
        if self.loss == "dpo" and chain_rows(config.model):
            reason = f"attention={config.model.attention!r} has one a row: use another, such as 'blocked'"
            raise ValueError(f"loss='dpo' compares the chains of a row, and {reason}")


def scored_tokens(rows: Rows, config: ObjectiveConfig) -> Bool[Array, "B T"]:
    """Marks the tokens of the steps of labelled chains, the only ones whose log-probabilities the loss takes.

    Of trajectories these are the tokens of turns, which begin where the extra `begin` says.
    """
    _, weight_BS = targets(rows, config.target)
    some_BT = jnp.any(on_paths(rows, rows.problem) & (weight_BS > 0)[..., None], axis=1)
    return some_BT & jnp.any(on_paths(rows, rows.extras[BEGIN]), axis=1) if BEGIN in rows.extras else some_BT


implicit = Implicit()
