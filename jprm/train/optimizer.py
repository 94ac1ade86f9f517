"""AdamW with schedules, clipping, weight-decay masks, and freezing and learning-rate factors by regular expression."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Literal

import jax
import optax
from flax.traverse_util import flatten_dict, unflatten_dict


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Patterns are matched (re.search) against parameter paths such as `decoder/layers_0/query` or `head/kernel`."""

    learning_rate: float
    warmup_steps: int = 0
    decay: Literal["constant", "cosine", "linear"] = "cosine"  # to 0 behind the last step
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    no_decay: str = r"norm|bias|embed"
    clip_norm: float = 1.0  # of the global gradient; 0 does not clip
    freeze: str = ""  # "" freezes nothing
    rate_factors: tuple[tuple[str, float], ...] = ()  # (pattern, factor): the first that matches


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


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """For the flat dict {path: array} of trained parameters."""

    def decayed(flat):
        return {path: not re.search(config.no_decay, path) for path in flat}

    def factor(path):
        return next((value for pattern, value in config.rate_factors if re.search(pattern, path)), 1.0)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        optax.scale_by_adam(config.b1, config.b2, config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
        optax.stateless(lambda updates, params: {path: factor(path) * u for path, u in updates.items()}),
        optax.scale_by_learning_rate(schedule(config, steps)),
    )


def split(params: dict, freeze: str, only: str = "") -> tuple[dict, dict]:
    """The trained and the frozen parameters, as flat dicts {path: array}. What `only` does not match is frozen too."""
    flat = flatten_dict(params, sep="/")
    matched = {path for path in flat if freeze and re.search(freeze, path)}
    frozen = {path: value for path, value in flat.items() if path in matched or not re.search(only, path)}
    if freeze and not matched:
        raise ValueError(f"freeze={freeze!r} matches no parameter; paths are {', '.join(sorted(flat))}")
    if len(frozen) == len(flat):
        raise ValueError(f"freeze={freeze!r} matches every parameter: nothing is left to train")
    return {path: value for path, value in flat.items() if path not in frozen}, frozen


def join(*flat: dict) -> dict:
    """The nested dict again."""
    return unflatten_dict({path: value for part in flat for path, value in part.items()}, sep="/")


Schedule = Callable[[int], float]
