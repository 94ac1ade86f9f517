"""AdamW with schedules, clipping, weight-decay masks, and freezing and learning-rate factors by regular expression.

A step whose loss or gradient is not finite, or is a spike, can be left out by a guard around it all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Scalar

from jprm.experiment import OptimizerConfig

MEMORY = 100
"""Steps of the running means that a spike is measured against, and before which nothing is one."""


class Guarded(NamedTuple):
    """The optimizer's state behind a guard, and what the guard has seen of good steps."""

    inner: optax.OptState
    good: Scalar
    skipped: Scalar
    loss: Scalar  # running means
    norm: Scalar


def guard(inner: optax.OptState) -> Guarded:
    """`inner` behind a guard that has seen nothing yet."""
    return Guarded(inner, *jax.jit(lambda: (jnp.int32(0), jnp.int32(0), jnp.float32(0), jnp.float32(0)))())


def skipped(state: optax.OptState) -> Scalar | int:
    """Steps that were left out so far."""
    return state.skipped if isinstance(state, Guarded) else 0


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The rate of update i, from 0: (i + 1) / warmup_steps of the full rate, then the named decay.

    The decay would reach 0 one update behind the last, so that neither the first update nor the last is wasted.
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


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformationExtraArgs:
    """For the flat dict {path: array} of trained parameters; `update` takes the step's mean loss as `loss`."""

    def decayed(flat):
        return {path: not re.search(config.no_decay, path) for path in flat}

    def factor(path):
        return next((value for pattern, value in config.rate_factors if re.search(pattern, path)), 1.0)

    plain = optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        optax.scale_by_adam(config.b1, config.b2, config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
        optax.stateless(lambda updates, params: {path: factor(path) * u for path, u in updates.items()}),
        optax.scale_by_learning_rate(schedule(config, steps)),
    )
    return _guarded(plain, config.spike) if config.guarded else optax.with_extra_args_support(plain)


def _guarded(plain: optax.GradientTransformation, spike: float) -> optax.GradientTransformationExtraArgs:
    """`plain`, of which a bad step changes nothing: neither parameters nor moments nor the schedule's count."""

    def update(updates, state: Guarded, params=None, *, loss: Scalar, **_: Any):
        norm = optax.tree.norm(updates)
        good = jnp.isfinite(loss) & jnp.isfinite(norm)
        if spike:
            above = (loss > spike * state.loss) | (norm > spike * state.norm)
            good &= ~(above & (state.good >= MEMORY))
        updates, inner = plain.update(updates, state.inner, params)
        part = 1 / jnp.minimum(state.good + 1, MEMORY)  # a plain mean at first, then one that forgets
        after = Guarded(
            inner, state.good + 1, state.skipped,
            state.loss + part * (loss - state.loss), state.norm + part * (norm - state.norm),
        )  # fmt: skip
        before = state._replace(skipped=state.skipped + 1)
        updates = jax.tree.map(lambda u: jnp.where(good, u, 0), updates)
        return updates, jax.tree.map(lambda new, old: jnp.where(good, new, old), after, before)

    return optax.GradientTransformationExtraArgs(lambda params: guard(plain.init(params)), update)


Schedule = Callable[[int], float]
