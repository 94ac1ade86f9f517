"""A GGUF file opened once for its tokenizer, its hyper-parameters and its tensors: parsing takes seconds."""

from __future__ import annotations

import functools
import os

import gguf


def open_gguf(path: str | os.PathLike) -> gguf.GGUFReader:
    """The parsed file, the last one kept as long as it does not change. Raises what `gguf` and `os.stat` raise."""
    stat = os.stat(path)
    return _parsed(os.path.abspath(path), stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=1)
def _parsed(path: str, modified: int, size: int) -> gguf.GGUFReader:
    return gguf.GGUFReader(path)
