"""A run's state: its start, the step function, and its continuation from a checkpoint.

    initial_state, reference_params, with_fitted_head -> State -> make_step(...)(state, rows, rate) -> State, Metrics
    saved_arrays -> a checkpoint -> restored, continued

`optimizer.name` gives an update's direction, by default AdamW. Clipping, weight decay, freezing and learning-rate
factors by regular expression are the same for all. The learning rate is an argument to every step, so one compiled step
serves every schedule.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Scalar

from jprm import multihost
from jprm.checkpoints import base, store
from jprm.devices import OPTIONS
from jprm.experiment import Experiment, ObjectiveConfig, OptimizerConfig, from_json
from jprm.model import transformer
from jprm.model.config import ModelConfig
from jprm.model.heads import find
from jprm.model.parameters import (
    TRAINED,
    check_adapted,
    check_matches,
    held_decoder,
    init_adapters,
    join,
    merge,
    split,
    without_adapters,
)
from jprm.objectives import Objective, divisor, means, summed
from jprm.options import find_part
from jprm.rows import Rows
from jprm.tokenizer import Tokenizer
from jprm.train.batches import own_batches, unstacked


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Parameters as flat dicts {path: array}, in two parts: only the trained one has optimizer state.

    `reference` are the nested parameters of the objective's second model. If they lack the decoder, it is the one in
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
    """One step's results. `loss`, `count`, `tokens` and `objective` are sums, divided on the host."""

    loss: Scalar
    count: Scalar
    tokens: Scalar  # real tokens, padding left out
    objective: dict[str, Any]  # as in `jprm.objectives`, summed
    gradient_norm: Scalar
    parameter_norm: Scalar  # of the trained parameters after the update; infinite where a square overflows
    learning_rate: Scalar
    skipped: Scalar  # 1 for a bad step that was left out

    def means(self) -> dict[str, float | None]:
        """Returns `loss` (per label, or 0) and metrics, e.g. `auroc` (`None` if undefined). Waits for the device."""
        count = float(self.count)
        return {"loss": float(self.loss) / divisor(count), **means(self.objective, count)}


def models(params: dict[str, Any], reference: dict[str, Any], config: ObjectiveConfig) -> dict[str, Any]:
    """Returns an objective's nested `params`: `model`, adapters merged; if config.reference also `reference`, whose
    default decoder is the model's without adapters."""
    both = {"model": merge(params, config.lora)}
    if config.reference:
        decoder = {} if "decoder" in reference else {"decoder": without_adapters(params["decoder"])}
        both["reference"] = reference | decoder
    return both


@functools.lru_cache(maxsize=32)
def make_step(
    objective: Objective, tx: optax.GradientTransformationExtraArgs, config: ObjectiveConfig, backend: str | None = None
) -> Callable[[State, Rows, Scalar], tuple[State, Metrics]]:
    """Returns the compiled step(state, rows, rate) for rows shaped (A, B, ...); equal arguments give the same one.

    It donates the old state: its arrays must not be used again. Gradients over A micro-batches with B rows are summed,
    divided by the objective's count, and given to `tx` (`make_optimizer`); `rate` is the learning rate. If the loss or
    gradient is not finite, the state stays (a guard counts step and skip). `backend`: e.g. "tpu"; default: jax's.
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
            **total, gradient_norm=norm, parameter_norm=optax.tree.norm(trained), learning_rate=rate,
            skipped=jnp.float32(skipped(opt) - skipped(state.optimizer)),
        )  # fmt: skip
        after = state.step + 1, trained, opt
        if not isinstance(opt, Guarded):  # a guard leaves out bad steps itself
            good = jnp.isfinite(loss) & jnp.isfinite(norm)
            before = state.step, state.trained, state.optimizer
            after = jax.tree.map(lambda new, old: jnp.where(good, new, old), after, before)
        step, trained, opt = after
        return State(step, trained, state.frozen, opt, state.reference), metrics

    return jax.jit(step, donate_argnums=0, compiler_options=OPTIONS.get(backend or jax.default_backend()))


# -------------------------------------------------------------------------------------------------------- the optimizer

MEMORY = 100
"""Steps in the running means that define a spike. Before that many good steps, no step is a spike."""


class Guarded(NamedTuple):
    """A guarded optimizer's state, with running means over the good steps."""

    inner: optax.OptState
    good: Scalar
    skipped: Scalar
    loss: Scalar
    norm: Scalar


def guard(inner: optax.OptState) -> Guarded:
    """Wraps an optimizer state with no good or skipped steps and zero running means of loss and norm."""
    return Guarded(inner, *jax.jit(lambda: (jnp.int32(0), jnp.int32(0), jnp.float32(0), jnp.float32(0)))())


def skipped(state: optax.OptState) -> Scalar | int:
    """Returns the number of bad steps left out so far, 0 without a guard."""
    return state.skipped if isinstance(state, Guarded) else 0


OPTIMIZERS = {"adamw": "jprm.train.state:adam", "muon": "jprm.methods.optimizers.muon:muon"}
"""Name to (config) -> optax transformation from gradients to directions, before weight decay and the rate. Gradients
are a flat dict {path: array} with layers stacked on the first axis. `FILE.py:NAME` is the user's own."""

