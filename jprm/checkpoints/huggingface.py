"""Base models from Hugging Face folders: config.json beside safetensors files. No code of the folder is run.

Llama (and SmolLM2), Mistral, Qwen2 and Qwen3. What would change the numbers is supported or refused by its name: a
field of config.json that this module does not know is an error.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
from typing import Any

import numpy as np

from jprm.checkpoints import decoder
from jprm.checkpoints.safetensors import Tensors, read_json
from jprm.model.config import ModelConfig
from jprm.model.rope import RopeScaling

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

NAMES = {
    "embed": "embed_tokens.weight", "final_norm": "norm.weight", "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight", "key": "self_attn.k_proj.weight", "value": "self_attn.v_proj.weight",
    "out": "self_attn.o_proj.weight", "mlp_norm": "post_attention_layernorm.weight", "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight", "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias", "value_bias": "self_attn.v_proj.bias",
    "query_norm": "self_attn.q_norm.weight", "key_norm": "self_attn.k_norm.weight",
}  # fmt: skip
"""Role to name; those of a layer follow layers.LAYER."""

HEADS = re.compile(r"lm_head\.|score\.|v_head\.|classifier\.")
"""Tensors that are not the decoder's: of a language, classification or value head."""

_IDLE = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq|rotary_emb\.inv_freq")
"""Frequencies that old versions of transformers saved and new ones compute, as jprm does."""

FIXED: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "attention_bias": (False,),  # transformers then gives the output projection a bias too
    "rope_interleaved": (False,),
    "partial_rotary_factor": (None, 1.0),
    "is_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "quantization_config": (None,),
    "per_layer_config": (None,),
    "is_decoder": (True, False),  # a decoder by its architecture, whatever this says
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": (None, {}),
}
"""Fields that must have one of these values where they are there."""

READ = {
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
    "tie_word_embeddings", "max_position_embeddings", "sliding_window", "use_sliding_window", "layer_types",
}  # fmt: skip

HARMLESS = {
    # what made the file, and in which type its tensors are (each says so itself)
    "_name_or_path", "architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "is_llama_config",
    "transformers.js_config", "_attn_implementation_autoset", "_commit_hash",
    # training and generation; PEFT and tensor-parallel slicing, which add the same numbers
    "initializer_range", "attention_dropout", "classifier_dropout", "hidden_dropout", "pretraining_tp", "use_cache",
    "return_dict", "output_attentions", "output_hidden_states", "keys_to_ignore_at_inference",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
    # heads
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
    # which layers would slide if any did
    "max_window_layers",
}  # fmt: skip
"""Fields known not to change the decoder's numbers."""

_ROPE = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "beta_fast", "beta_slow", "attention_factor", "original_max_position_embeddings", "truncate"},
}
"""Kinds of RoPE scaling and the fields that each may have."""


def model_config(folder: str | os.PathLike, *, max_tokens: int | None = None, **changes) -> ModelConfig:
    """The folder's hyper-parameters; `changes` set what it does not say (head, dtype, layers, ...).

    `layers` smaller than the folder's keeps its first layers only. `max_tokens`, a caller's promise that no chain is
    longer, lets a sliding window pass that is not shorter.

    Raises FileNotFoundError or ValueError, naming file and field, for what is not supported or not known.
    """
    path = pathlib.Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there; {folder} is not a model's folder")
    values = _values(_Fields(path, read_json(path)), max_tokens)
    decoder.check_layers(folder, values["layers"], changes)
    return ModelConfig(**(values | changes))


def load_decoder(folder: str | os.PathLike, config: ModelConfig, *, max_tokens: int | None = None) -> dict:
    """The decoder's parameters in float32, each put in its place on the mesh that is set; heads are left alone.

    Every name and shape is checked before the first tensor is read.
    """
    decoder.check(folder, model_config(folder, max_tokens=max_tokens, layers=config.layers), config)
    file = Tensors(folder)
    prefix = "" if NAMES["embed"] in file else "model."
    for name in file:
        inner = name.removeprefix(prefix)
        if not (HEADS.match(inner) or _IDLE.fullmatch(inner) or _known(inner, config)):
            raise ValueError(f"{folder}: tensor {name} is one that jprm does not know, of a model with another design")

    def read(role: str, name: str) -> np.ndarray:
        array = file.tensor(name)
        if array.dtype.kind in "iub":
            raise ValueError(f"{folder}: tensor {name} is of type {array.dtype}, and not of floating point")
        return array

    return decoder.load(folder, config, lambda role, layer: prefix + name_of(role, layer), file.shape, read)


def name_of(role: str, layer: int | None) -> str:
    """The tensor's name below `model.`"""
    return NAMES[role] if layer is None else f"layers.{layer}.{NAMES[role]}"


def _known(name: str, config: ModelConfig) -> bool:
    roles = decoder.file_shapes(config)
    layered = re.sub(r"^layers\.\d+\.", "", name)
    return any(NAMES[role] == layered and (layered == name) == (role in ("embed", "final_norm")) for role in roles)


