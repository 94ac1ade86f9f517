"""Writes models as Hugging Face folders: config.json and safetensors."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, get_args

import numpy as np
from flax.core import FrozenDict
from flax.traverse_util import flatten_dict
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jprm.checkpoints import decoder
from jprm.checkpoints.safetensors import FILE, INDEX
from jprm.experiment import PUBLISHED
from jprm.io.outputs import atomic_file, atomic_write
from jprm.methods.formats.config_json import SIZES, Fields, Stored, values_of
from jprm.methods.formats.families import DELTANET, FAMILIES
from jprm.methods.formats.huggingface import LANGUAGE_HEAD, Tensor, fused, name_of
from jprm.model import FileDtype, layers
from jprm.model.attention import check_softmax
from jprm.model.config import ModelConfig
from jprm.tokenizer import Tokenizer

SHARD_BYTES = 5_000_000_000
NUMBERS = {name: np.dtype(name) for name in get_args(FileDtype)}


def causal_lm(
    folder: pathlib.Path, params: Mapping[str, Any], config: ModelConfig, tokenizer: Tokenizer, positions: int,
    dtype: FileDtype, shard_bytes: int = SHARD_BYTES, *, tied_head: bool = False,
) -> None:  # fmt: skip
    """Writes a policy as a folder for transformers, vLLM and SGLang: tensors, config.json and tokenizer.

    `params` has `decoder` and, if untied, `head`. `positions` is the longest context in tokens; a tensor file has about
    `shard_bytes`. Adapters must be merged. `tied_head` also writes a head equal to the embedding, for servers that
    exchange their parameters. The folder must exist; its tensor files are kept, config.json and tokenizer files are
    replaced.

    Raises ValueError, naming the field, if no class of transformers supports the model, and OSError if writing fails.
    """
    family, fields = decoder_json(str(folder), config, tokenizer, positions, dtype)
    tensors = list(decoder_tensors(params["decoder"], config, stored_by(fields, config)))
    if tied_head or not config.tied_embeddings:
        tensors.append(head_tensor(params, config))
    write_tensors(folder, tensors, NUMBERS[dtype], shard_bytes, FILE)
    fields |= {
        "architectures": [f"{CLASSES[family]}ForCausalLM"],
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": True,
    }
    write_json(folder / PUBLISHED, fields)
    tokenizer.save(folder)


def head_tensor(params: Mapping[str, Any], config: ModelConfig) -> Tensor:
    """Returns ("lm_head.weight", (vocabulary, width), function returning the array); the embedding if tied."""
    if config.tied_embeddings:
        embed_VD = params["decoder"]["embed"]
        return LANGUAGE_HEAD, embed_VD.shape, lambda: np.asarray(embed_VD)
    kernel_DV = params["head"]["kernel"]
    return LANGUAGE_HEAD, kernel_DV.shape[::-1], lambda: np.ascontiguousarray(np.asarray(kernel_DV).T)


def decoder_json(
    name: str, c: ModelConfig, tokenizer: Tokenizer, positions: int, dtype: FileDtype
) -> tuple[str, dict[str, Any]]:
    """Returns (family, fields): `model_type` in transformers, and the config.json fields shared by all tasks.

    The caller must add `architectures`, `tie_word_embeddings` and the fields of its head. `positions` is the longest
    context in tokens. RoPE is written as in transformers 4, which transformers 5 and vLLM also read.

    Raises ValueError, beginning with `name`, with the field that the family cannot express.
    """
    if c.qkv_bias and c.qk_norm:
        raise ValueError(f"{name}: qkv_bias and qk_norm together are no model that transformers has")
    family, its_own = _by_record(name, c) or _by_hand(name, c)
    return family, {
        "model_type": family,
        **{theirs: getattr(c, ours) for theirs, ours in SIZES.items()},
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        **its_own,
        "max_position_embeddings": positions,  # the longest chain in training
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.eos,
        "pad_token_id": None,
        "use_cache": False,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


CLASSES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma2": "Gemma2", "olmo3": "Olmo3",
    "smollm3": "SmolLM3", "ministral3": "Ministral3", "qwen3_moe": "Qwen3Moe", "qwen3_next": "Qwen3Next",
    "qwen3_5_text": "Qwen3_5", "olmo2": "Olmo2", "glm4": "Glm4", "phi3": "Phi3", "mixtral": "Mixtral",
    "gpt_oss": "GptOss",
}  # fmt: skip
"""Prefix of a family's class names in transformers."""

