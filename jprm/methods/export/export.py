"""Writes a trained model as a folder that transformers and vLLM, or PEFT, load with the same logits.

    transformers   AutoModelForTokenClassification; vLLM serves the same folder (task `token_classify`). A policy is
                   AutoModelForCausalLM, which vLLM and SGLang serve
    qwen2-prm      the format of Qwen2.5-Math-PRM, which vLLM serves as Qwen2ForProcessRewardModel
    peft           the adapters of a LoRA run and the head, for the base model that they were trained on

Every folder holds the tokenizer, a model card (README.md), SHA256SUMS and `adapter.json`, which describes how chains
are written and scored.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jprm.checkpoints import huggingface, kinds, peft, store, writing
from jprm.checkpoints.kinds import PUBLISHED
from jprm.checkpoints.peft import PREFIX
from jprm.checkpoints.safetensors import FILE, SUMS, check_sums
from jprm.checkpoints.writing import Tensor
from jprm.experiment import Experiment, read, to_json
from jprm.io.folders import is_whole, local_copy, tidy, whole_folder
from jprm.io.storage import Place, path_of, sha256_of
from jprm.loading import load
from jprm.methods.export import FileDtype, Format, card
from jprm.model.heads import HEADS, TOKEN, find
from jprm.model.lora import PRODUCTS, A, B, merge
from jprm.model.mesh import make_mesh
from jprm.model.parameters import Int8
from jprm.score.files import digest, identity
from jprm.score.scorer import PRM
from jprm.tokenizer import load_tokenizer

CLASSIFIERS = ", ".join(name for name, head in HEADS.items() if head.classifier)
EXPORT = "export.json"


def export(
    model: PRM | str | os.PathLike,
    out: str | os.PathLike,
    *,
    dtype: FileDtype = "float32",
    format: Format = "transformers",
    shard_bytes: int = writing.SHARD_BYTES,
) -> Place:
    """Writes the model of a run's folder as a new folder `out`, whole or not at all; either may be in a bucket.

    The same call, repeated after it was stopped, keeps the shards that are whole; repeated after it finished, it checks
    the folder against its SHA256SUMS (as `sha256sum -c` does). A matrix larger than `shard_bytes` is a file of its own.

    Raises:
      FileNotFoundError: `model` is no run's folder.
      FileExistsError: `out` is another export.
      ValueError: a model that the format cannot hold, or a folder that differs from its sums.
    """
    out = path_of(out)
    if not isinstance(model, PRM):
        if kinds.kind_of(model) != "run":
            raise FileNotFoundError(f"{model}: holds no {kinds.RUN}: only what `jprm train` made is exported")
        if find(read(path_of(model) / kinds.RUN).model.head).target == TOKEN:
            return _policy(path_of(model), out, dtype, format, shard_bytes)
    prm = load(model)
    experiment = read(path_of(prm.name) / kinds.RUN)
    if format == "peft":
        _check_peft(prm, experiment)
    if prm.config.steps:
        raise ValueError(f"{prm.name}: model.steps={prm.config.steps!r} is a layer that no other library computes")
    config = {} if format == "peft" else config_json(prm, experiment, dtype, format)
    about = {"experiment": experiment.name, "step": prm.step, "dtype": dtype, "format": format}
    labels = find(prm.config.head).channels

    def write(partial: pathlib.Path) -> None:
        single, config_name = (peft.FILE, kinds.PEFT) if format == "peft" else (FILE, PUBLISHED)
        if format == "peft":
            arrays = _peft_tensors(prm, experiment)
            fields = _peft_json(experiment, arrays)
            tensors = [(name, array.shape, functools.partial(np.asarray, array)) for name, array in arrays.items()]
        else:
            fields, tensors = config, list(_tensors(prm, format))
        writing.write_tensors(partial, tensors, writing.NUMBERS[dtype], shard_bytes, single)
        writing.write_json(partial / config_name, fields)
        writing.write_json(partial / "adapter.json", card.adapter_json(prm, experiment, labels))
        prm.layout.tokenizer.save(partial)
        card.write(partial, prm, experiment, labels, format)

    return _whole(out, about, [identity(prm), dtype, format, shard_bytes, to_json(experiment)], write)


def _policy(folder: Place, out: Place, dtype: FileDtype, format: Format, shard_bytes: int) -> Place:
    """Writes the policy of a run's folder as a causal language model, adapters merged."""
    if format != "transformers":
        raise ValueError(f"{folder}: writes steps and scores none; --format transformers writes a policy")
    experiment, mesh = read(folder / kinds.RUN), make_mesh(devices=jax.local_devices())
    with jax.set_mesh(mesh):
        params, step = store.load_params(folder, experiment, mesh)
        params = merge(params, experiment.lora)
    tokenizer = load_tokenizer(folder, experiment.model.vocab_size)
    about = {"experiment": experiment.name, "step": step, "dtype": dtype, "format": format}

    def write(partial: pathlib.Path) -> None:
        positions = experiment.data.tokens
        writing.causal_lm(partial, params, experiment.model, tokenizer, positions, dtype, shard_bytes)
        card.write_policy(partial, experiment, step)

    return _whole(out, about, [digest(params, tokenizer, mesh), dtype, shard_bytes, to_json(experiment)], write)


