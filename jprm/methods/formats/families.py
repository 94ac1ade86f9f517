"""The published families that jprm reads, one record each, and the way to a user's own.

JPRM_FAMILIES names further records, e.g. `JPRM_FAMILIES=olmo2.py:OLMO2,granite.py:GRANITE`, as `FILE.py:NAME` or
`module:NAME`; a record there replaces one of the same name here.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jprm.checkpoints.safetensors import read_json
from jprm.methods.formats.config_json import (
    Family,
    Fields,
    Slides,
    Stored,
    everywhere,
    experts_of,
    local_ropes,
    one_rope,
    windows_of,
)
from jprm.model.config import DeltaNetConfig, ModelConfig
from jprm.options import find_part

OWN = "JPRM_FAMILIES"

MULTIMODAL = "gemma3"
TEXT_DEFAULTS = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072, "query_pre_attn_scalar": 256, "sliding_window": 4096, "rope_theta": 1e6,
}  # fmt: skip
"""Defaults of transformers' Gemma3TextConfig, which a `text_config` may omit (the 4B model's does)."""


def text_fields(path: pathlib.Path) -> Fields:
    """Returns the fields of config.json; for a multimodal Gemma 3, those of its text model, with their defaults.

    Raises FileNotFoundError if the file is missing, and ValueError if it is no JSON object.
    """
    content = read_json(path)
    text = content.get("text_config")
    if content.get("model_type") != MULTIMODAL or not isinstance(text, dict):
        return Fields(path, content)
    fields = TEXT_DEFAULTS | {"tie_word_embeddings": True} | text | {"model_type": "gemma3_text"}
    if "rope_parameters" in text and "rope_theta" not in text:
        del fields["rope_theta"]
    return Fields(path, fields, "text_config.")


def find(fields: Fields) -> Family:
    """Returns the family of a config.json by its `model_type`, also among the records in JPRM_FAMILIES.

    Raises ValueError if it is unknown (naming the missing feature, if known), or such a record cannot be found.
    """
    added = [find_part(name, {}, OWN, Family, files=True) for name in os.environ.get(OWN, "").split(",") if name]
    known, name = FAMILIES | {family.name: family for family in added}, fields.fields.get("model_type")
    if isinstance(name, str) and name in known:
        return known[name]
    lacks = f", which needs {MISSING[name]}" if isinstance(name, str) and name in MISSING else ""
    raise fields.refuse(
        "model_type",
        f"{name!r} is not supported{lacks}; one of {', '.join(known)} is. A family can be added by a record: see"
        " docs/extending.md",
    )


MISSING = {
    "bamba": "Mamba layers",
    "cohere": "LayerNorm, and attention and MLP side by side",
    "cohere2": "LayerNorm, and attention and MLP side by side",
    "deepseek_v2": "latent attention, and experts that are chosen by group",
    "deepseek_v3": "latent attention, and experts that are chosen by group",
    "falcon": "LayerNorm, an MLP without a gate, and attention and MLP side by side",
    "falcon_h1": "Mamba layers",
    "gemma4_text": "embeddings by layer, and heads whose size differs between layers",
    "gpt2": "LayerNorm, an MLP without a gate, and learned positions",
    "gpt_neox": "LayerNorm, an MLP without a gate, and attention and MLP side by side",
    "granitemoehybrid": "Mamba layers",
    "jamba": "Mamba layers",
    "lfm2": "layers of short convolutions",
    "llama4_text": "attention in chunks, and experts of which a token uses one",
    "mamba": "Mamba layers",
    "mamba2": "Mamba layers",
    "nemotron": "LayerNorm, and an MLP without a gate",
    "olmo": "LayerNorm without weights",
    "phi": "LayerNorm, an MLP without a gate, and attention and MLP side by side",
    "qwen3_5": "a tower for images: save its text model, Qwen3_5TextModel",
    "qwen3_5_moe_text": "a reader: its layers are those of qwen3_next, its tensors have other names",
    "stablelm": "LayerNorm",
    "starcoder2": "LayerNorm, and an MLP without a gate",
}
"""Unsupported families, and the missing feature."""

# ------------------------------------------------------------------------------------------------- parts of the records

Values = Mapping[str, Any]
KV, HEAD_DIM = "num_key_value_heads", "head_dim"
GELU = "gelu_pytorch_tanh"
EXPERTS = {
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "output_router_logits",
    "router_aux_loss_coef",
}  # fmt: skip
MOE = EXPERTS | {"norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"}
DELTANET = {
    "linear_num_key_heads": "key_heads", "linear_num_value_heads": "value_heads", "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim", "linear_conv_kernel_dim": "conv",
}  # fmt: skip
"""Fields in config.json and in `DeltaNetConfig`."""
HYBRID = {*DELTANET, "full_attention_interval", "mamba_ssm_dtype", "partial_rotary_factor"}
HYBRID_ROPE = {"partial_rotary_factor", "mrope_section", "mrope_interleaved"}  # of text all three positions are equal


def flagged(slides: Slides) -> Slides:
    """Returns the rule `slides` for `windows_of`, but without windows unless `use_sliding_window` is true."""
    return lambda fields: slides(fields) if fields.flag("use_sliding_window", False) else None


def alternating(every: int) -> Slides:
    """Returns a rule for `windows_of`: the last of `every` layers has no window, e.g. 3, 7, ... (from 0) for 4."""
    return lambda fields: lambda layer: (layer + 1) % every > 0


def rows(name: str, sizes: Mapping[str, int]) -> dict[str, Stored]:
    """Returns {role: Stored} for matrices in one file tensor `name`, in the order of `sizes`, their rows."""
    stored, first, whole = {}, 0, sum(sizes.values())
    for role, size in sizes.items():
        take = lambda x, a=first, b=first + size: x[a:b]  # noqa: E731
        stored[role] = Stored(name, take, whole=lambda shape: (whole, *shape[1:]))
        first += size
    return stored


def halves(heads: int, size: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns `Stored.take` for heads whose first `size` dimensions rotate in pairs side by side, (2i, 2i + 1).

    It moves these to jprm's pairs, (i, i + size / 2), in an array (heads x dimensions, ...).
    """

    def take(x_NX: np.ndarray) -> np.ndarray:
        x_KHX = x_NX.reshape(heads, -1, *x_NX.shape[1:])
        pair = [*range(0, size, 2), *range(1, size, 2), *range(size, x_KHX.shape[1])]
        return x_KHX[:, pair].reshape(x_NX.shape)

    return take


