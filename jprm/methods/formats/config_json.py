"""How a published family's config.json and tensors are read: `Family`, a record, and the code that families share.

Each field that could change the numbers is supported or refused by name; an unknown field is an error. The records of
the supported families are in `families.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import numpy as np

from jprm.io.storage import Place
from jprm.model.config import MOST_LAYERS, ExpertsConfig, ModelConfig, RopeScaling

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
    "out_bias": "self_attn.o_proj.bias", "sink": "self_attn.sinks", "router_bias": "mlp.gate.bias",
} | {
    f"{ours}_{role}": f"mlp.{theirs}.{role}_proj.weight"
    for ours, theirs in (("expert", "experts"), ("shared", "shared_expert")) for role in ("gate", "up", "down")
} | {f"expert_{role}_bias": f"mlp.experts.{role}_proj.bias" for role in ("gate", "up", "down")}  # fmt: skip
"""Tensor names by role, of Llama and alike; a layer's are prefixed by layers.LAYER."""


SIZES = {
    "vocab_size": "vocab_size", "hidden_size": "width", "intermediate_size": "mlp_width", "num_hidden_layers": "layers",
    "num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "head_dim": "head_dim",
}  # fmt: skip
"""Fields in config.json and in `ModelConfig`; read here, and written by `jprm.methods.formats.writing`."""

