"""Writes models as Hugging Face folders: config.json and safetensors."""

from __future__ import annotations

import errno
import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jprm.checkpoints import decoder
from jprm.checkpoints.huggingface import LANGUAGE_HEAD, name_of
from jprm.checkpoints.kinds import PUBLISHED, FileDtype
from jprm.checkpoints.safetensors import FILE, INDEX
from jprm.io.outputs import atomic_file, atomic_write
from jprm.model.config import ModelConfig
from jprm.tokenizer import Tokenizer

SHARD_BYTES = 5_000_000_000
NUMBERS = {
    name: np.dtype(dtype)
    for name, dtype in (("float32", np.float32), ("bfloat16", jnp.bfloat16), ("float16", np.float16))
}

Tensor = tuple[str, tuple[int, ...], Callable[[], np.ndarray]]
"""Name, shape as (out, in), and how to get it."""


def causal_lm(
    folder: pathlib.Path, params: Mapping[str, Any], config: ModelConfig, tokenizer: Tokenizer, positions: int,
    dtype: FileDtype, shard_bytes: int = SHARD_BYTES, *, tied_head: bool = False,
) -> None:  # fmt: skip
    """Writes a policy into a folder, as transformers, vLLM and SGLang read it: tensors, config.json and tokenizer.

    Adapters must be merged. `tied_head` also writes a head that is the embedding, for a server that is to exchange its
    parameters. Raises ValueError naming the field that no class of transformers has.
    """
    family, fields = decoder_json(str(folder), config, tokenizer, positions, dtype)
    tensors = list(decoder_tensors(params["decoder"], config))
    if not config.tied_embeddings:
        kernel_DV = params["head"]["kernel"]
        tensors.append((LANGUAGE_HEAD, kernel_DV.shape[::-1], lambda: np.ascontiguousarray(np.asarray(kernel_DV).T)))
    elif tied_head:
        embed_VD = params["decoder"]["embed"]
        tensors.append((LANGUAGE_HEAD, embed_VD.shape, lambda: np.asarray(embed_VD)))
    write_tensors(folder, tensors, NUMBERS[dtype], shard_bytes, FILE)
    fields |= {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": True,
    }
    write_json(folder / PUBLISHED, fields)
    tokenizer.save(folder)


def decoder_json(
    name: str, c: ModelConfig, tokenizer: Tokenizer, positions: int, dtype: FileDtype
) -> tuple[str, dict[str, Any]]:
    """Returns the family of a decoder's class in transformers, and the fields of config.json that every task shares.

    RoPE is written as in transformers 4, which 5 and vLLM read too. Raises ValueError, beginning with `name`, naming
    the field that the family cannot express.
    """
    if c.qkv_bias and c.qk_norm:
        raise ValueError(f"{name}: qkv_bias and qk_norm together are no model that transformers has")
    family = "qwen3" if c.qk_norm else "qwen2" if c.qkv_bias else "mistral" if c.windows else "llama"
    if c.design == "gemma":
        family = "gemma2"
    variant = _variant(name, c, family)
    if family == "llama" and c.width % c.heads:
        raise ValueError(f"{name}: width {c.width} is not a multiple of {c.heads} heads, as its class demands")
    return family, {
        "model_type": family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.mlp_width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        **variant,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": _rope_json(c),
        "max_position_embeddings": positions,  # no longer chain was ever in a row
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.eos,
        "pad_token_id": None,
        "use_cache": False,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _variant(name: str, c: ModelConfig, family: str) -> dict[str, Any]:
    """Returns the fields in which families differ. Raises ValueError for what the family's class does not compute."""
    kinds = [c.windows[i % len(c.windows)] for i in range(c.layers)] if c.windows else []
    if len(set(kinds) - {0}) > 1 or (family == "mistral" and 0 in kinds):
        raise ValueError(f"{name}: windows {c.windows} are no pattern that transformers' {family} has")
    plain = not (c.query_pre_attn_scalar or c.attention_softcap or c.logit_softcap or c.rope_theta_local)
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


def decoder_tensors(params: Mapping[str, Any], config: ModelConfig) -> Iterator[Tensor]:
    """Yields a decoder's parameters, a role's together, so that its stacks are fetched once.

    Raises ValueError for a parameter that the files have no name for.
    """
    names = flatten_dict(params, sep="/")
    if unknown := sorted(name for name in names if name.rpartition("/")[2] not in decoder.file_shapes(config)):
        raise ValueError(f"{', '.join(unknown)}: Hugging Face's files have no name for this parameter of the decoder")

    @functools.lru_cache(maxsize=1)
    def stack(role: str) -> np.ndarray:
        groups = [np.asarray(params[f"layers_{i}"][role]) for i in range(len(config.layer_groups))]
        return np.concatenate(groups) if len(groups) > 1 else groups[0]

    def get(role: str, layer: int | None) -> np.ndarray:
        return decoder.to_file(role, np.asarray(params[role]) if layer is None else stack(role)[layer], config)

    shapes = decoder.file_shapes(config)
    for role, layer in decoder.slots(config):
        yield f"model.{name_of(role, layer, config)}", shapes[role], functools.partial(get, role, layer)


def write_tensors(folder: pathlib.Path, tensors: list[Tensor], dtype: np.dtype, shard_bytes: int, single: str) -> None:
    """Writes one file, or shards and their index. Files that are there already are kept.

    The host holds one shard and one stack of layers.
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
    bar = functools.partial(track, total=len(tensors), transient=True, console=console, disable=not console.is_terminal)
    done = iter(bar(range(len(tensors)), "writing tensors"))
    for name, shard in zip(names, shards, strict=True):
        if not (folder / name).exists():
            arrays = {}
            for key, _, get in shard:
                arrays[key] = _cast(key, get(), dtype)
                next(done)
            save(folder / name, arrays)
        else:
            for _ in shard:
                next(done)
    next(done, None)  # the bar is full
    if len(names) > 1:
        places = {key: name for name, shard in zip(names, shards, strict=True) for key, _, _ in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if dtype == np.float16 and np.isinf(cast).any() and np.isfinite(array).all():
        raise ValueError(f"tensor {name} holds {np.abs(array).max():.6g}, which float16 has not; use --dtype bfloat16")
    return cast


def save(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    with atomic_file(path) as file:
        try:
            save_file(arrays, file.name, metadata={"format": "pt"})
        except SafetensorError as error:  # of a full disk too
            raise OSError(errno.EIO, f"could not be written: {error}", file.name) from error
        os.chmod(file.name, os.fstat(file.fileno()).st_mode)  # safetensors makes a file for its owner alone


def write_json(path: pathlib.Path, content: Any) -> None:
    atomic_write(path, json.dumps(content, indent=2) + "\n")
