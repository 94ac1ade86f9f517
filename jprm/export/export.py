"""Writes a trained model as a folder that transformers and vLLM, or PEFT, load with the same logits.

    transformers   AutoModelForTokenClassification; vLLM serves the same folder (task `token_classify`)
    qwen2-prm      the format of Qwen2.5-Math-PRM, which vLLM serves as Qwen2ForProcessRewardModel
    peft           the adapters of a LoRA run and the head, for the base model that they were trained on

Every folder holds the tokenizer, a model card (README.md), SHA256SUMS and `adapter.json`, which describes how chains
are written and scored.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jprm.checkpoints import decoder, kinds, peft
from jprm.checkpoints.huggingface import name_of
from jprm.checkpoints.safetensors import FILE, INDEX, SUMS, check_sums, sha256
from jprm.experiment import Experiment, read, to_json
from jprm.export import FileDtype, Format, card, peft_tensors
from jprm.loading import load
from jprm.model.config import ModelConfig
from jprm.model.heads import HEADS, find
from jprm.model.int8 import Int8
from jprm.outputs import atomic_file, atomic_write, tidy, whole_folder
from jprm.score.identity import identity
from jprm.score.scorer import PRM

CLASSIFIERS = ", ".join(name for name, head in HEADS.items() if head.classifier)
EXPORT = "export.json"
SHARD_BYTES = 5_000_000_000
_NUMBERS = {
    name: np.dtype(dtype)
    for name, dtype in (("float32", np.float32), ("bfloat16", jnp.bfloat16), ("float16", np.float16))
}

Tensor = tuple[str, tuple[int, ...], Callable[[], np.ndarray]]
"""Name, shape as (out, in), and how to get it."""


def export(
    model: PRM | str | os.PathLike,
    out: str | os.PathLike,
    *,
    dtype: FileDtype = "float32",
    format: Format = "transformers",
    shard_bytes: int = SHARD_BYTES,
) -> pathlib.Path:
    """Writes the model of a run's folder as a new folder `out`, whole or not at all.

    The same call, repeated after it was stopped, keeps the shards that are whole; repeated after it finished, it checks
    the folder against its SHA256SUMS (as `sha256sum -c` does). A matrix larger than `shard_bytes` is a file of its own.

    Raises:
      FileNotFoundError: `model` is no run's folder.
      FileExistsError: `out` is another export.
      ValueError: a model that the format cannot hold, or a folder that differs from its sums.
    """
    out = pathlib.Path(out)
    if not isinstance(model, PRM) and kinds.kind_of(model) != "run":
        raise FileNotFoundError(f"{model}: holds no {kinds.RUN}: only what `jprm train` made is exported")
    prm = load(model)
    experiment = read(pathlib.Path(prm.name) / kinds.RUN)
    if format == "peft":
        peft_tensors.check(prm, experiment)
    else:
        config = config_json(prm, experiment, dtype, format)
    request = json.dumps([identity(prm), dtype, format, shard_bytes, to_json(experiment)])
    about = {"experiment": experiment.name, "step": prm.step, "dtype": dtype, "format": format}
    about["request"] = hashlib.sha256(request.encode()).hexdigest()
    if out.exists():
        if _json_of(out / EXPORT) != about:
            raise FileExistsError(f"{out}: is there already, and not this export; name another folder or remove it")
        check_sums(out)
        tidy(out)
        return out
    with whole_folder(out, request) as partial:
        _write_json(partial / EXPORT, about)
        single, config_name = (peft.FILE, kinds.PEFT) if format == "peft" else (FILE, kinds.PUBLISHED)
        if format == "peft":
            arrays = peft_tensors.tensors(prm, experiment)
            config = peft_tensors.config_json(experiment, arrays)
            tensors = [(name, array.shape, functools.partial(np.asarray, array)) for name, array in arrays.items()]
        else:
            tensors = list(_tensors(prm, format))
        _write_tensors(partial, tensors, _NUMBERS[dtype], shard_bytes, single)
        _write_json(partial / config_name, config)
        _write_json(partial / "adapter.json", card.adapter_json(prm, experiment, find(prm.config.head).channels))
        prm.layout.tokenizer.save(partial)
        card.write(partial, prm, experiment, find(prm.config.head).channels, format)
        for file in list(partial.iterdir()):  # what a killed export left
            if file.suffix == ".partial":
                file.unlink()
        lines = [f"{sha256(file)}  {file.name}\n" for file in sorted(partial.iterdir()) if file.name != SUMS]
        (partial / SUMS).write_text("".join(lines))
    return out


def config_json(
    prm: PRM, experiment: Experiment, dtype: FileDtype = "float32", format: Format = "transformers"
) -> dict[str, Any]:
    """Returns the content of config.json. Raises ValueError naming the field that the format cannot express.

    RoPE is written as in transformers 4, which 5 and vLLM read too. vLLM takes an architecture that ends in
    ForTokenClassification for a pooling model with a score for every token, and needs no other field.
    """
    c = prm.config
    if isinstance(prm.params["decoder"]["embed"], Int8):
        raise ValueError(f"{prm.name}: was loaded in int8, which loses digits; load it without dtype to export it")
    labels = find(c.head).channels
    if not find(c.head).classifier:
        raise ValueError(f"{prm.name}: head {c.head!r} is no token classifier; one of {CLASSIFIERS} is")
    if c.qkv_bias and c.qk_norm:
        raise ValueError(f"{prm.name}: qkv_bias and qk_norm together are no model that transformers has")
    family = "qwen3" if c.qk_norm else "qwen2" if c.qkv_bias else "mistral" if c.windows else "llama"
    if c.design == "gemma":
        family = "gemma2"
    variant = _variant(prm, family)
    if family == "llama" and c.width % c.heads:
        raise ValueError(f"{prm.name}: width {c.width} is not a multiple of {c.heads} heads, as its class demands")
    if format == "transformers" and "hidden_kernel" in prm.params["head"]:
        raise ValueError(f"{prm.name}: a head of two layers is no token classifier; --format qwen2-prm has one")
    if format == "qwen2-prm" and (family != "qwen2" or labels != ("wrong", "right")):
        what = f"not of {family} with head {c.head!r}"
        raise ValueError(f"{prm.name}: Qwen2.5-Math-PRM's format is of a Qwen2 model with a binary head, {what}")
    tokenizer = prm.layout.tokenizer
    kind = "ProcessRewardModel" if format == "qwen2-prm" else "TokenClassification"
    return {
        "architectures": [f"{family.capitalize()}For{kind}"],
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
        "max_position_embeddings": experiment.data.tokens,  # no longer chain was ever in a row
        "tie_word_embeddings": False,  # there is no language head
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.eos,
        "pad_token_id": None,
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
        "classifier_dropout": 0.0,
        "use_cache": False,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _variant(prm: PRM, family: str) -> dict[str, Any]:
    """Returns the fields in which families differ. Raises ValueError for what the family's class does not compute."""
    c = prm.config
    kinds = [c.windows[i % len(c.windows)] for i in range(c.layers)] if c.windows else []
    if len(set(kinds) - {0}) > 1 or (family == "mistral" and 0 in kinds):
        raise ValueError(f"{prm.name}: windows {c.windows} are no pattern that transformers' {family} has")
    plain = not (c.query_pre_attn_scalar or c.attention_softcap or c.logit_softcap or c.rope_theta_local)
    if (family == "gemma2" and (c.qkv_bias or c.qk_norm)) or (family != "gemma2" and not plain):
        name = "Gemma 3" if c.design == "gemma" and c.qk_norm else "this model"
        raise ValueError(f"{prm.name}: transformers has no token classifier of {name}'s design")
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


