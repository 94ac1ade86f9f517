"""A trained model as a folder that transformers loads with AutoModelForTokenClassification, with the same logits."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from safetensors.numpy import save_file

from jprm.checkpoints import decoder
from jprm.checkpoints.huggingface import name_of
from jprm.checkpoints.safetensors import FILE, INDEX
from jprm.model.config import ModelConfig
from jprm.model.int8 import Int8
from jprm.score.scorer import PRM, load
from jprm.tokenizer import JsonTokenizer
from jprm.train.config import Experiment, read

LABELS = {"binary": ("wrong", "right"), "ternary": ("negative", "neutral", "positive")}
"""Names of the logits by head, in order."""

SUMS = "SHA256SUMS"
SHARD_BYTES = 5_000_000_000


def export(
    model: PRM | str | os.PathLike,
    out: str | os.PathLike,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    shard_bytes: int = SHARD_BYTES,
) -> pathlib.Path:
    """Writes the model of a run's folder as a new Hugging Face folder `out`, whole or not at all.

    `SHA256SUMS` in it is checked by `sha256sum -c`. A matrix larger than `shard_bytes` is a file of its own.

    Raises FileExistsError where `out` is there, ValueError for a model that no class of transformers computes.
    """
    out = pathlib.Path(out)
    if out.exists():
        raise FileExistsError(f"{out}: is there already; name a folder that is not, or remove it first")
    prm = model if isinstance(model, PRM) else load(model)
    experiment = read(pathlib.Path(prm.name) / "experiment.json")
    config = config_json(prm, experiment, dtype)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was stopped
    partial.mkdir(parents=True)
    _write_json(partial / "config.json", config)
    prm.layout.tokenizer.save(partial)
    _write_tensors(partial, prm, np.dtype(jnp.bfloat16 if dtype == "bfloat16" else np.float32), shard_bytes)
    (partial / "README.md").write_text(_card(prm, experiment, config), encoding="utf-8")
    lines = []
    for file in sorted(partial.iterdir()):
        with open(file, "rb") as opened:
            lines.append(f"{hashlib.file_digest(opened, 'sha256').hexdigest()}  {file.name}\n")
    (partial / SUMS).write_text("".join(lines))
    os.replace(partial, out)
    return out


def config_json(prm: PRM, experiment: Experiment, dtype: str = "float32") -> dict[str, Any]:
    """What config.json says. Raises ValueError, naming the field, where no family of transformers is this model."""
    c = prm.config
    if isinstance(prm.params["decoder"]["embed"], Int8):
        raise ValueError(f"{prm.name}: was loaded in int8, which loses digits; load it without dtype to export it")
    if c.head not in LABELS:
        raise ValueError(f"{prm.name}: head {c.head!r} is no token classifier; one of {', '.join(LABELS)} is")
    if c.qkv_bias and c.qk_norm:
        raise ValueError(f"{prm.name}: qkv_bias and qk_norm together are no model that transformers has")
    family = "qwen3" if c.qk_norm else "qwen2" if c.qkv_bias else "mistral" if c.windows else "llama"
    if c.design == "gemma":
        family = "gemma2"
    variant = _variant(prm, family)
    if family == "llama" and c.width % c.heads:
        raise ValueError(f"{prm.name}: width {c.width} is not a multiple of {c.heads} heads, as its class demands")
    tokenizer = prm.layout.tokenizer
    return {
        "architectures": [f"{family.capitalize()}ForTokenClassification"],
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
        "rope_parameters": _rope_json(c),
        "max_position_embeddings": experiment.data.tokens,  # no longer chain was ever in a row
        "tie_word_embeddings": False,  # there is no language head
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.eos,
        "pad_token_id": None,
        "id2label": {str(i): label for i, label in enumerate(LABELS[c.head])},
        "label2id": {label: i for i, label in enumerate(LABELS[c.head])},
        "classifier_dropout": 0.0,
        "use_cache": False,
        "dtype": dtype,
    }


def _variant(prm: PRM, family: str) -> dict[str, Any]:
    """The fields in which families differ. Raises ValueError for what the family's class does not compute."""
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


def _rope_json(config: ModelConfig) -> dict[str, Any]:
    s = config.rope_scaling
    fields: dict[str, Any] = {"rope_type": "default" if s.kind == "none" else s.kind, "rope_theta": config.rope_theta}
    if s.kind != "none":
        fields["factor"] = s.factor
    if s.kind == "llama3":
        fields |= {"low_freq_factor": s.low, "high_freq_factor": s.high}
    if s.kind == "yarn":
        fields |= {"beta_slow": s.low, "beta_fast": s.high, "attention_factor": s.attention_factor}
        fields |= {"truncate": s.truncate}
    if s.kind in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = s.positions
    return fields


