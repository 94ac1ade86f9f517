"""Exports a trained model as a folder for transformers, vLLM or PEFT, with equal logits.

    transformers   AutoModelForTokenClassification; vLLM serves the same folder (task `token_classify`). A policy
                   becomes an AutoModelForCausalLM, which vLLM and SGLang serve
    qwen2-prm      the format of Qwen2.5-Math-PRM, which vLLM serves as Qwen2ForProcessRewardModel
    peft           the adapters and head of a LoRA run, for the base model that they were trained on

Every folder has the tokenizer, a model card (README.md), SHA256SUMS and `adapter.json`, which describes the layout of
chains and their scoring.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import jax
import numpy as np

from jprm.checkpoints import base, store
from jprm.checkpoints.safetensors import FILE, SUMS, check_sums, read_json
from jprm.checkpoints.store import fingerprint
from jprm.experiment import PEFT, PUBLISHED, RUN, Experiment, kind_of, read, to_json
from jprm.io.folders import is_whole, local_copy, tidy, whole_folder
from jprm.io.storage import Found, Place, path_of, sha256_of
from jprm.loading import load
from jprm.methods.evaluate.benchmarks import BENCHMARKS
from jprm.methods.evaluate.blocks import figures_in
from jprm.methods.export import FileDtype, Format
from jprm.methods.formats import huggingface, peft, writing
from jprm.methods.formats.chat_template import template_of
from jprm.methods.formats.config_json import Fields
from jprm.methods.formats.gguf import open_gguf
from jprm.methods.formats.peft import PREFIX
from jprm.methods.formats.writing import Tensor
from jprm.methods.jobs.score import identity
from jprm.model.heads import HEADS, TOKEN, Weighted, find, of_channels
from jprm.model.mesh import make_mesh
from jprm.model.parameters import A, B, merge, products
from jprm.options import place_of
from jprm.score.scorer import PRM
from jprm.tokenizer import TEMPLATE, JsonTokenizer, load_tokenizer

CLASSIFIERS = ", ".join(name for name, head in HEADS.items() if head.classifier)
EXPORT = "export.json"

MODULES = "modules.json"
EVERY_TOKEN = [
    {"idx": 0, "name": "pooling", "path": ".", "type": "sentence_transformers.models.Pooling"},
    {"idx": 1, "name": "activation", "path": ".", "type": "sentence_transformers.models.Normalize"},
]
"""For vLLM, which pools Qwen2ForProcessRewardModel at <extra_0>, a token that jprm's layout lacks: use `pooling_mode`
of config.json instead, and apply the softmax."""


def export(
    model: PRM | str | os.PathLike,
    out: str | os.PathLike,
    *,
    dtype: FileDtype = "float32",
    format: Format = "transformers",
    shard_bytes: int = writing.SHARD_BYTES,
) -> Place:
    """Writes the model in a run's folder as a new folder `out`, atomically; either may be in a bucket. Returns `out`.

    `model` may also be a policy's run or a language model (GGUF file or Hugging Face folder); `format` must then be
    `transformers`.

    A repeated call continues a stopped export, keeping whole shards, and checks a finished one against its SHA256SUMS
    (as `sha256sum -c`). A matrix larger than `shard_bytes` gets its own file.

    Raises:
      FileNotFoundError: `model` is neither a run's folder nor a language model.
      FileExistsError: `out` is another export.
      ValueError: the format cannot represent the model, the folder differs from its checksums, or another process is
        writing it.
      OSError: writing failed, e.g. because the disk is full.
    """
    out = path_of(out)
    if not isinstance(model, PRM):
        model = place_of(model)
        if kind_of(model) != "run":
            return _language_model(model, out, dtype, format, shard_bytes)
        if find(read(model / RUN).model.head).target == TOKEN:
            return _policy(model, out, dtype, format, shard_bytes)
    experiment = read(path_of(model.name if isinstance(model, PRM) else model) / RUN)
    prm = load(model, dtype="float32" if experiment.rereads else None)
    if format == "peft":
        _check_peft(prm, experiment)
    if prm.config.steps:
        raise ValueError(f"{prm.name}: model.steps={prm.config.steps!r} is a layer that no other library computes")
    config = {} if format == "peft" else config_json(prm, experiment, dtype, format)
    about = {"experiment": experiment.name, "step": prm.step, "dtype": dtype, "format": format}
    labels = find(prm.config.head).channels

    def write(partial: pathlib.Path) -> None:
        single, config_name = (peft.FILE, PEFT) if format == "peft" else (FILE, PUBLISHED)
        if format == "peft":
            arrays = _peft_tensors(prm, experiment)
            fields = _peft_json(experiment, arrays)
            tensors = [(name, array.shape, functools.partial(np.asarray, array)) for name, array in arrays.items()]
        else:
            fields, tensors = config, list(_tensors(prm, format, config))
        writing.write_tensors(partial, tensors, writing.NUMBERS[dtype], shard_bytes, single)
        writing.write_json(partial / config_name, fields)
        if format == "qwen2-prm":
            writing.write_json(partial / MODULES, EVERY_TOKEN)
        writing.write_json(partial / "adapter.json", adapter_json(prm, experiment, labels))
        prm.layout.tokenizer.save(partial)
        if (calibration := path_of(prm.name) / CALIBRATION).is_file():
            (partial / CALIBRATION).write_bytes(calibration.read_bytes())
        (partial / CARD).write_text(card(prm, experiment, labels, format), encoding="utf-8")

    return _whole(out, about, [identity(prm), dtype, format, shard_bytes, to_json(experiment)], write)


def _policy(folder: Place, out: Place, dtype: FileDtype, format: Format, shard_bytes: int) -> Place:
    """Exports a run's policy as a causal language model, with adapters merged."""
    if format != "transformers":
        raise ValueError(f"{folder}: writes steps and scores none; --format transformers writes a policy")
    experiment, mesh = read(folder / RUN), make_mesh(devices=jax.local_devices())
    with jax.set_mesh(mesh):
        params, step = store.load_params(folder, experiment, mesh)
        params = merge(params, experiment.lora)
    tokenizer = load_tokenizer(folder, experiment.model.vocab_size)
    about = {"experiment": experiment.name, "step": step, "dtype": dtype, "format": format}

    def write(partial: pathlib.Path) -> None:
        positions = experiment.data.tokens
        writing.causal_lm(partial, params, experiment.model, tokenizer, positions, dtype, shard_bytes)
        (partial / CARD).write_text(policy_card(experiment, step), encoding="utf-8")

    return _whole(out, about, [fingerprint(params, tokenizer, mesh), dtype, shard_bytes, to_json(experiment)], write)


