"""Exports models for other programs, with a model card."""

from typing import Literal

from jprm.model import FileDtype

__all__ = ["FileDtype", "Format"]

Format = Literal["transformers", "qwen2-prm", "peft"]
