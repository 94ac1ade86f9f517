"""Base models from Hugging Face folders: config.json beside safetensors files. No code of the folder is run.

Llama (and SmolLM2), Mistral, Qwen2, Qwen3, Gemma 2 and Gemma 3; of a Gemma 3 that takes images the text is read. A
field that would change the numbers is supported or refused by name, and a field of config.json that this module does
not know is an error.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any, Protocol, cast

import numpy as np

from jprm.checkpoints import decoder
from jprm.checkpoints.safetensors import AGAIN, Tensors, check_sums, read_json
from jprm.model.config import MOST_LAYERS, ModelConfig, RopeScaling
from jprm.model.parameters import Dtype

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
GEMMA = ("gemma2", "gemma3_text")

NAMES = {
    "embed": "embed_tokens.weight", "final_norm": "norm.weight", "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight", "key": "self_attn.k_proj.weight", "value": "self_attn.v_proj.weight",
    "out": "self_attn.o_proj.weight", "mlp_norm": "post_attention_layernorm.weight", "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight", "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias", "value_bias": "self_attn.v_proj.bias",
    "query_norm": "self_attn.q_norm.weight", "key_norm": "self_attn.k_norm.weight",
}  # fmt: skip
"""Role to name; those of a layer follow layers.LAYER."""

GEMMA_NAMES = NAMES | {
    "attention_post_norm": "post_attention_layernorm.weight", "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}  # fmt: skip

open_tensors, LANGUAGE_HEAD = Tensors, "lm_head.weight"

HEADS = re.compile(r"(pretrained_model\.)?(lm_head|score|score_head|v_head|classifier)\.")
"""Tensors of a language, classification or value head, which are not the decoder's."""

_IDLE = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq|rotary_emb\.inv_freq")
"""Frequencies that old versions of transformers saved and new ones compute, as jprm does."""

_IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.|language_model\.lm_head\.")
"""Tensors of a multimodal Gemma 3 that its text does not go through, and its head, which is tied."""

MULTIMODAL = "gemma3"
TEXT_DEFAULTS = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072, "query_pre_attn_scalar": 256, "sliding_window": 4096, "rope_theta": 1e6,
}  # fmt: skip
"""What a `text_config` leaves out where it is the default of transformers' Gemma3TextConfig; the 4B model's does."""

FIXED: dict[str, tuple] = {
    "mlp_bias": (False,),
    "attention_bias": (False,),  # transformers then gives the output projection a bias too
    "rope_interleaved": (False,),
    "use_mrope": (False,),  # Qwen2.5 bases say so; rotary positions of images and time
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
    "tie_word_embeddings", "max_position_embeddings", "sliding_window", "use_sliding_window", "max_window_layers",
    "layer_types", "hidden_act",
}  # fmt: skip

READ_OF_GEMMA = READ - {"use_sliding_window", "max_window_layers"} | {
    "hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern", "use_bidirectional_attention",
    "cache_implementation",
}  # fmt: skip

HARMLESS = {
    # what made the file, and in which type its tensors are (each says so itself)
    "_name_or_path", "_model_name_or_path", "model_name_or_path", "architectures", "auto_map", "torch_dtype", "dtype",
    "transformers_version", "is_llama_config",
    "transformers.js_config", "_attn_implementation_autoset", "_commit_hash",
    # training and generation; PEFT and tensor-parallel slicing, which add the same numbers
    "initializer_range", "attention_dropout", "classifier_dropout", "hidden_dropout", "pretraining_tp", "use_cache",
    "return_dict", "output_attentions", "output_hidden_states", "keys_to_ignore_at_inference",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
    # heads
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
    "score_dimension", "score_dim", "use_bias", "bias", "summary_dropout_prob", "pooling_mode",
}  # fmt: skip
"""Fields known not to change the decoder's numbers."""

_ROPE = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "beta_fast", "beta_slow", "attention_factor", "original_max_position_embeddings", "truncate"},
}
"""Kinds of RoPE scaling and the fields that each may have."""


