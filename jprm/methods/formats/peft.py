"""A LoRA in PEFT's format, merged into its base model tensor by tensor on reading (Hu et al. 2021).

`adapter_config.json` lies beside `adapter_model.safetensors`; no code from the folder is executed. Such a folder may be
given wherever a model's folder may. Each adapter_config.json field that could change the numbers is supported or
refused by name; an unknown field is an error.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterator

import numpy as np

from jprm.checkpoints.safetensors import Tensors, check_sums, read_json
from jprm.experiment import PEFT as CONFIG
from jprm.experiment import kind_of
from jprm.io.folders import local_copy
from jprm.io.storage import Given
from jprm.methods.formats import huggingface
from jprm.methods.formats.config_json import NAMES, Fields
from jprm.methods.formats.huggingface import LANGUAGE_HEAD as LANGUAGE_HEAD
from jprm.model.config import ModelConfig
from jprm.model.parameters import Dtype, LoraConfig
from jprm.options import place_of

FILE, PICKLE = "adapter_model.safetensors", "adapter_model.bin"

PREFIX = "base_model.model."
"""Prefix of the model's tensor names in the file."""

READ = {"peft_type", "r", "lora_alpha", "use_rslora", "base_model_name_or_path", "modules_to_save"}

FIXED: dict[str, tuple] = {
    "bias": ("none",),  # biases trained beside the adapters
    "fan_in_fan_out": (False,),
    "use_dora": (False,), "use_qalora": (False,), "use_bdlora": (None, False), "lora_bias": (False,),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),  # of others, some change the base's weights
    "rank_pattern": ({}, None), "alpha_pattern": ({}, None),
    "layer_replication": (None,), "trainable_token_indices": (None,), "target_parameters": (None, []),
    "alora_invocation_tokens": (None,), "megatron_config": (None,), "loftq_config": ({}, None),
    "corda_config": (None,), "eva_config": (None,), "lora_ga_config": (None,), "velora_config": (None,),
    "monteclora_config": (None,), "arrow_config": (None,), "kasa_config": (None,),
    "ensure_weight_tying": (False, None),
}  # fmt: skip
"""Fields and, if present, their supported values."""

HARMLESS = {
    # the tensors of the file say themselves which matrices of which layers have an adapter
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "lora_dropout",  # acts only in PEFT's own training, never when a model scores
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "runtime_config", "megatron_core",
    "qalora_group_size",
}  # fmt: skip


def model_config(folder: str | os.PathLike, **changes) -> ModelConfig:
    """Returns the base model's hyperparameters, with the LoRA's vocabulary size; `changes` replace fields.

    Raises FileNotFoundError if a file or the base's folder is missing, and ValueError if a field or tensor of LoRA or
    base is unsupported, unknown or damaged.
    """
    file = MergedTensors(folder)
    return huggingface.model_config(file.path, **(file.changes | changes))


def load_decoder(folder: str | os.PathLike, config: ModelConfig, dtype: Dtype = "float32", *, new: str = "") -> dict:
    """Loads the base model's decoder, with the LoRA merged in float32 and then stored as `dtype`, onto the mesh.

    Layers beyond those of `config` are omitted. All names and shapes are checked before any tensor is read. Returns a
    tree {"embed", "final_norm", "layers_0": {role: stack}, ...}. `new` is as in `huggingface.load_decoder`.

    Raises FileNotFoundError if a file or the base's folder is missing, and ValueError if a checksum, field or tensor
    does not fit.
    """
    check_sums(folder)
    file = MergedTensors(folder)
    return huggingface.load_decoder(file.path, config, dtype, file, new=new)


