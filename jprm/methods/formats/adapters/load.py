"""Loads a published PRM's folder: it is recognised and checked before anything is put on the devices."""

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

from jprm.checkpoints.safetensors import Tensors, check_sums, read_json
from jprm.experiment import PUBLISHED, kind_of
from jprm.io.folders import local_copy
from jprm.io.storage import Found
from jprm.methods.formats import huggingface
from jprm.methods.formats.adapters.published import OUTER, labelled, named, recognise
from jprm.methods.formats.adapters.record import FILE, Adapter
from jprm.methods.formats.chat_template import conversation_of, trims
from jprm.methods.formats.peft import MergedTensors
from jprm.methods.implicit import LogRatio
from jprm.model.attention import suited
from jprm.model.heads import Readout, Weighted, of_channels
from jprm.model.mesh import MeshConfig, make_mesh, spec
from jprm.model.parameters import Dtype
from jprm.model.transformer import axes_of
from jprm.options import place_of
from jprm.score.scorer import PRM
from jprm.tokenizer import TemplateLayout, Tokenizer, control_tokens, load_tokenizer


def load(
    folder: str | os.PathLike,
    adapter: str | None = None,
    mesh: MeshConfig | None = None,
    dtype: Dtype | None = None,
    attention: str | None = None,
) -> PRM:
    """Loads the model in a folder, also of a bucket, with the named adapter (`named`) or the one that is recognised.

    The decoder is stored as `dtype`, by default bfloat16 on a GPU, as these models were trained and published, and
    float32 elsewhere; bfloat16 is the type of the computation too. `attention` is the
    implementation (`jprm.model.attention`): by default `gpu_kernel` on a GPU and `blocked` elsewhere.

    Raises FileNotFoundError or ValueError, naming file, field, tensor or token, before anything is put on a device.
    """
    place = place_of(folder)
    folder, place = local_copy(place), place.resolve()
    check_sums(folder)
    a = named(adapter) if adapter else recognise(folder)
    if not adapter:  # else the person who named the adapter named its models too
        a = dataclasses.replace(a, **{
            field: os.fspath(place_of(Found(place / FILE, field, name)))
            for field in ("base", "reference") if (name := getattr(a, field))
        })  # fmt: skip
    a = labelled(a, folder) if a.labels else a
    usual: Dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    model = _Model(folder, a, dtype or usual, attention or suited("blocked"))
    has_tokenizer = any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")
    )  # a LoRA may have none
    tokenizer = load_tokenizer(folder if has_tokenizer else model.place, model.config.vocab_size, of_model=True)
    a = in_chat(a, folder, tokenizer) if a.chat else a
    ids = token_ids(a, tokenizer, model.config.vocab_size, folder)
    head = model.head(a, ids)
    other = _reference(folder, a, model) if a.activation == "log_ratio" else None
    grid = make_mesh(mesh or MeshConfig(), jax.local_devices())
    fields: dict[str, Any] = dict(context=model.context, aggregation=a.aggregation, scale=a.score_scale)
    if other is None:
        factors = {"score": a.score, **a.outputs} | ({"redundancy": a.redundancy} if a.redundancy else {})
        rows = {
            name: tuple(float(by_channel.get(channel, 0.0)) for channel in a.channels)
            for name, by_channel in factors.items()
        }
        fields["readout"] = Readout(**{name: Weighted(cast(Any, a.activation), row) for name, row in rows.items()})
    else:
        fields["ratio"] = LogRatio(other.params(other.head(a, {}), grid), other.config, a.scale)
    config = dataclasses.replace(model.config, head_hidden="hidden_kernel" in head)
    name = f"{place} ({a.name} {a.digest})"
    return PRM(model.params(head, grid), config, layout_of(a, tokenizer, ids), grid, a.semantics, name, 0, **fields)


