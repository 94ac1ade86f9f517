"""A run of `jprm train` as the base of another. Its decoder is kept; its head is too where both are policies."""

from __future__ import annotations

import dataclasses
import os

import jax

from jprm.checkpoints import store
from jprm.checkpoints.kinds import RUN
from jprm.experiment import read
from jprm.io.storage import path_of
from jprm.model.config import ModelConfig
from jprm.model.heads import find
from jprm.model.int8 import Dtype, held_decoder
from jprm.model.lora import merge

FREE = (
    "head",
    "head_hidden",
    "steps",
    "dtype",
    "remat",
    "product_layers",
    "attention",
    "attention_block",
    "tied_embeddings",
    "logit_softcap",
)
"""Fields of `ModelConfig` that do not change what the decoder's parameters mean."""


def model_config(path: str | os.PathLike, **changes) -> ModelConfig:
    return dataclasses.replace(read(path_of(path) / RUN).model, **{"head": ModelConfig.head, **changes})


def load_decoder(path: str | os.PathLike, config: ModelConfig, dtype: Dtype = "float32", *, new: str = "") -> dict:
    """Returns the decoder of the newest checkpoint, LoRA merged, on the mesh that is set.

    Raises ValueError naming a field in which `config` differs from the run's decoder, or parameters that it lacks.
    """
    experiment = read(path_of(path) / RUN)
    for field in dataclasses.fields(ModelConfig):
        ours, theirs = (getattr(c, field.name) for c in (config, experiment.model))
        if field.name not in FREE and ours != theirs:
            raise ValueError(f"{path}: was trained with model.{field.name}={theirs!r}, and {ours!r} is asked for")
    params, _ = store.load_params(path, experiment, jax.sharding.get_mesh(), new)
    return held_decoder(merge(params, experiment.lora)["decoder"], dtype)


def load_language_head(path: str | os.PathLike) -> dict:
    """Returns a policy's head from its newest checkpoint, on the mesh that is set. Raises ValueError for a PRM's."""
    experiment = read(path_of(path) / RUN)
    if find(experiment.model.head).channels:
        raise ValueError(f"{path}: its head is {experiment.model.head!r}: a policy starts from a language model")
    return store.load_params(path, experiment, jax.sharding.get_mesh())[0]["head"]
