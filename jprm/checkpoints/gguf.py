"""Base models from GGUF files: Llama, Qwen2, Qwen3 and Gemma 3, through the `gguf` package.

llama.cpp stores a Llama's query and key heads with interleaved rotary pairs. jprm, like Hugging Face, keeps pair i at
(i, i + H/2), so both are reordered on reading. It stores a Gemma's norms as factors, 1 + w, so 1 is subtracted.
"""

from __future__ import annotations

import math
import pathlib
import re
from typing import Any

import numpy as np

from jprm.checkpoints import decoder
from jprm.gguf_file import open_gguf
from jprm.model.config import MOST_LAYERS, ModelConfig, RopeScaling, frequencies
from jprm.model.parameters import Dtype

_ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False, "gemma3": False}
"""Architecture to whether its query and key rows are interleaved in the file."""

_NAMES = {
    "embed": "token_embd.weight", "final_norm": "output_norm.weight", "attention_norm": "attn_norm.weight",
    "query": "attn_q.weight", "key": "attn_k.weight", "value": "attn_v.weight", "out": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight", "gate": "ffn_gate.weight", "up": "ffn_up.weight", "down": "ffn_down.weight",
    "query_bias": "attn_q.bias", "key_bias": "attn_k.bias", "value_bias": "attn_v.bias",
    "query_norm": "attn_q_norm.weight", "key_norm": "attn_k_norm.weight",
    "attention_post_norm": "post_attention_norm.weight", "mlp_post_norm": "post_ffw_norm.weight",
}  # fmt: skip
"""Role to name; those of a layer follow blk.LAYER."""

_FREQUENCIES = "rope_freqs.weight"
"""The divisor of every frequency: Llama 3.1's scaling, tabulated."""

LANGUAGE_HEAD = "output.weight"


