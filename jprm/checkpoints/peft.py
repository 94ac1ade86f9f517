"""Adapters in PEFT's format: adapter_config.json beside adapter_model.safetensors. No code of the folder is run.

A folder with adapters may stand wherever a base model does: its own base is loaded, from the folder that
`base_model_name_or_path` names, and the adapters are merged into it. What would change the numbers is supported or
refused by its name: a field of adapter_config.json that this module does not know is an error.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jprm.checkpoints import base, decoder
from jprm.checkpoints.huggingface import NAMES, name_of
from jprm.checkpoints.safetensors import Tensors, read_json
from jprm.model import lora
from jprm.model.config import ModelConfig
from jprm.model.int8 import Dtype, held_decoder
from jprm.model.lora import PRODUCTS, A, B, LoraConfig
from jprm.model.mesh import put, sharding

CONFIG, FILE, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"

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
"""Fields that must have one of these values where they are there."""

HARMLESS = {
    # the tensors of the file say themselves which matrices of which layers have an adapter
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "lora_dropout",  # acts in PEFT's own training alone, never when a model scores
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "runtime_config", "megatron_core",
    "qalora_group_size",
}  # fmt: skip

HEADS = ("score", "classifier")
"""Modules that may be saved whole: a classifier's head, which is not the decoder's."""

_ROLES = {NAMES[role].removesuffix(".weight"): role for role in PRODUCTS}
_TENSOR = re.compile(r"base_model\.model\.(?:model\.)?layers\.(\d+)\.(.+)\.lora_([AB])\.weight")
_HEAD = re.compile(rf"base_model\.model\.({'|'.join(HEADS)})\.(weight|bias)")


def is_adapter(path: str | os.PathLike) -> bool:
    return (pathlib.Path(path) / CONFIG).is_file()


def model_config(folder: str | os.PathLike, **changes) -> ModelConfig:
    """The hyper-parameters of the base model that the adapters are for."""
    return base.model_config(_base_of(folder), **changes)


def load_decoder(folder: str | os.PathLike, config: ModelConfig, dtype: Dtype = "float32") -> dict:
    """The base model's decoder with the adapters merged, held in `dtype`, each parameter in its place on the mesh.

    Layers that `config` leaves out are left out here too. Raises ValueError or FileNotFoundError, naming file and
    field or tensor, before the base is read.
    """
    kind = read_config(folder)
    adapters = read_adapters(folder, config, kind.rank)
    plain = base.load_decoder(_base_of(folder), config)
    for path, array in adapters.items():
        _, group, name = path.split("/")
        a_axes, b_axes = lora.axes(name.removesuffix(A).removesuffix(B))
        plain[group][name] = _place(array, a_axes if name.endswith(A) else b_axes)
    merged = lora.merge({"decoder": plain}, kind)["decoder"]  # float32, whatever it is held in then
    return merged if dtype == "float32" else held_decoder(merged, dtype)


def check_fields(path: pathlib.Path, fields: Mapping) -> None:
    """Raises ValueError naming the first field of an adapter_config.json that jprm does not support or know."""
    if fields.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type {fields.get('peft_type')!r} is not supported; only LORA is")
    for name, value in fields.items():
        if name in FIXED and value not in FIXED[name]:
            raise ValueError(f"{path}: {name} {value!r} is not supported; only {json.dumps(FIXED[name][0])} is")
        if name not in READ and name not in HARMLESS and name not in FIXED:
            raise ValueError(f"{path}: {name} ({str(value)[:60]!r}) is not known to jprm; it might change scores")


def read_config(folder: str | os.PathLike) -> LoraConfig:
    """Rank and scale. Raises ValueError naming the field that is not supported or not known."""
    path = pathlib.Path(folder) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there; {folder} is not a folder of adapters")
    fields = read_json(path)
    check_fields(path, fields)
    saved = fields.get("modules_to_save") or []
    if not isinstance(saved, list) or set(map(str, saved)) - set(HEADS):
        raise ValueError(f"{path}: modules_to_save {str(saved)[:80]} is not supported; only {', '.join(HEADS)} are")
    rank, alpha, rslora = fields.get("r"), fields.get("lora_alpha"), fields.get("use_rslora", False)
    if type(rank) is not int or not 0 < rank < 2**31:
        raise ValueError(f"{path}: r is {rank!r}, and not a positive integer")
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise ValueError(f"{path}: lora_alpha is {alpha!r}, and not a positive number")
    if type(rslora) is not bool:
        raise ValueError(f"{path}: use_rslora is {rslora!r}, and neither true nor false")
    return LoraConfig(rank, float(alpha), rslora=rslora)


def read_adapters(folder: str | os.PathLike, config: ModelConfig, rank: int) -> dict[str, np.ndarray]:
    """Adapters as a flat dict {path: array}, in float32, stacked by layer; zero where a layer of a stack has none.

    Every name and shape is checked before the first tensor is read.
    """
    file = Tensors(_file(folder))
    found: dict[tuple[str, int], dict[str, str]] = {}
    for name in file:
        match = _TENSOR.fullmatch(name)
        if match and match[2] in _ROLES:
            if int(match[1]) < config.layers:
                found.setdefault((_ROLES[match[2]], int(match[1])), {})[match[3]] = name
        elif not _HEAD.fullmatch(name):
            raise ValueError(f"{file.path}: tensor {name} is one that jprm does not know, or of no matrix of a layer")
    if not found:
        raise ValueError(f"{file.path}: holds no adapter of the model's {config.layers} layers")
    for (role, layer), pair in found.items():
        outs, ins = decoder.file_shapes(config)[role]
        for letter, wanted in (("A", (rank, ins)), ("B", (outs, rank))):
            if letter not in pair:
                raise ValueError(f"{file.path}: layer {layer} has a lora_{'BA'[letter == 'B']} of {role} alone")
            if file.shape(pair[letter]) != wanted:
                shape = file.shape(pair[letter])
                raise ValueError(f"{file.path}: tensor {pair[letter]} is of shape {shape}, not {wanted}")
    adapters = {}
    for group, first, layers in _groups(config):
        for role in PRODUCTS:
            pairs = {i: found[role, first + i] for i in range(layers) if (role, first + i) in found}
            if not pairs:
                continue
            a, b = (np.zeros(shape, np.float32) for shape in lora.shapes(config, role, layers, rank))
            for i, pair in pairs.items():
                a[i] = file.tensor(pair["A"]).T.reshape(a.shape[1:])
                b[i] = file.tensor(pair["B"]).T.reshape(b.shape[1:])
            adapters |= {f"decoder/{group}/{role}{A}": a, f"decoder/{group}/{role}{B}": b}
    return adapters


def read_head(folder: str | os.PathLike) -> dict[str, np.ndarray] | None:
    """The linear head that was saved whole beside the adapters: kernel (D, C) and bias (C,), or None."""
    file = Tensors(_file(folder))
    names = {match[2]: name for name in file if (match := _HEAD.fullmatch(name))}
    if not names:
        return None
    kernel = file.tensor(names["weight"]).astype(np.float32).T
    bias = file.tensor(names["bias"]).astype(np.float32) if "bias" in names else np.zeros(kernel.shape[1], np.float32)
    return {"kernel": kernel, "bias": bias}


def config_json(config: LoraConfig, base_folder: str, targets: list[str]) -> dict[str, Any]:
    """What adapter_config.json says of adapters that jprm trained for a token classifier."""
    return {
        "peft_type": "LORA",
        "task_type": "TOKEN_CLS",
        "base_model_name_or_path": base_folder,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "use_rslora": config.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": targets,
        "modules_to_save": ["score"],
        "inference_mode": True,
    }


def tensors(params: Mapping, config: ModelConfig) -> dict[str, np.ndarray]:
    """The file's tensors, in float32: the adapters, a layer at a time, and the linear head."""
    arrays: dict[str, np.ndarray] = {}
    for group, first, layers in _groups(config):
        stack = params["decoder"][group]
        for role in (role for role in PRODUCTS if role + A in stack):
            a, b = np.asarray(stack[role + A]), np.asarray(stack[role + B])
            rank = a.shape[-1]
            for i in range(layers):
                name = f"base_model.model.model.{name_of(role, first + i, config).removesuffix('.weight')}"
                arrays[f"{name}.lora_A.weight"] = np.ascontiguousarray(a[i].reshape(-1, rank).T)
                arrays[f"{name}.lora_B.weight"] = np.ascontiguousarray(b[i].reshape(rank, -1).T)
    arrays["base_model.model.score.weight"] = np.ascontiguousarray(np.asarray(params["head"]["kernel"]).T)
    arrays["base_model.model.score.bias"] = np.asarray(params["head"]["bias"])
    return arrays


