"""The state that training starts from: parameters of the base model or random ones, adapters, a head."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jprm import multihost
from jprm.checkpoints import base, store
from jprm.checkpoints.kinds import RUN, kind_of
from jprm.experiment import Experiment, read
from jprm.model import transformer
from jprm.model.config import ModelConfig
from jprm.model.heads import find
from jprm.model.int8 import held_decoder
from jprm.model.lora import TRAINED, merge
from jprm.model.lora import check as check_adapted
from jprm.model.lora import init as init_adapters
from jprm.model.parameters import join, split
from jprm.tokenizer import Tokenizer
from jprm.train.batches import training_batches, unstacked
from jprm.train.head_init import fitted_head, labelled_steps
from jprm.train.optimizer import make_optimizer
from jprm.train.step import State


def initial_state(experiment: Experiment, load_base: bool = True) -> State:
    """Returns parameters, adapters and the optimizer's state, sharded over the mesh that is set; no reference."""
    model, key = experiment.model, jax.random.key(experiment.seed)
    loaded: dict[str, Any] = {}
    if experiment.base and load_base:
        loaded = {"decoder": base.load_decoder(experiment.base, model, new=experiment.new_parameters)}
        if not find(model.head).channels:  # a policy starts from its base's head, which may be the embedding
            loaded |= _language_head(experiment.base, experiment)
    loaded = flatten_dict(loaded, sep="/")
    params = {**loaded, **_random(model, frozenset(loaded), key)}
    freeze, lora = experiment.optimizer.freeze, experiment.lora
    if lora.rank:
        check_adapted(params, freeze)
    adapters = jax.jit(init_adapters, static_argnums=(0, 1, 2))(lora, model, freeze, jax.random.fold_in(key, 1))
    trained, frozen = split(join(params, adapters), freeze, TRAINED if lora.rank else "")
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
    elif kind_of(path) == "run" and _same_head(other := read(pathlib.Path(path) / RUN), experiment):
        params = store.load_params(path, other, jax.sharding.get_mesh())[0] | {"decoder": {}}
    else:
        params = {"decoder": {}}
    dtype = experiment.reference_dtype
    if experiment.lora.rank and path == experiment.base and dtype == "float32":
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


def _same_head(other: Experiment, experiment: Experiment) -> bool:
    return all(getattr(other.model, name) == getattr(experiment.model, name) for name in ("head", "steps"))


def _language_head(path: str, experiment: Experiment) -> dict[str, Any]:
    model, tied = experiment.model, base.model_config(path).tied_embeddings
    if tied != model.tied_embeddings:
        raise ValueError(f"{path}: tied_embeddings is {tied}, the config says {model.tied_embeddings}")
    return {} if tied else {"head": base.load_language_head(path, model)}


def with_fitted_head(experiment: Experiment, state: State, tokenizer: Tokenizer) -> State:
    """Returns the state with its head fitted on the first rows of training."""
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
