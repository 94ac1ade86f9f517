"""Folders of safetensors files (one file, or several with an index), checked by header and read tensor by tensor.

All names, shapes, types and files are checked before any tensor is read. Files are memory-mapped, so a tensor uses host
memory only while it is referenced.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors

from jprm.io.jsonl import without_doubles
from jprm.io.storage import Place, sha256_of

FILE, INDEX, SUMS = "model.safetensors", "model.safetensors.index.json", "SHA256SUMS"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
TYPES = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"}
"""Supported types. Quantised checkpoints' 8 and 4-bit floats need scales, which the header does not name."""

AGAIN = "Download it again"


class Tensors:
    """Tensors of a folder or file; iterates over names. `shape(name)` reads no data, `tensor(name)` only that tensor.

    Raises FileNotFoundError if a file is missing, ValueError if a tensor is missing, truncated, duplicated or
    inconsistent, or the format executes code when read. The message names file and tensor.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        self._files: dict[pathlib.Path, Any] = {}
        self._file_of: dict[str, pathlib.Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file, wanted in _files(self.path).items():
            self._add(file, wanted)

    def __iter__(self):
        return iter(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise ValueError(f"{self.path}: tensor {name} is missing; the checkpoint is cut short or of another model")
        return self._shapes[name]

    def tensor(self, name: str) -> np.ndarray:
        """Returns a copy of the tensor in the file's type (bfloat16 via ml_dtypes). Raises ValueError if missing."""
        self.shape(name)
        try:
            return self._files[self._file_of[name]].get_tensor(name)
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"{self._file_of[name]}: tensor {name} cannot be read ({error}). {AGAIN}") from error

    def _add(self, file: pathlib.Path, wanted: set[str] | None) -> None:
        try:
            opened = safetensors.safe_open(file, framework="numpy")  # checks sizes and offsets against the file
        except FileNotFoundError:
            raise FileNotFoundError(f"{file}: not there, and {INDEX} names it. Download the missing file") from None
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"{file}: not a complete safetensors file ({error}). {AGAIN}") from error
        tensors = _header(file)
        if absent := sorted((wanted or set()) - set(tensors)):
            raise ValueError(f"{file}: tensor {absent[0]} is not in it, though {INDEX} says so. {AGAIN}")
        if wanted is not None and (extra := sorted(set(tensors) - wanted)):
            where = self._file_of.get(extra[0])
            reason = f"is in {where.name} too" if where else f"is not in {INDEX}, or there in another file"
            raise ValueError(f"{file}: tensor {extra[0]} {reason}. The files are of different checkpoints: {AGAIN}")
        self._files[file] = opened
        for name, (dtype, shape) in tensors.items():
            if dtype not in TYPES:
                raise ValueError(
                    f"{file}: tensor {name} is of type {dtype}, a quantised checkpoint's; use the one in bfloat16"
                )
            self._file_of[name], self._shapes[name] = file, shape


def _files(path: pathlib.Path) -> Mapping[pathlib.Path, set[str] | None]:
    """Returns the files to open, with the tensor names that the index lists for each (`None` without an index)."""
    if path.is_dir() and not (path / FILE).is_file():
        if (path / INDEX).is_file():
            return _read_index(path)
        names = sorted(file.name for file in path.iterdir())
        if pickles := [name for name in names if name.endswith(PICKLES)]:
            raise _pickle(path / pickles[0])
        if shards := [name for name in names if name.endswith(".safetensors")]:
            raise FileNotFoundError(f"{path / INDEX}: not there, though {shards[0]} is. Download the index too")
        raise FileNotFoundError(f"{path / FILE}: not there, nor {INDEX}; {path} is not a checkpoint's folder")
    file = path / FILE if path.is_dir() else path
    if file.name.endswith(PICKLES):
        raise _pickle(file)
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    return {file: None}


def _pickle(file: pathlib.Path) -> ValueError:
    return ValueError(
        f"{file}: is a pickle, which runs any code in it when read. Convert it: transformers' CLASS.from_pretrained"
        "(FOLDER).save_pretrained(NEW), with the CLASS in config.json's `architectures` (AutoModel would lose its head)"
    )


def _read_index(folder: pathlib.Path) -> Mapping[pathlib.Path, set[str]]:
    index = folder / INDEX
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index}: weight_map is not an object of tensor names and files. {AGAIN}")
    files: dict[pathlib.Path, set[str]] = {}
    for name, file in places.items():
        if not isinstance(file, str) or file in ("", ".", "..") or set(file) & set("/\\:\0"):
            raise ValueError(f"{index}: tensor {name} is in {file!r}, which is no plain file name. Do not trust it")
        if file.endswith(PICKLES):
            raise _pickle(folder / file)
        files.setdefault(folder / file, set()).add(name)
    return files


def check_sums(folder: str | os.PathLike) -> None:
    """Checks the files listed in the folder's SHA256SUMS, if present, as `sha256sum` writes it; README.md may differ.

    Raises ValueError for a differing or missing file; unlisted files pass.
    """
    sums = pathlib.Path(folder) / SUMS
    digest = functools.cache(sha256_of)  # the list may repeat a file
    for line in sums.read_text().splitlines() if sums.is_file() else ():
        wanted, _, name = line.partition("  ")
        file = sums.parent / name.removeprefix("*")
        if file.parent != sums.parent or not file.is_file():
            raise ValueError(f"{sums}: {name or line[:80]!r} is not a file beside it. Fetch or export the model again")
        if file.name != "README.md" and digest(file) != wanted:
            raise ValueError(
                f"{file}: differs from its checksum in {SUMS}. Fetch or export the model again; if you changed the file"
                f" yourself, remove {SUMS}"
            )


def read_json(path: pathlib.Path | Place) -> dict[str, Any]:
    """Reads a JSON object. Raises ValueError for other contents or duplicate keys, FileNotFoundError."""
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=without_doubles)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({str(error)[:200]}). {AGAIN}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: is not a JSON object. {AGAIN}")
    return content


def _header(file: pathlib.Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns (type, shape) by name. Rejects duplicate names, which `safe_open` accepts."""
    with open(file, "rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        try:
            header = json.loads(opened.read(size), object_pairs_hook=without_doubles)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: bad header ({str(error)[:200]}). {AGAIN}") from error
    return {name: (t["dtype"], tuple(t["shape"])) for name, t in header.items() if name != "__metadata__"}
