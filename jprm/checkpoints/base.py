"""The model that training starts from, by what the path is.

A GGUF file, a Hugging Face folder, PEFT's adapters, or the folder of another run.
"""

from __future__ import annotations

import os
import pathlib
from types import ModuleType

import jax
import numpy as np

from jprm.model.config import ModelConfig
from jprm.model.int8 import Dtype
from jprm.model.mesh import put, sharding
from jprm.model.transformer import AXES


def model_config(path: str | os.PathLike, **changes) -> ModelConfig:
    """The model's hyper-parameters; `changes` set what the files do not say (head, dtype, layers, ...)."""
    return _format(path).model_config(path, **changes)


def load_decoder(path: str | os.PathLike, config: ModelConfig, dtype: Dtype = "float32") -> dict:
    """The decoder's parameters, held in `dtype`, each put in its place on the mesh that is set.

    Training takes float32; bfloat16 and int8 (`jprm.model.int8`) are for scoring.
    """
    return _format(path).load_decoder(path, config, dtype)


def load_language_head(path: str | os.PathLike, config: ModelConfig) -> dict:
    """The language head's parameters in float32, {"kernel": (D, V)}, of a model whose head is not tied.

    They are put in their place on the mesh that is set.
    """
    if pathlib.Path(path).is_dir():
        from jprm.checkpoints import run
        from jprm.checkpoints.safetensors import Tensors

        if run.is_run(path):
            return run.load_language_head(path)

        file, name = Tensors(path), "lm_head.weight"
    else:
        from jprm.checkpoints.gguf import Reader

        file, name = Reader(path), "output.weight"
    if name not in file or tuple(file.shape(name)) != (config.vocab_size, config.width):
        raise ValueError(
            f"{path}: has no tensor {name} of shape {(config.vocab_size, config.width)}: no language model"
        )
    place = jax.NamedSharding(jax.sharding.get_mesh(), sharding(*AXES["kernel"]))
    return {"kernel": put(np.asarray(file.tensor(name).T, np.float32), place)}


def _format(path: str | os.PathLike) -> ModuleType:
    path = pathlib.Path(path)
    if path.is_dir():
        from jprm.checkpoints import huggingface, peft, run

        if run.is_run(path):
            return run
        if peft.is_adapter(path):
            return peft
        return huggingface
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder; a base is a GGUF file or a Hugging Face folder")
    if path.suffix != ".gguf":
        raise ValueError(f"{path}: not a .gguf file. Of a Hugging Face model give the folder that holds config.json")
    from jprm.checkpoints import gguf

    return gguf