DECAYS = {
    "constant": lambda rate, steps: optax.constant_schedule(rate),
    "cosine": optax.cosine_decay_schedule,
    "linear": lambda rate, steps: optax.linear_schedule(rate, 0.0, steps),
}
"""Name to (learning rate, updates after the warmup) -> optax schedule. `FILE.py:NAME` is the user's own."""


def adam(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.b1, config.b2, config.eps)


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the rate for update i, from 0: (i + 1) / warmup_steps of the full rate, then the named decay.

    The decay reaches 0 one update after the last of `steps`, so neither the first nor the last is wasted. Raises
    ValueError for an unknown decay.
    """
    warmup = max(config.warmup_steps, 1)
    rest = max(steps - warmup + 1, 1)
    after = find_part(config.decay, DECAYS, "optimizer.decay", files=True)(config.learning_rate, rest)
    joined = optax.join_schedules([optax.linear_schedule(0.0, config.learning_rate, warmup), after], [warmup])
    return lambda count: joined(count + 1)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer for a flat dict {path: array} of trained parameters.

    `update` takes the mean loss as `loss` and the learning rate as `rate`. Configs that differ only in the schedule
    give the same object. Raises ValueError for an unknown `name`.
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
        find_part(config.name, OPTIMIZERS, "optimizer.name", files=True)(config),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
        optax.stateless(scaled),
        _scale_by_rate(),
    )
    return _guarded(plain, config.spike) if config.guarded else optax.with_extra_args_support(plain)


def _scale_by_rate() -> optax.GradientTransformationExtraArgs:
    """Steps downhill by `rate`, an argument to `update`; the state counts updates, like optax's schedules."""

    def update(updates, state, params=None, *, rate: Scalar, **_: Any):
        updates = jax.tree.map(lambda u: jnp.asarray(-rate, u.dtype) * u, updates)
        return updates, optax.ScaleByScheduleState(optax.safe_increment(state.count))

    def init(params):
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32))

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))  # typed without extra arguments


def _guarded(plain: optax.GradientTransformationExtraArgs, spike: float) -> optax.GradientTransformationExtraArgs:
    """Guards `plain`: a bad step changes neither parameters nor moments nor the update count."""

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

    return optax.GradientTransformationExtraArgs(lambda params: guard(plain.init(params)), cast(Any, update))


# ----------------------------------------------------------------------------------------------------- how a run starts


def initial_state(experiment: Experiment, load_base: bool = True) -> State:
    """Returns step 0: parameters, adapters and optimizer state, sharded over the current mesh; no reference.

    Without `load_base` all parameters are random. Raises FileNotFoundError or ValueError if the base is missing,
    damaged or of another shape, OSError if it cannot be downloaded, ValueError if a pattern matches no parameter.
    """
    model, key = experiment.model, jax.random.key(experiment.seed)
    loaded: dict[str, Any] = {}
    if experiment.base and load_base:
        dtype, new = experiment.base_dtype, experiment.new_parameters
        loaded = {"decoder": base.load_decoder(experiment.base, model, dtype, new)}
        if not find(model.head).channels:  # a policy starts from its base's head, which may be the embedding
            loaded |= _language_head(experiment.base, experiment)
        elif not experiment.probe_rows:
            loaded |= _of_heads("kept_head")(experiment.base, experiment)
    loaded = flatten_dict(loaded, sep="/")
    params = {**loaded, **_random(model, frozenset(loaded), key)}
    freeze, lora, adapters = experiment.optimizer.freeze, experiment.lora, {}
    if lora.rank:
        check_adapted(params, freeze)
        adapters = jax.jit(init_adapters, static_argnums=(0, 1, 2))(lora, model, freeze, jax.random.fold_in(key, 1))
    trained, frozen = split(join(params, adapters), freeze, TRAINED if lora.rank else "")
    for field, pattern in experiment.patterns:  # `split`, `init_adapters` and `load_decoder` check the others
        if field in ("optimizer.no_decay", "optimizer.rate_factors") and pattern not in ("", OptimizerConfig.no_decay):
            check_matches(field, pattern, [*trained, *frozen])
    small = [path for path in loaded or params if path in trained and path.startswith("decoder/")]
    if experiment.rereads and small:
        raise ValueError(
            f"base_dtype={experiment.base_dtype!r}: {', '.join(sorted(small)[:3])} would be trained in it. Set"
            " lora.rank, or optimizer.freeze='^decoder/' to train only the head"
        )
    if experiment.rereads and not load_base:
        frozen |= flatten_dict({"decoder": held_decoder(join(frozen)["decoder"], experiment.base_dtype)}, sep="/")
    optimizer = jax.jit(make_optimizer(experiment.optimizer).init)(trained)
    return State(jnp.int32(0), trained, frozen, optimizer)


