"""Base models in Hugging Face folders: config.json beside safetensors files. No code from the folder is executed.

The supported families are records (`families.py`). `config_json.py` defines a record and reads config.json. A file's
tensors are renamed and rearranged by the record, and split into one for each role.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import numpy as np

from jprm.checkpoints import decoder
from jprm.checkpoints.safetensors import AGAIN, Tensors, check_sums
from jprm.methods.formats import families
from jprm.methods.formats.config_json import NAMES, Stored, values_of
from jprm.model.config import ModelConfig
from jprm.model.parameters import Dtype

LANGUAGE_HEAD = "lm_head.weight"

SANDWICHED = NAMES | {"mlp_norm": "pre_feedforward_layernorm.weight"}
"""Names for models with norms before and after attention and MLP."""

HEADS = re.compile(r"(pretrained_model\.)?(lm_head|score|score_head|v_head|classifier)\.")
"""Tensors of language, classification and value heads, which do not belong to the decoder."""

_IDLE = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Frequencies saved by old versions of transformers; new ones, like jprm, compute them."""

_IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.|language_model\.lm_head\.")
"""A multimodal Gemma 3's tensors unused for text, and its tied head."""


class Readable(Protocol):
    """Tensors of a checkpoint by name: `Tensors`, or `MergedTensors` for a LoRA."""

    def __iter__(self) -> Iterator[str]: ...

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> np.ndarray: ...


def model_config(folder: str | os.PathLike, **changes) -> ModelConfig:
    """Returns the hyperparameters of a local folder; `changes` replace fields of the result (e.g. head, dtype, layers).

    If `layers` is smaller than the folder's number, the first layers are kept.

    Raises FileNotFoundError if there is no config.json, and ValueError, naming file and field, if the family or a field
    is unsupported, unknown or damaged, or `layers` is above the folder's number.
    """
    path = pathlib.Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there; {folder} is not a model's folder")
    fields = families.text_fields(path)
    values = values_of(fields, families.find(fields))
    files = tuple((str(file), file.stat().st_mtime_ns) for file in sorted(path.parent.glob("*.safetensors")))
    if values["tied_embeddings"] and files and _has_own_head(path.parent, files):
        values["tied_embeddings"] = False
    decoder.check_layers(folder, values["layers"], changes)
    return ModelConfig(**(values | changes))


@functools.lru_cache(64)
def _has_own_head(folder: pathlib.Path, files: tuple[tuple[str, int], ...]) -> bool:
    """Returns whether the files have a language head unlike the embedding. `files` are the cache key.

    Such a head is used despite `tie_word_embeddings`, as in transformers 5: the field may be left over from the base if
    the model was trained untied.
    """
    file = Tensors(folder)
    head, embed = (next((x for x in file if x.endswith(name)), "") for name in (LANGUAGE_HEAD, NAMES["embed"]))
    if not head or not embed:
        return False
    return file.shape(head) != file.shape(embed) or not np.array_equal(file.tensor(head), file.tensor(embed))


def load_decoder(
    folder: str | os.PathLike, config: ModelConfig, dtype: Dtype = "float32", file: Readable | None = None, *,
    new: str = "",
) -> dict:  # fmt: skip
    """Loads the decoder's parameters, stored as `dtype`, onto the mesh that is set.

    Returns a tree {"embed", "final_norm", "layers_0": {role: stack}, ...}. `file` provides the tensors if they are
    already open, or changed by a LoRA; by default the folder's are opened and compared with SHA256SUMS. `new` is a
    regular expression, searched in paths such as `decoder/layers_0/ROLE`: it must be found in all parameters for which
    the format has no name (a user's own layers), which are left out. A named tensor must always be there. All names and
    shapes are checked before any tensor is read.

    Raises FileNotFoundError if a file is missing, and ValueError if a checksum, a field, or a tensor's name, shape or
    type does not fit `config`.
    """
    if file is None:
        check_sums(folder)
    changes = {} if file is None else getattr(file, "changes", {})
    decoder.check(folder, model_config(folder, layers=config.layers, **changes), config)
    layers = model_config(folder).layers
    file = unfused(arranged(Tensors(folder) if file is None else file, folder, config), config)
    embeds = [name for name in file if name.endswith(NAMES["embed"])]
    prefix = embeds[0].removesuffix(NAMES["embed"]) if embeds else "model."
    for name in file:
        inner = name.removeprefix(prefix)
        if not (HEADS.match(inner) or _IDLE.fullmatch(inner) or _known(inner, config) or _IMAGES.match(name)):
            raise ValueError(f"{folder}: tensor {name} is one that jprm does not know, of a model with another design")
        layer = re.match(r"layers\.(\d+)\.", inner)
        if layer and int(layer[1]) >= layers:
            raise ValueError(f"{folder}: tensor {name} exists, but num_hidden_layers is {layers}. {AGAIN}")

    def read(role: str, name: str) -> np.ndarray:
        array = file.tensor(name)
        if array.dtype.kind in "iub":
            raise ValueError(f"{folder}: tensor {name} has type {array.dtype}, not a floating-point type")
        return array

    return decoder.load(
        folder, config, lambda role, layer: prefix + name_of(role, layer, config), file.shape, read, dtype, new
    )