# -------------------------------------------------------------------------------------------------------- the families


def _gemma(fields: Fields, values: Values) -> dict[str, Any]:
    return dict(
        design="gemma",
        qk_norm=fields.fields["model_type"] == "gemma3_text",
        query_pre_attn_scalar=fields.count("query_pre_attn_scalar"),
        attention_softcap=fields.cap("attn_logit_softcapping"),
        logit_softcap=fields.cap("final_logit_softcapping"),
    )


def _gemma_pattern(fields: Fields):
    old = "_sliding_window_pattern" if fields.has("_sliding_window_pattern") else "sliding_window_pattern"
    return alternating(fields.count(old, 6))(fields)


GEMMA: dict[str, Any] = dict(
    reads={
        "hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
        "rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern", "cache_implementation",
    },
    fixed={"hidden_act": (GELU,), "hidden_activation": (GELU,), "use_bidirectional_attention": (False, None)},
    needs={KV, HEAD_DIM},
)  # fmt: skip
GEMMA_DEFAULTS = {"sliding_window": 4096, "query_pre_attn_scalar": 256, "tie_word_embeddings": True}


def _smollm3_turns(fields: Fields, layers: int) -> tuple[int, ...]:
    """Returns, for each layer of SmolLM3, whether it uses rotary embeddings."""
    every, chosen = fields.count("no_rope_layer_interval", 4), fields.fields.get("no_rope_layers")
    if chosen is None:
        return tuple(int((i + 1) % every > 0) for i in range(layers))
    if not isinstance(chosen, list) or len(chosen) < layers or any(flag not in (0, 1) for flag in chosen):
        raise fields.refuse("no_rope_layers", f"is no list of 0 and 1 for each of {layers} layers")
    return tuple(map(int, chosen[:layers]))


