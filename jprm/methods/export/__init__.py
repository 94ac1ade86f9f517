"""Models for other programs, and the card that describes one."""

from typing import Literal

from jprm.model import FileDtype

__all__ = ["FileDtype", "Format"]

Format = Literal["transformers", "qwen2-prm", "peft"]