class _Model:
    """A folder's tensors, opened but not read, with a LoRA merged into them, and the model's config."""

    def __init__(self, folder: pathlib.Path, a: Adapter, dtype: Dtype, attention: str):
        lora = kind_of(folder) == "peft"
        self.file: Tensors | MergedTensors = MergedTensors(folder, a.base) if lora else Tensors(folder)
        self.place = self.file.path
        fields = read_json(self.place / PUBLISHED) if (self.place / PUBLISHED).is_file() else {}
        limits = (a.context, fields.get("max_position_embeddings"))
        self.context = min((n for n in limits if type(n) is int and n > 0), default=None)
        head = of_channels(len(a.channels))  # its readout is the adapter's
        self.dtype: Dtype = dtype
        computed = "bfloat16" if dtype == "bfloat16" else "float32"
        changes = self.file.changes if isinstance(self.file, MergedTensors) else {}
        self.config = huggingface.model_config(self.place, head=head, dtype=computed, attention=attention, **changes)

    def head(self, a: Adapter, ids: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Returns the head's parameters in float32 as `transformer.Head` has them; every shape is checked."""
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
        """Returns the decoder and the head, each in its place on the mesh."""
        with jax.set_mesh(grid):
            decoder = huggingface.load_decoder(self.place, self.config, self.dtype, self.file)
            spots = {name: NamedSharding(grid, spec(*axes_of(name))) for name in head}
        return {"decoder": decoder, "head": {name: jax.device_put(head[name], spots[name]) for name in head}}

    def _language_head(self, a: Adapter, ids: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Returns the rows of the channels' tokens or their mean, or the whole matrix where there are no channels."""
        if self.config.logit_softcap:
            raise ValueError(f"{self.place}: final_logit_softcapping is not supported where an adapter reads lm_head")
        if self.config.tied_embeddings:
            if not a.channels:
                return {}
            module = next(name for name in self.file if name.endswith(huggingface.NAMES["embed"]))
            module = module.removesuffix(".weight")
        else:
            module = f"{OUTER}lm_head" if f"{OUTER}lm_head.weight" in self.file else "lm_head"
        rows = [ids[channel] for channel in a.channels] if a.channels and not a.mean else slice(None)
        kernel, bias = self._linear(module, self.config.vocab_size, rows)
        if a.mean:
            kernel, bias = kernel.mean(1, keepdims=True), bias.mean(keepdims=True)
        return {"kernel": kernel, "bias": bias} if a.channels else {"kernel": kernel}

    def _linear(self, module: str, count: int, rows: list[int] | slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows of the module's matrix of `count` rows as (in, out), and of its bias, 0 where it has none."""

        def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
            if (actual := self.file.shape(name)) != shape:
                raise ValueError(f"{self.place}: tensor {name} is of shape {actual}, the adapter's head is {shape}")
            return self.file.tensor(name)[rows].astype(np.float32)

        kernel = np.ascontiguousarray(tensor(f"{module}.weight", (count, self.config.width)).T)
        if f"{module}.bias" not in self.file:
            return kernel, np.zeros(kernel.shape[1], np.float32)
        return kernel, tensor(f"{module}.bias", (count,))


def _reference(folder: pathlib.Path, a: Adapter, model: _Model) -> _Model:
    """Opens the reference model of a log ratio, which must have the same vocabulary."""
    if not a.reference:
        raise ValueError(
            f"{folder}: adapter {a.name!r} scores by the log ratio of two models. Name the folder of the other one in a"
            f' file {FILE}: {{"like": "{a.name}", "reference": "FOLDER"}}'
        )
    other = _Model(local_copy(place_of(a.reference)), a, model.dtype, model.config.attention)
    if (size := other.config.vocab_size) != model.config.vocab_size:
        raise ValueError(f"{other.place}: its vocabulary has {size} tokens, but {folder} has {model.config.vocab_size}")
    return other


def in_chat(adapter: Adapter, folder: pathlib.Path, tokenizer: Tokenizer) -> Adapter:
    """Returns the adapter with the problem, the closing and the control tokens of the folder's chat template.

    White space around steps stays where the template keeps it.
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
    """Returns the layout of an adapter's templates; `ids` are those of its tokens."""
    a = adapter
    others = {reader: layout_of(a.in_benchmark(reader), tokenizer, ids) for reader in a.benchmarks or ()}
    return TemplateLayout(
        tokenizer, a.problem, a.step, a.first, a.closing, ids, a.joined, a.strip, others, a.system, a.turns
    )


def token_ids(adapter: Adapter, tokenizer: Tokenizer, vocab_size: int, where: str | os.PathLike) -> dict[str, int]:
    """Returns the ids of the adapter's tokens in the folder's own tokenizer.

    A token is looked up by its text, which must be one token, or else by its name, as control tokens are found.

    Raises:
      ValueError: a token that is absent, splits or is outside the model's vocabulary, or whose id is not the published
        one although `vocab_size` is the published vocabulary's.
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