class MergedTensors:
    """Tensors of a model, W + scale B A if the LoRA has matrices A and B for it; same interface as `Tensors`.

    `path` is the model's folder. A whole tensor in the LoRA's folder (PEFT's `modules_to_save`) replaces the model's.
    An embedding among these may have more rows than the model's config, for added tokens; `changes` then has the
    vocabulary size.

    Raises:
      ValueError: the files are not a plain LoRA for the model. The message names file and field or tensor.
      FileNotFoundError: a file of the LoRA or the model is missing.
    """

    def __init__(self, folder: str | os.PathLike, base: Given = ""):
        folder = pathlib.Path(folder)
        config = read_config(folder)
        self.path, self._scale = base_of(folder, base), config.scale
        pickled = not (folder / FILE).is_file() and (folder / PICKLE).is_file()  # a pickle is refused by name
        self._base, self._lora = Tensors(self.path), Tensors(folder / (PICKLE if pickled else FILE))
        self._pairs: dict[str, tuple[str, str]] = {}  # the model's tensor to the names of A and B
        self._whole: dict[str, str] = {}
        for name in self._lora:
            inner = name.removeprefix(PREFIX)
            if pair := re.fullmatch(r"(.+)\.lora_[AB]\.(?:default\.)?weight", inner):
                down, up = (re.sub(r"\.lora_[AB]\.", f".lora_{letter}.", name) for letter in "AB")
                self._pairs[self._of_base(f"{pair[1]}.weight")] = down, up
            elif "lora_" in inner or not inner.endswith((".weight", ".bias")):
                raise ValueError(f"{self._lora.path}: tensor {name} is no part of a plain LoRA")
            else:
                self._whole[self._of_base(inner)] = name
        if not self._pairs:
            raise ValueError(f"{self._lora.path}: holds no matrices A and B of a LoRA")
        for name, names in self._pairs.items():
            self._check(name, names, config.rank)
        embed = next((name for name in self._whole if name.endswith(NAMES["embed"])), None)
        self.changes = {"vocab_size": self.shape(embed)[0]} if embed else {}

    def _of_base(self, name: str) -> str:
        """Returns a tensor's name in the model, which may lack the prefix `model.` in PEFT's name."""
        plain = name.removeprefix("model.")
        return plain if name not in self._base and plain in self._base else name

    def _check(self, name: str, pair: tuple[str, str], rank: int) -> None:
        for letter, other, tensor in zip("AB", "BA", pair, strict=True):
            if tensor not in self._lora:
                raise ValueError(f"{self._lora.path}: has lora_{other} of {name} and no lora_{letter}")
        if name not in self._base:
            raise ValueError(f"{self._lora.path}: changes {name}, which is not in {self.path}: it is of another model")
        rows, columns = self._base.shape(name)
        for tensor, wanted in zip(pair, ((rank, columns), (rows, rank)), strict=True):
            if (shape := self._lora.shape(tensor)) != wanted:
                raise ValueError(f"{self._lora.path}: tensor {tensor} is of shape {shape}, not {wanted}")

    def __iter__(self) -> Iterator[str]:
        yield from self._base
        yield from (name for name in self._whole if name not in self._base)

    def __contains__(self, name: str) -> bool:
        return name in self._base or name in self._whole

    def shape(self, name: str) -> tuple[int, ...]:
        return self._lora.shape(self._whole[name]) if name in self._whole else self._base.shape(name)

    def tensor(self, name: str) -> np.ndarray:
        """Returns the tensor, as float32 if the LoRA changes it, else in its file's type; ValueError if absent."""
        if name in self._whole:
            return self._lora.tensor(self._whole[name])
        array = self._base.tensor(name)
        if name not in self._pairs:
            return array
        down, up = (self._lora.tensor(x).astype(np.float32) for x in self._pairs[name])
        return array.astype(np.float32) + self._scale * (up @ down)


def open_tensors(folder: str | os.PathLike) -> huggingface.Readable:
    """Returns the merged tensors under Llama's names; data is read on access.

    Raises FileNotFoundError if a file or the base's folder is missing, and ValueError if the files are not a plain LoRA
    for the model.
    """
    file = MergedTensors(folder)
    return huggingface.arranged(file, file.path)


def read_config(folder: str | os.PathLike) -> LoraConfig:
    """Returns rank, alpha and kind of scale in adapter_config.json.

    Raises FileNotFoundError if the file is missing, and ValueError for an unsupported, unknown or missing field.
    """
    path = pathlib.Path(folder) / CONFIG
    fields = Fields(path, read_json(path))
    if fields.fields.get("peft_type") != "LORA":
        raise fields.refuse("peft_type", f"{fields.fields.get('peft_type')!r} is not supported; only LORA is")
    remedy = ". Merge the LoRA with PEFT's merge_and_unload and use what that saves"
    fields.check(READ | HARMLESS | set(FIXED), FIXED, remedy)
    return LoraConfig(fields.count("r"), fields.number("lora_alpha"), rslora=fields.flag("use_rslora", False))


def base_of(folder: str | os.PathLike, base: Given = "") -> pathlib.Path:
    """Returns the folder of the LoRA's base model: `base`, or the name in adapter_config.json.

    A relative name is looked up in the LoRA's folder, then in the working directory, and never downloaded; `base` may
    be in a bucket or on the Hub, and is downloaded.

    Raises FileNotFoundError if there is no such folder, ValueError if there is no name or the folder is no Hugging Face
    model's, and OSError if a download fails.
    """
    path = pathlib.Path(folder) / CONFIG
    name = os.fspath(local_copy(place_of(base))) if base else read_json(path).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{path}: base_model_name_or_path is {name!r}; set it to the folder of the base model")
    for place in (path.parent / name, pathlib.Path(name)):  # the first is `name` itself where that is absolute
        if place.is_dir() and (kind := kind_of(place)) != "huggingface":
            raise ValueError(f"{path}: base_model_name_or_path {name} is a {kind} folder, not a Hugging Face model's")
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"{path}: is a LoRA of {name!r}, which is no folder here, and is not downloaded unasked. Name that model in a"
        ' file for --adapter: {"like": RECORD, "base": FOLDER or "hf://OWNER/NAME@REVISION"}'
    )
