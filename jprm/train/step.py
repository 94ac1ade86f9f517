"""The step: the state of a run, one update of it as a jitted function, and what it reports."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Scalar

from jprm.devices import OPTIONS
from jprm.experiment import ObjectiveConfig
from jprm.model.parameters import join, merge, without_adapters
from jprm.objectives import Objective, divisor, means, summed
from jprm.rows import Rows
from jprm.train.optimizer import Guarded, skipped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Parameters are flat dicts {path: array}, in two parts: only the trained one has optimizer state.

    `reference` are the nested parameters of the objective's second model. They may lack the decoder: it is then that of
    `frozen`, without adapters.
    """

    step: Scalar
    trained: dict[str, Array]
    frozen: dict[str, Array]
    optimizer: optax.OptState
    reference: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def params(self) -> dict:
        return join(self.trained, self.frozen)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metrics:
    """What one step reports. `loss`, `count`, `tokens` and `objective` are sums, divided on the host."""

    loss: Scalar
    count: Scalar
    tokens: Scalar  # real tokens, padding left out
    objective: dict[str, Any]  # as in `jprm.objectives`, summed
    gradient_norm: Scalar
    parameter_norm: Scalar  # of the trained parameters after the update; infinite where a square overflows
    learning_rate: Scalar
    skipped: Scalar  # 1 for a bad step that was left out

    def means(self) -> dict[str, float | None]:
        """Returns the mean loss and the objective's metrics, by the names in metrics.jsonl."""
        count = float(self.count)
        return {"loss": float(self.loss) / divisor(count), **means(self.objective, count)}


def models(params: dict[str, Any], reference: dict[str, Any], config: ObjectiveConfig) -> dict[str, Any]:
    """Returns what an objective takes as `params`: the model with its adapters merged, and the reference if any."""
    both = {"model": merge(params, config.lora)}
    if config.reference:
        decoder = {} if "decoder" in reference else {"decoder": without_adapters(params["decoder"])}
        both["reference"] = reference | decoder
    return both


@functools.lru_cache(maxsize=32)
def make_step(
    objective: Objective,
    tx: optax.GradientTransformationExtraArgs,
    config: ObjectiveConfig,
    backend: str | None = None,
) -> Callable[[State, Rows, Scalar], tuple[State, Metrics]]:
    """Returns the step for rows of shape (A, B, ...) and a learning rate; the same function for the same arguments.

    The gradients of A micro-batches of B rows are summed, divided by the objective's count, and given to `tx`. Where
    the loss or the gradient is not finite, the state stays as it is. `backend` is what the step is compiled for, by
    default jax's own.
    """

    def sums(trained, frozen, reference, rows: Rows):
        loss, count, metrics = objective(models(join(trained, frozen), reference, config), rows, config)
        real_BT = (rows.position > 0) | (rows.until > jnp.arange(rows.until.shape[1]) + 1)
        tokens = jnp.sum(real_BT.astype(jnp.float32))
        return loss, {"loss": loss, "count": count, "tokens": tokens, "objective": summed(metrics)}

    add = functools.partial(jax.tree.map, jnp.add)

    def step(state: State, rows: Rows, rate: Scalar) -> tuple[State, Metrics]:
        def micro(rows):
            return jax.grad(sums, has_aux=True)(state.trained, state.frozen, state.reference, rows)

        first = jax.tree.map(lambda x: x[0], rows)
        if rows.tokens.shape[0] == 1:  # for a loop of one turn, XLA's compiler for TPU makes two copies of the model
            gradients, total = micro(first)
        else:
            shapes = jax.eval_shape(sums, state.trained, state.frozen, state.reference, first)[1]
            zero = jax.tree.map(jnp.zeros_like, state.trained), jax.tree.map(lambda x: jnp.zeros(x.shape), shapes)
            (gradients, total), _ = jax.lax.scan(lambda sum, rows: (add(sum, micro(rows)), None), zero, rows)
        # Written out for every gradient: with one quotient XLA merges it with the clipping's, and last digits change.
        gradients = jax.tree.map(lambda g: g / jnp.where(total["count"] > 0, total["count"], 1.0), gradients)
        loss, norm = total["loss"] / jnp.where(total["count"] > 0, total["count"], 1.0), optax.tree.norm(gradients)
        updates, opt = tx.update(gradients, state.optimizer, state.trained, loss=loss, rate=rate)
        trained = cast(dict[str, Array], optax.apply_updates(state.trained, updates))
        metrics = Metrics(
            **total,
            gradient_norm=norm,
            parameter_norm=optax.tree.norm(trained),
            learning_rate=rate,
            skipped=jnp.float32(skipped(opt) - skipped(state.optimizer)),
        )
        after = state.step + 1, trained, opt
        if not isinstance(opt, Guarded):  # a guard leaves out bad steps itself
            good = jnp.isfinite(loss) & jnp.isfinite(norm)
            before = state.step, state.trained, state.optimizer
            after = jax.tree.map(lambda new, old: jnp.where(good, new, old), after, before)
        step, trained, opt = after
        return State(step, trained, state.frozen, opt, state.reference), metrics

    return jax.jit(step, donate_argnums=0, compiler_options=OPTIONS.get(backend or jax.default_backend()))
