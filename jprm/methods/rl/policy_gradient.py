"""Policy gradients on sample trees (`jprm.methods.rl.samples`): clipped token or sequence ratios, and KL.

A slot has the sums U and D of its samples' positive and negative advantages, norms folded in, and one ratio r:

    loss = -sum_slots w [min(r, 1 + clip_high) U + max(r, 1 - clip_low) D] + kl sum_slots weight KL

which is exactly GRPO, Dr. GRPO, RLOO, REINFORCE and their relatives: they differ in their advantages
(`jprm.methods.rl.credit`). The loss is divided by the sample count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

from jprm.experiment import ObjectiveConfig
from jprm.model.config import ModelConfig
from jprm.model.heads import TOKEN, find, token_log_probability
from jprm.model.mesh import at_tokens, gathered_weight, reshape
from jprm.model.transformer import head_logits, hidden
from jprm.objectives import Mean
from jprm.rows import Rows, at_slots

FARTHEST = 20.0
"""Log ratios are clipped here, so float32 can multiply their exponentials. Their gradient is 0 beyond."""


@dataclasses.dataclass(frozen=True)
class PolicyGradient:
    """An objective for the language head and rows from `jprm.methods.rl.samples.group_tree`.

    ratio: `token`, p / p_old per token (PPO, GRPO). `sequence`, the geometric mean of the sample's ratios up to the
        slot, for advantages at the samples' last tokens (GSPO, Zheng et al. 2025).
    clip_low, clip_high: the ratio is clipped to [1 - low, 1 + high]; a higher `clip_high` is DAPO's (Yu et al. 2025).
    dual_clip: the ratio's bound for negative advantages, above 1 (Ye et al. 2020); 0 is no bound.
    temperature: for sampling; log-probabilities come from logits / temperature.
    kl: coefficient for KL(policy || reference) at every token. It needs a reference model; with one, the KL is measured
        even at 0.
    estimator: how that KL is computed. `exact` sums over the vocabulary. `k3` has only the sampled token's r (p_ref / p
        - 1 - log p_ref / p), with r = p / p_old: its gradient has the expectation r log(p / p_ref) grad log p, like the
        exact one. Without r it would be the gradient of KL(reference || policy). There is no `k1`, log(p / p_ref): its
        expected gradient is 0.
    truncate: for samples from an older policy: ratios are relative to `extras["proximal"]`, the log-probabilities
        before the update (or to the current policy if rows lack them), and w = min(p_proximal / p_old, truncate)
        (Espeholt et al. 2018; Hilton et al. 2022). 0: ratios are relative to the sampling policy, and w = 1.

    The KL term holds the sampled prefixes fixed. For KL on whole texts, put it into the reward.

    Raises ValueError if a field is out of range. A call raises it if rows lack the extras of `group_tree`.
    """

    ratio: Literal["token", "sequence"] = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    temperature: float = 1.0
    kl: float = 0.0
    estimator: Literal["k3", "exact"] = "k3"
    truncate: float = 0.0

    def __post_init__(self):
        for name, good, range in (
            ("clip_low", 0 < self.clip_low <= 1, "above 0 and at most 1"),
            ("clip_high", self.clip_high > 0, "above 0"),
            ("dual_clip", self.dual_clip == 0 or self.dual_clip > 1, "above 1, or 0 for none"),
            ("temperature", self.temperature > 0, "above 0"),
            ("kl", self.kl >= 0, "0 or more"),
            ("truncate", self.truncate >= 0, "above 0, or 0 for no weights"),
        ):
            if not good:
                raise ValueError(f"{name}={getattr(self, name)} must be {range}")
        if self.estimator not in ("k3", "exact"):
            raise ValueError(
                f"estimator={self.estimator!r}: use 'k3' or 'exact'. The gradient of k1 as a loss is 0 in expectation"
            )

    def check(self, config: ObjectiveConfig) -> None:
        """Raises ValueError if the head is not a language head, or the KL term has no reference."""
        if find(config.model.head).target != TOKEN:
            raise ValueError(f"the objective does not fit head {config.model.head!r}; it takes language")
        if self.kl and not config.reference:
            raise ValueError(f"kl={self.kl} is a distance from a reference: set reference, or kl to 0")

    def __call__(self, params: dict[str, Any], rows: Rows, config: ObjectiveConfig) -> tuple[Scalar, Scalar, dict]:
        if missing := {"old", "gain", "penalty", "count"} - set(rows.extras):
            raise ValueError(f"rows lack {', '.join(sorted(missing))}: this objective takes trees of group_tree")
        own_BS = rows.owned.astype(jnp.float32)
        old_BS, gain_BS, penalty_BS, count_BS = (rows.extras[key] for key in ("old", "gain", "penalty", "count"))
        gain_BS, penalty_BS, count_BS = gain_BS * own_BS, penalty_BS * own_BS, count_BS * own_BS
        log_BS, entropy_BS, far_BS = self._distributions(params, rows, config)
        near_BS, importance_BS = self._proximal(log_BS, old_BS, rows)
        ratio_BS = _exp(self._of_samples(log_BS - near_BS, rows))
        above_BS = jnp.minimum(ratio_BS, 1 + self.clip_high)
        below_BS = jnp.maximum(ratio_BS, 1 - self.clip_low)
        below_BS = jnp.minimum(below_BS, self.dual_clip) if self.dual_clip else below_BS
        loss = -jnp.sum(importance_BS * (above_BS * gain_BS + below_BS * penalty_BS))
        cut_BS = (above_BS < ratio_BS) * gain_BS + (below_BS != ratio_BS) * -penalty_BS
        drift_BS = _exp(log_BS - old_BS) - 1 - (log_BS - old_BS)
        metrics = {
            "clipped": Mean(jnp.sum(cut_BS), jnp.sum(gain_BS - penalty_BS)),
            "entropy": Mean(jnp.sum(entropy_BS * count_BS), jnp.sum(count_BS)),
            "kl_old": Mean(jnp.sum(drift_BS * count_BS), jnp.sum(count_BS)),
        }
        if far_BS is not None:
            metrics["kl"] = Mean(jnp.sum(far_BS * count_BS), jnp.sum(count_BS))
            loss += self.kl * jnp.sum(far_BS * rows.weight) if self.kl else 0.0
        samples = jnp.sum(jnp.where(rows.parent < 0, count_BS, 0.0))  # through the first tokens
        return loss, samples, metrics

    def _distributions(self, params: dict[str, Any], rows: Rows, config: ObjectiveConfig):
        """Returns every slot's log p(token), entropy, and KL from the reference, if any, each (B, S)."""
        names = [name for name in ("model", "reference") if name in params]
        models = {name: gathered_head(params[name], config.model) for name in names}
        states = [slot_states(params[name], config.model, rows) for name in names]
        old_BS = rows.extras["old"]

        def of_block(token_BS, old_BS, *states):
            logits = [
                head_logits(models[name], config.model, x_BSD) / self.temperature
                for name, x_BSD in zip(names, states, strict=True)
            ]
            log_BS, still_BSV = token_log_probability(logits[0], token_BS), jax.lax.stop_gradient(logits[0])
            entropy_BS = -jnp.sum(jax.nn.softmax(still_BSV) * jax.nn.log_softmax(still_BSV), axis=-1)
            if len(logits) == 1:
                return log_BS, entropy_BS
            reference_BSV = jax.lax.stop_gradient(logits[1])
            if self.estimator == "exact":
                far_BS = exact_kl(logits[0], reference_BSV)
            else:
                far_BS = k3(log_BS, token_log_probability(reference_BSV, token_BS), old_BS)
            return log_BS, entropy_BS, far_BS

        log_BS, entropy_BS, *far_BS = in_blocks(of_block, rows.label, old_BS, *states)
        return log_BS, entropy_BS, far_BS[0] if far_BS else None

    def _proximal(self, log_BS: Array, old_BS: Array, rows: Rows) -> tuple[Array, Array]:
        """Returns the log-probabilities in the ratios' denominators, and older samples' importance weights."""
        if not self.truncate:
            return old_BS, jnp.ones_like(old_BS)
        near_BS = rows.extras.get("proximal", jax.lax.stop_gradient(log_BS))
        return near_BS, jnp.minimum(_exp(self._of_samples(near_BS - old_BS, rows)), self.truncate)

    def _of_samples(self, x_BS: Array, rows: Rows) -> Array:
        """Returns the token log ratios `x_BS` themselves if `ratio` is "token".

        Otherwise each slot gets their mean over the sampled tokens of its path, from the prompt's end to itself.
        """
        if self.ratio == "token":
            return x_BS
        tokens_BS = at_tokens(rows.position, rows.step_end) + 2 - rows.problem  # read at the token before
        return path_sum(x_BS, rows) / jnp.maximum(tokens_BS, 1)


