"""Loads a published PRM's folder; recognises and checks it before using any device."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jprm.checkpoints import base
from jprm.checkpoints.safetensors import Tensors, check_sums, read_json
from jprm.experiment import PUBLISHED, kind_of
from jprm.io.folders import local_copy
from jprm.io.storage import Found
from jprm.methods.formats import huggingface
from jprm.methods.formats.adapters.published import OUTER, labelled, named, recognise
from jprm.methods.formats.adapters.record import FILE, Adapter
from jprm.methods.formats.chat_template import conversation_of, prompt_of, trims
from jprm.methods.formats.config_json import NAMES
from jprm.methods.formats.peft import MergedTensors
from jprm.methods.implicit import LogRatio
from jprm.model.attention import suited
from jprm.model.heads import Readout, Weighted, of_channels
from jprm.model.mesh import MeshConfig, make_mesh, spec
from jprm.model.parameters import Dtype
from jprm.model.transformer import axes_of
from jprm.options import place_of
from jprm.score.scorer import PRM
from jprm.tokenizer import TemplateLayout, Tokenizer, control_tokens, load_tokenizer, native_layout, prompt_layout


def load(
    folder: str | os.PathLike,
    adapter: str | None = None,
    mesh: MeshConfig | None = None,
    dtype: Dtype | None = None,
    attention: str | None = None,
    reference: str | None = None,
) -> PRM:
    """Loads the model in a folder, local or in a bucket, with the named adapter (`named`) or the recognised one.

    The decoder is stored as `dtype`: by default bfloat16 on a GPU, in which such models are trained and published, and
    float32 elsewhere. bfloat16 also sets the computation type. `attention` is the implementation
    (`jprm.model.attention`): by default `gpu_kernel` on a GPU and `blocked` elsewhere. With `reference`, the folder may
    also be any language model, or a GGUF file: the score is the log ratio of the two. Both names may also be addresses
    on the Hub, which are downloaded. `mesh` divides this process's devices, by default as `MeshConfig()`.

    Raises FileNotFoundError or ValueError, naming file, field, tensor or token, before any device is used; OSError if a
    download fails.
    """
    place = place_of(folder)
    folder, place = local_copy(place), place.resolve()
    check_sums(folder)
    contrasted = reference is not None and not (folder / FILE).is_file()
    a = named(adapter or "contrast") if adapter or contrasted else recognise(folder)
    if not adapter:  # else the person who named the adapter named its models too
        a = dataclasses.replace(a, **{
            field: os.fspath(place_of(Found(place / FILE, field, name)))
            for field in ("base", "reference") if (name := getattr(a, field))
        })  # fmt: skip
    a = labelled(a, folder) if a.labels else a
    usual: Dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    if a.activation == "log_ratio" or reference:
        a = dataclasses.replace(a, reference=os.fspath(reference or a.reference))
        return _log_ratio(place, folder, a, mesh, dtype or usual, attention)
    model = _Model(folder, a, dtype or usual, attention or suited("blocked"))
    has_tokenizer = any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")
    )  # a LoRA may have none
    tokenizer = load_tokenizer(folder if has_tokenizer else model.place, model.config.vocab_size, of_model=True)
    a = in_chat(a, folder, tokenizer) if a.chat else a
    ids = token_ids(a, tokenizer, model.config.vocab_size, folder)
    head = model.head(a, ids)
    grid = make_mesh(mesh or MeshConfig(), jax.local_devices())
    fields: dict[str, Any] = dict(context=model.context, aggregation=a.aggregation, scale=a.score_scale)
    factors = {"score": a.score, **a.outputs} | ({"redundancy": a.redundancy} if a.redundancy else {})
    rows = {
        name: tuple(float(by_channel.get(channel, 0.0)) for channel in a.channels)
        for name, by_channel in factors.items()
    }
    fields["readout"] = Readout(**{name: Weighted(cast(Any, a.activation), row) for name, row in rows.items()})
    config = dataclasses.replace(model.config, head_hidden="hidden_kernel" in head)
    name = f"{place} ({a.name} {a.digest})"
    return PRM(model.params(head, grid), config, layout_of(a, tokenizer, ids), grid, a.semantics, name, 0, **fields)


class _Model:
    """Tensors of a folder, opened but not read, with a LoRA merged into them, and the model's config."""

    def __init__(self, folder: pathlib.Path, a: Adapter, dtype: Dtype, attention: str):
        lora = kind_of(folder) == "peft"
        file: Tensors | MergedTensors = MergedTensors(folder, a.base) if lora else Tensors(folder)
        self.place = file.path
        self.context = context_of(a, self.place)
        head = of_channels(len(a.channels))  # its readout is the adapter's
        self.dtype: Dtype = dtype
        computed = "bfloat16" if dtype == "bfloat16" else "float32"
        changes = file.changes if isinstance(file, MergedTensors) else {}
        self.config = huggingface.model_config(self.place, head=head, dtype=computed, attention=attention, **changes)
        self.file = huggingface.arranged(file, self.place, self.config)

    def head(self, a: Adapter, ids: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Returns the head's parameters in float32, as in `transformer.Head`. Checks every shape."""
        if a.head == "lm_head":
            return self._language_head(a, ids)
        classes, width = len(a.channels), self.config.width
        module = OUTER + a.head if f"{OUTER}{a.head}.weight" in self.file else a.head
        if f"{module}.0.weight" not in self.file:
            kernel, bias = self._linear(module, classes)
            return {"kernel": kernel, "bias": bias}
        hidden_kernel, hidden_bias = self._linear(f"{module}.0", width)  # Sequential(Linear, ReLU, Linear)
        kernel, bias = self._linear(f"{module}.2", classes)
        return {"hidden_kernel": hidden_kernel, "hidden_bias": hidden_bias, "kernel": kernel, "bias": bias}

    def params(self, head: Mapping[str, np.ndarray], grid: Mesh) -> dict[str, Any]:
        """Returns decoder and head on the mesh."""
        with jax.set_mesh(grid):
            decoder = huggingface.load_decoder(self.place, self.config, self.dtype, self.file)
            spots = {name: NamedSharding(grid, spec(*axes_of(name))) for name in head}
        return {"decoder": decoder, "head": {name: jax.device_put(head[name], spots[name]) for name in head}}

    def _language_head(self, a: Adapter, ids: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Returns the rows of the channels' tokens (or their mean), or the whole matrix if there are no channels."""
        if self.config.logit_softcap:
            raise ValueError(f"{self.place}: final_logit_softcapping is not supported where an adapter reads lm_head")
        if self.config.tied_embeddings:
            if not a.channels:
                return {}
            module = next(name for name in self.file if name.endswith(NAMES["embed"]))
            module = module.removesuffix(".weight")
        else:
            module = f"{OUTER}lm_head" if f"{OUTER}lm_head.weight" in self.file else "lm_head"
        rows = [ids[channel] for channel in a.channels] if a.channels and not a.mean else slice(None)
        kernel, bias = self._linear(module, self.config.vocab_size, rows)
        if a.mean:
            kernel, bias = kernel.mean(1, keepdims=True), bias.mean(keepdims=True)
        return {"kernel": kernel, "bias": bias} if a.channels else {"kernel": kernel}

    def _linear(self, module: str, count: int, rows: list[int] | slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """Returns the weight's selected rows, transposed to (in, out), and the bias's (zeros if there is no bias)."""

        def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
            if (actual := self.file.shape(name)) != shape:
                raise ValueError(f"{self.place}: tensor {name} is of shape {actual}, the adapter's head is {shape}")
            return self.file.tensor(name)[rows].astype(np.float32)

        kernel = np.ascontiguousarray(tensor(f"{module}.weight", (count, self.config.width)).T)
        if f"{module}.bias" not in self.file:
            return kernel, np.zeros(kernel.shape[1], np.float32)
        return kernel, tensor(f"{module}.bias", (count,))


def context_of(a: Adapter, *models: pathlib.Path) -> int | None:
    """Returns the smallest limit on a chain's tokens in the adapter and the models' files; `None` if there is no limit.

    `models` are Hugging Face folders and GGUF files. Raises ValueError if their metadata is damaged.
    """
    limits: list[Any] = [a.context]
    for model in models:
        if kind_of(model) == "gguf":
            from jprm.methods.formats.gguf import open_gguf  # other models are read without the package gguf

            fields = open_gguf(model).fields
            limits.append(fields.get(f"{fields['general.architecture']}.context_length"))
        elif (model / PUBLISHED).is_file():
            limits.append(read_json(model / PUBLISHED).get("max_position_embeddings"))
    return min((n for n in limits if type(n) is int and n > 0), default=None)


def _log_ratio(
    place: Any, folder: pathlib.Path, a: Adapter, mesh: MeshConfig | None, dtype: Dtype, attention: str | None
) -> PRM:
    """Loads two language models (Hugging Face folder, LoRA, GGUF file or run) as one scorer.

    Each is in memory once. A row is read by one model, then by the other; each computes common prefixes once.

    Raises ValueError if the second model is missing or has another tokenizer, or the adapter reads a head.
    """
    if a.activation != "log_ratio":
        raise ValueError(f"{place}: adapter {a.name!r} reads a head, so --reference has no use. Leave it out")
    if not a.reference:
        raise ValueError(
            f"{folder}: adapter {a.name!r} scores by the log ratio of two models. Name the folder of the other one by"
            f' --reference, or as "reference" in a file {FILE}, such as {{"like": "contrast", "reference": "FOLDER"}}'
        )
    path, other = local_copy(place_of(a.base)) if a.base else folder, local_copy(place_of(a.reference))
    computed = "bfloat16" if dtype == "bfloat16" else "float32"
    fields = dict(head=of_channels(0), dtype=computed, attention=attention or suited("blocked"))
    config, other_config = (base.model_config(model, **fields) for model in (path, other))
    tokenizer = load_tokenizer(path, config.vocab_size, of_model=True)
    check_one_tokenizer(tokenizer, load_tokenizer(other), other_config.vocab_size, path, a.reference)
    if a.joined:
        layout = layout_of(a, tokenizer, token_ids(a, tokenizer, config.vocab_size, folder))
    else:
        prompt, delimiter = "".join(a.problem), "".join(a.step).partition("{step}")[2]
        with contextlib.suppress(ValueError):  # it has no chat template
            prompt = prompt or prompt_of(path, "{problem}")
        layout = prompt_layout(tokenizer, prompt, delimiter) if prompt else native_layout(tokenizer)  # as it samples
    grid = make_mesh(mesh or MeshConfig(), jax.local_devices())
    with jax.set_mesh(grid):
        params, other_params = (
            base.load_language_model(model, of_model, dtype)
            for model, of_model in ((path, config), (other, other_config))
        )
    ratio = LogRatio(other_params, other_config, a.scale)
    name = f"{place} ({a.name} {a.digest})"
    return PRM(
        params, config, layout, grid, a.semantics, name, 0,
        ratio=ratio, context=context_of(a, path, other), aggregation=a.aggregation, scale=a.score_scale,
    )  # fmt: skip


_PROBE = "A probe of merges: 3 apples + 12.5 = 15.5, na\u00efve \u4f60\u597d\n\n\tdef f(x): return x  # (1/2)"


def check_one_tokenizer(tokenizer: Tokenizer, other: Tokenizer, size: int, path: Any, other_path: Any) -> None:
    """Raises ValueError, naming both models, unless both tokenizers encode a sample text equally and share all ids.

    `size` is the number of embedding rows of the model of `other`, which must cover the ids of `tokenizer`. Ids above
    the smaller vocabulary are not compared: a chat model may have more special tokens than its base.
    """
    shared = min(tokenizer.vocab_size, other.vocab_size)
    same = tokenizer.encode(_PROBE) == other.encode(_PROBE) and tokenizer.vocab_size <= size
    if not same or any(tokenizer.decode([i]) != other.decode([i]) for i in range(shared)):
        raise ValueError(
            f"{os.fspath(path)} and {os.fspath(other_path)} have different tokenizers, so their log-probabilities of a"
            " token do not compare. Give two models of one family, such as a small and a large one"
        )


def in_chat(adapter: Adapter, folder: pathlib.Path, tokenizer: Tokenizer) -> Adapter:
    """Returns a copy with problem, system, closing and control tokens of the folder's chat template.

    White space around steps is kept if the template keeps it; `system` is () if the template takes no system message.

    Raises ValueError if the folder has no chat template, or this fails or does not hold the messages unchanged, and
    FileNotFoundError if tokenizer_config.json is missing beside it.
    """
    (problem, end), system = conversation_of(folder), ()
    with contextlib.suppress(ValueError):  # a template may refuse a system message, or leave it out
        before, after = conversation_of(folder, system=True)
        system = before if after == end else ()
    before = "".join(adapter.step).partition("{step}")[0]
    tokens = dict.fromkeys(control_tokens(tokenizer, f"{problem}{system or ''}{end}")) | dict(adapter.tokens)
    closing = before + "{step}" + end
    return dataclasses.replace(
        adapter, chat=False, problem=problem, closing=closing, system=system, tokens=tokens, strip=trims(folder)
    )


def layout_of(adapter: Adapter, tokenizer: Tokenizer, ids: Mapping[str, int]) -> TemplateLayout:
    """Builds the layout of an adapter's templates; `ids` are the ids of its tokens, as from `token_ids`."""
    a = adapter
    others = {reader: layout_of(a.in_benchmark(reader), tokenizer, ids) for reader in a.benchmarks or ()}
    return TemplateLayout(
        tokenizer, a.problem, a.step, a.first, a.closing, ids, a.joined, a.strip, others, a.system, a.turns
    )


def token_ids(adapter: Adapter, tokenizer: Tokenizer, vocab_size: int, where: str | os.PathLike) -> dict[str, int]:
    """Returns {text: id} of `adapter.tokens` in the folder's tokenizer; `where` names the folder in errors.

    A token is looked up by its text, if that is one token, else by its name, as for control tokens.

    Raises:
      ValueError: a token is absent, is split, or exceeds the model's vocabulary; or its id differs from the published
        one although `vocab_size` is the published size.
    """
    probe = layout_of(dataclasses.replace(adapter, joined=True), tokenizer, {})
    id_of = {}
    for name, published in adapter.tokens.items():
        text = probe.encode(name, joined=True)
        whole = len(text) == 1 and tokenizer.decode(text).strip() == name.strip()  # one unknown is one token too
        token = text[0] if whole else tokenizer.token_id(name)
        if token is None:
            raise ValueError(
                f"{where}: adapter {adapter.name!r} needs {name!r} as one token, and the tokenizer splits it into"
                f" {len(text)} and has none of that name: it is not the tokenizer of such a model, or the adapter is"
                " another's (--adapter)"
            )
        if not token < vocab_size:
            raise ValueError(f"{where}: token {name!r} has id {token}, the model has embeddings for {vocab_size} only")
        if published is not None and vocab_size in adapter.vocabulary and token != published:
            raise ValueError(
                f"{where}: token {name!r} has id {token}, and {published} in the published vocabulary of adapter"
                f" {adapter.name!r}: the tokenizer is not the one that the model was trained with"
            )
        id_of[name] = token
    return id_of