def _whole(out: Place, about: dict[str, Any], request: list[Any], write: Callable[[pathlib.Path], None]) -> Place:
    """Writes a folder, or checks one that is there, and returns it."""
    asked = json.dumps(request)
    about |= {"request": hashlib.sha256(asked.encode()).hexdigest()}
    if is_whole(out):
        if _json_of(out / EXPORT) != about:
            raise FileExistsError(f"{out}: is there already, and not this export; name another folder or remove it")
        check_sums(local_copy(out))
        tidy(out)
        return out
    last = kinds.PEFT if about["format"] == "peft" else PUBLISHED
    with whole_folder(out, asked, last=last) as partial:
        writing.write_json(partial / EXPORT, about)
        write(partial)
        for file in list(partial.iterdir()):  # what a killed export left
            if file.suffix == ".partial":
                file.unlink()
        lines = [f"{sha256_of(file)}  {file.name}\n" for file in sorted(partial.iterdir()) if file.name != SUMS]
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
    family, decoder = writing.decoder_json(prm.name, c, prm.layout.tokenizer, experiment.data.tokens, dtype)
    if format == "transformers" and "hidden_kernel" in prm.params["head"]:
        raise ValueError(f"{prm.name}: a head of two layers is no token classifier; --format qwen2-prm has one")
    if format == "qwen2-prm" and (family != "qwen2" or labels != ("wrong", "right")):
        what = f"not of {family} with head {c.head!r}"
        raise ValueError(f"{prm.name}: Qwen2.5-Math-PRM's format is of a Qwen2 model with a binary head, {what}")
    kind = "ProcessRewardModel" if format == "qwen2-prm" else "TokenClassification"
    return decoder | {
        "architectures": [f"{family.capitalize()}For{kind}"],
        "tie_word_embeddings": False,  # there is no language head
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
        "classifier_dropout": 0.0,
    }


def _tensors(prm: PRM, format: Format) -> Iterator[Tensor]:
    """Yields all parameters, a role's together, so that its stacks are fetched once."""
    yield from writing.decoder_tensors(prm.params["decoder"], prm.config)
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


def _json_of(path: Place) -> Any:
    """Returns the file's content; None where there is none or it was cut short."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _check_peft(prm: PRM, experiment: Experiment) -> None:
    """Raises ValueError for a model that has no adapters, or whose head or base PEFT cannot load."""
    if not experiment.lora.rank:
        raise ValueError(
            f"{prm.name}: was trained without adapters (lora.rank=0); --format transformers writes it whole"
        )
    if not find(prm.config.head).classifier or "hidden_kernel" in prm.params["head"]:
        raise ValueError(f"{prm.name}: PEFT's token classifiers have a linear head over classes of one softmax")
    if not experiment.base or not (path_of(experiment.base) / PUBLISHED).is_file():
        raise ValueError(
            f"{prm.name}: its base {experiment.base or 'of random parameters'!r} is no Hugging Face folder, so PEFT has"
            " nothing to put the adapters on; --format transformers merges them"
        )
    if (layers := huggingface.model_config(local_copy(experiment.base, (PUBLISHED,))).layers) != prm.config.layers:
        raise ValueError(
            f"{prm.name}: has {prm.config.layers} of its base's {layers} layers, and PEFT would use them all;"
            " --format transformers merges the adapters"
        )


def _peft_tensors(prm: PRM, experiment: Experiment) -> dict[str, np.ndarray]:
    """Returns the file's tensors by name, in float32: A and B, a layer at a time, and the linear head."""
    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        params, _ = store.load_params(prm.name, experiment, mesh)
    arrays: dict[str, np.ndarray] = {}
    first = 0
    for group, layers in enumerate(prm.config.layer_groups):
        stack = params["decoder"][f"layers_{group}"]
        for role in (role for role in PRODUCTS if role + A in stack):
            a, b = np.asarray(stack[role + A]), np.asarray(stack[role + B])
            rank = a.shape[-1]
            for i in range(layers):
                name = huggingface.name_of(role, first + i, prm.config).removesuffix(".weight")
                arrays[f"{PREFIX}model.{name}.lora_A.weight"] = np.ascontiguousarray(a[i].reshape(-1, rank).T)
                arrays[f"{PREFIX}model.{name}.lora_B.weight"] = np.ascontiguousarray(b[i].reshape(rank, -1).T)
        first += layers
    arrays[f"{PREFIX}score.weight"] = np.ascontiguousarray(np.asarray(params["head"]["kernel"]).T)
    arrays[f"{PREFIX}score.bias"] = np.asarray(params["head"]["bias"])
    return arrays


def _peft_json(experiment: Experiment, names: Iterable[str]) -> dict[str, Any]:
    """Returns the content of adapter_config.json. PEFT compares `target_modules` with the ends of modules' names."""
    lora = experiment.lora
    layered = (re.search(r"layers\.\d+\..+(?=\.lora_A\.weight)", name) for name in names)
    return {
        "peft_type": "LORA",
        "task_type": "TOKEN_CLS",
        "base_model_name_or_path": experiment.base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": [match[0] for match in layered if match],
        "modules_to_save": ["score"],
        "inference_mode": True,
    }
