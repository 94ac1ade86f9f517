"""A LoRA in PEFT's format merged into the model that it changes, a tensor at a time as it is read (Hu et al. 2021)."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterator

import numpy as np

from jprm.checkpoints.peft import check_fields
from jprm.checkpoints.safetensors import Tensors, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_FIXED = {
    "peft_type": "LORA", "bias": "none", "use_dora": False, "fan_in_fan_out": False, "rank_pattern": {},
    "alpha_pattern": {}, "layer_replication": None, "lora_bias": False,
}  # fmt: skip
"""Fields of adapter_config.json that must have this value, or be empty, where they are there."""

_PREFIX = "base_model.model."


class Merged:
    """The tensors of a model, W + scale B A where the LoRA has A and B of its name; the interface of `Tensors`.

    `path` is the folder of the model. A tensor that the LoRA's folder has whole (PEFT's `modules_to_save`) is taken
    from there. Raises ValueError, naming file and field or tensor, for what is not a plain LoRA of that model.
    """

    def __init__(self, folder: str | os.PathLike, base: str = ""):
        folder = pathlib.Path(folder)
        fields = read_json(folder / CONFIG)
        for name, value in _FIXED.items():
            if fields.get(name) and fields[name] != value:
                raise ValueError(f"{folder / CONFIG}: {name} {str(fields[name])[:60]!r} is not supported; merge it with"
                                 " PEFT's merge_and_unload and load what that saves")  # fmt: skip
        check_fields(folder / CONFIG, fields)
        rank, alpha = fields.get("r"), fields.get("lora_alpha")
        if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
            raise ValueError(f"{folder / CONFIG}: r {rank!r} and lora_alpha {alpha!r} are no rank and no number")
        self.path = _base(folder, base or str(fields.get("base_model_name_or_path") or ""))
        self._base, self._lora = Tensors(self.path), Tensors(folder / WEIGHTS)
        self._scale = alpha / (rank**0.5 if fields.get("use_rslora") else rank)
        self._pairs: dict[str, tuple[str, str]] = {}
        self._whole: dict[str, str] = {}
        for name in self._lora:
            inner = name.removeprefix(_PREFIX)
            if not (pair := re.fullmatch(r"(.+)\.lora_[AB]\.(?:default\.)?weight", inner)):
                self._whole[inner] = name
                continue
            down, up = (re.sub(r"\.lora_[AB]\.", f".lora_{x}.", name) for x in "AB")
            self._pairs[f"{pair[1]}.weight"] = down, up
        for name, (down, up) in self._pairs.items():
            if name not in self._base:
                raise ValueError(
                    f"{folder / WEIGHTS}: changes {name}, which {self.path} has not: it is of another model"
                )
            shapes = self._lora.shape(up), self._lora.shape(down)
            rows, columns = self._base.shape(name)
            if shapes != ((rows, rank), (rank, columns)):
                raise ValueError(f"{folder / WEIGHTS}: B and A of {name} are of shapes {shapes}, and not"
                                 f" {((rows, rank), (rank, columns))}")  # fmt: skip
        if odd := [name for name in self._whole if "lora_" in name or not name.endswith((".weight", ".bias"))]:
            raise ValueError(f"{folder / WEIGHTS}: tensor {odd[0]} is no part of a plain LoRA")

    def __iter__(self) -> Iterator[str]:
        yield from self._base
        yield from (name for name in self._whole if name not in self._base)

    def __contains__(self, name: str) -> bool:
        return name in self._base or name in self._whole

    def shape(self, name: str) -> tuple[int, ...]:
        return self._lora.shape(self._whole[name]) if name in self._whole else self._base.shape(name)

    def tensor(self, name: str) -> np.ndarray:
        if name in self._whole:
            return self._lora.tensor(self._whole[name])
        array = self._base.tensor(name)
        if name not in self._pairs:
            return array
        down, up = (self._lora.tensor(x).astype(np.float32) for x in self._pairs[name])
        return array.astype(np.float32) + self._scale * (up @ down)


def _base(folder: pathlib.Path, named: str) -> pathlib.Path:
    if named:
        for path in (folder / named, pathlib.Path(named)):  # the first is `named` itself where that is absolute
            if (path / "config.json").is_file():
                return path
    raise FileNotFoundError(
        f"{folder / CONFIG}: is a LoRA of {named or 'a model without a name'}, which is no folder here. Download that"
        ' model, and name its folder: "base" in an adapter.json, or base_model_name_or_path in this file'
    )