def _language_model(path: Place, out: Place, dtype: FileDtype, format: Format, shard_bytes: int) -> Place:
    """Exports a base model that jprm did not train, e.g. a GGUF file, with its chat template if it has one."""
    if kind_of(path) == "peft" or format != "transformers":
        raise ValueError(f"{path}: was not trained here; a run's folder, and of a language model --format transformers")
    config, mesh = base.model_config(path, head=of_channels(0)), make_mesh(devices=jax.local_devices()[:1])
    with jax.set_mesh(mesh):
        params = base.load_language_model(path, config)
    tokenizer = load_tokenizer(path, config.vocab_size)
    try:
        template, _ = template_of(path)
    except (FileNotFoundError, ValueError):  # a base model needs none
        template = ""
    about = {"experiment": path.name, "step": 0, "dtype": dtype, "format": format}

    def write(partial: pathlib.Path) -> None:
        writing.causal_lm(partial, params, config, tokenizer, _positions(path), dtype, shard_bytes)
        if template and tokenizer.chat is None:
            (partial / TEMPLATE).write_text(template, encoding="utf-8")

    return _whole(out, about, [fingerprint(params, tokenizer, mesh), template, dtype, shard_bytes], write)


def _positions(path: Place) -> int:
    """Returns the context length in a GGUF file's or Hugging Face folder's metadata."""
    if path.is_dir():
        return Fields(path / PUBLISHED, read_json(path / PUBLISHED)).count("max_position_embeddings", 2048)
    fields = open_gguf(local_copy(path)).fields
    return Fields(path, fields).count(f"{fields['general.architecture']}.context_length", 2048)


def _whole(out: Place, about: dict[str, Any], request: list[Any], write: Callable[[pathlib.Path], None]) -> Place:
    """Writes the folder, or checks an existing one; returns it."""
    asked = json.dumps(request)
    about |= {"request": hashlib.sha256(asked.encode()).hexdigest()}
    if is_whole(out):
        try:
            exported = json.loads((out / EXPORT).read_bytes())
        except (OSError, ValueError):  # there is none, or it was cut short
            exported = None
        if exported != about:
            raise FileExistsError(f"{out}: is there already, and not this export; name another folder or remove it")
        check_sums(local_copy(out))
        tidy(out)
        return out
    last = PEFT if about["format"] == "peft" else PUBLISHED
    with whole_folder(out, asked, last=last) as partial:
        writing.write_json(partial / EXPORT, about)
        write(partial)
        for file in partial.glob("*.partial"):  # what a killed export left
            file.unlink()
        lines = [f"{sha256_of(file)}  {file.name}\n" for file in sorted(partial.iterdir()) if file.name != SUMS]
        (partial / SUMS).write_text("".join(lines))
    return out


