"""Base models in Hugging Face folders: config.json beside safetensors files. No code from the folder is executed.

Supports Llama (and SmolLM2), Mistral, Ministral 3, Qwen2, Qwen3, Qwen3-MoE, Qwen3-Next and Qwen3.5 (text), OLMo 3,
SmolLM3, Phi-3 and 4, Gemma 2 and Gemma 3 (of a multimodal Gemma 3, the text model). Each config.json field that could
change the numbers is supported or refused by name; an unknown field is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, cast

import numpy as np

from jprm.checkpoints import decoder
from jprm.checkpoints.safetensors import AGAIN, Tensors, check_sums, read_json
from jprm.model.config import MOST_LAYERS, DeltaNetConfig, ExpertsConfig, ModelConfig, RopeScaling
from jprm.model.parameters import Dtype

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "ministral3", "olmo3", "smollm3", "phi3",
    "qwen3_moe", "qwen3_next", "qwen3_5_text",
)  # fmt: skip
GEMMA = ("gemma2", "gemma3_text")
HYBRID = ("qwen3_next", "qwen3_5_text")
MISSING = {
    "gemma4_text": "embeddings by layer, and heads whose size differs between layers",
    "gpt_oss": "attention sinks, and biases of experts",
    "llama4_text": "attention in chunks, and experts of which a token uses one",
    "qwen3_5": "a tower for images: save its text model, Qwen3_5TextModel",
    "qwen3_5_moe_text": "a reader: its layers are those of qwen3_next, its tensors have other names",
}
"""Unsupported families, and the missing feature."""

NAMES = {
    "embed": "embed_tokens.weight", "final_norm": "norm.weight", "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight", "key": "self_attn.k_proj.weight", "value": "self_attn.v_proj.weight",
    "out": "self_attn.o_proj.weight", "mlp_norm": "post_attention_layernorm.weight", "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight", "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias", "value_bias": "self_attn.v_proj.bias",
    "query_norm": "self_attn.q_norm.weight", "key_norm": "self_attn.k_norm.weight",
    "query_width_norm": "self_attn.q_norm.weight", "key_width_norm": "self_attn.k_norm.weight",
    "attention_post_norm": "post_attention_layernorm.weight", "mlp_post_norm": "post_feedforward_layernorm.weight",
    "query_gate": "self_attn.gate_proj.weight", "router": "mlp.gate.weight",
    "delta_query": "linear_attn.q_proj.weight", "delta_key": "linear_attn.k_proj.weight",
    "delta_value": "linear_attn.v_proj.weight", "delta_gate": "linear_attn.in_proj_z.weight",
    "delta_rate": "linear_attn.in_proj_b.weight", "delta_decay": "linear_attn.in_proj_a.weight",
    "delta_query_conv": "linear_attn.q_conv.weight", "delta_key_conv": "linear_attn.k_conv.weight",
    "delta_value_conv": "linear_attn.v_conv.weight", "delta_log_decay": "linear_attn.A_log",
    "delta_decay_bias": "linear_attn.dt_bias", "delta_scale": "linear_attn.norm.weight",
    "delta_out": "linear_attn.out_proj.weight", "shared_mix": "mlp.shared_expert_gate.weight",
} | {
    f"{ours}_{role}": f"mlp.{theirs}.{role}_proj.weight"
    for ours, theirs in (("expert", "experts"), ("shared", "shared_expert")) for role in ("gate", "up", "down")
}  # fmt: skip
"""Tensor names by role; a layer's are prefixed by layers.LAYER."""

GEMMA_NAMES = NAMES | {"mlp_norm": "pre_feedforward_layernorm.weight"}

open_tensors, LANGUAGE_HEAD = Tensors, "lm_head.weight"

HEADS = re.compile(r"(pretrained_model\.)?(lm_head|score|score_head|v_head|classifier)\.")
"""Tensors of language, classification and value heads, which do not belong to the decoder."""

_IDLE = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Frequencies saved by old versions of transformers; new ones, like jprm, compute them."""

_IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.|language_model\.lm_head\.")
"""A multimodal Gemma 3's tensors unused for text, and its tied head."""

