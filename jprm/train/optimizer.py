"""AdamW with clipping, weight-decay masks, and freezing and learning-rate factors by regular expression.

The learning rate is an argument of every update, so that one compiled step serves every schedule. A guard can leave out
steps whose loss or gradient is not finite, or is a spike.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Scalar

from jprm.experiment import OptimizerConfig

MEMORY = 100
"""Steps of the running means that a spike is measured against. Before as many good steps there are no spikes."""


class Guarded(NamedTuple):
    """The state of an optimizer inside a guard, and running means of the good steps."""

    inner: optax.OptState
    good: Scalar
    skipped: Scalar
    loss: Scalar
    norm: Scalar


def guard(inner: optax.OptState) -> Guarded:
    """Returns `inner` in a guard that has seen no step."""
    return Guarded(inner, *jax.jit(lambda: (jnp.int32(0), jnp.int32(0), jnp.float32(0), jnp.float32(0)))())


def skipped(state: optax.OptState) -> Scalar | int:
    """Returns the number of steps left out so far."""
    return state.skipped if isinstance(state, Guarded) else 0


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the rate of update i, from 0: (i + 1) / warmup_steps of the full rate, then the named decay.

    The decay reaches 0 one update after the last, so that neither the first update nor the last is wasted.
    """
    warmup = max(config.warmup_steps, 1)
    rest = max(steps - warmup + 1, 1)
    after = {
        "constant": optax.constant_schedule(config.learning_rate),
        "cosine": optax.cosine_decay_schedule(config.learning_rate, rest),
        "linear": optax.linear_schedule(config.learning_rate, 0.0, rest),
    }[config.decay]
    joined = optax.join_schedules([optax.linear_schedule(0.0, config.learning_rate, warmup), after], [warmup])
    return lambda count: joined(count + 1)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer of a flat dict {path: array} of trained parameters.

    `update` takes the step's mean loss as `loss` and the learning rate as `rate`. Configurations that differ in their
    schedule alone give the same object.
    """
    return _optimizer(dataclasses.replace(config, learning_rate=0.0, warmup_steps=0, decay="constant"))


@functools.lru_cache(maxsize=32)
def _optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    def decayed(flat):
        return {path: not re.search(config.no_decay, path) for path in flat}

    def factor(path):
        return next((value for pattern, value in config.rate_factors if re.search(pattern, path)), 1.0)

    def scaled(updates: Any, params: Any):
        return {path: factor(path) * u for path, u in updates.items()}

    plain = optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        optax.scale_by_adam(config.b1, config.b2, config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
        optax.stateless(scaled),
        _scale_by_rate(),
    )
    return _guarded(plain, config.spike) if config.guarded else optax.with_extra_args_support(plain)


def _scale_by_rate() -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that steps downhill by `rate`, an argument of `update`.

    The state counts updates, as optax's own schedules do.
    """

    def update(updates, state, params=None, *, rate: Scalar, **_: Any):
        updates = jax.tree.map(lambda u: jnp.asarray(-rate, u.dtype) * u, updates)
        return updates, optax.ScaleByScheduleState(optax.safe_increment(state.count))

    def init(params):
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32))

    return _with_extra_args(init, update)


def _guarded(plain: optax.GradientTransformationExtraArgs, spike: float) -> optax.GradientTransformationExtraArgs:
    """Returns `plain` in a guard: a bad step changes neither parameters nor moments nor the count of updates."""

    def update(updates, state: Guarded, params=None, *, loss: Scalar, rate: Scalar, **_: Any):
        norm = optax.tree.norm(updates)
        good = jnp.isfinite(loss) & jnp.isfinite(norm)
        if spike:
            above = (loss > spike * state.loss) | (norm > spike * state.norm)
            good &= ~(above & (state.good >= MEMORY))
        updates, inner = plain.update(updates, state.inner, params, rate=rate)
        part = 1 / jnp.minimum(state.good + 1, MEMORY)  # a plain mean at first, then one that forgets
        after = Guarded(
            inner, state.good + 1, state.skipped,
            state.loss + part * (loss - state.loss), state.norm + part * (norm - state.norm),
        )  # fmt: skip
        before = state._replace(skipped=state.skipped + 1)
        updates = jax.tree.map(lambda u: jnp.where(good, u, 0), updates)
        return updates, jax.tree.map(lambda new, old: jnp.where(good, new, old), after, before)

    return _with_extra_args(lambda params: guard(plain.init(params)), update)


def _with_extra_args(init: Callable, update: Callable) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation. (Optax types its constructor for an `update` without arguments of its own.)"""
    return optax.GradientTransformationExtraArgs(init, update)