def config_json(
    prm: PRM, experiment: Experiment, dtype: FileDtype = "float32", format: Format = "transformers"
) -> dict[str, Any]:
    """Returns config.json's content: the decoder's fields, architecture and labels (`id2label`, `label2id`).

    `format` must not be `peft`, which has no config.json. Raises ValueError with the field the format cannot express,
    or if the PRM was loaded in fewer bits, e.g. as `int8`.

    RoPE is written as in transformers 4, which transformers 5 and vLLM also read. vLLM serves an architecture that ends
    in ForTokenClassification as a pooling model with one score per token, without further fields.
    """
    c = prm.config
    if not isinstance(prm.params["decoder"]["embed"], jax.Array | np.ndarray):
        raise ValueError(f"{prm.name}: was loaded in fewer bits, which loses digits; give its folder to export it")
    labels = find(c.head).channels
    if not find(c.head).classifier:
        raise ValueError(f"{prm.name}: head {c.head!r} is no token classifier; one of {CLASSIFIERS} is")
    family, decoder = writing.decoder_json(prm.name, c, prm.layout.tokenizer, experiment.data.tokens, dtype)
    if format == "transformers" and "hidden_kernel" in prm.params["head"]:
        raise ValueError(f"{prm.name}: a head of two layers is no token classifier; --format qwen2-prm has one")
    if format == "qwen2-prm" and (family != "qwen2" or labels != ("wrong", "right")):
        what = f"not of {family} with head {c.head!r}"
        raise ValueError(f"{prm.name}: Qwen2.5-Math-PRM's format is of a Qwen2 model with a binary head, {what}")
    if family in ("olmo2", "olmo3", "qwen3_5_text"):
        raise ValueError(f"{prm.name}: transformers has no token classifier of {family}; a policy of it is exported")
    kind = "ProcessRewardModel" if format == "qwen2-prm" else "TokenClassification"
    return {
        **decoder,
        **({"pooling_mode": "all"} if format == "qwen2-prm" else {}),
        "architectures": [f"{writing.CLASSES[family]}For{kind}"],
        "tie_word_embeddings": False,  # there is no language head
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
        "classifier_dropout": 0.0,
        **({"problem_type": "multi_label_classification"} if c.head.startswith("sigmoid=") else {}),
    }


def _tensors(prm: PRM, format: Format, fields: dict[str, Any]) -> Iterator[Tensor]:
    """Yields all parameters, grouped by role, so that each stack is fetched once."""
    yield from writing.decoder_tensors(prm.params["decoder"], prm.config, writing.stored_by(fields, prm.config))
    head = jax.tree.map(np.asarray, prm.params["head"])
    for name, array in (two_layers(head) if format == "qwen2-prm" else one_layer(head)).items():
        yield f"score.{name}", array.shape, functools.partial(np.asarray, array)


def one_layer(head: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"weight": np.ascontiguousarray(head["kernel"].T), "bias": head["bias"]}