def targets(names: Sequence[str]) -> list[str]:
    """`target_modules`, which name the matrices of these tensors and no other: PEFT compares the ends of names."""
    return [f"layers.{match[1]}.{match[2]}" for name in names if (match := _TENSOR.fullmatch(name)) and match[3] == "A"]


def _groups(config: ModelConfig):
    """(name, first layer, layers) of each stack."""
    first = 0
    for i, layers in enumerate(config.layer_groups):
        yield f"layers_{i}", first, layers
        first += layers


def _place(array: np.ndarray, axes: tuple[str | None, ...]) -> jax.Array:
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jnp.asarray(array)
    return put(array, jax.sharding.NamedSharding(mesh, sharding(*axes)))


def _file(folder: str | os.PathLike) -> pathlib.Path:
    folder = pathlib.Path(folder)
    name = PICKLE if not (folder / FILE).is_file() and (folder / PICKLE).is_file() else FILE  # a pickle is refused
    return folder / name


def _base_of(folder: str | os.PathLike) -> pathlib.Path:
    path = pathlib.Path(folder) / CONFIG
    name = read_json(path).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{path}: base_model_name_or_path is {name!r}; set it to the folder of the base model")
    for place in (pathlib.Path(name), pathlib.Path(folder) / name):
        if place.exists():
            if is_adapter(place):
                raise ValueError(f"{path}: base_model_name_or_path {name} holds adapters too, and not a model")
            return place
    raise FileNotFoundError(
        f"{path}: base_model_name_or_path {name!r} is no folder here, and nothing is downloaded. Fetch that model and"
        " set the field to its folder"
    )