RECORDED = {
    "olmo2": lambda c: c.design == "olmo",
    "glm4": lambda c: c.design == "glm",
    "phi3": lambda c: c.rotary_dim and not c.mlps,
    "mixtral": lambda c: c.mlps and not c.experts.clamp,
    "gpt_oss": lambda c: c.experts.clamp,
}
"""Families written by their records, and models that might be of one: that is certain if the record reads it back."""


def _by_record(name: str, c: ModelConfig) -> tuple[str, dict[str, Any]] | None:
    """Returns the recorded family, if any, that reads the fields back as this model, and the fields."""
    check_softmax(c.attention, "transformers")
    rope = {"rope_theta": c.rope_theta, **(_rope_json(c) or {"rope_type": "default"})}
    if c.rotary_dim or c.design == "glm":
        rope["partial_rotary_factor"] = (c.rotary_dim or c.head_dim) / c.head_dim
    fields = {"hidden_act": "silu", "rope_parameters": rope, "sliding_window": max(c.windows, default=None)}
    if c.experts.count:
        fields |= {"num_local_experts": c.experts.count, "num_experts_per_tok": c.experts.used}
    if c.qkv_bias:
        fields["attention_bias"] = True
    if c.experts.clamp:
        kinds = ["sliding_attention" if c.windows and c.windows[i % len(c.windows)] else "full_attention"
                 for i in range(c.layers)]  # fmt: skip
        fields |= {"swiglu_limit": c.experts.clamp, "layer_types": kinds}
    sizes = {theirs: getattr(c, ours) for theirs, ours in SIZES.items()} | {"rms_norm_eps": c.norm_eps}
    for family in (family for family, may_be in RECORDED.items() if may_be(c)):
        try:
            read = values_of(Fields(pathlib.Path(name), {"model_type": family, **sizes, **fields}), FAMILIES[family])
        except ValueError:
            continue
        model = ModelConfig(**read)
        experts = dataclasses.replace(c.experts, balance=model.experts.balance)
        if model.experts == experts and all(getattr(model, x) == getattr(c, x) for x in decoder.FIELDS):
            return family, fields
    return None


