"""How a run starts: initial parameters, a reference, a fitted head; and how it continues from a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jprm import multihost
from jprm.checkpoints import base, store
from jprm.experiment import Experiment, OptimizerConfig, from_json
from jprm.model import transformer
from jprm.model.config import ModelConfig
from jprm.model.heads import find
from jprm.model.parameters import TRAINED, check_adapted, held_decoder, init_adapters, join, merge, split
from jprm.options import find_part
from jprm.tokenizer import Tokenizer
from jprm.train.batches import training_batches, unstacked
from jprm.train.optimizer import Guarded, guard, make_optimizer
from jprm.train.step import State


def initial_state(experiment: Experiment, load_base: bool = True) -> State:
    """Returns parameters, adapters and the optimizer's state, sharded over the mesh that is set; no reference."""
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
    freeze, lora = experiment.optimizer.freeze, experiment.lora
    if lora.rank:
        check_adapted(params, freeze)
    adapters = jax.jit(init_adapters, static_argnums=(0, 1, 2))(lora, model, freeze, jax.random.fold_in(key, 1))
    trained, frozen = split(join(params, adapters), freeze, TRAINED if lora.rank else "")
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
    """Returns the parameters of the reference model, sharded over the mesh that is set; {} without one.

    The head is a language head, or that of a run with the same head and step layer; else there is none. Where adapters
    train on the reference itself, the decoder is left out: the state has it already. Without `load` the parameters are
    random.
    """
    path, model = experiment.reference, experiment.model
    if not experiment.task.reference:
        return {}
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
    """Returns random parameters as a flat dict, those left out that are loaded."""
    params: dict[str, Any] = flatten_dict(transformer.init(model, key), sep="/")
    return {path: x for path, x in params.items() if path not in loaded}


def _of_heads(name: str) -> Any:
    return find_part(f"jprm.methods.layers.head_init:{name}", {}, "head")


def _language_head(path: str, experiment: Experiment) -> dict[str, Any]:
    model, tied = experiment.model, base.model_config(path).tied_embeddings
    if tied != model.tied_embeddings:
        raise ValueError(f"{path}: tied_embeddings is {tied}, the config says {model.tied_embeddings}")
    return {} if tied else {"head": base.load_language_head(path, model)}


def with_fitted_head(experiment: Experiment, state: State, tokenizer: Tokenizer) -> State:
    """Returns the state with its head fitted on the first rows of training."""
    labelled_steps, fitted_head = map(_of_heads, ("labelled_steps", "fitted_head"))
    batches = training_batches(experiment, jax.sharding.get_mesh(), tokenizer)
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


# ---- Continuing: the arrays of a checkpoint, placed like those of the initial state.


def saved_arrays(state: State, experiment: Experiment) -> dict[str, Any]:
    """Returns the arrays of a checkpoint, by part: without the base that is read again."""
    again = experiment.rereads
    frozen = {path: x for path, x in state.frozen.items() if not (again and path.startswith("decoder/"))}
    return {"params": join(state.trained, frozen), "optimizer": state.optimizer}


def restored(
    checkpoints: store.Checkpoints, state: State, experiment: Experiment
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the newest checkpoint's arrays, placed like those of `state`, and what it holds beside them.

    A run may begin or cease to guard against bad steps: the optimizer's state follows.
    """
    run = store.restore(checkpoints, {"run": None})["run"]
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
    """Returns the state of a checkpoint's arrays, in the parts that `state` has; what it lacks stays."""
    saved: dict[str, Any] = flatten_dict(arrays["params"], sep="/")
    trained, frozen = ({path: saved.get(path, x) for path, x in part.items()} for part in (state.trained, state.frozen))
    return State(jnp.int32(step), trained, frozen, arrays["optimizer"])