FIXED: dict[str, tuple] = {
    "mlp_bias": (False,),
    "attention_bias": (False,),  # in a Llama, the output projection then has a bias too
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

READ = {
    *SIZES, "model_type", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "tie_word_embeddings",
    "max_position_embeddings", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "hidden_act",
}  # fmt: skip

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


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where files of a family have a role's tensor, if not under its name in `NAMES`.

    name: in the file, without `layers.LAYER.`. If every expert has a tensor of its own, {} stands for its number, and
        `take` receives them stacked.
    take: from the file's array to the role's, (out, in), by views only: indexing, reshaping, transposing.
    factor: multiplies the array, which is then float32.
    whole: from the role's shape to that of the file's array; used to write it.
    """

    name: str
    take: Callable[[np.ndarray], np.ndarray] = lambda array: array
    factor: float = 1.0
    whole: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: shape


def everywhere(layer: int) -> bool:
    return True


Slides = Callable[["Fields"], Callable[[int], bool] | None]
"""A rule for `windows_of`: from a file's fields to (layer from 0) -> whether it has a window; None if no layer has."""


def windows_of(slides: Slides) -> Callable[[Fields, int], tuple[int, ...]]:
    """Returns `Family.windows`: if a file has no `layer_types`, a layer has a window if `slides(fields)(layer)`.

    If `slides(fields)` is `None`, no layer has one. `windows(fields, layers)` gives a number per layer: the tokens of
    `sliding_window`, or 0 for full attention. This function raises ValueError if `layer_types` has an unknown kind or a
    wrong length, or contradicts the window.
    """

    def windows(fields: Fields, layers: int) -> tuple[int, ...]:
        kinds, names = fields.fields.get("layer_types"), ("full_attention", "sliding_attention")
        if kinds is not None and not (isinstance(kinds, list) and all(kind in names for kind in kinds)):
            raise fields.refuse("layer_types", f"{str(kinds)[:80]} is not supported; only {' and '.join(names)} are")
        if kinds is not None and len(kinds) != layers:
            raise fields.refuse("layer_types", f"names {len(kinds)} layers, and num_hidden_layers is {layers}")
        slid = slides(fields)
        window = fields.count("sliding_window") if slid and fields.has("sliding_window") else 0
        if kinds is None:
            kinds = [names[slid is not None and slid(i)] for i in range(layers)]
        elif slid is everywhere and window and names[0] in kinds:
            family = fields.fields["model_type"]
            raise fields.refuse(
                "layer_types", f"has {names[0]}, though a window slides in all layers of a {family} model"
            )
        elif names[1] in kinds and not window:
            raise fields.refuse("layer_types", f"has {names[1]}, and there is no sliding_window that slides")
        return tuple(window if kind == names[1] else 0 for kind in kinds)

    return windows


def one_rope(fields: Fields, family: Family, windows: tuple[int, ...]) -> dict[str, Any]:
    """Returns {"rope_theta", "rope_scaling"}, the same for all layers; ValueError if a field does not fit."""
    theta, scaling = rope(fields, family.rope)
    return dict(rope_theta=theta, rope_scaling=scaling)


@dataclasses.dataclass(frozen=True)
class Family:
    """A published family, by the `model_type` of its config.json. All is as in Llama if a field is left out.

    E.g. `Family("olmo2", lambda fields, values: {"design": "olmo", "qk_width_norm": True})`.

    Attributes:
      name: `model_type`.
      values: (fields, the values of a Llama with these sizes) to the fields of `ModelConfig` that differ.
      reads: fields of config.json that `values` and `tensors` read.
      fixed: further fields with their only supported values, e.g. `{"clip_qkv": (None,)}`.
      defaults: values of transformers' class for fields that a file may omit, if jprm has no such default.
      needs: `num_key_value_heads` or `head_dim`, if a file must have it.
      windows: (fields, layers) to each layer's window; see `windows_of`.
      ropes: (fields, family, windows) to the rotary fields of `ModelConfig`.
      rope: further keys of `rope_parameters` that are known.
      tensors: (fields, config) to `Stored` by role, for tensors that a file has under another name or in another form.
        The role `head` is the language head.
    """

    name: str
    values: Callable[[Fields, Mapping[str, Any]], Mapping[str, Any]] = lambda fields, values: {}
    reads: Collection[str] = ()
    fixed: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    needs: Collection[str] = ()
    windows: Callable[[Fields, int], tuple[int, ...]] = windows_of(lambda fields: None)
    ropes: Callable[..., Mapping[str, Any]] = one_rope
    rope: Collection[str] = ()
    tensors: Callable[[Fields, ModelConfig], Mapping[str, Stored]] = lambda fields, config: {}

    def fields(self, fields: Fields) -> Fields:
        """Returns a copy of the fields, with the family's defaults for absent ones; a null stays null."""
        return Fields(fields.path, {**self.defaults, **fields.fields}, fields.inside)


class Fields:
    """Fields of a JSON file, type-checked on access.

    `inside` is the path of an inner object, for messages, e.g. `text_config.`. All errors are ValueErrors as
    `FILE: INSIDE.FIELD REASON`.
    """

    def __init__(self, path: pathlib.Path | Place, fields: dict[str, Any], inside: str = ""):
        self.path, self.fields, self.inside = path, fields, inside

    def refuse(self, name: str, reason: str) -> ValueError:
        """Returns the ValueError `FILE: INSIDE.NAME REASON`, which the caller must raise."""
        return ValueError(f"{self.path}: {self.inside}{name} {reason}")

    def has(self, name: str) -> bool:
        """Returns whether the field is there and not null."""
        return self.fields.get(name) is not None

    def check(self, known: set[str], fixed: Mapping[str, tuple], remedy: str = "") -> None:
        """Raises ValueError for a field that is not `known`, or a value that is not among its field's `fixed` ones.

        `remedy` ends the second message.
        """
        for name, value in self.fields.items():
            if name not in known:
                reason = f"({str(value)[:60]!r}) is not known to jprm; it might change scores"
                raise self.refuse(name, f"{reason}. Remove it from the file if it does not")
            if name in fixed and value not in fixed[name]:
                only = json.dumps(fixed[name][0])
                raise self.refuse(name, f"{value!r} is not supported; only {only} is{remedy}")

    def need(self, name: str, default: Any = None) -> Any:
        """Returns a field, or `default` if it is absent or null; raises ValueError if this is `None` too."""
        value = self.fields.get(name) if self.has(name) else default
        if value is None:
            raise self.refuse(name, "is missing")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """Returns a field that must be an integer from 1 to 2^31 - 1, or `default` if it is absent or null.

        Raises ValueError for other values, or without both.
        """
        value = self.need(name, default)
        if type(value) is not int or not 0 < value < 2**31:
            raise self.refuse(name, f"is {value!r}, and not a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a field that must be a finite number above 0, or `default` if it is absent or null.

        Raises ValueError for other values, or without both.
        """
        value = self.need(name, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.refuse(name, f"is {value!r}, and not a positive number")
        return float(value)

    def cap(self, name: str) -> float:
        """Returns a positive number, or 0 if the field is null or absent. Raises ValueError for other values."""
        return self.number(name) if self.has(name) else 0.0

    def nested(self, name: str) -> Fields:
        """Returns the fields of an object inside, or no fields if it is null, absent or empty. Raises ValueError."""
        inner = self.fields.get(name) or {}
        if not isinstance(inner, dict):
            raise self.refuse(name, f"{str(inner)[:60]!r} is not an object")
        return Fields(self.path, inner, f"{name}.")

    def flag(self, name: str, default: bool) -> bool:
        """Returns a field that must be true or false, or `default` if it is absent or null. Raises ValueError."""
        value = self.fields.get(name) if self.has(name) else default
        if type(value) is not bool:
            raise self.refuse(name, f"is {value!r}, and neither true nor false")
        return value


def values_of(fields: Fields, family: Family) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` that config.json determines, by name, e.g. `width`; others are left out.

    Raises ValueError, naming file and field, if a field is missing, unknown, unsupported or of the wrong type, or the
    family's record sets an unknown field.
    """
    fields = family.fields(fields)
    fixed = {name: values for name, values in FIXED.items() if name not in family.reads} | {"hidden_act": ("silu",)}
    fields.check(READ | HARMLESS | {*FIXED, *family.reads, *family.fixed}, fixed | dict(family.fixed))
    needed = {ours: fields.count(theirs) for theirs, ours in SIZES.items() if ours not in ("kv_heads", "head_dim")}
    heads, width, layers = (needed[name] for name in ("heads", "width", "layers"))
    if layers > MOST_LAYERS:
        raise fields.refuse("num_hidden_layers", f"is {layers:,}, and at most {MOST_LAYERS:,} are supported")
    if not fields.has("head_dim") and ("head_dim" in family.needs or width % heads):
        raise fields.refuse("head_dim", "is missing")
    grouped = fields.count("num_key_value_heads", None if "num_key_value_heads" in family.needs else heads)
    if heads % grouped:
        raise fields.refuse("num_key_value_heads", f"{grouped} does not divide num_attention_heads {heads}")
    head_dim = fields.count("head_dim", width // heads)
    if head_dim % 2:
        raise fields.refuse("head_dim", f"{head_dim} is odd; rotary embeddings rotate pairs")
    windows = family.windows(fields, layers)
    values: dict[str, Any] = needed | dict(
        kv_heads=grouped,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps"),
        windows=windows,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        **family.ropes(fields, family, windows),
        rotary_dim=_rotary_dim(fields, head_dim),
    )
    its_own = family.values(fields, values)
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    if not isinstance(its_own, Mapping) or not its_own.keys() <= known:
        wrong = ", ".join(its_own.keys() - known) if isinstance(its_own, Mapping) else repr(its_own)
        raise ValueError(f"{fields.path}: the family {family.name!r} sets {wrong}, which is no field of ModelConfig")
    return {**values, **its_own}


def _rotary_dim(fields: Fields, head_dim: int) -> int:
    """Returns how many dimensions of a head rotate; 0 for all."""
    rope = fields.nested("rope_parameters")
    size = int(head_dim * rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)))
    if size % 2 or not 0 < size <= head_dim:
        raise rope.refuse("partial_rotary_factor", f"rotates {size} of {head_dim}: not a part in pairs")
    return 0 if size == head_dim else size


def local_ropes(fields: Fields, family: Family, windows: tuple[int, ...]) -> dict[str, Any]:
    """Returns {"rope_theta", "rope_scaling", "rope_theta_local"}, the last for layers with a window (Gemma 3, OLMo 3).

    `rope_theta_local` is unscaled; 0.0 if no layer has a window. Raises ValueError if a field does not fit, or the
    two kinds of layers are not given together.
    """
    content, kinds = fields.fields.get("rope_parameters"), ("full_attention", "sliding_attention")
    if content is None:
        theta, scaling = rope(fields, family.rope)
        local = fields.number("rope_local_base_freq", theta)
    elif isinstance(content, dict) and {*content} == {*kinds} and all(isinstance(content[k], dict) for k in kinds):
        parts = (Fields(fields.path, {"rope_parameters": content[x]}, f"rope_parameters.{x}: ") for x in kinds)
        (theta, scaling), (local, unscaled) = (rope(part, family.rope) for part in parts)
        if unscaled.kind != "none":
            raise fields.refuse("rope_parameters.sliding_attention", f"of rope_type {unscaled.kind} is not supported")
    else:
        raise fields.refuse("rope_parameters", "is not an object of full_attention and sliding_attention")
    return dict(rope_theta=theta, rope_scaling=scaling, rope_theta_local=local if any(windows) else 0.0)


def rope(fields: Fields, known: Collection[str] = ()) -> tuple[float, RopeScaling]:
    """Returns (theta, scaling), from `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (4).

    Kinds are `default` (no scaling), `linear`, `llama3` and `yarn`. Without any field theta is 10,000, unscaled.

    known: further keys that are read elsewhere; `mscale` and `mscale_all_dim` must be equal.

    Raises ValueError, naming file and field, if a kind or key is unsupported, or a value is out of range.
    """
    key = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    if fields.has("rope_parameters") and fields.has("rope_scaling"):
        raise fields.refuse("rope_scaling", "is there beside rope_parameters; keep one of them")
    inner = fields.nested(key)
    theta = inner.number("rope_theta", fields.number("rope_theta", 10000.0))
    if theta <= 1:
        raise fields.refuse("rope_theta", f"is {theta}, and must be above 1")
    content = inner.fields
    kind = content.get("rope_type", content.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE:
        raise inner.refuse("rope_type", f"{kind!r} is not supported; one of {', '.join(_ROPE)} is")
    allowed = {"rope_type", "type", "rope_theta", *known} | _ROPE[kind]
    if content.get("partial_rotary_factor") == 1:
        allowed.add("partial_rotary_factor")
    if kind != "yarn" or inner.number("mscale", 1.0) != inner.number("mscale_all_dim", 1.0):
        allowed -= {"mscale", "mscale_all_dim"}
    for name, value in content.items():
        if name not in allowed and value is not None:
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
        usual = factor > 1 and not inner.has("mscale")  # else a ratio, which is 1
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


def experts_of(
    fields: Fields, layers: int, width: str, normalised: bool, shared: int = 0, clamp: float = 0.0
) -> dict[str, Any]:
    """Returns {"mlps", "experts"}: each layer's kind, "dense" or "experts", and the `ExpertsConfig`.

    Reads `num_experts` or else `num_local_experts`, `num_experts_per_tok`, `decoder_sparse_step` and `mlp_only_layers`.
    `width` is the name of the field with an expert's width. The last three arguments are fields of `ExpertsConfig`:
    whether the chosen experts' weights add up to 1, the width of the shared expert and the clamp (0: none).

    Raises ValueError, naming the field, if a count is missing or does not fit.
    """
    every, dense = fields.count("decoder_sparse_step", 1), fields.fields.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise fields.refuse("mlp_only_layers", f"{str(dense)[:60]} is no list")
    count = fields.count("num_experts" if fields.has("num_experts") else "num_local_experts")
    used = fields.count("num_experts_per_tok")
    if used > count:
        raise fields.refuse("num_experts_per_tok", f"{used} is above the {count} experts")
    mlps = tuple("dense" if i in dense or (i + 1) % every else "experts" for i in range(layers))
    return dict(mlps=mlps, experts=ExpertsConfig(count, used, fields.count(width), normalised, shared, clamp=clamp))
