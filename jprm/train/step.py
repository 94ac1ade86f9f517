"""The training step: one pure, jitted, donated function of (state, rows), the same on one device and on many."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Scalar

from jprm.experiment import OptimizerConfig, TargetConfig
from jprm.model.config import ModelConfig
from jprm.model.heads import find
from jprm.model.lora import NO_LORA, LoraConfig, merge
from jprm.model.parameters import join
from jprm.model.transformer import step_logits
from jprm.objectives.losses import fitting
from jprm.objectives.targets import targets
from jprm.rows import Rows
from jprm.train.compiler_options import OPTIONS
from jprm.train.optimizer import make_optimizer, schedule, skipped

BINS = 512
"""Score bins of the training AUROC: two classes' histograms add up over steps, devices and micro-batches."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Parameters are flat dicts {path: array}, in two parts: only the trained one has optimizer state."""

    step: Scalar
    trained: dict[str, Array]
    frozen: dict[str, Array]
    optimizer: optax.OptState

    @property
    def params(self) -> dict:
        return join(self.trained, self.frozen)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metrics:
    """Sums over labelled steps: they add up, and are divided on the host."""

    loss: Scalar
    weight: Scalar
    right: Scalar  # weight of steps on the right side of one half
    tokens: Scalar  # real tokens, padding left out
    histogram_CN: Float[Array, "2 N"]  # weight by class (wrong, right) and bin of the score
    gradient_norm: Scalar
    parameter_norm: Scalar  # of the trained parameters after the update; infinite where a square overflows
    learning_rate: Scalar
    skipped: Scalar  # 1 for a bad step that was left out

    @staticmethod
    def zero() -> Metrics:
        zero = jnp.float32(0)
        return Metrics(zero, zero, zero, zero, jnp.zeros((2, BINS)), zero, zero, zero, zero)


def make_step(
    model: ModelConfig,
    target: TargetConfig,
    loss: str,
    optimizer: OptimizerConfig,
    steps: int,
    lora: LoraConfig = NO_LORA,
    backend: str | None = None,
) -> Callable[[State, Rows], tuple[State, Metrics]]:
    """The step for rows of shape (A, B, ...): A micro-batches of B rows, whose gradients are summed before the update.

    The loss is the mean over all labelled steps of the A x B rows: each step counts alike, wherever it lies.
    `backend` is what it is compiled for: jax's own, unless it is compiled for another machine.
    """
    loss_sum, head = fitting(loss, model.head), find(model.head)
    if target.neutral not in head.target.neutral:
        takes = " or ".join(head.target.neutral)
        raise ValueError(f"target.neutral={target.neutral!r} does not fit head {model.head!r}, which takes {takes}")
    tx, rate = make_optimizer(optimizer, steps), schedule(optimizer, steps)

    def objective(trained, frozen, rows):
        logit_BSC = step_logits(merge(join(trained, frozen), lora), model, rows)
        target_BS, weight_BS = targets(rows, target)
        total = loss_sum(head, logit_BSC, target_BS, weight_BS)
        return total, _metrics(*head.judge(logit_BSC, target_BS), weight_BS, rows, total)

    add = functools.partial(jax.tree.map, jnp.add)

    def step(state: State, rows: Rows) -> tuple[State, Metrics]:
        def micro(rows):
            return jax.grad(objective, has_aux=True)(state.trained, state.frozen, rows)

        if rows.tokens.shape[0] == 1:  # of a loop of one turn, XLA's compiler for TPU makes two copies of the model
            gradients, metrics = micro(jax.tree.map(lambda x: x[0], rows))
        else:
            zero = (jax.tree.map(jnp.zeros_like, state.trained), Metrics.zero())
            (gradients, metrics), _ = jax.lax.scan(lambda sum, rows: (add(sum, micro(rows)), None), zero, rows)
        gradients = jax.tree.map(lambda g: g / jnp.maximum(metrics.weight, 1.0), gradients)
        loss = metrics.loss / jnp.maximum(metrics.weight, 1.0)
        updates, opt = tx.update(gradients, state.optimizer, state.trained, loss=loss)
        trained = optax.apply_updates(state.trained, updates)
        metrics = dataclasses.replace(
            metrics,
            gradient_norm=optax.tree.norm(gradients),
            parameter_norm=optax.tree.norm(trained),
            learning_rate=jnp.float32(rate(state.step - skipped(state.optimizer))),
            skipped=jnp.float32(skipped(opt) - skipped(state.optimizer)),
        )
        return State(state.step + 1, trained, state.frozen, opt), metrics

    return jax.jit(step, donate_argnums=0, compiler_options=OPTIONS.get(backend or jax.default_backend()))


def _metrics(score_BS, positive_BS, weight_BS, rows: Rows, loss) -> Metrics:
    bin_BSN = jax.nn.one_hot(jnp.clip((score_BS * BINS).astype(jnp.int32), 0, BINS - 1), BINS)
    class_CBS = weight_BS * jnp.stack([~positive_BS, positive_BS])
    real_BT = (rows.position > 0) | (rows.until > jnp.arange(rows.until.shape[1]) + 1)
    zero = Metrics.zero()
    return dataclasses.replace(
        zero,
        loss=loss,
        weight=jnp.sum(weight_BS),
        right=jnp.sum(weight_BS * ((score_BS > 0.5) == positive_BS)),
        tokens=jnp.sum(real_BT.astype(jnp.float32)),
        histogram_CN=jnp.sum(class_CBS[..., None] * bin_BSN, axis=(1, 2)),
    )