def name_of(role: str, layer: int | None, config: ModelConfig) -> str:
    """Returns the tensor's name below `model.`, e.g. `layers.0.self_attn.q_proj.weight` for ("query", 0, config).

    If `layer` is `None`, the name has no `layers.LAYER.`. A role that is not in `NAMES` is its own name.
    """
    name = (SANDWICHED if {"attention_post_norm", "mlp_norm"} <= {*config.norms} else NAMES).get(role, role)
    return name if layer is None else f"layers.{layer}.{name}"


# ------------------------------------------------------------------------------------------- tensors of other families


def open_tensors(folder: str | os.PathLike) -> Readable:
    """Returns a local folder's tensors under Llama's names; data is read on access.

    Raises FileNotFoundError if config.json or a tensor file is missing, and ValueError if a file is damaged or the
    family is unsupported.
    """
    return arranged(Tensors(folder), folder)


def arranged(file: Readable, folder: str | os.PathLike, config: ModelConfig | None = None) -> Readable:
    """Returns the file's tensors under Llama's names, arranged as its family's record says (`Family.tensors`).

    The record is chosen by config.json in `folder`, which also gives `config` by default. Returns `file` itself if it
    is already arranged, or needs no change. Tensors are read on access.

    Raises FileNotFoundError if there is no config.json, and ValueError if it is unsupported, or the record names an
    unknown role.
    """
    if isinstance(file, Arranged):
        return file
    fields = families.text_fields(pathlib.Path(folder) / "config.json")
    family = families.find(fields)
    config = config or model_config(folder)
    stored = family.tensors(family.fields(fields), config)
    if unknown := stored.keys() - {*NAMES, *decoder.file_shapes(config), "head"}:
        known = ", ".join(decoder.file_shapes(config))
        raise ValueError(
            f"{folder}: the family {family.name!r} has tensors for {min(unknown)!r}; the roles are {known}"
        )
    file = Unpacked(file) if any(name.endswith(BLOCKS) for name in file) else file
    return Arranged(file, stored, config) if stored else file


BLOCKS, SCALES = "_blocks", "_scales"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


class Unpacked:
    """Tensors of a file, with matrices in MXFP4 as float32 (gpt-oss; OCP Microscaling Formats 1.0).

    A byte of `NAME_blocks` (..., out, in / 32, 16) holds two numbers, the lower four bits first, and a block of 32 is
    multiplied by a power of two in `NAME_scales`. `NAME` is (..., in, out), as in a file in bfloat16.
    """

    def __init__(self, file: Readable):
        self.file, self.changes = file, getattr(file, "changes", {})
        self._packed = {name.removesuffix(BLOCKS) for name in file if name.endswith(BLOCKS)}

    def __iter__(self) -> Iterator[str]:
        parts = {f"{name}{end}" for name in self._packed for end in (BLOCKS, SCALES)}
        yield from (name for name in self.file if name not in parts)
        yield from self._packed

    def __contains__(self, name: str) -> bool:
        return name in self._packed or name in self.file

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return tuple(self.file.shape(name))
        *first, out, blocks, size = self.file.shape(f"{name}{BLOCKS}")
        return (*first, 2 * blocks * size, out)

    def tensor(self, name: str) -> np.ndarray:
        if name not in self._packed:
            return self.file.tensor(name)
        code, scale = self.file.tensor(f"{name}{BLOCKS}"), self.file.tensor(f"{name}{SCALES}")
        number = np.concatenate([E2M1, -E2M1])[np.stack([code & 15, code >> 4], axis=-1)]
        number = np.ldexp(number.reshape(*code.shape[:-1], -1), scale[..., None].astype(np.int32) - 127)
        return number.reshape(*code.shape[:-2], -1).swapaxes(-1, -2)


