"""The decoder that training, sampling and scoring start from: a GGUF file, a Hugging Face folder, a LoRA or a run."""

from __future__ import annotations

import os
from types import ModuleType

import jax
import numpy as np

from jprm.checkpoints import huggingface, peft, run
from jprm.checkpoints.kinds import kind_of
from jprm.checkpoints.safetensors import check_sums
from jprm.io.local_copy import local_copy
from jprm.model.config import ModelConfig
from jprm.model.int8 import Dtype
from jprm.model.mesh import put, spec
from jprm.model.transformer import AXES


def model_config(path: str | os.PathLike, **changes) -> ModelConfig:
    """Returns the model's hyper-parameters; `changes` set what the files do not hold (head, dtype, layers, ...)."""
    module, path = _opened(path)
    return module.model_config(path, **changes)


def load_decoder(path: str | os.PathLike, config: ModelConfig, dtype: Dtype = "float32", new: str = "") -> dict:
    """Returns the decoder's parameters, stored as `dtype`, each in its place on the mesh that is set.

    Training takes float32; bfloat16 and int8 (`jprm.model.int8`) are for scoring. Parameters that the files have no
    weights for are left out where the pattern `new` matches them.

    Raises:
      ValueError: names parameters without weights that `new` does not match; or the pattern, where it matches none.
    """
    module, path = _opened(path)
    if os.path.isdir(path):
        check_sums(path)
    return module.load_decoder(path, config, dtype, new=new)


def load_language_head(path: str | os.PathLike, config: ModelConfig) -> dict:
    """Returns the parameters of an untied language head, {"kernel": (D, V)} in float32, on the mesh that is set.

    Raises:
      ValueError: the model has no language head of the config's shape.
    """
    module, path = _opened(path)
    if module is run:
        return run.load_language_head(path)
    file, name = module.open_tensors(path), module.LANGUAGE_HEAD
    if name not in file or tuple(file.shape(name)) != (config.vocab_size, config.width):
        raise ValueError(
            f"{path}: has no tensor {name} of shape {(config.vocab_size, config.width)}: no language model"
        )
    place = jax.NamedSharding(jax.sharding.get_mesh(), spec(*AXES["kernel"]))
    return {"kernel": put(np.asarray(file.tensor(name).T, np.float32), place)}


def _opened(path: str | os.PathLike) -> tuple[ModuleType, str | os.PathLike]:
    """Returns the module of this package that reads the path, and the path or its copy on this machine."""
    if (kind := kind_of(path)) == "run":
        return run, path
    if kind == "gguf":
        from jprm.checkpoints import gguf  # a slow import

        return gguf, local_copy(path)
    return {"peft": peft, "huggingface": huggingface}[kind], local_copy(path)