def _write_tensors(folder: pathlib.Path, prm: PRM, dtype: np.dtype, shard_bytes: int) -> None:
    """model.safetensors, or shards and their index; the host holds one shard and one stack of layers."""
    shards: list[dict[str, np.ndarray]] = [{}]
    files: list[tuple[pathlib.Path, list[str]]] = []
    size = total = 0

    def flush() -> None:
        path = folder / f"{len(files)}.safetensors"
        path.touch()  # safetensors would make a file that its owner alone may read; a server often runs as another user
        mode = path.stat().st_mode
        save_file(shards[0], path, metadata={"format": "pt"})
        path.chmod(mode)
        files.append((path, list(shards[0])))
        shards[0] = {}

    count = sum(1 for _ in decoder.slots(prm.config)) + 2
    console = Console(stderr=True)
    bar = functools.partial(track, total=count, transient=True, console=console, disable=not console.is_terminal)
    for name, array in bar(_tensors(prm), "writing tensors"):
        array = array.astype(dtype)
        if shards[0] and size + array.nbytes > shard_bytes:
            flush()
            size = 0
        shards[0][name] = array
        size, total = size + array.nbytes, total + array.nbytes
    flush()
    if len(files) == 1:
        os.replace(files[0][0], folder / FILE)
        return
    places = {}
    for i, (path, names) in enumerate(files, start=1):
        shard = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        os.replace(path, folder / shard)
        places |= dict.fromkeys(names, shard)
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _tensors(prm: PRM) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor as (out, in)) of all parameters; those of a role together, so that its stacks are fetched once."""
    params, config = prm.params["decoder"], prm.config
    stacks: tuple[str, np.ndarray] = ("", np.empty(0))
    for role, layer in decoder.slots(config):
        if layer is None:
            array = np.asarray(params[role])
        else:
            if stacks[0] != role:
                groups = [np.asarray(params[f"layers_{i}"][role]) for i in range(len(config.layer_groups))]
                stacks = role, np.concatenate(groups) if len(groups) > 1 else groups[0]
            array = stacks[1][layer]
        yield f"model.{name_of(role, layer, config)}", decoder.to_file(role, array, config)
    head = jax.tree.map(np.asarray, prm.params["head"])
    yield "score.weight", np.ascontiguousarray(head["kernel"].T)
    yield "score.bias", head["bias"]


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _card(prm: PRM, experiment: Experiment, config: dict[str, Any]) -> str:
    """The model card: what it is, what it learnt from, how its inputs are laid out, how to use it."""
    data, target, tokenizer = experiment.data, experiment.target, prm.layout.tokenizer
    bos = "none" if tokenizer.bos is None else f"id {tokenizer.bos}, once, at the very start"
    result = pathlib.Path(prm.name) / "result.json"
    metrics = json.loads(result.read_text()) if result.is_file() else {}
    shown = {k: v for k, v in metrics.items() if isinstance(v, int | float) and "second" not in k}
    table = "".join(f"| {name} | {value:.6g} |\n" for name, value in shown.items()) or "| none recorded | |\n"
    labels = LABELS[prm.config.head]
    classes = ", ".join(f"{i} = {label}" for i, label in enumerate(labels))
    base = pathlib.Path(experiment.base).name if experiment.base else "random parameters"
    specials = "" if isinstance(tokenizer, JsonTokenizer) else "\nThe tokenizer is a SentencePiece model alone.\n"
    return f"""---
library_name: transformers
pipeline_tag: token-classification
tags: [process-reward-model, jprm]
---

# {experiment.name}

A process reward model: it scores every step of a chain of reasoning. Trained with jprm, {prm.step} steps.

- Base: {base}, {config["num_hidden_layers"]} layers
- Data: {", ".join(pathlib.Path(file).name for file in data.train)}; supervision: {data.supervise}
- Labels: {target.labels} ({prm.semantics}); neutral: {target.neutral}
- Steps after the first error: {target.after_error}
- Loss: {experiment.loss}; chains longer than {data.tokens} tokens: {data.too_long}
- Classes: {classes}. The score of a step is 1 - P({labels[0]}), by the softmax.

## Layout of the input

Each part is encoded alone, without special tokens, and the ids are joined; a joined string is never encoded again.

- bos: {bos}
- the problem, then a newline (ids {list(prm.layout.newline)})
- each step, then a newline; its score is read at that newline's last token
{specials}
```python
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForTokenClassification.from_pretrained(FOLDER).eval()

def encode(text):
    return tokenizer.encode(text, add_special_tokens=False)

ids, ends = {[] if tokenizer.bos is None else [tokenizer.bos]} + encode(problem) + encode("\\n"), []
for step in steps:
    ids += encode(step) + encode("\\n")
    ends.append(len(ids) - 1)
with torch.no_grad():
    scores = model(torch.tensor([ids])).logits[0, ends].softmax(-1)[:, 1:].sum(-1)
```

## Metrics at the end of training

| metric | value |
|---|---|
{table}"""