MULTIMODAL = "gemma3"
TEXT_DEFAULTS = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072, "query_pre_attn_scalar": 256, "sliding_window": 4096, "rope_theta": 1e6,
}  # fmt: skip
"""Defaults of transformers' Gemma3TextConfig, which a `text_config` may omit (the 4B model's does)."""

FIXED: dict[str, tuple] = {
    "mlp_bias": (False,),
    "attention_bias": (False,),  # transformers then gives the output projection a bias too
    "rope_interleaved": (False,),
    "use_mrope": (False,),  # in Qwen2.5 bases; rotary positions of images and time
    "partial_rotary_factor": (None, 1.0),
    "is_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "quantization_config": (None,),
    "per_layer_config": (None,),
    "is_decoder": (True, False),  # it is a decoder by its architecture in any case
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": (None, {}),
}
"""Fields and, if present, their supported values."""

SIZES = {
    "vocab_size": "vocab_size", "hidden_size": "width", "intermediate_size": "mlp_width", "num_hidden_layers": "layers",
    "num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "head_dim": "head_dim",
}  # fmt: skip
"""Fields in config.json and in `ModelConfig`; read here, and written by `jprm.methods.export`."""

DELTANET = {
    "linear_num_key_heads": "key_heads", "linear_num_value_heads": "value_heads", "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim", "linear_conv_kernel_dim": "conv",
}  # fmt: skip
"""The same for `DeltaNetConfig`."""

READ = {
    *SIZES, "model_type", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "tie_word_embeddings",
    "max_position_embeddings", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "hidden_act",
}  # fmt: skip

READ_OF_GEMMA = READ - {"use_sliding_window", "max_window_layers"} | {
    "hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern", "use_bidirectional_attention",
    "cache_implementation",
}  # fmt: skip

READ_OF = {
    "smollm3": {"no_rope_layers", "no_rope_layer_interval"},
    "phi3": {"original_max_position_embeddings", "resid_pdrop", "embd_pdrop"},
    "qwen3_moe": {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
                  "decoder_sparse_step", "mlp_only_layers", "output_router_logits", "router_aux_loss_coef"},
    "qwen3_5_text": {*DELTANET, "full_attention_interval", "mamba_ssm_dtype"},
}  # fmt: skip
"""Additional fields of these families."""

READ_OF["qwen3_next"] = READ_OF["qwen3_moe"] | READ_OF["qwen3_5_text"] | {"shared_expert_intermediate_size"}

HARMLESS = {
    # origin of the file, and its tensor type (which each tensor states itself)
    "_name_or_path", "_model_name_or_path", "model_name_or_path", "architectures", "auto_map", "torch_dtype", "dtype",
    "transformers_version", "is_llama_config",
    "transformers.js_config", "_attn_implementation_autoset", "_commit_hash",
    "unsloth_version", "unsloth_fixed", "model_name", "trl_version", "tokenizer_class", "prefix",
    # training and generation; PEFT and tensor-parallel slicing, which add the same numbers
    "initializer_range", "attention_dropout", "classifier_dropout", "hidden_dropout", "pretraining_tp", "use_cache",
    "return_dict", "output_attentions", "output_hidden_states", "keys_to_ignore_at_inference",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
    # how a language model is sampled, as transformers once wrote it into config.json
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens",
    # heads
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
    "score_dimension", "score_dim", "use_bias", "bias", "summary_dropout_prob", "pooling_mode",
}  # fmt: skip
"""Fields that do not affect the decoder's numbers."""

_ROPE = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "beta_fast", "beta_slow", "attention_factor", "original_max_position_embeddings", "truncate"},
}
"""Kinds of RoPE scaling, and their permitted fields."""


