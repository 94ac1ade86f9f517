"""Loads the initial decoder of training, sampling or scoring: from a GGUF file, Hugging Face folder, LoRA or run.

From a run, only the decoder is loaded; the head too if both models are policies.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Collection
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jprm.checkpoints import store
from jprm.checkpoints.decoder import placed
from jprm.experiment import RUN, Experiment, kind_of, read
from jprm.io.folders import local_copy
from jprm.io.storage import Found, Given
from jprm.model.attention import check_softmax
from jprm.model.config import ModelConfig
from jprm.model.heads import find
from jprm.model.parameters import Dtype, held_decoder, merge
from jprm.model.transformer import check_model
from jprm.options import place_of


def model_config(path: Given | Found, **changes) -> ModelConfig:
    """Returns a base's config with `changes`, fields by name (e.g. layers=4); the head is the default unless changed.

    Reads no weights, but downloads a Hub model whole. Raises FileNotFoundError or ValueError if there is no model, or
    jprm cannot compute it; TypeError for an unknown field; OSError as `place_of`.
    """
    module, place = _opened(path)
    if module is None:
        config = dataclasses.replace(read(place / RUN).model, **{"head": ModelConfig.head, **changes})
    else:
        config = module.model_config(place, **changes)
    check_model(config)
    return config


def rebased(before: Experiment, changed: Experiment, named: Collection[str]) -> Experiment:
    """Returns `changed`, the experiment with a new base, with that base's model shape; `before` has the old base.

    Keeps model fields that the user set (`named`, e.g. `model.layers`) or that differ from the old base. If the
    tokenizer was the old base, it becomes the new one.

    Raises ValueError if the old base cannot be read; for the new base as `model_config`.
    """
    try:
        old = model_config(before.base)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"--set base={changed.base}: cannot tell which fields of `model` are those of {before.base}:"
            f" {error}. Write the experiment for the new base: model=base.model_config(BASE)"
        ) from None
    new, model = model_config(changed.base), {}
    for field in dataclasses.fields(new):
        value = getattr(changed.model, field.name)
        chosen = f"model.{field.name}" in named or value != getattr(old, field.name)
        model[field.name] = value if chosen else getattr(new, field.name)
    keeps = "tokenizer" in named or before.tokenizer != before.base
    tokenizer = changed.tokenizer if keeps else changed.base
    return dataclasses.replace(changed, model=ModelConfig(**model), tokenizer=tokenizer)


def load_decoder(path: Given | Found, config: ModelConfig, dtype: Dtype = "float32", new: str = "") -> dict:
    """Loads {"embed", "final_norm", "layers_0": {role: stack}, ...}, stored as `dtype`, onto the mesh that is set.

    Trained parameters need float32; other types (`Dtype`) are for frozen ones. Missing parameters that match the
    regular expression `new` are omitted. For a run, loads the newest checkpoint with LoRA merged.

    Raises ValueError if a missing parameter does not match `new`, `new` matches no missing one, `config` differs from
    the model's (fewer layers may do), or weights are damaged; FileNotFoundError without model; OSError as `place_of`.
    """
    module, place = _opened(path)
    if module is not None:
        return module.load_decoder(place, config, dtype, new=new)
    experiment = read(place / RUN)
    for field in dataclasses.fields(ModelConfig):
        ours, theirs = (getattr(c, field.name) for c in (config, experiment.model))
        if field.name not in FREE and ours != theirs:
            raise ValueError(f"{place}: was trained with model.{field.name}={theirs!r}, but {ours!r} was requested")
    if config.attention != experiment.model.attention:
        for name in (experiment.model.attention, config.attention):
            check_softmax(name, "the other model")
    params, _ = store.load_params(place, experiment, jax.sharding.get_mesh(), new)
    return held_decoder(merge(params, experiment.lora)["decoder"], dtype)


def load_language_head(path: Given | Found, config: ModelConfig) -> dict:
    """Loads an untied language head, {"kernel": (D, V)} in float32, onto the mesh if one is set.

    Raises ValueError if the model lacks a language head of the config's shape (unchecked for a run) or is a reward
    model, FileNotFoundError if there is no model.
    """
    module, place = check_language_model(path)
    if module is None:
        return store.load_params(place, read(place / RUN), jax.sharding.get_mesh())[0]["head"]
    file, name = module.open_tensors(place), module.LANGUAGE_HEAD
    shape = config.vocab_size, config.width
    if name not in file or tuple(file.shape(name)) != shape:
        raise ValueError(f"{place}: has no tensor {name} of shape {shape}: no language model")
    return {"kernel": placed("kernel", np.asarray(file.tensor(name).T, np.float32))}


def load_language_model(path: Given | Found, config: ModelConfig, dtype: Dtype = "float32") -> dict:
    """Loads {"decoder", "head"} by `load_decoder` and `load_language_head`; a tied head is omitted.

    `dtype` is the decoder's. Raises as they do, e.g. ValueError for a reward model.
    """
    if config.tied_embeddings:
        check_language_model(path)
        return {"decoder": load_decoder(path, config, dtype)}
    head = load_language_head(path, config)  # first: a reward model is refused before its decoder is read
    return {"decoder": load_decoder(path, config, dtype), "head": head}


def check_language_model(path: Given | Found) -> tuple[ModuleType | None, Any]:
    """Returns the module (of `MODULES`) that reads the model, and its local path; for a run `None` and its address.

    Raises ValueError for a reward model, FileNotFoundError if there is no model.
    """
    module, place = _opened(path)
    if module is None:
        head = read(place / RUN).model.head
        reward_head = repr(head) if find(head).channels else ""
    else:
        reward_head = next(filter(module.open_tensors(place).__contains__, SCORE_HEADS), "")
    if reward_head:
        raise ValueError(f"{place}: its head is {reward_head}, so it is a reward model. Give a language model")
    return module, place


SCORE_HEADS = ("score.weight", "score.0.weight", "score_head.weight", "v_head.summary.weight", "classifier.weight")
"""Tensors of published reward models' heads."""


def _opened(name: Given | Found) -> tuple[ModuleType | None, Any]:
    """Returns the module that reads the model, unless it is a run, and a local path."""
    place = place_of(name)
    if (kind := kind_of(place)) == "run":
        return None, place
    return importlib.import_module(MODULES[kind]), local_copy(place)


MODULES = {
    "huggingface": "jprm.methods.formats.huggingface",
    "peft": "jprm.methods.formats.peft",
    "gguf": "jprm.methods.formats.gguf",
}
"""Modules for published weights; each has `model_config`, `load_decoder`, `open_tensors` and `LANGUAGE_HEAD`."""

FREE = ("head", "head_hidden", "steps", "dtype", "remat", "product_layers", "attention", "attention_block",
        "tied_embeddings", "logit_softcap")  # fmt: skip
"""`ModelConfig` fields that may differ without changing the meaning of the decoder's parameters."""