class _Fields:
    """The fields of config.json, each checked for its type when it is asked for."""

    def __init__(self, path: pathlib.Path, fields: dict[str, Any], inside: str = ""):
        self.path, self.fields, self.inside = path, fields, inside

    def refuse(self, name: str, reason: str) -> ValueError:
        return ValueError(f"{self.path}: {self.inside}{name} {reason}")

    def has(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def count(self, name: str, default: int | None = None) -> int:
        value = self.fields.get(name) if self.has(name) else default
        if value is None:
            raise self.refuse(name, "is missing")
        if type(value) is not int or not 0 < value < 2**31:
            raise self.refuse(name, f"is {value!r}, and not a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.fields.get(name) if self.has(name) else default
        if value is None:
            raise self.refuse(name, "is missing")
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.refuse(name, f"is {value!r}, and not a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.fields.get(name) if self.has(name) else default
        if type(value) is not bool:
            raise self.refuse(name, f"is {value!r}, and neither true nor false")
        return value


def _values(fields: _Fields, max_tokens: int | None) -> dict[str, Any]:
    family = fields.fields.get("model_type")
    if family not in FAMILIES:
        raise fields.refuse("model_type", f"{family!r} is not supported; one of {', '.join(FAMILIES)} is")
    for name, value in fields.fields.items():
        if name in FIXED and value not in FIXED[name]:
            raise fields.refuse(name, f"{value!r} is not supported; only {json.dumps(FIXED[name][0])} is")
        if name not in READ and name not in HARMLESS and name not in FIXED:
            raise fields.refuse(name, f"({str(value)[:60]!r}) is not known to jprm; it might change scores")
    _refuse_window(fields, family, max_tokens)
    heads, width = fields.count("num_attention_heads"), fields.count("hidden_size")
    if not fields.has("head_dim") and (family == "qwen3" or width % heads):
        raise fields.refuse("head_dim", "is missing")
    grouped = fields.count("num_key_value_heads", heads if family == "llama" else None)
    if heads % grouped:
        raise fields.refuse("num_key_value_heads", f"{grouped} does not divide num_attention_heads {heads}")
    head_dim = fields.count("head_dim", width // heads)
    if head_dim % 2:
        raise fields.refuse("head_dim", f"{head_dim} is odd; rotary embeddings rotate pairs")
    theta, scaling = _rope(fields)
    return dict(
        vocab_size=fields.count("vocab_size"),
        layers=fields.count("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=grouped,
        head_dim=head_dim,
        mlp_width=fields.count("intermediate_size"),
        rope_theta=theta,
        norm_eps=fields.number("rms_norm_eps"),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        rope_scaling=scaling,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _refuse_window(fields: _Fields, family: str, max_tokens: int | None) -> None:
    """Mistral's window slides unless it is null, Qwen's only where `use_sliding_window` says so; Llama has none."""
    kinds = fields.fields.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        slides = isinstance(kinds, list) and set(map(str, kinds)) <= {"full_attention", "sliding_attention"}
        if not slides or not fields.has("sliding_window"):
            raise fields.refuse("layer_types", f"{str(kinds)[:80]} is not supported; only full_attention is")
    elif family == "llama" or not fields.has("sliding_window"):
        return
    elif family != "mistral" and not fields.flag("use_sliding_window", False):
        return
    window = fields.count("sliding_window")
    longest = max_tokens or fields.count("max_position_embeddings", 2**31 - 1)
    if window < longest:
        raise fields.refuse(
            "sliding_window",
            f"{window} is not supported where chains may have {longest} tokens. Where yours are never longer than the"
            " window, set it to null in a copy of config.json",
        )


def _rope(fields: _Fields) -> tuple[float, RopeScaling]:
    """Theta and scaling: `rope_parameters` as transformers 5 writes them, `rope_scaling` and `rope_theta` as 4 did."""
    key = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    if fields.has("rope_parameters") and fields.has("rope_scaling"):
        raise fields.refuse("rope_scaling", "is there beside rope_parameters; keep one of them")
    content = fields.fields.get(key) or {}
    if not isinstance(content, dict):
        raise fields.refuse(key, f"{str(content)[:60]!r} is not an object")
    inner = _Fields(fields.path, content, f"{key}.")
    theta = inner.number("rope_theta", fields.number("rope_theta", 10000.0))
    if theta <= 1:
        raise fields.refuse("rope_theta", f"is {theta}, and must be above 1")
    kind = content.get("rope_type", content.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE:
        raise inner.refuse("rope_type", f"{kind!r} is not supported; one of {', '.join(_ROPE)} is")
    for name, value in content.items():
        if name == "partial_rotary_factor" and value == 1:
            continue
        if name not in {"rope_type", "type", "rope_theta"} | _ROPE[kind] and value is not None:
            raise inner.refuse(name, f"is not supported with rope_type {kind}")
    if kind == "default":
        return theta, RopeScaling()
    factor = inner.number("factor")
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    positions = inner.count("original_max_position_embeddings", fields.fields.get("max_position_embeddings"))
    if kind == "llama3":
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        scaling = dict(low=low, high=high)
    else:
        scaling = dict(
            low=inner.number("beta_slow", 1.0),
            high=inner.number("beta_fast", 32.0),
            attention_factor=inner.number("attention_factor", 0.1 * math.log(factor) + 1 if factor > 1 else 1.0),
            truncate=inner.flag("truncate", True),
        )
    try:
        return theta, RopeScaling(kind, factor, positions, **scaling)
    except ValueError as error:
        raise inner.refuse("", str(error)) from error
