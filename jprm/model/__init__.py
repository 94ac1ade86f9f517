"""The decoder, its heads and attention, and how their parameters are stored and split."""

from typing import Literal

Dtype = Literal["float32", "bfloat16", "int8"]
"""How parameters are stored."""

FileDtype = Literal["float32", "bfloat16", "float16"]
"""What numbers are written as."""