class Reader:
    """An open GGUF file: its metadata by key, its tensors by name, read and dequantised one at a time."""

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        self.fields, self.tensors = open_gguf(self.path)
        self.architecture = str(self.fields.get("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise ValueError(
                f"{path}: architecture {self.architecture!r} is not supported; one of {', '.join(_ARCHITECTURES)} is"
            )

    def get(self, key: str, default: Any = None, *, kind: type = int) -> Any:
        """Returns a positive number, or text; `{a}` is the architecture. Raises ValueError for another value."""
        key = key.replace("{a}", self.architecture)
        value = self.fields.get(key, default)
        if value is not None and (type(value) is not kind or (kind is not str and not 0 < value < math.inf)):
            wanted = {int: "a positive integer", float: "a positive number", str: "text"}[kind]
            raise ValueError(f"{self.path}: metadata {key} is {str(value)[:60]}, and not {wanted}")
        return value

    def need(self, key: str, *, kind: type = int) -> Any:
        if (value := self.get(key, kind=kind)) is None:
            key = key.replace("{a}", self.architecture)
            raise ValueError(f"{self.path}: metadata {key} is missing; it is no model, or one that jprm does not know")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor in row-major order, (out, in) for a matrix."""
        if name not in self.tensors:
            raise ValueError(f"{self.path}: tensor {name} is missing; the file is cut short or of another model")
        return self.tensors[name].shape

    def tensor(self, name: str) -> np.ndarray:
        """Returns a tensor in float32, in row-major order: (out, in) for a matrix."""
        self.shape(name)
        try:
            return self.tensors[name].dequantized()
        except NotImplementedError:
            kind = self.tensors[name].kind.name
            raise ValueError(f"{self.path}: tensor {name} is of type {kind}, which no weights are read from") from None

    def __contains__(self, name: str) -> bool:
        return name in self.tensors


open_tensors = Reader


def model_config(path: str | pathlib.Path, **changes) -> ModelConfig:
    """Returns the file's hyper-parameters; `changes` set what it does not hold (head, dtype, layers, ...).

    A number of `layers` below the file's keeps the first layers.
    """
    return _config(Reader(path), **changes)


def _config(file: Reader, **changes) -> ModelConfig:
    get, need = file.get, file.need
    heads, width, layers = (need(f"{{a}}.{key}") for key in ("attention.head_count", "embedding_length", "block_count"))
    if (last := f"blk.{layers}.{_NAMES['attention_norm']}") in file:
        raise ValueError(f"{file.path}: tensor {last} is there, beyond the model's block_count; download it again")
    head_dim = get("{a}.attention.key_length", width // heads)
    if (rotated := get("{a}.rope.dimension_count", head_dim)) != head_dim:
        raise ValueError(f"{file.path}: rotary embeddings on {rotated} of {head_dim} dimensions are not supported")
    theta, window = get("{a}.rope.freq_base", 10000.0, kind=float), get("{a}.attention.sliding_window")
    values: dict[str, Any] = dict(
        vocab_size=file.shape("token_embd.weight")[0],
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=get("{a}.attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_width=need("{a}.feed_forward_length"),
        rope_theta=theta,
        rope_scaling=_scaling(file, head_dim, theta),
        norm_eps=round(need("{a}.attention.layer_norm_rms_epsilon", kind=float), 12),  # stored as float32
        qkv_bias="blk.0.attn_q.bias" in file,
        qk_norm="blk.0.attn_q_norm.weight" in file,
        tied_embeddings=LANGUAGE_HEAD not in file,
    )
    if file.architecture == "gemma3":
        every = get("{a}.attention.sliding_window_pattern", 6)
        windows = tuple((window or 0) if (i + 1) % every else 0 for i in range(min(every, layers, MOST_LAYERS)))
        values |= dict(
            design="gemma",
            # The file does not say; llama.cpp too knows the 27B model, which differs, by its layers.
            query_pre_attn_scalar=width // heads if layers == 62 else head_dim,
            windows=windows,
            rope_theta_local=get("{a}.rope.freq_base_swa", 10000.0, kind=float) if any(windows) else 0.0,
            logit_softcap=get("{a}.final_logit_softcapping", kind=float) or 0.0,
        )
    elif window is not None:
        raise ValueError(f"{file.path}: sliding-window attention ({window} tokens) is not supported")
    decoder.check_layers(file.path, layers, changes)
    try:
        config = ModelConfig(**(values | changes))
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from None
    known = {_NAMES[role] for role in decoder.file_shapes(config)} | {LANGUAGE_HEAD, _FREQUENCIES}
    if unknown := sorted(name for name in file.tensors if re.sub(r"^blk\.\d+\.", "", name) not in known):
        raise ValueError(f"{file.path}: tensors that jprm does not know: {', '.join(unknown[:5])}")
    return config


def _scaling(file: Reader, head_dim: int, theta: float) -> RopeScaling:
    """Reads RoPE scaling as llama.cpp does: linear and YaRN by their fields, Llama 3.1's by the divisors' tensor."""
    prefix = f"{file.architecture}.rope.scal"  # rope.scaling.*, and the old rope.scale_linear
    known = {f"{prefix}ing.{key}" for key in ("type", "factor", "original_context_length", "finetuned")}
    if unknown := sorted(key for key in file.fields if key.startswith(prefix) and key not in known):
        raise ValueError(f"{file.path}: metadata {unknown[0]} ({str(file.fields[unknown[0]])[:60]}) is not supported")
    kind = file.get("{a}.rope.scaling.type", "none", kind=str)
    if _FREQUENCIES in file:
        if kind != "none":
            raise ValueError(f"{file.path}: tensor {_FREQUENCIES} beside RoPE scaling {kind!r} is not supported")
        divisor_H = file.tensor(_FREQUENCIES)
        scaling = RopeScaling("llama3", float(divisor_H.max(initial=0)) or 1.0, 8192, 1.0, 4.0)
        plain_H = frequencies(head_dim, theta)
        found = divisor_H.shape == plain_H.shape and np.allclose(
            divisor_H * frequencies(head_dim, theta, scaling), plain_H, rtol=1e-4, atol=0
        )
        if not found:
            raise ValueError(f"{file.path}: tensor {_FREQUENCIES} is not of Llama 3.1's scaling, and is not supported")
        return scaling
    if kind == "none":
        return RopeScaling()
    factor = file.need("{a}.rope.scaling.factor", kind=float)
    positions = file.get("{a}.rope.scaling.original_context_length")
    try:
        if kind == "linear":
            return RopeScaling("linear", factor)
        if kind == "yarn":
            return RopeScaling("yarn", factor, int(positions or 0), 1.0, 32.0, 0.1 * math.log(factor) + 1)
    except ValueError as error:
        raise ValueError(f"{file.path}: RoPE scaling {kind!r}: {error}") from error
    raise ValueError(f"{file.path}: RoPE scaling {kind!r} is not supported")


def load_decoder(path: str | pathlib.Path, config: ModelConfig, dtype: Dtype = "float32", *, new: str = "") -> dict:
    """Returns the decoder's parameters, stored as `dtype`, each in its place on the mesh that is set.

    Fields and shapes are checked against `config`.
    """
    file = Reader(path)
    decoder.check(path, _config(file, layers=config.layers), config)
    rotated = ("query", "key", "query_bias", "key_bias") if _ARCHITECTURES[file.architecture] else ()

    def read(role: str, name: str) -> np.ndarray:
        array = file.tensor(name)
        if role in rotated:  # (heads x H, ...): pairs at (2i, 2i + 1) to (i, i + H/2)
            pairs = array.reshape(-1, config.head_dim // 2, 2, *array.shape[1:])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        return array - 1 if config.design == "gemma" and role.endswith("norm") else array

    def name_of(role: str, layer: int | None) -> str:
        return _NAMES[role] if layer is None else f"blk.{layer}.{_NAMES[role]}"

    return decoder.load(path, config, name_of, file.shape, read, dtype, new)