policy_gradient = PolicyGradient()


def k3(log_BS: Array, reference_BS: Array, old_BS: Array) -> Float[Array, "B S"]:
    """r (p_ref / p - 1 - log p_ref / p), r = p / p_old: unbiased for KL(p || p_ref) in value and gradient.

    For tokens sampled from p_old (Schulman 2020, with the ratio of DeepSeek-V3.2). Its first term is a constant. All
    arrays are (B, S): the sampled token's log-probabilities under p, p_ref and p_old; the result is in nats.
    """
    return _exp(reference_BS - old_BS) - _exp(log_BS - old_BS) * (1 + reference_BS - log_BS)


def exact_kl(logit_BSV: Array, reference_BSV: Array) -> Float[Array, "B S"]:
    """KL(p || p_ref), in nats, between the softmaxes of two logit arrays over the vocabulary."""
    log_BSV = jax.nn.log_softmax(logit_BSV)
    return jnp.sum(jnp.exp(log_BSV) * (log_BSV - jax.nn.log_softmax(reference_BSV)), axis=-1)


def path_sum(x_BS: Float[Array, "B S"], rows: Rows) -> Float[Array, "B S"]:
    """Returns the sum of x over every slot's chain, from the first slot to itself, by `rows.parent`.

    Each round doubles the summed slots. Each part of a split tree repeats its chains' earlier slots.
    """
    jump_BS = rows.parent
    for _ in range(max(x_BS.shape[1] - 1, 1).bit_length()):
        at_BS = jnp.maximum(jump_BS, 0)
        x_BS = x_BS + jnp.where(jump_BS >= 0, at_slots(x_BS, at_BS), 0.0)
        jump_BS = jnp.where(jump_BS >= 0, at_slots(jump_BS, at_BS), -1)
    return x_BS


