"""Implicit process rewards (Yuan et al. 2024, arXiv 2412.01981): a language model whose log ratio is the reward.

With pi the model, ref the frozen reference and y a chain's tokens, r(y) = beta sum_i log pi(y_i) / ref(y_i), and

    cross_entropy   -l log sigmoid(r(y)) - (1 - l) log(1 - sigmoid(r(y))), with outcome l
    dpo             -log sigmoid(r(y) - r(z)) over correct chains y and incorrect chains z of one problem
                    (Rafailov et al. 2023, arXiv 2305.18290); pairs that are in different rows are left out, and
                    counted as `pairs_lost`

Summed only up to a step's end, r is the step's score (`LogRatio`).

In a trajectory, y holds only the agent's tokens; messages of tools and users are read but not scored. The log ratio of
one turn is its progress advantage (arXiv 2606.26080). Training on trajectories needs data.extras=("begin",).

The reference is frozen, so its log-probabilities are needed only once: `jprm label reference` adds them to the data. If
data.extras=("reference",), training reads them and never loads the second model.
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
"""Default beta in training, from Yuan et al."""
BLOCK = 128
"""Maximum tokens whose vocabulary logits are in memory at once."""


@dataclasses.dataclass(frozen=True)
class LogRatio:
    """Scores steps by beta log pi / ref; holds the reference model and beta."""

    params: dict
    config: ModelConfig
    scale: float

    def __call__(self, params: dict, config: ModelConfig, rows: Rows, start_BS: Array) -> Float[Array, "B S"]:
        """Returns step scores, float32. `start_BS`: tokens at the start of each step's chain that are not scored."""
        above, below = log_probs(params, config, rows), log_probs(self.params, self.config, rows)
        return path_sum(self.scale * (above - below), rows, start_BS)

    def compile(self, params: dict, config: ModelConfig, rows: Rows) -> None:
        """Compiles a call without running it, and waits. Raises ValueError as `log_probs`."""
        log_probs.lower(params, config, rows).compile()
        log_probs.lower(self.params, self.config, rows).compile()


@dataclasses.dataclass(frozen=True)
class LogProbability:
    """Scores steps by a language model alone: the log-probability of the chain up to each step."""

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
    """Returns float32 log p(token | earlier tokens on its path); 0 for a tree's first token and padding.

    The head must be `language`, which is not checked. If `some_BT` is given, unmarked tokens are 0 too, and their
    logits are not computed: marked tokens are gathered side by side, and blocks without any are skipped.

    Raises ValueError if the mesh splits rows along their tokens.
    """
    if parts(rows.tokens) > 1:
        raise ValueError("implicit process rewards take unsplit rows: load the model on a mesh with context=1")
    return log_probs_of(hidden(params, config, rows), params, config, rows, some_BT)


def log_probs_of(
    x_BTD: Float[Array, "B T D"], params: dict, config: ModelConfig, rows: Rows,
    some_BT: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:  # fmt: skip
    """Computes `log_probs` from all tokens' hidden states after the final norm, in float32.

    A tree's first token gives 0, and so do padding and the tokens unmarked in `some_BT`, if given.
    """
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
    """Returns the index of each token's parent, the previous token on its path; -1 for a root and for padding.

    Tokens are in depth-first order and positions are depths, so the parent is the last earlier token with position one
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
    """Sums x over each step's chain from depth `start_BS` (0: the problem's first token) to the step's last token."""
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
    """The implicit objective; its count is the number of chains or pairs."""

    beta: float = BETA
    loss: Literal["cross_entropy", "dpo"] = "cross_entropy"

    @property
    def log_ratio(self) -> float:
        """The factor that scores have over the log ratio: `beta`."""
        return self.beta

    @property
    def pairs(self) -> bool | str:
        return self.loss == "dpo" and "problem"

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
        """Returns (loss sum, count, metrics) from both models' log-probabilities of each step's chain.

        They are sums over its `scored_tokens` up to the step's end, without the problem. The metrics are `scores` and,
        with loss="dpo", `pair_accuracy`.
        """
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
        """Raises ValueError without a language head, a reference or outcomes, or if dpo has one chain per row."""
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
    """Marks the step tokens of labelled chains, the only tokens whose log-probabilities the loss uses.

    In trajectories only tokens of turns are marked; turns begin at the extra `begin`.
    """
    _, weight_BS = targets(rows, config.target)
    some_BT = jnp.any(on_paths(rows, rows.problem) & (weight_BS > 0)[..., None], axis=1)
    return some_BT & jnp.any(on_paths(rows, rows.extras[BEGIN]), axis=1) if BEGIN in rows.extras else some_BT


implicit = Implicit()