def _tensors(prm: PRM, format: Format) -> Iterator[Tensor]:
    """Yields all parameters, a role's together, so that its stacks are fetched once."""
    params, config = prm.params["decoder"], prm.config

    @functools.lru_cache(maxsize=1)
    def stack(role: str) -> np.ndarray:
        groups = [np.asarray(params[f"layers_{i}"][role]) for i in range(len(config.layer_groups))]
        return np.concatenate(groups) if len(groups) > 1 else groups[0]

    def get(role: str, layer: int | None) -> np.ndarray:
        return decoder.to_file(role, np.asarray(params[role]) if layer is None else stack(role)[layer], config)

    shapes = decoder.file_shapes(config)
    for role, layer in decoder.slots(config):
        yield f"model.{name_of(role, layer, config)}", shapes[role], functools.partial(get, role, layer)
    head = jax.tree.map(np.asarray, prm.params["head"])
    for name, array in (two_layers(head) if format == "qwen2-prm" else one_layer(head)).items():
        yield f"score.{name}", array.shape, functools.partial(np.asarray, array)


def one_layer(head: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"weight": np.ascontiguousarray(head["kernel"].T), "bias": head["bias"]}


def two_layers(head: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns Linear(D, D), ReLU, Linear(D, C): the head's two layers, or a linear head in 2 C of the D hidden units.

    A logit z is relu(z) - relu(-z); one of the two is 0, so nothing is rounded.
    """
    if "hidden_kernel" in head:
        first = {"0.weight": np.ascontiguousarray(head["hidden_kernel"].T), "0.bias": head["hidden_bias"]}
        return first | {f"2.{name}": array for name, array in one_layer(head).items()}
    D, C = head["kernel"].shape
    if D < 2 * C:
        raise ValueError(f"a linear head of {C} classes needs {2 * C} hidden units, and the model is {D} wide")
    weight_DD, bias_D, out_CD = (np.zeros(shape, np.float32) for shape in ((D, D), D, (C, D)))
    weight_DD[: 2 * C] = np.concatenate([head["kernel"].T, -head["kernel"].T])
    bias_D[: 2 * C] = np.concatenate([head["bias"], -head["bias"]])
    out_CD[:, :C], out_CD[:, C : 2 * C] = np.eye(C), -np.eye(C)
    return {"0.weight": weight_DD, "0.bias": bias_D, "2.weight": out_CD, "2.bias": np.zeros(C, np.float32)}


def _write_tensors(folder: pathlib.Path, tensors: list[Tensor], dtype: np.dtype, shard_bytes: int, single: str) -> None:
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
            _save(folder / name, arrays)
        else:
            for _ in shard:
                next(done)
    next(done, None)  # the bar is full
    if len(names) > 1:
        places = {key: name for name, shard in zip(names, shards, strict=True) for key, _, _ in shard}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if dtype == np.float16 and np.isinf(cast).any() and np.isfinite(array).all():
        raise ValueError(f"tensor {name} holds {np.abs(array).max():.6g}, which float16 has not; use --dtype bfloat16")
    return cast


def _save(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    with atomic_file(path) as file:
        try:
            save_file(arrays, file.name, metadata={"format": "pt"})
        except SafetensorError as error:  # of a full disk too
            raise OSError(errno.EIO, f"could not be written: {error}", file.name) from error
        os.chmod(file.name, os.fstat(file.fileno()).st_mode)  # safetensors makes a file for its owner alone


def _json_of(path: pathlib.Path) -> Any:
    """Returns the file's content; None where there is none or it was cut short."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    atomic_write(path, json.dumps(content, indent=2) + "\n")
