"""Models for other programs, and the card that describes one."""

from typing import Literal

Format = Literal["transformers", "qwen2-prm", "peft"]
FileDtype = Literal["float32", "bfloat16", "float16"]