def _exp(x_BS: Array) -> Array:
    return jnp.exp(jnp.minimum(x_BS, FARTHEST))


# --------------------------------------------------------------------------------------------- logits over a vocabulary
#
# A block of slots at a time: 8,192 slots of 152,064 float32 logits take 4.6 GiB a row. A block's logits are computed,
# used and dropped, and computed again for the gradient.

BLOCK = 128
"""Slots per row whose logits are in memory at once: 74 MiB per array for 152,064 tokens in the vocabulary."""


def in_blocks(function: Callable[..., Any], *arrays_BS: Float[Array, "B S *X"]) -> Any:
    """Returns `function(*arrays)`, computed for `BLOCK` slots at a time and again for the gradient.

    `function` gets the arrays' blocks (B, b, ...), the last padded with zeros, and must return (B, b) arrays, one or a
    tuple; the result has the same structure, with (B, S) arrays.
    """
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
    """Returns `params` with the `head_logits` table gathered once for all blocks, so its gradient is summed once.

    The dictionaries in `params` stay unchanged. Only for a language head. If the mesh splits tokens, the gradient is
    summed per block: all devices in a row compute its slots, so their gradients are not terms in a sum.
    """
    params = dict(params)
    part, name, axis = ("decoder", "embed", 1) if config.tied_embeddings else ("head", "kernel", 0)
    table = params[part][name]
    if isinstance(table, Array) and jax.typeof(table).sharding.mesh.shape.get("context", 1) == 1:
        params[part] = {**params[part], name: gathered_weight(table, axis)}
    return params


def slot_states(params: Mapping, config: ModelConfig, rows: Rows) -> Float[Array, "B S D"]:
    """Returns the hidden states, after the final norm, at the tokens where slots are read (`rows.step_end`)."""
    return at_tokens(hidden(params, config, rows), rows.step_end)


def log_probabilities(
    params: Mapping, config: ModelConfig, rows: Rows, temperature: float = 1.0
) -> Float[Array, "B S"]:
    """Returns log p(the slot's token | the tokens before it) under softmax(logits / temperature), in float32.

    `params` are {"decoder", "head"}. Rows must be a policy's, with a slot for every token and its id as label; padding
    slots have meaningless values. Logits exist for one block of slots at a time, also in the gradient.
    """
    head = gathered_head(params, config)

    def of_block(x_BSD, token_BS):
        return token_log_probability(head_logits(head, config, x_BSD) / temperature, token_BS)

    return in_blocks(of_block, slot_states(params, config, rows), rows.label)