def _by_hand(name: str, c: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Returns the family without such a record, and its fields. Raises ValueError if no class computes the model."""
    family = _family(name, c)
    variant = _variant(name, c, family)
    if family == "llama" and c.width % c.heads:
        raise ValueError(f"{name}: width {c.width} is not a multiple of {c.heads} heads, as its class demands")
    return family, {**variant, "rope_scaling": _rope_json(c), **_of_2026(c, family)}


def stored_by(fields: Mapping[str, Any], config: ModelConfig) -> Mapping[str, Stored]:
    """Returns {role: Stored} for tensors that files of the family in `fields` name or arrange unlike Llama's.

    `fields` are config.json's, with the `model_type` of a supported family. {} if all are as in Llama.
    """
    return FAMILIES[fields["model_type"]].tensors(Fields(pathlib.Path(PUBLISHED), dict(fields)), config)


WRITTEN = {"attention", "deltanet", "dense", "experts"}
"""Kinds of layers that are written."""


def _family(name: str, c: ModelConfig) -> str:
    """Returns the family whose class computes the model. Raises ValueError if jprm knows no such family."""
    if foreign := sorted({*c.mixers, *c.mlps} - WRITTEN):
        raise ValueError(f"{name}: transformers has no class with layers of the kind {', '.join(foreign)}")
    if c.out_bias or c.experts.clamp:
        raise ValueError(f"{name}: out_bias and clamped experts are written only together with the rest of gpt-oss")
    mixture, hybrid = "experts" in c.mlps, "deltanet" in c.mixers
    next_one = c.qk_norm and c.attention_gate and c.design == "qwen3_next"
    for family, its_own, plain in (
        ("qwen3_next", hybrid and mixture and next_one and c.experts.shared_width, True),
        ("qwen3_5_text", hybrid and not mixture and next_one, True),
        ("qwen3_moe", mixture and c.qk_norm and not c.experts.shared_width, not (c.windows or hybrid)),
        ("olmo3", c.design == "olmo" and c.qk_width_norm and c.windows, not c.qkv_bias),
        ("smollm3", c.rope_layers, not (c.windows or c.qk_norm or c.qkv_bias)),
        ("ministral3", c.query_growth and c.rope_scaling.kind == "yarn", not (c.windows or c.qk_norm or c.qkv_bias)),
    ):
        if its_own and plain:
            return family
    new = c.mixers or c.mlps or c.rope_layers or c.query_growth or c.rotary_dim or c.attention_gate or c.qk_width_norm
    if new or c.design not in ("llama", "gemma"):
        raise ValueError(f"{name}: transformers has no class of this model's layers that jprm writes")
    if c.design == "gemma":
        return "gemma2"
    return "qwen3" if c.qk_norm else "qwen2" if c.qkv_bias else "mistral" if c.windows else "llama"


def _of_2026(c: ModelConfig, family: str) -> dict[str, Any]:
    """Returns the fields added to Llama's by the 2026 families."""
    fields: dict[str, Any] = {}
    rope = {"rope_theta": c.rope_theta} | (_rope_json(c) or {"rope_type": "default"})
    if family == "olmo3":
        local = {"rope_type": "default", "rope_theta": c.rope_theta_local or c.rope_theta}
        fields = {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    if family == "ministral3":
        beta, positions = c.query_growth
        scaling = {"llama_4_scaling_beta": beta, "original_max_position_embeddings": int(positions)}
        fields = {"rope_parameters": rope | scaling}
    if family == "smollm3":
        fields = {"no_rope_layers": [c.rope_layers[i % len(c.rope_layers)] for i in range(c.layers)]}
    if family in ("qwen3_moe", "qwen3_next"):
        dense = [i for i in range(c.layers) if c.mlps[i % len(c.mlps)] == "dense"]
        fields |= {
            "num_experts": c.experts.count, "num_experts_per_tok": c.experts.used,
            "moe_intermediate_size": c.experts.width, "norm_topk_prob": c.experts.normalised,
            "mlp_only_layers": dense, "decoder_sparse_step": 1,
        }  # fmt: skip
    if family in ("qwen3_5_text", "qwen3_next"):
        kinds = {"deltanet": "linear_attention", "attention": "full_attention"}
        fields |= {
            **{theirs: getattr(c.deltanet, ours) for theirs, ours in DELTANET.items()},
            "layer_types": [kinds[c.mixers[i % len(c.mixers)]] for i in range(c.layers)],
            "rope_parameters": rope | {"partial_rotary_factor": (c.rotary_dim or c.head_dim) / c.head_dim},
        }  # fmt: skip
    if family == "qwen3_next":
        fields["shared_expert_intermediate_size"] = c.experts.shared_width
    return fields | ({"rope_scaling": None} if "rope_parameters" in fields else {})


def _variant(name: str, c: ModelConfig, family: str) -> dict[str, Any]:
    """Returns the fields in which families differ. Raises ValueError for a feature that the family's class lacks."""
    kinds = [c.windows[i % len(c.windows)] for i in range(c.layers)] if c.windows else []
    if len(set(kinds) - {0}) > 1 or (family == "mistral" and 0 in kinds):
        raise ValueError(f"{name}: windows {c.windows} are not a pattern of transformers' {family}")
    local = c.rope_theta_local and family != "olmo3"
    plain = not (c.query_pre_attn_scalar or c.attention_softcap or c.logit_softcap or local)
    if (family == "gemma2" and (c.qkv_bias or c.qk_norm)) or (family != "gemma2" and not plain):
        what = "Gemma 3" if c.design == "gemma" and c.qk_norm else "this model"
        raise ValueError(f"{name}: transformers has no class of {what}'s design that jprm writes")
    fields: dict[str, Any] = {"hidden_act": "silu"}
    if family == "gemma2":
        fields = {
            "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": c.query_pre_attn_scalar or c.head_dim,
            "attn_logit_softcapping": c.attention_softcap or None, "final_logit_softcapping": c.logit_softcap or None,
            "sliding_window": None,
        }  # fmt: skip
    if family != "mistral" and (c.windows or family == "gemma2"):
        names = ("full_attention", "sliding_attention")
        fields["layer_types"] = [names[kind > 0] for kind in kinds or [0] * c.layers]
    if c.windows:
        fields["sliding_window"] = max(c.windows)
        fields |= {"use_sliding_window": True} if family in ("qwen2", "qwen3") else {}
    return fields


def _rope_json(config: ModelConfig) -> dict[str, Any] | None:
    s = config.rope_scaling
    if s.kind == "none":
        return None
    fields: dict[str, Any] = {"rope_type": s.kind, "factor": s.factor}
    if s.kind == "llama3":
        fields |= {"low_freq_factor": s.low, "high_freq_factor": s.high}
    if s.kind == "yarn":
        fields |= {"beta_slow": s.low, "beta_fast": s.high, "attention_factor": s.attention_factor}
        fields |= {"truncate": s.truncate}
    if s.kind in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = s.positions
    return fields


def decoder_tensors(
    params: Mapping[str, Any], config: ModelConfig, stored: Mapping[str, Stored] = FrozenDict()
) -> Iterable[Tensor]:
    """Returns a decoder's parameters as (name in the file, shape, function that returns the array).

    A name is e.g. `model.norm.weight`. They are grouped by role, so that each stack is fetched once. `stored` has the
    roles that the family's files name or arrange differently (`stored_by`).

    Raises ValueError at once for a parameter without a name in Hugging Face files.
    """
    names = flatten_dict(params, sep="/")
    if unknown := sorted(name for name in names if name.rpartition("/")[2] not in decoder.file_shapes(config)):
        raise ValueError(f"{', '.join(unknown)}: Hugging Face's files have no name for this parameter of the decoder")

    of_role = layers.stacks(config, 0, config.layers)

    @functools.lru_cache(maxsize=1)
    def stack(role: str) -> np.ndarray:
        groups = [params[f"layers_{i}"] for i in range(len(config.layer_groups))]
        stacks = [np.asarray(group[role]) for group in groups if role in group]
        return np.concatenate(stacks) if len(stacks) > 1 else stacks[0]

    def get(role: str, layer: int | None) -> np.ndarray:
        array = params[role] if layer is None else stack(role)[of_role[role][2].index(layer)]
        return decoder.to_file(role, np.asarray(array), config)

    def plain() -> Iterator[Tensor]:
        shapes = decoder.file_shapes(config)
        sharing = {name: [r for r in shapes if r in stored and stored[r].name == name] for name in
                   (its.name for its in stored.values())}  # fmt: skip
        for role, layer in decoder.slots(config):
            if role not in stored:
                yield f"model.{name_of(role, layer, config)}", shapes[role], functools.partial(get, role, layer)
            elif role == (roles := sharing[stored[role].name])[0]:
                parts = [(stored[r], shapes[r], functools.partial(get, r, layer)) for r in roles]
                yield from _arranged("model." if layer is None else f"model.layers.{layer}.", parts)

    return fused(plain(), config)


def _arranged(prefix: str, parts: list[tuple[Stored, tuple[int, ...], Callable[[], np.ndarray]]]) -> Iterator[Tensor]:
    """Yields the file's tensor that holds these roles, or a tensor per expert; inverse of `huggingface.Arranged`."""
    first, shape, get = parts[0]
    if "{}" in first.name:
        for e in range(shape[0]):
            yield prefix + first.name.format(e), shape[1:], lambda e=e: get()[e]
        return
    whole = first.whole(shape)

    def joined() -> np.ndarray:
        index, arrays = np.arange(math.prod(whole)).reshape(whole), [get() for *_, get in parts]
        array = np.empty(math.prod(whole), arrays[0].dtype)
        for (stored, *_), of_role in zip(parts, arrays, strict=True):
            array[stored.take(index)] = of_role / stored.factor
        return array.reshape(whole)

    yield prefix + first.name, whole, joined


def write_tensors(folder: pathlib.Path, tensors: list[Tensor], dtype: np.dtype, shard_bytes: int, single: str) -> None:
    """Writes one file, named `single`, or shards of about `shard_bytes` and their index. Existing files stay, unread.

    Shards are `model-00001-of-00002.safetensors` etc., and the index, replaced last, `model.safetensors.index.json`.
    Each file is written atomically; the folder must exist. The host holds one shard and one stack of layers. Shows a
    progress bar on a terminal.

    Raises OSError if writing fails, e.g. on a full disk, and ValueError if a number is beyond float16.
    """
    shards: list[list[Tensor]] = [[]]
    size = total = 0
    for tensor in tensors:
        nbytes = int(np.prod(tensor[1])) * dtype.itemsize
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size, total = size + nbytes, total + nbytes
    names = [single] if len(shards) == 1 else [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]  # fmt: skip
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("writing tensors", total=len(tensors))
        for name, shard in zip(names, shards, strict=True):
            if (folder / name).exists():
                bar.advance(task, len(shard))
                continue
            arrays = {}
            for key, _, get in shard:
                arrays[key] = _cast(key, get(), dtype)
                bar.advance(task)
            save(folder / name, arrays)
    if len(names) > 1:
        places = {key: name for name, shard in zip(names, shards, strict=True) for key, _, _ in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if dtype == np.float16 and np.isinf(cast).any() and np.isfinite(array).all():
        raise ValueError(f"tensor {name} holds {np.abs(array).max():.6g}, beyond float16; use --dtype bfloat16")
    return cast


def save(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    with atomic_file(path) as file:
        try:
            save_file(arrays, file.name, metadata={"format": "pt"})
        except SafetensorError as error:  # of a full disk too
            raise OSError(errno.EIO, f"could not be written: {error}", file.name) from error
        os.chmod(file.name, os.fstat(file.fileno()).st_mode)  # safetensors makes files readable only by their owner


def write_json(path: pathlib.Path, content: Any) -> None:
    atomic_write(path, json.dumps(content, indent=2) + "\n")