class Readable(Protocol):
    """Tensors of a checkpoint by name: `Tensors`, or `MergedTensors` for a LoRA."""

    def __iter__(self) -> Iterator[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> np.ndarray: ...


def model_config(folder: str | os.PathLike, **changes) -> ModelConfig:
    """Returns the folder's hyperparameters; `changes` set fields that it lacks (e.g. head, dtype, layers).

    If `layers` is smaller than the folder's number, the first layers are kept.

    Raises FileNotFoundError or ValueError, naming file and field, for an unsupported or unknown field.
    """
    path = pathlib.Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there; {folder} is not a model's folder")
    values = _values(_text_fields(path))
    files = tuple((str(file), file.stat().st_mtime_ns) for file in sorted(path.parent.glob("*.safetensors")))
    if values["tied_embeddings"] and files and _has_own_head(path.parent, files):
        values["tied_embeddings"] = False
    decoder.check_layers(folder, values["layers"], changes)
    return ModelConfig(**(values | changes))


@functools.lru_cache(64)
def _has_own_head(folder: pathlib.Path, files: tuple[tuple[str, int], ...]) -> bool:
    """Returns whether the files have a language head unlike the embedding. `files` are the cache key.

    Such a head is used despite `tie_word_embeddings`, as in transformers 5: the field may be left over from the base if
    the model was trained untied.
    """
    file = Tensors(folder)
    head, embed = (next((x for x in file if x.endswith(name)), "") for name in (LANGUAGE_HEAD, NAMES["embed"]))
    if not head or not embed:
        return False
    return file.shape(head) != file.shape(embed) or not np.array_equal(file.tensor(head), file.tensor(embed))


def load_decoder(
    folder: str | os.PathLike, config: ModelConfig, dtype: Dtype = "float32", file: Readable | None = None, *,
    new: str = "",
) -> dict:  # fmt: skip
    """Loads the decoder's parameters, stored as `dtype`, onto the mesh that is set.

    `file` provides the tensors if they are already open, or changed by a LoRA. Parameters missing in the files must
    match the pattern `new`, and are left out. All names and shapes are checked before any tensor is read.
    """
    if file is None:
        check_sums(folder)
    changes = {} if file is None else getattr(file, "changes", {})
    decoder.check(folder, model_config(folder, layers=config.layers, **changes), config)
    layers = model_config(folder).layers
    file = unfused(Tensors(folder) if file is None else file, config)
    embeds = [name for name in file if name.endswith(NAMES["embed"])]
    prefix = embeds[0].removesuffix(NAMES["embed"]) if embeds else "model."
    for name in file:
        inner = name.removeprefix(prefix)
        if not (HEADS.match(inner) or _IDLE.fullmatch(inner) or _known(inner, config) or _IMAGES.match(name)):
            raise ValueError(f"{folder}: tensor {name} is one that jprm does not know, of a model with another design")
        layer = re.match(r"layers\.(\d+)\.", inner)
        if layer and int(layer[1]) >= layers:
            raise ValueError(f"{folder}: tensor {name} exists, but num_hidden_layers is {layers}. {AGAIN}")

    def read(role: str, name: str) -> np.ndarray:
        array = file.tensor(name)
        if array.dtype.kind in "iub":
            raise ValueError(f"{folder}: tensor {name} has type {array.dtype}, not a floating-point type")
        return array

    return decoder.load(
        folder, config, lambda role, layer: prefix + name_of(role, layer, config), file.shape, read, dtype, new
    )


def name_of(role: str, layer: int | None, config: ModelConfig) -> str:
    """Returns the tensor's name below `model.`, e.g. `layers.0.self_attn.q_proj.weight`."""
    name = (GEMMA_NAMES if config.design == "gemma" else NAMES)[role]
    return name if layer is None else f"layers.{layer}.{name}"


# ------------------------------------------------------------------------------------------------------ fused tensors


@dataclasses.dataclass(frozen=True)
class Fused:
    """A tensor with several roles: rows of each in turn, `groups` times; or the tensors of all experts.

    parts: (name, rows per group). If `experts` is 0, the file tensor `name` contains the parts; otherwise the part
        stacks all experts' tensors, whose names are `name` with {} filled in. `squeezed`: the file has an extra axis of
        size 1 after the first (a convolution).
    """

    name: str
    parts: tuple[tuple[str, int], ...]
    groups: int = 1
    experts: int = 0
    squeezed: bool = False


def fusions(config: ModelConfig, phi: bool = False) -> list[Fused]:
    """Returns a layer's fused tensors in files of the model's family; `phi`: as in Phi-3."""
    rules = []
    H, heads, kv = config.head_dim, config.heads, config.kv_heads
    if phi:
        qkv = (NAMES["query"], heads * H), (NAMES["key"], kv * H), (NAMES["value"], kv * H)
        mlp = (NAMES["gate"], config.mlp_width), (NAMES["up"], config.mlp_width)
        rules += [Fused("self_attn.qkv_proj.weight", qkv), Fused("mlp.gate_up_proj.weight", mlp)]
    if config.attention_gate:
        rules.append(Fused(NAMES["query"], ((NAMES["query"], H), (NAMES["query_gate"], H)), heads))
    if "deltanet" in config.mixers:
        c = config.deltanet
        queries = c.value_heads // c.key_heads
        rows = {"query": c.key_dim, "key": c.key_dim, "value": queries * c.value_dim, "gate": queries * c.value_dim}
        qkv = ("query", "key", "value")
        conv = tuple((NAMES[f"delta_{role}_conv"], c.key_heads * rows[role]) for role in qkv)
        rules.append(Fused("linear_attn.conv1d.weight", conv, squeezed=True))
        if "experts" in config.mlps:  # Qwen3-Next: by key head
            parts = tuple((NAMES[f"delta_{role}"], size) for role, size in rows.items())
            rules.append(Fused("linear_attn.in_proj_qkvz.weight", parts, c.key_heads))
            parts = ((NAMES["delta_rate"], queries), (NAMES["delta_decay"], queries))
            rules.append(Fused("linear_attn.in_proj_ba.weight", parts, c.key_heads))
        else:
            parts = tuple((NAMES[f"delta_{role}"], c.key_heads * rows[role]) for role in qkv)
            rules.append(Fused("linear_attn.in_proj_qkv.weight", parts))
    if "experts" in config.mlps:
        rules += [
            Fused(f"mlp.experts.{{}}.{role}_proj.weight", ((NAMES[f"expert_{role}"], 0),), experts=config.experts.count)
            for role in ("gate", "up", "down")
        ]
    return rules


def unfused(file: Readable, config: ModelConfig) -> Readable:
    """Returns the file's tensors with each role separate."""
    phi = any(name.endswith("self_attn.qkv_proj.weight") for name in file)
    rules = fusions(config, phi)
    return Unfused(file, rules) if rules else file


class Unfused:
    """Tensors of a file, with `Fused` ones split into named parts."""

    def __init__(self, file: Readable, rules: list[Fused]):
        self.file, self.names = file, dict.fromkeys(file)
        self._part: dict[str, tuple[list[str], Fused, int]] = {}
        for name in file:
            for rule in rules:
                first = rule.name.format(0)
                if name.endswith("." + first):
                    before = name.removesuffix(first)
                    wholes = [before + rule.name.format(e) for e in range(max(rule.experts, 1))]
                    for whole in wholes:
                        self.names.pop(whole, None)
                    for i, (part, _) in enumerate(rule.parts):
                        self.names[before + part] = None
                        self._part[before + part] = wholes, rule, i

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._part:
            return tuple(self.file.shape(name))
        wholes, rule, i = self._part[name]
        shape = tuple(self.file.shape(wholes[0]))
        if rule.experts:
            return rule.experts, *shape
        rest = shape[2:] if rule.squeezed else shape[1:]
        whole = rule.groups * sum(rows for _, rows in rule.parts)
        return (rule.groups * rule.parts[i][1] if shape[0] == whole else -1, *rest)

    def tensor(self, name: str) -> np.ndarray:
        if name not in self._part:
            return self.file.tensor(name)
        wholes, rule, i = self._part[name]
        if rule.experts:
            return np.stack([self.file.tensor(part) for part in wholes])
        array = self.file.tensor(wholes[0])
        array = array[:, 0] if rule.squeezed else array
        first = sum(rows for _, rows in rule.parts[:i])
        array = array.reshape(rule.groups, -1, *array.shape[1:])[:, first : first + rule.parts[i][1]]
        return array.reshape(-1, *array.shape[2:])


Tensor = tuple[str, tuple[int, ...], Callable[[], np.ndarray]]
"""(name, shape as (out, in), function that returns the array)."""


def fused(tensors: Iterable[Tensor], config: ModelConfig) -> Iterable[Tensor]:
    """Fuses role tensors as files of the model's family have them; inverse of `unfused`."""
    rules = [(part, rule) for rule in fusions(config) for part, _ in rule.parts]
    waiting: dict[str, dict[str, Tensor]] = {}
    for tensor in tensors:
        ends = ((part, rule) for part, rule in rules if tensor[0].endswith("." + part))
        part, rule = next(ends, ("", None))
        if rule is None:
            yield tensor
            continue
        before = tensor[0].removesuffix(part)
        if rule.experts:
            for e in range(rule.experts):
                yield before + rule.name.format(e), tensor[1][1:], lambda get=tensor[2], e=e: get()[e]
            continue
        parts_of = waiting.setdefault(before + rule.name, {})
        parts_of[part] = tensor
        if len(parts_of) == len(rule.parts):
            parts = [parts_of[name] for name, _ in rule.parts]
            rows, rest = sum(shape[0] for _, shape, _ in parts), parts[0][1][1:]
            shape = (rows, *((1,) if rule.squeezed else ()), *rest)
            yield before + rule.name, shape, functools.partial(_joined, [get for *_, get in parts], rule.groups, shape)


def _joined(gets: list[Callable[[], np.ndarray]], groups: int, shape: tuple[int, ...]) -> np.ndarray:
    arrays = [array.reshape(groups, -1, *array.shape[1:]) for array in (get() for get in gets)]
    return np.concatenate(arrays, axis=1).reshape(shape)


def _known(name: str, config: ModelConfig) -> bool:
    layered = re.sub(r"^layers\.\d+\.", "", name)
    return any(
        name_of(role, None, config) == layered and (layered == name) == (role in ("embed", "final_norm"))
        for role in decoder.file_shapes(config)
    )


class Fields:
    """Fields of a JSON file, type-checked on access."""

    def __init__(self, path: pathlib.Path, fields: dict[str, Any], inside: str = ""):
        self.path, self.fields, self.inside = path, fields, inside

    def refuse(self, name: str, reason: str) -> ValueError:
        """Returns the ValueError for a field, to be raised."""
        return ValueError(f"{self.path}: {self.inside}{name} {reason}")

    def has(self, name: str) -> bool:
        """Returns whether the field is there and not null."""
        return self.fields.get(name) is not None

    def check(self, known: set[str], fixed: Mapping[str, tuple], remedy: str = "") -> None:
        """Raises ValueError for an unknown field, or a value outside the field's fixed ones."""
        for name, value in self.fields.items():
            if name not in known:
                reason = f"({str(value)[:60]!r}) is not known to jprm; it might change scores"
                raise self.refuse(name, f"{reason}. Remove it from the file if it does not")
            if name in fixed and value not in fixed[name]:
                only = json.dumps(fixed[name][0])
                raise self.refuse(name, f"{value!r} is not supported; only {only} is{remedy}")

    def need(self, name: str, default: Any = None) -> Any:
        """Returns a field or its default. Raises ValueError if both are absent or null."""
        value = self.fields.get(name) if self.has(name) else default
        if value is None:
            raise self.refuse(name, "is missing")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """Returns a field that must be an integer from 1 to 2^31 - 1. Raises ValueError."""
        value = self.need(name, default)
        if type(value) is not int or not 0 < value < 2**31:
            raise self.refuse(name, f"is {value!r}, and not a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a field that must be a finite number above 0. Raises ValueError."""
        value = self.need(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.refuse(name, f"is {value!r}, and not a positive number")
        return float(value)

    def cap(self, name: str, default: float | None) -> float:
        """Returns 0 if the field is null, and the default if it is absent."""
        default = None if name in self.fields else default
        return self.number(name, default) if self.has(name) or default else 0.0

    def flag(self, name: str, default: bool) -> bool:
        """Returns a field that must be true or false. Raises ValueError."""
        value = self.fields.get(name) if self.has(name) else default
        if type(value) is not bool:
            raise self.refuse(name, f"is {value!r}, and neither true nor false")
        return value


def _text_fields(path: pathlib.Path) -> Fields:
    """Returns the fields of config.json; for a multimodal model, those of its text model."""
    content = read_json(path)
    text = content.get("text_config")
    if content.get("model_type") != MULTIMODAL or not isinstance(text, dict):
        return Fields(path, content)
    fields = TEXT_DEFAULTS | {"tie_word_embeddings": True} | text | {"model_type": "gemma3_text"}
    if "rope_parameters" in text and "rope_theta" not in text:
        del fields["rope_theta"]
    return Fields(path, fields, "text_config.")


def _values(fields: Fields) -> dict[str, Any]:
    family = fields.fields.get("model_type")
    if family not in FAMILIES:
        lacks = f", which needs {MISSING[family]}" if isinstance(family, str) and family in MISSING else ""
        raise fields.refuse("model_type", f"{family!r} is not supported{lacks}; one of {', '.join(FAMILIES)} is")
    gemma = family in GEMMA
    activation = "gelu_pytorch_tanh" if gemma else "silu"
    fixed = FIXED | {"hidden_act": (activation,), "hidden_activation": (activation,)}
    fixed |= {"use_bidirectional_attention": (False, None)}
    if family in ("phi3", *HYBRID):
        fixed.pop("partial_rotary_factor")
    known = (READ_OF_GEMMA if gemma else READ) | READ_OF.get(family, set()) | HARMLESS | set(FIXED)
    fields.check(known, fixed)
    needed = {ours: fields.count(theirs) for theirs, ours in SIZES.items() if ours not in ("kv_heads", "head_dim")}
    heads, width, layers = (needed[name] for name in ("heads", "width", "layers"))
    if layers > MOST_LAYERS:
        raise fields.refuse("num_hidden_layers", f"is {layers:,}, and at most {MOST_LAYERS:,} are supported")
    if not fields.has("head_dim") and (gemma or family in ("qwen3", *HYBRID) or width % heads):
        raise fields.refuse("head_dim", "is missing")
    grouped = fields.count("num_key_value_heads", heads if family in ("llama", "olmo3", "smollm3", "phi3") else None)
    if heads % grouped:
        raise fields.refuse("num_key_value_heads", f"{grouped} does not divide num_attention_heads {heads}")
    head_dim = fields.count("head_dim", width // heads)
    if head_dim % 2:
        raise fields.refuse("head_dim", f"{head_dim} is odd; rotary embeddings rotate pairs")
    windows = () if family in HYBRID else _windows(fields, family, layers)
    values: dict[str, Any] = needed | dict(
        kv_heads=grouped,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps"),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "gemma3_text", "qwen3_moe", *HYBRID),
        windows=windows,
        tied_embeddings=fields.flag("tie_word_embeddings", gemma or family == "smollm3"),
        **_ropes(fields, family, windows),
    )
    if not gemma:
        return values | _variant(fields, family, values)
    caps = (50.0, 30.0) if family == "gemma2" else (None, None)  # defaults of transformers' classes
    return values | dict(
        design="gemma",
        query_pre_attn_scalar=fields.count("query_pre_attn_scalar", 256),
        attention_softcap=fields.cap("attn_logit_softcapping", caps[0]),
        logit_softcap=fields.cap("final_logit_softcapping", caps[1]),
    )


def _variant(fields: Fields, family: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields in which a family differs from Llama, except windows, biases and RoPE."""
    variant: dict[str, Any] = dict(design="olmo", qk_width_norm=True) if family == "olmo3" else {}
    rope = Fields(fields.path, fields.fields.get("rope_parameters") or {}, "rope_parameters.")
    if family == "smollm3":
        variant["rope_layers"] = _rope_layers(fields, values["layers"])
    if family == "ministral3" and rope.has("llama_4_scaling_beta"):
        positions = rope.count("original_max_position_embeddings")
        variant["query_growth"] = (rope.number("llama_4_scaling_beta"), positions)
    if family in ("phi3", *HYBRID):
        usual = fields.number("partial_rotary_factor", 1.0 if family == "phi3" else 0.25)
        size = int(values["head_dim"] * rope.number("partial_rotary_factor", usual))
        if size % 2 or not 0 < size <= values["head_dim"]:
            raise rope.refuse("partial_rotary_factor", f"rotates {size} of {values['head_dim']}: not a part in pairs")
        variant["rotary_dim"] = 0 if size == values["head_dim"] else size
    if family in ("qwen3_moe", "qwen3_next"):
        variant |= _experts(fields, family, values["layers"])
    if family in HYBRID:
        variant |= dict(design="qwen3_next", attention_gate=True, mixers=_mixers(fields, values["layers"]))
        of_file = {ours: fields.count(theirs) for theirs, ours in DELTANET.items()}
        if of_file["value_heads"] % of_file["key_heads"] or of_file["conv"] < 2:
            raise fields.refuse("linear_num_key_heads", f"or linear_conv_kernel_dim does not fit: {of_file}")
        variant["deltanet"] = DeltaNetConfig(**of_file)
    return variant


def _rope_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Returns, for each layer of SmolLM3, whether it uses rotary embeddings."""
    every, chosen = fields.count("no_rope_layer_interval", 4), fields.fields.get("no_rope_layers")
    if chosen is None:
        return tuple(int((i + 1) % every > 0) for i in range(layers))
    if not isinstance(chosen, list) or len(chosen) < layers or any(flag not in (0, 1) for flag in chosen):
        raise fields.refuse("no_rope_layers", f"is no list of 0 and 1 for each of {layers} layers")
    return tuple(map(int, chosen[:layers]))


def _mixers(fields: Fields, layers: int) -> tuple[str, ...]:
    """Returns each layer's mixer kind in a hybrid model."""
    every, kinds = fields.count("full_attention_interval", 4), fields.fields.get("layer_types")
    names = {"linear_attention": "deltanet", "full_attention": "attention"}
    if kinds is None:
        return tuple(("deltanet", "attention")[(i + 1) % every == 0] for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (*names,) for kind in kinds):
        raise fields.refuse("layer_types", f"{str(kinds)[:80]} is no list of {' and '.join(names)} for {layers} layers")
    return tuple(names[kind] for kind in kinds)


def _experts(fields: Fields, family: str, layers: int) -> dict[str, Any]:
    """Returns the MLP kinds and the experts' configuration."""
    if fields.flag("use_sliding_window", False):
        raise fields.refuse("use_sliding_window", f"true is not supported for {family}")
    every, dense = fields.count("decoder_sparse_step", 1), fields.fields.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise fields.refuse("mlp_only_layers", f"{str(dense)[:60]} is no list")
    count = fields.count("num_experts" if fields.has("num_experts") else "num_local_experts")
    used, shared = fields.count("num_experts_per_tok"), 0
    if used > count:
        raise fields.refuse("num_experts_per_tok", f"{used} is above the {count} experts")
    if family == "qwen3_next":
        shared = fields.count("shared_expert_intermediate_size")
    mlps = tuple("dense" if i in dense or (i + 1) % every else "experts" for i in range(layers))
    normalised = fields.flag("norm_topk_prob", family == "qwen3_next")
    experts = ExpertsConfig(count, used, fields.count("moe_intermediate_size"), normalised, shared)
    return dict(mlps=mlps, experts=experts)


def _windows(fields: Fields, family: str, layers: int) -> tuple[int, ...]:
    """Returns the window of each layer, 0 for none.

    Llama has none. Mistral has one in all layers, unless it is null. Qwen has one only with `use_sliding_window`, in
    the layers of `layer_types`, or from `max_window_layers` on. Gemma has one in all but every second (Gemma 2) or
    sixth layer (Gemma 3), or in the layers of `layer_types`.
    """
    kinds, gemma = fields.fields.get("layer_types"), family in GEMMA
    mistral = family in ("mistral", "ministral3", "phi3")
    names = ("full_attention", "sliding_attention")
    if kinds is not None and not (isinstance(kinds, list) and all(kind in names for kind in kinds)):
        raise fields.refuse("layer_types", f"{str(kinds)[:80]} is not supported; only {' and '.join(names)} are")
    if kinds is not None and len(kinds) != layers:
        raise fields.refuse("layer_types", f"names {len(kinds)} layers, and num_hidden_layers is {layers}")
    window = 0
    if "sliding_window" not in fields.fields and (gemma or family in ("mistral", "olmo3")):
        window = 4096  # transformers' default
    elif family != "llama" and fields.has("sliding_window"):
        window = fields.count("sliding_window")
    flagged = family in ("qwen2", "qwen3", "qwen3_moe", "smollm3")
    if flagged and not fields.flag("use_sliding_window", False):
        window = 0
    if kinds is None:
        if family in ("qwen2", "qwen3"):
            first = fields.count("max_window_layers", 28) if window else 0
            kinds = [names[i >= first] for i in range(layers)]
        else:
            of_gemma = "_sliding_window_pattern" if fields.has("_sliding_window_pattern") else "sliding_window_pattern"
            every = {"gemma2": 2, "olmo3": 4}.get(family) or (fields.count(of_gemma, 6) if gemma else 0)
            kinds = [names[not every or (i + 1) % every > 0] for i in range(layers)]
            if family == "smollm3":  # windows where nothing rotates
                kinds = [names[not turns] for turns in _rope_layers(fields, layers)]
    elif mistral and window and names[0] in kinds:
        raise fields.refuse("layer_types", f"has {names[0]}, though a window slides in all layers of a {family} model")
    elif names[1] in kinds and not window:
        raise fields.refuse("layer_types", f"has {names[1]}, and there is no sliding_window that slides")
    return tuple(window if kind == names[1] else 0 for kind in kinds)


def _ropes(fields: Fields, family: str, windows: tuple[int, ...]) -> dict[str, Any]:
    """Returns theta and scaling; for Gemma 3 and OLMo 3 also the theta of layers with a window, which is unscaled."""
    content, local = fields.fields.get("rope_parameters"), 0.0
    kinds = ("full_attention", "sliding_attention")
    if family not in ("gemma3_text", "olmo3"):
        theta, scaling = _rope(fields, 2e6 if family == "smollm3" else 1e4, family)
    elif content is None:
        theta, scaling = _rope(fields, 5e5 if family == "olmo3" else 1e6)
        local = theta if family == "olmo3" else fields.number("rope_local_base_freq", 1e4)
    elif isinstance(content, dict) and {*content} == {*kinds} and all(isinstance(content[k], dict) for k in kinds):
        parts = (Fields(fields.path, {"rope_parameters": content[x]}, f"rope_parameters.{x}: ") for x in kinds)
        (theta, scaling), (local, unscaled) = map(_rope, parts)
        if unscaled.kind != "none":
            raise fields.refuse("rope_parameters.sliding_attention", f"of rope_type {unscaled.kind} is not supported")
    else:
        raise fields.refuse("rope_parameters", "is not an object of full_attention and sliding_attention")
    return dict(rope_theta=theta, rope_scaling=scaling, rope_theta_local=local if any(windows) else 0.0)


def _rope(fields: Fields, default: float = 10000.0, family: str = "") -> tuple[float, RopeScaling]:
    """Returns theta and scaling, from `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (4)."""
    key = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    if fields.has("rope_parameters") and fields.has("rope_scaling"):
        raise fields.refuse("rope_scaling", "is there beside rope_parameters; keep one of them")
    content = fields.fields.get(key) or {}
    if not isinstance(content, dict):
        raise fields.refuse(key, f"{str(content)[:60]!r} is not an object")
    inner = Fields(fields.path, content, f"{key}.")
    theta = inner.number("rope_theta", fields.number("rope_theta", default))
    if theta <= 1:
        raise fields.refuse("rope_theta", f"is {theta}, and must be above 1")
    kind = content.get("rope_type", content.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE:
        raise inner.refuse("rope_type", f"{kind!r} is not supported; one of {', '.join(_ROPE)} is")
    known = {"rope_type", "type", "rope_theta"} | _ROPE[kind]
    if family in ("phi3", *HYBRID) or content.get("partial_rotary_factor") == 1:
        known.add("partial_rotary_factor")
    if family in HYBRID:
        known |= {"mrope_section", "mrope_interleaved"}  # of text all three positions are equal
    equal = inner.number("mscale", 1.0) == inner.number("mscale_all_dim", 1.0)
    if family == "ministral3":
        known |= {"llama_4_scaling_beta", "max_position_embeddings"}
        known |= {"mscale", "mscale_all_dim"} if equal and kind == "yarn" else set()
    for name, value in content.items():
        if name not in known and value is not None:
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
        usual = factor > 1 and not (family == "ministral3" and inner.has("mscale"))  # else a ratio, which is 1
        scaling = dict(
            low=inner.number("beta_slow", 1.0),
            high=inner.number("beta_fast", 32.0),
            attention_factor=inner.number("attention_factor", 0.1 * math.log(factor) + 1 if usual else 1.0),
            truncate=inner.flag("truncate", True),
        )
    try:
        return theta, RopeScaling(cast(Any, kind), factor, positions, **scaling)
    except ValueError as error:
        raise inner.refuse("", str(error)) from error
