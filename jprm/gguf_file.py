"""Opens a GGUF file once for its tokenizer, hyper-parameters and tensors: parsing takes seconds."""

from __future__ import annotations

import functools
import os

import gguf


def open_gguf(path: str | os.PathLike) -> gguf.GGUFReader:
    """Returns the parsed file; the last one is cached while it does not change. Raises what `gguf` and `os.stat` do."""
    stat = os.stat(path)
    return _parsed(os.path.abspath(path), stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=1)
def _parsed(path: str, modified: int, size: int) -> gguf.GGUFReader:
    return gguf.GGUFReader(path)