def _where_nothing_turns(fields: Fields):
    turns = _smollm3_turns(fields, fields.count("num_hidden_layers"))
    return lambda layer: not turns[layer]


def _ministral(fields: Fields, values: Values) -> dict[str, Any]:
    rope = fields.nested("rope_parameters")
    if not rope.has("llama_4_scaling_beta"):
        return {}
    positions = rope.count("original_max_position_embeddings")
    return dict(query_growth=(rope.number("llama_4_scaling_beta"), positions))


def _moe(fields: Fields, values: Values) -> dict[str, Any]:
    """Returns the experts of Qwen3-MoE and Qwen3-Next."""
    family = fields.fields["model_type"]
    if fields.flag("use_sliding_window", False):
        raise fields.refuse("use_sliding_window", f"true is not supported for {family}")
    following = family == "qwen3_next"
    normalised = fields.flag("norm_topk_prob", following)
    shared = fields.count("shared_expert_intermediate_size") if following else 0
    return experts_of(fields, values["layers"], "moe_intermediate_size", normalised, shared)


def _hybrid(fields: Fields, values: Values) -> dict[str, Any]:
    sizes = {ours: fields.count(theirs) for theirs, ours in DELTANET.items()}
    if sizes["value_heads"] % sizes["key_heads"] or sizes["conv"] < 2:
        raise fields.refuse("linear_num_key_heads", f"or linear_conv_kernel_dim does not fit: {sizes}")
    mixers, deltanet = _mixers(fields, values["layers"]), DeltaNetConfig(**sizes)
    return dict(design="qwen3_next", qk_norm=True, attention_gate=True, mixers=mixers, deltanet=deltanet)


def _mixers(fields: Fields, layers: int) -> tuple[str, ...]:
    """Returns each layer's mixer kind in a hybrid model."""
    every, kinds = fields.count("full_attention_interval", 4), fields.fields.get("layer_types")
    names = {"linear_attention": "deltanet", "full_attention": "attention"}
    if kinds is None:
        return tuple(("deltanet", "attention")[(i + 1) % every == 0] for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (*names,) for kind in kinds):
        raise fields.refuse("layer_types", f"{str(kinds)[:80]} is no list of {' and '.join(names)} for {layers} layers")
    return tuple(names[kind] for kind in kinds)


def _gate_and_up(config: ModelConfig) -> dict[str, Stored]:
    return rows("mlp.gate_up_proj.weight", {"gate": config.mlp_width, "up": config.mlp_width})


def _phi(fields: Fields, config: ModelConfig) -> dict[str, Stored]:
    heads = {role: count * config.head_dim for role, count in
             (("query", config.heads), ("key", config.kv_heads), ("value", config.kv_heads))}  # fmt: skip
    return rows("self_attn.qkv_proj.weight", heads) | _gate_and_up(config)


def _glm4(fields: Fields, config: ModelConfig) -> dict[str, Stored]:
    """Renames norms; rotary pairs are side by side in the files."""
    size = config.rotary_dim or config.head_dim
    turned = {
        f"{role}{kind}": Stored(f"self_attn.{role[0]}_proj.{end}", halves(heads, size))
        for role, heads in (("query", config.heads), ("key", config.kv_heads))
        for kind, end in (("", "weight"), ("_bias", "bias"))
    }
    norms = {"attention_post_norm": "post_self_attn_layernorm", "mlp_norm": "post_attention_layernorm",
             "mlp_post_norm": "post_mlp_layernorm"}  # fmt: skip
    return turned | {role: Stored(f"{name}.weight") for role, name in norms.items()} | _gate_and_up(config)


