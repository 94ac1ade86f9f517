"""Token trees on disk: made once, read in every epoch.

Reading and tokenising records takes most of a host's time; a tree from here takes a few slices of memory maps. A folder
holds one array a field, in which the trees stand one after the other, and where each begins.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np

from jprm.io.folders import made_once
from jprm.io.outputs import stamp_of
from jprm.io.progress import Bar
from jprm.io.storage import Remote, is_remote, path_of
from jprm.token_tree import TokenTree

VERSION = 1
"""Of the format, and of what `token_tree` makes: another version makes the trees again."""

INDEX = "index.json"
LENGTHS = "length_N"
"""Tokens, runs, steps and bytes of the name of every tree, and tokens of its problem."""

_KINDS = {"tokens": ("tokens_N",), "runs": ("length_R", "parent_R"),
          "steps": ("run_M", "above_M", "node_M", "label_M", "weight_M"), "name": ("name",)}  # fmt: skip
_TYPES = {"tokens_N": np.int32, "label_M": np.float32, "weight_M": np.float32, "name": np.uint8}
"""Of the arrays of a `TokenTree`, where they are not int64, which is stored as int32."""


class TokenTrees(Sequence[TokenTree]):
    """The trees of a folder that `write` made, by index, each read when it is asked for."""

    def __init__(self, folder: str | os.PathLike):
        folder = pathlib.Path(folder)
        self._extras: list[str] = json.loads((folder / INDEX).read_bytes())["extras"]
        length_NK = np.fromfile(folder / LENGTHS, "<i8").reshape(-1, 5)
        self._problem_N = length_NK[:, 4]
        start_JK = np.concatenate([np.zeros((1, 4), np.int64), np.cumsum(length_NK[:, :4], axis=0)])
        self._start = dict(zip(_KINDS, start_JK.T, strict=True))
        self._maps = {
            name: (kind, dtype, _mapped(folder / name, _stored(dtype)))
            for name, kind, dtype in _arrays(len(self._extras))
        }

    def __len__(self) -> int:
        return len(self._problem_N)

    def __getitem__(self, index: Any) -> TokenTree:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]  # pyright: ignore[reportReturnType]
        if not 0 <= index < len(self):
            raise IndexError(index)
        arrays = {}
        for name, (kind, dtype, array) in self._maps.items():
            start_J = self._start[kind]
            arrays[name] = array[start_J[index] : start_J[index + 1]].astype(dtype)
        extras = {key: arrays.pop(f"extra_{i}") for i, key in enumerate(self._extras)}
        name = arrays.pop("name").tobytes().decode()
        return TokenTree(name=name, problem=int(self._problem_N[index]), extras=extras, **arrays)


def write(folder: str | os.PathLike, trees: Iterable[TokenTree]) -> None:
    """Writes the trees into a folder, which must exist; the index last."""
    folder, extras = pathlib.Path(folder), []
    with contextlib.ExitStack() as stack:
        files: dict[str, IO[bytes]] = {}
        for tree in trees:
            if not files:
                extras = list(tree.extras)
                names = [*(name for name, _, _ in _arrays(len(extras))), LENGTHS]
                files = {name: stack.enter_context(open(folder / name, "wb")) for name in names}
            name = tree.name.encode()
            numbers = {"name": np.frombuffer(name, np.uint8)}
            numbers |= {f"extra_{i}": tree.extras[key] for i, key in enumerate(extras)}
            for array, _, dtype in _arrays(len(extras)):
                x = numbers[array] if array in numbers else getattr(tree, array)
                files[array].write(np.ascontiguousarray(x, _stored(dtype)).tobytes())
            lengths = (len(tree.tokens_N), len(tree.length_R), len(tree.run_M), len(name), tree.problem)
            files[LENGTHS].write(np.array(lengths, "<i8").tobytes())
    (folder / INDEX).write_text(json.dumps({"extras": extras}))


def cached(folder: str | os.PathLike, trees: Iterable[TokenTree], total: int, about: Mapping[str, Any]) -> TokenTrees:
    """Returns the trees from the place in `folder` that is named by all they depend on, written first where absent.

    Args:
      trees: asked for only where they are not there yet.
      about: what the trees depend on, as JSON.
    """
    if is_remote(folder):
        raise ValueError(f"data.cache={folder}: is to be a folder of this machine, which reads it at random places")
    name = hashlib.sha256(json.dumps([VERSION, about], sort_keys=True).encode()).hexdigest()[:16]

    def make(new: pathlib.Path) -> None:
        with Bar("tokenising", total) as bar:
            write(new, bar.follow(trees))

    return TokenTrees(made_once(pathlib.Path(folder) / name, make))


def files_of(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Returns what identifies the data at a path: its file, or all files of its folder, with sizes and times."""
    path = path_of(path)
    if isinstance(path, Remote):
        return [stamp_of(file) for file in path.files()]
    return [stamp_of(file) for file in ([path] if path.is_file() else sorted(path.rglob("*"))) if file.is_file()]


def _arrays(extras: int) -> Iterator[tuple[str, str, type]]:
    """Yields the name, the kind and the type of every array."""
    for kind, names in _KINDS.items():
        yield from ((name, kind, _TYPES.get(name, np.int64)) for name in names)
    yield from ((f"extra_{i}", "steps", np.float32) for i in range(extras))


def _stored(dtype: type) -> np.dtype:
    """Returns the type in the files, little-endian."""
    return np.dtype(np.int32 if dtype is np.int64 else dtype).newbyteorder("<")


def _mapped(path: pathlib.Path, dtype: np.dtype) -> np.ndarray:
    """Returns the numbers of a file as a memory map, which an empty file cannot be."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