class Arranged:
    """Tensors of a file under Llama's names, each taken from the file as `Stored` says."""

    def __init__(self, file: Readable, stored: Mapping[str, Stored], config: ModelConfig):
        self.file, self.changes, names = file, getattr(file, "changes", {}), list(file)
        self._sources: dict[str, tuple[list[str], Stored]] = {}
        for role, of_role in stored.items():
            if role == "head":
                tied = next((name for name in names if name.endswith(NAMES["embed"])), "")
                self._sources[LANGUAGE_HEAD] = [of_role.name if of_role.name in names else tied], of_role
                continue
            standard, first = name_of(role, None, config), of_role.name.format(0)
            for name in names:
                before = name.removesuffix(first)
                layered = re.search(r"(^|\.)layers\.\d+\.$", before)
                if name.endswith(first) and bool(layered) != (role in ("embed", "final_norm")):
                    count = config.experts.count if "{}" in of_role.name else 1
                    self._sources[before + standard] = [before + of_role.name.format(e) for e in range(count)], of_role
        taken = {name for role, (wholes, _) in self._sources.items() if role != LANGUAGE_HEAD for name in wholes}
        self._names = list(dict.fromkeys([*(name for name in names if name not in taken), *self._sources]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._sources or name in self.file

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._sources:
            return tuple(self.file.shape(name))
        wholes, stored = self._sources[name]
        shape = tuple(self.file.shape(wholes[0]))
        shape = (len(wholes), *shape) if "{}" in stored.name else shape
        try:
            return stored.take(np.broadcast_to(np.int8(0), shape)).shape
        except (ValueError, IndexError):  # of another shape than the family's
            return shape

    def tensor(self, name: str) -> np.ndarray:
        if name not in self._sources:
            return self.file.tensor(name)
        wholes, stored = self._sources[name]
        arrays = [self.file.tensor(whole) for whole in wholes]
        array = stored.take(np.stack(arrays) if "{}" in stored.name else arrays[0])
        return array if stored.factor == 1 else array.astype(np.float32) * np.float32(stored.factor)


# ------------------------------------------------------------------------------------------------------ fused tensors


@dataclasses.dataclass(frozen=True)
class Fused:
    """A tensor with several roles: rows of each in turn, `groups` times; or the tensors of all experts.

    parts: (name, rows per group). If `experts` is 0, the file tensor `name` contains the parts; otherwise the part
        stacks all experts' tensors, whose names are `name` with {} filled in. `squeezed`: the file has an extra axis of
        size 1 after the first (a convolution).
    """

    name: str
    parts: tuple[tuple[str, int], ...]
    groups: int = 1
    experts: int = 0
    squeezed: bool = False


def fusions(config: ModelConfig) -> list[Fused]:
    """Returns the rules by which files of Qwen's families fuse a layer's tensors; [] if it has no such layers."""
    rules, H, heads = [], config.head_dim, config.heads
    if config.attention_gate:
        rules.append(Fused(NAMES["query"], ((NAMES["query"], H), (NAMES["query_gate"], H)), heads))
    if "deltanet" in config.mixers:
        c = config.deltanet
        queries = c.value_heads // c.key_heads
        rows = {"query": c.key_dim, "key": c.key_dim, "value": queries * c.value_dim, "gate": queries * c.value_dim}
        qkv = ("query", "key", "value")
        conv = tuple((NAMES[f"delta_{role}_conv"], c.key_heads * rows[role]) for role in qkv)
        rules.append(Fused("linear_attn.conv1d.weight", conv, squeezed=True))
        if "experts" in config.mlps:  # Qwen3-Next: by key head
            parts = tuple((NAMES[f"delta_{role}"], size) for role, size in rows.items())
            rules.append(Fused("linear_attn.in_proj_qkvz.weight", parts, c.key_heads))
            parts = ((NAMES["delta_rate"], queries), (NAMES["delta_decay"], queries))
            rules.append(Fused("linear_attn.in_proj_ba.weight", parts, c.key_heads))
        else:
            parts = tuple((NAMES[f"delta_{role}"], c.key_heads * rows[role]) for role in qkv)
            rules.append(Fused("linear_attn.in_proj_qkv.weight", parts))
    if "experts" in config.mlps and not config.experts.clamp:
        rules += [
            Fused(f"mlp.experts.{{}}.{role}_proj.weight", ((NAMES[f"expert_{role}"], 0),), experts=config.experts.count)
            for role in ("gate", "up", "down")
        ]
    return rules


def unfused(file: Readable, config: ModelConfig) -> Readable:
    """Returns the file's tensors with each role separate, split on access; `file` itself if no rule applies."""
    rules = fusions(config)
    return Unfused(file, rules) if rules else file


class Unfused:
    """Tensors of a file, with `Fused` ones split into named parts."""

    def __init__(self, file: Readable, rules: list[Fused]):
        self.file, self.names = file, dict.fromkeys(file)
        self._part: dict[str, tuple[list[str], Fused, int]] = {}
        for name in file:
            for rule in rules:
                first = rule.name.format(0)
                if name.endswith("." + first):
                    before = name.removesuffix(first)
                    wholes = [before + rule.name.format(e) for e in range(max(rule.experts, 1))]
                    for whole in wholes:
                        self.names.pop(whole, None)
                    for i, (part, _) in enumerate(rule.parts):
                        self.names[before + part] = None
                        self._part[before + part] = wholes, rule, i

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._part:
            return tuple(self.file.shape(name))
        wholes, rule, i = self._part[name]
        shape = tuple(self.file.shape(wholes[0]))
        if rule.experts:
            return rule.experts, *shape
        rest = shape[2:] if rule.squeezed else shape[1:]
        whole = rule.groups * sum(rows for _, rows in rule.parts)
        return (rule.groups * rule.parts[i][1] if shape[0] == whole else -1, *rest)

    def tensor(self, name: str) -> np.ndarray:
        if name not in self._part:
            return self.file.tensor(name)
        wholes, rule, i = self._part[name]
        if rule.experts:
            return np.stack([self.file.tensor(part) for part in wholes])
        array = self.file.tensor(wholes[0])
        array = array[:, 0] if rule.squeezed else array
        first = sum(rows for _, rows in rule.parts[:i])
        array = array.reshape(rule.groups, -1, *array.shape[1:])[:, first : first + rule.parts[i][1]]
        return array.reshape(-1, *array.shape[2:])


Tensor = tuple[str, tuple[int, ...], Callable[[], np.ndarray]]
"""(name, shape as (out, in), function that returns the array)."""


def fused(tensors: Iterable[Tensor], config: ModelConfig) -> Iterable[Tensor]:
    """Yields (name, shape, function) of the tensors as files of the model's family have them; inverse of `unfused`.

    A fused tensor is yielded once its last part has come, and computed when its function is called. If a part never
    comes, the others are left out.
    """
    rules = [(part, rule) for rule in fusions(config) for part, _ in rule.parts]
    waiting: dict[str, dict[str, Tensor]] = {}
    for tensor in tensors:
        ends = ((part, rule) for part, rule in rules if tensor[0].endswith("." + part))
        part, rule = next(ends, ("", None))
        if rule is None:
            yield tensor
            continue
        before = tensor[0].removesuffix(part)
        if rule.experts:
            for e in range(rule.experts):
                yield before + rule.name.format(e), tensor[1][1:], lambda get=tensor[2], e=e: get()[e]
            continue
        parts_of = waiting.setdefault(before + rule.name, {})
        parts_of[part] = tensor
        if len(parts_of) == len(rule.parts):
            parts = [parts_of[name] for name, _ in rule.parts]
            rows, rest = sum(shape[0] for _, shape, _ in parts), parts[0][1][1:]
            shape = (rows, *((1,) if rule.squeezed else ()), *rest)
            yield before + rule.name, shape, functools.partial(_joined, [get for *_, get in parts], rule.groups, shape)


def _joined(gets: list[Callable[[], np.ndarray]], groups: int, shape: tuple[int, ...]) -> np.ndarray:
    arrays = [array.reshape(groups, -1, *array.shape[1:]) for array in (get() for get in gets)]
    return np.concatenate(arrays, axis=1).reshape(shape)


def _known(name: str, config: ModelConfig) -> bool:
    layered = re.sub(r"^layers\.\d+\.", "", name)
    return any(
        name_of(role, None, config) == layered and (layered == name) == (role in ("embed", "final_norm"))
        for role in decoder.file_shapes(config)
    )