def reference_params(experiment: Experiment, load: bool = True) -> dict[str, Any]:
    """Returns the reference model's parameters, sharded over the current mesh.

    They are `{"decoder", "head"}`. The head is a language head, or from a run with the same head and step layer, or
    missing. If adapters train on the reference itself, the decoder is left out, because the state has it. Without
    `load` the parameters are random. Errors are as those of `initial_state`.
    """
    path, model = experiment.reference, experiment.model
    if not load:
        params = jax.jit(transformer.init, static_argnums=0)(model, jax.random.key(0))
    elif not find(model.head).channels:
        params = {"decoder": {}, **_language_head(path, experiment)}
    else:
        params = {"decoder": {}, **_of_heads("head_of_run")(path, experiment)}
    dtype = experiment.reference_dtype
    if experiment.lora.rank and path == experiment.base and dtype == experiment.base_dtype:
        del params["decoder"]
    elif load:
        params["decoder"] = base.load_decoder(path, model, dtype)
    else:
        params["decoder"] = held_decoder(params["decoder"], dtype)
    return params


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random(model: ModelConfig, loaded: frozenset[str], key: jax.Array) -> dict[str, jax.Array]:
    """Returns random parameters as a flat dict, without the `loaded` paths."""
    params: dict[str, Any] = flatten_dict(transformer.init(model, key), sep="/")
    return {path: x for path, x in params.items() if path not in loaded}


def _of_heads(name: str) -> Any:
    return find_part(f"jprm.methods.layers.head_init:{name}", {}, "head")


def _language_head(path: str, experiment: Experiment) -> dict[str, Any]:
    model, tied = experiment.model, base.model_config(path).tied_embeddings
    if tied != model.tied_embeddings:
        raise ValueError(f"{path}: tied_embeddings is {tied}, but {model.tied_embeddings} in the config. Change it")
    return {} if tied else {"head": base.load_language_head(path, model)}


def with_fitted_head(experiment: Experiment, state: State, tokenizer: Tokenizer) -> State:
    """Returns the state with a head fitted on the first `probe_rows` training rows; process 0 prints its AUROC.

    Every process must call it. Raises ValueError if the labels are all alike or the head is not linear, or as
    `own_batches`.
    """
    labelled_steps, fitted_head = map(_of_heads, ("labelled_steps", "fitted_head"))
    batches = own_batches(experiment, experiment.data.train, jax.sharding.get_mesh(), tokenizer)
    params = merge(state.params, experiment.lora)
    micro_batches = itertools.chain.from_iterable(map(unstacked, batches))
    steps = labelled_steps(params, experiment.model, experiment.target, micro_batches, experiment.probe_rows)
    head, area = fitted_head(experiment.model.head, steps)
    left_out = "" if area is None else f": AUROC {area:.3f} on the last fifth, when that was left out"
    if multihost.is_first():
        print(f"the head is fitted on {len(steps.target_N):,} labelled steps{left_out}")
    fitted = {
        f"head/{name}": jax.device_put(value + state.trained[f"head/{name}"], state.trained[f"head/{name}"].sharding)
        for name, value in head.items()
    }
    return dataclasses.replace(state, trained=state.trained | fitted)


# -------------------------------------------------------------------------------------------------- how a run continues


def saved_arrays(state: State, experiment: Experiment) -> dict[str, Any]:
    """Returns a checkpoint's arrays, {"params" (nested), "optimizer"}, without a base that is read again."""
    again = experiment.rereads
    frozen = {path: x for path, x in state.frozen.items() if not (again and path.startswith("decoder/"))}
    return {"params": join(state.trained, frozen), "optimizer": state.optimizer}


def restored(checkpoints: store.Checkpoints, state: State, experiment: Experiment) -> tuple[dict, dict[str, Any]]:
    """Returns the newest checkpoint's arrays (`saved_arrays`), placed like `state`, and its `run` (`store.run_of`).

    A run may start or stop guarding against bad steps; the optimizer state is adapted. Raises ValueError as
    `store.restore` and `store.run_of`.
    """
    run = store.run_of(checkpoints)
    now = state.optimizer
    bare = now.inner if isinstance(now, Guarded) else now
    then = guard(bare) if from_json(OptimizerConfig, run["experiment"]["optimizer"]).guarded else bare
    wanted = {"params": store.abstract(saved_arrays(state, experiment)["params"]), "optimizer": store.abstract(then)}
    loaded = store.restore(checkpoints, wanted)
    optimizer = loaded["optimizer"]
    if isinstance(now, Guarded) and not isinstance(then, Guarded):
        optimizer = guard(optimizer)
    elif isinstance(then, Guarded) and not isinstance(now, Guarded):
        optimizer = optimizer.inner
    return {"params": loaded["params"], "optimizer": optimizer}, run


def continued(state: State, arrays: dict[str, Any], step: int) -> State:
    """Returns `state`, without reference, with `restored` arrays and their step; parameters not among them stay."""
    saved: dict[str, Any] = flatten_dict(arrays["params"], sep="/")
    trained, frozen = ({path: saved.get(path, x) for path, x in part.items()} for part in (state.trained, state.frozen))
    return State(jnp.int32(step), trained, frozen, arrays["optimizer"])