class Readable(Protocol):
    """The tensors of a checkpoint by name: `Tensors`, or `Merged` of a LoRA."""

    def __iter__(self) -> Iterator[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> np.ndarray: ...


def model_config(folder: str | os.PathLike, **changes) -> ModelConfig:
    """Returns the folder's hyper-parameters; `changes` set what it does not hold (head, dtype, layers, ...).

    A number of `layers` below the folder's keeps the first layers.

    Raises FileNotFoundError or ValueError, naming file and field, for what is not supported or not known.
    """
    path = pathlib.Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there; {folder} is not a model's folder")
    values = _values(_text_fields(path))
    decoder.check_layers(folder, values["layers"], changes)
    return ModelConfig(**(values | changes))


def load_decoder(
    folder: str | os.PathLike, config: ModelConfig, dtype: Dtype = "float32", file: Readable | None = None, *,
    new: str = "",
) -> dict:  # fmt: skip
    """Returns the decoder's parameters, stored as `dtype`, each in its place on the mesh that is set.

    `file` is the folder's tensors where they are open already, or changed by a LoRA. Every name and shape is checked
    before the first tensor is read.
    """
    if file is None:
        check_sums(folder)
    decoder.check(folder, model_config(folder, layers=config.layers), config)
    layers = model_config(folder).layers
    file = Tensors(folder) if file is None else file
    embeds = [name for name in file if name.endswith(NAMES["embed"])]
    prefix = embeds[0].removesuffix(NAMES["embed"]) if embeds else "model."
    for name in file:
        inner = name.removeprefix(prefix)
        if not (HEADS.match(inner) or _IDLE.fullmatch(inner) or _known(inner, config)):
            if not _IMAGES.match(name):
                raise ValueError(
                    f"{folder}: tensor {name} is one that jprm does not know, of a model with another design"
                )
        layer = re.match(r"layers\.(\d+)\.", inner)
        if layer and int(layer[1]) >= layers:
            raise ValueError(f"{folder}: tensor {name} is there, and num_hidden_layers is {layers}. {AGAIN}")

    def read(role: str, name: str) -> np.ndarray:
        array = file.tensor(name)
        if array.dtype.kind in "iub":
            raise ValueError(f"{folder}: tensor {name} is of type {array.dtype}, and not of floating point")
        return array

    def name_in_file(role: str, layer: int | None) -> str:
        return prefix + name_of(role, layer, config)

    return decoder.load(folder, config, name_in_file, file.shape, read, dtype, new)


def name_of(role: str, layer: int | None, config: ModelConfig) -> str:
    """Returns the tensor's name below `model.`"""
    name = (GEMMA_NAMES if config.design == "gemma" else NAMES)[role]
    return name if layer is None else f"layers.{layer}.{name}"


def _known(name: str, config: ModelConfig) -> bool:
    roles = decoder.file_shapes(config)
    layered = re.sub(r"^layers\.\d+\.", "", name)
    outer = layered == name
    return any(name_of(role, None, config) == layered and outer == (role in ("embed", "final_norm")) for role in roles)


class _Fields:
    """The fields of config.json, each checked for its type when it is read."""

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

    def cap(self, name: str, default: float | None) -> float:
        """Returns 0 where the field is null, and the default where it is absent."""
        default = None if name in self.fields else default
        return self.number(name, default) if self.has(name) or default else 0.0

    def flag(self, name: str, default: bool) -> bool:
        value = self.fields.get(name) if self.has(name) else default
        if type(value) is not bool:
            raise self.refuse(name, f"is {value!r}, and neither true nor false")
        return value


def _text_fields(path: pathlib.Path) -> _Fields:
    """Returns the fields of config.json; of a model that also takes images those of its text."""
    content = read_json(path)
    text = content.get("text_config")
    if content.get("model_type") != MULTIMODAL or not isinstance(text, dict):
        return _Fields(path, content)
    defaults = {
        key: value for key, value in TEXT_DEFAULTS.items() if key != "rope_theta" or "rope_parameters" not in text
    }
    return _Fields(path, {**defaults, "tie_word_embeddings": True, **text, "model_type": "gemma3_text"}, "text_config.")


def _values(fields: _Fields) -> dict[str, Any]:
    family = fields.fields.get("model_type")
    if family not in FAMILIES:
        raise fields.refuse("model_type", f"{family!r} is not supported; one of {', '.join(FAMILIES)} is")
    gemma = family in GEMMA
    activation = "gelu_pytorch_tanh" if gemma else "silu"
    fixed = FIXED | {"hidden_act": (activation,), "hidden_activation": (activation,)}
    fixed |= {"use_bidirectional_attention": (False, None)}
    for name, value in fields.fields.items():
        if name not in (READ_OF_GEMMA if gemma else READ) | HARMLESS | set(FIXED):
            raise fields.refuse(name, f"({str(value)[:60]!r}) is not known to jprm; it might change scores")
        if name in fixed and value not in fixed[name]:
            raise fields.refuse(name, f"{value!r} is not supported; only {json.dumps(fixed[name][0])} is")
    heads, width, layers = (fields.count(name) for name in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    if layers > MOST_LAYERS:
        raise fields.refuse("num_hidden_layers", f"is {layers:,}, and at most {MOST_LAYERS:,} are supported")
    if not fields.has("head_dim") and (gemma or family == "qwen3" or width % heads):
        raise fields.refuse("head_dim", "is missing")
    grouped = fields.count("num_key_value_heads", heads if family == "llama" else None)
    if heads % grouped:
        raise fields.refuse("num_key_value_heads", f"{grouped} does not divide num_attention_heads {heads}")
    head_dim = fields.count("head_dim", width // heads)
    if head_dim % 2:
        raise fields.refuse("head_dim", f"{head_dim} is odd; rotary embeddings rotate pairs")
    windows = _windows(fields, family, layers)
    values = dict(
        vocab_size=fields.count("vocab_size"),
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=grouped,
        head_dim=head_dim,
        mlp_width=fields.count("intermediate_size"),
        norm_eps=fields.number("rms_norm_eps"),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "gemma3_text"),
        windows=windows,
        tied_embeddings=fields.flag("tie_word_embeddings", gemma),
    )
    if not gemma:
        theta, scaling = _rope(fields)
        return values | dict(rope_theta=theta, rope_scaling=scaling)
    caps = (50.0, 30.0) if family == "gemma2" else (None, None)  # of transformers' classes, where nothing is said
    values |= dict(
        design="gemma",
        query_pre_attn_scalar=fields.count("query_pre_attn_scalar", 256),
        attention_softcap=fields.cap("attn_logit_softcapping", caps[0]),
        logit_softcap=fields.cap("final_logit_softcapping", caps[1]),
    )
    if family == "gemma2":
        theta, scaling = _rope(fields)
        return values | dict(rope_theta=theta, rope_scaling=scaling)
    theta, scaling, local = _two_ropes(fields)
    return values | dict(rope_theta=theta, rope_scaling=scaling, rope_theta_local=local if any(windows) else 0.0)


def _windows(fields: _Fields, family: str, layers: int) -> tuple[int, ...]:
    """Returns the window of every layer, 0 for none.

    Llama has none; Mistral's slides in all layers unless it is null; Qwen's only where `use_sliding_window` says so, in
    the layers that `layer_types` names or those from `max_window_layers` on; Gemma's in all but every second (Gemma 2)
    or sixth layer (Gemma 3), or in those that `layer_types` names.
    """
    kinds, gemma, mistral = fields.fields.get("layer_types"), family in GEMMA, family == "mistral"
    names = ("full_attention", "sliding_attention")
    if kinds is not None and not (isinstance(kinds, list) and all(kind in names for kind in kinds)):
        raise fields.refuse("layer_types", f"{str(kinds)[:80]} is not supported; only {' and '.join(names)} are")
    if kinds is not None and len(kinds) != layers:
        raise fields.refuse("layer_types", f"names {len(kinds)} layers, and num_hidden_layers is {layers}")
    window = 0
    if "sliding_window" not in fields.fields and (gemma or mistral):
        window = 4096  # transformers' default
    elif family != "llama" and fields.has("sliding_window"):
        window = fields.count("sliding_window")
    if family in ("qwen2", "qwen3") and not fields.flag("use_sliding_window", False):
        window = 0
    if kinds is None:
        if family in ("qwen2", "qwen3"):
            first = fields.count("max_window_layers", 28) if window else 0
            kinds = [names[i >= first] for i in range(layers)]
        else:
            every = 2 if family == "gemma2" else _pattern(fields) if gemma else 0
            kinds = [names[not gemma or (i + 1) % every > 0] for i in range(layers)]
    elif mistral and window and names[0] in kinds:
        raise fields.refuse("layer_types", f"has {names[0]}, though a window slides in all layers of a {family} model")
    elif names[1] in kinds and not window:
        raise fields.refuse("layer_types", f"has {names[1]}, and there is no sliding_window that slides")
    return tuple(window if kind == names[1] else 0 for kind in kinds)


def _pattern(fields: _Fields) -> int:
    """Returns every how many layers of Gemma 3 one has no window."""
    name = "_sliding_window_pattern" if fields.has("_sliding_window_pattern") else "sliding_window_pattern"
    return fields.count(name, 6)


def _two_ropes(fields: _Fields) -> tuple[float, RopeScaling, float]:
    """Returns Gemma 3's theta and scaling of layers without a window, and the unscaled theta of those with one."""
    content = fields.fields.get("rope_parameters")
    if content is None:
        theta, scaling = _rope(fields, 1e6)
        return theta, scaling, fields.number("rope_local_base_freq", 1e4)
    parts = {}
    for kind in ("full_attention", "sliding_attention"):
        part = content.get(kind) if isinstance(content, dict) else None
        if not isinstance(part, dict) or set(content) != {"full_attention", "sliding_attention"}:
            raise fields.refuse("rope_parameters", "is not an object of full_attention and sliding_attention")
        parts[kind] = _rope(_Fields(fields.path, {"rope_parameters": part}, f"rope_parameters.{kind}: "))
    theta_local, local = parts["sliding_attention"]
    if local.kind != "none":
        raise fields.refuse("rope_parameters.sliding_attention", f"of rope_type {local.kind} is not supported")
    return *parts["full_attention"], theta_local


def _rope(fields: _Fields, default: float = 10000.0) -> tuple[float, RopeScaling]:
    """Returns theta and scaling, from transformers 5's `rope_parameters` or 4's `rope_scaling` and `rope_theta`."""
    key = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    if fields.has("rope_parameters") and fields.has("rope_scaling"):
        raise fields.refuse("rope_scaling", "is there beside rope_parameters; keep one of them")
    content = fields.fields.get(key) or {}
    if not isinstance(content, dict):
        raise fields.refuse(key, f"{str(content)[:60]!r} is not an object")
    inner = _Fields(fields.path, content, f"{key}.")
    theta = inner.number("rope_theta", fields.number("rope_theta", default))
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
        scaling: dict[str, Any] = dict(low=low, high=high)
    else:
        scaling = dict(
            low=inner.number("beta_slow", 1.0),
            high=inner.number("beta_fast", 32.0),
            attention_factor=inner.number("attention_factor", 0.1 * math.log(factor) + 1 if factor > 1 else 1.0),
            truncate=inner.flag("truncate", True),
        )
    try:
        return theta, RopeScaling(cast(Any, kind), factor, positions, **scaling)
    except ValueError as error:
        raise inner.refuse("", str(error)) from error
