"""Turns labels into targets and weights inside jit, by the policies that a `TargetConfig` names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jprm.experiment import TargetConfig
from jprm.model.mesh import at_tokens
from jprm.rows import Rows, at_slots


def targets(rows: Rows, config: TargetConfig) -> tuple[Float[Array, "B S"], Float[Array, "B S"]]:
    """Returns the target and the weight of every slot.

    A target is the probability in [0, 1] that the step is correct; with neutral='third' it is the class 0, 1 or 2
    (negative, neutral, positive).
    """
    label, weight = rows.label, rows.weight
    if config.labels == "rating":
        neutral = label == 0
        wrong = label <= 0 if config.neutral == "negative" else label < 0
        target = label + 1.0 if config.neutral == "third" else jnp.where(wrong, 0.0, 1.0)
        if config.neutral == "drop":
            weight = jnp.where(neutral, 0.0, weight)
    else:
        target, wrong, weight = _of_probability(rows, config)
    if config.consensus:
        verdict = rows.extras[config.consensus]
        differ = jnp.isnan(verdict) | (~wrong != (verdict > 0.5))  # no verdict agrees with nothing
        weight = jnp.where(differ | after_error(rows, differ), 0.0, weight)
    if config.after_error == "mask":
        weight = jnp.where(after_error(rows, wrong), 0.0, weight)
    if config.smoothing:
        target = (1.0 - config.smoothing) * target + 0.5 * config.smoothing
    return target, weight


def _of_probability(rows: Rows, config: TargetConfig) -> tuple[Array, Array, Array]:
    """Returns targets, which steps are incorrect, and weights, by `TargetConfig.soft`."""
    value, weight, soft = rows.label, rows.weight, config.soft
    right = value > (0.0 if soft == "relative" else config.threshold)
    if soft in ("relative", "progress"):
        before, has_before = _before(rows)
        weight = jnp.where(has_before, weight, 0.0)
        if soft == "progress":
            return 0.5 * (1.0 + value - before), ~right, weight
        right &= value >= config.threshold * before
    if soft == "entropy":
        target = jnp.log1p(value * jnp.expm1(config.eta)) / config.eta
    else:
        target = value if soft == "soft" else jnp.where(right, 1.0, 0.0)
    return target, ~right, weight


def _before(rows: Rows) -> tuple[Float[Array, "B S"], Bool[Array, "B S"]]:
    """Returns the label of the step before each step, and where there is one, also where a split repeats that step."""
    at_BS = jnp.maximum(rows.parent, 0)
    label_BS, weight_BS = (at_slots(x_BS, at_BS) for x_BS in (rows.label, rows.tree_weight))
    return label_BS, (rows.parent >= 0) & (weight_BS > 0)


def after_error(rows: Rows, wrong_BS: Array) -> Array:
    """Marks the steps that follow an incorrect one: an incorrect step ends at an earlier token that they see.

    Slots are in depth-first order, so an earlier slot leads to this one if and only if its subtree extends past this
    step's end. The farthest extent among incorrect slots that end earlier decides. Alternatives with equal text end at
    one token: none follows another, and what follows one of them follows all.
    """
    until_BS = at_tokens(rows.until, rows.step_end)
    reach_BS = jax.lax.cummax(jnp.where(wrong_BS, until_BS, 0), axis=1)
    before_BS = jnp.pad(reach_BS, ((0, 0), (1, 0)))[:, :-1]
    new_BS = rows.step_end != jnp.pad(rows.step_end, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    first_BS = jax.lax.cummax(jnp.where(new_BS, jnp.arange(new_BS.shape[1]), 0), axis=1)  # of those with its end
    return at_slots(before_BS, first_BS) > rows.step_end