def two_layers(head: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns Linear(D, D), ReLU, Linear(D, C) as torch's `0.weight`, `0.bias`, `2.weight`, `2.bias`.

    A weight is (out, in), all are float32. They are the head's own two layers, or a linear head in 2 C of D hidden
    units: a logit z equals relu(z) - relu(-z); one of the two is 0, so there is no rounding. `head` has `kernel`
    (D, C) and `bias` (C,), maybe `hidden_kernel` (D, D) and `hidden_bias` (D,).

    Raises ValueError if a linear head has D < 2 C.
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


def _check_peft(prm: PRM, experiment: Experiment) -> None:
    """Raises ValueError if the model has no adapters, or PEFT cannot load its head or base."""
    if not experiment.lora.rank:
        raise ValueError(f"{prm.name}: has no adapters (lora.rank=0); --format transformers writes it whole")
    if prm.config.mixers or prm.config.mlps:
        raise ValueError(f"{prm.name}: adapters of its layers are not written apart; --format transformers merges them")
    if not find(prm.config.head).classifier or "hidden_kernel" in prm.params["head"]:
        raise ValueError(f"{prm.name}: PEFT's token classifiers have a linear head over classes of one softmax")
    place = place_of(Found(path_of(prm.name) / RUN, "base", experiment.base)) if experiment.base else None
    if place is None or not (place / PUBLISHED).is_file():
        raise ValueError(
            f"{prm.name}: its base {experiment.base or 'of random parameters'!r} is no Hugging Face folder, so PEFT has"
            " nothing to put the adapters on; --format transformers merges them"
        )
    if (layers := huggingface.model_config(local_copy(place, (PUBLISHED,))).layers) != prm.config.layers:
        raise ValueError(
            f"{prm.name}: has {prm.config.layers} of its base's {layers} layers, and PEFT would use them all;"
            " --format transformers merges the adapters"
        )


def _peft_tensors(prm: PRM, experiment: Experiment) -> dict[str, np.ndarray]:
    """Returns the file's tensors by name, as float32: each layer's A and B, and the linear head."""
    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        params, _ = store.load_params(prm.name, experiment, mesh)
    arrays: dict[str, np.ndarray] = {}
    first = 0
    for group, layers in enumerate(prm.config.layer_groups):
        stack = params["decoder"][f"layers_{group}"]
        for role in (role for role in products() if role + A in stack):
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
    """Returns adapter_config.json's content. PEFT matches `target_modules` with the ends of module names."""
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


# ------------------------------------------------------------------------------------------------------- the model card


CALIBRATION, CARD = "calibration.json", "README.md"


def adapter_json(prm: PRM, experiment: Experiment, labels: tuple[str, ...]) -> dict[str, Any]:
    """Returns jprm's layout and head as an `Adapter` in JSON, by which the exported folder is read.

    Its fields are `name`, `problem`, `step`, `channels`, `score`, `activation`, `semantics` and, if any, `outputs`.

    `labels` are the head's classes in order, the channels of the record.
    """
    outputs = cast(dict[str, Weighted], dict(find(prm.config.head).readout.outputs))  # pyright: ignore
    factors = {
        name: {label: factor for label, factor in zip(labels, output.factors, strict=True) if factor}
        for name, output in outputs.items()
    }
    score = factors.pop("score")
    return {
        "name": experiment.name,
        "problem": ["{bos}{problem}", "\n"],
        "step": ["{step}", "\n"],
        "channels": list(labels),
        "score": score,
        "activation": outputs["score"].activation,
        "semantics": prm.semantics,
        **({"outputs": factors} if factors else {}),
    }


def policy_card(experiment: Experiment, step: int) -> str:
    """Returns a policy's README.md; `step` is the number of training steps."""
    base = pathlib.Path(experiment.base).name if experiment.base else "random parameters"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [jprm]
---

# {experiment.name}

A policy that writes chains of reasoning, one step a line. Trained with jprm, {step} steps, from {base}; adapters are
merged. Objective: {experiment.objective}. A prompt is the tokenizer's beginning of text, if it has one, the problem,
and a newline, encoded one by one without special tokens.
"""


def card(prm: PRM, experiment: Experiment, labels: tuple[str, ...], format: Format) -> str:
    """Returns a PRM's README.md for a `Format`, with the metrics and benchmark reports in its run's folder.

    `labels` are the head's classes in order. Raises ValueError if a report is damaged.
    """
    data, target, tokenizer, lora = experiment.data, experiment.target, prm.layout.tokenizer, experiment.lora
    newline = tokenizer.encode("\n")
    bos = "none" if tokenizer.bos is None else f"id {tokenizer.bos}, once, at the very start"
    base = pathlib.Path(experiment.base).name if experiment.base else "random parameters"
    classes = ", ".join(f"{i} = {label}" for i, label in enumerate(labels))
    adapters = f"\n- LoRA: rank {lora.rank}, scale {lora.scale:g}, on {lora.targets}" if lora.rank else ""
    specials = "" if isinstance(tokenizer, JsonTokenizer) else "\nThe tokenizer is only a SentencePiece model.\n"
    library = "vllm" if format == "qwen2-prm" else format
    return f"""---
library_name: {library}
pipeline_tag: token-classification
tags: [process-reward-model, jprm]
---

# {experiment.name}

A process reward model: it scores every step of a chain of reasoning. Trained with jprm, {prm.step} steps.

- Base: {base}, {prm.config.layers} layers{adapters}
- Data: {", ".join(pathlib.Path(file).name for file in data.train)}; supervision: {data.supervise}
- Labels: {target.labels} ({prm.semantics}); neutral: {target.neutral}; probabilities as targets: {target.soft}
- Steps after the first error: {target.after_error}
- Objective: {experiment.objective}; chains longer than {data.tokens} tokens: {data.too_long}
- Classes: {classes}. The score of a step is 1 - P({labels[0]}), by the softmax.

## Layout of the input

Each part is encoded alone, without special tokens, and the ids are joined; a joined string is never encoded again.

- bos: {bos}
- the problem, then a newline (ids {newline})
- each step, then a newline; its score is read at that newline's last token
{specials}
```python
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)

def encode(text):
    return tokenizer.encode(text, add_special_tokens=False)

ids, ends = {[] if tokenizer.bos is None else [tokenizer.bos]} + encode(problem) + encode("\\n"), []
for step in steps:
    ids += encode(step) + encode("\\n")
    ends.append(len(ids) - 1)
```
{_USE[format]}{"" if format == "peft" else _VLLM.replace("{pooler}", _POOLER if format == "qwen2-prm" else "")}
## Metrics at the end of training

{_table(_result(path_of(prm.name)))}
{_evaluations(path_of(prm.name))}"""


_USE = {
    "transformers": """
```python
import torch
from transformers import AutoModelForTokenClassification

model = AutoModelForTokenClassification.from_pretrained(FOLDER).eval()
with torch.no_grad():
    scores = model(torch.tensor([ids])).logits[0, ends].softmax(-1)[:, 1:].sum(-1)
```
""",
    "peft": """
```python
import torch
from peft import PeftModel
from transformers import AutoModelForTokenClassification

base = AutoModelForTokenClassification.from_pretrained(BASE)  # the folder that adapter_config.json names
model = PeftModel.from_pretrained(base, FOLDER).eval()
with torch.no_grad():
    scores = model(input_ids=torch.tensor([ids])).logits[0, ends].softmax(-1)[:, 1:].sum(-1)
```

A base of more or fewer than two labels needs `num_labels` when it is loaded.
""",
    "qwen2-prm": """
The tensors and config.json are those of Qwen2.5-Math-PRM: a head of two layers with a ReLU. The layout is the one
above: there is no `<extra_0>` and no chat template. transformers has no class of its own for this format; vLLM has.
""",
}

_POOLER = """
`pooling_mode` in config.json and modules.json tell vLLM that every token is read. Without them it reads `<extra_0>`
only and answers `data: []`; `--pooler-config '{"tok_pooling_type": "ALL"}'` says the same.
"""

_VLLM = """
## Serving with vLLM

As a pooling model with a result for every token (0.14 or newer, for the bias of the head; 0.32 was tried):

    vllm serve FOLDER --runner pooling --dtype bfloat16
{pooler}
```python
from vllm import LLM

llm = LLM(FOLDER, runner="pooling", dtype="bfloat16")
(output,) = llm.encode([{"prompt_token_ids": ids}], pooling_task="token_classify")
scores = output.outputs.data[ends][:, 1:].sum(-1)  # it has applied the softmax
```

Send ids, not text: the server would tokenise a joined string. A `step_tag_id` in its pooler config, which returns the
scores of only that token, fits where a newline is one token that no problem and no step contains; the indices above
always do.
"""


def _result(run: Place) -> dict[str, str]:
    path = run / "result.json"
    metrics = read_json(path) if path.is_file() else {}
    timed = {"goodput", "mfu"} | {k for k in metrics if "second" in k or k.startswith("lost_")}  # of the machine
    numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float) and not abs(v) > 1e300}
    return {k: f"{v:.6g}" for k, v in numbers.items() if k not in timed}


def _evaluations(run: Place) -> str:
    """Returns the figures from every benchmark report (NAME.json) in the run's folder."""
    parts = []
    for name in BENCHMARKS:
        path = run / f"{name}.json"
        figures = dict(figures_in(read_json(path))) if path.is_file() else {}
        if figures:
            parts.append(f"\n## Evaluation: {name} (95 % intervals over problems)\n\n{_table(figures)}")
        if figures and path.name == CALIBRATION:
            parts.append(f"\nThe maps from scores to probabilities are in {CALIBRATION}.\n")
    return "".join(parts)


def _table(rows: dict[str, str]) -> str:
    return "| figure | value |\n|---|---|\n" + ("".join(f"| {k} | {v} |\n" for k, v in rows.items()) or "| none | |\n")