def _granite(fields: Fields, config: ModelConfig) -> dict[str, Stored]:
    """Multiplies matrices by the four multipliers, which makes the model a Llama."""
    stream = fields.number("residual_multiplier", 1.0)
    return {
        "embed": Stored("embed_tokens.weight", factor=fields.number("embedding_multiplier", 1.0)),
        "query": Stored(
            "self_attn.q_proj.weight",
            factor=fields.number("attention_multiplier", 1.0) * config.head_dim**0.5,
        ),
        "out": Stored("self_attn.o_proj.weight", factor=stream),
        "down": Stored("mlp.down_proj.weight", factor=stream),
        "head": Stored("lm_head.weight", factor=1 / fields.number("logits_scaling", 1.0)),
    }


def _mixtral(fields: Fields, config: ModelConfig) -> dict[str, Stored]:
    names = {"expert_gate": "w1", "expert_up": "w3", "expert_down": "w2"}
    experts = {role: Stored(f"block_sparse_moe.experts.{{}}.{name}.weight") for role, name in names.items()}
    return experts | {"router": Stored("block_sparse_moe.gate.weight")}


def _gpt_oss_values(fields: Fields, values: Values) -> dict[str, Any]:
    if fields.number("swiglu_alpha", 1.702) != 1.702:
        raise fields.refuse("swiglu_alpha", f"{fields.fields['swiglu_alpha']} is not supported; only 1.702 is")
    packed = fields.fields.get("quantization_config")
    if packed is not None and not (isinstance(packed, dict) and packed.get("quant_method") == "mxfp4"):
        raise fields.refuse("quantization_config", f"{str(packed)[:60]!r} is not supported; only mxfp4 is")
    limit = fields.number("swiglu_limit", 7.0)
    more = experts_of(fields, values["layers"], "intermediate_size", True, clamp=limit)
    return more | dict(qkv_bias=True, out_bias=True, mixers=("sinks",))


def _gpt_oss_ropes(fields: Fields, family: Family, windows: tuple[int, ...]) -> Mapping[str, Any]:
    if not fields.has("rope_scaling") and not fields.has("rope_parameters"):
        yarn = dict(rope_type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096)
        fields = Fields(fields.path, {**fields.fields, "rope_scaling": yarn})
    return one_rope(fields, family, windows)


def _gpt_oss(fields: Fields, config: ModelConfig) -> dict[str, Stored]:
    """Gate and up alternate in the last axis; experts' matrices are (in, out)."""
    both, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    of_both = functools.partial(Stored, both, whole=lambda shape: (shape[0], shape[2], 2 * shape[1]))
    of_biases = functools.partial(Stored, f"{both}_bias", whole=lambda shape: (shape[0], 2 * shape[1]))
    return {
        "expert_gate": of_both(lambda x: x[..., ::2].swapaxes(-1, -2)),
        "expert_up": of_both(lambda x: x[..., 1::2].swapaxes(-1, -2)),
        "expert_down": Stored(down, lambda x: x.swapaxes(-1, -2), whole=lambda shape: (shape[0], *shape[:0:-1])),
        "expert_gate_bias": of_biases(lambda x: x[..., ::2]),
        "expert_up_bias": of_biases(lambda x: x[..., 1::2]),
        "expert_down_bias": Stored(f"{down}_bias"),
        "router": Stored("mlp.router.weight"),
        "router_bias": Stored("mlp.router.bias"),
    }


def _from_a_layer_on(fields: Fields):
    first = fields.count("max_window_layers", 28)
    return lambda layer: layer >= first


QWEN_WINDOWS = windows_of(flagged(_from_a_layer_on))
EVERYWHERE = windows_of(lambda fields: everywhere)

