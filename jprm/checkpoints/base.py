"""The model that training starts from, by what the path is: a GGUF file, a Hugging Face folder, or PEFT's adapters."""

from __future__ import annotations

import os
import pathlib
from types import ModuleType

from jprm.model.config import ModelConfig
from jprm.model.int8 import Dtype


def model_config(path: str | os.PathLike, **changes) -> ModelConfig:
    """The model's hyper-parameters; `changes` set what the files do not say (head, dtype, layers, ...)."""
    return _format(path).model_config(path, **changes)


def load_decoder(path: str | os.PathLike, config: ModelConfig, dtype: Dtype = "float32") -> dict:
    """The decoder's parameters, held in `dtype`, each put in its place on the mesh that is set.

    Training takes float32; bfloat16 and int8 (`jprm.model.int8`) are for scoring.
    """
    return _format(path).load_decoder(path, config, dtype)


def _format(path: str | os.PathLike) -> ModuleType:
    path = pathlib.Path(path)
    if path.is_dir():
        from jprm.checkpoints import huggingface, peft

        if peft.is_adapter(path):
            return peft
        return huggingface
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder; a base is a GGUF file or a Hugging Face folder")
    if path.suffix != ".gguf":
        raise ValueError(f"{path}: not a .gguf file. Of a Hugging Face model give the folder that holds config.json")
    from jprm.checkpoints import gguf

    return gguf
