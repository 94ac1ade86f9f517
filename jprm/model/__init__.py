"""The decoder, its heads and attention, and how their parameters are stored and split."""

from typing import Literal

Dtype = Literal["float32", "bfloat16", "int8", "nf4", "gguf"]
"""How parameters are stored. `gguf` keeps a GGUF file's blocks."""

FileDtype = Literal["float32", "bfloat16", "float16"]
"""The number type for written weights."""