_RECORDS = (
    Family("llama"),
    Family("mistral", defaults={"sliding_window": 4096}, needs={KV}, windows=EVERYWHERE),
    Family("qwen2", lambda fields, values: {"qkv_bias": True}, needs={KV}, windows=QWEN_WINDOWS),
    Family("qwen3", lambda fields, values: {"qk_norm": True}, needs={KV, HEAD_DIM}, windows=QWEN_WINDOWS),
    Family("gemma2", _gemma, windows=windows_of(alternating(2)), **GEMMA, defaults=GEMMA_DEFAULTS | {
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    Family("gemma3_text", _gemma, windows=windows_of(_gemma_pattern), ropes=local_ropes, **GEMMA,
           defaults=GEMMA_DEFAULTS | {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
    Family("ministral3", _ministral, needs={KV}, windows=EVERYWHERE,
           rope={"llama_4_scaling_beta", "max_position_embeddings", "mscale", "mscale_all_dim"}),
    Family("olmo2", lambda fields, values: {"design": "olmo", "qk_width_norm": True}),
    Family("olmo3", lambda fields, values: {"design": "olmo", "qk_width_norm": True}, ropes=local_ropes,
           defaults={"sliding_window": 4096, "rope_theta": 5e5}, windows=windows_of(alternating(4))),
    Family("smollm3", lambda fields, values: {"rope_layers": _smollm3_turns(fields, values["layers"])},
           reads={"no_rope_layers", "no_rope_layer_interval"}, windows=windows_of(flagged(_where_nothing_turns)),
           defaults={"rope_theta": 2e6, "tie_word_embeddings": True}),
    Family("phi3", reads={"original_max_position_embeddings", "resid_pdrop", "embd_pdrop", "partial_rotary_factor"},
           windows=EVERYWHERE, rope={"partial_rotary_factor"}, tensors=_phi),
    Family("glm4", lambda fields, values: {"design": "glm", "qkv_bias": True}, reads={"partial_rotary_factor"},
           fixed={"attention_bias": (True,)}, defaults={"partial_rotary_factor": 0.5}, needs={KV, HEAD_DIM},
           rope={"partial_rotary_factor"}, tensors=_glm4),
    Family("granite", lambda fields, values: {"tied_embeddings": False}, tensors=_granite,
           reads={"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"}),
    Family("mixtral", lambda fields, values: experts_of(fields, values["layers"], "intermediate_size", True),
           reads=EXPERTS | {"router_jitter_noise"}, needs={KV}, windows=EVERYWHERE, defaults={"rope_theta": 1e6},
           tensors=_mixtral),
    Family("qwen3_moe", lambda fields, values: {"qk_norm": True, **_moe(fields, values)}, reads=MOE, needs={KV},
           windows=windows_of(flagged(lambda fields: everywhere))),
    Family("qwen3_next", lambda fields, values: {**_moe(fields, values), **_hybrid(fields, values)},
           reads=MOE | HYBRID | {"shared_expert_intermediate_size"}, needs={KV, HEAD_DIM}, rope=HYBRID_ROPE,
           defaults={"partial_rotary_factor": 0.25}, windows=lambda fields, layers: ()),
    Family("qwen3_5_text", _hybrid, reads=HYBRID, needs={KV, HEAD_DIM}, rope=HYBRID_ROPE,
           defaults={"partial_rotary_factor": 0.25}, windows=lambda fields, layers: ()),
    Family("gpt_oss", _gpt_oss_values, fixed={"attention_bias": (True,)}, needs={KV, HEAD_DIM},
           reads=EXPERTS | {"swiglu_alpha", "swiglu_limit", "experts_per_token", "initial_context_length",
                            "quantization_config"},
           defaults={"rope_theta": 150000.0, "sliding_window": 128}, windows=windows_of(alternating(2)),
           ropes=_gpt_oss_ropes, tensors=_gpt_oss),
)  # fmt: skip
FAMILIES = {family.name: family for family in _RECORDS}
